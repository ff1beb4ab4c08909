//! Aggregation of token losses into the loss of an optimizer step.

use super::{Rows, masked::n_kept};

/// How token losses are averaged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aggregation {
    /// Mean over tokens: long responses weigh more.
    TokenMean,
    /// Mean over tokens of a response, then over responses.
    SequenceMean,
    /// Sum over tokens of a response, divided by a constant; mean over responses.
    SequenceSum {
        /// Dr. GRPO: the longest possible response, so that a token's weight does not depend on its response's length.
        scale: f32,
    },
}

/// Size of an optimizer step over all micro-batches and ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSize {
    /// Tokens where the response mask is true.
    pub n_tokens: usize,
    /// Responses with at least one such token.
    pub n_responses: usize,
}

impl StepSize {
    /// The size of a step with these tokens.
    pub fn of(response_mask: &[Vec<bool>]) -> Self {
        let n_responses = response_mask.iter().filter(|row| row.contains(&true)).count();
        Self { n_tokens: n_kept(response_mask), n_responses }
    }
}

impl Aggregation {
    /// The weight of each token in the loss of the step, 0 where `response_mask` is false: `(B, T)`.
    ///
    /// Losses of micro-batches with these weights add up to the loss of the step, however it is split.
    ///
    /// Source: verl `agg_loss`: `token-mean`, `seq-mean-token-mean` (here without the 1e-8 added to the number of tokens) and
    /// `seq-mean-token-sum-norm`.
    pub fn weights(self, response_mask: &[Vec<bool>], step: StepSize) -> Rows {
        let (n_tokens, n_responses) = (step.n_tokens.max(1) as f32, step.n_responses.max(1) as f32);
        let row = |mask: &Vec<bool>| {
            let n_kept = mask.iter().filter(|keep| **keep).count().max(1) as f32;
            let weight = match self {
                Self::TokenMean => 1.0 / n_tokens,
                Self::SequenceMean => 1.0 / (n_kept * n_responses),
                Self::SequenceSum { scale } => 1.0 / (scale * n_responses),
            };
            mask.iter().map(|keep| if *keep { weight } else { 0.0 }).collect()
        };
        response_mask.iter().map(row).collect()
    }
}

/// Sum of values times weights. Positions of weight 0 are skipped, whatever they hold.
pub fn weighted_sum(values: &[Vec<f32>], weights: &[Vec<f32>]) -> f32 {
    let pairs = values.iter().zip(weights).flat_map(|(values, weights)| values.iter().zip(weights));
    pairs.filter(|(_, weight)| **weight != 0.0).map(|(x, weight)| f64::from(*x) * f64::from(*weight)).sum::<f64>()
        as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_do_not_depend_on_the_split_into_micro_batches() {
        let mask = vec![vec![true, true, false], vec![true], vec![true, true, true]];
        for aggregation in [Aggregation::TokenMean, Aggregation::SequenceMean, Aggregation::SequenceSum { scale: 8.0 }]
        {
            let whole = aggregation.weights(&mask, StepSize::of(&mask));
            let parts: Rows = mask.chunks(2).flat_map(|part| aggregation.weights(part, StepSize::of(&mask))).collect();
            assert_eq!(whole, parts);
        }
    }

    #[test]
    fn masked_values_do_not_leak_into_a_weighted_sum() {
        let weights = Aggregation::SequenceMean.weights(&[vec![true, false]], StepSize { n_tokens: 1, n_responses: 1 });
        assert_eq!(weighted_sum(&[vec![2.0, f32::NAN]], &weights), 2.0);
    }
}
