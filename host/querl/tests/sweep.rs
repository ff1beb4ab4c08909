//! `querl sweep` and `rl.record`, on a small project.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::process::kill;
use support::results::{project, timeless};
use support::{Project, with_sets};

const HALVING: [&str; 14] = [
    "sweep",
    "querl.toml",
    "--grid",
    "rl.learning_rate=1e-5,1e-3,1e-2",
    "--seeds",
    "1",
    "--halving",
    "--set",
    "rl.max_steps=4",
    "--set",
    "rl.eval_steps=1",
    "--out",
    "s",
    "--json",
];

/// Lines of a file of a run, without times.
fn lines(project: &Project, file: &str) -> Vec<String> {
    project.read(file).lines().map(timeless).collect()
}

#[test]
fn halving_trains_the_better_half_further_and_a_trial_in_parts_is_an_uninterrupted_run() {
    let project = project();
    let first = project.querl(&HALVING).ok();
    let report: Value = serde_json::from_str(&first.stdout).unwrap();
    let combinations = report["combinations"].as_array().unwrap();
    let column = |name: &str| combinations.iter().map(|one| one[name].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!((column("rank"), column("n_rungs")), (vec![1, 2, 3], vec![3, 2, 1]), "{report}");
    let steps: Vec<_> = combinations.iter().map(|one| one["trials"][0]["measured"]["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [4, 2, 1]);
    assert_eq!((&report["finished"], &report["search"]["halving"]), (&Value::Bool(true), &Value::Bool(true)));
    let best = combinations[0]["settings"][0].as_str().unwrap();
    assert_eq!(report["best"], serde_json::json!([format!("--set {best}")]));
    // The dataset was reused from the project's own run, SFT ran once in the first trial, and the test split was not evaluated.
    assert_eq!(first.stderr.matches("convert: running").count(), 0, "{first:#?}");
    assert_eq!(first.stderr.matches("sft: running").count(), 1, "{first:#?}");
    for number in 1..=3 {
        let trial = format!("s/trials/c00{number}-s1");
        assert!(project.path(&trial).join("rl/best").is_dir() && !project.path(&trial).join("eval").exists());
    }

    let winner = combinations[0]["trials"][0]["dir"].as_str().unwrap();
    let set = ["--set", best, "--set", "seed=1", "--set", "rl.max_steps=4", "--set", "rl.eval_steps=1"];
    project.querl(&[&["run", "querl.toml", "--out", "whole", "--to", "rl"][..], &set].concat()).ok();
    for file in ["episodes.jsonl", "metrics.jsonl"] {
        assert!(lines(&project, &format!("s/{winner}/{file}")) == lines(&project, &format!("whole/{file}")), "{file}");
    }
    let weights = |run: &str| std::fs::read(project.path(run).join("rl/best/adapter_model.safetensors")).unwrap();
    assert!(weights(&format!("s/{winner}")) == weights("whole"));

    let episodes = project.read(&format!("s/{winner}/episodes.jsonl"));
    let again = project.querl(&HALVING).ok();
    assert_eq!(again.stdout, first.stdout);
    assert_eq!(project.read(&format!("s/{winner}/episodes.jsonl")), episodes);
    let other = HALVING.map(|arg| if arg.starts_with("rl.learning_rate") { "rl.learning_rate=1e-5,1e-4" } else { arg });
    let message = project.refusal(&other, 2);
    let expected =
        "s/sweep.json: holds a sweep with other combinations; repeat its command to resume it, or name another --out";
    assert_eq!(message, expected);
}

#[test]
fn a_killed_sweep_is_finished_by_the_next_command() {
    let (whole, killed) = (project(), project());
    let expected = whole.querl(&HALVING).ok().stdout;
    let mut child = killed.command(&HALVING).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let log = killed.path("s/trials/c002-s1/metrics.jsonl");
    let started = Instant::now();
    while !std::fs::read_to_string(&log).is_ok_and(|text| text.contains("\"stage\":\"rl\"")) {
        assert!(started.elapsed().as_secs() < 240 && child.try_wait().unwrap().is_none(), "no second trial");
        std::thread::sleep(Duration::from_millis(2));
    }
    kill(child);
    assert_eq!(killed.querl(&HALVING).ok().stdout, expected);
}

#[test]
fn a_grid_with_several_seeds_has_means_and_standard_errors() {
    let project = project();
    let args = ["sweep", "querl.toml", "--grid", "rl.kl_coef=0.05,0.2", "--seeds", "1,2", "--out", "s"];
    let table = project.querl(&args).ok().stdout;
    let report: Value = serde_json::from_str(&project.read("s/sweep.json")).unwrap();
    let combinations = report["combinations"].as_array().unwrap();
    assert_eq!(combinations.len(), 2);
    for one in combinations {
        let values: Vec<f64> =
            (0..2_usize).map(|trial| one["trials"][trial]["measured"]["value"].as_f64().unwrap()).collect();
        let (mean, error) = (one["mean"].as_f64().unwrap(), one["standard_error"].as_f64().unwrap());
        assert!((mean - (values[0] + values[1]) / 2.0).abs() < 1e-12, "{one}");
        assert!((error - (values[0] - values[1]).abs() / 2.0).abs() < 1e-12, "{one}");
        let rows = project.rows(&format!("s/{}/metrics.jsonl", one["trials"][0]["dir"].as_str().unwrap()));
        let rewards = rows.iter().filter_map(|row| row["val/reward"].as_f64());
        assert_eq!(rewards.fold(f64::NEG_INFINITY, f64::max), values[0]);
    }
    assert!(table.starts_with("rank  val/reward  standard error  seeds  steps  settings\n"), "{table}");
    let means = [0_usize, 1].map(|one| combinations[one]["mean"].as_f64().unwrap());
    let (best, is_tie) = (report["best"][0].as_str().unwrap(), (means[0] - means[1]).abs() < 1e-9);
    assert_eq!(report["best"].as_array().unwrap().len(), if is_tie { 2 } else { 1 });
    let sentence = match is_tie {
        true => format!("\n2 combinations tie for the best val/reward, one of them {best}"),
        false => format!("\nbest settings on the validation split: {best}"),
    };
    assert!(table.lines().last().is_some_and(|line| line.starts_with(sentence.trim_start())), "{table}");
}

#[test]
fn what_cannot_be_searched_is_refused_before_anything_runs() {
    let project = project();
    let refusal = |more: &[&str]| {
        let args = [&["sweep", "querl.toml", "--out", "s"][..], more].concat();
        let message = project.refusal(&args, 2);
        assert!(!project.path("s").exists(), "{more:?}");
        message
    };
    let seeds = ["--seeds", "1"];
    let of = |grid: &str| refusal(&[&["--grid", grid][..], &seeds].concat());
    assert_eq!(of("rl.kl_coef"), "--grid `rl.kl_coef`: expected KEY=V1,V2, such as --grid rl.kl_coef=0.01,0.05");
    assert_eq!(of("rl.gamma=0.9,2"), "--grid rl.gamma is 2; expected 0.0 to 1.0");
    let misspelt = "--grid rl.kl_coeff: unknown key rl.kl_coeff; did you mean rl.kl_coef?";
    assert_eq!(of("rl.kl_coeff=0.02,0.05"), misspelt);
    assert!(
        of("retrieval.top_k=3,5").starts_with("--grid retrieval.top_k: it changes what the validation split measures")
    );
    assert_eq!(refusal(&["--grid", "rl.gamma=0.9,1", "--seeds", "1,1"]), "--seeds: 1 is given twice; expected once");
    let metric = refusal(&[&["--grid", "rl.gamma=0.9,1", "--metric", "reward"][..], &seeds].concat());
    assert!(metric.starts_with("--metric reward: expected a metric of the evaluations on the validation split"));
    let metric = refusal(&[&["--grid", "rl.gamma=0.9,1", "--metric", "val/mrr"][..], &seeds].concat());
    let known = "val/reward, val/win_rate, val/avg_top1, val/avg_top1_teacher, val/avg_quality, val/avg_mrr, \
                 or val/reward/COMPONENT";
    assert!(metric.starts_with("--metric val/mrr: expected a metric ") && metric.ends_with(known), "{metric}");
    let message = project.refusal(&["sweep", "querl.toml", "--grid", "rl.gamma=1", "--seeds", "1", "--out", "run"], 2);
    assert_eq!(message, "run: is a run directory; name a folder of the sweep's own with --out");
}

#[test]
fn a_component_that_evaluations_do_not_have_is_named_with_those_that_they_have() {
    let project = project();
    let metric = "val/reward/none";
    let args = ["sweep", "querl.toml", "--grid", "rl.gamma=1", "--seeds", "1", "--metric", metric, "--out", "s"];
    let refused = project.querl(&args);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    let last = refused.stderr.lines().last().unwrap();
    let expected = "error: --metric val/reward/none: is no number of the evaluations; expected one of val/";
    assert!(last.starts_with(expected), "{last}");
    assert!(last.contains("val/reward"), "{last}");
}

/// If Python has numpy, recompute_step.py computes each recorded step again.
#[test]
fn a_full_record_is_computed_again_in_numpy_and_repeats_no_stage() {
    let project = project();
    let args = ["run", "querl.toml", "--to", "rl", "--set", "rl.max_steps=3"];
    project.querl(&args).ok();
    assert!(!project.path("run/rl/steps").exists());
    let full = [&args[..], &["--set", "rl.record=full"]].concat();
    let skipped = project.querl(&full).ok();
    assert!(skipped.stderr.contains("rl: finished earlier, skipped"), "{skipped:#?}");
    let python = std::env::var("QUERL_PYTHON").unwrap_or_else(|_| "python3".into());
    let has_numpy = Command::new(&python).args(["-c", "import numpy, tomllib"]).output();
    let has_numpy = has_numpy.is_ok_and(|output| output.status.success());
    let script = support::repository().join("tests/reference/recompute_step.py");
    let algorithms: [&[&str]; 4] = [
        &["rl.algorithm=ppo"],
        &["rl.algorithm=ppo", "rl.advantage_form=sequence", "rl.normalize_rewards=true"],
        &["rl.algorithm=grpo", "rl.n_samples=3", "rl.kl_placement=loss", "rl.kl_estimator=k3"],
        &["rl.algorithm=rloo", "rl.n_samples=2", "rl.off_by_one=true", "rl.ppo_epochs=2"],
    ];
    for sets in algorithms {
        let args = with_sets(&[&full[..], &["--from", "rl"]].concat(), sets);
        project.querl(&args).ok();
        for step in 1..=3 {
            assert!(project.path(&format!("run/rl/steps/step-{step:06}.safetensors")).is_file(), "{args:?}");
        }
        if has_numpy {
            let output = Command::new(&python).arg(&script).arg(project.path("run")).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{args:?}\n{text}{}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(text.matches(": ok\n").count(), 3, "{text}");
        }
    }
    if !has_numpy {
        println!("recompute_step.py was not run: {python} has no numpy");
    }
}
