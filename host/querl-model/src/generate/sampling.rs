//! One token out of one row of logits, with its log-probabilities.

use super::Decoding;
use super::filters::Rules;
use super::vectorised::{LANES, exp_or_zero, vectorised};
use crate::ModelError;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Logits whose exponentials are summed together: a draw first finds the block, then the token in it.
const BLOCK: usize = 512;

/// The exponentials of a row's logits over a temperature, summed by blocks. A logit of minus infinity counts nothing.
pub(super) struct Softmax {
    max: f32,
    inverse_temperature: f32,
    blocks: Vec<f32>,
    total: f64,
}

/// A chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    pub token: u32,
    /// Under the model's whole distribution at the temperature.
    pub logprob: f32,
    /// Under the distribution that it was chosen from.
    pub behaviour_logprob: f32,
}

/// Chooses the token that follows `answer`. `logits` are those of the whole vocabulary; they are changed.
///
/// # Errors
/// A logit is not finite, or the limits leave no token.
pub fn choose(
    logits: &mut [f32],
    answer: &[u32],
    rules: &Rules<'_>,
    decoding: Decoding,
    rng: &mut ChaCha8Rng,
) -> Result<Choice, ModelError> {
    let temperature = rules.settings.temperature as f32;
    let whole = Softmax::of(logits, temperature);
    if !whole.total.is_finite() {
        return Err(ModelError::Generation(format!(
            "the logits of token {} of an answer are not finite",
            answer.len()
        )));
    }
    let mut replaced = rules.limit(logits, answer);
    let filtered = decoding == Decoding::Sample && rules.filter(logits);
    let (token, behaviour_logprob) = match decoding {
        Decoding::Greedy | Decoding::Beam { .. } => (argmax(logits), 0.0),
        Decoding::Sample => {
            let left = if filtered || !replaced.is_empty() { &Softmax::of(logits, temperature) } else { &whole };
            let token = left.draw(logits, rng.random::<f64>());
            (token, left.logprob(logits[token]))
        }
    };
    if logits[token] == f32::NEG_INFINITY {
        return Err(ModelError::Generation("no_repeat_ngram_size and min_new_tokens leave no token to choose".into()));
    }
    let logit = replaced.remove(&token).unwrap_or(logits[token]);
    Ok(Choice { token: token as u32, logprob: whole.logprob(logit), behaviour_logprob })
}

/// The first of the largest values.
fn argmax(row: &[f32]) -> usize {
    let max = largest(row);
    row.iter().position(|&value| value == max).unwrap_or(0)
}

impl Softmax {
    /// Of one row of logits.
    pub(super) fn of(logits: &[f32], temperature: f32) -> Self {
        let (max, inverse_temperature) = (largest(logits), 1.0 / temperature);
        let mut blocks = vec![0f32; logits.len().div_ceil(BLOCK)];
        sum_exponentials(logits, max, inverse_temperature, &mut blocks);
        let total = blocks.iter().map(|&sum| f64::from(sum)).sum();
        Self { max, inverse_temperature, blocks, total }
    }

    /// Log-probability of a token with this logit.
    pub(super) fn logprob(&self, logit: f32) -> f32 {
        (logit - self.max) * self.inverse_temperature - self.total.ln() as f32
    }

    /// `e` to a logit, less the largest, over the temperature: the share of its token, `total` being all of it.
    pub(super) fn weight(&self, logit: f32) -> f32 {
        exp_or_zero::<super::vectorised::Plain>((logit - self.max) * self.inverse_temperature)
    }

    pub(super) fn total(&self) -> f64 {
        self.total
    }

    pub(super) fn max(&self) -> f32 {
        self.max
    }

    /// The token in which the share `uniform` of the sum is reached. `logits` are those that the sums are of.
    fn draw(&self, logits: &[f32], uniform: f64) -> usize {
        let mut left = uniform * self.total;
        let mut block = 0;
        while block + 1 < self.blocks.len() && left >= f64::from(self.blocks[block]) {
            left -= f64::from(self.blocks[block]);
            block += 1;
        }
        // Rounding may leave a rest behind the last token of the vocabulary: it belongs to the last one that has a share.
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::SamplingSettings;
    use super::*;
    use rand::SeedableRng;
    use std::collections::BTreeSet;

    fn logits(n: usize) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        (0..n).map(|_| rng.random_range(-4.0f32..4.0)).collect()
    }

    /// Probability of every token, in f64.
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
    fn draws_have_the_frequencies_of_the_distribution() {
        let logits = logits(1200);
        let softmax = Softmax::of(&logits, 1.0);
        let expected = probabilities(&logits, 1.0);
        // Equal steps through the unit interval hit each token as often as its share says, but for one at either end.
        let n = 200_000;
        let mut counts = vec![0usize; logits.len()];
        (0..n).for_each(|i| counts[softmax.draw(&logits, (i as f64 + 0.5) / n as f64)] += 1);
        for (count, p) in counts.iter().zip(expected) {
            assert!((*count as f64 - p * n as f64).abs() < 2.0, "{count} draws of {}", p * n as f64);
        }
    }

    #[test]
    fn a_draw_at_either_end_is_a_token_that_has_a_share() {
        let mut logits = vec![f32::NEG_INFINITY; 1030];
        (logits[3], logits[520]) = (1.0, 1.0);
        let softmax = Softmax::of(&logits, 1.0);
        assert_eq!(softmax.draw(&logits, 0.0), 3);
        assert_eq!(softmax.draw(&logits, 1.0), 520);
    }

    #[test]
    fn the_distribution_that_is_drawn_from_sums_to_one_under_every_filter() {
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
        let rules = Rules { settings: &settings, stop_ids: &stop_ids };
        let answer = [1, 2, 1];
        let mut drawn = std::collections::BTreeMap::new();
        for seed in 0..20_000 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let choice = choose(&mut logits(200), &answer, &rules, Decoding::Sample, &mut rng).unwrap();
            *drawn.entry(choice.token).or_insert((0usize, choice.behaviour_logprob)) = {
                let (count, logprob) = drawn.get(&choice.token).copied().unwrap_or((0, choice.behaviour_logprob));
                assert_eq!(logprob, choice.behaviour_logprob);
                (count + 1, logprob)
            };
        }
        assert!(!drawn.contains_key(&2) && !drawn.contains_key(&7), "the bigram 1 2 and the stop token are barred");
        let sum: f64 = drawn.values().map(|(_, logprob)| f64::from(*logprob).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "probabilities of all tokens that are drawn sum to {sum}");
        for (count, logprob) in drawn.values() {
            let p = f64::from(*logprob).exp();
            let deviation = (20_000.0 * p * (1.0 - p)).sqrt();
            assert!((*count as f64 - 20_000.0 * p).abs() < 5.0 * deviation + 1.0);
        }
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error() {
        let settings = SamplingSettings::default();
        let rules = Rules { settings: &settings, stop_ids: &BTreeSet::new() };
        let mut logits = logits(50);
        logits[20] = f32::NAN;
        let rng = &mut ChaCha8Rng::seed_from_u64(0);
        let error = choose(&mut logits, &[], &rules, Decoding::Sample, rng).unwrap_err();
        assert!(error.to_string().contains("not finite"), "{error}");
    }
}
