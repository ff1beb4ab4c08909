//! Reading of a Hugging Face model's `config.json`, for decoders and encoders: within bounds, with an allow-list of keys.
//!
//! A key that querl does not know may change what the model computes: it is refused and never ignored. Keys fall into three groups:
//! those that the reader of an architecture uses, [`WITHOUT_EFFECT`], and those that have no effect with one value, [`NO_OPS`].

use crate::fsx::io_problem;
use serde_json::{Map, Value};
use std::io::Read;
use std::path::Path;

/// Folder within a model's folder where `querl model pretrain` works; it is removed at the end.
pub const PRETRAIN_FOLDER: &str = ".pretrain";

/// Maximum size of a `config.json`; published ones have a few KiB.
pub const MAX_BYTES: u64 = 16 << 20;

/// Bounds of sizes, several times those of the largest published models.
pub mod bounds {
    /// Hidden size (width of the residual stream).
    pub const HIDDEN_SIZE: u64 = 1 << 17;
    /// Width of the feed-forward layers.
    pub const INTERMEDIATE_SIZE: u64 = 1 << 20;
    /// Number of layers.
    pub const LAYERS: u64 = 1 << 10;
    /// Number of attention heads.
    pub const HEADS: u64 = 1 << 12;
    /// Width of a head.
    pub const HEAD_DIM: u64 = 1 << 12;
    /// Number of tokens of the vocabulary.
    pub const VOCABULARY: u64 = 1 << 24;
    /// Positions of a sequence: 4 million, those of the longest published Llama.
    pub const POSITIONS: u64 = 1 << 22;
    /// Number of weights.
    pub const PARAMETERS: u64 = 1 << 42;
}

/// Keys that do not affect a model's computation: names and versions, token ids, types of stored weights, generation defaults, labels,
/// marks of tools; separated by spaces. Source: transformers' `PreTrainedConfig` and `GenerationConfig`; configurations on the Hugging Face
/// hub.
const WITHOUT_EFFECT: &[&str] = &[
    // Names and versions.
    "_commit_hash _name_or_path architectures export_model_type is_llama_config language max_seq_length \
     max_sequence_length model_max_length model_type name_or_path tokenizer_class transformers.js_config \
     transformers_version unsloth_fixed unsloth_version",
    // Token ids.
    "bos_token_id cls_token_id decoder_start_token_id eos_token_id mask_token_id pad_token_id sep_token_id \
     unk_token_id",
    // Implementation: types, attention kernels, caches, initial values, chunks of the same computation.
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _experts_implementation \
     _flash_attn_2_enabled attn_implementation cache_implementation chunk_size_feed_forward dtype \
     gradient_checkpointing initializer_range output_attentions output_hidden_states output_past return_dict \
     tf_legacy_loss torch_dtype torchscript use_bfloat16 use_cache xla_device",
    // Labels and tasks; a reader that needs them checks them.
    "_num_labels finetuning_task id2label label2id num_labels problem_type task_specific_params",
    // Dropout on a head that is not trained here, and on the noise of another trainer.
    "classifier_dropout neftune_noise_alpha",
    // Defaults of generation.
    "assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty \
     do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff \
     exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length \
     max_new_tokens min_length min_new_tokens no_repeat_ngram_size num_assistant_tokens \
     num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_scores penalty_alpha prefix \
     remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens target_lookbehind temperature \
     top_k top_p typical_p",
];

/// The value with which a key of `config.json` has no effect; a missing key and `null` also have no effect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NoOp {
    /// No value other than `null`.
    Null,
    /// This boolean.
    Flag(bool),
    /// This number.
    Number(f64),
    /// An empty list or object.
    Empty,
}

impl NoOp {
    fn holds(self, value: &Value) -> bool {
        match self {
            Self::Null => false,
            Self::Flag(flag) => value.as_bool() == Some(flag),
            Self::Number(number) => value.as_f64() == Some(number),
            Self::Empty => {
                value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(serde_json::Map::is_empty)
            }
        }
    }
}

impl std::fmt::Display for NoOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Null => f.write_str("no value"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Empty => f.write_str("an empty one"),
        }
    }
}

/// Keys of any architecture that change the computation unless they have this value.
const NO_OPS: &[(&str, NoOp)] = &[
    ("add_cross_attention", NoOp::Flag(false)),
    ("compression_config", NoOp::Null),
    ("cross_attention_hidden_size", NoOp::Null),
    ("is_encoder_decoder", NoOp::Flag(false)),
    ("per_layer_config", NoOp::Empty),
    ("pruned_heads", NoOp::Empty),
    ("quantization_config", NoOp::Null),
    ("tie_encoder_decoder", NoOp::Flag(false)),
];

/// Why a `config.json` cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file is missing or unreadable.
    #[error("cannot be read: {}", io_problem(.0))]
    Io(#[from] std::io::Error),
    /// The file is not a JSON object, or too large.
    #[error("{0}")]
    Invalid(String),
}

