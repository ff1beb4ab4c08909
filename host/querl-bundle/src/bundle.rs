//! An archive that was read, with every digest and signature in it checked.

use crate::archive::{self, ArchiveLimits, Damage, names};
use crate::error::BundleError;
use crate::file;
use crate::keys::PublicKey;
use crate::manifest::Manifest;
use crate::signatures::{self, BundleSignature};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// How every component begins: magic number, version 13, layer 1. A core module has version 1, layer 0.
const COMPONENT_MAGIC: [u8; 8] = *b"\0asm\x0d\0\x01\0";
const CORE_MODULE_MAGIC: [u8; 8] = *b"\0asm\x01\0\0\0";

/// A plugin in one file. All that is in it fits together; whether its signers are trusted is asked with [`Bundle::verify`].
#[derive(Debug, Clone)]
pub struct Bundle {
    origin: String,
    manifest: Manifest,
    digest: String,
    files: BTreeMap<String, Vec<u8>>,
    signatures: Vec<BundleSignature>,
}

impl Bundle {
    /// Reads a file.
    ///
    /// # Errors
    /// The file cannot be read or is no regular file, or as [`Bundle::from_bytes`].
    pub fn open(path: &Path) -> Result<Self, BundleError> {
        let bytes = file::read(path, ArchiveLimits::DEFAULT.compressed_bytes)?;
        Self::from_bytes(&bytes, &path.display().to_string())
    }

    /// Reads an archive, which messages call `origin`.
    ///
    /// # Errors
    /// The archive is damaged, holds what no bundle holds, or is beyond a limit; a file does not have its digest; a signature
    /// does not fit; the manifest is wrong or speaks of another component. Each names the part.
    pub fn from_bytes(bytes: &[u8], origin: &str) -> Result<Self, BundleError> {
        let refuse = |damage: Damage| refused(origin, damage);
        let files = archive::read(bytes, &ArchiveLimits::DEFAULT).map_err(refuse)?;
        check_sums(&files).map_err(refuse)?;
        let digest = querl_core::fsx::digest_hex(&files[names::SUMS]);
        let signatures = match files.get(names::SIGNATURES) {
            Some(content) => signatures::read(content, &digest).map_err(refuse)?,
            None => Vec::new(),
        };
        let manifest = manifest(&files, origin)?;
        check_component(&files[names::COMPONENT]).map_err(|message| refuse(Damage::new(names::COMPONENT, message)))?;
        Ok(Self { origin: origin.to_owned(), manifest, digest, files, signatures })
    }

    /// What messages call it: as a rule its path.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// What the plugin says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Lower-case hexadecimal SHA-256 of `SHA256SUMS`: the name and content of every file but the signatures.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The component.
    pub fn component(&self) -> &[u8] {
        &self.files[names::COMPONENT]
    }

    /// The content of one file, such as `README.md` or `golden/cases.jsonl`.
    pub fn file(&self, name: &str) -> Option<&[u8]> {
        self.files.get(name).map(Vec::as_slice)
    }

    /// All files in the order of their names.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter().map(|(name, content)| (name.as_str(), content.as_slice()))
    }

    /// The files of golden cases in the order of their names.
    pub fn golden(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files().filter(|(name, _)| name.starts_with(names::GOLDEN))
    }

    /// The signatures in it, each of which fits.
    pub fn signatures(&self) -> &[BundleSignature] {
        &self.signatures
    }

    /// The first of `trusted` that has signed the bundle.
    ///
    /// # Errors
    /// None of them has; the message says who did.
    pub fn verify(&self, trusted: &[PublicKey]) -> Result<PublicKey, BundleError> {
        let has_signed = |key: &&PublicKey| self.signatures.iter().any(|signature| signature.key() == *key);
        if let Some(key) = trusted.iter().find(has_signed) {
            return Ok(key.clone());
        }
        let signers: Vec<_> = self.signatures.iter().map(|signature| signature.key().to_string()).collect();
        let expected: Vec<_> = trusted.iter().map(PublicKey::to_string).collect();
        let signed =
            if signers.is_empty() { "not signed".to_owned() } else { format!("signed by {}", signers.join(", ")) };
        let message = match expected.is_empty() {
            true => format!("{signed}, and no key is trusted; name one to verify against"),
            false => format!("{signed}; expected a signature of {}", expected.join(" or ")),
        };
        Err(BundleError::Untrusted { origin: self.origin.clone(), message })
    }

    pub(crate) fn into_files(self) -> BTreeMap<String, Vec<u8>> {
        self.files
    }

    pub(crate) fn damage(&self, damage: Damage) -> BundleError {
        refused(&self.origin, damage)
    }
}

