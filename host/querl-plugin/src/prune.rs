//! Keeps the folder of compiled code from growing for ever: each build of a Python plugin adds 43 MB.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// All compiled code together, about 45 Python components.
pub(crate) const MAX_BYTES: u64 = 2 << 30;

/// A folder in which a compiler worked is gone when it is done; an older one is of a host that was killed.
const MAX_COMPILING: Duration = Duration::from_hours(24);

/// Says that a file is in use: those used last are kept longest. That this may fail is no matter.
pub(crate) fn touch(path: &Path) {
    let _ = std::fs::File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
}

/// Removes the files used longest ago, but not `newest`, until those left have at most `max_bytes`. A host that has one mapped
/// keeps it. What cannot be removed stays.
pub(crate) fn prune(folder: &Path, newest: &Path, max_bytes: u64) {
    if let Err(error) = try_prune(folder, newest, max_bytes) {
        tracing::debug!("{}: not pruned: {error}", folder.display());
    }
}

fn try_prune(folder: &Path, newest: &Path, max_bytes: u64) -> io::Result<()> {
    let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(metadata) = entry.metadata() else { continue };
        let modified = metadata.modified()?;
        if metadata.is_file() {
            files.push((modified, metadata.len(), entry.path()));
        } else if metadata.is_dir() && modified.elapsed().is_ok_and(|age| age > MAX_COMPILING) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    files.sort();
    let mut n_bytes: u64 = files.iter().map(|(_, n_bytes, _)| n_bytes).sum();
    for (_, size, path) in files.into_iter().filter(|(_, _, path)| path != newest) {
        if n_bytes <= max_bytes {
            break;
        }
        if std::fs::remove_file(&path).is_ok() {
            n_bytes -= size;
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_used_longest_ago_go_first_and_the_newest_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for (name, age_s) in [("a", 30), ("b", 20), ("c", 10), ("new", 40)] {
            std::fs::write(path(name), [0; 100]).unwrap();
            let modified = SystemTime::now() - Duration::from_secs(age_s);
            std::fs::File::options().append(true).open(path(name)).unwrap().set_modified(modified).unwrap();
        }
        prune(folder.path(), &path("new"), 400);
        assert_eq!(names(folder.path()), ["a", "b", "c", "new"]);
        touch(&path("a"));
        prune(folder.path(), &path("new"), 250);
        assert_eq!(names(folder.path()), ["a", "new"]);
        prune(folder.path(), &path("new"), 0);
        assert_eq!(names(folder.path()), ["new"]);
    }

    #[test]
    fn folder_of_a_host_that_was_killed_goes_and_one_at_work_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["compiling-old", "compiling-now"] {
            std::fs::create_dir(path(name)).unwrap();
            std::fs::write(path(name).join("component.wasm"), "x").unwrap();
        }
        let long_ago = SystemTime::now() - MAX_COMPILING - Duration::from_secs(60);
        std::fs::File::open(path("compiling-old")).unwrap().set_modified(long_ago).unwrap();
        prune(folder.path(), &path("none"), 0);
        assert_eq!(names(folder.path()), ["compiling-now"]);
    }
}
