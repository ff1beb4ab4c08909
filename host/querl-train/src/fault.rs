//! In tests: a step at which the device has no memory left.

use candle_core::{Error, Result};
use std::cell::Cell;

thread_local! {
    static STEP: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The next call of [`at`] on this thread with this step fails, as CUDA does.
pub(crate) fn arm(step: u64) {
    STEP.set(Some(step));
}

/// # Errors
/// Once, at the step that was named.
pub(crate) fn at(step: u64) -> Result<()> {
    if STEP.get() == Some(step) {
        STEP.set(None);
        return Err(Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".into()));
    }
    Ok(())
}
