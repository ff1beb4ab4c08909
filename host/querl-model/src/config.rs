//! `config.json` of a Hugging Face directory.

use crate::ModelError;
use serde::Deserialize;
use std::path::Path;

/// Architecture of a decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum Family {
    /// Qwen2 and Qwen2.5: biases on query, key and value.
    Qwen2,
    /// Qwen3: queries and keys normalised per head.
    Qwen3,
    /// Llama 2 and 3: neither biases nor per-head norms, unless `attention_bias` is set.
    Llama,
    /// The dense Mistral models without sliding window: as Llama.
    Mistral,
}

impl Family {
    /// The family of an entry of `architectures`, for example `Qwen2ForCausalLM` with the suffix `ForCausalLM`.
    fn of_architecture(name: &str, suffix: &str) -> Option<Self> {
        match name.strip_suffix(suffix)? {
            "Qwen2" => Some(Self::Qwen2),
            "Qwen3" => Some(Self::Qwen3),
            "Llama" => Some(Self::Llama),
            "Mistral" => Some(Self::Mistral),
            _ => None,
        }
    }

    /// Whether each head of queries and keys has a norm before RoPE.
    pub fn has_qk_norm(self) -> bool {
        self == Self::Qwen3
    }
}

/// How RoPE's frequencies are scaled for contexts longer than those of pretraining.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct RopeScaling {
    /// Factor by which low frequencies are divided.
    pub factor: f64,
    /// Wavelengths above `original_max_position_embeddings` over this are scaled in full.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_max_position_embeddings` over this are kept.
    pub high_freq_factor: f64,
    /// Positions of pretraining.
    pub original_max_position_embeddings: usize,
}

impl RopeScaling {
    /// The scaled inverse frequency.
    ///
    /// Source: transformers' `_compute_llama3_parameters` (`modeling_rope_utils.py`).
    pub(crate) fn scaled(&self, inverse_frequency: f32) -> f32 {
        let (low, high) = (self.low_freq_factor, self.high_freq_factor);
        let original = self.original_max_position_embeddings as f64;
        let wavelength = std::f32::consts::TAU / inverse_frequency;
        if wavelength < (original / high) as f32 {
            return inverse_frequency;
        }
        let divided = inverse_frequency / self.factor as f32;
        if wavelength > (original / low) as f32 {
            return divided;
        }
        let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
        (1.0 - smooth) * inverse_frequency / self.factor as f32 + smooth * inverse_frequency
    }
}

/// Shape of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Architecture.
    pub family: Family,
    /// Number of tokens of the vocabulary, V.
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
    /// Most tokens of a sequence.
    pub max_positions: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies (`rope_type` `llama3`).
    pub rope_scaling: Option<RopeScaling>,
    /// Epsilon of all RMSNorms.
    pub rms_norm_eps: f64,
    /// The head is the embedding.
    pub tie_word_embeddings: bool,
    /// Biases on query, key and value: always with Qwen2, by the key `attention_bias` with Qwen3 and Llama.
    pub qkv_bias: bool,
    /// A bias on the attention's output: by the key `attention_bias` with Qwen3 and Llama.
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
    rope_scaling: Option<RopeParameters>,
    #[serde(default = "default_eps")]
    rms_norm_eps: f64,
    #[serde(default)]
    tie_word_embeddings: bool,
    attention_bias: Option<bool>,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    /// Of Mistral; the other families have the key too and ignore it without `use_sliding_window`.
    #[serde(default = "default_sliding_window")]
    sliding_window: Option<usize>,
    #[serde(default = "default_initializer_range")]
    initializer_range: f64,
    #[serde(default = "default_act")]
    hidden_act: String,
}

/// `rope_parameters` of transformers 5, or `rope_scaling` of earlier versions.
#[derive(Default, Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    /// The name of `rope_type` in transformers before 4.43.
    r#type: Option<String>,
    #[serde(flatten)]
    scaling: serde_json::Map<String, serde_json::Value>,
}

