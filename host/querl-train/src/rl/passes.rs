//! A batch cut into forward passes.

use crate::TrainError;
use crate::policy::{Example, passes};

/// Runs `pass` over all examples, at most `limit` rows at a time, and puts what it says of each in the examples' order.
///
/// # Errors
/// Those of `pass`.
pub(super) fn in_passes<T>(
    examples: &[&Example],
    limit: usize,
    mut pass: impl FnMut(&[&Example]) -> Result<Vec<T>, TrainError>,
) -> Result<Vec<T>, TrainError> {
    let mut found: Vec<(usize, T)> = Vec::with_capacity(examples.len());
    for indices in passes(examples, limit) {
        let part: Vec<&Example> = indices.iter().map(|&index| examples[index]).collect();
        found.extend(indices.into_iter().zip(pass(&part)?));
    }
    found.sort_by_key(|(index, _)| *index);
    Ok(found.into_iter().map(|(_, of_example)| of_example).collect())
}

/// Cuts an optimizer step into at least `n_parts` passes (fewer where there are fewer examples) of at most `limit` rows.
/// Examples that share a beginning stand together. Each index comes once.
pub(super) fn parts(examples: &[&Example], n_parts: usize, limit: usize) -> Vec<Vec<usize>> {
    let order: Vec<usize> = passes(examples, usize::MAX).concat();
    let size = order.len().div_ceil(n_parts.max(1)).max(1);
    let within = |chunk: &[usize]| -> Vec<Vec<usize>> {
        let part: Vec<&Example> = chunk.iter().map(|&index| examples[index]).collect();
        passes(&part, limit).into_iter().map(|pass| pass.into_iter().map(|i| chunk[i]).collect()).collect()
    };
    order.chunks(size).flat_map(within).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn examples() -> Vec<Example> {
        [5u32, 3, 5, 4, 3, 5]
            .into_iter()
            .map(|first| Example { prompt: vec![first; 3], response: vec![first; 2] })
            .collect()
    }

    #[test]
    fn what_a_pass_says_comes_back_in_order() {
        let examples = examples();
        let examples: Vec<&Example> = examples.iter().collect();
        for limit in [1, 7, 100] {
            let found = in_passes(&examples, limit, |part| Ok(part.iter().map(|example| example.prompt[0]).collect()));
            assert_eq!(found.unwrap(), [5, 3, 5, 4, 3, 5]);
        }
    }

    #[test]
    fn parts_hold_each_example_once_and_keep_both_limits() {
        let examples = examples();
        let examples: Vec<&Example> = examples.iter().collect();
        for (n_parts, limit) in [(1, 100), (4, 100), (1, 6), (2, 6)] {
            let parts = parts(&examples, n_parts, limit);
            let mut all = parts.concat();
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2, 3, 4, 5]);
            assert!(parts.len() >= n_parts.min(3), "{parts:?}");
        }
        assert_eq!(parts(&examples, 1, 100).len(), 1);
    }
}
