//! Splits rows into train, val and test, either by group, so that no paraphrase of a test query is in train, or by the files of a
//! dataset.

use crate::error::DataError;
use crate::table::DatasetFiles;
use querl_core::config::DataConfig;
use querl_core::records::{QueryRow, Split};
use sha2::{Digest, Sha256};

/// The assignment of rows to splits.
#[derive(Debug, Clone, PartialEq)]
pub enum RowSplits {
    /// Rows are assigned by their group.
    ByGroup(Splits),
    /// Rows are assigned by their file in `data.dataset`: (number of the file's last row, split) of each file, in order.
    ByFile(Vec<(usize, Split)>),
}

impl RowSplits {
    /// Assigns rows as configured; `groups` has the group of each row, as for [`Splits::assign`].
    ///
    /// # Errors
    /// As [`Splits::assign`], or the dataset cannot be read.
    pub fn of(groups: impl Iterator<Item = Result<String, DataError>>, config: &DataConfig) -> Result<Self, DataError> {
        match config.dataset.has_splits() {
            true => Ok(Self::ByFile(DatasetFiles::open(config)?.ends())),
            false => Splits::assign(groups, config).map(Self::ByGroup),
        }
    }

    /// The split of a row; `None` for an unknown row or group.
    pub fn split_of(&self, row: &QueryRow) -> Option<Split> {
        match self {
            Self::ByGroup(splits) => splits.of(&row.group),
            Self::ByFile(ends) => ends.iter().find(|(end, _)| row.row <= *end).map(|(_, split)| *split),
        }
    }
}

/// The assignment of groups to splits.
#[derive(Debug, Clone, PartialEq)]
pub struct Splits {
    seed: u64,
    /// The first 16 bytes of the digest of seed and group, sorted.
    groups: Vec<u128>,
    sizes: Vec<u32>,
    splits: Vec<Split>,
}

impl Splits {
    /// Assigns groups to splits; `groups` has the group of each row, in any order.
    ///
    /// Groups are taken in the order of their digests; each goes to the split that lacks most rows of its share.
    ///
    /// # Errors
    /// There are fewer groups than splits with a share above 0, or an item of `groups` is an error.
    pub fn assign(
        groups: impl Iterator<Item = Result<String, DataError>>,
        config: &DataConfig,
    ) -> Result<Self, DataError> {
        let seed = config.split_seed;
        let mut of_rows: Vec<u128> =
            groups.map(|group| Ok(group_digest(seed, &group?))).collect::<Result<_, DataError>>()?;
        of_rows.sort_unstable();
        let n_rows = of_rows.len();
        let sizes: Vec<u32> = of_rows.chunk_by(|one, other| one == other).map(|rows| rows.len() as u32).collect();
        of_rows.dedup();
        of_rows.shrink_to_fit();
        let wanted: Vec<usize> = (0..Split::ALL.len()).filter(|index| config.split[*index] > 0.0).collect();
        if sizes.len() < wanted.len() {
            return Err(DataError::TooFewGroups { n_groups: sizes.len(), n_splits: wanted.len() });
        }
        let mut lacking = config.split.map(|share| share * n_rows as f64);
        let choose = |(position, size): (usize, &u32)| {
            // The first groups fill one split each, so that none stays empty.
            let index = wanted.get(position).copied().unwrap_or_else(|| most_lacking(&wanted, &lacking));
            lacking[index] -= f64::from(*size);
            Split::ALL[index]
        };
        let splits = sizes.iter().enumerate().map(choose).collect();
        Ok(Self { seed, groups: of_rows, sizes, splits })
    }

    /// The split of a group; `None` for an unknown group.
    pub fn of(&self, group: &str) -> Option<Split> {
        let index = self.groups.binary_search(&group_digest(self.seed, group)).ok()?;
        Some(self.splits[index])
    }

    /// Number of groups of a split.
    pub fn n_groups(&self, split: Split) -> usize {
        self.splits.iter().filter(|of_group| **of_group == split).count()
    }

