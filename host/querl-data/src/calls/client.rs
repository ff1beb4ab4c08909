//! The HTTP client of one endpoint: limits in time, a proxy, certificates.

use super::CallLimits;
use crate::error::DataError;
use querl_core::config::CallsConfig;
use reqwest::{Certificate, Client, NoProxy, Proxy, redirect};
use std::time::Duration;

/// `setting` is what names the endpoint in the configuration.
///
/// # Errors
/// The proxy or the certificates cannot be used.
pub(super) fn client(setting: &str, limits: &CallLimits, config: &CallsConfig) -> Result<Client, DataError> {
    // Fails where a provider is installed already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let connect = seconds(config.connect_timeout_s).min(limits.timeout);
    let mut builder = Client::builder()
        .timeout(limits.timeout)
        .connect_timeout(connect)
        // A redirected POST becomes a GET without its body: whoever moved is named instead.
        .redirect(redirect::Policy::none());
    if let Some(address) = &config.proxy {
        let proxy = Proxy::all(address)
            .map_err(|error| DataError::setting("calls.proxy", format!("cannot be used: {error}")))?;
        builder = builder.proxy(proxy.no_proxy(NoProxy::from_env()));
    }
    if let Some(path) = &config.ca_file {
        let unusable =
            |problem: String| DataError::setting("calls.ca_file", format!("is `{}`, {problem}", path.display()));
        let bytes = std::fs::read(path).map_err(|error| unusable(format!("which cannot be read: {error}")))?;
        let certificates = Certificate::from_pem_bundle(&bytes).ok().filter(|found| !found.is_empty());
        let certificates = certificates.ok_or_else(|| unusable("which holds no certificate in PEM form".into()))?;
        builder = builder.tls_certs_merge(certificates);
    }
    builder.build().map_err(|error| DataError::setting(setting, format!("cannot be called from this machine: {error}")))
}

/// `from_secs_f64` panics on what the configuration's own check should have refused.
pub(super) fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(60))
}
