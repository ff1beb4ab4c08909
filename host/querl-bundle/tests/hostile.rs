//! Invalid or malicious archives, which `querl plugin pack` cannot produce.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Entry, archive_of, archive_of_tar, entries, header_of_size, packed, sealed, tar_of, with_sums};
use querl_bundle::Bundle;
use std::io::Write;
use tar::EntryType;

fn refusal(archive: &[u8]) -> String {
    Bundle::from_bytes(archive, "x.querl").unwrap_err().to_string()
}

/// A complete bundle with one more entry, in the sorted position of its name.
fn with_entry(extra: Entry) -> Vec<u8> {
    let mut all = entries(&packed());
    let place = all.iter().position(|entry| entry.name > extra.name).unwrap_or(all.len());
    all.insert(place, extra);
    archive_of(&with_sums(all))
}

#[test]
fn paths_that_leave_the_bundle_are_refused() {
    for (name, expected) in [
        ("../evil.jsonl", "../evil.jsonl: leaves the bundle through `..`"),
        ("golden/../../evil.jsonl", "golden/../../evil.jsonl: leaves the bundle through `..`"),
        ("golden/..", "golden/..: leaves the bundle through `..`"),
        ("/etc/passwd", "/etc/passwd: has an absolute path; a bundle's paths are relative"),
        ("C:/x.jsonl", "C:/x.jsonl: has an absolute path"),
        ("golden\\x.jsonl", "golden\\x.jsonl: has a backslash in its path"),
        ("golden/..\\x.jsonl", "golden/..\\x.jsonl: leaves the bundle through `..`"),
        ("golden/a/b.jsonl", "golden/a/b.jsonl: is not part of a bundle"),
        ("golden/x\u{1b}[2J.jsonl", "golden/x[2J.jsonl: has a character in its name that a terminal does not show"),
        ("golden/\u{202e}lnosj.jsonl", "golden/lnosj.jsonl: has a character in its name"),
        ("golden/cases\u{200b}.jsonl", "golden/cases.jsonl: has a character in its name"),
        ("plugin.toml\u{2060}", "plugin.toml: has a character in its name"),
        ("install.sh", "install.sh: is not part of a bundle; expected LICENSE, README.md"),
        ("", "tar stream: has no name"),
    ] {
        let error = refusal(&with_entry(Entry::new(name, b"x")));
        assert!(error.contains(expected), "{name}: {error}");
        assert!(!error.contains('\u{1b}'));
    }
    let mut odd = Entry::new("golden/x.jsonl", b"x");
    odd.name = b"golden/\xff.jsonl".to_vec();
    assert!(refusal(&with_entry(odd)).contains("has a header other than packing writes"));
}

