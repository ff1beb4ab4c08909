//! Consumers of logits: the sampler of a response, with log-probabilities, and the candidates of a beam.

use super::logits_processor::LogitsProcessor;
use super::{Decoding, FinishReason, Generated};
use crate::ModelError;
use crate::kernels::LANES;
use crate::kernels::simd::{Plain, exp_or_zero, vectorised};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Consumes the row of logits that follows a sequence's last token.
pub enum LogitsConsumer<'s> {
    /// Samples the next token of a response, on any device.
    Sampler(&'s mut Sampler),
    /// Finds the best next tokens of a beam, on the host.
    BeamCandidates(&'s mut BeamCandidates),
}

impl LogitsConsumer<'_> {
    /// Consumes the logits of the whole vocabulary; they may be changed. An error of [`sample_token`] is kept as the consumer's
    /// `failure`: it does not concern other sequences of the pass.
    pub fn consume(&mut self, logits: &mut [f32], processor: &LogitsProcessor<'_>) {
        match self {
            Self::Sampler(sampler) => {
                let Sampler { rng, decoding, token_ids, .. } = &mut **sampler;
                match sample_token(logits, token_ids, processor, *decoding, rng) {
                    Ok(token) => sampler.push(token),
                    Err(error) => sampler.failure = Some(error),
                }
            }
            Self::BeamCandidates(candidates) => candidates.failure = candidates.consume(logits, processor).err(),
        }
    }
}

/// Chooses the tokens of one response.
pub struct Sampler {
    /// Random number generator, with a stream of its own for each response.
    pub rng: ChaCha8Rng,
    /// Decoding strategy: greedy or sampling.
    pub decoding: Decoding,
    /// Token ids of the response so far.
    pub token_ids: Vec<u32>,
    logprobs: Vec<f32>,
    behaviour_logprobs: Vec<f32>,
    /// The error, if the last pass gave no token.
    pub(super) failure: Option<ModelError>,
}

impl Sampler {
    /// The sampler of response number `sample` to a request with this seed.
    pub fn new(seed: u64, sample: usize, decoding: Decoding) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(sample as u64);
        let (token_ids, logprobs, behaviour_logprobs) = (Vec::new(), Vec::new(), Vec::new());
        Self { rng, decoding, token_ids, logprobs, behaviour_logprobs, failure: None }
    }

    /// The sampler in the state after generating `response`.
    pub(super) fn resume(seed: u64, sample: usize, decoding: Decoding, response: Generated) -> Self {
        let mut sampler = Self::new(seed, sample, decoding);
        if decoding == Decoding::Sample {
            // `sample_token` draws one number for each token.
            response.token_ids.iter().for_each(|_| _ = sampler.rng.random::<f64>());
        }
        let Generated { token_ids, logprobs, behaviour_logprobs, .. } = response;
        Self { token_ids, logprobs, behaviour_logprobs, ..sampler }
    }

    /// Appends a token and its log-probabilities to the response.
    pub fn push(&mut self, token: SampledToken) {
        self.token_ids.push(token.token);
        self.logprobs.push(token.logprob);
        self.behaviour_logprobs.push(token.behaviour_logprob);
    }

    /// The response so far; `finish_reason`: why it ended, `None` if it did not.
    pub fn generated(self, finish_reason: Option<FinishReason>) -> Generated {
        Generated {
            token_ids: self.token_ids,
            logprobs: self.logprobs,
            behaviour_logprobs: self.behaviour_logprobs,
            truncated: finish_reason == Some(FinishReason::Length),
            finish_reason,
        }
    }
}

/// The best next tokens of one beam.
#[derive(Default)]
pub struct BeamCandidates {
    pub(super) response: Vec<u32>,
    pub(super) n_requested: usize,
    pub(super) best: Vec<BeamCandidate>,
    pub(super) failure: Option<ModelError>,
}

#[derive(Clone, Copy)]
pub(super) struct BeamCandidate {
    pub(super) token: u32,
    /// The term that is added to the beam's score: the log-probability at temperature 1 after penalties.
    pub(super) gain: f64,
    /// Log-probability at the sampling temperature, without penalties.
    pub(super) logprob: f32,
}

impl BeamCandidates {
    fn consume(&mut self, logits: &mut [f32], processor: &LogitsProcessor<'_>) -> Result<(), ModelError> {
        let softmax = Softmax::of(logits, 1.0);
        let reported = Softmax::of(logits, processor.settings.temperature as f32);
        if !softmax.total.is_finite() {
            return Err(ModelError::Generation("the logits of a beam are not finite".into()));
        }
        // As in transformers' beam search, penalties are applied to log-probabilities.
        let original = logits.to_vec();
        logits.iter_mut().for_each(|logit| *logit = softmax.logprob(*logit));
        processor.apply_penalties(logits, &self.response);
        let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
        let best_first = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then_with(|| a.cmp(b));
        if self.n_requested < tokens.len() {
            tokens.select_nth_unstable_by(self.n_requested, best_first);
            tokens.truncate(self.n_requested);
        }
        tokens.sort_unstable_by(best_first);
        let candidate = |token: u32| BeamCandidate {
            token,
            gain: f64::from(logits[token as usize]),
            logprob: reported.logprob(original[token as usize]),
        };
        self.best = tokens.into_iter().map(candidate).collect();
        Ok(())
    }
}

