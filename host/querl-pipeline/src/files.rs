//! Files with the errors that name them, and those of folders that are written for other machines: deployments and exports.

use anyhow::Context;
use querl_core::fsx;
use serde::Serialize;
use std::path::Path;

/// Names of the files directly in a folder, sorted.
pub(crate) fn files(folder: &Path, wanted: impl Fn(&str) -> bool) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| unreadable(folder))? {
        let path = entry.with_context(|| unreadable(folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_file() && wanted(&name) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Copies a file and creates its folder. Returns its size in bytes.
pub(crate) fn copy(from: &Path, to: &Path) -> anyhow::Result<u64> {
    let folder = to.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(folder).with_context(|| unwritable(folder))?;
    std::fs::copy(from, to).with_context(|| format!("{}: cannot be copied to {}", from.display(), to.display()))
}

pub(crate) fn write_text(path: &Path, text: &str) -> anyhow::Result<()> {
    fsx::write_atomic(path, text.as_bytes()).with_context(|| unwritable(path))
}

/// Writes a value as indented JSON with a line break at the end.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    fsx::write_json(path, value).with_context(|| unwritable(path))
}

pub(crate) fn unreadable(path: &Path) -> String {
    format!("{}: cannot be read", path.display())
}

pub(crate) fn unwritable(path: &Path) -> String {
    format!("{}: cannot be written", path.display())
}
