//! Rewards for other RL engines: responses are scored by the environment of a run, in the form of the engine's own client.
//!
//! | request | client | response |
//! |---|---|---|
//! | `POST /v1/score {"requests": [...]}` | any | `{"results": [{id, total, components, rewrite} or {id, rejected}], "range"}` |
//! | `POST /openrlhf {query[], prompts[], labels[]}` | OpenRLHF 0.11, `--reward.remote_url` (`openrlhf/utils/agent.py`) | `{rewards, scores, extra_logs}` |
//! | `POST /slime {prompt, response, label}` | slime 0.3, `--rm-type remote_rm --rm-url` (`slime/rollout/rm_hub/__init__.py`) | a number |
//! | `POST /slime/dict`, the same | slime with `--reward-key score` | `{score, ...components}` |
//! | `POST /seed_session`, `/verify`, `/aggregate_metrics`, `GET /reverify_mode` | NeMo Gym 0.5, a resources server (`nemo_gym/base_resources_server.py`) | the request's fields with `reward` |
//! | `GET /health`, `/ready`, `/metrics`, `/openapi.json` | | |
//!
//! The label of a response is the id of a query of the run, or a query itself as an object or as the JSON text of one.
//!
//! A rejected response has no score. `/v1/score` says so; the other forms carry only numbers, and give it
//! [`RewardOptions::rejected_reward`]. Without one the whole request is answered with 422. NaN and Inf are never sent.
//!
//! An error response is `{"error": {message, type, param, code}}`: 400 not JSON, 401 key missing or wrong, 404 no such route, 405 another
//! method, 408 body not received in time, 413 body or list too large, 415 not declared as JSON, 422 value missing or wrong, unknown query,
//! or a rejected response (code `rejected`), 429 queue full or too many requests of one address, 500 plugin failed, 502 a service of the
//! environment failed, 503 such a service is down, or too many requests.

mod dialect;
mod metrics;
mod nemo_gym;
mod openapi;
mod openrlhf;
mod outcome;
mod score;
mod server;
mod slime;

pub use server::RewardOptions;

use crate::body::JsonFields;
use crate::connections::ConnectionHandle;
use crate::error::{ErrorForm, ErrorResponse, json_response};
use crate::key::unauthorized;
use crate::metrics::metrics_response;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use querl_core::records::EpisodeRecord;
use querl_core::scoring::{RewardRequest, RewardService};
use serde_json::{Value, json};
use server::RewardServer;
use std::sync::Arc;
use std::time::Instant;

/// A router with the routes of a reward service. Requests that score require [`RewardOptions::api_key`], if it is set.
///
/// A service that owns an async runtime must not be dropped with the router, which may be on a thread of another runtime: keep a handle of
/// it elsewhere.
pub fn reward_router(service: Arc<dyn RewardService>, options: RewardOptions) -> Router {
    let max_body_bytes = options.max_body_bytes;
    let server = Arc::new(RewardServer::new(service, options));
    let with_key = Router::new()
        .route("/v1/score", post(score))
        .route("/openrlhf", post(openrlhf))
        .route("/slime", post(slime))
        .route("/slime/dict", post(slime_dict))
        .route("/seed_session", post(seed_session))
        .route("/verify", post(verify))
        .route("/aggregate_metrics", post(aggregate_metrics))
        // If Gym records the calls of a rollout, it adds the rollout's id to the path.
        .route("/ng-rollout/{rollout}/seed_session", post(seed_session))
        .route("/ng-rollout/{rollout}/verify", post(verify))
        .layer(from_fn_with_state(server.clone(), check_key))
        .layer(DefaultBodyLimit::max(max_body_bytes));
    let free = Router::new()
        .route("/health", get(|| async { Json(json!({"status": "ok"})) }))
        .route("/ready", get(ready))
        .route("/metrics", get(prometheus))
        .route("/openapi.json", get(|| async { Json(openapi::document()) }))
        .route("/reverify_mode", get(|| async { Json(json!("stateless")) }));
    let app = with_key.merge(free).fallback(not_found).method_not_allowed_fallback(wrong_method);
    app.layer(from_fn_with_state(server.clone(), count)).with_state(server)
}

fn respond(result: Result<Value, ErrorResponse>) -> Response {
    json_response(result, ErrorForm::OpenAi)
}

/// Parses a body, scores its requests, and formats the response. `parse` also returns the parts of the body that `answer` needs.
async fn scored<T>(
    (server, connection): (&RewardServer, &ConnectionHandle),
    (request, expected): (Request, &str),
    parse: impl FnOnce(JsonFields) -> Result<(T, Vec<RewardRequest>), ErrorResponse>,
    answer: impl FnOnce(T, &[EpisodeRecord]) -> Result<Value, ErrorResponse>,
) -> Response {
    let response = async {
        let (kept, requests) = parse(server.read(request, expected).await?)?;
        let _slot = connection.begin_request()?;
        answer(kept, &server.score(requests).await?)
    };
    respond(response.await)
}

