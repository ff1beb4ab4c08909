//! Tables, teacher, judge, retrieval and datasets.
//!
//! In: a query table, a recording or an endpoint of a teacher, a knowledge base or a retrieval service, the tenant's prompts and
//! filters through their ports. Out: rewrites, what retrieval finds with them, and the three splits of a dataset. This crate
//! refuses to know models, training and WebAssembly.

mod client;
mod dataset;
mod error;
mod judge;
mod retrieval;
mod stages;
mod table;
mod teacher;
mod text;

pub use client::batch::{BatchTeacher, NewQuestions, NotedQuestions, refuse_noted_batches};
pub use client::chat::prompt_tokens;
pub use client::context::Outside;
pub use client::deadline::within;
pub use client::response_cache::{AnswerCache, CacheLimits, CacheTable, TableStats, cache_stats, clear_cache};
pub use client::spend::{Account, ByStage, Spent, carries_files, read_account};
pub use dataset::augment::augmented;
pub use dataset::dialogues::{Dialogue, Place, read_dialogues};
pub use dataset::export::{Tabled, table_path, write_tables};
pub use dataset::journal::{Answered, Journal};
pub use dataset::leaks::{Leak, Leaks, QueriesOf, RowsOfSplit, find_leaks};
pub use dataset::rows::{RecordFile, RecordWriter, RowIter, Rows};
pub use dataset::splits::Splits;
pub use error::DataError;
pub use judge::lexicon::{Expression, Intent, Lexicon, Product};
pub use judge::open_judge;
pub use judge::query_intent::{Need, Wording};
pub use judge::rubric::RubricJudge;
pub use retrieval::EmbeddedRetriever;
pub use retrieval::{LocalModels, Search, SearchLimits, open_retriever, open_search};
pub use retrieval::{Passage, read_passages};
pub use stages::{
    Asked, Conversion, DroppedRow, LocalAnswers, LocalRewriting, Made, convert, rewrite, rewrite_in_batch, validate,
};
pub use table::{Findings, NamedRow, QueryTable, RowList, open_queries, query_id};
pub use teacher::{open_fallback, open_teacher};
pub use text::normalise;
