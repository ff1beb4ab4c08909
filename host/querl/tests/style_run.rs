//! Runs with a style model: from the classifier to reward and metrics, and refused configurations.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{Project, model, repository, with_sets};

const CLASSES: [&str; 5] = ["售前", "售后", "诚实", "有帮助", "无伤害"];

/// The end of a configuration with a style model, and a style scorer as second reward.
const STYLE: &str = r#"
[plugins.style_model]
path = "style"
[[plugins.rewards]]
path = "PLUGINS/scorer-style"
weight = 0.5
settings = { targets = ["诚实"], penalties = ["售前=0.5"], margin = 0.5 }
"#;

fn plugins() -> String {
    repository().join("plugins").display().to_string()
}

/// A project whose configuration ends with `more`; `PLUGINS` is replaced by the path of the repository's plugins.
fn project(more: &str) -> Project {
    let project = Project::new();
    std::fs::copy(repository().join("examples/style/seed26.json"), project.path("dialogues.json")).unwrap();
    project.write("querl.toml", &(project.read("querl.toml") + &more.replace("PLUGINS", &plugins())));
    project
}

/// Trains a classifier for a few steps with the example's configuration.
fn train(project: &Project, folder: &str, seed: &str) {
    let config = repository().join("examples/style/classifier.toml").display().to_string();
    let flags = ["--train_file", "dialogues.json", "--output_dir", folder, "--num_train_epochs", "1", "--seed", seed];
    project.querl(&[&["rm", "train", &config], &flags[..]].concat()).ok();
}

fn sum(style: &Value) -> f64 {
    style.as_array().unwrap().iter().map(|class| class["probability"].as_f64().unwrap()).sum()
}

#[test]
fn a_style_scorer_rewards_next_to_another_plugin_and_the_report_shows_the_shift_of_style() {
    let project = project(STYLE);
    project.edit("path = \"style\"", "path = \"style\"\naudit = \"audit\"");
    // A model that writes words, and a parser that accepts them unchanged: empty responses have no style.
    let tiny = repository().join("examples/tiny-qwen3").display().to_string();
    project.edit(&model().display().to_string(), &tiny);
    project
        .edit("tenant-fivedoctors", "prompt-answer")
        .edit("max_new_tokens = 8", "max_new_tokens = 12\nmin_new_tokens = 6");
    train(&project, "style", "42");
    train(&project, "audit", "43");
    let said = project.querl(&["run", "querl.toml"]).ok();
    assert!(said.stdout.contains("mean probability of each style (audit)"), "{said:#?}");

    let episodes = project.rows("run/episodes.jsonl");
    let scored: Vec<&Value> = episodes.iter().filter(|row| row["outcome"]["scored"].is_object()).collect();
    let mut n_classified = 0;
    for row in &scored {
        let components = row["outcome"]["scored"]["components"].as_array().unwrap();
        let value = |name: &str| {
            let found = components.iter().find(|part| part["name"] == name);
            found.unwrap_or_else(|| panic!("no {name} in {components:?}"))["value"].as_f64().unwrap()
        };
        let total = row["outcome"]["scored"]["total"].as_f64().unwrap();
        let expected = value("reward-competition/total") + 0.5 * value("scorer-style/total");
        assert!((total - expected).abs() < 1e-9, "{row}");
        let side = |side: &str| &row["episode"][side]["style"];
        assert!(side("baseline").is_null(), "no reward reads the style of the teacher's rewrite: {row}");
        if !row["episode"]["policy"]["rewrite"].as_str().unwrap_or_default().trim().is_empty() {
            n_classified += 1;
            // The plugin received the distribution of the policy's response, not that of the teacher's.
            assert!((sum(side("policy")) - 1.0).abs() < 1e-6, "{row}");
            for (index, class) in side("policy").as_array().unwrap().iter().enumerate() {
                assert_eq!(class["label"], CLASSES[index]);
                let reported = value(&format!("scorer-style/class_{index}"));
                assert!((reported - class["probability"].as_f64().unwrap()).abs() < 1e-9, "{row}");
            }
        }
    }

    assert!(n_classified > 0, "every answer is blank: {episodes:?}");

    let evaluation: Value = serde_json::from_str(&project.read("run/eval.json")).unwrap();
    let style = &evaluation["style"];
    for judge in ["model", "audit"] {
        for system in ["raw", "teacher", "sft", "rl"] {
            let classes = style[judge]["systems"][system].as_object().unwrap();
            let means: f64 = classes.values().filter_map(|found| found["mean"].as_f64()).sum();
            assert!(classes.len() == 5 && (means - 1.0).abs() < 1e-6, "{judge}, {system}: {classes:?}");
        }
        assert!(style[judge]["shifts"]["rl-sft"]["诚实"]["low"].is_number(), "{style}");
    }
    assert_ne!(style["model"]["systems"]["raw"], style["audit"]["systems"]["raw"], "two models, not one twice");
    assert!(style["n_chars"]["rl"]["mean"].is_number() && style["distinct"]["rl"].is_number(), "{style}");
    assert!(project.read("run/report.html").contains("Shift of style"));
    // A replay with another margin, without the model: the episodes contain its distributions.
    let scorer = format!("{}/scorer-style", plugins());
    let settings = ["--settings", "targets=[\"诚实\"]", "--settings", "margin=0.2"];
    let replay = project.json(&[&["plugin", "replay", "run", "--plugin", &scorer], &settings[..]].concat());
    assert!(replay.is_object(), "{replay}");
    // Regression: calls of a style scorer were not recorded. With the settings of the run they suffice for a replay.
    let without_styles = |row: &Value| {
        let mut row = row.clone();
        row["episode"]["policy"].as_object_mut().unwrap().remove("style");
        assert!(row["calls"].as_array().is_none_or(|calls| calls.len() == 1), "{row}");
        format!("{row}\n")
    };
    project.write("calls.jsonl", &episodes.iter().map(without_styles).collect::<String>());
    let settings =
        ["--settings", "targets=[\"诚实\"]", "--settings", "penalties=[\"售前=0.5\"]", "--settings", "margin=0.5"];
    let replay = project.json(&[&["plugin", "replay", "calls.jsonl", "--plugin", &scorer], &settings[..]].concat());
    let n_scored = replay["counts"]["n_scored_by_both"].as_u64().unwrap();
    assert_eq!((n_scored, &replay["change"]["n_changed"]), (scored.len() as u64, &json!(0)), "{replay}");
    assert!(episodes.iter().all(|row| row["episode"]["policy"].get("audit_style").is_none()), "no reward sees it");
}

