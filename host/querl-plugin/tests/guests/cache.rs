//! Compiled code that was modified or exchanged between two runs is not used, but compiled again.
#![cfg(unix)]

use crate::common::{Lines, episode, guest, host_in};
use sha2::{Digest, Sha256};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// Path of the only file in the cache in `base`.
fn kept(base: &Path) -> PathBuf {
    let files: Vec<_> = std::fs::read_dir(base.join("compiled")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

/// Loads the guest in a new host with the cache in `base`, and scores with it. Returns the warnings.
fn used(base: &Path) -> String {
    let (warnings, total) = Lines::of(|| {
        let scored = guest(&host_in(base), "ordinary").score_batch(&[episode("a", "好")]).unwrap();
        scored[0].as_ref().unwrap().total
    });
    assert_eq!(total, 0.5);
    warnings
}

/// Asserts that a cached file that was modified by `change` is not used, with a warning, and is written again.
fn assert_not_used(change: impl FnOnce(&Path), warning: &str) {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(used(folder.path()), "");
    let path = kept(folder.path());
    let code = std::fs::read(&path).unwrap();
    assert_eq!(used(folder.path()), "", "a good file is used in silence");
    change(&path);
    let message = used(folder.path());
    assert!(message.contains(&format!("{}: not used: {warning}", path.display())), "{message}");
    assert_eq!(std::fs::read(&path).unwrap(), code, "compiled and written again");
    assert!(std::fs::symlink_metadata(&path).unwrap().is_file());
    assert_eq!(used(folder.path()), "", "and used again");
}

const DAMAGED: &str = "damaged";
const NOT_OURS: &str = "not a file that only its owner can write";

#[test]
fn flipped_bits_are_noticed_wherever_they_are() {
    let folder = tempfile::tempdir().unwrap();
    used(folder.path());
    let n_bytes = std::fs::read(kept(folder.path())).unwrap().len();
    // Positions in the digest, at the start of the code, within it, and at its end.
    for place in [0, 31, 32, 40, n_bytes / 3, n_bytes / 2, n_bytes - 1] {
        let flip = |path: &Path| {
            let mut file = std::fs::read(path).unwrap();
            file[place] ^= 0x10;
            std::fs::write(path, file).unwrap();
        };
        assert_not_used(flip, DAMAGED);
    }
}

#[test]
fn truncated_and_empty_files_are_not_used() {
    for n_bytes in [0, 16, 32, 1000] {
        let truncate = |path: &Path| {
            let file = std::fs::read(path).unwrap();
            std::fs::write(path, &file[..n_bytes]).unwrap();
        };
        assert_not_used(truncate, DAMAGED);
    }
}

#[test]
fn code_of_one_plugin_is_not_used_for_another() {
    let other = tempfile::tempdir().unwrap();
    guest(&host_in(other.path()), "divides-by-zero");
    let code = std::fs::read(kept(other.path())).unwrap();
    assert_not_used(|path| std::fs::write(path, &code).unwrap(), DAMAGED);
}

#[test]
fn link_to_a_file_is_not_followed() {
    let other = tempfile::tempdir().unwrap();
    let target = other.path().join("elsewhere");
    let link = |path: &Path| {
        std::fs::rename(path, &target).unwrap();
        symlink(&target, path).unwrap();
    };
    assert_not_used(link, NOT_OURS);
}

#[test]
fn file_that_others_can_write_is_not_used() {
    let open = |path: &Path| std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).unwrap();
    assert_not_used(open, NOT_OURS);
}

/// A file with a valid digest that is not code of this host, for example from another build of querl.
#[test]
fn intact_file_that_does_not_load_is_compiled_again() {
    let folder = tempfile::tempdir().unwrap();
    used(folder.path());
    let path = kept(folder.path());
    let code = std::fs::read(&path).unwrap();
    let name = path.file_name().unwrap().as_encoded_bytes();
    let seal = Sha256::new().chain_update(name).chain_update([0]).chain_update(b"no code").finalize();
    std::fs::write(&path, [b"no code", seal.as_slice()].concat()).unwrap();
    let message = used(folder.path());
    assert!(message.contains(&format!("{}: not used: ", path.display())) && !message.contains(DAMAGED), "{message}");
    assert_eq!(std::fs::read(&path).unwrap(), code);
}

#[test]
fn folder_in_place_of_a_file_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    used(folder.path());
    let path = kept(folder.path());
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(used(folder.path()).contains(NOT_OURS));
}