/// Remedy, in messages about a model file that is truncated, empty or of another format.
pub const DOWNLOAD_AGAIN: &str = "download or save it again";

/// Reads a JSON file of a model directory, of at most [`MAX_BYTES`].
///
/// # Errors
/// The file cannot be read or is larger.
pub fn read_bytes(path: &Path) -> Result<Vec<u8>, ReadError> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        let message = format!("larger than {} MiB; expected the configuration of one model", MAX_BYTES >> 20);
        return Err(ReadError::Invalid(message));
    }
    Ok(bytes)
}

/// Reads a file with one JSON object, of at most [`MAX_BYTES`].
///
/// # Errors
/// The file cannot be read, is larger, or is not a JSON object.
pub fn read(path: &Path) -> Result<Map<String, Value>, ReadError> {
    match serde_json::from_slice(&read_bytes(path)?) {
        Ok(Value::Object(keys)) => Ok(keys),
        Ok(other) => Err(ReadError::Invalid(format!("is {}; expected a JSON object", shown(&other)))),
        Err(error) => Err(ReadError::Invalid(format!("not JSON: {error}; {DOWNLOAD_AGAIN}"))),
    }
}

/// The keys of `config.json`, or of an object in it. Messages name key, value and remedy; the caller adds the file.
#[derive(Debug, Clone, Copy)]
pub struct Keys<'a> {
    /// Name of the object, for messages; empty for the file itself.
    name: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// The keys of the file.
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Self { name: "", map }
    }

    /// The value of a key; `None` if it is missing or `null`.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// True if the key exists, even with the value `null`.
    pub fn contains(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The object that is the value of a key; `None` if it is missing, `null` or empty.
    ///
    /// # Errors
    /// The value is not an object.
    pub fn object(&self, key: &'a str) -> Result<Option<Keys<'a>>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok((!map.is_empty()).then_some(Keys { name: key, map })),
            Some(_) => Err(self.unexpected(key, "an object")),
        }
    }

    /// Keys and values in order, without those that are `null`.
    pub fn values(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.map.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.as_str(), value))
    }

    /// True if each key has this value or `null`.
    pub fn all_are(&self, value: &Value) -> bool {
        self.values().all(|(_, other)| other == value)
    }

    /// An integer from 0 to `most`; `None` if the key has no value.
    ///
    /// # Errors
    /// The value is not such an integer.
    pub fn count(&self, key: &str, most: u64) -> Result<Option<usize>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().filter(|count| *count <= most) {
            Some(count) => Ok(usize::try_from(count).ok()),
            None => Err(self.unexpected(key, &format!("a whole number from 0 to {most}"))),
        }
    }

    /// An integer from 1 to `most`; `None` if the key has no value.
    ///
    /// # Errors
    /// The value is not such an integer.
    pub fn optional_size(&self, key: &str, most: u64) -> Result<Option<usize>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().filter(|size| (1..=most).contains(size)) {
            Some(size) => Ok(usize::try_from(size).ok()),
            None => Err(self.unexpected(key, &format!("a whole number from 1 to {most}"))),
        }
    }

    /// An integer from 1 to `most` of a required key.
    ///
    /// # Errors
    /// As [`Keys::optional_size`], or the key has no value.
    pub fn size(&self, key: &str, most: u64) -> Result<usize, String> {
        self.optional_size(key, most)?.ok_or_else(|| self.missing(key))
    }

    /// A finite number; `None` if the key has no value.
    ///
    /// # Errors
    /// The value is not a number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().filter(|number| number.is_finite()).map(Some).ok_or_else(|| self.unexpected(key, "a number"))
    }

    /// A boolean; `None` if the key has no value.
    ///
    /// # Errors
    /// The value is neither.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.unexpected(key, "true or false"))
    }

    /// A string; `None` if the key has no value.
    ///
    /// # Errors
    /// The value is not a string.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.unexpected(key, "a string"))
    }

    /// Message for a required key without a value.
    pub fn missing(&self, key: &str) -> String {
        format!("has no `{}{key}`; copy it from the model's original configuration", self.prefix())
    }

    /// Message for a key whose value is not supported.
    pub fn unexpected(&self, key: &str, expected: &str) -> String {
        let value = self.map.get(key).map_or_else(|| "missing".to_owned(), shown);
        format!("`{}{key}` is {value}; expected {expected}", self.prefix())
    }

    fn prefix(&self) -> String {
        if self.name.is_empty() { String::new() } else { format!("{}.", self.name) }
    }

    /// Refuses keys that may change the computation. Accepted are the keys in `used` (separated by spaces), which the caller reads, keys
    /// that never have an effect, and keys in `no_ops` with the value given there.
    ///
    /// # Errors
    /// A key is not accepted.
    pub fn check_file(&self, used: &str, no_ops: &[(&str, NoOp)]) -> Result<(), String> {
        let maps_model = |(class, _): (&String, &Value)| class.starts_with("AutoModel");
        if self.get("auto_map").and_then(Value::as_object).is_some_and(|map| map.iter().any(maps_model)) {
            return Err(
                "`auto_map` names model code of the checkpoint's own, which may compute something else; remove the key if the \
                 weights are those of the architecture in transformers"
                    .into(),
            );
        }
        let names = [used, "auto_map"].into_iter().chain(WITHOUT_EFFECT.iter().copied());
        let known: Vec<&str> = names.flat_map(str::split_whitespace).collect();
        let all: Vec<(&str, NoOp)> = NO_OPS.iter().chain(no_ops).copied().collect();
        self.check(&known, &all)
    }

    /// Refuses all keys except those in `known`, those in `no_ops` with the value given there, and those that are `null`.
    ///
    /// # Errors
    /// A key is refused.
    pub fn check(&self, known: &[&str], no_ops: &[(&str, NoOp)]) -> Result<(), String> {
        for (key, value) in self.values().filter(|(key, _)| !known.contains(key)) {
            match no_ops.iter().find(|(name, _)| *name == key) {
                Some((_, no_op)) if no_op.holds(value) => {}
                Some((_, no_op)) => {
                    return Err(self.unexpected(key, &format!("{no_op}: querl does not compute anything else")));
                }
                None => {
                    let remedy = "remove the key if the model computes the same without it";
                    let key = format!("{}{key}", self.prefix());
                    return Err(format!("`{key}` is {}, a key that querl does not know; {remedy}", shown(value)));
                }
            }
        }
        Ok(())
    }
}

