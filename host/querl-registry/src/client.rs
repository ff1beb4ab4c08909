//! Calls to a registry.

use crate::credentials::Credentials;
use crate::error::{RegistryError, excerpt, is_absent};
use crate::location::Location;
use futures::TryStreamExt;
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::manifest::{OciDescriptor, OciImageManifest, OciManifest};
use oci_client::{Client, Reference};
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Without a byte for so long, a registry is taken for dead.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// How a registry is spoken to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Transport {
    /// https; plain http to this machine alone (127.0.0.0/8, ::1, localhost).
    #[default]
    Secure,
    /// Plain http: whoever is on the way reads and changes everything, credentials included.
    PlainHttp,
}

/// A registry, ready to be called.
pub(crate) struct Caller<'a> {
    client: Client,
    credentials: &'a Credentials,
    location: &'a Location,
}

impl<'a> Caller<'a> {
    pub(crate) async fn new(
        location: &'a Location,
        credentials: &'a Credentials,
        transport: Transport,
    ) -> Result<Self, RegistryError> {
        // Fails where a provider is installed already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let is_plain = transport == Transport::PlainHttp || location.is_loopback();
        let config = ClientConfig {
            protocol: if is_plain { ClientProtocol::Http } else { ClientProtocol::Https },
            connect_timeout: Some(CONNECT_TIMEOUT),
            read_timeout: Some(READ_TIMEOUT),
            user_agent: concat!("querl/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        let client = Client::try_from(config).map_err(|error| RegistryError::call(location, &error))?;
        let reference = location.tagged("latest".to_owned());
        client.store_auth_if_needed(reference.resolve_registry(), credentials.auth()).await;
        Ok(Self { client, credentials, location })
    }

    /// A manifest with its digest; `None` where there is none of this name.
    pub(crate) async fn manifest(
        &self,
        reference: &Reference,
    ) -> Result<Option<(OciImageManifest, String)>, RegistryError> {
        match self.client.pull_manifest(reference, self.credentials.auth()).await {
            Ok((OciManifest::Image(manifest), digest)) => Ok(Some((manifest, digest))),
            Ok((OciManifest::ImageIndex(_), _)) => {
                let tag = reference.tag().unwrap_or_default();
                Err(RegistryError::at(self.location, format!("the tag {tag} is an index of images and no plugin")))
            }
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(RegistryError::call(self.location, &error)),
        }
    }

    /// Every tag of the repository; `None` where there is no such repository.
    pub(crate) async fn tags(&self) -> Result<Option<Vec<String>>, RegistryError> {
        const PAGE: usize = 1000;
        // A repository of a hundred thousand versions is not one of plugins.
        const MOST_PAGES: usize = 100;
        let reference = self.location.tagged("latest".to_owned());
        let mut tags: Vec<String> = Vec::new();
        for _ in 0..MOST_PAGES {
            let last = tags.last().cloned();
            let answer = self.client.list_tags(&reference, self.credentials.auth(), Some(PAGE), last.as_deref()).await;
            let page = match answer {
                Ok(page) => page.tags,
                Err(error) if is_absent(&error) => return Ok(None),
                Err(error) => return Err(RegistryError::call(self.location, &error)),
            };
            // Some registries make smaller pages than was asked for, and some ignore pages: the end is where nothing is new.
            let n_before = tags.len();
            let news: Vec<_> = page.into_iter().filter(|tag| !tags.contains(tag)).collect();
            tags.extend(news);
            if tags.len() == n_before {
                return Ok(Some(tags));
            }
        }
        Err(RegistryError::at(self.location, "the repository has more tags than are read; name a version"))
    }

    /// The content of a layer of at most `limit` bytes, which has its digest.
    pub(crate) async fn blob(
        &self,
        reference: &Reference,
        layer: &OciDescriptor,
        limit: u64,
    ) -> Result<Vec<u8>, RegistryError> {
        let too_large =
            || RegistryError::at(self.location, format!("the bundle is larger than the {limit} bytes that are read"));
        if u64::try_from(layer.size).is_ok_and(|size| size > limit) {
            return Err(too_large());
        }
        // Without the layer's `urls`: the registry has the content, and no other server is asked.
        let layer = OciDescriptor { urls: None, ..layer.clone() };
        let stream = self.client.pull_blob_stream(reference, &layer).await;
        let mut stream = stream.map_err(|error| RegistryError::call(self.location, &error))?;
        let mut content = Vec::new();
        while let Some(chunk) = stream.try_next().await.map_err(|error| self.broken(&error))? {
            content.extend_from_slice(&chunk);
            if content.len() as u64 > limit {
                return Err(too_large());
            }
        }
        Ok(content)
    }

    fn broken(&self, error: &std::io::Error) -> RegistryError {
        RegistryError::at(self.location, format!("the transfer broke off: {}; try again", excerpt(&error.to_string())))
    }

    /// Uploads content that is not there yet.
    pub(crate) async fn push_blob(
        &self,
        reference: &Reference,
        content: Vec<u8>,
        digest: &str,
    ) -> Result<(), RegistryError> {
        let failed = |error| RegistryError::call(self.location, &error);
        if !self.client.blob_exists(reference, digest).await.map_err(failed)? {
            self.client.push_blob(reference, content, digest).await.map_err(failed)?;
        }
        Ok(())
    }

    pub(crate) async fn push_manifest(
        &self,
        reference: &Reference,
        manifest: Vec<u8>,
        media_type: &'static str,
    ) -> Result<(), RegistryError> {
        let media_type = media_type.parse().expect("media types are header values");
        let pushed = self.client.push_manifest_raw(reference, manifest, media_type).await;
        pushed.map(drop).map_err(|error| RegistryError::call(self.location, &error))
    }
}
