//! One decoder layer as one operation on slices: it keeps what its backward pass cannot cheaply compute again, joins products
//! and sums, and leaves nothing in between to the graph.
//!
//! Kept of each row: queries, keys and values as attention reads them, what attention gave, the residual behind it, gate and up
//! (for Qwen3 also queries and keys before their norms). Norms and the gated product are computed again. A candle operation has
//! at most three inputs, so the layer's trained tensors come as one: flattened and joined, an operation whose gradient is cut
//! back into theirs.

use super::layer::{Layer, Rows, Wanted};
use super::linear::Linear;
use super::pass::Pass;
use crate::kernels::{
    Floats, LogSums, LowRank, ParameterGradients, Projection, Weight, attend, attention_gradients, gated,
    gated_gradients, input_gradient, norm_gradients, normed,
};
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result as TensorResult, Shape, Tensor, bail};
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// What a layer computes with; clones of tensors share their values.
pub(super) struct FusedLayer {
    linears: [FusedLinear; 7], // q, k, v, o, gate, up, down
    input_norm: Tensor,
    post_attention_norm: Tensor,
    qk_norm: Option<(Tensor, Tensor)>,
    rows: Rows,
    wanted: Option<Wanted>,
}

const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const O: usize = 3;
const GATE: usize = 4;
const UP: usize = 5;
const DOWN: usize = 6;

struct FusedLinear {
    weight: Weight,
    bias: Option<Tensor>,
    /// A, B and the scale of their product.
    low_rank: Option<(Tensor, Tensor, f32)>,
}

/// What the backward pass reads; see the module's documentation.
struct Kept {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    before_norm: Option<(Vec<f32>, Vec<f32>)>,
    attended: Vec<f32>,
    log_sums: LogSums,
    residual: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// Of each linear layer `(N, rank)`.
    low: [Vec<f32>; 7],
}

/// The layer's input `(N, H)`; of rows of a frozen embedding no gradient is wanted.
#[derive(Clone, Copy)]
struct Input<'a> {
    values: &'a [f32],
    is_tracked: bool,
}

impl FusedLinear {
    /// `None` where the layer does more than a weight and a low-rank change: dropout, magnitudes.
    fn new(linear: &Linear, pass: &Pass<'_>) -> Option<Self> {
        let pair = pass.adapter.and_then(|adapter| adapter.pair(&linear.path));
        let is_plain = pair.is_none_or(|pair| pair.magnitude.is_none() && matches!(linear.weight, Weight::Frozen(_)));
        is_plain.then(|| Self {
            weight: linear.weight.clone(),
            bias: linear.bias.clone(),
            low_rank: pair.map(|pair| (pair.a.clone(), pair.b.clone(), pair.scale)),
        })
    }

    /// Everything that may be trained, in the order of [`FusedLinear::gradients_of`].
    fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = Vec::new();
        if let Weight::Trained(weight) = &self.weight {
            tensors.push(weight);
            tensors.extend(&self.bias);
        }
        if let Some((a, b, _)) = &self.low_rank {
            tensors.extend([a, b]);
        }
        tensors
    }

    fn gradients_of(&self, found: ParameterGradients) -> Vec<Vec<f32>> {
        let mut gradients = Vec::new();
        if matches!(self.weight, Weight::Trained(_)) {
            gradients.push(found.weight);
            gradients.extend(self.bias.is_some().then_some(found.bias));
        }
        if self.low_rank.is_some() {
            gradients.extend([found.a, found.b]);
        }
        gradients
    }

    /// Calls `f` with the layer on slices.
    fn with<R>(&self, f: impl FnOnce(&Projection<'_>) -> TensorResult<R>) -> TensorResult<R> {
        let bias = self.bias.as_ref().map(Floats::of).transpose()?;
        let bias = bias.as_deref();
        match (&self.weight, &self.low_rank) {
            (Weight::Trained(weight), _) => {
                let (values, n_in) = (Floats::of(weight)?, weight.dim(1)?);
                f(&Projection::Trained { weight: &values, n_in, bias })
            }
            (Weight::Frozen(weight), None) => f(&Projection::Frozen { weight, bias, low_rank: None }),
            (Weight::Frozen(weight), Some((a, b, scale))) => {
                let ((n_out, n_in), rank) = (weight.dims(), a.dim(0)?);
                if a.dims() != [rank, n_in] || b.dims() != [n_out, rank] {
                    bail!("adapter of shapes {:?} and {:?} on a weight ({n_out}, {n_in})", a.dims(), b.dims());
                }
                let (a, b) = (Floats::of(a)?, Floats::of(b)?);
                let low_rank = Some(LowRank { a: &a, b: &b, rank, scale: *scale });
                f(&Projection::Frozen { weight, bias, low_rank })
            }
        }
    }

    fn forward(&self, x: &[f32]) -> TensorResult<(Vec<f32>, Vec<f32>)> {
        self.with(|layer| layer.forward(x))
    }

    fn add_to(&self, x: &[f32], y: &mut [f32]) -> TensorResult<Vec<f32>> {
        self.with(|layer| layer.add_to(x, y))
    }

    fn parameter_gradients(&self, x: &[f32], low: &[f32], grad: &[f32]) -> TensorResult<ParameterGradients> {
        self.with(|layer| layer.parameter_gradients(x, low, grad))
    }

    fn input_gradient(&self, grad: &[f32], found: &ParameterGradients) -> TensorResult<Vec<f32>> {
        self.with(|layer| input_gradient(&[(layer, grad, found)]))
    }
}

