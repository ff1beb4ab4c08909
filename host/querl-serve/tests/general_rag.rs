//! The `general_rag` server over real sockets, with the embedded index as backend and the retriever of `kind = "http"` as client.
#![allow(clippy::unwrap_used)]

mod support;

use querl_core::config::{Overrides, RetrievalConfig, load};
use querl_core::ports::{RetrievalRequest, Retriever};
use querl_core::records::{CallFailure, Context, FailureKind, Hit};
use querl_data::{
    LocalModels, RetrievalBackend, RetrievalLimits, ServiceContext, open_retrieval_backend, open_retriever,
};
use querl_serve::{GENERAL_RAG_ROUTE, KnowledgeBase, ServerLimits, general_rag, serve};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{answer, http, serve_app};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const LEXICON: &str = r#"{
  "products": [{"id": "a", "name": "深海鱼油软胶囊", "aliases": ["鱼油"]}, {"id": "b", "name": "藻油软胶囊", "aliases": ["藻油"]}],
  "intents": [
    {"id": "usage", "name": "食用方法", "house": ["食用方法"], "general": ["怎么吃"]},
    {"id": "price", "name": "规格售价", "house": ["建议零售价"], "general": ["多少钱"]}
  ]
}"#;

const SHOP: [[&str; 3]; 3] = [
    ["a-usage", "深海鱼油软胶囊 食用方法", "每日两粒，餐后温水送服。"],
    ["a-price", "深海鱼油软胶囊 建议零售价", "一瓶一百粒，129元。"],
    ["b-usage", "藻油软胶囊 食用方法", "每日一粒，早餐时服用。"],
];
const OTHER: [[&str; 3]; 1] = [["z", "藻油软胶囊 食用方法", "另一家的说明。"]];

fn embedded(folder: &Path, name: &str, passages: &[[&str; 3]]) -> Value {
    let (knowledge_base, lexicon) = (folder.join(format!("{name}.jsonl")), folder.join("lexicon.json"));
    std::fs::write(&lexicon, LEXICON).unwrap();
    let passages = passages.iter().map(|[id, title, text]| json!({"id": id, "title": title, "text": text}));
    querl_core::fsx::write_jsonl(&knowledge_base, passages).unwrap();
    json!({"kind": "embedded", "knowledge_base": knowledge_base, "lexicon": lexicon, "score_threshold": 0.0,
        "index_dir": folder.join("indexes")})
}

fn config(value: &Value) -> RetrievalConfig {
    serde_json::from_value(value.clone()).unwrap()
}

fn base(folder: &Path, tenant: &str, kb_name: &str, passages: &[[&str; 3]]) -> KnowledgeBase {
    let config = config(&embedded(folder, &format!("{tenant}-{kb_name}"), passages));
    let search = open_retrieval_backend(&config, tenant, &LocalModels::default(), &ServiceContext::default()).unwrap();
    KnowledgeBase { tenant: tenant.into(), kb_name: kb_name.into(), search, timeout: TIMEOUT }
}

/// A server with two tenants; one has two knowledge bases.
async fn server(folder: &Path) -> String {
    let base = |tenant, kb_name, passages| base(folder, tenant, kb_name, passages);
    let bases = vec![base("shop", "default", &SHOP), base("shop", "archive", &OTHER), base("rival", "default", &OTHER)];
    start(bases, ServerLimits::default()).await
}

const TIMEOUT: Duration = Duration::from_secs(30);

async fn start(bases: Vec<KnowledgeBase>, limits: ServerLimits) -> String {
    serve_app(general_rag(bases, None).unwrap(), limits).await + GENERAL_RAG_ROUTE
}

fn client(url: &str, kb_name: &str, tenant: &str) -> Arc<dyn Retriever> {
    let config =
        config(&json!({"kind": "http", "url": url, "kb_name": kb_name, "score_threshold": 0.0, "max_retries": 0}));
    open_retriever(&config, tenant, &LocalModels::default(), &ServiceContext::default()).unwrap()
}

async fn post(url: &str, body: Value) -> (u16, Value) {
    answer(http().post(url).json(&body)).await
}

