//! The `querl` command: `cli.rs` parses the command line, `terminal.rs` prints, and each command is a thin module in `commands/` over
//! querl-pipeline, querl-style and querl-serve.
//!
//! In: a command line and a configuration file. Out: results on stdout, progress on stderr, an exit code. Ctrl-C:
//! `querl_pipeline::interrupt`. Signals and limits of the system: `process.rs`.

// A program has no public interface: `pub` items are those that other modules use.
#![allow(unreachable_pub)]

mod args;
mod cli;
mod commands;
mod model_hub;
mod new_folder;
mod process;
mod terminal;

use cli::{Cli, Command};
use querl_pipeline::failure::{self, Ending};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: process::Allocator = process::Allocator;

/// Defaults of environment variables. `CANDLE_NUM_THREADS`: candle's own thread pool waits by spinning on the cores that querl's kernels
/// use; with one thread, full fine-tuning takes a third less CPU time (`full` of `host/querl-train/examples/bench.rs`, with and without).
/// `RUST_LIB_BACKTRACE`: no backtraces in candle's error messages; `RUST_BACKTRACE` still applies to panics.
const ENVIRONMENT: [(&str, &str); 2] = [("CANDLE_NUM_THREADS", "1"), ("RUST_LIB_BACKTRACE", "0")];

fn main() -> ExitCode {
    for (name, value) in ENVIRONMENT {
        if std::env::var_os(name).is_none() {
            // SAFETY: this is the program's first statement; no other thread can read the environment.
            unsafe { std::env::set_var(name, value) };
        }
    }
    process::keep_freed_memory();
    process::end_where_no_thread_starts();
    // Signal handlers are installed before other threads exist.
    let signals = process::install_signals();
    process::on_a_stack(move || run(signals))
}

fn run(signals: anyhow::Result<()>) -> ExitCode {
    let cli = Cli::parse_or_exit();
    terminal::init(cli.noise.verbosity());
    if has_stages(&cli.command) {
        process::set_resumable();
    }
    match signals.and_then(|()| dispatch(cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of a pipe has closed it, as in `querl ... | head`. No message.
        Err(error) if failure::is_closed_pipe(&error) => ExitCode::from(Ending::Failed as u8),
        Err(error) => {
            if let Some(details) = failure::details(&error) {
                terminal::print_error(details.trim_end());
            }
            terminal::print_error(&format!("error: {}", failure::sentence(&error)));
            ExitCode::from(failure::ending_of(&error) as u8)
        }
    }
}

/// True for a command with stages or checkpoints: the same command resumes it.
fn has_stages(command: &Command) -> bool {
    use Command::{Convert, Eval, Model, Report, Rewrite, Rl, Run, Sft, Style, Sweep, Validate};
    matches!(
        command,
        Run(_)
            | Rewrite(_)
            | Validate(_)
            | Convert(_)
            | Sft(_)
            | Rl(_)
            | Eval(_)
            | Report(_)
            | Sweep(_)
            | Style(_)
            | Model(_)
    )
}

fn dispatch(command: Command) -> anyhow::Result<()> {
    use querl_pipeline::ledger::StageName;
    match command {
        Command::Plan(args) => commands::plan::run(&args),
        Command::Run(args) => commands::run::run(&args),
        Command::Rewrite(args) => commands::run::model_stage(StageName::Rewrite, &args),
        Command::Validate(args) => commands::run::model_stage(StageName::Validate, &args),
        Command::Convert(args) => commands::run::stage(StageName::Convert, &args),
        Command::Sft(args) => commands::run::model_stage(StageName::Sft, &args),
        Command::Rl(args) => commands::run::model_stage(StageName::Rl, &args),
        Command::Eval(args) => commands::run::model_stage(StageName::Eval, &args),
        Command::Report(args) => commands::run::report(&args),
        Command::Audit(args) => commands::audit::run(&args),
        Command::Sweep(args) => commands::sweep::run(&args),
        Command::Watch(args) => commands::watch::run(&args),
        Command::Track(args) => commands::track::run(&args),
        Command::Config(command) => commands::config::run(&command),
        Command::Data(command) => commands::data::run(&command),
        Command::Model(command) => commands::model::run(&command),
        Command::Plugin(command) => commands::plugin::run(&command),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Release(command) => commands::release::run(&command),
        Command::Deploy(args) => commands::deploy::run(&args),
        Command::Export(command) => commands::export::run(&command),
        Command::Import(command) => commands::import::run(&command),
        Command::Rag(command) => commands::rag::run(&command),
        Command::Cache(command) => commands::cache::run(&command),
        Command::Style(command) => commands::style::run(&command),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Completions { shell } => cli::print_completions(shell),
        Command::Man { dir } => cli::write_man_pages(dir.as_deref()),
        Command::CompilePlugin(args) => commands::plugin::compile(&args),
        Command::ReplayNativeLibrary(args) => commands::plugin::dev::replay_library(&args),
    }
}
