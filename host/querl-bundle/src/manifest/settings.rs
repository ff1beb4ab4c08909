//! A plugin's declared settings, and the check of values against them.

use super::Manifest;
use super::parse::number;
use crate::document::{Section, nearest, or_list, shown};
use crate::error::BundleError;
use serde::Serialize;
use std::collections::BTreeMap;
use toml::Value;

/// Largest integer up to which all integers are exact as f64.
const LARGEST_BOUND: u64 = 1 << 53;

querl_core::named_enum! {
    /// Type of a setting's value.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum SettingType {
        /// A finite number, whole or not.
        Number = "number",
        /// A whole number.
        Integer = "integer",
        /// `true` or `false`.
        Boolean = "boolean",
        /// A text.
        Text = "text",
        /// A list of texts.
        List = "list",
    }
}

impl SettingType {
    fn has_bounds(self) -> bool {
        matches!(self, Self::Number | Self::Integer)
    }
}

/// Section `[settings.KEY]` of the manifest: the declaration of one setting.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SettingSpec {
    /// Type of the value.
    #[serde(rename = "type")]
    pub kind: SettingType,
    /// Default value; `None` if there is none.
    pub default: Option<Value>,
    /// Smallest allowed number; for numbers and integers only.
    pub minimum: Option<f64>,
    /// Largest allowed number; for numbers and integers only.
    pub maximum: Option<f64>,
    /// Allowed texts; empty if any text is allowed.
    pub choices: Vec<String>,
    /// Description for users; may be empty.
    pub doc: String,
}

/// Why a user's setting is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("setting `{key}`: {message}")]
pub struct SettingProblem {
    /// Key of the setting.
    pub key: String,
    /// The actual and the expected value.
    pub message: String,
}

/// Checks keys and values of the user's settings against the declared ones.
///
/// # Errors
/// The first key, in alphabetical order, that is unknown, or whose
/// value has the wrong type, is out of range or is not among the choices.
pub fn check_settings(
    declared: &BTreeMap<String, SettingSpec>,
    settings: &BTreeMap<String, Value>,
) -> Result<(), SettingProblem> {
    for (key, value) in settings {
        let problem = match declared.get(key) {
            Some(spec) if spec.accepts(value) => continue,
            Some(spec) => format!("expected {}, got {}{}", spec.expected(), shown(value), spec.remedy(key, value)),
            None => unknown(declared, key),
        };
        return Err(SettingProblem { key: key.clone(), message: problem });
    }
    Ok(())
}

fn unknown(declared: &BTreeMap<String, SettingSpec>, key: &str) -> String {
    let known = || declared.keys().map(String::as_str);
    match nearest(key, known()) {
        _ if declared.is_empty() => "the plugin has no settings".to_owned(),
        Some(near) => format!("the plugin knows no such setting; did you mean `{near}`?"),
        None => format!("the plugin knows no such setting; expected {}", or_list(known())),
    }
}

impl Manifest {
    /// Checks the user's settings against those that this manifest declares, with the function [`check_settings`].
    ///
    /// # Errors
    /// As [`check_settings`].
    pub fn check_settings(&self, settings: &BTreeMap<String, Value>) -> Result<(), SettingProblem> {
        check_settings(&self.settings, settings)
    }

    /// Default values by key, of the settings that have one.
    pub fn defaults(&self) -> BTreeMap<String, Value> {
        let with_default = |(key, spec): (&String, &SettingSpec)| Some((key.clone(), spec.default.clone()?));
        self.settings.iter().filter_map(with_default).collect()
    }
}

impl SettingSpec {
    /// True if `value` has the declared type, is in the declared range and is one of the choices.
    pub fn accepts(&self, value: &Value) -> bool {
        match (self.kind, value) {
            (SettingType::Integer, Value::Integer(_)) | (SettingType::Number, Value::Integer(_) | Value::Float(_)) => {
                number(value).is_some_and(|number| self.is_within(number))
            }
            (SettingType::Boolean, Value::Boolean(_)) => true,
            (SettingType::Text, Value::String(text)) => self.choices.is_empty() || self.choices.contains(text),
            (SettingType::List, Value::Array(items)) => items.iter().all(Value::is_str),
            _ => false,
        }
    }