/// A value for a message, truncated to 60 characters.
fn shown(value: &Value) -> String {
    const MAX_CHARS: usize = 60;
    let text = match value {
        Value::String(text) => format!("`{text}`"),
        other => other.to_string(),
    };
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(value: &Value) -> Result<(), String> {
        let no_ops = [("mlp_bias", NoOp::Flag(false)), ("embedding_multiplier", NoOp::Number(1.0))];
        Keys::new(value.as_object().unwrap()).check_file("hidden_size", &no_ops)
    }

    #[test]
    fn keys_are_known_or_without_effect_or_refused() {
        let fine = json!({
            "hidden_size": 8, "torch_dtype": "bfloat16", "temperature": 0.6, "mlp_bias": false, "embedding_multiplier": 1,
            "quantization_config": null, "pruned_heads": {}, "head_gate": null, "auto_map": {"AutoConfig": "a.B"},
        });
        assert_eq!(check(&fine), Ok(()));
        for (file, expected) in [
            (json!({"mlp_bias": true}), "`mlp_bias` is true; expected false: querl does not compute anything else"),
            (json!({"embedding_multiplier": 12.0}), "`embedding_multiplier` is 12.0; expected 1"),
            (
                json!({"quantization_config": {"quant_method": "gptq"}}),
                "is {\"quant_method\":\"gptq\"}; expected no value",
            ),
            (
                json!({"head_gate": "sigmoid"}),
                "`head_gate` is `sigmoid`, a key that querl does not know; remove the key if the model computes the same",
            ),
            (json!({"auto_map": {"AutoModel": "a.B"}}), "`auto_map` names model code of the checkpoint's own"),
        ] {
            let found = check(&file).unwrap_err();
            assert!(found.contains(expected), "{found}");
        }
        let long = check(&json!({"head_gate": "数".repeat(1000)})).unwrap_err();
        assert!(long.len() < 400 && long.contains("..."), "{long}");
    }

    #[test]
    fn sizes_are_whole_numbers_within_bounds() {
        let file = json!({"zero": 0, "large": 9, "half": 1.5, "text": "8", "below": -1, "none": null, "fine": 8});
        let keys = Keys::new(file.as_object().unwrap());
        assert_eq!((keys.size("fine", 8), keys.optional_size("none", 8)), (Ok(8), Ok(None)));
        for key in ["zero", "large", "half", "text", "below"] {
            let found = keys.optional_size(key, 8).unwrap_err();
            assert!(found.starts_with(&format!("`{key}` is ")), "{found}");
            assert!(found.ends_with("a whole number from 1 to 8"), "{found}");
        }
        assert!(keys.size("none", 8).unwrap_err().starts_with("has no `none`"));
    }

    #[test]
    fn a_file_that_is_too_large_or_no_object_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let refusal = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read(&path).unwrap_err().to_string()
        };
        assert_eq!(refusal("[1]"), "is [1]; expected a JSON object");
        assert!(refusal("{\"a\": NaN}").starts_with("not JSON: "));
        assert!(refusal(&"[".repeat(100_000)).starts_with("not JSON: "));
        assert!(refusal(&" ".repeat(MAX_BYTES as usize + 1)).starts_with("larger than 16 MiB"));
        assert!(matches!(read(folder.path().join("none").as_path()), Err(ReadError::Io(_))));
    }
}
