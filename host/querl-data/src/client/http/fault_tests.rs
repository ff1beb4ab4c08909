//! What a network can do, against real sockets.
#![allow(clippy::unwrap_used)]

use super::*;
use futures::StreamExt;
use querl_core::config::CallsConfig;
use querl_faulty::{Answer as Sent, Asked, FaultyServer, Reply};
use serde_json::json;
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

fn limits(max_retries: usize) -> CallLimits {
    CallLimits { first_pause: Duration::from_millis(5), ..CallLimits::new(10, 1.0, max_retries) }
}

fn quick() -> CallsConfig {
    CallsConfig { read_timeout_s: 0.3, max_response_mib: 1, ..CallsConfig::default() }
}

fn caller(server: &FaultyServer, max_retries: usize, config: &CallsConfig) -> Caller {
    Caller::new("teacher.base_url", &server.url(), None, limits(max_retries), &ServiceContext::new(config)).unwrap()
}

fn good() -> Sent {
    Sent::json(200, &json!({"ok": "改写"}))
}

/// The first `n` requests meet `fault`, the others an answer.
fn failing(n: usize, fault: Reply) -> FaultyServer {
    FaultyServer::start(move |asked| if asked.index < n { fault.clone() } else { good().into() })
}

async fn ask(server: &FaultyServer, max_retries: usize) -> Result<ServiceResponse, CallFailure> {
    caller(server, max_retries, &quick()).post(&json!({}), CostBound::FREE).await
}

#[tokio::test]
async fn faults_that_pass_are_outlasted() {
    let busy = |status| Reply::from(Sent::text(status, "text/plain", "busy"));
    let faults = [
        busy(408),
        busy(409),
        busy(425),
        busy(429),
        busy(500),
        busy(503),
        busy(529),
        Reply::Hang,
        Reply::Reset,
        Reply::ResetMidBody(good()),
        Reply::Cut(good()),
        // In the middle of a character.
        Reply::Cut(Sent::text(200, "application/json", "改改改")),
        Reply::SlowHead(Duration::from_millis(50)),
        Reply::HeadOnly,
    ];
    for fault in faults {
        let server = failing(2, fault.clone());
        let answer = ask(&server, 3).await.unwrap_or_else(|failure| panic!("{fault:?}: {failure}"));
        assert_eq!((answer.body["ok"].as_str(), server.n_asked()), (Some("改写"), 3), "{fault:?}");
    }
}

#[tokio::test]
async fn faults_that_stay_are_failures_that_say_what_was_met() {
    let html = || Sent::text(200, "text/html", "<html>Sign in</html>");
    let cases = [
        (Reply::Hang, FailureKind::Timeout, 2, "no answer within 1 s"),
        (Reply::HeadOnly, FailureKind::Timeout, 2, "not a byte within calls.read_timeout_s = 0.3"),
        (Reply::SlowHead(Duration::from_millis(50)), FailureKind::Timeout, 2, "no answer within 1 s"),
        (
            Sent { body: b"{\"ok\": \"\xb8\xc4\xd0\xb4\"}".to_vec(), ..good() }.into(),
            FailureKind::InvalidResponse,
            1,
            "not UTF-8 from byte 8 on",
        ),
        (Reply::Reset, FailureKind::Unreachable, 2, "onnection"),
        (Reply::ResetMidBody(good()), FailureKind::Unreachable, 2, "onnection"),
        (Reply::Cut(good()), FailureKind::InvalidResponse, 2, "the answer is not JSON: EOF"),
        (Reply::Enormous(64 << 20), FailureKind::InvalidResponse, 1, "longer than calls.max_response_mib = 1"),
        (html().into(), FailureKind::InvalidResponse, 1, "the answer is not JSON: expected value"),
        (Sent::text(200, "application/json", "{'a': 1}").into(), FailureKind::InvalidResponse, 1, "not JSON"),
        (
            Sent::text(302, "text/html", "").with("Location", "http://127.0.0.1:9/").into(),
            FailureKind::Rejected,
            1,
            "answered 302",
        ),
    ];
    for (fault, kind, n_asked, said) in cases {
        let server = failing(usize::MAX, fault.clone());
        let failure = ask(&server, 1).await.unwrap_err();
        assert!(failure.kind == kind && failure.message.contains(said), "{fault:?}: {failure}");
        assert_eq!(server.n_asked(), n_asked, "{fault:?}");
    }
}

