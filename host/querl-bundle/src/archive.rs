//! The archive: a tar stream in a zstd frame, and a seal over the frame. The same files give the same bytes, and whatever [`write`] does
//! not write, [`read`] rejects.
//!
//! The seal is a zstd skippable frame with the SHA-256 of everything before it. A zstd frame can be written in more than one way, and its own
//! checksum has 32 bits and does not cover its header; the seal covers every byte of the file. An attacker who changes a file can compute
//! a new seal: against that, there are signatures.
//!
//! Memory of a reader is bounded by what was decoded, not by what a header claims: contents grow as they arrive, and each has its limit.

use crate::document::printable;
use querl_core::text::disturbs;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{self, Read};
use tar::{EntryType, Header};
use zstd::stream::raw::CParameter;

pub(crate) mod names {
    pub(crate) const LICENSE: &str = "LICENSE";
    pub(crate) const README: &str = "README.md";
    pub(crate) const SUMS: &str = "SHA256SUMS";
    pub(crate) const GOLDEN: &str = "golden/";
    pub(crate) const GOLDEN_ENDING: &str = ".jsonl";
    pub(crate) const MANIFEST: &str = "plugin.toml";
    pub(crate) const COMPONENT: &str = "plugin.wasm";
    pub(crate) const SIGNATURES: &str = "signatures";
    /// Names of the files that every bundle has.
    pub(crate) const REQUIRED: [&str; 5] = [LICENSE, README, SUMS, MANIFEST, COMPONENT];
}

/// Size limits that a reader of an archive enforces. The component of a Python plugin has 18 MB, a quarter of that compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArchiveLimits {
    /// Maximum size of the compressed file.
    pub compressed_bytes: u64,
    /// Maximum size of the tar stream: headers, contents, padding.
    pub tar_bytes: u64,
    /// Largest size of the tar stream as a multiple of the compressed size; a tar stream of up to 4 MiB is always allowed.
    pub ratio: u64,
    /// Maximum number of files.
    pub entries: usize,
    /// Maximum size of the component.
    pub component_bytes: u64,
    /// Maximum size of one file of golden cases, and of all of them together.
    pub golden_bytes: u64,
    /// Maximum size of each other file.
    pub text_bytes: u64,
}

impl ArchiveLimits {
    /// The limits of every reader and writer of this crate.
    pub const DEFAULT: Self = Self {
        compressed_bytes: 72 << 20,
        tar_bytes: 128 << 20,
        ratio: 256,
        entries: 1000,
        component_bytes: 64 << 20,
        golden_bytes: 16 << 20,
        text_bytes: 1 << 20,
    };

    pub(crate) fn bytes_of(&self, name: &str) -> u64 {
        match name {
            names::COMPONENT => self.component_bytes,
            _ if name.starts_with(names::GOLDEN) => self.golden_bytes,
            _ => self.text_bytes,
        }
    }
}

const LIMITS: ArchiveLimits = ArchiveLimits::DEFAULT;

/// Why one part of an archive is refused.
#[derive(Debug)]
pub(crate) struct Damage {
    pub(crate) part: String,
    pub(crate) message: String,
}

impl Damage {
    pub(crate) fn new(part: &str, message: impl Into<String>) -> Self {
        Self { part: part.to_owned(), message: message.into() }
    }
}

/// The reason why `name` is not allowed in a bundle; `None` if it is allowed.
pub(crate) fn refuse_name(name: &str) -> Option<&'static str> {
    const FLAT: [&str; 6] =
        [names::LICENSE, names::README, names::SUMS, names::MANIFEST, names::COMPONENT, names::SIGNATURES];
    if FLAT.contains(&name) {
        return None;
    }
    let parts = || name.split(['/', '\\']);
    match name {
        "" => Some("has no name"),
        _ if name.starts_with(['/', '\\']) || name.contains(':') => {
            Some("has an absolute path; a bundle's paths are relative")
        }
        _ if parts().any(|part| part == "..") => Some("leaves the bundle through `..`"),
        _ if name.contains('\\') => Some("has a backslash in its path"),
        _ if name.chars().any(disturbs) => {
            Some("has a character in its name that a terminal does not show, or that reorders text")
        }
        _ if is_golden(name) => None,
        _ => Some(
            "is not part of a bundle; expected LICENSE, README.md, SHA256SUMS, golden/*.jsonl, plugin.toml, plugin.wasm and \
             signatures",
        ),
    }
}

/// Whether `name` is `golden/NAME.jsonl`, short enough for a tar header.
pub(crate) fn is_golden(name: &str) -> bool {
    let file = name.strip_prefix(names::GOLDEN).and_then(|file| file.strip_suffix(names::GOLDEN_ENDING));
    let fits = |file: &str| !file.is_empty() && !file.starts_with('.') && !file.contains(['/', '\\', ':']);
    name.len() <= LONGEST_NAME && file.is_some_and(fits) && !name.chars().any(disturbs)
}

/// Magic number of a skippable frame (RFC 8878, 3.1.2): 0x184D2A50 to 0x184D2A5F, here the one that ends in 5.
const MAGIC: [u8; 4] = 0x184D_2A55_u32.to_le_bytes();
const SIZE: [u8; 4] = 32_u32.to_le_bytes();
const SEAL_BYTES: usize = 40;

fn seal(mut frame: Vec<u8>) -> Vec<u8> {
    let digest = Sha256::digest(&frame);
    frame.extend_from_slice(&MAGIC);
    frame.extend_from_slice(&SIZE);
    frame.extend_from_slice(&digest);
    frame
}

