//! Atomic file writes, JSON lines, digests and the user's cache folder.

use std::io::{self, BufRead, Read, Seek, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

/// Writes `bytes` to `path` atomically: to a temporary file in the same folder, synced, then renamed. Creates parent folders.
///
/// # Errors
/// An I/O error; `path` is then unchanged.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_atomic_with(path, |file| file.write_all(bytes))
}

/// [`write_atomic`] for content that `fill` writes incrementally.
///
/// # Errors
/// An I/O error, or that of `fill`; `path` is then unchanged.
pub fn write_atomic_with(
    path: &Path,
    fill: impl FnOnce(&mut io::BufWriter<&mut std::fs::File>) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = AtomicFile::create(path)?;
    let mut writer = io::BufWriter::new(file.writer.get_mut());
    fill(&mut writer)?;
    writer.flush()?;
    drop(writer);
    file.commit()
}

/// A file that is written incrementally and becomes visible with [`AtomicFile::commit`]; dropping it earlier leaves no file.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    /// A writer whose errors do not contain the path of the temporary file.
    writer: io::BufWriter<std::fs::File>,
    temporary: tempfile::TempPath,
}

impl AtomicFile {
    /// Opens a temporary file in the folder of `path`. Creates parent folders.
    ///
    /// # Errors
    /// An I/O error.
    pub fn create(path: &Path) -> io::Result<Self> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let (file, temporary) = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(folder)?.into_parts();
        Ok(Self { path: path.to_owned(), writer: io::BufWriter::new(file), temporary })
    }

    /// Appends one JSON value as a line.
    ///
    /// # Errors
    /// The file cannot be written, or the value cannot be serialised.
    pub fn write_line(&mut self, value: &impl serde::Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.writer, value)?;
        self.writer.write_all(b"\n")
    }

    /// Syncs the file, renames it to its path and syncs the folder.
    ///
    /// # Errors
    /// An I/O error; the path is then unchanged.
    pub fn commit(self) -> io::Result<()> {
        let file = self.writer.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        set_readable(&self.temporary)?;
        self.temporary.persist(&self.path).map_err(|error| error.error)?;
        sync_folder(&self.path)
    }
}

/// Syncs the folder, so that a rename to `path` survives a power failure, if the file system supports it.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A folder with write but no read permission cannot be opened.
    let Ok(folder) = std::fs::File::open(folder) else { return Ok(()) };
    match folder.sync_all() {
        Err(error) if !matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Err(error),
        _ => Ok(()),
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

impl io::Seek for AtomicFile {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        self.writer.seek(to)
    }
}

/// True if the user can correct the error: a path, its permissions, or content that is not text. A full disk is not such an error.
pub fn is_input_error(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::NotFound
            | Kind::PermissionDenied
            | Kind::NotADirectory
            | Kind::IsADirectory
            | Kind::ReadOnlyFilesystem
            | Kind::InvalidFilename
            | Kind::InvalidData
    )
}

/// True if the machine lacks memory, address space, open files or disk space; the error then says nothing about the content of the file.
pub fn is_exhausted(error: &io::Error) -> bool {
    exhaustion(error).is_some()
}

