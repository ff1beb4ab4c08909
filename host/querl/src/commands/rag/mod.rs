//! `querl rag`: the retrieval of a configuration as a service, and what querl makes of one.

mod check;
mod serve;

use clap::Subcommand;

/// The commands under `querl rag`.
#[derive(Debug, Subcommand)]
pub enum RagCommand {
    /// Offer knowledge bases over the general_rag interface, each under the tenant and kb_name of its configuration
    Serve(serve::ServeArgs),
    /// Send three queries to the retrieval of a configuration, and say what was understood of the answers
    Check(check::CheckArgs),
}

/// Runs one of them.
///
/// # Errors
/// As each says.
pub fn run(command: &RagCommand) -> anyhow::Result<()> {
    match command {
        RagCommand::Serve(args) => serve::run(args),
        RagCommand::Check(args) => check::run(args),
    }
}
