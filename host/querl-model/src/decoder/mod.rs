//! The decoder: embedding, transformer layers, final norm, head; with or without an adapter.

mod load;

use crate::accelerator::DeviceState;
use crate::adapter::{EMBEDDING, HEAD, LoraAdapter, LoraPair};
use crate::dropout::{Dropout, DropoutMask};
use crate::kernels::{self, Queries, RopeTable, Weight};
use crate::sharding::{Shard, TensorParallel};
use crate::transformer::{
    self, CheckpointedLayer, LayerContext, LayerPass, LayerRows, LayerWeights, Linear, PackedAttention, Pass,
    QueryRows, Rows,
};
use crate::{ComputeDevice, DecoderConfig, LoraSettings, ModelError, PackedBatch, save_tensors};
use candle_core::{DType, Result as TensorResult, Tensor, Var, bail};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// A decoder-only language model of one of the families of [`crate::Family`].
pub struct Decoder {
    config: DecoderConfig,
    local: DecoderConfig,
    parallel: TensorParallel,
    embedding: Weight, // (V, H)
    pub(crate) layers: Vec<Arc<LayerWeights>>,
    norm: Tensor,
    head: Weight, // (V, H); the embedding if tied
    rope: RopeTable,
    vars: BTreeMap<String, Var>,
    compute_device: ComputeDevice,
    /// RoPE table in the accelerator's memory.
    device_rope: Option<DeviceState>,
}

impl Decoder {
    /// Configuration of the full model.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Configuration of this rank's shard.
    pub fn local_config(&self) -> &DecoderConfig {
        &self.local
    }

    /// This rank's shard of the model.
    pub fn shard(&self) -> Shard {
        self.parallel.shard()
    }

    /// This rank's tensor-parallel shard and process group.
    pub fn parallel(&self) -> &TensorParallel {
        &self.parallel
    }

    /// The device that holds the weights and computes the passes.
    pub fn compute_device(&self) -> &ComputeDevice {
        &self.compute_device
    }

    /// Trained base weights by name; empty if the base is frozen.
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

    /// Hidden states after the final norm of the given rows, `(rows, H)` in the order given; a row may be named more than once. The last
    /// layer computes everything but keys and values for these rows alone; for no rows nothing is computed.
    ///
    /// # Errors
    /// As [`Decoder::hidden_states`]; or a row that the batch does not have.
    pub fn hidden_at(&self, batch: &PackedBatch, rows: &[u32], pass: &Pass<'_>) -> Result<Tensor, ModelError> {
        let mut query_rows = rows.to_vec();
        query_rows.sort_unstable();
        query_rows.dedup();
        if let Some(row) = query_rows.last().filter(|&&row| row as usize >= batch.n_rows()) {
            return Err(candle_core::Error::Msg(format!("there is no row {row} among {}", batch.n_rows())).into());
        }
        let is_all = query_rows.len() == batch.n_rows();
        let hidden = self.forward(batch, (!is_all).then_some(&query_rows), pass)?;
        if query_rows == rows {
            return Ok(hidden);
        }
        let index = |row: &u32| query_rows.partition_point(|query_row| query_row < row) as u32;
        let indices: Vec<u32> = rows.iter().map(index).collect();
        Ok(kernels::select_rows(&hidden, indices)?)
    }

    /// Log-probability of `targets` and entropy of the distribution, `(N, 2)` in nats, for N rows of hidden states. `adapter`: the one with
    /// which the hidden states were computed, since it may change the head too.
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

    /// Logits `(N, V)` of N rows of hidden states. `adapter`: the one with which the hidden states were computed.
    ///
    /// # Errors
    /// Shapes do not match.
    pub fn logits(&self, hidden: &Tensor, adapter: Option<&LoraAdapter>) -> Result<Tensor, ModelError> {
        Ok(kernels::linear(hidden, &self.head(adapter)?, None)?)
    }

