//! Dynamic batching: one worker thread classifies the queued texts of many callers together.

use super::{Classifier, ClassifierTokenizer, Encoded, Labels};
use crate::ModelError;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Number of texts up to which a request is never split, even if it has more than [`BatchLimits::max_texts`].
pub const MAX_UNSPLIT_TEXTS: usize = 32;

/// Batch size and queue limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Maximum number of texts per batch; with 1 requests are not batched together. A request with more texts (and more than
    /// [`MAX_UNSPLIT_TEXTS`]) is split, and other requests run between its parts.
    pub max_texts: usize,
    /// Maximum number of tokens of one forward pass.
    pub tokens_per_pass: usize,
    /// Queue capacity in texts; further requests are rejected.
    pub max_waiting: usize,
}

/// Result of classifying one text.
#[derive(Debug, Clone, PartialEq)]
pub struct Classification {
    /// Logits of the classes, one per class.
    pub logits: Vec<f64>,
    /// Number of tokens that were classified.
    pub n_tokens: usize,
    /// Number of tokens that were left out by truncation.
    pub n_left_out: usize,
}

/// Statistics of one batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchStats {
    /// Number of requests with a text in the batch.
    pub n_requests: usize,
    /// Number of texts in the batch.
    pub n_texts: usize,
    /// Time of the forward pass.
    pub elapsed: Duration,
}

/// Errors of submitting a request.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum QueueError {
    #[error("queue is full ({n_waiting} texts); retry later")]
    Busy { n_waiting: usize },
    #[error(transparent)]
    Text(#[from] ModelError),
    #[error("the classifier has ended")]
    Ended,
}

/// Callback of a request.
pub trait RequestCallback: Send {
    /// False once the request is cancelled; its remaining texts are then skipped.
    fn is_active(&self) -> bool;

    /// Receives the results in the order of the texts, or an error message; called on the worker thread.
    fn on_results(self: Box<Self>, results: Result<Vec<Classification>, String>);
}

/// Called after every batch.
pub type BatchObserver = Box<dyn Fn(BatchStats) + Send>;

struct QueuedRequest {
    texts: Vec<Encoded>,
    results: Vec<Classification>,
    callback: Box<dyn RequestCallback>,
}

/// Queue in front of one worker thread, which classifies all queued texts whenever it is idle. There is no batching delay: a
/// single text runs at once, and texts that arrive during a pass share the next one. Results do not depend on the batch.
pub struct Batcher {
    sender: Sender<QueuedRequest>,
    n_waiting: Arc<AtomicUsize>,
    worker: Weak<()>,
    tokenizer: Arc<ClassifierTokenizer>,
    labels: Labels,
    limits: BatchLimits,
}

impl Batcher {
    /// Creates the queue and its worker. The worker should run on the thread that called [`set_threads`](crate::set_threads), which is then
    /// one of the threads that compute each matrix product.
    pub fn new(
        classifier: impl Into<Arc<Classifier>>,
        tokenizer: impl Into<Arc<ClassifierTokenizer>>,
        limits: BatchLimits,
        observer: BatchObserver,
    ) -> (Self, BatchWorker) {
        let (sender, receiver) = channel();
        let (classifier, tokenizer) = (classifier.into(), tokenizer.into());
        let (n_waiting, sign_of_life) = (Arc::new(AtomicUsize::new(0)), Arc::new(()));
        let (labels, worker) = (classifier.labels().clone(), Arc::downgrade(&sign_of_life));
        let batcher = Self { sender, n_waiting: n_waiting.clone(), worker, tokenizer, labels, limits };
        (batcher, BatchWorker { classifier, receiver, limits, n_waiting, observer, _sign_of_life: sign_of_life })
    }

    /// Class names of the classifier.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// Number of texts in the queue and in the running batch.
    pub fn n_waiting(&self) -> usize {
        self.n_waiting.load(Ordering::Relaxed)
    }

    /// Whether the worker is still running.
    pub fn is_alive(&self) -> bool {
        self.worker.strong_count() > 0
    }

    /// Adds texts to the queue. Its capacity is checked before tokenization, so that a rejected request costs nothing; tokenization runs on
    /// the caller's thread.
    ///
    /// # Errors
    /// The queue is full, or a text has no token; `callback` is dropped then.
    pub fn submit(&self, texts: &[&str], callback: Box<dyn RequestCallback>) -> Result<(), QueueError> {
        let n_waiting = self.n_waiting.fetch_add(texts.len(), Ordering::Relaxed);
        let queued = self.enqueue(n_waiting, texts, callback);
        if queued.is_err() {
            self.n_waiting.fetch_sub(texts.len(), Ordering::Relaxed);
        }
        queued
    }

    fn enqueue(&self, n_waiting: usize, texts: &[&str], callback: Box<dyn RequestCallback>) -> Result<(), QueueError> {
        // An idle classifier accepts a request of any size.
        if n_waiting > 0 && n_waiting + texts.len() > self.limits.max_waiting {
            return Err(QueueError::Busy { n_waiting });
        }
        let texts = texts.iter().map(|text| self.tokenizer.encode(text)).collect::<Result<Vec<_>, _>>()?;
        let request = QueuedRequest { results: Vec::with_capacity(texts.len()), texts, callback };
        self.sender.send(request).map_err(|_| QueueError::Ended)
    }

