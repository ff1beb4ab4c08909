//! `querl rag`: checks a retrieval service, or serves retrieval.

mod check;
mod serve;

pub(super) use serve::{ServeArgs, run as serve};

use crate::terminal::report_new_form;
use clap::Subcommand;

/// The commands under `querl rag`.
#[derive(Debug, Subcommand)]
pub enum RagCommand {
    /// Serve knowledge bases over the general_rag interface, as `querl serve rag` does
    Serve(serve::ServeArgs),
    /// Send three queries to the retrieval service of a configuration and print what its answers were parsed to
    Check(check::CheckArgs),
}

pub fn run(command: &RagCommand) -> anyhow::Result<()> {
    match command {
        RagCommand::Serve(args) => {
            report_new_form("querl rag serve", "querl serve rag");
            serve::run(args)
        }
        RagCommand::Check(args) => check::run(args),
    }
}
