//! Answers to prompts that begin alike.

use super::operations::{token_bytes, weight_bytes};
use super::{Bench, kernel_times, nothing, ppo, rows, times, types};
use crate::work::lora;
use crate::{Ceilings, JobError, RolledOut, Spread};
use querl_model::{Decoding, Engine, EngineSettings, GenerationRequest, LoraAdapter, SamplingSettings, TextTokenizer};
use querl_train::rl::sampling;

/// Answers of an engine, one policy version after another.
struct Rollouts<'a> {
    engine: Engine<'a>,
    adapter: LoraAdapter,
    tokenizer: TextTokenizer,
    prompts: Vec<Vec<u32>>,
    n_samples: usize,
    version: u64,
    /// Of each call's answers: other versions write other answers.
    n_tokens: Vec<usize>,
}

impl Rollouts<'_> {
    /// By a version of the policy that has answered nothing, so that nothing is kept from before.
    fn answer(&mut self, sampling: &SamplingSettings) -> Result<(), JobError> {
        self.version += 1;
        let (version, n) = (self.version, self.n_samples);
        let request = |(row, prompt)| GenerationRequest { prompt, seed: version << 32 | row as u64, n };
        let requests: Vec<_> = self.prompts.iter().map(Vec::as_slice).enumerate().map(request).collect();
        self.engine.set_policy(Some(&self.adapter), self.version)?;
        let answers = self.engine.generate(&requests, Decoding::Sample, sampling, &self.tokenizer)?;
        self.n_tokens.push(answers.iter().flatten().map(|answer| answer.token_ids.len()).sum());
        Ok(())
    }

    /// Tokens whose keys and values differ, once all answers have `n_new` tokens: each prompt's own part once.
    fn different_tokens(&self, shared: usize, n_new: usize) -> usize {
        let own: usize = self.prompts.iter().map(|prompt| prompt.len() - shared).sum();
        shared + own + self.prompts.len() * self.n_samples * n_new
    }
}

/// Several answers to each prompt, as many in all as `n_sequences` as far as `rl.n_samples` divides it.
pub(super) fn measure(bench: &Bench<'_>, n_sequences: usize, ceilings: &Ceilings) -> Result<RolledOut, JobError> {
    let (job, measuring) = (bench.job, bench.measuring);
    let n_samples = measuring.rl.n_samples.clamp(1, n_sequences.max(1));
    let n_prompts = (n_sequences / n_samples).max(1);
    let settings = EngineSettings { max_sequences: n_sequences.max(1), ..EngineSettings::default() };
    let mut rollouts = Rollouts {
        engine: Engine::new(bench.decoder, settings)?,
        adapter: LoraAdapter::new(bench.decoder, lora(&measuring.sft), job.seed)?,
        tokenizer: ppo::tokenizer(measuring)?,
        prompts: rows::prompts(n_prompts, &measuring.lengths, bench.decoder.config().vocab_size, job.seed),
        n_samples,
        version: 0,
        n_tokens: Vec::new(),
    };
    let whole = sampling(&measuring.rl);
    let first = SamplingSettings { max_new_tokens: 1, min_new_tokens: whole.min_new_tokens.min(1), ..whole.clone() };
    let first_s = times(bench.place, measuring.repeats, || rollouts.answer(&first))?;
    rollouts.n_tokens.clear();
    let whole_s = times(bench.place, measuring.repeats, || rollouts.answer(&whole))?;
    let n_tokens = rollouts.n_tokens.split_off(1); // the first call is not counted
    let (first_s, seconds) = (Spread::of(&first_s).ok_or_else(nothing)?, Spread::of(&whole_s).ok_or_else(nothing)?);
    // Answers may end before; the longest of them decides how many steps there are.
    let (n_answers, n_steps) = (n_prompts * n_samples, whole.max_new_tokens.saturating_sub(1).max(1));
    let kernels = kernel_times(bench.place, || rollouts.answer(&whole))?;
    // Where prompts take most of the time, its noise may exceed what decoding takes: then nothing is said of that.
    let decode_s: Vec<f64> = whole_s.iter().map(|seconds| seconds - first_s.median).collect();
    let has_decoded = decode_s.iter().all(|seconds| *seconds > 0.0);
    let decode_s = if has_decoded { decode_s } else { Vec::new() };
    let n_decoded: Vec<usize> = n_tokens.iter().map(|n| n.saturating_sub(n_answers)).collect();
    let (shapes, value_bytes) = (bench.decoder.config(), types(bench.device).value_bytes);
    let n_cached = rollouts.different_tokens(measuring.lengths.shared, whole.max_new_tokens / 2);
    let step_bytes = weight_bytes(shapes, job.model.dtype) + n_cached as u64 * token_bytes(shapes, value_bytes);
    Ok(RolledOut {
        sequences: n_answers,
        prompts: n_prompts,
        max_new_tokens: whole.max_new_tokens,
        seconds,
        tokens_per_s: rates(&n_tokens, &whole_s).ok_or_else(nothing)?,
        decode_tokens_per_s: rates(&n_decoded, &decode_s),
        step_bytes,
        share_of_bandwidth: Spread::of(&decode_s)
            .map(|time| step_bytes as f64 * n_steps as f64 / time.median / ceilings.copy.median),
        cache_bytes: rollouts.engine.cache_memory().peak_bytes as u64,
        kernels,
    })
}

/// What each repetition wrote over its seconds.
fn rates(n_tokens: &[usize], seconds: &[f64]) -> Option<Spread> {
    let rate = |(n, seconds): (&usize, &f64)| *n as f64 / seconds;
    Spread::of(&n_tokens.iter().zip(seconds).map(rate).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The symptom: the tokens of the last repetition stood over the seconds of all.
    #[test]
    fn a_rate_is_of_the_tokens_that_were_written_in_that_time() {
        let rate = Spread { median: 15.0, least: 10.0, most: 20.0, n: 3 };
        assert_eq!(rates(&[10, 30, 40], &[1.0, 2.0, 2.0]), Some(rate));
        assert_eq!(rates(&[10, 30], &[]), None);
    }
}
