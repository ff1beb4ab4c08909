//! Query embeddings by a model in this process or a service with OpenAI's embeddings API (vLLM, TEI, Ollama and others). Also runs models
//! and indexes of this process on blocking threads, with limits on concurrency and time.

use crate::client::http::{Call, CallLimits, Caller, Refusal, Secret, estimated_tokens};
use crate::client::{ServiceContext, queued};
use crate::error::DataError;
use crate::retrieval::LocalModels;
use crate::retrieval::mapping::excerpt;
use crate::retrieval::pricing::{CallCharge, max_tokens};
use querl_core::config::{EmbeddingConfig, EmbeddingKind, ServicePrice};
use querl_core::ports::Embedder;
use querl_core::records::{CallFailure, FailureKind};
use serde_json::{Value, json};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Source of query embeddings: a local model or a service.
pub(crate) enum QueryEmbedding {
    Service(Box<EmbeddingService>),
    Local { model: Arc<dyn Embedder>, query_prefix: String, work: LocalModelCalls },
}

impl QueryEmbedding {
    /// Opens the configured source of query embeddings; `None` if none is configured.
    pub(crate) fn open(
        config: &EmbeddingConfig,
        models: &LocalModels,
        services: &ServiceContext,
    ) -> Result<Option<Self>, DataError> {
        match (config.kind, &models.embedder) {
            (EmbeddingKind::None, _) => Ok(None),
            (EmbeddingKind::Openai, _) => Ok(Some(Self::Service(Box::new(EmbeddingService::open(config, services)?)))),
            (EmbeddingKind::Local, Some(model)) => Ok(Some(Self::Local {
                model: model.clone(),
                query_prefix: query_prefix(config, Some(model.as_ref())),
                work: LocalModelCalls::new("embedding model", config.max_concurrent, config.timeout_s),
            })),
            (EmbeddingKind::Local, None) => Err(DataError::setting("retrieval.embedding.path", "was not opened")),
        }
    }

    pub(crate) async fn query(&self, text: &str) -> Result<Vec<f32>, CallFailure> {
        match self {
            Self::Service(service) => service.query(text).await,
            Self::Local { model, query_prefix, work } => {
                let (model, text) = (model.clone(), format!("{query_prefix}{text}"));
                let vectors = work.run(move || model.embed(&[&text])).await?;
                Ok(vectors.into_iter().next().unwrap_or_default())
            }
        }
    }
}

/// The configured embedding model, for texts that are compared with each other; all texts get the prefix of queries.
pub struct TextEncoder(QueryEmbedding);

impl TextEncoder {
    /// Opens the configured embedding model; `None` if none is configured.
    ///
    /// # Errors
    /// A setting of this kind of embedding is missing. Services are not called.
    pub fn open(
        config: &EmbeddingConfig,
        models: &LocalModels,
        services: &ServiceContext,
    ) -> Result<Option<Self>, DataError> {
        Ok(QueryEmbedding::open(config, models, services)?.map(Self))
    }

    /// The embedding of a text, with L2 norm 1.
    ///
    /// # Errors
    /// The call failed, or the embedding is zero.
    pub async fn embed(&self, text: &str) -> Result<Vec<f32>, CallFailure> {
        let mut vector = self.0.query(text).await?;
        let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        if length == 0.0 {
            let message = "the embedding model returned a vector of zeros".into();
            return Err(CallFailure { kind: FailureKind::InvalidResponse, message });
        }
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
        Ok(vector)
    }
}

/// A service with OpenAI's embeddings API.
#[derive(Debug)]
pub(crate) struct EmbeddingService {
    caller: Caller,
    model: String,
    query_prefix: String,
    price: Option<ServicePrice>,
}

impl EmbeddingService {
    pub(crate) fn open(config: &EmbeddingConfig, services: &ServiceContext) -> Result<Self, DataError> {
        let setting = "retrieval.embedding.url";
        let missing =
            |key: &str| DataError::setting(format!("retrieval.embedding.{key}"), "is not set; a service needs it");
        let url = config.url.as_deref().ok_or_else(|| missing("url"))?;
        let model = config.model.clone().ok_or_else(|| missing("model"))?;
        let key = Secret::open(services, "retrieval.embedding", config.api_key_file.as_deref(), &config.api_key_env)?;
        let limits = CallLimits::new(config.max_concurrent, config.timeout_s, config.max_retries)
            .per_minute(config.requests_per_minute, None);
        let caller = Caller::new(setting, url, key, limits, services)?;
        Ok(Self { caller, model, query_prefix: query_prefix(config, None), price: config.price() })
    }

    pub(crate) async fn query(&self, text: &str) -> Result<Vec<f32>, CallFailure> {
        let text = format!("{}{text}", self.query_prefix);
        let estimate = CallCharge { n_calls: 1, n_tokens: estimated_tokens(&text), is_estimated: true };
        let max_charge = CallCharge { n_tokens: max_tokens(text.len()), ..estimate };
        let body = json!({"model": self.model, "input": [text]});
        let check = |response: &Value| vector(response).err().map(Refusal::unusable);
        let mut response = self.caller.call(&Call::post("", &body), max_charge.bound(self.price), &check).await?;
        response.call_spend.charged(CallCharge::stated(&response.body, estimate, max_charge).usage(self.price));
        vector(&response.body).map_err(|what| self.caller.failure(FailureKind::InvalidResponse, &what))
    }
}

