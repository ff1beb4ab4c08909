//! `adapter_config.json`, as PEFT writes and reads it.

use super::patterns::Patterns;
use super::settings::{LoraSettings, Modules, SavedCopies};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

/// The file: keys that matter here by name, all others as they were.
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
    /// Written by PEFT and of no effect here, or refused.
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

/// PEFT's type for alpha is an integer; `8` and `8.0` are not the same to every reader.
fn as_integer<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if value.fract() == 0.0 && value.abs() < 1e15 {
        serializer.serialize_i64(*value as i64)
    } else {
        serializer.serialize_f64(*value)
    }
}

/// Keys whose effect is not implemented: refused where they are set.
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

/// Initialisations that change the base's weights as well, so that the adapter does not fit the base by itself.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

impl ConfigFile {
    /// What a new adapter's file says.
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

    /// The same for a classifier, whose head is saved with it.
    pub(super) fn of_classifier(&self, modules_to_save: &[String]) -> Self {
        let modules_to_save = Some(modules_to_save.to_vec());
        Self { task_type: Some("SEQ_CLS".into()), modules_to_save, ..self.clone() }
    }

    /// The same for another base.
    pub(super) fn on_base(&self, base_model: &str) -> Self {
        Self { base_model_name_or_path: Some(base_model.to_owned()), inference_mode: true, ..self.clone() }
    }

    /// The base as the file names it.
    pub(crate) fn base(&self) -> Option<&str> {
        self.base_model_name_or_path.as_deref()
    }

    /// What the keys come to, or the first that is not supported.
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
