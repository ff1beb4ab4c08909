//! A stand-in for the models of tenants: rewrites derived from the query's own text, with delays and failures that the query selects.
#![allow(clippy::unwrap_used, dead_code)] // each test program uses a part

use axum::Router;
use querl_core::serving::{
    ChatTask, EngineState, EventSink, Generation, GenerationEvent, GenerationFailure, GenerationTask, Rewriter, Role,
    SubmitError, Tenant,
};
use querl_serve::{CandidateLimits, RewriteOptions, ServerLimits, serve};
use reqwest::{Client, RequestBuilder};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;

/// A listener on a free port, and its URL.
pub(crate) async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

/// Serves on a free port to the end of the test, and returns the URL.
pub(crate) async fn serve_app(app: Router, limits: ServerLimits) -> String {
    let (listener, url) = listen().await;
    tokio::spawn(serve(listener, app, limits, std::future::pending()));
    url
}

/// Status and JSON of a response.
pub(crate) async fn answer(request: RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

pub(crate) fn http() -> Client {
    // Fails where a provider is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder().no_proxy().build().unwrap()
}

pub(crate) fn options() -> RewriteOptions {
    RewriteOptions {
        max_body_bytes: 4000,
        max_queries: 3,
        max_preparing: 100,
        body_timeout: Duration::from_secs(5),
        deadline: Duration::from_millis(300),
        chat_timeout: Duration::from_millis(500),
        max_cached_rewrites: 0,
        api_key: None,
        admin_key: Some("admin-key".into()),
        upstream: None,
        access_log: None,
        request_log: None,
        traces: None,
        candidate_limits: CandidateLimits::DEFAULT,
        server: ServerLimits::default(),
    }
}

pub(crate) fn tenant(name: &str, version: usize, api_key: Option<&str>) -> Tenant {
    Tenant {
        name: name.into(),
        role: Role::Current,
        version: format!("v{version}"),
        source: format!("runs/{name}"),
        created_at: 1_600_000_000,
        loaded_at: 1_700_000_000,
        api_key: api_key.map(str::to_owned),
    }
}

/// The first word of a query selects the behaviour, see `submit`; after the word `candidate` or `current`, only for that model. Chat
/// responses repeat the last message, a character at a time.
#[derive(Default)]
pub(crate) struct StandInRewriter {
    tenants: Mutex<Vec<Tenant>>,
    /// Requests that are never answered.
    pub(crate) held: Mutex<Vec<Box<dyn EventSink>>>,
    n_held: AtomicUsize,
    pub(crate) n_submitted: AtomicUsize,
    /// Number of concurrent calls of `submit` that prepare a prompt, and its maximum.
    n_preparing: AtomicUsize,
    pub(crate) max_preparing: AtomicUsize,
    pub(crate) has_ended: AtomicBool,
    pub(crate) is_full: AtomicBool,
    n_loaded: AtomicUsize,
}

impl StandInRewriter {
    pub(crate) fn new(tenants: Vec<Tenant>) -> Arc<Self> {
        Arc::new(Self { tenants: Mutex::new(tenants), ..Self::default() })
    }

    pub(crate) fn n_held_open(&self) -> usize {
        self.held.lock().unwrap().iter().filter(|events| events.is_open()).count()
    }
}

fn failure(code: &'static str) -> Result<Generation, GenerationFailure> {
    Err(GenerationFailure { code, message: "/secret/path: as the log reports".into() })
}

fn generation(text: String, version: &str, queued: Duration) -> Generation {
    let ms = Duration::from_millis;
    Generation {
        n_tokens: text.chars().count(),
        text,
        truncated: false,
        version: version.into(),
        n_prompt_tokens: 20,
        queued,
        prefill: ms(2),
        decode: ms(3),
    }
}

/// Sends the last message's text, until a stop text or the maximum number of tokens.
fn chat(task: &ChatTask, version: &str, queued: Duration, events: &dyn EventSink) -> Generation {
    let text = &task.messages.last().unwrap().content;
    let end = task.stop.iter().filter_map(|stop| text.find(stop.as_str())).min().unwrap_or(text.len());
    let maximum = task.max_new_tokens.unwrap_or(usize::MAX);
    let kept: String = text[..end].chars().take(maximum).collect();
    for character in kept.chars() {
        events.send(GenerationEvent::Text(character.into()));
    }
    let truncated = kept.len() < end;
    Generation { truncated, ..generation(kept, version, queued) }
}

impl Rewriter for StandInRewriter {
    fn n_tenants(&self) -> usize {
        self.models(Role::Current).len()
    }

    fn models(&self, role: Role) -> Vec<Tenant> {
        self.tenants.lock().unwrap().iter().filter(|tenant| tenant.role == role).cloned().collect()
    }

    fn submit(
        &self,
        tenant: &Tenant,
        task: GenerationTask,
        arrived_at: Instant,
        events: Box<dyn EventSink>,
    ) -> Result<(), SubmitError> {
        self.n_submitted.fetch_add(1, Ordering::Relaxed);
        let found = self.models(tenant.role).into_iter().find(|served| served.name == tenant.name);
        let version = found.ok_or(SubmitError::UnknownTenant)?.version;
        let text = match &task {
            GenerationTask::Rewrite { query, .. } => query.clone(),
            GenerationTask::Chat(task) => task.messages.last().unwrap().content.clone(),
        };
        let for_role = text.strip_prefix(tenant.role.name()).and_then(|text| text.strip_prefix(' '));
        let text = for_role.map(str::to_owned).unwrap_or(text);
        let (first, second) = text.split_once(' ').unwrap_or((&text, ""));
        match first {
            "busy" => return Err(SubmitError::QueueFull("the queue is full (9 requests); retry later".into())),
            "long" => return Err(SubmitError::Input("the prompt has 900 tokens; expected at most 512".into())),
            "plugin" => return Err(SubmitError::Plugin("prompt-x 0.1: out of fuel".into())),
            "panics" => panic!("as a tokenizer may"),
            "ends" => return Ok(()),
            // Takes this number of milliseconds to prepare.
            "prepares" => {
                let n_preparing = 1 + self.n_preparing.fetch_add(1, Ordering::Relaxed);
                self.max_preparing.fetch_max(n_preparing, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(second.parse().unwrap()));
                self.n_preparing.fetch_sub(1, Ordering::Relaxed);
            }
            "held" => {
                // As in the engine, a shadow request does not count towards the queue.
                self.n_held.fetch_add(usize::from(!events.is_shadow()), Ordering::Relaxed);
                self.held.lock().unwrap().push(events);
                return Ok(());
            }
            _ => {}
        }
        if let GenerationTask::Chat(ChatTask { max_new_tokens: Some(n @ 512..), .. }) = &task {
            // The words of the engine.
            let what =
                format!("the prompt has 1 tokens; with max_new_tokens {n} it goes beyond the model's 512 positions");
            return Err(SubmitError::Input(what));
        }
        // A fixed time where no test measures it.
        let queued = if first == "prepares" { arrived_at.elapsed() } else { Duration::from_millis(1) };
        let delay = if first == "delay" { second.parse().unwrap() } else { 0 };
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(delay));
            let done = match (text.as_str(), &task) {
                ("unreadable", _) => failure("no_rewrite"),
                ("broken", _) => failure("model_failed"),
                (_, GenerationTask::Chat(task)) => Ok(chat(task, &version, queued, events.as_ref())),
                (query, GenerationTask::Rewrite { context, .. }) => {
                    let context = format!("{}|{}", context.user_profile, context.history_summary);
                    Ok(generation(format!("{query}|{context}"), &version, queued))
                }
            };
            events.send(GenerationEvent::Done(done));
        });
        Ok(())
    }

    fn load(&self, path: &Path, role: Role) -> Result<Tenant, String> {
        let name = path.file_name().unwrap().to_str().unwrap();
        if name == "damaged" {
            return Err("runs/damaged: adapter is for another base; train it on this one".into());
        }
        let version = 2 + self.n_loaded.fetch_add(1, Ordering::Relaxed);
        let loaded = Tenant { role, ..tenant(name, version, None) };
        let mut tenants = self.tenants.lock().unwrap();
        tenants.retain(|tenant| tenant.name != name || tenant.role != role);
        tenants.push(loaded.clone());
        tenants.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(loaded)
    }

    fn remove(&self, name: &str, role: Role) -> bool {
        let mut tenants = self.tenants.lock().unwrap();
        let n_tenants = tenants.len();
        tenants.retain(|tenant| tenant.name != name || tenant.role != role);
        tenants.len() < n_tenants
    }

    fn state(&self) -> EngineState {
        let n_waiting = self.n_held.load(Ordering::Relaxed);
        EngineState {
            n_waiting,
            n_running: 2,
            n_steps: 10,
            n_step_sequences: 25,
            n_prompt_tokens: 7,
            ..Default::default()
        }
    }

    fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    fn is_alive(&self) -> bool {
        !self.has_ended.load(Ordering::Relaxed)
    }
}
