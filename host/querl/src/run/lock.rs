//! One process per run folder.

use anyhow::Context;
use querl_core::run_dir::RunDir;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};

/// Holds a run folder until dropped, or until the process ends in whatever way.
#[derive(Debug)]
pub struct DirLock {
    _file: File,
}

/// Takes the folder, which is made where it is missing.
///
/// # Errors
/// Another process holds it, or the file system refuses.
pub fn take(dir: &RunDir) -> anyhow::Result<DirLock> {
    let root = dir.root().display();
    std::fs::create_dir_all(dir.root()).with_context(|| format!("{root}: cannot be made"))?;
    let path = dir.root().join(".in-use");
    let unusable = || format!("{}: cannot be used", path.display());
    let mut file =
        OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path).with_context(unusable)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            // Only a hint: without it the sentence is still true.
            let _ = file.read_to_string(&mut holder);
            anyhow::bail!(
                "{root} is in use by another querl (process {}); wait for it, or choose another --out",
                holder.trim()
            );
        }
        Err(TryLockError::Error(error)) => return Err(error).with_context(unusable),
    }
    file.set_len(0).and_then(|()| file.rewind()).with_context(unusable)?;
    writeln!(file, "{}", std::process::id()).with_context(unusable)?;
    Ok(DirLock { _file: file })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_in_use_is_refused_until_it_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let dir = RunDir::new(folder.path().join("run"));
        let held = take(&dir).unwrap();
        let refusal = take(&dir).unwrap_err().to_string();
        assert!(refusal.contains(&format!("in use by another querl (process {})", std::process::id())), "{refusal}");
        drop(held);
        take(&dir).unwrap();
    }
}
