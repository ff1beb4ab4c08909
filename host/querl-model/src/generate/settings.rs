//! What is asked of a generation, and what comes of it.

use crate::{ModelError, TextTokenizer};
use std::collections::BTreeSet;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decoding {
    /// The likeliest token that the limits leave.
    Greedy,
    /// Drawn from the distribution that temperature, limits and filters leave.
    Sample,
    /// The sequence that is likeliest by its length, as far as `n_beams` followed side by side find it. Filters do not count.
    Beam {
        /// At least 1.
        n_beams: usize,
        /// The sum of log-probabilities is divided by the length to this power: above 0 favours longer answers.
        length_penalty: f64,
    },
}

/// What shapes the distribution that tokens are chosen from, and how long an answer may be.
///
/// Applied to the logits of each token in this order: `repetition_penalty`, `no_repeat_ngram_size`, `min_new_tokens`; then,
/// where tokens are drawn, `temperature`, `top_k`, `top_p`. All of them look at the answer alone, never at the prompt.
///
/// Source: transformers' `generation/logits_process.py`, in the order of `_get_logits_processor`.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingSettings {
    /// Divides the logits of drawn tokens, and of every reported log-probability. Above 0.
    pub temperature: f64,
    /// Below 1: the likeliest tokens that make up this share; the one that crosses it is kept.
    pub top_p: f64,
    /// Above 0: so many of the likeliest tokens, and those as likely as the last of them.
    pub top_k: usize,
    /// Divides the logits above zero, and multiplies those below, of tokens that the answer has; 1 changes nothing.
    pub repetition_penalty: f64,
    /// Above 0: no sequence of so many tokens is written twice in one answer.
    pub no_repeat_ngram_size: usize,
    /// No answer ends before so many tokens.
    pub min_new_tokens: usize,
    /// Longer answers are cut off and marked. At least 1.
    pub max_new_tokens: usize,
    /// An answer ends with the token that completes one of these.
    pub stop_strings: Vec<String>,
}

impl Default for SamplingSettings {
    /// The whole distribution at temperature 1, at most 150 tokens.
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
    /// `text` up to the first stop string in it: what is left of an answer once its end is cut off.
    pub fn before_stop<'t>(&self, text: &'t str) -> &'t str {
        let end = self.stop_strings.iter().filter_map(|stop| text.find(stop.as_str())).min();
        &text[..end.unwrap_or(text.len())]
    }

    pub(super) fn check(&self) -> Result<(), ModelError> {
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
            "stop_strings holds an empty string; it would end every answer at once".to_owned()
        } else {
            return Ok(());
        };
        Err(ModelError::Generation(wrong))
    }
}

/// Answers to generate to one prompt.
#[derive(Debug, Clone, Copy)]
pub struct GenerationRequest<'a> {
    /// Tokens before the answer; at least one.
    pub prompt: &'a [u32],
    /// Seeds the draws of these answers, each on a stream of its own: what comes does not depend on what else is generated.
    pub seed: u64,
    /// How many answers. Greedy decoding gives equal ones, beam search its `n` best, at most `n_beams`.
    pub n: usize,
}

/// What is known of tokens beyond their ids: which end an answer, and what they read.
pub trait TokenText: Sync {
    /// Tokens that end an answer.
    fn stop_ids(&self) -> &BTreeSet<u32>;

    /// Text of an answer's tokens.
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

/// Stop tokens alone: stop strings are refused.
impl TokenText for BTreeSet<u32> {
    fn stop_ids(&self) -> &BTreeSet<u32> {
        self
    }

    fn text(&self, _ids: &[u32]) -> Result<String, ModelError> {
        Err(ModelError::Generation("stop_strings need a tokenizer; only stop tokens were given".into()))
    }
}

/// What ended an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndedBy {
    /// A stop token, its last.
    StopToken,
    /// `stop_strings[index]`, which its last token completes.
    StopString {
        /// Which of them; the first in the list where several appear at once.
        index: usize,
    },
    /// `max_new_tokens`.
    Length,
}

/// One answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// Its tokens, the stop token included.
    pub token_ids: Vec<u32>,
    /// Log-probability of each token in nats, under the model's whole distribution at `temperature`: what a training pass
    /// computes of it.
    pub logprobs: Vec<f32>,
    /// Log-probability of each token in nats, under the distribution that it was drawn from: what limits and filters leave,
    /// with its sum made 1. Equal to `logprobs` where none is set; 0 where nothing was drawn.
    pub behaviour_logprobs: Vec<f32>,
    /// True where `max_new_tokens` ended it.
    pub truncated: bool,
    /// What ended it.
    pub ended_by: EndedBy,
}
