//! Alone in its process, since it measures the process.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use common::{Entry, sealed};
use querl_bundle::oci::{Credentials, RegistryReference, Transport, pull};
use querl_bundle::{Bundle, Manifest};
use std::io::{Read, Write};
use std::net::TcpListener;

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

/// The host of a registry whose answers do not end.
fn endless_registry() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n");
                while stream.write_all(&[b' '; 1 << 16]).is_ok() {}
            });
        }
    });
    host
}

#[test]
fn bombs_and_endless_answers_are_refused_without_taking_memory() {
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
    // Regression: an answer without an end was read until memory was full.
    let place = RegistryReference::parse(&format!("{}/a/b:1.0.0", endless_registry())).unwrap();
    let anonymous = Credentials::anonymous();
    let pulling = pull(&place, &anonymous, Transport::Secure);
    let error = tokio::runtime::Runtime::new().unwrap().block_on(pulling).unwrap_err().to_string();
    assert!(error.ends_with("the registry's answers take more than 512 MiB of memory; check the address"), "{error}");
    let grown = high_water() - before;
    assert!(grown < 2 << 30, "{grown} bytes");
}
