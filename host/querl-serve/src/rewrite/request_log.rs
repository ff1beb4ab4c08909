//! The request log: queries and rewrites for the training of a later model, if the operator asks for it.
//!
//! Requests put their lines into a queue with a bound, and never wait: where the queue is full, a line is dropped and counted. A thread takes
//! lines from the queue, removes the texts that the operator's filter does not permit, and writes them ([`DayFiles`]).

mod day_files;

use super::metrics::RewriteMetrics;
use anyhow::Context as _;
use chrono::{SecondsFormat, Utc};
use day_files::{Bounds, DayFiles, Unwritten};
use prometheus::{IntCounter, IntCounterVec};
use querl_core::dir_lock::{DirLock, DirLockError};
use querl_core::fsx::digest_hex;
use querl_core::ports::{Filter, PluginFault};
use querl_core::records::{Columns, Context, Sample, Verdict};
use querl_data::{LoggedFeedback, LoggedRewrite, RequestLogLine};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Once};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Options of the request log: its folder, limits and filter.
pub struct RequestLogOptions {
    /// Folder of the log files; created if it is missing.
    pub folder: PathBuf,
    /// Maximum size of all log files together, in bytes.
    pub max_bytes: u64,
    /// Number of days for which files are kept, today included.
    pub max_days: u32,
    /// Filter plugin: requests that it drops are logged without their texts. `None`: all texts are logged.
    pub filter: Option<Box<dyn Filter>>,
}

/// Maximum number of lines in the queue, and of bytes of their texts.
const MAX_QUEUED_LINES: usize = 16_384;
const MAX_QUEUED_BYTES: usize = 32 << 20;
/// Maximum size of the four texts of a line; longer ones are left out.
const MAX_TEXT_BYTES: usize = 64 << 10;
/// Size of a line without its texts.
const REST_BYTES: usize = 512;
/// Maximum number of lines of one write.
const MAX_BATCH: usize = 256;
/// Interval at which old days are removed if nothing is logged.
const IDLE_INTERVAL: Duration = Duration::from_secs(60);
/// Time for the queue to be written when the server stops.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// Reasons of dropped lines.
const QUEUE_FULL: &str = "queue_full";
const SIZE_LIMIT: &str = "size_limit";
const WRITE_FAILED: &str = "write_failed";
const WRITER_ENDED: &str = "writer_ended";
/// Texts are missing because the filter faulted.
const PLUGIN_FAULT: &str = "plugin_fault";
/// Texts are missing because of their size.
const TOO_LONG: &str = "too_long";

enum Message {
    Line(Box<RequestLogLine>),
    /// Sends a reply once all earlier lines are written.
    Flush(std::sync::mpsc::Sender<()>),
}

/// The request log: a bounded queue of lines, and the thread that writes them.
pub(super) struct RequestLog {
    sender: SyncSender<Message>,
    n_queued_bytes: Arc<AtomicUsize>,
    counters: Counters,
    salt: [u8; SALT_BYTES],
    writer: JoinHandle<()>,
    reported_full: Once,
    reported_end: Once,
}

#[derive(Clone)]
struct Counters {
    lines: IntCounter,
    dropped: IntCounterVec,
    redacted: IntCounterVec,
}

/// A rewritten query as it is logged.
pub(super) struct LoggedQuery<'a> {
    /// Id of the query; `None` if the request has only one query, and its id is that of the request.
    pub(super) id: Option<&'a str>,
    pub(super) query: &'a str,
    pub(super) context: &'a Context,
    /// The user's id, as the client sent it.
    pub(super) user: Option<&'a str>,
}

impl RequestLog {
    /// Opens the folder and starts the thread that writes lines.
    ///
    /// # Errors
    /// The folder cannot be used, or another process uses it.
    pub(super) fn open(options: RequestLogOptions, metrics: &RewriteMetrics) -> anyhow::Result<Self> {
        let RequestLogOptions { folder, max_bytes, max_days, filter } = options;
        let shown = folder.display().to_string();
        make_private(&folder).with_context(|| format!("{shown}: the request log cannot be made there"))?;
        let lock = DirLock::take(&folder).map_err(|error| match error {
            DirLockError::InUse { ref holder, .. } => {
                let what =
                    format!("{shown}: the request log of another server (process {holder}); name another folder");
                anyhow::Error::new(error).context(what)
            }
            DirLockError::Io { .. } => error.into(),
        })?;
        let salt = salt(&folder).with_context(|| format!("{shown}: the request log has no usable salt"))?;
        let files = DayFiles::open(folder, Bounds { max_bytes, max_days })
            .with_context(|| format!("{shown}: the request log cannot be read"))?;
        let counters = Counters {
            lines: metrics.request_log_lines.clone(),
            dropped: metrics.request_log_dropped.clone(),
            redacted: metrics.request_log_redacted.clone(),
        };
        let (sender, receiver) = sync_channel(MAX_QUEUED_LINES);
        let n_queued_bytes = Arc::new(AtomicUsize::new(0));
        let n_queued = n_queued_bytes.clone();
        let writer = Writer { files, filter, counters: counters.clone(), warned: Vec::new(), _lock: lock };
        let thread = std::thread::Builder::new().name("request log".into());
        let writer = thread.spawn(move || writer.run(&receiver, &n_queued)).context("no thread for the request log")?;
        let (reported_full, reported_end) = (Once::new(), Once::new());
        Ok(Self { sender, n_queued_bytes, counters, salt, writer, reported_full, reported_end })
    }

