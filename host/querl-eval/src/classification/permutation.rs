//! Whether a classifier is better than always saying the commonest class.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// Groups up to which every assignment is tried instead of a sample.
const N_EXACT: usize = 14;

/// One-sided p-value that a classifier tells more examples right than a prediction of `majority` for all of them: the class that is
/// commonest where it learned, not here.
///
/// Where both are equally good, which of the two predictions of an example is whose is a matter of chance. So they are exchanged at
/// random, groups as a whole, and the p-value is the share of assignments with at least the difference that was found: of all of
/// them with few groups, else of `n_resamples` and the one that was found.
///
/// Source: Edgington and Onghena, "Randomization Tests"; scipy's `permutation_test` with `permutation_type="samples"`.
pub fn beats_majority(
    labels: &[usize],
    predicted: &[usize],
    groups: &[&str],
    majority: usize,
    (seed, n_resamples): (u64, usize),
) -> f64 {
    let mut by_group: BTreeMap<&str, i64> = BTreeMap::new();
    for ((label, predicted), group) in labels.iter().zip(predicted).zip(groups) {
        *by_group.entry(group).or_default() += i64::from(predicted == label) - i64::from(majority == *label);
    }
    // Groups without a difference are the same either way.
    let differences: Vec<i64> = by_group.into_values().filter(|difference| *difference != 0).collect();
    let found: i64 = differences.iter().sum();
    let reaches = |is_kept: &mut dyn FnMut(usize) -> bool| {
        let sum: i64 = differences.iter().enumerate().map(|(at, d)| if is_kept(at) { *d } else { -d }).sum();
        sum >= found
    };
    if differences.len() <= N_EXACT {
        let n_all = 1u64 << differences.len();
        let n_reached = (0..n_all).filter(|bits| reaches(&mut |at| (bits >> at) & 1 == 1)).count();
        return n_reached as f64 / n_all as f64;
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let n_reached = (0..n_resamples).filter(|_| reaches(&mut |_| rng.random_bool(0.5))).count();
    (n_reached + 1) as f64 / (n_resamples + 1) as f64
}
