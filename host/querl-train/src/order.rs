//! Which rows come next.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// Rows in a shuffled order of their own for each epoch.
pub(crate) struct Order {
    rng: ChaCha8Rng,
    n_rows: usize,
    left: Vec<usize>,
}

impl Order {
    /// An order over `n_rows`, the same for the same seed.
    pub(crate) fn new(n_rows: usize, seed: u64) -> Self {
        Self { rng: ChaCha8Rng::seed_from_u64(seed), n_rows, left: Vec::new() }
    }

    /// At most `n` rows, at least one, never across the end of an epoch.
    pub(crate) fn take_within_epoch(&mut self, n: usize) -> Vec<usize> {
        if self.left.is_empty() {
            self.left = (0..self.n_rows).collect();
            self.left.shuffle(&mut self.rng);
        }
        let rest = self.left.len().saturating_sub(n);
        self.left.split_off(rest)
    }

    /// Exactly `n` rows, going on into the next epoch where one ends.
    pub(crate) fn take(&mut self, n: usize) -> Vec<usize> {
        let mut rows = Vec::with_capacity(n);
        while rows.len() < n && self.n_rows > 0 {
            rows.extend(self.take_within_epoch(n - rows.len()));
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_holds_every_row_once() {
        let mut order = Order::new(5, 1);
        let mut epoch = [order.take_within_epoch(3), order.take_within_epoch(3)].concat();
        epoch.sort_unstable();
        assert_eq!(epoch, [0, 1, 2, 3, 4]);
        assert_eq!(order.take(12).len(), 12);
    }
}
