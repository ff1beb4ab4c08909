//! Reads the keys of a decoder's `config.json`: sizes within bounds, an allow-list of keys, sliding windows.
//!
//! Source: transformers 5.17, `configuration_qwen2.py`, `configuration_qwen3.py`, `configuration_llama.py` and
//! `configuration_mistral.py`, whose defaults these are.

use super::rope_scaling::Rope;
use super::{DecoderConfig, Family};
use querl_core::model_config::{Keys, NoOp, bounds};

/// Keys that are read here or in [`Rope::read`], and those that have no effect on a decoder: transformers ignores
/// `dual_chunk_attention_config`, and `pretraining_tp` divides the same matrix products into parts.
const USED: &str = "\
    attention_bias dual_chunk_attention_config head_dim hidden_act hidden_size intermediate_size is_decoder \
    layer_types max_position_embeddings max_window_layers num_attention_heads num_hidden_layers \
    num_key_value_heads original_max_position_embeddings pretraining_tp rms_norm_eps rope_parameters rope_scaling \
    rope_theta sliding_window tie_word_embeddings use_sliding_window vocab_size";

/// Keys of other decoders and of unimplemented features, with the value that disables the feature.
const NO_OPS: &[(&str, NoOp)] = &[
    ("alibi", NoOp::Flag(false)),
    ("attention_dropout", NoOp::Number(0.0)),
    ("attention_multiplier", NoOp::Null),
    ("attn_logit_softcapping", NoOp::Null),
    ("bias", NoOp::Flag(false)),
    ("clip_qkv", NoOp::Null),
    ("embd_pdrop", NoOp::Number(0.0)),
    ("embedding_dropout", NoOp::Number(0.0)),
    ("embedding_multiplier", NoOp::Number(1.0)),
    ("final_logit_softcapping", NoOp::Null),
    ("hidden_dropout", NoOp::Number(0.0)),
    ("is_causal", NoOp::Flag(true)),
    ("logit_scale", NoOp::Number(1.0)),
    ("logits_scaling", NoOp::Number(1.0)),
    ("mlp_bias", NoOp::Flag(false)),
    ("num_nextn_predict_layers", NoOp::Number(0.0)),
    ("partial_rotary_factor", NoOp::Number(1.0)),
    ("qk_layernorm", NoOp::Flag(false)),
    ("query_pre_attn_scalar", NoOp::Null),
    ("resid_pdrop", NoOp::Number(0.0)),
    ("residual_dropout", NoOp::Number(0.0)),
    ("residual_multiplier", NoOp::Number(1.0)),
    ("rope_interleaved", NoOp::Flag(false)),
    ("rotary_pct", NoOp::Number(1.0)),
    ("use_bidirectional_attention", NoOp::Flag(false)),
    ("use_mrope", NoOp::Flag(false)),
];

/// Maximum number of angles in a RoPE table: 4 million positions with head size 128, 2 GiB of cosines and sines.
const MAX_ANGLES: usize = 1 << 29;

const DEFAULT_EPS: f64 = 1e-6;
const DEFAULT_INITIALIZER_RANGE: f64 = 0.02;
/// Default of `sliding_window`; `null` means full attention.
const DEFAULT_WINDOW: usize = 4096;
/// Default of `max_window_layers`, the first layer with a sliding window.
const DEFAULT_WINDOW_LAYERS: usize = 28;
/// Default of Qwen3's `head_dim`.
const QWEN3_HEAD_DIM: usize = 128;
/// Default of Mistral's `num_key_value_heads`; `null` means as many as query heads.
const MISTRAL_KV_HEADS: usize = 8;

impl DecoderConfig {
    /// Reads the configuration.
    ///
    /// # Errors
    /// A sentence without the file's name.
    pub(super) fn from_keys(family: Family, keys: Keys<'_>) -> Result<Self, String> {
        keys.check_file(USED, NO_OPS)?;
        check_names(family, keys)?;
        let n_layers = keys.size("num_hidden_layers", bounds::LAYERS)?;
        let hidden_size = keys.size("hidden_size", bounds::HIDDEN_SIZE)?;
        let (n_heads, n_kv_heads, head_dim) = heads(family, keys, hidden_size)?;
        let positions = keys.size("max_position_embeddings", bounds::POSITIONS)?;
        let rope = Rope::read(keys, positions)?;
        let max_positions = rope.max_positions(positions)?;
        if max_positions * head_dim > MAX_ANGLES {
            let most = MAX_ANGLES / head_dim;
            return Err(format!(
                "describes {max_positions} positions; expected at most {most} with a head_dim of {head_dim}"
            ));
        }
        let has_attention_bias =
            matches!(family, Family::Qwen3 | Family::Llama) && keys.flag("attention_bias")? == Some(true);
        let config = Self {
            family,
            vocab_size: keys.size("vocab_size", bounds::VOCABULARY)?,
            hidden_size,
            intermediate_size: keys.size("intermediate_size", bounds::INTERMEDIATE_SIZE)?,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim,
            max_positions,
            rope_theta: rope.theta,
            rope_scaling: rope.scaling,
            sliding_windows: sliding_windows(family, keys, n_layers, max_positions)?,
            rms_norm_eps: not_negative(keys, "rms_norm_eps")?.unwrap_or(DEFAULT_EPS),
            tie_word_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: family == Family::Qwen2 || has_attention_bias,
            output_bias: has_attention_bias,
            initializer_range: not_negative(keys, "initializer_range")?.unwrap_or(DEFAULT_INITIALIZER_RANGE),
        };
        let n_parameters = config.n_parameters() as u64;
        if n_parameters > bounds::PARAMETERS {
            let most = bounds::PARAMETERS;
            return Err(format!("describes {n_parameters} parameters; expected at most {most}: check its sizes"));
        }
        Ok(config)
    }
}

