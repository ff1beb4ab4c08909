//! Stage rewrite: the teacher rewrites each query.

use super::{Asked, Outcome, Work, ask_all, context};
use crate::error::DataError;
use crate::journal::{Answered, Journal};
use crate::rows::Rows;
use crate::text::hash_of;
use querl_core::ports::{Progress, PromptInput, PromptTask, Prompts, Teacher};
use querl_core::records::{CallFailure, Completion, FailureKind, QueryRow, RewriteRecord};

/// Asks the teacher for a rewrite of each row. Rows of which `journal` knows a rewrite are not asked again; failed ones are.
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
) -> Result<Asked<'a, QueryRow, RewriteRecord>, DataError> {
    ask_all(&Rewriting { teacher, prompts }, rows, journal, max_concurrent, progress).await
}

impl Answered for RewriteRecord {
    fn key(&self) -> Option<u64> {
        self.rewrite.is_ok().then(|| hash_of(&self.query.id))
    }
}

struct Rewriting<'a> {
    teacher: &'a dyn Teacher,
    prompts: &'a dyn Prompts,
}

impl Work for Rewriting<'_> {
    type Row = QueryRow;
    type Record = RewriteRecord;

    fn key(row: &QueryRow) -> Option<u64> {
        Some(hash_of(&row.id))
    }

    async fn ask(&self, query: QueryRow) -> Result<RewriteRecord, DataError> {
        let context = context(&query);
        let input = PromptInput { query: &query.original_query, context: &context, rewrite: None };
        let messages = self.prompts.messages(PromptTask::TeacherRewrite, &input)?;
        let rewrite = match self.teacher.rewrite(&query, &messages).await {
            Ok(completion) => parsed(completion, self.prompts)?,
            Err(failure) => Err(failure),
        };
        Ok(RewriteRecord { query, rewrite })
    }

    fn outcome(record: &RewriteRecord) -> Outcome<'_> {
        Some(record.rewrite.as_ref().map(|_| ()))
    }

    /// Every row is asked, so that every row is answered: where the table numbers or groups it anew, the answer stays.
    fn record(query: QueryRow, answered: Option<RewriteRecord>) -> RewriteRecord {
        let missing =
            || CallFailure { kind: FailureKind::InvalidResponse, message: "the teacher was not asked".into() };
        RewriteRecord { query, rewrite: answered.map_or_else(|| Err(missing()), |record| record.rewrite) }
    }
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
