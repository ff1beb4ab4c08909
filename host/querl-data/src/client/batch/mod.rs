//! OpenAI's batch API: prompts are uploaded in files, responses are downloaded in files, within a day and at a lower price.
//!
//! A batch is never paid for twice. The state file is written before and after each request: a stopped run resumes its batches, and
//! where the response to a creation request was lost, the service's list of batches is searched. A file that cannot be transferred
//! ends the stage; it never fails single rows.
//!
//! Source: OpenAI's reference of `files` and `batches`.

mod responses;
mod state;
mod submit;

pub(crate) use responses::BatchResponses;

use crate::client::chat::ChatClient;
use crate::client::context::ServiceContext;
use crate::client::http::{CallLimits, Caller, FileTransfer, Secret};
use crate::client::spend::{Reservation, SpendTracker};
use crate::error::DataError;
use querl_core::config::{CallsConfig, TeacherConfig};
use querl_core::fsx::digest_hex;
use querl_core::ports::Progress;
use querl_core::records::{CallFailure, FailureKind, Message};
use serde_json::{Value, json};
use state::{Batch, BatchState, key};
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use submit::PollLimits;

/// A teacher's batch interface.
pub struct BatchTeacher {
    client: ChatClient,
    files: FileTransfer,
    retrying: Caller,
    once: Caller,
    account: Arc<SpendTracker>,
    /// The name under which spend is counted; file transfers are counted separately.
    provider: String,
    price_factor: f64,
    poll: Duration,
    max_retries: usize,
    largest: FileLimits,
    poll_limits: PollLimits,
}

/// What one file may hold.
#[derive(Debug, Clone, Copy)]
struct FileLimits {
    n_rows: usize,
    n_bytes: usize,
}

impl FileLimits {
    /// The service's own limits: 50,000 requests and 200 MB.
    const OPENAI: Self = Self { n_rows: 50_000, n_bytes: 190_000_000 };
}

/// Whether prompts that are in no batch yet are submitted in one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewPrompts {
    /// They are submitted.
    Submit,
    /// They are left for single calls.
    Skip,
}

/// Prompts that are in batches already.
#[derive(Debug, Clone, Default)]
pub struct BatchedPrompts(HashSet<u64>);

impl BatchedPrompts {
    /// Whether this prompt is one of them.
    pub fn contains(&self, messages: &[Message]) -> bool {
        // A prompt is made into an id only where there is something to compare it with.
        !self.0.is_empty() && self.0.contains(&key(&prompt_id(messages)))
    }
}

/// A file of requests under construction.
#[derive(Default)]
struct BatchFile {
    ids: Vec<String>,
    text: String,
    most: f64,
    prompt_tokens: u64,
}

/// The batches of a stage: their state file and the reserved budget.
struct SubmittedBatches<'a> {
    path: &'a Path,
    note: BatchState,
    /// The highest cost of each batch, reserved until its responses are charged.
    reserved: Vec<Option<Reservation>>,
}

impl BatchTeacher {
    /// The batch interface of the teacher that the configuration names.
    ///
    /// # Errors
    /// The endpoint lacks an address, a model or its key.
    pub fn open(config: &TeacherConfig, services: &ServiceContext) -> Result<Self, DataError> {
        const SETTING: &str = "teacher.base_url";
        let endpoint = config.endpoint();
        let client = ChatClient::open("teacher", endpoint.clone(), services)?;
        let provider = format!("{} (batch)", client.provider());
        let of_files = format!("{provider} files");
        let key = Secret::open("teacher", endpoint.api_key_file.as_deref(), &endpoint.api_key_env)?;
        let base_url = endpoint.base_url.as_deref().unwrap_or_default().trim_end_matches('/');
        let limits = CallLimits::new(endpoint.max_concurrent, endpoint.timeout_s, endpoint.max_retries);
        // Without a circuit breaker: a service that is down for a while during a day is waited for.
        let patient = CallsConfig { breaker_failures: 0, ..services.config.clone() };
        let services = &services.reached_by(patient);
        let caller = |limits| {
            Ok::<_, DataError>(Caller::new(SETTING, base_url, key.clone(), limits, services)?.named(&of_files))
        };
        Ok(Self {
            files: FileTransfer::new(SETTING, base_url, key.clone(), limits, services, &of_files)?,
            retrying: caller(limits)?,
            once: caller(CallLimits { max_retries: 0, ..limits })?,
            account: services.account.clone(),
            provider,
            price_factor: config.batch_price_factor,
            poll: Duration::try_from_secs_f64(config.batch_poll_s).unwrap_or(Duration::from_secs(60)),
            max_retries: endpoint.max_retries,
            largest: FileLimits::OPENAI,
            poll_limits: PollLimits::default(),
            client,
        })
    }

