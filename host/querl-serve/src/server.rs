//! HTTP server: binds an address, serves until it is stopped, and lets requests in progress finish.

use crate::connections::{ConnectionHandle, Connections};
use anyhow::Context;
use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{HttpService, Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use querl_core::fsx::is_out_of_handles;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::TcpListener;

/// Maximum size of the head of a request: the longest URI that the HTTP library reads, 64 KiB, and as much for headers.
const MAX_HEAD_BYTES: usize = 128 << 10;
/// Interval of the checks for clients that do not read their response.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time for half-sent requests to arrive when the server stops.
const INCOMPLETE_GRACE: Duration = Duration::from_secs(1);

/// Limits of connections.
#[derive(Debug, Clone, Copy)]
pub struct ServerLimits {
    /// Maximum number of open connections. At the limit a new one replaces the oldest whose request is not complete. At most
    /// seven eighths of them may have a complete request in progress; further requests are answered with 503.
    pub max_connections: usize,
    /// Maximum number of open connections of one peer, an IPv4 address or an IPv6 network of 64 bits. At most seven eighths of
    /// them may have a complete request in progress; further requests are answered with 429. A reverse proxy is one peer: headers
    /// with the address of its client are not read.
    pub max_connections_per_peer: usize,
    /// Time limit for the head of a request to arrive completely, and for an idle connection.
    pub head_timeout: Duration,
    /// Time limit for the client to read a response.
    pub send_timeout: Duration,
    /// Time that requests in progress get to finish when the server is stopped.
    pub drain_timeout: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            max_connections: 1024,
            max_connections_per_peer: 512,
            head_timeout: seconds(30),
            send_timeout: seconds(120),
            drain_timeout: seconds(10),
        }
    }
}

impl ServerLimits {
    /// At most seven eighths of the files that the process may open, since each connection is one.
    fn within_open_files(self) -> Self {
        let limit = open_files_limit(self.max_connections.saturating_mul(8) / 7 + 1);
        let max_connections = self.max_connections.min(limit.saturating_mul(7) / 8);
        if max_connections < self.max_connections {
            let wanted = self.max_connections;
            tracing::warn!(
                "at most {max_connections} connections in place of {wanted}: this process may open {limit} files; raise `ulimit -Hn`"
            );
        }
        let max_connections_per_peer = self.max_connections_per_peer.min(max_connections);
        Self { max_connections, max_connections_per_peer, ..self }
    }
}

/// The limit of open files, raised to `wanted` where the system permits that.
#[cfg(unix)]
fn open_files_limit(wanted: usize) -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.unwrap_or(u64::MAX).min(wanted as u64);
    match current {
        Some(current) if current < wanted => {
            let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
            raised.map_or(current, |()| wanted) as usize
        }
        Some(current) => current as usize,
        None => usize::MAX,
    }
}

#[cfg(not(unix))]
fn open_files_limit(_wanted: usize) -> usize {
    usize::MAX
}

/// Why a server cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Two knowledge bases have the same tenant and name, so that requests cannot distinguish them.
    #[error("tenant `{tenant}` has two knowledge bases named `{kb_name}`; give each its own `retrieval.kb_name`")]
    Twice {
        /// Tenant of both knowledge bases.
        tenant: String,
        /// Name of both knowledge bases.
        kb_name: String,
    },
    /// The address cannot be bound.
    #[error("{addr}: cannot be listened on: {error}; give another --addr")]
    Bind {
        /// Address to listen on.
        addr: SocketAddr,
        /// Error of the operating system.
        error: io::Error,
    },
}

/// Binds a listener to `addr`; port 0 chooses a free port.
///
/// # Errors
/// The address is in use, or not one of this machine.
pub async fn bind(addr: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(addr).await.map_err(|error| ServeError::Bind { addr, error })
}

/// Runs a server on a new tokio runtime until it ends. Does not wait for computations whose client has left.
///
/// # Errors
/// The error of the server; or the async runtime cannot be started.
pub fn block_on(server: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the async runtime (tokio)")?;
    let served = runtime.block_on(server);
    runtime.shutdown_background();
    served
}

