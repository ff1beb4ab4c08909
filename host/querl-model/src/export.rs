//! Complete Hugging Face directories: a model as it is, or with an adapter merged into it, as transformers and vLLM load them.
//!
//! Tensors are read, changed and written one by one: memory holds one of them at a time.

use crate::adapter::{EMBEDDING, HEAD, LoraAdapter};
use crate::checkpoint::{StoredModel, required};
use crate::{ModelError, TextTokenizer};
use candle_core::{DType, Tensor};
use querl_core::model_config;
use safetensors::{Dtype, View};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Settings of exporting a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExportSettings {
    /// Type of all written tensors; `None` keeps the stored type of each.
    pub dtype: Option<DType>,
    /// Maximum bytes of tensors in one file; a larger tensor gets a file of its own.
    pub max_shard_bytes: u64,
}

impl ExportSettings {
    /// Usual maximum size in bytes of one weight file of published models.
    pub const SHARD_BYTES: u64 = 5_000_000_000;
}

/// Summary of an exported model.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Exported {
    /// Number of parameters.
    pub n_parameters: u64,
    /// Total bytes of all tensors.
    pub n_bytes: u64,
    /// Type of the written tensors, as `config.json` names it.
    pub dtype: String,
    /// Names of the written files, sorted.
    pub files: Vec<String>,
}

const COMPANIONS: [&str; 8] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
];

/// Writes a model to a folder that is new or empty: `config.json` with the type, safetensors in shards with their index,
/// generation settings, tokenizer and chat template. With an adapter its changes are in the weights, computed in f64 and rounded once; where
/// it unties embedding and head, both are written and `config.json` says so.
///
/// # Errors
/// The model or its tokenizer cannot be read, the adapter is for another one, the folder is not empty, or a file cannot be written.
pub fn export_model(
    model: &Path,
    adapter: Option<&LoraAdapter>,
    out: &Path,
    settings: &ExportSettings,
) -> Result<Exported, ModelError> {
    let stored = StoredModel::open(model)?;
    let tokenizer = TextTokenizer::load(model)?;
    let merge = Merge { stored: &stored, adapter };
    let tensors = merge.tensors(settings.dtype)?;
    let dtype = main_dtype(&tensors);
    let staging = new_folder(out)?;
    write_weights(staging.path(), &|tensor| merge.value(tensor), &tensors, settings.max_shard_bytes)?;
    write_config(model, staging.path(), dtype, merge.is_tied())?;
    write_generation_config(model, staging.path(), &tokenizer)?;
    copy_companions(model, staging.path())?;
    let files = move_files(staging.path(), out)?;
    let n_parameters = tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>() as u64).sum();
    let n_bytes = tensors.iter().map(OutTensor::n_bytes).sum();
    Ok(Exported { n_parameters, n_bytes, dtype: dtype_name(dtype).into(), files })
}

/// Copies all files of a model directory except the weights; `config.json` gets `dtype`, the type in which weights are written.
///
/// # Errors
/// A file cannot be read or written.
pub fn copy_model_files(from: &Path, to: &Path, dtype: DType) -> Result<(), ModelError> {
    let config = read_json(&required(from, "config.json")?)?;
    let is_tied = config["tie_word_embeddings"] == true;
    write_config(from, to, dtype, is_tied)?;
    let generation = from.join("generation_config.json");
    if generation.is_file() {
        copy(&generation, &to.join("generation_config.json"))?;
    }
    copy_companions(from, to)
}

/// Name of a type in `config.json`, such as `bfloat16`.
pub fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        DType::F64 => "float64",
        _ => "float32",
    }
}

pub(crate) struct OutTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
}

impl OutTensor {
    pub(crate) fn n_bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.size_in_bytes()) as u64
    }
}

/// The tensors of a model with an adapter merged into them.
pub(crate) struct Merge<'a> {
    pub(crate) stored: &'a StoredModel,
    pub(crate) adapter: Option<&'a LoraAdapter>,
}

