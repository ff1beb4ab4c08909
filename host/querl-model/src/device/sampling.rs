//! The choice of each sequence's next token on the card: twin of `generate::sampling::choose` with its limits and filters.

use super::elementwise::same_length;
use super::gpu::Gpu;
use super::launch::Arg;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtrMut};
use candle_core::{Result, bail};

/// What shapes the distributions of all rows; see `SamplingSettings`.
pub struct SamplingRules {
    /// Above 0.
    pub temperature: f32,
    /// 1 keeps everything.
    pub top_p: f64,
    /// 0 keeps everything.
    pub top_k: usize,
    /// 1 changes nothing.
    pub repetition_penalty: f32,
    /// 0 changes nothing.
    pub no_repeat_ngram_size: usize,
    /// No stop token before so many tokens.
    pub min_new_tokens: usize,
    /// Tokens that end an answer.
    pub stop_ids: CudaSlice<u32>,
}

/// The answers so far, on the card.
pub struct SamplingRows {
    /// `(n, max_tokens)`.
    pub answers: CudaSlice<u32>,
    /// Tokens that each answer has.
    pub lengths: CudaSlice<u32>,
    /// Room of a line of `answers`.
    pub max_tokens: usize,
}

/// What was chosen for each row, on the card.
pub struct Drawn {
    /// [`Drawn::NOT_FINITE`] and [`Drawn::NOTHING_LEFT`] stand for the errors of their names.
    pub tokens: CudaSlice<u32>,
    /// Under the model's whole distribution at the temperature.
    pub logprobs: CudaSlice<f32>,
    /// Under the distribution that it was chosen from; 0 where the likeliest was taken.
    pub behaviour_logprobs: CudaSlice<f32>,
}

impl Drawn {
    /// A row's logits are not finite.
    pub const NOT_FINITE: u32 = u32::MAX;
    /// The limits leave no token to choose.
    pub const NOTHING_LEFT: u32 = u32::MAX - 1;
}

/// Threads that work on a row.
const THREADS: usize = 1024;

/// Logits that are summed together, as on the CPU.
const BLOCK: usize = 512;

impl Gpu {
    /// Chooses the token that follows each answer, and appends it where there is room. `logits`: `(n, V)`, changed by the limits.
    /// `uniforms`: n numbers from 0 to 1, one for each row; without them the likeliest token is taken.
    ///
    /// The same numbers give the tokens that the CPU draws, but where one lies within rounding of the border of two tokens.
    ///
    /// # Errors
    /// Lengths that do not fit, or settings out of range.
    pub fn choose(
        &self,
        logits: &mut impl DevicePtrMut<f32>,
        rows: &mut SamplingRows,
        rules: &SamplingRules,
        uniforms: Option<&CudaSlice<f64>>,
    ) -> Result<Drawn> {
        let n = rows.lengths.len();
        let n_tokens = logits.len() / n.max(1);
        same_length("choose", logits.len(), n * n_tokens)?;
        same_length("choose", rows.answers.len(), n * rows.max_tokens)?;
        if let Some(uniforms) = uniforms {
            same_length("choose", uniforms.len(), n)?;
        }
        if !(rules.temperature > 0.0 && rules.top_p > 0.0 && rules.repetition_penalty > 0.0) {
            bail!("choose: temperature {}, top_p {} and penalty {} above 0", rules.temperature, rules.top_p, {
                rules.repetition_penalty
            });
        }
        let (mut tokens, mut logprobs, mut behaviour) = (self.alloc(n)?, self.alloc(n)?, self.alloc(n)?);
        let mut originals = self.alloc::<f32>(n * rows.max_tokens)?;
        let mut args = vec![self.output(logits), n_tokens.into()];
        args.extend([self.output(&mut rows.answers), self.output(&mut rows.lengths), rows.max_tokens.into()]);
        args.extend([self.output(&mut originals), self.input(&rules.stop_ids), rules.stop_ids.len().into()]);
        args.extend([rules.temperature.into(), Arg::from(rules.top_p), rules.top_k.into()]);
        args.extend([rules.repetition_penalty.into(), rules.no_repeat_ngram_size.into(), rules.min_new_tokens.into()]);
        args.push(uniforms.map_or(Arg::null(), |uniforms| self.input(uniforms)));
        args.extend([self.output(&mut tokens), self.output(&mut logprobs), self.output(&mut behaviour)]);
        let shared = n_tokens.div_ceil(BLOCK) * size_of::<u64>();
        // SAFETY: as `cuda/sampling.cuh` declares it: a block for each row; tokens of answers are held against the vocabulary.
        unsafe { self.launch("choose", [n, 1, 1], THREADS, shared, &mut args)? };
        Ok(Drawn { tokens, logprobs, behaviour_logprobs: behaviour })
    }
}
