//! The same checkpoint in candle-transformers' decoders: an independent implementation for comparison.

use crate::checkpoint::{required, weight_files};
use crate::{DecoderConfig, Family, ModelError};
use candle_core::{DType, Device, Result as TensorResult, Tensor};
use candle_nn::{Activation, VarBuilder};
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
        let files = weight_files(directory)?;
        // SAFETY: as in `Decoder::load`: a program that rewrites a checkpoint in place while it is read breaks the mapping.
        let weights = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &Device::Cpu) };
        let weights = weights.map_err(|error| ModelError::bad_file(directory, error))?;
        Ok(Self(match config.family {
            Family::Qwen2 => Inner::Qwen2(qwen2::Model::new(&qwen2_config(&config), weights)?),
            Family::Qwen3 => Inner::Qwen3(qwen3::Model::new(&qwen3_config(&config), weights)?),
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
        // A copy shares the weights; its caches of keys and values are its own, and as empty as the original's stay.
        let hidden = match &self.0 {
            Inner::Qwen2(model) => model.clone().forward(&ids, 0, None)?,
            Inner::Qwen3(model) => model.clone().forward(&ids, 0)?,
        };
        hidden.squeeze(0)
    }
}

fn qwen2_config(config: &DecoderConfig) -> qwen2::Config {
    qwen2::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.n_layers,
        num_attention_heads: config.n_heads,
        num_key_value_heads: config.n_kv_heads,
        max_position_embeddings: config.max_positions,
        sliding_window: config.max_positions,
        max_window_layers: config.n_layers,
        tie_word_embeddings: config.tie_word_embeddings,
        rope_theta: config.rope_theta,
        rms_norm_eps: config.rms_norm_eps,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    }
}

fn qwen3_config(config: &DecoderConfig) -> qwen3::Config {
    qwen3::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.n_layers,
        num_attention_heads: config.n_heads,
        head_dim: config.head_dim,
        attention_bias: config.qkv_bias,
        num_key_value_heads: config.n_kv_heads,
        max_position_embeddings: config.max_positions,
        sliding_window: None,
        max_window_layers: config.n_layers,
        tie_word_embeddings: config.tie_word_embeddings,
        rope_theta: config.rope_theta,
        rms_norm_eps: config.rms_norm_eps,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    }
}
