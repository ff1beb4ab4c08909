//! Text embeddings, with the settings of sentence-transformers.

use crate::EncoderError;
use crate::backbone::{Backbone, Batch, Directory, Tokens};
use candle_core::{D, DType, IndexOp, Tensor};
use querl_core::ports::{Embedder, LocalModelError};
use serde_json::Value;
use std::path::Path;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pooling {
    /// Hidden state of the first token, as in the bge family.
    Cls,
    /// Mean of the hidden states of all tokens.
    Mean,
}

/// An embedding model with L2-normalised vectors.
pub struct EmbeddingModel {
    backbone: Backbone,
    tokens: Tokens,
    pooling: Pooling,
    dimension: usize,
    prompts: Prompts,
    digest: String,
}

impl EmbeddingModel {
    /// Loads a model directory with the settings of sentence-transformers: pooling (default: first token), maximum length and prompts.
    ///
    /// `max_length`: maximum number of tokens of a text, special tokens included; `None` for the model's own maximum, at most 512.
    ///
    /// # Errors
    /// A file is missing or of another architecture, the model is a classifier, or it has an unsupported module.
    pub fn open(folder: &Path, max_length: Option<usize>) -> Result<Self, EncoderError> {
        let directory = Directory::open(folder)?;
        if directory.is_classifier() {
            let problem = "is of a classifier, such as a reranker; expected an embedding model";
            return Err(EncoderError::file(&directory.path("config.json"), problem));
        }
        let (pooling, prompts) = (Pooling::of(&directory)?, Prompts::of(&directory)?);
        let max_length = directory.max_length(max_length)?;
        let weights = directory.weights()?;
        Ok(Self {
            backbone: Backbone::load(&directory, &weights)?,
            tokens: Tokens::open(&directory, max_length)?,
            pooling,
            dimension: directory.number("hidden_size")?,
            digest: directory.digest(&[format!("{pooling:?}"), max_length.to_string(), prompts.passage.clone()])?,
            prompts,
        })
    }

    /// Embeds texts: one L2-normalised vector per text, in order.
    ///
    /// # Errors
    /// The tokenizer or a computation fails.
    pub fn vectors(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, EncoderError> {
        let mut vectors = vec![Vec::new(); texts.len()];
        for batch in self.tokens.batches(texts.to_vec())? {
            let pooled = self.pooling.pool(&self.backbone.forward(&batch)?, &batch)?; // (B, H)
            let length = pooled.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?; // (B, 1)
            let found = pooled.broadcast_div(&length)?.to_vec2::<f32>()?;
            if found.iter().flatten().any(|number| !number.is_finite()) {
                return Err(EncoderError::NotFinite);
            }
            batch.positions.iter().zip(found).for_each(|(position, vector)| vectors[*position] = vector);
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

    fn query_prefix(&self) -> &str {
        &self.prompts.query
    }

    fn passage_prefix(&self) -> &str {
        &self.prompts.passage
    }
}

impl Pooling {
    fn of(directory: &Directory) -> Result<Self, EncoderError> {
        let file = format!("{}/config.json", pooling_folder(directory)?);
        let Some(settings) = directory.optional_json(&file)? else { return Ok(Self::Cls) };
        let wrong = |problem: String| Err(EncoderError::file(&directory.path(&file), problem));
        if settings["include_prompt"].as_bool() == Some(false) {
            return wrong(
                "excludes the prompt's tokens from the mean (include_prompt = false), which is not supported".into(),
            );
        }
        match modes(&settings).as_slice() {
            ["cls" | "cls_token"] => Ok(Self::Cls),
            ["mean" | "mean_tokens"] => Ok(Self::Mean),
            other => wrong(format!("chooses {other:?}; expected the mode cls or mean")),
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

/// Pooling modes in a pooling `config.json`: `"pooling_mode": "cls"`, or the older `"pooling_mode_cls_token": true`.
fn modes(settings: &Value) -> Vec<&str> {
    match &settings["pooling_mode"] {
        Value::String(mode) => vec![mode],
        Value::Array(modes) => modes.iter().filter_map(Value::as_str).collect(),
        _ => {
            let flags = settings.as_object().into_iter().flatten();
            let chosen = flags.filter(|(_, value)| value.as_bool() == Some(true));
            chosen.filter_map(|(key, _)| key.strip_prefix("pooling_mode_")).collect()
        }
    }
}

/// Folder of the pooling settings, from modules.json; `1_Pooling` by default.
fn pooling_folder(directory: &Directory) -> Result<String, EncoderError> {
    const FILE: &str = "modules.json";
    let mut folder = "1_Pooling".to_owned();
    let modules = directory.optional_json(FILE)?.unwrap_or_default();
    for module in modules.as_array().into_iter().flatten() {
        let kind = module["type"].as_str().unwrap_or_default();
        match kind.rsplit('.').next() {
            // `Normalize` has no effect: vectors are always normalised.
            Some("Transformer" | "Normalize") => {}
            Some("Pooling") => folder = module["path"].as_str().unwrap_or(&folder).to_owned(),
            _ => {
                let problem = format!("has the module `{kind}`; expected only Transformer, Pooling and Normalize");
                return Err(EncoderError::file(&directory.path(FILE), problem));
            }
        }
    }
    Ok(folder)
}

/// Prompts of sentence-transformers: prefixes of queries and passages.
#[derive(Debug, Default)]
struct Prompts {
    query: String,
    passage: String,
}

impl Prompts {
    fn of(directory: &Directory) -> Result<Self, EncoderError> {
        let settings = directory.optional_json("config_sentence_transformers.json")?.unwrap_or_default();
        let prompt = |names: &[&str]| {
            let found = names.iter().find_map(|name| settings["prompts"][*name].as_str());
            found.unwrap_or_default().to_owned()
        };
        Ok(Self { query: prompt(&["query"]), passage: prompt(&["document", "passage"]) })
    }
}
