//! The threads of a server: the calling thread steps the engine; another one decodes and parses responses, for which the engine does not
//! wait.

use super::tenant::TenantModel;
use anyhow::Context;
use querl_core::serving::{EngineState, EventSink, Generation, GenerationEvent, GenerationFailure, SubmitError};
use querl_model::{
    Decoder, Generated, ModelError, RequestLimits, SamplingSettings, ServingEngine, ServingRequest, ServingSettings,
    StepOutput, TextTokenizer,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A generation request with the sink of its events.
pub(super) struct Job {
    pub(super) request: ServingRequest,
    pub(super) model: Arc<TenantModel>,
    /// The query to rewrite. `None` for a chat request with the client's own messages, whose text is streamed and not parsed.
    pub(super) question: Option<Question>,
    pub(super) events: Box<dyn EventSink>,
    pub(super) arrived_at: Instant,
}

/// A query and its history summary, which parsing a response needs.
pub(super) struct Question {
    pub(super) query: String,
    pub(super) history: String,
}

/// State that the threads of a server share.
struct Shared {
    /// Number of queued and running requests.
    n_open: AtomicUsize,
    max_open: usize,
    next_id: AtomicU64,
    is_alive: AtomicBool,
    state: Mutex<EngineState>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, EngineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle that submits requests to an engine on another thread.
pub(super) struct EngineHandle {
    jobs: Sender<Job>,
    shared: Arc<Shared>,
    limits: RequestLimits,
}

/// Starts the thread that sends responses, and returns the worker that steps the engine with a handle to submit requests.
pub(super) fn start(
    decoder: Arc<Decoder>,
    tokenizer: Arc<TextTokenizer>,
    settings: ServingSettings,
    max_waiting: usize,
) -> anyhow::Result<(EngineHandle, EngineWorker)> {
    let engine = ServingEngine::new(decoder, tokenizer.clone(), settings)?;
    let shared = Arc::new(Shared {
        n_open: AtomicUsize::new(0),
        max_open: settings.max_running + max_waiting,
        next_id: AtomicU64::new(0),
        is_alive: AtomicBool::new(true),
        state: Mutex::default(),
    });
    let ((jobs, new_jobs), (updates, to_send)) = (channel(), channel());
    let handle = EngineHandle { jobs, shared: shared.clone(), limits: engine.limits().clone() };
    spawn("responses", move || send_responses(&to_send, &tokenizer))?;
    Ok((handle, EngineWorker { engine, new_jobs, updates, open: HashMap::new(), shared }))
}

pub(super) fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<JoinHandle<T>> {
    std::thread::Builder::new().name(name.into()).spawn(work).context("no thread for the model")
}

impl EngineHandle {
    pub(super) fn next_id(&self) -> u64 {
        self.shared.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn limits(&self) -> &RequestLimits {
        &self.limits
    }

    pub(super) fn submit(&self, job: Job) -> Result<(), SubmitError> {
        let add = |n_open: usize| (n_open < self.shared.max_open).then_some(n_open + 1);
        if !job.events.is_shadow()
            && self.shared.n_open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_err()
        {
            let n = self.shared.max_open;
            return Err(SubmitError::QueueFull(format!("{n} requests are waiting or running; retry later")));
        }
        self.jobs.send(job).map_err(|_| SubmitError::Ended)
    }

    pub(super) fn state(&self) -> EngineState {
        *self.shared.state()
    }

    pub(super) fn is_full(&self) -> bool {
        self.shared.n_open.load(Ordering::Relaxed) >= self.shared.max_open
    }

    pub(super) fn is_alive(&self) -> bool {
        self.shared.is_alive.load(Ordering::Relaxed)
    }
}

/// A request that was submitted to the engine.
struct OpenRequest {
    n_prompt_tokens: usize,
    sampling: SamplingSettings,
    model: Arc<TenantModel>,
    question: Option<Question>,
    /// State of a streamed chat response; `None` for a rewrite.
    stream: Option<Arc<ChatStream>>,
    events: Arc<dyn EventSink>,
    arrived_at: Instant,
    /// Times of the start of prefill and of the first token.
    started: Option<(Instant, Instant)>,
}

/// State of a streamed chat response.
struct ChatStream {
    stop_strings: Vec<String>,
    events: Arc<dyn EventSink>,
    /// Tokens so far, and the number of bytes of their text that were sent. Only the sending thread locks it.
    progress: Mutex<(Vec<u32>, usize)>,
}

/// A message to the thread that sends responses.
enum Update {
    /// The next token of a chat response.
    Token(Arc<ChatStream>, u32),
    /// The end of a response, and the time of its last token.
    End(Box<OpenRequest>, Result<(Generated, Instant), GenerationFailure>),
}

/// Worker that steps the engine on the calling thread.
pub(super) struct EngineWorker {
    engine: ServingEngine,
    new_jobs: Receiver<Job>,
    updates: Sender<Update>,
    open: HashMap<u64, OpenRequest>,
    shared: Arc<Shared>,
}

impl Drop for EngineWorker {
    /// Runs also after a panic.
    fn drop(&mut self) {
        self.shared.is_alive.store(false, Ordering::Relaxed);
    }
}

impl EngineWorker {
    /// Steps the engine until the handle is dropped and all queued requests have ended.
    pub(super) fn run(mut self) {
        while self.receive() {
            let open = &mut self.open;
            let cancelled = open.extract_if(|_, request| !request.events.is_open());
            let n_cancelled = cancelled.filter(|(_, request)| !request.events.is_shadow()).count();
            self.shared.n_open.fetch_sub(n_cancelled, Ordering::Relaxed);
            self.engine.retain(|id| open.contains_key(&id));
            match self.engine.step() {
                Ok(outputs) => self.pass_on(outputs),
                Err(error) => self.fail_running(&error),
            }
        }
    }

    /// Receives new jobs; blocks if there is nothing to do. Returns false once no more can arrive.
    fn receive(&mut self) -> bool {
        if self.open.is_empty() {
            self.note_state(0);
            match self.new_jobs.recv() {
                Ok(job) => self.add(job),
                Err(_) => return false,
            }
        }
        loop {
            match self.new_jobs.try_recv() {
                Ok(job) => self.add(job),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return !self.open.is_empty(),
            }
        }
    }

    fn add(&mut self, job: Job) {
        let Job { request, model, question, events, arrived_at } = job;
        let (id, sampling, n_prompt_tokens) = (request.id, request.sampling.clone(), request.prompt.len());
        let events: Arc<dyn EventSink> = Arc::from(events);
        let stream = question.is_none().then(|| {
            let (stop_strings, progress) = (sampling.stop_strings.clone(), Mutex::default());
            Arc::new(ChatStream { stop_strings, events: events.clone(), progress })
        });
        let open =
            OpenRequest { n_prompt_tokens, sampling, model, question, stream, events, arrived_at, started: None };
        self.shared.state().n_prompt_tokens += n_prompt_tokens as u64;
        match self.engine.add(request) {
            Ok(()) => drop(self.open.insert(id, open)),
            Err(error) => self.end(open, Err(failure(&error))),
        }
    }

    fn pass_on(&mut self, outputs: Vec<StepOutput>) {
        let now = Instant::now();
        self.note_state(outputs.iter().map(|output| output.n_sequences).sum());
        for StepOutput { id, token, n_cached, started_at, finished, .. } in outputs {
            let Some(request) = self.open.get_mut(&id) else { continue };
            if request.started.is_none() {
                request.started = Some((started_at, now));
                self.shared.state().n_cached_tokens += n_cached as u64;
            }
            if let Some(finished) = finished {
                let request = self.open.remove(&id).expect("it was found above");
                self.end(request, finished.map(|generated| (generated, now)).map_err(|error| failure(&error)));
            } else if let (Some(stream), Some(token)) = (&request.stream, token) {
                let _ = self.updates.send(Update::Token(stream.clone(), token));
            }
        }
    }

    fn note_state(&self, n_sequences: usize) {
        let waiting = self.engine.waiting_ids();
        let is_client = |id: &u64| self.open.get(id).is_some_and(|request| !request.events.is_shadow());
        let n_waiting = waiting.into_iter().filter(is_client).count();
        let mut state = self.shared.state();
        (state.n_waiting, state.n_running) = (n_waiting, self.engine.n_running());
        state.kv_cache_bytes = self.engine.kv_cache_bytes() as u64;
        state.n_steps += u64::from(n_sequences > 0);
        state.n_step_sequences += n_sequences as u64;
    }

    fn end(&self, request: OpenRequest, result: Result<(Generated, Instant), GenerationFailure>) {
        self.shared.n_open.fetch_sub(usize::from(!request.events.is_shadow()), Ordering::Relaxed);
        let _ = self.updates.send(Update::End(Box::new(request), result));
    }

    /// Fails the running batch; queued requests are kept.
    fn fail_running(&mut self, error: &ModelError) {
        tracing::error!("a batch of requests failed: {error}");
        let waiting = self.engine.waiting_ids();
        let lost: Vec<u64> = self.open.keys().copied().filter(|id| !waiting.contains(id)).collect();
        for id in lost {
            let request = self.open.remove(&id).expect("its key was listed");
            self.end(request, Err(failure(error)));
        }
    }
}

fn failure(error: &ModelError) -> GenerationFailure {
    GenerationFailure { code: "model_failed", message: error.to_string() }
}

/// Decodes, parses and sends responses until the engine ends.
fn send_responses(updates: &Receiver<Update>, tokenizer: &TextTokenizer) {
    for update in updates {
        match update {
            Update::Token(stream, token) => stream.push(token, tokenizer),
            Update::End(request, result) => {
                let result =
                    result.and_then(|(generated, ended_at)| request.generation(&generated, ended_at, tokenizer));
                if let (Ok(generation), Some(stream)) = (&result, &request.stream) {
                    stream.send(&generation.text, &mut stream.progress().1);
                }
                request.events.send(GenerationEvent::Done(result));
            }
        }
    }
}

impl ChatStream {
    fn progress(&self) -> MutexGuard<'_, (Vec<u32>, usize)> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, token: u32, tokenizer: &TextTokenizer) {
        let (token_ids, n_sent) = &mut *self.progress();
        token_ids.push(token);
        if let Ok(text) = tokenizer.decode(token_ids) {
            self.send(certain(&text, &self.stop_strings), n_sent);
        }
    }

    /// Sends the new part of a growing text.
    fn send(&self, text: &str, n_sent: &mut usize) {
        if let Some(new) = text.get(*n_sent..).filter(|new| !new.is_empty()) {
            self.events.send(GenerationEvent::Text(new.to_owned()));
            *n_sent = text.len();
        }
    }
}

/// The beginning of a growing text that further tokens do not change: without an unfinished character and without the beginning of a stop
/// string.
fn certain<'t>(text: &'t str, stop_strings: &[String]) -> &'t str {
    let text = text.trim_end_matches('\u{FFFD}');
    let begins =
        |stop: &String| (1..=stop.len()).rev().find(|&n| stop.is_char_boundary(n) && text.ends_with(&stop[..n]));
    let n_held = stop_strings.iter().filter_map(begins).max().unwrap_or(0);
    &text[..text.len() - n_held]
}

