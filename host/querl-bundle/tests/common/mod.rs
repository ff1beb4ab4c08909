//! Helpers: a plugin's folder, and archives built entry by entry.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use sha2::{Digest, Sha256};
use std::path::Path;
use tar::{EntryType, Header};

pub const MANIFEST: &str = r#"[plugin]
id = "reward-brevity"
version = "0.1.0"
contract = "0.1.0"
kinds = ["reward"]
description = "短的改写得分高"
license = "Apache-2.0"
range = [0.0, 1.0]

[settings.max_chars]
type = "integer"
default = 40
minimum = 1
maximum = 1000
doc = "改写最多的字数"

[settings.mode]
type = "text"
default = "soft"
choices = ["soft", "hard"]

[settings.weight]
type = "number"
minimum = 0

[settings.banned]
type = "list"

[settings.strict]
type = "boolean"

[limits]
fuel_per_item = 2_000_000
memory_bytes = 67108864
"#;

/// The start of a component, and a text as its rest; nothing here runs it.
pub fn component() -> Vec<u8> {
    [b"\0asm\x0d\0\x01\0".as_slice(), "胶原蛋白怎么吃".repeat(20).as_bytes()].concat()
}

pub fn plugin_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path());
    folder
}

pub fn fill(folder: &Path) {
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    std::fs::create_dir_all(folder.join("golden")).unwrap();
    write("golden/second.jsonl", "{\"name\":\"长\"}\n");
    write("golden/first.jsonl", "{\"name\":\"短\"}\n");
    write("golden/notes.txt", "not packed");
    write("LICENSE", "Apache License 2.0\n");
    write("README.md", "# 简短奖励\n");
    write("plugin.toml", MANIFEST);
    write("package.json", "{}");
}

pub fn packed() -> Vec<u8> {
    querl_bundle::pack(plugin_folder().path(), &component()).unwrap()
}

/// An entry of an archive that is made by hand.
#[derive(Clone)]
pub struct Entry {
    pub name: Vec<u8>,
    pub content: Vec<u8>,
    pub header: fn(&mut Header),
}

impl Entry {
    pub fn new(name: &str, content: &[u8]) -> Self {
        Self { name: name.into(), content: content.to_vec(), header: |_| {} }
    }

    pub fn with(mut self, header: fn(&mut Header)) -> Self {
        self.header = header;
        self
    }

    pub fn blocks(&self) -> Vec<u8> {
        let mut header = Header::new_ustar();
        header.as_ustar_mut().unwrap().name[..self.name.len()].copy_from_slice(&self.name);
        header.set_entry_type(EntryType::Regular);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(self.content.len() as u64);
        (self.header)(&mut header);
        header.set_cksum();
        let mut blocks = [header.as_bytes().as_slice(), &self.content].concat();
        blocks.resize(blocks.len().next_multiple_of(512), 0);
        blocks
    }
}

/// The header of the file `name`, which gives its size as `n_bytes`, without its content.
pub fn header_of_size(name: &str, n_bytes: u64) -> Vec<u8> {
    let mut header = Header::from_byte_slice(&Entry::new(name, b"").blocks()).clone();
    header.set_size(n_bytes);
    header.set_cksum();
    header.as_bytes().to_vec()
}

/// The entries of an archive, ready to be changed.
pub fn entries(archive: &[u8]) -> Vec<Entry> {
    let tar = zstd::decode_all(archive).unwrap();
    let mut archive = tar::Archive::new(tar.as_slice());
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let mut content = Vec::new();
        std::io::Read::read_to_end(&mut entry, &mut content).unwrap();
        Entry { name: entry.path_bytes().to_vec(), content, header: |_| {} }
    });
    entries.collect()
}

pub fn tar_of(entries: &[Entry]) -> Vec<u8> {
    let mut tar: Vec<u8> = entries.iter().flat_map(Entry::blocks).collect();
    tar.resize(tar.len() + 1024, 0);
    tar
}

/// The tar stream compressed and sealed, as documented in the crate's first lines.
pub fn archive_of_tar(tar: &[u8]) -> Vec<u8> {
    sealed(zstd::encode_all(tar, 3).unwrap())
}

pub fn archive_of(entries: &[Entry]) -> Vec<u8> {
    archive_of_tar(&tar_of(entries))
}

pub fn sealed(mut frame: Vec<u8>) -> Vec<u8> {
    let digest = Sha256::digest(&frame);
    frame.extend_from_slice(&[0x55, 0x2a, 0x4d, 0x18, 32, 0, 0, 0]);
    frame.extend_from_slice(&digest);
    frame
}

/// Computes `SHA256SUMS` again, as an attacker who changes a bundle would.
pub fn with_sums(mut entries: Vec<Entry>) -> Vec<Entry> {
    let line = |entry: &Entry| {
        format!("{}  {}\n", hex::encode(Sha256::digest(&entry.content)), String::from_utf8_lossy(&entry.name))
    };
    let is_listed = |entry: &&Entry| entry.name != b"SHA256SUMS" && entry.name != b"signatures";
    let text: String = entries.iter().filter(is_listed).map(line).collect();
    let sums = entries.iter_mut().find(|entry| entry.name == b"SHA256SUMS");
    if let Some(sums) = sums {
        sums.content = text.into_bytes();
    }
    entries
}

/// For each line `OLD => NEW => MESSAGE` of `table`, `text` with NEW instead of OLD (`\n` is a line break), and MESSAGE.
pub fn replaced<'t>(text: &str, table: &'t str) -> Vec<(String, &'t str)> {
    let row = |line: &'t str| {
        let [old, new, message]: [&str; 3] = line.splitn(3, " => ").collect::<Vec<_>>().try_into().unwrap();
        let [old, new] = [old, new].map(|part| part.replace("\\n", "\n"));
        assert!(text.contains(&old), "{old}");
        (text.replacen(&old, &new, 1), message)
    };
    table.trim().lines().map(row).collect()
}
