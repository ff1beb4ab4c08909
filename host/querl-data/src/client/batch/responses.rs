//! Downloads and reads the responses of ended batches. The spend of all files is counted before any row gets a response.

use super::{Batch, BatchState, BatchTeacher, FileLimits, SubmittedBatches, prompt_id};
use crate::client::spend::{Spend, Usage};
use crate::error::DataError;
use crate::text::hash_of;
use querl_core::fsx::{MAX_LINE_BYTES, io_problem};
use querl_core::ports::Progress;
use querl_core::records::{CallFailure, Completion, FailureKind, Message};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Maximum number of downloads of a file with unexpected content, which may have been truncated.
const READ_ATTEMPTS: usize = 3;

/// The responses of all batches of a stage: the offset of each in memory, the downloaded files as unnamed temporary files.
pub(crate) struct BatchResponses<'a> {
    teacher: &'a BatchTeacher,
    path: &'a Path,
    state: BatchState,
    ended: Vec<EndedBatch>,
    locations: HashMap<u64, usize>,
    returned: Mutex<HashSet<u64>>,
}

pub(super) struct EndedBatch {
    status: String,
    files: Vec<ResponseFile>,
}

struct ResponseFile {
    file: Mutex<File>,
    /// Offset and length of each line by the hash of its id.
    lines: HashMap<u64, (u64, usize)>,
    answered: Vec<(u64, Usage)>,
}

impl BatchTeacher {
    /// Downloads the output and error files of each batch and counts the spend. A prompt in neither file has no response.
    pub(super) async fn read(
        &self,
        submitted: &mut SubmittedBatches<'_>,
        index: usize,
        end: &Value,
        progress: &dyn Progress,
    ) -> Result<EndedBatch, DataError> {
        let id = submitted.state.batches[index].batch_id.clone().unwrap_or_default();
        let unread = |failure: CallFailure| format!("the answers of batch {id} cannot be read: {failure}");
        let (files, missing) =
            self.download_all(submitted, index, end).await.map_err(|failure| submitted.stopped(&unread(failure)))?;
        if let Some(missing) = missing {
            progress.line(&format!("batch {id}: {missing}; rows without an answer are taken to have failed"));
        }
        if !submitted.state.batches[index].is_charged {
            let spent = self.spend(files.iter().flat_map(|file| &file.answered), &submitted.state.batches[index]);
            // A kill before the next line leaves a batch that is charged and not marked: the spend file knows its id.
            self.tracker.charge_batch(&self.provider, &id, &spent)?;
            submitted.change(index, |batch| batch.is_charged = true)?;
        }
        submitted.reserved[index] = None;
        Ok(EndedBatch { status: end["status"].as_str().unwrap_or_default().to_owned(), files })
    }

    /// Downloads the files of a batch, and again if they hold fewer responses than the service counts. If they still do, returns a note:
    /// services count in different ways.
    async fn download_all(
        &self,
        submitted: &SubmittedBatches<'_>,
        index: usize,
        end: &Value,
    ) -> Result<(Vec<ResponseFile>, Option<String>), CallFailure> {
        let ids = ["output_file_id", "error_file_id"].map(|name| end[name].as_str().filter(|id| !id.is_empty()));
        let folder = submitted.path.parent().unwrap_or(Path::new("."));
        let n_prompts = match submitted.state.batches[index].n_rows {
            0 => FileLimits::OPENAI.n_rows,
            n_rows => n_rows,
        };
        let count = |name: &str| end["request_counts"][name].as_u64().unwrap_or(0);
        // Some services count failed requests as completed, too.
        let n_expected = count("completed").saturating_add(count("failed")).min(n_prompts as u64);
        let (mut files, mut n_read) = (Vec::new(), 0);
        for _ in 0..READ_ATTEMPTS {
            files.clear();
            for file_id in ids.into_iter().flatten() {
                files.push(self.download_file(file_id, n_prompts, folder).await?);
            }
            n_read = files.iter().map(|file: &ResponseFile| file.lines.len()).sum();
            if n_read as u64 >= n_expected {
                return Ok((files, None));
            }
        }
        let what = format!("its files hold {n_read} answers, and the service counts {n_expected}");
        // A batch with completed requests cannot have files without any response.
        if count("completed") > 0 && files.iter().all(|file| file.answered.is_empty()) {
            return Err(self.failure(FailureKind::InvalidResponse, &what));
        }
        Ok((files, Some(what)))
    }

    async fn download_file(&self, file_id: &str, n_prompts: usize, folder: &Path) -> Result<ResponseFile, CallFailure> {
        let path = format!("/files/{file_id}/content");
        // A token may be several characters, each escaped as six bytes, plus the other fields of the line.
        let most_bytes = 32_u64.saturating_mul(self.client.most_tokens(&[]).1).saturating_add(16_384);
        let most_bytes = most_bytes.saturating_mul(n_prompts as u64).saturating_add(1 << 20);
        let invalid = |what: String| self.failure(FailureKind::InvalidResponse, &format!("{path}: {what}"));
        let unkept =
            |error: io::Error| invalid(format!("cannot be kept in {}: {}", folder.display(), io_problem(&error)));
        let file = tempfile::tempfile_in(folder).map_err(unkept)?;
        let mut n_try = 1;
        loop {
            self.files.download(&path, &file, most_bytes).await?;
            match self.index(&file, n_prompts) {
                Ok((lines, answered)) => return Ok(ResponseFile { file: Mutex::new(file), lines, answered }),
                Err(problem) if n_try == READ_ATTEMPTS => return Err(invalid(problem)),
                Err(problem) => tracing::debug!("{path}: {problem}; read again"),
            }
            n_try += 1;
        }
    }

