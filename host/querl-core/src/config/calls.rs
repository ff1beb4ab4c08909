//! How outside services are reached, whichever they are.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What holds for calls to teacher, judge and retrieval alike.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CallsConfig {
    /// Limit for making a connection, in seconds.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
    pub connect_timeout_s: f64,
    /// Limit for the time without a byte in the middle of an answer, in seconds; `timeout_s` of the service limits the whole call.
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
    pub read_timeout_s: f64,
    /// Largest answer that is read, in MiB.
    #[schemars(range(min = 1, max = 1024))]
    pub max_response_mib: usize,
    /// After so many calls in a row without an answer, retries included in each, a service is given up and the stage stops; 0 never.
    pub breaker_failures: usize,
    /// Proxy for all services, `http://` or `https://`; by default `HTTP_PROXY` and `HTTPS_PROXY` of the environment. `NO_PROXY` holds for both.
    pub proxy: Option<String>,
    /// Certificates to trust beside the system's, PEM.
    pub ca_file: Option<PathBuf>,
}

impl Default for CallsConfig {
    fn default() -> Self {
        Self {
            connect_timeout_s: 10.0,
            read_timeout_s: 60.0,
            max_response_mib: 8,
            breaker_failures: 20,
            proxy: None,
            ca_file: None,
        }
    }
}

/// Answers of teachers, judges and retrieval services that are kept on disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CacheConfig {
    /// Whether answers are kept and looked up.
    pub enabled: bool,
    /// The file; by default `answers.redb` in the user's cache folder, for all runs.
    pub path: Option<PathBuf>,
    /// How long what a retrieval service found is believed, in hours; 0 never.
    #[schemars(range(min = 0.0, max = 1_000_000.0))]
    pub retrieval_ttl_hours: f64,
    /// How much is kept, in MiB: above that the oldest answers go when a run begins.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub max_mib: u64,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self { enabled: true, path: None, retrieval_ttl_hours: 24.0, max_mib: 4096 }
    }
}
