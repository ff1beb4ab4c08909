//! The engine: one policy after another, on one pool of blocks.

use super::cpu_backend::PolicyWeights;
use super::filters::Rules;
use super::model_runner::{Hidden, Unit};
use super::policy::{DecodePolicy, Policy};
use super::prefixes::{Prefixes, shared_beginnings};
use super::sizes::{CacheRoom, blocks_of_prompt};
use super::{Decoding, Generated, GenerationRequest, SamplingSettings, TokenText, batch, beam};
use crate::cache::{BLOCK_TOKENS, BlockPool, BlockShape, SequenceCache};
use crate::{ComputeDevice, Decoder, LoraAdapter, ModelError};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What an engine may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineSettings {
    /// Answers in progress at once, or beams of beam search; one that ends makes room for the next. The answers do not depend
    /// on it.
    pub max_sequences: usize,
    /// Tokens of shared prefixes that are kept while the policy stays the same, in whole blocks.
    pub max_prefix_tokens: usize,
    /// Until when they are kept.
    pub prefix_life: PrefixLife,
    /// What a card makes room for, once: further answers wait. `None`: for what each call may need, which is remade for a call that
    /// needs more. The processor's memory grows as it is needed.
    pub room: Option<CacheRoom>,
}

/// Until when an engine keeps shared prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixLife {
    /// As long as the policy.
    Policy,
    /// To the end of a call. The products of a card may sum in another order for another number of rows; so what comes does not
    /// depend, to the last bit, on the calls before.
    Call,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self { max_sequences: 256, max_prefix_tokens: 4096, prefix_life: PrefixLife::Policy, room: None }
    }
}

/// What the keys and values of an engine take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheMemory {
    /// Of one block of 16 tokens.
    pub block_bytes: usize,
    /// Held now: the kept prefixes, between calls.
    pub live_bytes: usize,
    /// Most that was held at once; the processor keeps it for later calls. At most a block more than the tokens fill for each
    /// of `max_sequences` times the longest prompt with its answer, and for each prefix that is shared or kept.
    pub peak_bytes: usize,
    /// What a card has allocated, whether it is held or not; see [`EngineSettings::room`]. 0 on the processor.
    pub room_bytes: usize,
}

/// Generates answers of one policy after another, where the decoder is.
///
/// Keys and values stand in blocks that sequences share until one of them writes; what prompts have in common is computed
/// once, and kept until the policy changes. Answers in progress advance together, each thread taking some of them through all
/// layers; on a card, all of them as one batch, on a stream of the engine's own.
///
/// Sources: Kwon et al. 2023, "PagedAttention" (blocks, copy on write); Yu et al. 2022, "Orca" (batching by iterations).
pub struct Engine<'a> {
    decoder: &'a Decoder,
    settings: EngineSettings,
    pub(super) policy: Option<Policy>,
    version: Option<u64>,
    pool: Arc<BlockPool>,
    prefixes: Prefixes,
}

