//! Generation: the longest common prefix of all prompts is computed once, equal prompts are computed once, and all sequences
//! advance together until each has ended.

use crate::{Decoder, KvCache, LoraAdapter, ModelError, kernels};
use candle_core::{Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use std::collections::{BTreeSet, HashMap};

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decoding {
    /// The likeliest token.
    Greedy,
    /// Drawn from the whole distribution, logits divided by the temperature.
    Sample {
        /// Above 0.
        temperature: f64,
    },
}

/// One sequence to generate.
#[derive(Debug, Clone, Copy)]
pub struct GenerationRequest<'a> {
    /// Tokens before the answer; at least one.
    pub prompt: &'a [u32],
    /// Seeds this sequence's draws: the result does not depend on what else is in the batch.
    pub seed: u64,
}

/// One answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// Its tokens, the stop token included.
    pub token_ids: Vec<u32>,
    /// Log-probability of each under the distribution it was drawn from (at temperature 1 for greedy decoding).
    pub logprobs: Vec<f32>,
    /// True where `max_new_tokens` ended it.
    pub truncated: bool,
}

/// Generates one answer per request, in order.
///
/// # Errors
/// An empty prompt, or a sequence longer than the model's positions.
pub fn generate(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    requests: &[GenerationRequest<'_>],
    decoding: Decoding,
    max_new_tokens: usize,
    stop_ids: &BTreeSet<u32>,
) -> Result<Vec<Generated>, ModelError> {
    if requests.iter().any(|request| request.prompt.is_empty()) {
        return Err(candle_core::Error::Msg("cannot generate from an empty prompt".into()).into());
    }
    let adapter = adapter.map(LoraAdapter::without_gradient);
    let adapter = adapter.as_ref();
    let mut sequences = prefill(decoder, adapter, requests, decoding)?;
    let mut active: Vec<usize> = (0..sequences.len()).collect();
    for n_generated in 1..=max_new_tokens {
        choose(decoder, adapter, &mut sequences, &active)?;
        active.retain(|&index| {
            let last = sequences[index].answer.token_ids.last();
            !last.is_some_and(|id| stop_ids.contains(id))
        });
        if active.is_empty() || n_generated == max_new_tokens {
            break;
        }
        advance(decoder, adapter, &mut sequences, &active)?;
    }
    active.iter().for_each(|&index| sequences[index].answer.truncated = true);
    Ok(sequences.into_iter().map(|sequence| sequence.answer).collect())
}

/// A sequence in progress.
struct Sequence {
    cache: KvCache,
    /// Final hidden state of its last token, `H` values.
    hidden: Vec<f32>,
    processor: LogitsProcessor,
    temperature: f32,
    answer: Generated,
}

/// Length of the prefix that all prompts share, leaving each at least one token of its own.
fn shared_prefix(requests: &[GenerationRequest<'_>]) -> usize {
    let Some(first) = requests.first() else { return 0 };
    let common =
        |prompt: &[u32]| first.prompt.iter().zip(prompt).take_while(|(a, b)| a == b).count().min(prompt.len() - 1);
    requests.iter().map(|request| common(request.prompt)).min().unwrap_or(0)
}

fn prefill(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    requests: &[GenerationRequest<'_>],
    decoding: Decoding,
) -> Result<Vec<Sequence>, ModelError> {
    let n_shared = shared_prefix(requests);
    let mut prefix = KvCache::new(decoder.config().n_layers);
    if n_shared > 0 {
        decoder.extend(&mut [&mut prefix], &[&requests[0].prompt[..n_shared]], adapter)?;
    }
    // Equal prompts (several samples of one query) are computed once and share the result.
    let mut unique: Vec<&[u32]> = Vec::new();
    let mut position: HashMap<&[u32], usize> = HashMap::new();
    let index_of: Vec<usize> = requests
        .iter()
        .map(|request| {
            *position.entry(request.prompt).or_insert_with(|| {
                unique.push(&request.prompt[n_shared..]);
                unique.len() - 1
            })
        })
        .collect();
    let mut caches = vec![prefix; unique.len()];
    let hidden = last_hidden(decoder, adapter, &mut caches.iter_mut().collect::<Vec<_>>(), &unique)?;
    let (sampling, temperature) = match decoding {
        Decoding::Greedy => (Sampling::ArgMax, 1.0),
        Decoding::Sample { temperature } => (Sampling::All { temperature }, temperature as f32),
    };
    let sequence = |(request, index): (&GenerationRequest<'_>, usize)| Sequence {
        cache: caches[index].clone(),
        hidden: hidden[index].clone(),
        processor: LogitsProcessor::from_sampling(request.seed, sampling.clone()),
        temperature,
        answer: Generated { token_ids: Vec::new(), logprobs: Vec::new(), truncated: false },
    };
    Ok(requests.iter().zip(index_of).map(sequence).collect())
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
fn choose(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    sequences: &mut [Sequence],
    active: &[usize],
) -> Result<(), ModelError> {
    let (width, n_vocabulary) = (decoder.config().hidden_size, decoder.config().vocab_size);
    let hidden: Vec<f32> = active.iter().flat_map(|&index| sequences[index].hidden.iter().copied()).collect();
    let hidden = Tensor::from_vec(hidden, (active.len(), width), &Device::Cpu)?;
    let logits = decoder.logits(&hidden, adapter)?; // (active, V)
    kernels::with_floats(&logits, |values| {
        for (row, &index) in active.iter().enumerate() {
            let sequence = &mut sequences[index];
            let id = sequence.processor.sample(&logits.get(row)?)?;
            let row = &values[row * n_vocabulary..(row + 1) * n_vocabulary];
            sequence.answer.token_ids.push(id);
            sequence.answer.logprobs.push(logprob(row, id as usize, sequence.temperature));
        }
        Ok(())
    })?;
    Ok(())
}

fn logprob(logits: &[f32], index: usize, temperature: f32) -> f32 {
    let scaled = || logits.iter().map(|logit| logit / temperature);
    let max = scaled().fold(f32::NEG_INFINITY, f32::max);
    logits[index] / temperature - max - scaled().map(|logit| (logit - max).exp()).sum::<f32>().ln()
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
