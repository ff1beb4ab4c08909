//! Where an adapter changes what is no linear layer of a block: the embedding and the head.

use super::Decoder;
use crate::adapter::{EMBEDDING, HEAD, LoraAdapter};
use crate::kernels::Weight;
use crate::{LoraSettings, ModelError, PackedBatch};
use candle_core::{Result as TensorResult, Tensor, bail};

impl Decoder {
    /// The base's weight of a linear layer `(out, in)`, of the embedding or of the head `(V, H)`, in f32.
    pub(crate) fn base_weight(&self, path: &str) -> TensorResult<Tensor> {
        let mut linears = self.layers.iter().flat_map(|layer| layer.linears());
        let weight = match path {
            EMBEDDING => Some(&self.embedding),
            HEAD => Some(&self.head),
            _ => linears.find(|linear| linear.path == path).map(|linear| &linear.weight),
        };
        match weight {
            Some(Weight::Frozen(weight)) => weight.to_tensor(),
            Some(Weight::Trained(weight)) => Ok(weight.detach()),
            Some(Weight::Accelerator(weight)) => weight.to_tensor(),
            None => bail!("no layer `{path}`"),
        }
    }

    /// Rows of the embedding, `(N, H)`, with what an adapter makes of them.
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

    /// The head `(V, H)` with what an adapter makes of it: as a tensor of its own where it changes it.
    pub(super) fn head(&self, adapter: Option<&LoraAdapter>) -> TensorResult<Weight> {
        if let Some(saved) = adapter.and_then(|adapter| adapter.saved_module(HEAD)) {
            return Ok(Weight::Trained(saved.clone()));
        }
        match adapter.and_then(|adapter| adapter.pair(HEAD)) {
            Some(pair) => Ok(Weight::Trained(pair.changed(&self.base_weight(HEAD)?)?)),
            None => Ok(self.head.clone()),
        }
    }
}

impl LoraAdapter {
    /// A fresh adapter for a decoder that changes nothing yet: A uniform in `±1/sqrt(in)`, B zero (of an embedding: A zero, B
    /// normal), magnitudes as long as the base's rows, saved modules as in the base.
    ///
    /// # Errors
    /// A target that the decoder does not have, or a pattern that is no regular expression.
    pub fn new(base: &Decoder, settings: LoraSettings, seed: u64) -> Result<Self, ModelError> {
        settings.check_split(base.parallel())?;
        Self::init(base.config(), settings, seed, |path| base.base_weight(path))?.for_decoder(base)
    }

    /// A whole adapter on the device of a decoder, and of it the shard that belongs to the decoder's shard.
    ///
    /// # Errors
    /// No memory is left, or the adapter cannot be split as its base is.
    pub fn for_decoder(self, base: &Decoder) -> Result<Self, ModelError> {
        self.sharded(base.place(), base.parallel())
    }
}
