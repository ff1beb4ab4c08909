//! Memory of generation on a GPU: KV cache blocks and buffers of a decode step, which the engine allocates and memory plans count;
//! and admission: a response starts only if there are enough blocks to finish it.

use crate::DecoderConfig;
use crate::kv_cache::{BLOCK_TOKENS, n_splits, split_values};
use std::collections::BTreeMap;

/// KV cache capacity of a GPU: the responses whose blocks fit at once. A further response waits until others end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheRoom {
    /// Number of responses, or beams, that run at once.
    pub n_responses: usize,
    /// Number of different prompts of these responses; responses to one prompt share its blocks.
    pub n_prompts: usize,
    /// Number of tokens of the longest prompt.
    pub longest_prompt: usize,
    /// Maximum number of tokens of a response.
    pub max_new_tokens: usize,
}

impl CacheRoom {
    /// Maximum number of tokens of a sequence: the longest prompt and response.
    pub fn longest(&self) -> usize {
        self.longest_prompt + self.max_new_tokens
    }

    /// Number of KV cache blocks: those of the responses, of their prompts and one more prompt, and of `max_prefix_tokens` cached prefix
    /// tokens.
    pub fn n_blocks(&self, max_prefix_tokens: usize) -> usize {
        let prompts = (self.n_prompts + 1) * blocks_of_prompt(self.longest_prompt);
        self.n_responses * blocks_of_response(self.max_new_tokens) + prompts + max_prefix_tokens.div_ceil(BLOCK_TOKENS)
    }

    /// Bytes of the KV cache with `value_bytes` bytes per value.
    pub fn cache_bytes(&self, config: &DecoderConfig, max_prefix_tokens: usize, value_bytes: usize) -> u64 {
        let of_token = 2 * config.n_layers * config.n_kv_heads * config.head_dim * value_bytes;
        (self.n_blocks(max_prefix_tokens) * BLOCK_TOKENS * of_token) as u64
    }

    /// Bytes of all other buffers of a decode step on a GPU, without weights. `rank`: the LoRA rank, 0 without an adapter.
    pub fn work_bytes(&self, config: &DecoderConfig, rank: usize) -> u64 {
        DecodeBufferSizes::new(config, self.n_responses, self.longest()).bytes(config, 3 * rank)
    }
}

/// Maximum number of blocks of a prompt: its own, and a half-filled one of a shared prefix.
pub(super) fn blocks_of_prompt(n_tokens: usize) -> usize {
    n_tokens.div_ceil(BLOCK_TOKENS) + 1
}

/// Maximum number of blocks that a response adds to its prompt's: the prompt's last block is copied if it is not full.
pub(super) fn blocks_of_response(max_new_tokens: usize) -> usize {
    max_new_tokens.div_ceil(BLOCK_TOKENS) + 1
}

/// Maximum rows of a prefill pass. With more rows, matrix products are not faster but take more memory.
const PREFILL_ROWS: usize = 1024;

/// Maximum number of f32 values of split-K attention, which limits the rows of a prefill pass over long sequences.
const SPLIT_VALUES: usize = 1 << 24;

/// Maximum number of logits in memory: 256 rows with a vocabulary of 152,000 tokens.
const LOGITS: usize = 5 << 23;

/// Batch sizes of decode steps. Smaller batches are padded to the next size, which limits the number of captured CUDA graphs and selects
/// the same kernels for all batches of a size.
const BUCKETS: [usize; 14] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256];

/// The batch size to which a decode step of `n` sequences is padded.
pub fn bucket(n: usize) -> usize {
    BUCKETS.into_iter().find(|&size| size >= n).unwrap_or_else(|| n.next_multiple_of(BUCKETS[BUCKETS.len() - 1]))
}

/// Sizes of the buffers of a decode step on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeBufferSizes {
    /// Number of sequences in a decode step.
    pub n_sequences: usize,
    /// Maximum number of tokens in a prefill pass.
    pub n_rows: usize,
    /// Maximum number of rows of logits at a time.
    pub n_logit_rows: usize,
    /// Width of a block table: number of blocks of the longest sequence.
    pub table_width: usize,
    /// Number of splits of the longest sequence's keys in split-K (flash-decoding) attention.
    pub n_splits: usize,
}

impl DecodeBufferSizes {
    /// Sizes for `n_sequences` sequences of at most `longest` tokens.
    pub fn new(config: &DecoderConfig, n_sequences: usize, longest: usize) -> Self {
        let n_sequences = bucket(n_sequences.max(1));
        let n_splits = n_splits(longest);
        let of_row = split_values(1, config.n_heads, config.head_dim, n_splits).max(1);
        let n_rows = (SPLIT_VALUES / of_row).clamp(n_sequences, PREFILL_ROWS.max(n_sequences));
        let n_logit_rows = (LOGITS / config.vocab_size.max(1)).clamp(1, n_sequences);
        Self { n_sequences, n_rows, n_logit_rows, table_width: longest.div_ceil(BLOCK_TOKENS).max(1), n_splits }
    }