#[tokio::test]
async fn hits_over_http_equal_those_of_the_back_end() {
    let folder = tempfile::tempdir().unwrap();
    let here = open_retriever(
        &config(&embedded(folder.path(), "here", &SHOP)),
        "shop",
        &LocalModels::default(),
        &ServiceContext::default(),
    )
    .unwrap();
    let there = client(&server(folder.path()).await, "default", "shop");
    let context = Context { user_profile: "孕妇".into(), history_summary: "在看鱼油".into() };
    for rewrite in ["深海鱼油软胶囊 食用方法", "藻油", "没有这样的词", ""] {
        let request =
            || RetrievalRequest { original_query: "它怎么吃", context: &context, rewritten_query: rewrite };
        let expected = if rewrite.is_empty() { "它怎么吃" } else { rewrite };
        let found = there.retrieve(request()).await.unwrap();
        let request = RetrievalRequest { rewritten_query: expected, ..request() };
        assert_eq!(found, here.retrieve(request).await.unwrap(), "{rewrite}");
    }
}

/// The worked example: its rewrite has `服用方法` and `推荐用量`, the knowledge base `食用方法` and `用量`. Limits are the defaults of a request.
#[tokio::test]
async fn the_example_service_finds_the_passage_of_the_worked_example() {
    let folder = tempfile::tempdir().unwrap();
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/fivedoctors");
    let found = async |file: &str| {
        let index = format!("retrieval.index_dir={}", folder.path().display());
        let config = load(&example.join(file), &Overrides { set: vec![index], ..Overrides::default() }).unwrap();
        let (tenant, models) = (config.tenant, LocalModels::default());
        let search = open_retrieval_backend(&config.retrieval, &tenant, &models, &ServiceContext::default()).unwrap();
        let base = KnowledgeBase { tenant, kb_name: config.retrieval.kb_name, search, timeout: TIMEOUT };
        let url = start(vec![base], ServerLimits::default()).await;
        let body = json!({
            "query": "胶原蛋白怎么吃", "rewritten_query": "胶原蛋白肽 服用方法 推荐用量", "tenant_id": "fivedoctors",
        });
        let (status, answer) = post(&url, body).await;
        assert_eq!(status, 200, "{answer}");
        let passages = answer["data"]["recall"].as_array().unwrap().clone();
        passages.iter().map(|passage| passage["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    for file in ["serve.toml", "querl.toml"] {
        assert!(found(file).await.contains(&"p01-usage".to_owned()), "{file}");
    }
}

#[tokio::test]
async fn tenants_and_knowledge_bases_are_separate_and_unknown_ones_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let url = server(folder.path()).await;
    let context = Context::default();
    let request =
        || RetrievalRequest {
            original_query: "藻油怎么吃", context: &context, rewritten_query: "藻油软胶囊 食用方法"
        };
    for (tenant, kb_name, expected) in
        [("shop", "default", "b-usage"), ("shop", "archive", "z"), ("rival", "default", "z")]
    {
        let hits = client(&url, kb_name, tenant).retrieve(request()).await.unwrap();
        assert_eq!(hits[0].id, expected, "{tenant} {kb_name}");
    }
    // The same message for both, so that clients do not learn which tenants are served.
    for (tenant, kb_name) in [("thief", "default"), ("rival", "archive")] {
        let failure = client(&url, kb_name, tenant).retrieve(request()).await.unwrap_err();
        assert_eq!(failure.kind, FailureKind::Rejected);
        let said = format!("answered 404 Not Found: tenant_id `{tenant}` with kb_name `{kb_name}` is not served here");
        assert!(failure.message.ends_with(&said), "{failure}");
    }
}

#[tokio::test]
async fn defaults_and_forms_of_history() {
    let folder = tempfile::tempdir().unwrap();
    let url = server(folder.path()).await;
    let (status, answer) =
        post(&url, json!({"query": "深海鱼油软胶囊 食用方法", "tenant_id": "shop", "unknown": 1})).await;
    assert_eq!((status, &answer["status"]), (200, &json!(200)), "{answer}");
    assert_eq!(answer["data"]["rewritten_query"], "深海鱼油软胶囊 食用方法");
    assert_eq!(answer["data"]["recall"][0]["id"], "a-usage");
    for (history, expected) in [
        (json!("一\n二"), "一\n二"),
        (json!(["一", "二"]), "一\n二"),
        (json!([{"role": "user", "content": "一"}, {"role": "assistant", "content": "二"}]), "一\n二"),
        (json!(null), ""),
    ] {
        let (_, answer) = post(&url, json!({"query": "鱼油", "tenant_id": "shop", "history": history})).await;
        assert_eq!(answer["data"]["history_summary"], expected, "{answer}");
    }
}

#[tokio::test]
async fn limits_of_the_request_hold() {
    let folder = tempfile::tempdir().unwrap();
    let url = server(folder.path()).await;
    let ask = |key: &str, value: Value| {
        let mut body = json!({"query": "深海鱼油软胶囊 食用方法", "tenant_id": "shop", "score_threshold": 0.0});
        body[key] = value;
        post(&url, body)
    };
    let recall = async |key, value| ask(key, value).await.1["data"]["recall"].as_array().unwrap().clone();
    let ids = |hits: &[Value]| hits.iter().map(|hit| hit["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    let all = recall("top_k", json!(9)).await;
    assert_eq!(ids(&all), ["a-usage", "b-usage", "a-price"]);
    assert_eq!(ids(&recall("top_k", json!(1)).await), ["a-usage"]);
    let threshold = all[1]["reranker_score"].as_f64().unwrap();
    assert!(threshold > all[2]["reranker_score"].as_f64().unwrap());
    assert_eq!(ids(&recall("score_threshold", json!(threshold)).await), ["a-usage", "b-usage"]);
}

#[tokio::test]
async fn invalid_values_are_rejected_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let url = server(folder.path()).await;
    let with = |key: &str, value: Value| json!({"query": "鱼油", "tenant_id": "shop", key: value});
    for (body, said) in [
        (json!({"tenant_id": "shop"}), "`query` is missing; expected a text"),
        (json!({"query": " ", "tenant_id": "shop"}), "`query` is empty"),
        (json!({"query": "鱼油"}), "`tenant_id` is missing; expected a text"),
        (json!({"query": 7, "tenant_id": "shop"}), "`query` is 7; expected a text"),
        (with("top_k", json!(-1)), "`top_k` is -1; expected an integer from 1 to 1000"),
        (with("score_threshold", json!("x")), "`score_threshold` is \"x\"; expected a number from 0 to 1"),
        (json!(["鱼油"]), "the body is [\"鱼油\"]; expected {\"query\": ..., \"tenant_id\": ...}"),
        (with("top_k", json!(0)), "`top_k` is 0; expected 1 to 1000"),
        (with("score_threshold", json!(7)), "`score_threshold` is 7; expected 0 to 1"),
        (with("history", json!(3)), "`history` is neither a text nor a list"),
        (json!({"query": "油".repeat(8193), "tenant_id": "shop"}), "`query` is longer than 8192 characters"),
        (with("history", json!(["油".repeat(5000), "油".repeat(5000)])), "`history` is longer than 8192 characters"),
    ] {
        let (status, answer) = post(&url, body).await;
        assert_eq!((status, &answer["status"]), (422, &json!(422)), "{answer}");
        assert!(answer["msg"].as_str().unwrap().contains(said), "{answer}");
    }
}

#[test]
fn two_knowledge_bases_of_one_name_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let base = || base(folder.path(), "shop", "default", &SHOP);
    let error = general_rag(vec![base(), base()], None).unwrap_err().to_string();
    assert_eq!(error, "tenant `shop` has two knowledge bases named `default`; give each its own `retrieval.kb_name`");
}

#[tokio::test]
async fn malformed_requests_have_their_own_status_and_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let url = server(folder.path()).await;
    let client = http();
    let json = ("content-type", "application/json");
    let large = json!({"query": "x".repeat(300_000), "tenant_id": "shop"}).to_string();
    for (body, header, expected, said) in [
        (
            "{\n \"query\": }".to_owned(),
            json,
            400,
            "the body is not valid JSON: expected value at line 2 column 11; expected",
        ),
        (" ".to_owned(), json, 400, "the body is empty; expected {\"query\": ..., \"tenant_id\": ...}"),
        ("{\"query\": \"a\", \"query\": \"b\"}".to_owned(), json, 422, "`query` appears twice at line 1 column 2"),
        ("{}".to_owned(), ("x-other", "1"), 415, "`Content-Type` is missing; expected `application/json`"),
        (
            "{}".to_owned(),
            ("content-type", "text/json"),
            415,
            "`Content-Type` is `text/json`; expected `application/json`",
        ),
        (large, json, 413, "the body is larger than 262144 bytes"),
    ] {
        let response = client.post(&url).header(header.0, header.1).body(body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), expected);
        let answer: Value = response.json().await.unwrap();
        assert!(answer["status"] == expected && answer["msg"].as_str().unwrap().starts_with(said), "{answer}");
    }
    let (status, answer) = post(&url.replace("general_rag", "other"), json!({})).await;
    assert_eq!((status, &answer["status"]), (404, &json!(404)));
    let response = client.get(&url).send().await.unwrap();
    assert_eq!((response.status().as_u16(), &response.headers()["allow"]), (405, &"POST".parse().unwrap()));
    let answer: Value = response.json().await.unwrap();
    assert!(answer["msg"].as_str().unwrap().starts_with("method GET is not allowed"), "{answer}");
}

