//! The engine of a server: requests arrive while others run, and each has an adapter and sampling settings of its own.
//!
//! In: requests, one after another. Out of each step: the next token of every running request. A response is the one that
//! [`super::Engine`] generates, to the bit, whatever else is in the batch.
//!
//! Sources: Yu et al. 2022, "Orca" (continuous batching); Chen et al. 2023, "Punica" (multi-LoRA).

use super::beam::{Beams, Search};
use super::capacity::{blocks_of_prompt, blocks_of_response};
use super::cpu_backend::{Adapter, AdapterWeights, BaseWeights, is_same};
use super::engine::check_request;
use super::logits_processor::LogitsProcessor;
use super::model_runner::{HiddenState, Policy, ScheduledSequence};
use super::prefix_cache::{EngineCore, PrefixCache, StoppedSequences};
use super::sampler::{LogitsConsumer, Sampler};
use super::scheduler::finish_reason;
use super::{Decoding, Generated, SamplingSettings, TokenText};
use crate::kv_cache::{BLOCK_TOKENS, BlockPool, BlockShape, SequenceKvCache};
use crate::{ComputeDevice, Decoder, ModelError};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// Limits of a server's engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServingSettings {
    /// Maximum number of responses, or beams, that run at once; further requests wait. A response does not depend on it.
    pub max_running: usize,
    /// Bytes of the KV cache, half of them for prefixes that prompts share. A request waits until there are enough blocks for its longest
    /// possible response.
    pub kv_cache_bytes: usize,
}

impl Default for ServingSettings {
    /// At most 64 running responses, and 1 GiB of KV cache.
    fn default() -> Self {
        Self { max_running: 64, kv_cache_bytes: 1 << 30 }
    }
}

/// A response to generate.
#[derive(Clone)]
pub struct ServingRequest {
    /// Id of the request, which [`StepOutput::id`] repeats.
    pub id: u64,
    /// The adapter; `None` is the base model.
    pub adapter: Option<Arc<AdapterWeights>>,
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Seed of the request's sampler.
    pub seed: u64,
    /// Decoding strategy: greedy, sampling, or beam search, whose best beam is the response.
    pub decoding: Decoding,
    /// Temperature, penalties, filters and limits.
    pub sampling: SamplingSettings,
}

/// Result of a step for one request.
#[derive(Debug)]
pub struct StepOutput {
    /// Id of the request: [`ServingRequest::id`].
    pub id: u64,
    /// The new token; `None` with beam search, which has no tokens before it ends.
    pub token: Option<u32>,
    /// Number of the request's sequences in the batch: the number of beams, otherwise 1.
    pub n_sequences: usize,
    /// Number of prompt tokens that were found in the prefix cache.
    pub n_cached: usize,
    /// When prefill of the prompt started.
    pub started_at: Instant,
    /// The complete response if it has ended, or why it failed: logits are not finite, or the penalties leave no token.
    pub finished: Option<Result<Generated, ModelError>>,
}

struct Running {
    request: ServingRequest,
    response: Response,
    n_blocks: usize,
    n_cached: usize,
    started_at: Instant,
}

/// A response in progress.
enum Response {
    Sampled { cache: SequenceKvCache, hidden: HiddenState, sampler: Box<Sampler> },
    Beams(Search),
}

impl Response {
    /// `cache`: KV cache of the prompt, lacking at least its last token.
    fn new(request: &ServingRequest, cache: SequenceKvCache) -> Self {
        match beams(request) {
            Some(beams) => Self::Beams(Search::new(beams, cache)),
            None => {
                let sampler = Box::new(Sampler::new(request.seed, 0, request.decoding));
                Self::Sampled { cache, hidden: HiddenState::Unknown, sampler }
            }
        }
    }

    /// `None` before the first token, and for beams.
    fn last_token(&self) -> Option<u32> {
        match self {
            Self::Sampled { sampler, .. } => sampler.token_ids.last().copied(),
            Self::Beams(_) => None,
        }
    }

