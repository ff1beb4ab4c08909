//! Stage validate: what does retrieval find with each rewrite?

use super::{Collector, Outcome, context};
use crate::error::DataError;
use crate::journal::Journal;
use futures::StreamExt;
use querl_core::ports::{Progress, RetrievalRequest, Retriever};
use querl_core::records::{Hit, RewriteRecord, ValidatedRecord};
use std::collections::HashMap;

/// One record per rewrite record, in order. Rewrites that `previous` holds with hits, word for word, are not looked up again;
/// failed ones are. A row without a rewrite is passed on without a look-up.
///
/// Each finished row is added to `journal`; writing the output is the caller's ([`Journal::finish`]).
///
/// # Errors
/// The service refuses us, the first rows all failed alike, none succeeded, or the journal cannot be written. What was done
/// before is in the journal.
pub async fn validate(
    rewrites: &[RewriteRecord],
    retriever: &dyn Retriever,
    previous: Vec<ValidatedRecord>,
    journal: &mut Journal,
    max_concurrent: usize,
    progress: &dyn Progress,
) -> Result<Vec<ValidatedRecord>, DataError> {
    let mut done: HashMap<(String, String), Vec<Hit>> = previous.into_iter().filter_map(found).collect();
    let records: Vec<Option<ValidatedRecord>> = rewrites
        .iter()
        .map(|record| {
            let retrieval = match &record.rewrite {
                Ok(rewrite) => Some(Ok(done.remove(&(record.query.id.clone(), rewrite.text.clone()))?)),
                Err(_) => None,
            };
            Some(ValidatedRecord { rewritten: record.clone(), retrieval })
        })
        .collect();
    let to_do: Vec<usize> = (0..rewrites.len()).filter(|index| records[*index].is_none()).collect();
    let calls = to_do.into_iter().map(|index| async move { (index, Ok(look_up(&rewrites[index], retriever).await)) });
    let results = futures::stream::iter(calls).buffer_unordered(max_concurrent.max(1));
    Collector::new(records, journal, progress).collect(std::pin::pin!(results), outcome).await
}

fn found(record: ValidatedRecord) -> Option<((String, String), Vec<Hit>)> {
    let hits = record.retrieval?.ok()?;
    Some(((record.rewritten.query.id, record.rewritten.rewrite.ok()?.text), hits))
}

fn outcome(record: &ValidatedRecord) -> Outcome<'_> {
    Some(record.retrieval.as_ref()?.as_ref().map(|_| ()))
}

async fn look_up(record: &RewriteRecord, retriever: &dyn Retriever) -> ValidatedRecord {
    let retrieval = match &record.rewrite {
        Ok(rewrite) => {
            let context = context(&record.query);
            let original_query = &record.query.original_query;
            let request = RetrievalRequest { original_query, context: &context, rewritten_query: &rewrite.text };
            Some(retriever.retrieve(request).await)
        }
        Err(_) => None,
    };
    ValidatedRecord { rewritten: record.clone(), retrieval }
}
