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
