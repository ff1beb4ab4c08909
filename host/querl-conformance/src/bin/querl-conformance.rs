//! `querl-conformance --host COMMAND`: tests a host of plugins, querl's or that of another framework.

use clap::{Parser, Subcommand};
use querl_conformance::{HostArgs, serve_host};
use querl_plugin::Compiler;
use std::io::{stdin, stdout};
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(about = "Tests whether a host of querl plugins keeps the contract")]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    args: Option<HostArgs>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer the requests of the suite with querl's own host
    Serve,
}

/// Exit code 0: all checks passed; 1: one failed; 2: the suite could not run.
fn main() -> ExitCode {
    let passed = match Cli::parse() {
        Cli { command: Some(Command::Serve), .. } => {
            let served = serve_host(stdin().lock(), stdout().lock(), &Compiler::InProcessWithoutLimits);
            served.map(|()| true).map_err(|error| error.to_string())
        }
        Cli { args: Some(args), .. } => args.run(),
        Cli { .. } => Err("expected --host COMMAND".to_owned()),
    };
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
