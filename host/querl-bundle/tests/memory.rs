//! The only test of its process, because it measures the memory of the process.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use common::{header_of_size, sealed};
use querl_bundle::oci::{Credentials, RegistryReference, Transport, pull};
use querl_bundle::{Bundle, Manifest};
use std::io::{Read, Write};
use std::net::TcpListener;

/// Peak resident memory of the process, in bytes.
fn high_water() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// A file of less than 300 kB whose component decompresses to `n_bytes` of zeros; written in chunks, so that creating it needs little
/// memory.
fn bomb(n_bytes: u64) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
    encoder.write_all(&header_of_size("plugin.wasm", n_bytes)).unwrap();
    std::io::copy(&mut std::io::repeat(0).take(n_bytes), &mut encoder).unwrap();
    sealed(encoder.finish().unwrap())
}

/// Starts a registry whose responses never end; returns its host.
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
    // A table of one line per key, each with the long name as a prefix, would need 50 GB.
    let long_names =
        format!("[{}]\n", "a".repeat(500_000)) + &(0..60_000).map(|n| format!("k{n}=1\n")).collect::<String>();
    Manifest::parse(&long_names, "plugin.toml").unwrap_err();
    // The size in a header must not be allocated before the content is decoded.
    let grown = high_water() - before;
    assert!(grown < 64 << 20, "{grown} bytes");
    // Regression: an endless response was read until the memory was exhausted.
    let place = RegistryReference::parse(&format!("{}/a/b:1.0.0", endless_registry())).unwrap();
    let anonymous = Credentials::anonymous();
    let pulling = pull(&place, &anonymous, Transport::Secure);
    let error = tokio::runtime::Runtime::new().unwrap().block_on(pulling).unwrap_err().to_string();
    assert!(error.ends_with("the registry's answers take more than 512 MiB of memory; check the address"), "{error}");
    let grown = high_water() - before;
    assert!(grown < 2 << 30, "{grown} bytes");
}
