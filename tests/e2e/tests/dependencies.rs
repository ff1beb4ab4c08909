//! Permitted dependencies between crates. core <- data, bundle, model, encoder; bundle <- plugin <- conformance; model <- train <- cuda;
//! core <- eval; data <- serve; data, train, eval <- style <- pipeline; all <- querl.
#![allow(clippy::unwrap_used)]

use cargo_metadata::{Metadata, MetadataCommand};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Crates of this workspace, and the crates of the workspace that each may depend on, tests included.
const ALLOWED: [(&str, &[&str]); 19] = [
    ("querl-core", &[]),
    ("querl-data", &["querl-core", "querl-faulty"]),
    // Itself with the feature `oci`, for its own tests.
    ("querl-bundle", &["querl-core", "querl-bundle"]),
    // The SDK in its tests and examples only: a plugin is compared with the same function in native Rust.
    ("querl-plugin", &["querl-core", "querl-bundle", "querl-sdk"]),
    // The SDK for its reader of golden cases.
    ("querl-conformance", &["querl-core", "querl-bundle", "querl-plugin", "querl-sdk"]),
    ("querl-model", &["querl-core"]),
    // GPUs in its tests only.
    ("querl-train", &["querl-core", "querl-model", "querl-gpu"]),
    ("querl-bench", &["querl-core", "querl-gpu", "querl-model", "querl-train"]),
    ("querl-gpu", &["querl-core", "querl-model", "querl-train"]),
    ("querl-eval", &["querl-core"]),
    ("querl-encoder", &["querl-core"]),
    ("querl-serve", &["querl-core", "querl-data"]),
    ("querl-style", &["querl-core", "querl-data", "querl-eval", "querl-model", "querl-train"]),
    (
        "querl-pipeline",
        &[
            "querl-core",
            "querl-bundle",
            "querl-data",
            "querl-plugin",
            "querl-model",
            "querl-train",
            "querl-encoder",
            "querl-eval",
            "querl-style",
        ],
    ),
    (
        "querl",
        &[
            "querl-core",
            "querl-bundle",
            "querl-data",
            "querl-plugin",
            "querl-conformance",
            "querl-model",
            "querl-train",
            "querl-pipeline",
            "querl-style",
            // In its tests only: the program loads the library at run time and is not linked with it.
            "querl-gpu",
            "querl-eval",
            // In its tests only.
            "querl-encoder",
            "querl-faulty",
            "querl-serve",
        ],
    ),
    // The Python module is another program on top of the pipeline.
    ("querl-python", &["querl-core", "querl-plugin", "querl-pipeline"]),
    ("querl-faulty", &[]),
    // Itself with the feature `dev`, for its own tests.
    ("querl-sdk", &["querl-sdk"]),
    ("querl-e2e", &[]),
];

/// Crates that must not be reached even through other crates, with the reason.
const FORBIDDEN: [(&str, &[&str], &str); 15] = [
    ("querl-core", &["candle-core", "wasmtime", "tokio", "reqwest"], "records and ports know no machinery"),
    ("querl-data", &["candle-core", "wasmtime"], "data knows no models and no plugins"),
    (
        "querl-bundle",
        &["candle-core", "wasmtime", "reqwest", "tokio"],
        "a bundle is bytes; a network client and a runtime need the feature oci",
    ),
    ("querl-bundle/oci", &["candle-core", "wasmtime"], "sending bytes needs no engine"),
    ("querl-plugin", &["candle-core", "reqwest", "tokio"], "plugins know no models, network and runtime"),
    ("querl-model", &["wasmtime", "reqwest", "tokio", "cudarc"], "models know no plugins, network and CUDA"),
    ("querl-train", &["wasmtime", "reqwest", "tokio", "cudarc"], "rewards arrive through a port"),
    ("querl-gpu", &["wasmtime", "reqwest", "tokio"], "the library does jobs and nothing else"),
    ("querl-style", &["wasmtime", "clap"], "a classifier has no plugins and no command line"),
    ("querl-pipeline", &["querl-gpu", "clap", "indicatif"], "a library has no command line and prints nothing"),
    ("querl", &["querl-gpu", "cudarc"], "a program linked with CUDA does not start without its driver"),
    ("querl-eval", &["candle-core", "wasmtime", "reqwest", "tokio"], "figures are pure"),
    ("querl-python", &["clap", "indicatif"], "a library has no command line and prints nothing"),
    ("querl-encoder", &["wasmtime", "reqwest", "tokio"], "models know no plugins and network"),
    ("querl-serve", &["candle-core", "wasmtime"], "an interface knows no machinery"),
];

/// Metadata for this machine's platform only, so that nothing is downloaded.
fn metadata() -> Metadata {
    let version = Command::new("rustc").arg("-vV").output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap().to_owned();
    let options = ["--offline".to_owned(), "--filter-platform".to_owned(), host];
    MetadataCommand::new().manifest_path(manifest()).other_options(options).exec().unwrap()
}

#[test]
fn crates_depend_only_on_those_below_them() {
    let metadata = metadata();
    let allowed: BTreeMap<_, _> = ALLOWED.into_iter().collect();
    for package in metadata.workspace_packages() {
        let name = package.name.as_str();
        let may = allowed.get(name).unwrap_or_else(|| panic!("{name} is new: list in ALLOWED what it may depend on"));
        let ours = package.dependencies.iter().map(|dependency| dependency.name.as_str());
        for other in ours.filter(|other| allowed.contains_key(other)) {
            assert!(may.contains(&other), "{name} must not depend on {other}");
        }
    }
}

#[test]
fn only_the_plugin_host_depends_on_wasmtime() {
    let metadata = metadata();
    for package in metadata.workspace_packages().iter().filter(|package| package.name.as_str() != "querl-plugin") {
        let direct = package.dependencies.iter().find(|dependency| dependency.name.starts_with("wasmtime"));
        assert!(direct.is_none(), "{} depends on {}", package.name, direct.unwrap().name);
    }
}

#[test]
fn crates_do_not_reach_forbidden_dependencies() {
    for (name, forbidden, reason) in FORBIDDEN {
        let reached = reachable(name);
        let found: Vec<_> = forbidden.iter().filter(|other| reached.contains(**other)).collect();
        assert!(found.is_empty(), "{name} reaches {found:?}: {reason}");
    }
}

/// Names of all packages in the build of `name` (a package, or `package/feature`) alone, without tests and build scripts. Uses `cargo
/// tree`, because `cargo metadata` merges the features that all crates of the workspace request.
fn reachable(name: &str) -> BTreeSet<String> {
    let (package, features) = name.split_once('/').unwrap_or((name, ""));
    let mut command = Command::new(env!("CARGO"));
    command.args(["tree", "--offline", "--edges", "normal", "--prefix", "none", "--format", "{p}"]);
    command.args(["--package", package, "--features", features, "--manifest-path"]).arg(manifest());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).unwrap();
    tree.lines().filter_map(|line| line.split(' ').next().map(str::to_owned)).collect()
}

fn manifest() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml")
}
