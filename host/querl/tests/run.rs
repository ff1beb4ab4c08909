//! A complete run of a small project: which stages run, which are skipped, which are repeated, and the state after a kill.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::path::PathBuf;
use support::process::{interrupted, kill, signal};
use support::results::{files_below, run_until, timeless};
use support::{Project, repository, with_sets};

/// A single test, because its parts depend on one another and the run is slow.
#[test]
fn run_makes_everything_then_skips_what_is_finished_and_redoes_what_changed() {
    let project = Project::new();
    let first = project.querl(&["run", "querl.toml"]).ok();
    for stage in ["rewrite", "validate", "convert", "sft", "rl", "eval"] {
        assert!(first.stderr.contains(&format!("{stage}: running (no earlier result)\n")), "{first:#?}");
        assert!(first.stderr.contains(&format!("{stage}: done in ")), "{first:#?}");
    }
    assert!(first.stdout.contains("teacher") && first.stdout.contains("rl - sft"), "{first:#?}");
    let files = [
        "config.resolved.toml",
        "querl.lock",
        "stages.json",
        "data/rewrites.jsonl",
        "data/rewrites.xlsx",
        "data/validated.jsonl",
    ];
    let more = [
        "data/train.jsonl",
        "data/dropped.jsonl",
        "episodes.jsonl",
        "metrics.jsonl",
        "eval/records.jsonl",
        "eval.json",
        "report.html",
    ];
    for file in files.into_iter().chain(more) {
        assert!(project.path("run").join(file).is_file(), "{file}");
    }

    let second = project.querl(&["run", "querl.toml"]).ok();
    assert_eq!(second.stderr.matches("finished earlier, skipped").count(), 6, "{second:#?}");
    assert_eq!(second.stdout, first.stdout);

    let from_resolved = project.querl(&["run", "run/config.resolved.toml"]).ok();
    assert_eq!(from_resolved.stderr.matches("finished earlier, skipped").count(), 6, "{from_resolved:#?}");

    // Whether later stages are repeated depends on whether the new checkpoint differs; after so few steps it may not.
    let changed = project.querl(&["run", "querl.toml", "--set", "rl.kl_coef=0.2"]).ok();
    for line in ["sft: finished earlier, skipped\n", "rl: running (rl.kl_coef changed)\n"] {
        assert!(changed.stderr.contains(line), "{line}: {changed:#?}");
    }

    project.write(
        "teacher.jsonl",
        &project.read("teacher.jsonl").replacen("\"rewritten_query\": \"", "\"rewritten_query\": \"五博士 ", 1),
    );
    let other = project.querl(&["run", "querl.toml", "--to", "validate"]).ok();
    assert!(other.stderr.contains("rewrite: running (recording of the teacher changed)\n"), "{other:#?}");
    assert!(other.stderr.contains("validate: running (rewrites.jsonl of rewrite changed)\n"), "{other:#?}");
    project.querl(&["run", "querl.toml"]).ok();

    std::fs::remove_file(project.path("run/report.html")).unwrap();
    assert_eq!(project.json(&["report", "run"])["split"], "test");
    assert!(project.path("run/report.html").is_file());
    // A folder in place of a file cannot be replaced, as in a read-only folder.
    std::fs::remove_file(project.path("run/report.html")).unwrap();
    std::fs::create_dir(project.path("run/report.html")).unwrap();
    let message = project.refusal(&["report", "run"], 2);
    assert!(message.starts_with("run/report.html: cannot be written: "), "{message}");
    std::fs::remove_dir(project.path("run/report.html")).unwrap();

    let result = project.json(&["run", "querl.toml", "--from", "validate", "--to", "convert"]);
    let statuses: Vec<_> =
        result["stages"].as_array().unwrap().iter().map(|stage| stage["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["skipped", "done", "done"]);
}

#[test]
fn stages_alone_ask_for_what_comes_before() {
    let project = Project::new();
    let early = project.querl(&["validate", "querl.toml"]);
    let message = "error: run/data/rewrites.jsonl: not there yet; run `querl rewrite` first, or `querl run`\n";
    assert_eq!((early.code, early.stderr.as_str()), (Some(2), message));
    project.querl(&["rewrite", "querl.toml"]).ok();
    let done = project.querl(&["validate", "querl.toml"]).ok();
    assert!(done.stdout.contains("looked up"), "{done:#?}");
}

#[test]
fn keys_of_a_recording_that_are_not_read_are_named_where_rewrites_are_missing() {
    let project = Project::new();
    let rows = project.read("teacher.jsonl");
    project.write("teacher.jsonl", &rows.replace("\"history_summary\"", "\"history\""));
    let said = project.querl(&["rewrite", "querl.toml"]).stderr;
    let hint =
        " of 40 queries; its rows have no `history_summary`, and their `history` is not read; add them there, or set ";
    assert!(said.contains(hint), "{said}");
    // The table as read by the stage.
    project.write("teacher.jsonl", &rows);
    let stats = project.querl(&["data", "stats", "querl.toml"]).ok();
    assert!(stats.stdout.contains(hint), "{stats:#?}");
}

#[test]
fn failed_rows_stay_failed_rows_and_are_tried_again() {
    let project = Project::new();
    let rows = project.read("teacher.jsonl");
    project.write("teacher.jsonl", &rows.lines().skip(3).collect::<Vec<_>>().join("\n"));
    let done = project.querl(&["rewrite", "querl.toml"]).ok();
    assert!(done.stdout.contains("- not recorded  3"), "{done:#?}");
    // Regression: rewrites missing in the recording were not reported clearly.
    let warning = "warning: the recorded teacher (teacher.jsonl) has no rewrite of 3 of 40 queries; add them there, or set fallback_teacher.base_url\n";
    assert_eq!(done.stderr.matches(warning).count(), 1, "{done:#?}");
    let skipped = project.querl(&["run", "querl.toml", "--to", "rewrite"]).ok();
    assert!(skipped.stderr.contains(warning), "{skipped:#?}");
    let stats = project.querl(&["data", "stats", "querl.toml"]).ok();
    assert!(stats.stdout.contains(warning), "{stats:#?}");
    let records = project.read("run/data/rewrites.jsonl");
    assert_eq!(records.lines().filter(|line| line.contains("not_recorded")).count(), 3);
    project.write("teacher.jsonl", &rows);
    let again = project.querl(&["rewrite", "querl.toml"]).ok();
    assert!(again.stderr.contains("rewrite: running (recording of the teacher changed)\n"), "{again:#?}");
    assert!(again.stdout.contains("teacher failed  0"), "{again:#?}");
    assert!(!again.stderr.contains("recorded teacher"), "{again:#?}");
    project.write("teacher.jsonl", &rows.lines().skip(2).collect::<Vec<_>>().join("\n"));
    let few = project.querl(&["rewrite", "querl.toml", "--from", "rewrite"]).ok();
    assert!(few.stdout.contains("- not recorded  2") && !few.stderr.contains("recorded teacher"), "{few:#?}");
}

#[test]
fn rewrites_that_were_paid_for_outlive_new_rows() {
    let project = Project::new();
    let rows = project.read("queries.jsonl");
    project.write("queries.jsonl", &rows.lines().skip(1).collect::<Vec<_>>().join("\n"));
    project.querl(&["rewrite", "querl.toml"]).ok();
    // A text that no stage would write: if it is there afterwards, the row was kept.
    let kept = project.read("run/data/rewrites.jsonl").replacen("\"text\":\"", "\"text\":\"KEPT ", 1);
    project.write("run/data/rewrites.jsonl", &kept);
    project.write("queries.jsonl", &rows);
    let again = project.querl(&["rewrite", "querl.toml", "--set", "data.split=[0.5, 0.25, 0.25]"]).ok();
    assert!(again.stderr.contains("rewrite: running (query table changed)\n"), "{again:#?}");
    let now = project.read("run/data/rewrites.jsonl");
    assert_eq!((now.lines().count(), now.matches("KEPT").count()), (40, 1));
}

#[test]
fn a_stage_alone_refuses_what_was_made_from_other_files() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    let other = project.read("teacher.jsonl").replacen("\"rewritten_query\": \"", "\"rewritten_query\": \"五博士 ", 1);
    project.write("teacher.jsonl", &other);
    project.querl(&["rewrite", "querl.toml"]).ok();
    let refused = project.querl(&["sft", "querl.toml"]);
    let message =
        "error: validate ran before rewrites.jsonl of rewrite changed; run `querl validate` first, or `querl run`\n";
    assert_eq!((refused.code, refused.stderr.as_str()), (Some(2), message));
}

/// Starts `args` and kills the process once `metrics.jsonl` has `n_lines` of `stage`.
fn kill_within(project: &Project, args: &[&str], stage: &str, n_lines: usize) {
    kill(run_until(project.command(args), project, stage, n_lines));
}

/// Results of a run by file, without times.
fn results(project: &Project) -> Vec<(String, String)> {
    let mut files: Vec<String> =
        ["data/validated.jsonl", "data/train.jsonl", "episodes.jsonl", "eval/records.jsonl"].map(str::to_owned).into();
    for folder in ["sft/best", "sft/last", "rl/best", "rl/last"] {
        let entries = std::fs::read_dir(project.path("run").join(folder)).unwrap().flatten();
        let names = entries.filter(|entry| entry.path().is_file()).map(|entry| entry.file_name());
        files.extend(names.map(|name| format!("{folder}/{}", name.to_str().unwrap())));
    }
    files.sort();
    let read =
        |file: &String| String::from_utf8_lossy(&std::fs::read(project.path("run").join(file)).unwrap()).into_owned();
    files.iter().map(|file| (file.clone(), without_latency(&read(file)))).collect()
}

fn without_latency(text: &str) -> String {
    let mut parts = text.split("\"latency_ms\":");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |kept, part| kept + part.trim_start_matches(|c: char| c.is_ascii_digit() || ".e-".contains(c)))
}

