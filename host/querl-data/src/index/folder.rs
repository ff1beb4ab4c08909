//! Where an index is kept: whole under its digest, or not at all.

use super::manifest;
use crate::error::DataError;
use querl_core::fsx::user_cache_folder;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// How the folder of an index begins while it is built.
const UNFINISHED: &str = ".building-";
/// How the folder of a damaged index begins until it is removed.
const DAMAGED: &str = ".damaged-";
/// A folder of either kind that is older was left behind by a process that was killed.
const LONGEST_BUILD: Duration = Duration::from_secs(7 * 24 * 3600);

/// Where indexes are kept.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// `None` for the user's cache folder.
    pub(super) base: Option<PathBuf>,
    /// Building one more removes those that were not used for the longest time.
    pub(super) n_kept: usize,
}

/// A finished index.
#[derive(Debug)]
pub(super) enum IndexFolder {
    /// In the cache, for the next process too.
    Kept(PathBuf),
    /// Where no cache can be written: it goes with the process.
    Temporary(TempDir),
}

impl IndexFolder {
    /// The index of this digest, built where it is not there or is damaged. Of several processes that want the same one, one builds
    /// and the others wait for it.
    ///
    /// # Errors
    /// As `build`, or no folder can be made at all.
    pub(super) fn open(
        place: &Place,
        digest: &str,
        build: impl Fn(&Path) -> Result<(), DataError>,
    ) -> Result<Self, DataError> {
        let own = place.base.clone().or_else(|| Some(user_cache_folder()?.join("indexes")));
        let Some(base) = own else { return Self::temporary(build) };
        let kept = base.join(digest);
        if is_usable(&kept) {
            return Ok(Self::Kept(kept));
        }
        if let Err(error) = std::fs::create_dir_all(&base) {
            tracing::warn!("the index is not kept: {}: {error}", base.display());
            return Self::temporary(build);
        }
        // Held until the end: whoever waited finds it finished.
        let _lock = lock(&base.join(format!("{digest}.lock")));
        if is_usable(&kept) {
            return Ok(Self::Kept(kept));
        }
        let new = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(&base);
        let Ok(new) = new else {
            tracing::warn!("the index is not kept: {} cannot be written", base.display());
            return Self::temporary(build);
        };
        build(new.path())?;
        manifest::write(new.path()).map_err(|error| DataError::write(new.path(), error))?;
        Ok(put(new, kept, place.n_kept))
    }

    fn temporary(build: impl Fn(&Path) -> Result<(), DataError>) -> Result<Self, DataError> {
        let folder = tempfile::tempdir().map_err(|error| DataError::write(&std::env::temp_dir(), error))?;
        build(folder.path())?;
        Ok(Self::Temporary(folder))
    }

    /// Where the index is.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Kept(path) => path,
            Self::Temporary(folder) => folder.path(),
        }
    }
}

/// Whether the index is there and whole; one that is counts as used from now on.
fn is_usable(kept: &Path) -> bool {
    // Before its bytes are read, so that no other process takes it for the oldest meanwhile.
    manifest::touch(kept);
    match manifest::check(kept) {
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

/// Puts a finished folder in its place.
fn put(new: TempDir, kept: PathBuf, n_kept: usize) -> IndexFolder {
    let base = kept.parent().unwrap_or(Path::new("."));
    if kept.exists() {
        // Without locks another process may have been quicker, and have it open by now; theirs is as good.
        if is_usable(&kept) {
            return IndexFolder::Kept(kept);
        }
        set_aside(&kept, base);
    }
    if std::fs::rename(new.path(), &kept).is_ok() {
        let _ = new.keep();
        prune(base, &kept, n_kept);
        return IndexFolder::Kept(kept);
    }
    // Or quicker by a moment.
    if is_usable(&kept) { IndexFolder::Kept(kept) } else { IndexFolder::Temporary(new) }
}

/// By a rename, so that no other process sees half of it, or loses what it has just put there.
fn set_aside(damaged: &Path, base: &Path) {
    if let Ok(aside) = tempfile::Builder::new().prefix(DAMAGED).tempdir_in(base) {
        // The folder that comes with the name is empty: a rename takes its place. It is removed with what it holds.
        let _ = std::fs::rename(damaged, aside.path());
    }
}

/// Removes the indexes beyond `n_kept` that were not used for the longest time, and what killed processes left. A process that has
/// one open keeps what it has mapped. Nothing else in the folder is touched.
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
        others.filter(|path| path != newest).filter_map(|path| Some((manifest::used_at(&path)?, path))).collect();
    others.sort_by_key(|(used_at, _)| std::cmp::Reverse(*used_at));
    for (_, path) in others.into_iter().skip(n_kept.saturating_sub(1)) {
        let _ = std::fs::remove_dir_all(&path);
        let _ = std::fs::remove_file(path.with_extension("lock"));
    }
}
