//! Retrieval by an upstream service with rewritten queries: `POST /api/chat/general_rag` and Dify's `POST /retrieval`.
//!
//! A query whose rewrite fails for any reason is looked up as it is: retrieval works where rewriting does not. The reason is counted, and is the
//! header `x-querl-fallback` of the response.

use super::cache::CachedRewrite;
use super::protocol::{check_text, context, query};
use super::request_log::LoggedQuery;
use super::service::{Call, RewriteResult, RewriteService, with_fallback};
use super::traces::{AccessEntry, RequestSpan};
use super::upstream::{Upstream, UpstreamResponse};
use crate::body::JsonFields;
use crate::error::{ErrorForm, ErrorResponse};
use axum::Json;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use querl_core::records::Context;
use querl_core::serving::{SubmitError, Tenant};
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Number, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The route `POST /api/chat/general_rag`: forwards the request with `rewritten_query` filled in and everything else unchanged.
pub(super) async fn general_rag(mut call: Call) -> Result<Response, ErrorResponse> {
    let upstream = upstream(&call.service)?.clone();
    if upstream.is_dify() {
        let what = "the upstream service has Dify's interface; use /retrieval";
        return Err(ErrorResponse::not_found(what));
    }
    let name: Option<String> = call.fields.take("tenant_id", "a text")?;
    let tenant = call.service.tenant(&call, "tenant_id", name.as_deref())?;
    let query = query(&mut call.fields)?;
    let given: Option<String> = call.fields.take("rewritten_query", "a text")?;
    if given.is_some_and(|given| !given.trim().is_empty()) {
        return forward(&call, &upstream, call.body.clone()).await.map(UpstreamResponse::into_response);
    }
    let context = context(&mut call.fields)?;
    let user = user_id(&mut call.fields)?;
    // The other fields are forwarded as the client wrote them.
    call.fields = JsonFields::default();
    let logged = LoggedQuery { id: None, query: &query, context: &context, user: user.as_deref() };
    let (rewrite, fallback) = rewrite(&call, &tenant, &logged).await;
    let body = replaced(&call.body, &[("rewritten_query", &rewrite)])?;
    let response = forward(&call, &upstream, body).await?;
    Ok(with_fallback(response.into_response(), fallback))
}

/// The field `user_id`: a text, or a number, which some applications send.
#[derive(Deserialize)]
#[serde(untagged)]
enum UserId {
    Text(String),
    Number(Number),
}

fn user_id(fields: &mut JsonFields) -> Result<Option<String>, ErrorResponse> {
    let user = fields.take::<UserId>("user_id", "a text or a number")?.map(|id| match id {
        UserId::Text(text) => text,
        UserId::Number(number) => number.to_string(),
    });
    check_text("user_id", user.as_deref().unwrap_or_default())?;
    Ok(user.filter(|user| !user.is_empty()))
}

/// Replaces the texts of some fields of a JSON object; all other bytes are unchanged.
fn replaced(body: &[u8], texts: &[(&str, &str)]) -> Result<Vec<u8>, ErrorResponse> {
    let replace = || {
        let mut fields: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(body)?;
        for (name, text) in texts {
            fields.insert((*name).to_owned(), to_raw_value(text)?);
        }
        serde_json::to_vec(&fields)
    };
    let failed = |error| ErrorResponse::new(StatusCode::BAD_REQUEST, format!("the body cannot be forwarded: {error}"));
    replace().map_err(failed)
}

/// Checks API key and upstream service before the body is read: Dify tests a new endpoint by a request without a body, and
/// interprets 403, 404 and 502 as failures.
pub(super) async fn check_access(State(service): State<Arc<RewriteService>>, request: Request, next: Next) -> Response {
    let checked = service.check_permitted(request.headers()).and_then(|_| upstream(&service).map(|_| ()));
    match checked {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_body(ErrorForm::Dify),
    }
}

