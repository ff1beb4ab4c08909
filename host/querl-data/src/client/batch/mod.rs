//! Client of OpenAI's batch API: prompts are uploaded in files, and responses are downloaded within a day, at a lower price than single
//! calls.
//!
//! A batch is never paid for twice. The state file is written before and after each request: a stopped run resumes its batches, and
//! where the response to a creation request was lost, the service's list of batches is searched. A file that cannot be transferred
//! ends the stage; it never fails single rows.
//!
//! Source: OpenAI's reference of `files` and `batches`.

mod responses;
mod submit;

pub(crate) use responses::BatchResponses;

use crate::client::ServiceContext;
use crate::client::chat::ChatClient;
use crate::client::http::{CallLimits, Caller, FileTransfer, Secret};
use crate::client::spend::{Reservation, SpendTracker};
use crate::error::DataError;
use crate::text::hash_of;
use querl_core::config::{CallsConfig, TeacherConfig};
use querl_core::fsx::{digest_hex, read_bounded};
use querl_core::ports::Progress;
use querl_core::records::{CallFailure, FailureKind, Message};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use submit::PollLimits;

/// Teacher that is called by the batch API of an OpenAI-compatible endpoint.
pub struct BatchTeacher {
    client: ChatClient,
    files: FileTransfer,
    retrying: Caller,
    once: Caller,
    tracker: Arc<SpendTracker>,
    /// The name under which spend is counted; file transfers are counted separately.
    provider: String,
    price_factor: f64,
    poll: Duration,
    max_retries: usize,
    file_limits: FileLimits,
    poll_limits: PollLimits,
}

/// Maximum size of the state file, which has 20 bytes for each prompt.
const MAX_STATE_BYTES: u64 = 1 << 30;

/// Maximum size of one file of requests.
#[derive(Debug, Clone, Copy)]
struct FileLimits {
    n_rows: usize,
    n_bytes: usize,
}

impl FileLimits {
    /// The limits of OpenAI are 50,000 requests and 200 MB.
    const OPENAI: Self = Self { n_rows: 50_000, n_bytes: 190_000_000 };
}

/// What happens to prompts that are in no submitted batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewPrompts {
    /// The prompts are submitted in new batches.
    Submit,
    /// The prompts are not submitted; the caller requests them one by one.
    Skip,
}

/// The prompts that are in submitted batches, as hashes of their ids.
#[derive(Debug, Clone, Default)]
pub struct BatchedPrompts(HashSet<u64>);

impl BatchedPrompts {
    /// True if a batch contains this prompt.
    pub fn contains(&self, messages: &[Message]) -> bool {
        !self.0.is_empty() && self.0.contains(&hash_of(&prompt_id(messages)))
    }
}

/// A file of requests under construction.
#[derive(Default)]
struct BatchFile {
    ids: Vec<String>,
    text: String,
    max_cost: f64,
    prompt_tokens: u64,
}

/// The batches of a stage: their state file and the reserved budget.
struct SubmittedBatches<'a> {
    path: &'a Path,
    state: BatchState,
    /// The maximum cost of each batch, reserved until its responses are charged.
    reserved: Vec<Option<Reservation>>,
}

impl BatchTeacher {
    /// Opens the batch API of the configured teacher; sends no request.
    ///
    /// # Errors
    /// The endpoint lacks an address, a model or its key.
    pub fn open(config: &TeacherConfig, services: &ServiceContext) -> Result<Self, DataError> {
        const SETTING: &str = "teacher.base_url";
        let endpoint = config.endpoint();
        let client = ChatClient::open("teacher", endpoint.clone(), services)?;
        let provider = format!("{} (batch)", client.provider());
        let of_files = format!("{provider} files");
        let key = Secret::open(services, "teacher", endpoint.api_key_file.as_deref(), &endpoint.api_key_env)?;
        let base_url = endpoint.base_url.as_deref().unwrap_or_default().trim_end_matches('/');
        let limits = CallLimits::new(endpoint.max_concurrent, endpoint.timeout_s, endpoint.max_retries);
        // No circuit breaker: a batch takes up to a day, in which the service may be unavailable for a while.
        let patient = CallsConfig { breaker_failures: 0, ..services.config.clone() };
        let services = &services.with_config(patient);
        let caller = |limits| {
            Ok::<_, DataError>(Caller::new(SETTING, base_url, key.clone(), limits, services)?.named(&of_files))
        };
        Ok(Self {
            files: FileTransfer::new(SETTING, base_url, key.clone(), limits, services, &of_files)?,
            retrying: caller(limits)?,
            once: caller(CallLimits { max_retries: 0, ..limits })?,
            tracker: services.tracker.clone(),
            provider,
            price_factor: config.batch_price_factor,
            poll: Duration::try_from_secs_f64(config.batch_poll_s).unwrap_or(Duration::from_secs(60)),
            max_retries: endpoint.max_retries,
            file_limits: FileLimits::OPENAI,
            poll_limits: PollLimits::default(),
            client,
        })
    }

