//! The style service over real sockets, with a classifier that computes from text lengths.
#![allow(clippy::unwrap_used)]

mod support;

use querl_serve::{
    ClassifiedText, PendingRequest, ServerLimits, StyleOptions, StyleService, SubmitError, TextClassifier,
};
use reqwest::{Client, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::{http, serve_app};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Three classes, whose probabilities depend on a text's length; texts that begin with `slow` are never answered.
#[derive(Default)]
struct ByLength {
    classes: Vec<String>,
    english: Vec<String>,
    unanswered: Mutex<Vec<Box<dyn PendingRequest>>>,
    has_ended: AtomicBool,
}

impl ByLength {
    fn new() -> Arc<Self> {
        let names = |names: [&str; 3]| names.map(str::to_owned).to_vec();
        Arc::new(Self {
            classes: names(["售前", "售后", "诚实"]),
            english: names(["sales_oriented", "after_sales", "honesty"]),
            ..Self::default()
        })
    }
}

fn classified(text: &str) -> ClassifiedText {
    let n = text.chars().count();
    let long = 1.0 - 1.0 / (1.0 + n as f64);
    let probabilities = vec![(1.0 - long) * 0.75, (1.0 - long) * 0.25, long];
    let scores = probabilities.iter().map(|p: &f64| p.ln()).collect();
    ClassifiedText { probabilities, scores, n_tokens: n.min(20), n_left_out: n.saturating_sub(20) }
}

impl TextClassifier for ByLength {
    fn submit(&self, texts: &[&str], request: Box<dyn PendingRequest>) -> Result<(), SubmitError> {
        match texts[0] {
            "busy" => return Err(SubmitError::QueueFull("queue is full (9 texts); retry later".into())),
            "broken" => request.complete(Err("/secret/path: damaged".into())),
            "panics" => panic!("as a tokenizer may"),
            text if text.starts_with("slow") => self.unanswered.lock().unwrap().push(request),
            _ => request.complete(Ok(texts.iter().map(|text| classified(text)).collect())),
        }
        Ok(())
    }

    fn is_alive(&self) -> bool {
        !self.has_ended.load(Ordering::Relaxed)
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn english(&self) -> Option<&[String]> {
        Some(&self.english)
    }

    fn n_waiting(&self) -> usize {
        self.unanswered.lock().unwrap().len()
    }

    fn is_full(&self) -> bool {
        self.n_waiting() > 0
    }
}

struct Server {
    url: String,
    client: Client,
    service: Arc<StyleService>,
}

impl Server {
    async fn start(change: impl FnOnce(&mut StyleOptions)) -> Self {
        let mut options = StyleOptions {
            model_name: "style".into(),
            max_length: 20,
            max_body_bytes: 1000,
            max_texts: 3,
            max_text_chars: 100,
            body_timeout: Duration::from_secs(5),
            answer_timeout: Duration::from_millis(200),
            api_key: None,
            server: ServerLimits::default(),
        };
        change(&mut options);
        let service = StyleService::new(options);
        let url = serve_app(service.router(), ServerLimits::default()).await;
        Self { url, client: http(), service }
    }

    async fn ready(change: impl FnOnce(&mut StyleOptions)) -> Self {
        let server = Self::start(change).await;
        server.service.set_ready(ByLength::new());
        server
    }

    fn post(&self, path: &str) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.url))
    }

    async fn asked(&self, path: &str, body: Value) -> (StatusCode, Value) {
        answer(self.post(path).json(&body)).await
    }

    async fn get(&self, path: &str) -> (StatusCode, String) {
        let response = self.client.get(format!("{}{path}", self.url)).send().await.unwrap();
        (response.status(), response.text().await.unwrap())
    }
}

async fn answer(request: RequestBuilder) -> (StatusCode, Value) {
    let response = request.send().await.unwrap();
    (response.status(), response.json().await.unwrap())
}

