//! A text classifier over HTTP.
//!
//! | request | form | response |
//! |---|---|---|
//! | `POST /predict?text=...`, `POST /predict {"text": ...}` | the training script's service | `{predicted_label, confidence, probabilities}` |
//! | `POST /predict {"inputs": ...}` | text-embeddings-inference | `[{label, score}, ...]`, best first; for a batch a list of such lists |
//! | `POST /classify`, `/v1/classify` `{"input": ..., "use_activation": true}` | vLLM | `{id, object, created, model, data: [{index, label, probs, num_classes}], usage}` |
//! | `GET /health`, `/ready`, `/info`, `/metrics`, `/openapi.json`, `/docs` | | |
//!
//! `/health` answers once the process runs, `/ready` once the model is loaded and while the queue has room. An error response has a
//! sentence in `error`: 400 not JSON, 401 key missing or wrong, 404 no such route, 405 another method, 408 body not received in time, 413
//! body, list or text too large, 415 not declared as JSON, 422 value missing or wrong, 429 queue full or too many requests of one address,
//! 500 model failed, 503 model not loaded yet or too slow, or too many requests.

pub(crate) mod classifier;
mod metrics;
mod openapi;
pub(crate) mod protocol;

use crate::connections::ConnectionHandle;
use crate::error::{ErrorForm, ErrorResponse, json_response};
use crate::key::{ApiKey, unauthorized};
use crate::metrics::metrics_response;
use crate::server::{ServerLimits, run_with_worker};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use classifier::{ClassifiedText, PendingRequest, StyleOptions, SubmitError, TextClassifier};
use metrics::StyleMetrics;
use protocol::{ClassifyRequest, classify_response, predict_response, rejected};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::oneshot;

/// The sending end of the channel on which a client's handler waits.
struct ResponseSender(oneshot::Sender<Result<Vec<ClassifiedText>, String>>);

impl PendingRequest for ResponseSender {
    fn is_open(&self) -> bool {
        !self.0.is_closed()
    }

    fn complete(self: Box<Self>, results: Result<Vec<ClassifiedText>, String>) {
        // The handler may have given up.
        let _ = self.0.send(results);
    }
}

/// The style service. It answers requests before its model is loaded, with 503.
pub struct StyleService {
    options: StyleOptions,
    key: Option<ApiKey>,
    classifier: OnceLock<Arc<dyn TextClassifier>>,
    metrics: StyleMetrics,
    n_classified: AtomicU64,
}

impl StyleService {
    /// A service without a model, which is passed to [`set_ready`](Self::set_ready) later.
    pub fn new(options: StyleOptions) -> Arc<Self> {
        let key = options.api_key.as_deref().map(ApiKey::new);
        let metrics = StyleMetrics::new().expect("metric names are valid and distinct");
        Arc::new(Self { options, key, classifier: OnceLock::new(), metrics, n_classified: AtomicU64::new(0) })
    }

    /// Marks the model as loaded. Later calls have no effect.
    pub fn set_ready(&self, classifier: Arc<dyn TextClassifier>) {
        let _ = self.classifier.set(classifier);
    }

    /// Adds one batch to the metrics; `elapsed` is the time that the model took.
    pub fn note_batch(&self, n_requests: usize, n_texts: usize, elapsed: Duration) {
        self.metrics.batch(n_requests, n_texts, elapsed);
    }

    /// A router with the routes of the service.
    pub fn router(self: &Arc<Self>) -> Router {
        let with_key = Router::new()
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
        let app = with_key.merge(free).fallback(nothing_here).method_not_allowed_fallback(wrong_method);
        app.layer(from_fn_with_state(self.clone(), count)).with_state(self.clone())
    }

    /// Binds `addr`, calls `on_bound`, and serves until `is_stopped`. `work` runs on a thread of its own: it loads the model, passes it to
    /// [`set_ready`](Self::set_ready) and classifies. The address is bound first, so that clients get 503 until then.
    ///
    /// # Errors
    /// The address cannot be bound, `on_bound` failed, or `work` ended: while requests may arrive it has no reason to.
    pub fn run(
        self: Arc<Self>,
        addr: SocketAddr,
        on_bound: impl FnOnce(SocketAddr) -> std::io::Result<()>,
        work: impl FnOnce(Arc<Self>) -> anyhow::Result<()> + Send + 'static,
        is_stopped: impl Fn() -> bool + Send + 'static,
    ) -> anyhow::Result<()> {
        let limits = ServerLimits { drain_timeout: self.options.answer_timeout, ..self.options.server };
        let router = self.router();
        run_with_worker(addr, router, limits, on_bound, ("classifier", move || work(self)), is_stopped)
    }

    fn classifier(&self) -> Result<&Arc<dyn TextClassifier>, ErrorResponse> {
        let missing = || ErrorResponse::unavailable("the model is being loaded; retry in a moment");
        let loaded = self.classifier.get().ok_or_else(missing)?;
        if loaded.is_alive() { Ok(loaded) } else { Err(rejected(SubmitError::Ended)) }
    }

