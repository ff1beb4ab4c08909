//! One transformer layer: weights, forward pass, backward pass.
//!
//! ```text
//! h   = x + o_proj(attention(rope(q_norm(q_proj(norm(x)))), rope(k_norm(k_proj(norm(x)))), v_proj(norm(x))))
//! out = h + down_proj(swiglu(gate_proj(norm(h)), up_proj(norm(h))))
//! ```
//!
//! Training and decoding, every device and every kind of adapter use this code. A [`LayerBackend`] computes the operations, an
//! [`Attention`] is either that of a packed batch or that over a paged KV cache.
//!
//! Saved for the backward pass of each row: queries, keys and values with RoPE applied, the output of attention, the residual
//! after it, gate and up (with per-head norms also queries and keys before them). Norms and the SwiGLU product are computed again.
//!
//! With tensor parallelism each rank computes its heads and its part of the feed-forward layer. Sums over ranks are formed after
//! o_proj and down_proj in the forward pass, and of the gradients of both norms' outputs in the backward pass.
//!
//! Source: transformers' `Qwen2DecoderLayer`, `Qwen3DecoderLayer`, `LlamaDecoderLayer`; for the sums over ranks Shoeybi et al. 2019,
//! "Megatron-LM", figure 3 (`f` and `g`).

use super::backend::{
    Attention, LayerBackend, LayerContext, LayerRows, LinearBackward, MaybeBorrowed, PackedAttention, TrainingBackend,
};
use super::linear::{Linear, LoraLinear};
use crate::checkpoint::WeightLoader;
use crate::{DecoderConfig, LoraAdapter, ModelError};
use candle_core::{Result as TensorResult, Tensor};

/// Weights of a layer as a model holds them.
pub struct LayerWeights {
    pub(crate) input_norm: Tensor,
    pub(crate) q: Linear,
    pub(crate) k: Linear,
    pub(crate) v: Linear,
    pub(crate) qk_norm: Option<[Tensor; 2]>,
    pub(crate) o: Linear,
    pub(crate) post_attention_norm: Tensor,
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

impl LayerWeights {
    pub(crate) fn load(path: &str, config: &DecoderConfig, loader: &mut WeightLoader<'_>) -> Result<Self, ModelError> {
        let mut linear = |name: &str, has_bias: bool| -> Result<Linear, ModelError> {
            let path = format!("{path}.{name}");
            let bias = if has_bias { loader.bias(&format!("{path}.bias"))? } else { None };
            Ok(Linear::new(path.clone(), loader.weight(&format!("{path}.weight"))?, bias))
        };
        let q = linear("self_attn.q_proj", config.qkv_bias)?;
        let k = linear("self_attn.k_proj", config.qkv_bias)?;
        let v = linear("self_attn.v_proj", config.qkv_bias)?;
        let o = linear("self_attn.o_proj", config.output_bias)?;
        let gate = linear("mlp.gate_proj", false)?;
        let up = linear("mlp.up_proj", false)?;
        let down = linear("mlp.down_proj", false)?;
        let mut norm = |name: &str| loader.value(&format!("{path}.{name}.weight"));
        let qk_norm = match config.family.has_qk_norm() {
            true => Some([norm("self_attn.q_norm")?, norm("self_attn.k_norm")?]),
            false => None,
        };
        let (input_norm, post_attention_norm) = (norm("input_layernorm")?, norm("post_attention_layernorm")?);
        Ok(Self { input_norm, q, k, v, qk_norm, o, post_attention_norm, gate, up, down })
    }

    /// The linear layers that can be adapted.
    pub fn linears(&self) -> [&Linear; 7] {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down]
    }
}