    /// The allowed values in words: `a number from 0 to 1`.
    pub fn expected(&self) -> String {
        let kind = match self.kind {
            SettingType::Number => "a number",
            SettingType::Integer => "a whole number",
            SettingType::Boolean => "true or false",
            SettingType::Text if self.choices.is_empty() => "a text",
            SettingType::Text => return or_list(self.choices.iter().map(String::as_str)),
            SettingType::List => "a list of texts",
        };
        match (self.minimum, self.maximum) {
            (Some(min), Some(max)) => format!("{kind} from {min} to {max}"),
            (Some(min), None) => format!("{kind} of {min} or more"),
            (None, Some(max)) => format!("{kind} of at most {max}"),
            (None, None) => kind.to_owned(),
        }
    }

    /// For a text that TOML reads as another value, and that is accepted as a text, the rest of the sentence.
    fn remedy(&self, key: &str, value: &Value) -> String {
        let is_plain = !matches!(value, Value::String(_) | Value::Array(_) | Value::Table(_));
        match is_plain && self.accepts(&Value::String(value.to_string())) {
            true => format!("; quote it, on a command line as '{key}=\"{value}\"'"),
            false => String::new(),
        }
    }

    fn is_within(&self, number: f64) -> bool {
        let above = self.minimum.is_none_or(|min| number >= min);
        number.is_finite() && above && self.maximum.is_none_or(|max| number <= max)
    }
}

/// Reads `[settings.KEY]`.
pub(super) fn spec(settings: &Section<'_>, key: &str) -> Result<SettingSpec, BundleError> {
    let keys = ["type", "default", "minimum", "maximum", "choices", "doc"];
    let section = settings.section(key, &keys)?.expect("the key was found in the section");
    let meaning = or_list(SettingType::ALL.iter().map(|kind| kind.name()));
    let name = section.line("type", &meaning)?;
    let kind = SettingType::from_name(name);
    let kind = kind.ok_or_else(|| section.wrong("type", &Value::from(name), meaning + of_other_name(name)))?;
    let mut spec = SettingSpec {
        kind,
        default: None,
        minimum: bound(&section, "minimum", kind)?,
        maximum: bound(&section, "maximum", kind)?,
        choices: choices(&section, kind)?,
        doc: section.prose("doc")?.unwrap_or_default().to_owned(),
    };
    if let (Some(min), Some(max)) = (spec.minimum, spec.maximum)
        && min > max
    {
        return Err(section.error("maximum", format!("is {max}; expected {min} (the minimum) or more")));
    }
    if let Some(default) = section.value("default") {
        if !spec.accepts(default) {
            return Err(section.wrong("default", default, spec.expected()));
        }
        spec.default = Some(default.clone());
    }
    Ok(spec)
}

/// For the name of a type in an SDK, or in another language, the rest of the sentence.
fn of_other_name(name: &str) -> &'static str {
    match name {
        "flag" | "bool" => "; did you mean `boolean`?",
        "texts" | "array" => "; did you mean `list`?",
        "string" | "str" => "; did you mean `text`?",
        "choice" | "enum" => "; did you mean `text`, with `choices`?",
        "float" => "; did you mean `number`?",
        "int" => "; did you mean `integer`?",
        _ => "",
    }
}

fn bound(section: &Section<'_>, key: &str, kind: SettingType) -> Result<Option<f64>, BundleError> {
    let Some(value) = section.value(key) else { return Ok(None) };
    if !kind.has_bounds() {
        return Err(section.error(key, format!("is for numbers and integers; this setting is a {}", kind.name())));
    }
    let (expected, fits) = match kind {
        SettingType::Integer => {
            let fits = |number: &i64| number.unsigned_abs() <= LARGEST_BOUND;
            ("a whole number from -2^53 to 2^53", value.as_integer().as_ref().is_some_and(fits))
        }
        _ => ("a finite number", number(value).is_some_and(f64::is_finite)),
    };
    match fits {
        true => Ok(number(value)),
        false => Err(section.wrong(key, value, expected)),
    }
}

fn choices(section: &Section<'_>, kind: SettingType) -> Result<Vec<String>, BundleError> {
    let Some(choices) = section.texts("choices")? else { return Ok(Vec::new()) };
    if kind != SettingType::Text {
        return Err(section.error("choices", format!("is for texts; this setting is a {}", kind.name())));
    }
    let mut sorted = choices.clone();
    sorted.sort_unstable();
    sorted.dedup();
    match !choices.is_empty() && sorted.len() == choices.len() {
        true => Ok(choices.into_iter().map(str::to_owned).collect()),
        false => {
            let value = section.value("choices").expect("the list was just read");
            Err(section.wrong("choices", value, "one text or more, each once"))
        }
    }
}
