//! Tables, teacher, judge, retrieval and datasets.
//!
//! In: a query table, a recording or an endpoint of a teacher, a knowledge base or a retrieval service, the tenant's prompts and
//! filters through their ports. Out: rewrites, what retrieval finds with them, and the three splits of a dataset. This crate
//! refuses to know models, training and WebAssembly.

mod error;
mod quiet;
mod text;

mod augment;
mod dialogues;
mod export;
mod rows;
mod table;

mod account;
mod batch;
mod cache;
mod calls;
mod chat;
mod deadline;
mod outside;
mod provider;
mod teacher;

mod judge;
mod lexicon;
mod need;
mod phrases;
mod rubric;
mod segment;

mod embedded;
mod embedding;
mod general_rag;
mod index;
mod local_work;
mod mapping;
mod passages;
mod rerank;
mod reranker;
mod retrieval;
mod service;
mod synonyms;
mod templates;

mod journal;
mod leaks;
mod splits;
mod stages;

pub use account::{Account, ByStage, Spent, carries_files, read_account};
pub use augment::augmented;
pub use batch::{BatchTeacher, NewQuestions, NotedQuestions, refuse_noted_batches};
pub use cache::{AnswerCache, CacheLimits, CacheTable, TableStats, cache_stats, clear_cache};
pub use chat::prompt_tokens;
pub use deadline::within;
pub use dialogues::{Dialogue, Place, read_dialogues};
pub use embedded::EmbeddedRetriever;
pub use error::DataError;
pub use export::{Tabled, table_path, write_tables};
pub use journal::{Answered, Journal};
pub use judge::open_judge;
pub use leaks::{Leak, Leaks, QueriesOf, RowsOfSplit, find_leaks};
pub use lexicon::{Expression, Intent, Lexicon, Product};
pub use need::{Need, Wording};
pub use outside::Outside;
pub use passages::{Passage, read_passages};
pub use retrieval::{LocalModels, Search, SearchLimits, open_retriever, open_search};
pub use rows::{RecordFile, RecordWriter, RowIter, Rows};
pub use rubric::RubricJudge;
pub use splits::Splits;
pub use stages::{
    Asked, Conversion, DroppedRow, LocalAnswers, LocalRewriting, Made, convert, rewrite, rewrite_in_batch, validate,
};
pub use table::{Findings, NamedRow, QueryTable, RowList, open_queries, query_id};
pub use teacher::{open_fallback, open_teacher};
pub use text::normalise;
