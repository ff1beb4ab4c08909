//! Request and response bodies of the style service, in the forms of the training script's service, of text-embeddings-inference and
//! of vLLM.

use super::classifier::{ClassifiedText, StyleOptions, SubmitError, TextClassifier};
use crate::body::{BodyLimits, JsonFields, quoted, read_fields};
use crate::error::ErrorResponse;
use axum::extract::{Query, Request};
use axum::http::{StatusCode, header};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::{Value, json, to_string};
use std::collections::HashMap;

/// The form of a request, which determines that of its response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResponseForm {
    /// One text, answered with label, confidence and probabilities (the training script's service).
    Prediction,
    /// A list of texts, answered with a list of such predictions.
    Predictions,
    /// One text, answered with label and score of each class (text-embeddings-inference).
    Scores,
    /// A list of texts, answered with a list of such score lists (text-embeddings-inference).
    ScoreLists,
    /// The request and response of vLLM's `/classify`.
    Classify,
}

#[derive(Debug)]
pub(super) struct ClassifyRequest {
    pub(super) form: ResponseForm,
    pub(super) texts: Vec<String>,
    /// Respond with logits in place of probabilities.
    pub(super) is_raw: bool,
    pub(super) is_english: bool,
    pub(super) model: Option<String>,
    /// Reject a text that is too long instead of shortening it.
    rejects_long: bool,
}

impl ClassifyRequest {
    fn new(form: ResponseForm, texts: Vec<String>) -> Self {
        Self { form, texts, is_raw: false, is_english: false, model: None, rejects_long: false }
    }

    /// Checks the request without a tokenizer: number and size of the texts.
    pub(super) fn check(&self, options: &StyleOptions) -> Result<(), ErrorResponse> {
        let StyleOptions { max_texts, max_text_chars, .. } = *options;
        if self.texts.is_empty() {
            return Err(ErrorResponse::value("no text to classify; expected one at least"));
        }
        if self.texts.len() > max_texts {
            return Err(ErrorResponse::too_large(format!(
                "{} texts in one request; expected at most {max_texts}",
                self.texts.len()
            )));
        }
        if let Some(index) = self.texts.iter().position(|text| text.trim().is_empty()) {
            return Err(ErrorResponse::value(format!("text {} is empty", index + 1)));
        }
        match self.texts.iter().position(|text| text.chars().nth(max_text_chars).is_some()) {
            Some(index) => {
                Err(ErrorResponse::too_large(format!("text {} is longer than {max_text_chars} characters", index + 1)))
            }
            None => Ok(()),
        }
    }

    /// Rejects texts that were shortened, if the request demands that they are classified whole.
    pub(super) fn check_lengths(&self, classified: &[ClassifiedText], max_length: usize) -> Result<(), ErrorResponse> {
        let is_cut = |text: &ClassifiedText| text.n_left_out > 0;
        match classified.iter().position(is_cut).filter(|_| self.rejects_long) {
            Some(index) => {
                let n_tokens = classified[index].n_tokens + classified[index].n_left_out;
                let what = format!(
                    "text {} has {n_tokens} tokens; expected at most {max_length}, or leave `truncate` out",
                    index + 1
                );
                Err(ErrorResponse::too_large(what))
            }
            None => Ok(()),
        }
    }
}

/// `text`, or `inputs` as in text-embeddings-inference.
#[derive(Debug)]
struct PredictBody {
    text: Option<Value>,
    inputs: Option<Value>,
    raw_scores: bool,
    truncate: bool,
    english: bool,
}

impl PredictBody {
    fn new(mut fields: JsonFields) -> Result<Self, ErrorResponse> {
        Ok(Self {
            text: fields.take("text", TEXTS)?,
            inputs: fields.take("inputs", TEXTS)?,
            raw_scores: fields.take("raw_scores", FLAG)?.unwrap_or(false),
            truncate: fields.take("truncate", FLAG)?.unwrap_or(true),
            english: fields.take("english", FLAG)?.unwrap_or(false),
        })
    }
}

/// Reads a request to `/predict`. The text may be a query parameter, as in the training script's service.
pub(super) async fn predict(request: Request, options: &StyleOptions) -> Result<ClassifyRequest, ErrorResponse> {
    let query = Query::<HashMap<String, String>>::try_from_uri(request.uri());
    let Query(mut query) = query.map_err(|rejection| {
        ErrorResponse::value(format!(
            "the query string is not `text=...` in percent-encoding: {}",
            rejection.body_text()
        ))
    })?;
    if let Some(text) = query.remove("text") {
        let is_english = query.get("english").is_some_and(|value| value == "true");
        return Ok(ClassifyRequest { is_english, ..ClassifyRequest::new(ResponseForm::Prediction, vec![text]) });
    }
    let body = PredictBody::new(read(request, options, PREDICT_BODY).await?)?;
    let request = match (body.text, body.inputs) {
        (Some(Value::String(text)), None) => ClassifyRequest::new(ResponseForm::Prediction, vec![text]),
        (Some(Value::Array(texts)), None) => ClassifyRequest::new(ResponseForm::Predictions, all_texts("text", texts)?),
        (Some(other), None) => return Err(wrong_value("text", &other)),
        (None, Some(inputs)) => inputs_of(inputs)?,
        (Some(_), Some(_)) => return Err(ErrorResponse::value("both `text` and `inputs`; expected one of them")),
        (None, None) => return Err(no_text(PREDICT_BODY)),
    };
    Ok(ClassifyRequest { is_raw: body.raw_scores, is_english: body.english, rejects_long: !body.truncate, ..request })
}

