//! What clients ask, in whatever form.

use super::refusal::Refusal;
use super::{ClassifiedText, StyleOptions};
use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Query, Request};
use axum::http::{StatusCode, header};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;

/// The form in which a request came, and in which it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AnswerForm {
    /// One text: label, confidence, probabilities.
    Prediction,
    /// Such an object for each text.
    Predictions,
    /// One text: label and score of each class.
    Scores,
    /// Such a list for each text.
    ScoreLists,
    /// vLLM's.
    Classify,
}

#[derive(Debug)]
pub(super) struct ClassifyRequest {
    pub(super) form: AnswerForm,
    pub(super) texts: Vec<String>,
    /// Scores as they are before they become probabilities.
    pub(super) is_raw: bool,
    /// Names of classes in English.
    pub(super) is_english: bool,
    /// The model's name, as the client gave it.
    pub(super) model: Option<String>,
    /// Refuse a text that is too long, and do not shorten it.
    is_whole: bool,
}

impl ClassifyRequest {
    fn new(form: AnswerForm, texts: Vec<String>) -> Self {
        Self { form, texts, is_raw: false, is_english: false, model: None, is_whole: false }
    }

    /// What is known before the tokens are counted.
    pub(super) fn check(&self, options: &StyleOptions) -> Result<(), Refusal> {
        let StyleOptions { max_texts, max_text_chars, .. } = *options;
        if self.texts.is_empty() {
            return Err(Refusal::value("no text to classify; expected one at least"));
        }
        if self.texts.len() > max_texts {
            return Err(Refusal::too_large(format!(
                "{} texts in one request; expected at most {max_texts}",
                self.texts.len()
            )));
        }
        if let Some(index) = self.texts.iter().position(|text| text.trim().is_empty()) {
            return Err(Refusal::value(format!("text {} is empty", index + 1)));
        }
        match self.texts.iter().position(|text| text.chars().nth(max_text_chars).is_some()) {
            Some(index) => {
                Err(Refusal::too_large(format!("text {} is longer than {max_text_chars} characters", index + 1)))
            }
            None => Ok(()),
        }
    }

    /// Whether texts were shortened that must not be.
    pub(super) fn check_lengths(&self, found: &[ClassifiedText], max_length: usize) -> Result<(), Refusal> {
        let is_cut = |text: &ClassifiedText| text.n_left_out > 0;
        match found.iter().position(is_cut).filter(|_| self.is_whole) {
            Some(index) => {
                let n_tokens = found[index].n_tokens + found[index].n_left_out;
                let what = format!(
                    "text {} has {n_tokens} tokens; expected at most {max_length}, or leave `truncate` out",
                    index + 1
                );
                Err(Refusal::too_large(what))
            }
            None => Ok(()),
        }
    }
}

/// `text` alone, or text-embeddings-inference's.
#[derive(Debug, Deserialize)]
struct PredictBody {
    text: Option<Value>,
    inputs: Option<Value>,
    #[serde(default)]
    raw_scores: bool,
    truncate: Option<bool>,
    #[serde(default)]
    english: bool,
}

/// Reads a request to `/predict`. A text may stand in the address, where the script's service had it.
pub(super) async fn predict(request: Request, options: &StyleOptions) -> Result<ClassifyRequest, Refusal> {
    let in_address = Query::<HashMap<String, String>>::try_from_uri(request.uri());
    let Query(mut in_address) = in_address.map_err(|rejection| Refusal::value(rejection.body_text()))?;
    if let Some(text) = in_address.remove("text") {
        let is_english = in_address.get("english").is_some_and(|value| value == "true");
        return Ok(ClassifyRequest { is_english, ..ClassifyRequest::new(AnswerForm::Prediction, vec![text]) });
    }
    let body: PredictBody = read(request, options, PREDICT_BODY).await?;
    let asked = match (body.text, body.inputs) {
        (Some(Value::String(text)), None) => ClassifyRequest::new(AnswerForm::Prediction, vec![text]),
        (Some(Value::Array(texts)), None) => ClassifyRequest::new(AnswerForm::Predictions, all_texts("text", texts)?),
        (Some(_), None) => return Err(Refusal::value("`text` is neither a text nor a list of texts")),
        (None, Some(inputs)) => inputs_of(inputs)?,
        (Some(_), Some(_)) => return Err(Refusal::value("both `text` and `inputs`; expected one of them")),
        (None, None) => return Err(no_text(PREDICT_BODY)),
    };
    Ok(ClassifyRequest {
        is_raw: body.raw_scores,
        is_english: body.english,
        is_whole: body.truncate == Some(false),
        ..asked
    })
}