#[test]
fn a_killed_run_is_finished_by_the_next_as_if_nothing_had_been() {
    let more =
        ["sft.epochs=4", "sft.max_steps=12", "sft.batch_size=2", "sft.gradient_accumulation_steps=2", "rl.max_steps=8"];
    let args = with_sets(&["run", "querl.toml"], &more);
    let (unkilled, project) = (Project::new(), Project::new());
    unkilled.querl(&args).ok();

    kill_within(&project, &args, "sft", 2);
    let half = project.querl(&["rl", "querl.toml"]);
    let message = "error: sft was stopped on the way; `querl run CONFIG --out run` resumes it\n";
    assert_eq!((half.code, half.stderr.as_str()), (Some(2), message));

    kill_within(&project, &args, "rl", 2);
    assert!(project.path("run/rl/best").is_dir(), "there from the first evaluation on");
    let half = project.querl(&["eval", "querl.toml"]);
    let message = "error: rl was stopped on the way; `querl run CONFIG --out run` resumes it\n";
    assert_eq!((half.code, half.stderr.as_str()), (Some(2), message));
    let unreported = project.refusal(&["report", "run"], 2);
    assert_eq!(unreported, "run: the run was stopped in `rl`; `querl run CONFIG --out run` resumes it");

    let done = project.querl(&args).ok();
    assert!(done.stderr.contains("rl: running (stopped on the way last time)\n"), "{done:#?}");
    let (expected, found) = (results(&unkilled), results(&project));
    let names = |results: &[(String, String)]| results.iter().map(|(file, _)| file.clone()).collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected));
    for ((file, expected), (_, found)) in expected.into_iter().zip(found) {
        assert!(expected == found, "{file} differs from that of a run that was never killed");
    }
}

