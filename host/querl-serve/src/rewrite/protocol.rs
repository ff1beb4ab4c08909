//! The route `POST /v1/rewrite`.

use super::access_log::milliseconds;
use super::request_log::LoggedQuery;
use super::service::{Call, RewriteResult, rejected};
use super::traces::AccessEntry;
use crate::body::JsonFields;
use crate::error::ErrorResponse;
use crate::general_rag::history_text;
use axum::Json;
use axum::response::{IntoResponse, Response};
use futures::future::try_join_all;
use querl_core::records::Context;
use querl_core::serving::Tenant;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const FIELDS: [&str; 6] = ["query", "tenant", "user_profile", "history", "deadline_ms", "user"];
const QUERIES: &str = "a list of {\"query\": ..., \"tenant\": ...}";

/// A query with its tenant.
struct RewriteQuery {
    tenant: Tenant,
    user: Option<String>,
    query: String,
    context: Context,
    deadline: Instant,
}

/// Rewrites one query, answered with an object, or a list `queries`, answered with `results` in the same order. Nothing is
/// rewritten if one of the queries is invalid or does not fit into the queue.
pub(super) async fn rewrite(mut call: Call) -> Result<Response, ErrorResponse> {
    let Some(queries) = call.fields.take::<Vec<JsonFields>>("queries", QUERIES)? else {
        let fields = std::mem::take(&mut call.fields);
        let query = RewriteQuery::new(&call, fields)?;
        let result = query.rewrite(&call).await?;
        call.record.add(AccessEntry::new(None, &result));
        call.log_rewrite(&query.logged(None), &result);
        return Ok(Json(body(call.record.id(), &result)).into_response());
    };
    call.fields.check_known(&["queries"])?;
    let max_queries = call.service.options.max_queries;
    if queries.is_empty() {
        return Err(ErrorResponse::value(format!("`queries` is empty; expected {QUERIES}")));
    }
    if queries.len() > max_queries {
        let what = format!("{} queries in one request; expected at most {max_queries}", queries.len());
        return Err(ErrorResponse::too_large(what));
    }
    let in_batch = |index: usize| {
        move |error: ErrorResponse| ErrorResponse { message: format!("queries[{index}]: {}", error.message), ..error }
    };
    let queries = queries.into_iter().enumerate();
    let queries = queries.map(|(index, fields)| RewriteQuery::new(&call, fields).map_err(in_batch(index)));
    let queries = queries.collect::<Result<Vec<_>, _>>()?;
    let rewriting = queries.iter().enumerate();
    let rewriting = rewriting.map(async |(index, query)| query.rewrite(&call).await.map_err(in_batch(index)));
    let results = try_join_all(rewriting).await?;
    let result = |(index, result): (usize, &RewriteResult)| {
        let id = format!("{}-{index}", call.record.id());
        call.record.add(AccessEntry::new(Some(id.clone()), result));
        call.log_rewrite(&queries[index].logged(Some(&id)), result);
        body(&id, result)
    };
    let results: Vec<Value> = results.iter().enumerate().map(result).collect();
    Ok(Json(json!({"results": results})).into_response())
}

impl RewriteQuery {
    fn new(call: &Call, mut fields: JsonFields) -> Result<Self, ErrorResponse> {
        fields.check_known(&FIELDS)?;
        let query = query(&mut fields)?;
        let name: Option<String> = fields.take("tenant", "a text")?;
        let tenant = call.service.tenant(call, "tenant", name.as_deref())?;
        let deadline_ms: Option<u64> = fields.take("deadline_ms", "milliseconds, an integer of 0 or more")?;
        let own = call.started + deadline_ms.map_or(Duration::MAX, Duration::from_millis).min(MAX_DEADLINE);
        let user = user(&mut fields, "user")?;
        Ok(Self { tenant, user, query, context: context(&mut fields)?, deadline: own.min(call.deadline()) })
    }

    fn logged<'a>(&'a self, id: Option<&'a str>) -> LoggedQuery<'a> {
        LoggedQuery { id, query: &self.query, context: &self.context, user: self.user.as_deref() }
    }

    async fn rewrite(&self, call: &Call) -> Result<RewriteResult, ErrorResponse> {
        let Self { tenant, user, query, context, deadline } = self;
        let rewriting = call.service.rewrite(tenant, user.as_deref(), query, context.clone(), *deadline);
        rewriting.await.map_err(rejected)
    }
}

/// Maximum deadline: longer than any service waits, and small enough for time arithmetic.
const MAX_DEADLINE: Duration = Duration::from_secs(24 * 3600);

pub(super) fn query(fields: &mut JsonFields) -> Result<String, ErrorResponse> {
    let query: String = fields.take_required("query", "a text")?;
    if query.trim().is_empty() {
        return Err(ErrorResponse::field("query", "`query` is empty"));
    }
    check_text("query", &query)?;
    Ok(query)
}

/// Reads the fields `user_profile` and `history`.
pub(super) fn context(fields: &mut JsonFields) -> Result<Context, ErrorResponse> {
    let user_profile: String = fields.take("user_profile", "a text")?.unwrap_or_default();
    let history: Value = fields.take("history", "a text, a list of texts, or a list of messages")?.unwrap_or_default();
    let history_summary = history_text(&history)?;
    check_text("user_profile", &user_profile)?;
    check_text("history", &history_summary)?;
    Ok(Context { user_profile, history_summary })
}

/// Reads the field with the user's id, a text or a number. A value of another type is ignored, as clients of earlier versions may
/// send one.
pub(super) fn user(fields: &mut JsonFields, name: &'static str) -> Result<Option<String>, ErrorResponse> {
    Ok(match fields.take::<Value>(name, "a text or a number")? {
        Some(Value::String(user)) if !user.is_empty() => Some(user),
        Some(Value::Number(user)) => Some(user.to_string()),
        _ => None,
    })
}

/// Rejects a text that contains the NUL character, which ends a text in many programs.
pub(super) fn check_text(name: &'static str, text: &str) -> Result<(), ErrorResponse> {
    match text.contains('\0') {
        true => {
            Err(ErrorResponse::field(name, format!("`{name}` has the character U+0000; expected a text without it")))
        }
        false => Ok(()),
    }
}

fn body(id: &str, result: &RewriteResult) -> Value {
    json!({
        "id": id,
        "rewrite": result.generated.text,
        "tenant": result.tenant,
        "version": result.generated.version,
        "latency_ms": milliseconds(result.latency),
        "queue_ms": result.queued.map(milliseconds),
        "cached": result.is_cached,
        "fallback": result.fallback,
    })
}
