//! Stage validate: what does retrieval find with each rewrite?

use super::{Outcome, RowTask, StageResults, call_all, context};
use crate::dataset::journal::{Journal, JournalRecord};
use crate::dataset::rows::Rows;
use crate::error::DataError;
use crate::text::hash_of;
use querl_core::ports::{Progress, RetrievalRequest, Retriever};
use querl_core::records::{RewriteRecord, ValidatedRecord};

/// Looks every rewrite up. Rewrites that `journal` knows with hits, word for word, are not looked up again; failed ones are. A
/// row without a rewrite is passed on without a look-up. What comes back writes the stage's output: one record per row, in
/// order.
///
/// # Errors
/// The service refuses us, the first rows all failed alike, none succeeded, or the journal cannot be written. What was done
/// before is in the journal.
pub async fn validate<'a>(
    rewrites: &'a dyn Rows<RewriteRecord>,
    retriever: &dyn Retriever,
    journal: Journal<ValidatedRecord>,
    max_concurrent: usize,
    progress: &dyn Progress,
) -> Result<StageResults<'a, RewriteRecord, ValidatedRecord>, DataError> {
    call_all(&ValidateTask(retriever), rewrites, journal, max_concurrent, progress).await
}

impl JournalRecord for ValidatedRecord {
    fn key(&self) -> Option<u64> {
        matches!(self.retrieval, Some(Ok(_))).then(|| ValidateTask::key(&self.rewritten)).flatten()
    }
}

struct ValidateTask<'a>(&'a dyn Retriever);

impl RowTask for ValidateTask<'_> {
    type Row = RewriteRecord;
    type Record = ValidatedRecord;

    fn key(row: &RewriteRecord) -> Option<u64> {
        row.rewrite.as_ref().ok().map(|rewrite| hash_of(&(&row.query.id, &rewrite.text)))
    }

    async fn call(&self, rewritten: RewriteRecord) -> Result<ValidatedRecord, DataError> {
        let retrieval = match &rewritten.rewrite {
            Ok(rewrite) => {
                let context = context(&rewritten.query);
                let original_query = &rewritten.query.original_query;
                let request = RetrievalRequest { original_query, context: &context, rewritten_query: &rewrite.text };
                Some(self.0.retrieve(request).await)
            }
            Err(_) => None,
        };
        Ok(ValidatedRecord { rewritten, retrieval })
    }

    fn outcome(record: &ValidatedRecord) -> Outcome<'_> {
        Some(record.retrieval.as_ref()?.as_ref().map(|_| ()))
    }

    fn matches_row(record: &ValidatedRecord, row: &RewriteRecord) -> bool {
        let text = |record: &RewriteRecord| record.rewrite.as_ref().ok().map(|rewrite| rewrite.text.clone());
        record.rewritten.query.id == row.query.id && text(&record.rewritten) == text(row)
    }

    fn record(rewritten: RewriteRecord, answered: Option<ValidatedRecord>) -> ValidatedRecord {
        ValidatedRecord { rewritten, retrieval: answered.and_then(|record| record.retrieval) }
    }
}
