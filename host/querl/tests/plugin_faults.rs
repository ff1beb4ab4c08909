//! Plugins that violate the contract in a run: the files about a fault, the message, and prompts that cannot parse the judge's answer.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::json;
use std::path::PathBuf;
use support::{Project, repository};

/// A reward that violates the rule named by its setting `breach`.
fn odd_reward() -> PathBuf {
    querl_plugin::build(&repository().join("tests/guests/odd-reward")).unwrap().component
}

fn project(settings: &str) -> Project {
    let project = Project::new();
    std::fs::copy(odd_reward(), project.path("odd.wasm")).unwrap();
    project.edit(&repository().join("plugins/reward-competition").display().to_string(), "odd.wasm");
    project.write("querl.toml", &(project.read("querl.toml") + &format!("settings = {{ {settings} }}\n")));
    project
}

const EVAL: [&str; 4] = ["eval", "querl.toml", "--set", "eval.systems=[\"raw\", \"teacher\"]"];

#[test]
fn what_a_reward_faulted_at_is_kept_and_a_replay_reproduces_it() {
    let project = project("breach = \"fails_late\", scale = 1.0");
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    let message = project.refusal(&EVAL, 1);
    let file = "run/faults/01-odd-reward.jsonl";
    assert!(message.contains("cannot scale by 1"), "{message}");
    assert!(message.contains(&format!("is in {file}, which `querl plugin replay")), "{message}");
    assert!(project.read(file).lines().count() > 1, "{}", project.read(file));

    let again = project.refusal(&["plugin", "replay", file], 1);
    assert!(again.contains("plugin odd-reward 0.2.0: ") && again.contains("cannot scale by 1"), "{again}");
    let mended = project.json(&["plugin", "replay", file, "--settings", "breach=none"]);
    assert!(mended["fault"].is_null(), "{mended}");
    assert!(mended["recorded_fault"].as_str().unwrap().contains("cannot scale by 1"), "{mended}");
    let other = project.querl(&["plugin", "replay", file, "--plugin", "odd.wasm", "--settings", "scale=0.5"]).ok();
    assert!(other.stdout.contains("no fault with "), "{other:#?}");

    // A second attempt writes a second file.
    project.refusal(&EVAL, 1);
    assert!(project.path("run/faults/02-odd-reward.jsonl").exists());
    project.write("cut.jsonl", &project.read(file)[..200]);
    let message = project.refusal(&["plugin", "replay", "cut.jsonl"], 2);
    assert!(message.starts_with("cut.jsonl"), "{message}");
}

/// Symptom: a filter that faults at the words of a text got `not_recorded` in a replay and in a benchmark.
#[test]
fn filters_get_the_words_of_their_texts_in_a_replay_and_a_benchmark() {
    let project = Project::new();
    let folder = repository().join("tests/guests/guest-filter-words").display().to_string();
    let header = json!({ "plugin": "guest-filter-words", "version": "0.2.0", "path": folder, "role": "filter", "message": "panicked",
                         "settings": {} });
    let sample = json!({ "id": "a", "original_query": "蓝鲸海藻能吃吗", "rewritten_query": "蓝鲸海藻", "context": {}, "hits": [] });
    std::fs::create_dir_all(project.path("run/faults")).unwrap();
    let file = "run/faults/01-guest-filter-words.jsonl";
    project.write(file, &format!("{}\n{sample}\n", json!({ "fault": header })));
    project.querl(&["plugin", "replay", file]).ok();
    // With the dictionary of the run it is one word.
    project.write("words.txt", "蓝鲸海藻\n");
    project.edit("[retrieval]", "[retrieval]\nuser_dictionary = \"words.txt\"");
    let resolved = project.querl(&["config", "check", "querl.toml"]).ok().stdout;
    project.write("run/config.resolved.toml", &resolved);
    let again = project.refusal(&["plugin", "replay", file], 1);
    assert!(again.contains("has the word 蓝鲸海藻"), "{again}");
    project.querl(&["plugin", "bench", &folder, "--batch", "2"]).ok();
}

