//! One decoder layer as one operation: it keeps what its backward pass cannot cheaply compute again, joins products and sums,
//! and leaves nothing in between to the graph. The same layer runs on every device that has its steps.
//!
//! Kept of each row: queries, keys and values as attention reads them, what attention gave, the residual behind it, gate and up
//! (for Qwen3 also queries and keys before their norms). Norms and the gated product are computed again. A candle operation has
//! at most three inputs, so the layer's trained tensors come as one: flattened and joined, an operation whose gradient is cut
//! back into theirs.
//!
//! Where several ranks hold the model together, each runs the same steps on its heads and its part of the feed-forward layer, and
//! sums are formed over them: forward behind the attention's output and down, backward of the gradients of both norms' results.

use super::backend::{Steps, Trained};
use super::cpu::Cpu;
use super::fused_linear::FusedLinear;
use super::layer::Layer;
use super::pass::{Pass, Recompute};
use super::rows::{BatchRows, QueryRows};
use crate::place::only_on_cpu;
use candle_core::{DType, Result as TensorResult, Tensor};

/// What a layer computes with; clones of tensors share their values.
pub(crate) struct FusedLayer {
    linears: [FusedLinear; 7], // q, k, v, o, gate, up, down
    input_norm: Tensor,
    post_attention_norm: Tensor,
    qk_norm: Option<(Tensor, Tensor)>,
    rows: BatchRows,
    wanted: Option<QueryRows>,
    /// Where the gradients of what is trained are put, if not into the graph.
    pub(crate) gradients: Option<Recompute>,
}

const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const O: usize = 3;
const GATE: usize = 4;
const UP: usize = 5;
const DOWN: usize = 6;

/// What the backward pass reads; see the module's documentation.
pub(crate) struct Kept<S: Steps> {
    q: S::Values,
    k: S::Values,
    v: S::Values,
    before_norm: Option<(S::Values, S::Values)>,
    attended: S::Values,
    log_sums: S::LogSums,
    residual: S::Sums,
    gate: S::Values,
    up: S::Values,
    /// Of each linear layer `(N, rank)`.
    low: [S::Values; 7],
}

/// The layer's input `(N, H)`; of rows of a frozen embedding no gradient is wanted.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a, S: Steps> {
    pub(crate) values: &'a S::SumSlice,
    pub(crate) is_tracked: bool,
}

/// Gradients of the input, where it is wanted, and of a layer's tensors in the order of [`FusedLayer::tensors`].
type Gradients<S> = (Option<<S as Steps>::Sums>, Vec<Option<<S as Steps>::Sums>>);

/// Of queries, keys and values, and of the norms of the first two.
type AttendedGradients<S> = ([<S as Steps>::Values; 3], [Option<<S as Steps>::Sums>; 2]);

impl FusedLayer {
    /// `None` where a layer must be composed of single operations, on the CPU with dropout or magnitudes; and where full fine-tuning has so few
    /// rows that a joined copy of the weights would take more memory than it saves. On a card there are no such operations.
    pub(crate) fn new(
        layer: &Layer,
        x: &Tensor,
        rows: &BatchRows,
        wanted: Option<&QueryRows>,
        pass: &Pass<'_>,
    ) -> TensorResult<Option<Self>> {
        let is_on_cpu = x.device().is_cpu();
        if is_on_cpu && rows.dropout.is_some() || x.dtype() != DType::F32 {
            return Ok(None);
        }
        // Keys and values alone are computed of all rows.
        let of_queries = wanted.map_or(rows, |wanted| &wanted.rows);
        let rows_of = |index| if index == K || index == V { rows } else { of_queries };
        let linears = layer.linears().into_iter().enumerate();
        let linears = linears.map(|(index, linear)| FusedLinear::new(linear, rows_of(index), pass));
        let Some(linears) = linears.collect::<TensorResult<Option<Vec<_>>>>()? else {
            return if is_on_cpu { Ok(None) } else { Err(only_on_cpu("an adapter on weights that are trained")) };
        };
        let Ok(linears) = <[FusedLinear; 7]>::try_from(linears) else { return Ok(None) };
        let fused = Self {
            linears,
            input_norm: layer.input_norm.clone(),
            post_attention_norm: layer.post_attention_norm.clone(),
            qk_norm: layer.qk_norm.clone(),
            rows: rows.clone(),
            wanted: wanted.cloned(),
            gradients: pass.recompute.filter(|_| !is_on_cpu).cloned(),
        };
        if !is_on_cpu {
            return Ok(Some(fused));
        }
        let n_trained: usize = fused.trained().iter().map(|tensor| tensor.elem_count()).sum();
        let (n_rows, width) = x.dims2()?;
        let n_saved = n_rows * (5 * width + fused.linears[GATE].weight.dims()?.0);
        Ok((n_trained <= n_saved).then_some(fused))
    }

