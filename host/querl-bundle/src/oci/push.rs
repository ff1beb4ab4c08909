//! A bundle into a registry.

use super::artifact::{self, Artifact, MANIFEST_TYPE};
use super::client::{Caller, Transport, in_time};
use super::credentials::Credentials;
use super::error::RegistryError;
use super::pull::bundle_of;
use super::reference::{RegistryReference, is_ambiguous};
use crate::{Bundle, BundleSignature, PublicKey};
use oci_client::Reference;

/// What was pushed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// The place with the version.
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

/// Puts the archive `bytes` to `location`, under its own version.
///
/// Pushing the same bundle again changes nothing; one with more signatures takes the place of the one without.
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

/// The location with the bundle's version, where it is the plugin's own.
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

/// A version that others may have pulled stays what it is.
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
        // The annotation is the registry's word; the content is what is replaced.
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

/// A signature that others may rely on is not taken away by who has a copy without it.
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