/// The route `POST /retrieval`: external knowledge of Dify. Source:
/// <https://docs.dify.ai/en/use-dify/knowledge/external-knowledge-api>.
pub(super) async fn retrieval(mut call: Call) -> Result<Response, ErrorResponse> {
    let upstream = upstream(&call.service)?.clone();
    let id: String = call.fields.take_required("knowledge_id", "a text")?;
    let (tenant, kb_name) = tenant_of(&call, &id)?;
    let query = query(&mut call.fields)?;
    let setting = "an object with `top_k` and `score_threshold`";
    let mut setting: JsonFields = call.fields.take("retrieval_setting", setting)?.unwrap_or_default();
    let top_k: Option<u64> = setting.take("top_k", "a positive integer")?;
    let score_threshold: Option<f64> = setting.take("score_threshold", "a number from 0 to 1")?;
    let logged = LoggedQuery { id: None, query: &query, context: &Context::default(), user: None };
    call.fields = JsonFields::default();
    let (rewrite, fallback) = rewrite(&call, &tenant, &logged).await;
    if upstream.is_dify() {
        let body = replaced(&call.body, &[("query", &rewrite), ("knowledge_id", kb_name.unwrap_or(&id))])?;
        let response = forward(&call, &upstream, body).await?;
        return Ok(with_fallback(response.into_response(), fallback));
    }
    let mut body = json!({"query": query, "rewritten_query": rewrite, "tenant_id": tenant.name});
    let optional = [
        ("kb_name", kb_name.map(Value::from)),
        ("top_k", top_k.map(Value::from)),
        ("score_threshold", score_threshold.map(Value::from)),
    ];
    for (name, value) in optional.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        body[name] = value;
    }
    // The response is parsed here, so it must not be compressed.
    call.headers.remove(header::ACCEPT_ENCODING);
    let response = forward(&call, &upstream, body.to_string()).await?;
    Ok(with_fallback(Json(upstream.records(&response, top_k, score_threshold)?).into_response(), fallback))
}

/// The tenant of `TENANT` or `TENANT:KB_NAME`, and the name.
fn tenant_of<'a>(call: &Call, id: &'a str) -> Result<(Tenant, Option<&'a str>), ErrorResponse> {
    let find = |name| call.service.tenant(call, "knowledge_id", Some(name));
    match (find(id), id.split_once(':')) {
        (Ok(tenant), _) => Ok((tenant, None)),
        (Err(_), Some((name, kb_name))) => Ok((find(name)?, Some(kb_name))),
        (Err(error), None) => Err(error),
    }
}

fn upstream(service: &RewriteService) -> Result<&Upstream, ErrorResponse> {
    let missing = "no retrieval service is configured; start the server with --upstream URL";
    service.options.upstream.as_ref().ok_or_else(|| ErrorResponse::not_found(missing))
}

/// Sends a body with the headers of the request, within a span if there are traces.
async fn forward(
    call: &Call,
    upstream: &Upstream,
    body: impl Into<reqwest::Body>,
) -> Result<UpstreamResponse, ErrorResponse> {
    let Some(span) = call.record.span.as_ref().map(RequestSpan::upstream) else {
        return upstream.send(&call.uri, &call.headers, body).await;
    };
    let response = upstream.send(&call.uri, &span.headers(&call.headers), body).await;
    span.end(response.as_ref().map_or_else(|error| error.status, UpstreamResponse::status));
    response
}

/// The rewrite of a query, or the query and the reason.
async fn rewrite(call: &Call, tenant: &Tenant, logged: &LoggedQuery<'_>) -> (String, Option<&'static str>) {
    let rewriting = call.service.rewrite(tenant, logged.user, logged.query, logged.context.clone(), call.deadline());
    let result = rewriting.await.unwrap_or_else(|error| {
        let fallback = match error {
            SubmitError::UnknownTenant => "removed",
            SubmitError::QueueFull(_) => "queue_full",
            SubmitError::Input(_) => "input",
            SubmitError::Plugin(_) => "plugin_fault",
            SubmitError::Ended => "model_failed",
        };
        call.service.metrics.fallback(&tenant.name, fallback);
        RewriteResult {
            tenant: tenant.name.clone(),
            generated: CachedRewrite::raw(logged.query, &tenant.version),
            latency: call.started.elapsed(),
            queued: None,
            phases: None,
            is_cached: false,
            fallback: Some(fallback),
        }
    });
    call.record.add(AccessEntry::new(None, &result));
    call.log_rewrite(logged, &result);
    (result.generated.text, result.fallback)
}
