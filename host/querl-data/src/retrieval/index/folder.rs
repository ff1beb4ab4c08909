//! Cache of indexes on disk: an index is either complete in a folder named by its digest, with a manifest of checksums, or absent.

use crate::error::DataError;
use querl_core::fsx::{digest_file, io_problem, user_cache_folder, write_atomic};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tantivy::Directory;
use tantivy::directory::error::{DeleteError, LockError, OpenDirectoryError, OpenReadError, OpenWriteError};
use tantivy::directory::{DirectoryLock, FileHandle, Lock, MmapDirectory, WatchCallback, WatchHandle, WritePtr};
use tempfile::TempDir;

/// Name prefix of the folder of an index while it is built.
const UNFINISHED: &str = ".building-";
/// Name prefix of the folder of a damaged index until it is removed.
const DAMAGED: &str = ".damaged-";
/// Maximum age of an unfinished or damaged index folder; older ones were left by killed processes and are removed.
const LONGEST_BUILD: Duration = Duration::from_secs(7 * 24 * 3600);

#[derive(Debug, Clone)]
pub(super) struct IndexCacheSettings {
    /// Folder of the index cache; `None` for the default in the user's cache folder.
    pub(super) base: Option<PathBuf>,
    /// Maximum number of indexes in the cache; the least recently used are removed.
    pub(super) n_kept: usize,
}

#[derive(Debug)]
pub(super) enum IndexFolder {
    Cached(PathBuf),
    Temporary(TempDir),
}

impl IndexFolder {
    /// Opens the index with this digest; builds it if it is missing or damaged. If several processes need it, one builds it and the
    /// others wait.
    pub(super) fn open(
        settings: &IndexCacheSettings,
        digest: &str,
        build: impl Fn(&Path) -> Result<(), DataError>,
    ) -> Result<Self, DataError> {
        let base = settings.base.clone().or_else(|| Some(user_cache_folder()?.join("indexes")));
        let Some(base) = base else { return Self::temporary(build) };
        let path = base.join(digest);
        if is_usable(&path) {
            return Ok(Self::Cached(path));
        }
        if let Err(error) = std::fs::create_dir_all(&base) {
            tracing::warn!("the index is not cached: {}: {}", base.display(), io_problem(&error));
            return Self::temporary(build);
        }
        // The lock is held until the index is finished, for processes that wait for it.
        let _lock = lock(&base.join(format!("{digest}.lock")));
        if is_usable(&path) {
            return Ok(Self::Cached(path));
        }
        let new = match tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(&base) {
            Ok(new) => new,
            Err(error) => {
                tracing::warn!("the index is not cached: {} cannot be written: {}", base.display(), io_problem(&error));
                return Self::temporary(build);
            }
        };
        build(new.path())?;
        write_manifest(new.path()).map_err(|error| DataError::write(new.path(), error))?;
        Ok(publish(new, path, settings.n_kept))
    }

    fn temporary(build: impl Fn(&Path) -> Result<(), DataError>) -> Result<Self, DataError> {
        let folder = tempfile::tempdir().map_err(|error| DataError::write(&std::env::temp_dir(), error))?;
        build(folder.path())?;
        Ok(Self::Temporary(folder))
    }

    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Cached(path) => path,
            Self::Temporary(folder) => folder.path(),
        }
    }
}

/// True if the index is complete and undamaged; marks it as used.
fn is_usable(path: &Path) -> bool {
    // Updated before reading, so that no other process removes it as the least recently used index.
    touch(path);
    match check_manifest(path) {
        Ok(exists) => exists,
        Err(problem) => {
            tracing::warn!("{}: {problem}; it is built again", path.display());
            false
        }
    }
}

/// Waits for a file lock. If the file system has no locks, two processes may build the same index.
fn lock(path: &Path) -> Option<File> {
    let file = File::options().create(true).append(true).open(path).ok()?;
    match file.try_lock() {
        Ok(()) => Some(file),
        Err(TryLockError::WouldBlock) => {
            tracing::info!("another process builds the index; waiting for it");
            file.lock().ok().map(|()| file)
        }
        Err(TryLockError::Error(_)) => None,
    }
}

fn publish(new: TempDir, path: PathBuf, n_kept: usize) -> IndexFolder {
    let base = path.parent().unwrap_or(Path::new("."));
    if path.exists() {
        // Without locks another process may have published the same index.
        if is_usable(&path) {
            return IndexFolder::Cached(path);
        }
        move_aside(&path, base);
    }
    if std::fs::rename(new.path(), &path).is_ok() {
        let _ = new.keep();
        prune(base, &path, n_kept);
        return IndexFolder::Cached(path);
    }
    // Another process may have published the index between check and rename.
    if is_usable(&path) { IndexFolder::Cached(path) } else { IndexFolder::Temporary(new) }
}

/// Renames the folder, so that no other process sees a partly removed index.
fn move_aside(damaged: &Path, base: &Path) {
    if let Ok(aside) = tempfile::Builder::new().prefix(DAMAGED).tempdir_in(base) {
        // The rename replaces the empty temporary folder, which is removed on drop.
        let _ = std::fs::rename(damaged, aside.path());
    }
}

