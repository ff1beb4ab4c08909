//! Faults of network and service during a batch, against real sockets.

use super::*;
use crate::client::spend::Spend;
use querl_core::ports::Silent;
use querl_core::records::Completion;
use querl_faulty::{Answer, BatchService, FaultyServer, RecordedRequest, Reply};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Price of a batch response, half of the normal price: 100 tokens at 2 and 10 tokens at 10 per million.
const PRICE: f64 = 0.00015;

/// A batch service behind a faulty server, and a run directory.
struct Scene {
    service: Arc<BatchService>,
    server: FaultyServer,
    folder: tempfile::TempDir,
    services: ServiceContext,
    is_broken: Arc<AtomicBool>,
}

impl Scene {
    /// `fault` may replace the service's reply.
    fn new(fault: impl Fn(&RecordedRequest, &BatchService) -> Option<Reply> + Send + Sync + 'static) -> Self {
        Self::reading(Duration::ZERO, fault)
    }

    /// A service that sends `reply` to the requests that `fails` selects, until [`repair`](Self::repair).
    fn broken(fails: impl Fn(&RecordedRequest) -> bool + Send + Sync + 'static, reply: Reply) -> Self {
        let is_broken = Arc::new(AtomicBool::new(true));
        let flag = is_broken.clone();
        let fault = move |asked: &RecordedRequest, _: &BatchService| {
            (flag.load(Ordering::SeqCst) && fails(asked)).then(|| reply.clone())
        };
        Self { is_broken, ..Self::new(fault) }
    }

    fn repair(&self) {
        self.is_broken.store(false, Ordering::SeqCst);
    }

    /// A budget for one and a half responses to the prompt `a`.
    fn with_small_budget(mut self) -> Self {
        let client = &self.teacher().client;
        let max_cost = client.cost(client.most_tokens(&prompt("a"))).unwrap() * 0.5;
        let tracker = SpendTracker::open(&self.folder.path().join("calls.json"), Some(1.5 * max_cost)).unwrap();
        self.services = ServiceContext::default().with_spend_tracker(Arc::new(tracker));
        self
    }

    fn reading(
        pause: Duration,
        fault: impl Fn(&RecordedRequest, &BatchService) -> Option<Reply> + Send + Sync + 'static,
    ) -> Self {
        let service = Arc::new(BatchService::new(2));
        let behind = service.clone();
        let server = FaultyServer::start_reading(pause, move |asked| {
            fault(asked, &behind).unwrap_or_else(|| behind.reply(asked))
        });
        let (folder, services) = (tempfile::tempdir().unwrap(), ServiceContext::default());
        Self { service, server, folder, services, is_broken: Arc::default() }
    }

    fn config(&self) -> TeacherConfig {
        serde_json::from_value(json!({
            "kind": "openai", "model": "m", "base_url": self.server.url(), "api_key_env": "", "batch": true,
            "batch_poll_s": 0.01, "timeout_s": 0.5, "max_retries": 1,
            "price_prompt_per_million": 2.0, "price_completion_per_million": 10.0,
        }))
        .unwrap()
    }

    fn teacher(&self) -> BatchTeacher {
        BatchTeacher::open(&self.config(), &self.services).unwrap()
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("batches.json")
    }

    /// The responses to some prompts, as a new process would request them.
    async fn run(&self, prompts: &[&str]) -> Result<Completions, DataError> {
        self.run_with(&self.teacher(), prompts).await
    }

    async fn run_with(&self, teacher: &BatchTeacher, texts: &[&str]) -> Result<Completions, DataError> {
        let path = self.state();
        let responses = teacher.run(prompts(texts), NewPrompts::Submit, &path, &Silent).await?;
        let completions = texts.iter().map(|text| Ok(responses.of(&prompt(text))?.unwrap())).collect();
        responses.settle()?;
        completions
    }

    /// The error of a run that fails.
    async fn refusal(&self, prompts: &[&str]) -> String {
        let error = self.run(prompts).await.unwrap_err();
        assert!(matches!(error, DataError::Batch { .. }), "{error:?}");
        error.to_string()
    }

    fn n_requests(&self, method: &str, path: &str) -> usize {
        let asked = self.server.requests();
        asked.iter().filter(|asked| asked.method == method && asked.path.starts_with(path)).count()
    }

    fn recorded_state(&self) -> Vec<Batch> {
        BatchState::read(&self.state()).unwrap().map_or_else(Vec::new, |state| state.batches)
    }

