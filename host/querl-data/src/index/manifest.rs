//! Which files a finished index has, with their sums; and when it was used last.

use querl_core::fsx::{digest_file, write_atomic};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const FILE: &str = "files.json";

/// What [`FILE`] holds.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    /// SHA-256 of each file's content by its name.
    files: BTreeMap<String, String>,
}

/// Lists the files of a folder. It is the last that is written: a folder with a list was finished.
///
/// # Errors
/// A file cannot be read, or the list not be written.
pub(super) fn write(folder: &Path) -> io::Result<()> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name().to_string_lossy().into_owned()))?;
        // Locks, of no content, are made again whenever one is taken.
        if !name.ends_with(".lock") {
            files.insert(name, digest_file(&path)?);
        }
    }
    write_atomic(&path(folder), &serde_json::to_vec(&Manifest { files })?)
}

/// Reads every byte of a folder's files once. False where there is no such folder.
///
/// # Errors
/// What is missing or damaged.
pub(super) fn check(folder: &Path) -> Result<bool, String> {
    let text = match std::fs::read(path(folder)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound && !folder.exists() => return Ok(false),
        Err(error) => return Err(format!("{FILE} cannot be read: {error}")),
    };
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| format!("{FILE} is damaged: {error}"))?;
    for (name, digest) in &manifest.files {
        match digest_file(&folder.join(name)) {
            Ok(found) if found == *digest => {}
            Ok(_) => return Err(format!("{name} is damaged")),
            Err(error) => return Err(format!("{name} cannot be read: {error}")),
        }
    }
    Ok(true)
}

/// Notes that an index is used now, where its folder can be written.
pub(super) fn touch(folder: &Path) {
    let file = File::options().append(true).open(path(folder));
    let _ = file.and_then(|file| file.set_modified(SystemTime::now()));
}

/// When an index was used last; `None` for a folder that is no index.
pub(super) fn used_at(folder: &Path) -> Option<SystemTime> {
    // Earlier forms had no list.
    path(folder).metadata().or_else(|_| folder.join("meta.json").metadata()).ok()?.modified().ok()
}

fn path(folder: &Path) -> PathBuf {
    folder.join(FILE)
}
