//! Plugins given as a source folder, built when a source is newer than the component.

mod folder;
mod javascript;
mod native;
mod python;
mod rust;

use crate::error::PluginError;
use folder::{Build, unreadable};
pub use javascript::PACKAGES as JAVASCRIPT_PACKAGES;
pub use native::NativeFolder;
pub use python::TOOL as COMPONENTIZE_PY;
use querl_bundle::{Language, Manifest};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The result of [`build`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildOutput {
    /// Path of the component.
    pub component: PathBuf,
    /// The language of the source.
    pub language: Language,
    /// True if the component was built by this call, false if it was up to date.
    pub was_stale: bool,
}

/// What a host does with a source folder whose component is missing or older than its source. A build runs code of the folder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SourceFolders {
    /// The folder is built.
    #[default]
    Build,
    /// Loading the folder is an error.
    Refuse,
}

/// The path of the component of a source folder, which is built first if one of its sources is newer.
///
/// # Errors
/// The folder has the name of a bundle or a component, the language is unknown, its tools are missing, or the build fails.
pub fn build(folder: &Path) -> Result<BuildOutput, PluginError> {
    check_folder_name(folder)?;
    let language = language(folder)?;
    let source = open(folder, language)?;
    let was_stale = !source.is_fresh();
    if was_stale {
        let started = Instant::now();
        tracing::info!("building plugin {} ({})", folder.display(), duration_note(language));
        source.build()?;
        tracing::info!("built plugin {} in {:.0} s", folder.display(), started.elapsed().as_secs_f64());
    }
    Ok(BuildOutput { component: source.component(), language, was_stale })
}

/// A note on the build of a plugin and its duration, because nothing else is printed meanwhile.
fn duration_note(language: Language) -> &'static str {
    match language {
        Language::Rust => "cargo build, takes minutes the first time",
        Language::Python => "componentize-py, takes seconds",
        Language::JavaScript => "componentize-js, takes seconds",
    }
}

/// The path of the component of a source folder; `None` if it is missing or older than its source.
pub(crate) fn built(folder: &Path) -> Result<Option<PathBuf>, PluginError> {
    let source = open(folder, language(folder)?)?;
    Ok(source.is_fresh().then(|| source.component()))
}

/// Refuses a folder whose name ends like a bundle or a component: a user who names one does not expect that a build runs its
/// code.
pub(crate) fn check_folder_name(folder: &Path) -> Result<(), PluginError> {
    let names = [Some(folder.to_owned()), folder.canonicalize().ok()];
    let extension = |path: &PathBuf| Some(path.extension()?.to_str()?.to_ascii_lowercase());
    match names.iter().flatten().filter_map(extension).find(|extension| ["querl", "wasm"].contains(&extension.as_str()))
    {
        Some(extension) => Err(unreadable(
            folder,
            format!(
                "it is a folder with the name of a `.{extension}` file; expected a file, or a source folder with another name"
            ),
        )),
        None => Ok(()),
    }
}

fn open(folder: &Path, language: Language) -> Result<Box<dyn Build>, PluginError> {
    Ok(match language {
        Language::Rust => Box::new(rust::CrateFolder::read(folder)?),
        Language::Python => Box::new(python::PythonFolder::read(folder)?),
        Language::JavaScript => Box::new(javascript::JavaScriptFolder::read(folder)?),
    })
}

/// The language in plugin.toml; else determined by the build file in the folder.
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
