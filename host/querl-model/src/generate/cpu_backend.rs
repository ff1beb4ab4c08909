//! Inference on the CPU: weights of a policy, and the backend that runs transformer layers with them. No graph, no gradients;
//! LoRA A of all linear layers with the same input is one product; buffers are reused.

use crate::decoder::{AdaptedLayer, AdaptedLinear};
use crate::kernels::simd::{exp_or_zero, vectorised};
use crate::kernels::{FrozenWeight, LANES, Weight, with_floats};
use crate::transformer::{LayerBackend, LayerContext, MaybeBorrowed, ProjectionOut, QueryRows, Rows, TransformerLayer};
use crate::{Decoder, DecoderConfig, LoraAdapter, ModelError, Ranks};
use candle_core::{Error, Result, Tensor};
use querl_core::config::BaseDtype;
use rayon::prelude::*;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A policy ready for decoding. Later training does not change it.
pub(super) struct PolicyWeights {
    pub(super) config: DecoderConfig,
    pub(super) context: LayerContext,
    pub(super) layers: Vec<TransformerLayer<CpuInference>>,
    pub(super) final_norm: Vec<f32>,
    pub(super) head: FrozenWeight,
    embedding: FrozenWeight,
    /// Free buffers for logits: fresh pages for each decode step cost more than the softmax.
    logits: Mutex<Vec<Vec<f32>>>,
}

impl PolicyWeights {
    pub(super) fn new(decoder: &Decoder, adapter: Option<&LoraAdapter>) -> Result<Self> {
        let layers = decoder.adapted_layers(adapter).map(|layer| inference_layer(layer?)).collect::<Result<_>>()?;
        let embedding = frozen(&decoder.adapted_embedding(adapter)?)?;
        let is_tied = decoder.config().tie_word_embeddings;
        let head = match decoder.adapted_head(adapter)? {
            Weight::Trained(_) if is_tied && adapter.is_none() => embedding.clone(),
            head => frozen(&head)?,
        };
        Ok(Self {
            config: decoder.local_config().clone(),
            context: decoder.context(),
            layers,
            final_norm: floats(decoder.final_norm())?,
            head,
            embedding,
            logits: Mutex::default(),
        })
    }

    pub(super) fn weights_per_layer(&self) -> usize {
        self.layers.first().map_or(0, |layer| {
            layer.qkv.n_weights() + layer.o.n_weights() + layer.gate_up.n_weights() + layer.down.n_weights()
        })
    }

    /// A buffer for `n` logits with any values, to be given back.
    pub(super) fn take_logits(&self, n: usize) -> Vec<f32> {
        let mut logits = lock(&self.logits).pop().unwrap_or_default();
        logits.resize(n, 0.0);
        logits
    }

    pub(super) fn give_back(&self, logits: Vec<f32>) {
        lock(&self.logits).push(logits);
    }

    pub(super) fn embed(&self, ids: &[u32]) -> std::result::Result<Vec<f32>, ModelError> {
        Ok(floats(&self.embedding.rows(ids)?)?)
    }
}

fn inference_layer(layer: AdaptedLayer<'_>) -> Result<TransformerLayer<CpuInference>> {
    let qk_norm = match layer.qk_norm {
        Some([q, k]) => Some([floats(q)?, floats(k)?]),
        None => None,
    };
    Ok(TransformerLayer {
        input_norm: floats(layer.input_norm)?,
        qkv: LinearGroup::new(&layer.qkv)?,
        qk_norm,
        o: LinearGroup::new(&layer.o)?,
        post_attention_norm: floats(layer.post_attention_norm)?,
        gate_up: LinearGroup::new(&layer.gate_up)?,
        down: LinearGroup::new(&layer.down)?,
    })
}

/// Linear layers with the same input: their matrices A are concatenated to one product.
pub(super) struct LinearGroup {
    a: Option<FrozenWeight>, // (sum of ranks, in)
    members: Vec<DecodeLinear>,
}

struct DecodeLinear {
    weight: FrozenWeight,
    bias: Option<Vec<f32>>,
    lora_b: Option<LoraB>,
    /// DoRA's factor on each output before the bias.
    factor: Option<Vec<f32>>,
}