    /// Writes `model.safetensors` with tensors in `dtype`; a tied head is not written.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, directory: &Path, dtype: DType) -> Result<(), ModelError> {
        let tensors: Result<BTreeMap<String, Tensor>, candle_core::Error> =
            self.vars.iter().map(|(name, var)| Ok((name.clone(), var.as_tensor().to_dtype(dtype)?))).collect();
        save_tensors(&directory.join("model.safetensors"), &tensors?)
    }

    /// `query_rows`: ascending, `None` means all.
    fn forward(&self, batch: &PackedBatch, query_rows: Option<&Vec<u32>>, pass: &Pass<'_>) -> TensorResult<Tensor> {
        if query_rows.map_or(batch.n_rows(), Vec::len) == 0 {
            return Tensor::zeros((0, self.config.hidden_size), DType::F32, self.norm.device());
        }
        let all_rows = self.layer_pass(batch, pass.dropout)?;
        let last = query_rows.map(|query_rows| self.query_pass(batch, &all_rows, query_rows)).transpose()?;
        let checkpointing = pass.recompute.filter(|recompute| recompute.keeps_inputs());
        let adapter = checkpointing.and(pass.adapter).map(|adapter| Arc::new(adapter.clone()));
        let mut x = self.embed(batch, pass.adapter)?;
        for (index, weights) in self.layers.iter().enumerate() {
            let is_last = index + 1 == self.layers.len();
            let layer_pass = self.with_window(last.as_ref().filter(|_| is_last).unwrap_or(&all_rows), index);
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

    /// Parameters that all layers of this decoder share, such as the RoPE table.
    pub fn context(&self) -> LayerContext {
        LayerContext {
            rope: self.rope.clone(),
            hidden_size: self.config.hidden_size,
            eps: self.config.rms_norm_eps as f32,
            parallel: self.parallel.clone(),
        }
    }

    pub(crate) fn layer_pass(&self, batch: &PackedBatch, dropout: Option<Dropout>) -> TensorResult<LayerPass> {
        let dropout = dropout.filter(|dropout| dropout.p != 0.0);
        let dropout = dropout.map(|dropout| DropoutMask::new(dropout, batch.row_keys(), self.shard())).transpose()?;
        let device_rows = self.device_rows(batch, None, dropout.as_ref())?;
        let rows = Rows { positions: batch.positions.clone(), dropout, device_rows };
        let attention =
            PackedAttention { queries: Queries::all(&batch.tree), head_dim: self.config.head_dim, rows: rows.clone() };
        Ok(LayerPass { layer_rows: LayerRows { context: self.context(), rows, query_rows: None }, attention })
    }

    /// `pass` with the sliding window of layer `layer`.
    pub(crate) fn with_window(&self, pass: &LayerPass, layer: usize) -> LayerPass {
        let queries = pass.attention.queries.with_window(self.config.sliding_window(layer));
        LayerPass { attention: PackedAttention { queries, ..pass.attention.clone() }, ..pass.clone() }
    }

    /// `all` with only some of the batch's rows as queries; `query_rows`: their indices, ascending.
    pub(crate) fn query_pass(
        &self,
        batch: &PackedBatch,
        all: &LayerPass,
        query_rows: &[u32],
    ) -> TensorResult<LayerPass> {
        let queries = Queries::some(&batch.tree, query_rows)?; // checks that the rows exist
        let positions = query_rows.iter().map(|&row| batch.positions[row as usize]).collect();
        let dropout = all.layer_rows.rows.dropout.as_ref().map(|mask| mask.of_rows(query_rows));
        let device_rows = self.device_rows(batch, Some(query_rows), dropout.as_ref())?;
        let rows = Rows { positions: Arc::new(positions), dropout, device_rows };
        let query_rows = Some(QueryRows { indices: Arc::new(query_rows.to_vec()), rows: rows.clone() });
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
        match (transformer::layer_accelerator_of(&self.compute_device.device())?, &self.device_rope) {
            (Some(accelerator), Some(rope)) => accelerator.upload_rows(rope, batch, query_rows, dropout).map(Some),
            _ => Ok(None),
        }
    }

    /// The base's weight of a linear layer `(out, in)`, of the embedding or of the head `(V, H)`, in f32.
    pub(crate) fn base_weight(&self, path: &str) -> TensorResult<Tensor> {
        let mut linears = self.layers.iter().flat_map(|layer| layer.linears());
        let weight = match path {
            EMBEDDING => Some(&self.embedding),
            HEAD => Some(&self.head),
            _ => linears.find(|linear| linear.path == path).map(|linear| &linear.weight),
        };
        let Some(weight) = weight else { bail!("no layer `{path}`") };
        weight.to_tensor()
    }

    /// Rows of the embedding for the batch's tokens, `(N, H)`, with the adapter applied.
    pub(super) fn embed(&self, batch: &PackedBatch, adapter: Option<&LoraAdapter>) -> TensorResult<Tensor> {
        let ids = || Tensor::from_slice(&batch.token_ids, batch.n_rows(), self.norm.device());
        if let Some(saved) = adapter.and_then(|adapter| adapter.saved_module(EMBEDDING)) {
            return saved.index_select(&ids()?, 0);
        }
        let rows = match &self.embedding {
            Weight::Frozen(embedding) => embedding.rows(&batch.token_ids)?,
            Weight::Trained(embedding) => embedding.index_select(&ids()?, 0)?,
            Weight::Accelerator(embedding) => embedding.rows(&batch.token_ids)?,
        };
        let Some(pair) = adapter.and_then(|adapter| adapter.pair(EMBEDDING)) else { return Ok(rows) };
        let down = pair.a.index_select(&ids()?, 1)?.t()?; // (N, rank)
        rows + (down.matmul(&pair.b.t()?)? * f64::from(pair.scale))?
    }

    /// The head `(V, H)` with the adapter applied; a new tensor if the adapter changes the head.
    pub(super) fn head(&self, adapter: Option<&LoraAdapter>) -> TensorResult<Weight> {
        if let Some(saved) = adapter.and_then(|adapter| adapter.saved_module(HEAD)) {
            return Ok(Weight::Trained(saved.clone()));
        }
        match adapter.and_then(|adapter| adapter.pair(HEAD)) {
            Some(pair) => Ok(Weight::Trained(pair.changed(&self.base_weight(HEAD)?)?)),
            None => Ok(self.head.clone()),
        }
    }

    /// All layers in order, with the adapter's matrices.
    pub fn adapted_layers<'a>(
        &'a self,
        adapter: Option<&'a LoraAdapter>,
    ) -> impl Iterator<Item = TensorResult<AdaptedLayer<'a>>> {
        self.layers.iter().map(move |layer| layer.adapted(adapter))
    }

    /// Weight `(H)` of the RMSNorm before the head.
    pub fn final_norm(&self) -> &Tensor {
        &self.norm
    }

    /// RoPE table in an accelerator's memory, `None` on the CPU; see [`crate::backend::LayerAccelerator::upload_rope`].
    pub fn device_rope(&self) -> Option<&DeviceState> {
        self.device_rope.as_ref()
    }

    /// The embedding `(V, H)` with the adapter applied; if the adapter changes it, a new tensor that does not follow later training.
    pub fn adapted_embedding(&self, adapter: Option<&LoraAdapter>) -> TensorResult<Weight> {
        if let Some(saved) = adapter.and_then(|adapter| adapter.saved_module(EMBEDDING)) {
            return Ok(Weight::Trained(saved.detach().copy()?));
        }
        let Some(pair) = adapter.and_then(|adapter| adapter.pair(EMBEDDING)) else { return Ok(self.embedding.clone()) };
        let change = (pair.b.detach().matmul(&pair.a.detach())?.t()? * f64::from(pair.scale))?; // (V, H)
        Ok(Weight::Trained((self.base_weight(EMBEDDING)? + change)?))
    }

    /// The head `(V, H)` with the adapter applied; if the adapter changes it, a new tensor that does not follow later training.
    pub fn adapted_head(&self, adapter: Option<&LoraAdapter>) -> TensorResult<Weight> {
        match self.head(adapter)? {
            Weight::Trained(head) => Ok(Weight::Trained(head.detach().copy()?)),
            frozen => Ok(frozen),
        }
    }

    /// A view that records no gradients: a pass through it keeps no layer's activations. It shares the values, so it follows training.
    pub fn without_gradient(&self) -> Self {
        let layers = match self.vars.is_empty() {
            // Frozen layers record no operations in the graph, and keep values that were computed from their weights.
            true => self.layers.clone(),
            false => self.layers.iter().map(|layer| Arc::new(detached(layer))).collect(),
        };
        Self {
            config: self.config.clone(),
            local: self.local.clone(),
            parallel: self.parallel.clone(),
            embedding: detached_weight(&self.embedding),
            layers,
            norm: self.norm.detach(),
            head: detached_weight(&self.head),
            rope: self.rope.clone(),
            vars: self.vars.clone(),
            compute_device: self.compute_device.clone(),
            device_rope: self.device_rope.clone(),
        }
    }
}

