//! Embeds what `querl plugin new` writes: the SDKs, their templates, the contract, the licence. Makes a table of names and bytes.

use std::fmt::Write;
use std::path::{Path, PathBuf};

/// From the repository's root: a folder or a file, and its name in the table.
const SOURCES: [(&str, &str); 5] = [
    ("sdk/rust", "rust"),
    ("sdk/python", "python"),
    ("sdk/javascript", "javascript"),
    ("wit", "wit"),
    ("LICENSE", "LICENSE"),
];

const NOT_SOURCE: [&str; 4] = ["__pycache__", "node_modules", "target", ".venv"];

fn main() {
    // When it runs, not when it was compiled: a folder that was moved with its target folder has another path.
    let root = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../..");
    let mut table = String::from("&[\n");
    for (source, name) in SOURCES {
        let mut files = Vec::new();
        collect(&root.join(source), name.to_owned(), &mut files);
        files.sort();
        for (name, path) in files {
            println!("cargo::rerun-if-changed={}", path.display());
            writeln!(table, "    ({name:?}, include_bytes!({:?})),", path.display().to_string())
                .expect("writing to a String succeeds");
        }
    }
    table.push_str("]\n");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it")).join("embedded.rs");
    std::fs::write(&out, table).unwrap_or_else(|error| panic!("{}: {error}", out.display()));
}

fn collect(path: &Path, name: String, files: &mut Vec<(String, PathBuf)>) {
    if !path.is_dir() {
        files.push((name, path.canonicalize().unwrap_or_else(|_| path.to_owned())));
        return;
    }
    println!("cargo::rerun-if-changed={}", path.display());
    let entries = std::fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    for entry in entries.flatten() {
        let inner = entry.file_name().to_string_lossy().into_owned();
        if !NOT_SOURCE.contains(&inner.as_str()) {
            collect(&entry.path(), format!("{name}/{inner}"), files);
        }
    }
}
