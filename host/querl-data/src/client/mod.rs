//! Calls to external services: HTTP with retries, rate limits, circuit breaker and secrets; the response cache with single-flight
//! requests; the budget; chat completions and the batch API.

pub(crate) mod batch;
pub(crate) mod chat;
pub(crate) mod context;
pub(crate) mod deadline;
pub(crate) mod http;
mod provider;
pub(crate) mod response_cache;
pub(crate) mod spend;
