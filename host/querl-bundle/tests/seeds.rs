//! The seeds of the fuzzer are valid inputs: a seed that is rejected at its first byte gives the fuzzer no coverage.
#![allow(clippy::unwrap_used)]

mod common;

use common::{archive_of_tar, sealed};
use querl_bundle::lock::LockFile;
use querl_bundle::{Bundle, Manifest};
use std::path::PathBuf;

/// Name and content of each seed of a target.
fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/seeds").join(target);
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let seeds: Vec<_> = files
        .map(|file| (file.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&file).unwrap()))
        .collect();
    assert!(!seeds.is_empty());
    seeds
}

#[test]
fn manifests_and_lock_files_are_read() {
    for (name, text) in seeds("manifest") {
        Manifest::parse(std::str::from_utf8(&text).unwrap(), &name).unwrap();
    }
    for (name, text) in seeds("lock") {
        LockFile::parse(std::str::from_utf8(&text).unwrap(), &name).unwrap();
    }
}

#[test]
fn bundles_are_read_in_every_form() {
    for (name, seed) in seeds("bundle") {
        let archive = match seed[0] {
            0 => seed[1..].to_vec(),
            1 => sealed(seed[1..].to_vec()),
            _ => archive_of_tar(&seed[1..]),
        };
        Bundle::from_bytes(&archive, &name).unwrap();
    }
}
