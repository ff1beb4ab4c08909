//! A BERT or XLM-RoBERTa model without head: the Hugging Face directory, tokenized batches, and the encoder.

use crate::EncoderError;
use candle_core::safetensors::SliceSafetensors;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{bert, xlm_roberta};
use querl_core::floats::{FloatFormat, coordinates};
use querl_core::fsx;
use querl_core::model_config::{self, DOWNLOAD_AGAIN, Keys, NoOp, bounds};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tokenizers::{EncodeInput, Encoding, Tokenizer, TruncationParams, TruncationStrategy};

/// Files that a model's output depends on.
const DIGESTED_FILES: [&str; 3] = ["config.json", "tokenizer.json", "model.safetensors"];
/// Default and upper limit of the maximum length in tokens, unless a length is requested: BERT's. Attention memory grows with its square.
const DEFAULT_LENGTH: usize = 512;
/// Minimum of `max_length`, as in querl's configuration: room for the special tokens of a pair and a part of both texts.
const MIN_LENGTH: usize = 8;

/// Accepted keys of `config.json`: those that are read here or by candle-transformers, and those without effect on an encoder at
/// inference, which are dropout, BERT's pretraining and poolers that are not used.
const USED: &str = "\
    attention_probs_dropout_prob directionality hidden_act hidden_dropout_prob hidden_size intermediate_size \
    layer_norm_eps matryoshka_dimensions max_position_embeddings num_attention_heads num_hidden_layers \
    pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type \
    position_embedding_type sbert_ce_default_activation_function sentence_transformers tie_word_embeddings \
    type_vocab_size vocab_size";

/// Keys that must have the default value. With `is_decoder`, attention would be causal.
const NO_OPS: &[(&str, NoOp)] = &[("is_decoder", NoOp::Flag(false))];

