//! Generation: the longest common prefix of all prompts is computed once, equal prompts are computed once, and all sequences
//! advance together until each has ended.

mod filters;
mod sampling;
mod settings;
mod vectorised;

pub use settings::{Decoding, EndedBy, Generated, GenerationRequest, SamplingSettings, TokenText};

use crate::{Decoder, KvCache, LoraAdapter, ModelError, kernels};
use candle_core::{Device, Tensor};
use filters::Rules;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use sampling::choose;
use std::collections::{BTreeSet, HashMap};

/// What an engine may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineSettings {
    /// Answers in progress at once; one that ends makes room for the next. The answers do not depend on it.
    pub max_sequences: usize,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self { max_sequences: 256 }
    }
}

/// Generates answers of one policy after another.
pub struct Engine<'a> {
    decoder: &'a Decoder,
    settings: EngineSettings,
    adapter: Option<LoraAdapter>,
    version: Option<u64>,
}

impl<'a> Engine<'a> {
    /// An engine on a decoder; its policy is the bare base until another is set.
    ///
    /// # Errors
    /// `max_sequences` is 0.
    pub fn new(decoder: &'a Decoder, settings: EngineSettings) -> Result<Self, ModelError> {
        if settings.max_sequences == 0 {
            return Err(ModelError::Generation("max_sequences is 0; expected at least 1".into()));
        }
        Ok(Self { decoder, settings, adapter: None, version: None })
    }

    /// Takes a policy as it is now. The same version as before means the same values: nothing is done.
    ///
    /// # Errors
    /// The adapter does not fit the decoder.
    pub fn set_policy(&mut self, adapter: Option<&LoraAdapter>, version: u64) -> Result<(), ModelError> {
        if self.version != Some(version) {
            self.adapter = adapter.map(LoraAdapter::without_gradient);
            self.version = Some(version);
        }
        Ok(())
    }

