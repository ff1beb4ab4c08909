//! A bundle in memory: opened from an archive, or packed from a folder with its component.

use crate::archive::{ArchiveLimits, Damage, is_golden, names};
use crate::error::BundleError;
use crate::manifest::{BUNDLE_FORMAT, BuildSection, BundleSection, Language, Manifest};
use crate::signatures::BundleSignature;
use crate::signatures::PublicKey;
use crate::{archive, document, signatures};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// First bytes of every component: magic number, version 13, layer 1. A core module has version 1, layer 0.
const COMPONENT_MAGIC: [u8; 8] = *b"\0asm\x0d\0\x01\0";
const CORE_MODULE_MAGIC: [u8; 8] = *b"\0asm\x01\0\0\0";

/// A plugin bundle, checked for consistency. [`Bundle::verify`] checks whether a trusted key signed it.
#[derive(Debug, Clone)]
pub struct Bundle {
    origin: String,
    manifest: Manifest,
    digest: String,
    files: BTreeMap<String, Vec<u8>>,
    signatures: Vec<BundleSignature>,
}

impl Bundle {
    /// Reads a bundle from a file.
    ///
    /// # Errors
    /// The file cannot be read or is no regular file, or as [`Bundle::from_bytes`].
    pub fn open(path: &Path) -> Result<Self, BundleError> {
        let bytes = document::read_file(path, ArchiveLimits::DEFAULT.compressed_bytes)?;
        Self::from_bytes(&bytes, &path.display().to_string())
    }

