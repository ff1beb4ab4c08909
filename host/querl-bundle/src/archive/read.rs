//! Reads an archive, and refuses everything that [`super::write`] does not write.
//!
//! Memory is bounded by what was decoded, not by what a header claims: contents grow as they arrive, and each has its limit.

use super::write::{WINDOW_LOG, header};
use super::{ArchiveLimits, Damage, names, refuse_name, seal};
use crate::document::printable;
use std::collections::BTreeMap;
use std::io::{self, Read};
use tar::{EntryType, Header};

const BLOCK: usize = 512;
const STREAM: &str = "compressed stream";
const TAR: &str = "tar stream";
/// However well it compresses, an archive up to this size is no bomb.
const HARMLESS_BYTES: u64 = 4 << 20;

/// The files of an archive by name.
pub(crate) fn read(bytes: &[u8], limits: &ArchiveLimits) -> Result<BTreeMap<String, Vec<u8>>, Damage> {
    let n_bytes = bytes.len() as u64;
    if n_bytes > limits.compressed_bytes {
        return Err(Damage::new(STREAM, too_large(n_bytes, limits.compressed_bytes)));
    }
    let frame = seal::unseal(bytes)?;
    let tar_limit = limits.tar_bytes.min(HARMLESS_BYTES.saturating_add(n_bytes.saturating_mul(limits.ratio)));
    let mut decoder = decoder(frame)?;
    let mut stream = Stream { source: &mut decoder, n_left: tar_limit, tar_limit };
    let files = read_entries(&mut stream, limits)?;
    let rest = rest_of(decoder)?;
    match rest.is_empty() {
        true => Ok(files),
        false => {
            Err(Damage::new(STREAM, format!("has {} bytes between the end of its frame and the seal", rest.len())))
        }
    }
}

type Decoder<'a> = zstd::Decoder<'static, &'a [u8]>;

fn decoder(frame: &[u8]) -> Result<Decoder<'_>, Damage> {
    let failed = |error: io::Error| Damage::new(STREAM, format!("cannot be decoded: {error}"));
    let mut decoder = zstd::Decoder::with_buffer(frame).map_err(failed)?.single_frame();
    decoder.window_log_max(WINDOW_LOG).map_err(failed)?;
    Ok(decoder)
}

fn rest_of(mut decoder: Decoder<'_>) -> Result<&[u8], Damage> {
    // The last content can arrive before the frame's checksum was looked at.
    decoder.finish_frame().map_err(|error| undecodable(&error))?;
    Ok(decoder.finish())
}

fn undecodable(error: &io::Error) -> Damage {
    Damage::new(STREAM, format!("cannot be decoded: {error}"))
}

fn too_large(n_bytes: u64, limit: u64) -> String {
    format!("has {n_bytes} bytes; at most {limit} are read")
}

/// The decoded tar stream, with a limit.
struct Stream<'s, 'a> {
    source: &'s mut Decoder<'a>,
    n_left: u64,
    tar_limit: u64,
}

impl Stream<'_, '_> {
    /// Appends up to `n_bytes` to `content`; fewer only where the stream ends.
    fn read_into(&mut self, content: &mut Vec<u8>, n_bytes: u64) -> Result<(), Damage> {
        if n_bytes > self.n_left {
            let message = format!("expands to more than {} bytes; the archive is refused as a bomb", self.tar_limit);
            return Err(Damage::new(STREAM, message));
        }
        self.n_left -= n_bytes;
        self.source.by_ref().take(n_bytes).read_to_end(content).map_err(|error| undecodable(&error))?;
        Ok(())
    }

    /// The next block; `None` at the end of the stream.
    fn block(&mut self) -> Result<Option<[u8; BLOCK]>, Damage> {
        let mut content = Vec::with_capacity(BLOCK);
        self.read_into(&mut content, BLOCK as u64)?;
        match content.as_slice().try_into() {
            Ok(block) => Ok(Some(block)),
            Err(_) if content.is_empty() => Ok(None),
            Err(_) => Err(Damage::new(TAR, "ends within a block")),
        }
    }

