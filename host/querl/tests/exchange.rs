//! `querl export verl`, `trl`, `swift` and `openrlhf`, and `querl import`, through the command line: a run is exported to another engine, and
//! its adapter is imported again.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use support::results::copy;
use support::tenants::project;
use support::{Project, model};

/// Writes the output of another engine: the SFT adapter with other weights, and a log of two steps.
fn train_elsewhere(project: &Project) {
    copy(&project.path("run/sft/best"), &project.path("trained"));
    halve(&project.path("trained/adapter_model.safetensors"));
    let history = json!({ "log_history": [{ "step": 1, "reward": 0.25 }, { "step": 2, "reward": 0.5, "epoch": 1.0 }] });
    project.write("trained/trainer_state.json", &history.to_string());
}

/// Halves all weights of an f32 safetensors file (header length, header, values).
fn halve(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let n_header = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..8 + n_header]).unwrap();
    let mut tensors = header.iter().filter(|(name, _)| *name != "__metadata__");
    assert!(tensors.all(|(_, tensor)| tensor["dtype"] == "F32"), "{header:?}");
    for value in bytes[8 + n_header..].chunks_exact_mut(4) {
        let halved = f32::from_le_bytes([value[0], value[1], value[2], value[3]]) * 0.5;
        value.copy_from_slice(&halved.to_le_bytes());
    }
    std::fs::write(path, bytes).unwrap();
}

fn fact(project: &Project, name: &str) -> Option<Value> {
    let ledger: Value = serde_json::from_str(&project.read("run/stages.json")).unwrap();
    let facts = ledger["stages"]["rl"]["facts"].as_array().unwrap().clone();
    facts.into_iter().find(|fact| fact[0] == name).map(|fact| fact[1].clone())
}

/// Symptom: the figures of the earlier model were presented as those of the imported one.
fn check_outdated(project: &Project) {
    let outdated = "best of rl changed after the evaluation; run `querl eval` again";
    let reported = project.querl(&["report", "run"]).ok();
    assert!(reported.stdout.starts_with(&format!("{outdated}\n")), "{reported:#?}");
    assert!(reported.stderr.contains(&format!("warning: run: {outdated}\n")), "{reported:#?}");
    assert!(project.read("run/report.html").contains("best of rl changed after the evaluation"));
    assert_eq!(project.json(&["report", "run"])["outdated"], json!([outdated]));
    let watched = project.querl(&["watch", "run", "--once"]).ok().stdout;
    assert!(watched.contains("eval outdated") && watched.contains("best of rl changed"), "{watched}");
    assert!(!watched.contains("eval done"), "{watched}");
    assert_eq!(project.refusal(&["release", "check", "run", "--against", "raw"], 2), format!("run: {outdated}"));
    copy(&project.path("run"), &project.path("twin"));
    let pooled = project.querl(&["report", "run", "twin", "--pool"]).ok().stdout;
    let differing = "run and twin have the same seed (42)";
    assert!(pooled.starts_with(&format!("run: {outdated}\ntwin: {outdated}\n{differing}\n2 runs, ")), "{pooled}");
}

