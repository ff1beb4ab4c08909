//! The reader of bundles. Seal and digests would reject every random change before the code behind them runs. Therefore the first byte
//! selects how much is valid: the input is the file itself, its zstd frame, its tar stream, or a tar stream whose `SHA256SUMS` is
//! computed again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use querl_bundle::Bundle;
use sha2::{Digest, Sha256};
use std::io::Read;

fuzz_target!(|input: &[u8]| {
    let Some((dress, bytes)) = input.split_first() else { return };
    let archive = match dress % 4 {
        0 => bytes.to_vec(),
        1 => sealed(bytes.to_vec()),
        2 => archive(bytes),
        _ => archive(&with_fitting_sums(bytes)),
    };
    match Bundle::from_bytes(&archive, "fuzz.querl") {
        Ok(bundle) => check(&bundle),
        Err(error) => assert!(error.to_string().starts_with("fuzz.querl: ")),
    }
});

/// An accepted bundle has no path that leaves a folder, and a manifest that names its component.
fn check(bundle: &Bundle) {
    assert!(bundle.files().all(|(name, _)| !name.contains("..") && !name.starts_with('/') && !name.contains('\\')));
    let section = bundle.manifest().bundle.as_ref().expect("a bundle's manifest is complete");
    assert_eq!(section.component, hex::encode(Sha256::digest(bundle.component())));
}

fn archive(tar: &[u8]) -> Vec<u8> {
    sealed(zstd::encode_all(tar, 1).expect("memory is no file"))
}

/// The seal as documented in the first lines of querl-bundle.
fn sealed(mut frame: Vec<u8>) -> Vec<u8> {
    let digest = Sha256::digest(&frame);
    frame.extend_from_slice(&[0x55, 0x2a, 0x4d, 0x18, 32, 0, 0, 0]);
    frame.extend_from_slice(&digest);
    frame
}

/// The same stream with `SHA256SUMS` computed again, including the length.
fn with_fitting_sums(tar: &[u8]) -> Vec<u8> {
    let entries = entries(tar);
    let mut out = Vec::new();
    for (header, name, content) in &entries {
        let sums = if name == "SHA256SUMS" { Some(sums(&entries)) } else { None };
        let content = sums.as_deref().unwrap_or(content);
        let mut header = header.clone();
        header.set_size(content.len() as u64);
        header.set_cksum();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(content);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.resize(out.len() + 1024, 0);
    out
}

type Entry = (tar::Header, String, Vec<u8>);

fn entries(tar: &[u8]) -> Vec<Entry> {
    let mut archive = tar::Archive::new(tar);
    let Ok(entries) = archive.entries() else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.raw(true).take(32) {
        let Ok(entry) = entry else { break };
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let header = entry.header().clone();
        let mut content = Vec::new();
        if entry.take(1 << 16).read_to_end(&mut content).is_err() {
            break;
        }
        found.push((header, name, content));
    }
    found
}

fn sums(entries: &[Entry]) -> Vec<u8> {
    let listed = entries.iter().filter(|(_, name, _)| name != "SHA256SUMS" && name != "signatures");
    let lines = listed.map(|(_, name, content)| format!("{}  {name}\n", hex::encode(Sha256::digest(content))));
    lines.collect::<String>().into_bytes()
}
