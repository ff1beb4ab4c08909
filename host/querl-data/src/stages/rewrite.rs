//! Stage rewrite: the teacher rewrites each query.

use super::{Collector, context};
use crate::error::DataError;
use crate::journal::Journal;
use futures::StreamExt;
use querl_core::ports::{Progress, PromptInput, PromptTask, Prompts, Teacher};
use querl_core::records::{CallFailure, Completion, FailureKind, QueryRow, RewriteRecord};
use std::collections::HashMap;

/// One record per row, in order. Rows that `previous` holds with a rewrite are not asked again; failed ones are.
///
/// Each finished row is added to `journal`; writing the output is the caller's ([`Journal::finish`]).
///
/// # Errors
/// The teacher refuses us, the first rows all failed alike, none succeeded, a plugin broke its contract, or the journal cannot
/// be written. What was done before is in the journal.
pub async fn rewrite(
    rows: &[QueryRow],
    teacher: &dyn Teacher,
    prompts: &dyn Prompts,
    previous: Vec<RewriteRecord>,
    journal: &mut Journal,
    max_concurrent: usize,
    progress: &dyn Progress,
) -> Result<Vec<RewriteRecord>, DataError> {
    let mut done: HashMap<String, Completion> =
        previous.into_iter().filter_map(|record| Some((record.query.id, record.rewrite.ok()?))).collect();
    let records: Vec<Option<RewriteRecord>> = rows
        .iter()
        .map(|row| done.remove(&row.id).map(|completion| RewriteRecord { query: row.clone(), rewrite: Ok(completion) }))
        .collect();
    let to_do: Vec<usize> = (0..rows.len()).filter(|index| records[*index].is_none()).collect();
    let calls =
        to_do.into_iter().map(|index| async move { (index, rewrite_one(&rows[index], teacher, prompts).await) });
    let results = futures::stream::iter(calls).buffer_unordered(max_concurrent.max(1));
    let collector = Collector::new(records, journal, progress);
    collector.collect(std::pin::pin!(results), |record| Some(record.rewrite.as_ref().map(|_| ()))).await
}

async fn rewrite_one(row: &QueryRow, teacher: &dyn Teacher, prompts: &dyn Prompts) -> Result<RewriteRecord, DataError> {
    let context = context(row);
    let input = PromptInput { query: &row.original_query, context: &context, rewrite: None };
    let messages = prompts.messages(PromptTask::TeacherRewrite, &input)?;
    let rewrite = match teacher.rewrite(row, &messages).await {
        Ok(completion) => parsed(completion, prompts)?,
        Err(failure) => Err(failure),
    };
    Ok(RewriteRecord { query: row.clone(), rewrite })
}

/// The answer with its text as the plugin's parser leaves it.
fn parsed(completion: Completion, prompts: &dyn Prompts) -> Result<Result<Completion, CallFailure>, DataError> {
    Ok(match prompts.parse_rewrite(&completion.text)? {
        Ok(text) => Ok(Completion { text, ..completion }),
        Err(rejection) => Err(CallFailure {
            kind: FailureKind::InvalidResponse,
            message: format!("the teacher's answer holds no rewrite: {rejection}"),
        }),
    })
}
