//! A Hugging Face directory: settings, weights, a digest of both.

use crate::error::EncoderError;
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Files that decide what a model says.
const DECIDING: [&str; 4] = ["config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"];

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

    /// Longest sequence in tokens, those of the frame included.
    pub(crate) fn max_length(&self) -> Result<usize, EncoderError> {
        let positions = self.number("max_position_embeddings")?;
        Ok(match self.architecture {
            Architecture::Bert => positions,
            // RoBERTa counts positions from the padding token's on.
            Architecture::XlmRoberta => positions.saturating_sub(self.pad_id()? as usize + 1),
        })
    }

    pub(crate) fn pad_id(&self) -> Result<u32, EncoderError> {
        self.number("pad_token_id").map(|id| id as u32)
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

    /// Stands for the content of all files that decide what the model says.
    ///
    /// # Errors
    /// One of them cannot be read.
    pub(crate) fn digest(&self) -> Result<String, EncoderError> {
        let mut digest = Sha256::new();
        for name in DECIDING {
            let path = self.path(name);
            if path.is_file() {
                digest.update(name);
                add_file(&mut digest, &path)
                    .map_err(|error| EncoderError::file(&path, format!("cannot be read: {error}")))?;
            }
        }
        Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

fn add_file(digest: &mut Sha256, path: &Path) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    digest.update(file.metadata()?.len().to_le_bytes());
    let mut piece = vec![0; 256 << 10];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(()),
            n_bytes => digest.update(&piece[..n_bytes]),
        }
    }
}

fn read_json(path: &Path) -> Result<Value, EncoderError> {
    let text =
        std::fs::read_to_string(path).map_err(|error| EncoderError::file(path, format!("cannot be read: {error}")))?;
    serde_json::from_str(&text).map_err(|error| EncoderError::file(path, format!("not JSON: {error}")))
}