    /// Processes the result of a pass: selects the next beams, and checks whether the response has ended.
    ///
    /// # Errors
    /// There is no next token, or the tokenizer fails.
    fn advance(mut self, processor: &LogitsProcessor<'_>, text: &dyn TokenText) -> Result<Progress, ModelError> {
        if let Self::Sampled { sampler, .. } = &mut self
            && let Some(failure) = sampler.failure.take()
        {
            return Err(failure);
        }
        match self {
            Self::Sampled { cache, hidden, sampler } => Ok(match finish_reason(&sampler.token_ids, processor, text)? {
                None => Progress::Unfinished(Self::Sampled { cache, hidden, sampler }),
                reason => Progress::Finished(sampler.generated(reason)),
            }),
            Self::Beams(mut search) => {
                search.select(processor, text)?;
                if !search.is_finished() {
                    return Ok(Progress::Unfinished(Self::Beams(search)));
                }
                let best = search.best().next();
                best.map(Progress::Finished).ok_or_else(|| ModelError::Generation("no beam has ended".into()))
            }
        }
    }
}

enum Progress {
    Unfinished(Response),
    Finished(Generated),
}

fn beams(request: &ServingRequest) -> Option<Beams> {
    match request.decoding {
        Decoding::Beam { n_beams, length_penalty } => Some(Beams { n_beams, length_penalty }),
        Decoding::Greedy | Decoding::Sample => None,
    }
}

fn n_sequences(request: &ServingRequest) -> usize {
    beams(request).map_or(1, |beams| beams.n_beams)
}

/// Limits on requests: the model's positions and the KV cache.
#[derive(Clone)]
pub struct RequestLimits {
    decoder: Arc<Decoder>,
    /// KV cache blocks for requests.
    n_blocks: usize,
    max_running: usize,
}

impl RequestLimits {
    /// Positions of the model: the maximum number of tokens of a prompt with its response.
    pub fn n_positions(&self) -> usize {
        self.decoder.config().max_positions
    }

    /// Checks that a request is valid and within the limits.
    ///
    /// # Errors
    /// A setting is invalid, or the prompt with its longest possible response exceeds the model's positions or the KV cache.
    pub fn check(&self, request: &ServingRequest) -> Result<(), ModelError> {
        request.sampling.check()?;
        if let Some(beams) = beams(request) {
            beams.check()?;
            if beams.n_beams > self.max_running {
                let (n_beams, most) = (beams.n_beams, self.max_running);
                return Err(ModelError::Generation(format!("{n_beams} beams; the server runs at most {most} at once")));
            }
        }
        check_request(&self.decoder, "the prompt", &request.prompt, &request.sampling)?;
        let needed = n_blocks(request);
        if needed > self.n_blocks {
            let (n_tokens, room) = (needed * BLOCK_TOKENS, self.n_blocks * BLOCK_TOKENS);
            let wrong =
                format!("prompt and response may take {n_tokens} tokens of KV cache; the server has room for {room}");
            return Err(ModelError::Generation(wrong));
        }
        Ok(())
    }
}

/// Generates responses to requests of many adapters on one base, on the CPU.
pub struct ServingEngine {
    policy: Policy,
    text: Arc<dyn TokenText + Send + Sync>,
    limits: RequestLimits,
    pool: Arc<BlockPool>,
    prefixes: PrefixCache,
    /// KV cache blocks that running requests have reserved.
    n_reserved: usize,
    waiting: VecDeque<ServingRequest>,
    /// Running requests; those with the same adapter are consecutive.
    running: Vec<Running>,
}

/// Maximum number of prompt tokens that are started in one step, which limits the delay of running requests.
const MAX_PREFILL_TOKENS: usize = 512;

impl ServingEngine {
    /// An engine for a decoder on the CPU that is not sharded.
    ///
    /// # Errors
    /// The decoder is on another device or a shard.
    pub fn new(
        decoder: Arc<Decoder>,
        text: Arc<dyn TokenText + Send + Sync>,
        settings: ServingSettings,
    ) -> Result<Self, ModelError> {
        if !matches!(decoder.compute_device(), ComputeDevice::Cpu) || decoder.parallel().is_sharded() {
            return Err(ModelError::Generation("requests are served on the CPU, by a model in one part".into()));
        }
        let policy = Policy::Cpu(Box::new(BaseWeights::new(&decoder, true)?));
        let pool = BlockPool::new(BlockShape::new(decoder.local_config()));
        let n_blocks = settings.kv_cache_bytes / pool.block_bytes().max(1) / 2;
        Ok(Self {
            policy,
            text,
            limits: RequestLimits { decoder, n_blocks, max_running: settings.max_running.max(1) },
            prefixes: PrefixCache::new(n_blocks * BLOCK_TOKENS),
            pool,
            n_reserved: 0,
            waiting: VecDeque::new(),
            running: Vec::new(),
        })
    }

