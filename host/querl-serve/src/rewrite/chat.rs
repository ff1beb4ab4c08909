//! OpenAI's `POST /v1/chat/completions`, `GET /v1/models` and `GET /v1/models/MODEL`.
//!
//! The model `TENANT` responds to the client's own messages with the tenant's adapter. The model `TENANT/rewrite` takes the last message as a
//! query and earlier ones as its history, and responds with the rewrite by the tenant's own prompts.
//! Source: <https://platform.openai.com/docs/api-reference/chat>. Departures: the default `temperature` is 0; `n` is 1; messages are texts;
//! `system_fingerprint` is the version of the tenant.

use super::access_log::RequestRecord;
use super::candidates::Route;
use super::protocol::{check_text, user};
use super::request_log::LoggedQuery;
use super::service::{
    Audience, Call, PermittedTenants, REWRITE_SUFFIX, RewriteService, finished, model_failed, rejected, since_epoch,
    unknown_tenant, with_fallback,
};
use super::traces::{AccessEntry, Phases};
use crate::body::{JsonFields, quoted};
use crate::connections::RequestSlot;
use crate::error::{ErrorForm, ErrorResponse, json_response, openai_error};
use crate::general_rag::history_text;
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::poll_fn;
use querl_core::records::{Context, Message};
use querl_core::serving::{
    ChatTask, Generation, GenerationEvent, GenerationFailure, GenerationTask, Role, SubmitError, Tenant,
};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout_at;
use tracing::Instrument;

const MAX_STOPS: usize = 16;
/// As of OpenAI's API.
const MAX_MESSAGES: usize = 2048;

/// The route `GET /v1/models`: two models for each tenant that the client may use.
pub(super) async fn models(State(service): State<Arc<RewriteService>>, headers: HeaderMap) -> Response {
    let permitted = service.check_permitted(&headers);
    let list = permitted.map(|PermittedTenants { tenants, .. }| {
        json!({"object": "list", "data": tenants.iter().flat_map(models_of).collect::<Vec<_>>()})
    });
    json_response(list, ErrorForm::OpenAi)
}

