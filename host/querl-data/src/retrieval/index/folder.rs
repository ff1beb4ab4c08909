//! The cache folder of indexes: each is complete under its digest, with a manifest of checksums, or absent.

use crate::error::DataError;
use querl_core::fsx::{digest_file, user_cache_folder, write_atomic};
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

/// How the folder of an index begins while it is built.
const UNFINISHED: &str = ".building-";
/// How the folder of a damaged index begins until it is removed.
const DAMAGED: &str = ".damaged-";
/// A folder of either kind that is older was left behind by a process that was killed.
const LONGEST_BUILD: Duration = Duration::from_secs(7 * 24 * 3600);

#[derive(Debug, Clone)]
pub(super) struct IndexCacheSettings {
    /// `None` for the user's cache folder.
    pub(super) base: Option<PathBuf>,
    /// Building one more removes those that were not used for the longest time.
    pub(super) n_kept: usize,
}

#[derive(Debug)]
pub(super) enum IndexFolder {
    Cached(PathBuf),
    Temporary(TempDir),
}

impl IndexFolder {
    /// The index of this digest, built where it is not there or is damaged. Of several processes that want the same one, one builds
    /// and the others wait for it.
    pub(super) fn open(
        place: &IndexCacheSettings,
        digest: &str,
        build: impl Fn(&Path) -> Result<(), DataError>,
    ) -> Result<Self, DataError> {
        let own = place.base.clone().or_else(|| Some(user_cache_folder()?.join("indexes")));
        let Some(base) = own else { return Self::temporary(build) };
        let kept = base.join(digest);
        if is_usable(&kept) {
            return Ok(Self::Cached(kept));
        }
        if let Err(error) = std::fs::create_dir_all(&base) {
            tracing::warn!("the index is not kept: {}: {error}", base.display());
            return Self::temporary(build);
        }
        // Held until the end, so that waiting processes find a finished index.
        let _lock = lock(&base.join(format!("{digest}.lock")));
        if is_usable(&kept) {
            return Ok(Self::Cached(kept));
        }
        let new = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(&base);
        let Ok(new) = new else {
            tracing::warn!("the index is not kept: {} cannot be written", base.display());
            return Self::temporary(build);
        };
        build(new.path())?;
        write_manifest(new.path()).map_err(|error| DataError::write(new.path(), error))?;
        Ok(put(new, kept, place.n_kept))
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

/// Whether the index is there and whole; one that is counts as used from now on.
fn is_usable(kept: &Path) -> bool {
    // Before its bytes are read, so that no other process takes it for the oldest meanwhile.
    touch(kept);
    match check_manifest(kept) {
        Ok(is_there) => is_there,
        Err(problem) => {
            tracing::warn!("{}: {problem}; it is built again", kept.display());
            false
        }
    }
}

/// Waits for its turn. Where files cannot be locked there is no waiting: two processes then do the same work twice.
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

fn put(new: TempDir, kept: PathBuf, n_kept: usize) -> IndexFolder {
    let base = kept.parent().unwrap_or(Path::new("."));
    if kept.exists() {
        // Without locks another process may have been quicker, and have it open by now; theirs is as good.
        if is_usable(&kept) {
            return IndexFolder::Cached(kept);
        }
        set_aside(&kept, base);
    }
    if std::fs::rename(new.path(), &kept).is_ok() {
        let _ = new.keep();
        prune(base, &kept, n_kept);
        return IndexFolder::Cached(kept);
    }
    // Or quicker by a moment.
    if is_usable(&kept) { IndexFolder::Cached(kept) } else { IndexFolder::Temporary(new) }
}

/// By a rename, so that no other process sees half of it, or loses what it has just put there.
fn set_aside(damaged: &Path, base: &Path) {
    if let Ok(aside) = tempfile::Builder::new().prefix(DAMAGED).tempdir_in(base) {
        // The folder that comes with the name is empty: a rename takes its place. It is removed with what it holds.
        let _ = std::fs::rename(damaged, aside.path());
    }
}

/// Removes the indexes beyond `n_kept` that were not used for the longest time, and what killed processes left. A process that has
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

/// What [`MANIFEST`] holds.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    files: BTreeMap<String, String>,
}

/// Lists the files of a folder. It is the last that is written: a folder with a list was finished.
fn write_manifest(folder: &Path) -> io::Result<()> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name().to_string_lossy().into_owned()))?;
        // Locks, of no content, are made again whenever one is taken.
        if !name.ends_with(".lock") {
            files.insert(name, digest_file(&path)?);
        }
    }
    write_atomic(&manifest_path(folder), &serde_json::to_vec(&Manifest { files })?)
}

/// Reads every byte of a folder's files once. False where there is no such folder.
fn check_manifest(folder: &Path) -> Result<bool, String> {
    let text = match std::fs::read(manifest_path(folder)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound && !folder.exists() => return Ok(false),
        Err(error) => return Err(format!("{MANIFEST} cannot be read: {error}")),
    };
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|error| format!("{MANIFEST} is damaged: {error}"))?;
    for (name, digest) in &manifest.files {
        match digest_file(&folder.join(name)) {
            Ok(found) if found == *digest => {}
            Ok(_) => return Err(format!("{name} is damaged")),
            Err(error) => return Err(format!("{name} cannot be read: {error}")),
        }
    }
    Ok(true)
}

fn touch(folder: &Path) {
    let file = File::options().append(true).open(manifest_path(folder));
    let _ = file.and_then(|file| file.set_modified(SystemTime::now()));
}

/// When an index was used last; `None` for a folder that is no index.
fn used_at(folder: &Path) -> Option<SystemTime> {
    // Earlier forms had no list.
    manifest_path(folder).metadata().or_else(|_| folder.join("meta.json").metadata()).ok()?.modified().ok()
}

fn manifest_path(folder: &Path) -> PathBuf {
    folder.join(MANIFEST)
}

/// Mapped into memory, without the lock files that tantivy makes to read an index that others write to: a cache that cannot be written
/// can be read all the same.
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