/// Logits per block. [`Softmax`] keeps one sum of exponentials per block, so that sampling first selects a block by these sums, then a
/// token within it.
const BLOCK: usize = 512;

/// The exponentials of a row's logits divided by a temperature, with one sum per block. A logit of minus infinity adds 0.
pub(super) struct Softmax {
    pub(super) max: f32,
    inverse_temperature: f32,
    blocks: Vec<f32>,
    pub(super) total: f64,
}

/// A sampled token with its log-probabilities in nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampledToken {
    /// Token id.
    pub token: u32,
    /// Log-probability under the model's distribution at the temperature, without penalties and filters.
    pub logprob: f32,
    /// Log-probability under the distribution that the token was sampled from.
    pub behaviour_logprob: f32,
}

/// Chooses the token that follows `response`. `logits`: one per token of the vocabulary; they are changed in place.
///
/// # Errors
/// A logit is not finite, or the penalties leave no token.
pub fn sample_token(
    logits: &mut [f32],
    response: &[u32],
    processor: &LogitsProcessor<'_>,
    decoding: Decoding,
    rng: &mut ChaCha8Rng,
) -> Result<SampledToken, ModelError> {
    let temperature = processor.settings.temperature as f32;
    let softmax = Softmax::of(logits, temperature);
    if !softmax.total.is_finite() {
        let position = response.len();
        return Err(ModelError::Generation(format!("the logits of token {position} of a response are not finite")));
    }
    let mut replaced = processor.apply_penalties(logits, response);
    let filtered = decoding == Decoding::Sample && processor.filter(logits);
    let (token, behaviour_logprob) = match decoding {
        Decoding::Greedy | Decoding::Beam { .. } => (argmax(logits), 0.0),
        Decoding::Sample => {
            let behaviour = if filtered || !replaced.is_empty() { &Softmax::of(logits, temperature) } else { &softmax };
            let token = behaviour.sample(logits, rng.random::<f64>());
            (token, behaviour.logprob(logits[token]))
        }
    };
    if logits[token] == f32::NEG_INFINITY {
        return Err(ModelError::Generation("no_repeat_ngram_size and min_new_tokens leave no token to sample".into()));
    }
    let logit = replaced.remove(&token).unwrap_or(logits[token]);
    Ok(SampledToken { token: token as u32, logprob: softmax.logprob(logit), behaviour_logprob })
}

fn argmax(row: &[f32]) -> usize {
    let max = largest(row);
    row.iter().position(|&value| value == max).unwrap_or(0)
}

impl Softmax {
    pub(super) fn of(logits: &[f32], temperature: f32) -> Self {
        let (max, inverse_temperature) = (largest(logits), 1.0 / temperature);
        let mut blocks = vec![0f32; logits.len().div_ceil(BLOCK)];
        sum_exponentials(logits, max, inverse_temperature, &mut blocks);
        let total = blocks.iter().map(|&sum| f64::from(sum)).sum();
        Self { max, inverse_temperature, blocks, total }
    }

    pub(super) fn logprob(&self, logit: f32) -> f32 {
        (logit - self.max) * self.inverse_temperature - self.total.ln() as f32
    }

    /// `e^((logit - max) / temperature)`: the token's probability times `total`.
    pub(super) fn weight(&self, logit: f32) -> f32 {
        exp_or_zero::<Plain>((logit - self.max) * self.inverse_temperature)
    }

    /// Inverse transform sampling: the token at which the cumulative probability reaches `uniform`. `logits`: the logits that this softmax
    /// was computed from.
    fn sample(&self, logits: &[f32], uniform: f64) -> usize {
        let mut left = uniform * self.total;
        let mut block = 0;
        while block + 1 < self.blocks.len() && left >= f64::from(self.blocks[block]) {
            left -= f64::from(self.blocks[block]);
            block += 1;
        }
        // Because of rounding, `uniform` may exceed the total. Then the last token with a probability above 0 is taken.
        while block > 0 && self.blocks[block] == 0.0 {
            block -= 1;
        }
        let tokens = block * BLOCK..logits.len().min((block + 1) * BLOCK);
        let mut found = tokens.start;
        for token in tokens {
            let weight = f64::from(self.weight(logits[token]));
            if weight > 0.0 {
                found = token;
                if left < weight {
                    break;
                }
                left -= weight;
            }
        }
        found
    }
}