    fn spent(&self, provider: &str) -> Spend {
        self.services.spend_tracker().by_stage().remove("").unwrap().remove(provider).unwrap_or_default()
    }
}

fn prompt(text: &str) -> Vec<Message> {
    vec![Message { role: "user".into(), content: text.into() }]
}

type Completions = Vec<Result<Completion, CallFailure>>;

fn prompts<'a>(texts: &'a [&'a str]) -> impl Iterator<Item = Result<Vec<Message>, DataError>> + 'a {
    texts.iter().map(|text| Ok(prompt(text)))
}

fn all_answered(completions: &[Result<Completion, CallFailure>]) -> bool {
    completions.iter().all(|answer| answer.as_ref().is_ok_and(|answer| answer.text.starts_with("鱼油 ")))
}

fn is(asked: &RecordedRequest, method: &str, path: &str) -> bool {
    asked.method == method && asked.path.starts_with(path)
}

fn is_download(asked: &RecordedRequest) -> bool {
    asked.path.ends_with("/content")
}

fn answered(status: u16) -> Reply {
    Answer::json(status, &json!({"error": {"message": "from a proxy"}})).into()
}

/// Regression: a prompt was paid for once for each row with it.
#[tokio::test]
async fn rows_with_the_same_prompt_share_one_request() {
    let scene = Scene::new(|_, _| None);
    let answers = scene.run(&["a", "b", "a"]).await.unwrap();
    let texts: Vec<&str> = answers.iter().map(|answer| answer.as_ref().unwrap().text.as_str()).collect();
    assert!(texts[0] == texts[2] && texts[0] != texts[1], "{texts:?}");
    let form = String::from_utf8(scene.server.requests()[0].body.clone()).unwrap();
    assert_eq!(form.lines().filter(|line| line.starts_with('{')).count(), 2);
    let spent = scene.spent("teacher m (batch)");
    assert_eq!((spent.calls, spent.joined), (2, 1));
    assert!((spent.cost - 2.0 * PRICE).abs() < 1e-12, "{spent:?}");
    // An upload, a creation, two polls, a download.
    assert_eq!(scene.spent("teacher m (batch) files").calls, 5);
    assert_eq!(scene.services.spend_tracker().of_stage("").calls, 2);
}

/// Regression: a creation request was repeated because its response was late, and a second batch was paid for.
#[tokio::test]
async fn a_batch_whose_creation_response_was_lost_is_found() {
    let lost: [fn(Reply) -> Reply; 5] = [
        |reply: Reply| Reply::After(Duration::from_secs(2), Box::new(reply)),
        |_| Reply::Reset,
        |_| answered(502),
        |_| answered(409),
        |_| Answer::text(200, "text/html", "<p>").into(),
    ];
    for lose in lost {
        let scene = Scene::new(move |asked, service| is(asked, "POST", "/batches").then(|| lose(service.reply(asked))));
        assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
        assert_eq!((scene.service.n_begun(), scene.n_requests("POST", "/batches")), (1, 1));
        assert_eq!(scene.spent("teacher m (batch)").lost_cost, 0.0);
    }
}

#[tokio::test]
async fn a_batch_that_is_not_found_counts_as_lost_before_the_next_is_created() {
    let n_begun = AtomicUsize::new(0);
    let scene = Scene::new(move |asked, _| {
        let is_first = is(asked, "POST", "/batches") && n_begun.fetch_add(1, Ordering::SeqCst) == 0;
        is_first.then(|| answered(503))
    });
    assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
    assert_eq!((scene.service.n_begun(), scene.n_requests("POST", "/batches")), (1, 2));
    assert!(scene.n_requests("GET", "/batches?") > 1, "it may be listed a moment later");
    let spent = scene.spent("teacher m (batch)");
    assert!(spent.lost == 1 && spent.lost_cost > 2.0 * PRICE, "{spent:?}");
}

#[tokio::test]
async fn a_second_batch_of_a_file_must_fit_into_the_budget_with_the_first() {
    let scene = Scene::broken(|asked| is(asked, "POST", "/batches"), answered(503)).with_small_budget();
    let error = scene.run(&["a"]).await.unwrap_err();
    assert!(matches!(&error, DataError::Service(failure) if failure.kind == FailureKind::OverBudget), "{error:?}");
    assert_eq!((scene.n_requests("POST", "/batches"), scene.recorded_state().len()), (1, 1));
}

#[tokio::test]
async fn a_batch_is_found_on_a_later_page_of_the_list() {
    let scene = Scene::new(|asked, service| {
        is(asked, "POST", "/batches").then(|| {
            service.reply(&RecordedRequest { path: "/files".into(), ..asked.clone() });
            let of_others =
                RecordedRequest { body: json!({"input_file_id": "file-1"}).to_string().into(), ..asked.clone() };
            (0..250).for_each(|n| drop(service.reply(if n == 0 { asked } else { &of_others })));
            Reply::Reset
        })
    });
    assert!(all_answered(&scene.run(&["a"]).await.unwrap()));
    assert_eq!((scene.service.n_begun(), scene.n_requests("POST", "/batches")), (250, 1));
    assert_eq!(scene.n_requests("GET", "/batches?limit=100&after=batch-"), 2);
}

#[tokio::test]
async fn no_second_batch_is_created_if_the_list_cannot_be_read() {
    let scene = Scene::new(|asked, service| match (asked.method.as_str(), asked.path.as_str()) {
        ("POST", "/batches") => {
            service.reply(asked);
            Some(Reply::Reset)
        }
        ("GET", path) if path.starts_with("/batches?") => Some(answered(404)),
        _ => None,
    });
    for _ in 0..2 {
        let message = scene.refusal(&["a"]).await;
        assert!(message.starts_with("whether the service already has the batch is unknown: "), "{message}");
    }
    assert_eq!((scene.service.n_begun(), scene.recorded_state().len()), (1, 1));
}

#[tokio::test]
async fn a_rejected_file_is_submitted_again() {
    let scene = Scene::broken(|asked| is(asked, "POST", "/batches"), answered(400));
    let message = scene.refusal(&["a"]).await;
    assert!(message.ends_with("from a proxy; the same command submits its rows again"), "{message}");
    assert!(!scene.state().exists());
    scene.repair();
    assert!(all_answered(&scene.run(&["a"]).await.unwrap()));
    assert_eq!((scene.n_requests("POST", "/files"), scene.service.n_begun()), (2, 1));
    assert_eq!(scene.spent("teacher m (batch)").lost_cost, 0.0);
}

/// Regression: one 404 of a proxy dropped a batch, and a short outage stopped the run.
#[tokio::test]
async fn failed_polls_are_repeated() {
    let n_polls = AtomicUsize::new(0);
    let scene = Scene::new(move |asked, _| {
        let n_poll = if is(asked, "GET", "/batches/") { n_polls.fetch_add(1, Ordering::SeqCst) } else { usize::MAX };
        let fault = match n_poll {
            0 => answered(404),
            1 => answered(302),
            // Another rejection would be the third in a row.
            2 => return None,
            3 => answered(503),
            // Longer than the wait of any other call.
            4 => Answer::json(429, &json!({})).with("Retry-After", "600").into(),
            5 => Reply::Reset,
            6 => Answer::text(200, "text/html", "<p>").into(),
            7 => Reply::Hang,
            _ => return None,
        };
        Some(fault)
    });
    let mut teacher = scene.teacher();
    teacher.poll_limits.silence = Duration::from_secs(10);
    assert!(all_answered(&scene.run_with(&teacher, &["a", "b"]).await.unwrap()));
    assert_eq!((scene.n_requests("POST", "/files"), scene.service.n_begun()), (1, 1));
}

#[tokio::test]
async fn a_batch_of_unknown_status_stays_in_the_state_file() {
    for fault in [404, 503, 401] {
        let scene = Scene::broken(|asked| is(asked, "GET", "/batches/"), answered(fault));
        let mut teacher = scene.teacher();
        teacher.poll_limits.silence = Duration::from_millis(100);
        let message = scene.run_with(&teacher, &["a"]).await.unwrap_err().to_string();
        assert!(message.starts_with("what became of batch batch-0 is unknown: "), "{message}");
        let kept =
            format!("still open: batch batch-0; run the same command to resume; removing {}", scene.state().display());
        assert!(message.contains(&kept), "{message}");
        assert_eq!(scene.recorded_state()[0].batch_id.as_deref(), Some("batch-0"));
        scene.repair();
        assert!(all_answered(&scene.run(&["a"]).await.unwrap()));
        assert_eq!((scene.n_requests("POST", "/files"), scene.service.n_begun()), (1, 1));
    }
}

#[tokio::test]
async fn polling_ends_for_an_old_batch() {
    let scene = Scene::new(|asked, _| match (asked.method.as_str(), asked.path.as_str()) {
        ("POST", "/files") => Some(Answer::json(200, &json!({"id": "file-0", "created_at": 1_700_000_000})).into()),
        ("POST", "/batches") => Some(Answer::json(200, &json!({"id": "b"})).into()),
        _ => Some(Answer::json(200, &json!({"id": "b", "status": "resting"})).into()),
    });
    let message = scene.refusal(&["a"]).await;
    assert!(message.starts_with("batch b is `resting` after "), "{message}");
    assert_eq!(scene.recorded_state().len(), 1);
}

/// Regression: paid responses were dropped because a file could not be read for a moment.
#[tokio::test]
async fn unreadable_responses_end_the_stage_and_are_read_by_the_next_run() {
    let cut = Answer::text(200, "application/jsonl", "{\"custom_id\": \"x\", \"response\": {}}\n{\"custom_id\": \"y");
    let whole_lines_missing = Answer::text(200, "application/jsonl", "{\"custom_id\": \"x\", \"response\": {}}\n");
    let faults = [
        (answered(503), "answered 503"),
        (answered(404), "answered 404"),
        (cut.into(), "line 2 is not JSON"),
        (whole_lines_missing.into(), "its files hold 1 answers, and the service counts 2"),
        (Reply::Enormous(64 << 20), "longer than"),
        (Reply::Stall(Answer::text(200, "application/jsonl", "{}\n")), "nothing moved for 0.5 s"),
    ];
    for (fault, message) in faults {
        let scene = Scene::broken(is_download, fault);
        let error = scene.refusal(&["a", "b"]).await;
        assert!(error.starts_with("the answers of batch batch-0 cannot be read: "), "{error}");
        assert!(error.contains(message), "{error}");
        assert_eq!((scene.recorded_state().len(), scene.recorded_state()[0].is_charged), (1, false));
        scene.repair();
        assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
        assert_eq!((scene.n_requests("POST", "/files"), scene.service.n_begun()), (1, 1));
    }
}

#[tokio::test]
async fn a_truncated_download_is_repeated() {
    let n_reads = AtomicUsize::new(0);
    let scene = Scene::new(move |asked, service| {
        let is_first = asked.path.ends_with("/content") && n_reads.fetch_add(1, Ordering::SeqCst) == 0;
        match is_first.then(|| service.reply(asked))? {
            Reply::Answer(answer) => Some(Reply::Cut(answer)),
            other => Some(other),
        }
    });
    assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
    assert_eq!(scene.n_requests("GET", "/files/"), 2);
}

/// Regression: on a slow line no file could be transferred within the timeout of a call.
#[tokio::test]
async fn slow_transfers_are_not_timed_out_while_they_progress() {
    let scene = Scene::reading(Duration::from_millis(40), |asked, service| {
        let Reply::Answer(answer) = service.reply(asked) else { return None };
        asked.path.ends_with("/content").then(|| Reply::Trickle(answer, Duration::from_millis(300)))
    });
    // Longer than the buffers of a connection take to drain.
    let config = TeacherConfig { timeout_s: 2.5, ..scene.config() };
    let teacher = BatchTeacher::open(&config, &scene.services).unwrap();
    let long = "鱼".repeat(300_000);
    let prompts: Vec<String> = (0..26).map(|n| format!("{n}{long}")).collect();
    let prompts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    let started = std::time::Instant::now();
    assert!(all_answered(&scene.run_with(&teacher, &prompts).await.unwrap()));
    assert!(started.elapsed() > Duration::from_secs(6), "up and down each take longer than a call may");
    assert_eq!((scene.n_requests("POST", "/files"), scene.n_requests("GET", "/files/")), (1, 1));
}

#[tokio::test]
async fn a_failed_batch_is_submitted_again_and_the_others_are_resumed() {
    let n_begun = AtomicUsize::new(0);
    let scene = Scene::new(move |asked, service| {
        let reply = is(asked, "POST", "/batches").then(|| service.reply(asked))?;
        if n_begun.fetch_add(1, Ordering::SeqCst) == 1 {
            service.end(1, "failed");
        }
        Some(reply)
    });
    let mut teacher = scene.teacher();
    teacher.file_limits.n_rows = 2;
    let message = scene.run_with(&teacher, &["a", "b", "c", "d", "e"]).await.unwrap_err().to_string();
    assert!(
        message.starts_with(
            "batch batch-1 failed: the file is not what it should be; still open: batch batch-0, batch-2;"
        ),
        "{message}"
    );
    assert!(all_answered(&scene.run(&["a", "b", "c", "d", "e"]).await.unwrap()));
    assert_eq!((scene.n_requests("POST", "/files"), scene.service.n_begun()), (4, 4));
    let spent = scene.spent("teacher m (batch)");
    assert!(spent.calls == 5 && (spent.cost - 5.0 * PRICE).abs() < 1e-12, "{spent:?}");
}

#[tokio::test]
async fn rows_without_a_response_are_submitted_again() {
    for status in ["expired", "cancelled"] {
        let scene = Scene::new(move |asked, service| {
            let reply = is(asked, "POST", "/batches").then(|| service.reply(asked))?;
            if service.n_begun() == 1 {
                service.end(0, status);
            }
            Some(reply)
        });
        let answers = scene.run(&["a", "b", "c", "d"]).await.unwrap();
        assert!(all_answered(&answers[..2]));
        let failure = answers[3].as_ref().unwrap_err();
        assert!(failure.message.ends_with(&format!("batch {status} without an answer to this row")), "{failure}");
        assert_eq!(scene.recorded_state()[0].ids.len(), 2);
        assert!(all_answered(&scene.run(&["a", "b", "c", "d"]).await.unwrap()));
        assert_eq!(scene.service.n_begun(), 2);
        assert!((scene.spent("teacher m (batch)").cost - 4.0 * PRICE).abs() < 1e-12, "the first two are paid once");
    }
}

/// Regression: each later run charged the same responses again.
#[tokio::test]
async fn responses_are_charged_once() {
    let scene = Scene::new(|_, _| None);
    for _ in 0..2 {
        scene.teacher().run(prompts(&["a", "b"]), NewPrompts::Submit, &scene.state(), &Silent).await.unwrap();
        assert!((scene.spent("teacher m (batch)").cost - 2.0 * PRICE).abs() < 1e-12);
    }
}

/// Regression: a kill between the spend file and the state file let the next run charge the batch again.
#[tokio::test]
async fn a_batch_is_charged_once_if_a_kill_leaves_it_unmarked() {
    let mut scene = Scene::new(|_, _| None);
    let spend_file = scene.folder.path().join("calls.json");
    for _ in 0..2 {
        let tracker = SpendTracker::open(&spend_file, None).unwrap();
        scene.services = ServiceContext::default().with_spend_tracker(Arc::new(tracker));
        assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
        let spent = scene.spent("teacher m (batch)");
        assert!(spent.calls == 2 && (spent.cost - 2.0 * PRICE).abs() < 1e-12, "{spent:?}");
        let state = std::fs::read_to_string(scene.state()).unwrap();
        assert!(state.contains("\"is_charged\":true"), "{state}");
        std::fs::write(scene.state(), state.replace("\"is_charged\":true", "\"is_charged\":false")).unwrap();
    }
    assert_eq!(scene.service.n_begun(), 1);
}

#[tokio::test]
async fn batches_of_another_model_are_rejected_and_those_of_the_same_are_read() {
    let scene = Scene::broken(is_download, answered(404));
    scene.refusal(&["a"]).await;
    let other = TeacherConfig { model: Some("other".into()), ..scene.config() };
    let other = BatchTeacher::open(&other, &scene.services).unwrap();
    for error in [other.has_batches(&scene.state()).unwrap_err(), refuse_open_batches(&scene.state()).unwrap_err()] {
        let message = "submitted to another teacher, or with other settings of [teacher]: batch batch-0; ";
        assert!(error.to_string().contains(message), "{error}");
    }
    assert!(scene.teacher().has_batches(&scene.state()).unwrap());
    scene.repair();
    let (teacher, path) = (scene.teacher(), scene.state());
    let answers = teacher.run(prompts(&["a", "b"]), NewPrompts::Skip, &path, &Silent).await.unwrap();
    assert!(answers.of(&prompt("a")).unwrap().unwrap().is_ok());
    assert!(answers.of(&prompt("b")).unwrap().is_none());
    assert_eq!(scene.n_requests("POST", "/files"), 1);
}

/// Regression: a run failed at a batch with missing responses and paid again for those that it had read.
#[tokio::test]
async fn missing_responses_are_requested_again_and_the_others_kept() {
    let n_reads = AtomicUsize::new(0);
    let scene = Scene::new(move |asked, service| {
        let is_first = asked.path.ends_with("/content") && n_reads.fetch_add(1, Ordering::SeqCst) < 3;
        match is_first.then(|| service.reply(asked))? {
            Reply::Answer(answer) => {
                let text = String::from_utf8(answer.body).unwrap();
                let first = text.lines().next().unwrap();
                Some(Answer::text(200, "application/jsonl", &format!("{first}\n")).into())
            }
            other => Some(other),
        }
    });
    let answers = scene.run(&["a", "b"]).await.unwrap();
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1);
    let failure = answers.iter().find_map(|answer| answer.as_ref().err()).unwrap();
    assert!(failure.message.ends_with("batch completed without an answer to this row"), "{failure}");
    assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
    assert_eq!((scene.n_requests("GET", "/files/"), scene.service.n_begun()), (5, 2));
    assert!((scene.spent("teacher m (batch)").cost - 2.0 * PRICE).abs() < 1e-12);
}

