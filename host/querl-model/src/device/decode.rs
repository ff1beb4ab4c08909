//! Attention of one new token of each sequence over keys and values that stand in blocks, which sequences that begin alike share.

use super::elementwise::same_length;
use super::gpu::Gpu;
use super::launch::Arg;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle_core::{Result, bail};
use half::bf16;

/// Tokens of a block of keys or values.
pub const BLOCK_TOKENS: usize = 16;

/// Keys that one thread block attends to. A constant: what a sequence gets does not depend on the sequences beside it.
const SPLIT_KEYS: usize = 256;

/// Query heads of one key-value head that a thread block takes at once: the rows of a tensor-core product.
const HEADS_AT_ONCE: usize = 16;

/// How keys and values of one layer stand: each `(blocks, kv_heads, BLOCK_TOKENS, D)` bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Blocks of the pool.
    pub n_blocks: usize,
    /// Heads of keys and values.
    pub n_kv_heads: usize,
    /// A multiple of 8, at most 128.
    pub head_dim: usize,
}

impl CacheShape {
    /// Values of the keys, and as many of the values.
    pub fn len(self) -> usize {
        self.n_blocks * self.n_kv_heads * BLOCK_TOKENS * self.head_dim
    }

    /// Whether there is no room at all.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// Where the keys of some sequences are.
pub struct Sequences {
    /// Blocks of each sequence in order, `(n, width)`; those behind the last of a sequence are not read.
    pub tables: CudaSlice<u32>,
    /// Blocks that a line of `tables` has room for.
    pub width: usize,
    /// Tokens of each sequence whose keys are there, the new one included; 0 leaves its result zero.
    pub lengths: CudaSlice<u32>,
    /// At least the largest of them.
    pub max_length: usize,
}

impl Gpu {
    /// Puts keys or values `(n, kv_heads * D)` into the cache, each row in the place `block * BLOCK_TOKENS + token` that `slots`
    /// names; a place outside the pool is left out.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn store(
        &self,
        rows: &impl DevicePtr<bf16>,
        slots: &impl DevicePtr<u32>,
        cache: &mut impl DevicePtrMut<bf16>,
        shape: CacheShape,
    ) -> Result<()> {
        let CacheShape { n_blocks, n_kv_heads, head_dim } = shape;
        same_length("store", rows.len(), slots.len() * n_kv_heads * head_dim)?;
        same_length("store", cache.len(), shape.len())?;
        let [rows_at, slots_at] = [self.input(rows), self.input(slots)];
        let mut args = [
            rows_at,
            slots_at,
            self.output(cache),
            slots.len().into(),
            n_kv_heads.into(),
            head_dim.into(),
            n_blocks.into(),
        ];
        let n_blocks = (slots.len() * n_kv_heads).div_ceil(8);
        // SAFETY: as `cuda/decode.cuh` declares it: a warp for each head of each row; slots are checked on the card.
        unsafe { self.launch("store", [n_blocks, 1, 1], 256, 0, &mut args) }
    }

    /// Attention of one query of each sequence over all its keys: `(n, heads * D)`. `q`: `(n, heads * D)`.
    ///
    /// # Errors
    /// Lengths that do not fit, or heads that the kernel does not take.
    pub fn decode_attention(
        &self,
        q: &impl DevicePtr<bf16>,
        keys: &impl DevicePtr<bf16>,
        values: &impl DevicePtr<bf16>,
        shape: CacheShape,
        sequences: &Sequences,
    ) -> Result<CudaSlice<bf16>> {
        let CacheShape { n_kv_heads, head_dim, n_blocks } = shape;
        let n = sequences.lengths.len();
        let n_heads = q.len() / (n * head_dim).max(1);
        if head_dim == 0 || !head_dim.is_multiple_of(8) || head_dim > 128 {
            bail!("decode_attention: heads of {head_dim}; expected a multiple of 8 up to 128");
        }
        if n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) || q.len() != n * n_heads * head_dim {
            bail!("decode_attention: {} queries for {n} sequences, {n_kv_heads} heads of keys", q.len());
        }
        same_length("decode_attention", keys.len(), shape.len())?;
        same_length("decode_attention", values.len(), shape.len())?;
        same_length("decode_attention", sequences.tables.len(), n * sequences.width)?;
        let places =
            [q.device_ptr(self.stream()).0, keys.device_ptr(self.stream()).0, values.device_ptr(self.stream()).0];
        if places.iter().any(|place| !place.is_multiple_of(16)) {
            bail!("decode_attention: queries, keys and values begin at multiples of 16 bytes");
        }
        if sequences.max_length > sequences.width * BLOCK_TOKENS {
            bail!("decode_attention: {} tokens in {} blocks", sequences.max_length, sequences.width);
        }
        let n_splits = sequences.max_length.div_ceil(SPLIT_KEYS).max(1);
        let n_chunks = (n_heads / n_kv_heads).div_ceil(HEADS_AT_ONCE);
        let mut out = self.alloc(q.len())?;
        let mut parts = self.alloc::<f32>(if n_splits > 1 { n * n_heads * n_splits * (head_dim + 2) } else { 0 })?;
        let parts_at = if n_splits > 1 { self.output(&mut parts) } else { Arg::null() };
        let mut args = vec![self.input(q), self.input(keys), self.input(values)];
        args.extend([self.input(&sequences.tables), self.input(&sequences.lengths)]);
        args.extend([self.output(&mut out), parts_at]);
        args.extend([n_heads, n_kv_heads, head_dim, sequences.width, n_blocks, n_splits].map(Arg::from));
        args.push((1.0 / (head_dim as f32).sqrt()).into());
        let names = ["decode_attention_32", "decode_attention_64", "decode_attention_96", "decode_attention_128"];
        let name = names[(head_dim - 1) / 32];
        let shared = 4 * HEADS_AT_ONCE * (head_dim + 2) * size_of::<f32>();
        // SAFETY: as `cuda/decode.cuh` declares it; tables and lengths are held against the pool on the card.
        unsafe { self.launch(name, [n_splits, n_kv_heads * n_chunks, n], 128, shared, &mut args)? };
        if n_splits > 1 {
            let mut args = vec![self.input(&parts), self.input(&sequences.lengths), self.output(&mut out)];
            args.extend([n, n_heads, head_dim, n_splits].map(Arg::from));
            // SAFETY: as `cuda/decode.cuh` declares it: a warp for each head of each sequence.
            unsafe { self.launch("decode_attention_join", [(n * n_heads).div_ceil(8), 1, 1], 256, 0, &mut args)? };
        }
        Ok(out)
    }
}