vectorised! {
    fn largest<A>(row: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = row.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *lane = if *value > *lane { *value } else { *lane };
            }
        }
        lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &value| if value > max { value } else { max })
    }
}

vectorised! {
    fn sum_exponentials<A>(row: &[f32], max: f32, scale: f32, sums: &mut [f32]) {
        for (block, sum) in row.chunks(BLOCK).zip(sums) {
            let mut lanes = [0f32; LANES];
            let (chunks, rest) = block.as_chunks::<LANES>();
            for chunk in chunks {
                for (lane, value) in lanes.iter_mut().zip(chunk) {
                    *lane += exp_or_zero::<A>((value - max) * scale);
                }
            }
            *sum = lanes.iter().sum::<f32>() + rest.iter().map(|value| exp_or_zero::<A>((value - max) * scale)).sum::<f32>();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::SamplingSettings;
    use super::*;
    use std::collections::BTreeSet;

    fn logits(n: usize) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        (0..n).map(|_| rng.random_range(-4.0f32..4.0)).collect()
    }

    fn probabilities(logits: &[f32], temperature: f64) -> Vec<f64> {
        let weights: Vec<f64> = logits.iter().map(|&logit| (f64::from(logit) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / total).collect()
    }

    #[test]
    fn log_probabilities_agree_with_double_precision() {
        for n in [1, 15, 16, 511, 512, 513, 5000] {
            let logits = logits(n);
            let softmax = Softmax::of(&logits, 0.7);
            for (logit, p) in logits.iter().zip(probabilities(&logits, 0.7)) {
                assert!((f64::from(softmax.logprob(*logit)) - p.ln()).abs() < 2e-6);
            }
        }
    }

    #[test]
    fn samples_have_the_frequencies_of_the_distribution() {
        let logits = logits(1200);
        let softmax = Softmax::of(&logits, 1.0);
        let expected = probabilities(&logits, 1.0);
        // Equidistant numbers in the unit interval select each token in proportion to its probability, up to one at either end.
        let n = 200_000;
        let mut counts = vec![0usize; logits.len()];
        (0..n).for_each(|i| counts[softmax.sample(&logits, (i as f64 + 0.5) / n as f64)] += 1);
        for (count, p) in counts.iter().zip(expected) {
            assert!((*count as f64 - p * n as f64).abs() < 2.0, "{count} samples of {}", p * n as f64);
        }
    }

    #[test]
    fn samples_at_either_end_are_tokens_with_a_probability_above_zero() {
        let mut logits = vec![f32::NEG_INFINITY; 1030];
        (logits[3], logits[520]) = (1.0, 1.0);
        let softmax = Softmax::of(&logits, 1.0);
        assert_eq!(softmax.sample(&logits, 0.0), 3);
        assert_eq!(softmax.sample(&logits, 1.0), 520);
    }

    #[test]
    fn the_sampled_distribution_sums_to_one_under_every_filter() {
        let settings = SamplingSettings {
            temperature: 0.8,
            top_p: 0.7,
            top_k: 40,
            repetition_penalty: 1.3,
            no_repeat_ngram_size: 2,
            min_new_tokens: 5,
            ..SamplingSettings::default()
        };
        let stop_ids = BTreeSet::from([7]);
        let processor = LogitsProcessor { settings: &settings, stop_ids: &stop_ids };
        let response = [1, 2, 1];
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..20_000 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let sampled = sample_token(&mut logits(200), &response, &processor, Decoding::Sample, &mut rng).unwrap();
            *counts.entry(sampled.token).or_insert((0usize, sampled.behaviour_logprob)) = {
                let (count, logprob) = counts.get(&sampled.token).copied().unwrap_or((0, sampled.behaviour_logprob));
                assert_eq!(logprob, sampled.behaviour_logprob);
                (count + 1, logprob)
            };
        }
        assert!(!counts.contains_key(&2), "the bigram 1 2 and the stop token are suppressed");
        assert!(!counts.contains_key(&7), "the bigram 1 2 and the stop token are suppressed");
        let sum: f64 = counts.values().map(|(_, logprob)| f64::from(*logprob).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "probabilities of all sampled tokens sum to {sum}");
        for (count, logprob) in counts.values() {
            let p = f64::from(*logprob).exp();
            let deviation = (20_000.0 * p * (1.0 - p)).sqrt();
            assert!((*count as f64 - 20_000.0 * p).abs() < 5.0 * deviation + 1.0);
        }
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error() {
        let settings = SamplingSettings::default();
        let processor = LogitsProcessor { settings: &settings, stop_ids: &BTreeSet::new() };
        let mut logits = logits(50);
        logits[20] = f32::NAN;
        let rng = &mut ChaCha8Rng::seed_from_u64(0);
        let error = sample_token(&mut logits, &[], &processor, Decoding::Sample, rng).unwrap_err();
        assert!(error.to_string().contains("not finite"), "{error}");
    }
}
