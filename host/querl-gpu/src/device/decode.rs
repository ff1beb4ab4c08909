//! Attention of new tokens over keys and values that stand in blocks, which sequences that begin alike share.

use super::elementwise::same_length;
use super::gpu::Gpu;
use super::launch::Arg;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DevicePtr, DevicePtrMut};
use candle_core::{Result, bail};
use half::bf16;
use querl_model::backend::{BLOCK_TOKENS, split_values};

/// Query heads of one key-value head that a thread block takes at once: the rows of a tensor-core product.
const HEADS_AT_ONCE: usize = 16;

/// Rows that a thread block takes at once at most, where their heads leave room for it (`MOST_TOGETHER` in `cuda/decode.cuh`): what
/// several of them see is read once.
const MOST_TOGETHER: usize = 4;

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

/// Where the keys are that some rows see.
pub struct Sequences<'a> {
    /// Lines of `width` blocks, each those of a sequence in order; those behind the last that is seen are not read.
    pub tables: CudaView<'a, u32>,
    /// Blocks that a line of `tables` has room for.
    pub width: usize,
    /// Of each row its line of `tables`; `None` where each has the line of its number.
    pub lines: Option<CudaView<'a, u32>>,
    /// Tokens that each row sees, its own included; 0 leaves its result zero.
    pub lengths: CudaView<'a, u32>,
    /// See [`super::n_splits`], of at least the largest length.
    pub n_splits: usize,
}

/// Rows that a thread block takes at once, where each alone would make `n_blocks` of them: two blocks stay for each processor.
fn rows_together(group: usize, n_blocks: usize, n_processors: usize) -> usize {
    let with_room = (HEADS_AT_ONCE / group.max(1)).clamp(1, MOST_TOGETHER);
    with_room.min(n_blocks / (2 * n_processors).max(1)).max(1)
}

