//! Where an index is kept: whole under its digest, or not at all.

use crate::error::DataError;
use querl_core::cache_dir::user_cache_folder;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tantivy::Index;
use tempfile::TempDir;

/// The form of the index. A change in how it is built or read is another number.
const FORM: &str = "querl index 1";
/// Indexes that are kept; building one more removes the one that was built first.
const MAX_KEPT: usize = 32;
/// How the folder of an index begins while it is built.
const UNFINISHED: &str = ".building-";
/// One that is older was left behind by a process that was killed.
const LONGEST_BUILD: Duration = Duration::from_secs(7 * 24 * 3600);

/// A finished index.
#[derive(Debug)]
pub(super) enum IndexFolder {
    /// In the cache, for the next process too.
    Kept(PathBuf),
    /// Where no cache can be written: it goes with the process.
    Temporary(TempDir),
}

impl IndexFolder {
    /// The index of this digest, built where it is not there or is damaged.
    ///
    /// # Errors
    /// As `build`, or no folder can be made at all.
    pub(super) fn open(
        base: Option<&Path>,
        digest: &str,
        build: impl Fn(&Path) -> Result<(), DataError>,
    ) -> Result<Self, DataError> {
        let own = base.map(Path::to_owned).or_else(|| Some(user_cache_folder()?.join("indexes")));
        let usable = own.filter(|base| match std::fs::create_dir_all(base) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!("the index is not kept: {}: {error}", base.display());
                false
            }
        });
        let Some(base) = usable else { return Self::temporary(build) };
        let kept = base.join(digest);
        if kept.exists() {
            match is_whole(&kept) {
                Ok(()) => return Ok(Self::Kept(kept)),
                Err(problem) => {
                    tracing::warn!("{}: {problem}; it is built again", kept.display());
                    std::fs::remove_dir_all(&kept).map_err(|error| DataError::write(&kept, error))?;
                }
            }
        }
        let new = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(&base);
        let Ok(new) = new else { return Self::temporary(build) };
        build(new.path())?;
        // Another process may have been quicker; then theirs is as good.
        if std::fs::rename(new.path(), &kept).is_ok() {
            let _ = new.keep();
            prune(&base, &kept);
        }
        Ok(Self::Kept(kept))
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

/// Stands for the content of the files that an index is made of.
///
/// # Errors
/// One cannot be read.
pub(super) fn digest_of(
    knowledge_base: &Path,
    optional: &[Option<&Path>],
    embedder: Option<&str>,
) -> Result<String, DataError> {
    let mut all = Sha256::new();
    all.update(FORM);
    for path in std::iter::once(Some(knowledge_base)).chain(optional.iter().copied()) {
        let content = path.map(digest_of_file).transpose()?;
        // The length first: a file that is absent is not one that is empty.
        all.update([content.map_or(0, |digest| digest.len() as u8)]);
        all.update(content.unwrap_or_default());
    }
    all.update(embedder.unwrap_or_default());
    Ok(hex(&all.finalize()))
}

pub(super) fn digest_of_file(path: &Path) -> Result<[u8; 32], DataError> {
    let unreadable = |error| DataError::file(path, format!("cannot be read: {error}"));
    let mut file = File::open(path).map_err(unreadable)?;
    let (mut digest, mut piece) = (Sha256::new(), vec![0; 256 << 10]);
    loop {
        match file.read(&mut piece).map_err(unreadable)? {
            0 => return Ok(digest.finalize().into()),
            n_bytes => digest.update(&piece[..n_bytes]),
        }
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads every byte once, against the sums that the index keeps of its files.
fn is_whole(folder: &Path) -> Result<(), String> {
    let damaged = Index::open_in_dir(folder).and_then(|index| index.validate_checksum());
    match damaged {
        Ok(files) if files.is_empty() => super::vectors::check(folder),
        Ok(files) => Err(format!("{} of its files are damaged", files.len())),
        Err(error) => Err(format!("cannot be read: {error}")),
    }
}

/// Removes the oldest indexes beyond [`MAX_KEPT`]. A process that has one open keeps what it has mapped.
fn prune(base: &Path, newest: &Path) {
    let made = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let entries = std::fs::read_dir(base).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_index = |path: &PathBuf| path != newest && path.join("meta.json").is_file();
    let mut others: Vec<PathBuf> = entries.filter(is_index).collect();
    let is_left_behind = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().starts_with(UNFINISHED);
        name && made(path).elapsed().is_ok_and(|age| age > LONGEST_BUILD)
    };
    let unfinished = std::fs::read_dir(base).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in unfinished.filter(is_left_behind) {
        let _ = std::fs::remove_dir_all(path);
    }
    others.sort_by_key(|path| std::cmp::Reverse(made(path)));
    for path in others.iter().skip(MAX_KEPT - 1) {
        let _ = std::fs::remove_dir_all(path);
    }
}
