//! `querl plan` through the command line: facts with advice before and after the data stages, and predictions for a cluster.
#![allow(clippy::unwrap_used)]

mod support;

use querl_data::read_spend;
use querl_faulty::{Answer, FaultyServer};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use support::results::files_below;
use support::{Project, repository};

/// The level of each topic.
fn levels(plan: &Value) -> BTreeMap<String, String> {
    let text = |advice: &Value, key: &str| advice[key].as_str().unwrap().to_owned();
    let advice = plan["advice"].as_array().unwrap();
    advice.iter().map(|advice| (text(advice, "topic"), text(advice, "level"))).collect()
}

/// Contents of all files below a folder.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    files_below(folder).into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

#[test]
fn before_any_stage_the_table_and_the_model_are_judged_and_nothing_is_written() {
    let project = Project::new();
    let plan = project.json(&["plan", "querl.toml"]);
    assert_eq!(plan["data"]["queries"]["n_texts"], 40, "{plan}");
    assert_eq!(plan["data"]["queries"]["language"], "Chinese", "{plan}");
    assert_eq!(plan["data"]["passage_language"], "zh", "{plan}");
    // Regression: titles, which are indexed, were not read.
    let passages = repository().join("examples/fivedoctors/knowledge_base.jsonl");
    let n_chars: Vec<usize> =
        querl_data::read_passages(&passages).unwrap().iter().map(|one| one.full_text().chars().count()).collect();
    let mean = n_chars.iter().sum::<usize>() as f64 / n_chars.len() as f64;
    assert!((plan["data"]["passages"]["mean_chars"].as_f64().unwrap() - mean).abs() < 1e-6, "{plan}");
    let rows: Vec<u64> = plan["data"]["n_rows"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert_eq!(rows.iter().sum::<u64>(), 40, "{plan}");
    let levels = levels(&plan);
    // The model of the tests has random weights.
    assert_eq!(levels["base model"], "bad", "{plan}");
    assert_eq!((levels["data"].as_str(), levels["stages"].as_str()), ("weak", "unknown"), "{plan}");
    assert!(plan["teacher"].is_null() && plan["rollout"].is_null(), "{plan}");
    assert_eq!(plan["test"]["source"], "worst_case", "{plan}");
    assert!(!project.path("run").exists());

    let text = project.querl(&["plan", "querl.toml", "--no_model"]).ok().stdout;
    assert!(text.starts_with("!  data       40 queries of ") && !text.contains("nats"), "{text}");
    assert!(text.contains("run `querl run CONFIG --to convert`") && text.ends_with("a gain is unlikely)\n"), "{text}");
}

#[test]
fn after_the_data_stages_teacher_and_rewards_are_judged_and_the_run_is_unchanged() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    let before = files(&project.path("run"));
    let plan = project.json(&["plan", "querl.toml"]);
    let train = &plan["teacher"]["splits"][0];
    assert_eq!((train["split"].as_str(), plan["teacher"]["n_failed"].as_u64()), (Some("train"), Some(0)), "{plan}");
    let quality = |side: &str| train[side]["quality"].as_f64().unwrap();
    assert!(quality("oracle") >= quality("raw").max(quality("teacher")), "{plan}");
    let rollout = &plan["rollout"];
    assert_eq!((rollout["policy"].as_str(), rollout["n_groups"].as_u64()), (Some("base"), Some(8)), "{plan}");
    assert_eq!(rollout["n_samples"], 32, "4 of each query, where rl.n_samples is 1: {plan}");
    assert!(rollout["mean_reward"].is_number() || rollout["dropped_share"] == 1.0, "{plan}");
    let levels = levels(&plan);
    assert!(levels["base model"] == "bad" && !levels.contains_key("stages"), "{plan}");
    let advice = plan["advice"].as_array().unwrap().iter().find(|advice| advice["topic"] == "rollout").unwrap();
    assert!(advice["action"].as_str().unwrap().starts_with("see the line `base model`"), "{plan}");
    assert!(files(&project.path("run")) == before, "the plan wrote something");

    let of_folder = project.json(&["plan", "run", "--no-rollout", "--no-model"]);
    assert_eq!(of_folder["teacher"], plan["teacher"]);
    assert!(of_folder["rollout"].is_null() && of_folder["base_model"].is_null(), "{of_folder}");
    let refused = project.refusal(&["plan", "run", "--out", "other"], 2);
    assert_eq!(refused, "run: a run's folder is its own run directory; leave out --out");
}

/// Regression: commands that open no model searched for it on a hub and failed.
#[test]
fn before_there_is_a_model_the_data_and_retrieval_are_judged_without_it() {
    let project = Project::new();
    let model = ["--set", "model.path=none/model"];
    let args = [&["plan", "querl.toml", "--no_model"], &model[..]].concat();
    let plan = project.json(&args);
    assert_eq!((levels(&plan)["tokenizer"].as_str(), &plan["tokenizer"]), ("unknown", &Value::Null), "{plan}");
    assert!(plan.to_string().contains("leave out --no_model to download it, or make it"), "{plan}");
    let checked = project.querl(&[&["rag", "check", "querl.toml"], &model[..]].concat()).ok();
    assert!(checked.stdout.contains("ok  answers  3 of 3 queries were answered"), "{checked:#?}");
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    let plan = project.json(&args);
    assert!(plan["teacher"].is_object() && plan["rollout"].is_null(), "{plan}");
    let mut hub = project.command(&[&["rewrite", "querl.toml", "-q"], &model[..]].concat());
    let refused = hub.env("HF_HUB_OFFLINE", "1").env("HF_HOME", project.path("hf")).env_remove("HF_HUB_CACHE").output();
    let refused = String::from_utf8(refused.unwrap().stderr).unwrap();
    assert!(refused.contains("run `querl model corpus` and `querl model pretrain` first"), "{refused}");
}

