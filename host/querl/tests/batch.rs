//! The command line with a failing batch API: no batch is paid for twice or lost.
#![allow(clippy::unwrap_used)]

mod support;

use querl_data::read_spend;
use querl_faulty::{Answer, BatchService, FaultyServer, RecordedRequest, Reply};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use support::{CommandOutput, Project};

const RECORDED: &str = "kind = \"recorded\"\npath = \"teacher.jsonl\"";
const NOTE: &str = "run/data/rewrites.batches.json";

/// A batch service whose files cannot be downloaded until it is repaired, and which also answers chat requests; and a project with it as
/// teacher.
struct Scene {
    service: Arc<BatchService>,
    server: FaultyServer,
    is_broken: Arc<AtomicBool>,
    project: Project,
}

impl Scene {
    fn new() -> Self {
        let (service, is_broken) = (Arc::new(BatchService::new(2)), Arc::new(AtomicBool::new(true)));
        let (behind, broken) = (service.clone(), is_broken.clone());
        let server = FaultyServer::start(move |asked| match asked.path.as_str() {
            "/v1/chat/completions" => one_by_one(),
            path if path.ends_with("/content") && broken.load(Ordering::SeqCst) => {
                Answer::json(503, &json!({"error": {"message": "storage down"}})).into()
            }
            _ => behind.reply(asked),
        });
        let project = Project::new();
        let teacher = format!(
            "kind = \"openai\"\nbase_url = \"{}/v1\"\nmodel = \"m\"\napi_key_env = \"\"\nmax_retries = 0\nbatch = true\nbatch_poll_s = 0.05\n\
             price_prompt_per_million = 2.0\nprice_completion_per_million = 10.0\n[cache]\npath = \"answers.redb\"",
            server.url()
        );
        project.edit(RECORDED, &teacher);
        Self { service, server, is_broken, project }
    }

    fn rewrite(&self, more: &[&str]) -> CommandOutput {
        self.project.querl(&[&["rewrite", "querl.toml"], more].concat())
    }

    /// As [`Self::rewrite`], for a run that stops after a batch was submitted.
    fn stopped(&self) -> String {
        let said = self.rewrite(&[]);
        assert_eq!(said.code, Some(2), "{said:#?}");
        let errors: Vec<&str> = said.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "{said:#?}");
        assert!(self.project.path(NOTE).exists());
        errors[0].to_owned()
    }

    fn mend(&self) {
        self.is_broken.store(false, Ordering::SeqCst);
    }

    fn n_posts(&self, path: &str) -> usize {
        n_posts(&self.server.requests(), path)
    }

    fn texts(&self) -> Vec<String> {
        let records = self.project.read("run/data/rewrites.jsonl");
        let text = |line: &str| serde_json::from_str::<Value>(line).unwrap()["rewrite"]["Ok"]["text"].to_string();
        records.lines().map(text).collect()
    }
}

