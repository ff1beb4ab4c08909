//! The benchmark program on a tiny model.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::process::{Command, Output};

const SMALL: [&str; 14] = [
    "--shape",
    "tiny",
    "--device",
    "cpu",
    "--repeats",
    "2",
    "--rows",
    "6",
    "--batch",
    "4",
    "--sequences",
    "1,8",
    "--max-new-tokens",
    "6",
];

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_querl-bench")).args(args).output().unwrap()
}

fn small(more: &[&str]) -> Output {
    bench(&[&SMALL, more].concat())
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

#[test]
fn fine_tuning_rollouts_and_ppo_of_a_random_model_are_measured() {
    let output = small(&["--json", "--what", "load,sft,rollout,ppo"]);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["left_out"], Value::Array(Vec::new()));
    assert!(number(&report["ceilings"]["matrix"]["least"]) > 0.0 && number(&report["ceilings"]["copy"]["least"]) > 0.0);
    let sft = &report["sft"];
    let tokens = number(&sft["tokens"]);
    assert!(tokens > 6.0 * 200.0 && number(&sft["computed_tokens"]) == tokens - 5.0 * 160.0 - 6.0, "{sft}");
    assert!(sft["step_s"]["n"] == 2 && number(&sft["share_of_matrix_rate"]) > 0.0, "{sft}");
    // On the CPU the peak includes the program and the base.
    assert!(number(&sft["memory"]["peak_bytes"]) > number(&report["base_bytes"]), "{sft}");
    let rollouts = report["rollouts"].as_array().unwrap();
    let sizes: Vec<[u64; 2]> =
        rollouts.iter().map(|one| ["sequences", "prompts"].map(|key| one[key].as_u64().unwrap())).collect();
    assert_eq!(sizes, [[1, 1], [8, 2]]);
    assert!(
        rollouts.iter().all(|one| number(&one["tokens_per_s"]["median"]) > 0.0 && number(&one["cache_bytes"]) > 0.0)
    );
    let ppo = &report["ppo"];
    assert!(ppo["iteration_s"]["n"] == 2 && !ppo["parts_s"]["update_actor"].is_null(), "{ppo}");
    assert!(ppo["scorer"].as_str().unwrap().starts_with("a stand-in"));
    assert_eq!(number(&report["load"]["file_bytes"]), number(&report["parameters"]) * 2.0);
    let text = String::from_utf8(small(&["--what", "sft"]).stdout).unwrap();
    assert!(text.contains("sft memory") && !text.contains("rollout"), "{text}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_stopped_benchmark_prints_what_it_has() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;
    let mut child = Command::new(env!("CARGO_BIN_EXE_querl-bench"))
        .args(["--shape", "tiny", "--device", "cpu", "--repeats", "100000", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("parameters initialised") {
        line.clear();
        assert!(stderr.read_line(&mut line).unwrap() > 0, "it ended before it began");
    }
    std::thread::spawn(move || stderr.lines().count());
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let skipped = report["left_out"].as_array().unwrap();
    assert!(report["sft"].is_null() && skipped.len() == 3, "{report}");
    assert!(skipped[2].as_str().unwrap().starts_with("ppo: stopped"), "{report}");
}

#[test]
fn wrong_arguments_are_errors() {
    let rejected = |output: Output, what: &str| {
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && stderr.contains(what), "{stderr}");
    };
    rejected(bench(&["--shape", "gpt"]), "there is no shape \"gpt\"; expected one of qwen2.5-0.5b, ");
    rejected(small(&["--own-tokens", "9,3"]), "--own-tokens: expected the fewest and the most");
    rejected(small(&["--lora-rank", "0"]), "--lora-rank is 0; expected at least 1");
    let no_gpu = bench(&["--shape", "tiny", "--device", "cuda:1000"]);
    rejected(no_gpu, if cfg!(feature = "cuda") { "" } else { "has no CUDA" });
}
