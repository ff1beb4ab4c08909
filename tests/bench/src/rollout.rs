//! Rollouts: responses to prompts with a common prefix.

use crate::measure::{Bench, no_values, tokenizer};
use crate::operations::{token_bytes, weight_bytes};
use crate::report::{Ceilings, RolloutResult, Spread};
use crate::rows;
use anyhow::Result;
use querl_model::{Decoding, Engine, EngineSettings, GenerationRequest, LoraAdapter, SamplingSettings, TextTokenizer};
use querl_train::job::lora_settings;
use querl_train::rl::sampling;

/// An engine with a policy whose version changes with every call.
struct Rollouts<'a> {
    engine: Engine<'a>,
    adapter: LoraAdapter,
    tokenizer: TextTokenizer,
    prompts: Vec<Vec<u32>>,
    n_samples: usize,
    version: u64,
    /// Response tokens of each call; they differ because each version has another seed.
    n_tokens: Vec<usize>,
}

impl Rollouts<'_> {
    /// Generates with a new version of the policy, so that nothing is cached.
    fn generate(&mut self, sampling: &SamplingSettings) -> Result<()> {
        self.version += 1;
        let (version, n) = (self.version, self.n_samples);
        let request = |(row, prompt)| GenerationRequest { prompt, seed: version << 32 | row as u64, n };
        let requests: Vec<_> = self.prompts.iter().map(Vec::as_slice).enumerate().map(request).collect();
        self.engine.set_policy(Some(&self.adapter), self.version)?;
        let answers = self.engine.generate(&requests, Decoding::Sample, sampling, &self.tokenizer)?;
        self.n_tokens.push(answers.iter().flatten().map(|answer| answer.token_ids.len()).sum());
        Ok(())
    }

    /// Number of distinct cached tokens once all responses have `n_new` tokens.
    fn different_tokens(&self, shared: usize, n_new: usize) -> usize {
        let own: usize = self.prompts.iter().map(|prompt| prompt.len() - shared).sum();
        shared + own + self.prompts.len() * self.n_samples * n_new
    }
}

/// Generates `n_sequences` responses, `rl.n_samples` per prompt.
pub(crate) fn measure(bench: &Bench<'_>, n_sequences: usize, ceilings: &Ceilings) -> Result<RolloutResult> {
    let n_samples = bench.rl.n_samples.clamp(1, n_sequences.max(1));
    let n_prompts = (n_sequences / n_samples).max(1);
    let settings = EngineSettings { max_sequences: n_sequences.max(1), ..EngineSettings::default() };
    let mut rollouts = Rollouts {
        engine: Engine::new(bench.decoder, settings)?,
        adapter: LoraAdapter::new(bench.decoder, lora_settings(&bench.sft), bench.seed)?,
        tokenizer: tokenizer(bench.folder)?,
        prompts: rows::prompts(n_prompts, &bench.lengths, bench.decoder.config().vocab_size, bench.seed),
        n_samples,
        version: 0,
        n_tokens: Vec::new(),
    };
    let whole = sampling(&bench.rl);
    let first = SamplingSettings { max_new_tokens: 1, min_new_tokens: whole.min_new_tokens.min(1), ..whole.clone() };
    let first_s = bench.times(bench.repeats, || rollouts.generate(&first))?;
    rollouts.n_tokens.clear();
    let whole_s = bench.times(bench.repeats, || rollouts.generate(&whole))?;
    let n_tokens = rollouts.n_tokens.split_off(1); // warm-up
    let (first_s, seconds) = (Spread::of(&first_s).ok_or_else(no_values)?, Spread::of(&whole_s).ok_or_else(no_values)?);
    // Responses may end earlier; the longest one determines the number of decode steps.
    let (n_answers, n_steps) = (n_prompts * n_samples, whole.max_new_tokens.saturating_sub(1).max(1));
    let kernels = bench.kernel_times(|| rollouts.generate(&whole))?;
    // If prefill dominates, its noise may exceed the decode time.
    let decode_s: Vec<f64> = whole_s.iter().map(|seconds| seconds - first_s.median).collect();
    let has_decoded = decode_s.iter().all(|seconds| *seconds > 0.0);
    let decode_s = if has_decoded { decode_s } else { Vec::new() };
    let n_decoded: Vec<usize> = n_tokens.iter().map(|n| n.saturating_sub(n_answers)).collect();
    let (shapes, value_bytes) = (bench.decoder.config(), bench.sizes.value_bytes);
    let n_cached = rollouts.different_tokens(bench.lengths.shared, whole.max_new_tokens / 2);
    let step_bytes = weight_bytes(shapes, bench.model.dtype) + n_cached as u64 * token_bytes(shapes, value_bytes);
    Ok(RolloutResult {
        sequences: n_answers,
        prompts: n_prompts,
        max_new_tokens: whole.max_new_tokens,
        seconds,
        tokens_per_s: rates(&n_tokens, &whole_s).ok_or_else(no_values)?,
        decode_tokens_per_s: rates(&n_decoded, &decode_s),
        step_bytes,
        share_of_bandwidth: Spread::of(&decode_s)
            .map(|time| step_bytes as f64 * n_steps as f64 / time.median / ceilings.copy.median),
        cache_bytes: rollouts.engine.cache_memory().peak_bytes as u64,
        kernels,
    })
}

fn rates(n_tokens: &[usize], seconds: &[f64]) -> Option<Spread> {
    let rate = |(n, seconds): (&usize, &f64)| *n as f64 / seconds;
    Spread::of(&n_tokens.iter().zip(seconds).map(rate).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the tokens of the last repetition were divided by the seconds of all.
    #[test]
    fn a_rate_divides_the_tokens_of_each_repetition_by_its_seconds() {
        let rate = Spread { median: 15.0, least: 10.0, most: 20.0, n: 3 };
        assert_eq!(rates(&[10, 30, 40], &[1.0, 2.0, 2.0]), Some(rate));
        assert_eq!(rates(&[10, 30], &[]), None);
    }
}
