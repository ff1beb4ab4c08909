//! `querl rm serve` and `querl rm distill`, through the command line.
#![allow(clippy::unwrap_used)]

mod support;

use reqwest::Client;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;
use support::{Project, model, repository};

/// A project with a classifier that was trained for a moment, in `style`.
fn project() -> Project {
    let project = Project::new();
    std::fs::copy(repository().join("examples/style/seed26.json"), project.path("dialogues.json")).unwrap();
    let base = model().display().to_string();
    let flags = ["--output_dir", "style", "--num_train_epochs", "1", "--learning_rate", "1e-3"];
    let known = ["rm", "train", "--model_name_or_path", &base, "--train_file", "dialogues.json"];
    project.querl(&[&known[..], &flags].concat()).ok();
    project
}

/// A server of the classifier, killed when dropped.
struct Server {
    process: Child,
    url: String,
    client: Client,
}

impl Server {
    fn start(project: &Project, args: &[&str]) -> Self {
        let args = [&["rm", "serve", "--model", "style", "--addr", "127.0.0.1:0"], args].concat();
        let mut process = project
            .command(&args)
            .env("STYLE_KEY", "secret")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("listening on ")?.to_owned()));
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self { process, url: line.expect("the server says where it listens"), client: Client::new() }
    }

    async fn ready(&self) {
        for _ in 0..600 {
            let response = self.client.get(format!("{}/ready", self.url)).send().await.unwrap();
            if response.status() == 200 {
                return;
            }
            assert_eq!(response.status(), 503);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the model was never loaded");
    }

    async fn ask(&self, path: &str, body: &Value) -> (u16, Value) {
        let response = self.client.post(format!("{}{path}", self.url)).json(body).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn texts(project: &Project) -> Vec<String> {
    let dialogues: Value = serde_json::from_str(&project.read("dialogues.json")).unwrap();
    dialogues.as_array().unwrap().iter().map(|row| row["input"].as_str().unwrap().to_owned()).collect()
}

fn predicted(project: &Project) -> Vec<Value> {
    let said = project.querl(&["rm", "predict", "--model", "style", "--file", "dialogues.json", "--json"]).ok();
    said.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Probabilities in one order, as far as they are printed.
fn assert_alike(found: &Value, expected: &Value) {
    assert_eq!(found["predicted_label"], expected["predicted_label"]);
    for (class, expected) in expected["probabilities"].as_object().unwrap() {
        let found = found["probabilities"][class].as_f64().unwrap();
        assert!((found - expected.as_f64().unwrap()).abs() < 1e-6, "{class}: {found} is not {expected}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_at_once_are_answered_as_predict_answers() {
    let project = project();
    let (texts, expected) = (texts(&project), predicted(&project));
    for batch in ["1", "32"] {
        let server = Server::start(&project, &["--max_batch", batch]);
        server.ready().await;
        let bodies: Vec<Value> = texts.iter().map(|text| json!({"text": text})).collect();
        let asked = bodies.iter().map(|body| server.ask("/predict", body));
        for ((status, found), expected) in futures::future::join_all(asked).await.into_iter().zip(&expected) {
            assert_eq!(status, 200, "{found}");
            assert_alike(&found, expected);
        }
        let (status, found) = server.ask("/classify", &json!({"input": texts})).await;
        assert_eq!((status, found["data"].as_array().unwrap().len()), (200, 26));
        let metrics = server.client.get(format!("{}/metrics", server.url)).send().await.unwrap().text().await.unwrap();
        assert!(metrics.contains("querl_style_texts_total 52\n"), "{metrics}");
        let one_by_one = "querl_style_batch_texts_count 27\n";
        assert_eq!(metrics.contains(one_by_one), batch == "1", "{metrics}");
    }
}

#[tokio::test]
async fn an_interrupt_ends_the_server_well_and_the_key_is_asked_for() {
    let project = project();
    let mut server = Server::start(&project, &["--api_key_env", "STYLE_KEY"]);
    server.ready().await;
    assert_eq!(server.ask("/predict", &json!({"text": "好"})).await.0, 401);
    let request = server.client.post(format!("{}/predict", server.url)).bearer_auth("secret");
    assert_eq!(request.json(&json!({"text": "好"})).send().await.unwrap().status(), 200);
    let pid = server.process.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
}

#[test]
fn what_cannot_be_served_ends_with_a_sentence() {
    let project = Project::new();
    let base = model().display().to_string();
    let said = project.querl(&["rm", "serve", "--model", &base, "--addr", "127.0.0.1:0"]);
    assert_eq!(said.code, Some(2), "{said:#?}");
    assert!(said.stderr.contains("no `id2label` there") || said.stderr.contains("no classifier"), "{said:#?}");
    let said = project.querl(&["rm", "serve", "--model", &base, "--api_key_env", "NOT_SET"]);
    assert_eq!(said.code, Some(2), "{said:#?}");
    assert!(said.stderr.contains("the environment variable `NOT_SET` holds no key"), "{said:#?}");
}

#[test]
fn a_student_learns_from_a_teacher_that_is_asked_once() {
    let project = project();
    std::fs::copy(repository().join("examples/style/unlabelled.json"), project.path("unlabelled.json")).unwrap();
    let base = model().display().to_string();
    let args = [
        "rm",
        "distill",
        "--teacher",
        "style",
        "--student",
        &base,
        "--unlabelled",
        "unlabelled.json",
        "--train_file",
        "dialogues.json",
        "--output_dir",
        "student",
        "--num_train_epochs",
        "1",
        "--learning_rate",
        "1e-3",
    ];
    let said = project.querl(&args).ok();
    assert!(said.stdout.contains("the student is") && said.stdout.contains("eval_accuracy"), "{said:#?}");
    let report: Value = serde_json::from_str(&project.read("student/distillation.json")).unwrap();
    assert_eq!(report["n_unlabelled"], 181);
    let n_all = report["n_labelled"].as_u64().unwrap() + 181;
    assert_eq!(report["n_asked"], n_all);
    assert!(report["agreement"].is_number() && report["student"]["accuracy"].is_number(), "{report}");
    std::fs::remove_dir_all(project.path("student/training")).unwrap();
    project.querl(&args).ok();
    let again: Value = serde_json::from_str(&project.read("student/distillation.json")).unwrap();
    assert_eq!((&again["n_asked"], &again["agreement"]), (&json!(0), &report["agreement"]));
    project.querl(&["rm", "predict", "--model", "student", "--text", "好"]).ok();

    let said = project.querl(&[&args[..], &["--hard_weight", "2"]].concat());
    assert_eq!((said.code, said.stderr.contains("hard_weight is 2; expected 0 to 1")), (Some(2), true), "{said:#?}");
}
