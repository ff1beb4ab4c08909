//! One decoder layer: what it holds and what it computes.

use super::fused::FusedLayer;
use super::linear::Linear;
use super::pass::Pass;
use super::rows::{BatchRows, QueryRows};
use crate::kernels;
use crate::weights::WeightLoader;
use crate::{DecoderConfig, Family, ModelError};
use candle_core::{Result as TensorResult, Tensor};

/// Weights of one decoder layer.
pub(crate) struct Layer {
    pub(crate) input_norm: Tensor,
    pub(crate) post_attention_norm: Tensor,
    pub(crate) q: Linear,
    pub(crate) k: Linear,
    pub(crate) v: Linear,
    pub(crate) o: Linear,
    /// Qwen3: weights of the per-head norms of queries and keys.
    pub(crate) qk_norm: Option<(Tensor, Tensor)>,
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

impl Layer {
    pub(crate) fn new(path: &str, config: &DecoderConfig, source: &mut WeightLoader<'_>) -> Result<Self, ModelError> {
        let mut linear = |name: &str, has_bias: bool| -> Result<Linear, ModelError> {
            let path = format!("{path}.{name}");
            let bias = if has_bias { source.bias(&format!("{path}.bias"))? } else { None };
            Ok(Linear::new(path.clone(), source.weight(&format!("{path}.weight"))?, bias))
        };
        let bias = config.qkv_bias;
        let (q, k, v) =
            (linear("self_attn.q_proj", bias)?, linear("self_attn.k_proj", bias)?, linear("self_attn.v_proj", bias)?);
        let o = linear("self_attn.o_proj", config.output_bias)?;
        let (gate, up, down) =
            (linear("mlp.gate_proj", false)?, linear("mlp.up_proj", false)?, linear("mlp.down_proj", false)?);
        let qk_norm = match config.family {
            Family::Qwen2 => None,
            Family::Qwen3 => Some((
                source.value(&format!("{path}.self_attn.q_norm.weight"))?,
                source.value(&format!("{path}.self_attn.k_norm.weight"))?,
            )),
        };
        Ok(Self {
            input_norm: source.value(&format!("{path}.input_layernorm.weight"))?,
            post_attention_norm: source.value(&format!("{path}.post_attention_layernorm.weight"))?,
            q,
            k,
            v,
            o,
            qk_norm,
            gate,
            up,
            down,
        })
    }

    /// The linear layers that can be adapted.
    pub(crate) fn linears(&self) -> [&Linear; 7] {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down]
    }

    /// Output `(N, H)` of the layer for its input `(N, H)`.
    pub(crate) fn forward(&self, x: &Tensor, rows: &BatchRows, pass: &Pass<'_>) -> TensorResult<Tensor> {
        if let Some(fused) = FusedLayer::new(self, x, rows, None, pass)? {
            return fused.apply(x);
        }
        let (q, k, v) = self.queries_keys_values(x, rows, pass)?;
        let attended = kernels::attention(&q, &k, &v, &rows.queries, rows.head_dim)?; // (N, heads * D)
        self.after_attention(x, &attended, rows, pass)
    }

    /// Output `(wanted, H)` for some rows of its input `(N, H)`: of the others only keys and values are computed.
    pub(crate) fn forward_at(
        &self,
        x: &Tensor,
        rows: &BatchRows,
        wanted: &QueryRows,
        pass: &Pass<'_>,
    ) -> TensorResult<Tensor> {
        if let Some(fused) = FusedLayer::new(self, x, rows, Some(wanted), pass)? {
            return fused.apply(x);
        }
        let normed = rows.parallel.shared(&kernels::rms_norm(x, &self.input_norm, rows.eps)?)?;
        let (k, v) = (self.keys(&normed, rows, pass)?, self.v.forward(&normed, rows, pass)?);
        let QueryRows { indices, rows, .. } = wanted;
        let q = self.queries(&normed.index_select(indices, 0)?, rows, pass)?;
        let attended = kernels::attention(&q, &k, &v, &rows.queries, rows.head_dim)?;
        self.after_attention(&x.index_select(indices, 0)?, &attended, rows, pass)
    }

    /// Queries, keys and values of N rows, normed and turned: `(N, heads * D)` and twice `(N, kv_heads * D)`.
    pub(crate) fn queries_keys_values(
        &self,
        x: &Tensor,
        rows: &BatchRows,
        pass: &Pass<'_>,
    ) -> TensorResult<(Tensor, Tensor, Tensor)> {
        let normed = rows.parallel.shared(&kernels::rms_norm(x, &self.input_norm, rows.eps)?)?;
        let (q, k) = (self.queries(&normed, rows, pass)?, self.keys(&normed, rows, pass)?);
        Ok((q, k, self.v.forward(&normed, rows, pass)?))
    }

    fn queries(&self, normed: &Tensor, rows: &BatchRows, pass: &Pass<'_>) -> TensorResult<Tensor> {
        let q = self.q.forward(normed, rows, pass)?;
        turned(&q, self.qk_norm.as_ref().map(|(norm, _)| norm), rows)
    }

    fn keys(&self, normed: &Tensor, rows: &BatchRows, pass: &Pass<'_>) -> TensorResult<Tensor> {
        let k = self.k.forward(normed, rows, pass)?;
        turned(&k, self.qk_norm.as_ref().map(|(_, norm)| norm), rows)
    }

    /// The attention's projection and the feed-forward part, each added to what was there.
    pub(crate) fn after_attention(
        &self,
        x: &Tensor,
        attended: &Tensor,
        rows: &BatchRows,
        pass: &Pass<'_>,
    ) -> TensorResult<Tensor> {
        let x = (x + rows.parallel.summed(&self.o.forward(attended, rows, pass)?)?)?;
        let normed = rows.parallel.shared(&kernels::rms_norm(&x, &self.post_attention_norm, rows.eps)?)?;
        let gated = kernels::swiglu(&self.gate.forward(&normed, rows, pass)?, &self.up.forward(&normed, rows, pass)?)?;
        x + rows.parallel.summed(&self.down.forward(&gated, rows, pass)?)?
    }
}

/// Each head by its position, after its norm where there is one.
fn turned(x: &Tensor, norm: Option<&Tensor>, rows: &BatchRows) -> TensorResult<Tensor> {
    match norm {
        Some(norm) => kernels::norm_rope(x, norm, &rows.rope, &rows.positions, rows.eps),
        None => kernels::rope(x, &rows.rope, &rows.positions),
    }
}
