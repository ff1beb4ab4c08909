//! The rewriting service over real sockets, with a stand-in for its models.
#![allow(clippy::unwrap_used)]

mod support;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Uri};
use axum::response::IntoResponse;
use axum::routing::post;
use querl_serve::{RewriteOptions, RewriteService, ServerLimits, Upstream};
use reqwest::{Client, Method, RequestBuilder, Response};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::{StandInRewriter, answer, http, listen, options, serve_app, tenant};

struct Server {
    url: String,
    client: Client,
    service: Arc<RewriteService>,
    rewriter: Arc<StandInRewriter>,
}

impl Server {
    async fn start(change: impl FnOnce(&mut RewriteOptions), rewriter: Arc<StandInRewriter>) -> Self {
        let mut options = options();
        change(&mut options);
        let limits = options.server;
        let service = RewriteService::new(options).unwrap();
        let url = serve_app(service.router(), limits).await;
        Self { url, client: http(), service, rewriter }
    }

    async fn ready(change: impl FnOnce(&mut RewriteOptions), rewriter: Arc<StandInRewriter>) -> Self {
        let server = Self::start(change, rewriter).await;
        server.service.set_ready(server.rewriter.clone());
        server
    }

    /// Serves the tenant `shop` alone.
    async fn shop(change: impl FnOnce(&mut RewriteOptions)) -> Self {
        Self::ready(change, StandInRewriter::new(vec![tenant("shop", 1, None)])).await
    }

    fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.url)).json(body)
    }

    async fn asked(&self, path: &str, body: Value) -> (u16, Value) {
        answer(self.post(path, &body)).await
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let response = self.client.get(format!("{}{path}", self.url)).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    async fn admin(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        let request = self.client.request(method, format!("{}{path}", self.url)).bearer_auth("admin-key");
        answer(body.iter().fold(request, |request, body| request.json(body))).await
    }

    async fn has_metric(&self, line: &str) {
        let text = self.get("/metrics").await.1;
        assert!(text.lines().any(|found| found == line), "no `{line}` in {text}");
    }
}

fn header<'a>(response: &'a Response, name: &str) -> Option<&'a str> {
    response.headers().get(name).map(|value| value.to_str().unwrap())
}

