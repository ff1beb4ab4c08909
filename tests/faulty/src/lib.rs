//! A server on loopback that fails in every way a network can.
//!
//! In: a script, that is a function from a request to what happens to it. Out: an address to call, and what was asked. It
//! must not depend on the requests' meaning: tests define the responses. HTTP/1.1 is spoken byte by byte, since no HTTP library
//! sends what these tests need; HTTP/2 is hyper's, over TLS with a certificate of its own. [`BatchService`] is OpenAI's batch
//! interface in memory, for scripts to stand before.

mod batches;
mod http1;
mod http2;

pub use batches::BatchService;

use serde_json::Value;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What was asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// Of all requests to this server, from 0.
    pub index: usize,
    /// `POST`.
    pub method: String,
    /// `/v1/chat/completions`.
    pub path: String,
    /// The value of `Authorization`.
    pub authorization: Option<String>,
    /// The body as sent.
    pub body: Vec<u8>,
}

impl Asked {
    /// The body as JSON; null where it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }
}

/// What happens to a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// An answer.
    Answer(Answer),
    /// The same, so much later.
    After(Duration, Box<Reply>),
    /// Nothing, for ever.
    Hang,
    /// The connection breaks before a byte of an answer.
    Reset,
    /// The connection breaks after half of the body.
    ResetMidBody(Answer),
    /// Half of the body, as if it were whole: no length is said, the connection is closed in order.
    Cut(Answer),
    /// A byte of the head, and so long nothing, again and again.
    SlowHead(Duration),
    /// A head, and then nothing.
    HeadOnly,
    /// Half of the body, and then nothing.
    Stall(Answer),
    /// The whole of it, a tenth of the body at a time, with so long a pause before each.
    Trickle(Answer, Duration),
    /// A body of so many bytes.
    Enormous(u64),
}

/// An answer in whole.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// 200 and so on.
    pub status: u16,
    /// In addition to `Content-Type` and `Content-Length`.
    pub headers: Vec<(String, String)>,
    /// `application/json` and so on.
    pub content_type: &'static str,
    /// The body.
    pub body: Vec<u8>,
}

impl Answer {
    /// A JSON answer.
    pub fn json(status: u16, body: &Value) -> Self {
        let body = body.to_string().into_bytes();
        Self { status, headers: Vec::new(), content_type: "application/json", body }
    }

    /// Words that are no JSON.
    pub fn text(status: u16, content_type: &'static str, body: &str) -> Self {
        Self { status, headers: Vec::new(), content_type, body: body.into() }
    }

    /// With one more header.
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

/// What a request meets.
type Script = dyn Fn(&Asked) -> Reply + Send + Sync;

/// What is read of a request at once.
pub(crate) const CHUNK_BYTES: usize = 1 << 18;

/// What the connections share.
pub(crate) struct Shared {
    script: Box<Script>,
    asked: Mutex<Vec<Asked>>,
    /// Before each chunk of a request is read.
    pub(crate) reading_pause: Duration,
}

impl Shared {
    fn asked(&self) -> MutexGuard<'_, Vec<Asked>> {
        self.asked.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Notes the request; says what happens to it.
    pub(crate) fn meet(&self, method: &str, path: &str, authorization: Option<String>, body: Vec<u8>) -> Reply {
        let asked = {
            let mut all = self.asked();
            let asked = Asked { index: all.len(), method: method.into(), path: path.into(), authorization, body };
            all.push(asked.clone());
            asked
        };
        (self.script)(&asked)
    }
}

/// The server. It runs on a thread of its own, so that tests with and without a runtime can call it, until it is dropped.
pub struct FaultyServer {
    address: SocketAddr,
    certificate: Option<String>,
    shared: Arc<Shared>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl FaultyServer {
    /// HTTP/1.1 on a free port.
    ///
    /// # Panics
    /// There is no free port.
    pub fn start(script: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_reading(Duration::ZERO, script)
    }

    /// The same, on a line that carries 256 KiB of a request after each `pause`.
    ///
    /// # Panics
    /// There is no free port.
    pub fn start_reading(pause: Duration, script: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        let (runtime, shared, listener) = prepared(script, pause);
        let address = listener.local_addr().expect("it is bound");
        runtime.spawn(http1::serve(listener, shared.clone()));
        Self { address, certificate: None, shared, runtime: Some(runtime) }
    }

    /// HTTP/2 alone, over TLS, with a certificate that nobody knows: [`certificate`](Self::certificate).
    ///
    /// # Panics
    /// There is no free port.
    pub fn start_http2(script: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
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

    /// The certificate to trust, as PEM; empty where there is none.
    pub fn certificate(&self) -> &str {
        self.certificate.as_deref().unwrap_or_default()
    }

    /// What was asked so far, in order.
    pub fn asked(&self) -> Vec<Asked> {
        self.shared.asked().clone()
    }

    /// How much was asked so far.
    pub fn n_asked(&self) -> usize {
        self.shared.asked().len()
    }
}

impl Drop for FaultyServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A test may be dropping it within a runtime of its own, which must not wait.
            runtime.shutdown_background();
        }
    }
}

fn prepared(
    script: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
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
    (runtime, Arc::new(Shared { script: Box::new(script), asked: Mutex::default(), reading_pause }), listener)
}