impl OpenRequest {
    fn generation(
        &self,
        generated: &Generated,
        ended_at: Instant,
        tokenizer: &TextTokenizer,
    ) -> Result<Generation, GenerationFailure> {
        let text = tokenizer.decode(&generated.token_ids).map_err(|error| failure(&error))?;
        let text = self.sampling.before_stop(&text);
        let text = match &self.question {
            Some(Question { query, history }) => self.model.parse(query, history, text)?,
            None => text.to_owned(),
        };
        let (started_at, first_token_at) = self.started.unwrap_or((ended_at, ended_at));
        let since = |later: Instant, earlier: Instant| later.saturating_duration_since(earlier);
        let (queued, prefill): (Duration, Duration) =
            (since(started_at, self.arrived_at), since(first_token_at, started_at));
        Ok(Generation {
            text,
            truncated: generated.truncated,
            version: self.model.facts.version.clone(),
            n_prompt_tokens: self.n_prompt_tokens,
            n_tokens: generated.token_ids.len(),
            queued,
            prefill,
            decode: since(ended_at, first_token_at),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_streamed_text_waits_for_whole_characters_and_for_what_may_be_a_stop_string() {
        let stop = ["\n\n".to_owned(), "END".to_owned()];
        for (text, expected) in
            [("ab", "ab"), ("鱼\u{FFFD}", "鱼"), ("a\n", "a"), ("a\nb", "a\nb"), ("a E", "a "), ("aEN", "a")]
        {
            assert_eq!(certain(text, &stop), expected, "{text:?}");
        }
    }
}
