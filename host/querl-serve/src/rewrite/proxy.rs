//! Retrieval by an upstream service with rewritten queries: `POST /api/chat/general_rag` and Dify's `POST /retrieval`.
//!
//! A query whose rewrite fails for any reason is looked up as it is: retrieval works where rewriting does not. The reason is counted, and is the
//! header `x-querl-fallback` of the response.

use super::access_log::AccessEntry;
use super::protocol::{context, query};
use super::{Call, with_fallback};
use crate::body::JsonFields;
use crate::error::ErrorResponse;
use crate::general_rag::GENERAL_RAG_ROUTE;
use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use querl_core::records::Context;
use querl_core::serving::{SubmitError, Tenant};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

const RETRIEVAL_ROUTE: &str = "/retrieval";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Less than the 5 s after which uvicorn closes idle connections, the shortest of common servers.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Far above the passages of one response.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// Headers of one connection (RFC 9110, 7.6.1), and those that the HTTP library sets.
const NOT_FORWARDED: [&str; 11] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "expect",
    "host",
    "content-length",
];

/// A retrieval service.
#[derive(Debug, Clone)]
pub struct Upstream {
    /// The address of its route.
    url: String,
    is_dify: bool,
    timeout: Duration,
}

impl Upstream {
    /// `url`: the address of a service with the `general_rag` interface, with or without its route, or of a Dify external knowledge API, which
    /// ends in `/retrieval`. `timeout`: of one response.
    ///
    /// # Errors
    /// A sentence: it is not an HTTP address.
    pub fn new(url: &str, timeout: Duration) -> Result<Self, String> {
        let parsed = reqwest::Url::parse(url).map_err(|error| format!("`{url}` is not an address: {error}"))?;
        if !["http", "https"].contains(&parsed.scheme()) || !parsed.has_host() {
            return Err(format!("`{url}` is not an address; expected http://HOST:PORT or https://HOST"));
        }
        let url = url.trim_end_matches('/');
        let is_dify = url.ends_with(RETRIEVAL_ROUTE);
        let route = if is_dify || url.ends_with(GENERAL_RAG_ROUTE) { "" } else { GENERAL_RAG_ROUTE };
        Ok(Self { url: format!("{url}{route}"), is_dify, timeout })
    }
}

/// The client of upstream services, with pooled connections.
pub(super) fn client() -> reqwest::Result<reqwest::Client> {
    // Fails if a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        // A redirect is for the client.
        .redirect(reqwest::redirect::Policy::none())
        .build()
}

/// `POST /api/chat/general_rag`: the request with `rewritten_query` filled in, everything else as it is.
pub(super) async fn general_rag(mut call: Call) -> Result<Response, ErrorResponse> {
    let upstream = upstream(&call)?.clone();
    if upstream.is_dify {
        let what = "the upstream service has Dify's interface; use /retrieval";
        return Err(ErrorResponse::new(StatusCode::NOT_FOUND, what));
    }
    let name: Option<String> = call.fields.take("tenant_id", "a text")?;
    let tenant = call.service.tenant(&call, "tenant_id", name.as_deref())?;
    let query = query(&mut call.fields)?;
    let given: Option<String> = call.fields.take("rewritten_query", "a text")?;
    if given.is_some_and(|given| !given.trim().is_empty()) {
        return call.send(&upstream, call.body.clone()).await.map(UpstreamResponse::into_response);
    }
    let context = context(&mut call.fields)?;
    let (rewrite, fallback) = rewrite(&call, &tenant, &query, context).await;
    let mut fields: BTreeMap<&str, Box<RawValue>> = serde_json::from_slice(&call.body).map_err(not_forwarded)?;
    fields.insert("rewritten_query", to_raw_value(&rewrite).map_err(not_forwarded)?);
    let body = serde_json::to_vec(&fields).map_err(not_forwarded)?;
    let response = call.send(&upstream, body.into()).await?;
    Ok(with_fallback(response.into_response(), fallback))
}