    /// True if the state file at `path` lists batches; their responses must be awaited before any other call.
    ///
    /// # Errors
    /// The batches belong to another teacher or other settings, or the state file is invalid.
    pub fn has_batches(&self, path: &Path) -> Result<bool, DataError> {
        self.read_state(path).map(|state| !state.batches.is_empty())
    }

    /// The prompts of the batches in the state file at `path`; they are not requested again, since their batches are paid for.
    ///
    /// # Errors
    /// As [`has_batches`](Self::has_batches).
    pub fn batched_prompts(&self, path: &Path) -> Result<BatchedPrompts, DataError> {
        Ok(BatchedPrompts(self.read_state(path)?.locations().into_keys().collect()))
    }

    fn read_state(&self, path: &Path) -> Result<BatchState, DataError> {
        let identity = digest_hex(self.client.identity().to_string().as_bytes());
        match BatchState::read(path)? {
            // Written by an earlier version without an identity: assumed to be of this teacher.
            Some(state) if state.identity.is_empty() => Ok(BatchState { identity, ..state }),
            Some(state) if state.identity != identity => Err(wrong_teacher(path, &state)),
            Some(state) => Ok(state),
            None => Ok(BatchState { identity, batches: Vec::new() }),
        }
    }

    /// Submits the prompts that are in no batch yet, unless `new` is `Skip`, and waits until all batches have ended. `path` is the state
    /// file.
    pub(crate) async fn run<'a>(
        &'a self,
        prompts: impl Iterator<Item = Result<Vec<Message>, DataError>>,
        new: NewPrompts,
        path: &'a Path,
        progress: &dyn Progress,
    ) -> Result<BatchResponses<'a>, DataError> {
        let state = self.read_state(path)?;
        if state.batches.iter().any(|batch| batch.n_rows == 0) {
            progress
                .line("batches of an earlier version are assumed to belong to this teacher with its current settings");
        }
        let earlier = state.batches.iter().map(|batch| (!batch.is_charged).then(|| self.tracker.hold(batch.max_cost)));
        let mut submitted = SubmittedBatches { path, reserved: earlier.collect(), state };
        self.create_missing(&mut submitted).await?;
        if new == NewPrompts::Submit {
            self.submit_all(prompts, &mut submitted, progress).await?;
        }
        let n_rows: u64 = submitted.state.batches.iter().map(|batch| batch.ids.len() as u64).sum();
        let (mut n_ended, mut ended) = (0, Vec::new());
        for index in 0..submitted.state.batches.len() {
            let end = self.wait(&mut submitted, index, (n_ended, n_rows), progress).await?;
            ended.push(self.read(&mut submitted, index, &end, progress).await?);
            n_ended += submitted.state.batches[index].ids.len() as u64;
        }
        Ok(BatchResponses::new(self, path, submitted.state, ended))
    }

    async fn submit_all(
        &self,
        prompts: impl Iterator<Item = Result<Vec<Message>, DataError>>,
        submitted: &mut SubmittedBatches<'_>,
        progress: &dyn Progress,
    ) -> Result<(), DataError> {
        let mut known: HashSet<u64> = submitted.state.locations().into_keys().collect();
        let mut file = BatchFile::default();
        for messages in prompts {
            let messages = messages?;
            let id = prompt_id(&messages);
            // Rows with the same prompt share one request.
            if !known.insert(hash_of(&id)) {
                continue;
            }
            let body = self.client.body(&messages);
            let line = json!({"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body});
            let line = format!("{line}\n");
            let FileLimits { n_rows, n_bytes } = self.file_limits;
            if file.ids.len() >= n_rows || file.text.len() + line.len() > n_bytes {
                self.submit_file(std::mem::take(&mut file), submitted, progress).await?;
            }
            let most_tokens = self.client.most_tokens(&messages);
            file.ids.push(id);
            file.text.push_str(&line);
            file.prompt_tokens += most_tokens.0;
            file.max_cost += self.client.cost(most_tokens).unwrap_or(0.0) * self.price_factor;
        }
        if file.ids.is_empty() { Ok(()) } else { self.submit_file(file, submitted, progress).await }
    }

    /// Uploads a file and creates its batch at once, before the budget is reserved for the next file.
    async fn submit_file(
        &self,
        file: BatchFile,
        submitted: &mut SubmittedBatches<'_>,
        progress: &dyn Progress,
    ) -> Result<(), DataError> {
        let reserved = self.reserve(file.max_cost, submitted, progress).await?;
        let BatchFile { ids, text, max_cost, prompt_tokens } = file;
        let not_sent =
            |failure: CallFailure| submitted.stopped(&format!("{} row(s) were not submitted: {failure}", ids.len()));
        let response = self.files.upload("/files", &Arc::new(text)).await.map_err(not_sent)?;
        let file_id = self.text(&response, "id").map_err(not_sent)?;
        let (uploaded_at, n_rows) = (uploaded_at(&response, SystemTime::now()), ids.len());
        let batch = Batch { file_id, uploaded_at, max_cost, prompt_tokens, n_rows, ids, ..Batch::default() };
        submitted.state.batches.push(batch);
        submitted.reserved.push(Some(reserved));
        submitted.state.write(submitted.path)?;
        self.create_batch(submitted, submitted.state.batches.len() - 1).await
    }

    /// Reserves the maximum cost of a batch. If the budget does not cover it, waits for the real costs of batches in flight.
    async fn reserve(
        &self,
        max_cost: f64,
        submitted: &mut SubmittedBatches<'_>,
        progress: &dyn Progress,
    ) -> Result<Reservation, DataError> {
        loop {
            let failure = match self.tracker.reserve_for_batch(max_cost) {
                Ok(reserved) => return Ok(reserved),
                Err(failure) => failure,
            };
            let in_flight = submitted.reserved.iter().position(Option::is_some);
            let index = in_flight.ok_or(DataError::Service(failure))?;
            let n_rows = submitted.state.batches[index].ids.len() as u64;
            let end = self.wait(submitted, index, (0, n_rows), progress).await?;
            self.read(submitted, index, &end, progress).await?;
        }
    }

    fn text(&self, response: &Value, key: &str) -> Result<String, CallFailure> {
        let missing = || self.failure(FailureKind::InvalidResponse, &format!("the answer has no `{key}`"));
        response.get(key).and_then(Value::as_str).map(str::to_owned).ok_or_else(missing)
    }

    fn failure(&self, kind: FailureKind, what: &str) -> CallFailure {
        self.retrying.failure(kind, what)
    }
}

impl SubmittedBatches<'_> {
    fn change(&mut self, index: usize, change: impl FnOnce(&mut Batch)) -> Result<(), DataError> {
        change(&mut self.state.batches[index]);
        self.state.write(self.path)
    }

    fn drop_batch(&mut self, index: usize) -> Result<(), DataError> {
        self.state.batches.remove(index);
        self.reserved.remove(index);
        self.state.write(self.path)
    }

    fn stopped(&self, problem: &str) -> DataError {
        DataError::Batch { problem: problem.to_owned(), remedy: self.remedy() }
    }

    fn list_failed(&self, failure: &CallFailure) -> DataError {
        self.stopped(&format!("whether the service already has the batch is unknown: {failure}"))
    }

    fn remedy(&self) -> String {
        if self.state.batches.is_empty() {
            return "the same command submits its rows again".into();
        }
        let (batches, path) = (self.state.describe(), self.path.display());
        format!(
            "still open: {batches}; run the same command to resume; removing {path} submits its rows, and may pay for them, again"
        )
    }
}