/// Regression: overflow from implausible numbers of a service.
#[tokio::test]
async fn implausible_numbers_of_a_service_are_harmless() {
    let scene = Scene::new(|asked, service| {
        if !(is(asked, "POST", "/files") || is(asked, "GET", "/batches/")) {
            return None;
        }
        let Reply::Answer(answer) = service.reply(asked) else { return None };
        let mut body: Value = serde_json::from_slice(&answer.body).unwrap();
        body["created_at"] = json!(u64::MAX);
        if is(asked, "GET", "/batches/") {
            body["request_counts"] = json!({"completed": u64::MAX, "failed": 2});
        }
        Some(Answer::json(200, &body).into())
    });
    assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
}

#[test]
fn upload_time_is_the_service_s_if_plausible() {
    let at = |created_at: Value| {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        uploaded_at(&json!({"created_at": created_at}), now)
    };
    assert_eq!(at(json!(1_799_999_000)), 1_799_999_000);
    for useless in [json!(null), json!(1_800_000_000_000_u64), json!(u64::MAX)] {
        assert_eq!(at(useless), 1_799_913_600);
    }
}

/// Regression: a batch in flight was submitted and paid for again after an update of the program.
#[tokio::test]
async fn a_state_file_of_an_earlier_version_is_read() {
    for batch_id in [json!("batch-0"), Value::Null] {
        let scene = Scene::broken(is_download, answered(404));
        scene.refusal(&["a", "b"]).await;
        let recorded_state = &scene.recorded_state()[0];
        let earlier =
            json!({"batches": [{"file_id": recorded_state.file_id, "batch_id": batch_id, "ids": recorded_state.ids}]});
        std::fs::write(scene.state(), earlier.to_string()).unwrap();
        scene.repair();
        assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
        assert_eq!((scene.n_requests("POST", "/files"), scene.service.n_begun()), (1, 1));
    }
}

