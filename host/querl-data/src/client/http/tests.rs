//! Network faults, against real sockets.

use super::*;
use crate::client::within_deadline;
use futures::StreamExt;
use querl_faulty::{Answer as Sent, FaultyServer, RecordedRequest, Reply};
use serde_json::json;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

const KEY: &str = "sk-very-secret";

fn limits(max_retries: usize) -> CallLimits {
    CallLimits { first_pause: Duration::from_millis(5), ..CallLimits::new(10, 1.0, max_retries) }
}

fn quick() -> CallsConfig {
    CallsConfig { read_timeout_s: 0.3, max_response_mib: 1, ..CallsConfig::default() }
}

fn open(url: &str, key: Option<Secret>, limits: CallLimits, config: &CallsConfig) -> Result<Caller, DataError> {
    Caller::new("teacher.base_url", url, key, limits, &ServiceContext::new(config))
}

fn caller(server: &FaultyServer, max_retries: usize, config: &CallsConfig) -> Caller {
    open(&server.url(), None, limits(max_retries), config).unwrap()
}

fn good() -> Sent {
    Sent::json(200, &json!({"ok": "改写"}))
}

/// A server that replies to the first `n` requests with `fault`, and to others with a valid response.
fn failing(n: usize, fault: Reply) -> FaultyServer {
    FaultyServer::start(move |asked| if asked.index < n { fault.clone() } else { good().into() })
}

async fn ask(server: &FaultyServer, max_retries: usize) -> Result<ServiceResponse, CallFailure> {
    caller(server, max_retries, &quick()).post(&json!({})).await
}

#[tokio::test]
async fn transient_faults_are_retried() {
    let busy = |status| Reply::from(Sent::text(status, "text/plain", "busy"));
    let faults = [
        busy(408),
        busy(409),
        busy(425),
        busy(429),
        busy(500),
        busy(503),
        busy(529),
        Sent::text(429, "text/plain", "").with("Retry-After", "1").into(),
        Reply::Hang,
        Reply::Reset,
        Reply::ResetMidBody(good()),
        Reply::Cut(good()),
        // Cuts within a UTF-8 character.
        Reply::Cut(Sent::text(200, "application/json", "改改改")),
        Reply::SlowHead(Duration::from_millis(50)),
        Reply::HeadOnly,
    ];
    for fault in faults {
        let server = failing(2, fault.clone());
        let answer = ask(&server, 3).await.unwrap_or_else(|failure| panic!("{fault:?}: {failure}"));
        assert_eq!((answer.body["ok"].as_str(), server.n_requests()), (Some("改写"), 3), "{fault:?}");
    }
}

#[tokio::test]
async fn key_is_sent_and_never_shown() {
    let refusal = json!({"error": {"message": format!("Incorrect API key: {KEY}")}});
    let server = failing(usize::MAX, Sent::json(401, &refusal).into());
    let keyed = |url: &str| open(url, Some(Secret::new(KEY)), limits(3), &quick()).unwrap();
    let caller = keyed(&format!("{}/v1/chat", server.url()));
    let failure = caller.post(&json!({})).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Unauthorized);
    assert!(failure.message.ends_with("/v1/chat: answered 401 Unauthorized: Incorrect API key: [key]"), "{failure}");
    let asked = server.requests();
    assert_eq!(asked.len(), 1, "a rejection is not retried");
    assert_eq!((asked[0].path.as_str(), asked[0].authorization.clone()), ("/v1/chat", Some(format!("Bearer {KEY}"))));
    assert!(!format!("{caller:?}").contains(KEY));
    // The key is at the end of the excerpt.
    let long = format!("{}{KEY} is unknown", "x".repeat(EXCERPT_CHARS - 6));
    let server = failing(usize::MAX, Sent::text(400, "text/plain", &long).into());
    let failure = keyed(&server.url()).post(&json!({})).await.unwrap_err();
    assert!(!failure.message.contains(&KEY[..3]) && failure.message.ends_with("x[key] ..."), "{failure}");
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let caller = open(&format!("http://u:{KEY}@127.0.0.1:{port}/x?k={KEY}"), None, limits(1), &quick()).unwrap();
    let failure = caller.post(&json!({})).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Unreachable);
    assert!(failure.message.starts_with(&format!("POST http://127.0.0.1:{port}/x: ")), "{failure}");
    assert!(!failure.message.contains(KEY), "{failure}");
}