/// Polls for at most two seconds.
async fn becomes(is_true: impl Fn() -> bool) -> bool {
    for _ in 0..200 {
        if is_true() {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    false
}

#[tokio::test]
async fn a_rewrite_has_its_tenant_version_and_times() {
    let server = Server::shop(|_| ()).await;
    let messages = json!([{"role": "user", "content": "在看鱼油"}, {"role": "assistant", "content": "好的"}]);
    for history in [json!("在看鱼油\n好的"), json!(["在看鱼油", "好的"]), messages] {
        let request = json!({"query": "它怎么吃", "tenant": "shop", "user_profile": "孕妇", "history": history});
        let response = server.post("/v1/rewrite", &request).send().await.unwrap();
        let request_id = header(&response, "x-request-id").unwrap().to_owned();
        let mut body: Value = response.json().await.unwrap();
        let latency_ms = body["latency_ms"].take().as_f64().unwrap();
        assert!((0.0..300.0).contains(&latency_ms), "{latency_ms}");
        let expected = json!({
            "id": request_id, "rewrite": "它怎么吃|孕妇|在看鱼油\n好的", "tenant": "shop", "version": "v1", "latency_ms": null,
            "queue_ms": 1.0, "cached": false, "fallback": null,
        });
        assert_eq!(body, expected);
    }
    let (status, body) = server.asked("/v1/rewrite", json!({"query": "它怎么吃"})).await;
    assert_eq!((status, &body["tenant"]), (200, &json!("shop")), "the only tenant may be left out");
}

#[tokio::test]
async fn a_batch_has_results_in_the_order_of_its_queries() {
    let rewriter = StandInRewriter::new(vec![tenant("rival", 7, None), tenant("shop", 1, None)]);
    let server = Server::ready(|_| (), rewriter).await;
    let query = |query: &str, tenant: &str| json!({"query": query, "tenant": tenant});
    let queries = json!({"queries": [query("delay 100", "shop"), query("b", "rival"), query("held", "shop")]});
    let (status, body) = server.asked("/v1/rewrite", queries).await;
    assert_eq!(status, 200, "{body}");
    let results = body["results"].as_array().unwrap();
    let found = |field: &str| results.iter().map(|result| result[field].clone()).collect::<Vec<_>>();
    assert_eq!(found("rewrite"), ["delay 100||", "b||", "held"]);
    assert_eq!(found("version"), ["v1", "v7", "v1"]);
    assert_eq!(found("fallback"), [Value::Null, Value::Null, json!("timeout")]);
    assert_ne!(results[0]["id"], results[1]["id"]);

    let cases = [
        (json!([query("a", "shop"), query("", "shop")]), 422, "queries[1]: `query` is empty"),
        (json!([query("busy", "shop")]), 429, "queries[0]: the queue is full (9 requests)"),
        (json!([query("a", "shop"), query("b", "shopp")]), 404, "queries[1]: tenant `shopp` is not served here"),
        (json!([]), 422, "`queries` is empty"),
        (json!(vec![query("a", "shop"); 4]), 413, "4 queries in one request; expected at most 3"),
        (json!(["a"]), 422, "`queries` is [\"a\"]; expected a list of {\"query\": ..., \"tenant\": ...}"),
    ];
    for (queries, status, sentence) in cases {
        let (found, body) = server.asked("/v1/rewrite", json!({"queries": queries})).await;
        let message = body["error"]["message"].as_str().unwrap();
        assert!(found == status && message.starts_with(sentence), "{queries}: {found}, {message}");
    }
}

#[tokio::test]
async fn a_query_is_returned_unchanged_and_marked_where_there_is_no_rewrite() {
    // The backtrace of the panic takes a while on a busy machine.
    let server = Server::shop(|options| options.deadline = Duration::from_secs(2)).await;
    for (query, reason) in [
        ("held", "timeout"),
        ("plugin x", "plugin_fault"),
        ("unreadable", "no_rewrite"),
        ("broken", "model_failed"),
        ("ends", "model_failed"),
        ("panics", "model_failed"),
    ] {
        let (status, body) = server.asked("/v1/rewrite", json!({"query": query})).await;
        let found = (status, &body["rewrite"], &body["fallback"], &body["queue_ms"], &body["version"]);
        assert_eq!(found, (200, &json!(query), &json!(reason), &Value::Null, &json!("v1")));
        let (_, body) = server.asked("/v1/rewrite", json!({"query": "good"})).await;
        assert_eq!(body["fallback"], Value::Null, "others are rewritten");
    }
    server.has_metric("querl_rewrite_fallbacks_total{reason=\"timeout\",tenant=\"shop\"} 1").await;
    server.has_metric("querl_rewrite_fallbacks_total{reason=\"model_failed\",tenant=\"shop\"} 3").await;
}

#[tokio::test]
async fn a_request_may_shorten_the_deadline_and_its_generation_is_cancelled() {
    let server = Server::shop(|options| options.deadline = Duration::from_secs(30)).await;
    let started = Instant::now();
    let (_, body) = server.asked("/v1/rewrite", json!({"query": "held", "deadline_ms": 50})).await;
    assert_eq!(body["fallback"], "timeout");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert!(becomes(|| server.rewriter.n_held_open() == 0).await);

    let server = Server::shop(|_| ()).await;
    let (_, body) = server.asked("/v1/rewrite", json!({"query": "held", "deadline_ms": u64::MAX})).await;
    assert_eq!(body["fallback"], "timeout", "it cannot be extended");
}

#[tokio::test]
async fn a_request_whose_client_has_left_is_cancelled_and_logged() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.jsonl");
    let change = |options: &mut RewriteOptions| {
        (options.deadline, options.chat_timeout) = (Duration::from_secs(60), Duration::from_secs(60));
        options.access_log = Some(log.clone());
    };
    let server = Server::shop(change).await;
    let messages = json!([{"role": "user", "content": "held"}]);
    let requests = [
        server.post("/v1/rewrite", &json!({"query": "held"})),
        server.post("/v1/chat/completions", &json!({"model": "shop", "messages": messages})),
        server.post("/v1/chat/completions", &json!({"model": "shop", "messages": messages, "stream": true})),
    ];
    for request in requests {
        let reading = async { request.send().await.unwrap().text().await };
        assert!(tokio::time::timeout(Duration::from_millis(300), reading).await.is_err(), "it is never answered");
    }
    assert_eq!(server.rewriter.held.lock().unwrap().len(), 3);
    assert!(becomes(|| server.rewriter.n_held_open() == 0).await);
    assert!(becomes(|| std::fs::read_to_string(&log).unwrap().matches("\"status\":499").count() == 3).await);
}

#[tokio::test]
async fn rejected_requests_get_a_message() {
    let server = Server::shop(|_| ()).await;
    let cases = r#"
{} | 422 | `query` is missing; expected a text
{"query": " \n"} | 422 | `query` is empty
{"query": 7} | 422 | `query` is 7; expected a text
{"query": "a\u0000b"} | 422 | `query` has the character U+0000
{"query": "a", "user": 7} | 422 | `user` is 7; expected a text
{"query": "a", "user": "\u0000"} | 422 | `user` has the character U+0000
{"query": "a", "history": {"a": 1}} | 422 | `history` is neither a text nor a list
{"query": "a", "deadline_ms": -1} | 422 | `deadline_ms` is -1; expected milliseconds, an integer of 0 or more
{"query": "a", "hystory": "b"} | 422 | `hystory` is not a field of this request; did you mean `history`?
{"query": "a", "zzz": 1} | 422 | `zzz` is not a field of this request; expected `query`, `tenant`
{"queries": [{"query": "a"}], "tenant": "shop"} | 422 | `tenant` is not a field of this request; expected `queries`
{"queries": [{"query": "a", "usr": "b"}]} | 422 | queries[0]: `usr` is not a field of this request; did you mean `user`?
{"query": "long"} | 422 | the prompt has 900 tokens; expected at most 512
{"query": "busy"} | 429 | the queue is full (9 requests)
{"query": "a", "tenant": "shpo"} | 404 | tenant `shpo` is not served here; did you mean `shop`?
{"query": "a", "tenant": "zzz"} | 404 | tenant `zzz` is not served here
"#;
    let line = |line: &'static str| {
        let (body, rest) = line.split_once(" | ").unwrap();
        let (status, sentence) = rest.split_once(" | ").unwrap();
        (serde_json::from_str::<Value>(body).unwrap(), status.parse::<u16>().unwrap(), sentence)
    };
    let too_long = (json!({"query": "长".repeat(2000)}), 413, "the body is larger than 4000 bytes");
    for (body, status, sentence) in cases.trim().lines().map(line).chain([too_long]) {
        let (found, answer) = server.asked("/v1/rewrite", body.clone()).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(found == status && message.starts_with(sentence), "{body}: {found}, {answer}");
    }
    let raw = |body: &'static str| {
        let request = server.client.post(format!("{}/v1/rewrite", server.url));
        answer(request.header("content-type", "application/json").body(body))
    };
    for body in ["{", "", "{\"query\": \"\\ud800\"}", "nonsense"] {
        assert_eq!(raw(body).await.0, 400, "{body}");
    }
    assert_eq!(raw("[1]").await.0, 422);
    // Symptom: of a field that appeared twice in an object within the body, the second was used.
    for body in [
        r#"{"query": "a", "query": "b"}"#,
        r#"{"queries": [{"query": "a", "query": "b"}]}"#,
        r#"{"queries": [{"query": "a", "history": [{"query": "a", "query": "b"}]}]}"#,
    ] {
        let (status, answer) = raw(body).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == 422 && message.starts_with("`query` appears twice at line 1 column "), "{body}: {message}");
    }
    let other_control_characters = server.asked("/v1/rewrite", json!({"query": "a\u{7}\t\u{1b}"})).await;
    assert_eq!(other_control_characters.1["rewrite"], "a\u{7}\t\u{1b}||");
    let full = server.post("/v1/rewrite", &json!({"query": "busy"})).send().await.unwrap();
    assert_eq!(header(&full, "retry-after"), Some("1"));
    let (status, wrong_method) = server.get("/v1/rewrite").await;
    assert!(status == 405 && wrong_method.contains("GET is not allowed at `/v1/rewrite`; use POST"), "{wrong_method}");
    let (status, nowhere) = server.get("/nowhere").await;
    assert!(status == 404 && nowhere.contains("use /v1/rewrite, or read /docs"), "{nowhere}");
    // Symptom: the error of a client with a wrong base URL did not name the right one.
    let chat = json!({"model": "shop", "messages": []});
    for path in ["/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/chat/completions"] {
        let (status, answer) = server.asked(path, chat.clone()).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == 404 && message.ends_with("such as http://127.0.0.1:8000/v1"), "{path}: {message}");
    }
    for path in ["/models", "/v1/v1/models"] {
        let (status, answer) = server.get(path).await;
        assert!(status == 404 && answer.contains("such as http://127.0.0.1:8000/v1"), "{path}: {answer}");
    }
    let n_submitted = server.rewriter.n_submitted.load(Ordering::Relaxed);
    server.rewriter.is_full.store(true, Ordering::Relaxed);
    assert_eq!(server.asked("/v1/rewrite", json!({"query": "a"})).await.0, 429);
    assert_eq!(server.rewriter.n_submitted.load(Ordering::Relaxed), n_submitted, "a full queue costs no tokenizing");
    assert_eq!(server.get("/ready").await.0, 503);
}

/// The number of requests of one tenant that are prepared at once, where two are served.
fn n_permits() -> usize {
    (std::thread::available_parallelism().unwrap().get() / 2).max(1)
}

async fn two_tenants(change: impl FnOnce(&mut RewriteOptions)) -> Server {
    Server::ready(change, StandInRewriter::new(vec![tenant("rival", 1, None), tenant("shop", 1, None)])).await
}

/// Symptom: the plugin calls and tokenizing of many requests ran at once, which took the memory and the cores of all tenants.
#[tokio::test]
async fn a_tenant_prepares_requests_on_its_share_of_the_cores() {
    let server = two_tenants(|options| options.deadline = Duration::from_secs(60)).await;
    let ask = async |_| server.asked("/v1/rewrite", json!({"query": "prepares 100", "tenant": "shop"})).await;
    let answers = futures::future::join_all((0..n_permits() + 3).map(ask)).await;
    assert!(answers.iter().all(|(status, body)| *status == 200 && body["fallback"].is_null()), "{answers:?}");
    assert!(server.rewriter.max_preparing.load(Ordering::Relaxed) <= n_permits());
    // Symptom: `queue_ms` was near 0 while requests waited for seconds to be prepared.
    let longest = answers.iter().map(|(_, body)| body["queue_ms"].as_f64().unwrap()).fold(0.0, f64::max);
    assert!(longest >= 150.0, "some waited until others were prepared: {answers:?}");
}