    /// Generates `n` answers per request, in order. What comes depends on the policy, a request's prompt and seed and the
    /// sampling settings, and on nothing else.
    ///
    /// # Errors
    /// A setting or a prompt that cannot be, a prompt and `max_new_tokens` beyond the model's positions, logits that are not
    /// finite, or stop strings without a tokenizer.
    pub fn generate(
        &mut self,
        requests: &[GenerationRequest<'_>],
        decoding: Decoding,
        sampling: &SamplingSettings,
        text: &dyn TokenText,
    ) -> Result<Vec<Vec<Generated>>, ModelError> {
        sampling.check()?;
        check_requests(self.decoder, requests, sampling)?;
        let mut answers = Vec::new();
        let jobs: Vec<(GenerationRequest<'_>, u64)> =
            requests.iter().flat_map(|request| (0..request.n as u64).map(|sample| (*request, sample))).collect();
        for jobs in jobs.chunks(self.settings.max_sequences) {
            answers.extend(run(self.decoder, self.adapter.as_ref(), jobs, decoding, sampling, text)?);
        }
        let mut answers = answers.into_iter();
        Ok(requests.iter().map(|request| answers.by_ref().take(request.n).collect()).collect())
    }
}

fn check_requests(
    decoder: &Decoder,
    requests: &[GenerationRequest<'_>],
    sampling: &SamplingSettings,
) -> Result<(), ModelError> {
    let (n_positions, n_vocabulary) = (decoder.config().max_positions, decoder.config().vocab_size);
    for (index, GenerationRequest { prompt, .. }) in requests.iter().enumerate() {
        let wrong = if prompt.is_empty() {
            format!("prompt {index} is empty; expected at least one token")
        } else if prompt.len() + sampling.max_new_tokens > n_positions {
            format!(
                "prompt {index} has {} tokens; with {} new ones it goes beyond the model's {n_positions} positions",
                prompt.len(),
                sampling.max_new_tokens
            )
        } else if let Some(id) = prompt.iter().find(|&&id| id as usize >= n_vocabulary) {
            format!("prompt {index}: token id {id} is outside the vocabulary of {n_vocabulary}")
        } else {
            continue;
        };
        return Err(ModelError::Generation(wrong));
    }
    Ok(())
}

/// Generates one answer per request, in order, with the whole distribution.
///
/// # Errors
/// As [`Engine::generate`].
pub fn generate(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    requests: &[GenerationRequest<'_>],
    decoding: Decoding,
    sampling: &SamplingSettings,
    text: &dyn TokenText,
) -> Result<Vec<Generated>, ModelError> {
    let mut engine = Engine::new(decoder, EngineSettings::default())?;
    engine.set_policy(adapter, 0)?;
    Ok(engine.generate(requests, decoding, sampling, text)?.into_iter().flatten().collect())
}

fn run(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    jobs: &[(GenerationRequest<'_>, u64)],
    decoding: Decoding,
    sampling: &SamplingSettings,
    text: &dyn TokenText,
) -> Result<Vec<Generated>, ModelError> {
    let rules = Rules { settings: sampling, stop_ids: text.stop_ids() };
    let mut sequences = prefill(decoder, adapter, jobs)?;
    let mut active: Vec<usize> = (0..sequences.len()).collect();
    loop {
        choose_all(decoder, adapter, &mut sequences, &active, &rules, decoding)?;
        let mut going_on = Vec::new();
        for index in active {
            let answer = &mut sequences[index].answer;
            match end_of(&answer.token_ids, &rules, text)? {
                None => going_on.push(index),
                Some(ended_by) => {
                    answer.ended_by = ended_by;
                    answer.truncated = ended_by == EndedBy::Length;
                }
            }
        }
        active = going_on;
        if active.is_empty() {
            return Ok(sequences.into_iter().map(|sequence| sequence.answer).collect());
        }
        advance(decoder, adapter, &mut sequences, &active)?;
    }
}

/// What ends an answer with its last token, if anything does.
fn end_of(answer: &[u32], rules: &Rules<'_>, text: &dyn TokenText) -> Result<Option<EndedBy>, ModelError> {
    if answer.last().is_some_and(|id| rules.stop_ids.contains(id)) {
        return Ok(Some(EndedBy::StopToken));
    }
    let settings = rules.settings;
    if !settings.stop_strings.is_empty() && answer.len() >= settings.min_new_tokens {
        let text = text.text(answer)?;
        if let Some(index) = settings.stop_strings.iter().position(|stop| text.contains(stop.as_str())) {
            return Ok(Some(EndedBy::StopString { index }));
        }
    }
    Ok((answer.len() >= settings.max_new_tokens).then_some(EndedBy::Length))
}

/// A sequence in progress.
struct Sequence {
    cache: KvCache,
    /// Final hidden state of its last token, `H` values.
    hidden: Vec<f32>,
    rng: ChaCha8Rng,
    answer: Generated,
}

/// Length of the prefix that all prompts share, leaving each at least one token of its own.
fn shared_prefix(jobs: &[(GenerationRequest<'_>, u64)]) -> usize {
    let Some((first, _)) = jobs.first() else { return 0 };
    let common =
        |prompt: &[u32]| first.prompt.iter().zip(prompt).take_while(|(a, b)| a == b).count().min(prompt.len() - 1);
    jobs.iter().map(|(request, _)| common(request.prompt)).min().unwrap_or(0)
}

fn prefill(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    jobs: &[(GenerationRequest<'_>, u64)],
) -> Result<Vec<Sequence>, ModelError> {
    let n_shared = shared_prefix(jobs);
    let mut prefix = KvCache::new(decoder.config().n_layers);
    if n_shared > 0 {
        decoder.extend(&mut [&mut prefix], &[&jobs[0].0.prompt[..n_shared]], adapter)?;
    }
    // Equal prompts (several samples of one query) are computed once and share the result.
    let mut unique: Vec<&[u32]> = Vec::new();
    let mut position: HashMap<&[u32], usize> = HashMap::new();
    let index_of: Vec<usize> = jobs
        .iter()
        .map(|(request, _)| {
            *position.entry(request.prompt).or_insert_with(|| {
                unique.push(&request.prompt[n_shared..]);
                unique.len() - 1
            })
        })
        .collect();
    let mut caches = vec![prefix; unique.len()];
    let hidden = last_hidden(decoder, adapter, &mut caches.iter_mut().collect::<Vec<_>>(), &unique)?;
    let sequence = |((request, sample), index): (&(GenerationRequest<'_>, u64), usize)| {
        let mut rng = ChaCha8Rng::seed_from_u64(request.seed);
        rng.set_stream(*sample);
        let (token_ids, logprobs, behaviour_logprobs) = (Vec::new(), Vec::new(), Vec::new());
        let answer = Generated { token_ids, logprobs, behaviour_logprobs, truncated: false, ended_by: EndedBy::Length };
        Sequence { cache: caches[index].clone(), hidden: hidden[index].clone(), rng, answer }
    };
    Ok(jobs.iter().zip(index_of).map(sequence).collect())
}

/// Feeds `new` tokens and returns the hidden state of each sequence's last one.
fn last_hidden(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    caches: &mut [&mut KvCache],
    new: &[&[u32]],
) -> Result<Vec<Vec<f32>>, ModelError> {
    let width = decoder.config().hidden_size;
    let hidden = decoder.extend(caches, new, adapter)?;
    let rows = kernels::with_floats(&hidden, |hidden| {
        let mut end = 0;
        let last_row = |new: &&[u32]| {
            end += new.len();
            hidden[(end - 1) * width..end * width].to_vec()
        };
        Ok(new.iter().map(last_row).collect())
    })?;
    Ok(rows)
}

/// Draws the next token of each active sequence.
fn choose_all(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    sequences: &mut [Sequence],
    active: &[usize],
    rules: &Rules<'_>,
    decoding: Decoding,
) -> Result<(), ModelError> {
    let (width, n_vocabulary) = (decoder.config().hidden_size, decoder.config().vocab_size);
    let hidden: Vec<f32> = active.iter().flat_map(|&index| sequences[index].hidden.iter().copied()).collect();
    let hidden = Tensor::from_vec(hidden, (active.len(), width), &Device::Cpu)?;
    let mut logits: Vec<f32> = decoder.logits(&hidden, adapter)?.flatten_all()?.to_vec1()?; // (active, V)
    for (row, &index) in logits.chunks_exact_mut(n_vocabulary).zip(active) {
        let Sequence { answer, rng, .. } = &mut sequences[index];
        let choice = choose(row, &answer.token_ids, rules, decoding, rng)?;
        answer.token_ids.push(choice.token);
        answer.logprobs.push(choice.logprob);
        answer.behaviour_logprobs.push(choice.behaviour_logprob);
    }
    Ok(())
}

/// Feeds each active sequence the token it drew.
fn advance(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    sequences: &mut [Sequence],
    active: &[usize],
) -> Result<(), ModelError> {
    let is_active: BTreeSet<usize> = active.iter().copied().collect();
    let (mut caches, mut new): (Vec<&mut KvCache>, Vec<Vec<u32>>) = sequences
        .iter_mut()
        .enumerate()
        .filter(|(index, _)| is_active.contains(index))
        .map(|(_, sequence)| (&mut sequence.cache, sequence.answer.token_ids.last().copied().into_iter().collect()))
        .unzip();
    let new: Vec<&[u32]> = new.iter_mut().map(|ids| ids.as_slice()).collect();
    let hidden = last_hidden(decoder, adapter, &mut caches, &new)?;
    for (&index, hidden) in active.iter().zip(hidden) {
        sequences[index].hidden = hidden;
    }
    Ok(())
}