    /// Number of intermediate f32 values of split-K attention.
    pub fn n_split_values(&self, config: &DecoderConfig) -> usize {
        split_values(self.n_rows, config.n_heads, config.head_dim, self.n_splits)
    }

    /// Whether buffers of these sizes are large enough for `other`.
    pub fn holds(&self, other: &Self) -> bool {
        self.n_sequences >= other.n_sequences
            && self.table_width >= other.table_width
            && self.n_splits >= other.n_splits
    }

    fn bytes(&self, config: &DecoderConfig, lora_width: usize) -> u64 {
        let (hidden, q) = (config.hidden_size, config.n_heads * config.head_dim);
        let kv = config.n_kv_heads * config.head_dim;
        let of_row = 4 * hidden + 2 * (hidden + 2 * q + 2 * kv + 2 * config.intermediate_size + lora_width);
        let of_sequence = 4 * hidden + 2 * (q + 2 * hidden);
        let (logits, parts) = (4 * self.n_logit_rows * config.vocab_size, 4 * self.n_split_values(config));
        (self.n_rows * of_row + (self.n_sequences + 1) * of_sequence + logits + parts) as u64
    }
}

/// Reserves the blocks that running responses may need.
pub(super) struct Admission {
    n_left: usize,
    of_response: usize,
    running: BTreeMap<usize, RunningPrompt>,
}

struct RunningPrompt {
    n_responses: usize,
    n_blocks: usize,
}

impl Admission {
    /// `n_blocks`: number of blocks for responses and their prompts; `None` means unlimited.
    pub(super) fn new(n_blocks: Option<usize>, max_new_tokens: usize) -> Self {
        let n_left = n_blocks.unwrap_or(usize::MAX);
        Self { n_left, of_response: blocks_of_response(max_new_tokens), running: BTreeMap::new() }
    }

    /// Reserves the blocks of one more response to a prompt, if there are enough.
    pub(super) fn admit(&mut self, prompt: usize, n_tokens: usize) -> bool {
        let of_prompt = if self.running.contains_key(&prompt) { 0 } else { blocks_of_prompt(n_tokens) };
        let Some(n_left) = self.n_left.checked_sub(of_prompt + self.of_response) else { return false };
        self.n_left = n_left;
        let entry = self.running.entry(prompt).or_insert(RunningPrompt { n_responses: 0, n_blocks: of_prompt });
        entry.n_responses += 1;
        true
    }

    /// Frees the blocks of a finished response, and with its last response those of a prompt.
    pub(super) fn finish(&mut self, prompt: usize) {
        let Some(RunningPrompt { n_responses, n_blocks }) = self.running.get_mut(&prompt) else { return };
        *n_responses -= 1;
        self.n_left += self.of_response;
        if *n_responses == 0 {
            self.n_left += *n_blocks;
            self.running.remove(&prompt);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_sizes_are_padded_to_buckets() {
        assert_eq!([1, 3, 17, 256, 257].map(bucket), [1, 4, 24, 256, 512]);
    }

    #[test]
    fn a_shared_prompt_is_counted_once() {
        let room = CacheRoom { n_responses: 8, n_prompts: 2, longest_prompt: 100, max_new_tokens: 20 };
        // Each of 3 prompts: 7 blocks and a half-filled one. Each response: 2 blocks, and the copy of the prompt's last one.
        assert_eq!(room.n_blocks(64), 8 * 3 + 3 * 8 + 4);
    }

    #[test]
    fn a_response_waits_until_others_have_finished() {
        // A prompt of 20 tokens takes at most three blocks, a response of 16 two.
        let mut admission = Admission::new(Some(9), 16);
        assert_eq!([admission.admit(0, 20), admission.admit(0, 20), admission.admit(1, 20)], [true, true, false]);
        assert!(admission.admit(0, 20), "the prompt is counted once");
        admission.finish(0);
        admission.finish(0);
        assert!(!admission.admit(1, 20));
        admission.finish(0);
        assert!(admission.admit(1, 20) && !admission.admit(2, 20));
    }

    #[test]
    fn without_a_limit_everything_is_admitted() {
        let mut admission = Admission::new(None, 1000);
        assert!((0..1000).all(|prompt| admission.admit(prompt, 4000)));
    }
}