    /// Reads a bundle from the bytes of an archive; `origin` names it in messages.
    ///
    /// # Errors
    /// The archive is damaged, has an unknown entry, or exceeds a limit;
    /// a file does not have its digest; a signature is invalid; the manifest is invalid or describes another component. Each
    /// names the part.
    pub fn from_bytes(bytes: &[u8], origin: &str) -> Result<Self, BundleError> {
        let refuse = |damage: Damage| refused(origin, damage);
        let files = archive::read(bytes).map_err(refuse)?;
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

    /// Name of the bundle in messages, usually its path.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The parsed `plugin.toml`.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Lower-case hexadecimal SHA-256 of `SHA256SUMS`: the name and content of every file but the signatures.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The bytes of `plugin.wasm`.
    pub fn component(&self) -> &[u8] {
        &self.files[names::COMPONENT]
    }

    /// The content of one file, such as `README.md` or `golden/cases.jsonl`; `None` if the bundle has no such file.
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

    /// The signatures of the bundle, all valid.
    pub fn signatures(&self) -> &[BundleSignature] {
        &self.signatures
    }

    /// The first of `trusted` that has signed the bundle.
    ///
    /// # Errors
    /// None of them has; the message names the signers.
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
    // Compares line by line: the first difference shows which file or which line was changed.
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
    // The sums have just been verified, so the component need not be hashed again.
    let sums = String::from_utf8_lossy(&files[names::SUMS]);
    let digest = sums.lines().find_map(|line| line.strip_suffix(names::COMPONENT)).map_or("", str::trim_end);
    if bundle.component != digest || bundle.component_bytes != component.len() as u64 {
        return Err(refuse(format!("names a component with SHA-256 {}; plugin.wasm has {digest}", bundle.component)));
    }
    match manifest.to_text() == text {
        true => Ok(manifest),
        false => Err(refuse("is not written as packing writes it".to_owned())),
    }
}

/// Checks the first bytes of a component; the host checks all of it.
///
/// # Errors
/// Not a component: the rest of a sentence, such as
/// `is not WebAssembly; expected a component`.
pub fn check_component(bytes: &[u8]) -> Result<(), String> {
    match bytes.get(..8) {
        Some(start) if start == COMPONENT_MAGIC => Ok(()),
        Some(start) if start == CORE_MODULE_MAGIC => {
            Err("is a core module; expected a component, as the target wasm32-wasip2 makes".to_owned())
        }
        _ => Err("is not WebAssembly; expected a component".to_owned()),
    }
}

/// Packs the plugin in `folder` and the component that was built from it into a bundle; the same content gives the same bytes.
///
/// Of the folder it takes `plugin.toml`, `README.md`, `LICENSE` and `*.jsonl` in the folder of golden cases. The archive is
/// called [`Manifest::file_name`].
///
/// # Errors
/// A file is missing, not a plain file, or too large; the manifest is invalid; `component` is not a WebAssembly component.
pub fn pack(folder: &Path, component: &[u8]) -> Result<Vec<u8>, BundleError> {
    check_component(component).map_err(|message| BundleError::folder(folder, format!("its component {message}")))?;
    let manifest = Manifest::read(folder)?;
    if manifest.bundle.is_some() {
        let message = "has a section [bundle], which packing adds; take it out";
        return Err(BundleError::folder(&folder.join(names::MANIFEST), message));
    }
    let mut files = golden(folder, &manifest)?;
    files.insert(names::README.to_owned(), text(folder, names::README, "what the plugin does, for those who use it")?);
    files.insert(names::LICENSE.to_owned(), text(folder, names::LICENSE, "the licence's text")?);
    files.insert(names::MANIFEST.to_owned(), completed(manifest, folder, component).to_text().into_bytes());
    files.insert(names::COMPONENT.to_owned(), component.to_vec());
    files.insert(names::SUMS.to_owned(), sums(&files).into_bytes());
    let bytes = archive::write(&files).map_err(|source| BundleError::io(folder, source))?;
    // Reads the bundle back, so that the author, and not a recipient, sees what the reader rejects.
    Bundle::from_bytes(&bytes, &folder.display().to_string())?;
    Ok(bytes)
}

fn completed(manifest: Manifest, folder: &Path, component: &[u8]) -> Manifest {
    let found = || Language::of_folder(folder).map(|language| BuildSection { language });
    let mut completed = manifest;
    completed.build = completed.build.or_else(found);
    completed.plugin.golden = names::GOLDEN.trim_end_matches('/').to_owned();
    completed.bundle = Some(BundleSection {
        format: BUNDLE_FORMAT,
        component: querl_core::fsx::digest_hex(component),
        component_bytes: component.len() as u64,
    });
    completed
}

/// A required text file.
fn text(folder: &Path, name: &str, meaning: &str) -> Result<Vec<u8>, BundleError> {
    let path = folder.join(name);
    if !path.exists() {
        return Err(BundleError::folder(&path, format!("is missing; a bundle needs it: {meaning}")));
    }
    let bytes = plain_file(&path, name)?;
    match std::str::from_utf8(&bytes).is_ok_and(|text| !text.trim().is_empty()) {
        true => Ok(bytes),
        false => Err(BundleError::folder(&path, "is empty or not UTF-8 text")),
    }
}

/// The golden cases by their names in the archive.
fn golden(folder: &Path, manifest: &Manifest) -> Result<BTreeMap<String, Vec<u8>>, BundleError> {
    let golden = folder.join(&manifest.plugin.golden);
    if let Some(link) = golden.ancestors().take_while(|path| *path != folder).find(|path| path.is_symlink()) {
        return Err(BundleError::folder(link, "is a link; a bundle takes no links and folders here"));
    }
    let mut files = BTreeMap::new();
    if !golden.exists() && manifest.plugin.golden == "golden" {
        return Ok(files);
    }
    let entries = std::fs::read_dir(&golden).map_err(|source| BundleError::io(&golden, source))?;
    for entry in entries {
        let path = entry.map_err(|source| BundleError::io(&golden, source))?.path();
        let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !file.ends_with(names::GOLDEN_ENDING) {
            continue;
        }
        let name = format!("{}{file}", names::GOLDEN);
        if !is_golden(&name) {
            let message = "cannot be in a bundle; expected a name of at most 93 bytes that does not begin with a dot";
            return Err(BundleError::folder(&path, message));
        }
        let content = plain_file(&path, &name)?;
        files.insert(name, content);
    }
    Ok(files)
}

/// The content of a file, `name` in the archive. Symbolic links are rejected: they could publish a file by mistake.
fn plain_file(path: &Path, name: &str) -> Result<Vec<u8>, BundleError> {
    let metadata = std::fs::symlink_metadata(path).map_err(|source| BundleError::io(path, source))?;
    match metadata.is_file() {
        true => document::read_file(path, ArchiveLimits::DEFAULT.bytes_of(name)),
        false => Err(BundleError::folder(path, "is not a plain file; a bundle takes no links and folders here")),
    }
}
