//! Generation: rollouts and evaluation. Prefill and decode steps with a paged KV cache, continuous batching, sampling and beam search.
//!
//! In: prompts as token ids, a policy, and decoding settings. Out: responses with two log-probabilities for each token: under the model's
//! distribution, equal to a training pass, and under the distribution that the token was sampled from. Nothing here records a graph.
//!
//! A call goes through `engine.rs` (memory, prefix caching), `scheduler.rs` (which sequences are in a step) or `beam.rs`,
//! `model_runner.rs` (one forward pass) and `sampler.rs`.

mod beam;
mod capacity;
mod cpu_backend;
mod engine;
mod logits_processor;
mod model_runner;
mod paged_attention;
mod prefix_cache;
mod sampler;
mod scheduler;
mod serving;
#[cfg(test)]
mod tests;

pub use capacity::{CacheRoom, DecodeBufferSizes, bucket};
pub use cpu_backend::AdapterWeights;
pub use engine::{CacheMemory, Engine, EngineSettings, PrefixLife, generate};
pub use logits_processor::LogitsProcessor;
pub(crate) use model_runner::install;
pub use model_runner::{DecodePolicy, HiddenState, NewDecodePolicy, ScheduledSequence};
pub use sampler::{BeamCandidates, LogitsConsumer, SampledToken, Sampler, sample_token};
pub use serving::{RequestLimits, ServingEngine, ServingRequest, ServingSettings, StepOutput};

use crate::{ModelError, TextTokenizer};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Decoding strategy: how the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decoding {
    /// The token of the highest probability after penalties.
    Greedy,
    /// Sampled after temperature, penalties and filters.
    Sample,
    /// Beam search with a length penalty; filters do not apply.
    Beam {
        /// Number of beams, at least 1.
        n_beams: usize,
        /// Exponent of the length: a beam's score is its sum of log-probabilities over `length^length_penalty`. Above 0 favours longer
        /// responses.
        length_penalty: f64,
    },
}

impl Decoding {
    /// Greedy decoding for one beam, otherwise beam search with a length penalty of 1.
    pub fn with_beams(n_beams: usize) -> Self {
        match n_beams {
            1 => Self::Greedy,
            n_beams => Self::Beam { n_beams, length_penalty: 1.0 },
        }
    }
}

/// Sampling settings: temperature, penalties, filters and limits of a response.
///
/// Applied to the logits of each token in this order: `repetition_penalty`, `no_repeat_ngram_size`, `min_new_tokens`; then,
/// where tokens are sampled, `temperature`, `top_k`, `top_p`. They depend on the response, never on the prompt.
///
/// Source: transformers' `generation/logits_process.py`, in the order of `_get_logits_processor`.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingSettings {
    /// Temperature, above 0: divides the logits for sampling and for every reported log-probability.
    pub temperature: f64,
    /// Nucleus sampling below 1: the likeliest tokens up to this cumulative probability; the token that crosses it is kept.
    pub top_p: f64,
    /// Sampling from this number of likeliest tokens, ties included; 0 disables it.
    pub top_k: usize,
    /// Divides positive and multiplies negative logits of tokens that are in the response already; 1 has no effect.
    pub repetition_penalty: f64,
    /// Size of n-grams that may not occur twice in a response; 0 disables it.
    pub no_repeat_ngram_size: usize,
    /// Minimum number of tokens of a response.
    pub min_new_tokens: usize,
    /// Maximum number of tokens of a response, at least 1; longer responses are truncated and marked as such.
    pub max_new_tokens: usize,
    /// A response ends with the token that completes one of these strings.
    pub stop_strings: Vec<String>,
}

impl Default for SamplingSettings {
    /// Temperature 1 without penalties and filters, at most 150 tokens.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            repetition_penalty: 1.0,
            no_repeat_ngram_size: 0,
            min_new_tokens: 0,
            max_new_tokens: 150,
            stop_strings: Vec::new(),
        }
    }
}

