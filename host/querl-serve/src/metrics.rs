//! The parts that the metrics of all services share, in Prometheus' text format.

use crate::error::{ErrorForm, ErrorResponse};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use prometheus::Registry;
use prometheus::core::Collector;

pub(crate) fn registered<C: Collector + Clone + 'static>(registry: &Registry, metric: C) -> prometheus::Result<C> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

/// The response of the route `/metrics`.
pub(crate) fn metrics_response(text: prometheus::Result<String>, form: ErrorForm) -> Response {
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        Err(error) => ErrorResponse::internal(error.to_string()).into_body(form),
    }
}