#[test]
fn a_run_is_exported_to_trl_and_its_adapter_is_imported_and_evaluated() {
    let project = project();
    let exported = project.json(&["export", "trl", "run", "--out", "new/trl"]);
    assert_eq!(exported["has_adapter"], true, "{exported}");
    assert_eq!(exported["outside"], json!([model()]), "{exported}");
    let rows = project.rows("new/trl/train.jsonl");
    assert_eq!(exported["n_train"], rows.len());
    let query: Value = serde_json::from_str(rows[0]["querl"].as_str().unwrap()).unwrap();
    assert!(!query["query"].as_str().unwrap().is_empty() && query["baseline"].is_string(), "{query}");
    assert_eq!(rows[0]["prompt"].as_array().unwrap().last().unwrap()["role"], "user");
    project.querl(&["config", "check", "new/trl/querl.toml"]).ok();
    let config = project.read("new/trl/querl.toml");
    assert!(config.contains("[data.dataset]\ntrain = \"train.jsonl\"\n") && !config.contains("\ninput = "), "{config}");
    let script = project.read("new/trl/grpo.py");
    assert!(script.contains("    max_completion_length=8,\n") && !script.contains('@'), "{script}");
    assert!(project.path("new/trl/adapter/adapter_model.safetensors").is_file());
    assert!(project.read("new/trl/plugins/querl.lock").contains("role = \"reward\""));

    train_elsewhere(&project);
    let imported = project.json(&["import", "peft", "trained", "--run", "run"]);
    assert_eq!(imported["n_steps_with_metrics"], 2, "{imported}");
    assert_eq!(imported["previous"], "run/previous/rl-before-import-1", "{imported}");
    assert!(project.path("run/previous/rl-before-import-1/finished/files/rl/best/adapter_config.json").is_file());
    assert_eq!(fact(&project, "imported"), Some(json!("peft")));
    let from = fact(&project, "from").unwrap();
    assert!(Path::new(from.as_str().unwrap()).is_absolute(), "{from}");
    let metrics: Vec<Value> =
        project.rows("run/metrics.jsonl").into_iter().filter(|row| row["stage"] == "rl").collect();
    assert_eq!(metrics[1], json!({ "stage": "rl", "step": 2, "reward": 0.5, "epoch": 1.0 }));
    assert_eq!(metrics.len(), 2);
    check_outdated(&project);
    let evaluated = project.querl(&["eval", "run/config.resolved.toml", "--out", "run"]).ok();
    assert!(evaluated.stderr.contains("best of rl changed") && evaluated.stdout.contains("rl"), "{evaluated:#?}");
    let reported = project.querl(&["report", "run"]).ok();
    assert!(!reported.stdout.contains("after the evaluation"), "{reported:#?}");
    // A later import keeps both earlier results. An adapter of another base is reported.
    let mut settings: Value = serde_json::from_str(&project.read("trained/adapter_config.json")).unwrap();
    settings["base_model_name_or_path"] = "some/other-model".into();
    project.write("trained/adapter_config.json", &settings.to_string());
    let again = project.querl(&["import", "peft", "trained", "--run", "run"]).ok();
    let expected = "base_model_name_or_path is some/other-model, and the base of this run is ";
    assert!(again.stderr.contains(expected), "{again:#?}");
    assert!(again.stdout.contains("run/previous/rl-before-import-2"), "{again:#?}");
    assert_eq!(fact(&project, "its base model"), Some(json!("some/other-model")));
}

#[test]
fn responses_that_are_edits_are_counted_and_said_at_export() {
    let project = project();
    let run = ["run", "querl.toml", "--to", "convert", "--out", "edits", "--set", "data.rewrite_form=edit", "--json"];
    let output = project.querl(&run).ok();
    let line = "convert: targets are edits of the query (data.rewrite_form = \"edit\"): `=` keeps the query, ";
    assert!(output.stderr.contains(line), "{output:#?}");
    let converted: Value = serde_json::from_str(&output.stdout).unwrap();
    let facts = &converted["stages"][2]["facts"];
    let count = |name: &str| facts[name].as_u64().unwrap();
    let forms = ["- keep the query", "- add to the query", "- expand the query", "- replace the query"].map(count);
    assert_eq!(forms.iter().sum::<u64>(), count("kept"), "{facts}");
    let train = project.rows("edits/data/train.jsonl");
    let is_kept = |row: &&Value| row["messages"].as_array().unwrap().last().unwrap()["role"] == "assistant";
    assert_eq!(train.iter().filter(is_kept).count() as u64, count("kept rows of train, for sft"), "{facts}");
    let rows: Vec<Value> =
        ["train", "val", "test"].iter().flat_map(|split| project.rows(&format!("edits/data/{split}.jsonl"))).collect();
    let targets = rows.iter().filter_map(|row| row["messages"].as_array().unwrap().last());
    let targets =
        targets.filter(|message| message["role"] == "assistant").map(|message| message["content"].as_str().unwrap());
    assert_eq!(targets.filter(|target| *target == "=").count() as u64, forms[0]);
    let again = project.querl(&["convert", "querl.toml", "--out", "edits"]).ok();
    assert!(again.stderr.contains("convert: running (data.rewrite_form changed)\n"), "{again:#?}");

    project.querl(&run).ok();
    // Symptom: targets made by an older version with fewer forms of edits were treated as up to date.
    let mut older: Value = serde_json::from_str(&project.read("edits/stages.json")).unwrap();
    older["stages"]["convert"]["inputs"].as_object_mut().unwrap().remove("forms of edits in targets").unwrap();
    project.write("edits/stages.json", &older.to_string());
    let redone = project.querl(&run).ok();
    assert!(redone.stderr.contains("convert: running (forms of edits in targets changed)\n"), "{redone:#?}");
    for engine in ["trl", "swift", "openrlhf"] {
        let exported = project.json(&["export", engine, "edits", "--out", engine]);
        let note = exported["notes"][0].as_str().unwrap();
        assert!(note.starts_with("responses are edits of the query (data.rewrite_form = \"edit\"): "), "{exported}");
        assert!(project.read(&format!("{engine}/mapping.md")).contains(note), "{engine}");
        assert!(project.read(&format!("{engine}/querl.toml")).contains("rewrite_form = \"edit\""), "{engine}");
    }
}

