//! From a path to a component, with what is said of it before any of its code runs.

use crate::digest::ComponentDigest;
use crate::error::PluginError;
use crate::source;
use querl_bundle::{ArchiveLimits, Bundle, BundleError, Manifest, PublicKey, check_component};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// What a plugin was loaded from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A `.querl` bundle.
    Bundle,
    /// A `.wasm` component, of which nothing else is known.
    Component,
    /// A folder with source.
    Folder,
}

/// What a bundle says besides its manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleFacts {
    /// Lower-case hexadecimal SHA-256 over the names and contents of all of its files but the signatures.
    pub digest: String,
    /// The trusted key that signed it. Where no keys are configured, the first that signed it.
    pub signed_by: Option<PublicKey>,
}

/// A component, and where it came from.
pub(crate) struct Opened {
    /// The bundle, the component, or what was built from the folder.
    pub(crate) file: PathBuf,
    pub(crate) source: Source,
    pub(crate) manifest: Option<Manifest>,
    pub(crate) bundle: Option<BundleFacts>,
    content: Content,
}

enum Content {
    Component(Vec<u8>),
    Bundle(Box<Bundle>),
}

impl Opened {
    pub(crate) fn component(&self) -> &[u8] {
        match &self.content {
            Content::Component(bytes) => bytes,
            Content::Bundle(bundle) => bundle.component(),
        }
    }

    /// Of the bytes, whatever a manifest says.
    pub(crate) fn digest(&self) -> ComponentDigest {
        ComponentDigest::of(self.component())
    }
}

/// Opens a bundle, a component, or a source folder, which is built first.
///
/// # Errors
/// Not readable, not buildable, not a plugin; or, where any key is `trusted`, not a bundle signed with one of them.
pub(crate) fn open(path: &Path, trusted: &[PublicKey]) -> Result<Opened, PluginError> {
    let metadata = std::fs::metadata(path).map_err(|error| {
        let expected = "expected a `.querl` bundle, a `.wasm` component or a folder with its source";
        unreadable(path, format!("cannot be read: {error}; {expected}"))
    })?;
    let is_bundle = metadata.is_file() && path.extension().is_some_and(|extension| extension == "querl");
    if is_bundle {
        return open_bundle(path, trusted);
    }
    if !trusted.is_empty() {
        return Err(unsigned(path, metadata.is_dir(), trusted));
    }
    let (file, source, manifest) = match metadata.is_dir() {
        true => {
            let manifest = manifest_of_folder(path)?;
            (source::component(path)?, Source::Folder, manifest)
        }
        false => (path.to_owned(), Source::Component, None),
    };
    let content = Content::Component(read(&file)?);
    Ok(Opened { file, source, manifest, bundle: None, content })
}

/// A folder's plugin.toml, where it has one.
fn manifest_of_folder(folder: &Path) -> Result<Option<Manifest>, PluginError> {
    let path = folder.join("plugin.toml");
    // Of the name itself: a link to nowhere is a manifest that cannot be read, not none.
    match std::fs::symlink_metadata(&path) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(&path, error.to_string())),
    }
    let manifest = Manifest::read(&path)?;
    if manifest.bundle.is_none() {
        return Ok(Some(manifest));
    }
    let reason =
        "it has a section `[bundle]`, which `querl plugin pack` writes; remove it from the folder's plugin.toml";
    Err(PluginError::Manifest { path, reason: reason.into() })
}

fn open_bundle(path: &Path, trusted: &[PublicKey]) -> Result<Opened, PluginError> {
    let bundle = Bundle::open(path)?;
    let signed_by = match trusted {
        [] => bundle.signatures().first().map(|signature| signature.key().clone()),
        trusted => Some(bundle.verify(trusted).map_err(untrusted)?),
    };
    Ok(Opened {
        file: path.to_owned(),
        source: Source::Bundle,
        manifest: Some(bundle.manifest().clone()),
        bundle: Some(BundleFacts { digest: bundle.digest().to_owned(), signed_by }),
        content: Content::Bundle(Box::new(bundle)),
    })
}

fn unsigned(path: &Path, is_folder: bool, trusted: &[PublicKey]) -> PluginError {
    let what = if is_folder { "a folder with source" } else { "a component" };
    let keys: Vec<_> = trusted.iter().map(PublicKey::to_string).collect();
    let reason =
        format!("it is {what}, which nobody signs; expected a bundle with a signature of {}", keys.join(" or "));
    PluginError::Untrusted { plugin: path.display().to_string(), reason }
}

fn untrusted(error: BundleError) -> PluginError {
    match error {
        BundleError::Untrusted { origin, message } => PluginError::Untrusted { plugin: origin, reason: message },
        other => other.into(),
    }
}

fn read(file: &Path) -> Result<Vec<u8>, PluginError> {
    let failed = |error: std::io::Error| unreadable(file, error.to_string());
    // Before it is opened: opening a pipe waits for somebody who writes.
    if !std::fs::metadata(file).map_err(failed)?.is_file() {
        return Err(unreadable(file, "it is not a file; expected a component".into()));
    }
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(file).map_err(failed)?;
    let max_bytes = ArchiveLimits::DEFAULT.component_bytes;
    opened.take(max_bytes + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > max_bytes {
        return Err(unreadable(file, format!("it has more than the {max_bytes} bytes that a component may have")));
    }
    check_header(file, &bytes)?;
    Ok(bytes)
}

fn unreadable(path: &Path, reason: String) -> PluginError {
    PluginError::Unreadable { path: path.to_owned(), reason }
}

/// Tells apart what people mistake for a component, before the compiler sees it.
fn check_header(path: &Path, bytes: &[u8]) -> Result<(), PluginError> {
    let told = match bytes {
        [0x7f, b'E', b'L', b'F', ..] => Err("is native code; expected a component".to_owned()),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            Err("is compressed; expected a component, or a bundle with the extension `querl`".to_owned())
        }
        bytes => check_component(bytes),
    };
    told.map_err(|reason| PluginError::NotAPlugin { path: path.to_owned(), reason: format!("it {reason}") })
}
