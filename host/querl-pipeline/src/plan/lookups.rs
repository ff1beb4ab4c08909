//! Lookups of the raw queries and teacher rewrites of train and val, with the configured limits and to the depth of the rank histogram.

use super::headroom::{DEPTH, LookedUpRow, Lookup, gold_rank};
use super::inputs::PlanInputs;
use super::loss::spread;
use crate::retrieval::local_models;
use futures::stream::{self, StreamExt as _};
use querl_core::config::{Config, EmbeddingKind, RerankKind, RetrievalConfig, RetrievalKind};
use querl_core::edits::with_history;
use querl_core::ports::{RetrievalRequest, Retriever};
use querl_core::records::{CallFailure, DatasetRow, Hit, QueryRow, Split, ValidatedRecord};
use querl_data::{ServiceContext, open_retriever};
use std::collections::HashMap;
use std::sync::Arc;

/// Maximum number of rows per split with an embedded index.
const ROWS_OF_INDEX: usize = 200;
/// Maximum number of rows per split if a service or a local model is called: at most five retrievals per row.
const ROWS_OF_SERVICE: usize = 16;

/// Rows whose raw query and teacher's rewrite were looked up, and the number of rows whose lookup failed.
pub(super) struct LookedUp {
    pub rows: Vec<LookedUpRow>,
    pub n_failed: usize,
}

/// # Errors
/// Retrieval cannot be opened. A failed call leaves its row out.
pub(super) fn look_up(
    config: &Config,
    inputs: &PlanInputs,
    outside: &ServiceContext,
    runtime: &tokio::runtime::Runtime,
) -> anyhow::Result<Option<LookedUp>> {
    let Some([train, val, _]) = &inputs.splits else { return Ok(None) };
    if config.retrieval.kind == RetrievalKind::None {
        return Ok(None);
    }
    let models = local_models(&config.retrieval)?;
    let open = |retrieval: &RetrievalConfig| open_retriever(retrieval, &config.tenant, &models, outside);
    let retrievers = Retrievers { configured: open(&config.retrieval)?, deep: open(&deep(&config.retrieval))? };
    let rewrites: HashMap<&str, &str> = inputs.validated.iter().filter_map(rewrite_of).collect();
    let n_rows = rows_of_a_split(&config.retrieval);
    let has_rewrite = |row: &DatasetRow| rewrites.contains_key(row.metadata.query.id.as_str());
    let mut wanted = Vec::new();
    for (split, rows) in [(Split::Train, train), (Split::Val, val)] {
        wanted.extend(spread(rows, n_rows, has_rewrite).into_iter().map(|row| (split, &row.metadata.query)));
    }
    let n_at_once = config.retrieval.max_concurrent.max(1);
    let lookups = wanted.iter().map(|(split, query)| retrievers.row(*split, query, rewrites[query.id.as_str()]));
    let found: Vec<Result<LookedUpRow, CallFailure>> =
        runtime.block_on(stream::iter(lookups).buffered(n_at_once).collect());
    let n_all = found.len();
    let rows: Vec<LookedUpRow> = found.into_iter().filter_map(Result::ok).collect();
    Ok(Some(LookedUp { n_failed: n_all - rows.len(), rows }))
}

fn rewrite_of(record: &ValidatedRecord) -> Option<(&str, &str)> {
    let completion = record.rewritten.rewrite.as_ref().ok()?;
    Some((record.rewritten.query.id.as_str(), completion.text.as_str()))
}

/// The retrieval configuration with more passages and without a threshold.
fn deep(retrieval: &RetrievalConfig) -> RetrievalConfig {
    let mut deep = retrieval.clone();
    (deep.top_k, deep.score_threshold) = (DEPTH, 0.0);
    deep.rerank.n_candidates = deep.rerank.n_candidates.max(DEPTH);
    deep
}

fn rows_of_a_split(retrieval: &RetrievalConfig) -> usize {
    let is_cheap = retrieval.kind == RetrievalKind::Embedded
        && retrieval.embedding.kind == EmbeddingKind::None
        && retrieval.rerank.kind == RerankKind::None;
    if is_cheap { ROWS_OF_INDEX } else { ROWS_OF_SERVICE }
}

struct Retrievers {
    configured: Arc<dyn Retriever>,
    deep: Arc<dyn Retriever>,
}

impl Retrievers {
    async fn row(&self, split: Split, query: &QueryRow, rewrite: &str) -> Result<LookedUpRow, CallFailure> {
        let raw = self.look_up(query, &query.original_query).await?;
        let teacher = self.look_up(query, rewrite).await?;
        let with_history = match query.history_summary.trim() {
            "" => None,
            history => {
                let text = with_history(&query.original_query, history, "");
                Some(retrieve(self.configured.as_ref(), query, &text).await?)
            }
        };
        let gold_ids = query.gold_ids.clone();
        Ok(LookedUpRow { split, group: query.group.clone(), gold_ids, raw, with_history, teacher })
    }

    /// Retrieves once more for the rank, if there are gold passages.
    async fn look_up(&self, query: &QueryRow, text: &str) -> Result<Lookup, CallFailure> {
        let hits = retrieve(self.configured.as_ref(), query, text).await?;
        let deep_rank = match query.gold_ids.is_empty() {
            true => None,
            false => gold_rank(&retrieve(self.deep.as_ref(), query, text).await?, &query.gold_ids),
        };
        Ok(Lookup { hits, deep_rank })
    }
}

async fn retrieve(retriever: &dyn Retriever, query: &QueryRow, text: &str) -> Result<Vec<Hit>, CallFailure> {
    let context = query.context();
    let request = RetrievalRequest { original_query: &query.original_query, context: &context, rewritten_query: text };
    retriever.retrieve(request).await
}
