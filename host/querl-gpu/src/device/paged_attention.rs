//! Kernels of decode steps: attention over the paged KV cache, and fused kernels for what follows the products of a layer (LoRA B, DoRA's
//! factors, biases, norms, RoPE, writing keys and values into their blocks).

use super::elementwise::{same_length, whole_rows};
use super::gpu::Gpu;
use super::launch::{Arg, THREADS};
use super::norm_rope::DeviceRope;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr,
};
use candle_core::{Result, bail};
use half::bf16;
use querl_model::backend::{BLOCK_TOKENS, split_values};

/// Query heads per key-value head that a thread block processes at once: the rows of a tensor-core product.
const HEADS_AT_ONCE: usize = 16;

/// Maximum number of rows that a thread block processes at once, if their heads leave room (`MOST_TOGETHER` in `cuda/decode.cuh`): keys
/// that several rows attend to are read once.
const MOST_TOGETHER: usize = 4;

/// Dimensions of the KV cache of one layer: keys and values are each `(blocks, kv_heads, BLOCK_TOKENS, D)` bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    pub n_blocks: usize,
    pub n_kv_heads: usize,
    /// Head size D: a multiple of 8, at most 128.
    pub head_dim: usize,
}

impl CacheShape {
    /// Number of values of a layer's keys; the values have as many.
    pub fn len(self) -> usize {
        self.n_blocks * self.n_kv_heads * BLOCK_TOKENS * self.head_dim
    }

    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// Block tables of sequences, and the tokens that each row attends to.
pub struct Sequences<'a> {
    /// Block tables, one per line of `width` block numbers in the order of a sequence's tokens; blocks after the last one in use are not
    /// read.
    pub tables: CudaView<'a, u32>,
    /// Number of block numbers in a line of `tables`.
    pub width: usize,
    /// Line of `tables` for each row; `None` if row `i` has line `i`.
    pub table_rows: Option<CudaView<'a, u32>>,
    /// Number of tokens that each row attends to, its own included; with 0 the row's result is zero.
    pub lengths: CudaView<'a, u32>,
    /// Number of splits of the keys in split-K attention: [`super::n_splits`] of at least the largest length.
    pub n_splits: usize,
}

/// Number of rows that a thread block processes at once. `n_blocks`: number of blocks with one row each. At least two blocks per processor
/// remain.
fn rows_together(group: usize, n_blocks: usize, n_processors: usize) -> usize {
    let with_room = (HEADS_AT_ONCE / group.max(1)).clamp(1, MOST_TOGETHER);
    with_room.min(n_blocks / (2 * n_processors).max(1)).max(1)
}

impl Gpu {
    /// Copies blocks within the KV caches of all layers. `copies`: (source, destination) pairs of block numbers, with no block in two of
    /// them; `keys`, `values`: those of all layers, concatenated.
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
            bail!(
                "copy_blocks: {} block numbers, {of_block} values per block; \
                 expected (source, destination) pairs and a multiple of 8 values",
                copies.len()
            );
        }
        let copies_at = self.input(copies);
        let mut args =
            [self.output(keys), self.output(values), copies_at, shape.n_blocks.into(), (of_block / 8).into()];
        // SAFETY: as `cuda/decode.cuh` declares it; block numbers are checked against the pool on the GPU.
        unsafe { self.launch("copy_blocks", [copies.len() / 2, n_layers, 2], 256, 0, &mut args) }
    }

    /// Attention of each row's query over the tokens that the row attends to. `q`: `(n, heads * D)`; returns `(n, heads * D)`.
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

    /// Like [`Gpu::decode_attention`], into existing memory. `parts`: scratch memory of at least [`super::split_values`] values.
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
        match &sequences.table_rows {
            Some(table_rows) => same_length("decode_attention", table_rows.len(), n)?,
            None => same_length("decode_attention", sequences.tables.len(), n * sequences.width)?,
        }
        let places =
            [q.device_ptr(self.stream()).0, keys.device_ptr(self.stream()).0, values.device_ptr(self.stream()).0];
        if places.iter().any(|place| !place.is_multiple_of(16)) {
            bail!("decode_attention: queries, keys and values must be aligned to 16 bytes");
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
        args.push(sequences.table_rows.as_ref().map_or(Arg::null(), |table_rows| self.input(table_rows)));
        args.extend([self.input(&sequences.lengths), self.output(out), parts_at]);
        args.extend([n, n_together, n_heads, n_kv_heads, head_dim, sequences.width, n_blocks, n_splits].map(Arg::from));
        args.push((1.0 / (head_dim as f32).sqrt()).into());
        let names = ["decode_attention_32", "decode_attention_64", "decode_attention_96", "decode_attention_128"];
        let name = names[(head_dim - 1) / 32];
        let shared = 4 * HEADS_AT_ONCE * (head_dim + 2) * size_of::<f32>();
        // SAFETY: as `cuda/decode.cuh` declares it; blocks and lengths are checked against the pool on the GPU, table rows by
        // the caller.
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

/// What is applied to the product `y` of a linear layer: `(y + scale * B lora_a_out) * factor + bias`, where LoRA, factor and bias may each
/// be absent. It holds GPU addresses: see [`Epilogue::new`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epilogue {
    lora_b: u64,
    bias: u64,
    factor: u64,
    rank: i32,
    first: i32,
    scale: f32,
    padding: i32,
}