fn refused(origin: &str, Damage { part, message }: Damage) -> BundleError {
    BundleError::Archive { origin: origin.to_owned(), part, message }
}

/// The content of `SHA256SUMS` for `files`.
pub(crate) fn sums(files: &BTreeMap<String, Vec<u8>>) -> String {
    let mut text = String::new();
    for (name, content) in files.iter().filter(|(name, _)| ![names::SUMS, names::SIGNATURES].contains(&name.as_str())) {
        writeln!(text, "{}  {name}", querl_core::fsx::digest_hex(content)).expect("a string takes every text");
    }
    text
}

fn check_sums(files: &BTreeMap<String, Vec<u8>>) -> Result<(), Damage> {
    let actual = sums(files);
    let written = String::from_utf8_lossy(&files[names::SUMS]);
    if actual == written {
        return Ok(());
    }
    // A line each; the first that differs says which file or which line was changed.
    for (index, line) in actual.lines().enumerate() {
        let (digest, name) = line.split_once("  ").expect("the line was just made so");
        let same_file = |line: &&str| line.split_once("  ").is_some_and(|(_, other)| other == name);
        match written.lines().find(same_file) {
            Some(other) if other == line => {}
            Some(_) => {
                let message = format!(
                    "does not have the SHA-256 that SHA256SUMS gives for it (it is {digest}); one of the two was changed"
                );
                return Err(Damage::new(name, message));
            }
            None => {
                return Err(Damage::new(
                    names::SUMS,
                    format!("has no line for `{name}`; expected one as line {}", index + 1),
                ));
            }
        }
    }
    Err(Damage::new(names::SUMS, "has lines of files that are not there, or in another order"))
}

fn manifest(files: &BTreeMap<String, Vec<u8>>, origin: &str) -> Result<Manifest, BundleError> {
    let refuse = |message: String| refused(origin, Damage::new(names::MANIFEST, message));
    let text = std::str::from_utf8(&files[names::MANIFEST]).map_err(|_| refuse("is not UTF-8 text".to_owned()))?;
    let manifest = Manifest::parse(text, &format!("{origin}: {}", names::MANIFEST))?;
    let Some(bundle) = &manifest.bundle else {
        return Err(refuse("has no section [bundle]; expected the manifest that packing completes".to_owned()));
    };
    let component = &files[names::COMPONENT];
    // The sums were just found right, so that the component need not be read once more.
    let sums = String::from_utf8_lossy(&files[names::SUMS]);
    let digest = sums.lines().find_map(|line| line.strip_suffix(names::COMPONENT)).map_or("", str::trim_end);
    if bundle.component != digest || bundle.component_bytes != component.len() as u64 {
        return Err(refuse(format!(
            "speaks of a component with SHA-256 {}; plugin.wasm has {digest}",
            bundle.component
        )));
    }
    match manifest.to_text() == text {
        true => Ok(manifest),
        false => Err(refuse("is not written as packing writes it".to_owned())),
    }
}

/// Do the bytes begin as a component does? A full look is the host's.
///
/// # Errors
/// They do not: how a sentence about the component goes on, such as `is not WebAssembly; expected a component`.
pub fn check_component(bytes: &[u8]) -> Result<(), String> {
    match bytes.get(..8) {
        Some(start) if start == COMPONENT_MAGIC => Ok(()),
        Some(start) if start == CORE_MODULE_MAGIC => {
            Err("is a core module; expected a component, as the target wasm32-wasip2 makes".to_owned())
        }
        _ => Err("is not WebAssembly; expected a component".to_owned()),
    }
}
