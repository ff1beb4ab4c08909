//! In tests: a step at which the device has no memory left.

use candle_core::{Error, Result};
use std::cell::Cell;

thread_local! {
    static STEP: Cell<Option<(u64, &'static str)>> = const { Cell::new(None) };
}

/// The next call of [`at`] on this thread with this step and part of it fails, as CUDA does.
pub(crate) fn arm(step: u64, part: &'static str) {
    STEP.set(Some((step, part)));
}

/// # Errors
/// Once, at the step and part that were named.
pub(crate) fn at(step: u64, part: &'static str) -> Result<()> {
    if STEP.get() == Some((step, part)) {
        STEP.set(None);
        return Err(Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".into()));
    }
    Ok(())
}