/// The frame before an intact seal.
fn unseal(bytes: &[u8]) -> Result<&[u8], Damage> {
    let start = bytes.len().checked_sub(SEAL_BYTES);
    let Some((frame, seal)) = start.map(|start| bytes.split_at(start)) else {
        return Err(Damage::new(
            "seal",
            "is missing; the file is truncated, or is not a bundle; pack or fetch it again",
        ));
    };
    if seal[..4] != MAGIC || seal[4..8] != SIZE {
        let message = "is missing or damaged; the file is truncated, has bytes after its end, or is not a bundle; pack or fetch it again";
        return Err(Damage::new("seal", message));
    }
    match seal[8..] == Sha256::digest(frame)[..] {
        true => Ok(frame),
        false => Err(Damage::new(
            "compressed stream",
            "does not have the SHA-256 in the seal; bytes of the file were changed or lost after packing",
        )),
    }
}

/// Size of the name field of a ustar header; the prefix field is not used.
const LONGEST_NAME: usize = 100;
/// Part of the format: another level gives other bytes. A Python component of 18 MB takes about a second.
const LEVEL: i32 = 12;
/// log2 of the window, 4 MiB: the memory that a reader needs to decode.
const WINDOW_LOG: u32 = 22;

pub(crate) fn write(files: &BTreeMap<String, Vec<u8>>) -> io::Result<Vec<u8>> {
    let tar = tar_stream(files)?;
    let mut encoder = zstd::Encoder::new(Vec::new(), LEVEL)?;
    encoder.set_parameter(CParameter::WindowLog(WINDOW_LOG))?;
    encoder.include_checksum(true)?;
    encoder.include_contentsize(true)?;
    encoder.set_pledged_src_size(Some(tar.len() as u64))?;
    io::Write::write_all(&mut encoder, &tar)?;
    Ok(seal(encoder.finish()?))
}

fn tar_stream(files: &BTreeMap<String, Vec<u8>>) -> io::Result<Vec<u8>> {
    debug_assert!(files.keys().all(|name| refuse_name(name).is_none()));
    debug_assert!(files.keys().next_back().is_some_and(|last| last == names::SIGNATURES || last == names::COMPONENT));
    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in files {
        tar.append(&header(name, content.len() as u64), content.as_slice())?;
    }
    tar.into_inner()
}

/// The only accepted header of an entry with this name and size.
fn header(name: &str, size: u64) -> Header {
    let mut header = Header::new_ustar();
    let field = &mut header.as_ustar_mut().expect("the header was made as ustar").name;
    let n_bytes = name.len().min(field.len());
    field[..n_bytes].copy_from_slice(&name.as_bytes()[..n_bytes]);
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header.set_cksum();
    header
}

const BLOCK: usize = 512;
const STREAM: &str = "compressed stream";
const TAR: &str = "tar stream";
/// A decoded size up to this is accepted at any compression ratio.
const HARMLESS_BYTES: u64 = 4 << 20;

pub(crate) fn read(bytes: &[u8]) -> Result<BTreeMap<String, Vec<u8>>, Damage> {
    let n_bytes = bytes.len() as u64;
    if n_bytes > LIMITS.compressed_bytes {
        return Err(Damage::new(STREAM, too_large(n_bytes, LIMITS.compressed_bytes)));
    }
    let frame = unseal(bytes)?;
    let tar_limit = LIMITS.tar_bytes.min(HARMLESS_BYTES.saturating_add(n_bytes.saturating_mul(LIMITS.ratio)));
    let mut decoder = decoder(frame)?;
    let mut stream = Stream { source: &mut decoder, n_left: tar_limit, tar_limit };
    let files = read_entries(&mut stream)?;
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
    let mut decoder = zstd::Decoder::with_buffer(frame).map_err(|error| undecodable(&error))?.single_frame();
    decoder.window_log_max(WINDOW_LOG).map_err(|error| undecodable(&error))?;
    Ok(decoder)
}

fn rest_of(mut decoder: Decoder<'_>) -> Result<&[u8], Damage> {
    // The decoder can return the last content before it has checked the frame's checksum.
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
    /// Appends up to `n_bytes` to `content`; fewer only at the end of the stream.
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

    /// The content of one file, without its zero padding.
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

fn read_entries(stream: &mut Stream<'_, '_>) -> Result<BTreeMap<String, Vec<u8>>, Damage> {
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut n_golden_bytes = 0;
    loop {
        let block = stream.block()?.ok_or_else(|| Damage::new(TAR, "has no end mark; the archive is truncated"))?;
        if block == [0; BLOCK] {
            break;
        }
        let (name, n_bytes) = entry(&block)?;
        if files.len() == LIMITS.entries {
            return Err(Damage::new(TAR, format!("has more than {} files", LIMITS.entries)));
        }
        refuse_order(&files, &name)?;
        if name.starts_with(names::GOLDEN) {
            n_golden_bytes += n_bytes;
            if n_golden_bytes > LIMITS.golden_bytes {
                return Err(Damage::new(
                    &name,
                    format!("is more than the {} bytes of golden cases that are read", LIMITS.golden_bytes),
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

/// Requires one more block of zeros and the end of the stream.
fn end(stream: &mut Stream<'_, '_>) -> Result<(), Damage> {
    if stream.block()? != Some([0; BLOCK]) {
        return Err(Damage::new(TAR, "has no second end mark; the archive is truncated"));
    }
    // Reads without the limit, so that a stream of exactly the maximum size is not rejected as a decompression bomb.
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

/// Parses the name and size of a tar entry, and rejects it unless its header is byte-equal to the canonical one of [`header`].
fn entry(block: &[u8; BLOCK]) -> Result<(String, u64), Damage> {
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
    match n_bytes > LIMITS.bytes_of(&name) {
        true => refuse(&too_large(n_bytes, LIMITS.bytes_of(&name))),
        false => Ok((name, n_bytes)),
    }
}