/// Binds `addr`, calls `on_bound`, and serves `router` until `is_stopped`, while `work` runs on a separate thread. The address is bound
/// first, so that the router responds while `work` loads a model.
///
/// # Errors
/// The address cannot be bound, `on_bound` failed, or `work` ended, which it must not do while requests may arrive.
pub(crate) fn run_with_worker(
    addr: SocketAddr,
    router: Router,
    limits: ServerLimits,
    on_bound: impl FnOnce(SocketAddr) -> io::Result<()>,
    work: (&'static str, impl FnOnce() -> anyhow::Result<()> + Send + 'static),
    is_stopped: impl Fn() -> bool + Send + 'static,
) -> anyhow::Result<()> {
    block_on(async {
        let listener = bind(addr).await?;
        on_bound(listener.local_addr()?)?;
        let (name, work) = work;
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        let thread = Arc::new(thread.context("no thread to load the model on")?);
        let worker = thread.clone();
        let stop = wait_until(move || is_stopped() || worker.is_finished());
        // The worker ends when the last handle of the service is dropped, which must not be reported as the reason.
        serve(listener, router.clone(), limits, stop).await;
        match Arc::into_inner(thread) {
            Some(thread) if thread.is_finished() => Err(error_of(name, thread)),
            // A model that is still loading is abandoned at the end of the process.
            _ => Ok(()),
        }
    })
}

/// The error with which a thread ended.
fn error_of(name: &str, thread: JoinHandle<anyhow::Result<()>>) -> anyhow::Error {
    match thread.join() {
        Ok(Err(error)) => error,
        Ok(Ok(())) | Err(_) => anyhow::anyhow!("the {name} panicked, and nothing can be served any more"),
    }
}

/// Completes once `is_done`, which is polled, returns true; the `stop` of [`serve`].
pub async fn wait_until(is_done: impl Fn() -> bool) {
    while !is_done() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Serves until `stop` completes; then requests in progress have `drain_timeout` to finish, and half-sent ones a second.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    limits: ServerLimits,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let limits = limits.within_open_files();
    let connections = Connections::new(limits);
    let in_progress = GracefulShutdown::new();
    let mut stop = std::pin::pin!(stop);
    let mut check = tokio::time::interval(CHECK_INTERVAL);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head_timeout).max_buf_size(MAX_HEAD_BYTES);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = check.tick() => {
                connections.close_stalled();
                continue;
            }
            () = &mut stop => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                let open = connections.add(peer.ip());
                let service = with_handle(app.clone(), open.handle());
                let connection = in_progress.watch(http.serve_connection(TokioIo::new(stream), service));
                tokio::spawn(async move {
                    tokio::select! {
                        ended = connection => if let Err(error) = ended {
                            tracing::debug!("a connection ended: {error}");
                        },
                        () = open.closed() => tracing::debug!("a connection without a complete request was closed"),
                    }
                });
            }
            Err(error) => {
                tracing::debug!("a connection was not accepted: {error}");
                if is_out_of_handles(&error) {
                    connections.close_oldest();
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
    drop(listener);
    let timeout = limits.drain_timeout;
    tracing::info!(
        "stopping: requests in progress are answered, for at most {timeout:?}; interrupt again to stop at once"
    );
    drain(in_progress, &connections, limits.drain_timeout).await;
}

/// The routes of a connection: each request has its handle as an extension.
fn with_handle(
    app: Router,
    connection: ConnectionHandle,
) -> impl HttpService<Incoming, ResBody = axum::body::Body, Error = Infallible, Future: Send> + Send {
    let app = TowerToHyperService::new(app);
    service_fn(move |mut request: Request<Incoming>| {
        let connection = connection.clone();
        connection.note_progress();
        request.extensions_mut().insert(connection.clone());
        let response = app.call(request);
        async move {
            let response = response.await;
            connection.note_progress();
            response
        }
    })
}

async fn drain(in_progress: GracefulShutdown, connections: &Connections, drain_timeout: Duration) {
    let grace = INCOMPLETE_GRACE.min(drain_timeout);
    let mut finished = std::pin::pin!(in_progress.shutdown());
    if tokio::time::timeout(grace, &mut finished).await.is_ok() {
        return;
    }
    connections.close_incomplete();
    if tokio::time::timeout(drain_timeout - grace, finished).await.is_err() {
        tracing::warn!("requests in progress were not answered within {drain_timeout:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the server reported forever that its model was loading, after the loading thread had ended.
    #[test]
    fn a_panicked_thread_is_an_error_and_a_failed_one_reports_its_own() {
        let panicked = std::thread::spawn(|| -> anyhow::Result<()> { panic!("as a damaged file may cause") });
        let failed = std::thread::spawn(|| Err(ServeError::Twice { tenant: "a".into(), kb_name: "b".into() }.into()));
        let error = error_of("classifier", panicked);
        assert_eq!(error.to_string(), "the classifier panicked, and nothing can be served any more");
        assert!(error.downcast_ref::<ServeError>().is_none());
        assert!(
            matches!(error_of("classifier", failed).downcast_ref(), Some(ServeError::Twice { .. })),
            "of the type that it had"
        );
    }
}
