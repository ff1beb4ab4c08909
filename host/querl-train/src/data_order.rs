//! The order in which training takes rows: shuffled by epoch, seeded.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// The order in which fine-tuning with this seed takes rows, for a comparison with another program.
pub fn training_order(n_rows: usize, seed: u64, n_epochs: usize) -> Vec<usize> {
    DataOrder::new(n_rows, seed).take(n_rows * n_epochs)
}

/// Rows, shuffled for each epoch. The order of an epoch follows from the seed and its number alone, so a checkpoint keeps only
/// the position.
#[derive(Debug, Clone)]
pub(crate) struct DataOrder {
    n_rows: usize,
    seed: u64,
    position: u64,
    /// The epoch of `rows`.
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

    /// Continues as if so many rows had been taken.
    pub(crate) fn seek(&mut self, position: u64) {
        self.position = position;
    }

    /// At most `n` rows, at least one, all of the same epoch.
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

    /// Exactly `n` rows, across the end of an epoch.
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
}
