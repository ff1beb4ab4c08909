//! HTTP services: retrieval over the `general_rag` interface, a text classifier, rewrites of queries, and rewards for other RL engines.
//!
//! Input: open retrieval back ends with their tenants and knowledge bases; a text classifier, a rewriter and an environment behind traits.
//! This crate must not depend on configurations, runs, models and plugins.

mod body;
mod connections;
mod error;
mod general_rag;
mod key;
mod metrics;
mod openapi;
mod reward;
mod rewrite;
mod server;
mod style;

pub use general_rag::{GENERAL_RAG_ROUTE, KnowledgeBase, general_rag};
pub use reward::{RewardOptions, reward_router};
pub use rewrite::{
    CandidateLimits, RequestLogOptions, RewriteOptions, RewriteService, Traces, Upstream, check_server, reload_server,
};
pub use server::{ServeError, ServerLimits, bind, block_on, serve, wait_until};
pub use style::StyleService;
pub use style::classifier::{ClassifiedText, PendingRequest, StyleOptions, SubmitError, TextClassifier};
pub use style::protocol::StylePrediction;
