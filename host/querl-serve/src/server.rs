//! The way of a server: it takes requests until it is told to stop, then ends those under way.

use axum::Router;
use std::io;
use tokio::net::TcpListener;

/// Answers requests until `stop` is done; requests under way then are answered still.
///
/// # Errors
/// The listener fails.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    axum::serve(listener, app).with_graceful_shutdown(stop).await
}