/// A layer as a backend runs it: weights of the base and of an adapter in the backend's form.
pub struct TransformerLayer<B: LayerBackend> {
    /// RMSNorm before attention.
    pub input_norm: B::Norm,
    /// q_proj, k_proj, v_proj.
    pub qkv: B::Linears<3>,
    /// Per-head RMSNorm of queries and keys.
    pub qk_norm: Option<[B::Norm; 2]>,
    /// o_proj.
    pub o: B::Linears<1>,
    /// RMSNorm before the feed-forward layer.
    pub post_attention_norm: B::Norm,
    /// gate_proj, up_proj.
    pub gate_up: B::Linears<2>,
    /// down_proj.
    pub down: B::Linears<1>,
}

/// Values saved for the backward pass, listed in the module's documentation. `S`: what attention saves.
pub struct SavedActivations<B: LayerBackend, S> {
    q: B::Activations,
    k: B::Activations,
    v: B::Activations,
    before_norm: Option<[B::Activations; 2]>,
    attended: B::Activations,
    attention: S,
    residual: B::Residual,
    gate: B::Activations,
    up: B::Activations,
    /// LoRA A outputs `(N, rank)` of the linear layers.
    lora_a_out: [B::LoraAOut; 7], // q, k, v, o, gate, up, down
}

type ForwardResult<B, S> = (<B as LayerBackend>::Residual, SavedActivations<B, S>);

impl<B: LayerBackend> TransformerLayer<B> {
    /// Output `(queries, H)` for the input `x` `(N, H)`.
    pub fn forward<A: Attention<B>>(
        &self,
        backend: &B,
        attention: &mut A,
        layer_rows: &LayerRows,
        x: &B::ResidualSlice,
    ) -> TensorResult<ForwardResult<B, A::Saved>> {
        let LayerRows { context, rows, query_rows } = layer_rows;
        let (width, query_rows) = (context.hidden_size, query_rows.as_ref());
        let [q_norm, k_norm] = self.qk_norms();

        let normed = backend.rms_norm(x, &self.input_norm, context.eps)?;
        let [(q_proj, q_lora), (k_proj, k_lora), (v, v_lora)] =
            backend.project_qkv(&self.qkv, &normed, width, query_rows)?;
        drop(normed);
        let q = backend.apply_rope(&q_proj, q_norm, context, layer_rows.queries())?;
        let k = backend.apply_rope(&k_proj, k_norm, context, rows)?;
        let before_norm = self.qk_norm.is_some().then_some([q_proj, k_proj]);
        let (attended, saved) = attention.attend(backend, [&q, &k, &v])?;
        let residual = backend.query_residual(x, width, query_rows)?;
        let (residual, o_lora) = add_output(backend, context, &self.o, &attended, residual)?;

        let normed = backend.rms_norm(&residual, &self.post_attention_norm, context.eps)?;
        let [(gate, gate_lora), (up, up_lora)] = backend.project(&self.gate_up, &normed)?;
        drop(normed);
        let gated = backend.swiglu(&gate, &up)?;
        let (out, down_lora) = add_output(backend, context, &self.down, &gated, MaybeBorrowed::Borrowed(&*residual))?;

        let lora_a_out = [q_lora, k_lora, v_lora, o_lora, gate_lora, up_lora, down_lora];
        Ok((out, SavedActivations { q, k, v, before_norm, attended, attention: saved, residual, gate, up, lora_a_out }))
    }

    fn qk_norms(&self) -> [Option<&B::Norm>; 2] {
        self.qk_norm.as_ref().map_or([None, None], |[q, k]| [Some(q), Some(k)])
    }
}

/// `residual` plus the output of a row-parallel linear layer: outputs are summed over ranks, the residual is added once.
fn add_output<B: LayerBackend>(
    backend: &B,
    context: &LayerContext,
    linear: &B::Linears<1>,
    x: &B::ActivationSlice,
    residual: MaybeBorrowed<'_, B::Residual>,
) -> TensorResult<(B::Residual, B::LoraAOut)> {
    let (mut sum, lora_a_out) = match context.parallel.shard().is_first() {
        true => backend.add_projection(linear, x, &residual)?,
        false => backend.add_projection(linear, x, &*backend.zeros_like(&residual)?)?,
    };
    backend.all_reduce(context.parallel.ranks(), &mut sum)?;
    Ok((sum, lora_a_out))
}

