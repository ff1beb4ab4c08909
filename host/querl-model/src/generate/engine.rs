//! The engine: one policy after another, on one pool of blocks.

use super::filters::Rules;
use super::prefixes::{Prefixes, shared_beginnings};
use super::units::{Unit, advance};
use super::weights::DecodeWeights;
use super::{Decoding, Generated, GenerationRequest, SamplingSettings, TokenText, batch, beam};
use crate::cache::{BlockPool, BlockShape, SequenceCache};
use crate::{Decoder, LoraAdapter, ModelError};
use std::sync::Arc;

/// What an engine may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineSettings {
    /// Answers in progress at once, or beams of beam search; one that ends makes room for the next. The answers do not depend
    /// on it.
    pub max_sequences: usize,
    /// Tokens of shared prefixes that are kept from one call to the next while the policy stays the same.
    pub max_prefix_tokens: usize,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self { max_sequences: 256, max_prefix_tokens: 4096 }
    }
}

/// What the keys and values of an engine take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheMemory {
    /// Of one block of 16 tokens.
    pub block_bytes: usize,
    /// Held now: the kept prefixes, between calls.
    pub live_bytes: usize,
    /// Most that was held at once, which the engine keeps for later calls. At most a block more than the tokens fill for each
    /// of `max_sequences` times the longest prompt with its answer, and for each prefix that is shared or kept.
    pub peak_bytes: usize,
}

/// Generates answers of one policy after another.
///
/// Keys and values stand in blocks that sequences share until one of them writes; what prompts have in common is computed
/// once, and kept until the policy changes. Answers in progress advance together, each thread taking some of them through all
/// layers.
///
/// Sources: Kwon et al. 2023, "PagedAttention" (blocks, copy on write); Yu et al. 2022, "Orca" (batching by iterations).
pub struct Engine<'a> {
    decoder: &'a Decoder,
    settings: EngineSettings,
    weights: Option<DecodeWeights>,
    version: Option<u64>,
    pool: Arc<BlockPool>,
    prefixes: Prefixes,
}

/// What a run over some requests works with.
pub(super) struct Parts<'e> {
    pub(super) weights: &'e DecodeWeights,
    pub(super) pool: &'e Arc<BlockPool>,
    pub(super) prefixes: &'e mut Prefixes,
    pub(super) max_sequences: usize,
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
        let pool = BlockPool::new(BlockShape::new(decoder.local_config()));
        let prefixes = Prefixes::new(settings.max_prefix_tokens);
        Ok(Self { decoder, settings, weights: None, version: None, pool, prefixes })
    }

    /// Takes a policy as it is now: later training does not change it. The same version as before means the same values, and
    /// nothing is done.
    ///
    /// # Errors
    /// The adapter does not fit the decoder, or holds values that are not finite.
    pub fn set_policy(&mut self, adapter: Option<&LoraAdapter>, version: u64) -> Result<(), ModelError> {
        if self.version != Some(version) {
            self.prefixes.clear();
            self.weights = None; // the old copies go before the new ones are made
            self.weights = Some(DecodeWeights::new(self.decoder, adapter)?);
            self.version = Some(version);
        }
        Ok(())
    }

    /// Generates `n` answers per request, in order. What comes depends on the policy, a request's prompt and seed and the
    /// sampling settings, and on nothing else: not on other requests, on `max_sequences`, or on the number of threads.
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
        let weights = match &self.weights {
            Some(weights) => weights,
            None => self.weights.insert(DecodeWeights::new(self.decoder, None)?),
        };
        let max_sequences = self.settings.max_sequences;
        let mut parts = Parts { weights, pool: &self.pool, prefixes: &mut self.prefixes, max_sequences };
        let rules = Rules { settings: sampling, stop_ids: text.stop_ids() };
        match decoding {
            Decoding::Beam { n_beams, length_penalty } => {
                beam::run(&mut parts, requests, beam::Beams { n_beams, length_penalty }, &rules, text)
            }
            Decoding::Greedy | Decoding::Sample => batch::run(&mut parts, requests, decoding, &rules, text),
        }
    }

    /// What keys and values take.
    pub fn cache_memory(&self) -> CacheMemory {
        let block_bytes = self.pool.block_bytes();
        CacheMemory {
            block_bytes,
            live_bytes: self.pool.n_live() * block_bytes,
            peak_bytes: self.pool.n_peak() * block_bytes,
        }
    }
}

/// Caches to begin the given prompts from, each lacking at least the prompt's last token. What several of them share is
/// computed now and kept. `prompts`: sorted, all different.
pub(super) fn prompt_caches(
    parts: &mut Parts<'_>,
    prompts: &[&[u32]],
    rules: &Rules<'_>,
) -> Result<Vec<SequenceCache>, ModelError> {
    let mut left = shared_beginnings(prompts);
    if let [prompt] = prompts
        && parts.cache_of(prompt).len() * 2 < prompt.len()
    {
        // A prompt that comes alone and like none before: the next one may begin as it does.
        left.push(&prompt[..prompt.len() - 1]);
    }
    while !left.is_empty() {
        let waits = |tokens: &[u32]| left.iter().any(|other| other.len() < tokens.len() && tokens.starts_with(other));
        let (waiting, ready): (Vec<_>, Vec<_>) = left.iter().copied().partition(|tokens| waits(tokens));
        compute(parts, &ready, rules)?;
        left = waiting;
    }
    let caches = prompts.iter().map(|prompt| parts.cache_of(&prompt[..prompt.len() - 1])).collect();
    parts.prefixes.trim();
    Ok(caches)
}

/// Computes beginnings of which none is part of another, and keeps them.
fn compute(parts: &mut Parts<'_>, beginnings: &[&[u32]], rules: &Rules<'_>) -> Result<(), ModelError> {
    let wanted: Vec<&[u32]> =
        beginnings.iter().copied().filter(|tokens| parts.cache_of(tokens).len() < tokens.len()).collect();
    let mut caches: Vec<SequenceCache> = wanted.iter().map(|tokens| parts.cache_of(tokens)).collect();
    let mut hidden = vec![Vec::new(); wanted.len()];
    let mut units: Vec<Unit<'_>> = caches
        .iter_mut()
        .zip(&mut hidden)
        .zip(&wanted)
        .map(|((cache, hidden), tokens)| Unit { tokens: &tokens[cache.len()..], cache, hidden, takers: Vec::new() })
        .collect();
    advance(parts.weights, &mut units, rules)?;
    drop(units);
    wanted.into_iter().zip(caches).for_each(|(tokens, cache)| parts.prefixes.keep(tokens, cache));
    Ok(())
}

impl Parts<'_> {
    /// A cache of as many of the tokens as are known.
    fn cache_of(&mut self, tokens: &[u32]) -> SequenceCache {
        self.prefixes.longest(tokens).unwrap_or_else(|| SequenceCache::new(self.pool))
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
                "prompt {index} has {} tokens; with max_new_tokens {} it goes beyond the model's {n_positions} positions",
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
