//! OpenAI's batch interface: all prompts in files, all answers in others, within a day and at a lower price.
//!
//! What was handed over is noted after each step, so that a run that is stopped takes up its batches again instead of paying
//! for others. Between the service's taking a batch and our noting it a kill may fall: the service's list of batches is then
//! looked through for one that has our file.
//!
//! Source: OpenAI's reference of `files` and `batches`.

mod answers;
mod note;

pub(crate) use answers::BatchAnswers;

use crate::account::{Account, Bill, Reservation};
use crate::calls::{Call, CallLimits, Caller, Charge, Secret};
use crate::chat::ChatClient;
use crate::error::DataError;
use crate::outside::Outside;
use note::{Batch, Note, key};
use querl_core::config::TeacherConfig;
use querl_core::fsx::digest_hex;
use querl_core::ports::Progress;
use querl_core::records::{CallFailure, Completion, FailureKind, Message};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The service's own limits: 50,000 requests and 200 MB a file.
const MOST_ROWS: usize = 50_000;
const MOST_BYTES: usize = 190_000_000;

/// A teacher's batch interface.
pub struct BatchTeacher {
    client: ChatClient,
    files: Caller,
    account: Arc<Account>,
    provider: String,
    price_factor: f64,
    poll: Duration,
}

/// An answer is paid for once, however many rows have its question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    First,
    Again,
}

/// A file that is being made.
#[derive(Default)]
struct Part {
    ids: Vec<String>,
    text: String,
    most: f64,
}

impl Part {
    fn has_room_for(&self, line: &str) -> bool {
        self.ids.len() < MOST_ROWS && self.text.len() + line.len() <= MOST_BYTES
    }
}

impl BatchTeacher {
    /// The batch interface of the teacher that the configuration names.
    ///
    /// # Errors
    /// The endpoint lacks an address, a model or its key.
    pub fn open(config: &TeacherConfig, outside: &Outside) -> Result<Self, DataError> {
        let endpoint = config.endpoint();
        let client = ChatClient::open("teacher", endpoint.clone(), outside)?;
        let provider = format!("{} (batch)", client.provider());
        let key = Secret::open("teacher", endpoint.api_key_file.as_deref(), &endpoint.api_key_env)?;
        let base_url = endpoint.base_url.as_deref().unwrap_or_default().trim_end_matches('/');
        let limits = CallLimits::new(endpoint.max_concurrent, endpoint.timeout_s, endpoint.max_retries);
        // What carries the questions is counted by itself, so that `calls` of the batch are its answers.
        let files =
            Caller::new("teacher.base_url", base_url, key, limits, outside)?.named(&format!("{provider} files"));
        let poll = Duration::try_from_secs_f64(config.batch_poll_s).unwrap_or(Duration::from_secs(60));
        let account = outside.account.clone();
        Ok(Self { client, files, account, provider, price_factor: config.batch_price_factor, poll })
    }