fn not_forwarded(error: serde_json::Error) -> ErrorResponse {
    ErrorResponse::new(StatusCode::BAD_REQUEST, format!("the body cannot be forwarded: {error}"))
}

/// `POST /retrieval`: external knowledge of Dify.
/// Source: <https://docs.dify.ai/en/use-dify/knowledge/external-knowledge-api>.
pub(super) async fn retrieval(mut call: Call) -> Result<Response, ErrorResponse> {
    let upstream = upstream(&call)?.clone();
    let id: String = call.fields.take_required("knowledge_id", "a text")?;
    let (tenant, kb_name) = tenant_of(&call, &id)?;
    let query = query(&mut call.fields)?;
    let setting = "an object with `top_k` and `score_threshold`";
    let mut setting: JsonFields = call.fields.take("retrieval_setting", setting)?.unwrap_or_default();
    let (rewrite, fallback) = rewrite(&call, &tenant, &query, Context::default()).await;
    let body = if upstream.is_dify {
        let mut fields: BTreeMap<&str, Box<RawValue>> = serde_json::from_slice(&call.body).map_err(not_forwarded)?;
        fields.insert("query", to_raw_value(&rewrite).map_err(not_forwarded)?);
        fields.insert("knowledge_id", to_raw_value(kb_name.unwrap_or(&id)).map_err(not_forwarded)?);
        serde_json::to_vec(&fields)
    } else {
        let mut fields = json!({"query": query, "rewritten_query": rewrite, "tenant_id": tenant.name});
        let top_k: Option<u64> = setting.take("top_k", "a positive integer")?;
        let score_threshold: Option<f64> = setting.take("score_threshold", "a number from 0 to 1")?;
        let optional = [
            ("kb_name", kb_name.map(Value::from)),
            ("top_k", top_k.map(Value::from)),
            ("score_threshold", score_threshold.map(Value::from)),
        ];
        for (name, value) in optional.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            fields[name] = value;
        }
        serde_json::to_vec(&fields)
    };
    let response = call.send(&upstream, body.map_err(not_forwarded)?.into()).await?;
    let response = match upstream.is_dify {
        true => response.into_response(),
        false => Json(response.records()?).into_response(),
    };
    Ok(with_fallback(response, fallback))
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

fn upstream(call: &Call) -> Result<&Upstream, ErrorResponse> {
    let missing = "no retrieval service is configured; start the server with --upstream URL";
    call.service.options.upstream.as_ref().ok_or_else(|| ErrorResponse::new(StatusCode::NOT_FOUND, missing))
}

/// The rewrite of a query, or the query and the reason.
async fn rewrite(call: &Call, tenant: &Tenant, query: &str, context: Context) -> (String, Option<&'static str>) {
    match call.service.rewrite(tenant, query, context, call.deadline()).await {
        Ok(result) => {
            call.record.add(AccessEntry::new(None, &result));
            (result.generated.text, result.fallback)
        }
        Err(error) => {
            let fallback = match error {
                SubmitError::UnknownTenant => "removed",
                SubmitError::QueueFull(_) => "queue_full",
                SubmitError::Input(_) => "input",
                SubmitError::Plugin(_) => "plugin_fault",
                SubmitError::Ended => "model_failed",
            };
            call.service.metrics.fallback(&tenant.name, fallback);
            call.record.add(AccessEntry {
                tenant: tenant.name.clone(),
                version: tenant.version.clone(),
                fallback: Some(fallback),
                ..AccessEntry::default()
            });
            (query.to_owned(), Some(fallback))
        }
    }
}

