//! Ctrl-C: what runs when SIGINT, SIGTERM or SIGHUP arrives.
//!
//! The first signal sets [`flag`], the second ends the process at once with exit code 130. Work reads the flag at its safe points:
//!
//! | reader | what it does |
//! |---|---|
//! | `stages/mod.rs` (runner) | starts no further stage ([`check`]) |
//! | `rewrite`, `validate` | start no further calls; those in flight finish and their responses are saved ([`finish`], `ServiceContext::until`) |
//! | `Trainer::finish_step` of `querl-train/src/fine_tune.rs` (SFT, style) | ends after the current optimizer step, saves the trainer state and the model |
//! | `Trainer::stop_requested` of `querl-train/src/rl/train_loop.rs` | ends after the current part of a rollout, or after all updates of a batch; saves the trainer state and `rl/last` |
//! | generation (`querl-train/src/job`), `eval`, leak search, `querl plugin replay` | end after the current batch |
//! | `querl rag check`, `querl plugin push` and `pull` | drop the calls in flight ([`block_on`]) |
//! | download of a model by name | keeps what was downloaded; the next attempt continues there |
//! | `querl model pretrain` | ends after the current optimizer step and writes no model |
//! | `querl serve` | finishes the requests in progress, for at most the drain timeout; exit code 0 |
//!
//! Except for `querl serve`, the command then ends with exit code 130 ([`Stop::interrupted`]); the same command resumes, except for
//! `pretrain`, which starts over.

use crate::failure::{Ending, Stop};
use anyhow::Context;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

static STOP: AtomicBool = AtomicBool::new(false);

/// Installs the signal handler. `on_first` reports the first signal.
///
/// # Errors
/// The system refuses the handler.
pub fn install(on_first: impl Fn() + Send + 'static) -> anyhow::Result<()> {
    let handler = move || match STOP.swap(true, Ordering::SeqCst) {
        false => on_first(),
        true => std::process::exit(Ending::Interrupted as i32),
    };
    ctrlc::set_handler(handler).context("interrupts cannot be handled")
}

/// True after the first signal. Long loops read it between units of work.
pub fn flag() -> &'static AtomicBool {
    &STOP
}

/// # Errors
/// A signal has arrived.
pub fn check() -> Result<(), Stop> {
    match STOP.load(Ordering::SeqCst) {
        false => Ok(()),
        true => Err(Stop::interrupted("interrupted; finished work is saved, run the same command to resume")),
    }
}

/// Waits for `work`, which reads the flag itself ([`Progress::is_stopped`]) and starts nothing more: calls in flight are paid for, and
/// their responses are kept. An error of `work` comes before the interrupt.
///
/// [`Progress::is_stopped`]: querl_core::ports::Progress::is_stopped
pub(crate) fn finish<T, E: Into<anyhow::Error>>(
    runtime: &tokio::runtime::Runtime,
    work: impl Future<Output = Result<T, E>>,
) -> anyhow::Result<T> {
    let done = runtime.block_on(work).map_err(Into::into)?;
    check()?;
    Ok(done)
}

/// Waits for `work` or for a signal, which drops the calls in flight.
///
/// # Errors
/// A signal has arrived.
pub fn block_on<T>(runtime: &tokio::runtime::Runtime, work: impl Future<Output = T>) -> Result<T, Stop> {
    let stopped = async {
        loop {
            check()?;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    runtime.block_on(async {
        tokio::select! {
            done = work => Ok(done),
            stop = stopped => stop,
        }
    })
}
