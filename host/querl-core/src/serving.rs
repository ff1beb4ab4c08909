//! Interface between the HTTP service and the engine that generates responses with the models of tenants.

use crate::records::{Context, Message};
use std::path::Path;
use std::time::{Duration, Instant};

named_enum! {
    /// Role of a tenant's model.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Role {
        /// The released model.
        Current = "current",
        /// A candidate model that is tried next to the released one.
        Candidate = "candidate",
    }
}

/// A served model of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// Name of the tenant: the key `tenant` of the model's configuration.
    pub name: String,
    /// Whether the model is the released one or a candidate.
    pub role: Role,
    /// Digest of adapter, base, prompt plugin and decoding settings: the same version gives the same rewrites.
    pub version: String,
    /// The run or configuration that the model was loaded from, for operators.
    pub source: String,
    /// When the model's checkpoint was written, in seconds since 1970.
    pub created_at: u64,
    /// When the model was loaded, in seconds since 1970.
    pub loaded_at: u64,
    /// API key that the tenant's clients must send; `None` permits every client.
    pub api_key: Option<String>,
}

/// What a model is to generate.
#[derive(Debug, Clone, PartialEq)]
pub enum GenerationTask {
    /// A rewrite of a query, by the tenant's prompts, decoding settings and parser.
    Rewrite {
        /// What the user typed.
        query: String,
        /// User profile and history.
        context: Context,
    },
    /// A response to the client's own messages.
    Chat(ChatTask),
}

/// A response to the client's own messages.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatTask {
    /// The client's messages: at least one, the last from the user.
    pub messages: Vec<Message>,
    /// Sampling temperature; below 1e-5 it is greedy decoding.
    pub temperature: f64,
    /// Threshold of nucleus sampling; 1 disables it.
    pub top_p: f64,
    /// Maximum number of response tokens; `None` for that of the tenant's configuration.
    pub max_new_tokens: Option<usize>,
    /// Stop strings; the response ends before the first one that occurs.
    pub stop: Vec<String>,
    /// Seed of sampling.
    pub seed: u64,
}

/// A finished response.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The parsed rewrite, or the text of a chat response.
    pub text: String,
    /// True if the response was truncated at the maximum number of tokens.
    pub truncated: bool,
    /// [`Tenant::version`] of the model that generated the response.
    pub version: String,
    /// Number of prompt tokens.
    pub n_prompt_tokens: usize,
    /// Number of response tokens.
    pub n_tokens: usize,
    /// Time from the arrival of the task to the start of prefill: waiting for a core, prompt plugin, tokenizer, the engine's queue.
    pub queued: Duration,
    /// Time from the end of queueing to the first token.
    pub prefill: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
}

/// Why a request has no response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GenerationFailure {
    /// Stable code for counting: `plugin_fault`, `no_rewrite`, `model_failed` or `removed`.
    pub code: &'static str,
    /// A sentence for the log.
    pub message: String,
}

/// An event of a request, sent to its [`EventSink`].
#[derive(Debug, Clone, PartialEq)]
pub enum GenerationEvent {
    /// The next piece of the response's text; chat tasks only.
    Text(String),
    /// The last event: the response, or why there is none.
    Done(Result<Generation, GenerationFailure>),
}

/// Receiver of the events of one request; can be called from any thread.
pub trait EventSink: Send + Sync {
    /// Sends an event to the client; it is dropped if the client no longer waits.
    fn send(&self, event: GenerationEvent);

    /// False once the client no longer waits; the request is then cancelled.
    fn is_open(&self) -> bool;

    /// True for a shadow request, whose response no client waits for; it does not count towards the capacity of the queue.
    fn is_shadow(&self) -> bool {
        false
    }
}

/// Why a request is not queued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SubmitError {
    /// No tenant of this name is served.
    UnknownTenant,
    /// The queue is full; the string is the message.
    QueueFull(String),
    /// The input cannot be used, for example because it is longer than the model's positions; the string is the message.
    Input(String),
    /// The tenant's prompt plugin faulted or rejected the query; the string is the message.
    Plugin(String),
    /// The engine has stopped.
    Ended,
}

