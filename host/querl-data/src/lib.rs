//! Tables, teacher, judge, retrieval and datasets.
//!
//! In: a query table, a recording or an endpoint of a teacher, a knowledge base or a retrieval service, the tenant's prompts and
//! filters through their ports. Out: rewrites, what retrieval finds with them, and the three splits of a dataset. This crate
//! refuses to know models, training and WebAssembly.

mod embedded;
mod error;
mod lexicon;
mod need;
mod passages;
mod phrases;
mod reranker;
mod segment;
mod splits;
mod table;
mod table_formats;
mod text;

pub use embedded::EmbeddedRetriever;
pub use error::DataError;
pub use lexicon::{Expression, Intent, Lexicon, Product};
pub use need::Need;
pub use passages::{Passage, read_passages};
pub use reranker::Reranker;
pub use splits::assign_splits;
pub use table::{QueryTable, query_id, read_table};
pub use text::normalise;
