//! The memory of a step other than the layers' buffers, and the layout of its frame.

use super::backend::DecodeBackend;
use crate::device::{CudaSlice, Frame, Gpu, ReadBack};
use candle_core::Result;
use half::bf16;
use querl_model::DecoderConfig;
use querl_model::backend::DecodeBufferSizes;
use std::ops::Range;

/// Lengths of the lists that a forward pass reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PassShape {
    pub(super) n_rows: usize,
    /// Number of sequences in the pass: rows of the block tables.
    pub(super) n_tables: usize,
    /// Number of blocks in a row of the block tables.
    pub(super) table_width: usize,
    /// Whether each row of the pass is the only one of its sequence.
    pub(super) is_one_each: bool,
    /// Number of responses for which a token is sampled.
    pub(super) n_samples: usize,
    /// Whether response `i` continues hidden state `i`, for all responses.
    pub(super) is_in_order: bool,
    /// Row length of the token history uploaded per response for the logits processors; 0 if none of them reads it.
    pub(super) n_response_tokens: usize,
    pub(super) n_copies: usize,
}

/// Offsets of the lists in a frame, in words of 4 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FrameLayout {
    /// A uniform random number from 0 to 1 for each response, in f64 (two words).
    pub(super) uniforms: Range<usize>,
    pub(super) tokens: Range<usize>,
    pub(super) positions: Range<usize>,
    /// KV cache slot of each row.
    pub(super) slots: Range<usize>,
    /// Number of tokens that each row attends to.
    pub(super) lengths: Range<usize>,
    /// Index into the block tables for each row; empty if row `i` has table `i`.
    pub(super) table_rows: Range<usize>,
    /// Index of each sequence's last row, and the sequence's length; empty if each row is its sequence's only one.
    pub(super) last_rows: Range<usize>,
    pub(super) last_lengths: Range<usize>,
    pub(super) tables: Range<usize>,
    /// Index of the hidden state that each response continues; empty if they are in order.
    pub(super) hidden_rows: Range<usize>,
    /// Number of generated tokens of each response.
    pub(super) n_generated: Range<usize>,
    /// Copy-on-write block copies, each a (source, destination) pair.
    pub(super) copies: Range<usize>,
    /// Generated tokens of the responses, for the logits processors.
    pub(super) responses: Range<usize>,
    pub(super) len: usize,
}

impl FrameLayout {
    pub(super) fn new(shape: &PassShape) -> Self {
        let mut len = 0;
        let mut next = |n: usize| {
            len += n;
            len - n..len
        };
        let PassShape { n_rows, n_tables, n_samples, .. } = *shape;
        let n_last = if shape.is_one_each { 0 } else { n_tables };
        let layout = Self {
            uniforms: next(2 * n_samples),
            tokens: next(n_rows),
            positions: next(n_rows),
            slots: next(n_rows),
            lengths: next(n_rows),
            table_rows: next(if shape.is_one_each { 0 } else { n_rows }),
            last_rows: next(n_last),
            last_lengths: next(n_last),
            tables: next(n_tables * shape.table_width),
            hidden_rows: next(if shape.is_in_order { 0 } else { n_samples }),
            n_generated: next(n_samples),
            copies: next(2 * shape.n_copies),
            responses: next(n_samples * shape.n_response_tokens),
            len: 0,
        };
        Self { len, ..layout }
    }
}

/// Memory of a policy's decode steps, allocated once for the largest step, of S sequences.
pub(super) struct StepBuffers {
    pub(super) sizes: DecodeBufferSizes,
    pub(super) backend: DecodeBackend,
    pub(super) hidden: CudaSlice<bf16>, // (S + 1, H), after the final norm
    pub(super) picked: CudaSlice<bf16>, // (S, H), by response
    pub(super) logits: CudaSlice<f32>,  // (part of S, V)
    /// Logits before penalties, `(S, n_response_tokens)`.
    pub(super) original_logits: CudaSlice<f32>,
    pub(super) frame: Frame,
    pub(super) read_back: ReadBack,
    /// Layout of the last frame that was sent.
    pub(super) layout: FrameLayout,
    /// Number of tokens of the longest sequence in that frame.
    pub(super) longest: usize,
    n_response_tokens: usize,
}

impl StepBuffers {
    pub(super) fn new(
        gpu: &Gpu,
        config: &DecoderConfig,
        sizes: DecodeBufferSizes,
        lora_width: usize,
        n_response_tokens: usize,
    ) -> Result<Self> {
        let (DecodeBufferSizes { n_sequences, n_rows, n_logit_rows, table_width, .. }, hidden) =
            (sizes, config.hidden_size);
        let largest = FrameLayout::new(&PassShape {
            n_rows,
            n_tables: n_sequences + 1,
            table_width,
            n_samples: n_sequences,
            n_response_tokens,
            n_copies: n_sequences + 1,
            ..PassShape::default()
        });
        Ok(Self {
            sizes,
            backend: DecodeBackend::new(gpu, config, sizes, lora_width)?,
            // Padding rows of a step are computed but not read.
            hidden: gpu.zeros((n_sequences + 1) * hidden)?,
            picked: gpu.alloc(n_sequences * hidden)?,
            logits: gpu.alloc(n_logit_rows * config.vocab_size)?,
            original_logits: gpu.alloc(n_sequences * n_response_tokens)?,
            frame: Frame::new(gpu, largest.len)?,
            read_back: ReadBack::new(gpu, 3 * n_sequences)?,
            layout: FrameLayout::new(&PassShape::default()),
            longest: 0,
            n_response_tokens,
        })
    }

    /// Whether these buffers are large enough for decode steps of `sizes` with `n_response_tokens` tokens per response.
    pub(super) fn fits(&self, sizes: &DecodeBufferSizes, n_response_tokens: usize) -> bool {
        self.sizes.holds(sizes) && self.n_response_tokens >= n_response_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_a_captured_step_have_the_same_offsets_whatever_follows() {
        let shape = PassShape {
            n_rows: 4,
            n_tables: 4,
            table_width: 3,
            is_one_each: true,
            n_samples: 4,
            is_in_order: true,
            ..PassShape::default()
        };
        let few = FrameLayout::new(&shape);
        let many = FrameLayout::new(&PassShape { n_copies: 2, n_response_tokens: 5, ..shape });
        assert_eq!((few.tables.clone(), few.len), (24..36, 40));
        assert_eq!((many.tables, many.copies, many.responses, many.len), (24..36, 40..44, 44..64, 64));
    }
}
