//! Candidates of the rewriting service over real sockets, with stand-ins for models and releases.
#![allow(clippy::unwrap_used)]

mod support;

use querl_core::serving::{Candidate, CandidateMode, ReleaseSource, Reloaded, Rewriter, Role};
use querl_serve::{CandidateLimits, RewriteOptions, RewriteService, ServerLimits};
use reqwest::{Client, Method};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::{StandInRewriter, answer, http, options, serve_app, tenant};

const LIMITS: CandidateLimits =
    CandidateLimits { min_requests: 4, max_errors: 0.1, max_fallbacks: 0.2, max_latency_ratio: 2.0 };

/// Releases with at most one candidate, of the tenant `shop`.
struct StandInReleases {
    rewriter: Arc<StandInRewriter>,
    candidate: Mutex<Option<Candidate>>,
    reasons: Mutex<Vec<String>>,
    is_read_only: AtomicBool,
}

impl ReleaseSource for StandInReleases {
    fn reload(&self) -> Result<Reloaded, String> {
        let candidates: Vec<Candidate> = self.candidate.lock().unwrap().iter().cloned().collect();
        match candidates.first() {
            Some(_) if self.rewriter.models(Role::Candidate).is_empty() => {
                self.rewriter.load(Path::new("runs/shop"), Role::Candidate)?;
            }
            Some(_) => {}
            None => drop(self.rewriter.remove("shop", Role::Candidate)),
        }
        Ok(Reloaded { candidates, problems: Vec::new() })
    }

    fn end_candidate(&self, candidate: &Candidate, reason: &str) -> Result<(), String> {
        assert_eq!(candidate.tenant, "shop");
        self.reasons.lock().unwrap().push(reason.to_owned());
        if self.is_read_only.load(Ordering::Relaxed) {
            return Err("releases: read-only file system".into());
        }
        *self.candidate.lock().unwrap() = None;
        Ok(())
    }
}

struct Server {
    url: String,
    client: Client,
    rewriter: Arc<StandInRewriter>,
    releases: Arc<StandInReleases>,
}

impl Server {
    /// Serves the tenant `shop` with version 1, and a candidate of version 2.
    async fn start(mode: CandidateMode, max_cached_rewrites: usize) -> Self {
        let deadline = Duration::from_millis(500);
        let options = RewriteOptions { deadline, max_cached_rewrites, candidate_limits: LIMITS, ..options() };
        let service = RewriteService::new(options).unwrap();
        let rewriter = StandInRewriter::new(vec![tenant("shop", 1, None)]);
        let candidate = Mutex::new(Some(Candidate { tenant: "shop".into(), id: 7, mode }));
        let (reasons, is_read_only) = (Mutex::default(), AtomicBool::new(false));
        let releases = Arc::new(StandInReleases { rewriter: rewriter.clone(), candidate, reasons, is_read_only });
        service.set_releases(releases.clone());
        service.set_ready(rewriter.clone());
        let url = serve_app(service.router(), ServerLimits::default()).await;
        let server = Self { url, client: http(), rewriter, releases };
        assert_eq!(server.admin(Method::POST, "/admin/releases").await.0, 200);
        server
    }

    async fn admin(&self, method: Method, path: &str) -> (u16, Value) {
        let request = self.client.request(method, format!("{}{path}", self.url)).bearer_auth("admin-key");
        answer(request.json(&json!({"path": "runs/shop"}))).await
    }

    /// The tenant's entry of the comparison.
    async fn shop(&self) -> Value {
        self.admin(Method::GET, "/admin/releases").await.1["tenants"][0].take()
    }

    async fn ask(&self, path: &str, body: Value) -> Value {
        answer(self.client.post(format!("{}{path}", self.url)).json(&body)).await.1
    }

    async fn rewrite(&self, query: &str, user: &str) -> Value {
        self.ask("/v1/rewrite", json!({"query": query, "user": user})).await
    }

    /// A user of the current model and one of the candidate.
    async fn users(&self) -> [String; 2] {
        let mut users = [None, None];
        for user in (0..100).map(|user| format!("user {user}")) {
            let is_candidate = self.rewrite("a", &user).await["version"] != "v1";
            users[usize::from(is_candidate)] = Some(user);
            if let [Some(current), Some(candidate)] = &users {
                return [current.clone(), candidate.clone()];
            }
        }
        panic!("one model has no users")
    }