#[tokio::test]
async fn refusals_are_final_and_quote_the_server() {
    for status in [400, 401, 402, 403, 404, 422] {
        let refusal = Sent::json(status, &json!({"error": {"message": "temperature is not supported"}}));
        let server = failing(usize::MAX, refusal.into());
        let failure = ask(&server, 3).await.unwrap_err();
        assert!(failure.message.ends_with(": temperature is not supported"), "{failure}");
        assert_eq!(server.n_asked(), 1, "{status}");
    }
}

/// Regression: a table that is gone through row by row at a service whose account is empty.
#[tokio::test]
async fn a_service_that_wants_money_stops_everything() {
    let quota = json!({"error": {"code": "insufficient_quota", "message": "check your plan"}});
    for refusal in [Sent::json(402, &json!({"error": {"message": "Insufficient Balance"}})), Sent::json(429, &quota)] {
        let server = failing(usize::MAX, refusal.into());
        let failure = ask(&server, 3).await.unwrap_err();
        assert!(failure.kind.is_fatal(), "{failure}");
        assert_eq!(server.n_asked(), 1);
    }
}

/// Regression: a refusal that is too long or breaks off, taken for an answer that was lost.
#[tokio::test]
async fn refusals_are_judged_by_their_status_however_they_end() {
    let busy = || Sent::text(503, "text/plain", "busy");
    for fault in
        [Reply::ResetMidBody(busy()), Reply::Cut(busy()), Reply::from(Sent::text(503, "", &"x".repeat(2 << 20)))]
    {
        let server = failing(1, fault.clone());
        let answer = ask(&server, 1).await.unwrap_or_else(|failure| panic!("{fault:?}: {failure}"));
        drop(answer);
        assert_eq!(server.n_asked(), 2, "{fault:?}");
    }
}

/// Regression: a failure in words, under status 200, that is taken for an answer and not tried again.
#[tokio::test]
async fn refusals_within_a_body_are_treated_like_those_of_a_status() {
    let server = FaultyServer::start(|asked| match asked.index {
        0 => Sent::json(200, &json!({"error": "upstream busy"})).into(),
        _ => good().into(),
    });
    let check = |body: &Value| Some(Refusal::reported(None, body.get("error")?.to_string()));
    let caller = caller(&server, 1, &CallsConfig { breaker_failures: 2, ..quick() });
    assert!(caller.post_checked(&json!({}), CostBound::FREE, &check).await.is_ok());
    let refused = |body: &Value| Some(Refusal::reported(Some(404), body.to_string()));
    let failure = caller.post_checked(&json!({}), CostBound::FREE, &refused).await.unwrap_err();
    assert_eq!((failure.kind, server.n_asked()), (FailureKind::Rejected, 3));
    let busy = |body: &Value| Some(Refusal::reported(Some(500), body.to_string()));
    for kind in [FailureKind::ServerError, FailureKind::ServerError, FailureKind::Down] {
        assert_eq!(caller.post_checked(&json!({}), CostBound::FREE, &busy).await.unwrap_err().kind, kind);
    }
}

/// Regression: a model that thinks for minutes before its first byte was cut off by the read timeout.
#[tokio::test]
async fn the_first_byte_is_waited_for_as_long_as_the_whole_answer() {
    let server = FaultyServer::start(|_| Reply::After(Duration::from_millis(600), Box::new(good().into())));
    assert!(ask(&server, 0).await.is_ok());
}

