//! Safetensors files, read and written.

use crate::ModelError;
use candle_core::{Device, Tensor};
use std::collections::{BTreeMap, HashMap};
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
    let shards: std::collections::BTreeSet<String> = map.weight_map.into_values().collect();
    shards.iter().map(|shard| required(directory, shard)).collect()
}

/// What is wrong with a model directory, found without reading its weights.
///
/// # Errors
/// A file is missing, config.json is damaged or the architecture is not supported.
pub fn check_directory(directory: &Path) -> Result<(), ModelError> {
    crate::DecoderConfig::load(&required(directory, "config.json")?)?;
    weight_files(directory).map(drop)
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