#[test]
fn runs_on_the_same_queries_are_pooled_and_others_refused() {
    let project = Project::new();
    let evaluate = |out: &str, set: &str| {
        let systems = "eval.systems=[\"raw\", \"teacher\"]";
        project.querl(&["run", "querl.toml", "--out", out, "--to", "convert", "--set", set]).ok();
        project.querl(&["eval", "querl.toml", "--out", out, "--set", set, "--set", systems]).ok();
    };
    evaluate("one", "seed=1");
    evaluate("two", "seed=2");
    evaluate("other", "data.split_seed=77");
    let table = project.querl(&["report", "one", "two"]).ok().stdout;
    assert!(table.contains("raw") && table.contains("teacher") && table.contains("2 runs"), "{table}");
    assert!(project.json(&["report", "one", "two"]).is_object());
    // Without a limit on gold queries: the same test split with other settings.
    evaluate("three", "retrieval.top_k=3");
    let message = project.refusal(&["report", "one", "three"], 2);
    assert!(message.starts_with("one and three differ in more than the seed: "), "{message}");
    assert!(message.contains("retrieval.top_k (5 and 3)"), "{message}");
    assert!(message.ends_with("; pool them all the same with `--pool`, or report each alone"), "{message}");
    let pooled = project.querl(&["report", "one", "two", "three", "--pool"]).ok().stdout;
    assert!(pooled.contains("3 runs"), "{pooled}");
    assert!(pooled.starts_with("one and three differ in more than the seed: "), "{pooled}");
    assert!(!pooled.contains("one and two differ"), "{pooled}");
    // Symptom: a run was pooled with itself, and two runs of one seed, as samples of the experiment.
    let twice = project.refusal(&["report", "one", "./one"], 2);
    assert_eq!(twice, "one and ./one are the same run; name each run once");
    evaluate("again", "seed=1");
    let same_seed = "one and again have the same seed (1)";
    let message = project.refusal(&["report", "one", "again"], 2);
    assert_eq!(message, format!("{same_seed}; pool them all the same with `--pool`, or report each alone"));
    let pooled = project.querl(&["report", "one", "again", "--pool"]).ok().stdout;
    assert!(pooled.starts_with(&format!("{same_seed}\n")), "{pooled}");
    let refused = project.querl(&["report", "one", "other"]);
    assert_eq!((refused.code, refused.stderr.lines().count()), (Some(2), 1), "{refused:#?}");
    let message = "error: one and other were evaluated on different test queries (";
    assert!(refused.stderr.starts_with(message), "{refused:#?}");
}

