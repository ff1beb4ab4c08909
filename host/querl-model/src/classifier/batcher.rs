//! Dynamic batching: one worker thread classifies the queued texts of many callers together.

use super::{Classifier, ClassifierTokenizer, Encoded, Labels};
use crate::ModelError;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Texts of one request that are looked at in one go, whatever else goes together: a list of an ordinary size has no need to be parted.
pub const PART: usize = 32;

/// Batch size and queue limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Maximum number of texts per batch; with 1 requests are not batched together. A request with more texts (and more than
    /// [`PART`]) is split, and other requests run between its parts.
    pub max_texts: usize,
    /// Maximum number of tokens of one forward pass.
    pub tokens_per_pass: usize,
    /// Queue capacity in texts; further requests are rejected.
    pub max_waiting: usize,
}

/// Classification of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Classified {
    /// One for each class.
    pub logits: Vec<f64>,
    /// Tokens that were looked at.
    pub n_tokens: usize,
    /// Tokens that were left out for want of room.
    pub n_left_out: usize,
}

/// Statistics of one batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchDone {
    /// Requests that had a text in it.
    pub n_requests: usize,
    /// Texts.
    pub n_texts: usize,
    /// Time of the model.
    pub elapsed: Duration,
}

/// Errors of submitting a request.
#[derive(Debug, thiserror::Error)]
pub enum NotTaken {
    /// The queue is full.
    #[error("queue is full ({n_waiting} texts); retry later")]
    Busy {
        /// Texts in the queue.
        n_waiting: usize,
    },
    /// The tokenizer finds no token in a text.
    #[error(transparent)]
    Text(#[from] ModelError),
    /// The thread that classifies is gone.
    #[error("the classifier has ended")]
    Ended,
}

/// Callback of a request.
pub trait Asker: Send {
    /// False once the request is cancelled: its remaining texts are skipped.
    fn is_waiting(&self) -> bool;

    /// Receives the results in the order of the texts, on the worker thread; an error is a sentence.
    fn hear(self: Box<Self>, found: Result<Vec<Classified>, String>);
}

/// Called after every batch.
pub type BatchObserver = Box<dyn Fn(BatchDone) + Send>;

struct Asked {
    texts: Vec<Encoded>,
    found: Vec<Classified>,
    asker: Box<dyn Asker>,
}

/// Queue in front of one worker thread, which classifies all queued texts whenever it is idle. There is no batching delay: a
/// single text runs at once, and texts that arrive during a pass share the next one. Results do not depend on the batch.
pub struct Batcher {
    sender: Sender<Asked>,
    n_waiting: Arc<AtomicUsize>,
    worker: Weak<()>,
    tokenizer: Arc<ClassifierTokenizer>,
    labels: Labels,
    limits: BatchLimits,
}

impl Batcher {
    /// The two sides: who hands texts over, and who classifies them on whatever thread it is run. That thread should be the one that called
    /// [`set_threads`](crate::set_threads): it takes its part in the work then.
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

    /// Names of the classes.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// Texts that wait or are looked at.
    pub fn n_waiting(&self) -> usize {
        self.n_waiting.load(Ordering::Relaxed)
    }

    /// False once the worker has ended: it never answers again.
    pub fn is_alive(&self) -> bool {
        self.worker.strong_count() > 0
    }

    /// Hands texts over. Room is taken before their tokens are counted, so that a request that is turned away costs nothing; counting them is
    /// the caller's work, and may take a while for long texts.
    ///
    /// # Errors
    /// Too many wait, or a text has no token; `asker` is dropped then.
    pub fn submit(&self, texts: &[&str], asker: Box<dyn Asker>) -> Result<(), NotTaken> {
        let n_waiting = self.n_waiting.fetch_add(texts.len(), Ordering::Relaxed);
        let taken = self.take(n_waiting, texts, asker);
        if taken.is_err() {
            self.n_waiting.fetch_sub(texts.len(), Ordering::Relaxed);
        }
        taken
    }

    fn take(&self, n_waiting: usize, texts: &[&str], asker: Box<dyn Asker>) -> Result<(), NotTaken> {
        // What comes to an idle classifier is taken whatever its size.
        if n_waiting > 0 && n_waiting + texts.len() > self.limits.max_waiting {
            return Err(NotTaken::Busy { n_waiting });
        }
        let texts = texts.iter().map(|text| self.tokenizer.encode(text)).collect::<Result<Vec<_>, _>>()?;
        let asked = Asked { found: Vec::with_capacity(texts.len()), texts, asker };
        self.sender.send(asked).map_err(|_| NotTaken::Ended)
    }

    /// Classifies texts and waits for it.
    ///
    /// # Errors
    /// As [`Batcher::submit`], or the model failed; a sentence.
    pub fn ask(&self, texts: &[&str]) -> Result<Vec<Classified>, String> {
        let (sender, receiver) = channel();
        self.submit(texts, Box::new(Patient(sender))).map_err(|error| error.to_string())?;
        receiver.recv().unwrap_or_else(|_| Err(NotTaken::Ended.to_string()))
    }
}

/// A caller that stays until it has its answer.
struct Patient(Sender<Result<Vec<Classified>, String>>);

impl Asker for Patient {
    fn is_waiting(&self) -> bool {
        true
    }

