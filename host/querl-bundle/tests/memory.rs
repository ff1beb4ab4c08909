//! Alone in its process, since it measures the process.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use common::{Entry, sealed};
use querl_bundle::{Bundle, Manifest};
use std::io::{Read, Write};

/// The most memory that the process ever held, in bytes.
fn high_water() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// A file of some kilobytes whose component is `n_bytes` of zeros; made in pieces, so that making it takes no memory.
fn bomb(n_bytes: u64) -> Vec<u8> {
    let mut blocks = Entry::new("plugin.wasm", b"").blocks();
    let mut header = tar::Header::from_byte_slice(&blocks).clone();
    header.set_size(n_bytes);
    header.set_cksum();
    blocks[..512].copy_from_slice(header.as_bytes());
    let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
    encoder.write_all(&blocks).unwrap();
    std::io::copy(&mut std::io::repeat(0).take(n_bytes), &mut encoder).unwrap();
    sealed(encoder.finish().unwrap())
}

#[test]
fn bombs_are_refused_without_taking_memory() {
    let bombs: Vec<_> = [60 << 20, 2 << 30].map(bomb).into();
    assert!(bombs.iter().all(|bomb| bomb.len() < 300_000));
    let before = high_water();
    for bomb in &bombs {
        let error = Bundle::from_bytes(bomb, "bomb.querl").unwrap_err().to_string();
        assert!(error.contains("refused as a bomb") || error.contains("at most 67108864 are read"), "{error}");
    }
    // A line for each key, each with the long name before it, would be 50 GB.
    let long_names =
        format!("[{}]\n", "a".repeat(500_000)) + &(0..60_000).map(|n| format!("k{n}=1\n")).collect::<String>();
    Manifest::parse(&long_names, "plugin.toml").unwrap_err();
    // What a header claims may not be set aside before it is decoded.
    let grown = high_water() - before;
    assert!(grown < 64 << 20, "{grown} bytes");
}
