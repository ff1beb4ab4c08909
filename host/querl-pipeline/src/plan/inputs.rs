//! Data that a plan reads: the query table, the files of the data stages if these are finished, and the passages.

use super::data::{DataFacts, TextFacts};
use crate::ledger::{Inputs, Ledger, StageName, rows_of};
use querl_core::config::{Config, RetrievalKind};
use querl_core::records::{DatasetRow, QueryRow, Split, ValidatedRecord};
use querl_core::run_dir::RunDir;
use querl_data::{Passage, RowSplits, Rows, open_queries, read_passages, retrieval_language};
use std::collections::HashSet;

/// Queries, splits, rewrites and passages for a plan.
pub(super) struct PlanInputs {
    /// Queries of the dataset, or of the query table before the data stages.
    pub queries: Vec<QueryRow>,
    /// Rows of train, val and test; `None` before the data stages are finished.
    pub splits: Option<[Vec<DatasetRow>; 3]>,
    /// Teacher rewrites with their hits; empty before the data stages are finished.
    pub validated: Vec<ValidatedRecord>,
    /// Titles and texts of the knowledge base, or texts of the passages that the teacher's rewrites retrieved.
    pub passages: Vec<String>,
    /// Number of rows of train, val and test: counted, or computed from the configured shares.
    pub n_rows: [usize; 3],
    /// Number of query groups of the test split.
    pub n_test_groups: usize,
}

impl PlanInputs {
    /// # Errors
    /// The table, a file of the run or the knowledge base cannot be read, or a file of the run has changed since it was written.
    pub(super) fn read(config: &Config, dir: &RunDir) -> anyhow::Result<Self> {
        let ledger = Ledger::open(&dir.stages())?;
        match ledger.finished(StageName::Convert) {
            Some(_) => Self::of_dataset(config, dir, &ledger),
            None => Self::of_table(config),
        }
    }

    fn of_dataset(config: &Config, dir: &RunDir, ledger: &Ledger) -> anyhow::Result<Self> {
        let read = |split| -> anyhow::Result<Vec<DatasetRow>> {
            let path = dir.split(split);
            Inputs::default().made_by(ledger, StageName::Convert, &path)?;
            rows_of(&path)
        };
        let splits = [read(Split::Train)?, read(Split::Val)?, read(Split::Test)?];
        Inputs::default().made_by(ledger, StageName::Validate, &dir.validated())?;
        let validated: Vec<ValidatedRecord> = rows_of(&dir.validated())?;
        let queries = splits.iter().flatten().map(|row| row.metadata.query.clone()).collect();
        let passages = match known_passages(config)? {
            Some(passages) => passages,
            None => passages_of_hits(&validated),
        };
        let n_rows = [splits[0].len(), splits[1].len(), splits[2].len()];
        let n_test_groups = splits[2].iter().map(|row| &row.metadata.query.group).collect::<HashSet<_>>().len();
        Ok(Self { queries, splits: Some(splits), validated, passages, n_rows, n_test_groups })
    }

    fn of_table(config: &Config) -> anyhow::Result<Self> {
        let table = open_queries(&config.data)?;
        let queries = table.read()?.collect::<Result<Vec<QueryRow>, _>>()?;
        let passages = known_passages(config)?.unwrap_or_default();
        let groups = queries.iter().map(|query| Ok(query.group.clone()));
        let mut n_rows = [0; 3];
        let mut test_groups: HashSet<String> = HashSet::new();
        // A table with fewer groups than splits is refused by convert.
        if let Ok(splits) = RowSplits::of(groups, &config.data) {
            for query in &queries {
                let Some(split) = splits.split_of(query) else { continue };
                n_rows[split as usize] += 1;
                if split == Split::Test {
                    test_groups.insert(query.group.clone());
                }
            }
        }
        let n_test_groups = test_groups.len();
        Ok(Self { queries, splits: None, validated: Vec::new(), passages, n_rows, n_test_groups })
    }

    pub(super) fn facts(&self, config: &Config) -> DataFacts {
        let passages = self.passages.iter().map(String::as_str);
        let is_embedded = config.retrieval.kind == RetrievalKind::Embedded && !self.passages.is_empty();
        DataFacts {
            queries: TextFacts::of(self.queries.iter().map(|query| query.original_query.as_str())),
            passages: (!self.passages.is_empty()).then(|| TextFacts::of(passages)),
            passage_language: is_embedded.then(|| retrieval_language(&config.retrieval)),
            n_with_gold: self.queries.iter().filter(|query| !query.gold_ids.is_empty()).count(),
            n_with_history: self.queries.iter().filter(|query| !query.history_summary.is_empty()).count(),
            n_rows: self.n_rows,
            n_test_groups: self.n_test_groups,
            n_targets: self
                .splits
                .as_ref()
                .map(|[train, ..]| train.iter().filter(|row| row.target().is_some()).count()),
        }
    }

    /// Rows of train; empty before the data stages.
    pub(super) fn train(&self) -> &[DatasetRow] {
        self.splits.as_ref().map(|[train, ..]| train.as_slice()).unwrap_or_default()
    }
}

/// A warning if the queries and the passages of the knowledge base are in different scripts.
///
/// # Errors
/// The queries or the knowledge base cannot be read.
pub fn script_warning(config: &Config, queries: &dyn Rows<QueryRow>) -> anyhow::Result<Option<String>> {
    let Some(passages) = known_passages(config)? else { return Ok(None) };
    let queries = queries.read()?.map(|row| row.map(|row| row.original_query)).collect::<Result<Vec<String>, _>>()?;
    let [queries, passages] = [queries, passages].map(|texts| TextFacts::of(texts.iter().map(String::as_str)));
    Ok(queries.script_mismatch(&passages))
}

/// Titles and texts of the passages of the knowledge base; `None` if a service has them.
fn known_passages(config: &Config) -> anyhow::Result<Option<Vec<String>>> {
    match (config.retrieval.kind, &config.retrieval.knowledge_base) {
        (RetrievalKind::Embedded, Some(path)) => {
            Ok(Some(read_passages(path)?.iter().map(Passage::full_text).collect()))
        }
        _ => Ok(None),
    }
}

/// The passages in the hits, without duplicates.
fn passages_of_hits(validated: &[ValidatedRecord]) -> Vec<String> {
    let hits = validated.iter().filter_map(|record| record.retrieval.as_ref()?.as_ref().ok()).flatten();
    let mut seen = HashSet::new();
    hits.filter(|hit| !hit.text.is_empty() && seen.insert(hit.text.as_str())).map(|hit| hit.text.clone()).collect()
}