#[tokio::test]
async fn persistent_faults_are_reported() {
    let html = || Sent::text(200, "text/html", "<html>Sign in</html>");
    let cases = [
        (Reply::Hang, FailureKind::Timeout, 2, "no answer within 1 s"),
        (Reply::HeadOnly, FailureKind::Timeout, 2, "not a byte within calls.read_timeout_s = 0.3"),
        (Reply::SlowHead(Duration::from_millis(50)), FailureKind::Timeout, 2, "no answer within 1 s"),
        (
            Sent { body: b"{\"ok\": \"\xb8\xc4\xd0\xb4\"}".to_vec(), ..good() }.into(),
            FailureKind::InvalidResponse,
            2,
            "not UTF-8 from byte 8 on",
        ),
        (Reply::Reset, FailureKind::Unreachable, 2, "onnection"),
        (Reply::ResetMidBody(good()), FailureKind::Unreachable, 2, "onnection"),
        (Reply::Cut(good()), FailureKind::InvalidResponse, 2, "the answer is not JSON: EOF"),
        (Reply::Enormous(64 << 20), FailureKind::InvalidResponse, 1, "longer than calls.max_response_mib = 1"),
        (html().into(), FailureKind::InvalidResponse, 2, "the answer is not JSON: expected value"),
        (Sent::text(200, "application/json", "{'a': 1}").into(), FailureKind::InvalidResponse, 2, "not JSON"),
        (Sent::text(503, "text/plain", "").into(), FailureKind::ServerError, 2, "answered 503"),
        (
            Sent::text(400, "text/plain", "temperature is not supported").into(),
            FailureKind::Rejected,
            1,
            "answered 400 Bad Request: temperature is not supported",
        ),
        (
            Sent::text(429, "text/plain", "").with("Retry-After", "86400").into(),
            FailureKind::RateLimited,
            1,
            "; the service asks to wait 86400 s",
        ),
        (
            Sent::text(302, "text/html", "").with("Location", "http://127.0.0.1:9/").into(),
            FailureKind::Rejected,
            1,
            "answered 302",
        ),
    ];
    for (fault, kind, n_requests, message) in cases {
        let server = failing(usize::MAX, fault.clone());
        let failure = ask(&server, 1).await.unwrap_err();
        assert!(failure.kind == kind && failure.message.contains(message), "{fault:?}: {failure}");
        assert_eq!(server.n_requests(), n_requests, "{fault:?}");
    }
}

/// Regression: a broken service was reported as a spent budget alone.
#[tokio::test]
async fn a_spent_budget_names_the_last_request_without_a_usable_answer() {
    let server = failing(usize::MAX, Reply::Cut(good()));
    let (_folder, path) = crate::scratch_file("calls.json");
    let tracker = Arc::new(SpendTracker::open(&path, Some(1.0)).unwrap());
    let services = ServiceContext::new(&quick()).with_spend_tracker(tracker);
    let caller = Caller::new("teacher.base_url", &server.url(), None, limits(5), &services).unwrap();
    let bound = CostBound { n_tokens: 0, max_cost: 0.4 };
    let failure = caller.call(&Call::post("", &json!({})), bound, &|_| None).await.unwrap_err();
    assert_eq!((failure.kind, server.n_requests()), (FailureKind::OverBudget, 2));
    assert!(
        failure.message.contains("; 2 request(s) had no usable answer, the last: invalid response: POST http://"),
        "{failure}"
    );
    assert!(failure.message.contains("the answer is not JSON: EOF"), "{failure}");
}

#[tokio::test]
async fn refusals_are_final_and_quote_the_server() {
    for status in [400, 401, 402, 403, 404, 422] {
        let refusal = Sent::json(status, &json!({"error": {"message": "temperature is not supported"}}));
        let server = failing(usize::MAX, refusal.into());
        let failure = ask(&server, 3).await.unwrap_err();
        assert!(failure.message.ends_with(": temperature is not supported"), "{failure}");
        assert_eq!(server.n_requests(), 1, "{status}");
    }
}

/// Regression: every row of a table was tried at a service without credit.
#[tokio::test]
async fn missing_credit_is_fatal() {
    let quota = json!({"error": {"code": "insufficient_quota", "message": "check your plan"}});
    for refusal in [Sent::json(402, &json!({"error": {"message": "Insufficient Balance"}})), Sent::json(429, &quota)] {
        let server = failing(usize::MAX, refusal.into());
        let failure = ask(&server, 3).await.unwrap_err();
        assert!(failure.kind.is_fatal(), "{failure}");
        assert_eq!(server.n_requests(), 1);
    }
}

