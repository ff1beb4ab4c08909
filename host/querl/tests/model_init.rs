//! Random models from the command line.
#![allow(clippy::unwrap_used)]

mod support;

use support::Project;

#[test]
fn a_random_model_is_made_in_memory_or_written() {
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
fn wrong_arguments_are_errors_and_measure_names_its_successor() {
    let project = Project::new();
    let rejected = |args: &[&str], what: &str| {
        let said = project.querl(args);
        assert!(said.code == Some(2) && said.stderr.contains(what), "{said:#?}");
    };
    rejected(
        &["model", "init", "--shape", "gpt", "--no-save"],
        "there is no shape \"gpt\"; expected one of qwen2.5-0.5b, ",
    );
    rejected(&["model", "init", "--shape", "tiny"], "--out <DIR>");
    rejected(&["model", "init", "--shape", "tiny", "--dtype", "nf4", "--out", "x"], "expected f32, bf16 or f16");
    rejected(&["model", "init", "--shape", "tiny", "--no-save", "--device", "cuda:0"], "querl-bench");
    rejected(&["model", "measure", "--shape", "tiny", "--json"], "cargo run --release -p querl-bench");
}
