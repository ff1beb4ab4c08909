//! Reading and writing a classifier's folder, and its tokenizer.

use super::{Classifier, HEAD_WEIGHT};
use crate::adapter::LoraAdapter;
use crate::chat_template::token_text;
use crate::checkpoint::{StoredModel, Tensors, required};
use crate::export::{copy_companions, read_json, write_json};
use crate::finite::check_tensors;
use crate::tokenizer::read_tokenizer;
use crate::{Decoder, DecoderConfig, ModelError, Weights, save_tensors};
use candle_core::{DType, Tensor};
use querl_core::config::BaseDtype;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use tokenizers::Tokenizer;

/// Weight file of older releases of transformers.
const PICKLED: &str = "pytorch_model.bin";

const PROBLEM_TYPE: &str = "single_label_classification";

/// Tensors of a classifier folder, checked by name and shape: memory-mapped safetensors, or read from `pytorch_model.bin`.
pub(super) struct Opened {
    config: DecoderConfig,
    tensors: Box<dyn Tensors>,
}

impl Opened {
    pub(super) fn open(directory: &Path) -> Result<Self, ModelError> {
        let config = DecoderConfig::load_backbone(&required(directory, "config.json")?)?;
        let is_safe =
            ["model.safetensors", "model.safetensors.index.json"].iter().any(|file| directory.join(file).is_file());
        let pickled = directory.join(PICKLED);
        if is_safe || !pickled.is_file() {
            let stored = StoredModel::open_with(directory, config.clone(), &[HEAD_WEIGHT])?;
            return Ok(Self { config, tensors: Box::new(stored) });
        }
        let tensors = candle_core::pickle::read_all(&pickled).map_err(|error| ModelError::bad_file(&pickled, error))?;
        let tensors: BTreeMap<String, Tensor> = tensors.into_iter().collect();
        check_tensors(&pickled, &tensors)?;
        for (name, shape) in config.tensor_shapes() {
            let found = tensors.get(&name).map(|tensor| tensor.dims().to_vec());
            if found.as_ref() != Some(&shape) {
                let found = found.map_or("is not there".to_owned(), |found| format!("has shape {found:?}"));
                let message = format!("tensor `{name}` {found}; config.json makes it {shape:?}");
                return Err(ModelError::bad_file(&pickled, message));
            }
        }
        Ok(Self { config, tensors: Box::new(tensors) })
    }

    pub(super) fn decoder(&self, weights: Weights, dtype: BaseDtype) -> Result<Decoder, ModelError> {
        Decoder::of_tensors(self.config.clone(), &*self.tensors, weights, dtype)
    }

    pub(super) fn score(&self) -> Result<Option<Tensor>, ModelError> {
        let has_score = self.tensors.shape(HEAD_WEIGHT).is_ok();
        has_score.then(|| self.tensors.tensor(HEAD_WEIGHT, None)).transpose()
    }
}

/// The padding token id for implementations that pad batches: from `config.json`, or else from the tokenizer.
pub(super) fn pad_id(directory: &Path) -> Result<Option<u32>, ModelError> {
    let config = read_json(&required(directory, "config.json")?)?;
    match config["pad_token_id"].as_u64() {
        Some(id) => Ok(u32::try_from(id).ok()),
        None if directory.join(TOKENIZER).is_file() => Ok(ClassifierTokenizer::load(directory, 1)?.pad_id()),
        None => Ok(None),
    }
}

/// Checks that the problem type is single-label classification: for other types transformers applies no softmax.
pub(super) fn check_problem_type(directory: &Path) -> Result<(), ModelError> {
    let path = required(directory, "config.json")?;
    match read_json(&path)?["problem_type"].as_str() {
        None | Some(PROBLEM_TYPE) => Ok(()),
        Some(other) => {
            let message = format!("`problem_type` is `{other}`; expected `{PROBLEM_TYPE}`, one class of several");
            Err(ModelError::bad_file(&path, message))
        }
    }
}

/// Files of a full classifier, in addition to labels and tokenizer.
const FULL_MODEL_FILES: [&str; 2] = ["config.json", "model.safetensors"];

/// Removes files of a model in the other format (adapter or full model), which a reader would prefer.
fn remove_other_kind(directory: &Path, is_adapter: bool) -> Result<(), ModelError> {
    let is_stale = |name: &str| {
        let is_never_written =
            ["model-", "model.safetensors.index", PICKLED].iter().any(|start| name.starts_with(start));
        let is_of_other = if is_adapter { FULL_MODEL_FILES.contains(&name) } else { name.starts_with("adapter_") };
        is_never_written || is_of_other
    };
    for entry in std::fs::read_dir(directory).map_err(ModelError::io(directory))?.flatten() {
        if is_stale(&entry.file_name().to_string_lossy()) {
            std::fs::remove_file(entry.path()).map_err(ModelError::io(&entry.path()))?;
        }
    }
    Ok(())
}

impl Classifier {
    /// Maximum number of tokens of a text for the model in a folder.
    ///
    /// # Errors
    /// `config.json` cannot be read, or is of an architecture that is not supported.
    pub fn n_positions(directory: &Path) -> Result<usize, ModelError> {
        Ok(DecoderConfig::load_backbone(&required(directory, "config.json")?)?.max_positions)
    }

