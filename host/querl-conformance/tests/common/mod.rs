//! Helpers shared by the tests in this folder.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test file uses a part of this")]

use querl_conformance::{Check, Outcome, Report, SuiteOptions};
use std::path::{Path, PathBuf};

#[path = "../../../querl-plugin/tests/common/wat.rs"]
pub mod wat;

/// A golden case of the guest `counts-tokens`, which scores 1 divided by a number of tokens.
pub const FOUR_TOKENS: &str = r#"{"name": "四个", "episode": {"query": "x", "policy": {}}, "expect": {"total": 0.25},
    "calls": [{"request": {"count_tokens": "0.1.0"}, "response": {"Ok": {"count": 4}}}]}"#;

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Compiled plugins outlive a test run, as they do for a user.
pub fn options(settings: &str) -> SuiteOptions {
    SuiteOptions {
        n_repeats: 20,
        n_threads: 2,
        settings: toml::from_str(settings).unwrap(),
        cache_dir: Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("plugin-cache")),
        ..SuiteOptions::default()
    }
}

/// The suite on a folder of the repository under these settings.
pub fn report(folder: &str, settings: &str) -> Report {
    querl_conformance::run(&repository().join(folder), &options(settings)).unwrap()
}

/// The suite on a component in a file of its own.
pub fn report_of_component(component: &[u8], settings: &str) -> Report {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plugin.wasm");
    std::fs::write(&path, component).unwrap();
    querl_conformance::run(&path, &options(settings)).unwrap()
}

/// The files in `folder` whose names end so, in order.
pub fn files(folder: PathBuf, suffix: &str) -> Vec<PathBuf> {
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths.filter(|path| path.to_string_lossy().ends_with(suffix)).collect();
    paths.sort();
    paths
}

/// The suite on a guest that breaks the rule `breach`.
pub fn broken(guest: &str, breach: &str) -> Report {
    report(&format!("tests/guests/{guest}"), &format!("breach = '{breach}'"))
}

pub fn failed(report: &Report) -> Vec<&str> {
    let failed = report.checks.iter().filter(|check| matches!(check.outcome, Outcome::Failed(_)));
    failed.map(|check| check.name.as_str()).collect()
}

/// Sent, received and expected value in the message of a failed check.
pub fn failure<'a>(report: &'a Report, name: &str) -> [&'a str; 3] {
    match &check(report, name).outcome {
        Outcome::Failed(failure) => [&failure.sent, &failure.returned, &failure.expected].map(String::as_str),
        other => panic!("{name}: {other:?}"),
    }
}

pub fn check<'a>(report: &'a Report, name: &str) -> &'a Check {
    report.checks.iter().find(|check| check.name == name).unwrap_or_else(|| panic!("no check {name}"))
}