impl FusedLayer {
    /// `None` where a layer must be composed of single operations: dropout, magnitudes, another device; and where full
    /// fine-tuning has so few rows that a joined copy of the weights would take more memory than it saves.
    pub(super) fn new(
        layer: &Layer,
        x: &Tensor,
        rows: &Rows,
        wanted: Option<&Wanted>,
        pass: &Pass<'_>,
    ) -> TensorResult<Option<Self>> {
        if rows.dropout.is_some() || !x.device().is_cpu() || x.dtype() != DType::F32 {
            return Ok(None);
        }
        let Some(linears) =
            layer.linears().iter().map(|linear| FusedLinear::new(linear, pass)).collect::<Option<Vec<_>>>()
        else {
            return Ok(None);
        };
        let Ok(linears) = <[FusedLinear; 7]>::try_from(linears) else { return Ok(None) };
        let fused = Self {
            linears,
            input_norm: layer.input_norm.clone(),
            post_attention_norm: layer.post_attention_norm.clone(),
            qk_norm: layer.qk_norm.clone(),
            rows: rows.clone(),
            wanted: wanted.cloned(),
        };
        let n_trained: usize = fused.trained().iter().map(|tensor| tensor.elem_count()).sum();
        let (n_rows, width) = x.dims2()?;
        let n_saved = n_rows * (5 * width + fused.linears[GATE].weight.dims()?.0);
        Ok((n_trained <= n_saved).then_some(fused))
    }

    /// Output `(N, H)` of the layer, `(wanted, H)` where some rows are wanted, for its input `(N, H)`.
    pub(super) fn apply(self, x: &Tensor) -> TensorResult<Tensor> {
        let (x, width) = (x.contiguous()?, x.dim(1)?);
        let (out, kept) = self.run(&Floats::of(&x)?)?;
        let shape = Shape::from((out.len() / width, width));
        let trained = self.trained();
        if trained.is_empty() && !x.track_op() {
            return Tensor::from_vec(out, shape, x.device());
        }
        let joined = if trained.is_empty() {
            Tensor::zeros(1, DType::F32, x.device())?
        } else {
            let flat: Vec<Tensor> = trained.iter().map(|tensor| tensor.flatten_all()).collect::<TensorResult<_>>()?;
            Tensor::cat(&flat, 0)?
        };
        drop(trained);
        let op = FusedOperation { layer: self, kept, out: Mutex::new(out), shape };
        x.apply_op2(&joined, op)
    }

