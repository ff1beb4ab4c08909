//! Files that others may have put there.

use crate::error::BundleError;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The content of a regular file of at most `most` bytes. Devices and pipes never end, or never begin.
///
/// # Errors
/// There is no such file, it cannot be read, it is no regular file, or it is larger.
pub(crate) fn read(path: &Path, most: u64) -> Result<Vec<u8>, BundleError> {
    let failed = |source| BundleError::io(path, source);
    // Asked before opening, which waits for a pipe's other end.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(BundleError::folder(path, "is not a regular file"));
    }
    let mut content = Vec::new();
    // One byte more than is allowed shows that the file is too large, however much it grows meanwhile.
    File::open(path).and_then(|file| file.take(most + 1).read_to_end(&mut content)).map_err(failed)?;
    match content.len() as u64 > most {
        true => Err(BundleError::folder(path, format!("has more than the {most} bytes that are read"))),
        false => Ok(content),
    }
}

/// As [`read`], of UTF-8 text.
///
/// # Errors
/// As [`read`], or other content.
pub(crate) fn read_text(path: &Path, most: u64) -> Result<String, BundleError> {
    String::from_utf8(read(path, most)?).map_err(|_| BundleError::folder(path, "is not UTF-8 text"))
}
