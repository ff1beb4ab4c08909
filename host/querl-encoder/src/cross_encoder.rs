//! Cross-encoders (rerankers): relevance scores of passages for a query.

use crate::EncoderError;
use crate::backbone::{Architecture, Backbone, Directory, Tokens};
use candle_core::{IndexOp, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use querl_core::ports::{LocalModelError, PairScorer};
use querl_core::records::logistic;
use std::path::Path;

/// A cross-encoder that scores pairs of query and passage, such as `bge-reranker`.
pub struct CrossEncoder {
    backbone: Backbone,
    head: Head,
    tokens: Tokens,
    digest: String,
}

/// Classification head on the first token's hidden state: two linear layers with tanh between them. BERT calls the first one pooler.
struct Head {
    dense: Linear,
    output: Linear,
}

impl CrossEncoder {
    /// Loads a model directory. `max_length`: maximum number of tokens of a pair, special tokens included; `None` for the model's own
    /// maximum, at most 512.
    ///
    /// # Errors
    /// A file is missing or of another architecture, or the model has more than one label.
    pub fn open(folder: &Path, max_length: Option<usize>) -> Result<Self, EncoderError> {
        let directory = Directory::open(folder)?;
        let n_labels = n_labels(&directory);
        if n_labels != 1 {
            let problem = format!("has {n_labels} labels; a reranker has 1");
            return Err(EncoderError::file(&directory.path("config.json"), problem));
        }
        let weights = directory.weights()?;
        Ok(Self {
            backbone: Backbone::load(&directory, &weights)?,
            head: Head::load(&directory, &weights)
                .map_err(|error| EncoderError::file(&directory.path("model.safetensors"), error))?,
            tokens: Tokens::open(&directory, directory.max_length(max_length)?)?,
            digest: directory.digest(&[directory.max_length(max_length)?.to_string()])?,
        })
    }

    /// Relevance logits of texts for a query, one per text, in their order.
    ///
    /// # Errors
    /// The tokenizer or a computation fails.
    pub fn logits(&self, query: &str, texts: &[&str]) -> Result<Vec<f32>, EncoderError> {
        let mut logits = vec![0.0; texts.len()];
        let pairs: Vec<(&str, &str)> = texts.iter().map(|text| (query, *text)).collect();
        for batch in self.tokens.batches(pairs)? {
            let states = self.backbone.forward(&batch)?; // (B, T, H)
            let found = self.head.forward(&states)?.flatten_all()?.to_vec1::<f32>()?;
            if found.iter().any(|logit| !logit.is_finite()) {
                return Err(EncoderError::NotFinite);
            }
            batch.positions.iter().zip(found).for_each(|(position, logit)| logits[*position] = logit);
        }
        Ok(logits)
    }
}

impl PairScorer for CrossEncoder {
    fn scores(&self, query: &str, texts: &[&str]) -> Result<Vec<f64>, LocalModelError> {
        let logits = self.logits(query, texts).map_err(|error| LocalModelError(error.to_string()))?;
        Ok(logits.into_iter().map(|logit| logistic(f64::from(logit))).collect())
    }

    fn digest(&self) -> &str {
        &self.digest
    }
}

impl Head {
    fn load(directory: &Directory, weights: &VarBuilder<'static>) -> candle_core::Result<Self> {
        let hidden = directory.number("hidden_size").map_err(candle_core::Error::wrap)?;
        let (dense, output) = match directory.architecture {
            Architecture::Bert => ("bert.pooler.dense", "classifier"),
            Architecture::XlmRoberta => ("classifier.dense", "classifier.out_proj"),
        };
        Ok(Self { dense: linear(hidden, hidden, weights.pp(dense))?, output: linear(hidden, 1, weights.pp(output))? })
    }

    /// `states`: `(B, T, H)`. Returns `(B, 1)`.
    fn forward(&self, states: &Tensor) -> candle_core::Result<Tensor> {
        let first = states.i((.., 0))?.contiguous()?; // (B, H)
        self.output.forward(&self.dense.forward(&first)?.tanh()?)
    }
}

fn n_labels(directory: &Directory) -> usize {
    let labels = directory.config["id2label"].as_object().map(serde_json::Map::len);
    // 2 is the default of transformers.
    labels.or_else(|| directory.config["num_labels"].as_u64().map(|number| number as usize)).unwrap_or(2)
}