#[tokio::test]
async fn responses_have_the_form_of_their_requests() {
    let server = Server::ready(|_| ()).await;
    let expected = json!({
        "predicted_label": "诚实", "confidence": 0.75,
        "probabilities": {"售前": 0.1875, "售后": 0.0625, "诚实": 0.75},
    });
    let query = format!("/predict?text={}", "%E5%A5%BD%E7%9A%84%E5%90%A7");
    assert_eq!(answer(server.post(&query)).await, (StatusCode::OK, expected.clone()));
    assert_eq!(server.asked("/predict", json!({"text": "好的吧"})).await.1, expected);
    assert_eq!(server.asked("/predict", json!({"text": ["好的吧", "好的吧"]})).await.1, json!([expected, expected]));
    let english = server.asked("/predict", json!({"text": "好的吧", "english": true})).await.1;
    assert_eq!(english["predicted_label"], "honesty");

    let scores = json!([
        {"score": 0.75, "label": "诚实"}, {"score": 0.1875, "label": "售前"}, {"score": 0.0625, "label": "售后"},
    ]);
    assert_eq!(server.asked("/predict", json!({"inputs": "好的吧"})).await.1, scores);
    assert_eq!(server.asked("/predict", json!({"inputs": ["好的吧"]})).await.1, scores);
    assert_eq!(server.asked("/predict", json!({"inputs": [["好的吧"], ["好的吧"]]})).await.1, json!([scores, scores]));
    let pair = server.asked("/predict", json!({"inputs": ["问", "答"]})).await.1;
    assert_eq!(pair, server.asked("/predict", json!({"inputs": "用户问题：问\n回答：答"})).await.1);
    let raw = server.asked("/predict", json!({"inputs": "好的吧", "raw_scores": true})).await.1;
    assert_eq!(raw[0]["score"], 0.75f64.ln());

    for path in ["/classify", "/v1/classify"] {
        let (status, found) = server.asked(path, json!({"model": "mine", "input": ["好的吧", "好"]})).await;
        assert_eq!(status, StatusCode::OK);
        let first = json!({"index": 0, "label": "诚实", "probs": [0.1875, 0.0625, 0.75], "num_classes": 3});
        assert_eq!((&found["data"][0], &found["data"][1]["index"]), (&first, &json!(1)));
        assert_eq!((&found["object"], &found["model"]), (&json!("list"), &json!("mine")));
        assert_eq!(found["usage"]["prompt_tokens"], 4);
        assert!(found["id"].as_str().unwrap().starts_with("classify-"), "{found}");
        for key in ["use_activation", "activation"] {
            let raw = server.asked(path, json!({"input": "好的吧", key: false})).await.1;
            assert_eq!((&raw["data"][0]["probs"][2], &raw["data"][0]["label"]), (&json!(0.75f64.ln()), &json!("诚实")));
        }
    }
}

#[tokio::test]
async fn requests_before_the_model_is_loaded_get_503() {
    let server = Server::start(|_| ()).await;
    assert_eq!(server.get("/health").await.0, StatusCode::OK);
    assert_eq!(server.get("/ready").await.0, StatusCode::SERVICE_UNAVAILABLE);
    let response = server.post("/predict").json(&json!({"text": "好"})).send().await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["retry-after"], "1");
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["error"], "the model is being loaded; retry in a moment");
    assert!(server.get("/metrics").await.1.contains("querl_style_ready 0\n"));
    server.service.set_ready(ByLength::new());
    assert_eq!(server.get("/ready").await.0, StatusCode::OK);
    assert_eq!(server.asked("/predict", json!({"text": "好"})).await.0, StatusCode::OK);
}

