//! Vectors of texts.

use crate::backbone::Backbone;
use crate::directory::Directory;
use crate::error::EncoderError;
use crate::tokens::{Batch, Tokens};
use candle_core::{D, DType, IndexOp, Tensor};
use querl_core::ports::{Embedder, LocalModelError};
use std::path::Path;

/// Texts of one forward pass.
const BATCH_SIZE: usize = 32;

/// How the states of a text's tokens become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pooling {
    /// The first token's, as in the bge family.
    Cls,
    /// The mean of all.
    Mean,
}

/// A model that makes vectors of length 1, so that their products are cosines.
pub struct EmbeddingModel {
    backbone: Backbone,
    tokens: Tokens,
    pooling: Pooling,
    dimension: usize,
    digest: String,
}

impl EmbeddingModel {
    /// Reads a directory. How states are pooled is in `1_Pooling/config.json`, as sentence-transformers writes it; without that file
    /// it is the first token's state.
    ///
    /// # Errors
    /// A file is missing, or not that of such a model.
    pub fn open(folder: &Path) -> Result<Self, EncoderError> {
        let directory = Directory::open(folder)?;
        let weights = directory.weights()?;
        Ok(Self {
            backbone: Backbone::load(&directory, &weights)?,
            tokens: Tokens::open(&directory)?,
            pooling: Pooling::of(&directory)?,
            dimension: directory.number("hidden_size")?,
            digest: directory.digest()?,
        })
    }

    /// One vector a text, in order.
    ///
    /// # Errors
    /// The tokenizer or a computation fails.
    pub fn vectors(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, EncoderError> {
        let mut vectors = Vec::with_capacity(texts.len());
        for texts in texts.chunks(BATCH_SIZE) {
            let batch = self.tokens.batch(texts.to_vec())?;
            let pooled = self.pooling.pool(&self.backbone.forward(&batch)?, &batch)?; // (B, H)
            let length = pooled.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?; // (B, 1)
            vectors.extend(pooled.broadcast_div(&length)?.to_vec2::<f32>()?);
        }
        Ok(vectors)
    }
}

impl Embedder for EmbeddingModel {
    fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, LocalModelError> {
        self.vectors(texts).map_err(|error| LocalModelError(error.to_string()))
    }

    fn dimension(&self) -> usize {
        self.dimension
    }

    fn digest(&self) -> &str {
        &self.digest
    }
}

impl Pooling {
    fn of(directory: &Directory) -> Result<Self, EncoderError> {
        const FILE: &str = "1_Pooling/config.json";
        let Some(settings) = directory.optional_json(FILE)? else { return Ok(Self::Cls) };
        let modes = settings.as_object().into_iter().flatten();
        let chosen: Vec<&str> = modes
            .filter(|(key, value)| key.starts_with("pooling_mode_") && value.as_bool() == Some(true))
            .map(|(key, _)| key.as_str())
            .collect();
        match chosen.as_slice() {
            ["pooling_mode_cls_token"] => Ok(Self::Cls),
            ["pooling_mode_mean_tokens"] => Ok(Self::Mean),
            other => {
                let problem = format!("chooses {other:?}; expected pooling_mode_cls_token or pooling_mode_mean_tokens");
                Err(EncoderError::file(&directory.path(FILE), problem))
            }
        }
    }

    /// `states`: `(B, T, H)`. Returns `(B, H)`.
    fn pool(self, states: &Tensor, batch: &Batch) -> candle_core::Result<Tensor> {
        match self {
            Self::Cls => states.i((.., 0))?.contiguous(),
            Self::Mean => {
                let mask = batch.mask.to_dtype(DType::F32)?.unsqueeze(D::Minus1)?; // (B, T, 1)
                let sum = states.broadcast_mul(&mask)?.sum(1)?; // (B, H)
                sum.broadcast_div(&mask.sum(1)?)
            }
        }
    }
}
