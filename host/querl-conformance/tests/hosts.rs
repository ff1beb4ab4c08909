//! The suite for hosts, run on querl's own host and on stub hosts that violate the protocol.
#![allow(clippy::unwrap_used)]

mod common;

use querl_conformance::{Check, HostSuite, Outcome};
use std::path::PathBuf;
use std::time::Duration;

fn run(command: &str, plugins: Vec<PathBuf>) -> Vec<Check> {
    let suite = HostSuite { command: command.to_owned(), plugins, timeout: Duration::from_secs(120) };
    suite.run(&mut |_| {}).unwrap()
}

fn failed(checks: &[Check]) -> Vec<String> {
    let failed = checks.iter().filter_map(|check| match &check.outcome {
        Outcome::Failed(failure) => Some(format!("{}: {}", check.name, failure.returned)),
        _ => None,
    });
    failed.collect()
}

#[test]
fn querls_host_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let component = folder.path().join("counts-tokens.wasm");
    std::fs::write(&component, common::wat::component("counts-tokens")).unwrap();
    std::fs::create_dir(folder.path().join("golden")).unwrap();
    std::fs::write(folder.path().join("golden/counts-tokens.jsonl"), common::FOUR_TOKENS.replace('\n', " ")).unwrap();
    let mut plugins = common::files(common::repository().join("tests/plugins-0.1"), ".querl");
    plugins.push(component);
    let checks = run(&format!("{} serve", env!("CARGO_BIN_EXE_querl-conformance")), plugins);
    assert!(
        checks.iter().any(|check| check.name == "counts-tokens: 四个") && checks.len() > 80,
        "{} checks",
        checks.len()
    );
    assert_eq!(failed(&checks), [""; 0]);
}

#[test]
fn host_that_agrees_to_everything_fails() {
    let checks = run("while read -r line; do echo '{\"ok\": []}'; done", Vec::new());
    let failed = failed(&checks);
    // `end` is the only request to which any reply is valid.
    assert_eq!(failed.len(), checks.len() - 1, "{failed:?}");
}

#[test]
fn host_that_ends_fails_every_check() {
    let checks = run("exit 3", Vec::new());
    let failed = failed(&checks);
    assert_eq!(failed.len(), checks.len());
    assert!(failed.iter().all(|failure| failure.contains("ended")), "{failed:?}");
}
