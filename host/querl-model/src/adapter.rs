//! LoRA adapters in PEFT's format.

use crate::{DecoderConfig, ModelError, load_tensors, save_tensors};
use candle_core::{DType, Device, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Shape of an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSettings {
    /// Rows of A.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Scale by `alpha / sqrt(rank)` instead of `alpha / rank`.
    pub use_rslora: bool,
    /// Last part of the names of the adapted layers: `q_proj` and so on.
    pub target_modules: Vec<String>,
}

impl LoraSettings {
    /// All linear layers of a decoder, plain scaling.
    pub fn all_linear(rank: usize, alpha: f64) -> Self {
        Self { rank, alpha, use_rslora: false, target_modules: ALL_LINEAR.map(String::from).into() }
    }

    fn scale(&self) -> f32 {
        let rank = self.rank as f64;
        (self.alpha / if self.use_rslora { rank.sqrt() } else { rank }) as f32
    }
}

/// Every linear layer but the head, as PEFT's `all-linear`, sorted as PEFT's files are read best.
const ALL_LINEAR: [&str; 7] = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];

/// One layer's pair.
#[derive(Debug, Clone)]
pub(crate) struct LoraPair {
    pub(crate) a: Tensor, // (rank, in)
    pub(crate) b: Tensor, // (out, rank)
}

/// Low-rank matrices beside frozen weights, kept in f32.
#[derive(Debug, Clone)]
pub struct LoraAdapter {
    settings: LoraSettings,
    pairs: BTreeMap<String, LoraPair>,
    vars: BTreeMap<String, Var>,
}

const CONFIG_FILE: &str = "adapter_config.json";
const WEIGHTS_FILE: &str = "adapter_model.safetensors";
const KEY_PREFIX: &str = "base_model.model.";

/// The keys of `adapter_config.json` that matter here; PEFT fills in the rest.
#[derive(Serialize, Deserialize)]
struct AdapterConfigFile {
    peft_type: String,
    task_type: Option<String>,
    base_model_name_or_path: Option<String>,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    target_modules: Vec<String>,
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
    rank_pattern: BTreeMap<String, usize>,
    #[serde(default)]
    alpha_pattern: BTreeMap<String, f64>,
    modules_to_save: Option<Vec<String>>,
}

fn no_bias() -> String {
    "none".into()
}

impl LoraAdapter {
    /// A fresh adapter: A uniform in `±1/sqrt(in)`, B zero, so that it changes nothing yet.
    ///
    /// # Errors
    /// A target module that the decoder does not have.
    ///
    /// Source: PEFT's `reset_lora_parameters` (`kaiming_uniform_` with `a = sqrt(5)`).
    pub fn new(config: &DecoderConfig, settings: LoraSettings, seed: u64) -> Result<Self, ModelError> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut vars = BTreeMap::new();
        for (path, n_out, n_in) in config.linear_layers() {
            if !settings.target_modules.iter().any(|target| path.ends_with(target.as_str())) {
                continue;
            }
            let bound = 1.0 / (n_in as f32).sqrt();
            let a: Vec<f32> = (0..settings.rank * n_in).map(|_| rng.random_range(-bound..bound)).collect();
            let a = Var::from_vec(a, (settings.rank, n_in), &Device::Cpu)?;
            let b = Var::zeros((n_out, settings.rank), DType::F32, &Device::Cpu)?;
            vars.insert(format!("{path}.lora_A.weight"), a);
            vars.insert(format!("{path}.lora_B.weight"), b);
        }
        Ok(Self { pairs: pairs_of(&vars), settings, vars })
    }

    /// Reads an adapter that PEFT or querl saved; it can be trained on.
    ///
    /// # Errors
    /// A file is missing or damaged, the shapes do not fit the decoder, or the adapter uses what is not supported (DoRA,
    /// rank patterns, biases, saved modules).
    pub fn load(directory: &Path, config: &DecoderConfig) -> Result<Self, ModelError> {
        let config_path = directory.join(CONFIG_FILE);
        let text = std::fs::read_to_string(&config_path).map_err(ModelError::io(&config_path))?;
        let file: AdapterConfigFile =
            serde_json::from_str(&text).map_err(|error| ModelError::bad_file(&config_path, error))?;
        let settings = file.settings().map_err(|message| ModelError::bad_file(&config_path, message))?;
        let weights_path = directory.join(WEIGHTS_FILE);
        let mut vars = BTreeMap::new();
        for (name, tensor) in load_tensors(&weights_path)? {
            let Some(path) = name.strip_prefix(KEY_PREFIX) else {
                return Err(ModelError::bad_file(
                    &weights_path,
                    format!("tensor `{name}` is not PEFT's; expected the prefix `{KEY_PREFIX}`"),
                ));
            };
            vars.insert(path.to_owned(), Var::from_tensor(&tensor.to_dtype(DType::F32)?)?);
        }
        check_shapes(&vars, &settings, config).map_err(|message| ModelError::bad_file(&weights_path, message))?;
        Ok(Self { pairs: pairs_of(&vars), settings, vars })
    }

    /// Writes `adapter_config.json` and `adapter_model.safetensors` as PEFT reads them.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save(&self, directory: &Path, base_model: &str) -> Result<(), ModelError> {
        let tensors = self.vars.iter().map(|(path, var)| (format!("{KEY_PREFIX}{path}"), var.as_tensor().clone()));
        save_tensors(&directory.join(WEIGHTS_FILE), &tensors.collect())?;
        let config_path = directory.join(CONFIG_FILE);
        let text = serde_json::to_string_pretty(&AdapterConfigFile::of(&self.settings, base_model))
            .map_err(|error| ModelError::bad_file(&config_path, error))?;
        querl_core::fsx::write_atomic(&config_path, text.as_bytes()).map_err(ModelError::io(&config_path))
    }

    /// What is trained, by name, in the order of the names.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        &self.vars
    }

    /// Shape and scale.
    pub fn settings(&self) -> &LoraSettings {
        &self.settings
    }

    /// A view that records no gradients: for generation and evaluation. It shares the values, so it follows training.
    pub fn without_gradient(&self) -> Self {
        let mut view = self.clone();
        for pair in view.pairs.values_mut() {
            *pair = LoraPair { a: pair.a.detach(), b: pair.b.detach() };
        }
        view
    }

    pub(crate) fn pair(&self, path: &str) -> Option<&LoraPair> {
        self.pairs.get(path)
    }

    pub(crate) fn scale(&self) -> f32 {
        self.settings.scale()
    }
}

