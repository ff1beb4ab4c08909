//! What the user set for this plugin.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// An invalid setting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("setting `{key}`: {message}")]
pub struct SettingError {
    /// The key.
    pub key: String,
    /// Expected and got.
    pub message: String,
}

impl SettingError {
    /// `message` says what was expected and what was given.
    pub fn new(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self { key: key.into(), message: message.into() }
    }
}

/// The user's settings for this plugin, each a text. In a component they come from the host; in a test, from
/// [`Settings::from_pairs`].
#[derive(Debug, Clone)]
pub struct Settings {
    source: Source,
}

#[derive(Debug, Clone)]
enum Source {
    #[cfg(target_arch = "wasm32")]
    Host,
    Pairs(BTreeMap<String, Value>),
}

#[derive(Debug, Clone)]
struct Value {
    text: String,
    /// Set when the plugin reads the setting. Clones share it.
    is_read: Arc<AtomicBool>,
}

impl Settings {
    /// The settings from the host.
    #[cfg(target_arch = "wasm32")]
    pub(crate) fn of_host() -> Self {
        Self { source: Source::Host }
    }

    /// No settings: every default applies.
    pub fn none() -> Self {
        Self::from_pairs::<String, String>([])
    }

    /// Settings for a test. Lists are JSON: `["a", "b"]`.
    pub fn from_pairs<K: Into<String>, V: Into<String>>(pairs: impl IntoIterator<Item = (K, V)>) -> Self {
        let value = |text: V| Value { text: text.into(), is_read: Arc::default() };
        let pairs = pairs.into_iter().map(|(key, text)| (key.into(), value(text))).collect();
        Self { source: Source::Pairs(pairs) }
    }

    /// The text under `key`; `None` if it is not set.
    pub fn get(&self, key: &str) -> Option<String> {
        match &self.source {
            #[cfg(target_arch = "wasm32")]
            Source::Host => crate::__guest::imports::querl::plugin::settings::get(key),
            Source::Pairs(pairs) => {
                let value = pairs.get(key)?;
                value.is_read.store(true, Ordering::Relaxed);
                Some(value.text.clone())
            }
        }
    }

    /// Keys that are set and were never read: the host rejects them.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn unread(&self) -> Vec<&str> {
        let Source::Pairs(pairs) = &self.source;
        let unread = pairs.iter().filter(|(_, value)| !value.is_read.load(Ordering::Relaxed));
        unread.map(|(key, _)| key.as_str()).collect()
    }

    /// The text under `key`, or `default`.
    pub fn text(&self, key: &str, default: &str) -> String {
        self.get(key).unwrap_or_else(|| default.to_owned())
    }

    /// The number under `key`, or `default`.
    ///
    /// # Errors
    /// Not a number, or outside of `range`.
    pub fn number(&self, key: &str, default: f64, range: RangeInclusive<f64>) -> Result<f64, SettingError> {
        let Some(text) = self.get(key) else { return Ok(default) };
        let number = text.trim().parse::<f64>().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            SettingError::new(key, format!("expected a number from {low} to {high}, got `{text}`"))
        })
    }

    /// The whole number under `key`, or `default`.
    ///
    /// # Errors
    /// Not a whole number, or outside of `range`.
    pub fn integer(&self, key: &str, default: u64, range: RangeInclusive<u64>) -> Result<u64, SettingError> {
        let Some(text) = self.get(key) else { return Ok(default) };
        let number = text.trim().parse::<u64>().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            SettingError::new(key, format!("expected a whole number from {low} to {high}, got `{text}`"))
        })
    }

    /// The truth value under `key`, or `default`.
    ///
    /// # Errors
    /// Neither `true` nor `false`.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool, SettingError> {
        match self.get(key).as_deref() {
            None => Ok(default),
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(text) => Err(SettingError::new(key, format!("expected true or false, got `{text}`"))),
        }
    }

    /// The list of texts under `key`; empty where the user set nothing.
    ///
    /// # Errors
    /// Not a list of texts.
    pub fn list(&self, key: &str) -> Result<Vec<String>, SettingError> {
        let Some(text) = self.get(key) else { return Ok(Vec::new()) };
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
}