/// Regression: the next result of the stage removed a finished result that an import had moved to `previous/rl`.
#[test]
fn an_import_keeps_a_finished_result_that_an_unfinished_run_had_set_aside() {
    let project = project();
    train_elsewhere(&project);
    // A, the finished result of the run, is in previous/rl/finished. B is the imported result, unfinished and with a state to resume from.
    project.querl(&["import", "peft", "trained", "--run", "run"]).ok();
    let first = std::fs::read(project.path("run/previous/rl-before-import-1/finished/entry.json")).unwrap();
    std::fs::rename(project.path("run/previous/rl-before-import-1"), project.path("run/previous/rl")).unwrap();
    let mut ledger: Value = serde_json::from_str(&project.read("run/stages.json")).unwrap();
    ledger["stages"]["rl"]["finished"] = false.into();
    project.write("run/stages.json", &ledger.to_string());
    std::fs::create_dir_all(project.path("run/rl/state")).unwrap();
    project.write("run/rl/state/any", "");

    let imported = project.json(&["import", "peft", "trained", "--run", "run"]);
    assert_eq!(imported["previous"], "run/previous/rl-before-import-1", "{imported}");
    assert!(project.path("run/previous/rl-before-import-1/stopped/entry.json").is_file());
    project.querl(&["rl", "run/config.resolved.toml", "--out", "run", "--set", "rl.learning_rate=0.002"]).ok();
    let kept = std::fs::read(project.path("run/previous/rl-before-import-1/finished/entry.json")).unwrap();
    assert_eq!(kept, first);
    assert!(project.path("run/previous/rl-before-import-1/finished/files/rl/best/adapter_config.json").is_file());
}

#[test]
fn a_checkpoint_of_verl_is_imported_with_the_metrics_of_the_exported_folder() {
    let project = project();
    train_elsewhere(&project);
    let checkpoint = "moved/checkpoints/global_step_1";
    copy(&project.path("trained"), &project.path(&format!("{checkpoint}/merged/lora_adapter")));
    std::fs::remove_file(project.path(&format!("{checkpoint}/merged/lora_adapter/trainer_state.json"))).unwrap();
    let import = || project.querl(&["import", "verl", checkpoint, "--run", "run"]).ok().stdout;
    let without = import();
    assert!(without.contains("no metrics.jsonl or trainer_state.json was found"), "{without}");
    let line = |step: u64| json!({ "step": step, "data": { "actor/pg_loss": 0.25 } });
    project.write("moved/metrics.jsonl", &format!("{}\n{}\n", line(1), line(2)));
    let with = import();
    assert!(with.contains("with metrics of 1 steps from "), "{with}");
    assert_eq!(fact(&project, "last step"), Some(json!(1)));
}