/// The vector of the one text that was sent.
fn vector(response: &Value) -> Result<Vec<f32>, String> {
    let vectors = response.get("data").and_then(Value::as_array);
    if let Some(vectors) = vectors.filter(|vectors| vectors.len() > 1) {
        return Err(format!("{} vectors of one text: {}", vectors.len(), excerpt(response)));
    }
    let numbers = response.pointer("/data/0/embedding").and_then(Value::as_array).filter(|numbers| !numbers.is_empty());
    let numbers = numbers.ok_or_else(|| format!("no vector at `data[0].embedding`: {}", excerpt(response)))?;
    let finite = |number: &Value| Some(number.as_f64()? as f32).filter(|number| number.is_finite());
    let vector: Option<Vec<f32>> = numbers.iter().map(finite).collect();
    vector.ok_or_else(|| format!("`data[0].embedding` has a value that is not a finite number: {}", excerpt(response)))
}

/// Prefix that the embedding model expects before a query: the configured one, otherwise the default of the model.
pub(crate) fn query_prefix(config: &EmbeddingConfig, embedder: Option<&dyn Embedder>) -> String {
    let own = embedder.map(Embedder::query_prefix).unwrap_or_default();
    config.query_prefix.clone().unwrap_or_else(|| own.to_owned())
}

/// One permit per CPU core: more concurrent work needs more memory and is not faster.
static CORES: LazyLock<Arc<Semaphore>> =
    LazyLock::new(|| Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from))));

/// Limits on the calls of one local model or index. All calls together use at most one thread per CPU core.
pub(crate) struct LocalModelCalls {
    what: &'static str,
    slots: Arc<Semaphore>,
    timeout: Duration,
}

impl LocalModelCalls {
    /// At most `max_concurrent` calls at a time; `timeout_s` does not include time in the queue.
    pub(crate) fn new(what: &'static str, max_concurrent: usize, timeout_s: f64) -> Self {
        let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::from_secs(60));
        Self { what, slots: Arc::new(Semaphore::new(max_concurrent.max(1))), timeout }
    }

    /// Runs `work` on a blocking thread. A cancelled call leaves the queue; work that has started runs to its end and counts as
    /// concurrent until then.
    pub(crate) async fn run<T: Send + 'static, E: std::fmt::Display + Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, CallFailure> {
        let own = queued(self.slots.clone().acquire_owned()).await.expect("the semaphore is never closed");
        let core = queued(CORES.clone().acquire_owned()).await.expect("the semaphore is never closed");
        let task = tokio::task::spawn_blocking(move || {
            let result = work();
            drop((own, core));
            result
        });
        let seconds = self.timeout.as_secs_f64();
        let task = tokio::time::timeout(self.timeout, task).await;
        let done = task.map_err(|_| self.failure(FailureKind::Timeout, &format!("no answer within {seconds} s")))?;
        let failed = |problem: String| self.failure(FailureKind::ServerError, &problem);
        done.map_err(|error| failed(error.to_string()))?.map_err(|error| failed(error.to_string()))
    }

    fn failure(&self, kind: FailureKind, problem: &str) -> CallFailure {
        CallFailure { kind, message: format!("{}: {problem}", self.what) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn sleep(milliseconds: u64) -> Result<(), String> {
        std::thread::sleep(Duration::from_millis(milliseconds));
        Ok(())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn concurrency_is_limited() {
        static NOW: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        let work = LocalModelCalls::new("model", 1, 30.0);
        let one = || {
            work.run(|| {
                MOST.fetch_max(NOW.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                sleep(5)?;
                NOW.fetch_sub(1, Ordering::SeqCst);
                Ok::<(), String>(())
            })
        };
        futures::future::try_join_all((0..8).map(|_| one())).await.unwrap();
        assert_eq!(MOST.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_timeout_fails_the_call_and_keeps_its_slot() {
        let work = LocalModelCalls::new("model", 1, 0.02);
        let failure = work.run(|| sleep(200)).await.unwrap_err();
        assert_eq!((failure.kind, failure.message.as_str()), (FailureKind::Timeout, "model: no answer within 0.02 s"));
        assert_eq!(work.slots.available_permits(), 0);
        tokio::time::sleep(Duration::from_millis(400)).await;
        assert_eq!(work.slots.available_permits(), 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_failure_names_the_model() {
        let failure = LocalModelCalls::new("model", 1, 30.0).run(|| Err::<(), _>("no weights")).await.unwrap_err();
        assert_eq!((failure.kind, failure.message.as_str()), (FailureKind::ServerError, "model: no weights"));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn cancelled_work_is_not_started() {
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let work = Arc::new(LocalModelCalls::new("model", 1, 30.0));
        let (busy, waiting) = (work.clone(), work.clone());
        let (begin, begun) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let wait = move || {
            begin.send(()).map_err(|error| error.to_string())?;
            released.recv().map_err(|error| error.to_string())
        };
        let busy = tokio::spawn(async move { busy.run(wait).await });
        tokio::task::spawn_blocking(move || begun.recv()).await.unwrap().unwrap();
        let count = || {
            DONE.fetch_add(1, Ordering::SeqCst);
            Ok::<(), String>(())
        };
        let waiting = tokio::spawn(async move { waiting.run(count).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        waiting.abort();
        release.send(()).unwrap();
        busy.await.unwrap().unwrap();
        work.run(|| sleep(0)).await.unwrap();
        assert_eq!(DONE.load(Ordering::SeqCst), 0);
    }
}