    /// Adds a line to the queue. Returns false, and counts the line as dropped, if the queue is full or the writing thread has
    /// ended.
    pub(super) fn send(&self, mut line: RequestLogLine) -> bool {
        if text_bytes(&line) > MAX_TEXT_BYTES + REST_BYTES
            && let RequestLogLine::Rewrite(rewrite) = &mut line
        {
            remove_texts(rewrite, TOO_LONG.to_owned());
            self.counters.redacted.with_label_values(&[TOO_LONG]).inc();
        }
        let n_bytes = text_bytes(&line);
        let n_queued = self.n_queued_bytes.fetch_add(n_bytes, Ordering::Relaxed);
        let has_room = n_queued + n_bytes <= MAX_QUEUED_BYTES;
        let is_queued = has_room && self.sender.try_send(Message::Line(Box::new(line))).is_ok();
        if !is_queued {
            self.n_queued_bytes.fetch_sub(n_bytes, Ordering::Relaxed);
            self.counters.dropped.with_label_values(&[self.why_dropped()]).inc();
        }
        is_queued
    }

    /// The reason for dropped lines. Each reason is reported once.
    fn why_dropped(&self) -> &'static str {
        if self.writer.is_finished() {
            let message = "the writer of the request log has ended, and nothing more is logged; restart the server";
            self.reported_end.call_once(|| tracing::error!("{message}"));
            return WRITER_ENDED;
        }
        let message = "the queue of the request log is full; requests are not logged";
        self.reported_full.call_once(|| tracing::warn!("{message}"));
        QUEUE_FULL
    }

    /// Waits until the lines in the queue are written, for a bounded time.
    pub(super) fn flush(&self) {
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        let (done, is_done) = channel();
        let mut message = Message::Flush(done);
        while let Err(error) = self.sender.try_send(message) {
            match error {
                TrySendError::Full(unsent) if Instant::now() < deadline => message = unsent,
                _ => break,
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if is_done.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_err() {
            let why = match self.writer.is_finished() {
                true => "its writer has ended".to_owned(),
                false => format!("it was not written within {FLUSH_TIMEOUT:?}"),
            };
            tracing::warn!("the last lines of the request log are lost: {why}");
        }
    }

    /// Hash of a user's id: equal for requests of one user and tenant, and not reversible without the salt.
    pub(super) fn user_hash(&self, tenant: &str, user: &str) -> String {
        let text = serde_json::json!([tenant, user]).to_string();
        let mut hash = digest_hex(&[self.salt.as_slice(), text.as_bytes()].concat());
        hash.truncate(32);
        hash
    }
}

pub(super) fn now() -> String {
    Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// Size of a line: its texts, and a constant for the rest.
fn text_bytes(line: &RequestLogLine) -> usize {
    let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    REST_BYTES
        + match line {
            RequestLogLine::Rewrite(line) => {
                [&line.query, &line.user_profile, &line.history, &line.rewrite].into_iter().map(length).sum()
            }
            RequestLogLine::Feedback(LoggedFeedback { clicked, .. }) => clicked.iter().map(String::len).sum::<usize>(),
        }
}

/// Removes the texts of a line and sets the reason.
fn remove_texts(line: &mut LoggedRewrite, reason: String) {
    (line.query, line.user_profile, line.history, line.rewrite) = (None, None, None, None);
    line.redacted = Some(reason);
}

struct Writer {
    files: DayFiles,
    filter: Option<Box<dyn Filter>>,
    counters: Counters,
    /// Problems that were reported already.
    warned: Vec<&'static str>,
    _lock: DirLock,
}

impl Writer {
    fn run(mut self, queue: &Receiver<Message>, n_queued_bytes: &AtomicUsize) {
        loop {
            let first = match queue.recv_timeout(IDLE_INTERVAL) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout) => {
                    self.files.remove_old(&now()[..DAY_CHARS]);
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let mut flushed = Vec::new();
            let mut lines = Vec::new();
            for message in std::iter::once(first).chain(queue.try_iter().take(MAX_BATCH)) {
                match message {
                    Message::Line(line) => {
                        n_queued_bytes.fetch_sub(text_bytes(&line), Ordering::Relaxed);
                        lines.push(*line);
                    }
                    Message::Flush(done) => flushed.push(done),
                }
            }
            self.write(lines);
            for done in flushed {
                // The server may have stopped waiting.
                let _ = done.send(());
            }
        }
    }

    fn write(&mut self, lines: Vec<RequestLogLine>) {
        let mut texts: Vec<(String, Vec<u8>)> = Vec::new();
        for mut line in lines {
            if let RequestLogLine::Rewrite(rewrite) = &mut line {
                self.redact(rewrite);
            }
            let (RequestLogLine::Rewrite(LoggedRewrite { time, .. })
            | RequestLogLine::Feedback(LoggedFeedback { time, .. })) = &line;
            let day = time[..DAY_CHARS].to_owned();
            let mut text = serde_json::to_vec(&line).expect("a line has a JSON form");
            text.push(b'\n');
            texts.push((day, text));
        }
        for of_day in texts.chunk_by(|one, other| one.0 == other.0) {
            let Unwritten { n_beyond_limit, failed } =
                self.files.append(&of_day[0].0, of_day.iter().map(|(_, text)| text.as_slice()));
            self.count_dropped(SIZE_LIMIT, n_beyond_limit, "it is as large as --request_log_mib allows");
            let n_failed = match &failed {
                Some((n_failed, error)) => {
                    self.count_dropped(WRITE_FAILED, *n_failed, &error.to_string());
                    *n_failed
                }
                None => {
                    self.warned.retain(|warned| *warned != WRITE_FAILED);
                    0
                }
            };
            self.counters.lines.inc_by((of_day.len() - n_beyond_limit - n_failed) as u64);
        }
    }

    fn count_dropped(&mut self, reason: &'static str, n_lines: usize, why: &str) {
        if n_lines > 0 {
            self.counters.dropped.with_label_values(&[reason]).inc_by(n_lines as u64);
            let folder = self.files.folder().display();
            let message = format!("{folder}: lines of the request log are dropped: {why}");
            self.warn_once(reason, &message);
        }
    }

    fn warn_once(&mut self, problem: &'static str, message: &str) {
        if !self.warned.contains(&problem) {
            self.warned.push(problem);
            tracing::warn!("{message}");
        }
    }

    /// Removes the texts of a request that the filter drops, or faults on. Each request is a separate batch, so that its verdict does not
    /// depend on others.
    fn redact(&mut self, line: &mut LoggedRewrite) {
        let Some(filter) = self.filter.as_ref().filter(|_| line.redacted.is_none()) else { return };
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let context = Context { user_profile: text(&line.user_profile), history_summary: text(&line.history) };
        let sample = Sample {
            id: line.id.clone(),
            original_query: text(&line.query),
            rewritten_query: text(&line.rewrite),
            context,
            hits: Vec::new(),
            columns: Columns::default(),
        };
        let verdicts = filter.check_batch(std::slice::from_ref(&sample));
        let reason = match verdicts.as_deref() {
            Ok([Verdict::Keep]) => return,
            Ok([Verdict::Drop { code, .. }]) => code.clone(),
            Ok(_) | Err(_) => PLUGIN_FAULT.to_owned(),
        };
        if let Err(PluginFault { plugin, version, kind, .. }) = &verdicts {
            // Its message may quote the texts.
            let message = format!(
                "--request_log_filter: plugin {plugin} {version} faulted ({kind:?}); requests are logged without their texts"
            );
            self.warn_once(PLUGIN_FAULT, &message);
        }
        let label = if reason == PLUGIN_FAULT { PLUGIN_FAULT } else { "filter" };
        self.counters.redacted.with_label_values(&[label]).inc();
        remove_texts(line, reason);
    }
}

/// Length of the date at the beginning of a time.
const DAY_CHARS: usize = 10;

const SALT_BYTES: usize = 32;
const SALT_FILE: &str = "salt";

/// Reads the salt of the folder; the first server creates it.
fn salt(folder: &Path) -> anyhow::Result<[u8; SALT_BYTES]> {
    let path = folder.join(SALT_FILE);
    if !path.exists() {
        let mut bytes = [0; SALT_BYTES];
        getrandom::fill(&mut bytes).map_err(|error| anyhow::anyhow!("the system has no random numbers: {error}"))?;
        // Temporary files have the mode 0600.
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(&bytes)?;
        file.as_file().sync_all()?;
        file.persist(&path)?;
    }
    let bytes = std::fs::read(&path)?;
    let n_bytes = bytes.len();
    let shown = path.display();
    bytes.try_into().map_err(|_| anyhow::anyhow!("{shown} has {n_bytes} bytes; expected {SALT_BYTES}: remove it"))
}

/// Creates a folder that only its owner can read, if it does not exist.
fn make_private(folder: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}