/// Regression: an error response that is too long or truncated was counted as a lost response.
#[tokio::test]
async fn error_status_decides_even_if_the_body_is_truncated() {
    let busy = || Sent::text(503, "text/plain", "busy");
    for fault in
        [Reply::ResetMidBody(busy()), Reply::Cut(busy()), Reply::from(Sent::text(503, "", &"x".repeat(2 << 20)))]
    {
        let server = failing(1, fault.clone());
        let answer = ask(&server, 1).await.unwrap_or_else(|failure| panic!("{fault:?}: {failure}"));
        drop(answer);
        assert_eq!(server.n_requests(), 2, "{fault:?}");
    }
}

async fn post_checked(caller: &Caller, check: &Check<'_>) -> Result<ServiceResponse, CallFailure> {
    caller.call(&Call::post("", &json!({})), CostBound::FREE, check).await
}

/// Regression: an error under HTTP status 200 was taken for a response and not retried.
#[tokio::test]
async fn errors_in_a_body_are_treated_like_an_error_status() {
    let server = FaultyServer::start(|asked| match asked.index {
        0 => Sent::json(200, &json!({"error": "upstream busy"})).into(),
        _ => good().into(),
    });
    let check = |body: &Value| Some(Refusal::reported(None, body.get("error")?.to_string()));
    let caller = caller(&server, 1, &CallsConfig { breaker_failures: 2, ..quick() });
    assert!(post_checked(&caller, &check).await.is_ok());
    let refused = |body: &Value| Some(Refusal::reported(Some(404), body.to_string()));
    let failure = post_checked(&caller, &refused).await.unwrap_err();
    assert_eq!((failure.kind, server.n_requests()), (FailureKind::Rejected, 3));
    let busy = |body: &Value| Some(Refusal::reported(Some(500), body.to_string()));
    for kind in [FailureKind::ServerError, FailureKind::ServerError, FailureKind::Down] {
        assert_eq!(post_checked(&caller, &busy).await.unwrap_err().kind, kind);
    }
}

/// Regression: a model that thinks for minutes before its first byte was cut off by the read timeout.
#[tokio::test]
async fn the_read_timeout_starts_with_the_first_byte() {
    let server = FaultyServer::start(|_| Reply::After(Duration::from_millis(600), Box::new(good().into())));
    assert!(ask(&server, 0).await.is_ok());
}

/// Regression: episodes were dropped as late because of requests of others queued before theirs.
#[tokio::test]
async fn a_deadline_excludes_queue_time_and_requested_pauses() {
    let slow = Reply::After(Duration::from_millis(300), Box::new(good().into()));
    let server = FaultyServer::start(move |asked| match asked.index {
        2 => Sent::text(429, "text/plain", "").with("Retry-After", "1").into(),
        _ => slow.clone(),
    });
    let one_at_once = CallLimits { max_concurrent: 1, ..limits(1) };
    let caller = open(&server.url(), None, one_at_once, &CallsConfig::default()).unwrap();
    let body = json!({});
    let limited = |limit_ms| within_deadline(Duration::from_millis(limit_ms), caller.post(&body));
    let (first, second) = futures::join!(limited(550), limited(550));
    assert!(first.is_some_and(|answer| answer.is_ok()) && second.is_some_and(|answer| answer.is_ok()));
    assert!(limited(700).await.is_some_and(|answer| answer.is_ok()), "a pause that the service requested");
    assert!(limited(100).await.is_none());
}

#[tokio::test]
async fn a_slow_response_is_bounded_by_the_timeout() {
    let config = CallsConfig { read_timeout_s: 60.0, ..quick() };
    let server = failing(usize::MAX, Reply::SlowHead(Duration::from_millis(20)));
    let started = Instant::now();
    let failure = caller(&server, 0, &config).post(&json!({})).await.unwrap_err();
    assert!(failure.message.ends_with("no answer within 1 s"), "{failure}");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn a_requested_pause_applies_to_all_calls() {
    let server = FaultyServer::start(|asked| match asked.index {
        0 => Sent::text(429, "text/plain", "slow down").with("Retry-After", "1").into(),
        _ => good().into(),
    });
    let caller = caller(&server, 2, &quick());
    let started = Instant::now();
    caller.post(&json!({})).await.unwrap();
    assert!(started.elapsed() >= Duration::from_secs(1));
    let server = FaultyServer::start(|asked| match asked.json()["first"].as_bool() {
        Some(true) if asked.index == 0 => Sent::text(429, "text/plain", "").with("Retry-After", "1").into(),
        _ => good().into(),
    });
    let caller = self::caller(&server, 2, &quick());
    let second = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let started = Instant::now();
        caller.post(&json!({})).await.unwrap();
        started.elapsed()
    };
    let first = json!({"first": true});
    let (first, second) = futures::join!(caller.post(&first), second);
    first.unwrap();
    assert!(second >= Duration::from_millis(600), "{second:?}");
}