    /// Everything that may be trained, in the order in which [`FusedLayer::gradients`] returns gradients.
    fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = vec![&self.input_norm, &self.post_attention_norm];
        if let Some((q, k)) = &self.qk_norm {
            tensors.extend([q, k]);
        }
        tensors.extend(self.linears.iter().flat_map(FusedLinear::tensors));
        tensors
    }

    fn trained(&self) -> Vec<&Tensor> {
        self.tensors().into_iter().filter(|tensor| tensor.track_op()).collect()
    }

    /// Weights of the norms of queries and keys.
    fn qk_norms(&self) -> TensorResult<(Option<Floats<'_>>, Option<Floats<'_>>)> {
        let Some((q, k)) = &self.qk_norm else { return Ok((None, None)) };
        Ok((Some(Floats::of(q)?), Some(Floats::of(k)?)))
    }

    /// What the rows that are wanted of the output bring along.
    fn query_rows(&self) -> &Rows {
        self.wanted.as_ref().map_or(&self.rows, |wanted| &wanted.rows)
    }

    /// The wanted ones of some rows.
    fn pick<'a>(&self, all: &'a [f32], width: usize) -> std::borrow::Cow<'a, [f32]> {
        let Some(wanted) = &self.wanted else { return all.into() };
        let mut rows = Vec::with_capacity(wanted.list.len() * width);
        for &row in wanted.list.iter() {
            rows.extend_from_slice(&all[row as usize * width..(row as usize + 1) * width]);
        }
        rows.into()
    }

    /// Adds values of the wanted rows to all rows.
    fn add_picked(&self, all: &mut [f32], picked: &[f32], width: usize) {
        match &self.wanted {
            None => add(all, picked),
            Some(wanted) => {
                for (&row, picked) in wanted.list.iter().zip(picked.chunks_exact(width)) {
                    let all = &mut all[row as usize * width..(row as usize + 1) * width];
                    all.iter_mut().zip(picked).for_each(|(sum, x)| *sum += x);
                }
            }
        }
    }

    fn run(&self, x: &[f32]) -> TensorResult<(Vec<f32>, Kept)> {
        let (rows, query_rows, eps) = (&self.rows, self.query_rows(), self.rows.eps as f32);
        let input_norm = Floats::of(&self.input_norm)?;
        let width = input_norm.len();
        let input = normed(x, &input_norm, eps);
        let [q, k, v, o, gate, up, down] = &self.linears;
        let (v, low_v) = v.forward(&input)?;
        let (k_raw, low_k) = k.forward(&input)?;
        let (q_raw, low_q) = q.forward(&self.pick(&input, width))?;
        drop(input);
        let (q_norm, k_norm) = self.qk_norms()?;
        let q = query_rows.rope.turned(&q_raw, of(&q_norm, eps), &query_rows.positions)?;
        let k = rows.rope.turned(&k_raw, of(&k_norm, eps), &rows.positions)?;
        let before_norm = self.qk_norm.is_some().then_some((q_raw, k_raw));
        let (attended, log_sums) = attend(&query_rows.queries, rows.head_dim, [&q, &k, &v])?;
        let mut residual = self.pick(x, width).into_owned();
        let low_o = o.add_to(&attended, &mut residual)?;
        let input = normed(&residual, &Floats::of(&self.post_attention_norm)?, eps);
        let ((gate, low_gate), (up, low_up)) = (gate.forward(&input)?, up.forward(&input)?);
        drop(input);
        let mut out = residual.clone();
        let low_down = down.add_to(&gated(&gate, &up), &mut out)?;
        let low = [low_q, low_k, low_v, low_o, low_gate, low_up, low_down];
        Ok((out, Kept { q, k, v, before_norm, attended, log_sums, residual, gate, up, low }))
    }

    /// Gradients of the input, where it has one, and of all tensors for the gradient `grad` of the output.
    fn gradients(&self, kept: &Kept, x: Input<'_>, grad: &[f32]) -> TensorResult<(Vec<f32>, Vec<Vec<f32>>)> {
        let (rows, eps) = (&self.rows, self.rows.eps as f32);
        let [q, k, v, ..] = &self.linears;
        let mut found: [ParameterGradients; 7] = Default::default();

        // The feed-forward part and its norm.
        let (dresidual, dpost_norm) = self.feed_forward_gradients(kept, grad, &mut found)?;
        // Attention, turned and normed queries and keys.
        found[O] = self.linears[O].parameter_gradients(&kept.attended, &kept.low[O], &dresidual)?;
        let dattended = self.linears[O].input_gradient(&dresidual, &found[O])?;
        let inputs = [kept.q.as_slice(), &kept.k, &kept.v];
        let query_rows = self.query_rows();
        let [dq, dk, dv] = attention_gradients(
            &query_rows.queries,
            rows.head_dim,
            inputs,
            &kept.attended,
            &kept.log_sums,
            &dattended,
        )?;
        let (q_norm, k_norm) = self.qk_norms()?;
        let empty = (Vec::new(), Vec::new());
        let (q_raw, k_raw) = kept.before_norm.as_ref().unwrap_or(&empty);
        let turned_back = |rows: &Rows, x: &[f32], norm: &Option<Floats<'_>>, grad: &[f32]| {
            rows.rope.turned_gradients(x, of(norm, eps), &rows.positions, grad, rows.head_dim)
        };
        let (dq, dq_norm) = turned_back(query_rows, q_raw, &q_norm, &dq);
        let (dk, dk_norm) = turned_back(rows, k_raw, &k_norm, &dk);
        // Projections and the input's norm.
        let input_norm = Floats::of(&self.input_norm)?;
        let width = input_norm.len();
        let input = normed(x.values, &input_norm, eps);
        found[Q] = q.parameter_gradients(&self.pick(&input, width), &kept.low[Q], &dq)?;
        found[K] = k.parameter_gradients(&input, &kept.low[K], &dk)?;
        found[V] = v.parameter_gradients(&input, &kept.low[V], &dv)?;
        let (mut dx, mut dinput_norm) = (Vec::new(), Vec::new());
        if x.is_tracked || self.input_norm.track_op() {
            let dinput = self.shared_input_gradient(&found, [&dq, &dk, &dv], width)?;
            (dx, dinput_norm) = norm_gradients(x.values, &input_norm, eps, &dinput, width);
            self.add_picked(&mut dx, &dresidual, width);
        }

        let mut all = vec![dinput_norm, dpost_norm];
        if self.qk_norm.is_some() {
            all.extend([dq_norm, dk_norm]);
        }
        for (linear, found) in self.linears.iter().zip(found) {
            all.extend(linear.gradients_of(found));
        }
        Ok((dx, all))
    }

    /// Gradient of what queries, keys and values are projected from.
    fn shared_input_gradient(
        &self,
        found: &[ParameterGradients; 7],
        [dq, dk, dv]: [&[f32]; 3],
        width: usize,
    ) -> TensorResult<Vec<f32>> {
        let [q, k, v, ..] = &self.linears;
        q.with(|q| {
            k.with(|k| {
                v.with(|v| {
                    let (of_q, of_k, of_v) = ((q, dq, &found[Q]), (k, dk, &found[K]), (v, dv, &found[V]));
                    if self.wanted.is_none() {
                        return input_gradient(&[of_q, of_k, of_v]);
                    }
                    let mut dinput = input_gradient(&[of_k, of_v])?;
                    self.add_picked(&mut dinput, &input_gradient(&[of_q])?, width);
                    Ok(dinput)
                })
            })
        })
    }

    /// Gradients of the residual behind attention and of the norm on it.
    fn feed_forward_gradients(
        &self,
        kept: &Kept,
        grad: &[f32],
        found: &mut [ParameterGradients; 7],
    ) -> TensorResult<(Vec<f32>, Vec<f32>)> {
        let (eps, [.., gate, up, down]) = (self.rows.eps as f32, &self.linears);
        found[DOWN] = down.parameter_gradients(&gated(&kept.gate, &kept.up), &kept.low[DOWN], grad)?;
        let dgated = down.input_gradient(grad, &found[DOWN])?;
        let (dgate, dup) = gated_gradients(&kept.gate, &kept.up, &dgated);
        drop(dgated);
        let norm = Floats::of(&self.post_attention_norm)?;
        let input = normed(&kept.residual, &norm, eps);
        found[GATE] = gate.parameter_gradients(&input, &kept.low[GATE], &dgate)?;
        found[UP] = up.parameter_gradients(&input, &kept.low[UP], &dup)?;
        drop(input);
        let dinput = gate.with(|gate| {
            up.with(|up| input_gradient(&[(gate, &dgate[..], &found[GATE]), (up, &dup[..], &found[UP])]))
        })?;
        let (mut dresidual, dnorm) = norm_gradients(&kept.residual, &norm, eps, &dinput, norm.len());
        add(&mut dresidual, grad);
        Ok((dresidual, dnorm))
    }
}

