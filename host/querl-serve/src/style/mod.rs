//! A classifier of texts over HTTP, in the forms that its callers know.
//!
//! | request | form | answer |
//! |---|---|---|
//! | `POST /predict?text=...`, `POST /predict {"text": ...}` | the training script's service | `{predicted_label, confidence, probabilities}` |
//! | `POST /predict {"inputs": ...}` | text-embeddings-inference | `[{label, score}, ...]`, best first; of a batch a list of such lists |
//! | `POST /classify`, `/v1/classify` `{"input": ..., "use_activation": true}` | vLLM | `{id, object, created, model, data: [{index, label, probs, num_classes}], usage}` |
//! | `GET /health`, `/ready`, `/info`, `/metrics`, `/openapi.json`, `/docs` | | |
//!
//! `/health` says that the process is there, `/ready` that the model is. A request that cannot be served has a sentence in `error`: 400 for
//! what is no JSON, 401 without the key, 408 for a body that does not come, 413 for a body, a list or a text that is too large, 415 for one
//! that does not say it is JSON, 422 for a value that is missing or wrong, 429 where too many wait, 500 where the model failed, 503 while it
//! is loaded or where it takes too long.

mod answers;
mod metrics;
mod openapi;
mod refusal;
mod requests;

pub use answers::StylePrediction;

use answers::{classify_answer, predict_answer};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use metrics::StyleMetrics;
use querl_core::fsx::digest_hex;
use refusal::{Form, Refusal};
use requests::ClassifyRequest;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::oneshot;

/// What a classifier says of one text.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassifiedText {
    /// One for each class; they sum to 1.
    pub probabilities: Vec<f64>,
    /// The same before they are made probabilities.
    pub scores: Vec<f64>,
    /// Tokens that were looked at.
    pub n_tokens: usize,
    /// Tokens that were left out for want of room.
    pub n_left_out: usize,
}

/// Who waits for a request's texts.
pub trait Waiting: Send {
    /// False once nobody waits any more, because the client has left or it took too long.
    fn is_there(&self) -> bool;

    /// Hears of the texts, in order; an error is a sentence for the log.
    fn hear(self: Box<Self>, found: Result<Vec<ClassifiedText>, String>);
}

/// A request under way: its client's handler waits at the other end.
struct Handler(oneshot::Sender<Result<Vec<ClassifiedText>, String>>);

impl Waiting for Handler {
    fn is_there(&self) -> bool {
        !self.0.is_closed()
    }

    fn hear(self: Box<Self>, found: Result<Vec<ClassifiedText>, String>) {
        // Nobody may be there any more.
        let _ = self.0.send(found);
    }
}

/// Why texts are not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotAccepted {
    /// Too many wait already; in a sentence.
    Busy(String),
    /// A text cannot be classified; in a sentence.
    Text(String),
    /// There is no classifier any more.
    Gone,
}

/// A classifier that others may ask at the same time.
pub trait TextClassifier: Send + Sync {
    /// Hands texts over; who waits hears of them from any thread. It may count tokens, which takes its time: it is not called from a thread
    /// that others' requests need.
    ///
    /// # Errors
    /// They are not taken.
    fn submit(&self, texts: &[&str], waiting: Box<dyn Waiting>) -> Result<(), NotAccepted>;

    /// False once it will never answer again.
    fn is_alive(&self) -> bool;

    /// Names of the classes, by id.
    fn classes(&self) -> &[String];

    /// The same in English, where they are known.
    fn english(&self) -> Option<&[String]>;

    /// Texts that wait or are looked at.
    fn n_waiting(&self) -> usize;
}

/// What is served, and to whom.
#[derive(Clone)]
pub struct StyleOptions {
    /// As answers and `/info` name it.
    pub model_name: String,
    /// Most tokens of a text.
    pub max_length: usize,
    /// Of a request's body.
    pub max_body_bytes: usize,
    /// Texts of one request.
    pub max_texts: usize,
    /// Characters of one text.
    pub max_text_chars: usize,
    /// For a body to come, whole.
    pub body_timeout: Duration,
    /// For an answer, waiting for others' included.
    pub answer_timeout: Duration,
    /// What `Authorization: Bearer` must be followed by; `None` lets everybody ask.
    pub api_key: Option<String>,
}