/// Symptom: a request that had passed its deadline made room for the next one, while its plugin call still ran.
#[tokio::test]
async fn requests_that_wait_to_be_prepared_keep_their_deadline_and_are_limited() {
    let change = |options: &mut RewriteOptions| {
        (options.deadline, options.max_preparing) = (Duration::from_secs(60), 1);
    };
    let server = two_tenants(change).await;
    let ask = async |query: &str, tenant: &str, deadline_ms: u64| {
        server.asked("/v1/rewrite", json!({"query": query, "tenant": tenant, "deadline_ms": deadline_ms})).await
    };
    let expired = futures::future::join_all((0..n_permits()).map(|_| ask("prepares 6000", "shop", 100))).await;
    assert!(expired.iter().all(|(_, body)| body["fallback"] == "timeout"), "{expired:?}");
    let waiting = ask("a", "shop", 2500);
    let others = async {
        tokio::time::sleep(Duration::from_millis(400)).await;
        tokio::join!(ask("b", "shop", 60_000), ask("c", "rival", 60_000))
    };
    let ((_, waiting), ((status, full), (_, rival))) = tokio::join!(waiting, others);
    assert_eq!(waiting["fallback"], "timeout");
    assert_eq!((status, &full["error"]["message"]), (429, &json!("the queue is full (1 requests); retry later")));
    assert!(rival["rewrite"].is_string() && rival["fallback"].is_null(), "{rival}");
    assert_eq!(server.rewriter.n_submitted.load(Ordering::Relaxed), n_permits() + 1);
    let (status, body) = ask("d", "shop", 60_000).await;
    assert_eq!((status, &body["fallback"]), (200, &Value::Null), "permits are returned: {body}");
}

/// Symptom: a client that declared a large body and did not send it got 408 after the time limit.
#[tokio::test]
async fn a_body_that_is_declared_too_large_is_rejected_at_once() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = Server::shop(|options| options.body_timeout = Duration::from_secs(60)).await;
    let mut stream = tokio::net::TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.unwrap();
    let head = "POST /v1/rewrite HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 4001\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut response = [0; 12];
    let reading = tokio::time::timeout(Duration::from_secs(20), stream.read_exact(&mut response)).await;
    reading.expect("a response before the body").unwrap();
    assert_eq!(&response, b"HTTP/1.1 413");
}

#[tokio::test]
async fn requests_before_the_models_are_loaded_and_after_their_end_get_503() {
    let server = Server::start(|_| (), StandInRewriter::new(vec![tenant("shop", 1, None)])).await;
    assert_eq!((server.get("/health").await.0, server.get("/ready").await.0), (200, 503));
    let response = server.post("/v1/rewrite", &json!({"query": "a"})).send().await.unwrap();
    assert_eq!((response.status().as_u16(), header(&response, "retry-after")), (503, Some("1")));
    assert_eq!(server.get("/v1/models").await.0, 503);
    server.has_metric("querl_rewrite_ready 0").await;
    server.service.set_ready(server.rewriter.clone());
    assert_eq!(server.get("/ready").await.0, 200);
    server.has_metric("querl_rewrite_ready 1").await;
    server.rewriter.has_ended.store(true, Ordering::Relaxed);
    assert_eq!(server.get("/ready").await.0, 503);
    let (status, body) = server.asked("/v1/rewrite", json!({"query": "a"})).await;
    assert_eq!(status, 503);
    assert_eq!(body["error"]["message"], "the model has ended, and the server with it; its log says why");
}

#[tokio::test]
async fn identical_requests_to_one_version_share_a_rewrite() {
    let server = Server::shop(|options| options.max_cached_rewrites = 2).await;
    let ask = async |query: &str, profile: &str| {
        let request = json!({"query": query, "tenant": "shop", "user_profile": profile});
        let body = server.asked("/v1/rewrite", request).await.1;
        (body["cached"] == true, body["rewrite"].as_str().unwrap().to_owned(), body["version"].clone())
    };
    let v1 = json!("v1");
    assert_eq!(ask("a", "").await, (false, "a||".into(), v1.clone()));
    assert_eq!(ask("a", "").await, (true, "a||".into(), v1.clone()));
    assert_eq!(ask("a", "孕妇").await, (false, "a|孕妇|".into(), v1.clone()), "another context");
    assert_eq!(ask("b", "").await, (false, "b||".into(), v1.clone()));
    assert!(!ask("a", "").await.0, "the least recently used of three is dropped");
    for _ in 0..2 {
        assert!(!ask("unreadable", "").await.0, "a fallback is not kept");
    }
    server.has_metric("querl_rewrite_cache_hits_total{tenant=\"shop\"} 1").await;
    server.has_metric("querl_rewrite_cache_misses_total{tenant=\"shop\"} 6").await;
    assert_eq!(server.admin(Method::POST, "/admin/tenants", Some(json!({"path": "runs/shop"}))).await.0, 200);
    assert_eq!(ask("a", "").await, (false, "a||".into(), json!("v2")), "a new version has rewrites of its own");
}

