//! The engine: generates responses of one policy after another on one pool of KV cache blocks.

use super::beam::{self, Beams};
use super::capacity::{CacheRoom, blocks_of_prompt};
use super::cpu_backend::{Adapter, AdapterWeights, BaseWeights};
use super::logits_processor::LogitsProcessor;
use super::model_runner::{DecodePolicy, Policy};
use super::prefix_cache::{EngineCore, PrefixCache, StoppedSequences};
use super::{Decoding, Generated, GenerationRequest, SamplingSettings, StopSignal, TokenText, scheduler};
use crate::kv_cache::{BLOCK_TOKENS, BlockPool, BlockShape};
use crate::{ComputeDevice, Decoder, LoraAdapter, ModelError, RopeScaling};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Settings of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineSettings {
    /// Maximum number of responses, or beams, that run at once; further ones wait. A response does not depend on it.
    pub max_sequences: usize,
    /// Maximum number of tokens in the prefix cache, in whole blocks; the cache is emptied when the policy changes.
    pub max_prefix_tokens: usize,
    /// How long the prefix cache keeps prefixes.
    pub prefix_life: PrefixLife,
    /// Capacity of the KV cache that a GPU allocates once; further responses wait. `None` allocates what each call may need, and again for
    /// a call that needs more. Without effect on the CPU, where the KV cache grows as needed.
    pub room: Option<CacheRoom>,
    /// Whether, on the CPU, an int8 base is multiplied with activations rounded to int8, and its head is int8 too: faster, but
    /// log-probabilities differ from those of a training pass. For evaluation and serving.
    pub int8_activations: bool,
}

/// How long an engine's prefix cache keeps prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixLife {
    /// KV caches of prefixes are kept until the policy changes.
    Policy,
    /// KV caches of prefixes are kept until the end of a call to [`Engine::generate`]. GPU kernels may sum in another order for another
    /// number of rows; with this setting results are bit-identical whatever earlier calls computed.
    Call,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            max_sequences: 256,
            max_prefix_tokens: 4096,
            prefix_life: PrefixLife::Policy,
            room: None,
            int8_activations: false,
        }
    }
}

/// Memory of an engine's KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheMemory {
    /// Bytes of one KV cache block, which holds 16 tokens.
    pub block_bytes: usize,
    /// Bytes in use now; between calls, those of the prefix cache.
    pub live_bytes: usize,
    /// Peak bytes in use, which stay allocated on the CPU. Each of `max_sequences` responses with its prompt, and each shared or cached
    /// prefix, takes at most one block more than its tokens fill.
    pub peak_bytes: usize,
    /// Bytes allocated on a GPU, in use or not; see [`EngineSettings::room`]. 0 on the CPU.
    pub room_bytes: usize,
}

/// Generates responses of one policy after another, on the decoder's device.
///
/// Sequences share blocks of the paged KV cache until one of them writes (copy-on-write); prefixes that prompts share are computed
/// once, and kept until the policy changes. Running responses are batched: on the CPU each thread takes some of them through all
/// layers; on a GPU all of them are one batch, on a stream of the engine.
///
/// Sources: Kwon et al. 2023, "PagedAttention" (blocks, copy-on-write); Yu et al. 2022, "Orca" (continuous batching).
pub struct Engine<'a> {
    decoder: &'a Decoder,
    settings: EngineSettings,
    pub(super) policy: Option<Policy>,
    /// The policy's adapter on the CPU.
    adapter: Adapter,
    version: Option<u64>,
    pool: Arc<BlockPool>,
    prefixes: PrefixCache,
    stopped: StoppedSequences,
}

impl<'a> Engine<'a> {
    /// An engine on a decoder; its policy is the base model until another is set.
    ///
    /// # Errors
    /// `max_sequences` is 0.
    pub fn new(decoder: &'a Decoder, settings: EngineSettings) -> Result<Self, ModelError> {
        if settings.max_sequences == 0 {
            return Err(ModelError::Generation("max_sequences is 0; expected at least 1".into()));
        }
        let pool = BlockPool::new(BlockShape::new(decoder.local_config()));
        let prefixes = PrefixCache::new(settings.max_prefix_tokens);
        let stopped = StoppedSequences::new();
        Ok(Self { decoder, settings, policy: None, adapter: None, version: None, pool, prefixes, stopped })
    }

    /// Sets the policy to the adapter's current values, which later training does not change; `None` is the base model. Does nothing if
    /// `version` is the same as in the previous call.
    ///
    /// # Errors
    /// The adapter does not fit the decoder, or holds values that are not finite.
    pub fn set_policy(&mut self, adapter: Option<&LoraAdapter>, version: u64) -> Result<(), ModelError> {
        if self.version != Some(version) {
            self.prefixes.clear();
            self.stopped.clear();
            self.version = None;
            self.load_policy(adapter)?;
            self.version = Some(version);
        }
        Ok(())
    }

