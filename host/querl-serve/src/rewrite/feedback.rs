//! `POST /v1/feedback`: what a user did with the passages of an earlier request, for the request log.

use super::protocol::check_text;
use super::request_log::now;
use super::service::Call;
use crate::error::ErrorResponse;
use axum::Json;
use axum::response::{IntoResponse, Response};
use querl_data::{LoggedFeedback, RequestLogLine};
use serde_json::json;

const FIELDS: [&str; 6] = ["id", "tenant", "clicked", "useful", "score", "passage"];
/// Maximum number of passages of `clicked`.
const MAX_CLICKED: usize = 100;
/// Maximum total size of their ids.
const MAX_CLICKED_BYTES: usize = 8 << 10;
/// Maximum length of the id of a request or a passage.
const MAX_ID_CHARS: usize = 256;
/// Prefix of request ids in chat completions.
const CHAT_PREFIX: &str = "chatcmpl-";

/// The route `POST /v1/feedback`: appends feedback to the request log. Whether its id is that of a logged request is checked when
/// the log is read.
pub(super) async fn feedback(mut call: Call) -> Result<Response, ErrorResponse> {
    let missing = "no request log is configured; start the server with --request_log DIR";
    let service = call.service.clone();
    let log = service.request_log.as_ref().ok_or_else(|| ErrorResponse::not_found(missing))?;
    call.fields.check_known(&FIELDS)?;
    let name: Option<String> = call.fields.take("tenant", "a text")?;
    let tenant = service.tenant(&call, "tenant", name.as_deref())?;
    let fields = &mut call.fields;
    let id: String = fields.take_required("id", "the id of a rewrite, a text")?;
    let id = checked_id("id", id.strip_prefix(CHAT_PREFIX).unwrap_or(&id))?;
    let clicked: Vec<String> = fields.take("clicked", "a list of passage ids, which are texts")?.unwrap_or_default();
    if clicked.len() > MAX_CLICKED {
        let what = format!("`clicked` has {} passages; expected at most {MAX_CLICKED}", clicked.len());
        return Err(ErrorResponse { param: Some("clicked"), ..ErrorResponse::too_large(what) });
    }
    let n_bytes: usize = clicked.iter().map(String::len).sum();
    if n_bytes > MAX_CLICKED_BYTES {
        let what = format!("the ids of `clicked` have {n_bytes} bytes; expected at most {MAX_CLICKED_BYTES}");
        return Err(ErrorResponse { param: Some("clicked"), ..ErrorResponse::too_large(what) });
    }
    let clicked = clicked.iter().map(|passage| checked_id("clicked", passage)).collect::<Result<Vec<_>, _>>()?;
    let useful: Option<bool> = fields.take("useful", "true or false")?;
    let score: Option<f64> = fields.take("score", "a number from 0 to 1")?;
    if let Some(score) = score.filter(|score| !(0.0..=1.0).contains(score)) {
        return Err(ErrorResponse::field("score", format!("`score` is {score}; expected 0 to 1")));
    }
    let passage: Option<String> = fields.take("passage", "a passage id, a text")?;
    let passage = passage.map(|passage| checked_id("passage", &passage)).transpose()?;
    if clicked.is_empty() && useful.is_none() && score.is_none() && passage.is_none() {
        return Err(ErrorResponse::value(
            "the feedback says nothing; expected `clicked`, `useful`, `score` or `passage`",
        ));
    }
    let line = LoggedFeedback { time: now(), id: id.clone(), tenant: tenant.name, clicked, useful, score, passage };
    let is_accepted = log.send(RequestLogLine::Feedback(line));
    Ok(Json(json!({"id": id, "accepted": is_accepted})).into_response())
}

fn checked_id(param: &'static str, id: &str) -> Result<String, ErrorResponse> {
    check_text(param, id)?;
    let wrong = |what: String| Err(ErrorResponse::field(param, what));
    match id.trim() {
        "" => wrong(format!("`{param}` has an empty id")),
        id if id.chars().nth(MAX_ID_CHARS).is_some() => {
            wrong(format!("`{param}` has an id of more than {MAX_ID_CHARS} characters"))
        }
        id => Ok(id.to_owned()),
    }
}
