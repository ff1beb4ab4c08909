//! A bundle out of a registry.

use super::artifact;
use super::client::{Caller, Transport, in_time};
use super::credentials::Credentials;
use super::error::{RegistryError, excerpt};
use super::reference::{RegistryReference, version_of_bundle};
use crate::{ArchiveLimits, Bundle};
use oci_client::Reference;
use oci_client::manifest::OciImageManifest;
use semver::Version;

/// A bundle that was pulled.
#[derive(Debug, Clone)]
pub struct Pulled {
    /// The place with the version.
    pub location: RegistryReference,
    /// The archive as it was pushed.
    pub bytes: Vec<u8>,
    /// The same, read and checked. Whether its signers are trusted is for the caller to ask.
    pub bundle: Bundle,
}

/// The versions of which there is a bundle at `location`, the lowest first.
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

/// The bundle at `location`; without a version there, the highest one that is not a pre-release, or else the highest.
///
/// # Errors
/// There is no such bundle; it is damaged, of another version, or of another plugin than the last part of the repository names;
/// the component beside it is another one; or the registry cannot be reached, takes too long or refuses.
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

/// The archive that a manifest speaks of, and what is in it.
pub(crate) async fn bundle_of(
    caller: &Caller<'_>,
    location: &RegistryReference,
    reference: &Reference,
    manifest: &OciImageManifest,
) -> Result<(Vec<u8>, Bundle), RegistryError> {
    let layer = artifact::bundle_layer(manifest).ok_or_else(|| {
        RegistryError::at(location, format!("the tag {} holds no bundle", reference.tag().unwrap_or_default()))
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

/// Is the bundle the one that its place says, and the component beside it the bundle's own?
async fn check(caller: &Caller<'_>, location: &RegistryReference, bundle: &Bundle) -> Result<(), RegistryError> {
    let refuse = |message: String| Err(RegistryError::at(location, message));
    let expected = location.version().expect("a bundle is pulled from a place with a version");
    let version = &bundle.manifest().plugin.version;
    if version != expected {
        return refuse(format!("the bundle there has version {version}; whoever pushed it made a mistake"));
    }
    if let Err(reason) = location.check_id(&bundle.manifest().plugin.id) {
        return refuse(format!("{reason}; another plugin was pushed to this place, pull the one you want by its own"));
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

/// Why there is no bundle of the version.
async fn absent(caller: &Caller<'_>, location: &RegistryReference) -> RegistryError {
    let version = location.version().expect("a bundle is looked for at a place with a version");
    match caller.manifest(&location.component(version)).await {
        Err(error) => return error,
        Ok(Some(_)) => {
            let message =
                "has a component there and no bundle, so that another tool pushed it; `wkg oci pull` reads it";
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
            RegistryError::at(location, format!("there is no such version; there are {}", listed(&versions)))
        }
    }
}

/// The highest ones, since there may be thousands.
fn listed(versions: &[Version]) -> String {
    const MOST: usize = 20;
    let n_older = versions.len().saturating_sub(MOST);
    let shown: Vec<_> = versions[n_older..].iter().map(Version::to_string).collect();
    match n_older {
        0 => shown.join(", "),
        _ => format!("{} and {n_older} older ones", shown.join(", ")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
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
