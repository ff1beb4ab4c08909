//! The `querl` command: grammar of the command line, terminal, and one thin module per command over querl-pipeline and querl-style.
//!
//! In: a command line and a configuration file. Out: results on stdout, progress on stderr, an exit code. Ctrl-C:
//! `querl_pipeline::interrupt`.

// A program has no public interface; `pub` marks what other modules use.
#![allow(unreachable_pub)]

mod args;
mod cli;
mod commands;
mod model_hub;
mod terminal;

use clap::Parser;
use cli::{Cli, Command};
use querl_pipeline::failure::{self, Ending};
use querl_pipeline::interrupt::{self, InterruptKind};
use std::ffi::c_int;
use std::process::ExitCode;
#[cfg(unix)]
use std::sync::atomic::{AtomicBool, Ordering};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Environment variables where they are not set. One thread for candle's own pool, whose elementwise operations wait by spinning on cores
/// that our kernels' threads need: a third of the CPU time of full fine-tuning (`examples/bench.rs`, `full`, with and without). No
/// backtraces in the messages of candle's errors; those of panics stay with `RUST_BACKTRACE`.
const ENVIRONMENT: [(&str, &str); 2] = [("CANDLE_NUM_THREADS", "1"), ("RUST_LIB_BACKTRACE", "0")];

fn main() -> ExitCode {
    for (name, value) in ENVIRONMENT {
        if std::env::var_os(name).is_none() {
            // SAFETY: this is the program's first statement; no other thread can read the environment.
            unsafe { std::env::set_var(name, value) };
        }
    }
    keep_freed_memory();
    let cli = Cli::parse();
    terminal::init(cli.noise.verbosity());
    match install_signals().and_then(|()| dispatch(cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader has closed the pipe: `querl ... | head`.
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

fn report(kind: InterruptKind) {
    match kind {
        InterruptKind::AtSafePoint => {
            terminal::print("stopping at the next safe point; interrupt again to stop at once")
        }
        InterruptKind::AtOnce => terminal::print_error(
            "error: interrupted; finished stages and checkpoints are kept, run the same command again",
        ),
    }
}

/// Installs the handler of interrupts. SIGHUP stays ignored where the parent ignores it (`nohup`). SIGXFSZ is ignored: a write beyond the
/// limit of `ulimit -f` then fails with an error that names the file.
fn install_signals() -> anyhow::Result<()> {
    #[cfg(unix)]
    // SAFETY: asks for and sets dispositions of signals and the mask, before other threads exist; no handler runs. SIGHUP is blocked until
    // its own handler is set: one that arrives before is then handled, or ignored, like any other.
    let (mask, is_hangup_ignored) = unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        let (mut hangup, mut mask) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&mut hangup);
        libc::sigaddset(&mut hangup, libc::SIGHUP);
        libc::pthread_sigmask(libc::SIG_BLOCK, &hangup, &mut mask);
        (mask, libc::signal(libc::SIGHUP, libc::SIG_DFL) == libc::SIG_IGN)
    };
    interrupt::install(report)?;
    #[cfg(unix)]
    {
        let handler = if is_hangup_ignored { libc::SIG_IGN } else { hang_up as *const () as libc::sighandler_t };
        // SAFETY: as above; the handler of interrupts is installed, and no longer for SIGHUP.
        unsafe {
            libc::signal(libc::SIGHUP, handler);
            libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
        }
    }
    Ok(())
}

/// A closed terminal sends SIGHUP more than once, from the kernel and from the shell: the first is a SIGTERM, the others do nothing. A server
/// without a terminal reloads.
#[cfg(unix)]
extern "C" fn hang_up(_: c_int) {
    static IS_CLOSED: AtomicBool = AtomicBool::new(false);
    if !interrupt::note_reload() && !IS_CLOSED.swap(true, Ordering::SeqCst) {
        // SAFETY: it is async-signal-safe.
        unsafe { libc::raise(libc::SIGTERM) };
    }
}

/// `mi_option_purge_delay` of mimalloc's header: milliseconds until freed memory is returned to the system, -1 for never.
const PURGE_DELAY: c_int = 15;

/// Keeps freed memory for the next step. A training step of a large model frees a gigabyte and allocates it again, and pages that were
/// returned to the system are cleared when they come back: a fifth of the CPU time. `MIMALLOC_PURGE_DELAY` in the environment has
/// precedence.
fn keep_freed_memory() {
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        // SAFETY: it sets a number that the allocator reads; any number is allowed.
        unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
    }
}

fn dispatch(command: Command) -> anyhow::Result<()> {
    use querl_pipeline::ledger::StageName;
    match command {
        Command::Run(args) => commands::run::run(&args),
        Command::Rewrite(args) => commands::run::model_stage(StageName::Rewrite, &args),
        Command::Validate(args) => commands::run::model_stage(StageName::Validate, &args),
        Command::Convert(args) => commands::run::stage(StageName::Convert, &args),
        Command::Sft(args) => commands::run::model_stage(StageName::Sft, &args),
        Command::Rl(args) => commands::run::model_stage(StageName::Rl, &args),
        Command::Eval(args) => commands::run::model_stage(StageName::Eval, &args),
        Command::Report(args) => commands::run::report(&args),
        Command::Watch(args) => commands::watch::run(&args),
        Command::Config(command) => commands::config::run(&command),
        Command::Data(command) => commands::data::run(&command),
        Command::Model(command) => commands::model::run(&command),
        Command::Plugin(command) => commands::plugin::run(&command),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Release(command) => commands::release::run(&command),
        Command::Deploy(args) => commands::deploy::run(&args),
        Command::Export(command) => commands::export::run(&command),
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

#[cfg(test)]
mod tests {
    use super::PURGE_DELAY;

    #[test]
    fn purge_delay_is_the_option_of_that_number() {
        // SAFETY: it reads a number.
        let default = unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) };
        let expected = std::env::var("MIMALLOC_PURGE_DELAY").map_or(1000, |text| text.parse().unwrap_or(1000));
        assert_eq!(default, expected, "the options of mimalloc have other numbers");
    }
}