/// Regression: episodes dropped as late because others had asked the same service before them.
#[tokio::test]
async fn an_episodes_limit_counts_from_ones_turn_on() {
    let slow = Reply::After(Duration::from_millis(300), Box::new(good().into()));
    let server = FaultyServer::start(move |asked| match asked.index {
        2 => Sent::text(429, "text/plain", "").with("Retry-After", "1").into(),
        _ => slow.clone(),
    });
    let one_at_once = CallLimits { max_concurrent: 1, ..limits(1) };
    let caller = Caller::new("teacher.base_url", &server.url(), None, one_at_once, &ServiceContext::default()).unwrap();
    let body = json!({});
    let limited = |limit_ms| {
        crate::client::deadline::within_deadline(Duration::from_millis(limit_ms), caller.post(&body, CostBound::FREE))
    };
    let (first, second) = futures::join!(limited(550), limited(550));
    assert!(first.is_some_and(|answer| answer.is_ok()) && second.is_some_and(|answer| answer.is_ok()));
    assert!(limited(700).await.is_some_and(|answer| answer.is_ok()), "a pause that the service asked for");
    assert!(limited(100).await.is_none());
}

#[tokio::test]
async fn whole_call_is_bounded_however_the_bytes_trickle() {
    let config = CallsConfig { read_timeout_s: 60.0, ..quick() };
    let server = failing(usize::MAX, Reply::SlowHead(Duration::from_millis(20)));
    let started = Instant::now();
    let failure = caller(&server, 0, &config).post(&json!({}), CostBound::FREE).await.unwrap_err();
    assert!(failure.message.ends_with("no answer within 1 s"), "{failure}");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn pause_that_one_call_is_asked_for_is_kept_by_all() {
    let server = FaultyServer::start(|asked| match asked.index {
        0 => Sent::text(429, "text/plain", "slow down").with("Retry-After", "1").into(),
        _ => good().into(),
    });
    let caller = caller(&server, 2, &quick());
    let started = Instant::now();
    caller.post(&json!({}), CostBound::FREE).await.unwrap();
    assert!(started.elapsed() >= Duration::from_secs(1));
    let server = FaultyServer::start(|asked| match asked.json()["first"].as_bool() {
        Some(true) if asked.index == 0 => Sent::text(429, "text/plain", "").with("Retry-After", "1").into(),
        _ => good().into(),
    });
    let caller = self::caller(&server, 2, &quick());
    let second = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let started = Instant::now();
        caller.post(&json!({}), CostBound::FREE).await.unwrap();
        started.elapsed()
    };
    let first = json!({"first": true});
    let (first, second) = futures::join!(caller.post(&first, CostBound::FREE), second);
    first.unwrap();
    assert!(second >= Duration::from_millis(600), "{second:?}");
}

#[tokio::test]
async fn date_in_retry_after_is_waited_for() {
    let server = FaultyServer::start(|asked| match asked.index {
        0 => {
            let then = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(2));
            Sent::text(503, "text/plain", "").with("Retry-After", &then).into()
        }
        _ => good().into(),
    });
    let started = Instant::now();
    ask(&server, 1).await.unwrap();
    // The date has whole seconds.
    assert!(started.elapsed() >= Duration::from_millis(900), "{:?}", started.elapsed());
}

#[tokio::test]
async fn service_that_answers_nobody_is_given_up() {
    let config = CallsConfig { breaker_failures: 3, ..quick() };
    let server = failing(usize::MAX, Sent::text(503, "text/plain", "maintenance").into());
    let caller = caller(&server, 1, &config);
    for _ in 0..3 {
        assert_eq!(caller.post(&json!({}), CostBound::FREE).await.unwrap_err().kind, FailureKind::ServerError);
    }
    let failure = caller.post(&json!({}), CostBound::FREE).await.unwrap_err();
    assert_eq!((failure.kind, failure.kind.is_fatal(), server.n_asked()), (FailureKind::Down, true, 6));
    let said = "given up after 3 calls in a row without an answer; run again once it is up; the last: server error: ";
    assert!(failure.message.contains(said), "{failure}");
}

