//! Logits processors: penalties and filters on a row of logits before a token is sampled from it.
//!
//! Departures from transformers' processors: they see the tokens of the response, never the prompt; tokens of equal probability
//! at the edge of `top_p` are kept in the order of their ids.

use super::SamplingSettings;
use super::sampler::Softmax;
use std::collections::{BTreeMap, BTreeSet};

/// Penalties and filters of a generation call.
#[derive(Clone, Copy)]
pub struct LogitsProcessor<'a> {
    /// Sampling settings, which say which penalties and filters apply.
    pub settings: &'a SamplingSettings,
    /// Ids of the tokens that end a response: suppressed before `min_new_tokens`.
    pub stop_ids: &'a BTreeSet<u32>,
}

impl LogitsProcessor<'_> {
    /// Applies the penalties, which depend on the response so far. Returns the original values of the replaced logits, by token.
    ///
    /// Source: transformers' `RepetitionPenaltyLogitsProcessor`, `NoRepeatNGramLogitsProcessor` and `MinNewTokensLengthLogitsProcessor`, in
    /// this order.
    pub(super) fn apply_penalties(&self, logits: &mut [f32], response: &[u32]) -> BTreeMap<usize, f32> {
        let mut replaced = BTreeMap::new();
        let mut replace = |token: u32, value: &dyn Fn(f32) -> f32| {
            if let Some(logit) = logits.get_mut(token as usize) {
                replaced.entry(token as usize).or_insert(*logit);
                *logit = value(*logit);
            }
        };
        let penalty = self.settings.repetition_penalty as f32;
        if penalty != 1.0 {
            let once: BTreeSet<u32> = response.iter().copied().collect();
            for token in once {
                replace(token, &|logit| if logit < 0.0 { logit * penalty } else { logit / penalty });
            }
        }
        for token in ngram_completions(response, self.settings.no_repeat_ngram_size) {
            replace(token, &|_| f32::NEG_INFINITY);
        }
        if response.len() < self.settings.min_new_tokens {
            self.stop_ids.iter().for_each(|&token| replace(token, &|_| f32::NEG_INFINITY));
        }
        replaced
    }

    /// Sets logits outside `top_k`, and then outside `top_p`, to minus infinity. Returns true if one of the filters is enabled.
    ///
    /// Source: transformers' `TopKLogitsWarper` and `TopPLogitsWarper`.
    pub(super) fn filter(&self, logits: &mut [f32]) -> bool {
        let has_top_k = self.settings.top_k > 0 && self.settings.top_k < logits.len();
        if has_top_k {
            keep_top_k(logits, self.settings.top_k);
        }
        let has_top_p = self.settings.top_p < 1.0;
        if has_top_p {
            keep_top_p(logits, self.settings.top_p, self.settings.temperature as f32);
        }
        has_top_k || has_top_p
    }
}

/// Tokens that would complete an n-gram of `size` tokens that `response` already has.
fn ngram_completions(response: &[u32], size: usize) -> Vec<u32> {
    if size == 0 || response.len() < size {
        return Vec::new();
    }
    let prefix = &response[response.len() + 1 - size..];
    response.windows(size).filter(|window| window[..size - 1] == *prefix).map(|window| window[size - 1]).collect()
}

/// Keeps the `n` largest logits, and all ties with the smallest of them.
fn keep_top_k(logits: &mut [f32], n: usize) {
    let mut sorted = logits.to_vec();
    let (_, &mut threshold, _) = sorted.select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a));
    logits.iter_mut().filter(|logit| **logit < threshold).for_each(|logit| *logit = f32::NEG_INFINITY);
}

/// Number of histogram bins of logits by their distance from the maximum. Only the bin in which `top_p` is reached is sorted.
const N_BINS: usize = 512;

const BINS_PER_NAT: f32 = 16.0;

/// Keeps the most probable tokens up to the one at which the cumulative probability reaches `top_p`.
fn keep_top_p(logits: &mut [f32], top_p: f64, temperature: f32) {
    let softmax = Softmax::of(logits, temperature);
    let scale = BINS_PER_NAT / temperature;
    let bin = |logit: f32| (((softmax.max - logit) * scale) as usize).min(N_BINS - 1);
    let mut sums = [0f64; N_BINS];
    logits.iter().for_each(|&logit| sums[bin(logit)] += f64::from(softmax.weight(logit)));
    let threshold = top_p * softmax.total;
    let (mut before, mut edge) = (0.0, 0);
    while edge + 1 < N_BINS && before + sums[edge] < threshold {
        before += sums[edge];
        edge += 1;
    }
    let mut at_edge: Vec<usize> = (0..logits.len()).filter(|&token| bin(logits[token]) == edge).collect();
    at_edge.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    for token in at_edge {
        let weight = f64::from(softmax.weight(logits[token]));
        if before >= threshold {
            logits[token] = f32::NEG_INFINITY;
        }
        before += weight;
    }
    logits.iter_mut().filter(|logit| bin(**logit) > edge).for_each(|logit| *logit = f32::NEG_INFINITY);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(logits: &[f32]) -> Vec<usize> {
        (0..logits.len()).filter(|&token| logits[token].is_finite()).collect()
    }

    #[test]
    fn completions_of_earlier_ngrams_are_found() {
        assert_eq!(ngram_completions(&[1, 2, 3, 1, 2], 3), [3]);
        assert_eq!(ngram_completions(&[1, 2, 1, 3, 1], 2), [2, 3]);
        assert_eq!(ngram_completions(&[4, 5], 1), [4, 5]);
        assert!(ngram_completions(&[1, 2], 3).is_empty() && ngram_completions(&[1, 2], 0).is_empty());
    }

    #[test]
    fn top_k_keeps_ties() {
        let mut logits = [1.0, 3.0, 2.0, 2.0, 0.0];
        keep_top_k(&mut logits, 2);
        assert_eq!(kept(&logits), [1, 2, 3]);
    }

    #[test]
    fn top_p_keeps_the_token_that_crosses_it() {
        // Probabilities 0.5, 0.3, 0.15, 0.05.
        let probabilities = [0.15f32, 0.5, 0.05, 0.3];
        for (share, expected) in [(0.49, vec![1]), (0.51, vec![1, 3]), (0.81, vec![0, 1, 3]), (0.96, vec![0, 1, 2, 3])]
        {
            let mut logits = probabilities.map(f32::ln);
            keep_top_p(&mut logits, share, 1.0);
            assert_eq!(kept(&logits), expected, "share {share}");
        }
    }

    #[test]
    fn top_p_among_equal_tokens_keeps_only_as_many_as_needed() {
        let mut logits = [0f32; 1000];
        keep_top_p(&mut logits, 0.3005, 2.0);
        assert_eq!(kept(&logits), (0..301).collect::<Vec<_>>());
    }
}
