//! [`LayerBackend`] of decoding on a GPU: few launches per layer, into buffers that are allocated once.
//!
//! Two things differ from the training backend, so that a pass can be captured as a CUDA graph and small batches are fast:
//! - Each operation has its own buffer and returns a handle to it. The residual is updated in place.
//! - What follows a product (LoRA B, DoRA's factor, bias, per-head norms, RoPE) is deferred: the activations name it, and the fused
//!   kernel of the operation that reads them (`finish_heads` before attention, `finish_gated` for SwiGLU) computes it.

use super::linear::LinearGroup;
use crate::device::{
    CacheShape, CudaSlice, CudaView, CudaViewMut, DeviceRope, DeviceWeight, Gpu, HeadNorms, Matrix, Scale, Sequences,
};
use candle_core::{Error, Result};
use half::bf16;
use querl_model::backend::{
    Attention, DecodeBufferSizes, LayerBackend, LayerContext, MaybeBorrowed, ProjectionOut, QueryRows, Rows,
};
use querl_model::{DecoderConfig, Ranks};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A preallocated buffer; clones share it.
struct Buffer<T>(Arc<Mutex<CudaSlice<T>>>);

impl<T> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Buffer<T> {
    fn lock(&self) -> MutexGuard<'_, CudaSlice<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The first `len` values of a buffer of the residual.
pub(super) struct Residual {
    buffer: Buffer<f32>,
    len: usize,
}

impl Residual {
    pub(super) fn with<R>(&self, read: impl FnOnce(&CudaView<'_, f32>) -> R) -> R {
        read(&self.buffer.lock().slice(..self.len))
    }
}

/// The first `len` values of an activation buffer, with deferred operations.
#[derive(Clone)]
pub(super) struct Activations {
    buffer: Buffer<bf16>,
    len: usize,
    /// Linear layers whose LoRA B, factors and bias are deferred.
    linears: Option<Arc<LinearGroup>>,
    /// The weight of a deferred per-head norm.
    head_norm: Option<Norm>,
}

type Norm = Arc<CudaSlice<f32>>;

/// The last row of each sequence, on the GPU; a form of [`Rows::device_rows`].
pub(super) struct LastRows {
    pub(super) words: Arc<CudaSlice<u32>>,
    pub(super) range: Range<usize>,
}

impl LastRows {
    fn indices(&self) -> CudaView<'_, u32> {
        self.words.slice(self.range.clone())
    }
}

/// Buffers for the largest forward pass: N rows, S sequences.
pub(super) struct DecodeBackend {
    gpu: Gpu,
    x: Buffer<f32>,                // (N, H), the residual
    last_x: Buffer<f32>,           // (S, H)
    rms_norm: Buffer<bf16>,        // (N, H)
    qkv: [Buffer<bf16>; 3],        // (N, heads * D), (N, kv_heads * D) twice
    last_q: Buffer<bf16>,          // (S, heads * D)
    attended: Buffer<bf16>,        // (N, heads * D)
    gate_up: [Buffer<bf16>; 2],    // (N, intermediate) each
    lora_a_out: Buffer<bf16>,      // (N, ranks of a group), of the last product
    attention_splits: Buffer<f32>, // of attention over several parts of the keys
}

impl DecodeBackend {
    pub(super) fn new(gpu: &Gpu, config: &DecoderConfig, sizes: DecodeBufferSizes, lora_width: usize) -> Result<Self> {
        let (hidden, q) = (config.hidden_size, config.n_heads * config.head_dim);
        let kv = config.n_kv_heads * config.head_dim;
        let DecodeBufferSizes { n_rows, n_sequences, .. } = sizes;
        fn new<T: Default + candle_core::cuda_backend::cudarc::driver::DeviceRepr>(
            gpu: &Gpu,
            len: usize,
        ) -> Result<Buffer<T>> {
            Ok(Buffer(Arc::new(Mutex::new(gpu.alloc(len)?))))
        }
        Ok(Self {
            gpu: gpu.clone(),
            x: new(gpu, n_rows * hidden)?,
            last_x: new(gpu, (n_sequences + 1) * hidden)?,
            rms_norm: new(gpu, n_rows * hidden)?,
            qkv: [new(gpu, n_rows * q)?, new(gpu, n_rows * kv)?, new(gpu, n_rows * kv)?],
            last_q: new(gpu, (n_sequences + 1) * q)?,
            attended: new(gpu, n_rows * q)?,
            gate_up: [new(gpu, n_rows * config.intermediate_size)?, new(gpu, n_rows * config.intermediate_size)?],
            lora_a_out: new(gpu, n_rows * lora_width)?,
            attention_splits: new(gpu, sizes.n_split_values(config))?,
        })
    }

