//! A bundle into a registry.

use crate::artifact::{self, Artifact, MANIFEST_TYPE};
use crate::client::{Caller, Transport};
use crate::credentials::Credentials;
use crate::error::RegistryError;
use crate::location::{Location, is_ambiguous};
use oci_client::Reference;
use querl_bundle::Bundle;

/// What was pushed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// The place with the version.
    pub location: Location,
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
/// The bundle is damaged; `location` names another version; the version is there with other content; or the registry cannot
/// be reached or refuses.
pub async fn push(
    bytes: &[u8],
    location: &Location,
    credentials: &Credentials,
    transport: Transport,
) -> Result<Pushed, RegistryError> {
    let bundle = Bundle::from_bytes(bytes, "the bundle to push")?;
    let location = &own_version(&bundle, location)?;
    let version = &bundle.manifest().plugin.version;
    let caller = Caller::new(location, credentials, transport).await?;
    refuse_replacement(&caller, location, &bundle).await?;

    let component = artifact::component(&bundle).map_err(|message| RegistryError::at(location, message))?;
    let component_at = location.component(version);
    let component_manifest = put(&caller, &component_at, &component).await?;
    let archive = artifact::bundle(&bundle, bytes, &component.manifest);
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

/// The location with the bundle's version.
fn own_version(bundle: &Bundle, location: &Location) -> Result<Location, RegistryError> {
    let version = &bundle.manifest().plugin.version;
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
async fn refuse_replacement(caller: &Caller<'_>, location: &Location, bundle: &Bundle) -> Result<(), RegistryError> {
    let version = &bundle.manifest().plugin.version;
    let taken = |what: &str| {
        let message =
            format!("is there already with {what}; give the plugin a new version in plugin.toml and pack it again");
        Err(RegistryError::at(location, message))
    };
    if let Some((manifest, _)) = caller.manifest(&location.bundle(version)).await?
        && artifact::bundle_digest(&manifest) != Some(bundle.digest())
    {
        return taken("other content");
    }
    if let Some((manifest, _)) = caller.manifest(&location.component(version)).await?
        && artifact::component_digest(&manifest) != Some(&artifact::digest(bundle.component()))
    {
        return taken("another component");
    }
    Ok(())
}

/// Pushes contents, then the manifest; returns the manifest's digest.
async fn put(caller: &Caller<'_>, reference: &Reference, artifact: &Artifact) -> Result<String, RegistryError> {
    for blob in &artifact.blobs {
        caller.push_blob(reference, blob.clone(), &artifact::digest(blob)).await?;
    }
    caller.push_manifest(reference, artifact.manifest.clone(), MANIFEST_TYPE).await?;
    Ok(artifact::digest(&artifact.manifest))
}