#[tokio::test]
async fn a_date_in_retry_after_is_respected() {
    let server = FaultyServer::start(|asked| match asked.index {
        0 => {
            let then = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(2));
            Sent::text(503, "text/plain", "").with("Retry-After", &then).into()
        }
        _ => good().into(),
    });
    let started = Instant::now();
    ask(&server, 1).await.unwrap();
    // The date has a resolution of one second.
    assert!(started.elapsed() >= Duration::from_millis(900), "{:?}", started.elapsed());
}

#[tokio::test]
async fn breaker_opens_after_consecutive_failures() {
    let config = CallsConfig { breaker_failures: 3, ..quick() };
    let server = failing(usize::MAX, Sent::text(503, "text/plain", "maintenance").into());
    let caller = caller(&server, 1, &config);
    for _ in 0..3 {
        assert_eq!(caller.post(&json!({})).await.unwrap_err().kind, FailureKind::ServerError);
    }
    let failure = caller.post(&json!({})).await.unwrap_err();
    assert_eq!((failure.kind, failure.kind.is_fatal(), server.n_requests()), (FailureKind::Down, true, 6));
    let message =
        "given up after 3 calls in a row without an answer; run again once it is up; the last: server error: ";
    assert!(failure.message.contains(message), "{failure}");
}

#[tokio::test]
async fn http2_over_tls_works_with_an_own_certificate_authority() {
    let server = FaultyServer::start_http2(|asked| match asked.index {
        0 => Reply::ResetMidBody(good()),
        1 => Reply::Reset,
        _ => good().into(),
    });
    let (_folder, path) = crate::scratch_file("ca.pem");
    std::fs::write(&path, server.certificate()).unwrap();
    let config = CallsConfig { ca_file: Some(path), ..quick() };
    assert_eq!(caller(&server, 3, &config).post(&json!({})).await.unwrap().body["ok"], "改写");
    assert_eq!(server.n_requests(), 3);
    let failure = ask(&server, 0).await.unwrap_err();
    let expected = "no known CA signed the server's certificate; write a PEM file of the CA that did, or of the self-signed certificate \
                    itself, in calls.ca_file";
    assert!(failure.message.ends_with(expected), "{failure}");
}

