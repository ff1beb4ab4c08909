//! Push a bundle to a registry, pull a bundle from one.

use super::artifact;
use super::artifact::{Artifact, MANIFEST_TYPE};
use super::client::{Caller, RegistryError, Transport, excerpt, in_time};
use super::credentials::Credentials;
use super::reference::{RegistryReference, is_ambiguous, version_of_bundle};
use crate::{ArchiveLimits, Bundle, BundleSignature, PublicKey};
use oci_client::Reference;
use oci_client::manifest::OciImageManifest;
use semver::Version;

/// A bundle that was pulled.
#[derive(Debug, Clone)]
pub struct Pulled {
    /// The reference with the version.
    pub location: RegistryReference,
    /// The archive as it was pushed.
    pub bytes: Vec<u8>,
    /// The parsed archive. The caller checks whether its signers are trusted.
    pub bundle: Bundle,
}

/// The versions that have a bundle at `location`, in ascending order.
///
/// # Errors
/// There is no such repository, or the registry cannot be reached or refuses.
pub async fn versions(
    location: &RegistryReference,
    credentials: &Credentials,
    transport: Transport,
) -> Result<Vec<Version>, RegistryError> {
    let found = async { versions_of(&Caller::new(location, credentials, transport).await?, location).await };
    in_time(location, found).await
}

/// Downloads the bundle at `location`; without a version, that of the highest release, or of the highest pre-release if there is no
/// release.
///
/// # Errors
/// There is no such bundle; it is damaged, of another version, or of another plugin than the last part of the repository names;
/// the component next to it is another one; or the registry cannot be reached, takes too long or refuses.
pub async fn pull(
    location: &RegistryReference,
    credentials: &Credentials,
    transport: Transport,
) -> Result<Pulled, RegistryError> {
    in_time(location, pulled(location, credentials, transport)).await
}

async fn pulled(
    location: &RegistryReference,
    credentials: &Credentials,
    transport: Transport,
) -> Result<Pulled, RegistryError> {
    let caller = Caller::new(location, credentials, transport).await?;
    let version = match location.version() {
        Some(version) => version.clone(),
        None => highest(&versions_of(&caller, location).await?)
            .ok_or_else(|| RegistryError::at(location, "the repository has no bundles; push one, or check the name"))?,
    };
    let location = location.with_version(version.clone());
    let reference = location.bundle(&version);
    let Some((manifest, _)) = caller.manifest(&reference).await? else {
        return Err(absent(&caller, &location).await);
    };
    let (bytes, bundle) = bundle_of(&caller, &location, &reference, &manifest).await?;
    check(&caller, &location, &bundle).await?;
    Ok(Pulled { location, bytes, bundle })
}

/// The archive in a manifest, downloaded and parsed.
pub(crate) async fn bundle_of(
    caller: &Caller<'_>,
    location: &RegistryReference,
    reference: &Reference,
    manifest: &OciImageManifest,
) -> Result<(Vec<u8>, Bundle), RegistryError> {
    let layer = artifact::bundle_layer(manifest).ok_or_else(|| {
        let name = reference.tag().or(reference.digest()).unwrap_or_default();
        RegistryError::at(location, format!("{name} holds no bundle; name one that `querl plugin push` has put there"))
    })?;
    let bytes = caller.blob(reference, layer, ArchiveLimits::DEFAULT.compressed_bytes).await?;
    let bundle = Bundle::from_bytes(&bytes, &location.to_string())?;
    Ok((bytes, bundle))
}

async fn versions_of(caller: &Caller<'_>, location: &RegistryReference) -> Result<Vec<Version>, RegistryError> {
    let Some(tags) = caller.tags().await? else {
        return Err(RegistryError::at(location, "the registry has no such repository; check the name"));
    };
    let mut versions: Vec<_> = tags.iter().filter_map(|tag| version_of_bundle(tag)).collect();
    versions.sort();
    Ok(versions)
}

fn highest(versions: &[Version]) -> Option<Version> {
    let released = versions.iter().filter(|version| version.pre.is_empty()).max();
    released.or(versions.iter().max()).cloned()
}

