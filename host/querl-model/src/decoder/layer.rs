//! One decoder layer: what it holds and what it computes.

use super::Weights;
use super::linear::Linear;
use crate::adapter::LoraAdapter;
use crate::kernels::{self, RopeTable};
use crate::{DecoderConfig, Family, ModelError, PackedBatch};
use candle_core::{Result as TensorResult, Tensor};

/// Weights of one decoder layer.
pub(super) struct Layer {
    pub(super) input_norm: Tensor,
    pub(super) post_attention_norm: Tensor,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) o: Linear,
    /// Qwen3: weights of the per-head norms of queries and keys.
    pub(super) qk_norm: Option<(Tensor, Tensor)>,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

impl Layer {
    pub(super) fn new(
        path: &str,
        config: &DecoderConfig,
        weights: Weights,
        take: &mut impl FnMut(&str) -> Result<Tensor, ModelError>,
    ) -> Result<Self, ModelError> {
        let mut linear = |name: &str, has_bias: bool| -> Result<Linear, ModelError> {
            let path = format!("{path}.{name}");
            let bias = if has_bias { Some(take(&format!("{path}.bias"))?) } else { None };
            Ok(Linear { weight: take(&format!("{path}.weight"))?, bias, path, weights })
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
                take(&format!("{path}.self_attn.q_norm.weight"))?,
                take(&format!("{path}.self_attn.k_norm.weight"))?,
            )),
        };
        Ok(Self {
            input_norm: take(&format!("{path}.input_layernorm.weight"))?,
            post_attention_norm: take(&format!("{path}.post_attention_layernorm.weight"))?,
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

    /// Queries, keys and values of N rows, normed and turned: `(N, heads * D)` and twice `(N, kv_heads * D)`.
    pub(super) fn queries_keys_values(
        &self,
        x: &Tensor,
        config: &DecoderConfig,
        rope: &RopeTable,
        batch: &PackedBatch,
        adapter: Option<&LoraAdapter>,
    ) -> TensorResult<(Tensor, Tensor, Tensor)> {
        let (mut q, mut k) = (self.q.forward(x, adapter)?, self.k.forward(x, adapter)?);
        if let Some((q_norm, k_norm)) = &self.qk_norm {
            q = per_head_norm(&q, q_norm, config)?;
            k = per_head_norm(&k, k_norm, config)?;
        }
        let q = kernels::rope(&q, rope, &batch.positions)?;
        let k = kernels::rope(&k, rope, &batch.positions)?;
        Ok((q, k, self.v.forward(x, adapter)?))
    }
}

fn per_head_norm(x: &Tensor, weight: &Tensor, config: &DecoderConfig) -> TensorResult<Tensor> {
    let rows = x.reshape(((), config.head_dim))?; // (N * heads, D)
    kernels::rms_norm(&rows, weight, config.rms_norm_eps)?.reshape(x.shape())
}
