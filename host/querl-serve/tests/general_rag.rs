//! The `general_rag` server over real sockets: the embedded retrieval behind it, the retriever of `kind = "http"` as its client.
#![allow(clippy::unwrap_used)]

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
use std::time::{Duration, Instant};
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
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}{GENERAL_RAG_ROUTE}", listener.local_addr().unwrap());
    tokio::spawn(serve(listener, general_rag(bases).unwrap(), limits, std::future::pending()));
    url
}

fn client(url: &str, kb_name: &str, tenant: &str) -> Arc<dyn Retriever> {
    let config =
        config(&json!({"kind": "http", "url": url, "kb_name": kb_name, "score_threshold": 0.0, "max_retries": 0}));
    open_retriever(&config, tenant, &LocalModels::default(), &ServiceContext::default()).unwrap()
}

async fn post(url: &str, body: Value) -> (u16, Value) {
    // Fails where a provider is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::new();
    let response = client.post(url).json(&body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
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

/// The worked example of the source plan: its rewrite says `服用方法` and `推荐用量`, the knowledge base `食用方法` and `用量`.
#[tokio::test]
async fn the_example_finds_a_passage_by_words_that_its_synonyms_add() {
    let folder = tempfile::tempdir().unwrap();
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/fivedoctors");
    let found = async |synonyms: Option<&str>| {
        let index = format!("retrieval.index_dir={}", folder.path().display());
        let synonyms = synonyms.map(|file| format!("retrieval.synonyms={}", example.join(file).display()));
        let overrides = Overrides { set: synonyms.into_iter().chain([index]).collect(), ..Overrides::default() };
        let config = load(&example.join("querl.toml"), &overrides).unwrap();
        let (tenant, models) = (config.tenant, LocalModels::default());
        let search = open_retrieval_backend(&config.retrieval, &tenant, &models, &ServiceContext::default()).unwrap();
        let base = KnowledgeBase { tenant, kb_name: config.retrieval.kb_name, search, timeout: TIMEOUT };
        let url = start(vec![base], ServerLimits::default()).await;
        let body = json!({
            "query": "胶原蛋白怎么吃", "rewritten_query": "胶原蛋白肽 服用方法 推荐用量", "tenant_id": "fivedoctors",
            "kb_name": "default", "top_k": config.retrieval.top_k, "score_threshold": 0.3,
        });
        let (status, answer) = post(&url, body).await;
        assert_eq!(status, 200, "{answer}");
        let passages = answer["data"]["recall"].as_array().unwrap().clone();
        passages.iter().map(|passage| passage["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert!(!found(None).await.contains(&"p01-usage".to_owned()));
    assert_eq!(found(Some("synonyms.txt")).await.first().map(String::as_str), Some("p01-usage"));
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
    // One message for both: clients do not learn who else is served.
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
    for (body, said) in [
        (json!({"tenant_id": "shop"}), "missing field `query`"),
        (json!({"query": " ", "tenant_id": "shop"}), "`query` is empty"),
        (json!({"query": "鱼油"}), "missing field `tenant_id`"),
        (json!({"query": "鱼油", "tenant_id": "shop", "top_k": 0}), "`top_k` is 0; expected 1 to 1000"),
        (
            json!({"query": "鱼油", "tenant_id": "shop", "score_threshold": 7}),
            "`score_threshold` is 7; expected 0 to 1",
        ),
        (json!({"query": "鱼油", "tenant_id": "shop", "history": 3}), "`history` is neither a text nor a list"),
        (json!({"query": "油".repeat(8193), "tenant_id": "shop"}), "`query` is longer than 8192 characters"),
        (
            json!({"query": "鱼油", "tenant_id": "shop", "history": ["油".repeat(5000), "油".repeat(5000)]}),
            "`history` is longer than 8192 characters",
        ),
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
    let error = general_rag(vec![base(), base()]).unwrap_err().to_string();
    assert_eq!(error, "tenant `shop` has two knowledge bases named `default`; give each its own `retrieval.kb_name`");
}

#[tokio::test]
async fn malformed_requests_have_their_own_status_and_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let url = server(folder.path()).await;
    let client = reqwest::Client::new();
    let json = ("content-type", "application/json");
    let large = json!({"query": "x".repeat(300_000), "tenant_id": "shop"}).to_string();
    for (body, header, expected) in
        [("{".to_owned(), json, 400), ("{}".to_owned(), ("x-other", "1"), 415), (large, json, 413)]
    {
        let response = client.post(&url).header(header.0, header.1).body(body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), expected);
        let answer: Value = response.json().await.unwrap();
        assert!(answer["status"] == expected && !answer["msg"].as_str().unwrap().is_empty(), "{answer}");
    }
    let elsewhere = url.replace("general_rag", "other");
    let (status, answer) = post(&elsewhere, json!({})).await;
    assert_eq!((status, &answer["status"]), (404, &json!(404)));
}

/// Fails, or takes a while.
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
    // The time limit of the back end may pass first.
    let late = "embedded index: no answer within 5 s";
    let (status, _) = ask(faulty(Err((FailureKind::Timeout, late)), TIMEOUT)).await;
    assert_eq!(status, 503);
}

#[tokio::test]
async fn a_head_that_does_not_arrive_in_time_closes_the_connection() {
    let limits = ServerLimits { head_timeout: Duration::from_millis(100), ..ServerLimits::default() };
    let url = start(faulty(Ok(Duration::ZERO), TIMEOUT), limits).await;
    let address = url.strip_prefix("http://").unwrap().split('/').next().unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"POST / HTTP/1.1\r\nhost: x\r\n").await.unwrap();
    let started = Instant::now();
    let mut rest = Vec::new();
    // Closed by the server.
    stream.read_to_end(&mut rest).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_request_that_hangs_does_not_delay_shutdown() {
    let limits = ServerLimits { drain_timeout: Duration::from_millis(100), ..ServerLimits::default() };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let app = general_rag(faulty(Ok(Duration::ZERO), TIMEOUT)).unwrap();
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

#[tokio::test]
async fn connections_above_the_limit_wait() {
    let limits = ServerLimits { max_connections: 1, ..ServerLimits::default() };
    let url = start(faulty(Ok(Duration::ZERO), TIMEOUT), limits).await;
    let address = url.strip_prefix("http://").unwrap().split('/').next().unwrap();
    let first = TcpStream::connect(address).await.unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    let asked = tokio::spawn(async move { post(&url, json!({"query": "鱼油", "tenant_id": "shop"})).await.0 });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!asked.is_finished());
    drop(first);
    assert_eq!(asked.await.unwrap(), 200);
}
