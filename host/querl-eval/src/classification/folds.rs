//! Splits in which classes are spread evenly and groups stay whole.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// How to split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoldSettings {
    /// Parts of each round, each held out once; at least 2.
    pub n_folds: usize,
    /// Rounds, each with parts of its own.
    pub n_repeats: usize,
    /// Same seed, same parts.
    pub seed: u64,
}

/// Positions of the examples, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fold {
    /// From 0.
    pub repeat: usize,
    /// What to learn from.
    pub train: Vec<usize>,
    /// What is held out.
    pub test: Vec<usize>,
}

/// Repeated stratified k-fold over groups: in every round each example is held out once, a group's examples together, and each class
/// is spread over the parts as evenly as whole groups allow.
///
/// Groups are dealt in a random order, larger ones first, each to the part that leaves the classes' counts most even.
///
/// Source: the rule of scikit-learn's `StratifiedGroupKFold`; for examples that are each a group of their own every class is spread to within
/// one example, as by `RepeatedStratifiedKFold`.
pub fn folds(labels: &[usize], groups: &[&str], settings: FoldSettings) -> Vec<Fold> {
    (0..settings.n_repeats).flat_map(|repeat| round(labels, groups, settings, repeat)).collect()
}

/// Splits off about `share` of the examples, stratified, groups whole: `(rest, split off)`.
pub fn split_off(labels: &[usize], groups: &[&str], share: f64, seed: u64) -> (Vec<usize>, Vec<usize>) {
    let n_folds = (1.0 / share.clamp(0.01, 0.5)).round() as usize;
    let mut parts = round(labels, groups, FoldSettings { n_folds, n_repeats: 1, seed }, 0);
    let first = parts.swap_remove(0);
    (first.train, first.test)
}

fn round(labels: &[usize], groups: &[&str], settings: FoldSettings, repeat: usize) -> Vec<Fold> {
    let part_of = deal(labels, groups, settings, repeat);
    (0..settings.n_folds)
        .map(|part| {
            let (test, train) = (0..labels.len()).partition(|&index| part_of[index] == part);
            Fold { repeat, train, test }
        })
        .collect()
}

/// The part of each example.
fn deal(labels: &[usize], groups: &[&str], settings: FoldSettings, repeat: usize) -> Vec<usize> {
    let n_classes = labels.iter().max().map_or(0, |largest| largest + 1);
    let mut members: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, group) in groups.iter().enumerate() {
        members.entry(group).or_default().push(index);
    }
    let mut dealt: Vec<Vec<usize>> = members.into_values().collect();
    let mut rng = ChaCha8Rng::seed_from_u64(settings.seed);
    rng.set_stream(repeat as u64);
    dealt.shuffle(&mut rng);
    // Stable: equally large groups stay in the order of chance.
    dealt.sort_by_key(|group| std::cmp::Reverse(group.len()));
    let mut counts = vec![vec![0usize; n_classes]; settings.n_folds];
    let mut part_of = vec![0; labels.len()];
    for group in dealt {
        let mut of_group = vec![0usize; n_classes];
        group.iter().for_each(|&index| of_group[labels[index]] += 1);
        // What the group has of a class goes where there is least of it; of equals, where there is least in all, then the first.
        let key = |part: &usize| {
            let own = |class: usize| of_group[class] * counts[*part][class];
            ((0..n_classes).map(own).sum::<usize>(), counts[*part].iter().sum::<usize>())
        };
        let part = (0..settings.n_folds).min_by_key(key).unwrap_or_default();
        (0..n_classes).for_each(|class| counts[part][class] += of_group[class]);
        group.iter().for_each(|&index| part_of[index] = part);
    }
    part_of
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(groups: &[usize]) -> Vec<String> {
        groups.iter().map(|group| format!("g{group:03}")).collect()
    }

    #[test]
    fn every_example_is_held_out_once_a_round_and_classes_are_even() {
        let labels: Vec<usize> =
            (0..26).map(|index| [7, 11, 16, 22, 26].iter().filter(|end| index >= **end).count()).collect();
        let groups = names(&(0..26).collect::<Vec<_>>());
        let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
        let settings = FoldSettings { n_folds: 4, n_repeats: 3, seed: 42 };
        let found = folds(&labels, &groups, settings);
        assert_eq!(found.len(), 12);
        for repeat in 0..3 {
            let mut held_out: Vec<usize> =
                found.iter().filter(|fold| fold.repeat == repeat).flat_map(|fold| fold.test.clone()).collect();
            held_out.sort_unstable();
            assert_eq!(held_out, (0..26).collect::<Vec<_>>());
        }
        for fold in &found {
            for (class, n) in [7, 4, 5, 6, 4].into_iter().enumerate() {
                let held_out = fold.test.iter().filter(|&&index| labels[index] == class).count();
                assert!((n / 4..=n / 4 + 1).contains(&held_out), "{class}: {held_out} of {n}");
            }
            assert_eq!(fold.train.len() + fold.test.len(), 26);
        }
        assert_ne!(found[0].test, found[4].test);
        assert_eq!(found, folds(&labels, &groups, settings));
    }

    #[test]
    fn a_group_is_never_on_both_sides() {
        let labels: Vec<usize> = (0..90).map(|index| index % 5).collect();
        let groups = names(&(0..90).map(|index| index / 4).collect::<Vec<_>>());
        let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
        for fold in folds(&labels, &groups, FoldSettings { n_folds: 5, n_repeats: 2, seed: 1 }) {
            assert!(!fold.test.is_empty());
            assert!(fold.test.iter().all(|&test| fold.train.iter().all(|&train| groups[train] != groups[test])));
        }
        let (rest, off) = split_off(&labels, &groups, 0.2, 7);
        assert!((14..=22).contains(&off.len()), "{}", off.len());
        assert!(off.iter().all(|&test| rest.iter().all(|&train| groups[train] != groups[test])));
    }
}