// SAFETY: as `cuda/finish.cuh` declares it: plain numbers, and every byte is a field or explicit padding.
unsafe impl DeviceRepr for Epilogue {}

/// LoRA B of a linear layer, `(out, rank)`, rounded to bf16.
pub struct LoraB {
    pub b: CudaSlice<bf16>,
    pub rank: usize,
    /// First column of this layer's values in the LoRA A output of its group.
    pub first: usize,
    pub scale: f32,
}

impl Epilogue {
    /// The epilogue of a linear layer with `n_out` outputs.
    ///
    /// # Safety
    /// The memory of the arguments must live as long as a kernel may read a table that contains this epilogue.
    pub unsafe fn new(
        gpu: &Gpu,
        n_out: usize,
        lora_b: Option<&LoraB>,
        bias: Option<&CudaSlice<f32>>,
        factor: Option<&CudaSlice<f32>>,
    ) -> Result<Self> {
        let address = |values: &CudaSlice<f32>| -> Result<u64> {
            same_length("epilogue", values.len(), n_out)?;
            Ok(values.device_ptr(gpu.stream()).0)
        };
        let bias = bias.map(address).transpose()?.unwrap_or(0);
        let factor = factor.map(address).transpose()?.unwrap_or(0);
        let Some(LoraB { b, rank, first, scale }) = lora_b else {
            return Ok(Self { lora_b: 0, bias, factor, rank: 0, first: 0, scale: 0.0, padding: 0 });
        };
        same_length("epilogue", b.len(), n_out * rank)?;
        let lora_b = b.device_ptr(gpu.stream()).0;
        Ok(Self { lora_b, bias, factor, rank: *rank as i32, first: *first as i32, scale: *scale, padding: 0 })
    }
}

/// LoRA A's output of a group of linear layers, `(n, width)`; empty without an adapter.
pub struct LoraAOut<'a> {
    pub values: CudaView<'a, bf16>,
    /// Sum of the LoRA ranks of the group.
    pub width: usize,
}

/// Weights of the per-head norms of queries and keys, and their epsilon.
pub struct HeadNorms<'a> {
    /// Weights of the norms of queries and of keys, `(D)` each; `None` for models without them.
    pub weights: Option<[&'a CudaSlice<f32>; 2]>,
    /// Epsilon, added to the mean square.
    pub eps: f32,
}

/// Rows per block of `finish_heads`, and of the other kernels.
const ROWS_OF_HEADS: usize = 16;
const ROWS: usize = 8;

