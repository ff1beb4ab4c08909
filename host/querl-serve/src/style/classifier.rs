//! What a style service needs of its caller: a classifier and options.

use crate::server::ServerLimits;
use std::time::Duration;

/// Classification of one text.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassifiedText {
    /// One for each class; they sum to 1.
    pub probabilities: Vec<f64>,
    /// Logits, one for each class.
    pub scores: Vec<f64>,
    /// Tokens that were classified.
    pub n_tokens: usize,
    /// Tokens that were cut off.
    pub n_left_out: usize,
}

/// A request in progress.
pub trait PendingRequest: Send {
    /// False once it is cancelled: the client has left, or the time limit has passed.
    fn is_open(&self) -> bool;

    /// Receives the results in the order of the texts; an error is a sentence for the log.
    fn complete(self: Box<Self>, results: Result<Vec<ClassifiedText>, String>);
}

/// Why a request is not queued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SubmitError {
    /// The queue is full; in a sentence.
    QueueFull(String),
    /// A text cannot be classified; in a sentence.
    Text(String),
    /// The classifier has ended.
    Ended,
}

/// A classifier that requests share.
pub trait TextClassifier: Send + Sync {
    /// Queues texts; `request` is completed from any thread. It may tokenize, which takes time: it is not called on a thread that other
    /// requests need.
    ///
    /// # Errors
    /// The texts are not queued.
    fn submit(&self, texts: &[&str], request: Box<dyn PendingRequest>) -> Result<(), SubmitError>;

    /// False once it will never answer again.
    fn is_alive(&self) -> bool;

    /// Names of the classes, by id.
    fn classes(&self) -> &[String];

    /// English names of the classes, where they are known.
    fn english(&self) -> Option<&[String]>;

    /// Texts that are queued or being classified.
    fn n_waiting(&self) -> usize;

    /// Whether a further text would not be queued.
    fn is_full(&self) -> bool;
}

/// What is served, and to whom.
#[derive(Clone)]
pub struct StyleOptions {
    /// Model name of responses and `/info`.
    pub model_name: String,
    /// Maximum number of tokens of a text.
    pub max_length: usize,
    /// Maximum size of a request body.
    pub max_body_bytes: usize,
    /// Maximum number of texts of a request.
    pub max_texts: usize,
    /// Maximum number of characters of a text.
    pub max_text_chars: usize,
    /// Time limit for a whole body to arrive.
    pub body_timeout: Duration,
    /// Time limit of a response, time in the queue included.
    pub answer_timeout: Duration,
    /// The key expected after `Authorization: Bearer`; `None` permits every client.
    pub api_key: Option<String>,
    /// Limits of connections; requests in progress have `answer_timeout` when the server stops.
    pub server: ServerLimits,
}
