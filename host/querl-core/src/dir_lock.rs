//! Lock file that admits one process per output folder.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::time::Duration;

/// Name of the lock file in the locked folder.
const LOCK_FILE: &str = ".in-use";

/// Lock on a folder, held until it is dropped or the process ends, also by a crash.
#[derive(Debug)]
pub struct DirLock {
    _file: File,
}

/// Errors of locking a folder. `holder` is a process id, empty if unknown.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DirLockError {
    #[error("{folder} is in use by another querl (process {holder}); wait for it, or choose another --out")]
    InUse { folder: String, holder: String },
    #[error("{path}: {problem}; choose another folder, or change its permissions")]
    Io { path: String, problem: &'static str, source: io::Error },
}

impl DirLock {
    /// Locks the folder `root`; creates it if it does not exist.
    ///
    /// # Errors
    /// Another process holds the lock, or the file system failed.
    pub fn take(root: &Path) -> Result<Self, DirLockError> {
        let failed = |path: &Path, problem| {
            let path = path.display().to_string();
            move |source| DirLockError::Io { path, problem, source }
        };
        std::fs::create_dir_all(root).map_err(failed(root, "cannot be made"))?;
        let path = root.join(LOCK_FILE);
        let unusable = || failed(&path, "cannot be used");
        let mut options = OpenOptions::new();
        let mut file = options.create(true).truncate(false).read(true).write(true).open(&path).map_err(unusable())?;
        match try_twice(&file, || std::thread::sleep(LOOK)) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(DirLockError::InUse { folder: root.display().to_string(), holder: holder_in(&mut file) });
            }
            Err(TryLockError::Error(error)) => return Err(unusable()(error)),
        }
        file.set_len(0).and_then(|()| file.rewind()).map_err(unusable())?;
        writeln!(file, "{}", std::process::id()).map_err(unusable())?;
        Ok(Self { _file: file })
    }

    /// Id of the process that holds the lock on the folder `root`, empty if unknown; `None` if the folder is not locked. Writes nothing.
    pub fn holder(root: &Path) -> Option<String> {
        let mut file = File::open(root.join(LOCK_FILE)).ok()?;
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => Some(holder_in(&mut file)),
            Ok(()) | Err(TryLockError::Error(_)) => None,
        }
    }
}

/// Longer than [`DirLock::holder`] holds its lock.
const LOOK: Duration = Duration::from_millis(20);

/// Tries twice, because another process may be checking for the holder at this moment, which takes less than `pause`.
fn try_twice(file: &File, pause: impl FnOnce()) -> Result<(), TryLockError> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            pause();
            file.try_lock()
        }
        tried => tried,
    }
}

fn holder_in(file: &mut File) -> String {
    let mut holder = String::new();
    // Only a hint: the message is correct without it.
    let _ = file.read_to_string(&mut holder);
    holder.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_in_use_is_refused_until_it_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("run");
        assert_eq!((DirLock::holder(&dir), dir.exists()), (None, false));
        let held = DirLock::take(&dir).unwrap();
        assert_eq!(DirLock::holder(&dir), Some(std::process::id().to_string()));
        let refusal = DirLock::take(&dir).unwrap_err().to_string();
        assert!(refusal.contains(&format!("in use by another querl (process {})", std::process::id())), "{refusal}");
        drop(held);
        assert_eq!(DirLock::holder(&dir), None);
        DirLock::take(&dir).unwrap();
    }

    #[test]
    fn a_look_at_the_holder_does_not_refuse_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(LOCK_FILE);
        let (file, looking) = (File::create(&path).unwrap(), File::open(&path).unwrap());
        looking.try_lock_shared().unwrap();
        assert!(matches!(try_twice(&file, || ()), Err(TryLockError::WouldBlock)));
        try_twice(&file, || drop(looking)).unwrap();
    }
}