/// The I/O error, among `error` and its causes, for which [`is_exhausted`] holds.
pub fn exhaustion(error: &(dyn std::error::Error + 'static)) -> Option<io::Error> {
    let io_error = error.downcast_ref::<io::Error>();
    if let Some(found) = io_error.filter(|found| remedy(found).is_some()) {
        let of_text = || io::Error::new(found.kind(), found.to_string());
        return Some(found.raw_os_error().map_or_else(of_text, io::Error::from_raw_os_error));
    }
    // The source of an `io::Error` is not the error that it contains, but the cause of that.
    let contained = io_error.and_then(io::Error::get_ref).map(|inner| inner as &(dyn std::error::Error + 'static));
    if let Some(cause) = contained.or_else(|| error.source()) {
        return exhaustion(cause);
    }
    // Errors of `tempfile` and `csv` have the text of an I/O error and no source.
    let text = error.to_string();
    let (number, _) = text.split_once("(os error ")?.1.split_once(')')?;
    Some(io::Error::from_raw_os_error(number.parse().ok()?)).filter(|found| remedy(found).is_some())
}

/// True for `ENFILE` and `EMFILE`: the limit of open files of the machine or of the process. They have no `ErrorKind`; their numbers are the
/// same on Linux, macOS and the BSDs.
pub fn is_out_of_handles(error: &io::Error) -> bool {
    cfg!(unix) && matches!(error.raw_os_error(), Some(23 | 24))
}

/// Text of an I/O error for the end of a message. If the machine lacks a resource, it begins with the cause and the remedy.
pub fn io_problem(error: &io::Error) -> String {
    let text = error.to_string();
    match exhaustion(error).as_ref().and_then(remedy) {
        Some(remedy) if !text.contains(remedy) => format!("{remedy}: {text}"),
        _ => text,
    }
}

/// The missing resource and the remedy, for an error that is not the cause of another one.
fn remedy(error: &io::Error) -> Option<&'static str> {
    use io::ErrorKind as Kind;
    Some(match error.kind() {
        Kind::OutOfMemory => {
            "too little memory or address space to read it; free some, or raise the limit (`ulimit -v`)"
        }
        Kind::StorageFull | Kind::QuotaExceeded => "the disk or its quota is full; make room on it",
        // Without a number it is a limit of querl.
        Kind::FileTooLarge if error.raw_os_error().is_some() => {
            "a file reaches the limit on its size; raise the limit (`ulimit -f`)"
        }
        _ if is_out_of_handles(error) => "too many files are open; raise the limit (`ulimit -n`)",
        _ => return None,
    })
}

/// Name prefix of temporary files.
const UNFINISHED: &str = ".querl-";

/// Removes temporary files that killed processes left in `folder`, recursively. No other querl process may write there; files that the
/// library of an experiment tracker removes in the meantime are skipped.
///
/// # Errors
/// An I/O error.
pub fn remove_unfinished(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let removed = entry.and_then(|entry| {
            let kind = entry.file_type()?;
            if kind.is_dir() {
                remove_unfinished(&entry.path())
            } else if kind.is_file() && entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                std::fs::remove_file(entry.path())
            } else {
                Ok(())
            }
        });
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed?,
        }
    }
    Ok(())
}

/// Temporary files have mode 0600; committed files get 0644.
fn set_readable(path: &Path) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// Writes a value as indented JSON with a line break at the end, atomically.
///
/// # Errors
/// As [`write_atomic`], or the value cannot be serialised.
pub fn write_json(path: &Path, value: &impl serde::Serialize) -> io::Result<()> {
    let mut bytes = serde_json::to_vec_pretty(value)?;
    bytes.push(b'\n');
    write_atomic(path, &bytes)
}

/// Writes one JSON value per line, atomically.
///
/// # Errors
/// As [`write_atomic`], or a value cannot be serialised.
pub fn write_jsonl<T: serde::Serialize>(path: &Path, values: impl IntoIterator<Item = T>) -> io::Result<()> {
    let mut file = AtomicFile::create(path)?;
    values.into_iter().try_for_each(|value| file.write_line(&value))?;
    file.commit()
}

/// Errors of reading a JSON lines file. `line` is 1-based.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ReadError {
    #[error("{path}: cannot be read: {}", io_problem(source))]
    Io { path: String, source: io::Error },
    #[error("{path}:{line}: not a valid record: {problem}; fix or remove the line")]
    Line { path: String, line: usize, problem: String },
}

impl ReadError {
    fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.display().to_string(), source }
    }
}

/// Reads one JSON value per line and skips empty lines.
///
/// # Errors
/// The file cannot be read, or a line is not a `T`.
pub fn read_jsonl<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Vec<T>, ReadError> {
    open_jsonl(path)?.map(|line| line.map(|NumberedLine { value, .. }| value)).collect()
}

/// One line of a JSON lines file.
#[derive(Debug, Clone, PartialEq)]
pub struct NumberedLine<T> {
    /// 1-based line number, empty lines counted.
    pub line: usize,
    /// Byte offset of the line in the file.
    pub offset: u64,
    /// The parsed record.
    pub value: T,
}

/// The byte order mark that some programs write at the start of a UTF-8 file.
pub const UTF8_MARK: &[u8] = b"\xef\xbb\xbf";

/// Maximum length in bytes of a line that querl wrote.
pub const MAX_LINE_BYTES: usize = 64 << 20;