/// Sizes in `config.json` with their upper bounds. Only `type_vocab_size` may be missing.
const SIZES: [(&str, u64); 7] = [
    ("hidden_size", bounds::HIDDEN_SIZE),
    ("intermediate_size", bounds::INTERMEDIATE_SIZE),
    ("num_hidden_layers", bounds::LAYERS),
    ("num_attention_heads", bounds::HEADS),
    ("vocab_size", bounds::VOCABULARY),
    ("max_position_embeddings", bounds::POSITIONS),
    ("type_vocab_size", bounds::VOCABULARY),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Architecture {
    /// BERT with pooler, as in `bge-small-zh-v1.5`.
    Bert,
    /// XLM-RoBERTa, as in `bge-m3` and `bge-reranker-base`.
    XlmRoberta,
}

/// A Hugging Face model directory with its config.json.
#[derive(Debug)]
pub(crate) struct Directory {
    folder: PathBuf,
    pub(crate) architecture: Architecture,
    pub(crate) config: Value,
}

impl Directory {
    pub(crate) fn open(folder: &Path) -> Result<Self, EncoderError> {
        let path = folder.join("config.json");
        let config = Value::Object(model_config::read(&path).map_err(|error| EncoderError::file(&path, error))?);
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
        check_keys(&config).map_err(|problem| EncoderError::file(&path, problem))?;
        Ok(Self { folder: folder.to_owned(), architecture, config })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A JSON file of the directory; `None` if it does not exist.
    pub(crate) fn optional_json(&self, name: &str) -> Result<Option<Value>, EncoderError> {
        let path = self.path(name);
        if path.is_file() { read_json(&path).map(Some) } else { Ok(None) }
    }

    pub(crate) fn number(&self, key: &str) -> Result<usize, EncoderError> {
        let found = self.config[key].as_u64().map(|number| number as usize);
        found.ok_or_else(|| EncoderError::file(&self.path("config.json"), format!("has no number `{key}`")))
    }

    /// Refuses sizes that are missing, 0 or above their bound, and a hidden size that is not a multiple of the number of heads.
    fn check_sizes(&self) -> Result<(), EncoderError> {
        let wrong = |problem: String| EncoderError::file(&self.path("config.json"), problem);
        let Some(keys) = self.config.as_object().map(Keys::new) else { return Ok(()) };
        for (key, most) in SIZES {
            let size = keys.optional_size(key, most).map_err(wrong)?;
            if size.is_none() && key != "type_vocab_size" {
                return Err(wrong(keys.missing(key)));
            }
        }
        let (hidden, n_heads) = (self.number("hidden_size")?, self.number("num_attention_heads")?);
        match hidden.is_multiple_of(n_heads) {
            true => Ok(()),
            false => Err(wrong(format!("hidden_size {hidden} is not a multiple of num_attention_heads {n_heads}"))),
        }
    }

    /// True for a sequence classifier, such as a reranker.
    pub(crate) fn is_classifier(&self) -> bool {
        let architectures = self.config["architectures"].as_array().into_iter().flatten();
        architectures.filter_map(Value::as_str).any(|name| name.ends_with("ForSequenceClassification"))
    }

    /// Maximum sequence length in tokens, special tokens included: `requested`, or else `max_seq_length` of sentence-transformers, at most
    /// [`DEFAULT_LENGTH`].
    pub(crate) fn max_length(&self, requested: Option<usize>) -> Result<usize, EncoderError> {
        let positions = self.number("max_position_embeddings")?;
        let longest = match self.architecture {
            Architecture::Bert => positions,
            // RoBERTa's position ids start at `pad_token_id + 1`.
            Architecture::XlmRoberta => positions.saturating_sub(self.pad_id() as usize + 1),
        };
        match requested {
            Some(requested) if requested > longest => {
                let problem = format!("allows at most {longest} tokens; max_length is {requested}");
                Err(EncoderError::file(&self.path("config.json"), problem))
            }
            Some(requested) => Ok(requested),
            None => {
                let settings = self.optional_json("sentence_bert_config.json")?.unwrap_or_default();
                let cut_at = settings["max_seq_length"].as_u64().map_or(DEFAULT_LENGTH, |length| length as usize);
                if cut_at < MIN_LENGTH {
                    let path = self.path("sentence_bert_config.json");
                    let problem = format!("max_seq_length is {cut_at}; expected {MIN_LENGTH} or more");
                    return Err(EncoderError::file(&path, problem));
                }
                Ok(cut_at.min(DEFAULT_LENGTH).min(longest))
            }
        }
    }

    /// Id of the padding token. The defaults are those of transformers.
    pub(crate) fn pad_id(&self) -> u32 {
        let usual = match self.architecture {
            Architecture::Bert => 0,
            Architecture::XlmRoberta => 1,
        };
        self.config["pad_token_id"].as_u64().map_or(usual, |id| id as u32)
    }

    /// Loads and checks the weights; they are converted to f32 on access.
    pub(crate) fn weights(&self) -> Result<VarBuilder<'static>, EncoderError> {
        let path = self.path("model.safetensors");
        let bytes = std::fs::read(&path).map_err(|error| {
            let remedy = match error.kind() {
                std::io::ErrorKind::NotFound => "; save the model with `safe_serialization=True`",
                _ => "",
            };
            EncoderError::file(&path, format!("cannot be read: {}{remedy}", fsx::io_problem(&error)))
        })?;
        check_weights(&bytes).map_err(|problem| EncoderError::file(&path, problem))?;
        VarBuilder::from_buffered_safetensors(bytes, DType::F32, &Device::Cpu)
            .map_err(|error| EncoderError::file(&path, error))
    }

    /// Digest of [`DIGESTED_FILES`] and `settings`.
    pub(crate) fn digest(&self, settings: &[String]) -> Result<String, EncoderError> {
        let mut parts = settings.to_vec();
        for name in DIGESTED_FILES {
            let path = self.path(name);
            let digest = fsx::digest_file(&path)
                .map_err(|error| EncoderError::file(&path, format!("cannot be read: {error}")))?;
            parts.push(format!("{name} {digest}"));
        }
        // As JSON, so that different parts never have the same text.
        Ok(fsx::digest_hex(Value::from(parts).to_string().as_bytes()))
    }
}

fn check_keys(config: &Value) -> Result<(), String> {
    config.as_object().map_or(Ok(()), |keys| Keys::new(keys).check_file(USED, NO_OPS))
}

/// Checks that the file is complete and that every weight is finite.
fn check_weights(bytes: &[u8]) -> Result<(), String> {
    let damaged = |error: candle_core::Error| {
        let cause = error.to_string();
        let cause = cause.lines().next().unwrap_or_default();
        format!("damaged or truncated safetensors file ({cause}); download or save it again")
    };
    for (name, tensor) in SliceSafetensors::new(bytes).map_err(damaged)?.tensors() {
        let dtype = DType::try_from(tensor.dtype()).map_err(|error| format!("tensor `{name}`: {error}"))?;
        let Some(format) = FloatFormat::from_name(dtype.as_str()) else { continue };
        if let Some(found) = format.first_not_finite(tensor.data()) {
            let place = coordinates(found.index, tensor.shape());
            let value = found.value;
            return Err(format!("tensor `{name}` holds {value} at {place:?}; the file is damaged: download it again"));
        }
    }
    Ok(())
}

fn read_json(path: &Path) -> Result<Value, EncoderError> {
    let bytes = model_config::read_bytes(path).map_err(|error| EncoderError::file(path, error))?;
    serde_json::from_slice(&bytes)
        .map_err(|error| EncoderError::file(path, format!("not JSON: {error}; {DOWNLOAD_AGAIN}")))
}

/// A BERT or XLM-RoBERTa encoder without a head.
pub(crate) enum Backbone {
    Bert(bert::BertModel),
    XlmRoberta(xlm_roberta::XLMRobertaModel),
}

impl Backbone {
    /// Loads the encoder; tensor names may have the prefix of a model with a head.
    pub(crate) fn load(directory: &Directory, weights: &VarBuilder<'static>) -> Result<Self, EncoderError> {
        directory.check_sizes()?;
        let config = || settings(&directory.config, directory.pad_id());
        let unfit = |error: serde_json::Error| EncoderError::file(&directory.path("config.json"), error);
        let misfit = |error: candle_core::Error| EncoderError::file(&directory.path("model.safetensors"), error);
        let n_layers = directory.number("num_hidden_layers")?;
        let surplus = format!("encoder.layer.{n_layers}.attention.self.query.weight");
        if ["bert", "roberta"].iter().any(|prefix| below(weights, prefix).contains_tensor(&surplus)) {
            let problem = format!("`num_hidden_layers` is {n_layers}; model.safetensors has more layers");
            return Err(EncoderError::file(&directory.path("config.json"), problem));
        }
        match directory.architecture {
            Architecture::Bert => {
                let config: bert::Config = serde_json::from_value(config()).map_err(unfit)?;
                bert::BertModel::load(below(weights, "bert"), &config).map(Self::Bert).map_err(misfit)
            }
            Architecture::XlmRoberta => {
                let config: xlm_roberta::Config = serde_json::from_value(config()).map_err(unfit)?;
                let weights = below(weights, "roberta");
                xlm_roberta::XLMRobertaModel::new(&config, weights).map(Self::XlmRoberta).map_err(misfit)
            }
        }
    }

    /// Hidden states of the last layer, `(B, T, H)` f32.
    pub(crate) fn forward(&self, batch: &Batch) -> candle_core::Result<Tensor> {
        match self {
            Self::Bert(model) => model.forward(&batch.ids, &batch.type_ids, Some(&batch.mask)),
            Self::XlmRoberta(model) => model.forward(&batch.ids, &batch.mask, &batch.type_ids, None, None, None),
        }
    }
}

fn below(weights: &VarBuilder<'static>, prefix: &str) -> VarBuilder<'static> {
    let name = "embeddings.word_embeddings.weight";
    if weights.contains_tensor(&format!("{prefix}.{name}")) { weights.pp(prefix) } else { weights.clone() }
}

/// config.json with default values for the keys that newer versions of transformers do not write.
fn settings(config: &Value, pad_id: u32) -> Value {
    let mut settings = json!({
        "position_embedding_type": "absolute", "type_vocab_size": 2, "initializer_range": 0.02, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": pad_id,
    });
    let (own, all) = (config.as_object(), settings.as_object_mut());
    if let (Some(own), Some(all)) = (own, all) {
        all.extend(own.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.clone(), value.clone())));
    }
    settings
}