    /// Rows of the embedding for token ids, converted to f32.
    pub(super) fn embed(&self, embedding: &DeviceWeight, ids: &CudaView<'_, u32>) -> Result<Box<Residual>> {
        let (gpu, width) = (&self.gpu, embedding.dims().1);
        let x = Residual { buffer: self.x.clone(), len: ids.len() * width };
        let mut buffer = x.buffer.lock();
        let mut out = buffer.slice_mut(..x.len);
        if let Some(values) = embedding.bf16() {
            gpu.rows_into(values, ids, width, &mut out)?;
        } else {
            let mut own = gpu.alloc(ids.len())?;
            gpu.stream().memcpy_dtod(ids, &mut own).map_err(Error::wrap)?;
            gpu.stream().memcpy_dtod(&embedding.rows_at(gpu, &own)?, &mut out).map_err(Error::wrap)?;
        }
        drop(buffer);
        Ok(Box::new(x))
    }

    fn activations(&self, buffer: &Buffer<bf16>, len: usize) -> Box<Activations> {
        Box::new(Activations { buffer: buffer.clone(), len, linears: None, head_norm: None })
    }

    /// Computes the product with the LoRA A matrices of all members.
    fn project_lora_a(&self, linears: &LinearGroup, x: &CudaView<'_, bf16>) -> Result<()> {
        let Some(a) = &linears.lora_a else { return Ok(()) };
        let n_in = linears.n_in();
        let mut buffer = self.lora_a_out.lock();
        let mut out = buffer.slice_mut(..x.len() / n_in * linears.lora_width);
        self.gpu.product(&Matrix::of(&self.gpu, x, n_in)?, &Matrix::of(&self.gpu, a, n_in)?.t(), &mut out, Scale::WRITE)
    }

    /// Adds the output of the group's only linear layer to `sum`.
    fn add_to(&self, linears: &LinearGroup, x: &CudaView<'_, bf16>, sum: &mut CudaViewMut<'_, f32>) -> Result<()> {
        let gpu = &self.gpu;
        let (member, n) = (&linears.members[0], x.len() / linears.n_in());
        self.project_lora_a(linears, x)?;
        let x = Matrix::of(gpu, x, linears.n_in())?;
        if !linears.is_plain() {
            let (mut scratch, lora_a_out) = (self.rms_norm.lock(), self.lora_a_out.lock());
            let mut y = scratch.slice_mut(..n * member.weight.dims().0);
            member.weight.multiply(gpu, &x, &mut y, Scale::WRITE)?;
            return gpu.finish_added(sum, &y, &linears.lora_a_out(&lora_a_out, n), &linears.epilogues, n);
        }
        member.weight.multiply(gpu, &x, sum, Scale::ADD)?;
        let Some(lora_b) = &member.lora_b else { return Ok(()) };
        let (lora_a_out, rank) = (self.lora_a_out.lock(), lora_b.rank);
        let lora_a_out = lora_a_out.slice(..n * rank);
        let scale = Scale { alpha: lora_b.scale, beta: 1.0 };
        gpu.product(&Matrix::of(gpu, &lora_a_out, rank)?, &Matrix::of(gpu, &lora_b.b, rank)?.t(), sum, scale)
    }
}

impl LayerBackend for DecodeBackend {
    type Residual = Box<Residual>;
    type ResidualSlice = Residual;
    type Activations = Box<Activations>;
    type ActivationSlice = Activations;
    type Norm = Norm;
    type Linears<const N: usize> = Arc<LinearGroup>;
    type LoraAOut = ();

