//! Texts of many callers, classified in common passes.

use super::{Classifier, ClassifierTokenizer, Encoded, Labels};
use crate::ModelError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// How much goes together, and how much may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Texts that are taken together; with 1 every request has passes of its own. A request with more of them is not parted.
    pub max_texts: usize,
    /// Most tokens of one pass.
    pub tokens_per_pass: usize,
    /// Texts that may wait; more are turned away.
    pub max_waiting: usize,
}

/// What was found of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Classified {
    /// One for each class.
    pub logits: Vec<f64>,
    /// Tokens that were looked at.
    pub n_tokens: usize,
    /// Tokens that were left out for want of room.
    pub n_left_out: usize,
}

/// What was done in one go.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchDone {
    /// Requests that were answered.
    pub n_requests: usize,
    /// Their texts.
    pub n_texts: usize,
    /// Time of the model.
    pub elapsed: Duration,
}

/// Why a request is not taken.
#[derive(Debug, thiserror::Error)]
pub enum NotTaken {
    /// More would wait than may.
    #[error("{n_waiting} texts wait already; ask again later")]
    Busy {
        /// Texts that wait.
        n_waiting: usize,
    },
    /// The tokenizer finds no token in a text.
    #[error(transparent)]
    Text(#[from] ModelError),
    /// The thread that classifies is gone.
    #[error("the classifier has ended")]
    Ended,
}

/// Hears the result of a request's texts, in their order; an error is a sentence.
pub type Answer = Box<dyn FnOnce(Result<Vec<Classified>, String>) + Send>;

/// Hears of every batch.
pub type BatchObserver = Box<dyn Fn(BatchDone) + Send>;

struct Asked {
    texts: Vec<Encoded>,
    answer: Answer,
}

/// Hands texts of many callers to one thread, which classifies whatever waits when it is free. Nobody is waited for: a text that comes alone is answered at once, and texts that
/// come while a pass is under way share the next. What is found of a text does not depend on the others.
pub struct Batcher {
    sender: Sender<Asked>,
    n_waiting: Arc<AtomicUsize>,
    tokenizer: ClassifierTokenizer,
    labels: Labels,
    limits: BatchLimits,
}

impl Batcher {
    /// The two sides: who hands texts over, and who classifies them on whatever thread it is run. That thread should be the one that called
    /// [`set_threads`](crate::set_threads): it takes its part in the work then.
    pub fn new(
        classifier: Classifier,
        tokenizer: ClassifierTokenizer,
        limits: BatchLimits,
        observer: BatchObserver,
    ) -> (Self, BatchWorker) {
        let (sender, receiver) = channel();
        let n_waiting = Arc::new(AtomicUsize::new(0));
        let labels = classifier.labels().clone();
        let worker = BatchWorker { classifier, receiver, limits, n_waiting: n_waiting.clone(), observer };
        (Self { sender, n_waiting, tokenizer, labels, limits }, worker)
    }

    /// Names of the classes.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// Texts that wait or are looked at.
    pub fn n_waiting(&self) -> usize {
        self.n_waiting.load(Ordering::Relaxed)
    }

    /// Hands texts over; `answer` is called from the classifier's thread.
    ///
    /// # Errors
    /// Too many wait, or a text has no token; `answer` is dropped then.
    pub fn submit(&self, texts: &[&str], answer: Answer) -> Result<(), NotTaken> {
        let encoded = texts.iter().map(|text| self.tokenizer.encode(text)).collect::<Result<Vec<_>, _>>()?;
        let n_waiting = self.n_waiting.fetch_add(encoded.len(), Ordering::Relaxed);
        let given_back = |error| {
            self.n_waiting.fetch_sub(texts.len(), Ordering::Relaxed);
            Err(error)
        };
        // What comes to an idle classifier is taken whatever its size.
        if n_waiting > 0 && n_waiting + encoded.len() > self.limits.max_waiting {
            return given_back(NotTaken::Busy { n_waiting });
        }
        self.sender.send(Asked { texts: encoded, answer }).or_else(|_| given_back(NotTaken::Ended))
    }

    /// Classifies texts and waits for it.
    ///
    /// # Errors
    /// As [`Batcher::submit`], or the model failed; a sentence.
    pub fn ask(&self, texts: &[&str]) -> Result<Vec<Classified>, String> {
        let (sender, receiver) = channel();
        let answer: Answer = Box::new(move |found| drop(sender.send(found)));
        self.submit(texts, answer).map_err(|error| error.to_string())?;
        receiver.recv().unwrap_or_else(|_| Err(NotTaken::Ended.to_string()))
    }
}

/// The side that classifies.
pub struct BatchWorker {
    classifier: Classifier,
    receiver: Receiver<Asked>,
    limits: BatchLimits,
    n_waiting: Arc<AtomicUsize>,
    observer: BatchObserver,
}

impl BatchWorker {
    /// Classifies until the [`Batcher`] is dropped and all its requests are answered.
    pub fn run(self) {
        while let Ok(first) = self.receiver.recv() {
            let mut requests = vec![first];
            let mut n_texts = requests[0].texts.len();
            while n_texts < self.limits.max_texts {
                let Ok(next) = self.receiver.try_recv() else { break };
                n_texts += next.texts.len();
                requests.push(next);
            }
            let (started, n_requests) = (Instant::now(), requests.len());
            let found = classify(&self.classifier, &requests.iter().collect::<Vec<_>>(), self.limits);
            let elapsed = started.elapsed();
            self.n_waiting.fetch_sub(n_texts, Ordering::Relaxed);
            // Before the answers: who has one finds its batch in the figures.
            (self.observer)(BatchDone { n_requests, n_texts, elapsed });
            match found {
                Ok(found) => requests.into_iter().zip(found).for_each(|(asked, found)| (asked.answer)(Ok(found))),
                // What one text does to a pass must not be the others' fault.
                Err(_) => requests.into_iter().for_each(|asked| self.answer_alone(asked)),
            }
        }
    }

    fn answer_alone(&self, asked: Asked) {
        let alone = classify(&self.classifier, &[&asked], self.limits);
        (asked.answer)(alone.map(|found| found.into_iter().flatten().collect()));
    }
}

/// By request, then by text.
fn classify(classifier: &Classifier, requests: &[&Asked], limits: BatchLimits) -> Result<Vec<Vec<Classified>>, String> {
    let ids: Vec<&[u32]> =
        requests.iter().flat_map(|asked| &asked.texts).map(|encoded| encoded.ids.as_slice()).collect();
    let pass = || classifier.logits_of_all(&ids, limits.tokens_per_pass);
    let found = catch_unwind(AssertUnwindSafe(pass)).map_err(|_| "the classifier panicked".to_owned())?;
    let mut logits = found.map_err(|error| error.to_string())?.into_iter();
    let mut one = |encoded: &Encoded| {
        let logits = logits.next().expect("a row for each text");
        Classified { logits, n_tokens: encoded.ids.len(), n_left_out: encoded.n_left_out }
    };
    Ok(requests.iter().map(|asked| asked.texts.iter().map(&mut one).collect()).collect())
}
