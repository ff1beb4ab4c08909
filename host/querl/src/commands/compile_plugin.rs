//! The hidden command that a plugin host calls to have a component compiled where it can be stopped.

use clap::Args;
use std::path::PathBuf;

/// What the host hands over.
#[derive(Debug, Args)]
pub struct CompileArgs {
    /// The component
    input: PathBuf,
    /// Where the compiled code goes
    output: PathBuf,
    /// How long it may take
    timeout_ms: u64,
}

/// Compiles under limits of its own on time and memory.
pub fn run(args: &CompileArgs) -> anyhow::Result<()> {
    Ok(querl_plugin::compile_child(&args.input, &args.output, args.timeout_ms)?)
}
