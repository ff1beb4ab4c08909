//! What a network and a service can do to a batch, against real sockets.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::client::spend::Spend;
use querl_core::ports::Silent;
use querl_core::records::Completion;
use querl_faulty::{Answer, Asked, BatchService, FaultyServer, Reply};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Half of what an answer costs one by one: 100 tokens at 2 and 10 at 10 a million.
const PRICE: f64 = 0.00015;

/// A service, what stands before it, and a run's folder.
struct Scene {
    service: Arc<BatchService>,
    server: FaultyServer,
    folder: tempfile::TempDir,
    services: ServiceContext,
}

/// A service that is broken as long as this says so.
#[derive(Clone, Default)]
struct Broken(Arc<AtomicBool>);

impl Broken {
    fn yes() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }

    fn is(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    fn mend(&self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Scene {
    /// `fault` may answer for the service.
    fn new(fault: impl Fn(&Asked, &BatchService) -> Option<Reply> + Send + Sync + 'static) -> Self {
        Self::reading(Duration::ZERO, fault)
    }

    fn reading(
        pause: Duration,
        fault: impl Fn(&Asked, &BatchService) -> Option<Reply> + Send + Sync + 'static,
    ) -> Self {
        let service = Arc::new(BatchService::new(2));
        let behind = service.clone();
        let server = FaultyServer::start_reading(pause, move |asked| {
            fault(asked, &behind).unwrap_or_else(|| behind.reply(asked))
        });
        Self { service, server, folder: tempfile::tempdir().unwrap(), services: ServiceContext::default() }
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

    /// The answers to some prompts, of a new process.
    async fn run(&self, prompts: &[&str]) -> Result<Vec<Result<Completion, CallFailure>>, DataError> {
        self.ask_of(&self.teacher(), prompts).await
    }

    async fn ask_of(
        &self,
        teacher: &BatchTeacher,
        prompts: &[&str],
    ) -> Result<Vec<Result<Completion, CallFailure>>, DataError> {
        let asked = prompts.iter().map(|text| Ok(prompt(text)));
        let state = self.state();
        let answers = teacher.run(asked, NewPrompts::Submit, &state, &Silent).await?;
        let of = prompts.iter().map(|text| Ok(answers.of(&prompt(text))?.unwrap())).collect();
        answers.settle()?;
        of
    }

    /// The whole error of a run that does not come to its end.
    async fn refusal(&self, prompts: &[&str]) -> String {
        let error = self.run(prompts).await.unwrap_err();
        assert!(matches!(error, DataError::Batch { .. }), "{error:?}");
        error.to_string()
    }

    fn n_asked(&self, method: &str, path: &str) -> usize {
        let asked = self.server.asked();
        asked.iter().filter(|asked| asked.method == method && asked.path.starts_with(path)).count()
    }

    fn recorded_state(&self) -> Vec<Batch> {
        BatchState::read(&self.state()).unwrap().map_or_else(Vec::new, |note| note.batches)
    }

    fn spent(&self, provider: &str) -> Spend {
        self.services.account().by_stage().remove("").unwrap().remove(provider).unwrap_or_default()
    }
}

fn prompt(text: &str) -> Vec<Message> {
    vec![Message { role: "user".into(), content: text.into() }]
}

fn all_answered(answers: &[Result<Completion, CallFailure>]) -> bool {
    answers.iter().all(|answer| answer.as_ref().is_ok_and(|answer| answer.text.starts_with("鱼油 ")))
}

fn is(asked: &Asked, method: &str, path: &str) -> bool {
    asked.method == method && asked.path.starts_with(path)
}

fn answered(status: u16) -> Reply {
    Answer::json(status, &json!({"error": {"message": "so says a proxy"}})).into()
}

/// Regression: one prompt paid for as often as there are rows that have it.
#[tokio::test]
async fn rows_with_the_same_prompt_are_one_question_that_is_charged_once() {
    let scene = Scene::new(|_, _| None);
    let answers = scene.run(&["a", "b", "a"]).await.unwrap();
    let texts: Vec<&str> = answers.iter().map(|answer| answer.as_ref().unwrap().text.as_str()).collect();
    assert!(texts[0] == texts[2] && texts[0] != texts[1], "{texts:?}");
    let form = String::from_utf8(scene.server.asked()[0].body.clone()).unwrap();
    assert_eq!(form.lines().filter(|line| line.starts_with('{')).count(), 2);
    let spent = scene.spent("teacher m (batch)");
    assert_eq!((spent.calls, spent.joined), (2, 1));
    assert!((spent.cost - 2.0 * PRICE).abs() < 1e-12, "{spent:?}");
    // A file up, a batch, two questions whether it is done, a file down.
    assert_eq!((scene.spent("teacher m (batch) files").calls, scene.services.account().of_stage("").calls), (5, 2));
}

/// Regression: a request for a batch that is sent again because its answer was late, and a second batch that is paid.
#[tokio::test]
async fn batch_that_was_begun_behind_a_lost_answer_is_found_and_no_other_begun() {
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
        assert_eq!((scene.service.n_begun(), scene.n_asked("POST", "/batches")), (1, 1));
        assert_eq!(scene.spent("teacher m (batch)").lost_cost, 0.0);
    }
}

#[tokio::test]
async fn batch_that_nobody_finds_stands_on_the_account_before_the_next_is_begun() {
    let n_begun = AtomicUsize::new(0);
    let scene = Scene::new(move |asked, _| {
        let is_first = is(asked, "POST", "/batches") && n_begun.fetch_add(1, Ordering::SeqCst) == 0;
        is_first.then(|| answered(503))
    });
    assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
    assert_eq!((scene.service.n_begun(), scene.n_asked("POST", "/batches")), (1, 2));
    assert!(scene.n_asked("GET", "/batches?") > 1, "it may be listed a moment later");
    let spent = scene.spent("teacher m (batch)");
    assert!(spent.lost == 1 && spent.lost_cost > 2.0 * PRICE, "{spent:?}");
}

#[tokio::test]
async fn second_batch_over_a_file_must_fit_into_the_budget_beside_the_first() {
    let mut scene = Scene::new(|asked, _| is(asked, "POST", "/batches").then(|| answered(503)));
    let client = &scene.teacher().client;
    let most = client.cost(client.most_tokens(&prompt("a"))).unwrap() * 0.5;
    let account = SpendTracker::open(&scene.folder.path().join("calls.json"), Some(1.5 * most)).unwrap();
    scene.services = ServiceContext::default().with_account(Arc::new(account));
    let error = scene.run(&["a"]).await.unwrap_err();
    assert!(matches!(&error, DataError::Service(failure) if failure.kind == FailureKind::OverBudget), "{error:?}");
    assert_eq!((scene.n_asked("POST", "/batches"), scene.recorded_state().len()), (1, 1));
}

#[tokio::test]
async fn batch_of_a_busy_account_is_found_on_a_later_page() {
    let scene = Scene::new(|asked, service| {
        is(asked, "POST", "/batches").then(|| {
            service.reply(&Asked { path: "/files".into(), ..asked.clone() });
            let of_others = Asked { body: json!({"input_file_id": "file-1"}).to_string().into(), ..asked.clone() };
            (0..250).for_each(|n| drop(service.reply(if n == 0 { asked } else { &of_others })));
            Reply::Reset
        })
    });
    assert!(all_answered(&scene.run(&["a"]).await.unwrap()));
    assert_eq!((scene.service.n_begun(), scene.n_asked("POST", "/batches")), (250, 1));
    assert_eq!(scene.n_asked("GET", "/batches?limit=100&after=batch-"), 2);
}

#[tokio::test]
async fn service_that_lists_no_batches_is_not_asked_for_a_second_one() {
    let scene = Scene::new(|asked, service| match (asked.method.as_str(), asked.path.as_str()) {
        ("POST", "/batches") => {
            service.reply(asked);
            Some(Reply::Reset)
        }
        ("GET", path) if path.starts_with("/batches?") => Some(answered(404)),
        _ => None,
    });
    for _ in 0..2 {
        let said = scene.refusal(&["a"]).await;
        assert!(said.starts_with("whether the service already has the batch is unknown: "), "{said}");
    }
    assert_eq!((scene.service.n_begun(), scene.recorded_state().len()), (1, 1));
}

#[tokio::test]
async fn file_that_the_service_refuses_to_work_on_is_handed_over_anew() {
    let broken = Broken::yes();
    let is_broken = broken.clone();
    let scene = Scene::new(move |asked, _| (is_broken.is() && is(asked, "POST", "/batches")).then(|| answered(400)));
    let said = scene.refusal(&["a"]).await;
    assert!(said.ends_with("so says a proxy; the same command submits its rows again"), "{said}");
    assert!(!scene.state().exists());
    broken.mend();
    assert!(all_answered(&scene.run(&["a"]).await.unwrap()));
    assert_eq!((scene.n_asked("POST", "/files"), scene.service.n_begun()), (2, 1));
    assert_eq!(scene.spent("teacher m (batch)").lost_cost, 0.0);
}

/// Regression: a batch forgotten for one 404 of a proxy, and a stopped run for a service that was away for a moment.
#[tokio::test]
async fn questions_for_a_batch_that_fail_are_asked_again() {
    let n_polls = AtomicUsize::new(0);
    let scene = Scene::new(move |asked, _| {
        let n_poll = if is(asked, "GET", "/batches/") { n_polls.fetch_add(1, Ordering::SeqCst) } else { usize::MAX };
        let fault = match n_poll {
            0 => answered(404),
            1 => answered(302),
            // A refusal in between would be the third in a row.
            2 => return None,
            3 => answered(503),
            // Longer than any other call would wait.
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
    assert!(all_answered(&scene.ask_of(&teacher, &["a", "b"]).await.unwrap()));
    assert_eq!((scene.n_asked("POST", "/files"), scene.service.n_begun()), (1, 1));
}

#[tokio::test]
async fn batch_that_nobody_says_anything_of_stays_noted() {
    for fault in [404, 503, 401] {
        let broken = Broken::yes();
        let is_broken = broken.clone();
        let scene =
            Scene::new(move |asked, _| (is_broken.is() && is(asked, "GET", "/batches/")).then(|| answered(fault)));
        let mut teacher = scene.teacher();
        teacher.poll_limits.silence = Duration::from_millis(100);
        let said = scene.ask_of(&teacher, &["a"]).await.unwrap_err().to_string();
        assert!(said.starts_with("what became of batch batch-0 is unknown: "), "{said}");
        let kept =
            format!("still open: batch batch-0; run the same command to resume; removing {}", scene.state().display());
        assert!(said.contains(&kept), "{said}");
        assert_eq!(scene.recorded_state()[0].batch_id.as_deref(), Some("batch-0"));
        broken.mend();
        assert!(all_answered(&scene.run(&["a"]).await.unwrap()));
        assert_eq!((scene.n_asked("POST", "/files"), scene.service.n_begun()), (1, 1));
    }
}

#[tokio::test]
async fn batch_without_an_end_is_not_waited_for_for_ever() {
    let scene = Scene::new(|asked, _| match (asked.method.as_str(), asked.path.as_str()) {
        ("POST", "/files") => Some(Answer::json(200, &json!({"id": "file-0", "created_at": 1_700_000_000})).into()),
        ("POST", "/batches") => Some(Answer::json(200, &json!({"id": "b"})).into()),
        _ => Some(Answer::json(200, &json!({"id": "b", "status": "resting"})).into()),
    });
    let said = scene.refusal(&["a"]).await;
    assert!(said.starts_with("batch b is `resting` after "), "{said}");
    assert_eq!(scene.recorded_state().len(), 1);
}

/// Regression: paid answers that are thrown away, row by row, because a file could not be read for a moment.
#[tokio::test]
async fn answers_that_cannot_be_read_end_the_stage_and_are_read_by_the_next() {
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
    for (fault, said) in faults {
        let broken = Broken::yes();
        let is_broken = broken.clone();
        let scene =
            Scene::new(move |asked, _| (is_broken.is() && asked.path.ends_with("/content")).then(|| fault.clone()));
        let error = scene.refusal(&["a", "b"]).await;
        assert!(error.starts_with("the answers of batch batch-0 cannot be read: ") && error.contains(said), "{error}");
        assert_eq!((scene.recorded_state().len(), scene.recorded_state()[0].is_charged), (1, false));
        broken.mend();
        assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
        assert_eq!((scene.n_asked("POST", "/files"), scene.service.n_begun()), (1, 1));
    }
}

#[tokio::test]
async fn file_that_was_cut_short_once_is_read_again() {
    let n_reads = AtomicUsize::new(0);
    let scene = Scene::new(move |asked, service| {
        let is_first = asked.path.ends_with("/content") && n_reads.fetch_add(1, Ordering::SeqCst) == 0;
        match is_first.then(|| service.reply(asked))? {
            Reply::Answer(answer) => Some(Reply::Cut(answer)),
            other => Some(other),
        }
    });
    assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
    assert_eq!(scene.n_asked("GET", "/files/"), 2);
}

/// Regression: files that can never be carried on a slow line, since all of one had to pass within the time of a call.
#[tokio::test]
async fn slow_line_carries_files_for_as_long_as_they_move() {
    let scene = Scene::reading(Duration::from_millis(40), |asked, service| {
        let Reply::Answer(answer) = service.reply(asked) else { return None };
        asked.path.ends_with("/content").then(|| Reply::Trickle(answer, Duration::from_millis(300)))
    });
    // What the buffers of a connection hold is past the client's sight and gone in half of that.
    let config = TeacherConfig { timeout_s: 2.5, ..scene.config() };
    let teacher = BatchTeacher::open(&config, &scene.services).unwrap();
    let long = "鱼".repeat(300_000);
    let prompts: Vec<String> = (0..26).map(|n| format!("{n}{long}")).collect();
    let prompts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    let started = std::time::Instant::now();
    assert!(all_answered(&scene.ask_of(&teacher, &prompts).await.unwrap()));
    assert!(started.elapsed() > Duration::from_secs(6), "up and down each take longer than a call may");
    assert_eq!((scene.n_asked("POST", "/files"), scene.n_asked("GET", "/files/")), (1, 1));
}

#[tokio::test]
async fn failed_batch_is_handed_over_anew_and_the_others_are_gone_on_with() {
    let n_begun = AtomicUsize::new(0);
    let scene = Scene::new(move |asked, service| {
        let reply = is(asked, "POST", "/batches").then(|| service.reply(asked))?;
        if n_begun.fetch_add(1, Ordering::SeqCst) == 1 {
            service.end(1, "failed");
        }
        Some(reply)
    });
    let mut teacher = scene.teacher();
    teacher.largest.n_rows = 2;
    let said = scene.ask_of(&teacher, &["a", "b", "c", "d", "e"]).await.unwrap_err().to_string();
    assert!(
        said.starts_with(
            "batch batch-1 failed: the file is not what it should be; still open: batch batch-0, batch-2;"
        ),
        "{said}"
    );
    assert!(all_answered(&scene.run(&["a", "b", "c", "d", "e"]).await.unwrap()));
    assert_eq!((scene.n_asked("POST", "/files"), scene.service.n_begun()), (4, 4));
    let spent = scene.spent("teacher m (batch)");
    assert!(spent.calls == 5 && (spent.cost - 5.0 * PRICE).abs() < 1e-12, "{spent:?}");
}

#[tokio::test]
async fn rows_that_an_unfinished_batch_did_not_come_to_are_handed_over_anew() {
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

/// Regression: responses that each later run charged again.
#[tokio::test]
async fn all_that_a_batch_answers_is_charged_once_when_it_is_read() {
    let scene = Scene::new(|_, _| None);
    for _ in 0..2 {
        let asked = ["a", "b"].iter().map(|text| Ok(prompt(text)));
        scene.teacher().run(asked, NewPrompts::Submit, &scene.state(), &Silent).await.unwrap();
        assert!((scene.spent("teacher m (batch)").cost - 2.0 * PRICE).abs() < 1e-12);
    }
}

#[tokio::test]
async fn batch_of_another_model_is_refused_and_one_of_the_same_is_read_without_new_questions() {
    let broken = Broken::yes();
    let is_broken = broken.clone();
    let scene = Scene::new(move |asked, _| (is_broken.is() && asked.path.ends_with("/content")).then(|| answered(404)));
    scene.refusal(&["a"]).await;
    let other = TeacherConfig { model: Some("other".into()), ..scene.config() };
    let other = BatchTeacher::open(&other, &scene.services).unwrap();
    for error in [other.has_batches(&scene.state()).unwrap_err(), refuse_open_batches(&scene.state()).unwrap_err()] {
        assert!(
            error
                .to_string()
                .contains("submitted to another teacher, or with other settings of [teacher]: batch batch-0; "),
            "{error}"
        );
    }
    assert!(scene.teacher().has_batches(&scene.state()).unwrap());
    broken.mend();
    let (asked, state) = (["a", "b"].iter().map(|text| Ok(prompt(text))), scene.state());
    let teacher = scene.teacher();
    let answers = teacher.run(asked, NewPrompts::Skip, &state, &Silent).await.unwrap();
    assert!(answers.of(&prompt("a")).unwrap().unwrap().is_ok());
    assert!(answers.of(&prompt("b")).unwrap().is_none());
    assert_eq!(scene.n_asked("POST", "/files"), 1);
}

/// Regression: a run that could not get past a batch and paid again for responses that it had read.
#[tokio::test]
async fn fewer_answers_than_are_counted_are_taken_and_the_other_rows_asked_anew() {
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
    assert_eq!((scene.n_asked("GET", "/files/"), scene.service.n_begun()), (5, 2));
    assert!((scene.spent("teacher m (batch)").cost - 2.0 * PRICE).abs() < 1e-12);
}

/// Regression: numbers of a service that no clock and no sum can hold.
#[tokio::test]
async fn absurd_numbers_of_a_service_do_no_harm() {
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
fn upload_is_dated_by_the_service_where_it_tells_seconds_of_our_time() {
    let at = |created_at: Value| {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        uploaded_at(&json!({"created_at": created_at}), now)
    };
    assert_eq!(at(json!(1_799_999_000)), 1_799_999_000);
    for useless in [json!(null), json!(1_800_000_000_000_u64), json!(u64::MAX)] {
        assert_eq!(at(useless), 1_799_913_600);
    }
}

/// Regression: a batch that was submitted and paid for again because the program was replaced while it was in flight.
#[tokio::test]
async fn batch_that_an_earlier_version_noted_is_found_and_read() {
    for batch_id in [json!("batch-0"), Value::Null] {
        let broken = Broken::yes();
        let is_broken = broken.clone();
        let scene =
            Scene::new(move |asked, _| (is_broken.is() && asked.path.ends_with("/content")).then(|| answered(404)));
        scene.refusal(&["a", "b"]).await;
        let recorded_state = &scene.recorded_state()[0];
        let earlier =
            json!({"batches": [{"file_id": recorded_state.file_id, "batch_id": batch_id, "ids": recorded_state.ids}]});
        std::fs::write(scene.state(), earlier.to_string()).unwrap();
        broken.mend();
        assert!(all_answered(&scene.run(&["a", "b"]).await.unwrap()));
        assert_eq!((scene.n_asked("POST", "/files"), scene.service.n_begun()), (1, 1));
    }
}

/// Regression: ten paid responses next to a long file of errors, which no later run could read.
#[tokio::test]
async fn files_may_be_as_long_as_the_rows_that_were_handed_over_make_them() {
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

/// Regression: a budget that takes one file and not two, and a run that then hands over none, each time.
#[tokio::test]
async fn file_that_does_not_fit_beside_another_is_handed_over_behind_it() {
    let mut scene = Scene::new(|_, _| None);
    let client = &scene.teacher().client;
    let most = client.cost(client.most_tokens(&prompt("a"))).unwrap() * 0.5;
    let account = SpendTracker::open(&scene.folder.path().join("calls.json"), Some(1.5 * most)).unwrap();
    scene.services = ServiceContext::default().with_account(Arc::new(account));
    let mut teacher = scene.teacher();
    teacher.largest.n_rows = 1;
    assert!(all_answered(&scene.ask_of(&teacher, &["a", "b"]).await.unwrap()));
    assert_eq!(scene.service.n_begun(), 2);
    assert!((scene.spent("teacher m (batch)").cost - 2.0 * PRICE).abs() < 1e-12, "each is paid once");
}