impl Merge<'_> {
    fn is_tied(&self) -> bool {
        let is_changed =
            |adapter: &LoraAdapter, path| adapter.saved_module(path).is_some() || adapter.pair(path).is_some();
        let parts = |adapter: &LoraAdapter| {
            !adapter.has_one_copy() && (is_changed(adapter, EMBEDDING) || is_changed(adapter, HEAD))
        };
        self.stored.config.tie_word_embeddings && !self.adapter.is_some_and(parts)
    }

    pub(crate) fn tensors(&self, dtype: Option<DType>) -> Result<Vec<OutTensor>, ModelError> {
        let mut shapes = self.stored.config.tensor_shapes();
        let has_new_head = self.stored.config.tie_word_embeddings && !self.is_tied();
        if has_new_head {
            let config = &self.stored.config;
            shapes.push((format!("{HEAD}.weight"), vec![config.vocab_size, config.hidden_size]));
        }
        let tensor = |(name, shape): (String, Vec<usize>)| {
            let source = if has_new_head && name == format!("{HEAD}.weight") {
                format!("{EMBEDDING}.weight")
            } else {
                name.clone()
            };
            Ok(OutTensor { dtype: dtype.map_or_else(|| self.stored.dtype(&source), Ok)?, name, shape })
        };
        shapes.into_iter().map(tensor).collect()
    }

    pub(crate) fn value(&self, tensor: &OutTensor) -> Result<Tensor, ModelError> {
        let path = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
        let stored = || -> Result<Tensor, ModelError> {
            let is_tied_head = path == HEAD && self.stored.config.tie_word_embeddings;
            self.stored.tensor(&if is_tied_head { format!("{EMBEDDING}.weight") } else { tensor.name.clone() })
        };
        let value = match self.adapter {
            Some(adapter) => match (adapter.saved_module(path), adapter.pair(path)) {
                (Some(saved), _) => saved.detach(),
                (None, Some(pair)) => {
                    let weight = stored()?.to_dtype(DType::F64)?; // f64, so that only the written sum is rounded
                    if path == EMBEDDING { (weight + pair.product(DType::F64)?.t()?)? } else { pair.changed(&weight)? }
                }
                (None, None) => stored()?,
            },
            None => stored()?,
        };
        Ok(value.to_dtype(tensor.dtype)?.contiguous()?)
    }
}

/// Computes the values of an output tensor, in its output type.
pub(crate) type ValueOf<'a> = &'a dyn Fn(&OutTensor) -> Result<Tensor, ModelError>;

/// A tensor that is computed when safetensors writes it.
struct Lazy<'a> {
    tensor: &'a OutTensor,
    value_of: ValueOf<'a>,
    error: &'a RefCell<Option<ModelError>>,
}

impl View for Lazy<'_> {
    fn dtype(&self) -> Dtype {
        self.tensor.dtype.into()
    }

    fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    /// The trait cannot return an error: it is stored, and the file is discarded after writing.
    fn data(&self) -> Cow<'_, [u8]> {
        match (self.value_of)(self.tensor) {
            Ok(value) => Cow::Owned(value.data().into_owned()),
            Err(error) => {
                self.error.borrow_mut().get_or_insert(error);
                Cow::Owned(vec![0; self.data_len()])
            }
        }
    }

    fn data_len(&self) -> usize {
        self.tensor.n_bytes() as usize
    }
}

/// Divides the tensors, in order, into files of at most `max_bytes`.
fn shards(tensors: &[OutTensor], max_bytes: u64) -> Vec<Vec<&OutTensor>> {
    let (mut shards, mut n_bytes) = (vec![Vec::new()], 0);
    for tensor in tensors {
        let is_full = n_bytes > 0 && n_bytes + tensor.n_bytes() > max_bytes;
        if is_full {
            shards.push(Vec::new());
            n_bytes = 0;
        }
        n_bytes += tensor.n_bytes();
        if let Some(shard) = shards.last_mut() {
            shard.push(tensor);
        }
    }
    shards
}

/// Writes `model.safetensors`, or `model-00001-of-0000N.safetensors` and so on with their index.
pub(crate) fn write_weights(
    folder: &Path,
    value_of: ValueOf<'_>,
    tensors: &[OutTensor],
    max_bytes: u64,
) -> Result<(), ModelError> {
    let shards = shards(tensors, max_bytes);
    let mut weight_map = BTreeMap::new();
    for (index, shard) in shards.iter().enumerate() {
        let file = match shards.len() {
            1 => "model.safetensors".to_owned(),
            n_shards => format!("model-{:05}-of-{n_shards:05}.safetensors", index + 1),
        };
        write_shard(&folder.join(&file), value_of, shard)?;
        weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), file.clone())));
    }
    if shards.len() == 1 {
        return Ok(());
    }
    let total: u64 = tensors.iter().map(OutTensor::n_bytes).sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    write_json(&folder.join("model.safetensors.index.json"), &index)
}