#[test]
fn untrained_systems_samples_and_a_second_retriever_are_evaluated() {
    let project = Project::new();
    let passages = std::fs::read_to_string(repository().join("examples/fivedoctors/knowledge_base.jsonl")).unwrap();
    let with_gold = |(row, passage): (serde_json::Value, &str)| {
        let passage: serde_json::Value = serde_json::from_str(passage).unwrap();
        let mut row = row;
        row["gold_ids"] = passage["id"].clone();
        row.to_string()
    };
    let rows: Vec<String> = project.rows("queries.jsonl").into_iter().zip(passages.lines()).map(with_gold).collect();
    project.write("queries.jsonl", &rows.join("\n"));
    let systems = "eval.systems=[\"raw\", \"with_history\", \"prompted\", \"hyde\", \"teacher\", \"sft\"]";
    let sets = ["--set", systems, "--set", "eval.best_of_n=3", "--set", "eval.pass_at_k=2"];
    project.querl(&["run", "querl.toml", "--to", "sft"]).ok();
    let first = project.querl(&[&["eval", "querl.toml"], &sets[..]].concat()).ok();
    let records = project.rows("run/eval/records.jsonl");
    for system in ["raw", "with_history", "prompted", "hyde", "teacher", "sft", "best_of_n"] {
        let answers: Vec<_> = records.iter().filter(|record| record["system"] == system).collect();
        let n = project.rows("run/data/test.jsonl").len();
        assert_eq!(answers.len(), n, "{system}");
        // Symptom: the progress named `raw` for every system.
        assert!(first.stderr.contains(&format!("eval: {n}/{n} {system}")), "{system} in {first:#?}");
        assert!(answers.iter().all(|record| record["outcome"]["Ok"]["second_retrieval"]["retriever"] == "lexical"));
        let n_sampled = answers.iter().filter(|record| !record["outcome"]["Ok"]["samples"].is_null()).count();
        assert_eq!(n_sampled > 0, system == "sft", "{system}");
        let has_terms = |record: &&serde_json::Value| record["outcome"]["Ok"]["new_gold_terms"].is_number();
        assert!(system != "raw" || answers.iter().all(has_terms));
    }
    let evaluation: serde_json::Value = serde_json::from_str(&project.read("run/eval.json")).unwrap();
    assert_eq!(evaluation["second_retrieval"]["retriever"], "lexical");
    assert_eq!(evaluation["pass_at_k"]["sft"]["n_samples"], 2);
    assert!(evaluation["pairs"]["best_of_n-sft"].is_object() && evaluation["pairs"]["sft-prompted"].is_object());
    for title in ["on a second retriever (lexical)", "length and words of the rewrites", "pass@k %"] {
        assert!(first.stdout.contains(title), "{title} in {first:#?}");
    }

    let again = |more: &str| project.querl(&[&["eval", "querl.toml"], &sets[..], &["--set", more]].concat()).ok();
    assert!(again("eval.bootstrap=60").stderr.contains("eval: finished earlier, skipped\n"));
    let examples = again("eval.few_shot=1");
    assert!(examples.stderr.contains("eval: running (eval.few_shot"), "{examples:#?}");
    let none = again("eval.second_retrieval=none");
    assert!(!none.stdout.contains("second retriever (lexical)"), "{none:#?}");
}

#[test]
fn samples_are_the_same_in_each_run() {
    let sampled = || {
        let project = support::results::project();
        let only = ["--set", "eval.systems=[\"sft\"]", "--set", "eval.best_of_n=4"];
        project.querl(&["sft", "querl.toml"]).ok();
        project.querl(&[&["eval", "querl.toml"], &only[..]].concat()).ok();
        without_latency(&project.read("run/eval/records.jsonl"))
    };
    assert!(sampled() == sampled());
}

#[cfg(unix)]
#[test]
fn an_interrupt_stops_at_a_safe_point_with_code_130() {
    let project = Project::new();
    let many = ["--set", "sft.max_steps=100000", "--set", "sft.epochs=100000"];
    let mut command = project.command(&["run", "querl.toml", many[0], many[1], many[2], many[3]]);
    let child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let log = project.path("run/metrics.jsonl");
    let started = std::time::Instant::now();
    // There is a state to save from the first step on.
    let has_steps = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("\"sft\""));
    while !has_steps() && started.elapsed().as_secs() < 120 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let refused = project.querl(&["run", "querl.toml"]);
    assert_eq!(refused.code, Some(1), "{refused:#?}");
    assert!(refused.stderr.contains("run is in use by another querl (process "), "{refused:#?}");
    signal(&child, "-INT");
    interrupted(child);
    assert!(project.path("run/sft/last").is_dir());
}

/// Values of a metric of a stage by step.
fn column(project: &Project, stage: &str, name: &str) -> Vec<f64> {
    let lines = project.read("run/metrics.jsonl");
    let of_stage = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    of_stage.filter(|line| line["stage"] == stage).filter_map(|line| find(&line, name)).collect()
}

fn find(line: &serde_json::Value, name: &str) -> Option<f64> {
    line.get(name).or_else(|| line.get("metrics")?.get(name))?.as_f64()
}

