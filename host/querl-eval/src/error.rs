//! What can be wrong with the input of an evaluation.

use querl_core::records::EvalRecord;

/// Why there is no evaluation, or no report.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// Nothing to evaluate.
    #[error("no records to evaluate; expected one per system and query")]
    NoRecords,
    /// A bootstrap of nothing.
    #[error("eval.bootstrap is 0; expected at least 1 resample")]
    NoResamples,
    /// The same answer twice.
    #[error("system `{system}` has two records of query `{query}` (row {row}); expected one")]
    DuplicateRecord {
        /// Whose.
        system: String,
        /// Id of the query.
        query: String,
        /// Row in the input table.
        row: usize,
    },
    /// A query that one system was not asked. A failed answer is a record too, so this is a fault of the caller.
    #[error(
        "system `{system}` has no record of query `{query}` (row {row}), which other systems have; evaluate it again"
    )]
    MissingRecord {
        /// Whose.
        system: String,
        /// Id of the query.
        query: String,
        /// Row in the input table.
        row: usize,
    },
    /// NaN or infinite.
    #[error("system `{system}`, query `{query}`: `{metric}` is {value}; expected a finite number")]
    NotFinite {
        /// Whose.
        system: String,
        /// Id of the query.
        query: String,
        /// Which metric, or reward component.
        metric: String,
        /// What was found.
        value: f64,
    },
    /// A classifier's predictions cannot be measured.
    #[error("classification: {0}")]
    Classification(String),
    /// The page could not be drawn.
    #[error("report: {0}")]
    Template(#[from] minijinja::Error),
}

impl EvalError {
    /// A value of `metric` that is not a finite number.
    pub(crate) fn not_finite(record: &EvalRecord, metric: &str, value: f64) -> Self {
        Self::NotFinite {
            system: record.system.clone(),
            query: record.query.id.clone(),
            metric: metric.to_owned(),
            value,
        }
    }
}
