//! HTTP services: retrieval over the `general_rag` interface, a text classifier, and rewrites of queries.
//!
//! Input: open retrieval back ends with their tenants and knowledge bases; a text classifier and a rewriter behind traits. This crate must not
//! depend on configurations, runs, models and plugins.

mod body;
mod connections;
mod error;
mod general_rag;
mod key;
mod page;
mod rewrite;
mod server;
mod style;

pub use general_rag::{GENERAL_RAG_ROUTE, KnowledgeBase, general_rag};
pub use rewrite::{
    CandidateLimits, RequestLogOptions, RewriteOptions, RewriteService, Traces, Upstream, reload_server,
};
pub use server::{ServeError, ServerLimits, bind, block_on, serve, wait_until};
pub use style::StyleService;
pub use style::classifier::{ClassifiedText, PendingRequest, StyleOptions, SubmitError, TextClassifier};
pub use style::protocol::StylePrediction;