    /// The limits that [`ServingEngine::add`] checks.
    pub fn limits(&self) -> &RequestLimits {
        &self.limits
    }

    /// Appends a request to the queue.
    ///
    /// # Errors
    /// As [`RequestLimits::check`].
    pub fn add(&mut self, request: ServingRequest) -> Result<(), ModelError> {
        self.limits.check(&request)?;
        self.waiting.push_back(request);
        Ok(())
    }

    /// Drops waiting and running requests for whose id `keep` returns false.
    pub fn retain(&mut self, mut keep: impl FnMut(u64) -> bool) {
        self.waiting.retain(|request| keep(request.id));
        let n_reserved = &mut self.n_reserved;
        self.running.retain(|running| {
            let is_kept = keep(running.request.id);
            *n_reserved -= if is_kept { 0 } else { running.n_blocks };
            is_kept
        });
    }

    /// Number of requests in the queue.
    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Ids of the requests in the queue.
    pub fn waiting_ids(&self) -> BTreeSet<u64> {
        self.waiting.iter().map(|request| request.id).collect()
    }

    /// Number of requests in the running batch.
    pub fn n_running(&self) -> usize {
        self.running.len()
    }

    /// Bytes of the KV cache in use, cached prefixes included.
    pub fn kv_cache_bytes(&self) -> usize {
        self.pool.n_live() * self.pool.block_bytes()
    }

    /// Starts waiting requests as far as the limits allow, and computes the next token of each running request. Without requests it returns
    /// no outputs.
    ///
    /// # Errors
    /// The forward pass failed for the batch: the running requests are lost.
    pub fn step(&mut self) -> Result<Vec<StepOutput>, ModelError> {
        let outputs = self.admit().and_then(|()| self.forward());
        if outputs.is_err() {
            (self.n_reserved, self.running) = (0, Vec::new());
        }
        outputs
    }

    fn admit(&mut self) -> Result<(), ModelError> {
        let (mut admitted, mut n_tokens, started_at) = (Vec::new(), 0, Instant::now());
        let mut n_running: usize = self.running.iter().map(|running| n_sequences(&running.request)).sum();
        while let Some(request) = self.waiting.front() {
            let n_blocks = n_blocks(request);
            let has_room = n_running + n_sequences(request) <= self.limits.max_running
                && self.n_reserved + n_blocks <= self.limits.n_blocks
                && (n_tokens == 0 || n_tokens + request.prompt.len() <= MAX_PREFILL_TOKENS);
            let Some(request) = self.waiting.pop_front_if(|_| has_room) else { break };
            let cached = self.prefixes.longest(&request.adapter, &request.prompt[..request.prompt.len() - 1]);
            let n_cached = cached.map_or(0, |cache| cache.len());
            n_tokens += request.prompt.len() - n_cached;
            self.n_reserved += n_blocks;
            n_running += n_sequences(&request);
            let response = Response::new(&request, SequenceKvCache::new(&self.pool));
            admitted.push(Running { request, response, n_blocks, n_cached, started_at });
        }
        // Stable sort, so that requests with the same adapter start in the order of their arrival.
        admitted.sort_by_key(|running| running.request.adapter.as_ref().map(Arc::as_ptr));
        for of_adapter in admitted.chunk_by_mut(|a, b| is_same(&a.request.adapter, &b.request.adapter)) {
            self.start(of_adapter)?;
        }
        for new in admitted {
            let is_neighbour = |other: &Running| is_same(&other.request.adapter, &new.request.adapter);
            let last = self.running.iter().rposition(is_neighbour);
            self.running.insert(last.map_or(self.running.len(), |last| last + 1), new);
        }
        Ok(())
    }

