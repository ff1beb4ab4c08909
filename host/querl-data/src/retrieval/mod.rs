//! Retrieval: the embedded index, `general_rag` services, other services through a mapping, and rerankers. This file has the common
//! parts: trait, limits, local models, passages.

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
use crate::table::{column_names, find_column, header_remedy, open_table, warn_of_guess};
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
    /// Maximum number of passages (hits).
    pub top_k: usize,
    /// Minimum reranker score of a passage, 0 to 1.
    pub score_threshold: f64,
}

/// Passage search with limits per request, for servers. The stages use the port [`Retriever`](querl_core::ports::Retriever), which has
/// the limits of the configuration.
#[async_trait]
pub trait RetrievalBackend: Send + Sync {
    /// Finds passages for one rewrite, best reranker score first and ranks from 1; an embedded index without lexicon keeps the order of
    /// the first stage. An empty list is a valid result.
    ///
    /// # Errors
    /// The service failed, or its response cannot be parsed.
    async fn search(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure>;

    /// Name of the backend in reports.
    fn name(&self) -> &str;
}

/// Whether each passage of a retrieval service needs a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServiceScores {
    Required,
    /// A score is not needed, since a reranker scores the passages.
    Replaced,
}

impl ServiceScores {
    pub(crate) fn of(config: &RetrievalConfig) -> Self {
        if config.rerank.kind == RerankKind::None { Self::Required } else { Self::Replaced }
    }
}

/// Local models that retrieval uses, opened by the caller.
#[derive(Clone, Default)]
pub struct LocalModels {
    /// Embedding model, if `retrieval.embedding.kind` is `local`.
    pub embedder: Option<Arc<dyn Embedder>>,
    /// Cross-encoder, if `retrieval.rerank.kind` is `local`.
    pub scorer: Option<Arc<dyn PairScorer>>,
}

impl RetrievalLimits {
    /// The limits of a configuration (`retrieval.top_k`, `retrieval.score_threshold`).
    pub fn of(config: &RetrievalConfig) -> Self {
        Self { top_k: config.top_k, score_threshold: config.score_threshold }
    }

    /// Sorts hits by reranker score, removes those outside of the limits and sets their ranks. Ties keep their order.
    pub(crate) fn apply(self, mut hits: Vec<Hit>) -> Vec<Hit> {
        hits.sort_by(|a, b| b.reranker_score.total_cmp(&a.reranker_score));
        self.apply_in_order(hits)
    }

    /// Like [`apply`](Self::apply), without sorting.
    pub(crate) fn apply_in_order(self, mut hits: Vec<Hit>) -> Vec<Hit> {
        hits.retain(|hit| hit.reranker_score >= self.score_threshold);
        hits.truncate(self.top_k);
        for (hit, rank) in hits.iter_mut().zip(1..) {
            hit.rank = rank;
        }
        hits
    }
}

/// Retriever of kind `none`, which returns no passages.
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

/// A passage of the knowledge base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passage {
    /// Passage id, unique in the knowledge base.
    pub id: String,
    /// Title; may be empty.
    #[serde(default)]
    pub title: String,
    /// Text of the passage.
    pub text: String,
}

/// Reads a knowledge base: JSON lines of objects with `id`, `title` and `text`, or a table with these columns.
///
/// # Errors
/// The file cannot be read, a line is not a passage, an id is empty, repeated or not usable in a list of gold ids, a text has no visible
/// character, or there is no passage.
pub fn read_passages(path: &Path) -> Result<Vec<Passage>, DataError> {
    let mut passages = Vec::new();
    scan_passages(path, |passage| passages.push(passage))?;
    Ok(passages)
}

/// Description of a knowledge base, for error messages.
const KNOWLEDGE_BASE: &str = "retrieval.knowledge_base is a file of JSON lines, .csv, .tsv, .xlsx or .parquet, with id, text \
                              and optionally title";

/// Like [`read_passages`], but passes one passage at a time to `take`. Returns the line number of each id.
pub(crate) fn scan_passages(path: &Path, mut take: impl FnMut(Passage)) -> Result<HashMap<String, usize>, DataError> {
    let problem = |line: usize, problem: String| Err(DataError::line(path, line, problem));
    let mut ids = HashMap::new();
    for passage in passages(path)? {
        let (line, passage) = passage?;
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
        return Err(DataError::file(path, format!("holds no passage; fill it: {KNOWLEDGE_BASE}")));
    }
    Ok(ids)
}

/// Passages with their numbers, from 1: of lines, or of rows as a spreadsheet shows them.
type Passages<'a> = Box<dyn Iterator<Item = Result<(usize, Passage), DataError>> + 'a>;

fn passages(path: &Path) -> Result<Passages<'_>, DataError> {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    if matches!(extension.as_deref(), Some("csv" | "tsv" | "xlsx" | "parquet")) {
        return passages_of_table(path);
    }
    Ok(Box::new(open_rows::<Passage>(path)?.map(move |line| match line {
        Ok(NumberedLine { line, value, .. }) => Ok((line, value)),
        Err(error) => Err(of_another_file(path, error)),
    })))
}

/// Rows without an id, a title and a text are skipped.
fn passages_of_table(path: &Path) -> Result<Passages<'_>, DataError> {
    let table = open_table(path)?;
    let [id, title, text] = ["id", "title", "text"].map(|name| find_column(&table, name));
    let (id, title, text) = (id?, title?, text?);
    let (Some(id), Some(text)) = (id, text) else {
        let columns = [("id", id), ("text", text)].into_iter();
        let missing: Vec<&str> = columns.filter(|(_, column)| column.is_none()).map(|(name, _)| name).collect();
        let remedy = header_remedy(&table, &missing).unwrap_or_else(|| KNOWLEDGE_BASE.to_owned());
        let (missing, found) = (missing.join("` and no column `"), column_names(&table));
        return Err(DataError::file(path, format!("has no column `{missing}`; it has the columns {found}; {remedy}")));
    };
    let encoding = table.encoding;
    let used: Vec<usize> = [Some(id), title, Some(text)].into_iter().flatten().collect();
    let (rows, mut warned) = (table.rows(&used)?, false);
    Ok(Box::new(rows.filter_map(move |row| {
        let (number, cells) = match row {
            Ok(row) => row,
            Err(error) => return Some(Err(error)),
        };
        let cell = |column: usize| cells.get(column).map_or("", String::as_str);
        if let Some(encoding) = encoding.filter(|_| !warned) {
            warned = warn_of_guess(path, encoding, used.iter().map(|column| cell(*column)));
        }
        let passage = Passage {
            id: cell(id).trim().to_owned(),
            title: title.map_or("", cell).to_owned(),
            text: cell(text).to_owned(),
        };
        let is_empty = used.iter().all(|column| is_blank(cell(*column)));
        (!is_empty).then_some(Ok((number, passage)))
    })))
}

/// The error for a first line that is not a passage: the file is then not a knowledge base, and removing the line would not help.
fn of_another_file(path: &Path, error: ReadError) -> DataError {
    let ReadError::Line { line, .. } = error else { return error.into() };
    let first = FirstRow::read(path).ok().flatten().filter(|first| first.line == line);
    match first.filter(|first| !["id", "text"].iter().all(|key| first.has(key))) {
        Some(first) => DataError::line(path, line, format!("{first}; {KNOWLEDGE_BASE}")),
        None => error.into(),
    }
}

impl Passage {
    /// Title and text of the passage as one text.
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
