//! The files of a small Qwen3 model of one domain, apart from its weights.

use crate::{DecoderConfig, ModelError, TokenizerSettings, train_tokenizer};
use candle_core::DType;
use serde::Deserialize;
use serde_json::json;
use std::path::Path;

/// Type of the stored weights: half the size of f32, in which the model computes.
pub const STORED_DTYPE: DType = DType::BF16;

/// Token id of `<|endoftext|>`, which is also the padding token.
pub const END_OF_TEXT_ID: u32 = 0;

const SPECIAL_TOKENS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Smallest vocabulary: the 256 byte tokens and the special tokens.
pub const MIN_VOCABULARY: usize = 256 + SPECIAL_TOKENS.len();

/// ChatML, the format of Qwen's instruct models.
const CHAT_TEMPLATE: &str = "{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
";

/// Shape of the decoder; the vocabulary comes from the tokenizer.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Shape {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub n_layers: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    /// Maximum number of tokens of a sequence.
    pub max_positions: usize,
}

/// Trains a tokenizer on `texts` and writes config.json, tokenizer files, chat template and generation_config.json.
///
/// # Errors
/// The tokenizer cannot be trained or a file cannot be written.
pub fn write_files(
    directory: &Path,
    texts: &[String],
    vocab_size: usize,
    shape: &Shape,
) -> Result<DecoderConfig, ModelError> {
    let settings = TokenizerSettings { vocab_size, special_tokens: &SPECIAL_TOKENS };
    let tokenizer = train_tokenizer(texts, &settings, &directory.join("tokenizer.json"))?;
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT_ID, "eos_token_id": 2, "pad_token_id": END_OF_TEXT_ID,
        "hidden_act": "silu", "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.n_layers, "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads, "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions, "max_window_layers": shape.n_layers,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": null,
        "sliding_window": null, "use_sliding_window": false, "tie_word_embeddings": true, "use_cache": true,
        "torch_dtype": "bfloat16", "vocab_size": tokenizer.get_vocab_size(true),
    });
    let tokenizer_config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": shape.max_positions, "clean_up_tokenization_spaces": false,
    });
    let generation = json!({ "eos_token_id": [2, 0], "pad_token_id": END_OF_TEXT_ID, "do_sample": false });
    let texts = [
        ("config.json", format!("{config:#}\n")),
        ("tokenizer_config.json", format!("{tokenizer_config:#}\n")),
        ("generation_config.json", format!("{generation:#}\n")),
        ("chat_template.jinja", CHAT_TEMPLATE.to_owned()),
    ];
    for (file, text) in texts {
        let path = directory.join(file);
        querl_core::fsx::write_atomic(&path, text.as_bytes()).map_err(ModelError::io(&path))?;
    }
    DecoderConfig::load(&directory.join("config.json"))
}
