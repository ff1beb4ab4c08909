//! The memory of steps: allocated once, for the largest.

use super::fields::{Counts, Fields};
use crate::device::{CacheShape, CudaSlice, Frame, Gpu, ReadBack};
use candle_core::Result;
use half::bf16;
use querl_model::DecoderConfig;
use querl_model::backend::DecodeBufferSizes;

/// Keys and values of all layers, `(layers, blocks, kv_heads, 16, D)` each.
pub(super) struct Cache {
    pub(super) keys: CudaSlice<bf16>,
    pub(super) values: CudaSlice<bf16>,
    pub(super) shape: CacheShape,
    pub(super) n_layers: usize,
}

impl Cache {
    pub(super) fn new(gpu: &Gpu, n_layers: usize, shape: CacheShape) -> Result<Self> {
        // What stands behind a sequence's last token is never read, so nothing has to be cleared.
        let (keys, values) = (gpu.alloc(n_layers * shape.len())?, gpu.alloc(n_layers * shape.len())?);
        Ok(Self { keys, values, shape, n_layers })
    }
}

/// What the kernels of a step read and write; N rows, S sequences.
pub(super) struct Places {
    pub(super) sizes: DecodeBufferSizes,
    pub(super) x: CudaSlice<f32>,         // (N, H), the residual
    pub(super) last_x: CudaSlice<f32>,    // (S, H)
    pub(super) normed: CudaSlice<bf16>,   // (N, H)
    pub(super) q: CudaSlice<bf16>,        // (N, heads * D)
    pub(super) last_q: CudaSlice<bf16>,   // (S, heads * D)
    pub(super) k: CudaSlice<bf16>,        // (N, kv_heads * D)
    pub(super) v: CudaSlice<bf16>,        // (N, kv_heads * D)
    pub(super) attended: CudaSlice<bf16>, // (N, heads * D)
    pub(super) parts: CudaSlice<f32>,     // of attention
    pub(super) gate: CudaSlice<bf16>,     // (N, intermediate)
    pub(super) up: CudaSlice<bf16>,       // (N, intermediate)
    pub(super) low: CudaSlice<bf16>,      // (N, ranks of a group)
    pub(super) hidden: CudaSlice<bf16>,   // (S + 1, H), after the final norm
    pub(super) taken: CudaSlice<bf16>,    // (S, H), by answer
    pub(super) logits: CudaSlice<f32>,    // (some of S, V)
    pub(super) originals: CudaSlice<f32>, // (S, tokens of an answer), where limits look at answers
    pub(super) frame: Frame,
    pub(super) read_back: ReadBack,
    /// Of the frame that was sent last.
    pub(super) fields: Fields,
    /// Tokens of the longest sequence of that frame.
    pub(super) longest: usize,
    n_answer_tokens: usize,
}

impl Places {
    pub(super) fn new(
        gpu: &Gpu,
        config: &DecoderConfig,
        sizes: DecodeBufferSizes,
        low_width: usize,
        n_answer_tokens: usize,
    ) -> Result<Self> {
        let DecodeBufferSizes { n_sequences: n_units, n_rows, n_logit_rows, table_width: width, .. } = sizes;
        let (hidden, q) = (config.hidden_size, config.n_heads * config.head_dim);
        let kv = config.n_kv_heads * config.head_dim;
        let largest = Fields::new(&Counts {
            n_rows,
            n_lines: n_units + 1,
            width,
            n_draws: n_units,
            n_answer_tokens,
            n_copies: n_units + 1,
            ..Counts::default()
        });
        Ok(Self {
            sizes,
            x: gpu.alloc(n_rows * hidden)?,
            last_x: gpu.alloc((n_units + 1) * hidden)?,
            normed: gpu.alloc(n_rows * hidden)?,
            q: gpu.alloc(n_rows * q)?,
            last_q: gpu.alloc((n_units + 1) * q)?,
            k: gpu.alloc(n_rows * kv)?,
            v: gpu.alloc(n_rows * kv)?,
            attended: gpu.alloc(n_rows * q)?,
            parts: gpu.alloc(sizes.n_split_values(config))?,
            gate: gpu.alloc(n_rows * config.intermediate_size)?,
            up: gpu.alloc(n_rows * config.intermediate_size)?,
            low: gpu.alloc(n_rows * low_width)?,
            // Rows that a step is filled up with are normed and multiplied, and nobody reads what comes.
            hidden: gpu.zeros((n_units + 1) * hidden)?,
            taken: gpu.alloc(n_units * hidden)?,
            logits: gpu.alloc(n_logit_rows * config.vocab_size)?,
            originals: gpu.alloc(n_units * n_answer_tokens)?,
            frame: Frame::new(gpu, largest.len)?,
            read_back: ReadBack::new(gpu, 3 * n_units)?,
            fields: Fields::new(&Counts::default()),
            longest: 0,
            n_answer_tokens,
        })
    }

    /// Whether they do for steps of these sizes.
    pub(super) fn hold(&self, sizes: &DecodeBufferSizes, n_answer_tokens: usize) -> bool {
        self.sizes.holds(sizes) && self.n_answer_tokens >= n_answer_tokens
    }
}
