//! Watches a folder for saves by polling modification times: a plugin's folder is small, and polling works on every file system.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Interval between two scans.
const POLL: Duration = Duration::from_millis(30);

/// Folders that are not watched, in addition to hidden ones, because builds and tests write to them.
const NOT_WATCHED: [&str; 5] = ["dist", "node_modules", "target", "venv", "__pycache__"];

/// The files of a folder, each with size and modification time.
#[derive(Debug, PartialEq)]
pub(super) struct Files(BTreeMap<PathBuf, (u64, SystemTime)>);

/// One or more files that were saved together.
#[derive(Debug)]
pub(super) struct Save {
    /// Modification time of the file written last.
    pub(super) at: SystemTime,
    /// Paths of the written and removed files, relative to the folder.
    pub(super) files: Vec<PathBuf>,
}

impl Files {
    pub(super) fn of(folder: &Path) -> Self {
        let mut files = BTreeMap::new();
        add(folder, &mut files);
        Self(files)
    }

    /// Changes since an earlier scan of `folder`; `None` if there are none.
    fn since(&self, earlier: &Self, folder: &Path) -> Option<Save> {
        let written = self.0.iter().filter(|(path, file)| earlier.0.get(*path) != Some(*file));
        let (mut at, mut files) = (SystemTime::UNIX_EPOCH, Vec::new());
        for (path, (_, time)) in written {
            at = at.max(*time);
            files.push(path);
        }
        let removed = earlier.0.keys().filter(|path| !self.0.contains_key(*path));
        files.extend(removed);
        let relative = |path: &&PathBuf| path.strip_prefix(folder).unwrap_or(path).to_owned();
        let at = if at == SystemTime::UNIX_EPOCH { SystemTime::now() } else { at };
        (!files.is_empty()).then(|| Save { at, files: files.iter().map(relative).collect() })
    }
}

fn add(folder: &Path, files: &mut BTreeMap<PathBuf, (u64, SystemTime)>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let Ok(metadata) = entry.metadata() else { continue };
        if name.starts_with('.') || name.ends_with('~') {
            continue;
        }
        if metadata.is_dir() {
            if !NOT_WATCHED.contains(&&*name) {
                add(&entry.path(), files);
            }
        } else if let Ok(time) = metadata.modified() {
            files.insert(entry.path(), (metadata.len(), time));
        }
    }
}

/// Calls `saved` for each save in `folder` after the state `known`, until it returns false. A save is complete when two scans find the same
/// state, so that an editor that truncates a file before it writes it, or writes several files, causes one save.
pub(super) fn watch(folder: &Path, mut known: Files, mut saved: impl FnMut(Save) -> bool) {
    let mut last = Files::of(folder);
    loop {
        if let Some(save) = last.since(&known, folder) {
            let again = Files::of(folder);
            if again == last {
                known = again;
                if !saved(save) {
                    return;
                }
            }
        }
        std::thread::sleep(POLL);
        last = Files::of(folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_and_removed_sources_are_found_and_outputs_of_builds_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("plugin.py", "a");
        put("old.py", "a");
        let before = Files::of(folder.path());
        assert!(before.since(&Files::of(folder.path()), folder.path()).is_none());
        for output in
            ["dist/x.wasm", "target/x", "node_modules/x/index.js", "__pycache__/x", ".venv/x", ".plugin.py.swp"]
        {
            put(output, "b");
        }
        assert!(Files::of(folder.path()).since(&before, folder.path()).is_none());
        put("plugin.py", "ab");
        std::fs::remove_file(folder.path().join("old.py")).unwrap();
        let save = Files::of(folder.path()).since(&before, folder.path()).unwrap();
        assert_eq!(save.files, ["plugin.py", "old.py"].map(PathBuf::from));
    }
}
