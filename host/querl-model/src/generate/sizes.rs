//! How much room decoding takes on a card, counted before anything is begun: by the engine, which allocates it, and by whoever plans
//! a card's memory.

use crate::DecoderConfig;
use crate::cache::{BLOCK_TOKENS, n_splits, split_values};

/// Answers for which a card has room at once. A further one waits until others end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheRoom {
    /// Answers in progress, or beams.
    pub n_answers: usize,
    /// Different prompts that they follow: what answers to one prompt share stands once.
    pub n_prompts: usize,
    /// Tokens of the longest prompt.
    pub longest_prompt: usize,
    /// Tokens of the longest answer.
    pub max_new_tokens: usize,
}

impl CacheRoom {
    /// Tokens of the longest sequence.
    pub fn longest(&self) -> usize {
        self.longest_prompt + self.max_new_tokens
    }

    /// Blocks of keys and values, with those of kept prefixes and of the one prompt that waits for its next answer.
    pub fn n_blocks(&self, max_prefix_tokens: usize) -> usize {
        let prompts = (self.n_prompts + 1) * blocks_of_prompt(self.longest_prompt);
        self.n_answers * blocks_of_answer(self.max_new_tokens) + prompts + max_prefix_tokens.div_ceil(BLOCK_TOKENS)
    }

    /// Bytes of keys and values, of which each takes `value_bytes`.
    pub fn cache_bytes(&self, config: &DecoderConfig, max_prefix_tokens: usize, value_bytes: usize) -> u64 {
        let of_token = 2 * config.n_layers * config.n_kv_heads * config.head_dim * value_bytes;
        (self.n_blocks(max_prefix_tokens) * BLOCK_TOKENS * of_token) as u64
    }

    /// Bytes of everything else that a step reads and writes on a card, but for weights; `rank`: of adapters, 0 without.
    pub fn work_bytes(&self, config: &DecoderConfig, rank: usize) -> u64 {
        Sizes::new(config, self.n_answers, self.longest()).bytes(config, 3 * rank)
    }
}

/// Most blocks that a prompt takes: its own, and one that beginnings it shares with others leave half filled.
pub(super) fn blocks_of_prompt(n_tokens: usize) -> usize {
    n_tokens.div_ceil(BLOCK_TOKENS) + 1
}

/// Most blocks that an answer adds to its prompt's: the prompt's last is copied where it is not full.
pub(super) fn blocks_of_answer(max_new_tokens: usize) -> usize {
    max_new_tokens.div_ceil(BLOCK_TOKENS) + 1
}

/// Rows of one pass over the beginnings of prompts: beyond, products are no faster and their results take more room.
const ROWS_OF_PASS: usize = 1024;

/// Values of attention in parts, f32, that bound the rows of a pass over long sequences.
const SPLIT_VALUES: usize = 1 << 24;

/// Logits that are there at once: 256 answers' of a vocabulary of 152,000 tokens.
const LOGITS: usize = 5 << 23;

/// Sequences for which steps are made: one of fewer is filled up to the next, so that few kinds of steps are recorded, and a product
/// of one kind always runs in one way.
const BUCKETS: [usize; 14] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256];

/// Sequences of the step that does `n`.
pub fn bucket(n: usize) -> usize {
    BUCKETS.into_iter().find(|&size| size >= n).unwrap_or_else(|| n.next_multiple_of(BUCKETS[BUCKETS.len() - 1]))
}

/// How large the places are that a step's kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Sequences of a step.
    pub n_units: usize,
    /// Tokens of a pass.
    pub n_rows: usize,
    /// Rows of logits.
    pub n_logit_rows: usize,
    /// Blocks of the longest sequence.
    pub width: usize,
    /// Parts of its keys.
    pub n_splits: usize,
}

impl Sizes {
    pub fn new(config: &DecoderConfig, n_sequences: usize, longest: usize) -> Self {
        let n_units = bucket(n_sequences.max(1));
        let n_splits = n_splits(longest);
        let of_row = split_values(1, config.n_heads, config.head_dim, n_splits).max(1);
        let n_rows = (SPLIT_VALUES / of_row).clamp(n_units, ROWS_OF_PASS.max(n_units));
        let n_logit_rows = (LOGITS / config.vocab_size.max(1)).clamp(1, n_units);
        Self { n_units, n_rows, n_logit_rows, width: longest.div_ceil(BLOCK_TOKENS).max(1), n_splits }
    }

    /// Values of attention in parts.
    pub fn n_split_values(&self, config: &DecoderConfig) -> usize {
        split_values(self.n_rows, config.n_heads, config.head_dim, self.n_splits)
    }

    /// Whether there is room for all that `other` has room for.
    pub fn holds(&self, other: &Self) -> bool {
        self.n_units >= other.n_units && self.width >= other.width && self.n_splits >= other.n_splits
    }

    fn bytes(&self, config: &DecoderConfig, low_width: usize) -> u64 {
        let (hidden, q) = (config.hidden_size, config.n_heads * config.head_dim);
        let kv = config.n_kv_heads * config.head_dim;
        let of_row = 4 * hidden + 2 * (hidden + 2 * q + 2 * kv + 2 * config.intermediate_size + low_width);
        let of_unit = 4 * hidden + 2 * (q + 2 * hidden);
        let (logits, parts) = (4 * self.n_logit_rows * config.vocab_size, 4 * self.n_split_values(config));
        (self.n_rows * of_row + (self.n_units + 1) * of_unit + logits + parts) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_filled_up_to_few_kinds() {
        assert_eq!([1, 3, 17, 256, 257].map(bucket), [1, 4, 24, 256, 512]);
    }

    #[test]
    fn what_answers_share_is_counted_once() {
        let room = CacheRoom { n_answers: 8, n_prompts: 2, longest_prompt: 100, max_new_tokens: 20 };
        // Seven blocks of a prompt and one half filled, three prompts; two blocks of an answer and the copy of the prompt's last.
        assert_eq!(room.n_blocks(64), 8 * 3 + 3 * 8 + 4);
    }
}
