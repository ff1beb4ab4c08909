//! Commands that do not use a run.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeSet;
use std::process::Stdio;
use support::Project;
use support::process::{interrupted, signal};

#[test]
fn config_check_prints_every_value_in_force() {
    let project = Project::new();
    let said = project.querl(&["config", "check", "querl.toml", "--set", "rl.gamma=0.5", "--out", "there"]).ok();
    let table: toml::Table = said.stdout.parse().unwrap();
    assert_eq!(table["rl"]["gamma"].as_float(), Some(0.5));
    assert_eq!(table["rl"]["clip_range"].as_float(), Some(0.2));
    assert!(table["output_dir"].as_str().unwrap().ends_with("there"));
    assert!(!project.path("there").exists());
}

/// Symptom: warnings were above 250 lines of configuration.
#[test]
fn config_check_ends_with_its_warnings_and_the_result() {
    let project = Project::new();
    let rows = project.read("teacher.jsonl");
    project.write("teacher.jsonl", &rows.lines().skip(3).collect::<Vec<_>>().join("\n"));
    let output = std::fs::File::create(project.path("output")).unwrap();
    let mut command = project.command(&["config", "check", "querl.toml"]);
    assert!(command.stdout(output.try_clone().unwrap()).stderr(output).status().unwrap().success());
    let text = project.read("output");
    let [.., warning, result] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
    assert!(warning.starts_with("warning: the recorded teacher") && result == "querl.toml: ok", "{text}");

    // Symptom: where `head` had closed stdout, there were no warnings, no result and the exit code 1.
    let mut command = project.command(&["config", "check", "querl.toml"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.ends_with(&format!("{warning}\n{result}\n")), "{said}");
}

#[test]
fn config_schema_lists_keys_and_prints_json_schema() {
    let project = Project::new();
    let text = project.querl(&["config", "schema"]).ok().stdout;
    assert!(text.contains("[retrieval]\n"), "{text}");
    assert!(text.contains("\ngae_lambda = 0.95  # a number, 0.0 to 1.0; GAE's lambda.\n"), "{text}");
    let schema = project.json(&["config", "schema"]);
    assert_eq!(schema["properties"]["rl"]["properties"]["gae_lambda"]["maximum"], 1.0);
}

#[test]
fn config_check_reports_planned_gpu_memory() {
    let project = Project::new();
    let on_gpu = ["--set", "device=cuda:0", "--set", "model.dtype=bf16"];
    let check = ["config", "check", "querl.toml", "--skip-plugins"];
    let said = project.querl(&[&check[..], &on_gpu].concat()).ok();
    let lines: Vec<&str> = said.stderr.lines().collect();
    assert!(lines[0].starts_with("sft: takes about ") && lines[1].starts_with("rl: takes about "), "{said:#?}");
    assert!(lines.len() == 3 && lines[1].ends_with(", with rows of 4096 tokens"), "{said:#?}");
    assert_eq!(project.querl(&check).ok().stderr, "querl.toml: ok\n");
}

#[test]
fn doctor_speaks_in_sentences() {
    let project = Project::new();
    let text = project.querl(&["doctor"]).ok().stdout;
    assert!(text.contains("there is no CUDA driver (libcuda.so.1) on this machine\n"), "{text}");
    assert!(text.contains("device = \"cuda:N\" is refused, and device = \"auto\" takes the CPU\n"), "{text}");
    let findings = project.json(&["doctor"]);
    let names: Vec<_> = findings.as_array().unwrap().iter().map(|finding| finding["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["querl", "cpu", "driver", "library", "cuda", "cargo", "wasm", "plugins"]);
}

#[test]
fn completions_and_man_pages_cover_the_commands() {
    let project = Project::new();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = project.querl(&["completions", shell]).ok().stdout;
        assert!(script.contains("rewrite") && script.contains("doctor"), "{shell}: {script}");
    }
    assert!(project.querl(&["man"]).ok().stdout.starts_with(".ie"));
    project.querl(&["man", "pages"]).ok();
    assert!(project.read("pages/querl.1").contains("SUBCOMMANDS"));
    assert!(project.read("pages/querl-plugin-pack.1").contains("\\-\\-sign"));
    // Symptom: the program panicked if a completion script could not be written.
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = project.command(&["completions", "bash"]).stdout(full).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("error: stdout: ") && stderr.lines().count() == 1, "{stderr}");
}

/// Regression: every stage command had all flags of `querl run`, including some without effect on the stage.
#[test]
fn stage_commands_have_the_flags_that_act_on_their_stage() {
    let project = Project::new();
    project.querl(&["man", "pages"]).ok();
    let common = ["--set", "--out", "--from", "--accept-plugin-change", "--locked", "--dry-run", "--json"];
    for (stage, has_threads) in
        [("rewrite", true), ("validate", true), ("convert", false), ("sft", true), ("rl", true), ("eval", true)]
    {
        let help = project.querl(&[stage, "--help"]).ok().stdout;
        let has = |flag: &str| help.lines().any(|line| line.trim_start().starts_with(flag));
        assert!(common.iter().all(|flag| has(flag)), "{help}");
        assert_eq!((has("--threads"), has("--to")), (has_threads, false), "{help}");
        assert!(help.contains("- rewrite:") && (stage == "eval") == help.contains("- eval:"), "{help}");
        let page = project.read(&format!("pages/querl-{stage}.1"));
        assert_eq!((page.contains("\\-\\-threads"), page.contains("\\-\\-to\\f")), (has_threads, false), "{stage}");
    }
    for args in [
        ["run", "querl.toml", "--from", "nowhere"],
        ["convert", "querl.toml", "--threads", "1"],
        ["rewrite", "querl.toml", "--to", "convert"],
        ["sft", "querl.toml", "--from", "rl"],
    ] {
        let refused = project.querl(&args);
        assert_eq!((refused.code, project.path("run").exists()), (Some(2), false), "{refused:#?}");
    }
}

#[test]
fn a_small_model_replaces_another_whole_or_not_at_all() {
    let project = Project::new();
    let line = "{\"text\": \"五博士鱼油 每天两粒 饭后服用\"}\n";
    project.write("corpus.jsonl", &line.repeat(4));
    let recipe = |vocab_size: usize, max_length: usize| {
        format!(
            "corpus = \"corpus.jsonl\"\noutput_dir = \"out\"\nseed = 1\nvocab_size = {vocab_size}\n\
             [model]\nhidden_size = 16\nintermediate_size = 16\nn_layers = 1\nn_heads = 1\nn_kv_heads = 1\n\
             head_dim = 16\nmax_positions = 64\n[train]\nmethod = \"full\"\nmax_steps = 1\nmax_length = {max_length}\n"
        )
    };
    project.write("pretrain.toml", &recipe(300, 64));
    project.querl(&["model", "pretrain", "pretrain.toml"]).ok();
    project.querl(&["model", "inspect", "out"]).ok();
    let files = || {
        let names = std::fs::read_dir(project.path("out")).unwrap().flatten().map(|entry| entry.file_name());
        let read = |name: std::ffi::OsString| (name.clone(), std::fs::read(project.path("out").join(name)).unwrap());
        // The lock file contains the id of the last process.
        names.filter(|name| name != ".in-use").map(read).collect::<std::collections::BTreeMap<_, _>>()
    };
    let before = files();
    project.write("pretrain.toml", &recipe(280, 1));
    assert_eq!(project.querl(&["model", "pretrain", "pretrain.toml"]).code, Some(2));
    assert!(files() == before, "a training that fails changes nothing");
}

#[cfg(unix)]
#[test]
fn a_stopped_pretraining_resumes_and_has_the_weights_of_an_uninterrupted_one() {
    let project = Project::new();
    project.write("corpus.jsonl", &"{\"text\": \"五博士鱼油 每天两粒 饭后服用\"}\n".repeat(64));
    let recipe = |folder: &str| {
        let text = format!(
            "corpus = \"corpus.jsonl\"\noutput_dir = \"out/{folder}\"\nseed = 1\nvocab_size = 300\n\
             [model]\nhidden_size = 64\nintermediate_size = 64\nn_layers = 2\nn_heads = 1\nn_kv_heads = 1\n\
             head_dim = 64\nmax_positions = 64\n[train]\nmethod = \"full\"\nmax_steps = 400\nepochs = 400\nsave_steps = 1\n"
        );
        project.write(&format!("{folder}.toml"), &text);
        ["model".to_owned(), "pretrain".to_owned(), format!("{folder}.toml")]
    };
    let (whole, stopped) = (recipe("whole"), recipe("stopped"));
    let (whole, stopped) = (whole.each_ref().map(String::as_str), stopped.each_ref().map(String::as_str));
    project.querl(&whole).ok();
    let child = project.command(&stopped).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let started = std::time::Instant::now();
    while !project.path("out/stopped/.pretrain/state").exists() && started.elapsed().as_secs() < 120 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    signal(&child, "-INT");
    let message = interrupted(child);
    assert!(message.contains("; the same command resumes there\n"), "{message}");
    let resumed = project.querl(&stopped).ok();
    assert!(resumed.stderr.contains("resuming from step "), "{resumed:#?}");
    let weights = |folder: &str| std::fs::read(project.path(&format!("out/{folder}/model.safetensors"))).unwrap();
    assert!(weights("whole") == weights("stopped"));
    assert!(!project.path("out/stopped/.pretrain").exists());
}

#[test]
fn documentation_of_the_configuration_has_every_key_as_it_is() {
    let text = std::fs::read_to_string(support::repository().join("docs/configuration.md")).unwrap();
    let missing: Vec<String> = querl_core::config::keys()
        .iter()
        .map(|info| {
            let name = info.key.rsplit('.').next().unwrap_or_default();
            let default = match (&info.default, info.required) {
                (Some(default), _) => format!("`{default}`"),
                (None, true) => "required".to_owned(),
                (None, false) => "unset".to_owned(),
            };
            format!("| `{name}` | {} | {default} | {} |", info.expects, info.meaning)
        })
        .filter(|row| !text.contains(row))
        .collect();
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// The keys that the error for an unknown key lists, with `prefix`.
fn expected_keys(project: &Project, text: &str, prefix: &str) -> BTreeSet<String> {
    project.write("pretrain.toml", text);
    let message = project.refusal(&["model", "pretrain", "pretrain.toml"], 2);
    let (_, names) = message.split_once("expected one of ").unwrap_or_else(|| panic!("{message}"));
    names.split('`').skip(1).step_by(2).map(|name| format!("{prefix}{name}")).collect()
}

/// Symptom: the page had the table of another command.
#[test]
fn both_pages_of_the_configuration_have_the_keys_of_a_pretraining() {
    let project = Project::new();
    let mut expected = expected_keys(&project, "nothing = 1\n", "");
    assert!(expected.remove("model") && expected.remove("train"), "{expected:?}");
    expected.extend(expected_keys(&project, "[model]\nnothing = 1\n", "model."));
    // Pretraining has no adapter and no following stage.
    let without_effect = [
        "method",
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "use_rslora",
        "use_dora",
        "on_noise",
    ];
    let of_sft = querl_core::config::keys();
    let of_sft = of_sft.iter().filter_map(|info| info.key.strip_prefix("sft."));
    expected.extend(of_sft.filter(|key| !without_effect.contains(key)).map(|key| format!("train.{key}")));
    for page in ["docs/configuration.md", "docs/zh-CN/configuration.md"] {
        let text = std::fs::read_to_string(support::repository().join(page)).unwrap();
        let section = text.split("\n## `querl model pretrain`").nth(1).unwrap().split("\n## ").next().unwrap();
        let mut found = BTreeSet::new();
        for row in section.lines().filter(|line| line.starts_with("| `")) {
            let cell = row.split(" | ").next().unwrap();
            let names: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
            // `train.batch_size`, `epochs`: the section of the first name applies to all.
            let shared = names[0].split_once('.').map(|(section, _)| section);
            found.extend(names.iter().map(|name| match shared {
                Some(section) if !name.contains('.') => format!("{section}.{name}"),
                _ => (*name).to_owned(),
            }));
        }
        assert_eq!(found, expected, "{page}");
    }
}

#[test]
fn chinese_configuration_page_has_every_key_with_its_default() {
    let text = std::fs::read_to_string(support::repository().join("docs/zh-CN/configuration.md")).unwrap();
    for info in querl_core::config::keys() {
        let name = info.key.rsplit('.').next().unwrap_or_default();
        let default = match (&info.default, info.required) {
            (Some(default), _) => format!("`{default}`"),
            (None, true) => "必填".to_owned(),
            (None, false) => "未设".to_owned(),
        };
        let is_row = |line: &str| {
            let cells: Vec<&str> = line.split(" | ").collect();
            cells.len() >= 4 && cells[0] == format!("| `{name}`") && cells[2] == default && cells[3].len() > 2
        };
        assert!(text.lines().any(is_row), "docs/zh-CN/configuration.md lacks `{}` with default {default}", info.key);
    }
}

#[test]
fn documentation_of_training_gives_every_setting_a_source() {
    let text = std::fs::read_to_string(support::repository().join("docs/training.md")).unwrap();
    let is_trained = |key: &str| ["model.", "sft.", "rl."].iter().any(|section| key.starts_with(section));
    for info in querl_core::config::keys().iter().filter(|info| is_trained(&info.key)) {
        let (section, name) = info.key.rsplit_once('.').unwrap();
        let table = text.split(&format!("### `[{section}]`")).nth(1).unwrap().split("\n##").next().unwrap();
        let without = if info.required { "required" } else { "unset" };
        let default = info.default.as_ref().map_or(without.to_owned(), |default| format!("`{default}`"));
        let row = format!("| `{name}` | {default} | {} | ", info.meaning);
        let source = table.lines().find_map(|line| line.strip_prefix(&row)?.strip_suffix(" |"));
        assert!(source.is_some_and(|source| !source.is_empty()), "no source in {row}");
    }
}