/// Checks version and id of the bundle against its reference, and that the component next to it is the bundle's own.
async fn check(caller: &Caller<'_>, location: &RegistryReference, bundle: &Bundle) -> Result<(), RegistryError> {
    let refuse = |message: String| Err(RegistryError::at(location, message));
    let expected = location.version().expect("a bundle is pulled from a place with a version");
    let version = &bundle.manifest().plugin.version;
    if version != expected {
        return refuse(format!("the bundle there has version {version}; it was pushed under the wrong version"));
    }
    if let Err(reason) = location.check_id(&bundle.manifest().plugin.id) {
        return refuse(format!(
            "{reason}; another plugin was pushed to this place, pull the plugin that you want by its own reference"
        ));
    }
    let component = caller.manifest(&location.component(version)).await?;
    let found = component.as_ref().and_then(|(manifest, _)| artifact::component_digest(manifest));
    let own = artifact::digest(bundle.component());
    match found {
        Some(found) if found == own => Ok(()),
        Some(found) => refuse(format!(
            "the component there ({}) is not the one in the bundle ({own}); one of the two was replaced after pushing",
            excerpt(found)
        )),
        None => refuse("the bundle is there without its component; push it again".to_owned()),
    }
}

/// The error for a missing version.
async fn absent(caller: &Caller<'_>, location: &RegistryReference) -> RegistryError {
    let version = location.version().expect("a bundle is looked for at a place with a version");
    match caller.manifest(&location.component(version)).await {
        Err(error) => return error,
        Ok(Some(_)) => {
            let message = "has a component there but no bundle: another tool pushed it; `wkg oci pull` reads it";
            return RegistryError::at(location, message);
        }
        Ok(None) => {}
    }
    match versions_of(caller, location).await {
        Err(error) => error,
        Ok(versions) if versions.is_empty() => {
            RegistryError::at(location, "the repository has no bundles; check the name")
        }
        Ok(versions) => {
            RegistryError::at(location, format!("there is no such version; available: {}", listed(&versions)))
        }
    }
}

/// The highest versions, since there may be thousands.
fn listed(versions: &[Version]) -> String {
    const MOST: usize = 20;
    let n_older = versions.len().saturating_sub(MOST);
    let shown: Vec<_> = versions[n_older..].iter().map(Version::to_string).collect();
    match n_older {
        0 => shown.join(", "),
        _ => format!("{} and {n_older} older ones", shown.join(", ")),
    }
}

/// What was pushed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// The reference with the version.
    pub location: RegistryReference,
    /// The component, as `wkg oci pull` takes it: `HOST/REPO:VERSION`.
    pub component: String,
    /// `sha256:` digest of the component's manifest.
    pub component_manifest: String,
    /// The bundle: `HOST/REPO:VERSION.querl`.
    pub bundle: String,
    /// `sha256:` digest of the bundle's manifest.
    pub bundle_manifest: String,
}

/// Uploads the archive `bytes` to `location`, under the version in its manifest.
///
/// Pushing the same bundle again changes nothing; a bundle with more signatures replaces the one with fewer.
///
/// # Errors
/// The bundle is damaged; `location` names another version, or its repository another plugin; the version is there with other
/// content, or with a signature that the bundle lacks; or the registry cannot be reached, takes too long or refuses.
pub async fn push(
    bytes: &[u8],
    location: &RegistryReference,
    credentials: &Credentials,
    transport: Transport,
) -> Result<Pushed, RegistryError> {
    let bundle = Bundle::from_bytes(bytes, "the bundle to push")?;
    let location = own_place(&bundle, location)?;
    in_time(&location, pushed(bytes, &bundle, &location, credentials, transport)).await
}

async fn pushed(
    bytes: &[u8],
    bundle: &Bundle,
    location: &RegistryReference,
    credentials: &Credentials,
    transport: Transport,
) -> Result<Pushed, RegistryError> {
    let version = &bundle.manifest().plugin.version;
    let caller = Caller::new(location, credentials, transport).await?;
    refuse_replacement(&caller, location, bundle).await?;

    let component = artifact::component(bundle).map_err(|message| RegistryError::at(location, message))?;
    let component_at = location.component(version);
    let component_manifest = put(&caller, &component_at, &component).await?;
    let archive = artifact::bundle(bundle, bytes, &component.manifest);
    let bundle_at = location.bundle(version);
    let bundle_manifest = put(&caller, &bundle_at, &archive).await?;
    Ok(Pushed {
        location: location.clone(),
        component: component_at.whole(),
        component_manifest,
        bundle: bundle_at.whole(),
        bundle_manifest,
    })
}

