//! Where in a step's frame each list stands that its kernels read.

use std::ops::Range;

/// How long the lists of a pass are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) n_rows: usize,
    pub(super) n_lines: usize,
    /// Blocks of a line of the tables.
    pub(super) width: usize,
    /// Whether each row is a sequence's only one.
    pub(super) is_one_each: bool,
    /// Answers that are drawn from.
    pub(super) n_draws: usize,
    /// Whether each answer follows the sequence of its number.
    pub(super) is_in_order: bool,
    /// Tokens for which a line of the answers has room; 0 where nobody looks at them.
    pub(super) n_answer_tokens: usize,
    pub(super) n_copies: usize,
}

/// Places of the lists, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fields {
    /// For each answer a number from 0 to 1, two words each.
    pub(super) uniforms: Range<usize>,
    pub(super) tokens: Range<usize>,
    pub(super) positions: Range<usize>,
    /// Places in the cache, for each row.
    pub(super) slots: Range<usize>,
    /// Tokens that each row sees.
    pub(super) lengths: Range<usize>,
    /// Of each row its line of the tables; empty where it is its number.
    pub(super) lines: Range<usize>,
    /// The last row of each sequence, with its length; empty where each row is one.
    pub(super) last: Range<usize>,
    pub(super) last_lengths: Range<usize>,
    pub(super) tables: Range<usize>,
    /// Of each answer the hidden state that it follows; empty where it is its number.
    pub(super) taken: Range<usize>,
    pub(super) written: Range<usize>,
    /// Pairs of blocks, from and to.
    pub(super) copies: Range<usize>,
    pub(super) answers: Range<usize>,
    pub(super) len: usize,
}

impl Fields {
    pub(super) fn new(counts: &Counts) -> Self {
        let mut len = 0;
        let mut next = |n: usize| {
            len += n;
            len - n..len
        };
        let Counts { n_rows, n_lines, n_draws, .. } = *counts;
        let n_last = if counts.is_one_each { 0 } else { n_lines };
        let of_rows = if counts.is_one_each { 0 } else { n_rows };
        Self {
            uniforms: next(2 * n_draws),
            tokens: next(n_rows),
            positions: next(n_rows),
            slots: next(n_rows),
            lengths: next(n_rows),
            lines: next(of_rows),
            last: next(n_last),
            last_lengths: next(n_last),
            tables: next(n_lines * counts.width),
            taken: next(if counts.is_in_order { 0 } else { n_draws }),
            written: next(n_draws),
            copies: next(2 * counts.n_copies),
            answers: next(n_draws * counts.n_answer_tokens),
            len: 0,
        }
        .ended(len)
    }

    fn ended(self, len: usize) -> Self {
        Self { len, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_recorded_stands_in_the_same_places_whatever_follows() {
        let counts = Counts {
            n_rows: 4,
            n_lines: 4,
            width: 3,
            is_one_each: true,
            n_draws: 4,
            is_in_order: true,
            ..Counts::default()
        };
        let (few, many) = (Fields::new(&counts), Fields::new(&Counts { n_copies: 2, n_answer_tokens: 5, ..counts }));
        assert_eq!((few.tables.clone(), few.len), (24..36, 40));
        assert_eq!((many.tables, many.copies, many.answers, many.len), (24..36, 40..44, 44..64, 64));
    }
}