    /// Whether the state file lists batches, which then must be awaited before any other call.
    ///
    /// # Errors
    /// They belong to another teacher or other settings, or the state file is invalid.
    pub fn has_batches(&self, state: &Path) -> Result<bool, DataError> {
        self.recorded_state(state).map(|note| !note.batches.is_empty())
    }

    /// The prompts of the batches in the state file: they are answered by those batches and not paid for again.
    ///
    /// # Errors
    /// As [`has_noted`](Self::has_noted).
    pub fn batched_prompts(&self, state: &Path) -> Result<BatchedPrompts, DataError> {
        Ok(BatchedPrompts(self.recorded_state(state)?.locations().into_keys().collect()))
    }

    fn recorded_state(&self, state: &Path) -> Result<BatchState, DataError> {
        let identity = digest_hex(self.client.identity().to_string().as_bytes());
        match BatchState::read(state)?.filter(|note| !note.batches.is_empty()) {
            // Written by an earlier version without an identity: assumed to be of this teacher.
            Some(note) if note.identity.is_empty() => Ok(BatchState { identity, ..note }),
            Some(note) if note.identity != identity => Err(wrong_teacher(state, &note)),
            Some(note) => Ok(note),
            None => Ok(BatchState { identity, batches: Vec::new() }),
        }
    }

    /// Submits the prompts that are in no batch yet, if `new` says so, and waits for the end of all batches. `state` is the state file.
    pub(crate) async fn run<'a>(
        &'a self,
        prompts: impl Iterator<Item = Result<Vec<Message>, DataError>>,
        new: NewPrompts,
        state: &'a Path,
        progress: &dyn Progress,
    ) -> Result<BatchResponses<'a>, DataError> {
        let note = self.recorded_state(state)?;
        if note.batches.iter().any(|batch| batch.n_rows == 0) {
            progress
                .line("batches of an earlier version are assumed to belong to this teacher with its current settings");
        }
        let earlier = note.batches.iter().map(|batch| (!batch.is_charged).then(|| self.account.hold(batch.most)));
        let mut submitted = SubmittedBatches { path: state, reserved: earlier.collect(), note };
        self.create_missing(&mut submitted).await?;
        if new == NewPrompts::Submit {
            self.submit_all(prompts, &mut submitted, progress).await?;
        }
        let n_rows: u64 = submitted.note.batches.iter().map(|batch| batch.ids.len() as u64).sum();
        let (mut n_ended, mut ended) = (0, Vec::new());
        for index in 0..submitted.note.batches.len() {
            let end = self.wait(&mut submitted, index, (n_ended, n_rows), progress).await?;
            ended.push(self.read(&mut submitted, index, &end, progress).await?);
            n_ended += submitted.note.batches[index].ids.len() as u64;
        }
        Ok(BatchResponses::new(self, state, submitted.note, ended))
    }

    async fn submit_all(
        &self,
        prompts: impl Iterator<Item = Result<Vec<Message>, DataError>>,
        submitted: &mut SubmittedBatches<'_>,
        progress: &dyn Progress,
    ) -> Result<(), DataError> {
        let mut known: HashSet<u64> = submitted.note.locations().into_keys().collect();
        let mut part = BatchFile::default();
        for messages in prompts {
            let messages = messages?;
            let id = prompt_id(&messages);
            // Rows with the same prompt share one request.
            if !known.insert(key(&id)) {
                continue;
            }
            let body = self.client.body(&messages);
            let line = json!({"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body});
            let line = format!("{line}\n");
            if part.ids.len() >= self.largest.n_rows || part.text.len() + line.len() > self.largest.n_bytes {
                self.submit_file(std::mem::take(&mut part), submitted, progress).await?;
            }
            let most_tokens = self.client.most_tokens(&messages);
            part.ids.push(id);
            part.text.push_str(&line);
            part.prompt_tokens += most_tokens.0;
            part.most += self.client.cost(most_tokens).unwrap_or(0.0) * self.price_factor;
        }
        match part.ids.is_empty() {
            true => Ok(()),
            false => self.submit_file(part, submitted, progress).await,
        }
    }

    /// SubmitOutcome at once: where the budget does not take the next one, the service has this one.
    async fn submit_file(
        &self,
        part: BatchFile,
        submitted: &mut SubmittedBatches<'_>,
        progress: &dyn Progress,
    ) -> Result<(), DataError> {
        let reserved = self.reserve(part.most, submitted, progress).await?;
        self.upload(part, reserved, submitted).await?;
        self.create_batch(submitted, submitted.note.batches.len() - 1).await
    }

    /// Reserves the highest cost of a batch. Where it does not fit, waits for the real costs of batches in flight, which are lower.
    async fn reserve(
        &self,
        most: f64,
        submitted: &mut SubmittedBatches<'_>,
        progress: &dyn Progress,
    ) -> Result<Reservation, DataError> {
        loop {
            let failure = match self.account.reserve_for_batch(most) {
                Ok(reserved) => return Ok(reserved),
                Err(failure) => failure,
            };
            let under_way = submitted.reserved.iter().position(Option::is_some);
            let index = under_way.ok_or(DataError::Service(failure))?;
            let n_rows = submitted.note.batches[index].ids.len() as u64;
            let end = self.wait(submitted, index, (0, n_rows), progress).await?;
            self.read(submitted, index, &end, progress).await?;
        }
    }

    async fn upload(
        &self,
        part: BatchFile,
        reserved: Reservation,
        submitted: &mut SubmittedBatches<'_>,
    ) -> Result<(), DataError> {
        let BatchFile { ids, text, most, prompt_tokens } = part;
        let not_sent =
            |failure: CallFailure| submitted.stopped(&format!("{} row(s) were not submitted: {failure}", ids.len()));
        let answer = self.files.upload("/files", &Arc::new(text)).await.map_err(not_sent)?;
        let file_id = self.text(&answer, "id").map_err(not_sent)?;
        let (uploaded_at, n_rows) = (uploaded_at(&answer, SystemTime::now()), ids.len());
        submitted.note.batches.push(Batch {
            file_id,
            uploaded_at,
            most,
            prompt_tokens,
            n_rows,
            ids,
            ..Batch::default()
        });
        submitted.reserved.push(Some(reserved));
        submitted.note.write(submitted.path)
    }

    fn text(&self, answer: &Value, key: &str) -> Result<String, CallFailure> {
        let missing = || self.failure(FailureKind::InvalidResponse, &format!("the answer has no `{key}`"));
        answer.get(key).and_then(Value::as_str).map(str::to_owned).ok_or_else(missing)
    }

    fn failure(&self, kind: FailureKind, what: &str) -> CallFailure {
        self.retrying.failure(kind, what)
    }
}

impl SubmittedBatches<'_> {
    fn change(&mut self, index: usize, change: impl FnOnce(&mut Batch)) -> Result<(), DataError> {
        change(&mut self.note.batches[index]);
        self.note.write(self.path)
    }

    fn drop_batch(&mut self, index: usize) -> Result<(), DataError> {
        self.note.batches.remove(index);
        self.reserved.remove(index);
        self.note.write(self.path)
    }

    fn stopped(&self, problem: &str) -> DataError {
        DataError::Batch { problem: problem.to_owned(), kept: self.kept() }
    }

    fn list_failed(&self, failure: &CallFailure) -> DataError {
        self.stopped(&format!("whether the service already has the batch is unknown: {failure}"))
    }

    fn kept(&self) -> String {
        if self.note.batches.is_empty() {
            return "the same command submits its rows again".into();
        }
        let (batches, path) = (self.note.describe(), self.path.display());
        format!(
            "still open: {batches}; run the same command to resume; removing {path} submits its rows, and may pay for them, again"
        )
    }
}

