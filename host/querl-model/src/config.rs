//! The shape of a decoder, from `config.json` of a Hugging Face directory.

mod read;
mod rope_scaling;

pub(crate) use rope_scaling::inverse_frequencies;
pub use rope_scaling::{Llama3Scaling, RopeScaling, YarnScaling};

use crate::ModelError;
use querl_core::model_config::{self, Keys};
use std::path::Path;

querl_core::named_enum! {
    /// Architecture of a decoder, by the name that `architectures` begins with.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
    pub enum Family {
        /// Qwen2 and Qwen2.5: biases on query, key and value.
        Qwen2 = "Qwen2",
        /// Qwen3: queries and keys normalised per head.
        Qwen3 = "Qwen3",
        /// Llama 2 and 3: neither biases nor per-head norms, unless `attention_bias` is set.
        Llama = "Llama",
        /// The dense Mistral models: as Llama, with a sliding window where the configuration has one.
        Mistral = "Mistral",
    }
}

impl Family {
    /// The family of an entry of `architectures`, for example `Qwen2ForCausalLM` with the suffix `ForCausalLM`.
    fn of_architecture(name: &str, suffix: &str) -> Option<Self> {
        Self::from_name(name.strip_suffix(suffix)?)
    }

    pub(crate) fn model_type(self) -> String {
        self.name().to_lowercase()
    }

    /// Whether each head of queries and keys has a norm before RoPE.
    pub fn has_qk_norm(self) -> bool {
        self == Self::Qwen3
    }
}

/// Shape of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Architecture.
    pub family: Family,
    /// Vocabulary size V: number of rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual, H.
    pub hidden_size: usize,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Number of transformer layers.
    pub n_layers: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key-value heads.
    pub n_kv_heads: usize,
    /// Width of a head; need not be `hidden_size / n_heads`.
    pub head_dim: usize,
    /// Maximum number of tokens of a sequence.
    pub max_positions: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies; `None` if they are not scaled.
    pub rope_scaling: Option<RopeScaling>,
    /// Sliding window of each layer in tokens, the query's own included; `None` means full attention. Empty if all layers have full
    /// attention.
    pub sliding_windows: Vec<Option<usize>>,
    /// Epsilon of all RMSNorms.
    pub rms_norm_eps: f64,
    /// Whether the head shares the weights of the embedding.
    pub tie_word_embeddings: bool,
    /// Whether query, key and value projections have biases: always with Qwen2, by the key `attention_bias` with Qwen3 and Llama.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias: by the key `attention_bias` with Qwen3 and Llama.
    pub output_bias: bool,
    /// Standard deviation of newly initialised weights.
    pub initializer_range: f64,
}

const LANGUAGE_MODEL: &str = "ForCausalLM";
const CLASSIFIER: &str = "ForSequenceClassification";

const SUPPORTED: &str = "`Qwen2ForCausalLM`, `Qwen3ForCausalLM`, `LlamaForCausalLM`, `MistralForCausalLM`";
const CLASSIFIERS: &str = "`Qwen2ForSequenceClassification`, `Qwen3ForSequenceClassification`, \
     `LlamaForSequenceClassification`, `MistralForSequenceClassification`, or a language model's, which gets a new head";

/// Whether the base weights are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// The base weights get no gradients; only an adapter is trained.
    Frozen,
    /// Every base weight is trained: a variable of candle.
    Trained,
}

impl DecoderConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// The file is missing, is not JSON, lacks a key, or sets something that is not supported.
    pub fn load(path: &Path) -> Result<Self, ModelError> {
        Self::read(path, SUPPORTED, |name| Family::of_architecture(name, LANGUAGE_MODEL))
    }

    /// Reads the decoder of a classifier from a classifier's `config.json` or a language model's. A classifier has no lm_head: the
    /// configuration gets tied embeddings, and the classifier never computes logits with them.
    pub(crate) fn load_backbone(path: &Path) -> Result<Self, ModelError> {
        let family = |name: &str| {
            Family::of_architecture(name, LANGUAGE_MODEL).or_else(|| Family::of_architecture(name, CLASSIFIER))
        };
        Ok(Self { tie_word_embeddings: true, ..Self::read(path, CLASSIFIERS, family)? })
    }

    fn read(path: &Path, expected: &'static str, family: impl Fn(&str) -> Option<Family>) -> Result<Self, ModelError> {
        let file = model_config::read(path).map_err(|error| ModelError::unread(path, error))?;
        let architecture = file.get("architectures").and_then(|names| names[0].as_str());
        let found = architecture.unwrap_or("none named").to_owned();
        let Some(family) = family(&found) else {
            return Err(ModelError::UnsupportedArchitecture { path: path.to_owned(), found, expected });
        };
        Self::from_keys(family, Keys::new(&file)).map_err(|message| ModelError::bad_file(path, message))
    }

    /// Sliding window of layer `layer` in tokens; `None` means full attention.
    pub fn sliding_window(&self, layer: usize) -> Option<usize> {
        self.sliding_windows.get(layer).copied().flatten()
    }
}

impl DecoderConfig {
    /// Path, number of outputs and number of inputs of every linear layer that LoRA adapts by default.
    pub(crate) fn linear_layers(&self) -> impl Iterator<Item = (String, usize, usize)> {
        let (h, f) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        let shapes = [
            ("self_attn.q_proj", q, h),
            ("self_attn.k_proj", kv, h),
            ("self_attn.v_proj", kv, h),
            ("self_attn.o_proj", h, q),
            ("mlp.gate_proj", f, h),
            ("mlp.up_proj", f, h),
            ("mlp.down_proj", h, f),
        ];
        (0..self.n_layers).flat_map(move |layer| {
            shapes.map(|(name, n_out, n_in)| (format!("model.layers.{layer}.{name}"), n_out, n_in))
        })
    }

    /// Number of parameters; a tied head is counted once.
    pub fn n_parameters(&self) -> usize {
        self.tensor_shapes().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    pub(crate) fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let h = self.hidden_size;
        let mut shapes = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, h]),
            ("model.norm.weight".to_owned(), vec![h]),
        ];
        if !self.tie_word_embeddings {
            shapes.push(("lm_head.weight".to_owned(), vec![self.vocab_size, h]));
        }
        for (path, n_out, n_in) in self.linear_layers() {
            let has_bias = match path.rsplit('.').next() {
                Some("q_proj" | "k_proj" | "v_proj") => self.qkv_bias,
                Some("o_proj") => self.output_bias,
                _ => false,
            };
            if has_bias {
                shapes.push((format!("{path}.bias"), vec![n_out]));
            }
            shapes.push((format!("{path}.weight"), vec![n_out, n_in]));
        }
        for layer in 0..self.n_layers {
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                shapes.push((format!("model.layers.{layer}.{norm}.weight"), vec![h]));
            }
            if self.family.has_qk_norm() {
                for norm in ["q_norm", "k_norm"] {
                    shapes.push((format!("model.layers.{layer}.self_attn.{norm}.weight"), vec![self.head_dim]));
                }
            }
        }
        shapes
    }
}
