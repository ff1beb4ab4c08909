//! HTTP interfaces of this program.
//!
//! In: opened searches, each with the tenant and the knowledge base whose it is. Out: a server that answers the requests of
//! clients that know nothing of querl. This crate refuses to know configurations, runs, models and plugins.

mod general_rag;
mod server;

pub use general_rag::{GENERAL_RAG_ROUTE, KnowledgeBase, ServeError, general_rag};
pub use server::{ServerLimits, serve};
