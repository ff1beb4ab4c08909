//! `querl rm`: train, eval, predict.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{Project, model, repository};

const LABELS: [&str; 5] = ["售前", "售后", "诚实", "有帮助", "无伤害"];

/// A project with 26 dialogues in it.
fn project() -> Project {
    let project = Project::new();
    std::fs::copy(repository().join("examples/style/seed26.json"), project.path("dialogues.json")).unwrap();
    project
}

/// Trains the tiny model with further flags.
fn train(project: &Project, flags: &[&str]) -> support::Said {
    let base = model().display().to_string();
    let known =
        ["rm", "train", "--model_name_or_path", &base, "--train_file", "dialogues.json", "--output_dir", "style"];
    project.querl(&[&known, flags].concat())
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn a_classifier_is_trained_measured_and_asked() {
    let project = project();
    let said = train(&project, &["--num_train_epochs", "2", "--learning_rate", "1e-3", "--demo_inference"]).ok();
    assert!(said.stderr.contains("26 dialogues: 售前 7, 售后 4, 诚实 5, 有帮助 6, 无伤害 4"), "{said:#?}");
    for wanted in ["eval_accuracy", "eval_f1_macro", "TF-IDF", "too few to conclude from", "用户问题：送爸爸什么好？"]
    {
        assert!(said.stdout.contains(wanted), "no `{wanted}` in {said:#?}");
    }
    let config = json(&project.read("style/config.json"));
    assert_eq!(config["problem_type"], "single_label_classification");
    assert_eq!(json(&project.read("style/label_mapping.json"))["id_to_label"]["2"], "诚实");
    let figures = json(&project.read("style/eval.json"));
    assert!(figures["eval_per_class_f1"]["无伤害"].is_number() && figures["baseline"]["eval_accuracy"].is_number());
    assert!(project.read("style/report.html").contains("Confusion matrix"));

    let text = "用户问题：坏了怎么办？\n回答：给您换新的。";
    let said = project.querl(&["rm", "predict", "--model", "style", "--text", text, "--json"]).ok();
    let found = json(&said.stdout);
    let keys: Vec<&String> = found.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["confidence", "predicted_label", "probabilities"]);
    let probabilities = found["probabilities"].as_object().unwrap();
    assert!(LABELS.iter().all(|label| probabilities.contains_key(*label)) && probabilities.len() == 5);
    let sum: f64 = probabilities.values().map(|value| value.as_f64().unwrap()).sum();
    assert!((sum - 1.0).abs() < 1e-9);
    let said =
        project.querl(&["rm", "predict", "--model", "style", "--file", "dialogues.json", "--json", "--english"]).ok();
    assert_eq!(said.stdout.lines().count(), 26);
    assert!(json(said.stdout.lines().next().unwrap())["probabilities"]["honesty"].is_number());

    let said = project.querl(&["rm", "eval", "--model", "style", "--file", "dialogues.json", "--out", "figures"]).ok();
    assert!(said.stdout.contains("-> 无伤害"), "{said:#?}");
    assert_eq!(json(&project.read("figures/eval.json"))["n"], 26);
}

#[test]
fn an_adapter_is_trained_and_asked_with_its_base_and_folds_measure_every_dialogue() {
    let project = project();
    let flags = ["--num_train_epochs", "1", "--lora_rank", "4", "--class_weights", "balanced", "--num_folds", "2"];
    let said = train(&project, &flags).ok();
    assert!(said.stdout.contains("cross-validation: 2 parts"), "{said:#?}");
    assert_eq!(json(&project.read("style/eval.json"))["n"], 26);
    assert_eq!(json(&project.read("style/adapter_config.json"))["task_type"], "SEQ_CLS");
    let alone = project.querl(&["rm", "predict", "--model", "style", "--text", "好"]);
    assert_eq!(
        (alone.code, alone.stderr.contains("name the model that it was trained on with --base")),
        (Some(2), true)
    );
    let base = model().display().to_string();
    project.querl(&["rm", "predict", "--model", "style", "--base", &base, "--text", "好"]).ok();
}

