//! `querl-conformance --host COMMAND`: tests a host of plugins, querl's or that of another framework.

use clap::Parser;
use querl_conformance::HostArgs;
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(about = "Tests whether a host of querl plugins keeps the contract")]
struct Cli {
    #[command(flatten)]
    args: HostArgs,
}

/// Exit code 0: all checks passed; 1: one failed; 2: the suite could not run.
fn main() -> ExitCode {
    match Cli::parse().args.run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
