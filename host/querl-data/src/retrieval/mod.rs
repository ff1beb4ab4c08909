//! Retrieval: the embedded index, `general_rag` services, services of other makers through a mapping, and rerankers.

mod embedded;
mod embedding;
mod general_rag;
mod index;
mod json;
mod lexicon_reranker;
mod local_model;
mod mapped_service;
mod mapping;
mod open;
mod passages;
mod rerank;
mod search;
pub(crate) mod segment;
mod synonyms;

pub use embedded::EmbeddedRetriever;
pub(crate) use index::Vocabulary;
pub use open::{open_retrieval_backend, open_retriever};
pub use passages::{Passage, read_passages};
pub use search::{LocalModels, RetrievalBackend, RetrievalLimits};