/// What the upstream service responded.
struct UpstreamResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Call {
    /// Sends a body to the upstream service with the headers and the query string of the request.
    async fn send(&self, upstream: &Upstream, body: Bytes) -> Result<UpstreamResponse, ErrorResponse> {
        let query = self.uri.query().map_or(String::new(), |query| format!("?{query}"));
        let request = self.service.http.post(format!("{}{query}", upstream.url)).timeout(upstream.timeout);
        let sending = async {
            let mut response = request.headers(forwarded(&self.headers)).body(body).send().await?;
            let mut body = Vec::new();
            while let Some(chunk) = response.chunk().await? {
                body.extend_from_slice(&chunk);
                if body.len() > MAX_RESPONSE_BYTES {
                    return Ok(None);
                }
            }
            let headers = forwarded(response.headers());
            Ok(Some(UpstreamResponse { status: response.status(), headers, body }))
        };
        let failed = |status, what: &str| ErrorResponse::new(status, format!("the retrieval service {what}"));
        match sending.await {
            Ok(Some(response)) => Ok(response),
            Ok(None) => Err(failed(StatusCode::BAD_GATEWAY, "responded with more than 64 MiB")),
            Err(error) => {
                // The address and the reason are for the operator's log alone.
                let error: reqwest::Error = error;
                tracing::warn!(
                    "{}: {error}: {}",
                    upstream.url,
                    error.source().map(ToString::to_string).unwrap_or_default()
                );
                Err(match error.is_timeout() {
                    true => failed(StatusCode::GATEWAY_TIMEOUT, "did not respond in time"),
                    false => failed(StatusCode::BAD_GATEWAY, "cannot be reached; the server's log says why"),
                })
            }
        }
    }
}

/// Headers that concern more than one connection.
fn forwarded(headers: &HeaderMap) -> HeaderMap {
    let connection: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(',').map(|name| name.trim().to_ascii_lowercase()))
        .collect();
    let is_forwarded = |name: &str| !NOT_FORWARDED.contains(&name) && !connection.iter().any(|listed| listed == name);
    let headers = headers.iter().filter(|(name, _)| is_forwarded(name.as_str()));
    headers.map(|(name, value)| (name.clone(), value.clone())).collect()
}

impl UpstreamResponse {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.body));
        (*response.status_mut(), *response.headers_mut()) = (self.status, self.headers);
        response
    }

    /// The passages of a `general_rag` response as Dify's records.
    ///
    /// # Errors
    /// The service's own error, or that its response is unreadable.
    fn records(&self) -> Result<Value, ErrorResponse> {
        let body: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        // Services of this interface may have the status in the body alone.
        let stated = body["status"].as_u64().and_then(|status| StatusCode::from_u16(status.try_into().ok()?).ok());
        let status = if self.status.is_success() { stated.unwrap_or(self.status) } else { self.status };
        match body["data"]["recall"].as_array() {
            Some(passages) if status.is_success() => {
                Ok(json!({"records": passages.iter().map(record).collect::<Vec<_>>()}))
            }
            _ if status.is_client_error() => {
                let message = body["msg"].as_str().unwrap_or("the retrieval service rejected the request");
                Err(ErrorResponse::new(status, message))
            }
            _ => {
                tracing::warn!("the retrieval service responded with status {status} and no readable passages");
                let what = "the retrieval service failed; the server's log says how";
                Err(ErrorResponse::new(StatusCode::BAD_GATEWAY, what))
            }
        }
    }
}

/// A passage as Dify's record; `metadata` has what else the service sent.
fn record(passage: &Value) -> Value {
    let mut metadata = passage.as_object().cloned().unwrap_or_default();
    let mut take = |name: &str| metadata.remove(name).filter(|value| !value.is_null());
    let content = take("content").unwrap_or_else(|| "".into());
    let score = take("reranker_score").or_else(|| take("score")).unwrap_or_else(|| 0.into());
    let title = take("title").or_else(|| passage.get("id").cloned()).unwrap_or_else(|| "".into());
    let title = title.as_str().map_or_else(|| title.to_string(), str::to_owned);
    json!({"content": content, "score": score, "title": title, "metadata": metadata})
}
