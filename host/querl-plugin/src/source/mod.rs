//! Plugins given as a source folder, built when a source is newer than the component.

mod folder;
mod javascript;
mod python;
mod rust;

use crate::error::PluginError;
use folder::{Build, unreadable};
use querl_bundle::{Language, Manifest};
use std::path::{Path, PathBuf};

/// The result of [`build`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildOutput {
    /// The component.
    pub component: PathBuf,
    /// The language of the source.
    pub language: Language,
    /// False where the component was up to date.
    pub was_stale: bool,
}

/// The component of a source folder, built if one of its sources is newer.
///
/// # Errors
/// The language is unknown, its tools are missing, or the build fails.
pub fn build(folder: &Path) -> Result<BuildOutput, PluginError> {
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
    Ok(BuildOutput { component: source.component(), language, was_stale })
}

pub(crate) fn component(folder: &Path) -> Result<PathBuf, PluginError> {
    Ok(build(folder)?.component)
}

/// The language of plugin.toml, else by the build file in the folder.
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