#[test]
fn links_and_devices_are_refused() {
    let entry = || Entry::new("golden/x.jsonl", b"");
    for (entry, expected) in [
        (
            entry().with(|header| {
                header.set_entry_type(EntryType::Symlink);
                header.set_link_name("/etc/passwd").unwrap();
            }),
            "golden/x.jsonl: is a symbolic link; a bundle has plain files only",
        ),
        (
            entry().with(|header| {
                header.set_entry_type(EntryType::Link);
                header.set_link_name("plugin.wasm").unwrap();
            }),
            "golden/x.jsonl: is a hard link",
        ),
        (entry().with(|header| header.set_entry_type(EntryType::Char)), "golden/x.jsonl: is a device"),
        (entry().with(|header| header.set_entry_type(EntryType::Fifo)), "golden/x.jsonl: is a device"),
        (entry().with(|header| header.set_entry_type(EntryType::Directory)), "golden/x.jsonl: is a folder"),
        (entry().with(|header| header.set_entry_type(EntryType::XHeader)), "golden/x.jsonl: has a header of a sort"),
        (
            entry().with(|header| header.set_entry_type(EntryType::GNULongName)),
            "golden/x.jsonl: has a header of a sort",
        ),
        (entry().with(|header| header.set_entry_type(EntryType::GNUSparse)), "golden/x.jsonl: has a header of a sort"),
        (
            entry().with(|header| header.set_link_name("x").unwrap()),
            "golden/x.jsonl: has a header other than packing writes",
        ),
    ] {
        let error = refusal(&with_entry(entry));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn headers_that_packing_does_not_write_are_refused() {
    let changes: [fn(&mut tar::Header); 6] = [
        |header| header.set_mode(0o755),
        |header| header.set_mtime(1),
        |header| header.set_uid(1000),
        |header| header.set_gid(1000),
        |header| header.set_username("root").unwrap(),
        // The same number, written with a leading space.
        |header| header.as_ustar_mut().unwrap().size[0] = b' ',
    ];
    for change in changes {
        let error = refusal(&with_entry(Entry::new("golden/x.jsonl", b"x").with(change)));
        assert!(error.contains("golden/x.jsonl: has a header other than packing writes"), "{error}");
    }
}

#[test]
fn repeated_and_unsorted_entries_are_refused() {
    let all = entries(&packed());
    let mut twice = all.clone();
    twice.insert(1, all[0].clone());
    assert!(refusal(&archive_of(&twice)).contains("LICENSE: is there twice"));
    let mut swapped = all.clone();
    swapped.swap(0, 1);
    assert!(refusal(&archive_of(&swapped)).contains("LICENSE: comes after `README.md`"));
}

#[test]
fn missing_files_are_named() {
    let all = entries(&packed());
    for name in ["LICENSE", "README.md", "SHA256SUMS", "plugin.toml", "plugin.wasm"] {
        let kept: Vec<_> = all.iter().filter(|entry| entry.name != name.as_bytes()).cloned().collect();
        assert!(refusal(&archive_of(&with_sums(kept))).contains(&format!("{name}: is missing")), "{name}");
    }
    // A removed golden case is still listed in `SHA256SUMS`.
    let kept: Vec<_> = all.iter().filter(|entry| entry.name != b"golden/first.jsonl").cloned().collect();
    let error = refusal(&archive_of(&kept));
    assert!(error.contains("SHA256SUMS: has lines of files that are not there"), "{error}");
}

#[test]
fn bytes_around_the_files_are_refused() {
    let tar = tar_of(&entries(&packed()));
    let after_end = [tar.as_slice(), &[0; 512]].concat();
    assert!(refusal(&archive_of_tar(&after_end)).contains("tar stream: has bytes after its end mark"));
    let one_end = &tar[..tar.len() - 512];
    assert!(refusal(&archive_of_tar(one_end)).contains("tar stream: has no second end mark"));
    let no_end = &tar[..tar.len() - 1024];
    assert!(refusal(&archive_of_tar(no_end)).contains("tar stream: has no end mark"));
    let mut padded = tar.clone();
    let last = padded.len() - 1025;
    padded[last] = 1;
    assert!(refusal(&archive_of_tar(&padded)).contains("plugin.wasm: is followed by padding that is not zero"));
    let cut = &tar[..tar.len() - 1024 - 512];
    assert!(refusal(&archive_of_tar(cut)).contains("plugin.wasm: ends after"), "{}", refusal(&archive_of_tar(cut)));
}

#[test]
fn a_second_frame_is_refused() {
    let tar = tar_of(&entries(&packed()));
    let frame = zstd::encode_all(tar.as_slice(), 3).unwrap();
    let second = zstd::encode_all(b"more".as_slice(), 3).unwrap();
    let error = refusal(&sealed([frame.clone(), second].concat()));
    assert!(error.contains("between the end of its frame and the seal"), "{error}");
    let error = refusal(&sealed([frame.as_slice(), b"garbage"].concat()));
    assert!(error.contains("7 bytes between the end of its frame and the seal"), "{error}");
    assert!(refusal(&sealed(frame[..frame.len() - 10].to_vec())).contains("x.querl: "));
    assert!(refusal(&sealed(b"no frame at all".to_vec())).contains("compressed stream: cannot be decoded"));
}

#[test]
fn frame_that_wants_a_large_window_is_refused() {
    let tar = tar_of(&entries(&packed()));
    let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
    encoder.window_log(27).unwrap();
    encoder.write_all(&tar).unwrap();
    let error = refusal(&sealed(encoder.finish().unwrap()));
    assert!(error.contains("compressed stream: cannot be decoded"), "{error}");
}

#[test]
fn too_many_files_are_refused() {
    let mut all = entries(&packed());
    let place = all.iter().position(|entry| entry.name == b"plugin.toml").unwrap();
    let many = (0..1000).map(|index| Entry::new(&format!("golden/z{index:04}.jsonl"), b""));
    all.splice(place..place, many);
    let error = refusal(&archive_of(&with_sums(all)));
    assert!(error.contains("tar stream: has more than 1000 files"), "{error}");
}

#[test]
fn large_files_are_refused_by_their_headers() {
    // Without content: the reader must reject the header alone.
    for (name, size, expected) in [
        ("LICENSE", 2 << 20, "LICENSE: has 2097152 bytes; at most 1048576 are read"),
        ("golden/x.jsonl", 17 << 20, "golden/x.jsonl: has 17825792 bytes; at most 16777216 are read"),
        ("plugin.wasm", 1 << 40, "plugin.wasm: has 1099511627776 bytes; at most 67108864 are read"),
        ("plugin.wasm", 65 << 20, "plugin.wasm: has 68157440 bytes; at most 67108864 are read"),
    ] {
        let error = refusal(&archive_of_tar(&header_of_size(name, size)));
        assert!(error.contains(expected), "{error}");
    }
}