#[tokio::test]
async fn a_tenant_with_a_key_is_served_and_named_to_its_clients_alone() {
    let tenants = vec![tenant("alpha", 1, Some("alpha-key")), tenant("beta", 1, Some("beta-key"))];
    let server = Server::ready(|_| (), StandInRewriter::new(tenants)).await;
    let ask = async |name: Value, key: Option<&str>| {
        let request = server.post("/v1/rewrite", &json!({"query": "a", "tenant": name}));
        let (status, body) = answer(key.into_iter().fold(request, RequestBuilder::bearer_auth)).await;
        (status, body["error"]["message"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(ask(json!("alpha"), Some("alpha-key")).await.0, 200);
    assert_eq!(ask(Value::Null, Some("beta-key")).await.0, 200, "the only one that the key permits");
    // A client without their key cannot distinguish served from unknown names.
    for name in ["alpha", "alpah", "gamma"] {
        assert_eq!(ask(json!(name), None).await.0, 401);
        assert_eq!(ask(json!(name), Some("wrong")).await.0, 401);
        let expected = (404, format!("tenant `{name}` is not served with this key"));
        assert_eq!(ask(json!(name), Some("beta-key")).await, expected);
    }
    assert_eq!(
        ask(json!("alpah"), Some("alpha-key")).await.1,
        "tenant `alpah` is not served with this key; did you mean `alpha`?"
    );
    let models = async |key: &str| {
        let models = answer(server.client.get(format!("{}/v1/models", server.url)).bearer_auth(key)).await;
        (
            models.0,
            models.1["data"]
                .as_array()
                .map(|models| models.iter().map(|model| model["id"].clone()).collect::<Vec<_>>()),
        )
    };
    assert_eq!(models("beta-key").await, (200, Some(vec![json!("beta"), json!("beta/rewrite")])));
    assert_eq!(models("wrong").await, (401, None));
    let model = async |name: &str, key: &str| {
        answer(server.client.get(format!("{}/v1/models/{name}", server.url)).bearer_auth(key)).await
    };
    for (name, id) in [("beta", "beta"), ("beta/rewrite", "beta/rewrite"), ("beta%2Frewrite", "beta/rewrite")] {
        let expected = json!({"id": id, "object": "model", "created": 1_600_000_000, "owned_by": "querl"});
        assert_eq!(model(name, "beta-key").await, (200, expected));
    }
    let (status, body) = model("alpha", "beta-key").await;
    assert_eq!((status, &body["error"]["code"]), (404, &json!("model_not_found")), "{body}");
    // Regression: not UTF-8, which was 400 without JSON.
    let (status, body) = model("%FF", "beta-key").await;
    assert_eq!((status, &body["error"]["code"]), (404, &json!("model_not_found")), "{body}");
    assert_eq!(model("beta", "wrong").await.0, 401);
    assert_eq!(server.get("/health").await.0, 200);

    let change = |options: &mut RewriteOptions| options.api_key = Some("common".into());
    let rewriter = StandInRewriter::new(vec![tenant("alpha", 1, Some("alpha-key")), tenant("open", 1, None)]);
    let server = Server::ready(change, rewriter).await;
    let ask = async |name: &str, key: &str| {
        answer(server.post("/v1/rewrite", &json!({"query": "a", "tenant": name})).bearer_auth(key)).await.0
    };
    assert_eq!((ask("open", "common").await, ask("open", "alpha-key").await), (200, 404));
    assert_eq!((ask("alpha", "alpha-key").await, ask("alpha", "common").await), (200, 404));

    let rewriter = StandInRewriter::new(vec![tenant("alpha", 1, Some("alpha-key")), tenant("open", 1, None)]);
    let server = Server::ready(|_| (), rewriter).await;
    for name in ["alpha", "oepn"] {
        let (status, body) = server.asked("/v1/rewrite", json!({"query": "a", "tenant": name})).await;
        let message = body["error"]["message"].as_str().unwrap();
        assert_eq!(status, 404, "{message}");
        assert!(message.starts_with(&format!("tenant `{name}` is not served with this key")), "{message}");
    }
}

#[tokio::test]
async fn tenants_are_listed_loaded_replaced_and_removed_with_the_admin_key() {
    let server = Server::ready(|_| (), StandInRewriter::new(vec![tenant("shop", 1, Some("shop-key"))])).await;
    let path = |path: &str| Some(json!({"path": path}));
    let (status, body) = server.admin(Method::GET, "/admin/tenants", None).await;
    let expected = json!({"tenants": [{
        "name": "shop", "version": "v1", "source": "runs/shop", "loaded_at": 1_700_000_000, "has_own_key": true,
    }]});
    assert_eq!((status, &body), (200, &expected));
    let (status, body) = server.admin(Method::POST, "/admin/tenants", path("/runs/rival")).await;
    assert_eq!((status, &body["name"], &body["version"]), (200, &json!("rival"), &json!("v2")));
    assert_eq!(server.asked("/v1/rewrite", json!({"query": "a", "tenant": "rival"})).await.1["version"], "v2");
    server.has_metric("querl_rewrite_generated_tokens_total{tenant=\"rival\"} 3").await;
    let (status, body) = server.admin(Method::POST, "/admin/tenants", path("/runs/damaged")).await;
    assert_eq!(status, 422);
    assert_eq!(body["error"]["message"], "runs/damaged: adapter is for another base; train it on this one");
    assert_eq!(server.admin(Method::POST, "/admin/tenants", Some(json!({}))).await.0, 422);
    let (status, body) = server.admin(Method::DELETE, "/admin/tenants/rivla", None).await;
    assert_eq!((status, &body["error"]["code"]), (404, &json!("tenant_not_found")));
    let removed = server.admin(Method::DELETE, "/admin/tenants/rival", None).await;
    assert_eq!(removed, (200, json!({"removed": "rival"})));
    let text = server.get("/metrics").await.1;
    assert!(!text.contains("rival") && text.contains("querl_rewrite_tenants 1\n"), "{text}");

    let requests = [Method::GET, Method::POST].map(|method| (method, "/admin/tenants"));
    for (method, path) in requests.into_iter().chain([(Method::DELETE, "/admin/tenants/shop")]) {
        let request = server.client.request(method, format!("{}{path}", server.url)).bearer_auth("shop-key");
        assert_eq!(request.send().await.unwrap().status().as_u16(), 401, "a tenant's key is not the admin's");
    }
    let server = Server::shop(|options| options.admin_key = None).await;
    let (status, body) = server.admin(Method::GET, "/admin/tenants", None).await;
    assert_eq!(status, 403);
    let expected = "the admin routes are disabled; start the server with --admin_key_env NAME to enable them";
    assert_eq!(body["error"]["message"], expected);
}

#[tokio::test]
async fn chat_completions_respond_to_the_clients_own_messages() {
    let server = Server::shop(|_| ()).await;
    let (status, mut body) = server
        .asked(
            "/v1/chat/completions",
            json!({
                "model": "shop", "temperature": 0.7, "top_p": 0.9, "max_tokens": 3, "seed": -4, "n": 1, "user": "unknown fields are ignored",
                "messages": [
                    {"role": "developer", "content": "Rewrite."},
                    {"role": "user", "content": [{"type": "text", "text": "鱼油"}, {"type": "text", "text": "怎么吃"}]},
                ],
            }),
        )
        .await;
    assert_eq!(status, 200, "{body}");
    assert!(body["id"].take().as_str().unwrap().starts_with("chatcmpl-"));
    assert!(body["created"].take().as_u64().unwrap() > 1_700_000_000);
    let message = json!({"role": "assistant", "content": "鱼油怎", "refusal": null});
    let expected = json!({
        "id": null, "object": "chat.completion", "created": null, "model": "shop", "system_fingerprint": "v1",
        "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23},
    });
    assert_eq!(body, expected);
    let user = json!([{"role": "user", "content": "胶原蛋白怎么吃"}]);
    for stop in [json!("怎么"), json!(["没有", "怎么"])] {
        let request = json!({"model": "shop", "messages": user, "stop": stop, "max_completion_tokens": 50});
        let body = server.asked("/v1/chat/completions", request).await.1;
        let choice = &body["choices"][0];
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("胶原蛋白"), &json!("stop")));
    }
}

#[tokio::test]
async fn the_rewrite_model_takes_the_last_message_as_the_query() {
    let server = Server::shop(|options| options.max_cached_rewrites = 10).await;
    let request = |query: &str| {
        let messages = json!([
            {"role": "system", "content": "instructions of another prompt"},
            {"role": "user", "content": "在看鱼油"},
            {"role": "assistant", "content": "好的"},
            {"role": "user", "content": query},
        ]);
        server.post("/v1/chat/completions", &json!({"model": "shop/rewrite", "messages": messages}))
    };
    for _ in 0..2 {
        let body = answer(request("它怎么吃")).await.1;
        assert_eq!(body["choices"][0]["message"]["content"], "它怎么吃||在看鱼油\n好的");
        assert_eq!(body["model"], "shop/rewrite");
    }
    server.has_metric("querl_rewrite_cache_hits_total{tenant=\"shop\"} 1").await;
    let fallback = request("held").send().await.unwrap();
    assert_eq!((fallback.status().as_u16(), header(&fallback, "x-querl-fallback")), (200, Some("timeout")));
    let body: Value = fallback.json().await.unwrap();
    assert_eq!(body["choices"][0]["message"]["content"], "held");
}

/// The chunks of a stream, without the fields that differ between requests.
fn chunks(text: &str) -> Vec<Value> {
    let frames = text.split_terminator("\n\n").map(|frame| frame.strip_prefix("data: ").unwrap());
    let mut frames: Vec<&str> = frames.collect();
    assert_eq!(frames.pop(), Some("[DONE]"), "{text}");
    let chunk = |frame: &str| {
        let mut chunk: Value = serde_json::from_str(frame).unwrap();
        for field in ["id", "created"] {
            chunk.as_object_mut().unwrap().remove(field);
        }
        chunk
    };
    frames.into_iter().map(chunk).collect()
}

#[tokio::test]
async fn a_stream_has_a_chunk_for_each_text_and_ends_with_done() {
    let server = Server::shop(|_| ()).await;
    let request = |model: &str, content: &str, include_usage: bool| {
        let body = json!({
            "model": model, "stream": true, "stream_options": {"include_usage": include_usage},
            "messages": [{"role": "user", "content": content}],
        });
        server.post("/v1/chat/completions", &body)
    };
    let response = request("shop", "鱼油", true).send().await.unwrap();
    assert_eq!(header(&response, "content-type"), Some("text/event-stream"));
    let chunk = |delta: Value, finish_reason: Value, usage: bool| {
        let choice = json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason});
        let mut chunk = json!({
            "object": "chat.completion.chunk", "model": "shop", "system_fingerprint": "v1", "choices": [choice],
        });
        if usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    };
    let expected = |usage: bool| {
        let start = chunk(json!({"role": "assistant", "content": ""}), Value::Null, usage);
        let text = ["鱼", "油"].map(|text| chunk(json!({"content": text}), Value::Null, usage));
        let end = chunk(json!({}), json!("stop"), usage);
        [start].into_iter().chain(text).chain([end]).collect::<Vec<_>>()
    };
    let mut found = chunks(&response.text().await.unwrap());
    let last = found.pop().unwrap();
    assert_eq!(found, expected(true));
    let usage = json!({"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22});
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &usage));
    let text = request("shop", "鱼油", false).send().await.unwrap().text().await.unwrap();
    assert_eq!(chunks(&text), expected(false));

    let fallback = request("shop/rewrite", "unreadable", false).send().await.unwrap();
    assert_eq!(header(&fallback, "x-querl-fallback"), Some("no_rewrite"));
    assert_eq!(chunks(&fallback.text().await.unwrap())[1]["choices"][0]["delta"]["content"], "unreadable");
    // A failure before the first text gives an HTTP status, a later one an error among the chunks.
    assert_eq!(request("shop", "busy", false).send().await.unwrap().status().as_u16(), 429);
    for (content, sentence) in [("broken", "the model failed"), ("held", "the response took too long")] {
        let text = request("shop", content, false).send().await.unwrap().text().await.unwrap();
        let error = chunks(&text).pop().unwrap();
        assert!(error["error"]["message"].as_str().unwrap().starts_with(sentence), "{text}");
    }
}

