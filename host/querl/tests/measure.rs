//! Random models from the command line, and what a device does with them: within the program and across the border.
#![allow(clippy::unwrap_used)]

mod support;

use querl_device::Measured;
use std::path::Path;
use support::Project;

const SMALL: [&str; 16] = [
    "model",
    "measure",
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

fn with(more: &[&'static str]) -> Vec<&'static str> {
    SMALL.iter().chain(more).copied().collect()
}

fn assert_sensible(measured: &Measured) {
    assert_eq!(measured.left_out, [""; 0]);
    let ceilings = measured.ceilings.unwrap();
    assert!(ceilings.matrix.least > 0.0 && ceilings.copy.least > 0.0, "{ceilings:?}");
    let sft = measured.sft.as_ref().unwrap();
    assert!(sft.tokens > 6 * 200 && sft.computed_tokens == sft.tokens - 5 * 160 - 6, "{sft:?}");
    assert!(sft.step_s.n == 2 && sft.share_of_matrix_rate > 0.0, "{sft:?}");
    // A processor's peak holds the program and the base too.
    assert!(sft.memory.peak_bytes.unwrap() > measured.base_bytes, "{sft:?}");
    let sizes: Vec<(usize, usize)> =
        measured.rollouts.iter().map(|rolled| (rolled.sequences, rolled.prompts)).collect();
    assert_eq!(sizes, [(1, 1), (8, 2)]);
    assert!(measured.rollouts.iter().all(|rolled| rolled.tokens_per_s.median > 0.0 && rolled.cache_bytes > 0));
    let ppo = measured.ppo.as_ref().unwrap();
    assert!(ppo.iteration_s.n == 2 && ppo.parts_s.contains_key("update_actor"), "{ppo:?}");
    assert!(ppo.scorer.starts_with("a stand-in"));
}

#[test]
fn fine_tuning_rollouts_and_ppo_of_a_random_model_are_measured() {
    let project = Project::new();
    let said = project.querl(&with(&["--json", "--what", "load,sft,rollout,ppo"])).ok();
    let measured: Measured = serde_json::from_str(&said.stdout).unwrap();
    assert_sensible(&measured);
    assert_eq!(measured.load.unwrap().file_bytes, measured.parameters * 2);
    let text = project.querl(&with(&["--what", "sft"])).ok().stdout;
    assert!(text.contains("sft memory") && !text.contains("rollout"), "{text}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_measurement_crosses_the_border() {
    let deps = Path::new(env!("CARGO_BIN_EXE_querl")).parent().unwrap().join("deps");
    let project = Project::new();
    let args: Vec<&str> = with(&["--json"]).into_iter().map(|arg| if arg == "cpu" { "auto" } else { arg }).collect();
    let mut command = project.command(&args);
    let library = deps.join("libquerl_cuda.so");
    let output = command.env("QUERL_CUDA_ON_CPU", "1").env("QUERL_CUDA_LIBRARY", library).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("device: the CPU of libquerl_cuda\n"), "{said}");
    assert_sensible(&serde_json::from_slice(&output.stdout).unwrap());
}

#[test]
#[cfg(target_os = "linux")]
fn a_stopped_measurement_prints_what_it_has() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    let project = Project::new();
    let args = ["model", "measure", "--shape", "tiny", "--device", "cpu", "--repeats", "100000", "--json"];
    let mut child = project.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("parameters made") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "it ended before it began");
    }
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let measured: Measured = serde_json::from_slice(&output.stdout).unwrap();
    assert!(measured.sft.is_none() && measured.left_out.len() == 3, "{measured:?}");
    assert!(measured.left_out[2].starts_with("ppo: stopped"), "{measured:?}");
}

#[test]
fn a_random_model_is_made_in_place_or_written() {
    let project = Project::new();
    let made = project.querl(&["model", "init", "--shape", "tiny", "--device", "cpu", "--no-save", "--json"]).ok();
    let made: serde_json::Value = serde_json::from_str(&made.stdout).unwrap();
    assert!(made["parameters"].as_u64().unwrap() * 2 < made["bytes"].as_u64().unwrap(), "{made}");
    let written =
        project.querl(&["model", "init", "--shape", "tiny", "--dtype", "f32", "--out", "tiny", "--json"]).ok();
    let written: serde_json::Value = serde_json::from_str(&written.stdout).unwrap();
    assert_eq!((&written["parameters"], &written["dtype"]), (&made["parameters"], &"float32".into()));
    let loaded = querl_model::Decoder::load(&project.path("tiny"), querl_model::Weights::Frozen).unwrap();
    assert_eq!(loaded.config(), &querl_model::DecoderConfig::of_shape("tiny").unwrap());
}

#[test]
fn what_cannot_be_measured_is_said() {
    let project = Project::new();
    let refused = |args: &[&str], what: &str| {
        let said = project.querl(args);
        assert!(said.code == Some(2) && said.stderr.contains(what), "{said:#?}");
    };
    refused(&["model", "measure", "--shape", "gpt"], "there is no shape \"gpt\"; expected one of qwen2.5-0.5b, ");
    refused(&["model", "init", "--shape", "gpt", "--no-save"], "there is no shape \"gpt\"");
    refused(&["model", "init", "--shape", "tiny"], "--out <DIR>");
    refused(&["model", "init", "--shape", "tiny", "--dtype", "nf4", "--out", "x"], "expected f32, bf16 or f16");
    refused(&with(&["--own-tokens", "9,3"]), "--own-tokens: expected the fewest and the most");
    refused(&with(&["--lora-rank", "0"]), "--lora-rank is 0; expected at least 1");
    refused(
        &["model", "measure", "--shape", "tiny", "--device", "cuda:0"],
        "device is \"cuda:0\", which cannot be used: there is no CUDA driver",
    );
}
