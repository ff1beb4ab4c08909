//! Stage rewrite: the teacher rewrites each query, by single calls, by the batch API, or as a local model that generates rows in batches.

use super::{Outcome, StageRecord, StageResults, call_all};
use crate::client::batch::{BatchResponses, BatchTeacher, NewPrompts};
use crate::dataset::records::{Journal, JournalRecord, RowIter, Rows};
use crate::error::DataError;
use crate::text::{hash_of, without_control_characters};
use async_trait::async_trait;
use querl_core::ports::{Progress, PromptInput, PromptTask, Prompts, Teacher};
use querl_core::records::{CallFailure, Completion, FailureKind, Message, QueryRow, RewriteRecord};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Calls the teacher for each row. Rows that have a rewrite in `journal` are skipped; failed ones are retried. The result writes the
/// stage's output, with one record per row in order.
///
/// # Errors
/// The teacher rejects the API key, the first rows all failed alike, no row succeeded, a plugin broke its contract, or the journal cannot
/// be written. Finished records are in the journal.
pub async fn rewrite<'a>(
    rows: &'a dyn Rows<QueryRow>,
    teacher: &dyn Teacher,
    prompts: &dyn Prompts,
    journal: Journal<RewriteRecord>,
    max_concurrent: usize,
    progress: &dyn Progress,
) -> Result<StageResults<'a, RewriteRecord>, DataError> {
    let task = RewriteTask { teacher, prompts, batches: None };
    call_all(rows, |row| task.rewrite(row), journal, max_concurrent, progress).await
}

/// Like [`rewrite`], with the batch API. Rows that are neither cached nor in a batch are submitted in new batches, or, if `new` is
/// `Skip`, requested one by one. `path` is the state file of the batches, which the caller removes after the stage's output is written.
///
/// # Errors
/// A batch was rejected or its status is unknown, a plugin broke its contract, no row succeeded, or a file cannot be written.
pub async fn rewrite_in_batch<'a>(
    rows: &'a dyn Rows<QueryRow>,
    (teacher, batch): (&dyn Teacher, &BatchTeacher),
    prompts: &dyn Prompts,
    journal: Journal<RewriteRecord>,
    (new, max_concurrent): (NewPrompts, usize),
    path: &Path,
    progress: &dyn Progress,
) -> Result<StageResults<'a, RewriteRecord>, DataError> {
    let pending = rows.read()?.filter(|row| match row {
        Ok(row) => RewriteRecord::row_key(row).and_then(|key| journal.earlier(key)).is_none(),
        Err(_) => true,
    });
    let uncached = pending.filter_map(|row| uncached_prompt(row, teacher, prompts).transpose());
    let responses = before_stop(batch.run(uncached, new, path, progress), progress).await?;
    let task = RewriteTask { teacher, prompts, batches: Some(&responses) };
    let results = call_all(rows, |row| task.rewrite(row), journal, max_concurrent, progress).await;
    responses.settle()?;
    results
}

/// The result of `task`; an interrupt cancels it.
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

/// The teacher's prompt for a row; `None` if its response is cached.
fn uncached_prompt(
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

impl StageRecord for RewriteRecord {
    type Row = QueryRow;

    fn row_key(row: &QueryRow) -> Option<u64> {
        Some(hash_of(&row.id))
    }

    fn outcome(&self) -> Outcome<'_> {
        Some(self.rewrite.as_ref().map(|_| ()))
    }

    fn matches_row(&self, row: &QueryRow) -> bool {
        self.query.id == row.id
    }

    /// Keeps the recorded rewrite if the table has renumbered or regrouped the row.
    fn of(query: QueryRow, recorded: Option<Self>) -> Self {
        let missing =
            || CallFailure { kind: FailureKind::InvalidResponse, message: "the teacher was not called".into() };
        Self { query, rewrite: recorded.map_or_else(|| Err(missing()), |record| record.rewrite) }
    }
}

struct RewriteTask<'a> {
    teacher: &'a dyn Teacher,
    prompts: &'a dyn Prompts,
    batches: Option<&'a BatchResponses<'a>>,
}

impl RewriteTask<'_> {
    async fn rewrite(&self, query: QueryRow) -> Result<RewriteRecord, DataError> {
        let messages = messages(&query, self.prompts)?;
        let mut rewrite = match self.batch_response(&messages)? {
            Some(rewrite) => rewrite,
            None => self.call_teacher(self.teacher, &query, &messages).await?,
        };
        if let (Err(failure), Some(second)) = (&rewrite, self.teacher.fallback())
            // Invalid credentials and a spent budget need action by the user.
            && !matches!(failure.kind, FailureKind::Unauthorized | FailureKind::OverBudget)
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

    /// The rewrite of a prompt by a batch; `None` if no batch contains it.
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

/// The prompt for the teacher of each row.
///
/// # Errors
/// The rows cannot be read, or the plugin broke its contract.
pub fn teacher_prompts<'a>(
    rows: &'a dyn Rows<QueryRow>,
    prompts: &'a dyn Prompts,
) -> Result<impl Iterator<Item = Result<Vec<Message>, DataError>> + 'a, DataError> {
    Ok(rows.read()?.map(|row| messages(&row?, prompts)))
}

fn messages(row: &QueryRow, prompts: &dyn Prompts) -> Result<Vec<Message>, DataError> {
    let context = row.context();
    let input = PromptInput { query: &row.original_query, context: &context, rewrite: None };
    Ok(prompts.messages(PromptTask::TeacherRewrite, &input)?)
}