    /// Hands the prompts over that are in no batch yet, and waits for the end of all batches. `state` notes what was handed
    /// over.
    ///
    /// # Errors
    /// The service refuses a batch, the budget would not cover it, or the note cannot be written.
    pub(crate) async fn ask(
        &self,
        prompts: impl Iterator<Item = Result<Vec<Message>, DataError>>,
        state: &Path,
        progress: &dyn Progress,
    ) -> Result<BatchAnswers<'_>, DataError> {
        let mut note = Note::read(state)?;
        let n_known = note.batches.len();
        let earlier = note.batches.iter().map(|batch| self.account.hold(batch.most));
        let mut reserved: Vec<Reservation> = earlier.collect();
        self.hand_over(prompts, &mut note, state, &mut reserved).await?;
        for index in 0..note.batches.len() {
            if note.batches[index].batch_id.is_some() {
                continue;
            }
            let file_id = note.batches[index].file_id.clone();
            let begun = if index < n_known { self.begun_earlier(&file_id).await? } else { None };
            let begun = if begun.is_some() { begun } else { Some(self.begin(&file_id).await?) };
            note.batches[index].batch_id = begun;
            note.write(state)?;
        }
        let ended = self.wait_for_all(&mut note, state, progress).await?;
        Ok(BatchAnswers::new(self, state, note, ended, reserved))
    }

    /// Uploads files of the service's size. One of them at a time is in memory.
    async fn hand_over(
        &self,
        prompts: impl Iterator<Item = Result<Vec<Message>, DataError>>,
        note: &mut Note,
        state: &Path,
        reserved: &mut Vec<Reservation>,
    ) -> Result<(), DataError> {
        let mut known: HashSet<u64> = note.places().into_keys().collect();
        let mut part = Part::default();
        for messages in prompts {
            let messages = messages?;
            let id = question_id(&messages);
            // Of rows with the same prompt one is asked for all of them.
            if !known.insert(key(&id)) {
                continue;
            }
            let body = self.client.body(&messages);
            let line = json!({"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body});
            let line = format!("{line}\n");
            if !part.has_room_for(&line) {
                self.upload(std::mem::take(&mut part), note, state, reserved).await?;
            }
            part.ids.push(id);
            part.text.push_str(&line);
            part.most += self.client.cost(self.client.most_tokens(&messages)).unwrap_or(0.0) * self.price_factor;
        }
        match part.ids.is_empty() {
            true => Ok(()),
            false => self.upload(part, note, state, reserved).await,
        }
    }

    async fn upload(
        &self,
        part: Part,
        note: &mut Note,
        state: &Path,
        reserved: &mut Vec<Reservation>,
    ) -> Result<(), DataError> {
        reserved.push(self.account.reserve_for_batch(part.most).map_err(DataError::Service)?);
        let answer = self.call(&Call::upload("/files", part.text.as_bytes())).await.map_err(DataError::Service)?;
        let file_id = self.text(&answer, "id")?;
        note.batches.push(Batch { file_id, batch_id: None, most: part.most, ids: part.ids });
        note.write(state)
    }

    /// The batch over a file of an earlier process, if the service took it.
    async fn begun_earlier(&self, file_id: &str) -> Result<Option<String>, DataError> {
        let known = self.call(&Call::get("/batches?limit=100")).await.map_err(DataError::Service)?;
        let known = known.pointer("/data").and_then(Value::as_array).into_iter().flatten();
        let ours = known.into_iter().find(|batch| batch["input_file_id"] == file_id);
        ours.map(|batch| self.text(batch, "id")).transpose()
    }

    async fn begin(&self, file_id: &str) -> Result<String, DataError> {
        let body = json!({"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"});
        let answer = self.call(&Call::post("/batches", &body)).await.map_err(DataError::Service)?;
        self.text(&answer, "id")
    }

    /// What the service says of each batch once it is at its end.
    async fn wait_for_all(
        &self,
        note: &mut Note,
        state: &Path,
        progress: &dyn Progress,
    ) -> Result<Vec<Value>, DataError> {
        let n_rows: u64 = note.batches.iter().map(|batch| batch.ids.len() as u64).sum();
        let (mut ended, mut n_ended) = (Vec::new(), 0);
        for index in 0..note.batches.len() {
            let id = note.batches[index].batch_id.clone().unwrap_or_default();
            let end = self.wait(&id, |n_done, status| {
                progress.update(n_ended + n_done, n_rows, &format!("batch {id} {status}"));
            });
            match end.await {
                Ok(end) => ended.push(end),
                Err(error) => {
                    // A batch that failed is handed over anew by the next run; one that could not be asked about is not.
                    if matches!(&error, DataError::Service(CallFailure { kind: FailureKind::Rejected, .. })) {
                        note.batches.remove(index);
                        note.write(state)?;
                    }
                    return Err(error);
                }
            }
            n_ended += note.batches[index].ids.len() as u64;
        }
        Ok(ended)
    }

    async fn wait(&self, id: &str, say: impl Fn(u64, &str)) -> Result<Value, DataError> {
        loop {
            let now = self.call(&Call::get(&format!("/batches/{id}"))).await.map_err(DataError::Service)?;
            let status = self.text(&now, "status")?;
            say(now.pointer("/request_counts/completed").and_then(Value::as_u64).unwrap_or(0), &status);
            match status.as_str() {
                "completed" | "expired" | "cancelled" => return Ok(now),
                "failed" => {
                    let said = now.pointer("/errors/data/0/message").and_then(Value::as_str).unwrap_or("no message");
                    let failure = self.failure(FailureKind::Rejected, &format!("batch {id} failed: {said}"));
                    return Err(DataError::Service(failure));
                }
                _ => tokio::time::sleep(self.poll).await,
            }
        }
    }

    /// One line of an output file.
    fn answer(&self, messages: &[Message], line: &str, used: Use) -> Result<Completion, CallFailure> {
        let Some(body) = answered_body(line) else {
            return Err(self.failure(FailureKind::Rejected, &refusal(line)));
        };
        let mut usage = self.client.usage(messages, &body);
        usage.cost = usage.cost.map(|cost| cost * self.price_factor);
        match used {
            Use::First => {
                let mut bill = Bill::new(&self.account, &self.provider);
                bill.sent();
                bill.answered();
                bill.charged(usage);
            }
            Use::Again => self.account.count_joined(&self.provider),
        }
        self.client.completion(&body, usage, None).map_err(|what| self.failure(FailureKind::InvalidResponse, &what))
    }

    async fn call(&self, call: &Call<'_>) -> Result<Value, CallFailure> {
        self.files.call(call, Charge::FREE).await.map(|answer| answer.body)
    }

    fn text(&self, answer: &Value, key: &str) -> Result<String, DataError> {
        let missing =
            || DataError::Service(self.failure(FailureKind::InvalidResponse, &format!("the answer has no `{key}`")));
        answer.get(key).and_then(Value::as_str).map(str::to_owned).ok_or_else(missing)
    }

    fn failure(&self, kind: FailureKind, what: &str) -> CallFailure {
        self.files.failure(kind, what)
    }
}

/// Comes back with the answer: 32 characters. Made of the prompt, so that a prompt that changed between two runs is another question.
fn question_id(messages: &[Message]) -> String {
    digest_hex(serde_json::to_string(messages).unwrap_or_default().as_bytes())[..32].to_owned()
}

/// The chat completion in a line; `None` where the service refused the row.
fn answered_body(line: &str) -> Option<Value> {
    let mut line: Value = serde_json::from_str(line).ok()?;
    let status = line.pointer("/response/status_code").and_then(Value::as_u64);
    line.pointer_mut("/response/body").filter(|_| status == Some(200)).map(Value::take)
}

fn refusal(line: &str) -> String {
    let line: Value = serde_json::from_str(line).unwrap_or_default();
    let status = line.pointer("/response/status_code").and_then(Value::as_u64).unwrap_or(0);
    let said = ["/response/body/error/message", "/error/message"].iter().find_map(|at| line.pointer(at)?.as_str());
    format!("answered {status}: {}", said.unwrap_or("no message"))
}

#[cfg(test)]
mod tests;