/// A linear layer of the base with its LoRA matrices.
pub struct AdaptedLinear<'a> {
    /// Weight `(out, in)`.
    pub weight: &'a Weight,
    /// Bias `(out)`.
    pub bias: Option<&'a Tensor>,
    /// LoRA A and B with their scale; `None` if the layer is not adapted.
    pub pair: Option<&'a LoraPair>,
    /// DoRA's factor on each output `(out)`, applied before the bias.
    pub factor: Option<Tensor>,
}

/// A transformer layer of the base with its LoRA matrices.
pub struct AdaptedLayer<'a> {
    /// Weight `(H)` of the RMSNorm before attention.
    pub input_norm: &'a Tensor,
    /// Weight `(H)` of the RMSNorm before the feed-forward layer.
    pub post_attention_norm: &'a Tensor,
    /// Weights of the per-head RMSNorms of queries and keys; `None` for models without them.
    pub qk_norm: Option<&'a [Tensor; 2]>,
    /// q_proj, k_proj, v_proj.
    pub qkv: [AdaptedLinear<'a>; 3],
    /// o_proj.
    pub o: [AdaptedLinear<'a>; 1],
    /// gate_proj, up_proj.
    pub gate_up: [AdaptedLinear<'a>; 2],
    /// down_proj.
    pub down: [AdaptedLinear<'a>; 1],
}

impl LayerWeights {
    fn adapted<'a>(&'a self, adapter: Option<&'a LoraAdapter>) -> TensorResult<AdaptedLayer<'a>> {
        let adapted = |linear: &'a Linear| linear.adapted(adapter);
        Ok(AdaptedLayer {
            input_norm: &self.input_norm,
            post_attention_norm: &self.post_attention_norm,
            qk_norm: self.qk_norm.as_ref(),
            qkv: [adapted(&self.q)?, adapted(&self.k)?, adapted(&self.v)?],
            o: [adapted(&self.o)?],
            gate_up: [adapted(&self.gate)?, adapted(&self.up)?],
            down: [adapted(&self.down)?],
        })
    }
}

impl Linear {
    fn adapted<'a>(&'a self, adapter: Option<&'a LoraAdapter>) -> TensorResult<AdaptedLinear<'a>> {
        let pair = adapter.and_then(|adapter| adapter.pair(&self.path));
        let factor = match (&self.weight, pair) {
            (Weight::Trained(_), _) | (_, None) => None,
            (_, Some(pair)) => self.dora_factor(pair)?.map(|factor| factor.detach()),
        };
        Ok(AdaptedLinear { weight: &self.weight, bias: self.bias.as_ref(), pair, factor })
    }
}

fn detached_weight(weight: &Weight) -> Weight {
    match weight {
        Weight::Trained(tensor) => Weight::Trained(tensor.detach()),
        other => other.clone(),
    }
}

fn detached(layer: &LayerWeights) -> LayerWeights {
    let linear = |linear: &Linear| {
        Linear::new(linear.path.clone(), detached_weight(&linear.weight), linear.bias.as_ref().map(Tensor::detach))
    };
    LayerWeights {
        input_norm: layer.input_norm.detach(),
        post_attention_norm: layer.post_attention_norm.detach(),
        q: linear(&layer.q),
        k: linear(&layer.k),
        v: linear(&layer.v),
        o: linear(&layer.o),
        qk_norm: layer.qk_norm.as_ref().map(|[q, k]| [q.detach(), k.detach()]),
        gate: linear(&layer.gate),
        up: linear(&layer.up),
        down: linear(&layer.down),
    }
}

impl LoraAdapter {
    /// A fresh adapter for a decoder that changes nothing yet: A uniform in `±1/sqrt(in)`, B zero (of an embedding: A zero, B
    /// normal), magnitudes as long as the base's rows, saved modules as in the base.
    ///
    /// # Errors
    /// A target that the decoder does not have, or a pattern that is not a regular expression.
    pub fn new(base: &Decoder, settings: LoraSettings, seed: u64) -> Result<Self, ModelError> {
        settings.check_split(base.parallel())?;
        Self::init(base.config(), settings, seed, |path| base.base_weight(path))?.for_decoder(base)
    }

    /// Moves a full adapter to the device of a decoder, and keeps the shard of it that belongs to the decoder's shard.
    ///
    /// # Errors
    /// The device is out of memory, or the adapter cannot be split as its base is.
    pub fn for_decoder(self, base: &Decoder) -> Result<Self, ModelError> {
        self.sharded(base.compute_device(), base.parallel())
    }
}