/// Removes the least recently used indexes beyond `n_kept`, and folders that killed processes left.
fn prune(base: &Path, newest: &Path, n_kept: usize) {
    let names = std::fs::read_dir(base).into_iter().flatten().flatten();
    let names: Vec<String> = names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let left_behind = names.iter().filter(|name| name.starts_with(UNFINISHED) || name.starts_with(DAMAGED));
    for path in left_behind.map(|name| base.join(name)) {
        let changed = path.metadata().and_then(|metadata| metadata.modified());
        if changed.is_ok_and(|changed| changed.elapsed().is_ok_and(|age| age > LONGEST_BUILD)) {
            let _ = std::fs::remove_dir_all(path);
        }
    }
    let is_digest =
        |name: &&String| name.len() == 64 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let others = names.iter().filter(is_digest).map(|name| base.join(name));
    let mut others: Vec<(SystemTime, PathBuf)> =
        others.filter(|path| path != newest).filter_map(|path| Some((used_at(&path)?, path))).collect();
    others.sort_by_key(|(used_at, _)| std::cmp::Reverse(*used_at));
    for (_, path) in others.into_iter().skip(n_kept.saturating_sub(1)) {
        let _ = std::fs::remove_dir_all(&path);
        let _ = std::fs::remove_file(path.with_extension("lock"));
    }
}

const MANIFEST: &str = "files.json";

/// Content of [`MANIFEST`]: digests by file name.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    files: BTreeMap<String, String>,
}

/// Lists the files of a folder. Written last: a folder with a manifest is complete.
fn write_manifest(folder: &Path) -> io::Result<()> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name().to_string_lossy().into_owned()))?;
        // Empty lock files are created again when needed.
        if !name.ends_with(".lock") {
            files.insert(name, digest_file(&path)?);
        }
    }
    write_atomic(&manifest_path(folder), &serde_json::to_vec(&Manifest { files })?)
}

/// Checks the digests of all files. False if the folder does not exist.
fn check_manifest(folder: &Path) -> Result<bool, String> {
    let text = match std::fs::read(manifest_path(folder)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound && !folder.exists() => return Ok(false),
        Err(error) => return Err(format!("{MANIFEST} cannot be read: {}", io_problem(&error))),
    };
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|error| format!("{MANIFEST} is damaged: {error}"))?;
    for (name, digest) in &manifest.files {
        match digest_file(&folder.join(name)) {
            Ok(found) if found == *digest => {}
            Ok(_) => return Err(format!("{name} is damaged")),
            Err(error) => return Err(format!("{name} cannot be read: {}", io_problem(&error))),
        }
    }
    Ok(true)
}

fn touch(folder: &Path) {
    let file = File::options().append(true).open(manifest_path(folder));
    let _ = file.and_then(|file| file.set_modified(SystemTime::now()));
}

/// Time of last use; `None` for a folder that is not an index.
fn used_at(folder: &Path) -> Option<SystemTime> {
    // Earlier formats had no manifest.
    manifest_path(folder).metadata().or_else(|_| folder.join("meta.json").metadata()).ok()?.modified().ok()
}

fn manifest_path(folder: &Path) -> PathBuf {
    folder.join(MANIFEST)
}

/// A memory-mapped tantivy directory without lock files, so that a read-only index cache can be used.
#[derive(Debug, Clone)]
pub(super) struct ReadOnlyDirectory(MmapDirectory);

impl ReadOnlyDirectory {
    pub(super) fn open(folder: &Path) -> Result<Self, OpenDirectoryError> {
        MmapDirectory::open(folder).map(Self)
    }
}

fn refused() -> io::Error {
    io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "a finished index is not written to")
}

impl Directory for ReadOnlyDirectory {
    fn get_file_handle(&self, path: &Path) -> Result<Arc<dyn FileHandle>, OpenReadError> {
        self.0.get_file_handle(path)
    }

    fn delete(&self, path: &Path) -> Result<(), DeleteError> {
        Err(DeleteError::IoError { io_error: Arc::new(refused()), filepath: path.to_owned() })
    }

    fn exists(&self, path: &Path) -> Result<bool, OpenReadError> {
        self.0.exists(path)
    }

    fn open_write(&self, path: &Path) -> Result<WritePtr, OpenWriteError> {
        Err(OpenWriteError::wrap_io_error(refused(), path.to_owned()))
    }

    fn atomic_read(&self, path: &Path) -> Result<Vec<u8>, OpenReadError> {
        self.0.atomic_read(path)
    }

    fn atomic_write(&self, _path: &Path, _data: &[u8]) -> io::Result<()> {
        Err(refused())
    }

    fn sync_directory(&self) -> io::Result<()> {
        Ok(())
    }

    fn acquire_lock(&self, _lock: &Lock) -> Result<DirectoryLock, LockError> {
        Ok(DirectoryLock::from(Box::new(())))
    }

    fn watch(&self, _callback: WatchCallback) -> tantivy::Result<WatchHandle> {
        Ok(WatchHandle::empty())
    }
}