    /// Polls for at most two seconds.
    async fn becomes(&self, is_true: impl Fn(&Value) -> bool) -> Value {
        for _ in 0..200 {
            let shop = self.shop().await;
            if is_true(&shop) {
                return shop;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{}", self.shop().await)
    }

    async fn has_metric(&self, line: &str) {
        let text = self.client.get(format!("{}/metrics", self.url)).send().await.unwrap().text().await.unwrap();
        assert!(text.lines().any(|found| found == line), "no `{line}` in {text}");
    }
}

#[tokio::test]
async fn a_user_has_one_version_on_every_route_and_no_rewrite_of_the_other() {
    let server = Server::start(CandidateMode::Canary(0.5), 100).await;
    let mut versions = Vec::new();
    for user in 0..30 {
        let user = format!("user {user}");
        let first = server.rewrite("a", &user).await["version"].clone();
        assert_eq!(server.rewrite("a", &user).await["version"], first);
        assert_eq!(server.rewrite("b", &user).await["version"], first);
        for model in ["shop", "shop/rewrite"] {
            let messages = json!([{"role": "user", "content": "a"}]);
            let body =
                server.ask("/v1/chat/completions", json!({"model": model, "messages": messages, "user": user})).await;
            assert_eq!(body["system_fingerprint"], first, "{model}");
        }
        versions.push(first);
    }
    let n_candidate = versions.iter().filter(|version| **version == "v2").count();
    assert!((5..=25).contains(&n_candidate), "{versions:?}");
    let by_query = [
        server.ask("/v1/rewrite", json!({"query": "c"})).await,
        server.ask("/v1/rewrite", json!({"query": "c"})).await,
    ];
    assert_eq!(by_query[0]["version"], by_query[1]["version"], "without a user, by query");
    let trial = server.shop().await["candidate"].take();
    assert_eq!(
        (&trial["mode"], &trial["share"], &trial["current"]["version"], &trial["candidate"]["version"]),
        (&json!("canary"), &json!(0.5), &json!("v1"), &json!("v2"))
    );
    // The queries a and b, then the same from the cache; chats are never cached.
    let candidate = &trial["candidate"];
    let n_requests = candidate["requests"].as_u64().unwrap() as usize;
    assert!(n_requests >= 5 * n_candidate && n_requests <= 5 * n_candidate + 2, "{candidate}");
    assert!(candidate["cached"].as_u64().unwrap() as usize >= 3 * n_candidate - 2, "{candidate}");
    assert!(candidate["latency_ms"]["p95"].is_number(), "{candidate}");
    assert_eq!(candidate["errors"], 0);
}

#[tokio::test]
async fn a_shadow_is_compared_and_never_returned_or_counted_as_a_response() {
    let server = Server::start(CandidateMode::Shadow, 0).await;
    for query in ["a", "candidate differs", "candidate unreadable"] {
        let body = server.rewrite(query, "").await;
        assert_eq!(
            (&body["version"], &body["rewrite"], &body["fallback"]),
            (&json!("v1"), &json!(format!("{query}||")), &Value::Null)
        );
    }
    assert_eq!(server.rewrite("current unreadable", "").await["fallback"], "no_rewrite");
    let shop = server.becomes(|shop| shop["candidate"]["candidate"]["requests"] == 4).await;
    assert_eq!(shop["candidate"]["shadow"]["skipped"], 0);
    let shop = server.becomes(|shop| shop["candidate"]["shadow"]["compared"] == 3).await;
    assert_eq!(shop["candidate"]["shadow"]["equal"], 1, "a fallback of the current model is another rewrite");
    assert_eq!(shop["candidate"]["candidate"]["fallbacks"], json!({"no_rewrite": 1}));
    server.has_metric("querl_rewrite_version_requests_total{role=\"candidate\",tenant=\"shop\"} 4").await;
    server.has_metric("querl_rewrite_version_fallbacks_total{role=\"candidate\",tenant=\"shop\"} 1").await;
    server.has_metric("querl_rewrite_shadow_rewrites_total{result=\"different\",tenant=\"shop\"} 2").await;
    server.has_metric("querl_rewrite_shadow_rewrites_total{result=\"failed\",tenant=\"shop\"} 1").await;
    // The tokens of the three responses to clients.
    server.has_metric("querl_rewrite_generated_tokens_total{tenant=\"shop\"} 44").await;
    let messages = json!([{"role": "user", "content": "a"}]);
    server.ask("/v1/chat/completions", json!({"model": "shop", "messages": messages})).await;
    assert_eq!(server.shop().await["candidate"]["current"]["requests"], 4, "a chat has no shadow to compare it with");
}

#[tokio::test]
async fn a_shadow_delays_no_client_and_gives_way_to_clients_that_wait() {
    let server = Server::start(CandidateMode::Shadow, 0).await;
    let started = Instant::now();
    assert_eq!(server.rewrite("candidate held", "").await["version"], "v1");
    assert!(started.elapsed() < Duration::from_millis(400), "{:?}", started.elapsed());
    server.becomes(|_| server.rewriter.held.lock().unwrap().len() == 1).await;
    assert_eq!(server.rewriter.n_held_open(), 1, "it does not give way to itself");
    // Other requests get version 1, too.
    assert_eq!(server.rewrite("a", "").await["version"], "v1");
    server.becomes(|shop| shop["candidate"]["shadow"]["compared"] == 1).await;
    // The stand-in counts what clients have waited for as waiting: the shadow is cancelled, and no other starts.
    server.ask("/v1/rewrite", json!({"query": "held", "deadline_ms": 10})).await;
    assert_eq!(server.rewriter.n_held_open(), 0);
    let shop = server.becomes(|shop| shop["candidate"]["shadow"]["skipped"] == 2).await;
    assert_eq!(shop["candidate"]["candidate"]["requests"], 1, "nothing is known of a cancelled one");
    server.has_metric("querl_rewrite_shadow_rewrites_total{result=\"skipped\",tenant=\"shop\"} 2").await;
}

#[tokio::test]
async fn a_candidate_that_fails_is_ended_recorded_and_stays_ended() {
    let server = Server::start(CandidateMode::Canary(0.5), 0).await;
    server.releases.is_read_only.store(true, Ordering::Relaxed);
    let [current, candidate] = server.users().await;
    for _ in 0..4 {
        assert_eq!(server.rewrite("delay 200", &current).await["version"], "v1");
    }
    // Deadlines of clients: the six below the current model's 95% quantile are not counted against the candidate, the one above it is.
    for deadline_ms in [10, 10, 10, 10, 10, 10, 300] {
        let body = json!({"query": "candidate held", "user": candidate, "deadline_ms": deadline_ms});
        let body = server.ask("/v1/rewrite", body).await;
        assert_eq!((&body["version"], &body["fallback"]), (&json!("v2"), &json!("timeout")));
    }
    let mut n_unreadable = 0;
    while server.rewrite("candidate unreadable", &candidate).await["version"] == "v2" {
        n_unreadable += 1;
        assert!(n_unreadable < 10, "it is ended with the request that exceeds a limit");
    }
    let shop = server.becomes(|_| server.rewriter.models(Role::Candidate).is_empty()).await;
    assert_eq!(shop["candidate"], Value::Null);
    let reason = shop["automatic_return"]["reason"].as_str().unwrap();
    assert!(reason.starts_with("fallbacks: ") && reason.contains(", 0.0% of the current model's"), "{reason}");
    let fallbacks = &shop["automatic_return"]["comparison"]["candidate"]["fallbacks"];
    assert_eq!((&fallbacks["timeout"], fallbacks["no_rewrite"].as_u64().unwrap_or(0)), (&json!(1), n_unreadable));
    server.has_metric("querl_rewrite_automatic_returns_total{limit=\"fallbacks\",tenant=\"shop\"} 1").await;
    // The history could not be written, and still contains the candidate.
    let (status, body) = server.admin(Method::POST, "/admin/releases").await;
    assert_eq!((status, &body["problems"]), (200, &json!(["releases: read-only file system"])));
    assert!(server.rewriter.models(Role::Candidate).is_empty(), "loaded for nothing");
    assert_eq!(server.rewrite("a", "").await["version"], "v1");
    server.releases.is_read_only.store(false, Ordering::Relaxed);
    assert_eq!(server.admin(Method::POST, "/admin/releases").await.1["problems"], json!([]));
    assert_eq!(*server.releases.candidate.lock().unwrap(), None, "recorded at last");
    assert_eq!(server.releases.reasons.lock().unwrap().len(), 3);
    // The same model again, from another entry of the history.
    let mode = CandidateMode::Canary(0.5);
    *server.releases.candidate.lock().unwrap() = Some(Candidate { tenant: "shop".into(), id: 9, mode });
    server.admin(Method::POST, "/admin/releases").await;
    assert_eq!(server.shop().await["candidate"]["share"], 0.5);
}

#[tokio::test]
async fn the_time_of_a_slow_rewrite_is_counted_where_its_client_leaves() {
    let server = Server::start(CandidateMode::Canary(0.5), 0).await;
    let [current, candidate] = server.users().await;
    // Enough requests that one slow rewrite does not exceed the limit.
    for user in [&current, &candidate] {
        for _ in 0..30 {
            server.rewrite("a", user).await;
        }
    }
    let before = server.shop().await["candidate"]["candidate"]["requests"].as_u64().unwrap();
    let body = json!({"query": "candidate held", "user": candidate});
    let request = server.client.post(format!("{}/v1/rewrite", server.url)).json(&body);
    assert!(request.timeout(Duration::from_millis(200)).send().await.is_err(), "the deadline of the server is 500 ms");
    let shop = server.becomes(|shop| shop["candidate"]["candidate"]["requests"] == before + 1).await;
    assert_eq!(shop["candidate"]["candidate"]["fallbacks"], json!({}), "it was not refused");
}

#[tokio::test]
async fn releases_are_shown_and_read_with_the_admin_key_alone() {
    let server = Server::start(CandidateMode::Shadow, 0).await;
    for method in [Method::GET, Method::POST] {
        let response = server.client.request(method, format!("{}/admin/releases", server.url)).send().await.unwrap();
        assert_eq!(response.status(), 401);
    }
    let page = server.client.get(format!("{}/releases", server.url)).send().await.unwrap();
    let (status, page) = (page.status(), page.text().await.unwrap());
    assert!(status == 200 && page.contains("admin/releases") && !page.contains("shop"), "{page}");
    let (status, body) = server.admin(Method::POST, "/admin/tenants").await;
    assert_eq!(status, 409, "{body}");
    assert_eq!(server.admin(Method::DELETE, "/admin/tenants/shop").await.0, 409);
    *server.releases.candidate.lock().unwrap() = None;
    server.admin(Method::POST, "/admin/releases").await;
    assert_eq!(server.shop().await["candidate"], Value::Null);
    assert!(server.rewriter.models(Role::Candidate).is_empty());
}