/// The example's files, with a classifier and answers after a few steps.
#[test]
fn the_example_of_answers_in_a_style_loads_and_looks_nothing_up() {
    let project = project("");
    train(&project, "style", "42");
    train(&project, "audit", "43");
    let example = repository().join("examples/style");
    let answers = std::fs::read_to_string(example.join("answers.jsonl")).unwrap();
    project.write("answers.jsonl", &answers.lines().take(40).collect::<Vec<_>>().join("\n"));
    let text = std::fs::read_to_string(example.join("answers.toml")).unwrap();
    let places = [
        ("../../runs/style-audit", "audit".to_owned()),
        ("../../runs/style", "style".to_owned()),
        ("../../plugins", plugins()),
        ("../tiny-qwen3", model().display().to_string()),
    ];
    let text = places.iter().fold(text, |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replace(from, to)
    });
    project.write("answers.toml", &text);
    project.querl(&["config", "check", "answers.toml"]).ok();
    let said = project.querl(&["run", "answers.toml", "--out", "run", "--to", "validate"]).ok();
    assert!(said.stdout.contains("not looked up  40") && !said.stdout.contains("found nothing"), "{said:#?}");
    assert!(!said.stderr.contains("found passages is 0"), "{said:#?}");
    project.querl(&["convert", "answers.toml", "--out", "run"]).ok();
    assert!(!project.rows("run/data/train.jsonl").is_empty());
}

#[test]
fn an_unusable_style_model_is_reported_before_any_stage() {
    let project = project(&STYLE.replace("[plugins.style_model]\npath = \"style\"\n", ""));
    let run = ["run", "querl.toml"];
    let missing = "plugins.rewards[1]: `scorer-style` scores style and there is no style model; name a classifier of `querl style train` as \
                   plugins.style_model.path";
    assert_eq!(project.refusal(&run, 2), missing);
    let with = |sets: &[&str]| project.refusal(&with_sets(&run, sets), 2);
    let useless = "plugins.style_model.calibrated is set and plugins.style_model.path is not; name a classifier there, or leave it out";
    assert!(with(&["plugins.style_model.calibrated=true"]).ends_with(useless));
    let nothing = with(&["plugins.style_model.path=\"style\""]);
    assert!(nothing.contains("plugins.style_model.path is \"style\"; no such folder"), "{nothing}");
    let no_classifier = with(&[&format!("plugins.style_model.path={:?}", model().display().to_string())]);
    let expected = "no `id2label` there; a classifier names its classes in `label_mapping.json` or `config.json`";
    assert!(no_classifier.starts_with("plugins.style_model.path: "), "{no_classifier}");
    assert!(no_classifier.ends_with(expected), "{no_classifier}");
    assert!(!project.path("run").exists());

    train(&project, "style", "42");
    let style = "plugins.style_model.path=\"style\"";
    project.edit("targets = [\"诚实\"]", "targets = [\"誠实\"]");
    let expected = "plugins.rewards[1]: `scorer-style`: the style model has no class `誠实`; it has 售前、售后、诚实、有帮助、无伤害; \
                    correct its settings";
    assert_eq!(with(&[style]), expected);
    project.edit("targets = [\"誠实\"]", "targets = [\"诚实\"]");
    std::fs::remove_file(project.path("style/model.safetensors")).unwrap();
    let damaged = with(&[style]);
    assert!(damaged.starts_with("plugins.style_model.path: ") && damaged.contains("model.safetensors"), "{damaged}");
    // Stages that do not call the style model do not need its weights.
    project.querl(&["rewrite", "querl.toml", "--set", style]).ok();
}

#[test]
fn settings_of_a_retrieval_that_is_none_are_refused() {
    let project = Project::new();
    project.edit("kind = \"embedded\"", "kind = \"none\"");
    let expected = "retrieval.knowledge_base is set; retrieval.kind = \"none\" has no use for it, leave it out";
    assert!(project.refusal(&["run", "querl.toml"], 2).ends_with(expected));
}
