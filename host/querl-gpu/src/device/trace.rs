//! How long each launch takes on the card, for those who ask.

use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, sys};
use candle_core::{Error, Result};
use querl_model::KernelLaunch;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// What was launched since somebody asked.
#[derive(Default)]
pub(super) struct Trace {
    is_on: AtomicBool,
    launches: Mutex<Vec<Pending>>,
}

struct Pending {
    name: &'static str,
    begin: CudaEvent,
    end: CudaEvent,
}

impl Gpu {
    /// Does `work` and says what it launched, in order, with the card's own times. Each launch takes some microseconds more
    /// of the host meanwhile; what is launched as part of a graph is not told, so generation records none meanwhile. One trace at a
    /// time, of this card and of what runs beside it.
    ///
    /// # Errors
    /// Those of `work`, or the card fails.
    pub fn traced<R>(&self, work: impl FnOnce() -> R) -> Result<(R, Vec<KernelLaunch>)> {
        self.pending().clear();
        self.trace().is_on.store(true, Ordering::Relaxed);
        let done = work();
        self.trace().is_on.store(false, Ordering::Relaxed);
        self.synchronize()?;
        let launches = std::mem::take(&mut *self.pending());
        let timed = launches.into_iter().map(|Pending { name, begin, end }| {
            Ok(KernelLaunch { name, milliseconds: begin.elapsed_ms(&end).map_err(Error::wrap)? })
        });
        Ok((done, timed.collect::<Result<_>>()?))
    }

    /// Starts something on the stream, between two events where somebody wants to know.
    pub(super) fn noted<R>(&self, name: &'static str, launch: impl FnOnce() -> Result<R>) -> Result<R> {
        if !self.trace().is_on.load(Ordering::Relaxed) || self.is_capturing() {
            return launch();
        }
        let event = || self.stream().record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(Error::wrap);
        let begin = event()?;
        let launched = launch()?;
        let end = event()?;
        self.pending().push(Pending { name, begin, end });
        Ok(launched)
    }

    /// Whether somebody wants to know of each launch: then nothing is launched as part of a graph.
    pub(crate) fn is_traced(&self) -> bool {
        self.trace().is_on.load(Ordering::Relaxed)
    }

    fn is_capturing(&self) -> bool {
        let status = self.stream().capture_status();
        !matches!(status, Ok(sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE))
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, Vec<Pending>> {
        self.trace().launches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
