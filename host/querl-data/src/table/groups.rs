//! Rows with the same text belong to one group, whatever their group cells, so that no query is in two splits.

use std::collections::HashMap;

/// What one row says, as hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowDigest {
    /// Which row of the table, from 0.
    pub(super) index: u32,
    pub(super) row: u32,
    pub(super) id: u64,
    pub(super) text: u64,
    pub(super) group: u64,
    pub(super) gold: u64,
}

/// Finds rows whose groups are to be joined under one name: those of one group, and those whose query, profile and history are
/// equal but for width, case, space and punctuation. The query alone does not count: "how do I take this" is another question
/// after another history.
///
/// Returned are, for each row (by [`RowDigest::index`]) whose joined group has more than one name, the row that stands for the joined
/// group; and the number of groups. `digests` are in the order of their rows.
pub(super) fn joined(digests: &[RowDigest]) -> (HashMap<u32, u32>, usize) {
    let mut sets = UnionFind((0..digests.len() as u32).collect());
    for key in [|row_digest: &RowDigest| row_digest.text, |row_digest: &RowDigest| row_digest.group] {
        for_each_pair_of_indices(digests, key, |one, other| sets.join(one, other));
    }
    let of_row: Vec<u32> = (0..digests.len() as u32).map(|at| sets.of(at)).collect();
    let mut mixed = vec![false; digests.len()];
    for (row_digest, root) in digests.iter().zip(&of_row) {
        mixed[*root as usize] |= row_digest.group != digests[*root as usize].group;
    }
    let of_mixed = digests.iter().zip(&of_row).filter(|(_, root)| mixed[**root as usize]);
    let joined = of_mixed.map(|(row_digest, root)| (row_digest.index, digests[*root as usize].index)).collect();
    (joined, (0..).zip(&of_row).filter(|(at, root)| at == *root).count())
}

/// Calls `each` with digests that `key` says the same of: of every such set the first, with each other one.
pub(super) fn for_each_pair(
    digests: &[RowDigest],
    key: fn(&RowDigest) -> u64,
    mut each: impl FnMut(&RowDigest, &RowDigest),
) {
    for_each_pair_of_indices(digests, key, |first, other| each(&digests[first as usize], &digests[other as usize]));
}

fn for_each_pair_of_indices(digests: &[RowDigest], key: fn(&RowDigest) -> u64, mut each: impl FnMut(u32, u32)) {
    let mut order: Vec<(u64, u32)> = digests.iter().zip(0..).map(|(row_digest, at)| (key(row_digest), at)).collect();
    order.sort_unstable();
    for alike in order.chunk_by(|one, other| one.0 == other.0) {
        for (_, other) in &alike[1..] {
            each(alike[0].1, *other);
        }
    }
}

struct UnionFind(Vec<u32>);

impl UnionFind {
    fn of(&mut self, mut at: u32) -> u32 {
        while self.0[at as usize] != at {
            // Halves the way for the next one.
            self.0[at as usize] = self.0[self.0[at as usize] as usize];
            at = self.0[at as usize];
        }
        at
    }

    fn join(&mut self, one: u32, other: u32) {
        let (one, other) = (self.of(one), self.of(other));
        let root = one.min(other);
        self.0[one.max(other) as usize] = root;
    }
}