/// The reference with the bundle's version; its last part must be the plugin's id.
fn own_place(bundle: &Bundle, location: &RegistryReference) -> Result<RegistryReference, RegistryError> {
    let version = &bundle.manifest().plugin.version;
    if let Err(reason) = location.check_id(&bundle.manifest().plugin.id) {
        return Err(RegistryError::at(location, format!("{reason}; push it there")));
    }
    if is_ambiguous(version) {
        let message = format!("version {version} cannot be pushed: a version may not end in `.querl`");
        return Err(RegistryError::at(location, message));
    }
    match location.version() {
        Some(named) if named != version => {
            let message =
                format!("the bundle has version {version}; push it to {}", location.with_version(version.clone()));
            Err(RegistryError::at(location, message))
        }
        _ => Ok(location.with_version(version.clone())),
    }
}

/// A pushed version must not be replaced by other content.
async fn refuse_replacement(
    caller: &Caller<'_>,
    location: &RegistryReference,
    bundle: &Bundle,
) -> Result<(), RegistryError> {
    let version = &bundle.manifest().plugin.version;
    let taken = |what: &str| {
        let message =
            format!("is there already with {what}; give the plugin a new version in plugin.toml and pack it again");
        Err(RegistryError::at(location, message))
    };
    let bundle_at = location.bundle(version);
    if let Some((manifest, _)) = caller.manifest(&bundle_at).await? {
        if artifact::bundle_digest(&manifest) != Some(bundle.digest()) {
            return taken("other content");
        }
        let (_, there) = bundle_of(caller, location, &bundle_at, &manifest).await?;
        // The annotation is not verified, so the content itself is compared.
        if there.digest() != bundle.digest() {
            return taken("other content");
        }
        refuse_loss(&there, bundle).map_err(|message| RegistryError::at(location, message))?;
    }
    if let Some((manifest, _)) = caller.manifest(&location.component(version)).await?
        && artifact::component_digest(&manifest) != Some(&artifact::digest(bundle.component()))
    {
        return taken("another component");
    }
    Ok(())
}

/// A signature in the registry must not be removed by pushing a copy without it.
fn refuse_loss(there: &Bundle, new: &Bundle) -> Result<(), String> {
    let stays = |key: &PublicKey| new.signatures().iter().any(|signature| signature.key() == key);
    let signers = there.signatures().iter().map(BundleSignature::key);
    let lost: Vec<_> = signers.filter(|key| !stays(key)).map(PublicKey::to_string).collect();
    match lost.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "is there already with a signature of {}, which would be lost; pull the bundle, sign that one and push it",
            lost.join(", ")
        )),
    }
}

/// Pushes contents, then the manifest; returns the manifest's digest.
async fn put(caller: &Caller<'_>, reference: &Reference, artifact: &Artifact) -> Result<String, RegistryError> {
    for blob in &artifact.blobs {
        caller.push_blob(reference, blob.clone(), &artifact::digest(blob)).await?;
    }
    caller.push_manifest(reference, artifact.manifest.clone(), MANIFEST_TYPE).await?;
    Ok(artifact::digest(&artifact.manifest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn highest_version_is_by_number_and_a_release_where_there_is_one() {
        let versions = |texts: &[&str]| texts.iter().map(|text| Version::parse(text).unwrap()).collect::<Vec<_>>();
        assert_eq!(highest(&versions(&["0.9.0", "0.10.0", "1.0.0-rc.1"])).unwrap().to_string(), "0.10.0");
        assert_eq!(highest(&versions(&["1.0.0-rc.1", "1.0.0-rc.2"])).unwrap().to_string(), "1.0.0-rc.2");
        assert_eq!(highest(&[]), None);
    }

    #[test]
    fn versions_are_listed_up_to_a_length() {
        let versions: Vec<_> = (0..25).map(|minor| Version::new(0, minor, 0)).collect();
        assert_eq!(listed(&versions[..2]), "0.0.0, 0.1.0");
        let many = listed(&versions);
        assert!(many.starts_with("0.5.0, ") && many.ends_with(", 0.24.0 and 5 older ones"), "{many}");
    }
}
