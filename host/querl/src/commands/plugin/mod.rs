//! `querl plugin`: what authors and platform teams do with plugins. One file per command.

pub mod bench;
pub mod build;
pub mod inspect;
pub mod list;
pub mod new;
pub mod pack;
pub mod registry;
pub mod replay;
mod settings;
pub mod sign;
pub mod test;
pub mod verify;

use clap::Subcommand;

/// The commands under `querl plugin`.
#[derive(Debug, Subcommand)]
pub enum PluginCommand {
    /// Make a plugin's folder to start from, in Rust, Python or JavaScript
    New(new::NewArgs),
    /// Build the component of a plugin's folder
    Build(build::BuildArgs),
    /// Test whether a plugin keeps the contract and passes its golden cases
    Test(test::TestArgs),
    /// Measure what a plugin costs, and suggest limits
    Bench(bench::BenchArgs),
    /// Say what a bundle, a component or a folder is: settings, limits, digest, signers
    Inspect(inspect::InspectArgs),
    /// Make one file, ID-VERSION.querl, of a plugin's folder
    Pack(pack::PackArgs),
    /// List the plugins of a configuration: role, version, source, digest, weight
    List(list::ListArgs),
    /// Sign a bundle, or make a key to sign with
    Sign(sign::SignArgs),
    /// Check every byte of a bundle, and who has signed it
    Verify(verify::VerifyArgs),
    /// Put a bundle into an OCI registry
    Push(registry::PushArgs),
    /// Fetch a bundle from an OCI registry
    Pull(registry::PullArgs),
    /// Score recorded episodes with another plugin, version or setting, and say what would have changed
    Replay(replay::ReplayArgs),
}

pub fn run(command: &PluginCommand) -> anyhow::Result<()> {
    match command {
        PluginCommand::New(args) => new::run(args),
        PluginCommand::Build(args) => build::run(args),
        PluginCommand::Test(args) => test::run(args),
        PluginCommand::Bench(args) => bench::run(args),
        PluginCommand::Inspect(args) => inspect::run(args),
        PluginCommand::Pack(args) => pack::run(args),
        PluginCommand::List(args) => list::run(args),
        PluginCommand::Sign(args) => sign::run(args),
        PluginCommand::Verify(args) => verify::run(args),
        PluginCommand::Push(args) => registry::push(args),
        PluginCommand::Pull(args) => registry::pull(args),
        PluginCommand::Replay(args) => replay::run(args),
    }
}