    /// Output `(N, H)` of the layer, `(wanted, H)` where some rows are wanted, for its input `(N, H)`.
    pub(crate) fn apply(self, x: &Tensor) -> TensorResult<Tensor> {
        #[cfg(feature = "cuda")]
        if !x.device().is_cpu() {
            return self.apply_with(super::card::Card::of(x)?, x);
        }
        self.apply_with(Cpu, x)
    }

    /// Everything that may be trained.
    pub(crate) fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = vec![&self.input_norm, &self.post_attention_norm];
        if let Some((q, k)) = &self.qk_norm {
            tensors.extend([q, k]);
        }
        tensors.extend(self.linears.iter().flat_map(FusedLinear::tensors));
        tensors
    }

    pub(crate) fn trained(&self) -> Vec<&Tensor> {
        self.tensors().into_iter().filter(|tensor| tensor.track_op()).collect()
    }

    /// Weights of the norms of queries and keys.
    fn qk_norms(&self) -> (Option<&Tensor>, Option<&Tensor>) {
        self.qk_norm.as_ref().map(|(q, k)| (q, k)).unzip()
    }

    /// What the rows that are wanted of the output bring along.
    fn query_rows(&self) -> &BatchRows {
        self.wanted.as_ref().map_or(&self.rows, |wanted| &wanted.rows)
    }

    pub(crate) fn run<S: Steps>(&self, steps: &S, x: &S::SumSlice) -> TensorResult<(S::Sums, Kept<S>)> {
        let (rows, query_rows, eps) = (&self.rows, self.query_rows(), self.rows.eps as f32);
        let (width, wanted) = (self.input_norm.dims1()?, self.wanted.as_ref());
        let input = steps.normed(x, &self.input_norm, eps)?;
        let [q, k, v, o, gate, up, down] = &self.linears;
        let [(q_raw, low_q), (k_raw, low_k), (v, low_v)] = match wanted {
            None => steps.forward([q, k, v], &input)?,
            Some(_) => {
                let [of_k, of_v] = steps.forward([k, v], &input)?;
                let [of_q] = steps.forward([q], &*steps.picked(&input, width, wanted)?)?;
                [of_q, of_k, of_v]
            }
        };
        drop(input);
        let (q_norm, k_norm) = self.qk_norms();
        let q = steps.turned(&q_raw, q_norm, query_rows)?;
        let k = steps.turned(&k_raw, k_norm, rows)?;
        let before_norm = self.qk_norm.is_some().then_some((q_raw, k_raw));
        let (attended, log_sums) = steps.attend(query_rows, [&q, &k, &v])?;
        let (residual, low_o) = self.added(steps, o, &attended, &*steps.picked_sums(x, width, wanted)?)?;
        let input = steps.normed(&residual, &self.post_attention_norm, eps)?;
        let [(gate, low_gate), (up, low_up)] = steps.forward([gate, up], &input)?;
        drop(input);
        let (out, low_down) = self.added(steps, down, &*steps.gated(&gate, &up)?, &residual)?;
        let low = [low_q, low_k, low_v, low_o, low_gate, low_up, low_down];
        Ok((out, Kept { q, k, v, before_norm, attended, log_sums, residual, gate, up, low }))
    }

    /// `base` with the outputs of a layer that is split by its inputs added: those of all ranks, and the base once.
    fn added<S: Steps>(
        &self,
        steps: &S,
        linear: &FusedLinear,
        x: &S::ValueSlice,
        base: &S::SumSlice,
    ) -> TensorResult<(S::Sums, S::Values)> {
        let parallel = &self.rows.parallel;
        let (mut sum, low) = match parallel.shard().is_first() {
            true => steps.added(linear, x, base)?,
            false => steps.added(linear, x, &*steps.zeros(steps.n_sums(base))?)?,
        };
        steps.sum_over(parallel.ranks(), &mut sum)?;
        Ok((sum, low))
    }

    /// Gradients for the gradient `grad` of the output.
    pub(crate) fn gradients<S: Steps>(
        &self,
        steps: &S,
        kept: &Kept<S>,
        x: Input<'_, S>,
        grad: &S::SumSlice,
    ) -> TensorResult<Gradients<S>> {
        let ([q, k, v, ..], eps) = (&self.linears, self.rows.eps as f32);
        let mut found: [S::Found; 7] = Default::default();

        // The feed-forward part and its norm.
        let (dresidual, dpost_norm) = self.feed_forward_gradients(steps, kept, grad, &mut found)?;
        // Attention, turned and normed queries and keys.
        let ([dq, dk, dv], of_norms) = self.attended_gradients(steps, kept, &dresidual, &mut found[O])?;
        // Projections and the input's norm.
        let (width, wanted) = (self.input_norm.dims1()?, self.wanted.as_ref());
        let input = steps.normed(x.values, &self.input_norm, eps)?;
        let picked = steps.picked(&input, width, wanted)?;
        let [mut of_q, mut of_k, mut of_v] = steps.low_gradients([(q, &*dq), (k, &*dk), (v, &*dv)])?;
        steps.parameter_gradients([
            Trained { linear: q, x: &*picked, low: &*kept.low[Q], grad: &*dq, found: &mut of_q },
            Trained { linear: k, x: &*input, low: &*kept.low[K], grad: &*dk, found: &mut of_k },
            Trained { linear: v, x: &*input, low: &*kept.low[V], grad: &*dv, found: &mut of_v },
        ])?;
        (found[Q], found[K], found[V]) = (of_q, of_k, of_v);
        let (mut dx, mut dinput_norm) = (None, None);
        if x.is_tracked || self.input_norm.track_op() {
            let dinput = self.shared_input_gradient(steps, &found, [&dq, &dk, &dv], width)?;
            // The residual's own gradient: of all rows at once, or where it belongs.
            let more = wanted.is_none().then_some(&*dresidual);
            let (mut sum, dnorm) = steps.norm_gradients(x.values, &self.input_norm, eps, &dinput, more)?;
            if wanted.is_some() {
                steps.add_picked(&mut sum, &dresidual, width, wanted)?;
            }
            (dx, dinput_norm) = (Some(sum), dnorm);
        }

        let mut all = vec![dinput_norm, dpost_norm];
        if self.qk_norm.is_some() {
            all.extend(of_norms);
        }
        for (index, found) in found.into_iter().enumerate() {
            all.extend(self.gradients_of(steps, index, found)?.into_iter().map(Some));
        }
        Ok((dx, all))
    }

    /// Gradients of what was projected to queries, keys and values, and of the weights of the norms of queries and keys, for the
    /// gradient `grad` of the residual behind attention.
    fn attended_gradients<S: Steps>(
        &self,
        steps: &S,
        kept: &Kept<S>,
        grad: &S::SumSlice,
        found: &mut S::Found,
    ) -> TensorResult<AttendedGradients<S>> {
        let (o, query_rows) = (&self.linears[O], self.query_rows());
        let of_o = steps.values(grad)?;
        [*found] = steps.low_gradients([(o, &of_o)])?;
        steps.parameter_gradients([Trained {
            linear: o,
            x: &*kept.attended,
            low: &*kept.low[O],
            grad: &*of_o,
            found: &mut *found,
        }])?;
        let dattended = steps.input_gradient(o, &of_o, found)?;
        drop(of_o);
        let qkv = [&*kept.q, &*kept.k, &*kept.v];
        let [dq, dk, dv] = steps.attention_gradients(query_rows, qkv, &kept.attended, &kept.log_sums, &dattended)?;
        let (q_norm, k_norm) = self.qk_norms();
        let (q_raw, k_raw) = kept.before_norm.as_ref().map(|(q, k)| (&**q, &**k)).unzip();
        let (dq, dq_norm) = steps.turned_gradients(q_raw, q_norm, query_rows, &dq)?;
        let (dk, dk_norm) = steps.turned_gradients(k_raw, k_norm, &self.rows, &dk)?;
        Ok(([dq, dk, dv], [dq_norm, dk_norm]))
    }

    /// What was found for a linear layer's tensors. Of A and B the one that every rank has whole gets the sum of what the ranks
    /// found; see `TensorParallel::with_whole_gradients`.
    fn gradients_of<S: Steps>(&self, steps: &S, index: usize, found: S::Found) -> TensorResult<Vec<S::Sums>> {
        let mut gradients = steps.gradients_of(&self.linears[index], found);
        let parallel = &self.rows.parallel;
        if let ([a, b], true) = (gradients.as_mut_slice(), parallel.is_split()) {
            steps.sum_over(parallel.ranks(), if matches!(index, O | DOWN) { b } else { a })?;
        }
        Ok(gradients)
    }

    /// Gradient of what queries, keys and values are projected from.
    fn shared_input_gradient<S: Steps>(
        &self,
        steps: &S,
        found: &[S::Found; 7],
        [dq, dk, dv]: [&S::ValueSlice; 3],
        width: usize,
    ) -> TensorResult<S::Sums> {
        let [q, k, v, ..] = &self.linears;
        let (of_q, of_k, of_v) = ((q, dq, &found[Q]), (k, dk, &found[K]), (v, dv, &found[V]));
        let mut dinput = if self.wanted.is_none() {
            steps.shared_input_gradient(&[of_q, of_k, of_v])?
        } else {
            let mut dinput = steps.shared_input_gradient(&[of_k, of_v])?;
            let of_queries = steps.shared_input_gradient(&[of_q])?;
            steps.add_picked(&mut dinput, &of_queries, width, self.wanted.as_ref())?;
            dinput
        };
        steps.sum_over(self.rows.parallel.ranks(), &mut dinput)?;
        Ok(dinput)
    }

    /// Gradients of the residual behind attention and of the norm on it.
    fn feed_forward_gradients<S: Steps>(
        &self,
        steps: &S,
        kept: &Kept<S>,
        grad: &S::SumSlice,
        found: &mut [S::Found; 7],
    ) -> TensorResult<(S::Sums, Option<S::Sums>)> {
        let (eps, [.., gate, up, down]) = (self.rows.eps as f32, &self.linears);
        let of_down = steps.values(grad)?;
        let [mut found_down] = steps.low_gradients([(down, &*of_down)])?;
        let dgated = steps.input_gradient(down, &of_down, &found_down)?;
        let [gated, dgate, dup] = steps.gated_gradients(&kept.gate, &kept.up, dgated)?;
        steps.parameter_gradients([Trained {
            linear: down,
            x: &*gated,
            low: &*kept.low[DOWN],
            grad: &*of_down,
            found: &mut found_down,
        }])?;
        found[DOWN] = found_down;
        drop((gated, of_down));
        let norm = &self.post_attention_norm;
        let input = steps.normed(&kept.residual, norm, eps)?;
        let [mut of_gate, mut of_up] = steps.low_gradients([(gate, &*dgate), (up, &*dup)])?;
        steps.parameter_gradients([
            Trained { linear: gate, x: &*input, low: &*kept.low[GATE], grad: &*dgate, found: &mut of_gate },
            Trained { linear: up, x: &*input, low: &*kept.low[UP], grad: &*dup, found: &mut of_up },
        ])?;
        (found[GATE], found[UP]) = (of_gate, of_up);
        drop(input);
        let mut dinput = steps.shared_input_gradient(&[(gate, &*dgate, &found[GATE]), (up, &*dup, &found[UP])])?;
        steps.sum_over(self.rows.parallel.ranks(), &mut dinput)?;
        steps.norm_gradients(&kept.residual, norm, eps, &dinput, Some(grad))
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
        let rows = decoder.batch_rows(&batch, pass.dropout).unwrap();
        let x = Tensor::zeros((n_rows, decoder.config().hidden_size), DType::F32, &Device::Cpu).unwrap();
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