/// The state of a service: nothing at first, then a model.
pub struct StyleService {
    options: StyleOptions,
    /// Of a digest the time that a comparison takes tells nothing.
    key_digest: Option<String>,
    classifier: OnceLock<Arc<dyn TextClassifier>>,
    metrics: StyleMetrics,
    n_classified: AtomicU64,
}

impl StyleService {
    /// A service whose model is not there yet.
    pub fn new(options: StyleOptions) -> Arc<Self> {
        let key_digest = options.api_key.as_ref().map(|key| digest_hex(key.as_bytes()));
        let (metrics, n_classified) = (StyleMetrics::default(), AtomicU64::new(0));
        Arc::new(Self { options, key_digest, classifier: OnceLock::new(), metrics, n_classified })
    }

    /// From now on requests are answered. A second model is passed over.
    pub fn set_ready(&self, classifier: Arc<dyn TextClassifier>) {
        let _ = self.classifier.set(classifier);
    }

    /// Notes what was classified in one go: requests, their texts, and the time of the model.
    pub fn note_batch(&self, n_requests: usize, n_texts: usize, elapsed: Duration) {
        self.metrics.batch(n_requests, n_texts, elapsed);
    }

    /// The service's routes.
    pub fn router(self: &Arc<Self>) -> Router {
        let asked = Router::new()
            .route("/predict", post(predict))
            .route("/classify", post(classify))
            .route("/v1/classify", post(classify))
            .route("/info", get(info))
            .layer(from_fn_with_state(self.clone(), check_key))
            .layer(DefaultBodyLimit::max(self.options.max_body_bytes));
        let free = Router::new()
            .route("/health", get(|| async { Json(json!({"status": "ok"})) }))
            .route("/ready", get(ready))
            .route("/metrics", get(prometheus))
            .route("/openapi.json", get(|| async { Json(openapi::document()) }))
            .route("/docs", get(|| async { Html(openapi::page()) }));
        let app = asked.merge(free).fallback(nothing_here).method_not_allowed_fallback(wrong_method);
        app.layer(from_fn_with_state(self.clone(), count)).with_state(self.clone())
    }

    fn classifier(&self) -> Result<&Arc<dyn TextClassifier>, Refusal> {
        let unavailable = |what: &str| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, what);
        let loaded = self.classifier.get();
        let loaded = loaded.ok_or_else(|| unavailable("the model is being loaded; ask again in a moment"))?;
        match loaded.is_alive() {
            true => Ok(loaded),
            false => Err(unavailable("the classifier has ended, and the server with it; its log says why")),
        }
    }

    /// Classifies the texts of a request.
    async fn classify(
        &self,
        asked: &mut ClassifyRequest,
    ) -> Result<(Arc<dyn TextClassifier>, Vec<ClassifiedText>), Refusal> {
        let classifier = self.classifier()?.clone();
        asked.check(&self.options)?;
        let (sender, receiver) = oneshot::channel();
        let (texts, asks) = (std::mem::take(&mut asked.texts), classifier.clone());
        // Long texts take a while to be made tokens: none of the threads that answer others does it.
        let submitting = tokio::task::spawn_blocking(move || {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            asks.submit(&texts, Box::new(Handler(sender)))
        });
        let panicked = |_| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "the tokenizer failed on a text");
        submitting.await.map_err(panicked)?.map_err(Refusal::of)?;
        let found = tokio::time::timeout(self.options.answer_timeout, receiver).await;
        let found = found.map_err(|_| {
            let what = format!("no answer within {:?}; ask again later", self.options.answer_timeout);
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, what)
        })?;
        let failed = |problem: &str| {
            tracing::warn!("{problem}");
            Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "the model failed; the server's log says why")
        };
        let found = found.map_err(|_| failed("the classifier has ended"))?.map_err(|problem| failed(&problem))?;
        self.metrics.texts(&found);
        asked.check_lengths(&found, self.options.max_length)?;
        Ok((classifier, found))
    }
}

