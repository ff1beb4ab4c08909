//! File uploads and downloads, with a timeout on the time without progress, since the duration depends on size and bandwidth.

use super::{Call, CallLimits, Caller, FailedAttempt, Retry, Secret, lock};
use crate::client::ServiceContext;
use crate::client::spend::CallSpend;
use crate::error::DataError;
use futures::stream;
use querl_core::config::CallsConfig;
use querl_core::fsx::io_problem;
use querl_core::records::{CallFailure, FailureKind};
use reqwest::multipart::{Form, Part};
use reqwest::{Body, Method, RequestBuilder};
use serde_json::Value;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Effectively no limit, but representable as a time.
const UNBOUNDED: Duration = Duration::from_secs(30 * 24 * 3600);

/// Chunk size in bytes: at 10 kbit/s a chunk takes 13 s.
const CHUNK_BYTES: usize = 1 << 14;

/// Uploads files to and downloads files from one service.
#[derive(Debug)]
pub(crate) struct FileTransfer {
    caller: Caller,
    stall_timeout: Duration,
}

/// Time of the last transferred byte.
#[derive(Debug, Clone)]
struct TransferClock(Arc<Mutex<Instant>>);

impl TransferClock {
    fn now() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    fn tick(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn ago(&self) -> Duration {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}

impl FileTransfer {
    /// Like [`Caller::new`], with spend counted for `provider`. `limits.timeout` is the longest time without progress.
    pub(crate) fn new(
        setting: &str,
        url: &str,
        key: Option<Secret>,
        limits: CallLimits,
        services: &ServiceContext,
        provider: &str,
    ) -> Result<Self, DataError> {
        let config = CallsConfig { read_timeout_s: UNBOUNDED.as_secs_f64(), ..services.config.clone() };
        let (stall_timeout, limits) = (limits.timeout, CallLimits { timeout: UNBOUNDED, ..limits });
        let caller = Caller::new(setting, url, key, limits, &services.with_config(config))?;
        Ok(Self { caller: caller.named(provider), stall_timeout })
    }

    /// Uploads `text` as a file of batch requests and returns the service's JSON response.
    pub(crate) async fn upload(&self, path: &str, text: &Arc<String>) -> Result<Value, CallFailure> {
        let call = &Call { method: Method::POST, ..Call::get(path) };
        self.carry(|| async {
            let moved = TransferClock::now();
            let form = Form::new().text("purpose", "batch").part("file", part(text.clone(), moved.clone()));
            let mut body = Vec::new();
            let take = |chunk: &[u8]| {
                body.extend_from_slice(chunk);
                Ok(())
            };
            let request = self.caller.request(call).multipart(form);
            self.exchange(call, request, &moved, self.caller.max_response_bytes as u64, take).await?;
            self.caller.parse(call, body)
        })
        .await
    }

    /// Downloads a file of at most `most_bytes` bytes; it replaces the content of `file`.
    pub(crate) async fn download(&self, path: &str, file: &File, most_bytes: u64) -> Result<(), CallFailure> {
        let call = &Call::get(path);
        self.carry(|| async {
            let unwritten = |error: io::Error| {
                let what = format!("the answers cannot be kept on this machine: {}", io_problem(&error));
                FailedAttempt { retry: Retry::Useless, ..self.failed(call, FailureKind::InvalidResponse, what) }
            };
            let mut file = file;
            file.set_len(0).and_then(|()| file.rewind()).map_err(unwritten)?;
            let take = |chunk: &[u8]| file.write_all(chunk).map_err(unwritten);
            self.exchange(call, self.caller.request(call), &TransferClock::now(), most_bytes, take).await
        })
        .await
    }

    async fn carry<T, F: Future<Output = Result<T, FailedAttempt>>>(
        &self,
        mut try_once: impl FnMut() -> F,
    ) -> Result<T, CallFailure> {
        let call_spend = Mutex::new(CallSpend::new(&self.caller.tracker, &self.caller.provider));
        let counted = || {
            let tried = try_once();
            async {
                lock(&call_spend).sent();
                let result = tried.await;
                // Transfers are free of charge, even failed ones.
                match &result {
                    Ok(_) => lock(&call_spend).answered(),
                    Err(_) => lock(&call_spend).refused(),
                }
                result
            }
        };
        let result = self.caller.retried(counted).await;
        if result.is_err() {
            lock(&call_spend).failed();
        }
        result
    }

    /// One request; passes the body of a successful response to `take` in chunks.
    async fn exchange(
        &self,
        call: &Call<'_>,
        request: RequestBuilder,
        moved: &TransferClock,
        most_bytes: u64,
        mut take: impl FnMut(&[u8]) -> Result<(), FailedAttempt>,
    ) -> Result<(), FailedAttempt> {
        let broken =
            |error: reqwest::Error| self.failed(call, FailureKind::Unreachable, super::connection_problem(&error));
        let exchange = async {
            let mut response = request.send().await.map_err(broken)?;
            moved.tick();
            if !response.status().is_success() {
                return Err(self.caller.refused(call, response).await);
            }
            let mut n_bytes = 0;
            while let Some(chunk) = response.chunk().await.map_err(broken)? {
                moved.tick();
                n_bytes += chunk.len() as u64;
                if n_bytes > most_bytes {
                    let what = format!("the answer is longer than the {most_bytes} bytes that it can have");
                    let failed = self.failed(call, FailureKind::InvalidResponse, what);
                    return Err(FailedAttempt { retry: Retry::Useless, ..failed });
                }
                take(&chunk)?;
            }
            Ok(())
        };
        unless_stalled(exchange, moved, self.stall_timeout).await.unwrap_or_else(|| {
            let what = format!("nothing moved for {} s", self.stall_timeout.as_secs_f64());
            Err(self.failed(call, FailureKind::Timeout, what))
        })
    }

    pub(crate) fn hide_key_in(&self, answer: &mut Value) {
        if let Some(key) = &self.caller.key {
            key.hide_in_value(answer);
        }
    }

    fn failed(&self, call: &Call<'_>, kind: FailureKind, what: String) -> FailedAttempt {
        self.caller.failed(call, kind, Retry::Later, what)
    }
}

fn part(text: Arc<String>, moved: TransferClock) -> Part {
    let n_bytes = text.len();
    let chunks = (0..n_bytes).step_by(CHUNK_BYTES).map(move |start| {
        moved.tick();
        let end = n_bytes.min(start + CHUNK_BYTES);
        Ok::<_, io::Error>(text.as_bytes()[start..end].to_vec())
    });
    Part::stream_with_length(Body::wrap_stream(stream::iter(chunks)), n_bytes as u64).file_name("requests.jsonl")
}

/// The result of `work`; `None` after a stall.
async fn unless_stalled<T>(work: impl Future<Output = T>, moved: &TransferClock, stall_timeout: Duration) -> Option<T> {
    let mut work = pin!(work);
    loop {
        if let Ok(done) = tokio::time::timeout(stall_timeout.saturating_sub(moved.ago()), work.as_mut()).await {
            return Some(done);
        }
        if moved.ago() >= stall_timeout {
            return None;
        }
    }
}
