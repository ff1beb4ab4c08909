//! API keys: read from an environment variable or a file, and redacted in messages.

use crate::client::{KeyAccess, ServiceContext};
use crate::error::DataError;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use querl_core::config::AuthScheme;
use querl_core::fsx::read_text_bounded;
use reqwest::header::{HeaderValue, InvalidHeaderValue};
use serde_json::Value;
use std::path::Path;

/// An API key that no message or log shows.
#[derive(Clone)]
pub(crate) struct Secret {
    key: String,
    scheme: AuthScheme,
}

/// Shorter keys are not redacted: local servers use `1`, `none` or `token`, which also occur in responses.
const SECRET_BYTES: usize = 8;

/// Maximum size of a key file.
const MAX_KEY_BYTES: u64 = 64 << 10;

impl Secret {
    /// Reads the key from `file` if set, otherwise from an environment variable; `None` if `variable` is empty or `services` reads no
    /// keys. `section` of the configuration is named in errors.
    pub(crate) fn open(
        services: &ServiceContext,
        section: &str,
        file: Option<&Path>,
        variable: &str,
    ) -> Result<Option<Self>, DataError> {
        match file {
            _ if services.keys == KeyAccess::Ignore => Ok(None),
            Some(path) => Self::from_file(section, path).map(Some),
            None if variable.is_empty() => Ok(None),
            None => Self::from_env(section, variable).map(Some),
        }
    }

    fn from_file(section: &str, path: &Path) -> Result<Self, DataError> {
        let setting = |problem: String| DataError::setting(format!("{section}.api_key_file"), problem);
        let text = read_text_bounded(path, MAX_KEY_BYTES)
            .map_err(|error| setting(format!("is `{}`, which cannot be read: {error}", path.display())))?;
        match text.trim() {
            "" => Err(setting(format!("is `{}`, which is empty; put the key into it", path.display()))),
            key => Ok(Self::new(key)),
        }
    }

    fn from_env(section: &str, variable: &str) -> Result<Self, DataError> {
        match std::env::var(variable) {
            Ok(value) if !value.trim().is_empty() => Ok(Self::new(value.trim())),
            _ => Err(DataError::setting(
                format!("{section}.api_key_env"),
                format!(
                    "names the environment variable `{variable}`, which is not set; export it, or name none (\"\") for a service without keys"
                ),
            )),
        }
    }

    pub(crate) fn new(key: &str) -> Self {
        Self { key: key.to_owned(), scheme: AuthScheme::Bearer }
    }

    pub(crate) fn sent_as(self, scheme: AuthScheme) -> Self {
        Self { scheme, ..self }
    }

    /// The `Authorization` header with the key.
    pub(super) fn header(&self) -> Result<HeaderValue, InvalidHeaderValue> {
        let mut value = HeaderValue::try_from(match self.scheme {
            AuthScheme::Auto | AuthScheme::Bearer => format!("Bearer {}", self.key),
            AuthScheme::ApiKey => format!("ApiKey {}", self.key),
            AuthScheme::Basic => format!("Basic {}", self.encoded()),
        })?;
        value.set_sensitive(true);
        Ok(value)
    }

    fn encoded(&self) -> String {
        BASE64_STANDARD.encode(&self.key)
    }

    /// `text` with the key redacted in all its encodings.
    pub(super) fn hide_in(&self, text: &str) -> String {
        self.encodings().iter().fold(text.to_owned(), |text, form| text.replace(form, "[key]"))
    }

    pub(super) fn hide_in_value(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.hide_in(text),
            Value::Array(values) => values.iter_mut().for_each(|value| self.hide_in_value(value)),
            Value::Object(entries) => {
                let hidden = std::mem::take(entries).into_iter().map(|(name, mut value)| {
                    self.hide_in_value(&mut value);
                    (self.hide_in(&name), value)
                });
                *entries = hidden.collect();
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn encodings(&self) -> Vec<String> {
        let mut encodings = vec![self.key.clone()];
        if self.scheme == AuthScheme::Basic {
            encodings.push(self.encoded());
            encodings.extend(self.key.split_once(':').map(|(_, password)| password.to_owned()));
        }
        encodings.retain(|form| form.len() >= SECRET_BYTES);
        encodings
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[key]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_sent_and_redacted_in_each_encoding() {
        let header =
            |scheme| Secret::new("admin:s3cret").sent_as(scheme).header().unwrap().to_str().unwrap().to_owned();
        assert_eq!(header(AuthScheme::Bearer), "Bearer admin:s3cret");
        assert_eq!(header(AuthScheme::ApiKey), "ApiKey admin:s3cret");
        // `printf admin:s3cret | base64`
        assert_eq!(header(AuthScheme::Basic), "Basic YWRtaW46czNjcmV0");
        let basic = |key: &str| Secret::new(key).sent_as(AuthScheme::Basic);
        assert_eq!(basic("admin:s3cret").hide_in("YWRtaW46czNjcmV0, admin:s3cret, admin"), "[key], [key], admin");
        assert_eq!(basic("admin:long-s3cret").hide_in("wrong password long-s3cret"), "wrong password [key]");
        assert!(Secret::new("a\nb").header().is_err());
    }

    /// Regression: with the key `1` or `token`, numbers and words of responses were redacted.
    #[test]
    fn a_short_key_is_not_redacted() {
        assert_eq!(Secret::new("token").hide_in("completion_tokens"), "completion_tokens");
        assert_eq!(Secret::new("1").sent_as(AuthScheme::Basic).hide_in("1 MQ=="), "1 MQ==");
        let mut body = serde_json::json!({"a sk-long-key": ["quoted \"sk-long-key\"", 1, null]});
        Secret::new("sk-long-key").hide_in_value(&mut body);
        assert_eq!(body, serde_json::json!({"a [key]": ["quoted \"[key]\"", 1, null]}));
    }

    #[test]
    fn a_key_file_takes_precedence_over_the_environment() {
        let (_folder, path) = crate::scratch_file("key");
        let services = ServiceContext::default();
        let open = || Secret::open(&services, "teacher", Some(&path), "QUERL_NO_SUCH_KEY").map(|key| key.unwrap().key);
        let message = |result: Result<String, DataError>| result.unwrap_err().to_string();
        assert!(message(open()).starts_with("teacher.api_key_file is `"), "{}", message(open()));
        std::fs::write(&path, "\n").unwrap();
        assert!(message(open()).ends_with("which is empty; put the key into it"), "{}", message(open()));
        std::fs::write(&path, "sk-1\n").unwrap();
        assert_eq!(open().unwrap(), "sk-1");
        assert!(Secret::open(&services.without_keys(), "teacher", None, "QUERL_NO_SUCH_KEY").unwrap().is_none());
    }
}
