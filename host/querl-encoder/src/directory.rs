//! A Hugging Face directory: settings, weights, a digest of both, and what sentence-transformers says beside them.

use crate::error::EncoderError;
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use querl_core::fsx;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Files that decide what a model says.
const DECIDING: [&str; 3] = ["config.json", "tokenizer.json", "model.safetensors"];
/// Tokens of a text where nobody says otherwise: what BERT takes. Attention needs memory by the square of it.
const USUAL_LENGTH: usize = 512;
/// As in a configuration (`max_length`): the frame of a pair, and a little of both texts.
const SHORTEST: usize = 8;

/// Which network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Architecture {
    /// BERT with pooler, as in `bge-small-zh-v1.5`.
    Bert,
    /// XLM-RoBERTa, as in `bge-m3` and `bge-reranker-base`.
    XlmRoberta,
}

/// A model's directory with its settings read.
#[derive(Debug)]
pub(crate) struct Directory {
    folder: PathBuf,
    pub(crate) architecture: Architecture,
    pub(crate) config: Value,
}

impl Directory {
    /// Reads config.json.
    ///
    /// # Errors
    /// It is not there, no JSON, or of another architecture.
    pub(crate) fn open(folder: &Path) -> Result<Self, EncoderError> {
        let path = folder.join("config.json");
        let config = read_json(&path)?;
        let model_type = config["model_type"].as_str().unwrap_or_default();
        let architecture = match model_type {
            "bert" => Architecture::Bert,
            "xlm-roberta" => Architecture::XlmRoberta,
            other => {
                let problem = format!("model_type is `{other}`; expected bert or xlm-roberta");
                return Err(EncoderError::file(&path, problem));
            }
        };
        let positions = config["position_embedding_type"].as_str().unwrap_or("absolute");
        if positions != "absolute" {
            let problem = format!("position_embedding_type is `{positions}`; expected absolute");
            return Err(EncoderError::file(&path, problem));
        }
        Ok(Self { folder: folder.to_owned(), architecture, config })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A JSON file of the directory; `None` where it is not there.
    pub(crate) fn optional_json(&self, name: &str) -> Result<Option<Value>, EncoderError> {
        let path = self.path(name);
        if path.is_file() { read_json(&path).map(Some) } else { Ok(None) }
    }

    pub(crate) fn number(&self, key: &str) -> Result<usize, EncoderError> {
        let found = self.config[key].as_u64().map(|number| number as usize);
        found.ok_or_else(|| EncoderError::file(&self.path("config.json"), format!("has no number `{key}`")))
    }

    /// True for a network with a head that puts texts into classes, of which a reranker is one.
    pub(crate) fn is_classifier(&self) -> bool {
        let architectures = self.config["architectures"].as_array().into_iter().flatten();
        architectures.filter_map(Value::as_str).any(|name| name.ends_with("ForSequenceClassification"))
    }

    /// Longest sequence in tokens, those of the frame included: `wanted`, or what sentence-transformers cuts at, at most
    /// [`USUAL_LENGTH`].
    ///
    /// # Errors
    /// `wanted` is more than the network takes.
    pub(crate) fn max_length(&self, wanted: Option<usize>) -> Result<usize, EncoderError> {
        let positions = self.number("max_position_embeddings")?;
        let longest = match self.architecture {
            Architecture::Bert => positions,
            // RoBERTa counts positions from the padding token's on.
            Architecture::XlmRoberta => positions.saturating_sub(self.pad_id() as usize + 1),
        };
        match wanted {
            Some(wanted) if wanted > longest => {
                let problem = format!("takes {longest} tokens at most; max_length is {wanted}");
                Err(EncoderError::file(&self.path("config.json"), problem))
            }
            Some(wanted) => Ok(wanted),
            None => {
                let settings = self.optional_json("sentence_bert_config.json")?.unwrap_or_default();
                let cut_at = settings["max_seq_length"].as_u64().map_or(USUAL_LENGTH, |length| length as usize);
                if cut_at < SHORTEST {
                    let path = self.path("sentence_bert_config.json");
                    let problem = format!("max_seq_length is {cut_at}; expected {SHORTEST} or more");
                    return Err(EncoderError::file(&path, problem));
                }
                Ok(cut_at.min(USUAL_LENGTH).min(longest))
            }
        }
    }

    /// transformers leaves it out of a file where it is the architecture's own.
    pub(crate) fn pad_id(&self) -> u32 {
        let usual = match self.architecture {
            Architecture::Bert => 0,
            Architecture::XlmRoberta => 1,
        };
        self.config["pad_token_id"].as_u64().map_or(usual, |id| id as u32)
    }

    /// The weights as f32, whatever they are stored as.
    ///
    /// # Errors
    /// model.safetensors is not there or damaged.
    pub(crate) fn weights(&self) -> Result<VarBuilder<'static>, EncoderError> {
        let path = self.path("model.safetensors");
        let bytes = std::fs::read(&path).map_err(|error| {
            EncoderError::file(&path, format!("cannot be read: {error}; save the model with `safe_serialization=True`"))
        })?;
        VarBuilder::from_buffered_safetensors(bytes, DType::F32, &Device::Cpu)
            .map_err(|error| EncoderError::file(&path, error))
    }

    /// Stands for the content of all files that decide what the model says, and for `settings` of it.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn digest(&self, settings: &[String]) -> Result<String, EncoderError> {
        let mut parts = settings.to_vec();
        for name in DECIDING {
            let path = self.path(name);
            let digest = fsx::digest_file(&path)
                .map_err(|error| EncoderError::file(&path, format!("cannot be read: {error}")))?;
            parts.push(format!("{name} {digest}"));
        }
        // As JSON, so that no text of one part can look like two.
        Ok(fsx::digest_hex(Value::from(parts).to_string().as_bytes()))
    }
}

fn read_json(path: &Path) -> Result<Value, EncoderError> {
    let text =
        std::fs::read_to_string(path).map_err(|error| EncoderError::file(path, format!("cannot be read: {error}")))?;
    serde_json::from_str(&text).map_err(|error| EncoderError::file(path, format!("not JSON: {error}")))
}