impl RopeParameters {
    /// The scaling, `None` where positions are not scaled. A key that changes the frequencies and is not known here is an error.
    fn scaling(&self) -> Result<Option<RopeScaling>, String> {
        let rope_type = match (&self.rope_type, &self.r#type) {
            (Some(rope_type), Some(other)) if rope_type != other => {
                return Err(format!("rope_type is `{rope_type}` and type is `{other}`; expected one rope type"));
            }
            (rope_type, other) => rope_type.as_ref().or(other.as_ref()),
        };
        match rope_type.map_or("default", String::as_str) {
            "default" => match self.scaling.iter().find(|(_, value)| !value.is_null()) {
                Some((key, _)) => Err(format!("the rope parameter `{key}` is not supported with rope type `default`")),
                None => Ok(None),
            },
            "llama3" => {
                let scaling = serde_json::from_value(self.scaling.clone().into());
                let scaling: RopeScaling = scaling.map_err(|error| format!("rope type `llama3`: {error}"))?;
                let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
                if !(scaling.factor > 0.0 && low > 0.0 && high > low) {
                    return Err(
                        "rope type `llama3`: expected factor > 0 and 0 < low_freq_factor < high_freq_factor".into()
                    );
                }
                Ok(Some(scaling))
            }
            other => Err(format!("rope type `{other}` is not supported; expected `default` or `llama3`")),
        }
    }
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

/// What transformers' `MistralConfig` has where the key is missing; `null` means full attention.
fn default_sliding_window() -> Option<usize> {
    Some(4096)
}

const LANGUAGE_MODEL: &str = "ForCausalLM";
const CLASSIFIER: &str = "ForSequenceClassification";

const SUPPORTED: &str = "`Qwen2ForCausalLM`, `Qwen3ForCausalLM`, `LlamaForCausalLM`, `MistralForCausalLM`";
const CLASSIFIERS: &str = "`Qwen2ForSequenceClassification`, `Qwen3ForSequenceClassification`, \
     `LlamaForSequenceClassification`, `MistralForSequenceClassification`, or a language model's, which gets a new head";

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
        Self::read(path, SUPPORTED, |name| Family::of_architecture(name, LANGUAGE_MODEL))
    }

    /// The backbone of a classifier, from a classifier's `config.json` or a language model's. It has no lm_head: tied embeddings take its
    /// place and are not used.
    pub(crate) fn load_backbone(path: &Path) -> Result<Self, ModelError> {
        let family = |name: &str| {
            Family::of_architecture(name, LANGUAGE_MODEL).or_else(|| Family::of_architecture(name, CLASSIFIER))
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

// Tensors of a decoder.
impl DecoderConfig {
    /// Every adapted-by-default linear layer: its path, outputs, inputs.
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

    /// Weights in all, a tied head counted once.
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

impl ConfigFile {
    fn resolve(self, family: Family) -> Result<DecoderConfig, String> {
        if self.use_sliding_window {
            return Err("use_sliding_window is true; only full attention is supported".into());
        }
        let window = self.sliding_window.filter(|&window| window < self.max_position_embeddings);
        if let (Family::Mistral, Some(window)) = (family, window) {
            let positions = self.max_position_embeddings;
            return Err(format!(
                "sliding_window is {window}, below max_position_embeddings {positions}; only full attention is supported"
            ));
        }
        if self.mlp_bias {
            return Err("mlp_bias is true; expected false".into());
        }
        if self.hidden_act != "silu" {
            return Err(format!("hidden_act is `{}`; expected `silu`", self.hidden_act));
        }
        let (parameters, earlier) = (self.rope_parameters.unwrap_or_default(), self.rope_scaling.unwrap_or_default());
        let rope_theta = parameters.rope_theta.or(earlier.rope_theta).or(self.rope_theta).unwrap_or(10_000.0);
        let rope_scaling = match (parameters.scaling()?, earlier.scaling()?) {
            (Some(one), Some(other)) if one != other => {
                return Err("rope_parameters and rope_scaling differ; expected one of them".into());
            }
            (one, other) => one.or(other),
        };
        if self.num_attention_heads == 0 {
            return Err("num_attention_heads is 0; expected at least 1".into());
        }
        let n_kv_heads = self.num_key_value_heads.unwrap_or(match family {
            Family::Mistral => 8, // the default of transformers' `MistralConfig`
            _ => self.num_attention_heads,
        });
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
        let has_attention_bias = matches!(family, Family::Qwen3 | Family::Llama) && self.attention_bias == Some(true);
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
            rope_theta,
            rope_scaling,
            rms_norm_eps: self.rms_norm_eps,
            tie_word_embeddings: self.tie_word_embeddings,
            qkv_bias: family == Family::Qwen2 || has_attention_bias,
            output_bias: has_attention_bias,
            initializer_range: self.initializer_range,
        })
    }
}
