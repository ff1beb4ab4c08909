//! One decoder layer: what it holds and what it computes.

use super::Weights;
use super::linear::Linear;
use super::load::weight_of;
use super::pass::{Dropout, Pass};
use crate::adapter::DropoutMask;
use crate::kernels::{self, RopeTable, Segment};
use crate::{DecoderConfig, Family, ModelError, PackedBatch};
use candle_core::{Result as TensorResult, Tensor};
use std::sync::Arc;

/// What every layer knows of the rows that pass through it.
#[derive(Clone)]
pub(super) struct Rows {
    pub(super) rope: RopeTable,
    pub(super) positions: Arc<Vec<u32>>,
    pub(super) segments: Arc<Vec<Segment>>,
    pub(super) head_dim: usize,
    pub(super) eps: f64,
    /// On the inputs of adapters: it has a key for each row that comes to a linear layer.
    pub(super) dropout: Option<DropoutMask>,
}

impl Rows {
    pub(super) fn new(
        batch: &PackedBatch,
        config: &DecoderConfig,
        rope: &RopeTable,
        dropout: Option<Dropout>,
    ) -> TensorResult<Self> {
        let dropout = dropout.filter(|dropout| dropout.p != 0.0);
        Ok(Self {
            dropout: dropout.map(|dropout| DropoutMask::new(dropout, batch.row_keys())).transpose()?,
            rope: rope.clone(),
            positions: batch.positions.clone(),
            segments: batch.segments.clone(),
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
        })
    }
}

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
            Ok(Linear::new(path.clone(), weight_of(take(&format!("{path}.weight"))?, weights)?, bias))
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

    /// The linear layers that can be adapted.
    pub(super) fn linears(&self) -> [&Linear; 7] {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down]
    }

    /// Output `(N, H)` of the layer for its input `(N, H)`.
    pub(super) fn forward(&self, x: &Tensor, rows: &Rows, pass: &Pass<'_>) -> TensorResult<Tensor> {
        let (q, k, v) = self.queries_keys_values(x, rows, pass)?;
        let attended = kernels::attention(&q, &k, &v, &rows.segments, rows.head_dim)?; // (N, heads * D)
        self.after_attention(x, &attended, rows, pass)
    }

    /// Queries, keys and values of N rows, normed and turned: `(N, heads * D)` and twice `(N, kv_heads * D)`.
    pub(super) fn queries_keys_values(
        &self,
        x: &Tensor,
        rows: &Rows,
        pass: &Pass<'_>,
    ) -> TensorResult<(Tensor, Tensor, Tensor)> {
        let x = kernels::rms_norm(x, &self.input_norm, rows.eps)?;
        let (mut q, mut k) = (self.q.forward(&x, rows, pass)?, self.k.forward(&x, rows, pass)?);
        if let Some((q_norm, k_norm)) = &self.qk_norm {
            q = per_head_norm(&q, q_norm, rows)?;
            k = per_head_norm(&k, k_norm, rows)?;
        }
        let q = kernels::rope(&q, &rows.rope, &rows.positions)?;
        let k = kernels::rope(&k, &rows.rope, &rows.positions)?;
        Ok((q, k, self.v.forward(&x, rows, pass)?))
    }

    /// The attention's projection and the feed-forward part, each added to what was there.
    pub(super) fn after_attention(
        &self,
        x: &Tensor,
        attended: &Tensor,
        rows: &Rows,
        pass: &Pass<'_>,
    ) -> TensorResult<Tensor> {
        let x = (x + self.o.forward(attended, rows, pass)?)?;
        let normed = kernels::rms_norm(&x, &self.post_attention_norm, rows.eps)?;
        let gated = kernels::swiglu(&self.gate.forward(&normed, rows, pass)?, &self.up.forward(&normed, rows, pass)?)?;
        x + self.down.forward(&gated, rows, pass)?
    }
}

fn per_head_norm(x: &Tensor, weight: &Tensor, rows: &Rows) -> TensorResult<Tensor> {
    let heads = x.reshape(((), rows.head_dim))?; // (N * heads, D)
    kernels::rms_norm(&heads, weight, rows.eps)?.reshape(x.shape())
}
