//! Hostile and invalid guests: for each, the host reports the expected error, and the next calls of the same plugin and of another one
//! succeed.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;

mod cache;
mod contract;
mod contract_0_2;
mod isolation;
mod limits;
mod probe;
mod results;
mod style;
mod threads;

use std::path::Path;

/// The concatenated text of all `.rs` files in `folder`.
fn sources(folder: &Path) -> String {
    let Ok(entries) = std::fs::read_dir(folder) else { return String::new() };
    let text = |path: &Path| match path.is_dir() {
        true => sources(path),
        false if path.extension().is_some_and(|extension| extension == "rs") => std::fs::read_to_string(path).unwrap(),
        false => String::new(),
    };
    entries.map(|entry| text(&entry.unwrap().path())).collect()
}

/// Functions that load a guest by its name.
const LOADERS: [&str; 14] = [
    "guest(",
    "refusal(",
    "fault_message(",
    "message_of_result(",
    "overshoot(",
    "assert_stopped_by_fuel(",
    "fault_within(",
    "component(",
    "report(",
    "broken(",
    "assert_breaches(",
    "load_guest(",
    "load_probe(",
    "fault_of_recheck(",
];

/// The calls of these functions in the tests, without comments, which test nothing.
fn calls_of_loaders(tests: &str) -> String {
    let code = tests.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code = code.collect::<Vec<_>>().join("\n");
    code.split("\n}\n").filter(|function| LOADERS.iter().any(|loader| function.contains(loader))).collect()
}

#[test]
fn every_guest_has_a_test() {
    let tests = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests"))
        + &sources(&common::repository().join("host/querl-conformance/tests"));
    let names = |folder: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    let crates = names(&common::repository().join("tests/guests"));
    let crates = crates.iter().filter(|name| name.contains('-'));
    let modules = names(&common::wat::folder());
    let modules = modules.iter().filter_map(|name| name.strip_suffix(".wat"));
    let n_guests = crates.clone().count() + modules.clone().count();
    let tests = calls_of_loaders(&tests);
    let is_named = |name: &&str| tests.contains(&format!("\"{name}\""));
    let untested: Vec<_> = crates
        .map(|name| name.strip_prefix("guest-").unwrap_or(name))
        .chain(modules)
        .filter(|name| !is_named(name))
        .collect();
    assert!(untested.is_empty(), "no test uses {untested:?}");
    assert!(n_guests > 90, "{n_guests}");
}
