//! The decoder: embedding, transformer layers, final norm, head.

mod adapted;
mod load;
mod parts;
mod shapes;
mod view;

use crate::accelerator::DeviceState;
use crate::adapter::LoraAdapter;
use crate::dropout::{Dropout, DropoutMask};
use crate::kernels::{self, Queries, RopeTable, Weight};
use crate::sharding::{Shard, TensorParallel};
use crate::transformer::{
    self, CheckpointedLayer, LayerContext, LayerPass, LayerRows, LayerWeights, PackedAttention, Pass, QueryRows, Rows,
};
use crate::{ComputeDevice, DecoderConfig, ModelError, PackedBatch, save_tensors};
use candle_core::{DType, Result as TensorResult, Tensor, Var};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

pub use parts::{AdaptedLayer, AdaptedLinear};

/// A decoder-only language model of one of the families of [`crate::Family`].
pub struct Decoder {
    config: DecoderConfig,
    /// Of what stands here: the same, but where several ranks hold the model together.
    local: DecoderConfig,
    parallel: TensorParallel,
    embedding: Weight, // (V, H)
    pub(crate) layers: Vec<Arc<LayerWeights>>,
    norm: Tensor,
    head: Weight, // (V, H); the embedding where tied
    rope: RopeTable,
    vars: BTreeMap<String, Var>,
    place: ComputeDevice,
    /// RoPE table of an accelerator.
    device_rope: Option<DeviceState>,
}

impl Decoder {
    /// Shape of the whole model.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Shape of what stands here.
    pub fn local_config(&self) -> &DecoderConfig {
        &self.local
    }

    /// Which part of the model this is.
    pub fn shard(&self) -> Shard {
        self.parallel.shard()
    }

    /// The ranks that hold the model together.
    pub fn parallel(&self) -> &TensorParallel {
        &self.parallel
    }

    /// Where its weights stand and its passes run.
    pub fn place(&self) -> &ComputeDevice {
        &self.place
    }