/// `inputs` of text-embeddings-inference: a text, a text in a list, a pair in a list, or a list of such lists. A pair is a question
/// and its answer.
fn inputs_of(inputs: Value) -> Result<ClassifyRequest, ErrorResponse> {
    let is_batch = |items: &[Value]| items.iter().any(Value::is_array);
    match inputs {
        Value::String(text) => Ok(ClassifyRequest::new(ResponseForm::Scores, vec![text])),
        Value::Array(items) if is_batch(&items) => {
            let texts = items.into_iter().map(sequence).collect::<Result<_, _>>()?;
            Ok(ClassifyRequest::new(ResponseForm::ScoreLists, texts))
        }
        Value::Array(items) => Ok(ClassifyRequest::new(ResponseForm::Scores, vec![sequence(Value::Array(items))?])),
        other => Err(wrong_value("inputs", &other)),
    }
}

fn sequence(item: Value) -> Result<String, ErrorResponse> {
    let parts = match item {
        Value::Array(parts) => all_texts("inputs", parts)?,
        Value::String(text) => vec![text],
        other => {
            return Err(ErrorResponse::value(format!("an item of `inputs` is {}; expected {TEXTS}", quoted(&other))));
        }
    };
    match <[String; 2]>::try_from(parts) {
        Ok([question, answer]) => Ok(format!("用户问题：{question}\n回答：{answer}")),
        Err(mut parts) if parts.len() == 1 => Ok(parts.remove(0)),
        Err(parts) => Err(ErrorResponse::value(format!(
            "an item of `inputs` has {} texts; expected one, or a question and its answer",
            parts.len()
        ))),
    }
}

fn all_texts(name: &str, items: Vec<Value>) -> Result<Vec<String>, ErrorResponse> {
    let text = |item| match item {
        Value::String(text) => Ok(text),
        other => Err(ErrorResponse::value(format!("`{name}` holds {}; expected texts", quoted(&other)))),
    };
    items.into_iter().map(text).collect()
}

pub(super) async fn classify(request: Request, options: &StyleOptions) -> Result<ClassifyRequest, ErrorResponse> {
    let mut body = read(request, options, CLASSIFY_BODY).await?;
    let texts = match (body.take("input", TEXTS)?, body.take::<Value>("messages", TEXTS)?) {
        (Some(Value::String(text)), _) => vec![text],
        (Some(Value::Array(texts)), _) if texts.iter().all(Value::is_string) => all_texts("input", texts)?,
        (Some(other), _) => {
            let what = format!("`input` is {}; expected {TEXTS}; tokens are not taken", quoted(&other));
            return Err(ErrorResponse::value(what));
        }
        (None, Some(_)) => return Err(ErrorResponse::value("`messages` are not taken; expected `input`")),
        (None, None) => return Err(no_text(CLASSIFY_BODY)),
    };
    // Older clients use the second name.
    let is_activated = body.take("use_activation", FLAG)?.or(body.take("activation", FLAG)?);
    let (model, is_raw) = (body.take("model", "a text")?, is_activated == Some(false));
    Ok(ClassifyRequest { model, is_raw, ..ClassifyRequest::new(ResponseForm::Classify, texts) })
}

/// The accepted bodies and values, for messages.
const PREDICT_BODY: &str = "{\"text\": ...} or {\"inputs\": ...}";
const CLASSIFY_BODY: &str = "{\"input\": ...}, a text or a list of texts";
const TEXTS: &str = "a text or a list of texts";
const FLAG: &str = "true or false";

fn wrong_value(name: &str, value: &Value) -> ErrorResponse {
    ErrorResponse::value(format!("`{name}` is {}; expected {TEXTS}", quoted(value)))
}

fn no_text(expected: &str) -> ErrorResponse {
    ErrorResponse::value(format!("no text there; expected {expected}"))
}

async fn read(request: Request, options: &StyleOptions, expected: &str) -> Result<JsonFields, ErrorResponse> {
    let headers = request.headers();
    let has_body = match headers.get(header::CONTENT_LENGTH) {
        Some(length) => length != "0",
        None => headers.contains_key(header::TRANSFER_ENCODING) || headers.contains_key(header::CONTENT_TYPE),
    };
    if !has_body {
        return Err(no_text(expected));
    }
    let limits = BodyLimits { max_bytes: options.max_body_bytes, timeout: options.body_timeout, expected };
    read_fields(request, limits).await
}