/// State of the engine, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineState {
    /// Requests in the queue, without shadow requests.
    pub n_waiting: usize,
    /// Requests in the running batch.
    pub n_running: usize,
    /// Decode steps since the start.
    pub n_steps: u64,
    /// Sum of the batch sizes of all decode steps; divided by `n_steps`, the mean batch size.
    pub n_step_sequences: u64,
    /// Bytes of the KV cache in use.
    pub kv_cache_bytes: u64,
    /// Prompt tokens since the start.
    pub n_prompt_tokens: u64,
    /// Prompt tokens served from the prefix cache since the start.
    pub n_cached_tokens: u64,
}

/// Engine that generates responses with the models of all tenants.
pub trait Rewriter: Send + Sync {
    /// The released models, sorted by tenant name.
    fn tenants(&self) -> Vec<Tenant> {
        self.models(Role::Current)
    }

    /// Number of released models.
    fn n_tenants(&self) -> usize;

    /// The models of one role, sorted by tenant name; at most one for each tenant.
    fn models(&self, role: Role) -> Vec<Tenant>;

    /// The released model of a tenant; `None` if no tenant of this name is served.
    fn tenant(&self, name: &str) -> Option<Tenant> {
        self.tenants().into_iter().find(|tenant| tenant.name == name)
    }

    /// Queues a task for the model with the name and role of `tenant`. Calls the prompt plugin and the tokenizer, which takes time: do
    /// not call it on a thread that serves other requests. [`Generation::queued`] begins at `arrived_at`.
    ///
    /// # Errors
    /// Why the task was not queued.
    fn submit(
        &self,
        tenant: &Tenant,
        task: GenerationTask,
        arrived_at: Instant,
        events: Box<dyn EventSink>,
    ) -> Result<(), SubmitError>;

    /// Loads and checks the model of a run or a configuration, then serves it in place of the model of the same tenant and role, if
    /// there is one, whose requests in progress finish. Takes as long as loading a model.
    ///
    /// # Errors
    /// A sentence: the model cannot be loaded or fails its check; the models served before are still served.
    fn load(&self, path: &Path, role: Role) -> Result<Tenant, String>;

    /// Removes the model of a tenant and role; its requests in progress finish. Returns false if there is no such model.
    fn remove(&self, tenant: &str, role: Role) -> bool;

    /// State of the engine.
    fn state(&self) -> EngineState;

    /// True if the queue is full, so that a further request would be rejected.
    fn is_full(&self) -> bool;

    /// False once the engine has stopped and will not respond again.
    fn is_alive(&self) -> bool;
}

/// How a candidate is tried on a tenant's traffic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CandidateMode {
    /// The candidate answers this share of the requests, above 0 and below 1.
    Canary(f64),
    /// The candidate answers no request; its rewrites are compared with those of the current model.
    Shadow,
}

/// A candidate model that the releases name.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Name of the tenant.
    pub tenant: String,
    /// Number of the candidate's start in the release history; a model that is tried again gets a new number.
    pub id: usize,
    /// How the candidate is tried.
    pub mode: CandidateMode,
}

/// Result of [`ReleaseSource::reload`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reloaded {
    /// Canary and shadow candidates whose model is loaded; one that failed to load is in `problems`.
    pub candidates: Vec<Candidate>,
    /// One sentence for each model that is not served as the releases say, with the reason.
    pub problems: Vec<String>,
}

/// The released models and candidates that a service has to serve.
pub trait ReleaseSource: Send + Sync {
    /// Reads the releases again, loads models that are not served yet and removes candidates that have ended. Takes as long as loading
    /// models.
    ///
    /// # Errors
    /// A sentence: the releases cannot be read; everything is served as before.
    fn reload(&self) -> Result<Reloaded, String>;

    /// Records that the service has ended a candidate, and why. A candidate that has already ended is left unchanged.
    ///
    /// # Errors
    /// A sentence: the end of the candidate cannot be recorded.
    fn end_candidate(&self, candidate: &Candidate, reason: &str) -> Result<(), String>;
}