    /// One file's content and the zeros after it.
    fn content(&mut self, name: &str, n_bytes: u64) -> Result<Vec<u8>, Damage> {
        let mut content = Vec::new();
        self.read_into(&mut content, n_bytes)?;
        let mut padding = Vec::new();
        let n_padding = n_bytes.next_multiple_of(BLOCK as u64) - n_bytes;
        self.read_into(&mut padding, n_padding)?;
        if content.len() as u64 != n_bytes || padding.len() as u64 != n_padding {
            let message = format!("ends after {} of its {n_bytes} bytes; the archive is truncated", content.len());
            return Err(Damage::new(name, message));
        }
        match padding.iter().all(|byte| *byte == 0) {
            true => Ok(content),
            false => Err(Damage::new(name, "is followed by padding that is not zero")),
        }
    }
}

fn read_entries(stream: &mut Stream<'_, '_>, limits: &ArchiveLimits) -> Result<BTreeMap<String, Vec<u8>>, Damage> {
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut n_golden_bytes = 0;
    loop {
        let block = stream.block()?.ok_or_else(|| Damage::new(TAR, "has no end mark; the archive is truncated"))?;
        if block == [0; BLOCK] {
            break;
        }
        let (name, n_bytes) = entry(&block, limits)?;
        if files.len() == limits.entries {
            return Err(Damage::new(TAR, format!("has more than {} files", limits.entries)));
        }
        refuse_order(&files, &name)?;
        if name.starts_with(names::GOLDEN) {
            n_golden_bytes += n_bytes;
            if n_golden_bytes > limits.golden_bytes {
                return Err(Damage::new(
                    &name,
                    format!("is more than the {} bytes of golden cases that are read", limits.golden_bytes),
                ));
            }
        }
        let content = stream.content(&name, n_bytes)?;
        files.insert(name, content);
    }
    end(stream)?;
    match names::REQUIRED.into_iter().find(|name| !files.contains_key(*name)) {
        Some(missing) => Err(Damage::new(missing, "is missing")),
        None => Ok(files),
    }
}

/// One more block of zeros, and nothing after it.
fn end(stream: &mut Stream<'_, '_>) -> Result<(), Damage> {
    if stream.block()? != Some([0; BLOCK]) {
        return Err(Damage::new(TAR, "has no second end mark; the archive is truncated"));
    }
    // Read without the limit, so that a stream of just the greatest size is not taken for a bomb.
    let mut byte = [0];
    match stream.source.read(&mut byte).map_err(|error| undecodable(&error))? {
        0 => Ok(()),
        _ => Err(Damage::new(TAR, "has bytes after its end mark")),
    }
}

fn refuse_order(files: &BTreeMap<String, Vec<u8>>, name: &str) -> Result<(), Damage> {
    match files.keys().next_back() {
        _ if files.contains_key(name) => Err(Damage::new(name, "is there twice")),
        Some(last) if last.as_str() > name => {
            Err(Damage::new(name, format!("comes after `{last}`; entries are in the order of their names")))
        }
        _ => Ok(()),
    }
}

/// Name and size of an entry whose header is as we write it.
fn entry(block: &[u8; BLOCK], limits: &ArchiveLimits) -> Result<(String, u64), Damage> {
    let found = Header::from_byte_slice(block);
    let raw_name = found.path_bytes();
    let name = String::from_utf8_lossy(&raw_name).into_owned();
    let part = match name.is_empty() {
        true => TAR.to_owned(),
        false => printable(&name),
    };
    let refuse = |message: &str| Err(Damage::new(&part, message));
    match found.entry_type() {
        EntryType::Regular => {}
        EntryType::Symlink => return refuse("is a symbolic link; a bundle has plain files only"),
        EntryType::Link => return refuse("is a hard link; a bundle has plain files only"),
        EntryType::Directory => return refuse("is a folder; a bundle has plain files only"),
        EntryType::Char | EntryType::Block | EntryType::Fifo => {
            return refuse("is a device; a bundle has plain files only");
        }
        _ => return refuse("has a header of a sort that a bundle does not use"),
    }
    if let Some(reason) = refuse_name(&name) {
        return refuse(reason);
    }
    let Ok(n_bytes) = found.entry_size() else { return refuse("has a size that cannot be read") };
    if header(&name, n_bytes).as_bytes() != block {
        return refuse("has a header other than packing writes (owner, mode, time, size or checksum)");
    }
    match n_bytes > limits.bytes_of(&name) {
        true => refuse(&too_large(n_bytes, limits.bytes_of(&name))),
        false => Ok((name, n_bytes)),
    }
}
