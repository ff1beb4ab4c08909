//! `querl style`: train, eval, predict.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{Project, model, repository};

const LABELS: [&str; 5] = ["售前", "售后", "诚实", "有帮助", "无伤害"];

/// A project with 26 dialogues.
fn project() -> Project {
    let project = Project::new();
    std::fs::copy(repository().join("examples/style/seed26.json"), project.path("dialogues.json")).unwrap();
    project
}

fn train(project: &Project, flags: &[&str]) -> support::CommandOutput {
    let base = model().display().to_string();
    let known =
        ["rm", "train", "--model_name_or_path", &base, "--train_file", "dialogues.json", "--output_dir", "style"];
    project.querl(&[&known, flags].concat())
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn a_classifier_is_trained_evaluated_and_queried() {
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
fn an_adapter_is_trained_and_queried_with_its_base_and_folds_measure_every_dialogue() {
    let project = project();
    let flags = ["--num_train_epochs", "1", "--lora_rank", "4", "--class_weights", "balanced", "--num_folds", "2"];
    let said = train(&project, &flags).ok();
    assert!(said.stdout.contains("cross-validation: 2 parts"), "{said:#?}");
    assert_eq!(json(&project.read("style/eval.json"))["n"], 26);
    assert_eq!(json(&project.read("style/adapter_config.json"))["task_type"], "SEQ_CLS");
    let alone = project.querl(&["rm", "predict", "--model", "style", "--text", "好"]);
    alone.refused("name the model that it was trained on with --base");
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

/// Regression: the metrics were lost if stdout was closed, for example by `head`.
#[test]
fn figures_are_written_although_stdout_is_closed() {
    let project = project();
    train(&project, &["--num_train_epochs", "1", "--eval_share", "0"]).ok();
    let mut command =
        project.command(&["rm", "eval", "--model", "style", "--file", "dialogues.json", "--out", "figures"]);
    let mut child = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
    child.wait().unwrap();
    assert!(!said.contains("panicked"), "{said}");
    assert_eq!(json(&project.read("figures/eval.json"))["n"], 26);
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
    assert!(said.stderr.contains("augmented copies are in the training split only"), "{said:#?}");
    let resolved = project.read("style/rm.resolved.toml");
    assert!(resolved.contains("num_train_epochs = 1\n") && resolved.contains("augment_copies = 2\n"), "{resolved}");
    let again = project.querl(&["rm", "train", "style/rm.resolved.toml"]).ok();
    assert!(again.stdout.contains("eval_accuracy"), "{again:#?}");
    let copies = project.read("style/training/augmented.jsonl");
    assert!(copies.lines().count() > 26 && copies.lines().all(|line| json(line)["metadata"]["source"] == "augmented"));
    let figures = json(&project.read("style/eval.json"));
    assert_eq!(figures["n"], 5, "{figures}");

    project.write("style.toml", "learning_rate = 1e-3\nlearning_rat = 2\n");
    project.querl(&["rm", "train", "style.toml"]).refused("style.toml:2: unknown field `learning_rat`");
    train(&project, &["--learning_rate", "2"]).refused("learning_rate is 2; expected more than 0");
}

#[test]
fn unusable_data_is_reported_in_one_sentence() {
    let project = project();
    let row = |input: &str, label: &str| format!("{{\"input\": \"{input}\", \"label\": \"{label}\"}}");
    let cases = [
        ("[]".to_owned(), "dialogues.json: holds no dialogues"),
        ([row("a", "售前"), row("b", "售前")].join("\n"), "every dialogue is labelled `售前`; expected two classes"),
        (
            [row("a", "售前"), row("a", "售后")].join("\n"),
            "line 1 and line 2 are the same text with labels `售前` and `售后`",
        ),
        (
            [row("a", "售前"), row("b", "售前"), row("c", "售后")].join("\n"),
            "class `售后` has 1 example(s), line 3; expected 2 at least",
        ),
        ("[{\"input\": \"a\"}]".to_owned(), "line 1, dialogue 1: no `label` there"),
        ("[{\"input\": \"a\",\n\"label\": 0}]".to_owned(), "line 1, dialogue 1: `label` is 0; expected a text"),
        (
            [row("a", "售前"), row("b", "售后").replace('}', ", \"label_english\": \"x\"}"), row("c", "售前")]
                .join("\n")
                + &format!("\n{}", row("d", "售前").replace('}', ", \"label_english\": \"x\"}")),
            "line 4: label_english `x` is paired with label `售前`, and with `售后` in line 2; expected one",
        ),
    ];
    for (text, expected) in cases {
        project.write("dialogues.json", &text);
        train(&project, &[]).refused(expected);
    }
}

fn copy(project: &Project, from: &str, to: &str) {
    let _ = std::fs::remove_dir_all(project.path(to));
    std::fs::create_dir(project.path(to)).unwrap();
    for entry in std::fs::read_dir(project.path(from)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, project.path(to).join(path.file_name().unwrap())).unwrap();
        }
    }
}

fn change(project: &Project, name: &str, change: impl Fn(&mut Value)) {
    let mut file = json(&project.read(name));
    change(&mut file);
    project.write(name, &file.to_string());
}

#[test]
fn unusable_models_are_reported_in_one_sentence() {
    let project = project();
    train(&project, &["--num_train_epochs", "1", "--eval_share", "0"]).ok();
    let remove = |name: &str| std::fs::remove_file(project.path(name)).unwrap();
    let cases: [(&str, &dyn Fn()); 8] = [
        ("tokenizer.json", &|| remove("other/tokenizer.json")),
        ("model.safetensors", &|| remove("other/model.safetensors")),
        ("no `id_to_label` there", &|| project.write("other/label_mapping.json", "{}")),
        ("architecture `BertModel` is not supported", &|| {
            change(&project, "other/config.json", |file| file["architectures"][0] = "BertModel".into());
        }),
        ("`score.weight` has shape [5, 32]; the 4 labels and the model's width make it [4, 32]", &|| {
            remove("other/label_mapping.json");
            change(&project, "other/config.json", |file| drop(file["id2label"].as_object_mut().unwrap().remove("4")));
        }),
        ("id 4 is `无伤害` here and nothing in `config.json`", &|| {
            change(&project, "other/config.json", |file| drop(file["id2label"].as_object_mut().unwrap().remove("4")));
        }),
        ("no `id2label` there; a classifier names its classes", &|| {
            remove("other/label_mapping.json");
            change(&project, "other/config.json", |file| drop(file.as_object_mut().unwrap().remove("id2label")));
        }),
        ("`problem_type` is `multi_label_classification`; expected", &|| {
            change(&project, "other/config.json", |file| file["problem_type"] = "multi_label_classification".into());
        }),
    ];
    for (expected, spoil) in cases {
        copy(&project, "style", "other");
        spoil();
        let message = project.refusal(&["rm", "predict", "--model", "other", "--text", "好"], 2);
        assert!(message.contains(expected), "no `{expected}` in {message}");
    }
    let calibrated = ["rm", "predict", "--model", "style", "--calibrated", "--text", "好"];
    project.querl(&calibrated).refused("calibration.json: not there");
}

#[test]
fn labels_that_no_class_has_are_refused_by_line() {
    let project = project();
    train(&project, &["--num_train_epochs", "1", "--eval_share", "0"]).ok();
    let row = |input: &str, rest: &str| format!("{{\"input\": \"{input}\", {rest}}}");
    let eval = |rows: &[String]| {
        project.write("some.jsonl", &rows.join("\n"));
        project.querl(&["rm", "eval", "--model", "style", "--file", "some.jsonl"])
    };
    let good = row("a", "\"label\": \" 售前\"");
    let said = eval(&[good.clone(), row("b", "\"label\": \"售罄\"")]);
    said.refused("some.jsonl: line 2: label `售罄` is none of `售前`");
    let said = eval(&[row("b", "\"label\": \"售后\", \"label_english\": \"honesty\"")]);
    said.refused("line 1: label `售后` and label_english `honesty` are different classes");
    assert!(eval(&[good, row("b", "\"label\": \"after_sales\"")]).ok().stdout.contains("eval_accuracy"));
}

#[test]
fn classes_of_the_settings_have_the_ids_of_their_order_and_no_others_are_learned() {
    let project = project();
    let named = "无伤害=harmless,有帮助=helpful,诚实=honesty,售后=after_sales,售前=sales_oriented,其他=other";
    let flags = ["--num_train_epochs", "1", "--eval_share", "0", "--labels", named];
    let said = train(&project, &flags).ok();
    assert!(said.stderr.contains("class `其他` has no example: it is never learned"), "{said:#?}");
    let mapping = json(&project.read("style/label_mapping.json"));
    assert_eq!(
        (&mapping["label_to_id"]["售前"], &mapping["id_to_label_english"]["0"]),
        (&4.into(), &"harmless".into())
    );
    let mut rows = json(&project.read("dialogues.json"));
    rows[3]["label"] = "有帮肋".into();
    project.write("dialogues.json", &rows.to_string());
    train(&project, &flags).refused("dialogue 4: label `有帮肋` is none of `无伤害`");
    let said = train(&project, &["--labels", "无伤害=harmless,有帮助"]);
    said.refused("labels: `有帮助` has no English name");
}

#[test]
fn texts_that_are_too_long_are_counted_where_they_are_learned_and_where_they_are_measured() {
    let project = project();
    let said = train(&project, &["--num_train_epochs", "1", "--max_length", "8"]).ok();
    assert!(said.stderr.contains("train 21, dev 0, eval 5"), "{said:#?}");
    assert!(said.stderr.contains("21 text(s) were shortened to 8 tokens"), "{said:#?}");
    assert!(said.stdout.contains("5 evaluated text(s) were shortened to 8 tokens"), "{said:#?}");
    let said = project.querl(&["rm", "eval", "--model", "style", "--file", "dialogues.json", "--max_length", "8"]).ok();
    assert!(said.stdout.contains("26 text(s) were shortened to 8 tokens"), "{said:#?}");
    let predict = ["rm", "predict", "--model", "style", "--file", "dialogues.json", "--max_length", "8"];
    let said = project.querl(&predict).ok();
    assert!(said.stderr.contains("26 text(s) longer than 8 tokens were shortened"), "{said:#?}");
    train(&project, &["--max_length", "5000"]).refused("has 4096 positions");
}

/// Regression: if the best checkpoint was selected on held-out examples, the model was written without its weights.
#[test]
fn a_folder_that_was_trained_into_before_holds_the_last_model_alone() {
    let project = project();
    let base = model().display().to_string();
    let with_dev = ["--num_train_epochs", "2", "--learning_rate", "1e-3", "--early_stopping_patience", "1"];
    let said = train(&project, &[&with_dev[..], &["--lora_rank", "4"]].concat()).ok();
    assert!(said.stderr.contains("train 16, dev 5, eval 5"), "{said:#?}");
    let ask = |flags: &[&str]| {
        project.querl(&[&["rm", "predict", "--model", "style", "--file", "dialogues.json", "--json"], flags].concat())
    };
    let adapted = ask(&["--base", &base, "--calibrated"]).ok().stdout;
    train(&project, &with_dev).ok();
    assert!(!project.path("style/adapter_config.json").exists());
    let whole = ask(&["--calibrated"]).ok().stdout;
    assert_ne!(adapted, whole);
    let figures = json(&project.read("style/eval.json"));
    assert!(figures["calibrated"]["log_loss"].is_number() && figures["temperature"].is_number(), "{figures}");
    // With a selection, the best checkpoint is written.
    copy(&project, "style/training/best", "best");
    let best = project.querl(&["rm", "predict", "--model", "best", "--file", "dialogues.json", "--json"]).ok().stdout;
    assert_eq!(best, ask(&[]).ok().stdout);
    train(&project, &["--num_train_epochs", "1", "--eval_share", "0", "--dev_share", "0"]).ok();
    for stale in ["calibration.json", "eval.json", "report.html"] {
        assert!(!project.path("style").join(stale).exists(), "{stale}");
    }
    let into_base = ["--model_name_or_path", "best", "--train_file", "dialogues.json", "--output_dir", "best"];
    project.querl(&[&["rm", "train"], &into_base[..]].concat()).refused("output_dir is the model's own folder");
}

#[test]
fn figures_of_calibrated_probabilities_say_so() {
    let project = project();
    train(&project, &["--num_train_epochs", "1", "--dev_share", "0.2"]).ok();
    let eval = |flags: &[&str]| {
        let known = ["rm", "eval", "--model", "style", "--file", "dialogues.json", "--out", "figures"];
        (project.querl(&[&known, flags].concat()).ok(), json(&project.read("figures/eval.json")))
    };
    let (_, plain) = eval(&[]);
    assert!(plain.get("temperature").is_none());
    let (said, calibrated) = eval(&["--calibrated"]);
    assert!(said.stdout.contains("probabilities are calibrated: logits were divided by"), "{said:#?}");
    let written = json(&project.read("style/calibration.json"));
    assert_eq!(calibrated["temperature"], written["temperature"]);
    assert_eq!((&calibrated["eval_accuracy"], &written["n"]), (&plain["eval_accuracy"], &5.into()));
    assert!(project.read("figures/report.html").contains("Probabilities are calibrated by a temperature of"));
}

/// Regression: a training on another base resumed, and the classifier of the old base was written as that of the new one.
#[test]
fn a_training_resumes_only_with_the_same_base() {
    let project = project();
    project.copy_model("base");
    let train = || {
        let known = ["rm", "train", "--model_name_or_path", "base", "--train_file", "dialogues.json"];
        let flags = ["--output_dir", "style", "--num_train_epochs", "1", "--eval_share", "0"];
        let said = project.querl(&[&known[..], &flags].concat()).ok();
        (said.stderr.contains("resuming from step"), std::fs::read(project.path("style/model.safetensors")).unwrap())
    };
    let first = train();
    assert!(!first.0);
    assert_eq!(train(), (true, first.1.clone()));
    let weights = project.path("base/model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    // Changes the mantissa of the last value.
    let at = bytes.len() - 2;
    bytes[at] ^= 0x40;
    std::fs::write(&weights, bytes).unwrap();
    let other = train();
    assert!(!other.0);
    assert_ne!(other.1, first.1);
}

#[test]
fn parts_of_a_cross_validation_that_are_done_are_not_trained_again() {
    let project = project();
    let flags = ["--num_train_epochs", "1", "--num_folds", "2", "--num_repeats", "2"];
    let run = || train(&project, &flags).ok();
    let said = run();
    assert!(said.stderr.contains("train 26, dev 0, eval 0") && said.stderr.contains("part 4 of 4"), "{said:#?}");
    let figures = json(&project.read("style/eval.json"));
    assert_eq!((&figures["n"], &figures["n_repeats"]), (&26.into(), &2.into()));
    std::fs::remove_file(project.path("style/training/folds/part-002.json")).unwrap();
    let again = run();
    // Each training reports its end: the full one resumes, the fold is trained again.
    assert_eq!(again.stderr.matches(" steps, loss ").count(), 2, "{again:#?}");
    assert_eq!(json(&project.read("style/eval.json")), figures);
    train(&project, &["--num_folds", "27"]).refused("num_folds is 27; expected at most 26");
}

#[test]
fn a_student_is_written_over_what_stood_there_and_long_texts_are_counted() {
    let project = project();
    train(&project, &["--num_train_epochs", "1", "--dev_share", "0.2"]).ok();
    copy(&project, "style", "student");
    let base = model().display().to_string();
    let known = ["rm", "distill", "--teacher", "style", "--student", &base, "--train_file", "dialogues.json"];
    let unlabelled = repository().join("examples/style/unlabelled.json").display().to_string();
    let flags =
        ["--unlabelled", &unlabelled, "--output_dir", "student", "--num_train_epochs", "1", "--max_length", "8"];
    project.querl(&[&known[..], &flags].concat()).ok();
    assert!(!project.path("student/calibration.json").exists(), "the temperature is another model's");
    let report = json(&project.read("student/distillation.json"));
    assert_eq!(
        (&report["n_labelled"], &report["n_unlabelled"], &report["n_compared"]),
        (&21.into(), &181.into(), &5.into())
    );
    assert_eq!(report["n_shortened"], 21 + 181 + 5);
    assert!(report["student"]["accuracy"].is_number() && report["agreement"].is_number(), "{report}");
    project.querl(&["rm", "predict", "--model", "student", "--text", "好"]).ok();
}