fn one_by_one() -> Reply {
    let choice = json!({"message": {"content": "鱼油 一"}, "finish_reason": "stop"});
    Answer::json(200, &json!({"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10}})).into()
}

fn n_posts(asked: &[RecordedRequest], path: &str) -> usize {
    asked.iter().filter(|asked| asked.method == "POST" && asked.path == path).count()
}

/// Regression: the fallback was called, and paid, for rows whose batch responses exist, and a batch was submitted twice.
#[test]
fn answers_that_cannot_be_read_stop_the_stage_and_no_fallback_is_paid() {
    let scene = Scene::new();
    let spare = FaultyServer::start(|_| one_by_one());
    scene.project.add_fallback_teacher(&spare.url());
    let error = scene.stopped();
    assert!(error.contains("the answers of batch batch-0 cannot be read: "), "{error}");
    assert!(error.contains("storage down"), "{error}");
    assert!(error.contains("still open: batch batch-0; run the same command to resume"), "{error}");
    assert_eq!((spare.n_requests(), scene.project.path("run/data/rewrites.jsonl").exists()), (0, false));
    scene.mend();
    scene.rewrite(&[]).ok();
    assert!(scene.texts().iter().all(|text| text.starts_with("\"鱼油 ")), "{:?}", scene.texts());
    assert_eq!((scene.service.n_begun(), scene.n_posts("/v1/files"), spare.n_requests()), (1, 1, 0));
    assert!(!scene.project.path(NOTE).exists());
    let account = read_spend(&scene.project.path("run/calls.json")).unwrap();
    let spent = &account["rewrite"]["teacher m (batch)"];
    assert!(spent.calls == 40 && (spent.cost - 40.0 * 0.00015).abs() < 1e-9, "{spent:?}");
}

/// Regression: the estimate had a price for rows that are already paid for, and for a run that would be refused.
#[test]
fn dry_run_leaves_out_what_is_in_a_batch_under_way() {
    let scene = Scene::new();
    scene.stopped();
    let step = |more: &[&str]| scene.rewrite(&[&["--dry-run", "--json"], more].concat());
    let estimate: Value = serde_json::from_str(&step(&[]).ok().stdout).unwrap();
    let step_of_rewrite = &estimate["steps"][0];
    assert_eq!((&step_of_rewrite["calls"]["high"], &step_of_rewrite["in_batches"]), (&json!(0.0), &json!(40)));
    assert_eq!(step(&["--set", "teacher.model=other"]).code, Some(2));
}

/// Regression: a batch was lost if a second teacher was configured, or if the stage was run again.
#[test]
fn batch_outlives_changes_that_its_answers_do_not_depend_on() {
    let second =
        "[fallback_teacher]\nbase_url = \"http://127.0.0.1:9/v1\"\nmodel = \"spare\"\napi_key_env = \"\"\n[judge]";
    let changes: [(&str, &[&str]); 3] =
        [(second, &[]), ("[judge]", &["--set", "data.split_seed=9"]), ("[judge]", &["--from", "rewrite"])];
    for (section, args) in changes {
        let scene = Scene::new();
        scene.stopped();
        scene.mend();
        scene.project.edit("[judge]", section);
        scene.project.querl(&[&["run", "querl.toml", "--to", "rewrite"], args].concat()).ok();
        assert_eq!((scene.service.n_begun(), scene.n_posts("/v1/files")), (1, 1), "{section} {args:?}");
    }
}

#[test]
fn batch_of_other_settings_stops_the_run_before_anything_is_removed() {
    let scene = Scene::new();
    scene.stopped();
    scene.mend();
    scene.project.write("recorded.jsonl", &scene.project.read("teacher.jsonl"));
    let journal = scene.project.read("run/data/rewrites.journal.jsonl");
    let changes: [&[&str]; 2] = [
        &["--set", "teacher.model=other"],
        &["--set", "teacher.kind=recorded", "--set", "teacher.path=recorded.jsonl"],
    ];
    for change in changes {
        let sentence =
            "rewrites.batches.json: submitted to another teacher, or with other settings of [teacher]: batch batch-0; ";
        scene.rewrite(change).refused(sentence);
        assert_eq!(scene.project.read("run/data/rewrites.journal.jsonl"), journal);
    }
    scene.rewrite(&[]).ok();
    assert_eq!(scene.service.n_begun(), 1);
}

/// Regression: a batch was paid for and never downloaded, and its rows were requested and paid for again one by one.
#[test]
fn batch_is_read_after_batches_were_switched_off_and_new_rows_are_called_one_by_one() {
    let scene = Scene::new();
    scene.stopped();
    scene.mend();
    let queries = scene.project.read("queries.jsonl");
    scene.project.write("queries.jsonl", &format!("{queries}\n{}", json!({"original_query": "钙片什么时候吃"})));
    let said = scene.rewrite(&["--set", "teacher.batch=false"]).ok();
    assert!(said.stderr.contains("submitted while teacher.batch was on are waited for"), "{said:#?}");
    assert_eq!((scene.service.n_begun(), scene.n_posts("/v1/files"), scene.n_posts("/v1/chat/completions")), (1, 1, 1));
    assert_eq!((scene.texts().len(), scene.texts()[40].as_str()), (41, "\"鱼油 一\""));
    assert!(!scene.project.path(NOTE).exists());
}
