//! Rows that say the same belong to one group, whatever their group cells say, so that no split holds the other's queries.

use crate::text::normalise;
use querl_core::records::QueryRow;
use std::collections::HashMap;

/// Joins the groups of rows whose query, profile and history are equal but for width, case, space and punctuation. The query
/// alone does not count: "how do I take this" is another question after another history.
///
/// A joined group gets the least of its names, so that the order of rows makes no difference.
pub(crate) fn join_groups(rows: &mut [QueryRow]) {
    let roots = roots(rows);
    let mut names: HashMap<usize, String> = HashMap::new();
    for (row, root) in rows.iter().zip(&roots) {
        let name = names.entry(*root).or_insert_with(|| row.group.clone());
        if row.group < *name {
            name.clone_from(&row.group);
        }
    }
    for (row, root) in rows.iter_mut().zip(&roots) {
        row.group.clone_from(&names[root]);
    }
}

/// For each row the one that stands for its joined group.
fn roots(rows: &[QueryRow]) -> Vec<usize> {
    let mut parents: Vec<usize> = (0..rows.len()).collect();
    let (mut of_text, mut of_group) = (HashMap::new(), HashMap::new());
    for (index, row) in rows.iter().enumerate() {
        let text = [&row.original_query, &row.user_profile, &row.history_summary].map(|text| normalise(text));
        for first in [*of_text.entry(text).or_insert(index), *of_group.entry(&row.group).or_insert(index)] {
            let (one, other) = (root(&parents, index), root(&parents, first));
            parents[one.max(other)] = one.min(other);
        }
    }
    (0..rows.len()).map(|index| root(&parents, index)).collect()
}

fn root(parents: &[usize], mut index: usize) -> usize {
    while parents[index] != index {
        index = parents[index];
    }
    index
}
