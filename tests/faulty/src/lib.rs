//! A server on loopback that simulates network and service failures.
//!
//! A script, a function from a request to a reply or a fault, defines its behaviour; the server records all requests. It must not depend
//! on their meaning. HTTP/1.1 is written byte by byte, because no HTTP library can send what these tests need; HTTP/2 is hyper's, over TLS
//! with a self-signed certificate. [`BatchService`] is OpenAI's batch interface in memory, which a script can wrap.
#![allow(missing_docs)]

mod batches;
mod http1;
mod http2;

pub use batches::BatchService;

use serde_json::Value;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// A received request.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedRequest {
    /// 0-based number among all requests to this server.
    pub index: usize,
    pub method: String,
    pub path: String,
    pub authorization: Option<String>,
    pub body: Vec<u8>,
}

impl RecordedRequest {
    /// The body as JSON; null if it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }
}

/// A response, or the fault that replaces it.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    Answer(Answer),
    /// Another reply after a delay.
    After(Duration, Box<Reply>),
    /// The connection stays open without a response.
    Hang,
    /// The connection is reset before the first byte of the response.
    Reset,
    /// The connection is reset after half of the body.
    ResetMidBody(Answer),
    /// Half of the body without a length, then an orderly close.
    Cut(Answer),
    /// The head byte by byte, with this pause.
    SlowHead(Duration),
    /// The head; the body never follows.
    HeadOnly,
    /// Half of the body; the rest never follows.
    Stall(Answer),
    /// The body in ten parts, with this pause before each.
    Trickle(Answer, Duration),
    /// A body of this many bytes.
    Enormous(u64),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub status: u16,
    /// Headers in addition to `Content-Type` and `Content-Length`.
    pub headers: Vec<(String, String)>,
    pub content_type: &'static str,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(status: u16, body: &Value) -> Self {
        let body = body.to_string().into_bytes();
        Self { status, headers: Vec::new(), content_type: "application/json", body }
    }

    /// A body that is not JSON.
    pub fn text(status: u16, content_type: &'static str, body: &str) -> Self {
        Self { status, headers: Vec::new(), content_type, body: body.into() }
    }

    /// Adds a header.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        Self::Answer(answer)
    }
}

type Script = dyn Fn(&RecordedRequest) -> Reply + Send + Sync;

/// Number of bytes of a request that are read at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 18;

/// State shared by all connections.
pub(crate) struct Shared {
    script: Box<Script>,
    requests: Mutex<Vec<RecordedRequest>>,
    /// Pause before each chunk of a request is read.
    pub(crate) reading_pause: Duration,
}

impl Shared {
    fn requests(&self) -> MutexGuard<'_, Vec<RecordedRequest>> {
        self.requests.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Records the request and returns its reply.
    pub(crate) fn meet(&self, method: &str, path: &str, authorization: Option<String>, body: Vec<u8>) -> Reply {
        let request = {
            let mut all = self.requests();
            let request =
                RecordedRequest { index: all.len(), method: method.into(), path: path.into(), authorization, body };
            all.push(request.clone());
            request
        };
        (self.script)(&request)
    }
}

/// The server. It runs in its own thread until it is dropped, so that tests without an async runtime can use it.
pub struct FaultyServer {
    address: SocketAddr,
    certificate: Option<String>,
    shared: Arc<Shared>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl FaultyServer {
    /// Starts an HTTP/1.1 server on a free port.
    ///
    /// # Panics
    /// There is no free port.
    pub fn start(script: impl Fn(&RecordedRequest) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_reading(Duration::ZERO, script)
    }

    /// As [`start`](Self::start); reads 256 KiB of a request after each `pause`.
    ///
    /// # Panics
    /// There is no free port.
    pub fn start_reading(pause: Duration, script: impl Fn(&RecordedRequest) -> Reply + Send + Sync + 'static) -> Self {
        let (runtime, shared, listener) = prepared(script, pause);
        let address = listener.local_addr().expect("it is bound");
        runtime.spawn(http1::serve(listener, shared.clone()));
        Self { address, certificate: None, shared, runtime: Some(runtime) }
    }

    /// Starts an HTTP/2 server over TLS with a self-signed certificate: [`certificate`](Self::certificate).
    ///
    /// # Panics
    /// There is no free port.
    pub fn start_http2(script: impl Fn(&RecordedRequest) -> Reply + Send + Sync + 'static) -> Self {
        let (runtime, shared, listener) = prepared(script, Duration::ZERO);
        let address = listener.local_addr().expect("it is bound");
        let (acceptor, certificate) = http2::acceptor();
        runtime.spawn(http2::serve(listener, acceptor, shared.clone()));
        Self { address, certificate: Some(certificate), shared, runtime: Some(runtime) }
    }

    /// `http://127.0.0.1:PORT`, or `https://localhost:PORT`.
    pub fn url(&self) -> String {
        match self.certificate {
            Some(_) => format!("https://localhost:{}", self.address.port()),
            None => format!("http://{}", self.address),
        }
    }

    /// The certificate that a client must trust, as PEM; empty without TLS.
    pub fn certificate(&self) -> &str {
        self.certificate.as_deref().unwrap_or_default()
    }

    /// All requests so far, in order.
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.shared.requests().clone()
    }

    pub fn n_requests(&self) -> usize {
        self.shared.requests().len()
    }
}

impl Drop for FaultyServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Dropped within an async runtime, whose thread must not block.
            runtime.shutdown_background();
        }
    }
}

fn prepared(
    script: impl Fn(&RecordedRequest) -> Reply + Send + Sync + 'static,
    reading_pause: Duration,
) -> (tokio::runtime::Runtime, Arc<Shared>, tokio::net::TcpListener) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("threads can be started");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    listener.set_nonblocking(true).expect("a socket can be made not to block");
    let listener = {
        let _within = runtime.enter();
        tokio::net::TcpListener::from_std(listener).expect("a runtime takes a socket")
    };
    (runtime, Arc::new(Shared { script: Box::new(script), requests: Mutex::default(), reading_pause }), listener)
}
