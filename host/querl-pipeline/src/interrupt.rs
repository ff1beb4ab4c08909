//! Ctrl-C: the first asks the running stage to stop at its next safe point, the second ends the program at once.

use crate::failure::Stop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

static STOP: AtomicBool = AtomicBool::new(false);

/// True once the user asked to stop. Long loops look at it between units of work.
pub fn flag() -> &'static AtomicBool {
    &STOP
}

/// # Errors
/// The user asked to stop.
pub fn check() -> Result<(), Stop> {
    if STOP.load(Ordering::SeqCst) {
        return Err(Stop::interrupted("interrupted; finished work is saved, run the same command to resume"));
    }
    Ok(())
}

/// Waits for `work`, which itself begins nothing more once the user says stop ([`Progress::is_stopped`]): what is under way is paid, and
/// is kept. What went wrong on the way is said, whether the user said stop or not.
///
/// [`Progress::is_stopped`]: querl_core::ports::Progress::is_stopped
///
/// # Errors
/// `work`'s own, or the user asked to stop.
pub fn finish<T, E: Into<anyhow::Error>>(
    runtime: &tokio::runtime::Runtime,
    work: impl Future<Output = Result<T, E>>,
) -> anyhow::Result<T> {
    let done = runtime.block_on(work).map_err(Into::into)?;
    check()?;
    Ok(done)
}

/// Waits for `work`, or for the user to say stop: what is under way then is dropped.
///
/// # Errors
/// The user asked to stop.
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
