//! Keys of services: read from the environment or from a file, and shown nowhere.

use crate::error::DataError;
use std::path::Path;

/// A key that no message shows.
#[derive(Clone)]
pub(crate) struct Secret(String);

impl Secret {
    /// The key in a file, where one is named, else in an environment variable; `None` where `variable` is empty, for services
    /// that want no key. `section` is whose keys of the configuration name them.
    ///
    /// # Errors
    /// The file cannot be read or is empty, or the variable is not set.
    pub(crate) fn open(section: &str, file: Option<&Path>, variable: &str) -> Result<Option<Self>, DataError> {
        match file {
            Some(path) => Self::from_file(section, path).map(Some),
            None if variable.is_empty() => Ok(None),
            None => Self::from_env(section, variable).map(Some),
        }
    }

    fn from_file(section: &str, path: &Path) -> Result<Self, DataError> {
        let setting = |problem: String| DataError::setting(format!("{section}.api_key_file"), problem);
        let text = std::fs::read_to_string(path)
            .map_err(|error| setting(format!("is `{}`, which cannot be read: {error}", path.display())))?;
        match text.trim() {
            "" => Err(setting(format!("is `{}`, which is empty; put the key into it", path.display()))),
            key => Ok(Self(key.to_owned())),
        }
    }

    fn from_env(section: &str, variable: &str) -> Result<Self, DataError> {
        match std::env::var(variable) {
            Ok(value) if !value.trim().is_empty() => Ok(Self(value.trim().to_owned())),
            _ => Err(DataError::setting(
                format!("{section}.api_key_env"),
                format!(
                    "names the environment variable `{variable}`, which is not set; export it, or name none (\"\") for a service without keys"
                ),
            )),
        }
    }

    #[cfg(test)]
    pub(crate) fn new(key: &str) -> Self {
        Self(key.to_owned())
    }

    /// The key itself, for a request's header.
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }

    /// `text` without the key.
    pub(super) fn hide_in(&self, text: &str) -> String {
        text.replace(&self.0, "[key]")
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[key]")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn key_in_a_file_is_used_before_the_environment() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let open = || Secret::open("teacher", Some(&path), "QUERL_NO_SUCH_KEY").map(|key| key.unwrap().0);
        let said = |result: Result<String, DataError>| result.unwrap_err().to_string();
        assert!(said(open()).starts_with("teacher.api_key_file is `"), "{}", said(open()));
        std::fs::write(&path, "\n").unwrap();
        assert!(said(open()).ends_with("which is empty; put the key into it"), "{}", said(open()));
        std::fs::write(&path, "sk-1\n").unwrap();
        assert_eq!(open().unwrap(), "sk-1");
    }
}