    #[allow(clippy::type_complexity)] // `lines` and `answered` of a `ResponseFile`
    fn index(
        &self,
        mut file: &File,
        n_prompts: usize,
    ) -> Result<(HashMap<u64, (u64, usize)>, Vec<(u64, Usage)>), String> {
        let unreadable = |error: io::Error| format!("cannot be read again: {}", io_problem(&error));
        file.rewind().map_err(unreadable)?;
        let (mut reader, mut line, mut start) = (BufReader::with_capacity(1 << 16, file), Vec::new(), 0);
        let (mut lines, mut answered) = (HashMap::new(), Vec::new());
        for number in 1.. {
            line.clear();
            let mut bounded = reader.by_ref().take(MAX_LINE_BYTES as u64 + 1);
            let n_bytes = bounded.read_until(b'\n', &mut line).map_err(unreadable)?;
            if n_bytes == 0 {
                break;
            }
            if n_bytes > MAX_LINE_BYTES || lines.len() > n_prompts {
                let most = format!("at most {MAX_LINE_BYTES} bytes a line and {n_prompts} answers");
                return Err(format!("line {number} is beyond {most}"));
            }
            if !line.trim_ascii().is_empty() {
                let parsed: Value =
                    serde_json::from_slice(&line).map_err(|error| format!("line {number} is not JSON: {error}"))?;
                let id = parsed["custom_id"].as_str().ok_or_else(|| format!("line {number} has no `custom_id`"))?;
                lines.insert(hash_of(id), (start, n_bytes));
                if let Some(body) = response_body(&parsed) {
                    answered.push((hash_of(id), self.client.usage(&[], body)));
                }
            }
            start += n_bytes as u64;
        }
        Ok((lines, answered))
    }

    fn spend<'a>(&self, answered: impl Iterator<Item = &'a (u64, Usage)>, batch: &Batch) -> Spend {
        let mean_prompt_tokens = batch.prompt_tokens / (batch.ids.len() as u64).max(1);
        let mut spent = Spend::default();
        for (_, usage) in answered {
            let mut usage = *usage;
            if usage.is_estimated {
                usage.prompt_tokens = mean_prompt_tokens;
                usage.cost = self.client.cost((usage.prompt_tokens, usage.completion_tokens));
            }
            usage.cost = usage.cost.map(|cost| cost * self.price_factor);
            spent.calls += 1;
            spent.tries += 1;
            spent.add_usage(usage);
        }
        spent
    }

    fn response(&self, messages: &[Message], line: &Value) -> Result<Completion, CallFailure> {
        let Some(body) = response_body(line) else {
            return Err(self.failure(FailureKind::Rejected, &refusal(line)));
        };
        let mut usage = self.client.usage(messages, body);
        usage.cost = usage.cost.map(|cost| cost * self.price_factor);
        self.client.completion(body, usage, None).map_err(|what| self.failure(FailureKind::InvalidResponse, &what))
    }
}

impl<'a> BatchResponses<'a> {
    pub(super) fn new(teacher: &'a BatchTeacher, path: &'a Path, state: BatchState, ended: Vec<EndedBatch>) -> Self {
        let locations = state.locations();
        Self { teacher, path, state, ended, locations, returned: Mutex::default() }
    }

    /// The response (or failure) of a prompt; `None` if no batch contains the prompt.
    pub(crate) fn of(&self, messages: &[Message]) -> Result<Option<Result<Completion, CallFailure>>, DataError> {
        let key = hash_of(&prompt_id(messages));
        let Some(ended) = self.locations.get(&key).map(|index| &self.ended[*index]) else { return Ok(None) };
        if !self.returned.lock().unwrap_or_else(PoisonError::into_inner).insert(key) {
            self.teacher.tracker.count_joined(&self.teacher.provider);
        }
        let line = ended.files.iter().find_map(|file| file.line(key)).transpose();
        let unreadable = |error: io::Error| {
            DataError::file(self.path, format!("answers cannot be read again: {}", io_problem(&error)))
        };
        Ok(Some(match line.map_err(unreadable)? {
            Some(mut line) => {
                self.teacher.files.hide_key_in(&mut line);
                self.teacher.response(messages, &line)
            }
            None => {
                let what = format!("batch {} without an answer to this row", ended.status);
                Err(self.teacher.failure(FailureKind::Timeout, &what))
            }
        }))
    }

    /// Removes prompts without a response from the state file, so that the next run submits them in a new batch.
    pub(crate) fn settle(mut self) -> Result<(), DataError> {
        for (batch, ended) in self.state.batches.iter_mut().zip(&self.ended) {
            let answered: HashSet<u64> =
                ended.files.iter().flat_map(|file| &file.answered).map(|(key, _)| *key).collect();
            batch.ids.retain(|id| answered.contains(&hash_of(id)));
        }
        self.state.batches.retain(|batch| !batch.ids.is_empty());
        self.state.write(self.path)
    }
}

impl ResponseFile {
    fn line(&self, key: u64) -> Option<io::Result<Value>> {
        let (start, n_bytes) = *self.lines.get(&key)?;
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let mut line = vec![0; n_bytes];
        let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut line));
        Some(read.and_then(|()| Ok(serde_json::from_slice(&line)?)))
    }
}

/// The chat completion in a line; `None` if the service rejected the row.
fn response_body(line: &Value) -> Option<&Value> {
    let status = line.pointer("/response/status_code").and_then(Value::as_u64);
    line.pointer("/response/body").filter(|_| status == Some(200))
}

fn refusal(line: &Value) -> String {
    let status = line.pointer("/response/status_code").and_then(Value::as_u64).unwrap_or(0);
    let message = ["/response/body/error/message", "/error/message"].iter().find_map(|at| line.pointer(at)?.as_str());
    format!("answered {status}: {}", message.unwrap_or("no message"))
}