/// Connections whose client takes no response for `send_timeout` are closed; a stream without text yet is not such a connection.
#[tokio::test]
async fn a_stream_may_wait_for_its_first_text() {
    let server = Server::shop(|options| {
        options.server.send_timeout = Duration::from_millis(100);
        options.chat_timeout = Duration::from_secs(10);
    })
    .await;
    let messages = json!([{"role": "user", "content": "delay 2500"}]);
    let request = server.post("/v1/chat/completions", &json!({"model": "shop", "stream": true, "messages": messages}));
    let text = request.send().await.unwrap().text().await.unwrap();
    assert_eq!(chunks(&text).len(), "delay 2500".len() + 2);
}

#[tokio::test]
async fn errors_of_chat_completions_have_openais_form() {
    let server = Server::shop(|_| ()).await;
    let request = |field: &str, value: Value| {
        let mut body = json!({"model": "shop", "messages": [{"role": "user", "content": "a"}]});
        body[field] = value;
        body
    };
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let cases = [
        (
            request("model", json!("shpo")),
            404,
            "model",
            "model_not_found",
            "model `shpo` is not served here; did you mean `shop`?",
        ),
        (
            request("model", json!("shpo/rewrite")),
            404,
            "model",
            "model_not_found",
            "model `shpo/rewrite` is not served here; did you mean `shop/rewrite`?",
        ),
        (
            request("model", json!("gpt-4")),
            404,
            "model",
            "model_not_found",
            "model `gpt-4` is not served here; served: `shop`, `shop/rewrite`",
        ),
        (request("n", json!(2)), 422, "n", "", "`n` is 2; expected 1"),
        (request("temperature", json!(3)), 422, "temperature", "", "`temperature` is 3; expected 0 to 2"),
        (request("top_p", json!(1.5)), 422, "top_p", "", "`top_p` is 1.5; expected 0 to 1"),
        (request("max_tokens", json!(0)), 422, "max_tokens", "", "`max_tokens` is 0; expected a positive integer"),
        // Regression: `param` was null for a value of another type, and for a limit beyond the model's positions, which the message called
        // `max_new_tokens`.
        (request("max_tokens", json!(-1)), 422, "max_tokens", "", "`max_tokens` is -1; expected a positive integer"),
        (request("temperature", json!("1")), 422, "temperature", "", "`temperature` is \"1\"; expected a number"),
        (json!({"model": "shop", "user": "u"}), 422, "messages", "", "`messages` is missing"),
        (
            request("max_tokens", json!(9_999)),
            422,
            "max_tokens",
            "context_length_exceeded",
            "the prompt has 1 tokens; with max_tokens 9999 it goes beyond the model's 512 positions",
        ),
        (
            request("max_completion_tokens", json!(9_999)),
            422,
            "max_completion_tokens",
            "context_length_exceeded",
            "the prompt has 1 tokens; with max_completion_tokens 9999 it",
        ),
        (request("stop", json!([""])), 422, "stop", "", "`stop` is [\"\"]"),
        (request("messages", json!([])), 422, "messages", "", "`messages` is empty"),
        (request("messages", user(json!([{"type": "image_url"}]))), 422, "messages", "", "messages[0]: `content` is"),
        (
            request("messages", user(json!("long text"))),
            422,
            "",
            "context_length_exceeded",
            "the prompt has 900 tokens",
        ),
        (request("messages", user(json!("busy"))), 429, "", "rate_limit_exceeded", "the queue is full"),
        (request("messages", user(json!("broken"))), 500, "", "", "the model failed"),
        (request("messages", user(json!("held"))), 504, "", "", "the response took too long"),
        (
            request("messages", json!([{"role": "assistant", "content": "a"}])),
            422,
            "messages",
            "",
            "the last message is of `assistant`; expected `user`",
        ),
        (request("messages", json!([{"role": "tool", "content": "a"}])), 422, "messages", "", "messages[0]: `role` is"),
    ];
    for (body, status, param, code, sentence) in cases {
        let (found, answer) = server.asked("/v1/chat/completions", body.clone()).await;
        let error = &answer["error"];
        assert!(error["message"].as_str().unwrap().starts_with(sentence), "{body}: {answer}");
        let found = (found, error["param"].as_str().unwrap_or_default(), error["code"].as_str().unwrap_or_default());
        assert_eq!(found, (status, param, code), "{body}");
        assert!(error["type"].is_string());
    }
}