    fn hear(self: Box<Self>, found: Result<Vec<Classified>, String>) {
        // Only a panic of the caller takes the other end away.
        let _ = self.0.send(found);
    }
}

/// The side that classifies.
pub struct BatchWorker {
    classifier: Arc<Classifier>,
    receiver: Receiver<Asked>,
    limits: BatchLimits,
    n_waiting: Arc<AtomicUsize>,
    observer: BatchObserver,
    _sign_of_life: Arc<()>,
}

impl BatchWorker {
    /// Classifies until the [`Batcher`] is dropped and all its requests are answered.
    pub fn run(self) {
        let mut waiting = VecDeque::new();
        loop {
            if waiting.is_empty() {
                let Ok(first) = self.receiver.recv() else { return };
                waiting.push_back(first);
            }
            waiting.extend(self.receiver.try_iter());
            let parts = self.next(&mut waiting);
            if !parts.is_empty() {
                self.look_at(parts, &mut waiting);
            }
        }
    }

    /// Requests that are next, with the number of their texts that are. Those that nobody waits for are dropped.
    fn next(&self, waiting: &mut VecDeque<Asked>) -> Vec<(Asked, usize)> {
        let (mut parts, mut n_texts) = (Vec::new(), 0);
        while let Some(asked) = waiting.pop_front() {
            let n_left = asked.texts.len() - asked.found.len();
            if !asked.asker.is_waiting() {
                self.n_waiting.fetch_sub(n_left, Ordering::Relaxed);
                continue;
            }
            let n = n_left.min(self.limits.max_texts.max(PART));
            n_texts += n;
            parts.push((asked, n));
            if n_texts >= self.limits.max_texts {
                break;
            }
        }
        parts
    }

    fn look_at(&self, parts: Vec<(Asked, usize)>, waiting: &mut VecDeque<Asked>) {
        let (started, n_requests) = (Instant::now(), parts.len());
        let texts: Vec<&[Encoded]> = parts.iter().map(|(asked, n)| next_texts(asked, *n)).collect();
        let n_texts = texts.iter().map(|texts| texts.len()).sum();
        let found = self.classify(&texts);
        let elapsed = started.elapsed();
        self.n_waiting.fetch_sub(n_texts, Ordering::Relaxed);
        // Before the answers: who has one finds its batch in the figures.
        (self.observer)(BatchDone { n_requests, n_texts, elapsed });
        // The rest of a long request goes behind what came while its first part was looked at.
        waiting.extend(self.receiver.try_iter());
        match found {
            Ok(found) => {
                for (part, found) in parts.into_iter().zip(found) {
                    self.go_on(part, Ok(found), waiting);
                }
            }
            // What one text does to a pass must not be the others' fault.
            Err(_) => {
                for (asked, n) in parts {
                    let alone = self.classify(&[next_texts(&asked, n)]);
                    self.go_on((asked, n), alone.map(|found| found.into_iter().flatten().collect()), waiting);
                }
            }
        }
    }

    /// Answers a request, or has it wait for the turn of its next part.
    fn go_on(&self, part: (Asked, usize), found: Result<Vec<Classified>, String>, waiting: &mut VecDeque<Asked>) {
        let (mut asked, n) = part;
        match found {
            Ok(found) => {
                asked.found.extend(found);
                match asked.found.len() == asked.texts.len() {
                    true => asked.asker.hear(Ok(asked.found)),
                    false => waiting.push_back(asked),
                }
            }
            Err(problem) => {
                let n_never = asked.texts.len() - asked.found.len() - n;
                self.n_waiting.fetch_sub(n_never, Ordering::Relaxed);
                asked.asker.hear(Err(problem));
            }
        }
    }

    /// By request, then by text.
    fn classify(&self, requests: &[&[Encoded]]) -> Result<Vec<Vec<Classified>>, String> {
        let ids: Vec<&[u32]> = requests.iter().copied().flatten().map(|encoded| encoded.ids.as_slice()).collect();
        let pass = || self.classifier.logits_of_all(&ids, self.limits.tokens_per_pass);
        let found = catch_unwind(AssertUnwindSafe(pass)).map_err(|_| "the classifier panicked".to_owned())?;
        let mut logits = found.map_err(|error| error.to_string())?.into_iter();
        let mut one = |encoded: &Encoded| {
            let logits = logits.next().expect("a row for each text");
            Classified { logits, n_tokens: encoded.ids.len(), n_left_out: encoded.n_left_out }
        };
        Ok(requests.iter().map(|texts| texts.iter().map(&mut one).collect()).collect())
    }
}

fn next_texts(asked: &Asked, n: usize) -> &[Encoded] {
    &asked.texts[asked.found.len()..][..n]
}