/// All batches of a stage.
#[derive(Debug, Default, Serialize, Deserialize)]
struct BatchState {
    /// Digest of endpoint and request parameters; empty in a file of an earlier version.
    #[serde(default)]
    identity: String,
    batches: Vec<Batch>,
}

/// One uploaded file and its batch. State files of earlier versions lack some fields: a batch in flight is paid for, whichever version
/// submitted it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Batch {
    file_id: String,
    #[serde(default)]
    uploaded_at: u64,
    #[serde(default = "once")]
    n_unknown: u32,
    #[serde(default)]
    n_lost: u32,
    /// Id of the batch at the service; `None` until the service is known to have created it.
    batch_id: Option<String>,
    #[serde(default, rename = "most")]
    max_cost: f64,
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    is_charged: bool,
    /// Rows that were submitted; `ids` loses those without a response. 0 where unknown.
    #[serde(default)]
    n_rows: usize,
    ids: Vec<String>,
}

fn once() -> u32 {
    1
}

impl BatchState {
    /// The state at `path`; `None` without a file or without batches.
    fn read(path: &Path) -> Result<Option<Self>, DataError> {
        match read_bounded(path, MAX_STATE_BYTES) {
            Ok(bytes) => match serde_json::from_slice::<Self>(&bytes) {
                Ok(state) => Ok(Some(state).filter(|state| !state.batches.is_empty())),
                Err(error) => {
                    let remedy = "remove the file to submit all rows again";
                    Err(DataError::file(path, format!("not a state file of batches: {error}; {remedy}")))
                }
            },
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(DataError::read(path, error)),
        }
    }

