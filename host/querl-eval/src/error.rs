//! Errors of evaluations and reports, mostly in their input.

use querl_core::records::EvalRecord;

/// An invalid input of an evaluation or a report, or a page that cannot be rendered.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum EvalError {
    #[error("no records to evaluate; expected one per system and query")]
    NoRecords,
    #[error("eval.bootstrap is 0; expected at least 1 resample")]
    NoResamples,
    #[error("system `{system}` has two records of query `{query}` (row {row}); expected one")]
    DuplicateRecord { system: String, query: String, row: usize },
    /// A failed answer is a record too, so a missing one is a bug of the caller.
    #[error(
        "system `{system}` has no record of query `{query}` (row {row}), which other systems have; evaluate it again"
    )]
    MissingRecord { system: String, query: String, row: usize },
    /// A value is NaN or infinite; `metric` is the name of a metric or of a reward component.
    #[error("system `{system}`, query `{query}`: `{metric}` is {value}; expected a finite number")]
    NotFinite { system: String, query: String, metric: String, value: f64 },
    /// Two systems cannot be compared; the text says why.
    #[error("{0}")]
    Comparison(String),
    /// The predictions of a classifier are invalid; the text says why.
    #[error("classification: {0}")]
    Classification(String),
    /// The template engine could not render the HTML page.
    #[error("report: {0}")]
    Template(#[from] minijinja::Error),
}

impl EvalError {
    pub(crate) fn not_finite(record: &EvalRecord, metric: &str, value: f64) -> Self {
        let (system, query) = (record.system.clone(), record.query.id.clone());
        Self::NotFinite { system, query, metric: metric.to_owned(), value }
    }
}
