//! The order in which training takes rows, and the split of a batch into micro-batches: forward passes that fit in memory and compute
//! common prefixes once.

use crate::TrainError;
use crate::policy::Example;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// Row indices in the order in which fine-tuning with `seed` takes them over `n_epochs` epochs, for a comparison with another program.
pub fn training_order(n_rows: usize, seed: u64, n_epochs: usize) -> Vec<usize> {
    DataOrder::new(n_rows, seed).take(n_rows * n_epochs)
}

/// The shuffled order of the rows. The order of an epoch is a function of seed and epoch number, so that a checkpoint needs to store only
/// the position.
#[derive(Debug, Clone)]
pub(crate) struct DataOrder {
    n_rows: usize,
    seed: u64,
    position: u64,
    /// The epoch whose order is in `rows`.
    epoch: Option<u64>,
    rows: Vec<usize>,
}

impl DataOrder {
    pub(crate) fn new(n_rows: usize, seed: u64) -> Self {
        Self { n_rows, seed, position: 0, epoch: None, rows: Vec::new() }
    }

    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Continues as if `position` rows had been taken.
    pub(crate) fn seek(&mut self, position: u64) {
        self.position = position;
    }

    /// The next rows: at least one, at most `n`, all of the same epoch.
    pub(crate) fn take_within_epoch(&mut self, n: usize) -> Vec<usize> {
        if self.n_rows == 0 {
            return Vec::new();
        }
        let epoch = self.position / self.n_rows as u64;
        let start = (self.position % self.n_rows as u64) as usize;
        if self.epoch != Some(epoch) {
            (self.epoch, self.rows) = (Some(epoch), self.shuffled(epoch));
        }
        let taken = self.rows[start..self.n_rows.min(start + n.max(1))].to_vec();
        self.position += taken.len() as u64;
        taken
    }

    /// The next `n` rows, continued into the next epoch where one ends.
    pub(crate) fn take(&mut self, n: usize) -> Vec<usize> {
        let mut rows = Vec::with_capacity(n);
        while rows.len() < n && self.n_rows > 0 {
            rows.extend(self.take_within_epoch(n - rows.len()));
        }
        rows
    }

    fn shuffled(&self, epoch: u64) -> Vec<usize> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(epoch);
        let mut rows: Vec<usize> = (0..self.n_rows).collect();
        rows.shuffle(&mut rng);
        rows
    }
}

/// Packs examples into micro-batches of at most `max_tokens` tokens, where a common prefix counts once; a longer example has a
/// micro-batch of its own. Examples that share the longest prefixes are adjacent. Each index occurs once.
pub fn micro_batches(examples: &[&Example], max_tokens: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..examples.len()).collect();
    order.sort_by(|&a, &b| examples[a].computed().cmp(examples[b].computed())); // stable: equal examples stay in order
    let mut micro_batches: Vec<Vec<usize>> = Vec::new();
    let mut n_tokens = 0;
    for index in order {
        let example = examples[index];
        if let Some(micro_batch) = micro_batches.last_mut() {
            let n_shared = micro_batch.last().map_or(0, |&last| n_common_tokens(examples[last], example));
            if n_tokens + example.n_computed() - n_shared <= max_tokens {
                n_tokens += example.n_computed() - n_shared;
                micro_batch.push(index);
                continue;
            }
        }
        n_tokens = example.n_computed();
        micro_batches.push(vec![index]);
    }
    micro_batches
}

/// Gradient accumulation: divides an optimizer step into at least `n` micro-batches (fewer where there are fewer examples) of at most
/// `max_tokens` tokens. Examples that share a prefix stay together. Each index occurs once.
pub(crate) fn accumulation_micro_batches(examples: &[&Example], n: usize, max_tokens: usize) -> Vec<Vec<usize>> {
    let order: Vec<usize> = micro_batches(examples, usize::MAX).concat();
    let size = order.len().div_ceil(n.max(1)).max(1);
    let within = |chunk: &[usize]| -> Vec<Vec<usize>> {
        let chunk_examples: Vec<&Example> = chunk.iter().map(|&index| examples[index]).collect();
        let cut = micro_batches(&chunk_examples, max_tokens).into_iter();
        cut.map(|indices| indices.into_iter().map(|i| chunk[i]).collect()).collect()
    };
    order.chunks(size).flat_map(within).collect()
}