#[test]
fn epochs_of_rl_are_as_many_steps_as_the_training_split_has_batches() {
    let project = support::results::project();
    project.edit("[rl]\nmax_steps = 2\nbatch_size = 4", "[rl]\nepochs = 2\nbatch_size = 16");
    let done = project.querl(&["run", "querl.toml", "--to", "rl"]).ok();
    let n_rows = project.read("run/data/train.jsonl").lines().count();
    let n_steps = (2 * n_rows).div_ceil(16);
    let note = format!("rl: {n_steps} steps: 2 epoch(s) of {n_rows} queries in batches of 16\n");
    assert!(done.stderr.contains(&note), "{done:#?}");
    assert_eq!(column(&project, "rl", "avg_reward").len(), n_steps);
    let watched = project.querl(&["watch", "run", "--once"]).ok().stdout;
    assert!(watched.contains(&format!("step {n_steps} of {n_steps}")), "{watched}");
}

#[test]
fn two_devices_that_hold_a_model_together_train_and_answer_as_one() {
    let model = format!("model.path={}", repository().join("examples/tiny-qwen3").display());
    let run = |sets: &[&str]| {
        let project = support::results::project();
        let common = ["sft.max_steps=3", "rl.max_steps=2", "rl.eval_steps=2", "rl.n_samples=2", &model];
        project.querl(&with_sets(&["run", "querl.toml", "--to", "eval"], &[&common, sets].concat())).ok();
        project
    };
    let alone = run(&[]);
    let together = run(&["device=cpu:2", "model.tensor_parallel=2"]);
    for (stage, name) in [("sft", "loss"), ("sft", "grad_norm"), ("rl", "avg_reward")] {
        let (found, expected) = (column(&together, stage, name), column(&alone, stage, name));
        assert!(!expected.is_empty() && found.len() == expected.len(), "{name}: {found:?} and {expected:?}");
        for (found, expected) in found.iter().zip(&expected) {
            // The order of sums differs.
            assert!((found - expected).abs() <= 1e-4 * expected.abs().max(0.1), "{name}: {found} and {expected}");
        }
    }
    let answers = |project: &Project| {
        let lines = project.read("run/eval/records.jsonl");
        lines.lines().map(timeless).collect::<String>()
    };
    assert_eq!(answers(&together), answers(&alone));
}

#[test]
fn what_cannot_be_split_is_refused_before_anything_is_done() {
    let run = |device| {
        support::results::project().querl(&with_sets(&["run", "querl.toml"], &[device, "model.tensor_parallel=2"]))
    };
    run("device=cpu:2").refused("1 heads of keys and values (2 of queries) cannot be split over 2 ranks");
    run("device=cpu:3").refused("model.tensor_parallel is 2 and device is \"cpu:3\"");
}

/// Digest of every file of the run, by path.
fn snapshot(project: &Project) -> BTreeMap<PathBuf, String> {
    let files = files_below(&project.path("run")).into_iter().filter(|path| !path.ends_with(".in-use"));
    files.map(|path| (path.clone(), querl_core::fsx::digest_file(&path).unwrap())).collect()
}