    /// Assigns KV caches of the longest shared prefixes to requests with the same adapter, and computes new prefixes.
    fn start(&mut self, requests: &mut [Running]) -> Result<(), ModelError> {
        let adapter: Adapter = requests[0].request.adapter.clone();
        let mut prompts: Vec<&[u32]> = requests.iter().map(|running| running.request.prompt.as_slice()).collect();
        prompts.sort_unstable();
        prompts.dedup();
        let mut core = EngineCore {
            policy: &mut self.policy,
            adapter: &adapter,
            pool: &self.pool,
            prefixes: &mut self.prefixes,
            stopped: &mut StoppedSequences::new(),
            max_sequences: self.limits.max_running,
            n_blocks: None,
        };
        let settings = SamplingSettings::default();
        let processor = LogitsProcessor { settings: &settings, stop_ids: self.text.stop_ids() };
        let caches = core.prompt_caches(&prompts, &processor)?;
        let index = |running: &Running| prompts.binary_search(&running.request.prompt.as_slice()).unwrap_or_default();
        let indices: Vec<usize> = requests.iter().map(index).collect();
        for (running, index) in requests.iter_mut().zip(indices) {
            running.response = Response::new(&running.request, caches[index].clone());
        }
        Ok(())
    }

    fn forward(&mut self) -> Result<Vec<StepOutput>, ModelError> {
        if self.running.is_empty() {
            return Ok(Vec::new());
        }
        let settings = SamplingSettings::default();
        let processor = LogitsProcessor { settings: &settings, stop_ids: self.text.stop_ids() };
        let last_tokens: Vec<Option<u32>> = self.running.iter().map(|running| running.response.last_token()).collect();
        let mut sequences: Vec<ScheduledSequence<'_>> = Vec::with_capacity(self.running.len());
        for (Running { request, response, .. }, last) in self.running.iter_mut().zip(&last_tokens) {
            let own = |sequence| ScheduledSequence {
                adapter: request.adapter.clone(),
                sampling: Some(&request.sampling),
                ..sequence
            };
            match response {
                Response::Beams(search) => {
                    sequences.extend(search.schedule(&request.prompt, processor.stop_ids).map(own));
                }
                Response::Sampled { cache, hidden, sampler } => {
                    let tokens = match last {
                        Some(last) => std::slice::from_ref(last),
                        None => &request.prompt[cache.len()..],
                    };
                    let (adapter, sampling, consumers) = (None, None, vec![LogitsConsumer::Sampler(sampler)]);
                    let keeps_hidden = false;
                    sequences.push(own(ScheduledSequence {
                        adapter,
                        sampling,
                        tokens,
                        cache,
                        hidden,
                        keeps_hidden,
                        consumers,
                    }));
                }
            }
        }
        self.policy.forward(&mut sequences, &processor)?;
        drop(sequences);
        let (mut outputs, mut unfinished) = (Vec::with_capacity(self.running.len()), Vec::new());
        for running in std::mem::take(&mut self.running) {
            let Running { request, response, n_blocks, n_cached, started_at } = running;
            let (id, processor) = (request.id, LogitsProcessor { settings: &request.sampling, ..processor });
            let (token, n_sequences) = (response.last_token(), n_sequences(&request));
            let finished = match response.advance(&processor, self.text.as_ref()) {
                Ok(Progress::Unfinished(response)) => {
                    unfinished.push(Running { request, response, n_blocks, n_cached, started_at });
                    None
                }
                Ok(Progress::Finished(generated)) => Some(Ok(generated)),
                Err(error) => Some(Err(error)),
            };
            self.n_reserved -= if finished.is_some() { n_blocks } else { 0 };
            outputs.push(StepOutput { id, token, n_sequences, n_cached, started_at, finished });
        }
        self.running = unfinished;
        Ok(outputs)
    }
}

fn n_blocks(request: &ServingRequest) -> usize {
    let of_response = blocks_of_response(request.sampling.max_new_tokens);
    blocks_of_prompt(request.prompt.len()) + n_sequences(request) * of_response
}
