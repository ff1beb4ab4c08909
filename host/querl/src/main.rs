//! The `querl` command: grammar of the command line, terminal, and one thin module per command over querl-pipeline and querl-style.
//!
//! In: a command line and a configuration file. Out: results on stdout, progress on stderr, an exit code.

// In a program nothing is reachable from outside; `pub` says here that other modules use it.
#![allow(unreachable_pub)]

mod allocator;
mod args;
mod cli;
mod commands;
mod interrupt;
mod terminal;

use clap::Parser;
use cli::{Cli, Command};
use querl_pipeline::failure::{self, Ending};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// One thread for candle's own pool: its elementwise operations wait by spinning, on cores that our kernels' threads need. A
/// third of the processor's time of full fine-tuning (`examples/bench.rs`, `full`, with and without).
const CANDLE_THREADS: (&str, &str) = ("CANDLE_NUM_THREADS", "1");

fn main() -> ExitCode {
    if std::env::var_os(CANDLE_THREADS.0).is_none() {
        // SAFETY: this is the program's first statement; there is no other thread that could read the environment meanwhile.
        unsafe { std::env::set_var(CANDLE_THREADS.0, CANDLE_THREADS.1) };
    }
    allocator::keep_memory();
    let cli = Cli::parse();
    terminal::init(cli.noise.verbosity());
    match interrupt::install().and_then(|()| dispatch(cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read our output has read enough: `querl ... | head`.
        Err(error) if failure::is_closed_pipe(&error) => ExitCode::from(Ending::Failed as u8),
        Err(error) => {
            if let Some(details) = failure::details(&error) {
                eprintln!("{}", details.trim_end());
            }
            eprintln!("error: {}", failure::sentence(&error));
            ExitCode::from(failure::ending_of(&error) as u8)
        }
    }
}

fn dispatch(command: Command) -> anyhow::Result<()> {
    use querl_pipeline::ledger::StageName;
    match command {
        Command::Run(args) => commands::run::run(&args),
        Command::Rewrite(args) => commands::run::stage(StageName::Rewrite, &args),
        Command::Validate(args) => commands::run::stage(StageName::Validate, &args),
        Command::Convert(args) => commands::run::stage(StageName::Convert, &args),
        Command::Sft(args) => commands::run::stage(StageName::Sft, &args),
        Command::Rl(args) => commands::run::stage(StageName::Rl, &args),
        Command::Eval(args) => commands::run::stage(StageName::Eval, &args),
        Command::Report(args) => commands::report::run(&args),
        Command::Watch(args) => commands::watch::run(&args),
        Command::Config(command) => commands::check::run(&command),
        Command::Data(command) => commands::data::run(&command),
        Command::Model(command) => commands::model::run(&command),
        Command::Plugin(command) => commands::plugin::run(&command),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Rag(command) => commands::rag::run(&command),
        Command::Cache(command) => commands::cache::run(&command),
        Command::Style(command) => commands::style::run(&command),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::CompilePlugin(args) => commands::compile_plugin::run(&args),
    }
}
