//! Adapters to and from PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.

use super::LoraAdapter;
use super::settings::{EMBEDDING, HEAD, LayerKind, LayerPlan, LoraSettings, Modules, Patterns, SCORE, SavedCopies};
use crate::{DecoderConfig, ModelError, load_tensors, save_tensors};
use candle_core::{DType, Device, Tensor, Var};
use querl_core::fsx::{json_problem, write_json};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Content of `adapter_config.json`: the keys that are used here, and all others in `rest`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ConfigFile {
    peft_type: String,
    task_type: Option<String>,
    base_model_name_or_path: Option<String>,
    r: usize,
    #[serde(serialize_with = "as_integer")]
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    target_modules: Option<Modules>,
    exclude_modules: Option<Modules>,
    #[serde(default = "no_bias")]
    bias: String,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    inference_mode: bool,
    #[serde(default)]
    rank_pattern: Patterns<usize>,
    #[serde(default)]
    alpha_pattern: Patterns<f64>,
    modules_to_save: Option<Vec<String>>,
    #[serde(default)]
    ensure_weight_tying: bool,
    layers_to_transform: Option<Layers>,
    /// Other keys: without effect here, or refused.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// `layers_to_transform`: one number or several.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum Layers {
    One(usize),
    Several(Vec<usize>),
}

fn no_bias() -> String {
    "none".into()
}

/// Writes alpha as an integer, PEFT's type for it: some readers refuse `8.0`.
fn as_integer<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if value.fract() == 0.0 && value.abs() < 1e15 {
        serializer.serialize_i64(*value as i64)
    } else {
        serializer.serialize_f64(*value)
    }
}

/// Keys that are not implemented: refused if set.
const UNSUPPORTED: [&str; 10] = [
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
];

/// Initialisations that also change the base's weights: the adapter alone is not usable.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

impl ConfigFile {
    pub(super) fn new(settings: &LoraSettings) -> Self {
        Self {
            peft_type: "LORA".into(),
            task_type: Some("CAUSAL_LM".into()),
            base_model_name_or_path: None,
            r: settings.rank,
            lora_alpha: settings.alpha,
            lora_dropout: settings.dropout,
            target_modules: Some(settings.target_modules.clone()),
            exclude_modules: settings.exclude_modules.clone(),
            bias: no_bias(),
            use_rslora: settings.use_rslora,
            use_dora: settings.use_dora,
            fan_in_fan_out: false,
            inference_mode: true,
            rank_pattern: settings.rank_pattern.clone(),
            alpha_pattern: settings.alpha_pattern.clone(),
            modules_to_save: (!settings.modules_to_save.is_empty()).then(|| settings.modules_to_save.clone()),
            ensure_weight_tying: settings.saved_copies == SavedCopies::Tied,
            layers_to_transform: (!settings.layers_to_transform.is_empty())
                .then(|| Layers::Several(settings.layers_to_transform.clone())),
            rest: Map::new(),
        }
    }

    pub(super) fn of_classifier(&self, modules_to_save: &[String]) -> Self {
        let modules_to_save = Some(modules_to_save.to_vec());
        Self { task_type: Some("SEQ_CLS".into()), modules_to_save, ..self.clone() }
    }

    pub(super) fn on_base(&self, base_model: &str) -> Self {
        Self { base_model_name_or_path: Some(base_model.to_owned()), inference_mode: true, ..self.clone() }
    }

    pub(crate) fn base(&self) -> Option<&str> {
        self.base_model_name_or_path.as_deref()
    }

    /// Converts the keys to LoRA settings. The error names the first unsupported key.
    pub(super) fn settings(&self) -> Result<LoraSettings, String> {
        self.check_supported()?;
        let target_modules = self
            .target_modules
            .clone()
            .ok_or("target_modules is null; expected a list, a regular expression or `all-linear`")?;
        let layers_to_transform = match self.layers_to_transform.clone() {
            None => Vec::new(),
            Some(Layers::One(number)) => vec![number],
            Some(Layers::Several(numbers)) => numbers,
        };
        if self.r == 0 {
            return Err("r is 0; expected at least 1".into());
        }
        Ok(LoraSettings {
            rank: self.r,
            alpha: self.lora_alpha,
            use_rslora: self.use_rslora,
            use_dora: self.use_dora,
            dropout: self.lora_dropout,
            target_modules,
            exclude_modules: self.exclude_modules.clone(),
            layers_to_transform,
            rank_pattern: self.rank_pattern.clone(),
            alpha_pattern: self.alpha_pattern.clone(),
            modules_to_save: self.modules_to_save.clone().unwrap_or_default(),
            saved_copies: if self.ensure_weight_tying { SavedCopies::Tied } else { SavedCopies::Apart },
        })
    }

