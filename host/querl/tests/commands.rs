//! Commands that need no run.
#![allow(clippy::unwrap_used)]

mod support;

use support::Project;

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

#[test]
fn config_schema_lists_keys_and_prints_json_schema() {
    let project = Project::new();
    let text = project.querl(&["config", "schema"]).ok().stdout;
    assert!(text.contains("[retrieval]\n"), "{text}");
    assert!(text.contains("\ngae_lambda = 0.95  # a number, 0.0 to 1.0; GAE's lambda.\n"), "{text}");
    let schema: serde_json::Value =
        serde_json::from_str(&project.querl(&["config", "schema", "--json"]).ok().stdout).unwrap();
    assert_eq!(schema["properties"]["rl"]["properties"]["gae_lambda"]["maximum"], 1.0);
}

#[test]
fn doctor_speaks_in_sentences() {
    let project = Project::new();
    let text = project.querl(&["doctor"]).ok().stdout;
    assert!(text.contains("device = \"auto\" takes the CPU"), "{text}");
    let findings: serde_json::Value = serde_json::from_str(&project.querl(&["doctor", "--json"]).ok().stdout).unwrap();
    let names: Vec<_> = findings.as_array().unwrap().iter().map(|finding| finding["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["querl", "cpu", "cuda", "cargo", "wasm", "plugins"]);
}

#[test]
fn wrong_usage_has_exit_code_2() {
    let project = Project::new();
    assert_eq!(project.querl(&["run"]).code, Some(2));
    assert_eq!(project.querl(&["run", "querl.toml", "--from", "nowhere"]).code, Some(2));
}
