//! The request log and feedback over real sockets, with a stand-in for the models.
#![allow(clippy::unwrap_used)]

mod support;

use querl_core::ports::{FaultKind, Filter, PluginFault};
use querl_core::records::{Sample, Verdict};
use querl_serve::{RequestLogOptions, RewriteOptions, RewriteService, Upstream, serve};
use reqwest::Client;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::{StandInRewriter, answer, http, listen, options, serve_app, tenant};

struct Server {
    url: String,
    client: Client,
    /// The server task; ending it releases its log.
    running: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start(change: impl FnOnce(&mut RewriteOptions)) -> Self {
        let mut options = options();
        change(&mut options);
        Self::of(RewriteService::new(options).unwrap()).await
    }

    async fn of(service: Arc<RewriteService>) -> Self {
        service.set_ready(StandInRewriter::new(vec![
            tenant("rival", 7, Some("rival-key")),
            tenant("shop", 1, Some("shop-key")),
        ]));
        let (listener, url) = listen().await;
        let running = tokio::spawn(serve(listener, service.router(), options().server, std::future::pending()));
        Self { url, client: http(), running }
    }

    async fn logging(folder: &Path) -> Self {
        Self::start(|options| options.request_log = Some(log(folder))).await
    }

    /// Starts a server once no other server uses the log.
    async fn logging_once_free(folder: &Path) -> Self {
        let opened = || {
            let mut options = options();
            options.request_log = Some(log(folder));
            RewriteService::new(options).ok()
        };
        for _ in 0..100 {
            if let Some(service) = opened() {
                return Self::of(service).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("the log was never free");
    }

    async fn ask(&self, path: &str, body: Value) -> (u16, Value) {
        answer(self.client.post(format!("{}{path}", self.url)).bearer_auth("shop-key").json(&body)).await
    }

    async fn metric(&self, name: &str) -> Option<u64> {
        let text = self.client.get(format!("{}/metrics", self.url)).send().await.unwrap().text().await.unwrap();
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    }

    /// Polls for at most two seconds.
    async fn has_metric(&self, name: &str, expected: u64) {
        for _ in 0..200 {
            if self.metric(name).await == Some(expected) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{name} is {:?}; expected {expected}", self.metric(name).await);
    }
}

fn log(folder: &Path) -> RequestLogOptions {
    RequestLogOptions { folder: folder.to_owned(), max_bytes: 1 << 20, max_days: 30, filter: None }
}

/// The lines of all days.
fn lines(folder: &Path) -> Vec<Value> {
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    paths.sort();
    let texts = paths.iter().map(|path| std::fs::read_to_string(path).unwrap());
    texts.flat_map(|text| text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<_>>()).collect()
}

async fn lines_once(folder: &Path, n_lines: usize) -> Vec<Value> {
    for _ in 0..200 {
        if lines(folder).len() >= n_lines {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let lines = lines(folder);
    assert_eq!(lines.len(), n_lines, "{lines:#?}");
    lines
}

async fn upstream() -> String {
    let respond = async || axum::Json(json!({"status": 200, "data": {"recall": []}}));
    serve_app(axum::Router::new().fallback(respond), options().server).await
}

#[tokio::test]
async fn each_rewrite_of_each_protocol_is_logged_with_its_texts_and_without_keys_and_user_ids() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("log");
    let url = upstream().await;
    let server = Server::start(|options| {
        options.request_log = Some(log(&dir));
        options.upstream = Some(Upstream::new(&url, Duration::from_secs(5)).unwrap());
        options.max_cached_rewrites = 10;
    })
    .await;
    let query = json!({"query": "鱼油", "user_profile": "孕妇", "history": ["在看钙片"], "user": "ada@example.org"});
    let (_, first) = server.ask("/v1/rewrite", query.clone()).await;
    let (_, batch) =
        server.ask("/v1/rewrite", json!({"queries": [query, {"query": "unreadable", "user": "bob"}]})).await;
    let messages = json!([{"role": "user", "content": "在看钙片"}, {"role": "user", "content": "藻油"}]);
    let chat = json!({"model": "shop/rewrite", "messages": messages, "user": "ada@example.org"});
    let (_, completion) = server.ask("/v1/chat/completions", chat).await;
    let own = json!({"model": "shop", "messages": [{"role": "user", "content": "not a query"}]});
    assert_eq!(server.ask("/v1/chat/completions", own).await.0, 200);
    let rag = json!({"query": "busy", "tenant_id": "shop", "user_id": 17});
    assert_eq!(server.ask("/api/chat/general_rag", rag).await.0, 200);
    assert_eq!(server.ask("/retrieval", json!({"knowledge_id": "shop", "query": "钙片"})).await.0, 200);
    assert_eq!(server.ask("/v1/rewrite", json!({"query": ""})).await.0, 422);

    let lines = lines_once(&dir, 6).await;
    let text = serde_json::to_string(&lines).unwrap();
    for secret in ["shop-key", "rival-key", "ada@", "bob", "not a query"] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
    let fields = |line: &Value, names: &[&str]| names.iter().map(|name| line[*name].clone()).collect::<Vec<_>>();
    let texts = ["query", "user_profile", "history", "rewrite", "fallback", "cached"];
    let expected = ["鱼油", "孕妇", "在看钙片", "鱼油|孕妇|在看钙片"].map(|text| json!(text)).to_vec();
    assert_eq!(fields(&lines[0], &texts), [&expected[..], &[Value::Null, json!(false)][..]].concat());
    assert_eq!(fields(&lines[1], &texts), [&expected[..], &[Value::Null, json!(true)][..]].concat());
    assert_eq!(fields(&lines[2], &texts[3..]), [json!("unreadable"), json!("no_rewrite"), json!(false)]);
    assert_eq!(fields(&lines[3], &texts[..4]), ["藻油", "", "在看钙片", "藻油||在看钙片"]);
    assert_eq!(fields(&lines[4], &texts[3..5]), ["busy", "queue_full"]);
    assert_eq!(fields(&lines[5], &["query", "user"]), [json!("钙片"), Value::Null]);
    for line in &lines {
        assert_eq!(fields(line, &["kind", "tenant", "version", "redacted"])[..3], ["rewrite", "shop", "v1"]);
        assert!(line["latency_ms"].is_number() && line["time"].as_str().unwrap().ends_with('Z'));
    }
    let ids = [&first["id"], &batch["results"][0]["id"], &batch["results"][1]["id"]];
    assert_eq!([&lines[0]["id"], &lines[1]["id"], &lines[2]["id"]], ids);
    assert_eq!(completion["id"], json!(format!("chatcmpl-{}", lines[3]["id"].as_str().unwrap())));
    assert_eq!((&lines[0]["user"], &lines[1]["user"]), (&lines[3]["user"], &lines[3]["user"]), "one user");
    assert!(lines[2]["user"].is_string() && lines[2]["user"] != lines[0]["user"] && lines[4]["user"].is_string());
    server.has_metric("querl_rewrite_request_log_lines_total", 6).await;
    #[cfg(unix)]
    for entry in std::fs::read_dir(&dir).unwrap().filter(|entry| entry.as_ref().unwrap().file_name() != ".in-use") {
        use std::os::unix::fs::PermissionsExt;
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{entry:?}");
    }
}

/// A filter that drops texts with a number, faults on certain texts, and blocks on request of a test.
struct StandInFilter(Arc<AtomicBool>);

impl Filter for StandInFilter {
    fn check_batch(&self, samples: &[Sample]) -> Result<Vec<Verdict>, PluginFault> {
        while self.0.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let [sample] = samples else { panic!("one request at a time") };
        let text = format!("{}{}{}", sample.original_query, sample.context.history_summary, sample.rewritten_query);
        if text.contains("faults") {
            let (plugin, version, message) = ("f".to_owned(), "1".to_owned(), text);
            return Err(PluginFault { plugin, version, message, kind: FaultKind::Trap, log: Vec::new() });
        }
        let verdict = match text.contains(char::is_numeric) {
            true => Verdict::Drop { code: "has_number".into(), detail: text },
            false => Verdict::Keep,
        };
        Ok(vec![verdict])
    }

    fn name(&self) -> &str {
        "f"
    }
}

fn filtered(folder: &Path, is_waiting: &Arc<AtomicBool>) -> RequestLogOptions {
    RequestLogOptions { filter: Some(Box::new(StandInFilter(is_waiting.clone()))), max_bytes: 1 << 30, ..log(folder) }
}

#[tokio::test]
async fn what_the_filter_drops_or_faults_on_is_logged_without_its_texts() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(|options| options.request_log = Some(filtered(folder.path(), &Arc::default()))).await;
    for (query, history) in [("鱼油", ""), ("鱼油", "我的电话 13800000000"), ("faults", "")] {
        assert_eq!(server.ask("/v1/rewrite", json!({"query": query, "history": history, "user": "u"})).await.0, 200);
    }
    let lines = lines_once(folder.path(), 3).await;
    let text = serde_json::to_string(&lines).unwrap();
    assert!(!text.contains("13800000000") && !text.contains("faults"), "{text}");
    let has_texts =
        |line: &Value| ["query", "user_profile", "history", "rewrite"].iter().any(|name| !line[*name].is_null());
    assert_eq!((&lines[0]["query"], &lines[0]["redacted"]), (&json!("鱼油"), &Value::Null));
    assert_eq!((has_texts(&lines[1]), &lines[1]["redacted"]), (false, &json!("has_number")));
    assert_eq!((has_texts(&lines[2]), &lines[2]["redacted"]), (false, &json!("plugin_fault")));
    assert!(lines[1]["id"].is_string() && lines[1]["user"].is_string());
    server.has_metric("querl_rewrite_request_log_redacted_total{reason=\"filter\"}", 1).await;
    server.has_metric("querl_rewrite_request_log_redacted_total{reason=\"plugin_fault\"}", 1).await;
}

#[tokio::test]
async fn a_log_that_cannot_keep_up_drops_lines_and_delays_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let is_waiting = Arc::new(AtomicBool::new(true));
    let change = |options: &mut RewriteOptions| {
        options.max_body_bytes = 2 << 20;
        options.request_log = Some(filtered(folder.path(), &is_waiting));
    };
    let server = Server::start(change).await;
    let query = "a".repeat(32_000);
    let started = Instant::now();
    // Each takes 64 kB with its rewrite; the queue holds 32 MiB, and the writing thread has taken some lines already.
    for _ in 0..700 {
        assert_eq!(server.ask("/v1/rewrite", json!({"query": query})).await.1["fallback"], Value::Null);
    }
    let n_dropped = server.metric("querl_rewrite_request_log_dropped_total{reason=\"queue_full\"}").await.unwrap_or(0);
    assert!(n_dropped > 0 && started.elapsed() < Duration::from_secs(20), "{n_dropped}, {:?}", started.elapsed());
    is_waiting.store(false, Ordering::Relaxed);
    server.has_metric("querl_rewrite_request_log_lines_total", 700 - n_dropped).await;
    server.ask("/v1/rewrite", json!({"query": "鱼油"})).await;
    server.has_metric("querl_rewrite_request_log_lines_total", 701 - n_dropped).await;
}

struct PanickingFilter;

impl Filter for PanickingFilter {
    fn check_batch(&self, _: &[Sample]) -> Result<Vec<Verdict>, PluginFault> {
        panic!("as no filter should")
    }

    fn name(&self) -> &str {
        "f"
    }
}

#[tokio::test]
async fn lines_that_are_dropped_because_the_writer_has_ended_are_counted_apart() {
    let folder = tempfile::tempdir().unwrap();
    let options = RequestLogOptions { filter: Some(Box::new(PanickingFilter)), ..log(folder.path()) };
    let server = Server::start(|server| server.request_log = Some(options)).await;
    for _ in 0..200 {
        assert_eq!(server.ask("/v1/rewrite", json!({"query": "鱼油"})).await.0, 200);
        if server.metric("querl_rewrite_request_log_dropped_total{reason=\"writer_ended\"}").await.is_some() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("no line was counted");
}

#[tokio::test]
async fn texts_of_more_than_64_kib_are_not_logged() {
    let folder = tempfile::tempdir().unwrap();
    let change = |options: &mut RewriteOptions| {
        options.max_body_bytes = 1 << 20;
        options.request_log = Some(log(folder.path()));
    };
    let server = Server::start(change).await;
    let history = "a".repeat(70_000);
    assert_eq!(server.ask("/v1/rewrite", json!({"query": "鱼油", "history": history})).await.0, 200);
    let lines = lines_once(folder.path(), 1).await;
    let texts = [&lines[0]["query"], &lines[0]["history"], &lines[0]["rewrite"]];
    assert_eq!((texts, &lines[0]["redacted"]), ([&Value::Null; 3], &json!("too_long")));
    server.has_metric("querl_rewrite_request_log_redacted_total{reason=\"too_long\"}", 1).await;
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_full_disk_and_a_full_log_are_counted_and_fail_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let day = chrono::Utc::now().date_naive();
    for day in [day, day + chrono::Days::new(1)] {
        std::os::unix::fs::symlink("/dev/full", folder.path().join(format!("requests-{day}.jsonl"))).unwrap();
    }
    let server = Server::logging(folder.path()).await;
    let (status, body) = server.ask("/v1/rewrite", json!({"query": "鱼油"})).await;
    assert_eq!((status, &body["rewrite"]), (200, &json!("鱼油||")));
    server.has_metric("querl_rewrite_request_log_dropped_total{reason=\"write_failed\"}", 1).await;

    let folder = tempfile::tempdir().unwrap();
    let server =
        Server::start(|options| options.request_log = Some(RequestLogOptions { max_bytes: 700, ..log(folder.path()) }))
            .await;
    for _ in 0..4 {
        assert_eq!(server.ask("/v1/rewrite", json!({"query": "鱼油"})).await.0, 200);
    }
    lines_once(folder.path(), 2).await;
    server.has_metric("querl_rewrite_request_log_dropped_total{reason=\"size_limit\"}", 2).await;
}

#[tokio::test]
async fn a_log_belongs_to_one_server_and_the_next_one_hashes_users_as_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let ask = json!({"query": "鱼油", "user": "ada"});
    let server = Server::logging(folder.path()).await;
    server.ask("/v1/rewrite", ask.clone()).await;
    let before = lines_once(folder.path(), 1).await;
    let mut second = options();
    second.request_log = Some(log(folder.path()));
    let refused = RewriteService::new(second).err().unwrap().to_string();
    assert!(refused.contains("the request log of another server (process "), "{refused}");
    server.running.abort();
    assert!(server.running.await.is_err());
    // Connections end with their client.
    drop(server.client);
    let server = Server::logging_once_free(folder.path()).await;
    server.ask("/v1/rewrite", ask).await;
    let lines = lines_once(folder.path(), 2).await;
    assert_eq!(lines[1]["user"], before[0]["user"]);
}

#[tokio::test]
async fn feedback_is_appended_for_a_tenant_that_the_key_permits() {
    let folder = tempfile::tempdir().unwrap();
    let change = |options: &mut RewriteOptions| {
        options.max_body_bytes = 16 << 10;
        options.request_log = Some(log(folder.path()));
    };
    let server = Server::start(change).await;
    let body = json!({
        "id": "chatcmpl-18b2-0", "tenant": "shop", "clicked": ["p1", "p2"], "useful": true, "score": 0.9, "passage": "p2",
    });
    assert_eq!(server.ask("/v1/feedback", body).await, (200, json!({"id": "18b2-0", "accepted": true})));
    assert_eq!(
        server.ask("/v1/feedback", json!({"id": "a", "useful": false})).await.0,
        200,
        "the key permits one tenant"
    );
    let lines = lines_once(folder.path(), 2).await;
    let mut first = lines[0].clone();
    assert!(first["time"].take().is_string());
    let expected = json!({
        "kind": "feedback", "time": null, "id": "18b2-0", "tenant": "shop", "clicked": ["p1", "p2"], "useful": true, "score": 0.9,
        "passage": "p2",
    });
    assert_eq!(first, expected);
    assert_eq!((&lines[1]["tenant"], &lines[1]["useful"]), (&json!("shop"), &json!(false)));

    let long = "p".repeat(257);
    for (body, status, sentence) in [
        (json!({"tenant": "shop", "clicked": ["p1"]}), 422, "`id` is missing"),
        (json!({"id": " ", "clicked": ["p1"]}), 422, "`id` has an empty id"),
        (json!({"id": "a"}), 422, "the feedback says nothing"),
        (json!({"id": "a", "cliked": ["p1"]}), 422, "`cliked` is not a field of this request; did you mean `clicked`?"),
        (json!({"id": "a", "clicked": []}), 422, "the feedback says nothing"),
        (json!({"id": "a", "clicked": "p1"}), 422, "`clicked` is \"p1\"; expected a list of passage ids"),
        (json!({"id": "a", "clicked": [7]}), 422, "`clicked` is [7]; expected a list of passage ids"),
        (json!({"id": "a", "clicked": [long]}), 422, "`clicked` has an id of more than 256 characters"),
        (json!({"id": "a", "clicked": vec!["p"; 101]}), 413, "`clicked` has 101 passages; expected at most 100"),
        (json!({"id": "a", "clicked": vec!["p".repeat(256); 33]}), 413, "the ids of `clicked` have 8448 bytes"),
        (json!({"id": "a", "clicked": ["a\u{0}"]}), 422, "`clicked` has the character U+0000"),
        (json!({"id": "a", "score": 1.5}), 422, "`score` is 1.5; expected 0 to 1"),
        (json!({"id": "a", "useful": "yes"}), 422, "`useful` is \"yes\"; expected true or false"),
        (json!({"id": "a", "passage": 3}), 422, "`passage` is 3; expected a passage id"),
        (json!({"id": "a", "tenant": "rival", "useful": true}), 404, "tenant `rival` is not served with this key"),
        (json!([1]), 422, "the body is [1]"),
    ] {
        let (found, answer) = server.ask("/v1/feedback", body.clone()).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(found == status && message.starts_with(sentence), "{body}: {found}, {message}");
    }
    let stranger = server.client.post(format!("{}/v1/feedback", server.url)).json(&json!({"id": "a", "useful": true}));
    assert_eq!(stranger.send().await.unwrap().status(), 401);
    assert_eq!(lines_once(folder.path(), 2).await.len(), 2);

    let server = Server::start(|_| ()).await;
    let (status, body) = server.ask("/v1/feedback", json!({"id": "a", "useful": true})).await;
    let expected = "no request log is configured; start the server with --request_log DIR";
    assert_eq!((status, &body["error"]["message"]), (404, &json!(expected)));
}