#[tokio::test]
async fn rejected_requests_get_a_message() {
    let server = Server::ready(|_| ()).await;
    let long = "长".repeat(101);
    let cases = [
        (json!({}), 422, "no text there"),
        (json!({"text": ""}), 422, "text 1 is empty"),
        (json!({"text": 7}), 422, "`text` is 7; expected a text or a list of texts"),
        (json!({"text": "a", "inputs": "b"}), 422, "both `text` and `inputs`"),
        (json!({"text": []}), 422, "no text to classify"),
        (json!({"inputs": ["a", "b", "c"]}), 422, "an item of `inputs` has 3 texts"),
        (json!({"text": ["a", "b", "c", "d"]}), 413, "4 texts in one request; expected at most 3"),
        (json!({"text": long}), 413, "text 1 is longer than 100 characters"),
        (json!({"inputs": "好".repeat(30), "truncate": false}), 413, "text 1 has 30 tokens; expected at most 20"),
        (json!({"text": "a".repeat(2000)}), 413, "the body is larger than 1000 bytes"),
        (json!({"text": "busy"}), 429, "queue is full (9 texts)"),
        (json!({"text": "broken"}), 500, "the model failed; the server's log says why"),
        (json!({"text": "slow"}), 503, "no response within 200ms"),
        (json!({"text": "panics"}), 500, "the tokenizer failed on a text"),
        (json!({"text": "a", "raw_scores": 7}), 422, "`raw_scores` is 7; expected true or false"),
    ];
    for (body, status, sentence) in cases {
        let (found, answer) = server.asked("/predict", body.clone()).await;
        let message = answer["error"].as_str().unwrap();
        assert!(found.as_u16() == status && message.contains(sentence), "{body}: {found}, {answer}");
    }
    // Error types as in text-embeddings-inference.
    for (text, kind) in [("", "Validation"), ("busy", "Overloaded"), ("broken", "Backend"), ("slow", "Unhealthy")] {
        assert_eq!(server.asked("/predict", json!({"text": text})).await.1["error_type"], kind);
    }
    let (status, body) = server.asked("/classify", json!({"input": [1, 2]})).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (422, &json!(422)));
    for request in [server.post("/classify"), server.post("/classify").json(&json!({"text": "a"}))] {
        let (status, body) = answer(request).await;
        let expected = json!("no text there; expected {\"input\": ...}, a text or a list of texts");
        assert_eq!((status.as_u16(), &body["error"]["message"]), (422, &expected));
    }
    let no_body = answer(server.post("/predict")).await;
    assert!(no_body.0.as_u16() == 422, "{no_body:?}");
    assert!(no_body.1["error"].as_str().unwrap().starts_with("no text there"), "{no_body:?}");
    let no_json = answer(server.post("/predict").header("content-type", "application/json").body("{")).await;
    assert_eq!(no_json.0.as_u16(), 400);
    let sentence = no_json.1["error"].as_str().unwrap();
    let expected = "the body is not valid JSON: EOF while parsing an object at line 1 column 1";
    assert!(sentence.starts_with(expected), "{sentence}");
    let no_type = answer(server.post("/predict").body("{}")).await;
    assert_eq!(no_type.0.as_u16(), 415);
    let expected = "`Content-Type` is missing; expected `application/json`";
    assert_eq!(no_type.1["error"], expected);
    let wrong_method = server.client.get(format!("{}/predict", server.url)).send().await.unwrap();
    assert_eq!((wrong_method.status().as_u16(), &wrong_method.headers()["allow"]), (405, &"POST".parse().unwrap()));
    assert_eq!(server.get("/nowhere").await.0.as_u16(), 404);
}

#[tokio::test]
async fn a_classifier_that_has_ended_is_not_ready() {
    let server = Server::start(|_| ()).await;
    let classifier = ByLength::new();
    server.service.set_ready(classifier.clone());
    assert_eq!(server.get("/ready").await.0, StatusCode::OK);
    classifier.has_ended.store(true, Ordering::Relaxed);
    assert_eq!(server.get("/ready").await.0, StatusCode::SERVICE_UNAVAILABLE);
    let (status, body) = server.asked("/predict", json!({"text": "好"})).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(body["error"], "the classifier has ended, and the server with it; its log says why");
}

#[tokio::test]
async fn a_request_whose_client_has_left_is_cancelled() {
    let server = Server::start(|options| options.answer_timeout = Duration::from_secs(60)).await;
    let classifier = ByLength::new();
    server.service.set_ready(classifier.clone());
    let request = server.post("/predict").json(&json!({"text": "slow"})).send();
    assert!(tokio::time::timeout(Duration::from_millis(300), request).await.is_err(), "it is never answered");
    let is_open = || classifier.unanswered.lock().unwrap().iter().any(|request| request.is_open());
    for _ in 0..200 {
        if !is_open() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!is_open());
    assert_eq!(classifier.unanswered.lock().unwrap().len(), 1, "it was taken, and never answered");
}

