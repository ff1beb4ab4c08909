//! A decoder with an adapter, seen as a policy: log-probabilities of responses given prompts.

use crate::TrainError;
use candle_core::{Tensor, Var};
use querl_model::{Decoder, Dropout, Keep, LoraAdapter, PackedBatch, Pass, Ranks, Recompute};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A prompt and the response to it, as tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Example {
    /// At least one token.
    pub prompt: Vec<u32>,
    /// Ends with the end of sequence, unless it was cut off.
    pub response: Vec<u32>,
}

impl Example {
    /// Tokens of both.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.response.len()
    }

    /// The tokens that go through the decoder: all but the last, from which nothing is predicted.
    pub fn computed(&self) -> impl Iterator<Item = u32> + '_ {
        self.prompt.iter().chain(&self.response).copied().take(self.n_computed())
    }

    fn n_computed(&self) -> usize {
        self.len() - usize::from(!self.response.is_empty())
    }

    /// True without any token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A base and what is trained on it.
#[derive(Clone, Copy)]
pub struct Policy<'a> {
    /// The base; shared by policy, reference and critic.
    pub decoder: &'a Decoder,
    /// `None` is the bare base.
    pub adapter: Option<&'a LoraAdapter>,
}

/// What a forward pass says of the response tokens of a batch.
pub(crate) struct ResponsePass {
    /// `(N, H)`: the hidden state that each response token was predicted from.
    pub(crate) hidden: Tensor,
    /// `(N, 2)`: log-probability and entropy.
    pub(crate) logprobs: Tensor,
}

impl Policy<'_> {
    /// Variables of the adapter, or of the base where there is none.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        self.adapter.map_or(self.decoder.vars(), LoraAdapter::vars)
    }

    /// Hidden states from which each response token of the batch is predicted: `(N, H)` for N response tokens in all.
    pub(crate) fn response_hidden(&self, examples: &[&Example]) -> Result<Tensor, TrainError> {
        self.training_hidden(examples, Training::default())
    }

    /// Log-probabilities and entropies of all response tokens of a batch, logits divided by the temperature.
    pub(crate) fn response_pass(&self, examples: &[&Example], temperature: f64) -> Result<ResponsePass, TrainError> {
        self.training_pass(examples, temperature, Training::default())
    }

    /// The same with what concerns training alone. What the examples begin with in common is computed once; gradients of the
    /// checkpointed layers are found by [`querl_model::backward`].
    pub(crate) fn training_pass(
        &self,
        examples: &[&Example],
        temperature: f64,
        training: Training<'_>,
    ) -> Result<ResponsePass, TrainError> {
        let hidden = self.training_hidden(examples, training)?;
        let targets = examples.iter().flat_map(|example| example.response.iter().copied()).collect();
        let logprobs = self.decoder.token_logprobs(&hidden, targets, temperature, self.adapter)?;
        Ok(ResponsePass { hidden, logprobs })
    }

    /// As [`Policy::response_hidden`], with what concerns training alone.
    pub(crate) fn training_hidden(&self, examples: &[&Example], training: Training<'_>) -> Result<Tensor, TrainError> {
        let sequences: Vec<Vec<u32>> = examples.iter().map(|example| example.computed().collect()).collect();
        let batch = PackedBatch::shared(sequences.iter().map(Vec::as_slice));
        let rows = examples.iter().enumerate().flat_map(|(index, example)| {
            let first = example.prompt.len() - 1;
            let batch = &batch;
            (first..first + example.response.len()).map(move |position| batch.row_of(index, position) as u32)
        });
        let pass = Pass { adapter: self.adapter, dropout: training.dropout, recompute: training.recompute };
        Ok(self.decoder.hidden_at(&batch, &rows.collect::<Vec<u32>>(), &pass)?)
    }
}

/// What a pass does in training alone.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Training<'a> {
    /// On the inputs of the adapter's layers.
    pub(crate) dropout: Option<Dropout>,
    /// What layers keep, and where they put gradients.
    pub(crate) recompute: Option<&'a Recompute>,
}

/// What layers keep in training, and where their gradients go.
pub(crate) fn kept(gradient_checkpointing: bool) -> Recompute {
    Recompute::new(if gradient_checkpointing { Keep::Inputs } else { Keep::Activations })
}

