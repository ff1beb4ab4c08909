//! Launches that are asked of the card in one call: recorded once, then repeated with the same places of memory.

use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, sys};
use candle_core::{Error, Result, bail};

/// What a piece of work launches, ready to be launched again.
pub struct Graph(CudaGraph);

// SAFETY: a graph may be used from any thread, by one at a time: its only use is `launch`, which takes it by a mutable reference.
unsafe impl Send for Graph {}

impl Graph {
    /// Launches everything, on the stream that it was recorded on; see [`Gpu::recorded`] for what has to be there still.
    ///
    /// # Errors
    /// Something that was asked of the card failed.
    pub fn launch(&mut self) -> Result<()> {
        self.0.launch().map_err(Error::wrap)
    }
}

impl Gpu {
    /// Records what `work` launches; nothing of it is done. It must not allocate, upload or wait. For a stream that no other thread
    /// uses (see [`Gpu::beside`]): what that launched would be recorded too.
    ///
    /// # Errors
    /// `work` fails or asks for what cannot be recorded; the stream goes on as before.
    ///
    /// # Safety
    /// The graph holds places of the card's memory and keeps none of it alive: whatever `work` hands to the card stays where it is,
    /// and nobody else reads or writes it meanwhile, whenever the graph is launched.
    pub unsafe fn recorded(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream().begin_capture(mode).map_err(Error::wrap)?;
        let done = work();
        // Ends the recording in any case. No flags: memory is none of the graph's.
        let flags = sys::CUgraphInstantiate_flags(0);
        let graph = self.stream().end_capture(flags);
        done?;
        match graph.map_err(Error::wrap)? {
            Some(graph) => Ok(Graph(graph)),
            None => bail!("nothing was recorded"),
        }
    }
}
