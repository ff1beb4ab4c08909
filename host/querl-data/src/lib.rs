//! Data side of the pipeline: query tables, teacher, judge, retrieval, datasets, and request logs as tables.
//!
//! Input: a query table or a dataset of another framework, a teacher, a knowledge base or a retrieval service, and the tenant's prompt
//! and filter plugins through their ports. Output: rewrites, the passages that retrieval finds with them, and the three splits of a
//! dataset. This crate must not depend on language models, their training or WebAssembly.

mod client;
mod dataset;
mod error;
mod expansion;
mod first_row;
mod gold_ids;
mod judge;
mod request_log;
mod retrieval;
mod rollout;
mod stages;
mod table;
mod teacher;
mod text;

pub use client::batch::{BatchTeacher, BatchedPrompts, NewPrompts, refuse_open_batches};
pub use client::chat::prompt_tokens;
pub use client::http::root_cause;
pub use client::response_cache::{CacheLimits, CacheTable, ResponseCache, TableStats, cache_stats, clear_cache};
pub use client::spend::{Spend, SpendByStage, SpendTracker, is_file_transfer, read_spend};
pub use client::{ServiceContext, within_deadline};
pub use dataset::augment::augmented;
pub use dataset::dialogues::{Dialogue, DialogueLocation, read_dialogues};
pub use dataset::export::verl::{VerlRow, write_verl_rows};
pub use dataset::export::{TableRecord, table_path, write_tables};
pub use dataset::leaks::{DatasetQueries, Leak, Leaks, SplitRows, find_leaks};
pub use dataset::records::{Journal, RecordFile, RecordWriter, RowIter, Rows};
pub use dataset::splits::{RowSplits, Splits};
pub use error::DataError;
pub use expansion::{
    ExamplePassages, ExpansionForm, ExpansionModel, ExpansionParts, FittedExpansion, NoExpansion, NoTerms,
    TermSelection,
};
pub use first_row::shown_keys;
pub use gold_ids::{UnknownGoldIds, check_knowledge_base};
pub use judge::lexicon::{Intent, Lexicon, Product, QueryIntent};
pub use judge::{RubricJudge, open_judge, rubric_answer};
pub use request_log::lines::{LoggedFeedback, LoggedRewrite, RequestLogLine, day_file_name, day_of_file_name, is_day};
pub use request_log::{DamagedLine, LogTableReport, LogTableSettings, table_from_log};
pub use retrieval::{
    EmbeddedRetriever, INDEX_VERSION, LocalModels, Passage, RagPassage, RetrievalBackend, RetrievalLimits,
    SecondRetriever, TextEncoder, WordSegmenter, open_retrieval_backend, open_retriever, rag_passages, read_passages,
    retrieval_language,
};
pub use rollout::RolloutServer;
pub use stages::{
    Conversion, ConvertedRow, DroppedRow, LocalRewriteCollector, LocalRewriteStage, StageResults, convert,
    dataset_rewrites, first_policy_prompt, rewrite, rewrite_in_batch, teacher_prompts, validate,
};
pub use table::{ColumnReader, Findings, QueryTable, RowList, RowReference, open_queries, query_id};
pub use teacher::{check_recording, not_recorded, open_fallback, open_teacher};
pub use text::{is_mostly_traditional, normalise};

/// A path in a new folder, which is removed with the first value.
#[cfg(test)]
pub(crate) fn scratch_file(name: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    (folder, path)
}

/// Configuration of a property test with a fixed seed, so that each run has the same cases.
#[cfg(test)]
pub(crate) fn properties(cases: u32) -> proptest::test_runner::Config {
    let rng_seed = proptest::test_runner::RngSeed::Fixed(7);
    proptest::test_runner::Config { cases, rng_seed, failure_persistence: None, ..Default::default() }
}
