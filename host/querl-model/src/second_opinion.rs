//! candle-transformers' decoders on the same checkpoint: an independent implementation to compare with.

use crate::checkpoint::{required, unloaded, weight_files};
use crate::{DecoderConfig, Family, ModelError};
use candle_core::{DType, Device, Result as TensorResult, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{qwen2, qwen3};
use std::path::Path;

/// A decoder of candle-transformers in f32, without adapters and gradients.
pub struct SecondOpinion(Inner);

enum Inner {
    Qwen2(qwen2::Model),
    Qwen3(qwen3::Model),
}

impl SecondOpinion {
    /// Loads a Hugging Face directory.
    ///
    /// # Errors
    /// A file is missing or damaged, or the decoder lacks what the config asks for.
    pub fn load(directory: &Path) -> Result<Self, ModelError> {
        let config = DecoderConfig::load(&required(directory, "config.json")?)?;
        if config.rope_scaling.is_some() || !config.sliding_windows.is_empty() {
            let reason = "the decoders of candle-transformers have no RoPE scaling and no sliding window per layer";
            return Err(ModelError::bad_file(directory, reason));
        }
        let files = weight_files(directory)?;
        // SAFETY: as in `Decoder::load`: a program that rewrites a checkpoint in place while it is read breaks the mapping.
        let weights = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &Device::Cpu) };
        let weights = weights.map_err(|error| unloaded(directory, error))?;
        let mut json = config.to_json();
        let bad = |error| ModelError::bad_file(directory, error);
        Ok(Self(match config.family {
            Family::Qwen2 => {
                json["sliding_window"] = config.max_positions.into(); // required to be a number, although it is not used
                Inner::Qwen2(qwen2::Model::new(&serde_json::from_value(json).map_err(bad)?, weights)?)
            }
            Family::Qwen3 => Inner::Qwen3(qwen3::Model::new(&serde_json::from_value(json).map_err(bad)?, weights)?),
            Family::Llama | Family::Mistral => {
                let reason = "the decoders of candle-transformers for Llama and Mistral do not return hidden states";
                return Err(ModelError::bad_file(directory, reason));
            }
        }))
    }

    /// Hidden states after the final norm: `(T, H)` for a sequence of T tokens.
    ///
    /// # Errors
    /// A token outside the vocabulary, or more tokens than positions.
    pub fn hidden_states(&self, token_ids: &[u32]) -> TensorResult<Tensor> {
        let ids = Tensor::from_slice(token_ids, (1, token_ids.len()), &Device::Cpu)?; // (1, T)
        // The clone shares the weights; its KV cache is empty.
        let hidden = match &self.0 {
            Inner::Qwen2(model) => model.clone().forward(&ids, 0, None)?,
            Inner::Qwen3(model) => model.clone().forward(&ids, 0)?,
        };
        hidden.squeeze(0)
    }
}
