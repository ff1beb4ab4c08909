//! Rows that say the same belong to one group, whatever their group cells say, so that no split holds the other's queries.

use std::collections::HashMap;

/// What one row says, as hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    /// Which row of the table, from 0.
    pub(super) index: u32,
    /// The same as the table numbers it.
    pub(super) row: u32,
    /// Query, profile and history as written.
    pub(super) id: u64,
    /// The same, but for width, case, space and punctuation.
    pub(super) text: u64,
    /// The group that its cells name.
    pub(super) group: u64,
    /// Its gold ids; 0 where there are none.
    pub(super) gold: u64,
}

/// Finds rows whose groups are to be joined under one name: those of one group, and those whose query, profile and history are
/// equal but for width, case, space and punctuation. The query alone does not count: "how do I take this" is another question
/// after another history.
///
/// Returned are, for each row (by [`Mark::index`]) whose joined group has more than one name, the row that stands for the joined
/// group; and the number of groups. `marks` are in the order of their rows.
pub(super) fn joined(marks: &[Mark]) -> (HashMap<u32, u32>, usize) {
    let mut roots = Roots((0..marks.len() as u32).collect());
    for key in [|mark: &Mark| mark.text, |mark: &Mark| mark.group] {
        for_each_pair_of_places(marks, key, |one, other| roots.join(one, other));
    }
    let of_row: Vec<u32> = (0..marks.len() as u32).map(|at| roots.of(at)).collect();
    let mut mixed = vec![false; marks.len()];
    for (mark, root) in marks.iter().zip(&of_row) {
        mixed[*root as usize] |= mark.group != marks[*root as usize].group;
    }
    let of_mixed = marks.iter().zip(&of_row).filter(|(_, root)| mixed[**root as usize]);
    let joined = of_mixed.map(|(mark, root)| (mark.index, marks[*root as usize].index)).collect();
    (joined, (0..).zip(&of_row).filter(|(at, root)| at == *root).count())
}

/// Calls `each` with marks that `key` says the same of: of every such set the first, with each other one.
pub(super) fn for_each_pair(marks: &[Mark], key: fn(&Mark) -> u64, mut each: impl FnMut(&Mark, &Mark)) {
    for_each_pair_of_places(marks, key, |first, other| each(&marks[first as usize], &marks[other as usize]));
}

fn for_each_pair_of_places(marks: &[Mark], key: fn(&Mark) -> u64, mut each: impl FnMut(u32, u32)) {
    let mut order: Vec<(u64, u32)> = marks.iter().zip(0..).map(|(mark, at)| (key(mark), at)).collect();
    order.sort_unstable();
    for alike in order.chunk_by(|one, other| one.0 == other.0) {
        for (_, other) in &alike[1..] {
            each(alike[0].1, *other);
        }
    }
}

struct Roots(Vec<u32>);

impl Roots {
    fn of(&mut self, mut at: u32) -> u32 {
        while self.0[at as usize] != at {
            // Halves the way for the next one.
            self.0[at as usize] = self.0[self.0[at as usize] as usize];
            at = self.0[at as usize];
        }
        at
    }

    /// The earlier row stands for both.
    fn join(&mut self, one: u32, other: u32) {
        let (one, other) = (self.of(one), self.of(other));
        let root = one.min(other);
        self.0[one.max(other) as usize] = root;
    }
}
