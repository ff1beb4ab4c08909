//! One decoder layer: what it holds and what it computes.

use super::fused::FusedLayer;
use super::linear::Linear;
use super::load::Source;
use super::parallel::TensorParallel;
use super::pass::{Dropout, Pass};
use crate::adapter::DropoutMask;
use crate::kernels::{self, Queries, RopeTable};
use crate::{Decoder, DecoderConfig, Family, ModelError, PackedBatch};
use candle_core::{Result as TensorResult, Tensor};
use std::sync::Arc;

/// What every layer knows of the rows that pass through it.
#[derive(Clone)]
pub(super) struct Rows {
    pub(super) rope: RopeTable,
    pub(super) positions: Arc<Vec<u32>>,
    pub(super) queries: Queries,
    pub(super) head_dim: usize,
    pub(super) eps: f64,
    /// Whose results are summed up behind a layer that is split by its inputs.
    pub(super) parallel: TensorParallel,
    /// On the inputs of adapters: it has a key for each row that comes to a linear layer.
    pub(super) dropout: Option<DropoutMask>,
    /// The same on the card, where the pass runs there.
    #[cfg(feature = "cuda")]
    pub(super) on_card: Option<Arc<super::card::CardRows>>,
}

impl Rows {
    pub(super) fn new(batch: &PackedBatch, decoder: &Decoder, dropout: Option<Dropout>) -> TensorResult<Self> {
        let dropout = dropout.filter(|dropout| dropout.p != 0.0);
        let dropout =
            dropout.map(|dropout| DropoutMask::new(dropout, batch.row_keys(), decoder.shard())).transpose()?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            on_card: match &decoder.on_card {
                Some(card) => Some(Arc::new(card.rows(batch, None, dropout.as_ref())?)),
                None => None,
            },
            dropout,
            rope: decoder.rope.clone(),
            positions: batch.positions.clone(),
            queries: Queries::all(&batch.tree),
            head_dim: decoder.config.head_dim,
            eps: decoder.config.rms_norm_eps,
            parallel: decoder.parallel.clone(),
        })
    }
}

/// The rows that are wanted of the last layer.
#[derive(Clone)]
pub(super) struct Wanted {
    /// In rising order.
    pub(super) list: Arc<Vec<u32>>,
    indices: Tensor, // u32, the same
    pub(super) rows: Rows,
}

impl Wanted {
    /// `wanted`: some of a batch's `rows`, in rising order.
    pub(super) fn new(batch: &PackedBatch, decoder: &Decoder, rows: &Rows, wanted: &[u32]) -> TensorResult<Self> {
        let queries = Queries::some(&batch.tree, wanted)?; // a row that is not there ends here
        let positions = wanted.iter().map(|&row| batch.positions[row as usize]).collect();
        let dropout = rows.dropout.as_ref().map(|mask| mask.of_rows(wanted));
        let rows = Rows {
            #[cfg(feature = "cuda")]
            on_card: match &decoder.on_card {
                Some(card) => Some(Arc::new(card.rows(batch, Some(wanted), dropout.as_ref())?)),
                None => None,
            },
            positions: Arc::new(positions),
            queries,
            dropout,
            ..rows.clone()
        };
        let indices = Tensor::new(wanted, decoder.norm.device())?;
        Ok(Self { list: Arc::new(wanted.to_vec()), indices, rows })
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
    pub(super) fn new(path: &str, config: &DecoderConfig, source: &mut Source<'_>) -> Result<Self, ModelError> {
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
    pub(super) fn linears(&self) -> [&Linear; 7] {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down]
    }

    /// Output `(N, H)` of the layer for its input `(N, H)`.
    pub(super) fn forward(&self, x: &Tensor, rows: &Rows, pass: &Pass<'_>) -> TensorResult<Tensor> {
        if let Some(fused) = FusedLayer::new(self, x, rows, None, pass)? {
            return fused.apply(x);
        }
        let (q, k, v) = self.queries_keys_values(x, rows, pass)?;
        let attended = kernels::attention(&q, &k, &v, &rows.queries, rows.head_dim)?; // (N, heads * D)
        self.after_attention(x, &attended, rows, pass)
    }

    /// Output `(wanted, H)` for some rows of its input `(N, H)`: of the others only keys and values are computed.
    pub(super) fn forward_at(&self, x: &Tensor, rows: &Rows, wanted: &Wanted, pass: &Pass<'_>) -> TensorResult<Tensor> {
        if let Some(fused) = FusedLayer::new(self, x, rows, Some(wanted), pass)? {
            return fused.apply(x);
        }
        let normed = rows.parallel.shared(&kernels::rms_norm(x, &self.input_norm, rows.eps)?)?;
        let (k, v) = (self.keys(&normed, rows, pass)?, self.v.forward(&normed, rows, pass)?);
        let Wanted { indices, rows, .. } = wanted;
        let q = self.queries(&normed.index_select(indices, 0)?, rows, pass)?;
        let attended = kernels::attention(&q, &k, &v, &rows.queries, rows.head_dim)?;
        self.after_attention(&x.index_select(indices, 0)?, &attended, rows, pass)
    }

    /// Queries, keys and values of N rows, normed and turned: `(N, heads * D)` and twice `(N, kv_heads * D)`.
    pub(super) fn queries_keys_values(
        &self,
        x: &Tensor,
        rows: &Rows,
        pass: &Pass<'_>,
    ) -> TensorResult<(Tensor, Tensor, Tensor)> {
        let normed = rows.parallel.shared(&kernels::rms_norm(x, &self.input_norm, rows.eps)?)?;
        let (q, k) = (self.queries(&normed, rows, pass)?, self.keys(&normed, rows, pass)?);
        Ok((q, k, self.v.forward(&normed, rows, pass)?))
    }

    fn queries(&self, normed: &Tensor, rows: &Rows, pass: &Pass<'_>) -> TensorResult<Tensor> {
        let q = self.q.forward(normed, rows, pass)?;
        turned(&q, self.qk_norm.as_ref().map(|(norm, _)| norm), rows)
    }

    fn keys(&self, normed: &Tensor, rows: &Rows, pass: &Pass<'_>) -> TensorResult<Tensor> {
        let k = self.k.forward(normed, rows, pass)?;
        turned(&k, self.qk_norm.as_ref().map(|(_, norm)| norm), rows)
    }

    /// The attention's projection and the feed-forward part, each added to what was there.
    pub(super) fn after_attention(
        &self,
        x: &Tensor,
        attended: &Tensor,
        rows: &Rows,
        pass: &Pass<'_>,
    ) -> TensorResult<Tensor> {
        let x = (x + rows.parallel.summed(&self.o.forward(attended, rows, pass)?)?)?;
        let normed = rows.parallel.shared(&kernels::rms_norm(&x, &self.post_attention_norm, rows.eps)?)?;
        let gated = kernels::swiglu(&self.gate.forward(&normed, rows, pass)?, &self.up.forward(&normed, rows, pass)?)?;
        x + rows.parallel.summed(&self.down.forward(&gated, rows, pass)?)?
    }
}

/// Each head by its position, after its norm where there is one.
fn turned(x: &Tensor, norm: Option<&Tensor>, rows: &Rows) -> TensorResult<Tensor> {
    match norm {
        Some(norm) => kernels::norm_rope(x, norm, &rows.rope, &rows.positions, rows.eps),
        None => kernels::rope(x, &rows.rope, &rows.positions),
    }
}
