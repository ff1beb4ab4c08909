//! Bundles that a configuration names by registry reference and digest, and their cache.

use super::artifact::{self, MANIFEST_TYPE};
use super::client::{Caller, RegistryError, Transport, in_time};
use super::credentials::Credentials;
use super::reference::RegistryReference;
use super::transfer::bundle_of;
use crate::Bundle;
use oci_client::Reference;
use oci_client::manifest::OciImageManifest;
use querl_core::config::REGISTRY_PREFIX;
use querl_core::fsx::{io_problem, write_atomic};
use std::path::{Path, PathBuf};

const EXPECTED: &str = "is not a pinned reference; expected oci://HOST[:PORT]/REPO[:VERSION]@sha256:DIGEST, with the digest that `querl plugin push` \
     or `querl plugin pull` prints";

/// Reference to a bundle in a registry, pinned by a digest: `oci://HOST[:PORT]/REPO[:VERSION]@sha256:DIGEST`.
///
/// The digest is that of the bundle's manifest in the registry, or that of the bundle itself, which needs the version too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinnedReference {
    location: RegistryReference,
    /// 64 hexadecimal digits.
    digest: String,
}

impl PinnedReference {
    /// Parses `oci://HOST[:PORT]/REPO[:VERSION]@sha256:DIGEST`.
    ///
    /// # Errors
    /// The text has another form.
    pub fn parse(text: &str) -> Result<Self, RegistryError> {
        let refuse =
            || RegistryError::RegistryReference { text: text.escape_debug().to_string(), message: EXPECTED.into() };
        let (location, digest) =
            text.strip_prefix(REGISTRY_PREFIX).and_then(|rest| rest.split_once("@sha256:")).ok_or_else(refuse)?;
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if digest.len() != 64 || !digest.bytes().all(is_digit) {
            return Err(refuse());
        }
        Ok(Self { location: RegistryReference::parse(location)?, digest: digest.to_owned() })
    }

    /// Registry, repository and version of the bundle, without the digest.
    pub fn location(&self) -> &RegistryReference {
        &self.location
    }

    /// Path of the bundle in the cache folder `cache`, checked against the digest; `None` if it is missing or damaged.
    pub fn cached(&self, cache: &Path) -> Option<PathBuf> {
        let (archive, manifest) = self.files(cache);
        let bundle = Bundle::open(&archive).ok().filter(|bundle| self.check(bundle).is_ok())?;
        let is_of_manifest = || {
            let manifest = std::fs::read(&manifest).ok()?;
            let layer = serde_json::from_slice::<OciImageManifest>(&manifest).ok()?;
            let layer = artifact::bundle_layer(&layer)?.digest.clone();
            let archive = std::fs::read(&archive).ok()?;
            Some(
                artifact::digest(&manifest) == format!("sha256:{}", self.digest) && artifact::digest(&archive) == layer,
            )
        };
        (bundle.digest() == self.digest || is_of_manifest() == Some(true)).then_some(archive)
    }

    /// Path of the bundle in the cache folder `cache`; downloads it if it is missing or damaged.
    ///
    /// # Errors
    /// There is no such bundle, it has another digest, or the registry cannot be reached, takes too long or refuses.
    pub async fn fetch(
        &self,
        cache: &Path,
        credentials: &Credentials,
        transport: Transport,
    ) -> Result<PathBuf, RegistryError> {
        if let Some(path) = self.cached(cache) {
            return Ok(path);
        }
        let fetched = async {
            let caller = Caller::new(&self.location, credentials, transport).await?;
            let found = match self.by_manifest(&caller).await? {
                Some(found) => found,
                None => (self.by_version(&caller).await?, Vec::new()),
            };
            self.keep(cache, &found.0, &found.1)
        };
        in_time(&self.location, fetched).await
    }