/// Regression: a refused command removed a finished training. Everything is checked before the result is moved.
#[test]
fn a_refused_command_leaves_every_file_as_it_was() {
    let project = Project::new();
    project.querl(&["run", "querl.toml"]).ok();
    let before = snapshot(&project);
    for folder in ["cut", "not-finite", "template", "no-tokens", "one-row"] {
        project.copy_model(folder);
    }
    let weights = std::fs::read(project.path("cut/model.safetensors")).unwrap();
    std::fs::write(project.path("cut/model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    let n_bytes = weights.len();
    let damaged = [&weights[..n_bytes - 4], &f32::NAN.to_le_bytes()].concat();
    std::fs::write(project.path("not-finite/model.safetensors"), damaged).unwrap();
    let special = r#"{"eos_token": "<|im_end|>", "chat_template": "{{ raise_exception('no') }}"}"#;
    project.write("template/tokenizer_config.json", special);
    project.write("no-tokens/chat_template.jinja", "");
    // Symptom: a local teacher rendered its prompts, and failed, only after the earlier result was moved.
    let last = project.rows("queries.jsonl")[39]["original_query"].as_str().unwrap().to_owned();
    let one_row = format!("{{% if {last:?} in messages[-1].content %}}{{{{ raise_exception('no') }}}}{{% endif %}}x");
    project.write("one-row/chat_template.jinja", &one_row);
    let refused: [&[&str]; 13] = [
        &["run", "querl.toml", "--set", "rl.max_new_tokens=100000"],
        &["eval", "querl.toml", "--set", "rl.max_new_tokens=100000"],
        &["rl", "querl.toml", "--from", "rl", "--set", "model.path=\"template\""],
        &["run", "querl.toml", "--from", "rl", "--set", "rl.max_new_tokens=100000"],
        &["run", "querl.toml", "--set", "sft.max_length=4"],
        &["sft", "querl.toml", "--set", "sft.max_length=4"],
        &["run", "querl.toml", "--set", "model.path=\"cut\""],
        &["run", "querl.toml", "--set", "model.path=\"not-finite\""],
        &["run", "querl.toml", "--set", "model.path=\"template\""],
        &["run", "querl.toml", "--from", "rewrite", "--set", "data.query_column=\"none\""],
        &["run", "querl.toml", "--set", "model.path=\"no-tokens\""],
        &["rl", "querl.toml", "--from", "rl", "--set", "rl.stop_strings=[\"\"]"],
        &["run", "querl.toml", "--set", "teacher={ kind = \"local\", model_path = \"one-row\" }"],
    ];
    for args in refused {
        let output = project.querl(args);
        assert_eq!(output.code, Some(2), "{args:?}: {output:#?}");
        // Symptom: the result was moved, and moved back after the refusal.
        assert!(!output.stderr.contains("back in place"), "{args:?}: {output:#?}");
        assert_eq!(snapshot(&project), before, "{args:?}");
    }
    let again = project.querl(&["run", "querl.toml"]).ok();
    assert_eq!(again.stderr.matches("finished earlier, skipped").count(), 6, "{again:#?}");
}

#[test]
fn an_earlier_result_is_kept_until_the_new_one_is_complete() {
    let project = Project::new();
    let first = ["run", "querl.toml", "--to", "rl"];
    project.querl(&first).ok();
    let before = snapshot(&project);
    let more = ["run", "querl.toml", "--to", "rl", "--set", "rl.max_steps=400", "--set", "rl.save_steps=1"];
    kill_within(&project, &more, "rl", 5);
    assert!(project.path("run/previous/rl/finished/files/rl/best/adapter_config.json").is_file());
    // With the settings of the first run its result is restored.
    let back = project.querl(&first).ok();
    assert!(back.stderr.contains("rl: its earlier result on the same inputs is back in place\n"), "{back:#?}");
    assert!(back.stderr.contains("rl: finished earlier, skipped\n"), "{back:#?}");
    assert_eq!(snapshot(&project), before);
    let other = ["run", "querl.toml", "--to", "rl", "--set", "rl.max_steps=3"];
    project.querl(&other).ok();
    assert!(!project.path("run/previous").exists(), "a complete result replaces the earlier one");
}

/// Regression: without its adapter the base model was evaluated as `rl`.
#[test]
fn a_damaged_file_of_an_earlier_stage_is_named_with_the_command_that_makes_it_again() {
    let project = Project::new();
    project.querl(&["run", "querl.toml"]).ok();
    let damage = |file: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = std::fs::read(project.path(file)).unwrap();
        change(&mut bytes);
        std::fs::write(project.path(file), bytes).unwrap();
    };
    let cases = [
        ("rl/best/adapter_config.json", "rl"),
        ("rl/best/adapter_model.safetensors", "rl"),
        ("sft/best/adapter_model.safetensors", "sft"),
        ("data/train.jsonl", "convert"),
        ("data/validated.jsonl", "validate"),
        ("eval/records.jsonl", "eval"),
    ];
    for (file, stage) in cases {
        let file = &format!("run/{file}");
        let whole = std::fs::read(project.path(file)).unwrap();
        let remedy = format!("put the file back, or run `querl {stage} CONFIG --from {stage}` to make it again");
        let named = |what: &str| {
            let message = project.refusal(&["run", "querl.toml"], 2);
            assert_eq!(message, format!("{file}: {what}; {remedy}"));
        };
        damage(file, &|bytes| *bytes.last_mut().unwrap() ^= 1);
        named("has other content than when it was written");
        damage(file, &|bytes| bytes.truncate(10));
        named(&format!("has 10 of {} bytes", whole.len()));
        std::fs::write(project.path(file), &whole).unwrap();
    }
    std::fs::remove_file(project.path("run/rl/best/adapter_config.json")).unwrap();
    let message = project.refusal(&["eval", "querl.toml"], 2);
    assert!(message.starts_with("run/rl/best/adapter_config.json: is missing; "), "{message}");
    project.querl(&["rl", "querl.toml", "--from", "rl"]).ok();
    project.querl(&["run", "querl.toml"]).ok();
}

#[test]
fn logs_that_were_cut_are_reported_and_not_drawn() {
    let project = Project::new();
    project.querl(&["run", "querl.toml"]).ok();
    let figures = |html: &str| html.matches("<svg").count();
    let whole = figures(&project.read("run/report.html"));
    let lines = project.read("run/metrics.jsonl");
    let without = lines.lines().filter(|line| !line.contains("\"stage\":\"rl\"")).collect::<Vec<_>>().join("\n");
    project.write("run/metrics.jsonl", &without);
    std::fs::remove_file(project.path("run/episodes.jsonl")).unwrap();
    let table = project.querl(&["report", "run"]).ok().stdout;
    assert!(table.contains("\nmetrics.jsonl of rl is missing: its curves are not drawn\n"), "{table}");
    assert!(table.contains("\nepisodes.jsonl of rl is missing\n"), "{table}");
    assert!(figures(&project.read("run/report.html")) < whole);
}

/// Symptom: `audit`, `watch` and `plugin replay` treated truncated logs as complete.
#[test]
fn logs_that_lost_lines_are_named_by_whatever_reads_them() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "rl"]).ok();
    for log in ["run/episodes.jsonl", "run/metrics.jsonl"] {
        let text = project.read(log);
        let (kept, _) = text.trim_end().rsplit_once('\n').unwrap();
        project.write(log, &format!("{kept}\n"));
    }
    for args in [["audit", "run"].as_slice(), &["watch", "run", "--once"]] {
        let said = project.querl(args).ok().stdout;
        for log in ["episodes.jsonl of rl has ", "metrics.jsonl of rl has "] {
            assert!(said.contains(log), "{args:?}: no {log:?} in {said}");
        }
    }
    let reward = repository().join("plugins/reward-competition").display().to_string();
    let replayed = project.querl(&["plugin", "replay", "run", "--plugin", &reward]).ok();
    assert!(replayed.stderr.contains("warning: episodes.jsonl of rl has "), "{replayed:#?}");
    // Without the ledger it is unknown whether the log is complete, and existing results are not reported as missing.
    std::fs::remove_file(project.path("run/stages.json")).unwrap();
    let ledger = project.refusal(&["export", "gguf", "run", "--out", "model.gguf"], 2);
    assert!(ledger.starts_with("run/stages.json: has no finished training for run/sft; put the file back"), "{ledger}");
    let ledger = project.refusal(&["rl", "querl.toml"], 2);
    assert!(ledger.starts_with("run/stages.json: has no entry of "), "{ledger}");
}