    fn rms_norm(&self, x: &Residual, weight: &Norm, eps: f32) -> Result<Box<Activations>> {
        let y = self.activations(&self.rms_norm, x.len);
        x.with(|x| self.gpu.rms_norm_into(x, &**weight, eps, &mut y.buffer.lock().slice_mut(..y.len)))?;
        Ok(y)
    }

    fn project<const N: usize>(&self, linears: &Arc<LinearGroup>, x: &Activations) -> Result<[ProjectionOut<Self>; N]> {
        let buffers: &[Buffer<bf16>] = if N == 3 { &self.qkv } else { &self.gate_up };
        let (buffer, n_in) = (x.buffer.lock(), linears.n_in());
        let x = buffer.slice(..x.len);
        let project = |(member, buffer): (&super::linear::DecodeLinear, &Buffer<bf16>)| {
            let mut y = self.activations(buffer, x.len() / n_in * member.weight.dims().0);
            let matrix = Matrix::of(&self.gpu, &x, n_in)?;
            member.weight.multiply(&self.gpu, &matrix, &mut buffer.lock().slice_mut(..y.len), Scale::WRITE)?;
            y.linears = Some(linears.clone());
            Ok((y, ()))
        };
        let outputs: Vec<ProjectionOut<Self>> =
            linears.members.iter().zip(buffers).map(project).collect::<Result<_>>()?;
        self.project_lora_a(linears, &x)?;
        outputs.try_into().map_err(|_| Error::Msg(format!("expected {N} linear layers to give as many outputs")))
    }

    /// Queries of all rows: `finish_heads` takes queries, keys and values of the same rows, and [`PagedAttention`] selects the query rows.
    fn project_qkv(
        &self,
        qkv: &Arc<LinearGroup>,
        x: &Activations,
        _width: usize,
        _query_rows: Option<&QueryRows>,
    ) -> Result<[ProjectionOut<Self>; 3]> {
        self.project(qkv, x)
    }

    fn apply_rope(&self, x: &Activations, norm: Option<&Norm>, _: &LayerContext, _: &Rows) -> Result<Box<Activations>> {
        Ok(Box::new(Activations { head_norm: norm.cloned(), ..x.clone() }))
    }

    fn query_residual<'a>(
        &self,
        x: &'a Residual,
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<MaybeBorrowed<'a, Box<Residual>>> {
        let Some(query_rows) = query_rows else { return Ok(MaybeBorrowed::Borrowed(x)) };
        let last = query_rows.rows.device_rows.as_ref().and_then(|rows| rows.downcast_ref::<LastRows>());
        let last = last.ok_or_else(|| Error::Msg("rows on the CPU in a layer on the GPU".into()))?;
        let y = Residual { buffer: self.last_x.clone(), len: last.range.len() * width };
        x.with(|x| self.gpu.pick_into(x, &last.indices(), width, &mut y.buffer.lock().slice_mut(..y.len)))?;
        Ok(MaybeBorrowed::Owned(Box::new(y)))
    }

    fn add_projection(
        &self,
        linear: &Arc<LinearGroup>,
        x: &Activations,
        residual: &Residual,
    ) -> Result<(Box<Residual>, ())> {
        let mut sum = residual.buffer.lock();
        self.add_to(linear, &x.buffer.lock().slice(..x.len), &mut sum.slice_mut(..residual.len))?;
        Ok((Box::new(Residual { buffer: residual.buffer.clone(), len: residual.len }), ()))
    }

    /// `silu(gate) * up`, in the buffer of the gate.
    fn swiglu(&self, gate: &Activations, up: &Activations) -> Result<Box<Activations>> {
        let Some(linears) = &gate.linears else { return Err(no_projection()) };
        let n = gate.len / linears.members[0].weight.dims().0;
        let (mut gate_values, up_values, lora_a_out) = (gate.buffer.lock(), up.buffer.lock(), self.lora_a_out.lock());
        self.gpu.finish_gated(
            &mut gate_values.slice_mut(..gate.len),
            &up_values.slice(..up.len),
            &linears.lora_a_out(&lora_a_out, n),
            &linears.epilogues,
            n,
        )?;
        Ok(self.activations(&gate.buffer, gate.len))
    }

