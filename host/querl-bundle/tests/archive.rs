//! Packing the same content gives the same bytes, and the error for a changed byte names the changed part.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Entry, archive_of, component, entries, fill, packed, plugin_folder, with_sums};
use querl_bundle::{Bundle, Language, pack};
use sha2::{Digest, Sha256};

fn refusal(archive: &[u8]) -> String {
    Bundle::from_bytes(archive, "x.querl").unwrap_err().to_string()
}

#[test]
fn packed_folder_is_read_back() {
    let bundle = Bundle::from_bytes(&packed(), "x.querl").unwrap();
    let names: Vec<_> = bundle.files().map(|(name, _)| name).collect();
    let expected = [
        "LICENSE",
        "README.md",
        "SHA256SUMS",
        "golden/first.jsonl",
        "golden/second.jsonl",
        "plugin.toml",
        "plugin.wasm",
    ];
    assert_eq!(names, expected);
    assert_eq!(bundle.component(), component());
    assert_eq!(bundle.golden().count(), 2);
    assert_eq!(bundle.manifest().build.unwrap().language, Language::JavaScript);
    assert_eq!(bundle.manifest().bundle.as_ref().unwrap().component, hex::encode(Sha256::digest(component())));
    assert_eq!(bundle.digest(), hex::encode(Sha256::digest(bundle.file("SHA256SUMS").unwrap())));
    assert!(bundle.signatures().is_empty());
}