fn write_shard(path: &Path, value_of: ValueOf<'_>, shard: &[&OutTensor]) -> Result<(), ModelError> {
    let error = RefCell::new(None);
    let views = shard.iter().map(|tensor| (tensor.name.as_str(), Lazy { tensor, value_of, error: &error }));
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let written = safetensors::serialize_to_file(views, Some(metadata), path);
    if let Some(error) = error.into_inner() {
        return Err(error);
    }
    written.map_err(|error| match error {
        safetensors::SafeTensorError::IoError(source) => ModelError::io(path)(source),
        error => ModelError::bad_file(path, error),
    })?;
    // The file was created as a temporary file: set the usual permissions and sync it to disk.
    let file = std::fs::File::open(path).map_err(ModelError::io(path))?;
    make_readable(&file).and_then(|()| file.sync_all()).map_err(ModelError::io(path))
}

fn make_readable(file: &std::fs::File) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// The type with the most bytes, for `config.json`.
pub(crate) fn main_dtype(tensors: &[OutTensor]) -> DType {
    let mut n_bytes: BTreeMap<&'static str, (u64, DType)> = BTreeMap::new();
    for tensor in tensors {
        n_bytes.entry(dtype_name(tensor.dtype)).or_insert((0, tensor.dtype)).0 += tensor.n_bytes();
    }
    n_bytes.into_values().max_by_key(|(n_bytes, _)| *n_bytes).map_or(DType::F32, |(_, dtype)| dtype)
}

fn write_config(model: &Path, folder: &Path, dtype: DType, is_tied: bool) -> Result<(), ModelError> {
    let mut config = read_json(&required(model, "config.json")?)?;
    // Some readers know only one of the two keys.
    for key in ["dtype", "torch_dtype"] {
        config[key] = dtype_name(dtype).into();
    }
    config["tie_word_embeddings"] = is_tied.into();
    write_json(&folder.join("config.json"), &config)
}

/// The model's generation settings, or stop tokens from its tokenizer and configuration.
fn write_generation_config(model: &Path, folder: &Path, tokenizer: &TextTokenizer) -> Result<(), ModelError> {
    let own = model.join("generation_config.json");
    if own.is_file() {
        return copy(&own, &folder.join("generation_config.json"));
    }
    let config = read_json(&required(model, "config.json")?)?;
    let mut generation = json!({ "eos_token_id": tokenizer.stop_ids() });
    for key in ["bos_token_id", "pad_token_id"] {
        if config[key].is_u64() {
            generation[key] = config[key].clone();
        }
    }
    write_json(&folder.join("generation_config.json"), &generation)
}

pub(crate) fn copy_companions(from: &Path, to: &Path) -> Result<(), ModelError> {
    for file in COMPANIONS {
        if from.join(file).is_file() && from != to {
            copy(&from.join(file), &to.join(file))?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<(), ModelError> {
    let bytes = std::fs::read(from).map_err(ModelError::io(from))?;
    querl_core::fsx::write_atomic(to, &bytes).map_err(ModelError::io(to))
}

pub(crate) fn read_json(path: &Path) -> Result<Value, ModelError> {
    let bytes = model_config::read_bytes(path).map_err(|error| ModelError::unread(path, error))?;
    serde_json::from_slice(&bytes).map_err(|error| ModelError::unparsed(path, "JSON", error))
}

pub(crate) fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    querl_core::fsx::write_json(path, value).map_err(ModelError::io(path))
}

/// Creates a staging folder within `out`, which must be new or empty.
pub(crate) fn new_folder(out: &Path) -> Result<tempfile::TempDir, ModelError> {
    std::fs::create_dir_all(out).map_err(ModelError::io(out))?;
    let mut entries = std::fs::read_dir(out).map_err(ModelError::io(out))?;
    if entries.next().is_some() {
        return Err(ModelError::bad_file(out, "is not empty; name a new folder"));
    }
    tempfile::Builder::new().prefix(".new-").tempdir_in(out).map_err(ModelError::io(out))
}

/// Moves the written files to a folder, weights first: a folder with a `config.json` is complete.
pub(crate) fn move_files(from: &Path, to: &Path) -> Result<Vec<String>, ModelError> {
    let entries = std::fs::read_dir(from).map_err(ModelError::io(from))?;
    let names: Result<Vec<_>, _> = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect();
    let mut names = names.map_err(ModelError::io(from))?;
    names.sort_by_key(|name| (name == "config.json", name.clone()));
    for name in &names {
        std::fs::rename(from.join(name), to.join(name)).map_err(ModelError::io(&to.join(name)))?;
    }
    names.sort();
    Ok(names)
}