/// Maximum number of attention scores of one layer in a forward pass, `B * heads * T * T`: 64 MiB of f32. A layer holds about three such
/// tensors. A batch of one text may exceed it.
const SCORES_PER_PASS: usize = 1 << 24;
/// Maximum number of texts in a forward pass. Larger batches are not faster.
const TEXTS_PER_PASS: usize = 32;

/// Tokenizer, with the special tokens that the model needs (`[CLS]`, `[SEP]`).
pub(crate) struct Tokens {
    tokenizer: Tokenizer,
    architecture: Architecture,
    pad_id: u32,
    n_heads: usize,
}

/// Tokenized texts as padded tensors, each `(B, T)` u32.
pub(crate) struct Batch {
    /// Indices of the texts in the input.
    pub(crate) positions: Vec<usize>,
    pub(crate) ids: Tensor,
    pub(crate) type_ids: Tensor,
    /// Attention mask: 1 for tokens, 0 for padding.
    pub(crate) mask: Tensor,
}

impl Tokens {
    /// Reads tokenizer.json. Texts are truncated to `max_length` tokens, special tokens included. The characters of a special token in a
    /// text (`[SEP]`) are encoded as text, as with transformers' `split_special_tokens=True`.
    pub(crate) fn open(directory: &Directory, max_length: usize) -> Result<Self, EncoderError> {
        let path = directory.path("tokenizer.json");
        let bytes = std::fs::read(&path)
            .map_err(|error| EncoderError::file(&path, format!("cannot be read: {}", fsx::io_problem(&error))))?;
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|error| {
            let expected = "a tokenizer as tokenizers 0.23 or older saves it";
            EncoderError::file(&path, format!("not {expected}: {error}; {DOWNLOAD_AGAIN}"))
        })?;
        // The file's padding is not used: `batch` pads each batch to its longest text.
        tokenizer.with_padding(None);
        tokenizer.set_encode_special_tokens(true);
        let truncation =
            TruncationParams { max_length, strategy: TruncationStrategy::LongestFirst, ..TruncationParams::default() };
        tokenizer.with_truncation(Some(truncation)).map_err(|error| EncoderError::file(&path, error))?;
        Ok(Self {
            tokenizer,
            architecture: directory.architecture,
            pad_id: directory.pad_id(),
            n_heads: directory.number("num_attention_heads")?,
        })
    }

    /// Tokenizes texts or pairs into batches of similar length, longest first.
    pub(crate) fn batches<'a, T: Into<EncodeInput<'a>> + Send>(
        &self,
        texts: Vec<T>,
    ) -> Result<Vec<Batch>, EncoderError> {
        let encodings =
            self.tokenizer.encode_batch(texts, true).map_err(|error| EncoderError::Tokenizer(error.to_string()))?;
        let lengths: Vec<usize> = encodings.iter().map(Encoding::len).collect();
        cuts(&lengths, self.n_heads).into_iter().map(|positions| self.batch(&encodings, positions)).collect()
    }

    fn batch(&self, encodings: &[Encoding], positions: Vec<usize>) -> Result<Batch, EncoderError> {
        let longest = positions.iter().map(|position| encodings[*position].len()).max().unwrap_or_default();
        let tensor = |numbers: fn(&Encoding) -> &[u32], padding: u32| {
            let padded = |position: &usize| {
                let numbers = numbers(&encodings[*position]);
                numbers.iter().copied().chain(std::iter::repeat_n(padding, longest - numbers.len()))
            };
            let all: Vec<u32> = positions.iter().flat_map(padded).collect();
            Tensor::from_vec(all, (positions.len(), longest), &Device::Cpu)
        };
        let ids = tensor(Encoding::get_ids, self.pad_id)?;
        let type_ids = match self.architecture {
            Architecture::Bert => tensor(Encoding::get_type_ids, 0)?,
            // XLM-RoBERTa has one token type; transformers also ignores the tokenizer's type ids.
            Architecture::XlmRoberta => ids.zeros_like()?,
        };
        let mask = tensor(Encoding::get_attention_mask, 0)?;
        Ok(Batch { positions, ids, type_ids, mask })
    }
}