/// Maximum length in bytes of a line that querl did not write: a parsed row takes many times its length in memory.
pub const MAX_ROW_BYTES: usize = 8 << 20;

/// Reads a file of at most `max_bytes`.
///
/// # Errors
/// An I/O error, or the file is longer.
pub fn read_bounded(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let problem = format!("the file has more than {max_bytes} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

/// [`read_bounded`] for UTF-8 text.
///
/// # Errors
/// As [`read_bounded`], or the text is not UTF-8.
pub fn read_text_bounded(path: &Path, max_bytes: u64) -> io::Result<String> {
    String::from_utf8(read_bounded(path, max_bytes)?).map_err(|error| {
        let bytes = error.as_bytes();
        let line = 1 + bytes[..error.utf8_error().valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
        io::Error::new(io::ErrorKind::InvalidData, format!("line {line} is not UTF-8 text"))
    })
}

/// Opens a JSON lines file that is read lazily; a byte order mark and empty lines are skipped. The iterator yields an error
/// for a line that is not a `T` or cannot be read.
///
/// # Errors
/// The file cannot be opened.
pub fn open_jsonl<T: serde::de::DeserializeOwned>(path: &Path) -> Result<JsonLines<T>, ReadError> {
    open_lines(path, MAX_LINE_BYTES)
}

/// Like [`open_jsonl`], for files that querl did not write: a line has at most [`MAX_ROW_BYTES`] (8 MiB), not [`MAX_LINE_BYTES`] (64
/// MiB).
///
/// # Errors
/// The file cannot be opened.
pub fn open_rows<T: serde::de::DeserializeOwned>(path: &Path) -> Result<JsonLines<T>, ReadError> {
    open_lines(path, MAX_ROW_BYTES)
}

fn open_lines<T>(path: &Path, max_bytes: usize) -> Result<JsonLines<T>, ReadError> {
    let file = std::fs::File::open(path).map_err(|source| ReadError::io(path, source))?;
    let reader = io::BufReader::with_capacity(1 << 16, file);
    let path = path.to_owned();
    Ok(JsonLines { path, reader, max_bytes, buffer: Vec::new(), line: 0, offset: 0, of: PhantomData })
}

/// Iterator over the lines of a JSON lines file, opened with [`open_jsonl`] or [`open_rows`].
#[derive(Debug)]
pub struct JsonLines<T> {
    path: PathBuf,
    reader: io::BufReader<std::fs::File>,
    max_bytes: usize,
    buffer: Vec<u8>,
    line: usize,
    offset: u64,
    of: PhantomData<fn() -> T>,
}

impl<T: serde::de::DeserializeOwned> Iterator for JsonLines<T> {
    type Item = Result<NumberedLine<T>, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            self.buffer.clear();
            // Bytes rather than `read_line`: a line with invalid UTF-8 is reported with its number.
            let mut bounded = self.reader.by_ref().take(self.max_bytes as u64 + 1);
            let n_bytes = match bounded.read_until(b'\n', &mut self.buffer) {
                Ok(0) => return None,
                Ok(n_bytes) => n_bytes as u64,
                Err(source) => return Some(Err(ReadError::io(&self.path, source))),
            };
            self.line += 1;
            let (line, offset) = (self.line, self.offset);
            if n_bytes > self.max_bytes as u64 {
                let problem = format!("a line of more than {} bytes", self.max_bytes);
                // The rest of the line is not a record.
                self.reader.seek(io::SeekFrom::End(0)).ok();
                return Some(Err(ReadError::Line { path: self.path.display().to_string(), line, problem }));
            }
            self.offset += n_bytes;
            let text = match offset {
                0 => self.buffer.strip_prefix(UTF8_MARK).unwrap_or(&self.buffer),
                _ => &self.buffer,
            };
            if text.trim_ascii().is_empty() {
                continue;
            }
            let value = serde_json::from_slice(text).map_err(|source| {
                let path = self.path.display().to_string();
                ReadError::Line { path, line, problem: fault(text, &source) }
            });
            return Some(value.map(|value| NumberedLine { line, offset, value }));
        }
    }
}

/// Message of a serde_json error, with JSON terms instead of the names of Rust types.
pub fn json_problem(error: &serde_json::Error) -> String {
    let message = error.to_string();
    if let Some((before, named)) = message.split_once("expected struct ") {
        let rest = named.find(' ').map_or("", |end| &named[end..]);
        return format!("{before}expected an object{rest}");
    }
    TYPES.into_iter().fold(message, |message, (name, words)| message.replace(name, words))
}

/// Rust type names in serde_json messages, and what to print instead.
const TYPES: [(&str, &str); 6] = [
    ("expected usize", "expected a whole number"),
    ("expected u64", "expected a whole number"),
    ("expected u32", "expected a whole number"),
    ("expected i64", "expected an integer"),
    ("expected f64", "expected a number"),
    ("expected a map", "expected an object"),
];

/// Describes a parse error of a line; the position reported by serde_json is relative to the line.
pub(crate) fn fault(text: &[u8], error: &serde_json::Error) -> String {
    if let Err(error) = std::str::from_utf8(text) {
        return format!("byte {} is not UTF-8; save the file as UTF-8", error.valid_up_to() + 1);
    }
    if text.trim_ascii_start().starts_with(b"[") {
        return "a list; expected one object on each line, which `jq -c '.[]' FILE` makes of it".into();
    }
    if error.is_eof() {
        return "the line ends too early; a record is one line".into();
    }
    let message = json_problem(error);
    let plain = message.split(" at line ").next().unwrap_or(&message);
    if let Some((key, value)) = value_without_quotes(text, plain, error.column()) {
        return format!("`{key}` is {value}, expected a string: write \"{key}\": \"{value}\"");
    }
    // The column is that of the first character of the name, or the one after.
    let near = text.get(error.column().saturating_sub(2)..).unwrap_or_default();
    let not_finite = ["NaN", "Infinity"].into_iter().filter(|_| error.is_syntax()).find(|name| {
        let name = name.as_bytes();
        near.starts_with(name) || near.get(1..).is_some_and(|near| near.starts_with(name))
    });
    let (what, remedy) = match not_finite {
        Some(name) => (name, " is not JSON; write null or leave the key out"),
        None if message.contains("hex escape") => {
            let what = "a `\\u` escape of half a character (a lone surrogate), or without four digits";
            (what, "; write the character itself")
        }
        None => (plain, ""),
    };
    match error.column() {
        0 => format!("{what}{remedy}"),
        column => format!("{what} at byte {column}{remedy}"),
    }
}

/// Key and value if a number or a boolean was found instead of a string, from the parser's message and the byte where the value ends.
fn value_without_quotes<'t>(text: &'t [u8], message: &str, end: usize) -> Option<(&'t str, &'t str)> {
    let found = message.strip_prefix("invalid type: ")?.strip_suffix(", expected a string")?;
    let before = std::str::from_utf8(text.get(..end)?).ok()?;
    let (before, value) = before.rsplit_once("\":")?;
    let (_, key) = before.rsplit_once('"')?;
    // For some records the parser reports the end of the line instead.
    found.ends_with(&format!("`{}`", value.trim())).then_some((key, value.trim()))
}