fn pairs_of(vars: &BTreeMap<String, Var>) -> BTreeMap<String, LoraPair> {
    let pair = |(name, a): (&String, &Var)| {
        let path = name.strip_suffix(".lora_A.weight")?;
        let b = vars.get(&format!("{path}.lora_B.weight"))?;
        Some((path.to_owned(), LoraPair { a: a.as_tensor().clone(), b: b.as_tensor().clone() }))
    };
    vars.iter().filter_map(pair).collect()
}

fn check_shapes(vars: &BTreeMap<String, Var>, settings: &LoraSettings, config: &DecoderConfig) -> Result<(), String> {
    let shapes: BTreeMap<String, (usize, usize)> = config
        .linear_layers()
        .flat_map(|(path, n_out, n_in)| {
            [
                (format!("{path}.lora_A.weight"), (settings.rank, n_in)),
                (format!("{path}.lora_B.weight"), (n_out, settings.rank)),
            ]
        })
        .collect();
    for (name, var) in vars {
        let expected = shapes.get(name).ok_or_else(|| format!("tensor `{name}` belongs to no layer of this model"))?;
        let found = var.dims2().map_err(|error| format!("tensor `{name}`: {error}"))?;
        if found != *expected {
            return Err(format!("tensor `{name}` has shape {found:?}; this model expects {expected:?}"));
        }
        let partner = match name.strip_suffix(".lora_A.weight") {
            Some(path) => format!("{path}.lora_B.weight"),
            None => name.replace(".lora_B.weight", ".lora_A.weight"),
        };
        if !vars.contains_key(&partner) {
            return Err(format!("tensor `{name}` has no partner `{partner}`"));
        }
    }
    if vars.is_empty() {
        return Err("holds no tensors".into());
    }
    Ok(())
}

impl AdapterConfigFile {
    fn of(settings: &LoraSettings, base_model: &str) -> Self {
        Self {
            peft_type: "LORA".into(),
            task_type: Some("CAUSAL_LM".into()),
            base_model_name_or_path: Some(base_model.to_owned()),
            r: settings.rank,
            lora_alpha: settings.alpha,
            lora_dropout: 0.0,
            target_modules: settings.target_modules.clone(),
            bias: no_bias(),
            use_rslora: settings.use_rslora,
            use_dora: false,
            fan_in_fan_out: false,
            inference_mode: true,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            modules_to_save: None,
        }
    }

    fn settings(self) -> Result<LoraSettings, String> {
        let unsupported = [
            (self.peft_type != "LORA", format!("peft_type is `{}`; expected `LORA`", self.peft_type)),
            (self.use_dora, "use_dora is true; only plain LoRA is supported".into()),
            (self.fan_in_fan_out, "fan_in_fan_out is true; expected false".into()),
            (self.bias != "none", format!("bias is `{}`; expected `none`", self.bias)),
            (!self.rank_pattern.is_empty(), "rank_pattern is not empty; one rank for all layers is supported".into()),
            (
                !self.alpha_pattern.is_empty(),
                "alpha_pattern is not empty; one alpha for all layers is supported".into(),
            ),
            (self.modules_to_save.is_some_and(|m| !m.is_empty()), "modules_to_save is not supported".into()),
        ];
        if let Some((_, message)) = unsupported.into_iter().find(|(is_so, _)| *is_so) {
            return Err(message);
        }
        Ok(LoraSettings {
            rank: self.r,
            alpha: self.lora_alpha,
            use_rslora: self.use_rslora,
            target_modules: self.target_modules,
        })
    }
}