    /// Number of rows of a split.
    pub fn n_rows(&self, split: Split) -> u64 {
        let sizes = self.sizes.iter().zip(&self.splits).filter(|(_, of_group)| **of_group == split);
        sizes.map(|(size, _)| u64::from(*size)).sum()
    }
}

fn most_lacking(wanted: &[usize], lacking: &[f64; 3]) -> usize {
    // On ties, the first one.
    wanted.iter().copied().rev().max_by(|a, b| lacking[*a].total_cmp(&lacking[*b])).unwrap_or(0)
}

pub(crate) fn group_digest(seed: u64, group: &str) -> u128 {
    let digest = Sha256::digest(format!("{seed}\n{group}").as_bytes());
    digest.iter().take(16).fold(0, |number, byte| number << 8 | u128::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(n_groups: usize, size: usize) -> Vec<String> {
        (0..n_groups * size).map(|index| format!("g{}", index % n_groups)).collect()
    }

    fn assign(groups: &[String], split: [f64; 3], seed: u64) -> Result<Splits, DataError> {
        let config = serde_json::json!({ "input": "x", "split": split, "split_seed": seed });
        Splits::assign(groups.iter().cloned().map(Ok), &serde_json::from_value(config).unwrap())
    }

    fn counts(splits: &Splits) -> [u64; 3] {
        Split::ALL.map(|split| splits.n_rows(split))
    }

    #[test]
    fn shares_are_met_and_siblings_stay_together() {
        let splits = assign(&groups(140, 4), [0.6, 0.2, 0.2], 42).unwrap();
        assert_eq!(counts(&splits), [336, 112, 112]);
        assert_eq!(Split::ALL.map(|split| splits.n_groups(split)), [84, 28, 28]);
        assert!(splits.of("g7").is_some() && splits.of("g140").is_none());
    }

    #[test]
    fn rows_of_a_file_are_in_its_split() {
        let splits = RowSplits::ByFile(vec![(3, Split::Train), (4, Split::Test)]);
        let row = |row| QueryRow { row, group: "the same".into(), ..QueryRow::default() };
        let found = [1, 3, 4, 5].map(|number| splits.split_of(&row(number)));
        assert_eq!(found, [Some(Split::Train), Some(Split::Train), Some(Split::Test), None]);
    }

    #[test]
    fn order_of_rows_makes_no_difference_and_the_seed_does() {
        let forward = groups(30, 3);
        let mut backward = forward.clone();
        backward.reverse();
        let shares = [0.8, 0.1, 0.1];
        let of_forward = assign(&forward, shares, 42).unwrap();
        assert_eq!(of_forward, assign(&backward, shares, 42).unwrap());
        let other = assign(&forward, shares, 43).unwrap();
        assert!(forward.iter().any(|group| of_forward.of(group) != other.of(group)));
    }

    /// Regression: test sets differed from those of earlier releases, which compared digests as text.
    #[test]
    fn groups_are_ordered_by_their_digests_as_text() {
        let splits = assign(&groups(6, 1), [0.5, 0.25, 0.25], 42).unwrap();
        let digest = |group: &str| querl_core::fsx::digest_hex(format!("42\n{group}").as_bytes());
        let mut by_digest = groups(6, 1);
        by_digest.sort_by_key(|group| digest(group));
        let found: Vec<Split> = by_digest.iter().map(|group| splits.of(group).unwrap()).collect();
        let first = [Split::Train, Split::Val, Split::Test];
        assert_eq!(found[..3], first);
    }

    #[test]
    fn splits_are_empty_only_if_their_share_is_0() {
        assert_eq!(counts(&assign(&groups(3, 1), [0.98, 0.01, 0.01], 1).unwrap()), [1, 1, 1]);
        assert_eq!(counts(&assign(&groups(5, 1), [0.0, 0.0, 1.0], 1).unwrap()), [0, 0, 5]);
        let error = assign(&groups(2, 9), [0.8, 0.1, 0.1], 1).unwrap_err().to_string();
        assert!(error.starts_with("2 group(s) of queries cannot fill 3 splits"), "{error}");
    }
}
