//! The command line of the suite for hosts.

use super::HostSuite;
use crate::report::{Check, Outcome};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `querl-conformance` and `querl plugin conformance`.
#[derive(Debug, Clone, Args)]
pub struct HostArgs {
    /// Command line of the host, which speaks the protocol of docs/spec/host-protocol.md
    #[arg(long, value_name = "COMMAND")]
    host: String,
    /// A plugin with golden cases: a bundle, a folder with its component or its source, or NAME.wasm next to golden/NAME; may be repeated
    #[arg(long, value_name = "PATH")]
    plugin: Vec<PathBuf>,
    /// How long the host may take for one reply, in seconds
    #[arg(long, value_name = "N", default_value_t = 120)]
    timeout_s: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl HostArgs {
    /// Runs the suite and prints each check as it ends. Returns true if all checks passed.
    ///
    /// # Errors
    /// As [`HostSuite::run`].
    pub fn run(&self) -> Result<bool, String> {
        let suite = HostSuite {
            command: self.host.clone(),
            plugins: self.plugin.clone(),
            timeout: Duration::from_secs(self.timeout_s),
        };
        let is_text = !self.json;
        let checks = suite.run(&mut |check| {
            if is_text {
                print!("{}", line(check));
            }
        })?;
        let n_failed = checks.iter().filter(|check| matches!(check.outcome, Outcome::Failed(_))).count();
        match self.json {
            true => println!("{}", json!({"passed": n_failed == 0, "checks": checks})),
            false => println!("\n{} passed, {n_failed} failed", checks.len() - n_failed),
        }
        Ok(n_failed == 0)
    }
}

fn line(check: &Check) -> String {
    match &check.outcome {
        Outcome::Failed(failure) => format!(
            "FAIL  {}\n        sent      {}\n        returned  {}\n        contract  {}\n",
            check.name, failure.sent, failure.returned, failure.expected
        ),
        _ => format!("ok    {}\n", check.name),
    }
}