/// Symptom: 128 requests with 28,000 messages each took the memory of the server.
#[tokio::test]
async fn the_number_of_messages_is_limited() {
    let server = Server::shop(|options| options.max_body_bytes = 1 << 20).await;
    let ask = async |n_messages: usize, model: &str| {
        let messages = vec![json!({"role": "user", "content": "x"}); n_messages];
        server.asked("/v1/chat/completions", json!({"model": model, "messages": messages})).await
    };
    for model in ["shop", "shop/rewrite"] {
        assert_eq!(ask(2048, model).await.0, 200);
        let (status, body) = ask(2049, model).await;
        let message = &body["error"]["message"];
        assert_eq!((status, message), (422, &json!("2049 messages in one request; expected at most 2048")));
    }
}

/// What an upstream service received: path and query, headers, body.
type Received = Arc<Mutex<Vec<(String, HeaderMap, String)>>>;

/// An upstream service that responds with one passage; with 404 to the query `missing`, slowly to `slow`.
async fn upstream() -> (String, Received) {
    let received = Received::default();
    let respond = async |State(received): State<Received>, uri: Uri, headers: HeaderMap, body: Bytes| {
        let fields: Value = serde_json::from_slice(&body).unwrap();
        received.lock().unwrap().push((uri.to_string(), headers, String::from_utf8(body.to_vec()).unwrap()));
        if fields["query"].as_str().is_some_and(|query| query.starts_with("slow")) {
            tokio::time::sleep(Duration::from_secs(30)).await;
        }
        match fields["query"] == "missing" {
            true => (axum::http::StatusCode::NOT_FOUND, [("x-own", "1")], "{\"status\": 404, \"msg\": \"no such kb\"}"),
            false => (
                axum::http::StatusCode::OK,
                [("x-own", "1")],
                r#"{"status": 200, "data": {"recall": [{"id": "p1", "content": "每日两粒", "reranker_score": 0.9, "score": 7.5, "rank": 1}]}}"#,
            ),
        }
        .into_response()
    };
    let app = Router::new()
        .route("/api/chat/general_rag", post(respond))
        .route("/dify/retrieval", post(respond))
        .with_state(received.clone());
    (serve_app(app, ServerLimits::default()).await, received)
}

fn with_upstream(url: &str) -> impl FnOnce(&mut RewriteOptions) + use<> {
    let upstream = Upstream::new(url, Duration::from_millis(400)).unwrap();
    |options| options.upstream = Some(upstream)
}

#[tokio::test]
async fn a_retrieval_request_is_forwarded_with_its_rewrite() {
    let (url, received) = upstream().await;
    let server = Server::shop(with_upstream(&url)).await;
    let body = r#"{"query": "它怎么吃", "tenant_id": "shop", "history": ["在看鱼油"], "kb_\u006eame": "a",
        "own": {"id": 123456789012345678901234567890, "share": 0.10}, "rewritten_query": null}"#;
    let request =
        server.client.post(format!("{}/api/chat/general_rag?trace=1", server.url)).bearer_auth("of-the-upstream");
    let request = request.header("content-type", "application/json").header("x-app", "7").body(body);
    let response = request.send().await.unwrap();
    assert_eq!((response.status().as_u16(), header(&response, "x-own")), (200, Some("1")));
    assert_eq!(header(&response, "x-querl-fallback"), None);
    assert_eq!(response.json::<Value>().await.unwrap()["data"]["recall"][0]["id"], "p1");
    let (uri, headers, sent) = received.lock().unwrap().pop().unwrap();
    assert_eq!(uri, "/api/chat/general_rag?trace=1");
    assert_eq!(
        (&headers["x-app"], &headers["authorization"]),
        (&"7".parse().unwrap(), &"Bearer of-the-upstream".parse().unwrap())
    );
    assert!(sent.contains(r#""own":{"id": 123456789012345678901234567890, "share": 0.10}"#), "{sent}");
    let sent: Value = serde_json::from_str(&sent).unwrap();
    assert_eq!((&sent["query"], &sent["rewritten_query"]), (&json!("它怎么吃"), &json!("它怎么吃||在看鱼油")));
    assert_eq!(sent["kb_name"], "a");

    // As docs/serving.md says of numbers beyond the range of a double, and of fields that appear twice.
    for (fields, status) in [(r#""e": 1E400"#, 400), (r#""e": 1, "e": 1"#, 422)] {
        let request = server.client.post(format!("{}/api/chat/general_rag", server.url));
        let request =
            request.header("content-type", "application/json").body(format!("{{\"query\": \"a\", {fields}}}"));
        assert_eq!(answer(request).await.0, status, "{fields}");
    }

    let given = json!({"query": "a", "tenant_id": "shop", "rewritten_query": "b"});
    let n_submitted = server.rewriter.n_submitted.load(Ordering::Relaxed);
    assert_eq!(server.asked("/api/chat/general_rag", given.clone()).await.0, 200);
    assert_eq!(server.rewriter.n_submitted.load(Ordering::Relaxed), n_submitted, "a given rewrite is used");
    assert_eq!(serde_json::from_str::<Value>(&received.lock().unwrap().pop().unwrap().2).unwrap(), given);

    let rag = async |query: &str| server.post("/api/chat/general_rag", &json!({"query": query})).send().await.unwrap();
    let missing = rag("missing").await;
    assert_eq!(missing.status().as_u16(), 404);
    let expected = "{\"status\": 404, \"msg\": \"no such kb\"}";
    assert_eq!(missing.text().await.unwrap(), expected, "status and body are the upstream's");
    // Retrieval works if rewriting fails.
    for (query, reason) in [("held", "timeout"), ("busy", "queue_full"), ("long", "input"), ("plugin", "plugin_fault")]
    {
        let response = rag(query).await;
        assert_eq!((response.status().as_u16(), header(&response, "x-querl-fallback")), (200, Some(reason)));
        let sent: Value = serde_json::from_str(&received.lock().unwrap().pop().unwrap().2).unwrap();
        assert_eq!(sent["rewritten_query"], query);
    }
    server.has_metric("querl_rewrite_fallbacks_total{reason=\"queue_full\",tenant=\"shop\"} 1").await;
    for (body, status, sentence) in [
        (json!({"query": "", "tenant_id": "shop"}), 422, "`query` is empty"),
        (json!({"query": "a", "tenant_id": "shpo"}), 404, "tenant_id `shpo` is not served here; did you mean `shop`?"),
        (json!({"query": "slow"}), 504, "the retrieval service did not respond in time"),
    ] {
        let (found, body) = server.asked("/api/chat/general_rag", body).await;
        assert_eq!((found, &body["status"], &body["msg"]), (status, &json!(status), &json!(sentence)));
    }
}

#[tokio::test]
async fn an_upstream_that_is_down_or_not_configured_is_an_error_with_a_sentence() {
    let (listener, url) = listen().await;
    drop(listener);
    let server = Server::shop(with_upstream(&url)).await;
    let (status, body) = server.asked("/api/chat/general_rag", json!({"query": "a"})).await;
    assert_eq!((status, &body["status"]), (502, &json!(502)));
    assert_eq!(body["msg"], "the retrieval service cannot be reached; the server's log says why");
    let (status, body) = server.asked("/retrieval", json!({"query": "a", "knowledge_id": "shop"})).await;
    assert_eq!((status, &body["error_code"]), (502, &json!(502)));
    let server = Server::shop(|_| ()).await;
    let (status, body) = server.asked("/api/chat/general_rag", json!({"query": "a"})).await;
    assert_eq!(status, 404);
    assert_eq!(body["msg"], "no retrieval service is configured; start the server with --upstream URL");
    for wrong in ["127.0.0.1:8000", "ftp://a", "http://", ""] {
        let error = Upstream::new(wrong, Duration::from_secs(1)).unwrap_err();
        assert!(error.ends_with("; expected one such as http://127.0.0.1:9000"), "{wrong}: {error}");
    }
}

/// Answers every request with these bytes and closes the connection.
async fn raw_upstream(response: &'static str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (listener, url) = listen().await;
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(response.as_bytes()).await;
            let _ = stream.shutdown().await;
        }
    });
    url
}

