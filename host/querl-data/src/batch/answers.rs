//! Answers of batches at their end, read a batch at a time.

use super::note::{Note, key};
use super::{BatchTeacher, Use, question_id};
use crate::account::Reservation;
use crate::calls::Call;
use crate::error::DataError;
use querl_core::records::{CallFailure, Completion, FailureKind, Message};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use tokio::sync::Mutex;

/// What batches answered. One of them is in memory: rows are asked in the order in which they were handed over.
pub(crate) struct BatchAnswers<'a> {
    teacher: &'a BatchTeacher,
    path: PathBuf,
    note: Note,
    /// What the service says of each.
    ended: Vec<Value>,
    places: HashMap<u64, usize>,
    read: Mutex<Read>,
}

struct Read {
    batch: Option<usize>,
    /// Lines of its files by the question's id.
    lines: HashMap<String, String>,
    /// Questions whose answer stands on the account.
    charged: HashSet<u64>,
    /// Questions of all that was read so far without an answer that is of use.
    failed: HashSet<u64>,
    /// Until a batch is read, the most that it may have cost is.
    reserved: Vec<Option<Reservation>>,
}

impl<'a> BatchAnswers<'a> {
    pub(super) fn new(
        teacher: &'a BatchTeacher,
        path: &Path,
        note: Note,
        ended: Vec<Value>,
        reserved: Vec<Reservation>,
    ) -> Self {
        let reserved = reserved.into_iter().map(Some).collect();
        let read =
            Read { batch: None, lines: HashMap::new(), charged: HashSet::new(), failed: HashSet::new(), reserved };
        let places = note.places();
        Self { teacher, path: path.to_owned(), note, ended, places, read: Mutex::new(read) }
    }

    /// The answer to a prompt; `None` where it is in no batch.
    ///
    /// # Errors
    /// The files of its batch cannot be read.
    pub(crate) async fn of(
        &self,
        messages: &[Message],
    ) -> Result<Option<Result<Completion, CallFailure>>, CallFailure> {
        let id = question_id(messages);
        let Some(index) = self.places.get(&key(&id)).copied() else { return Ok(None) };
        let mut read = self.read.lock().await;
        if read.batch != Some(index) {
            self.read(index, &mut read).await?;
        }
        let is_first = read.charged.insert(key(&id));
        Ok(Some(match read.lines.get(&id) {
            Some(line) => self.teacher.answer(messages, line, if is_first { Use::First } else { Use::Again }),
            None => Err(self.missing(index)),
        }))
    }

    /// Takes questions without an answer out of the note, so that the next run hands them over anew.
    ///
    /// # Errors
    /// The note cannot be written.
    pub(crate) fn settle(mut self) -> Result<(), DataError> {
        let failed = self.read.into_inner().failed;
        for batch in &mut self.note.batches {
            batch.ids.retain(|id| !failed.contains(&key(id)));
        }
        self.note.batches.retain(|batch| !batch.ids.is_empty());
        self.note.write(&self.path)
    }

    /// Reads both files of a batch. What is in neither has no answer.
    async fn read(&self, index: usize, read: &mut Read) -> Result<(), CallFailure> {
        let mut lines = HashMap::new();
        for name in ["output_file_id", "error_file_id"] {
            let file_id = self.ended[index].get(name).and_then(Value::as_str).filter(|id| !id.is_empty());
            let Some(file_id) = file_id else { continue };
            let file = self.teacher.call(&Call::get_file(&format!("/files/{file_id}/content"))).await?;
            for line in file.as_str().unwrap_or_default().lines() {
                let parsed: Option<Value> = serde_json::from_str(line).ok();
                if let Some(id) = parsed.as_ref().and_then(|line| line["custom_id"].as_str()) {
                    lines.insert(id.to_owned(), line.to_owned());
                }
            }
        }
        let ids = self.note.batches[index].ids.iter();
        let without = ids.filter(|id| lines.get(*id).is_none_or(|line| super::answered_body(line).is_none()));
        read.failed.extend(without.map(|id| key(id)));
        // From here on each answer stands on the account by itself.
        read.reserved[index] = None;
        (read.batch, read.lines) = (Some(index), lines);
        Ok(())
    }

    fn missing(&self, index: usize) -> CallFailure {
        let status = self.ended[index]["status"].as_str().unwrap_or_default();
        self.teacher.failure(FailureKind::Timeout, &format!("batch {status} without an answer to this row"))
    }
}
