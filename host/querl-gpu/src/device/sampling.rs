//! Sampling of the next tokens, and the copies between host and GPU of each decode step.
//!
//! Counterpart of [`querl_model::backend::sample_token`] with its logits processors. Each step has one copy to the GPU and one back, both of
//! page-locked memory.

use super::elementwise::same_length;
use super::gpu::Gpu;
use super::launch::Arg;
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, PinnedHostSlice, result,
};
use candle_core::{Error, Result, bail};
use std::ops::Range;
use std::sync::Arc;

/// Sampling settings of all rows; see [`querl_model::SamplingSettings`].
pub struct SamplingRules {
    /// Temperature, above 0.
    pub temperature: f32,
    /// Cumulative probability of nucleus sampling, above 0; 1 disables it.
    pub top_p: f64,
    /// Number of likeliest tokens to sample from; 0 disables it.
    pub top_k: usize,
    /// Repetition penalty, above 0; 1 has no effect.
    pub repetition_penalty: f32,
    /// Size of n-grams that may not occur twice; 0 disables it.
    pub no_repeat_ngram_size: usize,
    /// Number of tokens before which a response cannot end: stop tokens are suppressed.
    pub min_new_tokens: usize,
    pub stop_ids: CudaSlice<u32>,
}

impl SamplingRules {
    /// Whether logits processors read the tokens of the responses.
    pub fn read_responses(&self) -> bool {
        self.repetition_penalty != 1.0 || self.no_repeat_ngram_size > 0
    }
}

/// The responses that the rows of logits continue, one per row.
pub struct SamplingRows<'a> {
    pub lengths: CudaView<'a, u32>,
    /// Tokens of the responses; needed if logits processors read them (see [`SamplingRules::read_responses`]).
    pub responses: Option<ResponseTokens<'a>>,
    /// A uniform random number from 0 to 1 for each row; `None` for greedy decoding.
    pub uniforms: Option<CudaView<'a, f64>>,
}

/// The tokens of responses so far.
pub struct ResponseTokens<'a> {
    /// Token ids `(n, max_tokens)`.
    pub tokens: CudaView<'a, u32>,
    pub max_tokens: usize,
    /// Scratch memory of the size of `tokens`.
    pub original_logits: CudaViewMut<'a, f32>,
}

/// Output of sampling: the chosen token of each row and its log-probabilities.
pub struct SampledTokens<'a> {
    /// Token ids, or [`SampledTokens::NOT_FINITE`] or [`SampledTokens::NOTHING_LEFT`] for a row that has no token.
    pub tokens: CudaViewMut<'a, u32>,
    /// Log-probability under the model's distribution at the temperature, without penalties and filters.
    pub logprobs: CudaViewMut<'a, f32>,
    /// Log-probability under the distribution that the token was sampled from; 0 with greedy decoding.
    pub behaviour_logprobs: CudaViewMut<'a, f32>,
}

impl SampledTokens<'_> {
    /// Marks a row whose logits are not finite.
    pub const NOT_FINITE: u32 = u32::MAX;
    /// Marks a row in which the penalties leave no token to choose.
    pub const NOTHING_LEFT: u32 = u32::MAX - 1;
}

const SAMPLING_THREADS: usize = 1024;

/// Number of logits per sum of exponentials, as on the CPU.
const BLOCK: usize = 512;

impl Gpu {
    /// Samples the next token of each response. `logits`: `(n, V)`, changed by logits processors.
    ///
    /// The same uniform numbers give the same tokens as on the CPU, except within rounding of the border of two tokens.
    pub fn choose(
        &self,
        logits: &mut impl DevicePtrMut<f32>,
        mut rows: SamplingRows<'_>,
        rules: &SamplingRules,
        mut drawn: SampledTokens<'_>,
    ) -> Result<()> {
        let n = rows.lengths.len();
        let n_tokens = logits.len() / n.max(1);
        same_length("choose", logits.len(), n * n_tokens)?;
        for len in [drawn.tokens.len(), drawn.logprobs.len(), drawn.behaviour_logprobs.len()] {
            same_length("choose", len, n)?;
        }
        same_length("choose", rows.uniforms.as_ref().map_or(n, |uniforms| uniforms.len()), n)?;
        let max_tokens = rows.responses.as_ref().map_or(0, |responses| responses.max_tokens);
        for len in rows.responses.iter().flat_map(|responses| [responses.tokens.len(), responses.original_logits.len()])
        {
            same_length("choose", len, n * max_tokens)?;
        }
        if rows.responses.is_none() && rules.read_responses() {
            bail!("choose: a logits processor needs the response tokens, but none were passed");
        }
        if !(rules.temperature > 0.0 && rules.top_p > 0.0 && rules.repetition_penalty > 0.0) {
            bail!(
                "choose: temperature is {}, top_p {} and repetition_penalty {}; expected all above 0",
                rules.temperature,
                rules.top_p,
                rules.repetition_penalty
            );
        }
        let [responses_at, originals_at] = match &mut rows.responses {
            Some(responses) => [self.input(&responses.tokens), self.output(&mut responses.original_logits)],
            None => [Arg::null(), Arg::null()],
        };
        let mut args = vec![self.output(logits), n_tokens.into()];
        args.extend([responses_at, self.input(&rows.lengths), max_tokens.into(), originals_at]);
        args.extend([self.input(&rules.stop_ids), rules.stop_ids.len().into()]);
        args.extend([rules.temperature.into(), Arg::from(rules.top_p), rules.top_k.into()]);
        args.extend([rules.repetition_penalty.into(), rules.no_repeat_ngram_size.into(), rules.min_new_tokens.into()]);
        args.push(rows.uniforms.as_ref().map_or(Arg::null(), |uniforms| self.input(uniforms)));
        args.extend([self.output(&mut drawn.tokens), self.output(&mut drawn.logprobs)]);
        args.push(self.output(&mut drawn.behaviour_logprobs));
        let shared = n_tokens.div_ceil(BLOCK) * size_of::<u64>();
        // SAFETY: as `cuda/sampling.cuh` declares it: a block for each row; tokens of responses are checked against the vocabulary.
        unsafe { self.launch("choose", [n, 1, 1], SAMPLING_THREADS, shared, &mut args) }
    }
}