    /// Trained base weights by name; empty where they are frozen.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        &self.vars
    }

    /// Hidden states after the final norm: `(N, H)` for the N rows of the batch.
    ///
    /// # Errors
    /// A token outside the vocabulary, or a sequence longer than the model's positions.
    pub fn hidden_states(&self, batch: &PackedBatch, adapter: Option<&LoraAdapter>) -> Result<Tensor, ModelError> {
        Ok(self.forward(batch, None, &Pass::with(adapter))?)
    }

    /// Hidden states after the final norm of some rows, `(rows, H)` in the order given; a row may be named more than once.
    /// What only those rows need is computed for those rows alone; for no rows nothing is.
    ///
    /// # Errors
    /// As [`Decoder::hidden_states`]; a row that the batch does not have.
    pub fn hidden_at(&self, batch: &PackedBatch, rows: &[u32], pass: &Pass<'_>) -> Result<Tensor, ModelError> {
        let mut wanted = rows.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        if let Some(row) = wanted.last().filter(|&&row| row as usize >= batch.n_rows()) {
            return Err(candle_core::Error::Msg(format!("there is no row {row} among {}", batch.n_rows())).into());
        }
        let is_all = wanted.len() == batch.n_rows();
        let hidden = self.forward(batch, (!is_all).then_some(&wanted), pass)?;
        if wanted == rows {
            return Ok(hidden);
        }
        let place = |row: &u32| wanted.partition_point(|wanted| wanted < row) as u32;
        let places: Vec<u32> = rows.iter().map(place).collect();
        Ok(kernels::select_rows(&hidden, places)?)
    }

    /// Log-probability of `targets` and entropy of the distribution, `(N, 2)`, for N rows of hidden states. The adapter is the
    /// one that made them: it may have changed the head too.
    ///
    /// # Errors
    /// See [`kernels::token_logprobs`].
    pub fn token_logprobs(
        &self,
        hidden: &Tensor,
        targets: Vec<u32>,
        temperature: f64,
        adapter: Option<&LoraAdapter>,
    ) -> Result<Tensor, ModelError> {
        Ok(kernels::token_logprobs(hidden, &self.head(adapter)?, &Arc::new(targets), temperature)?)
    }

    /// Logits `(N, V)` of N rows of hidden states. The adapter is the one that made them.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn logits(&self, hidden: &Tensor, adapter: Option<&LoraAdapter>) -> Result<Tensor, ModelError> {
        Ok(kernels::linear(hidden, &self.head(adapter)?, None)?)
    }

    /// Writes `model.safetensors`. Tied heads are not written twice.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, directory: &Path, dtype: DType) -> Result<(), ModelError> {
        let tensors: Result<BTreeMap<String, Tensor>, candle_core::Error> =
            self.vars.iter().map(|(name, var)| Ok((name.clone(), var.as_tensor().to_dtype(dtype)?))).collect();
        save_tensors(&directory.join("model.safetensors"), &tensors?)
    }

    /// `wanted`: rows in rising order, or all.
    fn forward(&self, batch: &PackedBatch, wanted: Option<&Vec<u32>>, pass: &Pass<'_>) -> TensorResult<Tensor> {
        if wanted.map_or(batch.n_rows(), Vec::len) == 0 {
            return Tensor::zeros((0, self.config.hidden_size), DType::F32, self.norm.device());
        }
        let all_rows = self.layer_pass(batch, pass.dropout)?;
        let last = wanted.map(|wanted| self.query_pass(batch, &all_rows, wanted)).transpose()?;
        let checkpointing = pass.recompute.filter(|recompute| recompute.keeps_inputs());
        let adapter = checkpointing.and(pass.adapter).map(|adapter| Arc::new(adapter.clone()));
        let mut x = self.embed(batch, pass.adapter)?;
        for (index, weights) in self.layers.iter().enumerate() {
            let is_last = index + 1 == self.layers.len();
            let layer_pass = last.as_ref().filter(|_| is_last).unwrap_or(&all_rows).clone();
            x = match checkpointing {
                None => transformer::forward(weights, pass.adapter, &x, layer_pass, pass.recompute)?,
                Some(recompute) => CheckpointedLayer {
                    weights: weights.clone(),
                    pass: layer_pass,
                    adapter: adapter.clone(),
                    recompute: recompute.clone(),
                    input: x.detach(),
                }
                .apply(&x)?,
            };
        }
        kernels::rms_norm(&x, &self.norm, self.config.rms_norm_eps)
    }

    pub(crate) fn context(&self) -> LayerContext {
        LayerContext {
            rope: self.rope.clone(),
            hidden_size: self.config.hidden_size,
            eps: self.config.rms_norm_eps as f32,
            parallel: self.parallel.clone(),
        }
    }

    /// All rows of a batch through a layer.
    pub(crate) fn layer_pass(&self, batch: &PackedBatch, dropout: Option<Dropout>) -> TensorResult<LayerPass> {
        let dropout = dropout.filter(|dropout| dropout.p != 0.0);
        let dropout = dropout.map(|dropout| DropoutMask::new(dropout, batch.row_keys(), self.shard())).transpose()?;
        let device_rows = self.device_rows(batch, None, dropout.as_ref())?;
        let rows = Rows { positions: batch.positions.clone(), dropout, device_rows };
        let attention =
            PackedAttention { queries: Queries::all(&batch.tree), head_dim: self.config.head_dim, rows: rows.clone() };
        Ok(LayerPass { layer_rows: LayerRows { context: self.context(), rows, query_rows: None }, attention })
    }

    /// The same with some of the batch's rows, ascending, as queries.
    pub(crate) fn query_pass(&self, batch: &PackedBatch, all: &LayerPass, wanted: &[u32]) -> TensorResult<LayerPass> {
        let queries = Queries::some(&batch.tree, wanted)?; // checks that the rows exist
        let positions = wanted.iter().map(|&row| batch.positions[row as usize]).collect();
        let dropout = all.layer_rows.rows.dropout.as_ref().map(|mask| mask.of_rows(wanted));
        let device_rows = self.device_rows(batch, Some(wanted), dropout.as_ref())?;
        let rows = Rows { positions: Arc::new(positions), dropout, device_rows };
        let query_rows = Some(QueryRows { indices: Arc::new(wanted.to_vec()), rows: rows.clone() });
        Ok(LayerPass {
            layer_rows: LayerRows { query_rows, ..all.layer_rows.clone() },
            attention: PackedAttention { queries, head_dim: self.config.head_dim, rows },
        })
    }

    /// See [`Rows::device_rows`]; `query_rows`: `None` means all.
    fn device_rows(
        &self,
        batch: &PackedBatch,
        query_rows: Option<&[u32]>,
        dropout: Option<&DropoutMask>,
    ) -> TensorResult<Option<DeviceState>> {
        match (&self.place, &self.device_rope) {
            (ComputeDevice::Accelerator(accelerator), Some(rope)) => {
                accelerator.upload_rows(rope, batch, query_rows, dropout).map(Some)
            }
            _ => Ok(None),
        }
    }
}