#[test]
fn a_run_is_exported_to_verl_with_scripts_and_parquet() {
    let project = project();
    let args = ["export", "verl", "run", "--out", "verl", "--gpus", "2", "--base", "copy"];
    let exported = project.json(&args);
    assert_eq!((&exported["outside"], &exported["n_val"].is_u64()), (&json!([]), &true), "{exported}");
    assert!(std::fs::read(project.path("verl/train.parquet")).unwrap().starts_with(b"PAR1"));
    assert!(project.path("verl/model/model.safetensors").is_file());
    project.querl(&["config", "check", "verl/querl.toml"]).ok();
    let script = project.read("verl/train.sh");
    for setting in [
        "    'algorithm.adv_estimator=gae' \\\n",
        "    'data.train_files=\"'\"$HERE\"'/train.parquet\"' \\\n",
        "    'trainer.n_gpus_per_node=2' \\\n",
        "MODEL=\"${MODEL:-$HERE/model}\"",
    ] {
        assert!(script.contains(setting), "{setting}: {script}");
    }
    // Regression: a line `querl`, a name that is not registered on the package index, so that anybody could publish a package there.
    let requirements = project.read("verl/requirements.txt");
    let own = requirements.lines().filter(|line| line.contains("querl"));
    assert!(own.clone().count() > 0 && own.clone().all(|line| line.starts_with('#')), "{requirements}");
    for script in ["train.sh", "ray.sh", "merge.sh"] {
        let checked = std::process::Command::new("bash").arg("-n").arg(project.path("verl").join(script)).status();
        assert!(checked.unwrap().success(), "{script}");
    }
    // Symptom: hydra parsed the folder's name as override syntax, or resolved it as an interpolation.
    for name in ["a\"b", "${y}"] {
        std::fs::rename(project.path("verl"), project.path(name)).unwrap();
        let refused = std::process::Command::new("bash").arg(project.path(name).join("train.sh")).output().unwrap();
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(2) && message.contains("which verl's settings cannot hold"), "{message}");
        std::fs::rename(project.path(name), project.path("verl")).unwrap();
    }
    let mapping = project.read("verl/mapping.md");
    assert!(mapping.contains("| `rl.kl_target` | `0.0` | none |") && !mapping.contains('@'), "{mapping}");
}

/// Placeholders `@NAME@` that were not replaced in a template.
fn place_holders(text: &str) -> Vec<&str> {
    let is_name = |part: &&str| !part.is_empty() && part.chars().all(|c| c.is_ascii_uppercase());
    text.split('@').skip(1).filter(is_name).collect()
}

fn check_script(project: &Project, script: &str) {
    let checked = std::process::Command::new("bash").arg("-n").arg(project.path(script)).status();
    assert!(checked.unwrap().success(), "{script}");
    assert!(place_holders(&project.read(script)).is_empty(), "{script}: {}", project.read(script));
}

#[test]
fn a_run_is_exported_to_ms_swift_with_its_plugin() {
    let project = project();
    let exported = project.json(&["export", "swift", "run", "--out", "swift"]);
    let rows = project.rows("swift/train.jsonl");
    assert_eq!((&exported["has_adapter"], &exported["n_train"]), (&json!(true), &json!(rows.len())), "{exported}");
    assert_eq!(rows[0]["messages"].as_array().unwrap().last().unwrap()["role"], "user");
    let query: Value = serde_json::from_str(rows[0]["querl"].as_str().unwrap()).unwrap();
    assert!(query["baseline"].is_string() && rows[0].get("prompt").is_none(), "{query}");
    check_script(&project, "swift/train.sh");
    let script = project.read("swift/train.sh");
    for setting in [
        "reward_funcs querl",
        "max_completion_length 8",
        "kl_in_reward true",
        "model_type qwen3",
        "template qwen3",
        "enable_thinking true",
    ] {
        assert!(script.contains(&format!("    --{setting} \\\n")), "{setting}: {script}");
    }
    assert!(project.read("swift/plugin.py").contains("import querl.integrations.swift"));
    for page in ["swift/README.md", "swift/mapping.md"] {
        assert!(place_holders(&project.read(page)).is_empty(), "{page}");
    }
    project.querl(&["config", "check", "swift/querl.toml"]).ok();
}

#[test]
fn prompts_without_the_date_of_the_day_are_noted_at_export() {
    let project = project();
    project.copy_model("dated");
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}";
    project.write("dated/chat_template.jinja", template);
    let [own, dated] = [model().to_owned(), project.path("dated")].map(|path| path.display().to_string());
    project.write("run/config.resolved.toml", &project.read("run/config.resolved.toml").replace(&own, &dated));
    for engine in ["trl", "swift", "openrlhf"] {
        let exported = project.json(&["export", engine, "run", "--out", engine]);
        let note = exported["notes"][0].as_str().unwrap();
        assert!(note.starts_with("the chat template asks for today's date; querl renders it without"), "{exported}");
        assert!(project.read(&format!("{engine}/mapping.md")).contains(note), "{engine}");
    }
}