async fn score(State(server): State<Arc<RewardServer>>, connection: ConnectionHandle, request: Request) -> Response {
    let parse = |fields| Ok(((), score::requests(fields, &server.options)?));
    let answer = |(), records: &[EpisodeRecord]| Ok(score::response(records, server.range()));
    scored((&server, &connection), (request, score::EXPECTED), parse, answer).await
}

async fn openrlhf(State(server): State<Arc<RewardServer>>, connection: ConnectionHandle, request: Request) -> Response {
    let parse = |fields| Ok(((), openrlhf::requests(fields, &server.options)?));
    let answer = |(), records: &[EpisodeRecord]| openrlhf::response(records, server.options.rejected_reward);
    scored((&server, &connection), (request, openrlhf::EXPECTED), parse, answer).await
}

async fn slime(State(server): State<Arc<RewardServer>>, connection: ConnectionHandle, request: Request) -> Response {
    let parse = |fields| Ok(((), vec![slime::request(fields)?]));
    let answer = |(), records: &[EpisodeRecord]| slime::number(&records[0], server.options.rejected_reward);
    scored((&server, &connection), (request, slime::EXPECTED), parse, answer).await
}

async fn slime_dict(
    State(server): State<Arc<RewardServer>>,
    connection: ConnectionHandle,
    request: Request,
) -> Response {
    let parse = |fields| Ok(((), vec![slime::request(fields)?]));
    let answer = |(), records: &[EpisodeRecord]| slime::dict(&records[0], server.options.rejected_reward);
    scored((&server, &connection), (request, slime::EXPECTED), parse, answer).await
}

/// A session has no state, because `/verify` has all data in its request.
async fn seed_session(State(server): State<Arc<RewardServer>>, request: Request) -> Response {
    respond(server.read(request, "the fields of a row").await.map(|_| json!({})))
}

async fn verify(State(server): State<Arc<RewardServer>>, connection: ConnectionHandle, request: Request) -> Response {
    let parse = |fields| {
        let row = nemo_gym::Row::new(fields)?;
        let asked = row.request()?;
        Ok((row, vec![asked]))
    };
    let answer =
        |row: nemo_gym::Row, records: &[EpisodeRecord]| row.response(&records[0], server.options.rejected_reward);
    scored((&server, &connection), (request, nemo_gym::EXPECTED), parse, answer).await
}

async fn aggregate_metrics(State(server): State<Arc<RewardServer>>, request: Request) -> Response {
    let fields = server.read(request, "{\"verify_responses\": [...]}").await;
    respond(fields.and_then(nemo_gym::aggregate_metrics))
}

async fn ready(State(server): State<Arc<RewardServer>>, connection: ConnectionHandle) -> Response {
    let check = || -> Result<(), ErrorResponse> {
        server.check_queue()?;
        Ok(connection.check_requests()?)
    };
    // With a full queue a request gets 429, and a probe 503, as in the other services.
    let not_ready = |error: ErrorResponse| ErrorResponse { status: StatusCode::SERVICE_UNAVAILABLE, ..error };
    respond(check().map(|()| json!({"status": "ready"})).map_err(not_ready))
}

async fn prometheus(State(server): State<Arc<RewardServer>>) -> Response {
    metrics_response(server.metrics_text(), ErrorForm::OpenAi)
}

async fn not_found(uri: Uri) -> Response {
    let what = format!(
        "there is nothing at `{}`; use /v1/score, /openrlhf, /slime, or /seed_session and /verify of NeMo Gym",
        uri.path()
    );
    respond(Err(ErrorResponse::not_found(what)))
}

async fn wrong_method(method: Method) -> Response {
    let what = format!("method {method} is not allowed; routes that score take POST, all others GET");
    respond(Err(ErrorResponse::new(StatusCode::METHOD_NOT_ALLOWED, what)))
}

async fn check_key(State(server): State<Arc<RewardServer>>, request: Request, next: Next) -> Response {
    match server.has_key(request.headers()) {
        true => next.run(request).await,
        false => respond(Err(unauthorized(request.headers()))),
    }
}

/// Counts each response and its duration.
async fn count(State(server): State<Arc<RewardServer>>, request: Request, next: Next) -> Response {
    let (route, started) = (metrics::route_of(request.uri().path()), Instant::now());
    let response = next.run(request).await;
    server.metrics.request(route, response.status().as_str(), started.elapsed());
    response
}
