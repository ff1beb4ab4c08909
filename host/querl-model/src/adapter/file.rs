//! Adapters to and from PEFT's files.

use super::LoraAdapter;
use super::config_file::ConfigFile;
use super::settings::{EMBEDDING, HEAD, LayerKind, LayerPlan, LoraSettings, SCORE, SavedCopies};
use crate::{DecoderConfig, ModelError, load_tensors, save_tensors};
use candle_core::{DType, Device, Tensor, Var};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(crate) const CONFIG_FILE: &str = "adapter_config.json";
const WEIGHTS_FILE: &str = "adapter_model.safetensors";
const KEY_PREFIX: &str = "base_model.model.";

/// PEFT's copy of the frozen weight under an adapted embedding or head: it adds nothing to the base's own.
const BASE_COPY: &str = ".base_layer.weight";

impl LayerPlan {
    pub(super) fn a_name(&self) -> String {
        match self.kind {
            LayerKind::Linear => format!("{}.lora_A.weight", self.path),
            LayerKind::Embedding => format!("{}.lora_embedding_A", self.path),
        }
    }

    pub(super) fn b_name(&self) -> String {
        match self.kind {
            LayerKind::Linear => format!("{}.lora_B.weight", self.path),
            LayerKind::Embedding => format!("{}.lora_embedding_B", self.path),
        }
    }

    pub(super) fn magnitude_name(&self) -> String {
        format!("{}.lora_magnitude_vector", self.path)
    }
}

impl LoraAdapter {
    /// Reads an adapter that PEFT or querl saved; it can be trained on. Tensors become f32; [`LoraAdapter::stored_dtype`] keeps
    /// what they were.
    ///
    /// # Errors
    /// A file is missing or damaged, the tensors are not those that the configuration makes on this decoder (another width or
    /// vocabulary), or the adapter uses what is not supported (biases, other kinds than LoRA).
    pub fn load(directory: &Path, config: &DecoderConfig) -> Result<Self, ModelError> {
        let Parts { file, settings, tensors, dtype } = Self::read(directory)?;
        let mut tensors = Tensors(tensors);
        let plan =
            settings.plan(config).map_err(|message| ModelError::bad_file(&directory.join(CONFIG_FILE), message))?;
        let bad = |message: String| ModelError::bad_file(&directory.join(WEIGHTS_FILE), message);
        let score = tensors.0.remove(&format!("{SCORE}.weight"));
        tensors.drop_base_copies(config).map_err(bad)?;
        tensors.check(&expected_shapes(&plan, &settings, config).map_err(bad)?, config).map_err(bad)?;
        if settings.saved_copies == SavedCopies::Tied && tensors.0.contains_key(&format!("{EMBEDDING}.weight")) {
            tensors.0.remove(&format!("{HEAD}.weight"));
        }
        let mut vars = BTreeMap::new();
        for (name, tensor) in tensors.0 {
            vars.insert(name, Var::from_tensor(&tensor.to_dtype(DType::F32)?)?);
        }
        Self::assemble(settings, plan, vars, score, file, dtype)
    }

    /// Reads both files, whatever model they are for.
    pub(crate) fn read(directory: &Path) -> Result<Parts, ModelError> {
        let (config_path, weights_path) = (required(directory, CONFIG_FILE)?, required(directory, WEIGHTS_FILE)?);
        let text = std::fs::read_to_string(&config_path).map_err(ModelError::io(&config_path))?;
        let file: ConfigFile =
            serde_json::from_str(&text).map_err(|error| ModelError::bad_file(&config_path, error))?;
        let settings = file.settings().map_err(|message| ModelError::bad_file(&config_path, message))?;
        let tensors = Tensors::of(load_tensors(&weights_path)?)
            .map_err(|message| ModelError::bad_file(&weights_path, message))?
            .0;
        let dtype = tensors.values().next().map_or(DType::F32, Tensor::dtype);
        Ok(Parts { file, settings, tensors, dtype })
    }

    /// Writes `adapter_config.json` and `adapter_model.safetensors` as PEFT reads them, in f32.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save(&self, directory: &Path, base_model: &str) -> Result<(), ModelError> {
        self.save_as(directory, base_model, DType::F32)
    }

    /// As [`LoraAdapter::save`], in another type.
    ///
    /// # Errors
    /// As [`LoraAdapter::save`], or a type that cannot be converted to; a part of an adapter: see [`LoraAdapter::whole`].
    pub fn save_as(&self, directory: &Path, base_model: &str, dtype: DType) -> Result<(), ModelError> {
        self.parallel.only_whole("the file of an adapter")?;
        let mut tensors = BTreeMap::new();
        for (path, var) in &self.vars {
            tensors.insert(format!("{KEY_PREFIX}{path}"), stored(var.as_tensor(), dtype)?);
        }
        for (path, weight) in &self.saved {
            tensors.insert(format!("{KEY_PREFIX}{path}.weight"), stored(weight, dtype)?);
        }
        if let Some(score) = &self.score {
            tensors.insert(format!("{KEY_PREFIX}{SCORE}.weight"), stored(score, dtype)?);
        }
        save_tensors(&directory.join(WEIGHTS_FILE), &tensors)?;
        let config_path = directory.join(CONFIG_FILE);
        let text = serde_json::to_string_pretty(&self.file.on_base(base_model))
            .map_err(|error| ModelError::bad_file(&config_path, error))?;
        querl_core::fsx::write_atomic(&config_path, text.as_bytes()).map_err(ModelError::io(&config_path))
    }
}

