//! Where the responses of reinforcement learning are generated.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Generator of rollouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RolloutEngineKind {
    /// The engine of querl, on `device`.
    Local,
    /// A server with OpenAI's completions interface that takes and returns token ids.
    Openai,
}

/// Program of a rollout server. They load adapters at different routes, and report other log-probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RolloutServerKind {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

section! {
    /// Where the responses of reinforcement learning are generated.
    RolloutConfig {
        /// `local` generates on `device`, `openai` on a vLLM or SGLang server.
        engine: RolloutEngineKind = RolloutEngineKind::Local,
        /// `openai`: the server's program.
        server: RolloutServerKind = RolloutServerKind::Vllm,
        /// `openai`: address of the interface, up to and with `/v1`.
        base_url: Option<String> = None,
        /// `openai`: name of the base model on the server.
        model: Option<String> = None,
        /// Environment variable that holds the server's key; the key itself is never stored.
        api_key_env: String = String::new(),
        /// File that holds the key and nothing else; used instead of the environment variable.
        api_key_file: Option<PathBuf> = None,
        /// The names of the adapters at the server begin with this, at the default also with a digest of the run folder. When the stage starts, adapters of earlier processes with the same name are unloaded.
        adapter: String = "querl".into(),
        /// The folder `rl/rollout` of the run as the server sees it, such as a mount of its container; by default the same path.
        adapter_dir: Option<String> = None,
        /// Maximum number of concurrent requests; with vLLM each is for all samples of a query.
        #[schemars(range(min = 1, max = 1024))]
        max_concurrent: usize = 64,
        /// Timeout of one request in seconds.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
        timeout_s: f64 = 600.0,
        /// Maximum number of retries.
        #[schemars(range(max = 100))]
        max_retries: usize = 4,
        /// Maximum KL (k3, nats per token) of the server's log-probabilities to those of the training pass; a batch above it stops the run.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        max_mismatch_kl: f64 = 0.05,
    }
}