/// Runs `forward` over all examples in micro-batches and returns its results in the order of the examples.
pub(crate) fn map_micro_batches<T>(
    examples: &[&Example],
    max_tokens: usize,
    mut forward: impl FnMut(&[&Example]) -> Result<Vec<T>, TrainError>,
) -> Result<Vec<T>, TrainError> {
    let mut results: Vec<(usize, T)> = Vec::with_capacity(examples.len());
    for indices in micro_batches(examples, max_tokens) {
        let micro_batch: Vec<&Example> = indices.iter().map(|&index| examples[index]).collect();
        results.extend(indices.into_iter().zip(forward(&micro_batch)?));
    }
    results.sort_by_key(|(index, _)| *index);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

/// Length of the common prefix of two examples' input tokens.
pub(crate) fn n_common_tokens(a: &Example, b: &Example) -> usize {
    a.computed().zip(b.computed()).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_holds_every_row_once() {
        let mut order = DataOrder::new(5, 1);
        let mut epoch = [order.take_within_epoch(3), order.take_within_epoch(3)].concat();
        epoch.sort_unstable();
        assert_eq!(epoch, [0, 1, 2, 3, 4]);
        assert_eq!(order.take(12).len(), 12);
    }

    #[test]
    fn epochs_differ_and_the_position_determines_the_rest() {
        let mut order = DataOrder::new(40, 7);
        let (first, second) = (order.take_within_epoch(40), order.take_within_epoch(40));
        assert_ne!(first, second);
        let mut again = DataOrder::new(40, 7);
        again.seek(57);
        assert_eq!((again.take(5), again.position()), (second[17..22].to_vec(), 62));
        assert_ne!(DataOrder::new(40, 8).take(40), first);
    }

    fn example(prompt: &[u32], response: &[u32]) -> Example {
        Example { prompt: prompt.to_vec(), response: response.to_vec() }
    }

    #[test]
    fn micro_batches_group_common_prefixes_and_keep_to_the_limit() {
        let (system, other) = ([1, 2, 3, 4], [9, 8, 7]);
        let examples = [
            example(&system, &[10, 11, 0]), // 4 + 2 rows
            example(&other, &[12, 0]),      // 3 + 1
            example(&system, &[10, 13, 0]), // 1 more row: shares the first token of the answer, too
            example(&system, &[14, 0]),     // 1 more
            example(&[5; 30], &[0]),        // exceeds the limit alone
        ];
        let examples: Vec<&Example> = examples.iter().collect();
        assert_eq!(micro_batches(&examples, 8), [vec![0, 2, 3], vec![4], vec![1]]);
        assert_eq!(micro_batches(&examples, 7), [vec![0, 2], vec![3], vec![4], vec![1]]);
        assert_eq!(micro_batches(&examples, 1000), [vec![0, 2, 3, 4, 1]]);
        assert!(micro_batches(&[], 8).is_empty());
    }

    fn examples() -> Vec<Example> {
        [5u32, 3, 5, 4, 3, 5]
            .into_iter()
            .map(|first| Example { prompt: vec![first; 3], response: vec![first; 2] })
            .collect()
    }

    #[test]
    fn results_come_back_in_order() {
        let examples = examples();
        let examples: Vec<&Example> = examples.iter().collect();
        for limit in [1, 7, 100] {
            let found =
                map_micro_batches(&examples, limit, |part| Ok(part.iter().map(|example| example.prompt[0]).collect()));
            assert_eq!(found.unwrap(), [5, 3, 5, 4, 3, 5]);
        }
    }

    #[test]
    fn accumulation_holds_each_example_once_and_keeps_both_limits() {
        let examples = examples();
        let examples: Vec<&Example> = examples.iter().collect();
        for (n_parts, limit) in [(1, 100), (4, 100), (1, 6), (2, 6)] {
            let parts = accumulation_micro_batches(&examples, n_parts, limit);
            let mut all = parts.concat();
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2, 3, 4, 5]);
            assert!(parts.len() >= n_parts.min(3), "{parts:?}");
        }
        assert_eq!(accumulation_micro_batches(&examples, 1, 100).len(), 1);
    }
}