#[test]
fn the_same_command_gives_the_same_classifier() {
    let project = project();
    let figures = |_: usize| {
        let _ = std::fs::remove_dir_all(project.path("style"));
        train(&project, &["--num_train_epochs", "1", "--eval_share", "0", "--dev_share", "0.2"]).ok();
        std::fs::read(project.path("style/model.safetensors")).unwrap()
    };
    let calibrated = ["rm", "predict", "--model", "style", "--calibrated", "--text", "好", "--json"];
    assert_eq!(figures(0), figures(1));
    project.querl(&calibrated).ok();
}

#[test]
fn a_file_of_settings_is_read_and_flags_go_before_it() {
    let project = project();
    let base = model().display().to_string();
    project.write(
        "style.toml",
        &format!("model_name_or_path = \"{base}\"\ntrain_file = \"table.csv\"\noutput_dir = \"style\"\nnum_train_epochs = 9\naugment_copies = 2\n"),
    );
    let dialogues = json(&project.read("dialogues.json"));
    let cell = |value: &Value| format!("\"{}\"", value.as_str().unwrap().replace('"', "\"\""));
    let row = |row: &Value| format!("{},{}", cell(&row["input"]), cell(&row["label"]));
    let rows: Vec<String> = dialogues.as_array().unwrap().iter().map(row).collect();
    project.write("table.csv", &format!("input,label\n{}\n", rows.join("\n")));
    let said = project.querl(&["rm", "train", "style.toml", "--num_train_epochs", "1"]).ok();
    assert!(said.stderr.contains("changed copies are learned from besides; none chooses or measures"), "{said:#?}");
    let resolved = project.read("style/rm.resolved.toml");
    assert!(resolved.contains("num_train_epochs = 1\n") && resolved.contains("augment_copies = 2\n"), "{resolved}");
    let copies = project.read("style/training/augmented.jsonl");
    assert!(copies.lines().count() > 26 && copies.lines().all(|line| json(line)["metadata"]["source"] == "augmented"));
    assert!(json(&project.read("style/eval.json"))["n"].as_u64().unwrap() < 8);

    project.write("style.toml", "learning_rate = 1e-3\nlearning_rat = 2\n");
    let said = project.querl(&["rm", "train", "style.toml"]);
    assert_eq!(said.code, Some(2), "{said:#?}");
    assert!(said.stderr.contains("style.toml:2: unknown field `learning_rat`"), "{said:#?}");
    let said = train(&project, &["--learning_rate", "2"]);
    assert!(said.code == Some(2) && said.stderr.contains("learning_rate is 2; expected more than 0"), "{said:#?}");
}

#[test]
fn data_that_cannot_be_learned_from_is_told_in_a_sentence() {
    let project = project();
    let row = |input: &str, label: &str| format!("{{\"input\": \"{input}\", \"label\": \"{label}\"}}");
    let cases = [
        ("[]".to_owned(), "dialogues.json: holds no dialogues"),
        ([row("a", "售前"), row("b", "售前")].join("\n"), "every dialogue is labelled `售前`; expected two classes"),
        (
            [row("a", "售前"), row("a", "售后")].join("\n"),
            "dialogues 1 and 2 are the same text with labels `售前` and `售后`",
        ),
        (
            [row("a", "售前"), row("b", "售前"), row("c", "售后")].join("\n"),
            "class `售后` has 1 example(s); expected 2",
        ),
        ("[{\"input\": \"a\"}]".to_owned(), "dialogue 1: no `label` there"),
    ];
    for (text, expected) in cases {
        project.write("dialogues.json", &text);
        let said = train(&project, &[]);
        assert_eq!(said.code, Some(2), "{said:#?}");
        assert!(said.stderr.contains(expected), "{said:#?}");
    }
    let base = model().display().to_string();
    let said = project.querl(&["rm", "predict", "--model", &base, "--text", "好"]);
    assert_eq!(said.code, Some(2), "{said:#?}");
}