/// By the service's clock, in seconds since 1970; a day ago by ours where the response has no plausible time.
fn uploaded_at(answer: &Value, now: SystemTime) -> u64 {
    const DAY_S: u64 = 86_400;
    let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let created_at = answer["created_at"].as_u64().filter(|created_at| *created_at <= now.saturating_add(DAY_S));
    created_at.unwrap_or(now.saturating_sub(DAY_S))
}

/// Fails where the state file lists batches, for a teacher without the batch API.
///
/// # Errors
/// There are some, or the state file is invalid.
pub fn refuse_open_batches(state: &Path) -> Result<(), DataError> {
    match BatchState::read(state)?.filter(|note| !note.batches.is_empty()) {
        Some(note) => Err(wrong_teacher(state, &note)),
        None => Ok(()),
    }
}

fn wrong_teacher(state: &Path, note: &BatchState) -> DataError {
    let problem = format!(
        "submitted to another teacher, or with other settings of [teacher]: {}; go back to them, or cancel it at the service and remove this file",
        note.describe()
    );
    DataError::file(state, problem)
}

/// `custom_id` of a prompt: 32 hexadecimal digits of its digest, so that a prompt that changed between two runs has another one.
fn prompt_id(messages: &[Message]) -> String {
    digest_hex(serde_json::to_string(messages).unwrap_or_default().as_bytes())[..32].to_owned()
}

#[cfg(test)]
mod tests;