/// Symptom: `serve reward` knew fewer queries, and `data stats` counted fewer rows, without a message.
#[test]
fn splits_that_lost_rows_are_named_by_whatever_reads_them() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    project.write("run/data/train.jsonl", "");
    let stats = project.querl(&["data", "stats", "querl.toml"]).ok().stdout;
    assert!(stats.contains("warning: data/train.jsonl of convert has 0 of "), "{stats}");
    let serve = project.querl(&["serve", "reward", "run", "--addr", "127.0.0.1:0"]);
    serve.refused("run/data/train.jsonl: has 0 of ");
}

#[test]
fn a_base_model_that_was_damaged_is_not_deployed() {
    let project = Project::new();
    project.copy_model("model");
    project.querl(&["run", "querl.toml", "--to", "sft", "--set", "model.path=\"model\""]).ok();
    project.write("model/tokenizer.json", "");
    let message = project.refusal(&["deploy", "run", "--out", "new"], 2);
    let expected =
        "model/tokenizer.json: not a tokenizer as tokenizers 0.23 or older saves it: EOF while parsing a value";
    assert!(message.starts_with(expected), "{message}");
    assert!(message.ends_with("; download or save it again"), "{message}");
    assert!(!project.path("new/tenants").exists());
}

/// Symptom: the report omitted the row funnel without a message if rewrites or hits had been changed.
#[test]
fn rows_that_were_changed_after_the_run_are_reported_where_the_funnel_ends() {
    let project = Project::new();
    project.querl(&["run", "querl.toml"]).ok();
    let whole = project.read("run/report.html");
    assert!(whole.contains("kept by validate") && whole.contains("kept by convert"));
    support::results::copy(&project.path("run"), &project.path("twin"));
    let cases = [
        (
            "data/rewrites.jsonl",
            "data/rewrites.jsonl of rewrite",
            ": the row funnel ends at rewrite",
            "kept by validate",
        ),
        (
            "data/validated.jsonl",
            "data/validated.jsonl of validate",
            ": the row funnel ends at validate",
            "kept by convert",
        ),
    ];
    for (file, of_stage, end, missing) in cases {
        let file = format!("run/{file}");
        let before = project.read(&file);
        project.write(&file, &before.replacen('1', "2", 1));
        let note = format!("{of_stage} has other content than when it was written{end}");
        let table = project.querl(&["report", "run"]).ok().stdout;
        assert!(table.contains(&format!("\n{note}\n")), "{table}");
        let html = project.read("run/report.html");
        assert!(html.contains(end) && !html.contains(missing));
        let stats = project.querl(&["data", "stats", "querl.toml"]).ok().stdout;
        assert!(stats.contains(&note), "{stats}");
        let pooled = project.querl(&["report", "run", "twin", "--pool"]).ok().stdout;
        assert!(pooled.contains(&format!("run: {note}")), "{pooled}");
        std::fs::remove_file(project.path(&file)).unwrap();
        let table = project.querl(&["report", "run"]).ok().stdout;
        assert!(table.contains(&format!("\n{of_stage} is missing\n")), "{table}");
        project.write(&file, &before);
    }
    let table = project.querl(&["report", "run"]).ok().stdout;
    assert!(!table.contains("funnel"), "{table}");
}