impl Gpu {
    /// Copies blocks to others, in all layers at once. `copies`: pairs of from and to, no block in two of them; `keys`, `values`:
    /// those of all layers, one after another.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn copy_blocks(
        &self,
        keys: &mut impl DevicePtrMut<bf16>,
        values: &mut impl DevicePtrMut<bf16>,
        copies: &impl DevicePtr<u32>,
        shape: CacheShape,
        n_layers: usize,
    ) -> Result<()> {
        same_length("copy_blocks", keys.len(), n_layers * shape.len())?;
        same_length("copy_blocks", values.len(), n_layers * shape.len())?;
        let of_block = shape.n_kv_heads * BLOCK_TOKENS * shape.head_dim;
        if !of_block.is_multiple_of(8) || !copies.len().is_multiple_of(2) {
            bail!("copy_blocks: {} numbers of blocks of {of_block} values; expected pairs and eights", copies.len());
        }
        let copies_at = self.input(copies);
        let mut args =
            [self.output(keys), self.output(values), copies_at, shape.n_blocks.into(), (of_block / 8).into()];
        // SAFETY: as `cuda/decode.cuh` declares it; numbers of blocks are held against the pool on the card.
        unsafe { self.launch("copy_blocks", [copies.len() / 2, n_layers, 2], 256, 0, &mut args) }
    }

    /// Attention of the query of each row over the keys that it sees: `(n, heads * D)`. `q`: `(n, heads * D)`.
    ///
    /// # Errors
    /// Lengths that do not fit, or heads that the kernel does not take.
    pub fn decode_attention<K: DevicePtr<bf16>>(
        &self,
        q: &impl DevicePtr<bf16>,
        keys: &K,
        values: &K,
        shape: CacheShape,
        sequences: &Sequences<'_>,
    ) -> Result<CudaSlice<bf16>> {
        let (n, mut out) = (sequences.lengths.len(), self.alloc(q.len())?);
        let n_heads = q.len() / (n * shape.head_dim).max(1);
        let mut parts = self.alloc(split_values(n, n_heads, shape.head_dim, sequences.n_splits))?;
        self.decode_attention_into(q, [keys, values], shape, sequences, &mut parts, &mut out)?;
        Ok(out)
    }

    /// The same, into memory that is there. `parts`: at least [`super::split_values`], written over.
    ///
    /// # Errors
    /// As [`Gpu::decode_attention`].
    pub fn decode_attention_into<K: DevicePtr<bf16>>(
        &self,
        q: &impl DevicePtr<bf16>,
        [keys, values]: [&K; 2],
        shape: CacheShape,
        sequences: &Sequences<'_>,
        parts: &mut impl DevicePtrMut<f32>,
        out: &mut impl DevicePtrMut<bf16>,
    ) -> Result<()> {
        let CacheShape { n_kv_heads, head_dim, n_blocks } = shape;
        let (n, n_splits) = (sequences.lengths.len(), sequences.n_splits);
        let n_heads = q.len() / (n * head_dim).max(1);
        if head_dim == 0 || !head_dim.is_multiple_of(8) || head_dim > 128 {
            bail!("decode_attention: heads of {head_dim}; expected a multiple of 8 up to 128");
        }
        if n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) || q.len() != n * n_heads * head_dim {
            bail!("decode_attention: {} queries for {n} sequences, {n_kv_heads} heads of keys", q.len());
        }
        same_length("decode_attention", out.len(), q.len())?;
        same_length("decode_attention", keys.len(), shape.len())?;
        same_length("decode_attention", values.len(), shape.len())?;
        match &sequences.lines {
            Some(lines) => same_length("decode_attention", lines.len(), n)?,
            None => same_length("decode_attention", sequences.tables.len(), n * sequences.width)?,
        }
        let places =
            [q.device_ptr(self.stream()).0, keys.device_ptr(self.stream()).0, values.device_ptr(self.stream()).0];
        if places.iter().any(|place| !place.is_multiple_of(16)) {
            bail!("decode_attention: queries, keys and values begin at multiples of 16 bytes");
        }
        if parts.len() < split_values(n, n_heads, head_dim, n_splits) {
            bail!("decode_attention: {n_splits} parts of {n} rows with room for {} values", parts.len());
        }
        let group = n_heads / n_kv_heads;
        let n_chunks = group.div_ceil(HEADS_AT_ONCE);
        let n_blocks_of_one = n_splits * n_kv_heads * n_chunks * n;
        let n_together = rows_together(group, n_blocks_of_one, self.n_processors());
        let parts_at = if n_splits > 1 { self.output(parts) } else { Arg::null() };
        let mut args = vec![self.input(q), self.input(keys), self.input(values), self.input(&sequences.tables)];
        args.push(sequences.lines.as_ref().map_or(Arg::null(), |lines| self.input(lines)));
        args.extend([self.input(&sequences.lengths), self.output(out), parts_at]);
        args.extend([n, n_together, n_heads, n_kv_heads, head_dim, sequences.width, n_blocks, n_splits].map(Arg::from));
        args.push((1.0 / (head_dim as f32).sqrt()).into());
        let names = ["decode_attention_32", "decode_attention_64", "decode_attention_96", "decode_attention_128"];
        let name = names[(head_dim - 1) / 32];
        let shared = 4 * HEADS_AT_ONCE * (head_dim + 2) * size_of::<f32>();
        // SAFETY: as `cuda/decode.cuh` declares it; blocks and lengths are held against the pool on the card, lines come from
        // whoever made the tables.
        unsafe {
            self.launch(name, [n_splits, n_kv_heads * n_chunks, n.div_ceil(n_together)], 128, shared, &mut args)?
        };
        if n_splits > 1 {
            let mut args = vec![self.output(parts), self.input(&sequences.lengths), self.output(out)];
            args.extend([n, n_heads, head_dim, n_splits].map(Arg::from));
            // SAFETY: as `cuda/decode.cuh` declares it: a warp for each head of each sequence.
            unsafe { self.launch("decode_attention_join", [(n * n_heads).div_ceil(8), 1, 1], 256, 0, &mut args)? };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::rows_together;

    #[test]
    fn rows_are_taken_together_where_there_are_enough() {
        let together = |group: usize, n_rows: usize| rows_together(group, 2 * 4 * n_rows, 132);
        assert_eq!([1, 16, 64, 256].map(|n_rows| together(7, n_rows)), [1, 1, 1, 2]);
        assert_eq!([(4, 256), (1, 256), (9, 256), (20, 256)].map(|(group, n)| together(group, n)), [4, 4, 1, 1]);
    }
}