    fn check_supported(&self) -> Result<(), String> {
        if self.peft_type != "LORA" {
            return Err(format!("peft_type is `{}`; expected `LORA`", self.peft_type));
        }
        if self.fan_in_fan_out {
            return Err("fan_in_fan_out is true; expected false".into());
        }
        if self.bias != "none" {
            return Err(format!("bias is `{}`; expected `none`", self.bias));
        }
        if let Some(key) = UNSUPPORTED.into_iter().find(|key| self.rest.get(*key).is_some_and(is_set)) {
            return Err(format!("{key} is set and not supported; merge the adapter with PEFT and train on the result"));
        }
        let init = self.rest.get("init_lora_weights").and_then(Value::as_str).unwrap_or_default();
        if CHANGES_BASE.into_iter().any(|prefix| init.to_lowercase().starts_with(prefix)) {
            return Err(format!(
                "init_lora_weights is `{init}`, which changes the base too; save it with PEFT's \
                 `path_initial_model_for_weight_conversion`"
            ));
        }
        match self.rest.get("layers_pattern").filter(|value| is_set(value)) {
            None => Ok(()),
            Some(pattern) if *pattern == "layers" || *pattern == serde_json::json!(["layers"]) => Ok(()),
            Some(pattern) => Err(format!("layers_pattern is {pattern}; expected `layers`")),
        }
    }
}

fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(values) => !values.is_empty(),
        Value::Object(values) => !values.is_empty(),
        Value::String(text) => !text.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    }
}

pub(crate) const CONFIG_FILE: &str = "adapter_config.json";
const WEIGHTS_FILE: &str = "adapter_model.safetensors";
const KEY_PREFIX: &str = "base_model.model.";

/// PEFT's copy of the base weight of an adapted embedding or head, which is redundant.
const BASE_COPY: &str = ".base_layer.weight";

impl LayerPlan {
    pub(super) fn a_name(&self) -> String {
        match self.kind {
            LayerKind::Linear | LayerKind::TiedHead => format!("{}.lora_A.weight", self.path),
            LayerKind::Embedding => format!("{}.lora_embedding_A", self.path),
        }
    }

    pub(super) fn b_name(&self) -> String {
        match self.kind {
            LayerKind::Linear | LayerKind::TiedHead => format!("{}.lora_B.weight", self.path),
            LayerKind::Embedding => format!("{}.lora_embedding_B", self.path),
        }
    }

    pub(super) fn magnitude_name(&self) -> String {
        format!("{}.lora_magnitude_vector", self.path)
    }
}

impl LoraAdapter {
    /// Reads an adapter that PEFT or querl saved; it can be trained further. Tensors are converted to f32; [`LoraAdapter::stored_dtype`] is
    /// their type in the file.
    ///
    /// # Errors
    /// A file is missing or damaged, names or shapes of tensors differ from what the configuration makes on this decoder (another width or
    /// vocabulary), or the adapter uses something that is not supported (biases, other kinds than LoRA).
    pub fn load(directory: &Path, config: &DecoderConfig) -> Result<Self, ModelError> {
        let Parts { file, settings, tensors, dtype } = Self::read(directory)?;
        let settings = settings.on_model(config);
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
        if !tensors.drop_tied_head(&plan)? {
            return Err(bad(format!(
                "the LoRA matrices of `{HEAD}` are not those of `{EMBEDDING}`, although ensure_weight_tying is true in `{CONFIG_FILE}`; \
                 set it to false there and add `{HEAD}` to target_modules, to have both as saved"
            )));
        }
        let mut vars = BTreeMap::new();
        for (name, tensor) in tensors.0 {
            vars.insert(name, Var::from_tensor(&tensor.to_dtype(DType::F32)?)?);
        }
        Self::assemble(settings, plan, vars, score, file, dtype)
    }

