//! HTTP interfaces of this program.
//!
//! In: opened searches, each with the tenant and the knowledge base whose it is; a classifier of texts behind a trait. Out: servers that
//! answer the requests of clients that know nothing of querl. This crate refuses to know configurations, runs, models and plugins.

mod general_rag;
mod server;
mod style;

pub use general_rag::{GENERAL_RAG_ROUTE, KnowledgeBase, ServeError, general_rag};
pub use server::{ServerLimits, serve};
pub use style::{ClassifiedText, NotAccepted, StyleOptions, StylePrediction, StyleService, TextClassifier, Waiting};
