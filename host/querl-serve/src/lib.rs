//! HTTP interfaces of this program.
//!
//! Input: opened searches with their tenants and knowledge bases; a text classifier behind a trait. Output: servers for clients of these
//! APIs. This crate must not depend on configurations, runs, models and plugins.

mod general_rag;
mod server;
mod style;

pub use general_rag::{GENERAL_RAG_ROUTE, KnowledgeBase, ServeError, general_rag};
pub use server::{ServerLimits, serve};
pub use style::{ClassifiedText, NotAccepted, StyleOptions, StylePrediction, StyleService, TextClassifier, Waiting};