/// The model of these tests has random weights.
#[test]
fn a_model_that_is_noise_stops_the_run_after_sft_and_its_checkpoint_is_kept() {
    let project = Project::new();
    project.edit("on_noise = \"warn\"", "on_noise = \"stop\"");
    let finding = "the model is noise after sft: its eval loss is ";
    for sft in ["sft: done in ", "sft: finished earlier, skipped\n"] {
        let stopped = project.querl(&["run", "querl.toml"]);
        assert!(stopped.code == Some(3) && stopped.stderr.contains(sft), "{stopped:#?}");
        // Symptom: nothing was printed between `running` and the last step.
        let start = stopped.stderr.lines().find(|line| line.ends_with(" trainable parameters"));
        assert_eq!(start.is_some(), sft == "sft: done in ", "{stopped:#?}");
        assert!(start.is_none_or(|line| line.starts_with("sft: ") && line.contains(" rows, 2 steps of ")));
        let last = stopped.stderr.lines().last().unwrap();
        assert!(last.starts_with(&format!("error: {finding}")), "{stopped:#?}");
        assert!(last.ends_with("(`querl model pretrain`), or set sft.on_noise = \"warn\""), "{stopped:#?}");
        assert!(project.path("run/sft/best").is_dir() && !project.path("run/rl/best").exists());
    }
    let warning = format!("warning: {finding}");
    let warned = project.querl(&["rl", "querl.toml"]).ok();
    assert!(warned.stderr.contains(&warning) && warned.stderr.contains("take more SFT steps or rows (2 steps on "));
    // Symptom: the last line of progress had the best reward before the evaluation of the last step.
    assert!(warned.stderr.contains("rl: 2/2 best val reward "), "{warned:#?}");
    let sft = project.querl(&["sft", "querl.toml", "--from", "sft"]).ok();
    assert!(sft.stderr.contains(&warning), "{sft:#?}");
    // The setting does not affect results: SFT is not repeated.
    let whole = project.querl(&["run", "querl.toml", "--set", "sft.on_noise=warn"]).ok();
    assert!(whole.stderr.contains("sft: finished earlier, skipped\n"), "{whole:#?}");
}

#[test]
fn thinking_is_a_setting_of_the_policy_in_all_stages() {
    let project = Project::new();
    let set = |thinking: &str| format!("model.enable_thinking={thinking}");
    let message = project.refusal(&["run", "querl.toml", "--set", &set("false")], 2);
    assert!(message.contains(": the chat template does not read `enable_thinking`; leave out model."), "{message}");

    project.copy_model("thinking");
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n\
                    {% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}";
    project.write("thinking/chat_template.jinja", template);
    let run = |thinking: Option<&str>| {
        let set = thinking.map(set).unwrap_or_else(|| "seed=42".to_owned());
        project.querl(&["run", "querl.toml", "--set", "model.path=\"thinking\"", "--set", &set]).ok()
    };
    run(None);
    for thinking in ["false", "true"] {
        let changed = run(Some(thinking));
        assert!(changed.stderr.contains("sft: running (model.enable_thinking changed)\n"), "{changed:#?}");
    }
    // A model with random weights never writes `</think>`, so that none of its responses has a rewrite.
    let records = project.rows("run/eval/records.jsonl");
    let trained: Vec<_> = records.iter().filter(|record| record["system"] == "rl").collect();
    assert!(!trained.is_empty());
    for record in trained {
        assert!(record["outcome"]["Ok"]["candidate"]["rewrite"].as_str().unwrap_or_default().is_empty(), "{record}");
    }
}

/// Symptom: a template that refuses the system message stopped `run` only at `sft`, after all calls of the teacher.
#[test]
fn a_template_that_refuses_the_prompts_stops_the_run_before_rewrite() {
    let project = Project::new();
    project.copy_model("strict");
    let template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
                    {{ m.content }}{% endfor %}";
    project.write("strict/chat_template.jinja", template);
    let with_model = |args: &[&'static str]| [args, &["--set", "model.path=\"strict\""]].concat();
    let remedy = "; plugins.prompt sends a system message, which this template refuses: use a prompt plugin that sends none, or another \
                  model";
    for command in [&["run", "querl.toml"][..], &["config", "check", "querl.toml"]] {
        let message = project.refusal(&with_model(command), 2);
        let problem = "strict/chat_template.jinja:1: chat template: invalid operation: no system; ";
        assert!(message.starts_with(problem) && message.ends_with(remedy), "{message}");
    }
    assert!(!project.path("run/data/rewrites.jsonl").exists());
    // The data stages need no model.
    project.querl(&with_model(&["run", "querl.toml", "--to", "convert"])).ok();
}

#[test]
fn prompts_without_the_date_of_the_day_are_said_once() {
    let project = Project::new();
    project.copy_model("dated");
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}";
    project.write("dated/chat_template.jinja", template);
    for command in [&["config", "check", "querl.toml"][..], &["run", "querl.toml", "--to", "sft"]] {
        let output = project.querl(&[command, &["--set", "model.path=\"dated\""]].concat()).ok();
        assert_eq!(output.stderr.matches("dated: the chat template asks for today's date").count(), 1, "{output:#?}");
    }
}
