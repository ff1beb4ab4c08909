//! Groups of rows that must be in the same split, so that test queries are not similar to training queries.

use crate::dataset::leaks::{MAX_OF_BAND, Shingles, bands_of};
use crate::table::UnionFind;
use std::collections::HashMap;

/// The default of `data.leak_similarity`: rows of different groups are less similar than a leak.
const LEAST_SIMILARITY: f64 = 0.8;
/// Bands are compared in this number of rounds, so that memory holds a part of them.
const N_ROUNDS: usize = 4;
/// Maximum size of groups that are joined by reformulations and shared passages, or a twentieth of all rows. Frequent everyday queries, and
/// passages that answer everything, would otherwise join all rows to one group.
const MAX_BOUNDED_GROUP: usize = 20;

/// Groups under construction, as a union-find over rows.
pub(super) struct GroupSets(UnionFind);

/// The group of each row, represented by its smallest row.
pub(super) struct Groups(Vec<u32>);

impl GroupSets {
    /// Starts with one group for each set of rows with equal normalised texts, as in any query table.
    pub(super) fn new(rows: &[&Shingles]) -> Self {
        let mut sets = Self(UnionFind((0..rows.len() as u32).collect()));
        sets.join_equal(rows.iter().map(|row| Some(row.text)));
        sets
    }

    pub(super) fn join_equal<K: std::hash::Hash + Eq>(&mut self, keys: impl Iterator<Item = Option<K>>) {
        let mut first: HashMap<K, u32> = HashMap::new();
        for (key, row) in keys.zip(0..) {
            if let Some(key) = key {
                let first = *first.entry(key).or_insert(row);
                self.0.join(first, row);
            }
        }
    }

    /// Joins the groups of rows that are nearly equal, by the same MinHash search as leak detection.
    pub(super) fn join_similar(&mut self, rows: &[&Shingles]) {
        for round in 0..N_ROUNDS {
            let of_row = |(row, index): (&&Shingles, u32)| {
                bands_of(row).skip(round).step_by(N_ROUNDS).map(move |band| (band, index)).collect::<Vec<_>>()
            };
            let mut bands: Vec<(u64, u32)> = rows.iter().zip(0..).flat_map(of_row).collect();
            bands.sort_unstable();
            for of_band in bands.chunk_by(|one, other| one.0 == other.0) {
                for (at, (_, row)) in of_band.iter().enumerate().skip(1) {
                    for (_, other) in of_band[..at].iter().rev().take(MAX_OF_BAND) {
                        if self.0.find(*row) != self.0.find(*other) {
                            let (one, other_row) = (rows[*row as usize], rows[*other as usize]);
                            if one.similarity(other_row, LEAST_SIMILARITY) >= LEAST_SIMILARITY {
                                self.0.join(*row, *other);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Joins the groups of each pair of rows unless the joined group would be too large; returns the number of pairs that were not
    /// joined.
    pub(super) fn join_bounded(&mut self, pairs: &[(u32, u32)]) -> u64 {
        let n_rows = self.0.0.len();
        let most = MAX_BOUNDED_GROUP.max(n_rows / 20);
        let mut sizes = vec![0_usize; n_rows];
        for row in 0..n_rows as u32 {
            sizes[self.0.find(row) as usize] += 1;
        }
        let mut n_unjoined = 0;
        for (one, other) in pairs {
            let (one, other) = (self.0.find(*one), self.0.find(*other));
            let n_joined = sizes[one as usize] + sizes[other as usize];
            if one == other {
                continue;
            }
            if n_joined > most {
                n_unjoined += 1;
                continue;
            }
            self.0.join(one, other);
            sizes[one.min(other) as usize] = n_joined;
        }
        n_unjoined
    }

    pub(super) fn finish(mut self) -> Groups {
        Groups((0..self.0.0.len() as u32).map(|row| self.0.find(row)).collect())
    }
}

impl Groups {
    /// The first row of the group of `row`.
    pub(super) fn of(&self, row: u32) -> u32 {
        self.0[row as usize]
    }

    /// The number of groups, and the number of rows of the largest group.
    pub(super) fn sizes(&self) -> (usize, usize) {
        let mut sizes: HashMap<u32, usize> = HashMap::new();
        for root in &self.0 {
            *sizes.entry(*root).or_default() += 1;
        }
        (sizes.len(), sizes.into_values().max().unwrap_or(0))
    }
}