async fn predict(State(service): State<Arc<StyleService>>, request: Request) -> Response {
    let answered = async {
        let mut asked = requests::predict(request, &service.options).await?;
        let (classifier, found) = service.classify(&mut asked).await?;
        predict_answer(&asked, classifier.as_ref(), &found)
    };
    let is_json = [(header::CONTENT_TYPE, "application/json")];
    answered.await.map_or_else(|refusal: Refusal| refusal.answer(Form::Plain), |text| (is_json, text).into_response())
}

async fn classify(State(service): State<Arc<StyleService>>, request: Request) -> Response {
    let answered = async {
        let mut asked = requests::classify(request, &service.options).await?;
        let (classifier, found) = service.classify(&mut asked).await?;
        let number = service.n_classified.fetch_add(1, Ordering::Relaxed);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let id = format!("classify-{:x}-{number:x}", created.as_nanos());
        let model = asked.model.as_deref().unwrap_or(&service.options.model_name);
        Ok::<_, Refusal>(classify_answer(&asked, classifier.as_ref(), &found, (&id, created.as_secs(), model)))
    };
    answered.await.map_or_else(|refusal: Refusal| refusal.answer(Form::OpenAi), |answer| Json(answer).into_response())
}

async fn info(State(service): State<Arc<StyleService>>) -> Response {
    let options = &service.options;
    let labels = service.classifier.get().map(|classifier| {
        let by_id = classifier.classes().iter().enumerate();
        let id2label: serde_json::Map<String, Value> =
            by_id.clone().map(|(id, name)| (id.to_string(), name.clone().into())).collect();
        let label2id: serde_json::Map<String, Value> = by_id.map(|(id, name)| (name.clone(), id.into())).collect();
        json!({"id2label": id2label, "label2id": label2id})
    });
    let body = json!({
        "model_id": options.model_name,
        "model_type": {"classifier": labels},
        "max_input_length": options.max_length,
        "max_client_batch_size": options.max_texts,
        "version": env!("CARGO_PKG_VERSION"),
    });
    Json(body).into_response()
}

async fn ready(State(service): State<Arc<StyleService>>) -> Response {
    match service.classifier() {
        Ok(_) => Json(json!({"status": "ready"})).into_response(),
        Err(refusal) => refusal.answer(Form::Plain),
    }
}

async fn prometheus(State(service): State<Arc<StyleService>>) -> Response {
    let n_waiting = service.classifier.get().map(|classifier| classifier.n_waiting());
    let text = service.metrics.text(n_waiting);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

async fn nothing_here(uri: Uri) -> Response {
    let what = format!("there is nothing at `{}`; ask /predict or /classify, or read /docs", uri.path());
    Refusal::new(StatusCode::NOT_FOUND, what).answer(Form::Plain)
}

async fn wrong_method() -> Response {
    let what = "not asked this way; /predict and /classify take POST, all others GET";
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, what).answer(Form::Plain)
}

async fn check_key(State(service): State<Arc<StyleService>>, request: Request, next: Next) -> Response {
    let Some(wanted) = &service.key_digest else { return next.run(request).await };
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.strip_prefix("Bearer ")).map(|key| digest_hex(key.trim().as_bytes()));
    match given.as_ref() == Some(wanted) {
        true => next.run(request).await,
        false => {
            let what = "the key is missing or wrong; send it as `Authorization: Bearer KEY`";
            Refusal::new(StatusCode::UNAUTHORIZED, what).answer(Form::Plain)
        }
    }
}

/// Notes each answer's status and time.
async fn count(State(service): State<Arc<StyleService>>, request: Request, next: Next) -> Response {
    let (route, started) = (metrics::route_of(request.uri().path()), Instant::now());
    let response = next.run(request).await;
    service.metrics.request(route, response.status().as_u16(), started.elapsed());
    response
}