const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const O: usize = 3;
const GATE: usize = 4;
const UP: usize = 5;
const DOWN: usize = 6;

/// The layer's input `(N, H)`, and whether its gradient is needed: it is not if the input is the output of a frozen embedding.
#[derive(Clone, Copy)]
pub struct LayerInput<'a, B: TrainingBackend> {
    pub values: &'a B::ResidualSlice,
    pub needs_gradient: bool,
}

/// Gradient of the input, if needed, and gradients of the layer's tensors in the order of [`TransformerLayer::tensors`].
pub(crate) type LayerGradients<B> = (Option<<B as LayerBackend>::Residual>, Vec<Option<<B as LayerBackend>::Residual>>);

type Saved<B> = SavedActivations<B, <B as TrainingBackend>::LogSumExp>;

/// Gradients of q_proj's, k_proj's and v_proj's outputs, and of the per-head norms.
type AttentionGradients<B> = ([<B as LayerBackend>::Activations; 3], [Option<<B as LayerBackend>::Residual>; 2]);

impl<B: TrainingBackend> TransformerLayer<B> {
    /// The layer of a decoder with an adapter, prepared for one pass.
    ///
    /// # Errors
    /// The layer or the device cannot train the adapter.
    pub fn new(
        backend: &B,
        weights: &LayerWeights,
        adapter: Option<&LoraAdapter>,
        layer_rows: &LayerRows,
    ) -> TensorResult<Self> {
        let linear = |linear: &Linear, rows| {
            let linear = LoraLinear::new(linear, adapter, rows)?;
            backend.check(&linear)?;
            TensorResult::Ok(linear)
        };
        let (rows, queries) = (&layer_rows.rows, layer_rows.queries());
        Ok(Self {
            input_norm: weights.input_norm.clone(),
            qkv: B::group([linear(&weights.q, queries)?, linear(&weights.k, rows)?, linear(&weights.v, rows)?]),
            qk_norm: weights.qk_norm.clone(),
            o: B::group([linear(&weights.o, queries)?]),
            post_attention_norm: weights.post_attention_norm.clone(),
            gate_up: B::group([linear(&weights.gate, queries)?, linear(&weights.up, queries)?]),
            down: B::group([linear(&weights.down, queries)?]),
        })
    }

    fn linears(&self) -> [&LoraLinear<B::LinearState>; 7] {
        let ([q, k, v], [o]) = (B::members(&self.qkv), B::members(&self.o));
        let ([gate, up], [down]) = (B::members(&self.gate_up), B::members(&self.down));
        [q, k, v, o, gate, up, down]
    }