/// What a run over some requests works with.
pub(super) struct Parts<'e> {
    pub(super) policy: &'e mut Policy,
    pub(super) pool: &'e Arc<BlockPool>,
    pub(super) prefixes: &'e mut Prefixes,
    pub(super) max_sequences: usize,
    /// Blocks for answers and their prompts; `None` where there is no end.
    pub(super) n_blocks: Option<usize>,
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
        Ok(Self { decoder, settings, policy: None, version: None, pool, prefixes })
    }

    /// Takes a policy as it is now: later training does not change it. The same version as before means the same values, and
    /// nothing is done.
    ///
    /// # Errors
    /// The adapter does not fit the decoder, or holds values that are not finite.
    pub fn set_policy(&mut self, adapter: Option<&LoraAdapter>, version: u64) -> Result<(), ModelError> {
        if self.version != Some(version) {
            self.prefixes.clear();
            self.version = None;
            self.take_policy(adapter)?;
            self.version = Some(version);
        }
        Ok(())
    }

    fn take_policy(&mut self, adapter: Option<&LoraAdapter>) -> Result<(), ModelError> {
        if let ComputeDevice::Accelerator(accelerator) = self.decoder.place() {
            match &mut self.policy {
                Some(Policy::Accelerator(policy)) => policy.set(self.decoder, adapter)?,
                _ => self.policy = Some(Policy::Accelerator(accelerator.decode_policy(self.decoder, adapter)?)),
            }
            return Ok(());
        }
        self.policy = None; // the old copies go before the new ones are made
        self.policy = Some(Policy::Host(Box::new(PolicyWeights::new(self.decoder, adapter)?)));
        Ok(())
    }

    /// Generates `n` answers per request, in order. What comes depends on the policy, a request's prompt and seed and the
    /// sampling settings, and on nothing else: not on other requests, on `max_sequences`, or on the number of threads. On a card,
    /// where products of another number of rows may be summed in another order, that is so but for rounding.
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
        if self.policy.is_none() {
            self.take_policy(None)?;
        }
        let rules = Rules { settings: sampling, stop_ids: text.stop_ids() };
        let (n_blocks, max_sequences) = self.make_room(requests, decoding, &rules)?;
        if self.settings.prefix_life == PrefixLife::Call {
            self.prefixes.clear();
        }
        let Some(policy) = &mut self.policy else { return Ok(Vec::new()) }; // it was taken above
        let mut parts = Parts { policy, pool: &self.pool, prefixes: &mut self.prefixes, max_sequences, n_blocks };
        match decoding {
            Decoding::Beam { n_beams, length_penalty } => {
                beam::run(&mut parts, requests, beam::Beams { n_beams, length_penalty }, &rules, text)
            }
            Decoding::Greedy | Decoding::Sample => batch::run(&mut parts, requests, decoding, &rules, text),
        }
    }

    /// The policy on an accelerator, if there is one.
    pub fn device_policy(&self) -> Option<&dyn DecodePolicy> {
        match &self.policy {
            Some(Policy::Accelerator(policy)) => Some(&**policy),
            _ => None,
        }
    }

    /// What keys and values take.
    pub fn cache_memory(&self) -> CacheMemory {
        let block_bytes = self.pool.block_bytes();
        CacheMemory {
            block_bytes,
            live_bytes: self.pool.n_live() * block_bytes,
            peak_bytes: self.pool.n_peak() * block_bytes,
            room_bytes: self.pool.n_blocks().unwrap_or(0) * block_bytes,
        }
    }

    /// Sees to it that a card has room for a call. Returns the blocks that answers and their prompts may come to hold, and how many
    /// answers may be in progress.
    fn make_room(
        &mut self,
        requests: &[GenerationRequest<'_>],
        decoding: Decoding,
        rules: &Rules<'_>,
    ) -> Result<(Option<usize>, usize), ModelError> {
        let (sampling, max_sequences) = (rules.settings, self.settings.max_sequences);
        if matches!(self.decoder.place(), ComputeDevice::Cpu) || requests.is_empty() {
            return Ok((None, max_sequences));
        }
        let room = self.settings.room.unwrap_or_else(|| room_for(requests, decoding, sampling, &self.settings));
        let needed = room.n_blocks(self.settings.max_prefix_tokens);
        if self.pool.n_blocks().is_none_or(|n_blocks| n_blocks < needed) {
            self.prefixes.clear();
            self.new_pool(needed)?;
        }
        let n_answers = room.n_answers.max(1);
        let longest = requests.iter().map(|request| request.prompt.len()).max().unwrap_or(0);
        if let Some(Policy::Accelerator(policy)) = &mut self.policy {
            let n_units = match decoding {
                Decoding::Beam { n_beams, .. } => n_beams.max(n_answers),
                _ => n_answers,
            };
            policy.reserve(n_units, room.longest().max(longest + sampling.max_new_tokens), rules)?;
        }
        // Kept prefixes and the prompt that waits have blocks of their own.
        let beside = self.settings.max_prefix_tokens.div_ceil(BLOCK_TOKENS) + blocks_of_prompt(longest);
        let n_blocks = self.pool.n_blocks().map(|n_blocks| n_blocks.saturating_sub(beside));
        Ok((n_blocks, max_sequences.min(n_answers)))
    }

    fn new_pool(&mut self, n_blocks: usize) -> Result<(), ModelError> {
        let shape = BlockShape::new(self.decoder.local_config());
        // The device frees its blocks before it allocates others; if that fails, there are none.
        self.pool = BlockPool::of_device(shape, 0);
        if let Some(Policy::Accelerator(policy)) = &mut self.policy {
            policy.allocate_blocks(n_blocks)?;
        }
        self.pool = BlockPool::of_device(shape, n_blocks);
        Ok(())
    }
}

/// What the answers of a call need at once, at most.
fn room_for(
    requests: &[GenerationRequest<'_>],
    decoding: Decoding,
    sampling: &SamplingSettings,
    settings: &EngineSettings,
) -> CacheRoom {
    let n_asked = match decoding {
        Decoding::Beam { n_beams, .. } => {
            return CacheRoom {
                n_answers: requests.len().min((settings.max_sequences / n_beams.max(1)).max(1)) * n_beams,
                ..room_for(requests, Decoding::Greedy, sampling, settings)
            };
        }
        _ => requests.iter().map(|request| request.n).sum::<usize>(),
    };
    let prompts: BTreeSet<&[u32]> = requests.iter().map(|request| request.prompt).collect();
    let n_answers = n_asked.min(settings.max_sequences);
    CacheRoom {
        n_answers,
        n_prompts: prompts.len().min(n_answers),
        longest_prompt: prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0),
        max_new_tokens: sampling.max_new_tokens,
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
    let mut hidden: Vec<Hidden> = wanted.iter().map(|_| Hidden::Unknown).collect();
    let mut units: Vec<Unit<'_>> = caches
        .iter_mut()
        .zip(&mut hidden)
        .zip(&wanted)
        .map(|((cache, hidden), tokens)| {
            let tokens = &tokens[cache.len()..];
            Unit { tokens, cache, hidden, is_held: false, takers: Vec::new() }
        })
        .collect();
    parts.policy.advance(&mut units, rules)?;
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
