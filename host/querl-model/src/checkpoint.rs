//! Safetensors files, read and written.

use crate::sharding::Part;
use crate::{DecoderConfig, ModelError};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

const NEEDS: &str =
    "config.json, tokenizer.json and model.safetensors (or its shards with model.safetensors.index.json)";

/// A file of `directory` that must be there.
pub(crate) fn required(directory: &Path, file: &str) -> Result<PathBuf, ModelError> {
    let path = directory.join(file);
    if path.is_file() {
        return Ok(path);
    }
    Err(ModelError::MissingFile { directory: directory.to_owned(), file: file.to_owned(), needs: NEEDS })
}

/// The weight files of a model: one, or the shards that the index names.
pub(crate) fn weight_files(directory: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let index = directory.join("model.safetensors.index.json");
    if !index.is_file() {
        return Ok(vec![required(directory, "model.safetensors")?]);
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = std::fs::read_to_string(&index).map_err(ModelError::io(&index))?;
    let map: Index = serde_json::from_str(&text).map_err(|error| ModelError::bad_file(&index, error))?;
    let shards: BTreeSet<String> = map.weight_map.into_values().collect();
    shards.iter().map(|shard| required(directory, shard)).collect()
}

/// What is wrong with a model directory, found without reading its weights.
///
/// # Errors
/// A file is missing, config.json is damaged or the architecture is not supported.
pub fn check_directory(directory: &Path) -> Result<(), ModelError> {
    DecoderConfig::load(&required(directory, "config.json")?)?;
    weight_files(directory).map(drop)
}

/// Type, shape and bytes of a tensor or a part of one.
pub(crate) type Bytes<'a> = (DType, Vec<usize>, Cow<'a, [u8]>);

/// A model's tensors, mapped into memory and checked by name and shape: each is read when it is asked for.
pub(crate) struct StoredModel {
    config: DecoderConfig,
    tensors: MmapedSafetensors,
    directory: PathBuf,
}

impl StoredModel {
    /// Opens a Hugging Face directory.
    pub(crate) fn open(directory: &Path) -> Result<Self, ModelError> {
        let config = DecoderConfig::load(&required(directory, "config.json")?)?;
        Self::open_with(directory, config, &[])
    }

    /// The same for a configuration that was read already. `beside`: tensors that may stand there besides the decoder's.
    pub(crate) fn open_with(directory: &Path, config: DecoderConfig, beside: &[&str]) -> Result<Self, ModelError> {
        let files = weight_files(directory)?;
        // SAFETY: a program that rewrites a checkpoint in place while it is mapped breaks the mapping, as it would for every
        // reader of safetensors. querl never does: it writes beside and renames, which leaves what is mapped as it is.
        let tensors = unsafe { MmapedSafetensors::multi(&files) }.map_err(|error| {
            ModelError::bad_file(directory, format!("damaged safetensors file: {}", first_line(&error)))
        })?;
        let stored = Self { config, tensors, directory: directory.to_owned() };
        stored.check(beside).map_err(|message| ModelError::bad_file(directory, message))?;
        Ok(stored)
    }

    fn check(&self, beside: &[&str]) -> Result<(), String> {
        let shapes = self.config.tensor_shapes();
        let known: BTreeSet<&str> =
            shapes.iter().map(|(name, _)| name.as_str()).chain(beside.iter().copied()).collect();
        let is_surplus = |name: &String| !known.contains(name.as_str()) && !is_redundant(name, &self.config);
        if let Some((name, _)) = self.tensors.tensors().into_iter().find(|(name, _)| is_surplus(name)) {
            return Err(format!("tensor `{name}` has no place in the model that config.json describes"));
        }
        for (name, shape) in &shapes {
            let found = self.tensors.get(name).map_err(|_| format!("no tensor `{name}` there"))?;
            if found.shape() != shape.as_slice() {
                let found = found.shape();
                return Err(format!("tensor `{name}` has shape {found:?}; config.json makes it {shape:?}"));
            }
        }
        Ok(())
    }

    pub(crate) fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The type in which a tensor is stored.
    pub(crate) fn dtype(&self, name: &str) -> Result<DType, ModelError> {
        Ok(DType::try_from(self.view(name)?.dtype())?)
    }

    /// A tensor in its stored type.
    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor, ModelError> {
        self.view(name)?;
        Ok(self.tensors.load(name, &Device::Cpu)?)
    }

    /// Whether there is such a tensor.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.get(name).is_ok()
    }

    pub(crate) fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError> {
        Ok(self.view(name)?.shape().to_vec())
    }

    /// A tensor or a part of it as it is stored. Rows are those of the mapped file; columns are copied, they alone are read.
    pub(crate) fn bytes(&self, name: &str, part: Option<&Part>) -> Result<Bytes<'_>, ModelError> {
        let view = self.view(name)?;
        let (dtype, mut shape) = (DType::try_from(view.dtype())?, view.shape().to_vec());
        let Some(Part { axis, range }) = part else { return Ok((dtype, shape, Cow::Borrowed(view.data()))) };
        let bytes: &[u8] = self.tensors.get(name)?.data();
        let line = bytes.len() / shape.first().copied().unwrap_or_default().max(1);
        let bytes = match (axis, shape.as_slice()) {
            (0, [..]) => Cow::Borrowed(&bytes[range.start * line..range.end * line]),
            (1, [_, width]) => {
                let size = line / width;
                let columns = range.start * size..range.end * size;
                Cow::Owned(bytes.chunks_exact(line).flat_map(|row| &row[columns.clone()]).copied().collect())
            }
            _ => return Err(ModelError::bad_file(&self.directory, format!("`{name}` is no matrix: {shape:?}"))),
        };
        shape[*axis] = range.len();
        Ok((dtype, shape, bytes))
    }

    fn view(&self, name: &str) -> Result<safetensors::tensor::TensorView<'_>, ModelError> {
        self.tensors.get(name).map_err(|_| ModelError::bad_file(&self.directory, format!("no tensor `{name}` there")))
    }
}

/// Tensors that some checkpoints hold beside what is needed: a tied head written out, constants of the rotary embedding.
fn is_redundant(name: &str, config: &DecoderConfig) -> bool {
    (config.tie_word_embeddings && name == "lm_head.weight") || name.ends_with("rotary_emb.inv_freq")
}

/// The first line of an error: candle appends backtraces.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Reads all tensors of one safetensors file, in their stored types.
///
/// # Errors
/// The file is missing, cut short or no safetensors file.
pub fn load_tensors(path: &Path) -> Result<HashMap<String, Tensor>, ModelError> {
    let bytes = std::fs::read(path).map_err(ModelError::io(path))?;
    candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).map_err(|error| ModelError::bad_file(path, error))
}

/// Writes tensors to one safetensors file, in the order of their names; the file appears whole or not at all.
///
/// # Errors
/// The file cannot be written.
pub fn save_tensors(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<(), ModelError> {
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes =
        safetensors::serialize(tensors.iter(), Some(metadata)).map_err(|error| ModelError::bad_file(path, error))?;
    querl_core::fsx::write_atomic(path, &bytes).map_err(ModelError::io(path))
}