    /// All tensors of the layer that may be trained.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = vec![&self.input_norm, &self.post_attention_norm];
        tensors.extend(self.qk_norm.iter().flatten());
        tensors.extend(self.linears().into_iter().flat_map(LoraLinear::tensors));
        tensors
    }

    /// Tensors that are trained in this pass.
    pub fn trained(&self) -> Vec<&Tensor> {
        self.tensors().into_iter().filter(|tensor| tensor.track_op()).collect()
    }

    /// Gradients for the gradient `grad` of the output.
    pub fn backward(
        &self,
        backend: &B,
        attention: &PackedAttention,
        layer_rows: &LayerRows,
        saved: &Saved<B>,
        x: LayerInput<'_, B>,
        grad: &B::ResidualSlice,
    ) -> TensorResult<LayerGradients<B>> {
        let ([q, k, v, ..], context) = (self.linears(), &layer_rows.context);
        let (width, query_rows) = (context.hidden_size, layer_rows.query_rows.as_ref());
        let mut gradients: [B::LinearGradients; 7] = Default::default();

        let (dresidual, dpost_norm) = self.feed_forward_backward(backend, context, saved, grad, &mut gradients)?;
        let ([dq, dk, dv], dqk_norm) =
            self.attention_backward(backend, attention, layer_rows, saved, &dresidual, &mut gradients[O])?;

        // q_proj, k_proj, v_proj and the input's norm.
        let normed = backend.rms_norm(x.values, &self.input_norm, context.eps)?;
        let q_input = backend.query_activations(&normed, width, query_rows)?;
        let [mut q_grad, mut k_grad, mut v_grad] = backend.lora_b_backward([(q, &*dq), (k, &*dk), (v, &*dv)])?;
        let lora = |index: usize| &saved.lora_a_out[index];
        backend.parameter_backward([
            LinearBackward { linear: q, x: &*q_input, lora_a_out: lora(Q), grad: &*dq, gradients: &mut q_grad },
            LinearBackward { linear: k, x: &*normed, lora_a_out: lora(K), grad: &*dk, gradients: &mut k_grad },
            LinearBackward { linear: v, x: &*normed, lora_a_out: lora(V), grad: &*dv, gradients: &mut v_grad },
        ])?;
        let (mut dx, mut dinput_norm) = (None, None);
        if x.needs_gradient || self.input_norm.track_op() {
            let of_queries = (q, &*dq, &q_grad);
            let of_keys_values = [(k, &*dk, &k_grad), (v, &*dv, &v_grad)];
            let mut dnormed = match query_rows {
                None => backend.shared_input_backward(&[of_queries, of_keys_values[0], of_keys_values[1]])?,
                Some(_) => {
                    let mut dnormed = backend.shared_input_backward(&of_keys_values)?;
                    let of_queries = backend.shared_input_backward(&[of_queries])?;
                    backend.add_query_rows(&mut dnormed, &of_queries, width, query_rows)?;
                    dnormed
                }
            };
            backend.all_reduce(context.parallel.ranks(), &mut dnormed)?;
            // The residual's own gradient is added to all rows at once, or to the query rows.
            let residual_grad = query_rows.is_none().then_some(&*dresidual);
            let (mut sum, dnorm) =
                backend.rms_norm_backward(x.values, &self.input_norm, context.eps, &dnormed, residual_grad)?;
            if query_rows.is_some() {
                backend.add_query_rows(&mut sum, &dresidual, width, query_rows)?;
            }
            (dx, dinput_norm) = (Some(sum), dnorm);
        }
        (gradients[Q], gradients[K], gradients[V]) = (q_grad, k_grad, v_grad);

        let mut all = vec![dinput_norm, dpost_norm];
        if self.qk_norm.is_some() {
            all.extend(dqk_norm);
        }
        for (index, gradients) in gradients.into_iter().enumerate() {
            all.extend(self.linear_gradients(backend, context, index, gradients)?.into_iter().map(Some));
        }
        Ok((dx, all))
    }

    /// Gradients of the residual after attention and of the norm on it, for the gradient of the layer's output.
    fn feed_forward_backward(
        &self,
        backend: &B,
        context: &LayerContext,
        saved: &Saved<B>,
        grad: &B::ResidualSlice,
        gradients: &mut [B::LinearGradients; 7],
    ) -> TensorResult<(B::Residual, Option<B::Residual>)> {
        let ([.., gate, up, down], lora) = (self.linears(), |index: usize| &saved.lora_a_out[index]);
        let dout = backend.to_activations(grad)?;
        let [mut down_grad] = backend.lora_b_backward([(down, &*dout)])?;
        let dgated = backend.input_backward(down, &dout, &down_grad)?;
        let [gated, dgate, dup] = backend.swiglu_backward(&saved.gate, &saved.up, dgated)?;
        backend.parameter_backward([LinearBackward {
            linear: down,
            x: &*gated,
            lora_a_out: lora(DOWN),
            grad: &*dout,
            gradients: &mut down_grad,
        }])?;
        drop((gated, dout));

        let normed = backend.rms_norm(&saved.residual, &self.post_attention_norm, context.eps)?;
        let [mut gate_grad, mut up_grad] = backend.lora_b_backward([(gate, &*dgate), (up, &*dup)])?;
        backend.parameter_backward([
            LinearBackward {
                linear: gate,
                x: &*normed,
                lora_a_out: lora(GATE),
                grad: &*dgate,
                gradients: &mut gate_grad,
            },
            LinearBackward { linear: up, x: &*normed, lora_a_out: lora(UP), grad: &*dup, gradients: &mut up_grad },
        ])?;
        drop(normed);
        let mut dnormed = backend.shared_input_backward(&[(gate, &*dgate, &gate_grad), (up, &*dup, &up_grad)])?;
        (gradients[GATE], gradients[UP], gradients[DOWN]) = (gate_grad, up_grad, down_grad);
        backend.all_reduce(context.parallel.ranks(), &mut dnormed)?;
        backend.rms_norm_backward(&saved.residual, &self.post_attention_norm, context.eps, &dnormed, Some(grad))
    }

    /// Gradients of the attention block, given the gradient `grad` of the residual after attention.
    fn attention_backward(
        &self,
        backend: &B,
        attention: &PackedAttention,
        layer_rows: &LayerRows,
        saved: &Saved<B>,
        grad: &B::ResidualSlice,
        o_grad: &mut B::LinearGradients,
    ) -> TensorResult<AttentionGradients<B>> {
        let ([_, _, _, o, ..], context) = (self.linears(), &layer_rows.context);
        let dresidual = backend.to_activations(grad)?;
        [*o_grad] = backend.lora_b_backward([(o, &*dresidual)])?;
        backend.parameter_backward([LinearBackward {
            linear: o,
            x: &*saved.attended,
            lora_a_out: &saved.lora_a_out[O],
            grad: &*dresidual,
            gradients: &mut *o_grad,
        }])?;
        let dattended = backend.input_backward(o, &dresidual, o_grad)?;
        drop(dresidual);
        let qkv = [&*saved.q, &*saved.k, &*saved.v];
        let [dq, dk, dv] = backend.attention_backward(attention, qkv, &saved.attended, &saved.attention, &dattended)?;
        let [q_norm, k_norm] = self.qk_norms();
        let (q_proj, k_proj) = saved.before_norm.as_ref().map(|[q, k]| (&**q, &**k)).unzip();
        let (dq, dq_norm) = backend.rope_backward(q_proj, q_norm, context, layer_rows.queries(), &dq)?;
        let (dk, dk_norm) = backend.rope_backward(k_proj, k_norm, context, &layer_rows.rows, &dk)?;
        Ok(([dq, dk, dv], [dq_norm, dk_norm]))
    }

    /// Gradients of a linear layer's tensors. Of A and B, the gradient of the matrix that is replicated on every rank is summed over ranks.
    ///
    /// With `g` the gradient of the outputs, `dA = (s g B)^T x` and `dB = g^T (s x A^T)`. In a column-parallel layer each rank has some
    /// columns of `g` and rows of `B`, so its `s g B` is a partial sum; in a row-parallel layer its `s x A^T` is. The other matrix is
    /// sharded, and the gradient of its shard is complete.
    fn linear_gradients(
        &self,
        backend: &B,
        context: &LayerContext,
        index: usize,
        gradients: B::LinearGradients,
    ) -> TensorResult<Vec<B::Residual>> {
        let mut gradients = backend.gradients_of(self.linears()[index], gradients);
        if let ([a, b], true) = (gradients.as_mut_slice(), context.parallel.is_sharded()) {
            backend.all_reduce(context.parallel.ranks(), if matches!(index, O | DOWN) { b } else { a })?;
        }
        Ok(gradients)
    }
}
