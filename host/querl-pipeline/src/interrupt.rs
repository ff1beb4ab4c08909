//! Ctrl-C: what runs when SIGINT, SIGTERM or SIGHUP arrives, or SIGXCPU before the limit of CPU time (`host/querl/src/process.rs`).
//!
//! As long as no work has anything to save, the first signal ends the process at once with exit code 130: files are replaced atomically,
//! so no file is left in part. Builds of plugins and compilers, which are child processes, are ended too
//! ([`querl_plugin::end_children`]). Work that would lose something holds [`at_safe_points`]: then the first signal sets [`flag`], the
//! work ends at its next safe point, and the second signal ends the process at once.
//!
//! | held by | safe point |
//! |---|---|
//! | calls of `rewrite` and `validate` ([`finish`], `ServiceContext::until`) | calls in flight finish, and their responses are saved; no further ones start |
//! | calls of `eval`, pass@k | the batch of queries is scored |
//! | `sft`, `querl style train` and `distill`, `querl model pretrain`, from their first step on (below) | one rank: before the next pass (`check_stop` of `querl-train/src/data_parallel.rs`), and the unfinished step or evaluation is discarded; several: after the optimizer step and its evaluation (`Trainer::finish_step` of `fine_tune.rs`); saves the trainer state and the model |
//! | `rl`, from its first step on (below), in a rollout | after the current decode step (`complete` of `querl-train/src/rl/rollout_pipeline.rs`): on the CPU the rest continues from the saved state, on a GPU the rollout is generated again; with a rollout server: after the requests in flight, whose responses are dropped. Saves the trainer state and `rl/last` |
//! | `rl`, in the updates of a batch | one CPU rank: before the next pass (`RlTask::check_stop` of `rl/mod.rs`); the batch is saved with the state before its updates. GPUs, several ranks and `off_by_one`: after all updates (`Trainer::stop_requested` of `train_loop.rs`). Saves the trainer state and `rl/last` |
//! | `querl style train` and `distill`, writing the finished model ([`uninterrupted`], `publish` of `querl-style/src/trainer.rs`) | all files are written |
//! | `querl model pretrain`, moving the finished model to its folder | all files are moved |
//! | `querl serve` | finishes the requests in progress, for at most the drain timeout; exit code 0. Without a terminal, `querl serve rewrite` loads its runs again on SIGHUP ([`reload_on_hangup`]) |
//! | `querl watch`, `querl plugin dev` | restores the terminal; `plugin dev` ends its child processes and removes its temporary files |
//!
//! Loading a model and encoding prompts are interrupted at once. A training holds [`at_safe_points`] from `MetricsLog::rewind`
//! (`metrics_log.rs`) on, the truncation of its metrics log to the checkpoint that it resumes from.
//!
//! Except for `querl serve`, the command then ends with exit code 130 ([`Stop::interrupted`]), and the same command resumes. The runner
//! (`stages/mod.rs`) starts no further stage ([`check`]).

use crate::failure::{Ending, Stop};
use anyhow::Context;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

static STOP: AtomicBool = AtomicBool::new(false);

static N_AT_SAFE_POINTS: AtomicUsize = AtomicUsize::new(0);

/// True if SIGHUP requests a reload, and whether one was requested.
static RELOADS: AtomicBool = AtomicBool::new(false);
static RELOAD: AtomicBool = AtomicBool::new(false);

/// Makes SIGHUP request a reload instead of ending the process. Returns the flag that SIGHUP then sets.
pub fn reload_on_hangup() -> &'static AtomicBool {
    RELOADS.store(true, Ordering::SeqCst);
    &RELOAD
}

/// For the handler of SIGHUP: returns whether SIGHUP requests a reload, and if so sets the reload flag. Async-signal-safe.
pub fn note_reload() -> bool {
    let reloads = RELOADS.load(Ordering::SeqCst);
    RELOAD.fetch_or(reloads, Ordering::SeqCst);
    reloads
}