/// The route `GET /v1/models/MODEL`: one of the models of `GET /v1/models`.
pub(super) async fn model(
    State(service): State<Arc<RewriteService>>,
    name: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Response {
    // A name that is not UTF-8 is not the name of a tenant.
    let name = name.map_or_else(|_| "\u{FFFD}".to_owned(), |Path(name)| name);
    let found = service.check_permitted(&headers).and_then(|PermittedTenants { tenants, has_others }| {
        let scope = if has_others { "with this key" } else { "here" };
        let found = tenants.iter().flat_map(models_of).find(|model| model["id"] == name.as_str());
        found.ok_or_else(|| unknown_tenant("model", &name, scope, &tenants))
    });
    json_response(found, ErrorForm::OpenAi)
}

fn models_of(tenant: &Tenant) -> [Value; 2] {
    ["", REWRITE_SUFFIX].map(|suffix| {
        let id = format!("{}{suffix}", tenant.name);
        json!({"id": id, "object": "model", "created": tenant.created_at, "owned_by": "querl"})
    })
}

/// The fields of a request that are used; others are ignored, as other services with this API do.
struct ChatRequest {
    model: Option<String>,
    user: Option<String>,
    task: ChatTask,
    /// The field that limits the tokens of the response, if the client sent one.
    limit: Option<&'static str>,
    is_stream: bool,
    includes_usage: bool,
}

impl ChatRequest {
    fn new(mut fields: JsonFields) -> Result<Self, ErrorResponse> {
        let fields = &mut fields;
        let n: Option<u64> = fields.take("n", "1")?;
        if let Some(n) = n.filter(|&n| n != 1) {
            let what = format!("`n` is {n}; expected 1: there is one response to a request");
            return Err(ErrorResponse::field("n", what));
        }
        let (limit, max_new_tokens) = max_tokens(fields)?.unzip();
        let stream_options: Option<Value> = fields.take("stream_options", "an object")?;
        let seed: Option<i64> = fields.take("seed", "an integer")?;
        let task = ChatTask {
            messages: messages(fields.take_required("messages", "a list of messages")?)?,
            temperature: number(fields, "temperature", 0.0, (0.0, 2.0))?,
            // With 0, only the most probable token is sampled.
            top_p: number(fields, "top_p", 1.0, (0.0, 1.0))?.max(f64::MIN_POSITIVE),
            max_new_tokens,
            stop: stops(fields.take("stop", "a text or a list of texts")?)?,
            seed: seed.map_or_else(|| since_epoch().as_nanos() as u64, |seed| seed as u64),
        };
        Ok(Self {
            model: fields.take("model", "a text")?,
            user: user(fields)?,
            task,
            limit,
            is_stream: fields.take("stream", "true or false")?.unwrap_or(false),
            includes_usage: stream_options.is_some_and(|options| options["include_usage"] == true),
        })
    }

    /// The last message as query, the earlier ones as history. System messages are ignored, because they are meant for another prompt.
    fn into_query(self) -> Result<(String, Context), ErrorResponse> {
        let mut messages = self.task.messages;
        let query = messages.pop().map(|message| message.content).unwrap_or_default();
        if query.trim().is_empty() {
            return Err(wrong_messages("the last message is empty; expected a query".into()));
        }
        messages.retain(|message| message.role != "system");
        let history = messages.into_iter().map(|message| Value::String(message.content)).collect();
        Ok((query, Context { history_summary: history_text(&history)?, ..Context::default() }))
    }
}

/// The maximum number of tokens of the response, and the field that has it; `max_tokens` is deprecated.
fn max_tokens(fields: &mut JsonFields) -> Result<Option<(&'static str, usize)>, ErrorResponse> {
    let mut found = None;
    for name in ["max_completion_tokens", "max_tokens"] {
        let value: Option<usize> = fields.take(name, "a positive integer")?;
        if value == Some(0) {
            return Err(ErrorResponse::field(name, format!("`{name}` is 0; expected a positive integer")));
        }
        found = found.or(value.map(|value| (name, value)));
    }
    Ok(found)
}

/// As [`rejected`], with the client's name of the limit `max_new_tokens`.
fn chat_rejected(error: SubmitError, limit: Option<&'static str>) -> ErrorResponse {
    let error = rejected(error);
    match limit.filter(|_| error.message.contains("max_new_tokens")) {
        Some(limit) => {
            ErrorResponse { param: Some(limit), message: error.message.replace("max_new_tokens", limit), ..error }
        }
        None => error,
    }
}

fn number(fields: &mut JsonFields, name: &'static str, default: f64, range: (f64, f64)) -> Result<f64, ErrorResponse> {
    let value: f64 = fields.take(name, "a number")?.unwrap_or(default);
    let (least, most) = range;
    match (least..=most).contains(&value) {
        true => Ok(value),
        false => Err(ErrorResponse::field(name, format!("`{name}` is {value}; expected {least} to {most}"))),
    }
}

fn stops(stop: Option<Value>) -> Result<Vec<String>, ErrorResponse> {
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let texts = match &stop {
        None => Some(Vec::new()),
        Some(Value::Array(values)) if values.len() <= MAX_STOPS => values.iter().map(text).collect(),
        Some(value) => text(value).map(|text| vec![text]),
    };
    texts.ok_or_else(|| {
        let what = format!(
            "`stop` is {}; expected a text or a list of at most {MAX_STOPS} texts, none of them empty",
            quoted(&stop.unwrap_or_default())
        );
        ErrorResponse::field("stop", what)
    })
}

fn wrong_messages(what: String) -> ErrorResponse {
    ErrorResponse::field("messages", what)
}

fn messages(values: Vec<Value>) -> Result<Vec<Message>, ErrorResponse> {
    if values.len() > MAX_MESSAGES {
        return Err(wrong_messages(format!(
            "{} messages in one request; expected at most {MAX_MESSAGES}",
            values.len()
        )));
    }
    let message = |(index, value): (usize, &Value)| {
        message(value).map_err(|what| wrong_messages(format!("messages[{index}]: {what}")))
    };
    let messages = values.iter().enumerate().map(message).collect::<Result<Vec<_>, _>>()?;
    match messages.last() {
        Some(last) if last.role == "user" => Ok(messages),
        Some(last) => Err(wrong_messages(format!("the last message is of `{}`; expected `user`", last.role))),
        None => Err(wrong_messages("`messages` is empty; expected one at least".into())),
    }
}

fn message(value: &Value) -> Result<Message, String> {
    let role = match value["role"].as_str() {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant")) => role,
        _ => return Err(format!("`role` is {}; expected system, user or assistant", quoted(&value["role"]))),
    };
    let part = |part: &Value| part["text"].as_str().filter(|_| part["type"] == "text").map(str::to_owned);
    let content = match &value["content"] {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(part).collect(),
        _ => None,
    };
    let content = content.ok_or_else(|| {
        format!(
            "`content` is {}; expected a text or a list of {{\"type\": \"text\", \"text\": ...}}",
            quoted(&value["content"])
        )
    })?;
    check_text("content", &content).map_err(|error| error.message)?;
    Ok(Message { role: role.into(), content })
}

/// The route `POST /v1/chat/completions`.
pub(super) async fn completions(mut call: Call) -> Result<Response, ErrorResponse> {
    // Body and other fields are not kept while the request waits: parsed, they take many times the memory of the body.
    call.body = Bytes::new();
    let request = ChatRequest::new(std::mem::take(&mut call.fields))?;
    let (tenant, rewrites) = tenant_of(&call, request.model.as_deref())?;
    let completion = Completion {
        id: format!("chatcmpl-{}", call.record.id()),
        created: since_epoch().as_secs(),
        model: request.model.clone().unwrap_or_else(|| tenant.name.clone()),
        version: tenant.version.clone(),
        includes_usage: request.includes_usage,
    };
    match rewrites {
        true => rewrite(call, &tenant, request, completion).await,
        false => chat(call, &tenant, request, completion).await,
    }
}

/// The tenant of a model, and whether the model is the one that rewrites.
fn tenant_of(call: &Call, model: Option<&str>) -> Result<(Tenant, bool), ErrorResponse> {
    let find = |name| call.service.tenant(call, "model", name);
    let rewrites = model.and_then(|model| model.strip_suffix(REWRITE_SUFFIX));
    match (find(model), rewrites) {
        (Ok(tenant), _) => Ok((tenant, false)),
        (Err(error), Some(name)) => find(Some(name)).map(|tenant| (tenant, true)).map_err(|_| error),
        (Err(error), None) => Err(error),
    }
}

async fn rewrite(
    call: Call,
    tenant: &Tenant,
    request: ChatRequest,
    completion: Completion,
) -> Result<Response, ErrorResponse> {
    let is_stream = request.is_stream;
    let user = request.user.clone();
    let (query, context) = request.into_query()?;
    let rewriting = call.service.rewrite(tenant, user.as_deref(), &query, context.clone(), call.deadline());
    let result = rewriting.await.map_err(rejected)?;
    call.record.add(AccessEntry::new(None, &result));
    call.log_rewrite(&LoggedQuery { id: None, query: &query, context: &context, user: user.as_deref() }, &result);
    let completion = Completion { version: result.generated.version.clone(), ..completion };
    let end = CompletionEnd {
        is_truncated: result.generated.is_truncated,
        n_prompt_tokens: result.generated.n_prompt_tokens,
        n_tokens: result.generated.n_tokens,
    };
    let response = match is_stream {
        true => {
            let (sender, frames) = unbounded_channel();
            completion.send_start(&sender);
            completion.send_text(&sender, &result.generated.text);
            completion.send_end(&sender, &end);
            stream(frames)
        }
        false => Json(completion.body(&result.generated.text, &end)).into_response(),
    };
    Ok(with_fallback(response, result.fallback))
}

async fn chat(
    call: Call,
    tenant: &Tenant,
    request: ChatRequest,
    completion: Completion,
) -> Result<Response, ErrorResponse> {
    let deadline = call.started + call.service.options.chat_timeout;
    let last = request.task.messages.last().map(|message| message.content.as_str()).unwrap_or_default();
    let mut route = call.service.candidates.route(tenant, request.user.as_deref(), last);
    let task = GenerationTask::Chat(request.task);
    let for_current = (route.model.role == Role::Candidate).then(|| task.clone());
    let submitting = async {
        let submitted = call.service.submit(&route.model, task, &Audience::Client).await;
        match (submitted, for_current) {
            // The candidate has ended in the meantime.
            (Err(SubmitError::UnknownTenant), Some(task)) => {
                route.model = tenant.clone();
                call.service.submit(tenant, task, &Audience::Client).await
            }
            (submitted, _) => submitted,
        }
    };
    let submitted = timeout_at(deadline.into(), submitting).await.map_err(|_| too_slow())?;
    let mut events = submitted.map_err(|error| chat_rejected(error, request.limit))?;
    let completion = Completion { version: route.model.version.clone(), ..completion };
    let job = ChatJob { service: call.service, record: call.record, route, deadline, started: call.started };
    if request.is_stream {
        let (sender, frames) = unbounded_channel();
        tokio::spawn(job.forward(events, sender, completion, call.slot).in_current_span());
        return Ok(stream(frames));
    }
    let done = timeout_at(deadline.into(), finished(&mut events)).await.map_err(|_| job.note_timeout())?;
    let generation = job.finish(done)?;
    Ok(Json(completion.body(&generation.text, &CompletionEnd::of(&generation))).into_response())
}

fn too_slow() -> ErrorResponse {
    ErrorResponse::new(StatusCode::GATEWAY_TIMEOUT, "the response took too long; retry later")
}

/// A response in progress.
struct ChatJob {
    service: Arc<RewriteService>,
    record: Arc<RequestRecord>,
    route: Route,
    deadline: Instant,
    started: Instant,
}

impl ChatJob {
    /// Counts and logs a finished response.
    fn finish(&self, done: Result<Generation, GenerationFailure>) -> Result<Generation, ErrorResponse> {
        let generation = done.map_err(|failure| {
            let tenant = format!("tenant {}", self.route.model.name);
            self.service.failures.warn(&tenant, failure.code, &failure.message);
            self.route.add(&self.service, Some(failure.code));
            model_failed()
        })?;
        self.route.add(&self.service, None);
        self.service.metrics.generated(&self.route.model.name, &generation, self.started.elapsed());
        self.record.add(AccessEntry {
            tenant: self.route.model.name.clone(),
            version: generation.version.clone(),
            n_prompt_tokens: generation.n_prompt_tokens,
            n_tokens: generation.n_tokens,
            phases: Some(Phases::of(&generation)),
            ..AccessEntry::default()
        });
        Ok(generation)
    }

    fn note_timeout(&self) -> ErrorResponse {
        self.route.add(&self.service, Some("timeout"));
        too_slow()
    }

    /// Passes text on as it is generated. The request is in progress until the last frame is created, whether or not the client reads it.
    async fn forward(
        self,
        mut events: UnboundedReceiver<GenerationEvent>,
        frames: UnboundedSender<String>,
        completion: Completion,
        _slot: RequestSlot,
    ) {
        let forwarding = async {
            completion.send_start(&frames);
            loop {
                match events.recv().await {
                    Some(GenerationEvent::Text(text)) => completion.send_text(&frames, &text),
                    Some(GenerationEvent::Done(done)) => return self.finish(done),
                    None => return Err(model_failed()),
                }
            }
        };
        let ended = tokio::select! {
            ended = timeout_at(self.deadline.into(), forwarding) => ended.unwrap_or_else(|_| Err(self.note_timeout())),
            () = frames.closed() => return self.record.note_closed(),
        };
        match ended {
            Ok(generation) => completion.send_end(&frames, &CompletionEnd::of(&generation)),
            Err(ErrorResponse { status, message, code, param }) => {
                // The status was already sent to the client.
                self.record.note_status(status);
                send(&frames, &openai_error(status, &message, code, param));
                send_text(&frames, "[DONE]");
            }
        }
    }
}

/// Finish reason and size of a response.
struct CompletionEnd {
    is_truncated: bool,
    n_prompt_tokens: usize,
    n_tokens: usize,
}

impl CompletionEnd {
    fn of(generation: &Generation) -> Self {
        let Generation { truncated: is_truncated, n_prompt_tokens, n_tokens, .. } = *generation;
        Self { is_truncated, n_prompt_tokens, n_tokens }
    }

    fn finish_reason(&self) -> &'static str {
        if self.is_truncated { "length" } else { "stop" }
    }

    fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.n_prompt_tokens,
            "completion_tokens": self.n_tokens,
            "total_tokens": self.n_prompt_tokens + self.n_tokens,
        })
    }
}

