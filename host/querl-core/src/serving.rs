//! Serving rewrites: what an HTTP service needs of the models and prompts of tenants.

use crate::records::{Context, Message};
use std::path::Path;
use std::time::Duration;

named_enum! {
    /// What a model of a tenant is for.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Role {
        /// The released model.
        Current = "current",
        /// A model that is tried next to it.
        Candidate = "candidate",
    }
}

/// A model of a tenant that is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// `tenant` of its configuration.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// Digest of adapter, base, prompt plugin and decoding settings: the same version gives the same rewrites.
    pub version: String,
    /// The run or configuration that it was loaded from, for operators.
    pub source: String,
    /// When its checkpoint was written, in seconds since 1970.
    pub created_at: u64,
    /// When it was loaded, in seconds since 1970.
    pub loaded_at: u64,
    /// The key that its clients must send; `None` permits every client.
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
    /// At least one, the last from the user.
    pub messages: Vec<Message>,
    /// 0 is greedy decoding.
    pub temperature: f64,
    /// Nucleus sampling below 1.
    pub top_p: f64,
    /// Most tokens of the response; `None`: as in the tenant's configuration.
    pub max_new_tokens: Option<usize>,
    /// The response ends before the first of these.
    pub stop: Vec<String>,
    /// Seed of sampling.
    pub seed: u64,
}

/// A finished response.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The parsed rewrite, or the text of a chat response.
    pub text: String,
    /// Whether it was truncated at the maximum number of tokens.
    pub truncated: bool,
    /// Version of the tenant that generated it.
    pub version: String,
    /// Tokens of the prompt.
    pub n_prompt_tokens: usize,
    /// Tokens of the response.
    pub n_tokens: usize,
    /// Time in the queue.
    pub queued: Duration,
    /// From the queue to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// Why there is no response. Codes are stable, for counting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GenerationFailure {
    /// `plugin_fault`, `no_rewrite`, `model_failed`, `removed`.
    pub code: &'static str,
    /// A sentence for the log.
    pub message: String,
}

/// What a request receives.
#[derive(Debug, Clone, PartialEq)]
pub enum GenerationEvent {
    /// Text that follows that of earlier events; of chat tasks alone.
    Text(String),
    /// The last event.
    Done(Result<Generation, GenerationFailure>),
}

/// Where the events of one request go, from any thread.
pub trait EventSink: Send + Sync {
    /// Passes an event on; one that nobody waits for is dropped.
    fn send(&self, event: GenerationEvent);

    /// False once nobody waits any more: the request is cancelled.
    fn is_open(&self) -> bool;

    /// Whether no client waits for the response: then it takes no place in the queue, which has room for clients alone.
    fn is_shadow(&self) -> bool {
        false
    }
}

/// Why a request is not queued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SubmitError {
    /// No tenant of this name is served.
    UnknownTenant,
    /// The queue is full; in a sentence.
    QueueFull(String),
    /// The input cannot be used, for example because it is longer than the model's positions; in a sentence.
    Input(String),
    /// The tenant's prompt plugin faulted or rejected the query; in a sentence.
    Plugin(String),
    /// The engine has ended.
    Ended,
}

/// State of the engine, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineState {
    /// Requests in the queue that a client waits for.
    pub n_waiting: usize,
    /// Requests in the running batch.
    pub n_running: usize,
    /// Decode steps since the start.
    pub n_steps: u64,
    /// Sequences of all those steps: divided by the steps, the mean batch size.
    pub n_step_sequences: u64,
    /// Bytes of the KV cache in use.
    pub kv_cache_bytes: u64,
    /// Tokens of prompts since the start.
    pub n_prompt_tokens: u64,
    /// Those that were found in the prefix cache.
    pub n_cached_tokens: u64,
}

/// Models of tenants that requests share.
pub trait Rewriter: Send + Sync {
    /// The released models, sorted by name.
    fn tenants(&self) -> Vec<Tenant> {
        self.models(Role::Current)
    }

    /// The models of one role, sorted by name: at most one for each tenant.
    fn models(&self, role: Role) -> Vec<Tenant>;

    /// The released model of a tenant.
    fn tenant(&self, name: &str) -> Option<Tenant> {
        self.tenants().into_iter().find(|tenant| tenant.name == name)
    }

    /// Queues a task for the model of the tenant's name and role. Calls the prompt plugin and tokenizes, which takes time: it is not called
    /// on a thread that other requests need.
    ///
    /// # Errors
    /// The task is not queued.
    fn submit(&self, tenant: &Tenant, task: GenerationTask, events: Box<dyn EventSink>) -> Result<(), SubmitError>;

    /// Loads a run or a configuration as a tenant, or in place of a tenant of the same name and role, whose requests in progress finish with the
    /// old model. It is checked before it takes requests. Takes as long as loading a model.
    ///
    /// # Errors
    /// A sentence: it cannot be loaded or fails its check; what was served before is still served.
    fn load(&self, path: &Path, role: Role) -> Result<Tenant, String>;

    /// Removes a tenant's model; its requests in progress finish. False where there is none of this name and role.
    fn remove(&self, tenant: &str, role: Role) -> bool;

    /// State of the engine.
    fn state(&self) -> EngineState;

    /// Whether a further request would not be queued.
    fn is_full(&self) -> bool;

    /// False once it will never respond again.
    fn is_alive(&self) -> bool;
}

/// How much of a tenant's traffic a candidate has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CandidateMode {
    /// It answers this share of the requests, above 0 and below 1.
    Canary(f64),
    /// It answers none; its rewrites are compared with those of the current model.
    Shadow,
}

/// A candidate that the releases name.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The tenant.
    pub tenant: String,
    /// Number of its start in the history: a model that is tried again has another one.
    pub id: usize,
    /// Its traffic.
    pub mode: CandidateMode,
}

/// What reading the releases again has changed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reloaded {
    /// The candidates, which are loaded.
    pub candidates: Vec<Candidate>,
    /// Sentences: what is not served as the releases say, and why.
    pub problems: Vec<String>,
}

/// The releases that a service follows.
pub trait ReleaseSource: Send + Sync {
    /// Reads them again, loads what is not served yet and removes candidates that have ended. Takes as long as loading models.
    ///
    /// # Errors
    /// A sentence: they cannot be read; everything is served as before.
    fn reload(&self) -> Result<Reloaded, String>;

    /// Records that the service has ended a candidate, and why. One that has ended in the meantime is left alone.
    ///
    /// # Errors
    /// A sentence: it cannot be recorded.
    fn end_candidate(&self, candidate: &Candidate, reason: &str) -> Result<(), String>;
}
