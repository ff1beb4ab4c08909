//! OpenAI's batch interface in memory: file upload, batches that finish after a number of polls, file download.

use crate::{Answer, RecordedRequest, Reply};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// The batch service. Scripts can replace or modify its replies.
pub struct BatchService {
    /// Number of polls after which a batch is finished.
    n_polls: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The requests of each file.
    files: Vec<Vec<Value>>,
    batches: Vec<Batch>,
}

struct Batch {
    file: usize,
    n_polled: usize,
    /// The final status of a batch, if it is not `completed`.
    ends: Option<String>,
}

impl BatchService {
    /// A service whose batches are finished after `n_polls` polls.
    pub fn new(n_polls: usize) -> Self {
        Self { n_polls, state: Mutex::default() }
    }

    pub fn n_begun(&self) -> usize {
        self.state().batches.len()
    }

    /// Ends a batch (0-based) with this status instead of `completed`. If the status is `expired` or `cancelled`, the first half of the
    /// batch has results.
    ///
    /// # Panics
    /// The batch does not exist.
    pub fn end(&self, index: usize, status: &str) {
        self.state().batches[index].ends = Some(status.to_owned());
    }

    /// The response to a request.
    pub fn reply(&self, request: &RecordedRequest) -> Reply {
        let path = request.path.strip_prefix("/v1").unwrap_or(&request.path);
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let words: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        let answer = match (request.method.as_str(), words.as_slice()) {
            ("POST", ["files"]) => self.file(request),
            ("POST", ["batches"]) => self.begin(&request.json()),
            ("GET", ["batches"]) => self.list(query),
            ("GET", ["batches", id]) => self.poll(id),
            ("GET", ["files", id, "content"]) => self.content(id),
            _ => None,
        };
        answer.unwrap_or_else(|| Answer::json(404, &json!({"error": {"message": "no such thing"}}))).into()
    }

    fn file(&self, request: &RecordedRequest) -> Option<Answer> {
        let form = String::from_utf8_lossy(&request.body);
        let requests =
            form.lines().filter_map(|line| serde_json::from_str(line).ok()).filter(Value::is_object).collect();
        let mut state = self.state();
        state.files.push(requests);
        let id = format!("file-{}", state.files.len() - 1);
        Some(Answer::json(200, &json!({"id": id, "created_at": created_at(state.batches.len())})))
    }

    fn begin(&self, body: &Value) -> Option<Answer> {
        let file = place(body["input_file_id"].as_str()?, "file-")?;
        let mut state = self.state();
        state.files.get(file)?;
        state.batches.push(Batch { file, n_polled: 0, ends: None });
        let index = state.batches.len() - 1;
        Some(Answer::json(200, &self.object(&state, index)))
    }

    /// Newest first, as in OpenAI's service.
    fn list(&self, query: &str) -> Option<Answer> {
        let fields: BTreeMap<&str, &str> = query.split('&').filter_map(|field| field.split_once('=')).collect();
        let state = self.state();
        let end = fields.get("after").and_then(|id| place(id, "batch-")).unwrap_or(state.batches.len());
        let n_most: usize = fields.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(20);
        let start = end.saturating_sub(n_most);
        let page: Vec<Value> = (start..end).rev().map(|index| self.object(&state, index)).collect();
        Some(Answer::json(200, &json!({"data": page, "has_more": start > 0})))
    }

    fn poll(&self, id: &str) -> Option<Answer> {
        let (mut state, index) = (self.state(), place(id, "batch-")?);
        state.batches.get_mut(index)?.n_polled += 1;
        Some(Answer::json(200, &self.object(&state, index)))
    }

    fn object(&self, state: &State, index: usize) -> Value {
        let batch = &state.batches[index];
        let is_over = batch.n_polled >= self.n_polls;
        let ends = batch.ends.as_deref().unwrap_or("completed");
        let n_answered = if is_over { n_answered(state, batch) } else { 0 };
        let mut object = json!({
            "id": format!("batch-{index}"), "input_file_id": format!("file-{}", batch.file), "created_at": created_at(index),
            "status": if is_over { ends } else { "in_progress" },
            "request_counts": {"total": state.files[batch.file].len(), "completed": n_answered, "failed": 0},
        });
        if n_answered > 0 {
            object["output_file_id"] = json!(format!("output-{index}"));
        }
        if is_over && ends == "failed" {
            object["errors"] = json!({"data": [{"message": "the file is not what it should be"}]});
        }
        object
    }

    /// The results, in another order than the requests.
    fn content(&self, id: &str) -> Option<Answer> {
        let (state, index) = (self.state(), place(id, "output-")?);
        let batch = state.batches.get(index)?;
        let requests = state.files[batch.file].iter().take(n_answered(&state, batch));
        let lines: Vec<String> = requests.rev().map(|request| format!("{}\n", answered(request))).collect();
        Some(Answer::text(200, "application/jsonl", &lines.concat()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn n_answered(state: &State, batch: &Batch) -> usize {
    let n_requests = state.files[batch.file].len();
    match batch.ends.as_deref() {
        None | Some("completed") => n_requests,
        Some("failed") => 0,
        Some(_) => n_requests / 2,
    }
}

/// One second apart and in the future, so that no batch is too old.
fn created_at(index: usize) -> usize {
    4_000_000_000 + index
}

fn place(id: &str, prefix: &str) -> Option<usize> {
    id.strip_prefix(prefix)?.parse().ok()
}

/// 100 prompt tokens, 10 completion tokens; the text is the request's id.
fn answered(request: &Value) -> Value {
    let text = format!("鱼油 {}", request["custom_id"].as_str().unwrap_or_default());
    let choice = json!({"message": {"content": text}, "finish_reason": "stop"});
    let body = json!({"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10}});
    json!({"custom_id": request["custom_id"], "response": {"status_code": 200, "body": body}})
}
