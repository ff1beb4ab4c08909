//! What passes between host and card in each step of a decoding: one copy there, one copy back, both from page-locked memory.

use super::gpu::Gpu;
use super::sampling::Drawn;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaSlice, CudaView, DevicePtr, PinnedHostSlice, result};
use candle_core::{Error, Result, bail};
use std::ops::Range;

/// Frames that may be on their way at once: one is filled while another is copied.
const N_HOST: usize = 2;

/// What the kernels of a step read that the host has decided: words of 4 bytes, at the same place of the card in each step.
pub struct Frame {
    words: CudaSlice<u32>,
    host: Vec<(PinnedHostSlice<u32>, CudaEvent)>,
    next: usize,
}

impl Frame {
    /// Room for so many words.
    ///
    /// # Errors
    /// No memory left on the card, or none that can be locked on the host.
    pub fn new(gpu: &Gpu, n_words: usize) -> Result<Self> {
        let context = gpu.stream().context();
        let piece = || {
            // SAFETY: every bit pattern is a number, and a part is written before it is read.
            let memory = unsafe { context.alloc_pinned_with_flags::<u32>(n_words.max(1), 0) }.map_err(Error::wrap)?;
            Ok((memory, context.new_event(None).map_err(Error::wrap)?))
        };
        let host = (0..N_HOST).map(|_| piece()).collect::<Result<_>>()?;
        Ok(Self { words: gpu.zeros(n_words.max(1))?, host, next: 0 })
    }

    /// Copies the first words to the card, which `fill` writes. The host waits only for a copy that was begun two steps before.
    ///
    /// # Errors
    /// There is no room for as many, or something that was asked of the card failed.
    pub fn send(&mut self, gpu: &Gpu, n_words: usize, fill: impl FnOnce(&mut [u32])) -> Result<()> {
        if n_words > self.words.len() {
            bail!("{n_words} words for a frame of {}", self.words.len());
        }
        self.next = (self.next + 1) % N_HOST;
        let (memory, is_read) = &mut self.host[self.next];
        is_read.synchronize().map_err(Error::wrap)?;
        let words = &mut memory.as_mut_slice().map_err(Error::wrap)?[..n_words];
        fill(words);
        gpu.stream().context().bind_to_thread().map_err(Error::wrap)?;
        let to = self.words.device_ptr(gpu.stream()).0;
        // SAFETY: both places have room for as many; the event keeps the host from writing while the card reads.
        unsafe { result::memcpy_htod_async(to, words, gpu.stream().cu_stream()) }.map_err(Error::wrap)?;
        is_read.record(gpu.stream()).map_err(Error::wrap)
    }

    /// Some words as the card sees them.
    pub fn words(&self, range: Range<usize>) -> CudaView<'_, u32> {
        self.words.slice(range)
    }

    /// Pairs of words as numbers of 8 bytes.
    ///
    /// # Errors
    /// They do not begin at a multiple of 8 bytes.
    pub fn doubles(&self, range: Range<usize>) -> Result<CudaView<'_, f64>> {
        let n = range.len() / 2;
        if !range.start.is_multiple_of(2) || !range.len().is_multiple_of(2) {
            bail!("words {range:?} are no numbers of 8 bytes");
        }
        // SAFETY: every bit pattern is a number, and the place is aligned: allocations begin at multiples of 256 bytes.
        let view = unsafe { self.words.slice(range).transmute::<f64>(n) };
        view.ok_or_else(|| Error::Msg(format!("{n} numbers leave the frame")))
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        // The memory is given back only when the card has read it; after an error it never reads again.
        self.host.iter().for_each(|(_, is_read)| {
            let _ = is_read.synchronize();
        });
    }
}

/// What the host reads of a step: words on the card, and page-locked memory of the same size.
pub struct ReadBack {
    words: CudaSlice<u32>,
    host: PinnedHostSlice<u32>,
}

impl ReadBack {
    /// Room for so many words.
    ///
    /// # Errors
    /// As [`Frame::new`].
    pub fn new(gpu: &Gpu, n_words: usize) -> Result<Self> {
        let context = gpu.stream().context();
        // SAFETY: every bit pattern is a number, and a part is written before it is read.
        let host = unsafe { context.alloc_pinned_with_flags::<u32>(n_words.max(1), 0) }.map_err(Error::wrap)?;
        Ok(Self { words: gpu.zeros(n_words.max(1))?, host })
    }

    /// Hands out where the chosen tokens of some of `n` rows, and their log-probabilities, go.
    ///
    /// # Errors
    /// There is no room for as many, or what `write` reports.
    pub fn write(&mut self, n: usize, rows: Range<usize>, write: impl FnOnce(Drawn<'_>) -> Result<()>) -> Result<()> {
        if rows.start > rows.end || rows.end > n || 3 * n > self.words.len() {
            bail!("rows {rows:?} of {n}, for {} words to read back", self.words.len());
        }
        let n_own = rows.len();
        let (mut tokens, mut rest) = self.words.split_at_mut(n);
        let (mut first, mut second) = rest.split_at_mut(n);
        let tokens = tokens.slice_mut(rows.clone());
        let (mut first, mut second) = (first.slice_mut(rows.clone()), second.slice_mut(rows));
        // SAFETY: every bit pattern is a float, and both have the size of a word.
        let floats = unsafe { (first.transmute_mut::<f32>(n_own), second.transmute_mut::<f32>(n_own)) };
        let (Some(logprobs), Some(behaviour_logprobs)) = floats else { bail!("{n} floats leave what is read back") };
        write(Drawn { tokens, logprobs, behaviour_logprobs })
    }

    /// Waits for the card, and gives `n` tokens, their log-probabilities and those of their drawing.
    ///
    /// # Errors
    /// Something that was asked of the card failed.
    pub fn read(&mut self, gpu: &Gpu, n: usize) -> Result<[&[u32]; 3]> {
        let from = self.words.device_ptr(gpu.stream()).0;
        let words = &mut self.host.as_mut_slice().map_err(Error::wrap)?[..3 * n];
        gpu.stream().context().bind_to_thread().map_err(Error::wrap)?;
        if n > 0 {
            // SAFETY: both places have as many; the host reads only after it has waited.
            unsafe { result::memcpy_dtoh_async(words, from, gpu.stream().cu_stream()) }.map_err(Error::wrap)?;
        }
        gpu.synchronize()?;
        let (tokens, rest) = words.split_at(n);
        let (logprobs, behaviour) = rest.split_at(n);
        Ok([tokens, logprobs, behaviour])
    }
}

impl Drop for ReadBack {
    fn drop(&mut self) {
        // A copy into page-locked memory that is given back would write to whoever has it then.
        let _ = self.words.stream().synchronize();
    }
}