/// Groups the indices of texts into batches of similar length, longest first, within [`SCORES_PER_PASS`] and [`TEXTS_PER_PASS`].
fn cuts(lengths: &[usize], n_heads: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|position| std::cmp::Reverse(lengths[*position]));
    let mut batches = Vec::new();
    let mut rest = order.as_slice();
    while let Some(longest) = rest.first() {
        let scores_of_one = n_heads * lengths[*longest].pow(2).max(1);
        let n_texts = (SCORES_PER_PASS / scores_of_one).clamp(1, TEXTS_PER_PASS).min(rest.len());
        let (batch, others) = rest.split_at(n_texts);
        batches.push(batch.to_vec());
        rest = others;
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a batch of 32 texts with 8192 tokens needed 137 GB for attention scores.
    #[test]
    fn batches_are_cut_by_the_memory_of_their_attention_scores() {
        let lengths: Vec<usize> = (0..40).map(|index| if index % 8 == 3 { 512 } else { 16 }).collect();
        let batches = cuts(&lengths, 16);
        let scores = |batch: &Vec<usize>| {
            let longest = batch.iter().map(|position| lengths[*position]).max().unwrap_or_default();
            16 * batch.len() * longest * longest
        };
        assert!(batches.iter().all(|batch| scores(batch) <= SCORES_PER_PASS), "{batches:?}");
        assert_eq!(batches[0], [3, 11, 19, 27], "the longest come first, those of one length in their order");
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 32]);
        let mut all = batches.concat();
        all.sort_unstable();
        assert_eq!(all, (0..40).collect::<Vec<_>>());
        assert_eq!(cuts(&[8192, 8192], 16).len(), 2, "one text at a time where even one is more than that");
        assert!(cuts(&[], 16).is_empty());
    }

    /// The keys of published checkpoints on Hugging Face, written by old and new versions of transformers.
    #[test]
    fn configurations_of_published_encoders_are_accepted() {
        let bge_small_zh = json!({
            "_name_or_path": "", "architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
            "classifier_dropout": null, "directionality": "bidi", "eos_token_id": 2, "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1, "hidden_size": 512, "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02,
            "intermediate_size": 2048, "label2id": {"LABEL_0": 0}, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
            "model_type": "bert", "num_attention_heads": 8, "num_hidden_layers": 4, "output_past": true, "pad_token_id": 0,
            "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128,
            "pooler_type": "first_token_transform", "position_embedding_type": "absolute", "torch_dtype": "float32",
            "transformers_version": "4.30.0", "type_vocab_size": 2, "use_cache": true, "vocab_size": 21128,
        });
        let bge_m3 = json!({
            "architectures": ["XLMRobertaModel"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
            "classifier_dropout": null, "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
            "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 4096, "layer_norm_eps": 1e-5,
            "max_position_embeddings": 8194, "model_type": "xlm-roberta", "num_attention_heads": 16,
            "num_hidden_layers": 24, "output_past": true, "pad_token_id": 1, "position_embedding_type": "absolute",
            "torch_dtype": "float32", "transformers_version": "4.33.0", "type_vocab_size": 1, "use_cache": true,
            "vocab_size": 250_002,
        });
        let new = json!({
            "add_cross_attention": false, "architectures": ["XLMRobertaForSequenceClassification"], "dtype": "float32",
            "hidden_size": 1024, "id2label": {"0": "LABEL_0"}, "is_decoder": false, "matryoshka_dimensions": [256],
            "model_type": "xlm-roberta", "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            "tie_word_embeddings": true, "transformers_version": "5.17.0",
        });
        let old = json!({
            "_num_labels": 1, "finetuning_task": null, "gradient_checkpointing": false, "model_type": "bert",
            "torchscript": false, "use_bfloat16": false, "xla_device": true,
        });
        for config in [bge_small_zh, bge_m3, new, old] {
            assert_eq!(check_keys(&config), Ok(()), "{config}");
        }
    }

    /// Goldens: `tests/reference/control_tokens.py`.
    #[test]
    fn control_tokens_in_texts_are_encoded_as_transformers_splits_them() {
        let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden");
        let golden = read_json(&reference.join("control_tokens.json")).unwrap();
        let golden = &golden["encoders"];
        let texts = || golden["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
        let pairs: Vec<(&str, &str)> = texts().map(|text| (golden["query"].as_str().unwrap(), text)).collect();
        for (name, expected) in golden["ids"].as_object().unwrap() {
            let directory = Directory::open(&reference.join("encoders").join(name)).unwrap();
            let tokens = Tokens::open(&directory, 1000).unwrap();
            let of_texts = tokens.batches(texts().collect::<Vec<_>>()).unwrap();
            let of_pairs = tokens.batches(pairs.clone()).unwrap();
            for (batches, expected) in [(of_texts, &expected["texts"]), (of_pairs, &expected["pairs"])] {
                let mut n_texts = 0;
                for batch in batches {
                    let (ids, mask) = (batch.ids.to_vec2::<u32>().unwrap(), batch.mask.to_vec2::<u32>().unwrap());
                    for ((position, ids), mask) in batch.positions.iter().zip(&ids).zip(&mask) {
                        let kept = ids.iter().zip(mask).filter(|(_, kept)| **kept == 1).map(|(id, _)| *id);
                        assert_eq!(json!(kept.collect::<Vec<u32>>()), expected[position], "{name} {position}");
                        n_texts += 1;
                    }
                }
                assert_eq!(n_texts, 4, "{name}");
            }
        }
    }
}