#[tokio::test]
async fn a_search_requires_the_key() {
    let app = general_rag(faulty(Ok(Duration::ZERO), TIMEOUT), Some("right")).unwrap();
    let url = serve_app(app, ServerLimits::default()).await;
    let ask = async |authorization: &str| {
        let body = json!({"query": "鱼油", "tenant_id": "shop"});
        let request = http().post(format!("{url}{GENERAL_RAG_ROUTE}")).json(&body);
        request.header("authorization", authorization).send().await.unwrap()
    };
    let rejected = ask("Bearer wrong").await;
    assert_eq!(
        (rejected.status().as_u16(), &rejected.headers()["www-authenticate"]),
        (401, &"Bearer".parse().unwrap())
    );
    assert_eq!(ask("bearer right").await.status(), 200);
    assert_eq!(http().get(format!("{url}/ready")).send().await.unwrap().status(), 200);
}

/// A retriever that fails or takes a while.
struct Faulty(Result<Duration, (FailureKind, &'static str)>);

#[async_trait::async_trait]
impl RetrievalBackend for Faulty {
    async fn search(&self, _request: &RetrievalRequest<'_>, _limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
        match self.0 {
            Ok(time) => tokio::time::sleep(time).await,
            Err((kind, problem)) => return Err(CallFailure { kind, message: problem.into() }),
        }
        Ok(Vec::new())
    }

    fn name(&self) -> &str {
        "faulty"
    }
}

fn faulty(fault: Result<Duration, (FailureKind, &'static str)>, timeout: Duration) -> Vec<KnowledgeBase> {
    let search = Arc::new(Faulty(fault));
    vec![KnowledgeBase { tenant: "shop".into(), kb_name: "default".into(), search, timeout }]
}

#[tokio::test]
async fn internal_failures_are_hidden_and_timeouts_are_reported() {
    let ask = async |bases| {
        let url = start(bases, ServerLimits::default()).await;
        post(&url, json!({"query": "鱼油", "tenant_id": "shop"})).await
    };
    let (status, answer) =
        ask(faulty(Err((FailureKind::ServerError, "POST http://10.0.0.7:9200/kb: refused")), TIMEOUT)).await;
    assert_eq!((status, &answer["msg"]), (500, &json!("the search failed; the server's log says why")));
    let (status, answer) = ask(faulty(Ok(TIMEOUT), Duration::from_millis(50))).await;
    assert_eq!((status, &answer["msg"]), (503, &json!("no response within 50ms; retry later")));
    // The backend's time limit may pass first.
    let late = "embedded index: no answer within 5 s";
    let (status, _) = ask(faulty(Err((FailureKind::Timeout, late)), TIMEOUT)).await;
    assert_eq!(status, 503);
}

fn address(url: &str) -> &str {
    url.strip_prefix("http://").unwrap().split('/').next().unwrap()
}

/// Status of `GET path` over a new connection, and the time that it took.
async fn status_of(url: &str, path: &str) -> (u16, Duration) {
    let started = Instant::now();
    let mut stream = TcpStream::connect(address(url)).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    (response.split(' ').nth(1).unwrap().parse().unwrap(), started.elapsed())
}

#[tokio::test]
async fn a_head_that_does_not_arrive_in_time_closes_the_connection() {
    let limits = ServerLimits { head_timeout: Duration::from_millis(200), ..ServerLimits::default() };
    let url = start(faulty(Ok(Duration::ZERO), TIMEOUT), limits).await;
    let (mut reader, mut writer) = TcpStream::connect(address(&url)).await.unwrap().into_split();
    tokio::spawn(async move {
        // One byte at a time, which does not extend the time limit.
        while writer.write_all(b"a").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let started = Instant::now();
    // Closed by the server, or reset because of unread bytes.
    let _ = reader.read_to_end(&mut Vec::new()).await;
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

/// Number of half-sent requests that a test may open in addition to `n_connections` connections of its server.
fn n_half_sent(n_connections: u64) -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    1100.min(limit.saturating_sub(n_connections + 128)) as usize
}

/// Regression: 1,100 half-sent requests held all connections, and `/health` was answered after their time limit.
#[tokio::test]
async fn half_sent_requests_do_not_delay_health() {
    let limits = ServerLimits { max_connections: 256, max_connections_per_peer: 128, ..ServerLimits::default() };
    let url = start(faulty(Ok(Duration::ZERO), TIMEOUT), limits).await;
    let head = format!("POST {GENERAL_RAG_ROUTE} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n");
    let body = format!("{head}content-length: 99\r\n\r\n{{");
    let mut half_sent = Vec::new();
    for index in 0..n_half_sent(256) {
        let mut stream = TcpStream::connect(address(&url)).await.unwrap();
        let part = if index % 2 == 0 { &head } else { &body };
        stream.write_all(part.as_bytes()).await.unwrap();
        half_sent.push(stream);
    }
    assert!(half_sent.len() > 256, "more than the connections of the server");
    for path in ["/health", "/ready"] {
        let (status, elapsed) = status_of(&url, path).await;
        assert!(status == 200 && elapsed < Duration::from_secs(5), "{path}: {status} after {elapsed:?}");
    }
    assert_eq!(post(&url, json!({"query": "鱼油", "tenant_id": "shop"})).await.0, 200);
    // The oldest are closed, the newest are not.
    assert!(!matches!(half_sent[0].read(&mut [0]).await, Ok(1..)));
    let newest = half_sent.last_mut().unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(20), newest.read(&mut [0])).await.is_err());
}

/// A retriever that counts searches, which never end.
#[derive(Default)]
struct Endless(AtomicUsize);

#[async_trait::async_trait]
impl RetrievalBackend for Endless {
    async fn search(&self, _request: &RetrievalRequest<'_>, _limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
        self.0.fetch_add(1, Ordering::Relaxed);
        std::future::pending().await
    }

    fn name(&self) -> &str {
        "endless"
    }
}

#[tokio::test]
async fn requests_above_the_limits_are_rejected_and_health_is_answered() {
    for (per_peer, n_requests, expected, ready) in [(8, 7, 429, 200), (16, 14, 503, 503)] {
        let limits =
            ServerLimits { max_connections: 16, max_connections_per_peer: per_peer, ..ServerLimits::default() };
        let search = Arc::new(Endless::default());
        let (tenant, kb_name) = ("shop".into(), "default".into());
        let base = KnowledgeBase { tenant, kb_name, search: search.clone(), timeout: TIMEOUT };
        let url = start(vec![base], limits).await;
        let request = http().post(&url).json(&json!({"query": "鱼油", "tenant_id": "shop"}));
        let send = || request.try_clone().unwrap().send();
        let in_progress: Vec<_> = (0..n_requests).map(|_| tokio::spawn(send())).collect();
        while search.0.load(Ordering::Relaxed) < n_requests {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let rejected = send().await.unwrap();
        assert_eq!((rejected.status().as_u16(), &rejected.headers()["retry-after"]), (expected, &"1".parse().unwrap()));
        let said = rejected.json::<Value>().await.unwrap()["msg"].to_string();
        assert!(said.contains(&format!("{n_requests} requests")), "{said}");
        assert_eq!((status_of(&url, "/health").await.0, status_of(&url, "/ready").await.0), (200, ready));
        assert!(in_progress.iter().all(|request| !request.is_finished()), "none was closed for another");
    }
}

#[tokio::test]
async fn a_request_that_hangs_does_not_delay_shutdown() {
    let limits = ServerLimits { drain_timeout: Duration::from_millis(100), ..ServerLimits::default() };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let app = general_rag(faulty(Ok(Duration::ZERO), TIMEOUT), None).unwrap();
    let server = tokio::spawn(serve(listener, app, limits, async {
        let _ = stopped.await;
    }));
    let mut half_sent = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST {GENERAL_RAG_ROUTE} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{{"
    );
    half_sent.write_all(head.as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(5), server).await.expect("the server ends").unwrap();
}
