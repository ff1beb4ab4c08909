//! Stage rewrite with a model in this process as teacher. A model answers many prompts at once, so it is handed rows in
//! portions, by who knows models.

use super::StageResults;
use super::rewrite::{messages, parsed, rewrite};
use crate::dataset::journal::Journal;
use crate::dataset::rows::{RowIter, Rows};
use crate::error::DataError;
use crate::text::hash_of;
use async_trait::async_trait;
use querl_core::ports::{Progress, Prompts, Teacher};
use querl_core::records::{CallFailure, Completion, FailureKind, Message, QueryRow, RewriteRecord};
use std::collections::HashMap;
use std::sync::Arc;

/// The rows that no earlier run has a rewrite of, on their way through a model.
pub struct LocalRewriteStage<'a> {
    rows: &'a dyn Rows<QueryRow>,
    left: RowIter<'a, QueryRow>,
    answers: LocalRewriteCollector<'a>,
}

/// What a model writes, a portion of rows at a time.
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
    /// Starts with the first row whose rewrite is not in `journal`.
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
        let answers = LocalRewriteCollector { prompts, journal, progress, portion, failures, n_done, n_total };
        Ok(Self { rows, left: rows.read()?, answers })
    }

    /// Prompts of the next rows, at most so many, and what takes the answers to them; no prompts at the end.
    ///
    /// # Errors
    /// The rows cannot be read, or the plugin broke its contract.
    pub fn portion(&mut self, n_most: usize) -> Result<(Vec<Vec<Message>>, &mut LocalRewriteCollector<'a>), DataError> {
        let answers = &mut self.answers;
        answers.portion.clear();
        while answers.portion.len() < n_most
            && let Some(row) = self.left.next()
        {
            let row = row?;
            if !is_done(&answers.journal, &row) {
                answers.portion.push(row);
            }
        }
        let prompts = answers.portion.iter().map(|row| messages(row, answers.prompts)).collect::<Result<_, _>>()?;
        Ok((prompts, answers))
    }

    /// Ends the stage; rows that the model failed on go to `fallback`, if there is one.
    ///
    /// # Errors
    /// As [`rewrite`](super::rewrite).
    pub async fn finish(
        self,
        name: String,
        fallback: Option<Arc<dyn Teacher>>,
        max_concurrent: usize,
    ) -> Result<StageResults<'a, QueryRow, RewriteRecord>, DataError> {
        let LocalRewriteCollector { prompts, journal, progress, failures, .. } = self.answers;
        let output = journal.output().to_owned();
        drop(journal);
        let (teacher, journal) = (LocalResults { name, failures, fallback }, Journal::open(&output)?);
        rewrite(self.rows, &teacher, prompts, journal, max_concurrent, progress).await
    }
}

impl LocalRewriteCollector<'_> {
    /// What came of the prompt with this place in the portion.
    ///
    /// # Errors
    /// The plugin broke its contract, or the journal cannot be written.
    ///
    /// # Panics
    /// The portion has no such place.
    pub fn take(&mut self, place: usize, answer: Result<Completion, CallFailure>) -> Result<(), DataError> {
        let query = self.portion[place].clone();
        let rewrite = match answer {
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

/// The model after it was asked: what is left is what it failed on.
struct LocalResults {
    name: String,
    failures: HashMap<u64, CallFailure>,
    fallback: Option<Arc<dyn Teacher>>,
}

#[async_trait]
impl Teacher for LocalResults {
    async fn rewrite(&self, query: &QueryRow, _messages: &[Message]) -> Result<Completion, CallFailure> {
        let unasked = || CallFailure { kind: FailureKind::InvalidResponse, message: "the model was not asked".into() };
        Err(self.failures.get(&hash_of(&query.id)).cloned().unwrap_or_else(unasked))
    }

    fn fallback(&self) -> Option<&dyn Teacher> {
        self.fallback.as_deref()
    }

    fn name(&self) -> &str {
        &self.name
    }
}
