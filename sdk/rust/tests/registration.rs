//! A component without `export!` does not link, and the linker's message says what to write.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

const WITHOUT_EXPORT: &str = "
    pub struct KeepAll;
    impl querl_sdk::Filter for KeepAll {
        fn new(_: &querl_sdk::Settings) -> Result<Self, querl_sdk::SettingError> { Ok(Self) }
        fn check(&mut self, _: &querl_sdk::Sample) -> querl_sdk::Verdict { querl_sdk::Verdict::Keep }
    }";

/// The error output of cargo for a crate with this source, built as the host builds plugins; empty if it builds.
fn build(name: &str, source: &str) -> String {
    let sdk = Path::new(env!("CARGO_MANIFEST_DIR"));
    let plugins = sdk.join("../../plugins");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(folder.join("src")).unwrap();
    // Uses the profile and the target folder of the first-party plugins, so that shared dependencies are compiled once.
    let workspace = std::fs::read_to_string(plugins.join("Cargo.toml")).unwrap();
    let profile = &workspace[workspace.find("[profile.release]").unwrap()..];
    let manifest = format!(
        "[package]\nname = '{name}'\nedition = '2024'\n[workspace]\n[lib]\ncrate-type = ['cdylib']\n\
         [dependencies]\nquerl-sdk = {{ path = '{}' }}\n{profile}",
        sdk.display()
    );
    std::fs::write(folder.join("Cargo.toml"), manifest).unwrap();
    std::fs::copy(plugins.join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
    std::fs::write(folder.join("src/lib.rs"), source).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--release", "--offline", "--target", "wasm32-wasip2", "--target-dir"])
        .arg(plugins.join("target"));
    let output =
        cargo.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS").current_dir(&folder).output().unwrap();
    if output.status.success() { String::new() } else { String::from_utf8(output.stderr).unwrap() }
}

#[test]
fn component_without_registration_fails_with_what_to_write() {
    let said = build("sdk-test-unregistered", WITHOUT_EXPORT);
    let expected = "this plugin registers nothing; write querl_sdk::export!(reward: MyReward), or what kind it is, once in src/lib.rs";
    assert!(said.contains(expected), "{said}");
}

#[test]
fn component_with_registration_links() {
    assert_eq!(build("sdk-test-registered", &format!("{WITHOUT_EXPORT} querl_sdk::export!(filter: KeepAll);")), "");
}