struct LoraB {
    b: FrozenWeight, // (out, rank), times the adapter's scale
    first: usize,    // its first column in the group's product with A
}

/// Whether a product replaces the values of its output or is added to them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Output {
    Replace,
    Add,
}

impl LinearGroup {
    fn new(linears: &[AdaptedLinear<'_>]) -> Result<Self> {
        let pairs: Vec<Tensor> = linears.iter().filter_map(|linear| Some(linear.pair?.a.detach())).collect();
        let a =
            if pairs.is_empty() { None } else { Some(FrozenWeight::pack(&Tensor::cat(&pairs, 0)?, BaseDtype::F32)?) };
        let mut first = 0;
        let members = linears.iter().map(|linear| DecodeLinear::new(linear, &mut first)).collect::<Result<_>>()?;
        Ok(Self { a, members })
    }

    fn n_weights(&self) -> usize {
        self.members.iter().map(|member| member.weight.dims()).map(|(n_out, n_in)| n_out * n_in).sum()
    }

    fn n_rows(&self, x: &[f32]) -> usize {
        self.members.first().map_or(0, |member| x.len() / member.weight.dims().1)
    }

    /// LoRA A's output of all members, `(N, sum of ranks)`; empty without adapters.
    fn lora_a_out(&self, x: &[f32]) -> Result<Vec<f32>> {
        let Some(a) = &self.a else { return Ok(Vec::new()) };
        let mut lora_a_out = vec![0f32; self.n_rows(x) * a.dims().0];
        a.forward(x, &mut lora_a_out, 0.0)?;
        Ok(lora_a_out)
    }
}

impl DecodeLinear {
    fn new(linear: &AdaptedLinear<'_>, first: &mut usize) -> Result<Self> {
        let lora_b = match linear.pair {
            Some(pair) => {
                let b = FrozenWeight::pack(&(pair.b.detach() * f64::from(pair.scale))?, BaseDtype::F32)?;
                let lora_b = LoraB { b, first: *first };
                *first += pair.a.dim(0)?;
                Some(lora_b)
            }
            None => None,
        };
        let bias = linear.bias.map(floats).transpose()?;
        let factor = linear.factor.as_ref().map(floats).transpose()?;
        Ok(Self { weight: frozen(linear.weight)?, bias, lora_b, factor })
    }

    /// Writes or adds the outputs `(N, out)` for `x` `(N, in)`.
    fn forward(&self, x: &[f32], lora_a_out: &[f32], n_rows: usize, y: &mut [f32], output: Output) -> Result<()> {
        let n_out = self.weight.dims().0;
        let Some(factor) = &self.factor else {
            let mut keep = if output == Output::Add { 1.0 } else { 0.0 };
            if let Some(bias) = &self.bias {
                y.chunks_exact_mut(n_out).for_each(|row| match output {
                    Output::Add => row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias),
                    Output::Replace => row.copy_from_slice(bias),
                });
                keep = 1.0;
            }
            self.weight.forward(x, y, keep)?;
            return self.add_lora(lora_a_out, n_rows, y);
        };
        let mut changed = vec![0f32; n_rows * n_out];
        self.weight.forward(x, &mut changed, 0.0)?;
        self.add_lora(lora_a_out, n_rows, &mut changed)?;
        if output == Output::Replace {
            y.fill(0.0);
        }
        for (y, changed) in y.chunks_exact_mut(n_out).zip(changed.chunks_exact(n_out)) {
            for (i, (y, changed)) in y.iter_mut().zip(changed).enumerate() {
                *y += changed * factor[i] + self.bias.as_ref().map_or(0.0, |bias| bias[i]);
            }
        }
        Ok(())
    }

    fn add_lora(&self, lora_a_out: &[f32], n_rows: usize, y: &mut [f32]) -> Result<()> {
        let Some(LoraB { b, first }) = &self.lora_b else { return Ok(()) };
        let (rank, stride) = (b.dims().1, lora_a_out.len() / n_rows);
        if stride == rank {
            return b.forward(lora_a_out, y, 1.0);
        }
        let own: Vec<f32> =
            lora_a_out.chunks_exact(stride).flat_map(|row| &row[*first..first + rank]).copied().collect();
        b.forward(&own, y, 1.0)
    }
}

