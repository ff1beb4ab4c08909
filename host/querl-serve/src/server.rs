//! Runs an HTTP server until it is stopped, and lets requests in progress finish.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long clients may take, and how many they may be.
#[derive(Debug, Clone, Copy)]
pub struct ServerLimits {
    /// Connections at once; others wait to be taken.
    pub max_connections: usize,
    /// For the head of a request to come, whole; also for a connection without one.
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

/// Answers requests until `stop` is done; requests under way then are answered still, within `drain_timeout`.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    limits: ServerLimits,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let slots = Arc::new(Semaphore::new(limits.max_connections));
    let under_way = GracefulShutdown::new();
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
                // Most are a client's that went away; a machine without free handles has some again in a while.
                tracing::debug!("a connection was not taken: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(app.clone());
        let connection = under_way.watch(connections.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!("a connection ended: {error}");
            }
            drop(slot);
        });
    }
    drop(listener);
    if tokio::time::timeout(limits.drain_timeout, under_way.shutdown()).await.is_err() {
        tracing::warn!("requests under way were not answered within {:?}", limits.drain_timeout);
    }
}

async fn accept(listener: &TcpListener, slots: &Arc<Semaphore>) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let slot = slots.clone().acquire_owned().await.expect("the semaphore is never closed");
    let (stream, _) = listener.accept().await?;
    Ok((stream, slot))
}
