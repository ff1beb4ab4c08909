//! A client of a running service's `POST /admin/releases`.

use crate::server::block_on;
use anyhow::Context;
use serde_json::Value;
use std::time::Duration;

/// Loading a model takes long.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Makes the service at `url` read its releases again. Must not be called on a thread of an async runtime.
///
/// # Errors
/// It cannot be reached, refuses the key, or does not serve what the releases say.
pub fn reload_server(url: &str, admin_key: &str) -> anyhow::Result<()> {
    // Fails if a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    block_on(async {
        // The key is for the server alone.
        let client = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build().context("no HTTP client")?;
        let address = format!("{}/admin/releases", url.trim_end_matches('/'));
        let response = client.post(&address).bearer_auth(admin_key).send().await.with_context(|| address.clone())?;
        let status = response.status();
        let body: Value = response.json().await.with_context(|| format!("{address}: status {status}"))?;
        if !status.is_success() {
            anyhow::bail!("{address}: {}", body["error"]["message"].as_str().unwrap_or(status.as_str()));
        }
        let problems = body["problems"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let problems: Vec<&str> = problems.collect();
        anyhow::ensure!(problems.is_empty(), "{url}: {}", problems.join("; "));
        Ok(())
    })
}
