//! A model sharded over two ranks of the CPU, through the command line, compared with one on a single rank.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::results::project;
use support::{Project, repository};

/// Figures of a stage's steps.
fn column(project: &Project, stage: &str, name: &str) -> Vec<f64> {
    let lines = project.read("run/metrics.jsonl");
    let of_stage = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    of_stage.filter(|line| line["stage"] == stage).filter_map(|line| find(&line, name)).collect()
}

fn find(line: &Value, name: &str) -> Option<f64> {
    line.get(name).or_else(|| line.get("metrics")?.get(name))?.as_f64()
}

#[test]
fn two_devices_that_hold_a_model_together_train_and_answer_as_one() {
    let model = format!("model.path={}", repository().join("examples/tiny-qwen3").display());
    let run = |sets: &[&str]| {
        let project = project();
        let common = ["sft.max_steps=3", "rl.max_steps=2", "rl.eval_steps=2", "rl.n_samples=2", &model];
        let sets: Vec<&str> = common.iter().chain(sets).flat_map(|set| ["--set", *set]).collect();
        project.querl(&[["run", "querl.toml", "--to", "eval"].as_slice(), &sets].concat()).ok();
        project
    };
    let alone = run(&[]);
    let together = run(&["device=cpu:2", "model.tensor_parallel=2"]);
    for (stage, name) in [("sft", "loss"), ("sft", "grad_norm"), ("rl", "avg_reward")] {
        let (found, expected) = (column(&together, stage, name), column(&alone, stage, name));
        assert!(!expected.is_empty() && found.len() == expected.len(), "{name}: {found:?} and {expected:?}");
        for (found, expected) in found.iter().zip(&expected) {
            // Sums in another order.
            assert!((found - expected).abs() <= 1e-4 * expected.abs().max(0.1), "{name}: {found} and {expected}");
        }
    }
    let answers = |project: &Project| {
        let lines = project.read("run/eval/records.jsonl");
        lines.lines().map(support::results::timeless).collect::<String>()
    };
    assert_eq!(answers(&together), answers(&alone));
}

#[test]
fn what_cannot_be_split_is_refused_before_anything_is_done() {
    let refused = |sets: [&str; 2]| {
        let said = project().querl(&["run", "querl.toml", "--set", sets[0], "--set", sets[1]]);
        assert_eq!(said.code, Some(2), "{said:#?}");
        said.stderr
    };
    let said = refused(["device=cpu:2", "model.tensor_parallel=2"]);
    let expected = "1 heads of keys and values (2 of queries) cannot be split over 2 ranks";
    assert!(said.contains(expected), "{said}");
    let said = refused(["device=cpu:3", "model.tensor_parallel=2"]);
    assert!(said.contains("model.tensor_parallel is 2 and device is \"cpu:3\""), "{said}");
}