/// Number of frames in page-locked memory: one is filled while another is copied.
const N_HOST: usize = 2;

/// Page-locked and GPU memory for the inputs of a decode step: words of 4 bytes, at the same GPU address in each step.
pub struct Frame {
    words: Arc<CudaSlice<u32>>,
    host: Vec<(PinnedHostSlice<u32>, CudaEvent)>,
    next: usize,
}

impl Frame {
    pub fn new(gpu: &Gpu, n_words: usize) -> Result<Self> {
        let context = gpu.stream().context();
        let piece = || {
            // SAFETY: every bit pattern is a number, and a part is written before it is read.
            let memory = unsafe { context.alloc_pinned_with_flags::<u32>(n_words.max(1), 0) }.map_err(Error::wrap)?;
            Ok((memory, context.new_event(None).map_err(Error::wrap)?))
        };
        let host = (0..N_HOST).map(|_| piece()).collect::<Result<_>>()?;
        Ok(Self { words: Arc::new(gpu.zeros(n_words.max(1))?), host, next: 0 })
    }

    /// Copies the first `n_words` words, which `fill` writes, to the GPU. The host waits only for the copy of two steps before.
    pub fn send(&mut self, gpu: &Gpu, n_words: usize, fill: impl FnOnce(&mut [u32])) -> Result<()> {
        if n_words > self.words.len() {
            bail!("the inputs of a decode step take {n_words} words; the buffer has {}", self.words.len());
        }
        self.next = (self.next + 1) % N_HOST;
        let (memory, is_read) = &mut self.host[self.next];
        is_read.synchronize().map_err(Error::wrap)?;
        let words = &mut memory.as_mut_slice().map_err(Error::wrap)?[..n_words];
        fill(words);
        gpu.stream().context().bind_to_thread().map_err(Error::wrap)?;
        let to = self.words.device_ptr(gpu.stream()).0;
        // SAFETY: both places have room for as many; the event keeps the host from writing while the GPU reads.
        unsafe { result::memcpy_htod_async(to, words, gpu.stream().cu_stream()) }.map_err(Error::wrap)?;
        is_read.record(gpu.stream()).map_err(Error::wrap)
    }

    /// The GPU memory of all words.
    pub(crate) fn shared(&self) -> Arc<CudaSlice<u32>> {
        self.words.clone()
    }

    /// A range of the words, on the GPU.
    pub fn words(&self, range: Range<usize>) -> CudaView<'_, u32> {
        self.words.slice(range)
    }

    /// A range of the words on the GPU, read as f64 (two words each).
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
        // Memory is freed only after the GPU has read it; after an error the GPU reads nothing more.
        self.host.iter().for_each(|(_, is_read)| {
            let _ = is_read.synchronize();
        });
    }
}

/// Outputs of a decode step for the host: words of 4 bytes on the GPU, and page-locked memory of the same size.
pub struct ReadBack {
    words: CudaSlice<u32>,
    host: PinnedHostSlice<u32>,
}

impl ReadBack {
    pub fn new(gpu: &Gpu, n_words: usize) -> Result<Self> {
        let context = gpu.stream().context();
        // SAFETY: every bit pattern is a number, and a part is written before it is read.
        let host = unsafe { context.alloc_pinned_with_flags::<u32>(n_words.max(1), 0) }.map_err(Error::wrap)?;
        Ok(Self { words: gpu.zeros(n_words.max(1))?, host })
    }

    /// Calls `write` with the GPU memory for the sampled tokens and log-probabilities of some of `n` rows.
    pub fn write(
        &mut self,
        n: usize,
        rows: Range<usize>,
        write: impl FnOnce(SampledTokens<'_>) -> Result<()>,
    ) -> Result<()> {
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
        write(SampledTokens { tokens, logprobs, behaviour_logprobs })
    }

    /// Waits for the GPU, and returns `n` tokens, the bits of their log-probabilities, and those under the sampling distribution.
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
        // Page-locked memory must not be freed during a copy into it.
        let _ = self.words.stream().synchronize();
    }
}