/// Regression: a broken response was reported as a service that cannot be reached.
#[tokio::test]
async fn an_upstream_with_a_broken_response_is_not_one_that_cannot_be_reached() {
    for response in ["HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"status\"", "SSH-2.0-OpenSSH_9.6\r\n"] {
        let server = Server::shop(with_upstream(&raw_upstream(response).await)).await;
        let (status, body) = server.asked("/api/chat/general_rag", json!({"query": "a"})).await;
        let message = "the retrieval service sent no complete HTTP response; the server's log says why";
        assert_eq!((status, &body["msg"]), (502, &json!(message)), "{response}");
    }
}

/// An upstream service that ignores the limits of a request.
async fn upstream_of(recall: Value) -> String {
    let respond = async move || axum::Json(json!({"status": 200, "data": {"recall": recall}}));
    serve_app(Router::new().route("/api/chat/general_rag", post(respond)), ServerLimits::default()).await
}

/// Regression: passages whose text is not under `content` became records without a text.
#[tokio::test]
async fn dify_gets_the_texts_of_any_general_rag_service_within_the_limits_of_the_request() {
    let passages = json!([
        {"id": "p1", "text": "甲", "reranker_score": 0.9, "source": "a.md"},
        {"doc_id": 2, "page_content": "乙", "reranker_score": "0.8", "title": "题"},
        {"id": "p3", "chunk": "丙", "score": 12.5},
        {"id": "p4", "content": " ", "reranker_score": 0.95},
        {"id": "p5", "content": "丁", "reranker_score": 0.3},
        {"id": "p6", "content": "戊", "reranker_score": 0.7},
        "lack of knowledge",
    ]);
    let server = Server::shop(with_upstream(&upstream_of(passages).await)).await;
    let ask = async |setting: Value| {
        server.asked("/retrieval", json!({"knowledge_id": "shop", "query": "a", "retrieval_setting": setting})).await
    };
    let (status, body) = ask(json!({})).await;
    let records = json!([
        {"content": "甲", "score": 0.9, "title": "p1", "metadata": {"id": "p1", "source": "a.md"}},
        {"content": "乙", "score": 0.8, "title": "题", "metadata": {"doc_id": 2}},
        {"content": "丙", "score": 0.0, "title": "p3", "metadata": {"id": "p3", "score": 12.5}},
        {"content": "丁", "score": 0.3, "title": "p5", "metadata": {"id": "p5"}},
        {"content": "戊", "score": 0.7, "title": "p6", "metadata": {"id": "p6"}},
    ]);
    assert_eq!((status, &body["records"]), (200, &records));
    let titles = |body: &Value| -> Vec<String> {
        body["records"].as_array().unwrap().iter().map(|record| record["title"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(titles(&ask(json!({"score_threshold": 0.5})).await.1), ["p1", "题", "p3", "p6"], "p3 has no score");
    assert_eq!(titles(&ask(json!({"score_threshold": 0.5, "top_k": 2})).await.1), ["p1", "题"]);

    // A field without a number hides no other score.
    let scored = upstream_of(json!([{"id": "p1", "text": "甲", "reranker_score": "none", "score": "0.7"}])).await;
    let server = Server::shop(with_upstream(&scored)).await;
    let (_, body) = server.asked("/retrieval", json!({"knowledge_id": "shop", "query": "a"})).await;
    assert_eq!(body["records"][0]["score"], 0.7, "{body}");

    let without_text = upstream_of(json!([{"id": "p1", "body": "甲", "score": 0.9}])).await;
    let server = Server::shop(with_upstream(&without_text)).await;
    let (status, body) = server.asked("/retrieval", json!({"knowledge_id": "shop", "query": "a"})).await;
    assert_eq!(status, 502, "{body}");
    let empty = Server::shop(with_upstream(&upstream_of(json!([])).await)).await;
    let found = empty.asked("/retrieval", json!({"knowledge_id": "shop", "query": "a"})).await;
    assert_eq!(found, (200, json!({"records": []})));
}

#[tokio::test]
async fn dify_gets_records_of_the_rewritten_query() {
    let (url, received) = upstream().await;
    let tenants = || StandInRewriter::new(vec![tenant("shop", 1, Some("shop-key"))]);
    let server = Server::ready(with_upstream(&url), tenants()).await;
    let body = |id: &str, query: &str| json!({"knowledge_id": id, "query": query, "retrieval_setting": {"top_k": 3, "score_threshold": 0.5}});
    let ask = async |body: Value| answer(server.post("/retrieval", &body).bearer_auth("shop-key")).await;
    let sent = || serde_json::from_str::<Value>(&received.lock().unwrap().pop().unwrap().2).unwrap();
    let metadata = json!({"id": "p1", "score": 7.5, "rank": 1});
    let records = json!({"records": [{"content": "每日两粒", "score": 0.9, "title": "p1", "metadata": metadata}]});
    assert_eq!(ask(body("shop", "鱼油")).await, (200, records.clone()));
    let expected =
        json!({"query": "鱼油", "rewritten_query": "鱼油||", "tenant_id": "shop", "top_k": 3, "score_threshold": 0.5});
    assert_eq!(sent(), expected);
    let archive = server.post("/retrieval", &body("shop:archive", "鱼油")).bearer_auth("shop-key");
    assert_eq!(answer(archive.header("accept-encoding", "gzip")).await, (200, records));
    assert_eq!(received.lock().unwrap()[0].1.get("accept-encoding"), None, "the response is read here");
    assert_eq!(sent()["kb_name"], "archive");

    let code = async |request: RequestBuilder| {
        let (status, body) = answer(request).await;
        assert!(body["error_msg"].is_string(), "{body}");
        (status, body["error_code"].as_u64().unwrap())
    };
    let shop = || server.post("/retrieval", &body("shop", "a"));
    assert_eq!(code(shop()).await, (403, 1001));
    assert_eq!(code(shop().header("authorization", "shop-key")).await, (403, 1001));
    assert_eq!(code(shop().bearer_auth("wrong")).await, (403, 1002));
    // Dify tests a new endpoint by a request without a body, and takes 403, 404 and 502 for failures.
    let test = |server: &Server| server.client.post(format!("{}/retrieval", server.url));
    assert_eq!(code(test(&server).bearer_auth("shop-key")).await, (415, 415));
    assert_eq!(code(test(&server).bearer_auth("wrong")).await, (403, 1002));
    let without_upstream = Server::shop(|_| ()).await;
    assert_eq!(code(test(&without_upstream).bearer_auth("shop-key")).await, (404, 2001));
    let with_key = |body: Value| server.post("/retrieval", &body).bearer_auth("shop-key");
    assert_eq!(code(with_key(body("other:x", "a"))).await, (404, 2001));
    assert_eq!(code(with_key(body("shop", "missing"))).await, (404, 2001));
    assert_eq!(code(with_key(json!({"knowledge_id": "shop"}))).await, (422, 422));

    let server = Server::ready(with_upstream(&format!("{url}/dify/retrieval")), tenants()).await;
    let mut request = body("shop:its-id", "鱼油");
    request["metadata_condition"] = json!({"logical_operator": "and"});
    let (status, found) = answer(server.post("/retrieval", &request).bearer_auth("shop-key")).await;
    assert_eq!((status, &found["status"]), (200, &json!(200)), "the response of a Dify upstream is passed on");
    (request["query"], request["knowledge_id"]) = (json!("鱼油||"), json!("its-id"));
    assert_eq!(sent(), request);
    let rag = server.post("/api/chat/general_rag", &json!({"query": "a", "tenant_id": "shop"})).bearer_auth("shop-key");
    assert_eq!(answer(rag).await.0, 404);
}

#[tokio::test]
async fn requests_are_counted_by_tenant_and_phase_and_the_interface_describes_itself() {
    let server = Server::shop(|_| ()).await;
    server.asked("/v1/rewrite", json!({"query": "鱼油"})).await;
    server.get("/some/stranger").await;
    server.admin(Method::DELETE, "/admin/tenants/stranger", None).await;
    for line in [
        "querl_rewrite_requests_total{route=\"/v1/rewrite\",status=\"200\"} 1",
        "querl_rewrite_requests_total{route=\"/admin/tenants\",status=\"404\"} 1",
        "querl_rewrite_requests_total{route=\"other\",status=\"404\"} 1",
        "querl_rewrite_request_duration_seconds_count{route=\"/v1/rewrite\"} 1",
        "querl_rewrite_phase_duration_seconds_sum{phase=\"queue\",tenant=\"shop\"} 0.001",
        "querl_rewrite_phase_duration_seconds_sum{phase=\"prefill\",tenant=\"shop\"} 0.002",
        "querl_rewrite_phase_duration_seconds_sum{phase=\"decode\",tenant=\"shop\"} 0.003",
        "querl_rewrite_phase_duration_seconds_count{phase=\"total\",tenant=\"shop\"} 1",
        "querl_rewrite_prompt_tokens_total{tenant=\"shop\"} 20",
        "querl_rewrite_generated_tokens_total{tenant=\"shop\"} 4",
        "querl_rewrite_running_requests 2",
        "querl_rewrite_waiting_requests 0",
        "querl_rewrite_mean_batch_size 2.5",
        "querl_rewrite_decode_steps_total 10",
        "querl_rewrite_engine_prompt_tokens_total 7",
    ] {
        server.has_metric(line).await;
    }
    let document: Value = serde_json::from_str(&server.get("/openapi.json").await.1).unwrap();
    for path in
        ["/v1/rewrite", "/v1/chat/completions", "/v1/models", "/api/chat/general_rag", "/retrieval", "/admin/tenants"]
    {
        assert!(document["paths"][path].is_object(), "{path}");
    }
    for schema in ["Query", "Feedback"] {
        assert_eq!(document["components"]["schemas"][schema]["additionalProperties"], false, "{schema}");
    }
    assert!(server.get("/docs").await.1.contains("<code>POST /v1/rewrite</code>"));
}

#[tokio::test]
async fn the_access_log_has_a_line_for_each_rewrite_and_no_texts_or_keys() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.jsonl");
    let rewriter = StandInRewriter::new(vec![tenant("shop", 1, Some("secret-key"))]);
    let server = Server::ready(|options| options.access_log = Some(log.clone()), rewriter).await;
    let request = json!({"queries": [{"query": "鱼油", "user_profile": "孕妇"}, {"query": "unreadable"}]});
    let (_, body) = answer(server.post("/v1/rewrite", &request).bearer_auth("secret-key")).await;
    answer(server.post("/v1/rewrite", &json!({"query": "busy"})).bearer_auth("secret-key")).await;
    let chat = json!({"model": "shop", "stream": true, "messages": [{"role": "user", "content": "藻油"}]});
    server.post("/v1/chat/completions", &chat).bearer_auth("secret-key").send().await.unwrap().text().await.unwrap();
    assert!(becomes(|| std::fs::read_to_string(&log).unwrap().lines().count() == 4).await);
    let text = std::fs::read_to_string(&log).unwrap();
    for secret in ["鱼油", "孕妇", "藻油", "unreadable", "secret-key"] {
        assert!(!text.contains(secret), "{text}");
    }
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&lines[0]["id"], &lines[1]["id"]), (&body["results"][0]["id"], &body["results"][1]["id"]));
    let fields = |line: &Value| {
        let fields = ["route", "status", "tenant", "version", "fallback", "cached", "prompt_tokens", "tokens"];
        fields.map(|field| line[field].clone())
    };
    let rewrite = |rest: [Value; 5]| {
        let [a, b, c, d, e] = rest;
        [json!("/v1/rewrite"), json!(200), json!("shop"), a, b, c, d, e]
    };
    assert_eq!(fields(&lines[0]), rewrite([json!("v1"), Value::Null, json!(false), json!(20), json!(6)]));
    assert_eq!(fields(&lines[1]), rewrite([json!("v1"), json!("no_rewrite"), json!(false), json!(0), json!(0)]));
    assert_eq!(lines[2]["status"], json!(429));
    assert_eq!(lines[2]["tenant"], json!("shop"));
    assert_eq!(lines[2]["version"], Value::Null);
    assert_eq!((&lines[3]["route"], &lines[3]["tokens"]), (&json!("/v1/chat/completions"), &json!(2)));
    assert!(lines.iter().all(|line| line["time"].is_string() && line["latency_ms"].is_number()));
}

