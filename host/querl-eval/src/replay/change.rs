//! How far the totals moved, on the whole and along the training.

use super::Scored;
use super::distribution::mean;
use super::groups::{Groups, by_key};
use crate::bootstrap::{Bootstrap, Interval};
use crate::evaluation::FEW_GROUPS;
use serde::Serialize;

/// Totals no further apart than this are equal, as in win rates.
pub(super) const DRAW_TOLERANCE: f64 = 1e-9;

/// After minus before.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Its mean with a 95% interval over groups of episodes that answer one query.
    pub mean: Option<Interval>,
    /// Those groups.
    pub n_queries: usize,
    /// Episodes whose total moved by more than 1e-9.
    pub n_changed: usize,
    /// The first third of the steps; `None` for fewer than three steps.
    pub first_third: Option<Third>,
    /// The last third of the steps; `None` for fewer than three steps.
    pub last_third: Option<Third>,
    /// Every step, in order.
    pub by_step: Vec<StepMeans>,
}

/// A stretch of the training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Third {
    /// First and last step.
    pub steps: (u64, u64),
    /// Episodes that both sides scored.
    pub n: usize,
    /// Their mean change, with a 95% interval.
    pub mean: Option<Interval>,
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepMeans {
    /// Which.
    pub step: u64,
    /// Episodes that both sides scored.
    pub n: usize,
    /// Mean total before; `None` where nothing was scored before.
    pub before: Option<f64>,
    /// Mean total after.
    pub after: Option<f64>,
}

impl Change {
    pub(super) fn of(scored: &[Scored<'_>], groups: &Groups, bootstrap: Bootstrap) -> Self {
        let interval = |scored: &[Scored<'_>]| {
            let changes = scored.iter().filter_map(|one| Some((groups.query(one), one.change()?)));
            bootstrap.interval(changes).filter(|found| (found.low + found.high).is_finite())
        };
        let third = |steps: &[u64]| {
            let (first, last) = (*steps.first()?, *steps.last()?);
            let inside = |one: &&Scored<'_>| (first..=last).contains(&one.recorded.step);
            let inside: Vec<Scored<'_>> = scored.iter().filter(inside).copied().collect();
            Some(Third { steps: (first, last), n: inside.len(), mean: interval(&inside) })
        };
        let by_step = step_means(scored);
        let steps: Vec<u64> = by_step.iter().map(|means| means.step).collect();
        let n_third = steps.len() / 3;
        Self {
            mean: interval(scored),
            n_queries: groups.n_queries(scored),
            n_changed: scored.iter().filter_map(Scored::change).filter(|change| change.abs() > DRAW_TOLERANCE).count(),
            first_third: third(&steps[..n_third]),
            last_third: third(&steps[steps.len() - n_third..]),
            by_step,
        }
    }

    /// A caution where the intervals mean little.
    pub(super) fn too_few_queries(&self) -> Option<String> {
        let n = self.n_queries;
        (self.mean.is_some() && n < FEW_GROUPS)
            .then(|| format!("the episodes are of {n} queries only: the intervals are too narrow to conclude from"))
    }
}

fn step_means(scored: &[Scored<'_>]) -> Vec<StepMeans> {
    let means = |(step, indices): (u64, Vec<usize>)| {
        let before: Option<Vec<f64>> = indices.iter().map(|index| Some(scored[*index].before?.total)).collect();
        let after: Vec<f64> = indices.iter().map(|index| scored[*index].after.total).collect();
        StepMeans { step, n: indices.len(), before: before.as_deref().and_then(mean), after: mean(&after) }
    };
    by_key(scored.iter().map(|one| one.recorded.step)).into_iter().map(means).collect()
}
