//! The choice of each sequence's next token on the card: twin of `generate::sampling::choose` with its limits and filters.

use super::elementwise::same_length;
use super::gpu::Gpu;
use super::launch::Arg;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtrMut};
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

impl SamplingRules {
    /// Whether limits look at more of an answer than its length.
    pub fn look_at_answers(&self) -> bool {
        self.repetition_penalty != 1.0 || self.no_repeat_ngram_size > 0
    }
}

/// What rows of logits follow.
pub struct SamplingRows<'a> {
    /// Tokens that each answer has.
    pub lengths: CudaView<'a, u32>,
    /// The answers, where limits look at them.
    pub answers: Option<Answers<'a>>,
    /// A number from 0 to 1 for each row; without them the likeliest token is taken.
    pub uniforms: Option<CudaView<'a, f64>>,
}

/// The answers so far.
pub struct Answers<'a> {
    /// `(n, max_tokens)`.
    pub tokens: CudaView<'a, u32>,
    /// Room of a line of `tokens`.
    pub max_tokens: usize,
    /// Of the size of `tokens`: written over.
    pub originals: CudaViewMut<'a, f32>,
}

/// Where what is chosen for each row goes.
pub struct Drawn<'a> {
    /// [`Drawn::NOT_FINITE`] and [`Drawn::NOTHING_LEFT`] stand for the errors of their names.
    pub tokens: CudaViewMut<'a, u32>,
    /// Under the model's whole distribution at the temperature.
    pub logprobs: CudaViewMut<'a, f32>,
    /// Under the distribution that it was chosen from; 0 where the likeliest was taken.
    pub behaviour_logprobs: CudaViewMut<'a, f32>,
}

impl Drawn<'_> {
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
    /// Chooses the token that follows each answer. `logits`: `(n, V)`, changed by the limits.
    ///
    /// The same numbers give the tokens that the CPU draws, but where one lies within rounding of the border of two tokens.
    ///
    /// # Errors
    /// Lengths that do not fit, settings out of range, or limits that look at answers which are not given.
    pub fn choose(
        &self,
        logits: &mut impl DevicePtrMut<f32>,
        mut rows: SamplingRows<'_>,
        rules: &SamplingRules,
        mut drawn: Drawn<'_>,
    ) -> Result<()> {
        let n = rows.lengths.len();
        let n_tokens = logits.len() / n.max(1);
        same_length("choose", logits.len(), n * n_tokens)?;
        for len in [drawn.tokens.len(), drawn.logprobs.len(), drawn.behaviour_logprobs.len()] {
            same_length("choose", len, n)?;
        }
        same_length("choose", rows.uniforms.as_ref().map_or(n, |uniforms| uniforms.len()), n)?;
        let max_tokens = rows.answers.as_ref().map_or(0, |answers| answers.max_tokens);
        for len in rows.answers.iter().flat_map(|answers| [answers.tokens.len(), answers.originals.len()]) {
            same_length("choose", len, n * max_tokens)?;
        }
        if rows.answers.is_none() && rules.look_at_answers() {
            bail!("choose: limits that look at the answers, which are not given");
        }
        if !(rules.temperature > 0.0 && rules.top_p > 0.0 && rules.repetition_penalty > 0.0) {
            bail!("choose: temperature {}, top_p {} and penalty {} above 0", rules.temperature, rules.top_p, {
                rules.repetition_penalty
            });
        }
        let [answers_at, originals_at] = match &mut rows.answers {
            Some(answers) => [self.input(&answers.tokens), self.output(&mut answers.originals)],
            None => [Arg::null(), Arg::null()],
        };
        let mut args = vec![self.output(logits), n_tokens.into()];
        args.extend([answers_at, self.input(&rows.lengths), max_tokens.into(), originals_at]);
        args.extend([self.input(&rules.stop_ids), rules.stop_ids.len().into()]);
        args.extend([rules.temperature.into(), Arg::from(rules.top_p), rules.top_k.into()]);
        args.extend([rules.repetition_penalty.into(), rules.no_repeat_ngram_size.into(), rules.min_new_tokens.into()]);
        args.push(rows.uniforms.as_ref().map_or(Arg::null(), |uniforms| self.input(uniforms)));
        args.extend([self.output(&mut drawn.tokens), self.output(&mut drawn.logprobs)]);
        args.push(self.output(&mut drawn.behaviour_logprobs));
        let shared = n_tokens.div_ceil(BLOCK) * size_of::<u64>();
        // SAFETY: as `cuda/sampling.cuh` declares it: a block for each row; tokens of answers are held against the vocabulary.
        unsafe { self.launch("choose", [n, 1, 1], THREADS, shared, &mut args) }
    }
}