fn check_names(family: Family, keys: Keys<'_>) -> Result<(), String> {
    if keys.text("model_type")?.is_some_and(|name| name != family.model_type()) {
        let expected = format!("`{}`, that of its architecture", family.model_type());
        return Err(keys.unexpected("model_type", &expected));
    }
    match keys.text("hidden_act")? {
        None | Some("silu" | "swish") => Ok(()),
        Some(_) => Err(keys.unexpected("hidden_act", "`silu`")),
    }
}

fn not_negative(keys: Keys<'_>, key: &str) -> Result<Option<f64>, String> {
    match keys.number(key)? {
        Some(number) if number < 0.0 => Err(keys.unexpected(key, "0 or more")),
        number => Ok(number),
    }
}

/// Number of query heads, number of key-value heads, head size.
fn heads(family: Family, keys: Keys<'_>, hidden_size: usize) -> Result<(usize, usize, usize), String> {
    let n_heads = keys.size("num_attention_heads", bounds::HEADS)?;
    let n_kv_heads = match keys.optional_size("num_key_value_heads", bounds::HEADS)? {
        Some(n_kv_heads) => n_kv_heads,
        None if family == Family::Mistral && !keys.contains("num_key_value_heads") => MISTRAL_KV_HEADS,
        None => n_heads,
    };
    if !n_heads.is_multiple_of(n_kv_heads) {
        return Err(format!("num_attention_heads {n_heads} is not a multiple of num_key_value_heads {n_kv_heads}"));
    }
    let head_dim = match keys.optional_size("head_dim", bounds::HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None if family == Family::Qwen3 => QWEN3_HEAD_DIM,
        None if hidden_size.is_multiple_of(n_heads) => hidden_size / n_heads,
        None => return Err(format!("hidden_size {hidden_size} is not a multiple of num_attention_heads {n_heads}")),
    };
    match head_dim.is_multiple_of(2) {
        true => Ok((n_heads, n_kv_heads, head_dim)),
        false => Err(format!("head_dim is {head_dim}; rotary embeddings need an even number")),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LayerType {
    Full,
    Sliding,
}

/// The sliding window of each layer; empty if no window is shorter than the maximum sequence length.
fn sliding_windows(
    family: Family,
    keys: Keys<'_>,
    n_layers: usize,
    max_positions: usize,
) -> Result<Vec<Option<usize>>, String> {
    let types = layer_types(keys, n_layers)?;
    let configured = match keys.contains("sliding_window") {
        true => keys.optional_size("sliding_window", u64::from(u32::MAX)),
        false => Ok((family != Family::Llama).then_some(DEFAULT_WINDOW)),
    };
    let window = match family {
        Family::Qwen2 | Family::Qwen3 if keys.flag("use_sliding_window")? != Some(true) => None,
        _ => configured?,
    };
    let has_type = |layer_type| types.as_ref().is_some_and(|types| types.contains(&layer_type));
    let applied = window.filter(|window| *window < max_positions);
    if window.is_none() && has_type(LayerType::Sliding) {
        return Err(
            "`layer_types` has `sliding_attention`, and no sliding window is used; expected `sliding_window` (with \
                    `use_sliding_window` for Qwen), or `full_attention` in all layers"
                .into(),
        );
    }
    let Some(window) = applied else { return Ok(Vec::new()) };
    match family {
        Family::Llama => Err(keys.unexpected("sliding_window", "no value: Llama has no sliding window in transformers")),
        Family::Mistral if has_type(LayerType::Full) => {
            Err("`layer_types` has `full_attention` next to a sliding window, which Mistral has in all layers; remove one of the keys"
                .into())
        }
        Family::Mistral => Ok(vec![Some(window); n_layers]),
        Family::Qwen2 | Family::Qwen3 => {
            let first = keys.count("max_window_layers", u64::from(u32::MAX))?.unwrap_or(DEFAULT_WINDOW_LAYERS);
            let slides = |layer: usize| types.as_ref().map_or(layer >= first, |types| types[layer] == LayerType::Sliding);
            let windows: Vec<Option<usize>> = (0..n_layers).map(|layer| slides(layer).then_some(window)).collect();
            Ok(if windows.iter().any(Option::is_some) { windows } else { Vec::new() })
        }
    }
}

fn layer_types(keys: Keys<'_>, n_layers: usize) -> Result<Option<Vec<LayerType>>, String> {
    let Some(value) = keys.get("layer_types") else { return Ok(None) };
    let layer_type = |name: &serde_json::Value| match name.as_str() {
        Some("full_attention") => Some(LayerType::Full),
        Some("sliding_attention") => Some(LayerType::Sliding),
        _ => None,
    };
    let types = value.as_array().and_then(|names| names.iter().map(layer_type).collect::<Option<Vec<_>>>());
    match types.filter(|types| types.len() == n_layers) {
        Some(types) => Ok(Some(types)),
        None => {
            let expected = format!("`full_attention` or `sliding_attention` for each of {n_layers} layers");
            Err(keys.unexpected("layer_types", &expected))
        }
    }
}