/// Divides examples into passes of at most `limit` rows, where what examples begin with in common counts once; an example
/// that is longer has a pass of its own. Examples that share the most stand together. Each index comes once.
pub fn passes(examples: &[&Example], limit: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..examples.len()).collect();
    order.sort_by(|&a, &b| examples[a].computed().cmp(examples[b].computed())); // stable: equal ones stay in order
    let mut passes: Vec<Vec<usize>> = Vec::new();
    let mut n_rows = 0;
    for index in order {
        let example = examples[index];
        if let Some(pass) = passes.last_mut() {
            let n_shared = pass.last().map_or(0, |&last| n_common(examples[last], example));
            if n_rows + example.n_computed() - n_shared <= limit {
                n_rows += example.n_computed() - n_shared;
                pass.push(index);
                continue;
            }
        }
        n_rows = example.n_computed();
        passes.push(vec![index]);
    }
    passes
}

/// The examples that a rank computes of a batch that all have: nearly as many rows as every other, examples that share a
/// beginning kept together. Ascending; each index is one rank's. Few examples may leave a rank without any.
pub(crate) fn share(examples: &[&Example], ranks: &Ranks) -> Vec<usize> {
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    if world_size == 1 {
        return (0..examples.len()).collect();
    }
    let order = passes(examples, usize::MAX).concat();
    let n_shared =
        |place: usize| place.checked_sub(1).map_or(0, |last| n_common(examples[order[last]], examples[order[place]]));
    // An example costs at least a row, so that equal ones are spread as well.
    let costs: Vec<usize> =
        (0..order.len()).map(|place| (examples[order[place]].n_computed() - n_shared(place)).max(1)).collect();
    let total: usize = costs.iter().sum();
    let mut before = 0;
    let mut mine = Vec::new();
    for (index, cost) in order.into_iter().zip(costs) {
        // Whose part of the whole holds the middle of this example.
        if (2 * before + cost) * world_size / (2 * total) == rank {
            mine.push(index);
        }
        before += cost;
    }
    mine.sort_unstable();
    mine
}

/// Tokens that two examples begin with in common.
fn n_common(a: &Example, b: &Example) -> usize {
    a.computed().zip(b.computed()).take_while(|(a, b)| a == b).count()
}

/// Cuts the values of all response tokens of a batch into one row per response.
pub(crate) fn rows_of<T: Copy>(values: &[T], examples: &[&Example]) -> Vec<Vec<T>> {
    let mut rest = values;
    let row = |example: &&Example| {
        let (row, tail) = rest.split_at(example.response.len());
        rest = tail;
        row.to_vec()
    };
    examples.iter().map(row).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use querl_model::{RanksError, run_ranks};

    fn example(prompt: &[u32], response: &[u32]) -> Example {
        Example { prompt: prompt.to_vec(), response: response.to_vec() }
    }

    #[test]
    fn passes_group_what_shares_most_and_keep_to_the_limit() {
        let (system, other) = ([1, 2, 3, 4], [9, 8, 7]);
        let examples = [
            example(&system, &[10, 11, 0]), // 4 + 2 rows
            example(&other, &[12, 0]),      // 3 + 1
            example(&system, &[10, 13, 0]), // 1 more: it shares the first token of the answer too
            example(&system, &[14, 0]),     // 1 more
            example(&[5; 30], &[0]),        // above the limit by itself
        ];
        let examples: Vec<&Example> = examples.iter().collect();
        assert_eq!(passes(&examples, 8), [vec![0, 2, 3], vec![4], vec![1]]);
        assert_eq!(passes(&examples, 7), [vec![0, 2], vec![3], vec![4], vec![1]]);
        assert_eq!(passes(&examples, 1000), [vec![0, 2, 3, 4, 1]]);
        assert!(passes(&[], 8).is_empty());
    }

    #[test]
    fn every_example_is_one_ranks_and_none_has_much_more_to_compute() {
        let examples: Vec<Example> =
            (0..23u32).map(|i| example(&[1, 2, 3, i % 4], &vec![7 + i; 1 + (i as usize * 5) % 9])).collect();
        let examples: Vec<&Example> = examples.iter().collect();
        for world_size in [1, 2, 3, 5] {
            let shares = run_ranks(world_size, |ranks| Ok::<_, RanksError>(share(&examples, &ranks))).unwrap();
            let mut all = shares.concat();
            all.sort_unstable();
            assert_eq!(all, (0..23).collect::<Vec<_>>());
            assert!(shares.iter().all(|share| share.is_sorted()));
            let rows = |share: &Vec<usize>| share.iter().map(|&i| examples[i].n_computed()).sum::<usize>();
            let (least, most) = (shares.iter().map(rows).min().unwrap(), shares.iter().map(rows).max().unwrap());
            assert!(most - least <= 2 * 13, "{world_size}: {least} to {most}");
        }
        let two = [examples[0], examples[1]];
        let shares = run_ranks(3, |ranks| Ok::<_, RanksError>(share(&two, &ranks).len())).unwrap();
        assert_eq!(shares.iter().sum::<usize>(), 2);
    }
}
