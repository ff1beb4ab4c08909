//! Files that appear whole or not at all.

use std::io::{self, Write};
use std::path::Path;

/// Writes `bytes` to `path`: beside it first, synced, then renamed over it. Makes missing parent folders.
///
/// # Errors
/// Whatever the file system says; `path` is then as it was before.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_atomic_with(path, |file| file.write_all(bytes))
}

/// As [`write_atomic`], for content that is written piece by piece.
///
/// # Errors
/// Whatever the file system or `fill` says; `path` is then as it was before.
pub fn write_atomic_with(
    path: &Path,
    fill: impl FnOnce(&mut io::BufWriter<&mut std::fs::File>) -> io::Result<()>,
) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(folder)?;
    {
        let mut writer = io::BufWriter::new(file.as_file_mut());
        fill(&mut writer)?;
        writer.flush()?;
    }
    file.as_file().sync_all()?;
    set_readable(file.path())?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// How the names of files begin that are written beside another before they take its place.
const UNFINISHED: &str = ".querl-";

/// Removes the unfinished files that killed processes left in `folder` and below. No other process may write there.
///
/// # Errors
/// Whatever the file system says.
pub fn remove_unfinished(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            remove_unfinished(&entry.path())?;
        } else if kind.is_file() && entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// A temporary file is private to its owner; what it becomes is an ordinary file.
fn set_readable(path: &Path) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// Writes one JSON value a line.
///
/// # Errors
/// As [`write_atomic`], or a value that JSON cannot hold.
pub fn write_jsonl<T: serde::Serialize>(path: &Path, values: impl IntoIterator<Item = T>) -> io::Result<()> {
    write_atomic_with(path, |file| {
        for value in values {
            serde_json::to_writer(&mut *file, &value)?;
            file.write_all(b"\n")?;
        }
        Ok(())
    })
}

/// Why a JSON lines file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file itself.
    #[error("{path}: cannot be read: {source}")]
    Io {
        /// Which file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// One of its lines.
    #[error("{path}:{line}: not a valid record: {source}; mend the line or remove it")]
    Line {
        /// Which file.
        path: String,
        /// 1-based.
        line: usize,
        /// Why.
        source: serde_json::Error,
    },
}

/// Reads one JSON value a line; empty lines are passed over.
///
/// # Errors
/// The file cannot be read, or a line is not a `T`.
pub fn read_jsonl<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Vec<T>, ReadError> {
    Ok(read_numbered_jsonl(path)?.into_iter().map(|(_, record)| record).collect())
}

/// As [`read_jsonl`], with each record's line number; the first line is 1.
///
/// # Errors
/// The file cannot be read, or a line is not a record.
pub fn read_numbered_jsonl<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Vec<(usize, T)>, ReadError> {
    let bytes = std::fs::read(path).map_err(|source| ReadError::Io { path: path.display().to_string(), source })?;
    // As bytes: where a line was cut within a character, that line is named too.
    let lines = bytes.split(|byte| *byte == b'\n').zip(1..).filter(|(line, _)| !line.trim_ascii().is_empty());
    lines
        .map(|(text, line)| {
            let record = serde_json::from_slice(text);
            let record = record.map_err(|source| ReadError::Line { path: path.display().to_string(), line, source })?;
            Ok((line, record))
        })
        .collect()
}

/// Lower-case hexadecimal SHA-256 of `bytes`.
pub fn digest_hex(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    hex::encode(Sha256::digest(bytes))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn failed_write_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b.txt");
        write_atomic(&path, b"old").unwrap();
        let failed = write_atomic_with(&path, |file| {
            file.write_all(b"half")?;
            Err(io::Error::other("disk full"))
        });
        assert!(failed.is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_a_kill_left_unfinished_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str| write_atomic(&folder.path().join(name), b"x").unwrap();
        ["a.txt", ".in-use", "best/.querl-a1b2c3", "best/adapter", ".querl-d4"].into_iter().for_each(put);
        remove_unfinished(folder.path()).unwrap();
        let left = |name: &str| folder.path().join(name).exists();
        assert!(left("a.txt") && left(".in-use") && left("best/adapter"));
        assert!(!left("best/.querl-a1b2c3") && !left(".querl-d4"));
    }

    #[test]
    fn a_bad_line_is_named_also_where_it_was_cut_within_a_character() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.jsonl");
        let message = |text: &[u8]| {
            write_atomic(&path, text).unwrap();
            read_jsonl::<String>(&path).unwrap_err().to_string()
        };
        for text in ["\"a\"\n\r\nx\n".as_bytes(), &"\"a\"\n\n\"鱼\"".as_bytes()[..7]] {
            let message = message(text);
            assert!(message.contains("x.jsonl:3: not a valid record") && message.ends_with("remove it"), "{message}");
        }
    }
}
