//! Settings that the user configured for a plugin.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};
#[cfg(not(target_arch = "wasm32"))]
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
};

/// Error about an invalid setting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("setting `{key}`: {message}")]
pub struct SettingError {
    /// Key of the setting.
    pub key: String,
    /// The expected value and the actual value.
    pub message: String,
}

impl SettingError {
    /// An error about the setting `key`; `message` has the expected and the actual value.
    pub fn new(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self { key: key.into(), message: message.into() }
    }
}

/// The user's settings of this plugin, stored as text. In a component they come from the host, in a test from
/// [`Settings::from_pairs`].
#[derive(Debug, Clone)]
pub struct Settings {
    source: Source,
}

#[derive(Debug, Clone)]
enum Source {
    #[cfg(target_arch = "wasm32")]
    Host,
    #[cfg(not(target_arch = "wasm32"))]
    Pairs(BTreeMap<String, Value>),
    /// No values; records every read. Clones share the record.
    Recording(Arc<Mutex<Vec<Setting>>>),
}

/// A setting that a plugin reads, as reported by `info.describe`.
#[doc(hidden)]
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    pub key: String,
    pub value_type: SettingType,
    /// Default value in text form; `None` if the user must set it.
    pub default: Option<String>,
    pub minimum: Option<f64>,
    pub maximum: Option<f64>,
    pub choices: Option<Vec<String>>,
    pub doc: Option<String>,
}

#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingType {
    Text,
    Number,
    Integer,
    Flag,
    Texts,
}

#[cfg(not(target_arch = "wasm32"))]
#[derive(Debug, Clone)]
struct Value {
    text: String,
    /// The value in a golden case. A text is read in its JSON form where another type is expected, and refused there.
    json: Option<serde_json::Value>,
    /// True once the plugin has read the setting. Clones share the flag.
    is_read: Arc<AtomicBool>,
    /// True once the plugin has read the setting as a text. Clones share the flag.
    is_read_as_text: Arc<AtomicBool>,
}

#[cfg(not(target_arch = "wasm32"))]
impl Value {
    fn new(text: String, json: Option<serde_json::Value>) -> Self {
        Self { text, json, is_read: Arc::default(), is_read_as_text: Arc::default() }
    }
}

impl Settings {
    /// Settings that are read from the host.
    #[cfg(target_arch = "wasm32")]
    pub(crate) fn of_host() -> Self {
        Self { source: Source::Host }
    }