/// text-embeddings-inference's: a text, a text in a list, a pair in a list, or a list of such lists. A pair is a question and its answer.
fn inputs_of(inputs: Value) -> Result<ClassifyRequest, Refusal> {
    let is_batch = |items: &[Value]| items.iter().any(Value::is_array);
    match inputs {
        Value::String(text) => Ok(ClassifyRequest::new(AnswerForm::Scores, vec![text])),
        Value::Array(items) if is_batch(&items) => {
            let texts = items.into_iter().map(sequence).collect::<Result<_, _>>()?;
            Ok(ClassifyRequest::new(AnswerForm::ScoreLists, texts))
        }
        Value::Array(items) => Ok(ClassifyRequest::new(AnswerForm::Scores, vec![sequence(Value::Array(items))?])),
        _ => Err(Refusal::value("`inputs` is neither a text nor a list")),
    }
}

fn sequence(item: Value) -> Result<String, Refusal> {
    let parts = match item {
        Value::Array(parts) => all_texts("inputs", parts)?,
        Value::String(text) => vec![text],
        _ => return Err(Refusal::value("an item of `inputs` is neither a text nor a list of texts")),
    };
    match <[String; 2]>::try_from(parts) {
        Ok([question, answer]) => Ok(format!("用户问题：{question}\n回答：{answer}")),
        Err(mut parts) if parts.len() == 1 => Ok(parts.remove(0)),
        Err(parts) => Err(Refusal::value(format!(
            "an item of `inputs` has {} texts; expected one, or a question and its answer",
            parts.len()
        ))),
    }
}

fn all_texts(name: &str, items: Vec<Value>) -> Result<Vec<String>, Refusal> {
    let text = |item| match item {
        Value::String(text) => Ok(text),
        other => Err(Refusal::value(format!("`{name}` holds {other}; expected texts"))),
    };
    items.into_iter().map(text).collect()
}

#[derive(Debug, Deserialize)]
struct ClassifyBody {
    input: Option<Value>,
    model: Option<String>,
    messages: Option<Value>,
    /// Older clients call it `activation`.
    #[serde(alias = "activation")]
    use_activation: Option<bool>,
}

/// Reads a request to `/classify`.
pub(super) async fn classify(request: Request, options: &StyleOptions) -> Result<ClassifyRequest, Refusal> {
    let body: ClassifyBody = read(request, options, CLASSIFY_BODY).await?;
    let texts = match (body.input, body.messages) {
        (Some(Value::String(text)), _) => vec![text],
        (Some(Value::Array(texts)), _) if texts.iter().all(Value::is_string) => all_texts("input", texts)?,
        (Some(_), _) => {
            return Err(Refusal::value("`input` is neither a text nor a list of texts; tokens are not taken"));
        }
        (None, Some(_)) => return Err(Refusal::value("`messages` are not taken; expected `input`")),
        (None, None) => return Err(no_text(CLASSIFY_BODY)),
    };
    let is_raw = body.use_activation == Some(false);
    Ok(ClassifyRequest { model: body.model, is_raw, ..ClassifyRequest::new(AnswerForm::Classify, texts) })
}

/// The accepted bodies, for the error message of a missing one.
const PREDICT_BODY: &str = "{\"text\": ...} or {\"inputs\": ...}";
const CLASSIFY_BODY: &str = "{\"input\": ...}, a text or a list of texts";

fn no_text(expected: &str) -> Refusal {
    Refusal::value(format!("no text there; expected {expected}"))
}

async fn read<T: serde::de::DeserializeOwned>(
    request: Request,
    options: &StyleOptions,
    expected: &str,
) -> Result<T, Refusal> {
    let has_body = request.headers().get(header::CONTENT_LENGTH).is_none_or(|length| length != "0");
    if !has_body || !has_type(&request) && is_without_body(&request) {
        return Err(no_text(expected));
    }
    let body = tokio::time::timeout(options.body_timeout, Json::<T>::from_request(request, &())).await;
    let late = |_| {
        Refusal::new(StatusCode::REQUEST_TIMEOUT, format!("the body did not come within {:?}", options.body_timeout))
    };
    let Json(body) = body.map_err(late)?.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            Refusal::too_large(format!("the body is larger than {} bytes", options.max_body_bytes))
        }
        StatusCode::UNSUPPORTED_MEDIA_TYPE => {
            Refusal::new(rejection.status(), "the body is not said to be JSON; send `Content-Type: application/json`")
        }
        status => Refusal::new(status, format!("{}; expected {expected}", reason_of(&rejection))),
    })?;
    Ok(body)
}

/// Why a body cannot be read, in the words of the innermost cause: the outer ones name types of this program.
fn reason_of(rejection: &JsonRejection) -> String {
    let mut cause: &dyn std::error::Error = rejection;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    format!("the body is not what was expected: {cause}")
}

fn has_type(request: &Request) -> bool {
    request.headers().contains_key(header::CONTENT_TYPE)
}

fn is_without_body(request: &Request) -> bool {
    let headers = request.headers();
    !headers.contains_key(header::CONTENT_LENGTH) && !headers.contains_key(header::TRANSFER_ENCODING)
}