/// Fields that all objects of one response have in common.
struct Completion {
    id: String,
    created: u64,
    model: String,
    version: String,
    includes_usage: bool,
}

impl Completion {
    fn object(&self, kind: &str, choices: Value) -> Value {
        json!({
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.version, "choices": choices,
        })
    }

    fn body(&self, text: &str, end: &CompletionEnd) -> Value {
        let message = json!({"role": "assistant", "content": text, "refusal": null});
        let choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": end.finish_reason()});
        let mut body = self.object("chat.completion", json!([choice]));
        body["usage"] = end.usage();
        body
    }

    fn chunk(&self, delta: Value, finish_reason: Option<&str>) -> Value {
        let choice = json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason});
        let mut chunk = self.object("chat.completion.chunk", json!([choice]));
        if self.includes_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn send_start(&self, frames: &UnboundedSender<String>) {
        send(frames, &self.chunk(json!({"role": "assistant", "content": ""}), None));
    }

    fn send_text(&self, frames: &UnboundedSender<String>, text: &str) {
        send(frames, &self.chunk(json!({"content": text}), None));
    }

    fn send_end(&self, frames: &UnboundedSender<String>, end: &CompletionEnd) {
        send(frames, &self.chunk(json!({}), Some(end.finish_reason())));
        if self.includes_usage {
            let mut chunk = self.object("chat.completion.chunk", json!([]));
            chunk["usage"] = end.usage();
            send(frames, &chunk);
        }
        send_text(frames, "[DONE]");
    }
}

fn send(frames: &UnboundedSender<String>, value: &Value) {
    send_text(frames, &value.to_string());
}

fn send_text(frames: &UnboundedSender<String>, text: &str) {
    // The client may have disconnected.
    let _ = frames.send(text.to_owned());
}

/// Sends frames as server-sent events, and a comment if there is none for 15 seconds.
fn stream(mut frames: UnboundedReceiver<String>) -> Response {
    let events = poll_fn(move |context| {
        frames.poll_recv(context).map(|frame| frame.map(|frame| Ok::<_, Infallible>(Event::default().data(frame))))
    });
    // For nginx, which otherwise would buffer events.
    let unbuffered = [(HeaderName::from_static("x-accel-buffering"), "no")];
    (unbuffered, Sse::new(events).keep_alive(KeepAlive::default())).into_response()
}
