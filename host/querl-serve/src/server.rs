//! Binds an address, runs an HTTP server until it is stopped, and lets requests in progress finish.

use anyhow::Context;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Limits of connections.
#[derive(Debug, Clone, Copy)]
pub struct ServerLimits {
    /// Open connections; further ones wait to be accepted.
    pub max_connections: usize,
    /// Time limit for the whole head of a request to arrive; also for an idle connection.
    pub head_timeout: Duration,
    /// Time limit of the requests in progress when the server stops.
    pub drain_timeout: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { max_connections: 1024, head_timeout: seconds(30), drain_timeout: seconds(10) }
    }
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Requests could not distinguish two knowledge bases.
    #[error("tenant `{tenant}` has two knowledge bases named `{kb_name}`; give each its own `retrieval.kb_name`")]
    Twice {
        /// Tenant of both.
        tenant: String,
        /// Their name.
        kb_name: String,
    },
    /// The address cannot be bound.
    #[error("{addr}: cannot be listened on: {error}; give another --addr")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// Error of the system.
        error: io::Error,
    },
}

/// Binds `addr`; port 0 is a free one.
///
/// # Errors
/// The address is in use, or not one of this machine.
pub async fn bind(addr: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(addr).await.map_err(|error| ServeError::Bind { addr, error })
}

/// Runs a server to its end. Computation for clients that have left is not waited for.
///
/// # Errors
/// The server's, or there is no async runtime.
pub fn block_on(server: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")?;
    let served = runtime.block_on(server);
    runtime.shutdown_background();
    served
}

/// Completes once `is_done`, which is polled; the `stop` of a server.
pub async fn wait_until(is_done: impl Fn() -> bool) {
    while !is_done() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Serves until `stop` completes; requests in progress then have `drain_timeout` to finish.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    limits: ServerLimits,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let slots = Arc::new(Semaphore::new(limits.max_connections));
    let in_progress = GracefulShutdown::new();
    let mut stop = std::pin::pin!(stop);
    let mut connections = http1::Builder::new();
    connections.timer(TokioTimer::new()).header_read_timeout(limits.head_timeout);
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &slots) => accepted,
            () = &mut stop => break,
        };
        let (stream, slot) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Usually a client that has left. A process without free file handles has some again after a while.
                tracing::debug!("a connection was not accepted: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(app.clone());
        let connection = in_progress.watch(connections.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!("a connection ended: {error}");
            }
            drop(slot);
        });
    }
    drop(listener);
    if tokio::time::timeout(limits.drain_timeout, in_progress.shutdown()).await.is_err() {
        tracing::warn!("requests in progress were not answered within {:?}", limits.drain_timeout);
    }
}

async fn accept(listener: &TcpListener, slots: &Arc<Semaphore>) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let slot = slots.clone().acquire_owned().await.expect("the semaphore is never closed");
    let (stream, _) = listener.accept().await?;
    Ok((stream, slot))
}
