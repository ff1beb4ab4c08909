//! Stage rewrite: the teacher rewrites each query.

use super::{Outcome, RowTask, StageResults, call_all, context};
use crate::client::batch::{BatchResponses, BatchTeacher, NewPrompts};
use crate::dataset::journal::{Journal, JournalRecord};
use crate::dataset::rows::Rows;
use crate::error::DataError;
use crate::text::hash_of;
use querl_core::ports::{Progress, PromptInput, PromptTask, Prompts, Teacher};
use querl_core::records::{CallFailure, Completion, FailureKind, Message, QueryRow, RewriteRecord};
use std::path::Path;
use std::time::Duration;

/// Has the teacher rewrite each row. Rows whose rewrite is in `journal` are skipped; failed ones are tried again.
/// What comes back writes the stage's output: one record per row, in order.
///
/// # Errors
/// The teacher refuses us, the first rows all failed alike, none succeeded, a plugin broke its contract, or the journal cannot
/// be written. What was done before is in the journal.
pub async fn rewrite<'a>(
    rows: &'a dyn Rows<QueryRow>,
    teacher: &dyn Teacher,
    prompts: &dyn Prompts,
    journal: Journal<RewriteRecord>,
    max_concurrent: usize,
    progress: &dyn Progress,
) -> Result<StageResults<'a, QueryRow, RewriteRecord>, DataError> {
    call_all(&RewriteTask { teacher, prompts, batches: None }, rows, journal, max_concurrent, progress).await
}

/// As [`rewrite`], with what is in batches answered from there. `new` says whether rows that neither the cache nor a batch knows
/// are put into one; if not, `max_concurrent` of them are asked at once. `state` notes what was handed over; removing it once the
/// stage's output is written is the caller's.
///
/// # Errors
/// A batch was refused or what became of it is unknown, a plugin broke its contract, no row succeeded, or a file cannot be written.
pub async fn rewrite_in_batch<'a>(
    rows: &'a dyn Rows<QueryRow>,
    (teacher, batch): (&dyn Teacher, &BatchTeacher),
    prompts: &dyn Prompts,
    journal: Journal<RewriteRecord>,
    (new, max_concurrent): (NewPrompts, usize),
    state: &Path,
    progress: &dyn Progress,
) -> Result<StageResults<'a, QueryRow, RewriteRecord>, DataError> {
    let open = rows.read()?.filter(|row| match row {
        Ok(row) => RewriteTask::key(row).and_then(|key| journal.earlier(key)).is_none(),
        Err(_) => true,
    });
    let open = open.filter_map(|row| unknown_prompt(row, teacher, prompts).transpose());
    let answers = before_stop(batch.run(open, new, state, progress), progress).await?;
    let task = RewriteTask { teacher, prompts, batches: Some(&answers) };
    let asked = call_all(&task, rows, journal, max_concurrent, progress).await;
    answers.settle()?;
    asked
}

/// The result of `task`, which an interrupt cancels.
async fn before_stop<T>(
    task: impl Future<Output = Result<T, DataError>>,
    progress: &dyn Progress,
) -> Result<T, DataError> {
    let stopped = async {
        while !progress.is_stopped() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        done = task => done,
        () = stopped => Err(DataError::Interrupted),
    }
}

/// `None` where the cache knows the answer.
fn unknown_prompt(
    row: Result<QueryRow, DataError>,
    teacher: &dyn Teacher,
    prompts: &dyn Prompts,
) -> Result<Option<Vec<Message>>, DataError> {
    let messages = messages(&row?, prompts)?;
    Ok((!teacher.knows(&messages)).then_some(messages))
}

impl JournalRecord for RewriteRecord {
    fn key(&self) -> Option<u64> {
        self.rewrite.is_ok().then(|| hash_of(&self.query.id))
    }
}

struct RewriteTask<'a> {
    teacher: &'a dyn Teacher,
    prompts: &'a dyn Prompts,
    batches: Option<&'a BatchResponses<'a>>,
}