/// Parses the rewrite from a teacher's response with the prompt plugin, without control characters.
pub(super) fn parsed(
    completion: Completion,
    prompts: &dyn Prompts,
) -> Result<Result<Completion, CallFailure>, DataError> {
    Ok(match prompts.parse_rewrite(&completion.text)? {
        Ok(text) => match without_control_characters(&text) {
            text if text.trim().is_empty() => Err(CallFailure {
                kind: FailureKind::InvalidResponse,
                message: "the teacher's answer holds control characters alone".into(),
            }),
            text => Ok(Completion { text: text.into_owned(), ..completion }),
        },
        Err(rejection) => Err(CallFailure {
            kind: FailureKind::InvalidResponse,
            message: format!("the teacher's answer holds no rewrite: {rejection}"),
        }),
    })
}

/// Stage rewrite with a local model, which generates many rewrites at once: the caller takes a batch of prompts, generates, and hands the
/// results to the collector.
pub struct LocalRewriteStage<'a> {
    rows: &'a dyn Rows<QueryRow>,
    rows_left: RowIter<'a, QueryRow>,
    collector: LocalRewriteCollector<'a>,
}

/// Collector of the rewrites of a batch of rows.
pub struct LocalRewriteCollector<'a> {
    prompts: &'a dyn Prompts,
    journal: Journal<RewriteRecord>,
    progress: &'a dyn Progress,
    portion: Vec<QueryRow>,
    failures: HashMap<u64, CallFailure>,
    n_done: u64,
    n_total: u64,
}

impl<'a> LocalRewriteStage<'a> {
    /// Starts the stage at the first row without a rewrite in `journal`.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub fn begin(
        rows: &'a dyn Rows<QueryRow>,
        prompts: &'a dyn Prompts,
        journal: Journal<RewriteRecord>,
        progress: &'a dyn Progress,
    ) -> Result<Self, DataError> {
        let (mut n_done, mut n_total) = (0, 0);
        for row in rows.read()? {
            n_total += 1;
            n_done += u64::from(is_done(&journal, &row?));
        }
        progress.update(n_done, n_total, "");
        let (portion, failures) = (Vec::new(), HashMap::new());
        let collector = LocalRewriteCollector { prompts, journal, progress, portion, failures, n_done, n_total };
        Ok(Self { rows, rows_left: rows.read()?, collector })
    }

    /// The prompts of the next rows, at most `n_most`, and the collector of their rewrites; no prompts at the end of the stage.
    ///
    /// # Errors
    /// The rows cannot be read, or the plugin broke its contract.
    pub fn portion(&mut self, n_most: usize) -> Result<(Vec<Vec<Message>>, &mut LocalRewriteCollector<'a>), DataError> {
        let collector = &mut self.collector;
        collector.portion.clear();
        while collector.portion.len() < n_most
            && let Some(row) = self.rows_left.next()
        {
            let row = row?;
            if !is_done(&collector.journal, &row) {
                collector.portion.push(row);
            }
        }
        let prompts = collector.portion.iter().map(|row| messages(row, collector.prompts)).collect::<Result<_, _>>()?;
        Ok((prompts, collector))
    }

    /// Ends the stage; failed rows are sent to the teacher `fallback`, if there is one.
    ///
    /// # Errors
    /// As [`rewrite`].
    pub async fn finish(
        self,
        name: String,
        fallback: Option<Arc<dyn Teacher>>,
        max_concurrent: usize,
    ) -> Result<StageResults<'a, RewriteRecord>, DataError> {
        let LocalRewriteCollector { prompts, journal, progress, failures, .. } = self.collector;
        let output = journal.output().to_owned();
        drop(journal);
        let (teacher, journal) = (LocalResults { name, failures, fallback }, Journal::open(&output)?);
        rewrite(self.rows, &teacher, prompts, journal, max_concurrent, progress).await
    }
}

impl LocalRewriteCollector<'_> {
    /// Records the result for the prompt at `index` of the current batch.
    ///
    /// # Errors
    /// The plugin broke its contract, or the journal cannot be written.
    ///
    /// # Panics
    /// `index` is out of range.
    pub fn take(&mut self, index: usize, result: Result<Completion, CallFailure>) -> Result<(), DataError> {
        let query = self.portion[index].clone();
        let rewrite = match result {
            Ok(completion) => parsed(completion, self.prompts)?,
            Err(failure) => Err(failure),
        };
        match rewrite {
            Ok(_) => drop(self.journal.append(&RewriteRecord { query, rewrite })?),
            Err(failure) => drop(self.failures.insert(hash_of(&query.id), failure)),
        }
        self.n_done += 1;
        let note = match self.failures.len() {
            0 => String::new(),
            n_failed => format!("{n_failed} failed"),
        };
        self.progress.update(self.n_done, self.n_total, &note);
        Ok(())
    }
}

fn is_done(journal: &Journal<RewriteRecord>, row: &QueryRow) -> bool {
    journal.earlier(hash_of(&row.id)).is_some()
}

/// The failures of the local model, as a teacher: successful rows are in the journal.
struct LocalResults {
    name: String,
    failures: HashMap<u64, CallFailure>,
    fallback: Option<Arc<dyn Teacher>>,
}

#[async_trait]
impl Teacher for LocalResults {
    async fn rewrite(&self, query: &QueryRow, _messages: &[Message]) -> Result<Completion, CallFailure> {
        let missing = || CallFailure { kind: FailureKind::InvalidResponse, message: "the model was not called".into() };
        Err(self.failures.get(&hash_of(&query.id)).cloned().unwrap_or_else(missing))
    }

    fn fallback(&self) -> Option<&dyn Teacher> {
        self.fallback.as_deref()
    }

    fn name(&self) -> &str {
        &self.name
    }
}