/// Regression: TLS errors were debug text without a remedy.
#[tokio::test]
async fn tls_errors_have_a_remedy() {
    use std::io::{Read, Write};
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}/", server.local_addr().unwrap());
    let plain = std::thread::spawn(move || {
        let mut stream = server.accept().unwrap().0;
        stream.read_exact(&mut [0; 5]).unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        // Until the client closes the connection.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let failure = open(&url, None, limits(0), &quick()).unwrap().post(&json!({})).await.unwrap_err();
    plain.join().unwrap();
    assert!(failure.message.contains("the server does not speak TLS on this port; write http://"), "{failure}");
    let error = std::io::Error::other("invalid peer certificate: Other(OtherError(CaUsedAsEndEntity))");
    let problem = connection_problem(&error);
    assert!(problem.contains("basicConstraints CA:FALSE") && problem.ends_with("in calls.ca_file"), "{problem}");
    assert_eq!(connection_problem(&std::io::Error::other("Connection refused")), "Connection refused");
}

#[tokio::test]
async fn requests_go_through_the_proxy() {
    let proxy = FaultyServer::start(|_| good().into());
    let config = CallsConfig { proxy: Some(proxy.url()), ..quick() };
    let url = "http://teacher.invalid/v1/chat/completions";
    open(url, None, limits(0), &config).unwrap().post(&json!({})).await.unwrap();
    assert_eq!(proxy.requests()[0].path, url);
}

#[test]
fn invalid_certificates_and_urls_name_the_setting() {
    let (_folder, path) = crate::scratch_file("ca.pem");
    std::fs::write(&path, "no certificate").unwrap();
    let config = CallsConfig { ca_file: Some(path), ..quick() };
    let error = open("http://127.0.0.1/", None, limits(0), &config).unwrap_err();
    assert!(error.to_string().ends_with("which holds no certificate in PEM form"), "{error}");
    let error = open("localhost:8000", None, limits(0), &quick()).unwrap_err();
    assert_eq!(error.to_string(), "teacher.base_url is not an http or https address; write it in full");
}

/// A third of all requests get a fault, drawn by row and attempt. Every row ends as a success or a recorded failure; a row with a
/// response is not requested again.
#[tokio::test]
async fn under_random_faults_every_row_ends_and_none_is_paid_twice() {
    const N_ROWS: u64 = 300;
    let tries: Mutex<HashMap<u64, u64>> = Mutex::default();
    let server = FaultyServer::start(move |asked| {
        let row = asked.json()["row"].as_u64().unwrap();
        let mut tries = tries.lock().unwrap();
        let n_tries = tries.entry(row).or_default();
        *n_tries += 1;
        scripted(row, *n_tries)
    });
    let config = CallsConfig { breaker_failures: 0, ..quick() };
    let caller = caller(&server, 4, &config);
    let caller = &caller;
    let calls = (0..N_ROWS).map(|row| async move { (row, caller.post(&json!({"row": row})).await) });
    let answers: Vec<(u64, Result<ServiceResponse, CallFailure>)> =
        futures::stream::iter(calls).buffer_unordered(10).collect().await;
    assert_eq!(answers.len() as u64, N_ROWS, "none lost");
    for (row, answer) in &answers {
        if let Ok(answer) = answer {
            assert_eq!(answer.body["row"].as_u64(), Some(*row), "none copied");
        }
    }
    let n_succeeded = answers.iter().filter(|(_, answer)| answer.is_ok()).count();
    assert!(n_succeeded as u64 >= N_ROWS - 6, "{n_succeeded}");
    for row in 0..N_ROWS {
        let asked: Vec<RecordedRequest> =
            server.requests().into_iter().filter(|asked| asked.json()["row"] == row).collect();
        let whole = (1..=asked.len() as u64)
            .filter(|n_try| matches!(scripted(row, *n_try), Reply::Answer(a) if a.status == 200));
        assert!(whole.count() <= 1, "row {row} was answered twice");
    }
}

/// Faults for 6 of 20 attempts.
fn scripted(row: u64, n_try: u64) -> Reply {
    let draw = (row.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ n_try.wrapping_mul(0xbf58_476d_1ce4_e5b9))
        .wrapping_mul(0x94d0_49bb_1331_11eb)
        >> 32;
    let answer = Sent::json(200, &json!({"row": row}));
    match draw % 20 {
        0 => Sent::text(429, "text/plain", "").into(),
        1 => Sent::text(500, "text/plain", "").into(),
        2 => Reply::Reset,
        3 => Reply::ResetMidBody(answer),
        4 => Reply::Cut(answer),
        5 => Reply::Hang,
        _ => answer.into(),
    }
}

/// Regression: a queued request was sent, and paid, minutes after an interrupt.
#[tokio::test]
async fn queued_and_retried_requests_are_not_sent_after_the_stop() {
    let busy = Sent::text(429, "text/plain", "busy").with("Retry-After", "60");
    let (paced, retried) = (failing(0, Reply::Hang), failing(1, busy.into()));
    for (server, requests_per_minute) in [(paced, Some(1)), (retried, None)] {
        let stop: &'static AtomicBool = Box::leak(Box::default());
        let limits = limits(3).per_minute(requests_per_minute, None);
        let services = ServiceContext::new(&quick()).until(stop);
        let caller = Caller::new("teacher.base_url", &server.url(), None, limits, &services).unwrap();
        let started = Instant::now();
        let body = json!({});
        let (first, second, ()) = tokio::join!(caller.post(&body), caller.post(&body), async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            stop.store(true, Ordering::Relaxed);
        });
        assert!(started.elapsed() < Duration::from_secs(5));
        let unsent = [first, second].into_iter().filter_map(Result::err).map(|failure| failure.message);
        assert!(unsent.filter(|message| message.ends_with("not sent: interrupted")).count() >= 1);
        assert!(server.n_requests() <= 2, "{}", server.n_requests());
        let n_requests = server.n_requests();
        caller.post(&body).await.unwrap_err();
        assert_eq!(server.n_requests(), n_requests);
    }
}