    /// Reads both files of an adapter, without checking them against a model.
    pub(crate) fn read(directory: &Path) -> Result<Parts, ModelError> {
        let (config_path, weights_path) = (required(directory, CONFIG_FILE)?, required(directory, WEIGHTS_FILE)?);
        let text = std::fs::read_to_string(&config_path).map_err(ModelError::io(&config_path))?;
        let file: ConfigFile = serde_json::from_str(&text).map_err(|error| match not_finite(&text, &error) {
            Some(problem) => ModelError::bad_file(&config_path, problem),
            None => ModelError::unparsed(&config_path, "an adapter's settings", json_problem(&error)),
        })?;
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

    /// Like [`LoraAdapter::save`], with the tensors in `dtype`.
    ///
    /// # Errors
    /// As [`LoraAdapter::save`]; f32 cannot be converted to `dtype`; or the adapter is a shard (see [`LoraAdapter::whole`]).
    pub fn save_as(&self, directory: &Path, base_model: &str, dtype: DType) -> Result<(), ModelError> {
        self.parallel.require_unsharded("the file of an adapter")?;
        let mut tensors = BTreeMap::new();
        for (path, var) in &self.vars {
            tensors.insert(format!("{KEY_PREFIX}{path}"), stored(var.as_tensor(), dtype)?);
        }
        if let Some(pair) = self.tied_pair() {
            tensors.insert(format!("{KEY_PREFIX}{HEAD}.lora_A.weight"), stored(&pair.a, dtype)?.contiguous()?);
            tensors.insert(format!("{KEY_PREFIX}{HEAD}.lora_B.weight"), stored(&pair.b, dtype)?.contiguous()?);
        }
        for (path, weight) in &self.saved {
            tensors.insert(format!("{KEY_PREFIX}{path}.weight"), stored(weight, dtype)?);
        }
        if let Some(score) = &self.score {
            tensors.insert(format!("{KEY_PREFIX}{SCORE}.weight"), stored(score, dtype)?);
        }
        save_tensors(&directory.join(WEIGHTS_FILE), &tensors)?;
        let config_path = directory.join(CONFIG_FILE);
        write_json(&config_path, &self.file.on_base(base_model)).map_err(ModelError::io(&config_path))
    }
}

/// The key at which the JSON parser stopped, if its value is NaN or Infinity, which Python writes but JSON lacks.
fn not_finite(text: &str, error: &serde_json::Error) -> Option<String> {
    let line = text.lines().nth(error.line().checked_sub(1)?)?;
    let (before, _) = line.get(..error.column())?.rsplit_once(':')?;
    let (key, value) = (before.rsplit('"').nth(1)?, line[before.len() + 1..].split([',', '}']).next()?.trim());
    let problem =
        format!("{key} in line {} is {value}; expected a number: correct it, or save the adapter again", error.line());
    ["NaN", "Infinity", "-Infinity"].contains(&value).then_some(problem)
}

pub(crate) struct Parts {
    pub(crate) file: ConfigFile,
    pub(crate) settings: LoraSettings,
    /// Tensors by name without PEFT's prefix, in their stored types.
    pub(crate) tensors: BTreeMap<String, Tensor>,
    pub(crate) dtype: DType,
}

fn stored(tensor: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
    tensor.to_device(&Device::Cpu)?.to_dtype(dtype)
}

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
            // Some programs write the name of the module that holds the magnitude.
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

    /// Drops copies of the base's embedding and head, after checking their shapes.
    fn drop_base_copies(&mut self, config: &DecoderConfig) -> Result<(), String> {
        for path in [EMBEDDING, HEAD] {
            if let Some(copy) = self.0.remove(&format!("{path}{BASE_COPY}")) {
                fits(&format!("{path}{BASE_COPY}"), &copy, &[config.vocab_size, config.hidden_size], config)?;
            }
        }
        Ok(())
    }

    /// Drops the matrices of a tied head. False if they are not the embedding's.
    fn drop_tied_head(&mut self, plan: &[LayerPlan]) -> Result<bool, ModelError> {
        let [.., embedding, head] = plan else { return Ok(true) };
        if head.kind != LayerKind::TiedHead {
            return Ok(true);
        }
        for (name, source) in [(head.a_name(), embedding.b_name()), (head.b_name(), embedding.a_name())] {
            let own = self.0.remove(&name).zip(self.0.get(&source));
            if let Some((own, source)) = own
                && own.ne(&source.t()?)?.to_dtype(DType::F32)?.max_all()?.to_scalar::<f32>()? > 0.0
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn check(&self, shapes: &BTreeMap<String, Vec<usize>>, config: &DecoderConfig) -> Result<(), String> {
        for (name, tensor) in &self.0 {
            let Some(shape) = shapes.get(name) else {
                let in_memory = [".lora_A.", ".lora_B."].into_iter().any(|part| {
                    name.split_once(part).is_some_and(|(_, rest)| rest != "weight" && rest.ends_with(".weight"))
                });
                let remedy = match in_memory {
                    true => {
                        "; it has the name of a module in memory, of PEFT's state_dict(): save the adapter with save_pretrained()"
                    }
                    false => "",
                };
                return Err(format!(
                    "tensor `{name}` belongs to no layer that `{CONFIG_FILE}` adapts on this model{remedy}"
                ));
            };
            fits(name, tensor, shape, config)?;
        }
        match shapes.keys().find(|name| !self.0.contains_key(*name)) {
            Some(name) => Err(format!("no tensor `{name}` there, which `{CONFIG_FILE}` requires on this model")),
            None => Ok(()),
        }
    }
}

/// Names and shapes of all tensors of an adapter with these settings.
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

/// Checks the shape of a tensor. The error says which model the tensor fits.
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