/// Backend of inference on the CPU; one for each pass, whose layers use the same buffers in turn.
#[derive(Default)]
pub(super) struct CpuInference {
    free: Arc<Mutex<Vec<Vec<f32>>>>,
}

/// A buffer that returns to its backend when it is dropped.
pub(super) struct PooledBuffer {
    values: Vec<f32>,
    len: usize,
    pool: Arc<Mutex<Vec<Vec<f32>>>>,
}

impl CpuInference {
    /// `len` values that are still to be written.
    pub(super) fn buffer(&self, len: usize) -> PooledBuffer {
        let mut values = lock(&self.free).pop().unwrap_or_default();
        if values.len() < len {
            values.resize(len, 0.0);
        }
        PooledBuffer { values, len, pool: self.free.clone() }
    }

    fn copy(&self, values: &[f32]) -> PooledBuffer {
        let mut copy = self.buffer(values.len());
        copy.copy_from_slice(values);
        copy
    }

    /// The query rows; all of them where `query_rows` is `None`.
    fn pick(&self, x: &[f32], width: usize, query_rows: &QueryRows) -> PooledBuffer {
        let mut picked = self.buffer(query_rows.indices.len() * width);
        for (picked, &row) in picked.chunks_exact_mut(width).zip(query_rows.indices.iter()) {
            picked.copy_from_slice(&x[row as usize * width..(row as usize + 1) * width]);
        }
        picked
    }
}

impl Deref for PooledBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values[..self.len]
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.len]
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        lock(&self.pool).push(std::mem::take(&mut self.values));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LayerBackend for CpuInference {
    type Residual = PooledBuffer;
    type ResidualSlice = [f32];
    type Activations = PooledBuffer;
    type ActivationSlice = [f32];
    type Norm = Vec<f32>;
    type Linears<const N: usize> = LinearGroup;
    type LoraAOut = ();

    fn rms_norm(&self, x: &[f32], weight: &Vec<f32>, eps: f32) -> Result<PooledBuffer> {
        let mut y = self.buffer(x.len());
        rms_norm(x, weight, eps, &mut y);
        Ok(y)
    }

    fn project<const N: usize>(&self, linears: &LinearGroup, x: &[f32]) -> Result<[ProjectionOut<Self>; N]> {
        let (n_rows, lora_a_out) = (linears.n_rows(x), linears.lora_a_out(x)?);
        let project = |linear: &DecodeLinear| {
            let mut y = self.buffer(n_rows * linear.weight.dims().0);
            linear.forward(x, &lora_a_out, n_rows, &mut y, Output::Replace)?;
            Ok((y, ()))
        };
        let outputs: Vec<ProjectionOut<Self>> = linears.members.iter().map(project).collect::<Result<_>>()?;
        outputs.try_into().map_err(|_| Error::Msg(format!("expected {N} linear layers to give as many outputs")))
    }

    fn project_qkv(
        &self,
        qkv: &LinearGroup,
        x: &[f32],
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<[ProjectionOut<Self>; 3]> {
        let [(q, ()), k, v] = self.project(qkv, x)?;
        let Some(query_rows) = query_rows else { return Ok([(q, ()), k, v]) };
        let q_width = q.len() * width / x.len();
        Ok([(self.pick(&q, q_width, query_rows), ()), k, v])
    }

    fn apply_rope(
        &self,
        x: &[f32],
        norm: Option<&Vec<f32>>,
        context: &LayerContext,
        rows: &Rows,
    ) -> Result<PooledBuffer> {
        let mut y = match norm {
            Some(norm) => self.rms_norm(x, norm, context.eps)?,
            None => self.copy(x),
        };
        let width = y.len() / rows.positions.len();
        for (heads, &position) in y.chunks_exact_mut(width).zip(rows.positions.iter()) {
            let (cos, sin) = context.rope.angles(position as usize);
            rotate(heads, cos, sin);
        }
        Ok(y)
    }

    fn query_residual<'a>(
        &self,
        x: &'a [f32],
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<MaybeBorrowed<'a, PooledBuffer>> {
        match query_rows {
            None => Ok(MaybeBorrowed::Borrowed(x)),
            Some(query_rows) => Ok(MaybeBorrowed::Owned(self.pick(x, width, query_rows))),
        }
    }

    fn add_projection(&self, linear: &LinearGroup, x: &[f32], residual: &[f32]) -> Result<(PooledBuffer, ())> {
        let (n_rows, mut y) = (linear.n_rows(x), self.copy(residual));
        let lora_a_out = linear.lora_a_out(x)?;
        for linear in &linear.members {
            linear.forward(x, &lora_a_out, n_rows, &mut y, Output::Add)?;
        }
        Ok((y, ()))
    }

    fn swiglu(&self, gate: &[f32], up: &[f32]) -> Result<PooledBuffer> {
        let mut y = self.buffer(gate.len());
        swiglu(gate, up, &mut y);
        Ok(y)
    }

    fn zeros_like(&self, residual: &[f32]) -> Result<PooledBuffer> {
        let mut zeros = self.buffer(residual.len());
        zeros.fill(0.0);
        Ok(zeros)
    }

    fn all_reduce(&self, ranks: &Ranks, sum: &mut PooledBuffer) -> Result<()> {
        ranks.sum(&mut *sum).map_err(Error::wrap)
    }
}

fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    with_floats(tensor, |values| Ok(values.to_vec()))
}

/// The weight itself where it is frozen; a copy of the values as they are now where it is trained.
fn frozen(weight: &Weight) -> Result<FrozenWeight> {
    match weight {
        Weight::Frozen(weight) => Ok(weight.clone()),
        Weight::Trained(weight) => FrozenWeight::pack(&weight.detach(), BaseDtype::F32),
        #[allow(unreachable_patterns)] // weights of other devices
        _ => candle_core::bail!("a weight of another device in a decoder on the CPU"),
    }
}

/// Values that one parallel task works on.
const VALUES_PER_TASK: usize = 1 << 15;

/// `x / sqrt(mean(x^2) + eps) * weight` for each row of `weight.len()` values.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let per_task = VALUES_PER_TASK.next_multiple_of(weight.len().max(1));
    out.par_chunks_mut(per_task).zip(x.par_chunks(per_task)).for_each(|(out, x)| norm_rows(x, weight, eps, out));
}

fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let inputs = gate.par_chunks(VALUES_PER_TASK).zip(up.par_chunks(VALUES_PER_TASK));
    out.par_chunks_mut(VALUES_PER_TASK).zip(inputs).for_each(|(out, (gate, up))| gated(gate, up, out));
}

vectorised! {
    fn norm_rows<A>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let size = weight.len();
        for (out, x) in out.chunks_exact_mut(size).zip(x.chunks_exact(size)) {
            let mut lanes = [0f32; LANES];
            let (chunks, rest) = x.as_chunks::<LANES>();
            for chunk in chunks {
                for lane in 0..LANES {
                    lanes[lane] = A::multiply_add(chunk[lane], chunk[lane], lanes[lane]);
                }
            }
            let sum = lanes.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>();
            let inverse = 1.0 / (sum / size as f32 + eps).sqrt();
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = x * inverse * weight;
            }
        }
    }
}

vectorised! {
    fn gated<A>(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp_or_zero::<A>(-gate)) * up;
        }
    }
}

vectorised! {
    /// Rotates each head by the angles of its row's position; the first half of a head pairs with the second.
    ///
    /// Source: Su et al. 2021, "RoFormer"; the half-split layout of transformers' `rotate_half`.
    fn rotate<A>(heads: &mut [f32], cos: &[f32], sin: &[f32]) {
        let half = cos.len();
        let sin = &sin[..half];
        for head in heads.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for i in 0..half {
                let (a, b) = (first[i], second[i]);
                first[i] = a * cos[i] - b * sin[i];
                second[i] = b * cos[i] + a * sin[i];
            }
        }
    }
}