/// A prediction for one text: the label of the most probable class, and the probability of each class.
#[derive(Debug, Serialize)]
pub struct StylePrediction<'a> {
    predicted_label: &'a str,
    confidence: f64,
    probabilities: ByClass<'a>,
}

/// Probabilities by class, in the order of the classes.
#[derive(Debug)]
struct ByClass<'a>(&'a [String], &'a [f64]);

impl Serialize for ByClass<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.1.len()))?;
        for (name, probability) in self.0.iter().zip(self.1) {
            map.serialize_entry(name, probability)?;
        }
        map.end()
    }
}

impl<'a> StylePrediction<'a> {
    /// A prediction from the class names and the probability of each class; there is at least one class.
    pub fn new(names: &'a [String], probabilities: &'a [f64]) -> Self {
        let predicted = argmax(probabilities);
        Self {
            predicted_label: &names[predicted],
            confidence: probabilities[predicted],
            probabilities: ByClass(names, probabilities),
        }
    }

    /// The prediction as lines for a terminal.
    pub fn text(&self) -> String {
        let lines = self.probabilities.0.iter().zip(self.probabilities.1);
        let lines: String = lines.map(|(name, probability)| format!("  {name}: {probability:.3}\n")).collect();
        format!("{} (confidence {:.3})\n{lines}", self.predicted_label, self.confidence)
    }
}

/// Index of the highest probability, the lowest on a tie.
fn argmax(probabilities: &[f64]) -> usize {
    let better = |best: usize, index: usize| if probabilities[index] > probabilities[best] { index } else { best };
    (1..probabilities.len()).fold(0, better)
}

/// A class and its probability or logit.
#[derive(Debug, Serialize)]
struct ClassScore<'a> {
    score: f64,
    label: &'a str,
}

fn by_score<'a>(names: &'a [String], values: &[f64]) -> Vec<ClassScore<'a>> {
    let mut list: Vec<ClassScore<'a>> =
        names.iter().zip(values).map(|(label, &score)| ClassScore { score, label }).collect();
    list.sort_by(|a, b| b.score.total_cmp(&a.score));
    list
}

/// The JSON response of `/predict`, with classes in the model's order.
pub(super) fn predict_response<'a>(
    request: &ClassifyRequest,
    classifier: &'a dyn TextClassifier,
    classified: &'a [ClassifiedText],
) -> Result<String, ErrorResponse> {
    let names = match (request.is_english, classifier.english()) {
        (true, Some(english)) => english,
        (true, None) => {
            return Err(ErrorResponse::value("the model has no English names of its classes; leave `english` out"));
        }
        (false, _) => classifier.classes(),
    };
    let prediction = |text: &'a ClassifiedText| StylePrediction::new(names, &text.probabilities);
    let scores =
        |text: &ClassifiedText| by_score(names, if request.is_raw { &text.scores } else { &text.probabilities });
    let json = match request.form {
        ResponseForm::Prediction => to_string(&prediction(&classified[0])),
        ResponseForm::Scores => to_string(&scores(&classified[0])),
        ResponseForm::Predictions | ResponseForm::Classify => {
            to_string(&classified.iter().map(prediction).collect::<Vec<_>>())
        }
        ResponseForm::ScoreLists => to_string(&classified.iter().map(scores).collect::<Vec<_>>()),
    };
    Ok(json.expect("names and numbers have a JSON form"))
}

/// The JSON response of `/classify`; `probs` holds logits if the client requests them.
pub(super) fn classify_response(
    request: &ClassifyRequest,
    classifier: &dyn TextClassifier,
    classified: &[ClassifiedText],
    (id, created, model): (&str, u64, &str),
) -> Value {
    let n_tokens: usize = classified.iter().map(|text| text.n_tokens).sum();
    let item = |(index, text): (usize, &ClassifiedText)| {
        json!({
            "index": index,
            "label": classifier.classes()[argmax(&text.probabilities)],
            "probs": if request.is_raw { &text.scores } else { &text.probabilities },
            "num_classes": text.probabilities.len(),
        })
    };
    json!({
        "id": id,
        "object": "list",
        "created": created,
        "model": model,
        "data": classified.iter().enumerate().map(item).collect::<Vec<_>>(),
        "usage": {
            "prompt_tokens": n_tokens,
            "total_tokens": n_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": null,
        },
    })
}

pub(super) fn rejected(error: SubmitError) -> ErrorResponse {
    match error {
        SubmitError::QueueFull(message) => ErrorResponse::new(StatusCode::TOO_MANY_REQUESTS, message),
        SubmitError::Text(message) => ErrorResponse::value(message),
        SubmitError::Ended => {
            ErrorResponse::unavailable("the classifier has ended, and the server with it; its log says why")
        }
    }
}