impl Gpu {
    /// Applies epilogues, per-head norms and RoPE to queries `(n, heads * D)` in place, and to keys and values `(n, kv_heads * D)`, which
    /// are written to the cache slots `slots`; a slot outside the cache is skipped. `epilogues`: those of q_proj, k_proj and v_proj.
    #[allow(clippy::too_many_arguments)] // a layer has this many parts
    pub fn finish_heads(
        &self,
        [q, k, v]: [&mut CudaViewMut<'_, bf16>; 3],
        rows: &LoraAOut<'_>,
        epilogues: &CudaSlice<Epilogue>,
        norms: &HeadNorms<'_>,
        (rope, positions): (&DeviceRope, &CudaView<'_, u32>),
        slots: &CudaView<'_, u32>,
        [keys, values]: [&mut CudaViewMut<'_, bf16>; 2],
        shape: CacheShape,
    ) -> Result<()> {
        let CacheShape { n_blocks, n_kv_heads, head_dim } = shape;
        let (n, (cos, sin, of_rope)) = (slots.len(), rope.tables());
        same_length("finish_heads", of_rope, head_dim)?;
        same_length("finish_heads", positions.len(), n)?;
        same_length("finish_heads", epilogues.len(), 3)?;
        for len in [k.len(), v.len()] {
            same_length("finish_heads", len, n * n_kv_heads * head_dim)?;
        }
        for len in [keys.len(), values.len()] {
            same_length("finish_heads", len, shape.len())?;
        }
        let n_heads = whole_rows("finish_heads", q.len(), (n * head_dim).max(1))?;
        rows.check("finish_heads", n)?;
        if head_dim > 128 || !head_dim.is_multiple_of(2) {
            bail!("finish_heads: head_dim is {head_dim}; expected an even number up to 128");
        }
        let [q_norm, k_norm] = match norms.weights {
            Some(weights) => {
                same_length("finish_heads", weights[0].len(), head_dim)?;
                same_length("finish_heads", weights[1].len(), head_dim)?;
                weights.map(|weight| self.input(weight))
            }
            None => [Arg::null(), Arg::null()],
        };
        let mut args = vec![self.output(q), self.output(k), self.output(v)];
        args.extend([self.input(&rows.values), rows.width.into(), self.input(epilogues), q_norm, k_norm]);
        args.extend([self.input(cos), self.input(sin), self.input(positions), self.input(slots)]);
        args.extend([self.output(keys), self.output(values)]);
        args.extend([n, n_heads, n_kv_heads, head_dim, n_blocks].map(Arg::from));
        args.push(norms.eps.into());
        let grid = [n_heads + 2 * n_kv_heads, n.div_ceil(ROWS_OF_HEADS), 1];
        // SAFETY: as `cuda/finish.cuh` declares it, lengths as checked; slots are checked against the pool on the GPU, positions
        // by the caller.
        unsafe { self.launch("finish_heads", grid, THREADS, 0, &mut args) }
    }

    /// Applies epilogues to gate and up, and writes `silu(gate) * up` `(n, out)` over the gate. `epilogues`: those of gate_proj and
    /// up_proj.
    pub fn finish_gated(
        &self,
        gate: &mut CudaViewMut<'_, bf16>,
        up: &impl DevicePtr<bf16>,
        rows: &LoraAOut<'_>,
        epilogues: &CudaSlice<Epilogue>,
        n: usize,
    ) -> Result<()> {
        same_length("finish_gated", up.len(), gate.len())?;
        same_length("finish_gated", epilogues.len(), 2)?;
        rows.check("finish_gated", n)?;
        let n_out = gate.len() / n.max(1);
        same_length("finish_gated", gate.len(), n * n_out)?;
        let mut args = vec![self.output(gate), self.input(up), self.input(&rows.values), rows.width.into()];
        args.extend([self.input(epilogues), n.into(), n_out.into()]);
        // SAFETY: as `cuda/finish.cuh` declares it, lengths as checked.
        unsafe { self.launch("finish_gated", grid_of(n, n_out), THREADS, 0, &mut args) }
    }

    /// Applies an epilogue to `y` `(n, out)` and adds the result to `sum`.
    pub fn finish_added(
        &self,
        sum: &mut impl DevicePtrMut<f32>,
        y: &impl DevicePtr<bf16>,
        rows: &LoraAOut<'_>,
        epilogue: &CudaSlice<Epilogue>,
        n: usize,
    ) -> Result<()> {
        same_length("finish_added", y.len(), sum.len())?;
        same_length("finish_added", epilogue.len(), 1)?;
        rows.check("finish_added", n)?;
        let n_out = sum.len() / n.max(1);
        same_length("finish_added", sum.len(), n * n_out)?;
        let mut args = vec![self.output(sum), self.input(y), self.input(&rows.values), rows.width.into()];
        args.extend([self.input(epilogue), n.into(), n_out.into()]);
        // SAFETY: as `cuda/finish.cuh` declares it, lengths as checked.
        unsafe { self.launch("finish_added", grid_of(n, n_out), THREADS, 0, &mut args) }
    }
}

fn grid_of(n: usize, n_out: usize) -> [usize; 3] {
    [n_out.div_ceil(THREADS), n.div_ceil(ROWS), 1]
}

impl LoraAOut<'_> {
    fn check(&self, what: &str, n: usize) -> Result<()> {
        same_length(what, self.values.len(), n * self.width)
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