/// An adapter's files as they were read.
pub(crate) struct Parts {
    pub(crate) file: ConfigFile,
    pub(crate) settings: LoraSettings,
    /// By their names without PEFT's prefix, in their stored types.
    pub(crate) tensors: BTreeMap<String, Tensor>,
    pub(crate) dtype: DType,
}

/// A tensor as it is written.
fn stored(tensor: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
    tensor.to_device(&Device::Cpu)?.to_dtype(dtype)
}

/// A file of an adapter's folder that must be there.
fn required(directory: &Path, file: &str) -> Result<PathBuf, ModelError> {
    let path = directory.join(file);
    if path.is_file() {
        return Ok(path);
    }
    let remedy = match directory.join("adapter_model.bin").is_file() {
        true => "; pickled tensors are not read: save the adapter with PEFT as safetensors",
        false => "; an adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`",
    };
    Err(ModelError::bad_file(directory, format!("no `{file}` there{remedy}")))
}

/// Tensors of a file by their names without PEFT's prefix.
struct Tensors(BTreeMap<String, Tensor>);

impl Tensors {
    fn of(stored: impl IntoIterator<Item = (String, Tensor)>) -> Result<Self, String> {
        let mut tensors = BTreeMap::new();
        for (name, tensor) in stored {
            let Some(path) = name.strip_prefix(KEY_PREFIX) else {
                return Err(format!("tensor `{name}` is not PEFT's; expected the prefix `{KEY_PREFIX}`"));
            };
            // The module that holds the vector has a name of its own in memory, which some programs write.
            let path = path
                .strip_suffix(".lora_magnitude_vector.weight")
                .map_or(path.to_owned(), |layer| format!("{layer}.lora_magnitude_vector"));
            tensors.insert(path, tensor);
        }
        if tensors.is_empty() {
            return Err("holds no tensors".into());
        }
        Ok(Self(tensors))
    }

    /// Leaves out copies of the base's embedding and head, which must be as large as the base's.
    fn drop_base_copies(&mut self, config: &DecoderConfig) -> Result<(), String> {
        for path in [EMBEDDING, HEAD] {
            if let Some(copy) = self.0.remove(&format!("{path}{BASE_COPY}")) {
                fits(&format!("{path}{BASE_COPY}"), &copy, &[config.vocab_size, config.hidden_size], config)?;
            }
        }
        Ok(())
    }

    fn check(&self, shapes: &BTreeMap<String, Vec<usize>>, config: &DecoderConfig) -> Result<(), String> {
        for (name, tensor) in &self.0 {
            let Some(shape) = shapes.get(name) else {
                return Err(format!("tensor `{name}` belongs to no layer that `{CONFIG_FILE}` adapts on this model"));
            };
            fits(name, tensor, shape, config)?;
        }
        match shapes.keys().find(|name| !self.0.contains_key(*name)) {
            Some(name) => Err(format!("no tensor `{name}` there, which `{CONFIG_FILE}` requires on this model")),
            None => Ok(()),
        }
    }
}

/// Every tensor that the settings make on a decoder, with its shape.
fn expected_shapes(
    plan: &[LayerPlan],
    settings: &LoraSettings,
    config: &DecoderConfig,
) -> Result<BTreeMap<String, Vec<usize>>, String> {
    let mut shapes = BTreeMap::new();
    for layer in plan {
        shapes.insert(layer.a_name(), vec![layer.rank, layer.n_in]);
        shapes.insert(layer.b_name(), vec![layer.n_out, layer.rank]);
        if settings.use_dora {
            shapes.insert(layer.magnitude_name(), vec![layer.n_out]);
        }
    }
    for path in settings.saved_modules()?.into_iter().filter(|path| *path != SCORE) {
        shapes.insert(format!("{path}.weight"), vec![config.vocab_size, config.hidden_size]);
    }
    Ok(shapes)
}

/// Compares shapes and says what kind of model the tensor is for where they differ.
fn fits(name: &str, tensor: &Tensor, expected: &[usize], config: &DecoderConfig) -> Result<(), String> {
    let found = tensor.dims();
    if found == expected {
        return Ok(());
    }
    let differs =
        |size: usize| expected.iter().zip(found).any(|(expected, found)| *expected == size && found != expected);
    let reason = if found.len() == expected.len()
        && differs(config.vocab_size)
        && config.vocab_size != config.hidden_size
    {
        ": the adapter was trained with another vocabulary; take the base that it was trained on, with its embeddings resized"
    } else if name.ends_with("lora_A.weight") && found.len() == 2 && found[1] == expected[1] {
        ": the rank is not the configuration's"
    } else {
        ": the adapter belongs to a model of another width"
    };
    Err(format!("tensor `{name}` has shape {found:?}; this model expects {expected:?}{reason}"))
}