impl RowTask for RewriteTask<'_> {
    type Row = QueryRow;
    type Record = RewriteRecord;

    fn key(row: &QueryRow) -> Option<u64> {
        Some(hash_of(&row.id))
    }

    async fn call(&self, query: QueryRow) -> Result<RewriteRecord, DataError> {
        let messages = messages(&query, self.prompts)?;
        let mut rewrite = match self.batch_response(&messages)? {
            Some(rewrite) => rewrite,
            None => self.call_teacher(self.teacher, &query, &messages).await?,
        };
        if let (Err(failure), Some(second)) = (&rewrite, self.teacher.fallback())
            && may_another_answer(failure.kind)
        {
            rewrite = match self.call_teacher(second, &query, &messages).await? {
                Ok(completion) => Ok(Completion { source: Some(second.name().to_owned()), ..completion }),
                // A spent budget replaces the first failure; any other is appended to it.
                Err(other) if other.kind == FailureKind::OverBudget => Err(other),
                Err(other) => {
                    let message = format!("{}; the fallback: {other}", failure.message);
                    Err(CallFailure { message, kind: failure.kind })
                }
            };
        }
        Ok(RewriteRecord { query, rewrite })
    }

    fn outcome(record: &RewriteRecord) -> Outcome<'_> {
        Some(record.rewrite.as_ref().map(|_| ()))
    }

    fn matches_row(record: &RewriteRecord, row: &QueryRow) -> bool {
        record.query.id == row.id
    }

    /// The recorded rewrite is kept where the table has renumbered or regrouped the row.
    fn record(query: QueryRow, answered: Option<RewriteRecord>) -> RewriteRecord {
        let missing =
            || CallFailure { kind: FailureKind::InvalidResponse, message: "the teacher was not asked".into() };
        RewriteRecord { query, rewrite: answered.map_or_else(|| Err(missing()), |record| record.rewrite) }
    }
}

impl RewriteTask<'_> {
    /// What a batch says to a prompt; `None` where it is in none.
    fn batch_response(&self, messages: &[Message]) -> Result<Option<Result<Completion, CallFailure>>, DataError> {
        let Some(answer) = self.batches.map(|batches| batches.of(messages)).transpose()?.flatten() else {
            return Ok(None);
        };
        Ok(Some(match answer {
            Ok(completion) => {
                let rewrite = parsed(completion.clone(), self.prompts)?;
                if rewrite.is_ok() {
                    self.teacher.keep(messages, &completion);
                }
                rewrite
            }
            Err(failure) => Err(failure),
        }))
    }

    async fn call_teacher(
        &self,
        teacher: &dyn Teacher,
        query: &QueryRow,
        messages: &[Message],
    ) -> Result<Result<Completion, CallFailure>, DataError> {
        Ok(match teacher.rewrite(query, messages).await {
            Ok(completion) => parsed(completion, self.prompts)?.inspect_err(|_| teacher.forget(messages)),
            Err(failure) => Err(failure),
        })
    }
}

pub(super) fn messages(row: &QueryRow, prompts: &dyn Prompts) -> Result<Vec<Message>, DataError> {
    let context = context(row);
    let input = PromptInput { query: &row.original_query, context: &context, rewrite: None };
    Ok(prompts.messages(PromptTask::TeacherRewrite, &input)?)
}

/// Refusals of our key and a spent budget are for a person to mend, not to be worked around row by row.
fn may_another_answer(kind: FailureKind) -> bool {
    !matches!(kind, FailureKind::Unauthorized | FailureKind::OverBudget)
}

pub(super) fn parsed(
    completion: Completion,
    prompts: &dyn Prompts,
) -> Result<Result<Completion, CallFailure>, DataError> {
    Ok(match prompts.parse_rewrite(&completion.text)? {
        Ok(text) => Ok(Completion { text, ..completion }),
        Err(rejection) => Err(CallFailure {
            kind: FailureKind::InvalidResponse,
            message: format!("the teacher's answer holds no rewrite: {rejection}"),
        }),
    })
}
