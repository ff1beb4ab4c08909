//! Limits and filters: what a row of logits loses before a token is chosen from it.
//!
//! Departures from transformers' processors: only the answer is looked at, never the prompt; tokens of equal probability at
//! the edge of `top_p` are kept in the order of their ids.

use super::SamplingSettings;
use super::sampling::Softmax;
use std::collections::{BTreeMap, BTreeSet};

/// What shapes a row of logits.
#[derive(Clone, Copy)]
pub struct Rules<'a> {
    pub settings: &'a SamplingSettings,
    pub stop_ids: &'a BTreeSet<u32>,
}

impl Rules<'_> {
    /// Applies what depends on the answer so far. Returns the logits that were replaced, by token.
    ///
    /// Source: transformers' `RepetitionPenaltyLogitsProcessor`, `NoRepeatNGramLogitsProcessor` and
    /// `MinNewTokensLengthLogitsProcessor`, in this order.
    pub(super) fn limit(&self, logits: &mut [f32], answer: &[u32]) -> BTreeMap<usize, f32> {
        let mut replaced = BTreeMap::new();
        let mut replace = |token: u32, value: &dyn Fn(f32) -> f32| {
            if let Some(logit) = logits.get_mut(token as usize) {
                replaced.entry(token as usize).or_insert(*logit);
                *logit = value(*logit);
            }
        };
        let penalty = self.settings.repetition_penalty as f32;
        if penalty != 1.0 {
            let once: BTreeSet<u32> = answer.iter().copied().collect();
            for token in once {
                replace(token, &|logit| if logit < 0.0 { logit * penalty } else { logit / penalty });
            }
        }
        for token in repeating(answer, self.settings.no_repeat_ngram_size) {
            replace(token, &|_| f32::NEG_INFINITY);
        }
        if answer.len() < self.settings.min_new_tokens {
            self.stop_ids.iter().for_each(|&token| replace(token, &|_| f32::NEG_INFINITY));
        }
        replaced
    }

    /// Leaves the likeliest tokens alone finite, as `top_k` and then `top_p` say. Returns whether there was anything to do.
    ///
    /// Source: transformers' `TopKLogitsWarper` and `TopPLogitsWarper`.
    pub(super) fn filter(&self, logits: &mut [f32]) -> bool {
        let by_count = self.settings.top_k > 0 && self.settings.top_k < logits.len();
        if by_count {
            keep_largest(logits, self.settings.top_k);
        }
        let by_share = self.settings.top_p < 1.0;
        if by_share {
            keep_share(logits, self.settings.top_p, self.settings.temperature as f32);
        }
        by_count || by_share
    }
}

/// Tokens that would end a sequence of `size` tokens that `answer` already has.
fn repeating(answer: &[u32], size: usize) -> Vec<u32> {
    if size == 0 || answer.len() < size {
        return Vec::new();
    }
    let begun = &answer[answer.len() + 1 - size..];
    answer.windows(size).filter(|window| window[..size - 1] == *begun).map(|window| window[size - 1]).collect()
}

/// Keeps the `n` largest logits, and those that equal the last of them.
fn keep_largest(logits: &mut [f32], n: usize) {
    let mut sorted = logits.to_vec();
    let (_, &mut threshold, _) = sorted.select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a));
    logits.iter_mut().filter(|logit| **logit < threshold).for_each(|logit| *logit = f32::NEG_INFINITY);
}

/// Classes of logits by their distance from the largest: tokens are sorted only within the one in which the share is reached.
const N_CLASSES: usize = 512;

/// Classes to a factor of `e`.
const CLASSES_PER_NAT: f32 = 16.0;

/// Keeps the likeliest tokens up to the one with which their sum reaches `share`.
fn keep_share(logits: &mut [f32], share: f64, temperature: f32) {
    let softmax = Softmax::of(logits, temperature);
    let scale = CLASSES_PER_NAT / temperature;
    let class = |logit: f32| (((softmax.max() - logit) * scale) as usize).min(N_CLASSES - 1);
    let mut sums = [0f64; N_CLASSES];
    logits.iter().for_each(|&logit| sums[class(logit)] += f64::from(softmax.weight(logit)));
    let wanted = share * softmax.total();
    let (mut before, mut edge) = (0.0, 0);
    while edge + 1 < N_CLASSES && before + sums[edge] < wanted {
        before += sums[edge];
        edge += 1;
    }
    let mut at_edge: Vec<usize> = (0..logits.len()).filter(|&token| class(logits[token]) == edge).collect();
    at_edge.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    for token in at_edge {
        let weight = f64::from(softmax.weight(logits[token]));
        if before >= wanted {
            logits[token] = f32::NEG_INFINITY;
        }
        before += weight;
    }
    logits.iter_mut().filter(|logit| class(**logit) > edge).for_each(|logit| *logit = f32::NEG_INFINITY);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(logits: &[f32]) -> Vec<usize> {
        (0..logits.len()).filter(|&token| logits[token].is_finite()).collect()
    }

    #[test]
    fn a_sequence_that_is_there_is_not_written_again() {
        assert_eq!(repeating(&[1, 2, 3, 1, 2], 3), [3]);
        assert_eq!(repeating(&[1, 2, 1, 3, 1], 2), [2, 3]);
        assert_eq!(repeating(&[4, 5], 1), [4, 5]);
        assert!(repeating(&[1, 2], 3).is_empty() && repeating(&[1, 2], 0).is_empty());
    }

    #[test]
    fn tokens_as_likely_as_the_last_kept_are_kept() {
        let mut logits = [1.0, 3.0, 2.0, 2.0, 0.0];
        keep_largest(&mut logits, 2);
        assert_eq!(kept(&logits), [1, 2, 3]);
    }

    #[test]
    fn the_token_that_crosses_the_share_is_kept() {
        // Probabilities 0.5, 0.3, 0.15, 0.05.
        let probabilities = [0.15f32, 0.5, 0.05, 0.3];
        for (share, expected) in [(0.49, vec![1]), (0.51, vec![1, 3]), (0.81, vec![0, 1, 3]), (0.96, vec![0, 1, 2, 3])]
        {
            let mut logits = probabilities.map(f32::ln);
            keep_share(&mut logits, share, 1.0);
            assert_eq!(kept(&logits), expected, "share {share}");
        }
    }

    #[test]
    fn a_share_among_equal_tokens_keeps_only_what_it_needs() {
        let mut logits = [0f32; 1000];
        keep_share(&mut logits, 0.3005, 2.0);
        assert_eq!(kept(&logits), (0..301).collect::<Vec<_>>());
    }
}
