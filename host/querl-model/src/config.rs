//! `config.json` of a Hugging Face directory.

use crate::ModelError;
use serde::Deserialize;
use std::path::Path;

/// Which decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum Family {
    /// Qwen2 and Qwen2.5: biases on query, key and value.
    Qwen2,
    /// Qwen3: queries and keys normalised per head.
    Qwen3,
}

/// Shape of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Which decoder.
    pub family: Family,
    /// Tokens.
    pub vocab_size: usize,
    /// Width of a row.
    pub hidden_size: usize,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Width of a head; need not be `hidden_size / n_heads`.
    pub head_dim: usize,
    /// Longest sequence.
    pub max_positions: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Of the norms.
    pub rms_norm_eps: f64,
    /// The head is the embedding.
    pub tie_word_embeddings: bool,
    /// Biases on query, key and value: always with Qwen2, by the key `attention_bias` with Qwen3.
    pub qkv_bias: bool,
    /// A bias on the attention's output: by the key `attention_bias` with Qwen3, never with Qwen2.
    pub output_bias: bool,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
}

/// `config.json` as written, with the two ways in which transformers has named the rotary base.
#[derive(Deserialize)]
struct ConfigFile {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rope_theta: Option<f64>,
    rope_parameters: Option<RopeParameters>,
    rope_scaling: Option<serde_json::Value>,
    #[serde(default = "default_eps")]
    rms_norm_eps: f64,
    #[serde(default)]
    tie_word_embeddings: bool,
    attention_bias: Option<bool>,
    #[serde(default)]
    use_sliding_window: bool,
    #[serde(default = "default_initializer_range")]
    initializer_range: f64,
    #[serde(default = "default_act")]
    hidden_act: String,
}

#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    #[serde(default = "default_rope_type")]
    rope_type: String,
}

fn default_eps() -> f64 {
    1e-6
}

fn default_initializer_range() -> f64 {
    0.02
}

fn default_act() -> String {
    "silu".into()
}

fn default_rope_type() -> String {
    "default".into()
}

const SUPPORTED: &str = "`Qwen2ForCausalLM`, `Qwen3ForCausalLM`";
const CLASSIFIERS: &str =
    "`Qwen2ForSequenceClassification`, `Qwen3ForSequenceClassification`, or a language model's, which gets a new head";

/// Whether the base weights are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// No gradient is computed for them: adapters alone are trained.
    Frozen,
    /// Every weight is a variable.
    Trained,
}

impl DecoderConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// The file is missing, is no JSON, lacks a key, or asks for something that is not supported.
    pub fn load(path: &Path) -> Result<Self, ModelError> {
        let family = |found: &str| match found {
            "Qwen2ForCausalLM" => Some(Family::Qwen2),
            "Qwen3ForCausalLM" => Some(Family::Qwen3),
            _ => None,
        };
        Self::read(path, SUPPORTED, family)
    }

    /// The decoder below a classifier's head, of a classifier's `config.json` or a language model's. It has no head of its own: the
    /// embedding stands in its place, and is never asked for logits.
    ///
    /// # Errors
    /// As [`DecoderConfig::load`].
    pub(crate) fn load_backbone(path: &Path) -> Result<Self, ModelError> {
        let family = |found: &str| match found {
            "Qwen2ForCausalLM" | "Qwen2ForSequenceClassification" => Some(Family::Qwen2),
            "Qwen3ForCausalLM" | "Qwen3ForSequenceClassification" => Some(Family::Qwen3),
            _ => None,
        };
        Ok(Self { tie_word_embeddings: true, ..Self::read(path, CLASSIFIERS, family)? })
    }

    fn read(path: &Path, expected: &'static str, family: impl Fn(&str) -> Option<Family>) -> Result<Self, ModelError> {
        let text = std::fs::read_to_string(path).map_err(ModelError::io(path))?;
        let architecture: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| ModelError::bad_file(path, error))?;
        let found = architecture["architectures"][0].as_str().unwrap_or("none named").to_owned();
        let Some(family) = family(&found) else {
            return Err(ModelError::UnsupportedArchitecture { path: path.to_owned(), found, expected });
        };
        let file: ConfigFile = serde_json::from_str(&text).map_err(|error| ModelError::bad_file(path, error))?;
        file.resolve(family).map_err(|message| ModelError::bad_file(path, message))
    }
}

impl ConfigFile {
    fn resolve(self, family: Family) -> Result<DecoderConfig, String> {
        if self.use_sliding_window {
            return Err("use_sliding_window is true; only full attention is supported".into());
        }
        if self.hidden_act != "silu" {
            return Err(format!("hidden_act is `{}`; expected `silu`", self.hidden_act));
        }
        let rope = self.rope_parameters.unwrap_or(RopeParameters { rope_theta: None, rope_type: default_rope_type() });
        if rope.rope_type != "default" || self.rope_scaling.is_some_and(|scaling| !scaling.is_null()) {
            return Err("scaled rotary embeddings are not supported; expected rope type `default`".into());
        }
        if self.num_attention_heads == 0 {
            return Err("num_attention_heads is 0; expected at least 1".into());
        }
        let n_kv_heads = self.num_key_value_heads.unwrap_or(self.num_attention_heads);
        if n_kv_heads == 0 || !self.num_attention_heads.is_multiple_of(n_kv_heads) {
            return Err(format!(
                "num_attention_heads {} is not a multiple of num_key_value_heads {n_kv_heads}",
                self.num_attention_heads
            ));
        }
        let head_dim = self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads);
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(format!("head_dim is {head_dim}; rotary embeddings need an even number"));
        }
        Ok(DecoderConfig {
            family,
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            n_layers: self.num_hidden_layers,
            n_heads: self.num_attention_heads,
            n_kv_heads,
            head_dim,
            max_positions: self.max_position_embeddings,
            rope_theta: rope.rope_theta.or(self.rope_theta).unwrap_or(10_000.0),
            rms_norm_eps: self.rms_norm_eps,
            tie_word_embeddings: self.tie_word_embeddings,
            qkv_bias: family == Family::Qwen2 || self.attention_bias == Some(true),
            output_bias: family == Family::Qwen3 && self.attention_bias == Some(true),
            initializer_range: self.initializer_range,
        })
    }
}