impl SamplingSettings {
    /// `text` up to the first stop string in it.
    pub fn before_stop<'t>(&self, text: &'t str) -> &'t str {
        let end = self.stop_strings.iter().filter_map(|stop| text.find(stop.as_str())).min();
        &text[..end.unwrap_or(text.len())]
    }

    fn check(&self) -> Result<(), ModelError> {
        let wrong = if !(self.temperature > 0.0 && self.temperature.is_finite()) {
            format!("temperature is {}; expected above 0", self.temperature)
        } else if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            format!("top_p is {}; expected above 0 and at most 1", self.top_p)
        } else if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            format!("repetition_penalty is {}; expected above 0", self.repetition_penalty)
        } else if self.max_new_tokens == 0 {
            "max_new_tokens is 0; expected at least 1".to_owned()
        } else if self.min_new_tokens > self.max_new_tokens {
            format!("min_new_tokens is {}, above max_new_tokens {}", self.min_new_tokens, self.max_new_tokens)
        } else if self.stop_strings.iter().any(String::is_empty) {
            "stop_strings holds an empty string; it would end every response at once".to_owned()
        } else {
            return Ok(());
        };
        Err(ModelError::Generation(wrong))
    }
}

/// A prompt and the number of responses to generate to it.
#[derive(Debug, Clone, Copy)]
pub struct GenerationRequest<'a> {
    /// Token ids of the prompt, at least one.
    pub prompt: &'a [u32],
    /// Seed of the responses' samplers. Each sampler has its own random stream: a response does not depend on other requests.
    pub seed: u64,
    /// Number of responses. Greedy decoding gives equal ones, beam search its `n` best, at most `n_beams`.
    pub n: usize,
}

/// Called before each decode step; true stops generation. It must return the same on all ranks that share a model.
pub type StopSignal<'s> = dyn FnMut() -> Result<bool, ModelError> + 's;

/// Stop tokens, and conversion of token ids to text.
pub trait TokenText: Sync {
    /// Ids of the tokens that end a response.
    fn stop_ids(&self) -> &BTreeSet<u32>;

    /// Text of a response's token ids.
    ///
    /// # Errors
    /// The tokenizer fails, or there is none.
    fn text(&self, ids: &[u32]) -> Result<String, ModelError>;
}

impl TokenText for TextTokenizer {
    fn stop_ids(&self) -> &BTreeSet<u32> {
        self.stop_ids()
    }

    fn text(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.decode(ids)
    }
}

/// A set of stop tokens without a tokenizer: stop strings are refused.
impl TokenText for BTreeSet<u32> {
    fn stop_ids(&self) -> &BTreeSet<u32> {
        self
    }

    fn text(&self, _ids: &[u32]) -> Result<String, ModelError> {
        Err(ModelError::Generation("stop_strings need a tokenizer; only stop tokens were given".into()))
    }
}

/// Why a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// The last token is a stop token.
    StopToken,
    /// The last token completes the stop string `stop_strings[index]`.
    StopString {
        /// Index in `stop_strings`: the first in the list if one token completes several.
        index: usize,
    },
    /// The response has `max_new_tokens` tokens.
    Length,
}

/// A generated response.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Generated {
    /// Token ids of the response, the stop token included.
    pub token_ids: Vec<u32>,
    /// Log-probability of each token in nats, under the model's distribution at `temperature`: equal to a training pass, without
    /// [`EngineSettings::int8_activations`].
    pub logprobs: Vec<f32>,
    /// Log-probability of each token in nats, under the distribution that it was sampled from, after penalties and filters.
    /// Equal to `logprobs` where none is set; 0 with greedy decoding and beam search.
    pub behaviour_logprobs: Vec<f32>,
    /// True if the finish reason is `Length`.
    pub truncated: bool,
    /// Why the response ended; `None` if generation was stopped before its end.
    pub finish_reason: Option<FinishReason>,
}
