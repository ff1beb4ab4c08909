//! Paths that are not regular files, or are too large.
#![allow(clippy::unwrap_used)]

mod common;

use common::{component, plugin_folder};
use querl_bundle::lock::LockFile;
use querl_bundle::{Bundle, Manifest, pack};
use std::path::Path;

type Reader = fn(&Path) -> Result<(), querl_bundle::BundleError>;

const READERS: [Reader; 4] = [
    |path| Manifest::read(path).map(drop),
    |path| Manifest::file_digest(path).map(drop),
    |path| LockFile::read(path).map(drop),
    |path| Bundle::open(path).map(drop),
];

/// Reading a device such as `/dev/zero` would use all memory; opening a pipe would block forever.
#[cfg(unix)]
#[test]
fn devices_and_pipes_are_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [Path::new("/dev/zero"), &pipe] {
        for read in READERS {
            let error = read(path).unwrap_err().to_string();
            assert_eq!(error, format!("{}: is not a regular file", path.display()));
        }
    }
    // The manifest in a folder is checked in the same way.
    std::os::unix::fs::symlink("/dev/zero", folder.path().join("plugin.toml")).unwrap();
    assert!(Manifest::read(folder.path()).unwrap_err().to_string().ends_with("plugin.toml: is not a regular file"));
}

#[test]
fn files_too_large_are_not_read_to_their_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large");
    // A sparse file: it uses no disk space, but reading it would need 1 TiB of memory.
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    for (read, most) in READERS.into_iter().zip([1 << 20, 1 << 20, 1 << 20, 72 << 20]) {
        let error = read(&path).unwrap_err().to_string();
        assert_eq!(error, format!("{}: has more than the {most} bytes that are read", path.display()));
    }
    let plugin = plugin_folder();
    std::fs::File::create(plugin.path().join("README.md")).unwrap().set_len(1 << 40).unwrap();
    let error = pack(plugin.path(), &component()).unwrap_err().to_string();
    assert!(error.ends_with("README.md: has more than the 1048576 bytes that are read"), "{error}");
}

#[test]
fn manifests_are_pinned_as_they_are_written() {
    let folder = plugin_folder();
    let file = folder.path().join("plugin.toml");
    let digest = Manifest::file_digest(folder.path()).unwrap();
    assert_eq!(digest, querl_core::fsx::digest_hex(common::MANIFEST.as_bytes()));
    assert_eq!(Manifest::file_digest(&file).unwrap(), digest);
    std::fs::write(&file, common::MANIFEST.replace("2_000_000", "1_000_000")).unwrap();
    assert_ne!(Manifest::file_digest(&file).unwrap(), digest);
}