/// The user's cache folder: `$QUERL_CACHE_DIR`, `$XDG_CACHE_HOME/querl` or `~/.cache/querl`; `None` where none of these is set.
pub fn user_cache_folder() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let in_home = || Some(folder("HOME")?.join(".cache/querl"));
    folder("QUERL_CACHE_DIR").or_else(|| folder("XDG_CACHE_HOME").map(|base| base.join("querl"))).or_else(in_home)
}

/// Lower-case hexadecimal SHA-256 of `bytes`.
pub fn digest_hex(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    hex::encode(Sha256::digest(bytes))
}

/// Lower-case hexadecimal SHA-256 of a file's content, read in chunks.
///
/// # Errors
/// The file cannot be read.
pub fn digest_file(path: &Path) -> io::Result<String> {
    use sha2::{Digest, Sha256};
    let (file, mut digest) = (std::fs::File::open(path)?, Sha256::new());
    io::copy(&mut io::BufReader::with_capacity(256 << 10, file), &mut digest)?;
    Ok(hex::encode(digest.finalize()))
}

#[cfg(test)]
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

    /// Regression: a file that could not be mapped for want of memory was called damaged.
    #[test]
    fn want_of_memory_or_handles_says_nothing_about_the_file() {
        let exhausted =
            [io::Error::from_raw_os_error(24), io::ErrorKind::OutOfMemory.into(), io::ErrorKind::StorageFull.into()];
        assert!(exhausted.iter().all(is_exhausted));
        let others = [io::ErrorKind::UnexpectedEof, io::ErrorKind::InvalidData, io::ErrorKind::NotFound];
        assert!(!others.into_iter().any(|kind| is_exhausted(&kind.into())));
        let error = ReadError::io(Path::new("a.jsonl"), io::ErrorKind::OutOfMemory.into()).to_string();
        let expected =
            "too little memory or address space to read it; free some, or raise the limit (`ulimit -v`): out of memory";
        assert_eq!(error, format!("a.jsonl: cannot be read: {expected}"));
        assert_eq!(io_problem(&io::ErrorKind::NotFound.into()), "entity not found");
    }

    /// Regression: a full disk had a remedy in RL alone.
    #[cfg(target_os = "linux")]
    #[test]
    fn full_disks_and_limits_on_files_have_a_remedy() {
        for (number, remedy) in [
            (28, "the disk or its quota is full; make room on it: "),
            (122, "the disk or its quota is full; make room on it: "),
            (27, "a file reaches the limit on its size; raise the limit (`ulimit -f`): "),
            (24, "too many files are open; raise the limit (`ulimit -n`): "),
            (5, ""),
        ] {
            let error = io::Error::from_raw_os_error(number);
            assert_eq!(io_problem(&error), format!("{remedy}{error}"));
        }
        let too_long = io::Error::new(io::ErrorKind::FileTooLarge, "the file has more than 4 bytes");
        assert_eq!(io_problem(&too_long), "the file has more than 4 bytes");
        assert!(!is_exhausted(&too_long));
    }

    /// Regression: `EMFILE` within the error of a library, such as that of `tempfile` for a folder, had no remedy.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_missing_resource_is_recognised_in_errors_that_contain_it() {
        /// An error without a source, as those of `tempfile` and `csv`.
        #[derive(Debug, thiserror::Error)]
        #[error("{0} at path \"a\"")]
        struct TextOnly(String);
        #[derive(Debug, thiserror::Error)]
        #[error("External")]
        struct WithSource(#[source] io::Error);
        let files = || io::Error::from_raw_os_error(24);
        let wrapped = [
            io::Error::other(files()),
            io::Error::other(TextOnly(files().to_string())),
            io::Error::other(WithSource(files())),
            io::Error::other(WithSource(io::Error::other(files()))),
        ];
        for error in wrapped {
            let text = error.to_string();
            assert_eq!(exhaustion(&error).and_then(|found| found.raw_os_error()), Some(24), "{error:?}");
            assert_eq!(io_problem(&error), format!("too many files are open; raise the limit (`ulimit -n`): {text}"));
        }
        let full = WithSource(io::Error::other(io::Error::from(io::ErrorKind::StorageFull)));
        assert_eq!(exhaustion(&full).map(|found| found.kind()), Some(io::ErrorKind::StorageFull));
        // The remedy stands once, and other errors have none.
        let named = io::Error::other(ReadError::io(Path::new("a"), files()));
        assert_eq!(io_problem(&named).matches("raise the limit").count(), 1, "{named}");
        assert!(!is_exhausted(&io::Error::other(TextOnly(io::Error::from_raw_os_error(2).to_string()))));
    }

    #[test]
    fn a_longer_file_is_not_read_and_a_cut_character_has_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        write_atomic(&path, "a\n鱼".as_bytes()).unwrap();
        assert_eq!(read_text_bounded(&path, 5).unwrap(), "a\n鱼");
        assert_eq!(read_text_bounded(&path, 4).unwrap_err().to_string(), "the file has more than 4 bytes");
        write_atomic(&path, &"a\n鱼".as_bytes()[..4]).unwrap();
        assert_eq!(read_text_bounded(&path, 5).unwrap_err().to_string(), "line 2 is not UTF-8 text");
    }

    #[test]
    fn only_temporary_files_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str| write_atomic(&folder.path().join(name), b"x").unwrap();
        ["a.txt", ".in-use", "best/.querl-a1b2c3", "best/adapter", ".querl-d4"].into_iter().for_each(put);
        remove_unfinished(folder.path()).unwrap();
        let left = |name: &str| folder.path().join(name).exists();
        assert!(left("a.txt") && left(".in-use") && left("best/adapter"));
        assert!(!left("best/.querl-a1b2c3") && !left(".querl-d4"));
    }

    #[test]
    fn messages_speak_of_objects_and_not_of_types() {
        #[derive(Debug, serde::Deserialize)]
        struct Counts {
            _n: u32,
        }
        let message = |text: &str| json_problem(&serde_json::from_str::<Counts>(text).unwrap_err());
        assert_eq!(message("9"), "invalid type: integer `9`, expected an object at line 1 column 1");
        assert!(message("[]").starts_with("invalid length 0, expected an object with 1 element"), "{}", message("[]"));
        assert!(message("{}").starts_with("missing field `_n`"), "{}", message("{}"));
        assert!(
            message("{\"_n\": \"16\"}").starts_with("invalid type: string \"16\", expected a whole number at line 1")
        );
    }

    #[test]
    fn uncommitted_file_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_line(&1).unwrap();
        drop(file);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_line(&"鱼油").unwrap();
        file.commit().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "\"鱼油\"\n");
    }

    #[test]
    fn lines_have_byte_offsets_and_a_byte_order_mark_is_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.jsonl");
        write_atomic(&path, "\u{feff}\"鱼\"\n\n\"油\"".as_bytes()).unwrap();
        let lines: Vec<_> = open_jsonl::<String>(&path).unwrap().map(Result::unwrap).collect();
        let expected = [(1, 0, "鱼"), (3, 10, "油")];
        assert_eq!(lines.iter().map(|l| (l.line, l.offset, l.value.as_str())).collect::<Vec<_>>(), expected);
    }

    /// Regression: messages were "expected value", "invalid type: sequence, expected a map" and "unexpected end of hex escape".
    #[test]
    fn nan_lists_and_halves_of_characters_are_named() {
        let not_json = " is not JSON; write null or leave the key out";
        for (text, problem, end) in [
            (r#"{"a": [0.5, NaN]}"#, "NaN at byte ", not_json),
            (r#"{"a": -Infinity}"#, "Infinity at byte ", not_json),
            (r#"[{"a": 1}]"#, "a list; expected one object on each line, which `jq -c '.[]' FILE` makes of it", ""),
            ("[", "a list; expected one object on each line", ""),
            (
                r#"{"a": "\ud83d"}"#,
                "a `\\u` escape of half a character (a lone surrogate), or without four digits at byte ",
                "; write the character itself",
            ),
            (r#"{"a": x}"#, "expected value at byte ", ""),
        ] {
            let error = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).unwrap_err();
            let found = fault(text.as_bytes(), &error);
            assert!(found.starts_with(problem) && found.ends_with(end), "{text}: {found}");
        }
    }

    #[test]
    fn invalid_line_is_named_even_if_cut_within_a_character() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.jsonl");
        let message = |text: &[u8]| {
            write_atomic(&path, text).unwrap();
            read_jsonl::<String>(&path).unwrap_err().to_string()
        };
        for text in ["\"a\"\n\r\nx\n".as_bytes(), &"\"a\"\n\n\"鱼\"".as_bytes()[..7]] {
            let message = message(text);
            assert!(message.contains("x.jsonl:3: not a valid record"), "{message}");
            assert!(message.ends_with("remove the line"), "{message}");
        }
        let cases = [
            ("{\"a\": 1}", "invalid type: map, expected a string"),
            ("7", "invalid type: integer `7`, expected a string at byte 1"),
            ("\"a\" \"b\"", "trailing characters at byte 5"),
            ("\"a", "the line ends too early; a record is one line"),
        ];
        for (text, problem) in cases {
            let message = message(text.as_bytes());
            assert!(message.contains(&format!(":1: not a valid record: {problem}")), "{message}");
        }
        // Regression: ids of a knowledge base that are numbers were refused without the name of the key.
        std::fs::write(&path, "{\"text\": \"a\", \"id\": 1, \"n\": 1}").unwrap();
        let message = read_jsonl::<std::collections::BTreeMap<String, String>>(&path).unwrap_err().to_string();
        let expected = "not a valid record: `id` is 1, expected a string: write \"id\": \"1\"; fix or remove the line";
        assert!(message.ends_with(expected), "{message}");
    }
}