    /// The archive and its manifest, where the digest is that of a manifest.
    async fn by_manifest(&self, caller: &Caller<'_>) -> Result<Option<(Vec<u8>, Vec<u8>)>, RegistryError> {
        let digest = format!("sha256:{}", self.digest);
        let (host, repository) = (self.location.host().to_owned(), self.location.repository().to_owned());
        let reference = Reference::with_digest(host, repository, digest.clone());
        let Some(raw) = caller.raw_manifest(&reference, MANIFEST_TYPE).await? else { return Ok(None) };
        let refuse = |message: &str| RegistryError::at(&self.location, message);
        if artifact::digest(&raw) != digest {
            return Err(refuse("the registry sent a manifest that does not have the digest of the configuration"));
        }
        let manifest: OciImageManifest = serde_json::from_slice(&raw).map_err(|_| {
            refuse("the digest is that of a manifest without a bundle; use the one that `querl plugin push` prints")
        })?;
        let (bytes, bundle) = bundle_of(caller, &self.location, &reference, &manifest).await?;
        self.check(&bundle)?;
        Ok(Some((bytes, raw)))
    }

    /// The archive under its version, where the digest is that of the bundle.
    async fn by_version(&self, caller: &Caller<'_>) -> Result<Vec<u8>, RegistryError> {
        let refuse = |message: String| Err(RegistryError::at(&self.location, message));
        let Some(version) = self.location.version() else {
            return refuse(format!(
                "has no bundle with the digest sha256:{}; check the digest, or name the version too",
                self.digest
            ));
        };
        let reference = self.location.bundle(version);
        let Some((manifest, of_manifest)) = caller.manifest(&reference).await? else {
            return refuse("is not in the registry; check the name and the version".into());
        };
        let (bytes, bundle) = bundle_of(caller, &self.location, &reference, &manifest).await?;
        self.check(&bundle)?;
        match bundle.digest() == self.digest {
            true => Ok(bytes),
            false => refuse(format!(
                "has the digest sha256:{} (its manifest {of_manifest}); the configuration expects sha256:{}; correct the configuration \
                 where you trust the new content",
                bundle.digest(),
                self.digest
            )),
        }
    }

    /// Checks id and version against the reference.
    fn check(&self, bundle: &Bundle) -> Result<(), RegistryError> {
        let plugin = &bundle.manifest().plugin;
        let refuse = |message: String| Err(RegistryError::at(&self.location, message));
        if let Err(reason) = self.location.check_id(&plugin.id) {
            return refuse(reason);
        }
        match self.location.version() {
            Some(version) if *version != plugin.version => refuse(format!(
                "the bundle with this digest has version {}; correct the version or the digest",
                plugin.version
            )),
            _ => Ok(()),
        }
    }

    fn keep(&self, cache: &Path, archive: &[u8], manifest: &[u8]) -> Result<PathBuf, RegistryError> {
        let (path, of_manifest) = self.files(cache);
        let written = std::fs::create_dir_all(cache)
            .and_then(|()| if manifest.is_empty() { Ok(()) } else { write_atomic(&of_manifest, manifest) })
            .and_then(|()| write_atomic(&path, archive));
        let failed = |error: std::io::Error| {
            RegistryError::at(&self.location, format!("{}: cannot be written: {}", path.display(), io_problem(&error)))
        };
        written.map_err(failed)?;
        Ok(path)
    }

    /// The archive, and the manifest with this digest.
    fn files(&self, cache: &Path) -> (PathBuf, PathBuf) {
        let file = |extension: &str| cache.join(format!("sha256-{}.{extension}", self.digest));
        (file("querl"), file("json"))
    }
}

impl std::fmt::Display for PinnedReference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{REGISTRY_PREFIX}{}@sha256:{}", self.location, self.digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_references_are_read_and_others_are_refused_with_the_form() {
        let digest = "ab".repeat(32);
        for text in [
            format!("oci://localhost:5000/a/b:0.1.0@sha256:{digest}"),
            format!("oci://r.example.com/b@sha256:{digest}"),
        ] {
            assert_eq!(PinnedReference::parse(&text).unwrap().to_string(), text);
        }
        for text in [
            "oci://localhost/a",
            "oci://localhost/a:0.1.0",
            "oci://localhost/a@sha256:ab",
            "oci://localhost/a@sha512:ab",
        ] {
            assert!(PinnedReference::parse(text).unwrap_err().to_string().contains("@sha256:DIGEST"), "{text}");
        }
    }
}
