//! `querl plugin`: what authors and platform teams do with plugins. One file per command.

pub mod list;

use clap::Subcommand;

/// The commands under `querl plugin`.
#[derive(Debug, Subcommand)]
pub enum PluginCommand {
    /// List the plugins of a configuration: role, version, source, digest, weight
    List(list::ListArgs),
}

/// Runs one of them.
///
/// # Errors
/// As each says.
pub fn run(command: &PluginCommand) -> anyhow::Result<()> {
    match command {
        PluginCommand::List(args) => list::run(args),
    }
}
