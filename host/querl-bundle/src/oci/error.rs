//! Why a bundle did not get into a registry, or out of it.

use super::reference::RegistryReference;
use crate::BundleError;
use oci_client::errors::{OciDistributionError, OciErrorCode};
use std::error::Error;

/// How much of a server's words goes into a message.
const EXCERPT_BYTES: usize = 300;

/// Why a bundle did not get into a registry, or out of it.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The text names no place in a registry.
    #[error("`{text}` {message}")]
    RegistryReference {
        /// As written.
        text: String,
        /// What was expected.
        message: String,
    },
    /// The registry, or what is in it.
    #[error("{location}: {message}")]
    Registry {
        /// The place.
        location: String,
        /// What happened, and the remedy; shows no password.
        message: String,
    },
    /// The bundle itself.
    #[error(transparent)]
    Bundle(#[from] BundleError),
}

impl RegistryError {
    pub(crate) fn at(location: &RegistryReference, message: impl Into<String>) -> Self {
        Self::Registry { location: location.to_string(), message: message.into() }
    }

    /// The sentence for what the client met.
    pub(crate) fn call(location: &RegistryReference, error: &OciDistributionError) -> Self {
        Self::at(location, sentence(location, error))
    }
}

/// True where the registry answered that there is nothing of this name.
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
            "the registry refused the credentials or wants some; run `docker login {host}`, or set QUERL_REGISTRY_HOST to {host} and \
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
            "the registry sent content that does not have its digest; try again, and tell whoever runs it if it stays so".to_owned()
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

/// A failed request by its innermost cause: the outer ones repeat the address, which may be signed for one reader.
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

/// A server's words, made harmless and not too many.
pub(crate) fn excerpt(text: &str) -> String {
    querl_core::text::printable(text, EXCERPT_BYTES)
}