    /// Writes the classifier in the layout of transformers' `AutoModelForSequenceClassification` or, with an adapter, of PEFT:
    /// configuration, weights in f32, `label_mapping.json` and the base's tokenizer. `base`: the folder from which the classifier was made.
    /// Weights and adapters in `directory` are replaced.
    ///
    /// # Errors
    /// A file cannot be read or written; `directory` is the base's own; or the decoder was loaded frozen and has no adapter, so that only a
    /// head could be written.
    pub fn save(&self, directory: &Path, base: &Path) -> Result<(), ModelError> {
        if self.adapter.is_none() && self.decoder.vars().is_empty() {
            return Err(ModelError::bad_file(directory, "a classifier with frozen weights is not written again"));
        }
        std::fs::create_dir_all(directory).map_err(ModelError::io(directory))?;
        let real = |path: &Path| path.canonicalize().map_err(ModelError::io(path));
        if real(directory)? == real(base)? {
            return Err(ModelError::bad_file(directory, "the model that is trained stands there; name another folder"));
        }
        self.labels.write(directory)?;
        copy_companions(base, directory)?;
        if let Some(adapter) = &self.adapter {
            let name = base.file_name().unwrap_or(base.as_os_str()).to_string_lossy();
            LoraAdapter::save(adapter, directory, &name)?;
            return remove_other_kind(directory, true);
        }
        let tensors: BTreeMap<String, Tensor> =
            self.vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
        save_tensors(&directory.join("model.safetensors"), &tensors)?;
        let config = read_json(&required(base, "config.json")?)?;
        write_json(&directory.join("config.json"), &self.config_file(config))?;
        remove_other_kind(directory, false)
    }

    fn config_file(&self, mut config: Value) -> Value {
        let architecture = format!("{:?}ForSequenceClassification", self.decoder.config().family);
        config["architectures"] = vec![architecture].into();
        config["id2label"] = self.labels.id_to_label();
        config["label2id"] = self.labels.label_to_id();
        config["problem_type"] = PROBLEM_TYPE.into();
        // transformers needs it to classify batches.
        config["pad_token_id"] = self.pad_id.map_or(Value::Null, Value::from);
        for key in ["dtype", "torch_dtype"] {
            config[key] = crate::dtype_name(DType::F32).into();
        }
        config
    }
}

const TOKENIZER: &str = "tokenizer.json";

/// Separates question and answer when a dialogue is one text.
const ANSWER: &str = "\n回答：";
/// Truncation leaves the question at least 1 / `QUESTION_SHARE` of the tokens.
const QUESTION_SHARE: usize = 4;

/// The tokenizer of a model folder, without chat template.
pub struct ClassifierTokenizer {
    inner: Tokenizer,
    pad_id: Option<u32>,
    max_length: usize,
}

/// Token ids of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids, at most `max_length`.
    pub ids: Vec<u32>,
    /// Number of tokens that were left out by truncation.
    pub n_left_out: usize,
}

impl ClassifierTokenizer {
    /// Loads `tokenizer.json`; `max_length`: maximum number of tokens of a text, at least 1.
    ///
    /// # Errors
    /// The file is missing or damaged.
    pub fn load(directory: &Path, max_length: usize) -> Result<Self, ModelError> {
        let path = required(directory, TOKENIZER)?;
        let mut inner = read_tokenizer(&path)?;
        // Ignore the padding and truncation in the file: they are settings of the program that saved it.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| ModelError::bad_file(&path, error))?;
        // Control tokens in a text are encoded as text, as with transformers' `split_special_tokens=True`.
        inner.set_encode_special_tokens(true);
        let settings = directory.join("tokenizer_config.json");
        let settings = if settings.is_file() { read_json(&settings)? } else { Default::default() };
        // Without a padding token, the end-of-sequence token is used for padding.
        let pad = token_text(&settings["pad_token"]).or_else(|| token_text(&settings["eos_token"]));
        let pad_id = pad.and_then(|token| inner.token_to_id(&token));
        Ok(Self { inner, pad_id, max_length: max_length.max(1) })
    }

    /// The padding token id for implementations that pad batches; querl does not pad.
    pub fn pad_id(&self) -> Option<u32> {
        self.pad_id
    }

    /// Token ids of a text, special tokens included; a control token in the text is encoded as text. A long text is truncated at the end,
    /// as in transformers; in a dialogue (`用户问题：...
    /// 回答：...`) question and answer are each truncated, so that both remain.
    ///
    /// # Errors
    /// The tokenizer fails, or finds no token in the text.
    pub fn encode(&self, text: &str) -> Result<Encoded, ModelError> {
        let mut ids = self.ids(text, true)?;
        if ids.is_empty() {
            return Err(ModelError::Tokenizer(format!(
                "no token in the text `{text}`; expected a question and an answer"
            )));
        }
        let n_left_out = ids.len().saturating_sub(self.max_length);
        if n_left_out > 0 {
            ids = self.shortened(text, ids)?;
        }
        Ok(Encoded { ids, n_left_out })
    }

    fn shortened(&self, text: &str, whole: Vec<u32>) -> Result<Vec<u32>, ModelError> {
        let limit = self.max_length;
        let Some(at) = text.find(ANSWER).filter(|_| limit >= 2 * QUESTION_SHARE) else {
            return Ok(whole.into_iter().take(limit).collect());
        };
        let (question, answer) = (self.ids(&text[..at], false)?, self.ids(&text[at..], false)?);
        let of_question = question.len().min((limit / QUESTION_SHARE).max(limit.saturating_sub(answer.len())));
        let of_answer = limit - of_question;
        Ok(question.into_iter().take(of_question).chain(answer.into_iter().take(of_answer)).collect())
    }

    fn ids(&self, text: &str, adds_special: bool) -> Result<Vec<u32>, ModelError> {
        let encoding =
            self.inner.encode_fast(text, adds_special).map_err(|error| ModelError::Tokenizer(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}
