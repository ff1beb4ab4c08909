//! Retrieval: the embedded index, `general_rag` services, other services through a mapping, and rerankers. This file has what they share:
//! the trait, limits, local models, and passages.

mod embedded;
mod embedding;
mod index;
mod language;
mod lexicon_reranker;
mod mapping;
mod open;
mod pricing;
mod rerank;
mod second;
mod services;
pub(crate) mod vocabulary;

pub use embedded::EmbeddedRetriever;
pub use embedding::TextEncoder;
pub use index::INDEX_VERSION;
pub use language::retrieval_language;
pub use open::{open_retrieval_backend, open_retriever};
pub use second::SecondRetriever;
pub use services::{RagPassage, rag_passages};
pub use vocabulary::WordSegmenter;

use crate::error::DataError;
use crate::first_row::FirstRow;
use crate::text::separates_ids;
use async_trait::async_trait;
use querl_core::config::{RerankKind, RetrievalConfig};
use querl_core::fsx::{NumberedLine, ReadError, open_rows};
use querl_core::ports::{Embedder, PairScorer, RetrievalRequest};
use querl_core::records::{CallFailure, Hit};
use querl_core::text::{disturbs, is_blank};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// Limits of a search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetrievalLimits {
    /// Maximum number of passages.
    pub top_k: usize,
    /// Minimum reranker score, 0 to 1.
    pub score_threshold: f64,
}

/// Passage search with limits per request, which servers use. The stages use the core port
/// [`Retriever`](querl_core::ports::Retriever), which has the limits of the configuration.
#[async_trait]
pub trait RetrievalBackend: Send + Sync {
    /// Passages for one rewrite, best reranker score first (of an embedded index without lexicon in the order of the first stage), ranks
    /// from 1. An empty list is a valid result.
    ///
    /// # Errors
    /// The service failed, or its response cannot be parsed.
    async fn search(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure>;

    /// Name in reports.
    fn name(&self) -> &str;
}

/// Whether passages need a score of the service that found them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServiceScores {
    Required,
    /// A reranker scores the passages.
    Replaced,
}

impl ServiceScores {
    pub(crate) fn of(config: &RetrievalConfig) -> Self {
        if config.rerank.kind == RerankKind::None { Self::Required } else { Self::Replaced }
    }
}

/// Models in this process that retrieval uses; the caller opens them.
#[derive(Clone, Default)]
pub struct LocalModels {
    /// `retrieval.embedding` of kind `local`.
    pub embedder: Option<Arc<dyn Embedder>>,
    /// `retrieval.rerank` of kind `local`.
    pub scorer: Option<Arc<dyn PairScorer>>,
}

impl RetrievalLimits {
    /// The limits of a configuration.
    pub fn of(config: &RetrievalConfig) -> Self {
        Self { top_k: config.top_k, score_threshold: config.score_threshold }
    }

    /// Sorts hits by reranker score, removes those beyond the limits and numbers the others. The order of equal scores is kept.
    pub(crate) fn apply(self, mut hits: Vec<Hit>) -> Vec<Hit> {
        hits.sort_by(|a, b| b.reranker_score.total_cmp(&a.reranker_score));
        self.apply_in_order(hits)
    }

    /// As [`apply`](Self::apply), without sorting.
    pub(crate) fn apply_in_order(self, mut hits: Vec<Hit>) -> Vec<Hit> {
        hits.retain(|hit| hit.reranker_score >= self.score_threshold);
        hits.truncate(self.top_k);
        for (hit, rank) in hits.iter_mut().zip(1..) {
            hit.rank = rank;
        }
        hits
    }
}

/// Retrieval of kind `none`: finds nothing.
pub(super) struct NoRetrieval;

#[async_trait]
impl RetrievalBackend for NoRetrieval {
    async fn search(&self, _: &RetrievalRequest<'_>, _: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
        Ok(Vec::new())
    }

    fn name(&self) -> &str {
        "none"
    }
}

/// One passage of the knowledge base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passage {
    /// Identifier, unique in the knowledge base.
    pub id: String,
    /// Title; may be empty.
    #[serde(default)]
    pub title: String,
    /// Text of the passage.
    pub text: String,
}

/// Reads a knowledge base: one JSON object a line with `id`, `title`, `text`.
///
/// # Errors
/// The file cannot be read, a line is not a passage, an id is empty, occurs twice or cannot be written in a list of gold ids, a text has
/// no visible character, or there is no passage.
pub fn read_passages(path: &Path) -> Result<Vec<Passage>, DataError> {
    let mut passages = Vec::new();
    scan_passages(path, |passage| passages.push(passage))?;
    Ok(passages)
}

/// What a knowledge base is, for messages about other files.
const KNOWLEDGE_BASE: &str = "retrieval.knowledge_base is a file of JSON lines with id, title and text";

/// As [`read_passages`], one passage at a time. Returns the line of each id.
pub(crate) fn scan_passages(path: &Path, mut take: impl FnMut(Passage)) -> Result<HashMap<String, usize>, DataError> {
    let problem = |line: usize, problem: String| Err(DataError::line(path, line, problem));
    let mut ids = HashMap::new();
    for passage in open_rows::<Passage>(path)? {
        let NumberedLine { line, value: passage, .. } = passage.map_err(|error| of_another_file(path, error))?;
        let Passage { id, text, .. } = &passage;
        if is_blank(id) {
            return problem(line, "the id is empty; give each passage its own".into());
        }
        if let Some(character) = id.chars().find(|character| separates_ids(*character) || disturbs(*character)) {
            let what = match separates_ids(character) {
                true => "which separates the ids in a list of gold ids",
                false => "which is invisible",
            };
            return problem(
                line,
                format!("the id {id:?} has the character {character:?}, {what}; write the id without it"),
            );
        }
        if is_blank(text) {
            return problem(line, format!("the text of `{id}` is empty; write one, or remove the line"));
        }
        if let Some(first) = ids.insert(id.clone(), line) {
            let what = format!("the id `{id}` occurs twice, first in line {first}");
            return problem(line, format!("{what}; give each passage its own"));
        }
        take(passage);
    }
    if ids.is_empty() {
        return Err(DataError::file(path, format!("holds no passage; fill it, {KNOWLEDGE_BASE}")));
    }
    Ok(ids)
}

/// What the first line holds where it is none of a knowledge base: then every line is wrong, and none is to be removed.
fn of_another_file(path: &Path, error: ReadError) -> DataError {
    let ReadError::Line { line, .. } = error else { return error.into() };
    let first = FirstRow::read(path).ok().flatten().filter(|first| first.line == line);
    match first.filter(|first| !["id", "text"].iter().all(|key| first.has(key))) {
        Some(first) => DataError::line(path, line, format!("{first}; {KNOWLEDGE_BASE}")),
        None => error.into(),
    }
}

impl Passage {
    /// Title and text.
    pub fn full_text(&self) -> String {
        match self.title.as_str() {
            "" => self.text.clone(),
            title => format!("{title}\n{}", self.text),
        }
    }
}

#[cfg(test)]
mod embedded_tests;
#[cfg(test)]
mod service_tests;
