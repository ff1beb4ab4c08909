//! `querl serve style`, `querl style predict` and `querl style distill`, through the command line.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;
use support::server::Server;
use support::{Project, model, repository};

const SERVE_STYLE: [&str; 4] = ["rm", "serve", "--model", "style"];

/// A project with a classifier in `style` that was trained for a few steps.
fn project() -> Project {
    let project = Project::new();
    std::fs::copy(repository().join("examples/style/seed26.json"), project.path("dialogues.json")).unwrap();
    let base = model().display().to_string();
    let flags = ["--output_dir", "style", "--num_train_epochs", "1", "--learning_rate", "1e-3"];
    let known = ["rm", "train", "--model_name_or_path", &base, "--train_file", "dialogues.json"];
    project.querl(&[&known[..], &flags].concat()).ok();
    project
}

fn texts(project: &Project) -> Vec<String> {
    let dialogues: Value = serde_json::from_str(&project.read("dialogues.json")).unwrap();
    dialogues.as_array().unwrap().iter().map(|row| row["input"].as_str().unwrap().to_owned()).collect()
}

fn predicted(project: &Project) -> Vec<Value> {
    let said = project.querl(&["rm", "predict", "--model", "style", "--file", "dialogues.json", "--json"]).ok();
    said.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Compares probabilities in any order, to the printed precision.
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
        let server = Server::start(&project, &SERVE_STYLE, &["--max_batch", batch]);
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
async fn an_interrupt_shuts_the_server_down_and_the_key_is_required() {
    let project = project();
    let mut server = Server::start(&project, &SERVE_STYLE, &["--api_key_env", "TEST_KEY"]);
    server.ready().await;
    assert_eq!(server.ask("/predict", &json!({"text": "好"})).await.0, 401);
    let request = server.client.post(format!("{}/predict", server.url)).bearer_auth("secret");
    assert_eq!(request.json(&json!({"text": "好"})).send().await.unwrap().status(), 200);
    assert_eq!(server.end("-INT"), Some(0));
}

/// Regression: connections were closed before their response when the server was stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_under_way_at_an_interrupt_are_answered() {
    let project = project();
    let mut server = Server::start(&project, &SERVE_STYLE, &["--max_texts", "4000"]);
    server.ready().await;
    let dialogue = format!("用户问题：怎么洗？\n回答：{}", "冷水手洗，平铺晾干。".repeat(40));
    let (client, url) = (server.client.clone(), format!("{}/predict", server.url));
    let asked = tokio::spawn(async move {
        let response = client.post(url).json(&json!({"text": vec![dialogue; 800]})).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    });
    let metrics = format!("{}/metrics", server.url);
    for _ in 0..1000 {
        let text = server.client.get(&metrics).send().await.unwrap().text().await.unwrap();
        if !text.contains("querl_style_waiting_texts 0\n") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(!asked.is_finished(), "the request is under way");
    server.signal("-TERM");
    let (status, found) = asked.await.unwrap();
    assert_eq!((status, found.as_array().unwrap().len()), (200, 800));
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
}

#[tokio::test]
async fn a_folder_or_a_run_is_served_as_the_classifier_is() {
    let project = project();
    let text = project.read("querl.toml") + "\n[plugins.style_model]\npath = \"style\"\nmax_length = 99\n";
    project.write("with.toml", &text);
    let expected = predicted(&project).remove(0);
    let body = json!({"text": texts(&project)[0]});
    for (place, max_length) in [
        (&["style"][..], 512),
        (&["--model", "style", "--max_length", "77"], 77),
        (&["with.toml"], 99),
        (&["style", "with.toml"], 99),
    ] {
        let mut server = Server::start(&project, &[&["serve"], place].concat(), &[]);
        server.ready().await;
        let info = server.client.get(format!("{}/info", server.url)).send().await.unwrap();
        assert_eq!(info.json::<Value>().await.unwrap()["max_input_length"], max_length, "{place:?}");
        if max_length == 512 {
            assert_alike(&server.ask("/predict", &body).await.1, &expected);
        }
        assert_eq!(server.end("-INT"), Some(0));
    }
    let said = project.querl(&["serve", "querl.toml"]);
    let message = "error: querl.toml: has no style model to serve; name a classifier of `querl style train` as plugins.style_model.path\n";
    let message =
        format!("note: `querl serve DIR` is now `querl serve style DIR`; the old form still works\n{message}");
    assert_eq!((said.code, said.stderr), (Some(2), message));
    assert_eq!(project.querl(&["serve", "style", "querl.toml"]).code, Some(2));
    // Symptom: the error for a run did not name the command that serves it.
    project.querl(&["run", "querl.toml", "--to", "rewrite"]).ok();
    let message = "error: run: this is a run; serve it with `querl serve rewrite run`, or, to serve a style model, ";
    project.querl(&["serve", "run"]).refused(message);
    assert_eq!(project.querl(&["serve"]).code, Some(2));
}

/// Output of `querl style predict --json` for this input on stdin.
fn predict(project: &Project, input: &[u8]) -> (Option<i32>, Vec<Value>, String) {
    let mut command = project.command(&["rm", "predict", "--model", "style", "--json", "-q"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The write fails if the process ended early, because the model could not be opened.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let rows = text(output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (output.status.code(), rows, text(output.stderr))
}

/// Regression: a dialogue of two lines was classified as two separate texts.
#[test]
fn dialogues_on_stdin_are_classified_whole_and_in_their_order() {
    let project = project();
    let (texts, expected) = (texts(&project), predicted(&project));
    assert!(texts.iter().all(|text| text.lines().count() == 2), "{texts:?}");
    let lines = texts.join("\n") + "\n";
    let objects = texts.iter().map(|text| json!({"input": text}).to_string() + "\n").collect::<String>();
    for input in [lines, objects] {
        let (code, found, stderr) = predict(&project, input.as_bytes());
        assert_eq!((code, found.len()), (Some(0), expected.len()), "{stderr}");
        for (found, expected) in found.iter().zip(&expected) {
            assert_alike(found, expected);
        }
    }
    let refused = [
        (&b"\n\n"[..], "no text to classify"),
        ("好\n\n好\n".as_bytes(), "stdin: line 2 is blank; expected a text in each line"),
        ("{\"input\": \"好\"}\n{\"text\": 7}\n".as_bytes(), "stdin: line 2: no text there; expected a JSON string"),
        (&b"ab\xff"[..], "stdin: no UTF-8 from byte 2 on; save it as UTF-8"),
    ];
    for (input, sentence) in refused {
        let (code, found, stderr) = predict(&project, input);
        assert!((code, found.len()) == (Some(2), 0) && stderr.starts_with(&format!("error: {sentence}")), "{stderr}");
    }
}

#[test]
fn what_cannot_be_served_ends_with_a_sentence() {
    let project = Project::new();
    let base = model().display().to_string();
    let said = project.querl(&["rm", "serve", "--model", &base, "--addr", "127.0.0.1:0"]);
    said.refused("no `id2label` there; a classifier names its classes");
    let said = project.querl(&["rm", "serve", "--model", &base, "--api_key_env", "NOT_SET"]);
    said.refused("the environment variable `NOT_SET` holds no key");
}

#[test]
fn a_student_learns_from_a_teacher_that_is_run_once() {
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
    let into_teacher = args.map(|arg| if arg == "student" { "style" } else { arg });
    project.querl(&into_teacher).refused("style: output_dir is the teacher's own folder; name another");
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
    said.refused("hard_weight is 2; expected 0 to 1");
}