    /// Empty settings for a test: all settings have their defaults.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn none() -> Self {
        Self::from_pairs::<String, String>([])
    }

    /// Settings for a test. Lists are JSON: `["a", "b"]`.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn from_pairs<K: Into<String>, V: Into<String>>(pairs: impl IntoIterator<Item = (K, V)>) -> Self {
        let pairs = pairs.into_iter().map(|(key, text)| (key.into(), Value::new(text.into(), None))).collect();
        Self { source: Source::Pairs(pairs) }
    }

    /// Settings of a golden case: key, text form and value. The text "40" is no number and the number 40 no text, as in a configuration.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn of_golden_case(values: impl IntoIterator<Item = (String, String, serde_json::Value)>) -> Self {
        let value = |(key, text, json)| (key, Value::new(text, Some(json)));
        Self { source: Source::Pairs(values.into_iter().map(value).collect()) }
    }

    /// Calls `read` with empty settings and returns the settings that it reads, in order, each key once.
    #[doc(hidden)]
    pub fn recorded(read: impl FnOnce(&Self)) -> Vec<Setting> {
        let kept = Arc::default();
        read(&Self { source: Source::Recording(Arc::clone(&kept)) });
        std::mem::take(&mut *kept.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn get(&self, key: &str, value_type: SettingType, setting: impl FnOnce(&mut Setting)) -> Option<String> {
        match &self.source {
            #[cfg(target_arch = "wasm32")]
            Source::Host => crate::__guest::imports::querl::plugin::settings::get(key),
            #[cfg(not(target_arch = "wasm32"))]
            Source::Pairs(pairs) => {
                let value = pairs.get(key)?;
                value.is_read.store(true, Ordering::Relaxed);
                if value_type == SettingType::Text {
                    value.is_read_as_text.store(true, Ordering::Relaxed);
                    return Some(value.text.clone());
                }
                let quoted = value.json.as_ref().filter(|json| json.is_string());
                Some(quoted.map_or_else(|| value.text.clone(), ToString::to_string))
            }
            Source::Recording(kept) => {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                if kept.iter().all(|known| known.key != key) {
                    let (minimum, maximum) = (None, None);
                    let (choices, doc) = (None, None);
                    let mut read =
                        Setting { key: key.into(), value_type, default: None, minimum, maximum, choices, doc };
                    setting(&mut read);
                    kept.push(read);
                }
                None
            }
        }
    }

    /// Sets the help text of a setting that was already read, one sentence. `querl plugin inspect` shows it for a component without
    /// plugin.toml.
    pub fn doc(&self, key: &str, text: &str) {
        if let Source::Recording(kept) = &self.source {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(setting) = kept.iter_mut().find(|setting| setting.key == key) {
                setting.doc = Some(text.to_owned());
            }
        }
    }

    /// Keys that the user set and the plugin has not read: the host rejects them as unknown.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn unread(&self) -> Vec<&str> {
        let Source::Pairs(pairs) = &self.source else { return Vec::new() };
        let unread = pairs.iter().filter(|(_, value)| !value.is_read.load(Ordering::Relaxed));
        unread.map(|(key, _)| key.as_str()).collect()
    }

    /// The error about a value of a golden case that is no text and was read as one: [`Settings::text`] returns no error.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn not_text(&self) -> Option<SettingError> {
        let Source::Pairs(pairs) = &self.source else { return None };
        let mut as_text = pairs.iter().filter(|(_, value)| value.is_read_as_text.load(Ordering::Relaxed));
        let not_text = |value: &Value| value.json.clone().filter(|json| !json.is_string());
        as_text.find_map(|(key, value)| {
            let got = not_text(value)?;
            Some(SettingError::new(key, format!("expected a text, got {got}")))
        })
    }

    /// The text of `key`, which the user must set.
    ///
    /// # Errors
    /// The setting is not set.
    pub fn required(&self, key: &str) -> Result<String, SettingError> {
        match self.get(key, SettingType::Text, |_| {}) {
            Some(text) => Ok(text),
            // No error, so that the keys after this one are recorded too.
            None if matches!(self.source, Source::Recording(_)) => Ok(String::new()),
            None => Err(SettingError::new(key, "expected a text, got none")),
        }
    }

    /// The text of `key`; `default` if it is not set.
    pub fn text(&self, key: &str, default: &str) -> String {
        let text = self.get(key, SettingType::Text, |setting| setting.default = Some(default.to_owned()));
        text.unwrap_or_else(|| default.to_owned())
    }

    /// The text of `key`, one of `choices`; `default` if it is not set.
    ///
    /// # Errors
    /// The text is none of `choices`.
    pub fn choice(&self, key: &str, default: &str, choices: &[&str]) -> Result<String, SettingError> {
        let text = self.get(key, SettingType::Text, |setting| {
            setting.default = Some(default.to_owned());
            setting.choices = Some(choices.iter().map(|choice| (*choice).to_owned()).collect());
        });
        let text = text.unwrap_or_else(|| default.to_owned());
        if choices.contains(&&*text) {
            return Ok(text);
        }
        Err(SettingError::new(key, format!("expected one of {}, got `{text}`", choices.join(", "))))
    }

    /// The number of `key`; `default` if it is not set.
    ///
    /// # Errors
    /// The value is not a number, or outside of `range` (bounds inclusive).
    pub fn number(&self, key: &str, default: f64, range: RangeInclusive<f64>) -> Result<f64, SettingError> {
        let text = self.get(key, SettingType::Number, |setting| {
            setting.default = Some(default.to_string());
            (setting.minimum, setting.maximum) = (Some(*range.start()), Some(*range.end()));
        });
        let Some(text) = text else { return Ok(default) };
        let number = text.trim().parse::<f64>().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            SettingError::new(key, format!("expected a number from {low} to {high}, got `{text}`"))
        })
    }

    /// The integer of `key`, 0 or more; `default` if it is not set.
    ///
    /// # Errors
    /// The value is not such an integer, or outside of `range` (bounds inclusive).
    pub fn integer(&self, key: &str, default: u64, range: RangeInclusive<u64>) -> Result<u64, SettingError> {
        let text = self.get(key, SettingType::Integer, |setting| {
            setting.default = Some(default.to_string());
            (setting.minimum, setting.maximum) = (Some(*range.start() as f64), Some(*range.end() as f64));
        });
        let Some(text) = text else { return Ok(default) };
        let number = text.trim().parse::<u64>().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            SettingError::new(key, format!("expected a whole number from {low} to {high}, got `{text}`"))
        })
    }

    /// The boolean of `key`; `default` if it is not set.
    ///
    /// # Errors
    /// The value is neither `true` nor `false`.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool, SettingError> {
        let text = self.get(key, SettingType::Flag, |setting| setting.default = Some(default.to_string()));
        match text.as_deref() {
            None => Ok(default),
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(text) => Err(SettingError::new(key, format!("expected true or false, got `{text}`"))),
        }
    }

    /// The list of texts of `key`; empty if it is not set.
    ///
    /// # Errors
    /// The value is not a list of texts.
    pub fn list(&self, key: &str) -> Result<Vec<String>, SettingError> {
        self.list_or(key, &[])
    }

    /// The list of texts of `key`; `default` if it is not set.
    ///
    /// # Errors
    /// The value is not a list of texts.
    pub fn list_or(&self, key: &str, default: &[&str]) -> Result<Vec<String>, SettingError> {
        let text = self.get(key, SettingType::Texts, |setting| {
            setting.default = Some(serde_json::Value::from(default).to_string());
        });
        let Some(text) = text else { return Ok(default.iter().map(|item| (*item).to_owned()).collect()) };
        serde_json::from_str(&text)
            .map_err(|_| SettingError::new(key, format!("expected a list of texts, got `{text}`")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn absent_settings_give_the_defaults() {
        let settings = Settings::none();
        assert_eq!(settings.text("a", "x"), "x");
        assert_eq!(settings.number("b", 0.5, 0.0..=1.0), Ok(0.5));
        assert_eq!(settings.integer("c", 7, 0..=9), Ok(7));
        assert_eq!(settings.flag("d", true), Ok(true));
        assert_eq!(settings.list("e"), Ok(Vec::new()));
    }

    #[test]
    fn settings_read_back() {
        let settings = Settings::from_pairs([("b", "0.25"), ("c", "3"), ("d", "false"), ("e", r#"["虾青素"]"#)]);
        assert_eq!(settings.number("b", 0.5, 0.0..=1.0), Ok(0.25));
        assert_eq!(settings.integer("c", 7, 0..=9), Ok(3));
        assert_eq!(settings.flag("d", true), Ok(false));
        assert_eq!(settings.list("e"), Ok(vec!["虾青素".to_owned()]));
    }

    #[test]
    fn unusable_values_name_the_key_and_what_was_expected() {
        let settings = Settings::from_pairs([("b", "high"), ("c", "-1"), ("d", "yes"), ("e", "虾青素"), ("n", "NaN")]);
        let error = settings.number("b", 0.5, 0.0..=1.0).unwrap_err();
        assert_eq!(error.to_string(), "setting `b`: expected a number from 0 to 1, got `high`");
        assert!(settings.number("n", 0.5, 0.0..=1.0).is_err());
        assert!(settings.integer("c", 7, 0..=9).is_err());
        assert!(settings.flag("d", true).is_err());
        assert!(settings.list("e").is_err());
    }

    #[test]
    fn what_is_read_is_recorded_with_type_default_and_bounds() {
        let recorded = Settings::recorded(|settings| {
            settings.required("a").unwrap();
            settings.choice("b", "x", &["x", "y"]).unwrap();
            settings.number("c", 1e-7, 0.0..=1.0).unwrap();
            settings.number("c", 0.5, 0.0..=1.0).unwrap();
            settings.integer("d", 3, 1..=9).unwrap();
            settings.doc("d", "Length of an n-gram.");
            settings.doc("z", "Of a setting that is not read.");
            settings.flag("e", true).unwrap();
            settings.list("f").unwrap();
            settings.list_or("g", &["鱼", "\""]).unwrap();
        });
        let with = |key: &str, value_type, default: Option<&str>, bounds: Option<(f64, f64)>| Setting {
            key: key.into(),
            value_type,
            default: default.map(Into::into),
            minimum: bounds.map(|(minimum, _)| minimum),
            maximum: bounds.map(|(_, maximum)| maximum),
            choices: (key == "b").then(|| vec!["x".into(), "y".into()]),
            doc: (key == "d").then(|| "Length of an n-gram.".into()),
        };
        let expected = [
            with("a", SettingType::Text, None, None),
            with("b", SettingType::Text, Some("x"), None),
            with("c", SettingType::Number, Some("0.0000001"), Some((0.0, 1.0))),
            with("d", SettingType::Integer, Some("3"), Some((1.0, 9.0))),
            with("e", SettingType::Flag, Some("true"), None),
            with("f", SettingType::Texts, Some("[]"), None),
            with("g", SettingType::Texts, Some(r#"["鱼","\""]"#), None),
        ];
        assert_eq!(recorded, expected);
        assert!(Settings::none().required("a").is_err());
        assert_eq!(
            Settings::from_pairs([("b", "z")]).choice("b", "x", &["x", "y"]).unwrap_err().message,
            "expected one of x, y, got `z`"
        );
    }
}
