//! Plugins given as a folder with source: built when a source is newer than the component.

mod javascript;
mod python;
mod rust;
mod script;

use crate::error::PluginError;
use querl_bundle::{Language, Manifest};
use std::path::{Path, PathBuf};

/// What `build` found or made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Built {
    /// The component.
    pub component: PathBuf,
    /// What the source is written in.
    pub language: Language,
    /// Whether anything had to be built.
    pub was_stale: bool,
}

/// A folder of one language whose component can be looked up and made.
trait Build {
    /// Where the component is, or will be.
    fn component(&self) -> PathBuf;
    /// Nothing that the component was made from is newer.
    fn is_fresh(&self) -> bool;
    /// Makes the component.
    fn build(&self) -> Result<(), PluginError>;
}

/// The component of a source folder, built if any file that it was made from is newer.
///
/// # Errors
/// The language is not to be seen, its tools are missing, or the source does not build.
pub fn build(folder: &Path) -> Result<Built, PluginError> {
    let language = language(folder)?;
    let source: Box<dyn Build> = match language {
        Language::Rust => Box::new(rust::CrateFolder::read(folder)?),
        Language::Python => Box::new(python::PythonFolder::read(folder)?),
        Language::JavaScript => Box::new(javascript::JavaScriptFolder::read(folder)?),
    };
    let was_stale = !source.is_fresh();
    if was_stale {
        tracing::info!("building plugin {}", folder.display());
        source.build()?;
    }
    Ok(Built { component: source.component(), language, was_stale })
}

/// The component of a source folder, as [`build`].
pub(crate) fn component(folder: &Path) -> Result<PathBuf, PluginError> {
    Ok(build(folder)?.component)
}

/// What plugin.toml says, else what the build files in the folder say.
fn language(folder: &Path) -> Result<Language, PluginError> {
    if folder.join("plugin.toml").is_file()
        && let Some(build) = Manifest::read(folder)?.build
    {
        return Ok(build.language);
    }
    Language::of_folder(folder).ok_or_else(|| {
        let reason = "the folder holds no Cargo.toml, pyproject.toml or package.json; expected a bundle, a `.wasm` component \
                      or a folder with Rust, Python or JavaScript source";
        unreadable(folder, reason)
    })
}

fn unreadable(path: &Path, reason: impl Into<String>) -> PluginError {
    PluginError::Unreadable { path: path.to_owned(), reason: reason.into() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn language_is_what_the_manifest_says_else_what_the_build_file_says() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let error = language(folder.path()).unwrap_err().to_string();
        assert!(error.contains("Rust, Python or JavaScript source"), "{error}");
        put("package.json", "{}");
        assert_eq!(language(folder.path()).unwrap(), Language::JavaScript);
        let manifest = "[plugin]\nid = 'x'\nversion = '0.1.0'\ncontract = '0.1.0'\nkinds = ['filter']\ndescription = 'x'\n\
                        license = 'MIT'\n[build]\nlanguage = 'python'\n";
        put("plugin.toml", manifest);
        assert_eq!(language(folder.path()).unwrap(), Language::Python);
    }
}