/// A server that is stopped while requests are in progress, streams among them.
#[test]
fn requests_in_progress_are_answered_when_the_server_stops() {
    use std::sync::atomic::AtomicBool;
    let is_stopped = Arc::new(AtomicBool::new(false));
    let mut options = options();
    (options.deadline, options.chat_timeout) = (Duration::from_secs(20), Duration::from_secs(20));
    let service = RewriteService::new(options).unwrap();
    let (sender, bound) = std::sync::mpsc::channel();
    let stop = is_stopped.clone();
    let server = std::thread::spawn(move || {
        let on_bound = |addr| sender.send(addr).map_err(std::io::Error::other);
        let work = |service: Arc<RewriteService>| {
            service.set_ready(StandInRewriter::new(vec![tenant("shop", 1, None)]));
            loop {
                std::thread::park();
            }
        };
        service.run("127.0.0.1:0".parse().unwrap(), on_bound, work, move || stop.load(Ordering::Relaxed))
    });
    let url = format!("http://{}", bound.recv().unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = http();
        let ready = || async { client.get(format!("{url}/ready")).send().await.unwrap().status().as_u16() };
        while ready().await != 200 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let rewriting = client.post(format!("{url}/v1/rewrite")).json(&json!({"query": "delay 2000"})).send();
        let chat = json!({"model": "shop", "stream": true, "messages": [{"role": "user", "content": "delay 2000"}]});
        let streaming = client.post(format!("{url}/v1/chat/completions")).json(&chat).send();
        let stopping = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            is_stopped.store(true, Ordering::Relaxed);
        };
        let streamed = async { streaming.await.unwrap().text().await.unwrap() };
        let (rewritten, streamed, ()) = tokio::join!(rewriting, streamed, stopping);
        assert_eq!(rewritten.unwrap().json::<Value>().await.unwrap()["rewrite"], "delay 2000||");
        assert_eq!(chunks(&streamed).len(), "delay 2000".len() + 2);
        assert!(client.get(format!("{url}/health")).send().await.is_err(), "no further requests");
    });
    server.join().unwrap().unwrap();
}