/// A norm's weight with its epsilon.
fn of<'a>(norm: &'a Option<Floats<'_>>, eps: f32) -> Option<(&'a [f32], f32)> {
    norm.as_ref().map(|weight| (&**weight, eps))
}

/// Values that one parallel task adds.
const VALUES_PER_TASK: usize = 16_384;

fn add(sum: &mut [f32], more: &[f32]) {
    sum.par_chunks_mut(VALUES_PER_TASK).zip(more.par_chunks(VALUES_PER_TASK)).for_each(|(sum, more)| {
        sum.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
    });
}

/// A layer that has run, as a node of the graph. Inputs: `x` `(N, H)` and the trained tensors, flattened and joined.
struct FusedOperation {
    layer: FusedLayer,
    kept: Kept,
    /// The result, handed on once.
    out: Mutex<Vec<f32>>,
    shape: Shape,
}

impl CustomOp2 for FusedOperation {
    fn name(&self) -> &'static str {
        "decoder-layer"
    }

    fn cpu_fwd(
        &self,
        _x: &CpuStorage,
        _x_layout: &Layout,
        _trained: &CpuStorage,
        _trained_layout: &Layout,
    ) -> TensorResult<(CpuStorage, Shape)> {
        let out = std::mem::take(&mut *self.out.lock().unwrap_or_else(PoisonError::into_inner));
        Ok((CpuStorage::F32(out), self.shape.clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        joined: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> TensorResult<(Option<Tensor>, Option<Tensor>)> {
        let (grad, is_tracked) = (grad.contiguous()?, x.track_op());
        let (dx, all) =
            self.layer.gradients(&self.kept, Input { values: &Floats::of(x)?, is_tracked }, &Floats::of(&grad)?)?;
        let dx = if is_tracked { Some(Tensor::from_vec(dx, x.shape(), x.device())?) } else { None };
        let tensors = self.layer.tensors();
        let trained = tensors.into_iter().zip(all).filter(|(tensor, _)| tensor.track_op());
        let trained: Vec<f32> = trained.flat_map(|(_, gradient)| gradient).collect();
        if trained.is_empty() {
            return Ok((dx, None));
        }
        Ok((dx, Some(Tensor::from_vec(trained, joined.shape(), joined.device())?)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{Decoder, Dropout, LoraAdapter, LoraSettings, PackedBatch, Weights};
    use candle_core::Device;
    use std::path::Path;

    /// Whether the first layer of a tiny decoder is one operation.
    fn is_fused(weights: Weights, settings: Option<LoraSettings>, dropout: Option<Dropout>, n_rows: usize) -> bool {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/decoders/qwen3-tied");
        let decoder = Decoder::load(&directory, weights).unwrap();
        let adapter = settings.map(|settings| LoraAdapter::new(&decoder, settings, 1).unwrap());
        let pass = Pass { dropout, ..Pass::with(adapter.as_ref()) };
        let batch = PackedBatch::new([vec![1; n_rows].as_slice()]);
        let rows = Rows::new(&batch, &decoder.config, &decoder.rope, pass.dropout).unwrap();
        let x = Tensor::zeros((n_rows, decoder.config.hidden_size), DType::F32, &Device::Cpu).unwrap();
        FusedLayer::new(&decoder.layers[0], &x, &rows, None, &pass).unwrap().is_some()
    }

    #[test]
    fn layers_are_one_operation_unless_they_do_more_or_save_nothing() {
        let lora = || Some(LoraSettings::all_linear(2, 4.0));
        let dora = LoraSettings { use_dora: true, ..LoraSettings::all_linear(2, 4.0) };
        assert!(is_fused(Weights::Frozen, lora(), None, 12));
        assert!(is_fused(Weights::Frozen, None, None, 1));
        assert!(!is_fused(Weights::Frozen, lora(), Some(Dropout { p: 0.1, seed: 1 }), 12));
        assert!(!is_fused(Weights::Frozen, Some(dora), None, 12));
        assert!(is_fused(Weights::Trained, None, None, 100));
        assert!(!is_fused(Weights::Trained, None, None, 2));
    }
}