    /// Writes the file, or removes it if there are no batches.
    fn write(&self, path: &Path) -> Result<(), DataError> {
        if self.batches.is_empty() {
            return match std::fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(DataError::write(path, error)),
                _ => Ok(()),
            };
        }
        let bytes = serde_json::to_vec(self).map_err(|error| DataError::write(path, error.into()))?;
        querl_core::fsx::write_atomic(path, &bytes).map_err(|error| DataError::write(path, error))
    }

    /// The batch index of each prompt, by the hash of its id; if there are two, the later one.
    fn locations(&self) -> HashMap<u64, usize> {
        let batches = self.batches.iter().enumerate();
        batches.flat_map(|(index, batch)| batch.ids.iter().map(move |id| (hash_of(id), index))).collect()
    }

    fn describe(&self) -> String {
        let name = |batch: &Batch| batch.batch_id.clone().unwrap_or_else(|| format!("over file {}", batch.file_id));
        let names: Vec<String> = self.batches.iter().take(3).map(name).collect();
        let more = self.batches.len().saturating_sub(names.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("batch {}{more}", names.join(", "))
    }
}

/// Upload time by the service's clock, in seconds since 1970; a day ago if the response has no plausible time.
fn uploaded_at(response: &Value, now: SystemTime) -> u64 {
    const DAY_S: u64 = 86_400;
    let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let created_at = response["created_at"].as_u64().filter(|created_at| *created_at <= now.saturating_add(DAY_S));
    created_at.unwrap_or(now.saturating_sub(DAY_S))
}

/// Fails if the state file at `path` lists batches: their responses would be lost with a teacher that does not use the batch API.
///
/// # Errors
/// The state file lists batches, or is invalid.
pub fn refuse_open_batches(path: &Path) -> Result<(), DataError> {
    match BatchState::read(path)? {
        Some(state) => Err(wrong_teacher(path, &state)),
        None => Ok(()),
    }
}

fn wrong_teacher(path: &Path, state: &BatchState) -> DataError {
    let problem = format!(
        "submitted to another teacher, or with other settings of [teacher]: {}; go back to them, or cancel it at the service and remove this file",
        state.describe()
    );
    DataError::file(path, problem)
}

/// `custom_id` of a prompt: the first 32 hexadecimal digits of its digest.
fn prompt_id(messages: &[Message]) -> String {
    digest_hex(serde_json::to_string(messages).unwrap_or_default().as_bytes())[..32].to_owned()
}

#[cfg(test)]
mod tests;
