//! Calls to a registry and their errors.

use super::credentials::Credentials;
use super::reference::RegistryReference;
use crate::BundleError;
use futures::TryStreamExt;
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::manifest::{OciDescriptor, OciImageManifest, OciManifest};
use oci_client::{Client, Reference};
use querl_core::memory::private_memory_bytes;
use std::collections::HashSet;
use std::error::Error;
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A registry that sends nothing for this time is considered unreachable.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout for listing all tags of a repository.
const TAGS_TIMEOUT: Duration = Duration::from_secs(120);
/// More tags than any plugin has versions: listing stops with an error.
const MOST_TAGS: usize = 10_000;
/// Timeout of a whole push or pull: 72 MiB at 350 kbit/s.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(1800);
/// Maximum growth of the process's memory during a push or pull: oci-client reads manifests, lists of tags, tokens and errors into memory
/// without a limit.
const MAX_MEMORY_BYTES: u64 = 512 << 20;
/// How often the memory of the process is read.
const POLL: Duration = Duration::from_millis(10);

/// Protocol of connections to a registry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Transport {
    /// HTTPS; plain HTTP only to this machine (127.0.0.0/8, ::1, localhost).
    #[default]
    Secure,
    /// Plain HTTP, which others on the network can read and change. Credentials are sent to this machine only.
    PlainHttp,
}

/// The result of `operation`, limited to the timeout and the memory of a push or pull.
pub(crate) async fn in_time<T>(
    location: &RegistryReference,
    operation: impl Future<Output = Result<T, RegistryError>>,
) -> Result<T, RegistryError> {
    tokio::select! {
        done = within(location, TOTAL_TIMEOUT, operation) => done,
        () = memory_grown_by(MAX_MEMORY_BYTES) => {
            let limit = MAX_MEMORY_BYTES >> 20;
            Err(RegistryError::at(location, format!("the registry's answers take more than {limit} MiB of memory; check the address")))
        }
    }
}

async fn within<T>(
    location: &RegistryReference,
    limit: Duration,
    operation: impl Future<Output = Result<T, RegistryError>>,
) -> Result<T, RegistryError> {
    // Boxed, because the future of a registry call is large.
    tokio::time::timeout(limit, Box::pin(operation)).await.unwrap_or_else(|_| {
        let message = format!("the registry took more than {} seconds; try again later", limit.as_secs_f64());
        Err(RegistryError::at(location, message))
    })
}

async fn memory_grown_by(n_bytes: u64) {
    let before = private_memory_bytes();
    while private_memory_bytes().saturating_sub(before) <= n_bytes {
        tokio::time::sleep(POLL).await;
    }
}

/// A client of one registry.
pub(crate) struct Caller<'a> {
    client: Client,
    credentials: &'a Credentials,
    location: &'a RegistryReference,
}

