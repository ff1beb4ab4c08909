//! Writes an archive, the same bytes from the same files.

use super::{names, seal};
use std::collections::BTreeMap;
use std::io;
use tar::{EntryType, Header};
use zstd::stream::raw::CParameter;

/// The name field of a ustar header; longer names would take the prefix field, which no name of a bundle needs.
pub(super) const LONGEST_NAME: usize = 100;
/// Part of the format: another level makes other bytes. A Python component of 18 MB takes about a second at this one.
const LEVEL: i32 = 12;
/// log2 of the window, 4 MiB: what a reader must hold to decode.
pub(super) const WINDOW_LOG: u32 = 22;

/// The archive of `files`, by name.
pub(crate) fn write(files: &BTreeMap<String, Vec<u8>>) -> io::Result<Vec<u8>> {
    let tar = tar_stream(files)?;
    let mut encoder = zstd::Encoder::new(Vec::new(), LEVEL)?;
    encoder.set_parameter(CParameter::WindowLog(WINDOW_LOG))?;
    encoder.include_checksum(true)?;
    encoder.include_contentsize(true)?;
    encoder.set_pledged_src_size(Some(tar.len() as u64))?;
    io::Write::write_all(&mut encoder, &tar)?;
    Ok(seal::seal(encoder.finish()?))
}

fn tar_stream(files: &BTreeMap<String, Vec<u8>>) -> io::Result<Vec<u8>> {
    debug_assert!(files.keys().all(|name| super::refuse_name(name).is_none()));
    debug_assert!(files.keys().next_back().is_some_and(|last| last == names::SIGNATURES || last == names::COMPONENT));
    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in files {
        tar.append(&header(name, content.len() as u64), content.as_slice())?;
    }
    tar.into_inner()
}

/// The one header that an entry of this name and size has.
pub(super) fn header(name: &str, size: u64) -> Header {
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