#[tokio::test]
async fn http2_over_tls_is_spoken_with_a_certificate_of_ones_own() {
    let server = FaultyServer::start_http2(|asked| match asked.index {
        0 => Reply::ResetMidBody(good()),
        1 => Reply::Reset,
        _ => good().into(),
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ca.pem");
    std::fs::write(&path, server.certificate()).unwrap();
    let config = CallsConfig { ca_file: Some(path), ..quick() };
    assert_eq!(caller(&server, 3, &config).post(&json!({}), CostBound::FREE).await.unwrap().body["ok"], "改写");
    assert_eq!(server.n_asked(), 3);
    let failure = ask(&server, 0).await.unwrap_err();
    assert!(failure.message.contains("certificate"), "{failure}");
}

#[tokio::test]
async fn proxy_is_asked_instead_of_the_service() {
    let proxy = FaultyServer::start(|_| good().into());
    let config = CallsConfig { proxy: Some(proxy.url()), ..quick() };
    let url = "http://teacher.invalid/v1/chat/completions";
    let caller = Caller::new("teacher.base_url", url, None, limits(0), &ServiceContext::new(&config)).unwrap();
    caller.post(&json!({}), CostBound::FREE).await.unwrap();
    assert_eq!(proxy.asked()[0].path, url);
}

#[test]
fn unusable_certificates_name_the_setting() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ca.pem");
    std::fs::write(&path, "no certificate").unwrap();
    let config = CallsConfig { ca_file: Some(path), ..quick() };
    let error = Caller::new("x", "http://127.0.0.1/", None, limits(0), &ServiceContext::new(&config)).unwrap_err();
    assert!(error.to_string().ends_with("which holds no certificate in PEM form"), "{error}");
}

/// A third of all requests meets a fault, drawn by row and try. Every row ends as a success or a recorded failure; a row whose
/// answer came is not asked again.
#[tokio::test]
async fn under_injected_faults_every_row_ends_and_none_is_paid_twice() {
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
    let calls = (0..N_ROWS).map(|row| async move { (row, caller.post(&json!({"row": row}), CostBound::FREE).await) });
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
        let asked: Vec<Asked> = server.asked().into_iter().filter(|asked| asked.json()["row"] == row).collect();
        let whole = (1..=asked.len() as u64)
            .filter(|n_try| matches!(scripted(row, *n_try), Reply::Answer(a) if a.status == 200));
        assert!(whole.count() <= 1, "row {row} was answered twice");
    }
}

/// A fault for three of ten tries.
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

/// Regression: a paid request that was sent minutes after an interrupt, because it was queued.
#[tokio::test]
async fn who_waits_for_a_turn_or_another_try_is_not_sent_after_the_stop() {
    let busy = Sent::text(429, "text/plain", "busy").with("Retry-After", "60");
    let (paced, retried) = (failing(0, Reply::Hang), failing(1, busy.into()));
    for (server, requests_per_minute) in [(paced, Some(1)), (retried, None)] {
        let stop: &'static AtomicBool = Box::leak(Box::default());
        let limits = limits(3).per_minute(requests_per_minute, None);
        let services = ServiceContext::new(&quick()).until(stop);
        let caller = Caller::new("teacher.base_url", &server.url(), None, limits, &services).unwrap();
        let started = Instant::now();
        let body = json!({});
        let (first, second, ()) =
            tokio::join!(caller.post(&body, CostBound::FREE), caller.post(&body, CostBound::FREE), async {
                tokio::time::sleep(Duration::from_millis(300)).await;
                stop.store(true, Ordering::Relaxed);
            });
        assert!(started.elapsed() < Duration::from_secs(5));
        let unsent = [first, second].into_iter().filter_map(Result::err).map(|failure| failure.message);
        assert!(unsent.filter(|message| message.ends_with("not sent: interrupted")).count() >= 1);
        assert!(server.n_asked() <= 2, "{}", server.n_asked());
        let n_asked = server.n_asked();
        caller.post(&body, CostBound::FREE).await.unwrap_err();
        assert_eq!(server.n_asked(), n_asked);
    }
}