    fn load_policy(&mut self, adapter: Option<&LoraAdapter>) -> Result<(), ModelError> {
        if matches!(self.decoder.compute_device(), ComputeDevice::Accelerator(_)) {
            match &mut self.policy {
                Some(Policy::Accelerator(policy)) => policy.set(self.decoder, adapter)?,
                _ => self.policy = Some(Policy::on_accelerator(self.decoder, adapter)?),
            }
            return Ok(());
        }
        (self.policy, self.adapter) = (None, None); // frees the old copies before new ones are allocated
        self.policy = Some(Policy::Cpu(Box::new(BaseWeights::new(self.decoder, self.settings.int8_activations)?)));
        self.adapter = adapter.map(|adapter| AdapterWeights::new(self.decoder, adapter).map(Arc::new)).transpose()?;
        Ok(())
    }

    /// Generates `n` responses per request, in order. A response depends on the policy, the request's prompt and seed, and the sampling
    /// settings alone: not on other requests, `max_sequences` or the number of threads. On a GPU, where products of another number
    /// of rows may be summed in another order, this holds up to rounding.
    ///
    /// # Errors
    /// An invalid setting or prompt, a prompt and `max_new_tokens` beyond the model's positions, logits that are not finite, or stop
    /// strings without a tokenizer.
    pub fn generate(
        &mut self,
        requests: &[GenerationRequest<'_>],
        decoding: Decoding,
        sampling: &SamplingSettings,
        text: &dyn TokenText,
    ) -> Result<Vec<Vec<Generated>>, ModelError> {
        self.generate_until(requests, &[], decoding, sampling, text, &mut || Ok(false))
    }

    /// Like [`Engine::generate`], but calls `stop` before each decode step and, once it returns true, returns the responses as they are
    /// (`finish_reason: None` if unfinished). Pass them as `started` to resume the same requests, or `&[]` to start (beam search ignores
    /// `started`).
    ///
    /// # Errors
    /// As [`Engine::generate`], or an error of `stop`.
    pub fn generate_until(
        &mut self,
        requests: &[GenerationRequest<'_>],
        started: &[Vec<Generated>],
        decoding: Decoding,
        sampling: &SamplingSettings,
        text: &dyn TokenText,
        stop: &mut StopSignal<'_>,
    ) -> Result<Vec<Vec<Generated>>, ModelError> {
        sampling.check()?;
        check_requests(self.decoder, requests, sampling)?;
        if self.policy.is_none() {
            self.load_policy(None)?;
        }
        let processor = LogitsProcessor { settings: sampling, stop_ids: text.stop_ids() };
        let (n_blocks, max_sequences) = self.allocate(requests, decoding, &processor)?;
        if self.settings.prefix_life == PrefixLife::Call {
            self.prefixes.clear();
        }
        let policy = self.policy.as_mut().expect("it was loaded above");
        let (adapter, pool) = (&self.adapter, &self.pool);
        let (prefixes, stopped) = (&mut self.prefixes, &mut self.stopped);
        let mut core = EngineCore { policy, adapter, pool, prefixes, stopped, max_sequences, n_blocks };
        match decoding {
            Decoding::Beam { n_beams, length_penalty } => {
                beam::run(&mut core, requests, Beams { n_beams, length_penalty }, &processor, text, stop)
            }
            Decoding::Greedy | Decoding::Sample => {
                scheduler::run(&mut core, (requests, started), decoding, &processor, text, stop)
            }
        }
    }

    /// The policy on an accelerator; `None` on the CPU.
    pub fn device_policy(&self) -> Option<&dyn DecodePolicy> {
        match &self.policy {
            Some(Policy::Accelerator(policy)) => Some(&**policy),
            _ => None,
        }
    }

    /// Memory of the KV cache.
    pub fn cache_memory(&self) -> CacheMemory {
        let block_bytes = self.pool.block_bytes();
        CacheMemory {
            block_bytes,
            live_bytes: self.pool.n_live() * block_bytes,
            peak_bytes: self.pool.n_peak() * block_bytes,
            room_bytes: self.pool.n_blocks().unwrap_or(0) * block_bytes,
        }
    }

    /// Allocates the GPU memory of a call. Returns the number of blocks for responses and their prompts, and the maximum number of running
    /// responses.
    fn allocate(
        &mut self,
        requests: &[GenerationRequest<'_>],
        decoding: Decoding,
        processor: &LogitsProcessor<'_>,
    ) -> Result<(Option<usize>, usize), ModelError> {
        let (sampling, max_sequences) = (processor.settings, self.settings.max_sequences);
        if matches!(self.decoder.compute_device(), ComputeDevice::Cpu) || requests.is_empty() {
            return Ok((None, max_sequences));
        }
        let room = self.settings.room.unwrap_or_else(|| room_for(requests, decoding, sampling, &self.settings));
        let needed = room.n_blocks(self.settings.max_prefix_tokens);
        if self.pool.n_blocks().is_none_or(|n_blocks| n_blocks < needed) {
            self.prefixes.clear();
            self.stopped.clear();
            self.new_pool(needed)?;
        }
        let n_responses = room.n_responses.max(1);
        let longest = requests.iter().map(|request| request.prompt.len()).max().unwrap_or(0);
        if let Some(Policy::Accelerator(policy)) = &mut self.policy {
            let n_sequences = match decoding {
                Decoding::Beam { n_beams, .. } => n_beams.max(n_responses),
                _ => n_responses,
            };
            policy.reserve(n_sequences, room.longest().max(longest + sampling.max_new_tokens), processor)?;
        }
        // Cached prefixes and the prompt that waits for admission have separate blocks.
        let reserved = self.settings.max_prefix_tokens.div_ceil(BLOCK_TOKENS) + blocks_of_prompt(longest);
        let n_blocks = self.pool.n_blocks().map(|n_blocks| n_blocks.saturating_sub(reserved));
        Ok((n_blocks, max_sequences.min(n_responses)))
    }

    fn new_pool(&mut self, n_blocks: usize) -> Result<(), ModelError> {
        let shape = BlockShape::new(self.decoder.local_config());
        // The device frees its blocks before it allocates new ones. If the allocation fails, there are none.
        self.pool = BlockPool::of_device(shape, 0);
        if let Some(Policy::Accelerator(policy)) = &mut self.policy {
            policy.allocate_blocks(n_blocks)?;
        }
        self.pool = BlockPool::of_device(shape, n_blocks);
        Ok(())
    }
}

/// The maximum memory that the responses of a call need at once.
fn room_for(
    requests: &[GenerationRequest<'_>],
    decoding: Decoding,
    sampling: &SamplingSettings,
    settings: &EngineSettings,
) -> CacheRoom {
    let n_requested = match decoding {
        Decoding::Beam { n_beams, .. } => {
            return CacheRoom {
                n_responses: requests.len().min((settings.max_sequences / n_beams.max(1)).max(1)) * n_beams,
                ..room_for(requests, Decoding::Greedy, sampling, settings)
            };
        }
        _ => requests.iter().map(|request| request.n).sum::<usize>(),
    };
    let prompts: BTreeSet<&[u32]> = requests.iter().map(|request| request.prompt).collect();
    let n_responses = n_requested.min(settings.max_sequences);
    CacheRoom {
        n_responses,
        n_prompts: prompts.len().min(n_responses),
        longest_prompt: prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0),
        max_new_tokens: sampling.max_new_tokens,
    }
}

fn check_requests(
    decoder: &Decoder,
    requests: &[GenerationRequest<'_>],
    sampling: &SamplingSettings,
) -> Result<(), ModelError> {
    let check = |(index, request): (usize, &GenerationRequest<'_>)| {
        check_request(decoder, &format!("prompt {index}"), request.prompt, sampling)
    };
    requests.iter().enumerate().try_for_each(check)
}

/// Checks that a prompt and its response fit into the model's positions. `name`: the prompt's name in the message.
pub(super) fn check_request(
    decoder: &Decoder,
    name: &str,
    prompt: &[u32],
    sampling: &SamplingSettings,
) -> Result<(), ModelError> {
    let (n_positions, n_vocabulary) = (decoder.config().max_positions, decoder.config().vocab_size);
    let dynamic = match decoder.config().rope_scaling {
        Some(RopeScaling::Dynamic { .. }) => " (rope_type `dynamic` is computed up to max_position_embeddings)",
        _ => "",
    };
    let wrong = if prompt.is_empty() {
        format!("{name} is empty; expected at least one token")
    } else if prompt.len().saturating_add(sampling.max_new_tokens) > n_positions {
        format!(
            "{name} has {} tokens; with max_new_tokens {} it goes beyond the model's {n_positions} positions{dynamic}",
            prompt.len(),
            sampling.max_new_tokens
        )
    } else if let Some(id) = prompt.iter().find(|&&id| id as usize >= n_vocabulary) {
        format!("{name}: token id {id} is outside the vocabulary of {n_vocabulary}")
    } else {
        return Ok(());
    };
    Err(ModelError::Generation(wrong))
}

/// Generates responses with a new engine, and returns them in the order of the requests, `n` for each.
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
