//! Which rows go to train, val and test: by group, so that no paraphrase of a test query is trained on.

use crate::error::DataError;
use querl_core::config::DataConfig;
use querl_core::fsx::digest_hex;
use querl_core::records::{QueryRow, Split};
use std::collections::{BTreeMap, HashMap};

/// The split of each row, in the order of `rows`. The order of rows makes no difference to where a row goes.
///
/// Groups are taken in the order of a digest of seed and group; each goes to the split that lacks most rows of its share.
///
/// # Errors
/// Fewer groups than splits with a share above 0.
pub fn assign_splits(rows: &[QueryRow], config: &DataConfig) -> Result<Vec<Split>, DataError> {
    let mut sizes: BTreeMap<&str, usize> = BTreeMap::new();
    for row in rows {
        *sizes.entry(row.group.as_str()).or_insert(0) += 1;
    }
    let wanted: Vec<usize> = (0..Split::ALL.len()).filter(|index| config.split[*index] > 0.0).collect();
    if sizes.len() < wanted.len() {
        return Err(DataError::TooFewGroups { n_groups: sizes.len(), n_splits: wanted.len() });
    }
    let mut groups: Vec<(String, &str, usize)> =
        sizes.into_iter().map(|(group, size)| (group_digest(config.split_seed, group), group, size)).collect();
    groups.sort();
    let mut lacking = config.split.map(|share| share * rows.len() as f64);
    let mut chosen: HashMap<&str, Split> = HashMap::new();
    for (position, (_, group, size)) in groups.iter().enumerate() {
        // The first groups see to it that no split stays empty, however small its share.
        let index = wanted.get(position).copied().unwrap_or_else(|| most_lacking(&wanted, &lacking));
        lacking[index] -= *size as f64;
        chosen.insert(group, Split::ALL[index]);
    }
    Ok(rows.iter().map(|row| chosen[row.group.as_str()]).collect())
}

fn most_lacking(wanted: &[usize], lacking: &[f64; 3]) -> usize {
    // Of equals the first.
    wanted.iter().copied().rev().max_by(|a, b| lacking[*a].total_cmp(&lacking[*b])).unwrap_or(0)
}

fn group_digest(seed: u64, group: &str) -> String {
    digest_hex(format!("{seed}\n{group}").as_bytes())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn rows(n_groups: usize, size: usize) -> Vec<QueryRow> {
        let row = |index: usize| QueryRow {
            id: index.to_string(),
            row: index + 2,
            original_query: index.to_string(),
            user_profile: String::new(),
            history_summary: String::new(),
            gold_ids: Vec::new(),
            group: format!("g{}", index % n_groups),
        };
        (0..n_groups * size).map(row).collect()
    }

    fn config(split: [f64; 3], split_seed: u64) -> DataConfig {
        serde_json::from_value(serde_json::json!({"input": "x", "split": split, "split_seed": split_seed})).unwrap()
    }

    fn counts(splits: &[Split]) -> [usize; 3] {
        Split::ALL.map(|split| splits.iter().filter(|found| **found == split).count())
    }

    #[test]
    fn shares_are_met_and_siblings_stay_together() {
        let rows = rows(140, 4);
        let splits = assign_splits(&rows, &config([0.6, 0.2, 0.2], 42)).unwrap();
        assert_eq!(counts(&splits), [336, 112, 112]);
        let mut of_group = HashMap::new();
        assert!(rows.iter().zip(&splits).all(|(row, split)| of_group.entry(&row.group).or_insert(*split) == split));
    }

    #[test]
    fn order_of_rows_makes_no_difference_and_the_seed_does() {
        let forward = rows(30, 3);
        let mut backward = forward.clone();
        backward.reverse();
        let mut of_backward = assign_splits(&backward, &config([0.8, 0.1, 0.1], 42)).unwrap();
        of_backward.reverse();
        let of_forward = assign_splits(&forward, &config([0.8, 0.1, 0.1], 42)).unwrap();
        assert_eq!(of_forward, of_backward);
        assert_ne!(of_forward, assign_splits(&forward, &config([0.8, 0.1, 0.1], 43)).unwrap());
    }

    #[test]
    fn no_wanted_split_stays_empty_and_no_unwanted_one_is_filled() {
        assert_eq!(counts(&assign_splits(&rows(3, 1), &config([0.98, 0.01, 0.01], 1)).unwrap()), [1, 1, 1]);
        assert_eq!(counts(&assign_splits(&rows(5, 1), &config([0.0, 0.0, 1.0], 1)).unwrap()), [0, 0, 5]);
        let error = assign_splits(&rows(2, 9), &config([0.8, 0.1, 0.1], 1)).unwrap_err().to_string();
        assert!(error.starts_with("2 group(s) of queries cannot fill 3 splits"), "{error}");
    }
}