/// How a signal ends the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InterruptKind {
    /// The process ends at the next safe point of the work.
    AtSafePoint,
    /// The process ends at once.
    AtOnce,
}

/// Guard: while a value exists, the first signal ends the process at a safe point, not at once.
#[derive(Debug)]
pub struct AtSafePoints(());

/// Creates the guard [`AtSafePoints`], for work that reads [`flag`] and would lose results if the process ended at once.
#[must_use]
pub fn at_safe_points() -> AtSafePoints {
    N_AT_SAFE_POINTS.fetch_add(1, Ordering::SeqCst);
    AtSafePoints(())
}

impl Drop for AtSafePoints {
    fn drop(&mut self) {
        N_AT_SAFE_POINTS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Installs the signal handler. `report` prints a message about the signal; if it blocks, the process ends nevertheless.
///
/// # Errors
/// The operating system does not accept the handler.
pub fn install(report: fn(InterruptKind)) -> anyhow::Result<()> {
    let handler = move || {
        let can_wait = N_AT_SAFE_POINTS.load(Ordering::SeqCst) > 0;
        // The flag is set only if the running work reads it.
        if can_wait && !STOP.swap(true, Ordering::SeqCst) {
            std::thread::spawn(move || report(InterruptKind::AtSafePoint));
        } else {
            end(report);
        }
    };
    ctrlc::set_handler(handler).context("interrupts cannot be handled")
}

/// Maximum time to kill child processes and to remove their temporary folders.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time to write the message: the terminal may be closed, or the pipe full.
const REPORT_TIMEOUT: Duration = Duration::from_millis(200);

fn end(report: fn(InterruptKind)) -> ! {
    within(END_TIMEOUT, querl_plugin::end_children);
    within(REPORT_TIMEOUT, move || report(InterruptKind::AtOnce));
    exit(Ending::Interrupted as i32)
}

/// Waits for `work` at most `timeout`.
fn within(timeout: Duration, work: impl FnOnce() + Send + 'static) {
    let (sender, done) = mpsc::channel();
    std::thread::spawn(move || {
        work();
        let _ = sender.send(());
    });
    let _ = done.recv_timeout(timeout);
}

/// Ends the process without exit handlers, which would destroy state that other threads still use, such as CUDA's and the allocator's.
#[cfg(unix)]
fn exit(code: i32) -> ! {
    // SAFETY: it has no preconditions.
    unsafe { libc::_exit(code) }
}

#[cfg(not(unix))]
fn exit(code: i32) -> ! {
    std::process::exit(code)
}

/// Stop flag, set by the first signal while an [`AtSafePoints`] guard exists. Long loops read it between units of work.
pub fn flag() -> &'static AtomicBool {
    &STOP
}

/// # Errors
/// A signal has arrived.
pub fn check() -> Result<(), Stop> {
    match STOP.load(Ordering::SeqCst) {
        false => Ok(()),
        true => Err(Stop::interrupted(
            "interrupted; finished stages and checkpoints are saved, run the same command to resume",
        )),
    }
}

/// Runs `work` to its end even if a signal arrives, and returns the error of the interrupt afterwards.
///
/// # Errors
/// Errors of `work`, or a signal has arrived.
pub fn uninterrupted(work: &mut dyn FnMut() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let _at_safe_points = at_safe_points();
    work()?;
    Ok(check()?)
}

/// Waits for `work`, which reads the stop flag itself ([`Progress::is_stopped`]) and then starts no further calls; calls in flight finish,
/// and their responses are kept, since they are paid for. An error of `work` takes precedence over the interrupt.
///
/// [`Progress::is_stopped`]: querl_core::ports::Progress::is_stopped
pub(crate) fn finish<T, E: Into<anyhow::Error>>(
    runtime: &tokio::runtime::Runtime,
    work: impl Future<Output = Result<T, E>>,
) -> anyhow::Result<T> {
    let _at_safe_points = at_safe_points();
    let done = runtime.block_on(work).map_err(Into::into)?;
    check()?;
    Ok(done)
}
