#![allow(clippy::unwrap_used)]

use super::*;
use serde_json::json;
use wiremock::matchers::{header, method, path};
use wiremock::{Mock, MockServer, ResponseTemplate};

const KEY: &str = "sk-very-secret";

fn limits(max_retries: usize) -> CallLimits {
    CallLimits { first_pause: Duration::from_millis(1), ..CallLimits::new(4, 0.3, max_retries) }
}

fn caller(server: &MockServer, max_retries: usize) -> Caller {
    let url = format!("{}/v1/chat", server.uri());
    Caller::new("teacher.base_url", &url, Some(Secret::new(KEY)), limits(max_retries), &ServiceContext::default())
        .unwrap()
}

async fn answering(template: ResponseTemplate) -> MockServer {
    let server = MockServer::start().await;
    Mock::given(method("POST")).respond_with(template).mount(&server).await;
    server
}

#[tokio::test]
async fn key_is_sent_and_never_shown() {
    let server = MockServer::start().await;
    let refusal =
        ResponseTemplate::new(401).set_body_json(json!({"error": {"message": format!("Incorrect API key: {KEY}")}}));
    let authorized = format!("Bearer {KEY}");
    Mock::given(path("/v1/chat"))
        .and(header("authorization", authorized.as_str()))
        .respond_with(refusal)
        .mount(&server)
        .await;
    let failure = caller(&server, 3).post(&json!({}), CostBound::FREE).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Unauthorized);
    assert!(failure.message.ends_with("/v1/chat: answered 401 Unauthorized: Incorrect API key: [key]"), "{failure}");
    assert_eq!(server.received_requests().await.unwrap().len(), 1, "a refusal is not tried again");
    assert!(!format!("{:?}", caller(&server, 0)).contains(KEY));
}

#[tokio::test]
async fn key_at_the_end_of_what_is_quoted_is_not_shown_in_part() {
    let body = format!("{}{KEY} is unknown", "x".repeat(EXCERPT_CHARS - 6));
    let server = answering(ResponseTemplate::new(400).set_body_string(body)).await;
    let failure = caller(&server, 0).post(&json!({}), CostBound::FREE).await.unwrap_err();
    assert!(!failure.message.contains(&KEY[..3]), "{failure}");
    assert!(failure.message.ends_with("x[key] ..."), "{failure}");
}

#[tokio::test]
async fn rate_limit_is_waited_for_as_the_server_asks() {
    let server = MockServer::start().await;
    let limited = ResponseTemplate::new(429).insert_header("Retry-After", "1");
    Mock::given(method("POST")).respond_with(limited).up_to_n_times(1).mount(&server).await;
    Mock::given(method("POST"))
        .respond_with(ResponseTemplate::new(200).set_body_json(json!({"ok": 1})))
        .mount(&server)
        .await;
    let started = Instant::now();
    let answer = caller(&server, 1).post(&json!({}), CostBound::FREE).await.unwrap();
    assert_eq!(answer.body, json!({"ok": 1}));
    assert!(started.elapsed() >= Duration::from_secs(1));
}

#[tokio::test]
async fn rate_limit_that_lasts_too_long_fails_at_once() {
    let server = answering(ResponseTemplate::new(429).insert_header("Retry-After", "86400")).await;
    let failure = caller(&server, 5).post(&json!({}), CostBound::FREE).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::RateLimited);
    assert!(failure.message.ends_with("; it wants no call for 86400 s"), "{failure}");
    assert_eq!(server.received_requests().await.unwrap().len(), 1);
}

#[tokio::test]
async fn server_error_is_tried_again() {
    let server = MockServer::start().await;
    Mock::given(method("POST")).respond_with(ResponseTemplate::new(500)).up_to_n_times(2).mount(&server).await;
    Mock::given(method("POST")).respond_with(ResponseTemplate::new(200).set_body_json(json!([]))).mount(&server).await;
    assert!(caller(&server, 2).post(&json!({}), CostBound::FREE).await.is_ok());
    let server = answering(ResponseTemplate::new(503)).await;
    let failure = caller(&server, 2).post(&json!({}), CostBound::FREE).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::ServerError);
    assert_eq!(server.received_requests().await.unwrap().len(), 3);
}

#[tokio::test]
async fn other_refusals_are_final_and_quote_the_server() {
    let server = answering(ResponseTemplate::new(400).set_body_string("temperature is not supported")).await;
    let failure = caller(&server, 3).post(&json!({}), CostBound::FREE).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Rejected);
    assert!(failure.message.ends_with("answered 400 Bad Request: temperature is not supported"), "{failure}");
}

#[tokio::test]
async fn silence_is_a_timeout() {
    let server = answering(ResponseTemplate::new(200).set_delay(Duration::from_secs(5))).await;
    let failure = caller(&server, 1).post(&json!({}), CostBound::FREE).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Timeout);
    assert!(failure.message.ends_with("no answer within 0.3 s"), "{failure}");
}

#[tokio::test]
async fn answer_that_is_not_json_is_invalid() {
    let server = answering(ResponseTemplate::new(200).set_body_string("<html>")).await;
    let failure = caller(&server, 3).post(&json!({}), CostBound::FREE).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::InvalidResponse);
}

#[tokio::test]
async fn closed_port_is_unreachable() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://u:{KEY}@127.0.0.1:{port}/x?k={KEY}");
    let caller = Caller::new("retrieval.url", &url, None, limits(1), &ServiceContext::default()).unwrap();
    let failure = caller.post(&json!({}), CostBound::FREE).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Unreachable);
    assert!(failure.message.starts_with(&format!("POST http://127.0.0.1:{port}/x: ")), "{failure}");
    assert!(!failure.message.contains(KEY), "{failure}");
}

#[test]
fn address_without_scheme_names_the_setting() {
    let error =
        Caller::new("retrieval.url", "localhost:8000", None, limits(0), &ServiceContext::default()).unwrap_err();
    assert_eq!(error.to_string(), "retrieval.url is not an http or https address; write it in full");
}