#[test]
fn data_of_other_settings_are_named() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    let args = ["plan", "querl.toml", "--no_model", "--no_rollout"];
    let plan = project.json(&args);
    assert_eq!((&plan["changed_since_data"], levels(&plan).get("stages")), (&json!([]), None), "{plan}");
    let set = ["--set", "data.split_seed=7", "--set", "retrieval.top_k=9", "--set", "sft.epochs=9"];
    let plan = project.json(&[&args[..], &set].concat());
    assert_eq!(plan["changed_since_data"], json!(["data.split_seed", "retrieval.top_k"]), "{plan}");
    assert_eq!(levels(&plan)["stages"], "weak", "{plan}");
    let queries = project.read("queries.jsonl");
    project.write("queries.jsonl", &queries.replace("\n", " \n"));
    assert_eq!(project.json(&args)["changed_since_data"], json!(["query table"]));
}

#[test]
fn lookups_without_a_trial_rollout_are_in_the_spend_file() {
    let server = FaultyServer::start(|_| {
        let hit = json!({"id": "p1", "text": "文", "reranker_score": 0.9});
        Answer::json(200, &json!({"status": 200, "data": {"recall": [hit]}})).into()
    });
    let project = Project::new();
    let retrieval = format!("kind = \"http\"\nurl = \"{}/api/chat/general_rag\"", server.url());
    project.edit("kind = \"embedded\"", &retrieval);
    project.edit("path = \"teacher.jsonl\"", "path = \"teacher.jsonl\"\n[cache]\nenabled = false");
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    let before = server.n_requests();
    project.querl(&["plan", "querl.toml", "--no_model", "--no_rollout"]).ok();
    let files: Vec<_> = std::fs::read_dir(project.path("run/scoring")).unwrap().flatten().collect();
    assert_eq!(files.len(), 1);
    let spent = &read_spend(&files[0].path()).unwrap()["scoring"]["retrieval"];
    assert!(spent.calls > 0 && spent.calls == (server.n_requests() - before) as u64, "{spent:?}");
}

#[test]
fn a_cluster_is_predicted_with_memory_phases_and_hours() {
    let project = Project::new();
    let text = project.querl(&["plan", "querl.toml", "--on", "2x8xH100", "--model", "Qwen2.5-7B"]).ok().stdout;
    assert!(text.starts_with("on 2x8xH100: 7.62 billion weights, 16 GPU(s)\n"), "{text}");
    for part in ["memory per GPU: ", "rollout decode", "critic update", "2 steps take", "GPU(s) hardly help: "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(text.contains("  assumes rl.algorithm = \"ppo\", with a critic of the same size, "), "{text}");
    let args = ["plan", "querl.toml", "--on", "4090", "--model", "qwen3-32b"];
    let text = project.querl(&args).ok().stdout;
    assert!(text.contains("does not fit on up to 1024 of these GPUs either; ") && !text.contains("hours"), "{text}");
    assert!(project.json(&args)["hours"].is_null());
    let own = project.querl(&["plan", "querl.toml", "--on", "h100"]).ok().stdout;
    assert!(own.lines().next().unwrap().contains(" million weights, 1 GPU(s)"), "{own}");
    let own = project.json(&["plan", "querl.toml", "--on", "h100"]);
    assert_eq!(own["cluster"]["n_per_node"], 1, "{own}");
    assert_eq!(own["size"]["is_measured"], false, "{own}");
    let seconds = own["step"]["seconds"].as_f64().unwrap();
    assert!((own["hours"].as_f64().unwrap() - 2.0 * seconds / 3600.0).abs() < 1e-9, "{own}");
}

#[test]
fn gpus_and_models_that_are_not_known_are_refused_with_what_was_expected() {
    let project = Project::new();
    let refused = project.refusal(&["plan", "querl.toml", "--on", "8xV100"], 2);
    let expected = "--on: `8xV100` names no known GPU; expected NxMxGPU, such as 2x8xH100: nodes, GPUs of a node, one of \
                    A100-40, A100-80, H100, H200, L40S, 4090, B200, MI300X";
    assert_eq!(refused, expected);
    let refused = project.refusal(&["plan", "querl.toml", "--on", "H100", "--model", "none"], 2);
    assert!(refused.starts_with("--model none: no such file or shape; expected a config.json"), "{refused}");
    let refused = project.refusal(&["plan", "nowhere.toml"], 2);
    assert!(refused.starts_with("nowhere.toml: no such file"), "{refused}");
}

#[test]
fn a_run_begins_with_a_summary_of_the_plan() {
    let project = Project::new();
    let first = project.querl(&["run", "querl.toml", "--to", "validate"]).ok();
    let (before, _) = first.stderr.split_once("rewrite: running").unwrap();
    let summary: Vec<&str> = before.lines().filter(|line| line.contains(" plan: ")).collect();
    assert!((3..=4).contains(&summary.len()), "{first:#?}");
    // Symptom: advice that a gain is less likely had the level INFO and the mark `!`.
    assert!(summary[0].contains("WARN plan: data (weak): 40 queries of "), "{first:#?}");
    let [.., test, last] = summary[..] else { panic!("{first:#?}") };
    assert!(test.contains("WARN plan: test (weak): standard error"), "{first:#?}");
    assert!(last.contains("INFO plan: `querl plan querl.toml` says what to do"), "{first:#?}");
    // Symptom: the advice was logged again at each resume.
    let again = project.querl(&["run", "querl.toml", "--to", "validate"]).ok();
    assert!(!again.stderr.contains(" plan: "), "{again:#?}");
    let quiet = project.querl(&["run", "querl.toml", "--to", "validate", "-q"]).ok();
    assert_eq!(quiet.stderr, "");
}