#[tokio::test]
async fn a_full_queue_is_not_ready() {
    let server = Server::ready(|_| ()).await;
    assert_eq!(server.get("/ready").await.0, StatusCode::OK);
    assert_eq!(server.asked("/predict", json!({"text": "slow"})).await.0, StatusCode::SERVICE_UNAVAILABLE);
    let (status, body) = server.get("/ready").await;
    assert!(status == StatusCode::SERVICE_UNAVAILABLE && body.contains("queue is full (1 texts)"), "{status}, {body}");
    assert_eq!(server.get("/health").await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_body_that_does_not_arrive_in_time_is_rejected() {
    let server = Server::ready(|options| options.body_timeout = Duration::from_millis(200)).await;
    let stream = tokio::net::TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.unwrap();
    let (mut reader, mut writer) = stream.into_split();
    let head = "POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{";
    writer.write_all(head.as_bytes()).await.unwrap();
    tokio::spawn(async move {
        // One byte at a time, which does not extend the time limit.
        while writer.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let mut response = [0; 4096];
    let n = tokio::time::timeout(Duration::from_secs(5), reader.read(&mut response)).await.unwrap().unwrap();
    let response = String::from_utf8_lossy(&response[..n]);
    assert!(response.starts_with("HTTP/1.1 408 ") && response.contains("not received within 200ms"), "{response}");
}

#[tokio::test]
async fn classifying_requires_the_key() {
    let server = Server::ready(|options| options.api_key = Some("right".into())).await;
    let body = json!({"text": "好"});
    for request in [server.post("/predict"), server.post("/predict").bearer_auth("wrong"), server.post("/classify")] {
        assert_eq!(answer(request.json(&body)).await.0, StatusCode::UNAUTHORIZED);
    }
    assert_eq!(answer(server.post("/predict").bearer_auth("right").json(&body)).await.0, StatusCode::OK);
    assert_eq!(server.get("/health").await.0, StatusCode::OK);
    assert_eq!(server.get("/info").await.0, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn requests_are_counted_by_known_routes_and_the_interface_describes_itself() {
    let server = Server::ready(|_| ()).await;
    server.asked("/predict", json!({"text": "好".repeat(30)})).await;
    server.asked("/predict", json!({"text": ""})).await;
    server.get("/some/stranger").await;
    server.service.note_batch(2, 3, Duration::from_millis(4));
    let text = server.get("/metrics").await.1;
    for line in [
        "querl_style_requests_total{route=\"/predict\",status=\"200\"} 1",
        "querl_style_requests_total{route=\"/predict\",status=\"422\"} 1",
        "querl_style_requests_total{route=\"other\",status=\"404\"} 1",
        "querl_style_request_duration_seconds_count{route=\"/predict\"} 2",
        "querl_style_batch_texts_bucket{le=\"2\"} 0",
        "querl_style_batch_texts_bucket{le=\"4\"} 1",
        "querl_style_batch_texts_sum 3",
        "querl_style_batched_requests_total 2",
        "querl_style_texts_total 1",
        "querl_style_texts_shortened_total 1",
        "querl_style_tokens_total 20",
        "querl_style_ready 1",
    ] {
        assert!(text.lines().any(|found| found == line), "no `{line}` in {text}");
    }
    let document: Value = serde_json::from_str(&server.get("/openapi.json").await.1).unwrap();
    for path in ["/predict", "/classify", "/health", "/ready", "/metrics", "/info"] {
        assert!(document["paths"][path].is_object(), "{path}");
    }
    assert!(server.get("/docs").await.1.contains("<code>POST /predict</code>"));
    let info: Value = serde_json::from_str(&server.get("/info").await.1).unwrap();
    assert_eq!(info["model_type"]["classifier"]["id2label"]["1"], "售后");
}
