//! The archive: a tar stream in a zstd frame, and a seal over the frame.

mod read;
mod seal;
mod write;

use querl_core::text::disturbs;

pub(crate) use read::read;
pub(crate) use write::write;

pub(crate) mod names {
    pub(crate) const LICENSE: &str = "LICENSE";
    pub(crate) const README: &str = "README.md";
    pub(crate) const SUMS: &str = "SHA256SUMS";
    pub(crate) const GOLDEN: &str = "golden/";
    pub(crate) const GOLDEN_ENDING: &str = ".jsonl";
    pub(crate) const MANIFEST: &str = "plugin.toml";
    pub(crate) const COMPONENT: &str = "plugin.wasm";
    pub(crate) const SIGNATURES: &str = "signatures";
    /// Without these no archive is a bundle.
    pub(crate) const REQUIRED: [&str; 5] = [LICENSE, README, SUMS, MANIFEST, COMPONENT];
}

/// What a reader takes from an archive at most. A Python plugin has 18 MB and is a quarter of that compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArchiveLimits {
    /// The file itself.
    pub compressed_bytes: u64,
    /// The tar stream: headers, contents, padding.
    pub tar_bytes: u64,
    /// The tar stream may be 4 MiB, and beyond that this many times the compressed size.
    pub ratio: u64,
    /// Files.
    pub entries: usize,
    /// The component.
    pub component_bytes: u64,
    /// One file of golden cases; all of them together.
    pub golden_bytes: u64,
    /// Each of the other files.
    pub text_bytes: u64,
}

impl ArchiveLimits {
    /// What every reader and writer of this crate keeps to.
    pub const DEFAULT: Self = Self {
        compressed_bytes: 72 << 20,
        tar_bytes: 128 << 20,
        ratio: 256,
        entries: 1000,
        component_bytes: 64 << 20,
        golden_bytes: 16 << 20,
        text_bytes: 1 << 20,
    };

    pub(crate) fn bytes_of(&self, name: &str) -> u64 {
        match name {
            names::COMPONENT => self.component_bytes,
            _ if name.starts_with(names::GOLDEN) => self.golden_bytes,
            _ => self.text_bytes,
        }
    }
}

impl Default for ArchiveLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// What is wrong with one part of an archive.
#[derive(Debug)]
pub(crate) struct Damage {
    pub(crate) part: String,
    pub(crate) message: String,
}

impl Damage {
    pub(crate) fn new(part: &str, message: impl Into<String>) -> Self {
        Self { part: part.to_owned(), message: message.into() }
    }
}

/// Why `name` may not be in a bundle.
pub(crate) fn refuse_name(name: &str) -> Option<&'static str> {
    const FLAT: [&str; 6] =
        [names::LICENSE, names::README, names::SUMS, names::MANIFEST, names::COMPONENT, names::SIGNATURES];
    if FLAT.contains(&name) {
        return None;
    }
    let parts = || name.split(['/', '\\']);
    match name {
        "" => Some("has no name"),
        _ if name.starts_with(['/', '\\']) || name.contains(':') => {
            Some("has an absolute path; a bundle's paths are relative")
        }
        _ if parts().any(|part| part == "..") => Some("leaves the bundle through `..`"),
        _ if name.contains('\\') => Some("has a backslash in its path"),
        _ if name.chars().any(disturbs) => {
            Some("has a character in its name that a terminal does not show, or that reorders text")
        }
        _ if is_golden(name) => None,
        _ => Some(
            "is no part of a bundle; expected LICENSE, README.md, SHA256SUMS, golden/*.jsonl, plugin.toml, plugin.wasm and \
             signatures",
        ),
    }
}

/// `golden/NAME.jsonl`, short enough for a tar header.
pub(crate) fn is_golden(name: &str) -> bool {
    let file = name.strip_prefix(names::GOLDEN).and_then(|file| file.strip_suffix(names::GOLDEN_ENDING));
    let fits = |file: &str| !file.is_empty() && !file.starts_with('.') && !file.contains(['/', '\\', ':']);
    name.len() <= write::LONGEST_NAME && file.is_some_and(fits) && !name.chars().any(disturbs)
}