    /// Classifies texts and waits for the results.
    ///
    /// # Errors
    /// As [`Batcher::submit`], or an error message of the model.
    pub fn classify(&self, texts: &[&str]) -> Result<Vec<Classification>, String> {
        let (sender, receiver) = channel();
        self.submit(texts, Box::new(BlockingCallback(sender))).map_err(|error| error.to_string())?;
        receiver.recv().unwrap_or_else(|_| Err(QueueError::Ended.to_string()))
    }
}

struct BlockingCallback(Sender<Result<Vec<Classification>, String>>);

impl RequestCallback for BlockingCallback {
    fn is_active(&self) -> bool {
        true
    }

    fn on_results(self: Box<Self>, results: Result<Vec<Classification>, String>) {
        // Fails only if the caller panicked.
        let _ = self.0.send(results);
    }
}

/// The worker of a [`Batcher`], which classifies the queued texts.
pub struct BatchWorker {
    classifier: Arc<Classifier>,
    receiver: Receiver<QueuedRequest>,
    limits: BatchLimits,
    n_waiting: Arc<AtomicUsize>,
    observer: BatchObserver,
    _sign_of_life: Arc<()>,
}

impl BatchWorker {
    /// Classifies until the [`Batcher`] is dropped and all its requests are answered; blocks the calling thread.
    pub fn run(self) {
        let mut waiting = VecDeque::new();
        loop {
            if waiting.is_empty() {
                let Ok(first) = self.receiver.recv() else { return };
                waiting.push_back(first);
            }
            waiting.extend(self.receiver.try_iter());
            let batch = self.next_batch(&mut waiting);
            if !batch.is_empty() {
                self.run_batch(batch, &mut waiting);
            }
        }
    }

    /// The requests of the next batch, each with the number of its texts. Cancelled requests are dropped.
    fn next_batch(&self, waiting: &mut VecDeque<QueuedRequest>) -> Vec<(QueuedRequest, usize)> {
        let (mut batch, mut n_texts) = (Vec::new(), 0);
        while let Some(request) = waiting.pop_front() {
            let n_left = request.texts.len() - request.results.len();
            if !request.callback.is_active() {
                self.n_waiting.fetch_sub(n_left, Ordering::Relaxed);
                continue;
            }
            let n = n_left.min(self.limits.max_texts.max(MAX_UNSPLIT_TEXTS));
            n_texts += n;
            batch.push((request, n));
            if n_texts >= self.limits.max_texts {
                break;
            }
        }
        batch
    }

    fn run_batch(&self, batch: Vec<(QueuedRequest, usize)>, waiting: &mut VecDeque<QueuedRequest>) {
        let (started, n_requests) = (Instant::now(), batch.len());
        let texts: Vec<&[Encoded]> = batch.iter().map(|(request, n)| next_texts(request, *n)).collect();
        let n_texts = texts.iter().map(|texts| texts.len()).sum();
        let results = self.classify(&texts);
        let elapsed = started.elapsed();
        self.n_waiting.fetch_sub(n_texts, Ordering::Relaxed);
        // Called before the callbacks, so that a caller with results finds its batch in the metrics.
        (self.observer)(BatchStats { n_requests, n_texts, elapsed });
        // The rest of a long request is queued after requests that arrived during this batch.
        waiting.extend(self.receiver.try_iter());
        match results {
            Ok(results) => {
                for (part, results) in batch.into_iter().zip(results) {
                    self.finish_part(part, Ok(results), waiting);
                }
            }
            // One text may have caused the error: run each request alone.
            Err(_) => {
                for (request, n) in batch {
                    let alone = self.classify(&[next_texts(&request, n)]);
                    let alone = alone.map(|results| results.into_iter().flatten().collect());
                    self.finish_part((request, n), alone, waiting);
                }
            }
        }
    }

    /// Reports the results of a request, or queues its next part.
    fn finish_part(
        &self,
        (mut request, n): (QueuedRequest, usize),
        results: Result<Vec<Classification>, String>,
        waiting: &mut VecDeque<QueuedRequest>,
    ) {
        match results {
            Ok(results) => {
                request.results.extend(results);
                match request.results.len() == request.texts.len() {
                    true => request.callback.on_results(Ok(request.results)),
                    false => waiting.push_back(request),
                }
            }
            Err(problem) => {
                let n_skipped = request.texts.len() - request.results.len() - n;
                self.n_waiting.fetch_sub(n_skipped, Ordering::Relaxed);
                request.callback.on_results(Err(problem));
            }
        }
    }

    /// Results by request, then by text.
    fn classify(&self, requests: &[&[Encoded]]) -> Result<Vec<Vec<Classification>>, String> {
        let ids: Vec<&[u32]> = requests.iter().copied().flatten().map(|encoded| encoded.ids.as_slice()).collect();
        let pass = || self.classifier.logits_of_all(&ids, self.limits.tokens_per_pass);
        let found = catch_unwind(AssertUnwindSafe(pass)).map_err(|_| "the classifier panicked".to_owned())?;
        let mut logits = found.map_err(|error| error.to_string())?.into_iter();
        let mut one = |encoded: &Encoded| {
            let logits = logits.next().expect("a row for each text");
            Classification { logits, n_tokens: encoded.ids.len(), n_left_out: encoded.n_left_out }
        };
        Ok(requests.iter().map(|texts| texts.iter().map(&mut one).collect()).collect())
    }
}

fn next_texts(request: &QueuedRequest, n: usize) -> &[Encoded] {
    &request.texts[request.results.len()..][..n]
}