/// Regression: ten paid responses and a long file of errors, which no later run could read.
#[tokio::test]
async fn the_download_limit_depends_on_the_submitted_rows() {
    let scene = Scene::new(|asked, service| {
        let Reply::Answer(answer) = asked.path.ends_with("/content").then(|| service.reply(asked))? else {
            return None;
        };
        let text = String::from_utf8(answer.body).unwrap();
        let long = format!("{}{}\n", text.lines().next().unwrap(), " ".repeat(1 << 21));
        Some(Answer::text(200, "application/jsonl", &long).into())
    });
    let prompts: Vec<String> = (0..100).map(|n| n.to_string()).collect();
    let prompts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    scene.run(&prompts).await.unwrap();
    assert_eq!((scene.recorded_state()[0].ids.len(), scene.recorded_state()[0].n_rows), (1, 100));
    scene.teacher().run(std::iter::empty(), NewPrompts::Skip, &scene.state(), &Silent).await.map(drop).unwrap();
}

/// Regression: with a budget for one file but not two, no file was submitted.
#[tokio::test]
async fn a_file_beyond_the_budget_is_submitted_after_the_first_has_ended() {
    let scene = Scene::new(|_, _| None).with_small_budget();
    let mut teacher = scene.teacher();
    teacher.file_limits.n_rows = 1;
    assert!(all_answered(&scene.run_with(&teacher, &["a", "b"]).await.unwrap()));
    assert_eq!(scene.service.n_begun(), 2);
    assert!((scene.spent("teacher m (batch)").cost - 2.0 * PRICE).abs() < 1e-12, "each is paid once");
}
