//! A client of a running service's `/admin/releases`.

use crate::server::block_on;
use anyhow::Context;
use reqwest::Method;
use serde_json::Value;
use std::time::Duration;

const CHECK_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of a reload, which may load a model.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// Checks that the service at `url` follows releases and accepts the admin key. Must not be called on a thread of an async
/// runtime.
///
/// # Errors
/// It cannot be reached, refuses the key, or follows no releases.
pub fn check_server(url: &str, admin_key: &str) -> anyhow::Result<()> {
    let body = call(Method::GET, url, admin_key, CHECK_TIMEOUT)?;
    anyhow::ensure!(body["follows_releases"] != false, "{url}: follows no releases; start it with --releases DIR");
    Ok(())
}

/// Makes the service at `url` read its releases again. Must not be called on a thread of an async runtime.
///
/// # Errors
/// It cannot be reached, refuses the key, or does not serve what the releases say.
pub fn reload_server(url: &str, admin_key: &str) -> anyhow::Result<()> {
    let body = call(Method::POST, url, admin_key, RELOAD_TIMEOUT)?;
    let problems: Vec<&str> = body["problems"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    anyhow::ensure!(problems.is_empty(), "{url}: {}", problems.join("; "));
    Ok(())
}

fn call(method: Method, url: &str, admin_key: &str, timeout: Duration) -> anyhow::Result<Value> {
    // Fails if a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut found = Value::Null;
    block_on(async {
        // Without a proxy, because the key must only be sent to the server.
        let client = reqwest::Client::builder().no_proxy().timeout(timeout).build().context("no HTTP client")?;
        let address = format!("{}/admin/releases", url.trim_end_matches('/'));
        let request = client.request(method, &address).bearer_auth(admin_key);
        let response = request.send().await.with_context(|| address.clone())?;
        let status = response.status();
        let body: Value = response.json().await.with_context(|| format!("{address}: status {status}"))?;
        if !status.is_success() {
            anyhow::bail!("{address}: {}", body["error"]["message"].as_str().unwrap_or(status.as_str()));
        }
        found = body;
        Ok(())
    })?;
    Ok(found)
}
