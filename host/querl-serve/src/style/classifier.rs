//! The interface between a style service and its caller: a classifier and options.

use crate::server::ServerLimits;
use std::time::Duration;

/// The classification of one text.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassifiedText {
    /// Probability of each class, in the order of the classes; they sum to 1.
    pub probabilities: Vec<f64>,
    /// Logit of each class, in the order of the classes.
    pub scores: Vec<f64>,
    /// Number of tokens that were classified.
    pub n_tokens: usize,
    /// Number of tokens beyond the maximum length, which were cut off.
    pub n_left_out: usize,
}

/// A classification request in progress.
pub trait PendingRequest: Send {
    /// False once the request is cancelled: the client has left, or the time limit has passed.
    fn is_open(&self) -> bool;

    /// Receives the results in the order of the texts; an error is a sentence for the log.
    fn complete(self: Box<Self>, results: Result<Vec<ClassifiedText>, String>);
}

/// Why a request was not queued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SubmitError {
    /// The queue is full; the message is a sentence for the client.
    QueueFull(String),
    /// A text cannot be classified; the message is a sentence for the client.
    Text(String),
    /// The classifier has ended.
    Ended,
}

/// A text classifier that all requests share.
pub trait TextClassifier: Send + Sync {
    /// Queues texts; `request` is completed from any thread. It may tokenize, which takes time: it is not called on a thread that other
    /// requests need.
    ///
    /// # Errors
    /// The texts are not queued.
    fn submit(&self, texts: &[&str], request: Box<dyn PendingRequest>) -> Result<(), SubmitError>;

    /// False once the classifier has ended and will answer no request.
    fn is_alive(&self) -> bool;

    /// Names of the classes, by id.
    fn classes(&self) -> &[String];

    /// English names of the classes, if they are known.
    fn english(&self) -> Option<&[String]>;

    /// Number of texts that are queued or being classified.
    fn n_waiting(&self) -> usize;

    /// True if the queue has no room for a further text.
    fn is_full(&self) -> bool;
}

/// Options of a style service.
#[derive(Clone)]
pub struct StyleOptions {
    /// Name of the model in responses and `/info`.
    pub model_name: String,
    /// Maximum number of tokens of a text; longer texts are shortened.
    pub max_length: usize,
    /// Maximum size of a request body.
    pub max_body_bytes: usize,
    /// Maximum number of texts in one request.
    pub max_texts: usize,
    /// Maximum number of characters of a text.
    pub max_text_chars: usize,
    /// Time limit for a whole body to arrive.
    pub body_timeout: Duration,
    /// Time limit of a response, time in the queue included.
    pub answer_timeout: Duration,
    /// The key expected after `Authorization: Bearer`; `None` permits every client.
    pub api_key: Option<String>,
    /// Limits of connections. Requests in progress get `answer_timeout` to finish when the server is stopped.
    pub server: ServerLimits,
}