#[test]
fn same_content_makes_the_same_bytes() {
    let first = packed();
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("elsewhere");
    // Files with other times and modes, created in another order.
    std::fs::create_dir_all(below.join("golden")).unwrap();
    std::fs::write(below.join("golden/first.jsonl"), "").unwrap();
    fill(&below);
    #[cfg(unix)]
    std::fs::set_permissions(below.join("LICENSE"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    assert_eq!(pack(&below, &component()).unwrap(), first);
}

#[test]
fn digest_is_the_one_of_the_first_release() {
    // The digest is content alone, so that it holds for every version of the compressor.
    let bundle = Bundle::from_bytes(&packed(), "x.querl").unwrap();
    assert_eq!(bundle.digest(), "36c7d56582018eff602c0bd425b69c14bf3d35b5cd148a61704a036741ad19fa");
}

#[test]
fn other_tools_read_the_archive() {
    let names: Vec<_> = entries(&packed()).into_iter().map(|entry| String::from_utf8(entry.name).unwrap()).collect();
    assert_eq!(names.len(), 7);
}

#[test]
fn every_flipped_byte_of_the_file_is_noticed() {
    let archive = packed();
    for index in 0..archive.len() {
        for mask in [0x01, 0x10, 0x80] {
            let mut changed = archive.clone();
            changed[index] ^= mask;
            let error = refusal(&changed);
            let part = if index < archive.len() - 40 { "x.querl: compressed stream: " } else { "x.querl: " };
            assert!(error.starts_with(part), "{index}: {error}");
        }
    }
}

#[test]
fn every_truncated_file_is_refused() {
    let archive = packed();
    for n_bytes in 0..archive.len() {
        assert!(Bundle::from_bytes(&archive[..n_bytes], "x.querl").is_err(), "{n_bytes}");
    }
    let longer = [archive.as_slice(), b"\0"].concat();
    assert!(refusal(&longer).contains("has bytes after its end"), "{}", refusal(&longer));
}

/// An attacker can compress and seal changed content again: then `SHA256SUMS` does not match.
#[test]
fn changed_byte_in_each_part_is_named() {
    let key = querl_bundle::SigningKey::generate().unwrap();
    let signed = querl_bundle::sign(&packed(), &key).unwrap();
    let original = entries(&signed);
    for (part, named) in [
        ("LICENSE", "LICENSE: does not have the SHA-256 that SHA256SUMS gives for it"),
        ("README.md", "README.md: does not have the SHA-256 that SHA256SUMS gives for it"),
        ("golden/first.jsonl", "golden/first.jsonl: does not have the SHA-256 that SHA256SUMS gives for it"),
        ("plugin.toml", "plugin.toml: does not have the SHA-256 that SHA256SUMS gives for it"),
        ("plugin.wasm", "plugin.wasm: does not have the SHA-256 that SHA256SUMS gives for it"),
        ("SHA256SUMS", "SHA256SUMS"),
        ("signatures", "signatures: "),
    ] {
        let index = original.iter().position(|entry| entry.name == part.as_bytes()).unwrap();
        for at in 0..original[index].content.len() {
            let mut changed = original.clone();
            changed[index].content[at] ^= 0x01;
            let error = refusal(&archive_of(&changed));
            assert!(error.starts_with("x.querl: ") && error.contains(named), "{part} at {at}: {error}");
        }
    }
}

/// If both the content and `SHA256SUMS` were changed, the signature does not match.
#[test]
fn changed_content_with_new_sums_does_not_fit_the_signature() {
    let key = querl_bundle::SigningKey::generate().unwrap();
    let mut changed = entries(&querl_bundle::sign(&packed(), &key).unwrap());
    changed.iter_mut().find(|entry| entry.name == b"README.md").unwrap().content = b"# other\n".to_vec();
    let error = refusal(&archive_of(&with_sums(changed.clone())));
    assert!(error.contains("signatures: has a signature in line 1 that does not fit the bundle"), "{error}");
    // Without the signature, the bundle is intact and unsigned.
    changed.retain(|entry| entry.name != b"signatures");
    let unsigned = Bundle::from_bytes(&archive_of(&with_sums(changed)), "x.querl").unwrap();
    assert!(unsigned.verify(&[key.public()]).is_err());
}

#[test]
fn manifest_of_another_component_is_refused() {
    let mut changed = entries(&packed());
    changed.iter_mut().find(|entry| entry.name == b"plugin.wasm").unwrap().content.push(b'x');
    let error = refusal(&archive_of(&with_sums(changed)));
    assert!(error.contains("plugin.toml: names a component with SHA-256"), "{error}");
}

#[test]
fn hand_written_manifest_in_a_bundle_is_refused() {
    let mut changed = entries(&packed());
    let manifest = changed.iter_mut().find(|entry| entry.name == b"plugin.toml").unwrap();
    manifest.content.extend_from_slice(b"# a comment\n");
    let error = refusal(&archive_of(&with_sums(changed.clone())));
    assert!(error.contains("plugin.toml: is not written as packing writes it"), "{error}");
    let manifest = changed.iter_mut().find(|entry| entry.name == b"plugin.toml").unwrap();
    manifest.content = common::MANIFEST.replace("0.1.0", "0.1").into_bytes();
    let error = refusal(&archive_of(&with_sums(changed)));
    assert!(error.starts_with("x.querl: plugin.toml:3: plugin.version is \"0.1\""), "{error}");
}

#[test]
fn folder_that_cannot_be_packed_is_named_with_the_remedy() {
    type Breakage = fn(&std::path::Path);
    let cases: [(Breakage, &str); 7] = [
        (|folder| std::fs::remove_file(folder.join("README.md")).unwrap(), "README.md: is missing; a bundle needs it"),
        (|folder| std::fs::remove_file(folder.join("LICENSE")).unwrap(), "LICENSE: is missing; a bundle needs it"),
        (|folder| std::fs::write(folder.join("LICENSE"), " \n").unwrap(), "LICENSE: is empty or not UTF-8 text"),
        (|folder| std::fs::remove_file(folder.join("plugin.toml")).unwrap(), "plugin.toml: "),
        (|folder| std::fs::create_dir(folder.join("golden/x.jsonl")).unwrap(), "x.jsonl: is not a plain file"),
        (|folder| std::fs::write(folder.join("golden/.x.jsonl"), "").unwrap(), ".x.jsonl: cannot be in a bundle"),
        (
            |folder| {
                std::fs::write(
                    folder.join("plugin.toml"),
                    format!(
                        "{}\n[bundle]\nformat = 1\ncomponent = \"{}\"\ncomponent_bytes = 1\n",
                        common::MANIFEST,
                        "0".repeat(64)
                    ),
                )
                .unwrap()
            },
            "plugin.toml: has a section [bundle], which packing adds; take it out",
        ),
    ];
    for (break_it, expected) in cases {
        let folder = plugin_folder();
        break_it(folder.path());
        let error = pack(folder.path(), &component()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[cfg(unix)]
#[test]
fn link_in_a_folder_is_not_packed() {
    let folder = plugin_folder();
    std::fs::write(folder.path().join("secret"), "token").unwrap();
    std::os::unix::fs::symlink("../secret", folder.path().join("golden/link.jsonl")).unwrap();
    let error = pack(folder.path(), &component()).unwrap_err().to_string();
    assert!(error.contains("link.jsonl: is not a plain file; a bundle takes no links"), "{error}");
}

/// Symptom: files from outside of the plugin's folder were packed.
#[cfg(unix)]
#[test]
fn golden_folder_behind_a_link_is_not_packed() {
    for (golden, link) in [("golden", "golden"), ("tests/golden", "tests/golden"), ("tests/golden", "tests")] {
        let (folder, outside) = (plugin_folder(), tempfile::tempdir().unwrap());
        std::fs::rename(folder.path().join("golden"), outside.path().join("golden")).unwrap();
        let manifest = common::MANIFEST.replace("range =", &format!("golden = \"{golden}\"\nrange ="));
        std::fs::write(folder.path().join("plugin.toml"), manifest).unwrap();
        std::fs::create_dir_all(folder.path().join(link).parent().unwrap()).unwrap();
        let target = if link == "tests" { outside.path().to_owned() } else { outside.path().join("golden") };
        std::os::unix::fs::symlink(target, folder.path().join(link)).unwrap();
        let error = pack(folder.path(), &component()).unwrap_err().to_string();
        assert!(error.ends_with(&format!("{link}: is a link; a bundle takes no links and folders here")), "{error}");
    }
}

#[test]
fn golden_folder_of_another_name_becomes_golden() {
    let folder = plugin_folder();
    std::fs::rename(folder.path().join("golden"), folder.path().join("cases")).unwrap();
    let manifest = common::MANIFEST.replace("range =", "golden = \"cases\"\nrange =");
    std::fs::write(folder.path().join("plugin.toml"), manifest).unwrap();
    let bundle = Bundle::from_bytes(&pack(folder.path(), &component()).unwrap(), "x.querl").unwrap();
    assert_eq!(bundle.golden().count(), 2);
    std::fs::remove_dir_all(folder.path().join("cases")).unwrap();
    assert!(pack(folder.path(), &component()).unwrap_err().to_string().contains("cases: "));
}

#[test]
fn core_modules_and_other_bytes_are_no_components() {
    let folder = plugin_folder();
    let error = pack(folder.path(), b"\0asm\x01\0\0\0").unwrap_err().to_string();
    assert!(error.contains("its component is a core module; expected a component"), "{error}");
    let error = pack(folder.path(), b"\x7fELF").unwrap_err().to_string();
    assert!(error.contains("its component is not WebAssembly"), "{error}");
}

#[test]
fn file_of_another_sort_is_refused_at_once() {
    assert!(
        refusal(b"").contains("seal: is missing; the file is truncated, or is not a bundle; pack or fetch it again")
    );
    assert!(refusal(&component()).contains("is not a bundle"));
    assert!(refusal(&archive_of(&[Entry::new("LICENSE", b"x")])).contains("README.md: is missing"));
}