    async fn classify(
        &self,
        request: &mut ClassifyRequest,
    ) -> Result<(Arc<dyn TextClassifier>, Vec<ClassifiedText>), ErrorResponse> {
        let classifier = self.classifier()?.clone();
        request.check(&self.options)?;
        let (sender, receiver) = oneshot::channel();
        let (texts, queue) = (std::mem::take(&mut request.texts), classifier.clone());
        // Tokenizing long texts would block a thread of the async runtime.
        let submitting = tokio::task::spawn_blocking(move || {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            queue.submit(&texts, Box::new(ResponseSender(sender)))
        });
        let panicked = |_| ErrorResponse::internal("the tokenizer failed on a text");
        submitting.await.map_err(panicked)?.map_err(rejected)?;
        let results = tokio::time::timeout(self.options.answer_timeout, receiver).await;
        let results = results.map_err(|_| {
            let what = format!("no response within {:?}; retry later", self.options.answer_timeout);
            ErrorResponse::unavailable(what)
        })?;
        let failed = |problem: &str| {
            tracing::warn!("{problem}");
            ErrorResponse::internal("the model failed; the server's log says why")
        };
        let classified =
            results.map_err(|_| failed("the classifier has ended"))?.map_err(|problem| failed(&problem))?;
        self.metrics.texts(&classified);
        request.check_lengths(&classified, self.options.max_length)?;
        Ok((classifier, classified))
    }
}

async fn predict(State(service): State<Arc<StyleService>>, connection: ConnectionHandle, request: Request) -> Response {
    let response = async {
        let mut request = protocol::predict(request, &service.options).await?;
        let _slot = connection.begin_request()?;
        let (classifier, classified) = service.classify(&mut request).await?;
        predict_response(&request, classifier.as_ref(), &classified)
    };
    let is_json = [(header::CONTENT_TYPE, "application/json")];
    response.await.map_or_else(
        |error| error.into_body(ErrorForm::TextEmbeddingsInference),
        |text| (is_json, text).into_response(),
    )
}

async fn classify(
    State(service): State<Arc<StyleService>>,
    connection: ConnectionHandle,
    request: Request,
) -> Response {
    let response = async {
        let mut request = protocol::classify(request, &service.options).await?;
        let _slot = connection.begin_request()?;
        let (classifier, classified) = service.classify(&mut request).await?;
        let number = service.n_classified.fetch_add(1, Ordering::Relaxed);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let id = format!("classify-{:x}-{number:x}", created.as_nanos());
        let model = request.model.as_deref().unwrap_or(&service.options.model_name);
        let head = (id.as_str(), created.as_secs(), model);
        Ok::<_, ErrorResponse>(classify_response(&request, classifier.as_ref(), &classified, head))
    };
    json_response(response.await, ErrorForm::Vllm)
}

async fn info(State(service): State<Arc<StyleService>>) -> Response {
    let options = &service.options;
    let labels = service.classifier.get().map(|classifier| {
        let by_id = classifier.classes().iter().enumerate();
        let id2label: Value = by_id.clone().map(|(id, name)| (id.to_string(), name.as_str())).collect();
        let label2id: Value = by_id.map(|(id, name)| (name.as_str(), id)).collect();
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

async fn ready(State(service): State<Arc<StyleService>>, connection: ConnectionHandle) -> Response {
    let check = || {
        let classifier = service.classifier()?;
        if classifier.is_full() {
            let what = format!("queue is full ({} texts); retry later", classifier.n_waiting());
            return Err(ErrorResponse::unavailable(what));
        }
        Ok(connection.check_requests()?)
    };
    json_response(check().map(|()| json!({"status": "ready"})), ErrorForm::TextEmbeddingsInference)
}

async fn prometheus(State(service): State<Arc<StyleService>>) -> Response {
    let n_waiting = service.classifier.get().map(|classifier| classifier.n_waiting());
    metrics_response(service.metrics.to_text(n_waiting), ErrorForm::TextEmbeddingsInference)
}

async fn nothing_here(uri: Uri) -> Response {
    let what = format!("there is nothing at `{}`; use /predict or /classify, or read /docs", uri.path());
    ErrorResponse::not_found(what).into_body(ErrorForm::TextEmbeddingsInference)
}

async fn wrong_method(method: Method) -> Response {
    let what = format!("method {method} is not allowed; /predict and /classify take POST, all others GET");
    ErrorResponse::new(StatusCode::METHOD_NOT_ALLOWED, what).into_body(ErrorForm::TextEmbeddingsInference)
}

async fn check_key(State(service): State<Arc<StyleService>>, request: Request, next: Next) -> Response {
    match service.key.as_ref().is_none_or(|key| key.is_in(request.headers())) {
        true => next.run(request).await,
        false => unauthorized(request.headers()).into_body(ErrorForm::TextEmbeddingsInference),
    }
}

/// Counts each response and its duration.
async fn count(State(service): State<Arc<StyleService>>, request: Request, next: Next) -> Response {
    let (route, started) = (metrics::route_of(request.uri().path()), Instant::now());
    let response = next.run(request).await;
    service.metrics.request(route, response.status().as_str(), started.elapsed());
    response
}