impl<'a> Caller<'a> {
    pub(crate) async fn new(
        location: &'a RegistryReference,
        credentials: &'a Credentials,
        transport: Transport,
    ) -> Result<Self, RegistryError> {
        let is_plain = transport == Transport::PlainHttp || location.is_loopback();
        if is_plain && !location.is_loopback() && !credentials.is_anonymous() {
            let host = location.host();
            let message = format!(
                "credentials are not sent over plain http to another machine; leave out `--plain-http`, or go without credentials \
                 (`docker logout {host}`, unset QUERL_REGISTRY_HOST)"
            );
            return Err(RegistryError::at(location, message));
        }
        // Fails if a provider is already installed, which is sufficient.
        let _ = rustls::crypto::ring::default_provider().install_default();
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

    /// A manifest with its digest; `None` if it does not exist.
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

    /// The bytes of a manifest of one media type; `None` if it does not exist.
    pub(crate) async fn raw_manifest(
        &self,
        reference: &Reference,
        media_type: &str,
    ) -> Result<Option<Vec<u8>>, RegistryError> {
        match self.client.pull_manifest_raw(reference, self.credentials.auth(), &[media_type]).await {
            Ok((bytes, _)) => Ok(Some(bytes.to_vec())),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(RegistryError::call(self.location, &error)),
        }
    }

    /// Every tag of the repository; `None` if it does not exist.
    pub(crate) async fn tags(&self) -> Result<Option<HashSet<String>>, RegistryError> {
        within(self.location, TAGS_TIMEOUT, self.pages_of_tags()).await
    }

    async fn pages_of_tags(&self) -> Result<Option<HashSet<String>>, RegistryError> {
        const PAGE: usize = 1000;
        // Some registries return smaller pages than requested.
        const MOST_PAGES: usize = 100;
        let reference = self.location.tagged("latest".to_owned());
        let mut tags = HashSet::new();
        let mut last: Option<String> = None;
        for _ in 0..MOST_PAGES {
            let answer = self.client.list_tags(&reference, self.credentials.auth(), Some(PAGE), last.as_deref()).await;
            let page = match answer {
                Ok(page) => page.tags,
                Err(error) if is_absent(&error) => return Ok(None),
                Err(error) => return Err(RegistryError::call(self.location, &error)),
            };
            // Some registries ignore paging: a page without new tags ends the list.
            let n_before = tags.len();
            last = page.last().cloned();
            tags.extend(page);
            if tags.len() == n_before {
                return Ok(Some(tags));
            }
            if tags.len() > MOST_TAGS {
                break;
            }
        }
        let message = format!("the repository has more tags than are read ({MOST_TAGS}); name a version");
        Err(RegistryError::at(self.location, message))
    }

    /// The content of a layer of at most `limit` bytes, checked against its digest.
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
        // Without the layer's `urls`, so that the content is read from the registry and not from another server.
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

    /// Uploads content that the registry lacks.
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

/// Maximum length of a server's text in a message.
const EXCERPT_BYTES: usize = 300;

/// Errors of pushing and pulling bundles.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum RegistryError {
    /// The text is not a reference.
    #[error("`{text}` {message}")]
    RegistryReference { text: String, message: String },
    /// The registry failed, or its content is invalid.
    #[error("{location}: {message}")]
    Registry {
        location: String,
        /// The error and the remedy; never contains a password.
        message: String,
    },
    /// The bundle is invalid.
    #[error(transparent)]
    Bundle(#[from] BundleError),
}

impl RegistryError {
    pub(crate) fn at(location: &RegistryReference, message: impl Into<String>) -> Self {
        Self::Registry { location: location.to_string(), message: message.into() }
    }

    /// The message for a client error.
    pub(crate) fn call(location: &RegistryReference, error: &OciDistributionError) -> Self {
        Self::at(location, sentence(location, error))
    }
}

/// Whether the registry answered that the name does not exist.
pub(crate) fn is_absent(error: &OciDistributionError) -> bool {
    const ABSENT: [OciErrorCode; 4] =
        [OciErrorCode::ManifestUnknown, OciErrorCode::NameUnknown, OciErrorCode::NotFound, OciErrorCode::BlobUnknown];
    match error {
        OciDistributionError::ImageManifestNotFoundError(_) | OciDistributionError::ServerError { code: 404, .. } => {
            true
        }
        OciDistributionError::RegistryError { envelope, .. } => {
            envelope.errors.iter().any(|error| ABSENT.contains(&error.code))
        }
        _ => false,
    }
}

fn sentence(location: &RegistryReference, error: &OciDistributionError) -> String {
    let host = location.host();
    match error {
        error if is_refusal(error) => format!(
            "the registry rejected the credentials or requires some; run `docker login {host}`, or set QUERL_REGISTRY_HOST to {host} and \
             QUERL_REGISTRY_USER and QUERL_REGISTRY_PASSWORD"
        ),
        error if is_absent(error) => "is not in the registry; check the name and the version".to_owned(),
        OciDistributionError::RequestError(error) => request_sentence(error),
        OciDistributionError::RegistryError { envelope, .. } => {
            let said: Vec<_> = envelope.errors.iter().map(|error| error.message.as_str()).collect();
            format!("the registry refused the request: {}", excerpt(&said.join("; ")))
        }
        OciDistributionError::ServerError { code, message, .. } => {
            format!("the registry answered with status {code}: {}; try again later", excerpt(message))
        }
        OciDistributionError::DigestError(_) => {
            "the registry sent content that does not have its digest; try again, and report it to the operator of the registry if it persists".to_owned()
        }
        other => format!("the registry's answer is not understood: {}", excerpt(&other.to_string())),
    }
}

fn is_refusal(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::AuthenticationFailure(_)
        | OciDistributionError::UnauthorizedError { .. }
        | OciDistributionError::ServerError { code: 401 | 403, .. } => true,
        OciDistributionError::RegistryError { envelope, .. } => {
            let refused = |code: &OciErrorCode| matches!(code, OciErrorCode::Unauthorized | OciErrorCode::Denied);
            envelope.errors.iter().any(|error| refused(&error.code))
        }
        OciDistributionError::RequestError(error) => {
            error.status().is_some_and(|status| matches!(status.as_u16(), 401 | 403))
        }
        _ => false,
    }
}

/// The innermost cause of a failed request: outer errors repeat the address, which may contain a signature.
fn request_sentence(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    let cause = match std::ptr::eq(cause, error) {
        true => "no further cause is known".to_owned(),
        false => excerpt(&cause.to_string()),
    };
    format!(
        "cannot be reached: {cause}; check the address and the network, and whether the registry speaks https (plain http is \
         spoken to this machine alone, unless `--plain-http` asks for it)"
    )
}

/// A server's text, printable and truncated.
pub(crate) fn excerpt(text: &str) -> String {
    querl_core::text::printable(text, EXCERPT_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A registry that sends a byte from time to time never reaches the read timeout; the total timeout must end it.
    #[tokio::test]
    async fn registry_that_never_comes_to_an_end_is_given_up() {
        let location = RegistryReference::parse("localhost/a").unwrap();
        let endless = async {
            loop {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let limit = Duration::from_millis(20);
        let error = within::<()>(&location, limit, endless).await.unwrap_err().to_string();
        assert_eq!(error, "localhost/a: the registry took more than 0.02 seconds; try again later");
        assert_eq!(within(&location, limit, async { Ok(1) }).await.unwrap(), 1);
    }
}
