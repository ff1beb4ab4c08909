//! Dropout on the inputs of adapters, with masks that depend on a row's tokens and not on its position in a batch.

use crate::batch::row_key;
use crate::random::{STEP, mix};
use crate::sharding::{LinearSplit, Shard};
use candle_core::{Result, bail};
use rayon::prelude::*;
use std::sync::Arc;

/// Dropout of one pass. The mask of a row depends on the seed, the layer and the row's tokens up to itself alone: a pass that is
/// computed again draws the same mask, and so does a row in another pass or one that several sequences share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Share of an adapter's inputs that is zeroed, 0 to below 1; the others are scaled by `1 / (1 - p)`.
    pub p: f64,
    /// A different one for each pass.
    pub seed: u64,
}

/// Dropout of one pass with a key for each of its rows. A row's key comes from its tokens up to itself, so that a row of a
/// prefix that several sequences share is masked as it would be in each of them alone, however rows are packed into passes.
#[derive(Debug, Clone)]
pub struct DropoutMask {
    dropout: Dropout,
    row_keys: Arc<Vec<u64>>,
    shard: Shard,
}

/// The masks of one linear layer.
#[derive(Clone, Copy)]
pub struct LayerMask<'a> {
    mask: &'a DropoutMask,
    seed: u64,
    /// Index of this rank's first input among those of the whole model: an even number.
    first_input: usize,
    n_in: usize,
}

impl DropoutMask {
    /// `shard`: which part of a model's inputs is masked; the masks are those of the whole model.
    pub fn new(dropout: Dropout, row_keys: Vec<u64>, shard: Shard) -> Result<Self> {
        if !(0.0..1.0).contains(&dropout.p) {
            bail!("dropout is {}; expected 0 to below 1", dropout.p);
        }
        Ok(Self { dropout, row_keys: Arc::new(row_keys), shard })
    }

    /// One key per row, from the tokens of its prefix.
    pub fn row_keys(&self) -> &[u64] {
        &self.row_keys
    }

    /// Share of inputs that is zeroed.
    pub fn p(&self) -> f64 {
        self.dropout.p
    }

    /// The masks of some of the rows.
    pub fn of_rows(&self, rows: &[u32]) -> Self {
        let row_keys = rows.iter().map(|&row| self.row_keys[row as usize]).collect();
        Self { row_keys: Arc::new(row_keys), ..self.clone() }
    }

    /// The masks of the linear layer at `path`, which has `n_in` inputs here.
    pub fn of_layer(&self, path: &str, n_in: usize) -> LayerMask<'_> {
        LayerMask { mask: self, seed: self.seed_of(path), first_input: self.first_input(path, n_in), n_in }
    }

    /// Index of the first of `n_in` inputs of the layer at `path` among those of the whole model.
    pub fn first_input(&self, path: &str, n_in: usize) -> usize {
        match LinearSplit::of(path) {
            Some(LinearSplit::RowParallel) => self.shard.rank() * n_in,
            _ => 0,
        }
    }

    /// Seed of the masks of the layer at `path`.
    pub fn seed_of(&self, path: &str) -> u64 {
        path.bytes().fold(mix(self.dropout.seed), |seed, byte| row_key(seed, u32::from(byte)))
    }
}

impl LayerMask<'_> {
    /// Zeroes and scales the inputs `(N, in)` of A in place.
    ///
    /// # Panics
    /// Another number of rows than there are keys.
    pub fn apply(&self, rows: &mut [f32]) {
        let DropoutMask { dropout, row_keys, .. } = self.mask;
        assert_eq!(rows.len(), row_keys.len() * self.n_in, "a key for each row");
        let threshold = (dropout.p * f64::from(u32::MAX)) as u32;
        let scale = (1.0 / (1.0 - dropout.p)) as f32;
        rows.par_chunks_mut(self.n_in.max(1)).zip(row_keys.par_iter()).for_each(|(row, key)| {
            let mut state = mix(key ^ self.seed).wrapping_add((self.first_input as u64 / 2).wrapping_mul(STEP));
            for pair in row.chunks_mut(2) {
                state = state.wrapping_add(STEP);
                let bits = mix(state);
                for (value, bits) in pair.iter_mut().zip([bits as u32, (bits >> 32) as u32]) {
                    *value = if bits < threshold { 0.0 } else { *value * scale };
                }
            }
        });
    }
}