    /// Zeroes the residual itself, which is updated in place.
    fn zeros_like(&self, residual: &Residual) -> Result<Box<Residual>> {
        let mut values = residual.buffer.lock();
        self.gpu.stream().memset_zeros(&mut values.slice_mut(..residual.len)).map_err(Error::wrap)?;
        Ok(Box::new(Residual { buffer: residual.buffer.clone(), len: residual.len }))
    }

    fn all_reduce(&self, ranks: &Ranks, sum: &mut Box<Residual>) -> Result<()> {
        self.gpu.all_reduce(ranks, &mut sum.buffer.lock().slice_mut(..sum.len))
    }
}

fn no_projection() -> Error {
    Error::Msg("activations that are not outputs of linear layers; internal error, please report it".into())
}

/// Paged KV cache: keys and values of all layers in blocks, `(layers, blocks, kv_heads, 16, D)` each.
pub(super) struct KvCache {
    pub(super) keys: CudaSlice<bf16>,
    pub(super) values: CudaSlice<bf16>,
    pub(super) shape: CacheShape,
    pub(super) n_layers: usize,
}

impl KvCache {
    pub(super) fn new(gpu: &Gpu, n_layers: usize, shape: CacheShape) -> Result<Self> {
        // Uninitialised: values after a sequence's last token are never read.
        let (keys, values) = (gpu.alloc(n_layers * shape.len())?, gpu.alloc(n_layers * shape.len())?);
        Ok(Self { keys, values, shape, n_layers })
    }
}

/// Attention of one layer over the paged KV cache. Writes keys and values of the new rows into their blocks first.
pub(super) struct PagedAttention<'a> {
    pub(super) cache: &'a mut KvCache,
    pub(super) layer: usize,
    pub(super) rope: &'a DeviceRope,
    pub(super) eps: f32,
    pub(super) positions: CudaView<'a, u32>,
    pub(super) slots: CudaView<'a, u32>,
    pub(super) sequences: Sequences<'a>,
    /// The rows that are queries; `None` means all.
    pub(super) query_rows: Option<&'a LastRows>,
}

impl Attention<DecodeBackend> for PagedAttention<'_> {
    type Saved = ();

    fn attend(&mut self, backend: &DecodeBackend, [q, k, v]: [&Activations; 3]) -> Result<(Box<Activations>, ())> {
        let (Some(linears), gpu) = (&q.linears, &backend.gpu) else { return Err(no_projection()) };
        let KvCache { keys, values, shape, .. } = &mut *self.cache;
        let of_layer = self.layer * shape.len()..(self.layer + 1) * shape.len();
        let mut queries = q.buffer.lock();
        {
            let (mut k_rows, mut v_rows, lora_a_out) = (k.buffer.lock(), v.buffer.lock(), backend.lora_a_out.lock());
            gpu.finish_heads(
                [&mut queries.slice_mut(..q.len), &mut k_rows.slice_mut(..k.len), &mut v_rows.slice_mut(..v.len)],
                &linears.lora_a_out(&lora_a_out, self.slots.len()),
                &linears.epilogues,
                &HeadNorms {
                    weights: q.head_norm.as_deref().zip(k.head_norm.as_deref()).map(<[_; 2]>::from),
                    eps: self.eps,
                },
                (self.rope, &self.positions),
                &self.slots,
                [&mut keys.slice_mut(of_layer.clone()), &mut values.slice_mut(of_layer.clone())],
                *shape,
            )?;
        }
        let mut last_q = backend.last_q.lock();
        let queries = match self.query_rows {
            None => queries.slice(..q.len),
            Some(last) => {
                let (width, indices) = (q.len / self.slots.len(), last.indices());
                let len = indices.len() * width;
                gpu.pick_into(&queries.slice(..q.len), &indices, width, &mut last_q.slice_mut(..len))?;
                last_q.slice(..len)
            }
        };
        let out = backend.activations(&backend.attended, queries.len());
        let (keys, values) = (keys.slice(of_layer.clone()), values.slice(of_layer));
        gpu.decode_attention_into(
            &queries,
            [&keys, &values],
            *shape,
            &self.sequences,
            &mut *backend.attention_splits.lock(),
            &mut out.buffer.lock().slice_mut(..out.len),
        )?;
        Ok((out, ()))
    }
}
