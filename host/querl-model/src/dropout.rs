//! Dropout on the inputs of adapters, with masks that depend on a row's tokens and not on its position in a batch.

use crate::batch::row_key;
use crate::random::{STEP, mix};
use crate::sharding::{LinearSplit, Shard};
use candle_core::{Result, bail};
use rayon::prelude::*;
use std::sync::Arc;

/// Dropout of one forward pass. The mask of a row depends only on the seed, the layer and the row's tokens up to itself: the same row gets
/// the same mask when it is computed again, in another pass, or in a prefix that several sequences share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Dropout probability, 0 to below 1: the fraction of an adapter's inputs that is zeroed; the others are scaled by `1 / (1 - p)`.
    pub p: f64,
    /// Seed of the masks, different for each pass.
    pub seed: u64,
}

/// Dropout of one pass with a key for each of its rows: a hash of the row's tokens up to itself. So a row of a shared prefix has the same
/// mask as it would have in each of the sequences alone, however rows are packed into passes.
#[derive(Debug, Clone)]
pub struct DropoutMask {
    dropout: Dropout,
    row_keys: Arc<Vec<u64>>,
    shard: Shard,
}

/// Dropout masks of the inputs of one linear layer.
#[derive(Clone, Copy)]
pub struct LayerMask<'a> {
    mask: &'a DropoutMask,
    seed: u64,
    /// Index of this rank's first input among the inputs of the unsharded layer; even.
    first_input: usize,
    n_in: usize,
}

impl DropoutMask {
    /// Masks for rows with these keys. `shard`: this rank's shard of the model, whose masks are those of the full model.
    pub fn new(dropout: Dropout, row_keys: Vec<u64>, shard: Shard) -> Result<Self> {
        if !(0.0..1.0).contains(&dropout.p) {
            bail!("dropout is {}; expected 0 to below 1", dropout.p);
        }
        Ok(Self { dropout, row_keys: Arc::new(row_keys), shard })
    }

    /// One key per row: a hash of the row's tokens up to itself.
    pub fn row_keys(&self) -> &[u64] {
        &self.row_keys
    }

    /// Dropout probability.
    pub fn p(&self) -> f64 {
        self.dropout.p
    }

    /// The masks of the rows with these indices.
    pub fn of_rows(&self, rows: &[u32]) -> Self {
        let row_keys = rows.iter().map(|&row| self.row_keys[row as usize]).collect();
        Self { row_keys: Arc::new(row_keys), ..self.clone() }
    }

    /// The masks of the linear layer at `path`, which has `n_in` inputs on this rank.
    pub fn of_layer(&self, path: &str, n_in: usize) -> LayerMask<'_> {
        LayerMask { mask: self, seed: self.seed_of(path), first_input: self.first_input(path, n_in), n_in }
    }

    /// Index of this rank's first input of the layer at `path` among all inputs of the full layer; `n_in`: number of inputs on this rank.
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
    /// Applies dropout in place to the inputs `(N, in)` of LoRA A.
    ///
    /// # Panics
    /// The number of rows differs from the number of keys.
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