#[test]
fn a_run_is_exported_to_openrlhf_with_its_reward_server() {
    let project = project();
    let exported = project.json(&["export", "openrlhf", "run", "--out", "openrlhf", "--base", "copy"]);
    assert_eq!(exported["outside"], json!([]), "{exported}");
    let notes: Vec<&str> = exported["notes"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(notes.iter().any(|note| note.contains("train.sh merges the SFT adapter")), "{notes:?}");
    let rows = project.rows("openrlhf/train.jsonl");
    assert!(rows[0]["prompt"].is_array() && rows[0]["querl"].is_string(), "{}", rows[0]);
    for script in ["openrlhf/train.sh", "openrlhf/reward.sh"] {
        check_script(&project, script);
    }
    let script = project.read("openrlhf/train.sh");
    for line in ["    --algo.advantage.estimator gae \\\n", "MODEL=\"${MODEL:-$HERE/model}\"", "--data.label_key querl"]
    {
        assert!(script.contains(line), "{line}: {script}");
    }
    project.querl(&["config", "check", "openrlhf/querl.toml"]).ok();
    for page in ["openrlhf/README.md", "openrlhf/mapping.md"] {
        assert!(place_holders(&project.read(page)).is_empty(), "{page}");
    }
}

#[test]
fn what_cannot_be_exported_is_refused_and_leaves_nothing() {
    let (project, without_data) = (project(), Project::new());
    let refused = |args: &[&str]| project.refusal(&[&["export"], args].concat(), 2);
    assert_eq!(refused(&["trl", "run", "--out", "other"]), "other: is not empty; name a new folder");
    assert!(refused(&["trl", "releases", "--out", "new"]).contains("releases: no such file"));
    let gpus = refused(&["verl", "run", "--out", "new", "--gpus", "8"]);
    assert!(gpus.contains("has 4 responses, which verl cannot divide evenly over 8 GPUs"), "{gpus}");
    let samples = refused(&["verl", "run", "--out", "new", "--algorithm", "grpo"]);
    assert!(samples.contains("rl.n_samples is 1"), "{samples}");
    assert!(!project.path("new").exists());
    let missing = without_data.refusal(&["export", "trl", "querl.toml", "--out", "new"], 2);
    assert_eq!(missing, "run/data/train.jsonl: not there yet; run `querl convert` first, or `querl run`");
}

#[test]
fn an_adapter_that_cannot_be_imported_changes_nothing() {
    let project = project();
    train_elsewhere(&project);
    let before = (project.read("run/stages.json"), project.read("run/metrics.jsonl"));
    let refused = |kind: &str, folder: &str| project.refusal(&["import", kind, folder, "--run", "run"], 2);
    assert!(refused("peft", "run/data").contains("has no adapter_config.json"));
    assert!(refused("verl", "run/data").contains("verl.model_merger merge"));
    let other = project.refusal(&["import", "peft", "trained", "--run", "trained"], 2);
    assert!(other.starts_with("trained: not a run's folder"), "{other}");
    let mut config: Value = serde_json::from_str(&project.read("trained/adapter_config.json")).unwrap();
    config["lora_alpha"] = 0.into();
    project.write("trained/adapter_config.json", &config.to_string());
    assert!(refused("peft", "trained").contains("lora_alpha is 0; with it the adapter changes nothing"));
    // The model that train.sh of `querl export openrlhf` makes of base and SFT adapter.
    (config["lora_alpha"], config["base_model_name_or_path"]) = (8.into(), "/elsewhere/served/merged".into());
    project.write("trained/adapter_config.json", &config.to_string());
    assert!(refused("peft", "trained").contains("a model that an adapter was merged into"));
    // Another rank than that of the weights.
    config["r"] = 2.into();
    project.write("trained/adapter_config.json", &config.to_string());
    assert!(refused("peft", "trained").contains("the rank is not the configuration's"));
    assert_eq!((project.read("run/stages.json"), project.read("run/metrics.jsonl")), before);
}