/// Symptom: totals of 1e308 stopped a training with the advice to lower the learning rate.
#[test]
fn absurd_numbers_and_too_many_names_blame_the_plugin() {
    for (breach, said) in [
        ("huge_range", "declares the range -1e308 to 1e308; expected bounds of at most 1e9 in magnitude"),
        ("huge_component", "component `tokens` is 1e308; expected at most 1e18 in magnitude"),
        ("many_components", "the score has 65 components; expected at most 64"),
        ("many_names", "is one name more than the 256 that a plugin may use in a run"),
    ] {
        let project = project(&format!("breach = \"{breach}\""));
        let said_of = project.querl(&["run", "querl.toml", "--to", "convert", "-q"]);
        let said_of = if said_of.code == Some(0) { project.querl(&[&EVAL[..], &["-q"]].concat()) } else { said_of };
        assert_ne!(said_of.code, Some(0), "{breach}");
        assert!(said_of.stderr.contains("plugin odd-reward 0.2.0") && said_of.stderr.contains(said), "{said_of:#?}");
    }
    let project = Project::new();
    project.write("querl.toml", &(project.read("querl.toml") + "weight = 1e300\n"));
    let message = project.refusal(&["config", "check", "querl.toml"], 2);
    assert!(message.contains("weight"), "{message}");
}

/// Symptom: every judgement of a run was dropped, because the prompt plugin expected another form of answers.
#[test]
fn prompts_that_cannot_read_the_rubric_are_found_by_the_check() {
    let project = Project::new();
    let component = querl_plugin::build(&repository().join("tests/guests/odd-prompt")).unwrap().component;
    std::fs::copy(component, project.path("odd.wasm")).unwrap();
    project.edit(&repository().join("plugins/tenant-fivedoctors").display().to_string(), "odd.wasm");
    let message = project.refusal(&["config", "check", "querl.toml"], 2);
    let expected = "plugins.prompt: plugin odd-prompt 0.2.0 cannot read the answers of judge.kind = \"rubric\"";
    assert!(message.starts_with(expected), "{message}");
    assert!(message.contains("{\"综合得分\":4.5,\"评分理由\":"), "{message}");
    project.querl(&["config", "check", "querl.toml", "--set", "judge.kind=none"]).ok();
}

/// Symptom: a prompt plugin made by `querl plugin new` could not parse any judgement of the rubric.
#[test]
fn templates_of_prompts_have_a_golden_case_with_the_answer_of_the_rubric() {
    let answer = querl_data::rubric_answer(4.5, "产品准确 2.0；意图明确 1.1");
    for language in ["rust", "python", "javascript"] {
        let path = repository().join(format!("sdk/{language}/templates/prompt/golden/cases.jsonl"));
        let text = std::fs::read_to_string(path).unwrap();
        let cases: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let case = cases.iter().find(|case| case["parse_judgement"] == answer.as_str());
        assert_eq!(case.map(|case| &case["expect"]["score"]), Some(&4.5.into()), "{language}");
    }
}

/// Symptom: loading a new style scorer failed, because its plugin.toml did not declare the style model.
#[test]
fn templates_of_style_scorers_declare_the_style_model() {
    for language in ["rust", "python", "javascript"] {
        let path = repository().join(format!("sdk/{language}/templates/style-scorer/plugin.toml"));
        let manifest = std::fs::read_to_string(path).unwrap();
        assert!(manifest.contains("\nhost_functions = [\"style-model\"]\n"), "{language}: {manifest}");
    }
}

/// Symptom: under `ulimit -v` of 8 GiB no plugin could be loaded.
#[cfg(target_os = "linux")]
#[test]
fn plugins_run_under_a_limit_of_address_space_with_equal_results() {
    let project = Project::new();
    let limited = |args: &[&str]| project.querl_after("ulimit -v 8388608; export RAYON_NUM_THREADS=2", args);
    let doctor = limited(&["doctor"]);
    assert!(doctor.stdout.contains("the plugin host starts without its pool of memory"), "{doctor:#?}");
    let free = project.querl(&["doctor"]);
    assert!(free.stdout.contains("the plugin host starts; compiled plugins"), "{free:#?}");
    let dataset = |out: &str| project.read(&format!("{out}/data/train.jsonl"));
    project.querl(&["run", "querl.toml", "--to", "convert", "--out", "free"]).ok();
    limited(&["run", "querl.toml", "--to", "convert", "--out", "limited"]).ok();
    assert_eq!(dataset("free"), dataset("limited"));
    let bundle = repository().join("plugins/reward-competition").display().to_string();
    limited(&["plugin", "test", &bundle, "--repeats", "3"]).ok();
}
