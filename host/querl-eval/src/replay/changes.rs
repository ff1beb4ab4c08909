//! How totals, signs and components changed, and the episodes that changed most.

use super::episodes::{Groups, PluginSide, ReplayEpisode, ScoredEpisode, Side, first_of_queries};
use super::statistics::mean;
use crate::bootstrap::{Bootstrap, Interval};
use crate::evaluation::FEW_GROUPS;
use crate::text::counted;
use querl_core::records::{Candidate, Reward, retrieval_quality, win};
use serde::Serialize;
use std::collections::BTreeMap;

/// Tolerance of a tie: totals that differ by at most this much are equal.
pub(super) const DRAW_TOLERANCE: f64 = 1e-9;

/// Changes of the total reward, as after minus before.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Change {
    /// Mean change with its 95% interval from a bootstrap over queries.
    pub(crate) mean: Option<Interval>,
    pub(crate) n_queries: usize,
    /// Number of episodes whose total changed by more than 1e-9.
    pub(crate) n_changed: usize,
    /// Changes in the first third of the training steps; `None` for fewer than three steps.
    pub(crate) first_third: Option<Third>,
    pub(crate) last_third: Option<Third>,
    pub(crate) by_step: Vec<StepMeans>,
}

/// Mean change in a range of training steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Third {
    pub(crate) steps: (u64, u64),
    pub(crate) n: usize,
    pub(crate) mean: Option<Interval>,
}

/// Mean total reward in one training step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct StepMeans {
    pub(crate) step: u64,
    pub(crate) n: usize,
    /// Mean total before; `None` if no episode has a recorded or computed reward before.
    pub(crate) before: Option<f64>,
    pub(crate) after: Option<f64>,
}

impl Change {
    pub(super) fn of(scored: &[ScoredEpisode<'_>], groups: &Groups, bootstrap: Bootstrap) -> Self {
        let interval = |scored: &[ScoredEpisode<'_>]| {
            let changes = scored.iter().filter_map(|one| Some((groups.query(one), one.change()?)));
            bootstrap.interval(changes).filter(|found| (found.low + found.high).is_finite())
        };
        let third = |steps: &[u64]| {
            let (first, last) = (*steps.first()?, *steps.last()?);
            let inside = |one: &&ScoredEpisode<'_>| (first..=last).contains(&one.recorded.step);
            let inside: Vec<ScoredEpisode<'_>> = scored.iter().filter(inside).copied().collect();
            Some(Third { steps: (first, last), n: inside.len(), mean: interval(&inside) })
        };
        let by_step = step_means(scored);
        let steps: Vec<u64> = by_step.iter().map(|means| means.step).collect();
        let n_third = steps.len() / 3;
        Self {
            mean: interval(scored),
            n_queries: groups.n_queries(scored),
            n_changed: scored
                .iter()
                .filter_map(ScoredEpisode::change)
                .filter(|change| change.abs() > DRAW_TOLERANCE)
                .count(),
            first_third: third(&steps[..n_third]),
            last_third: third(&steps[steps.len() - n_third..]),
            by_step,
        }
    }

    pub(super) fn too_few_queries(&self) -> Option<String> {
        let n = self.n_queries;
        (self.mean.is_some() && n < FEW_GROUPS)
            .then(|| format!("the episodes are of {n} queries only: the intervals are too narrow to conclude from"))
    }
}

fn step_means(scored: &[ScoredEpisode<'_>]) -> Vec<StepMeans> {
    let mut by_step: BTreeMap<u64, Vec<&ScoredEpisode<'_>>> = BTreeMap::new();
    scored.iter().for_each(|one| by_step.entry(one.recorded.step).or_default().push(one));
    let means = |(step, episodes): (u64, Vec<&ScoredEpisode<'_>>)| {
        let before: Option<Vec<f64>> = episodes.iter().map(|one| Some(one.before?.total)).collect();
        let after: Vec<f64> = episodes.iter().map(|one| one.after.total).collect();
        StepMeans { step, n: episodes.len(), before: before.as_deref().and_then(mean), after: mean(&after) }
    };
    by_step.into_iter().map(means).collect()
}

/// Outcome of the policy's rewrite against the teacher's, from the sign of the total reward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Sign {
    /// The total is above 0.
    Won,
    /// The total is within 1e-9 of 0.
    Drew,
    /// The total is below 0.
    Lost,
}

impl Sign {
    pub(super) fn of(total: f64) -> Self {
        match total {
            total if total > DRAW_TOLERANCE => Self::Won,
            total if total < -DRAW_TOLERANCE => Self::Lost,
            _ => Self::Drew,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Won => "won",
            Self::Drew => "drew",
            Self::Lost => "lost",
        }
    }
}

/// Number of episodes by the sign of their total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct SignCounts {
    pub(crate) won: usize,
    pub(crate) drew: usize,
    pub(crate) lost: usize,
}

impl SignCounts {
    fn of(signs: impl Iterator<Item = Sign>) -> Self {
        let mut counts = Self::default();
        for sign in signs {
            match sign {
                Sign::Won => counts.won += 1,
                Sign::Drew => counts.drew += 1,
                Sign::Lost => counts.lost += 1,
            }
        }
        counts
    }

    pub(crate) fn n(&self) -> usize {
        self.won + self.drew + self.lost
    }

    /// Table cells of won, drew and lost, each as `12 (40.0 %)`.
    pub(super) fn cells(&self) -> [String; 3] {
        [self.won, self.drew, self.lost].map(|n| counted(n as u64, self.n() as u64))
    }
}

/// Signs of the totals before and after, over the episodes that both sides scored.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Signs {
    /// Number of episodes by sign before; `None` if no episode was scored before.
    pub(crate) before: Option<SignCounts>,
    pub(crate) after: SignCounts,
    pub(crate) n_changed: usize,
    pub(crate) moves: Vec<SignMove>,
}

/// Number of episodes whose sign changed from `from` to `to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct SignMove {
    pub(crate) from: Sign,
    pub(crate) to: Sign,
    pub(crate) n: usize,
}

impl Signs {
    pub(super) fn of(scored: &[ScoredEpisode<'_>]) -> Self {
        let pairs: Vec<(Sign, Sign)> =
            scored.iter().filter_map(|one| Some((Sign::of(one.before?.total), Sign::of(one.after.total)))).collect();
        let order = [Sign::Won, Sign::Drew, Sign::Lost];
        let all = order.into_iter().flat_map(|from| order.into_iter().map(move |to| (from, to)));
        let moves: Vec<SignMove> = all
            .filter(|(from, to)| from != to)
            .map(|(from, to)| SignMove { from, to, n: pairs.iter().filter(|pair| **pair == (from, to)).count() })
            .collect();
        Self {
            before: (!pairs.is_empty()).then(|| SignCounts::of(pairs.iter().map(|pair| pair.0))),
            after: SignCounts::of(scored.iter().map(|one| Sign::of(one.after.total))),
            n_changed: moves.iter().map(|one| one.n).sum(),
            moves,
        }
    }
}

/// Wins of the policy against the teacher by retrieval quality, over all episodes with a successful retrieval for both rewrites.
pub(super) fn by_retrieval(episodes: &[ReplayEpisode<'_>]) -> SignCounts {
    let sign = |one: &ReplayEpisode<'_>| {
        let baseline = one.episode.baseline.as_ref()?;
        Some(Sign::of(win(one.episode.policy.found()?, baseline.found()?) - 0.5))
    };
    SignCounts::of(episodes.iter().filter_map(sign))
}

/// The reason why signs are not counted: the declared range of a side does not span 0. `None` if both ranges do.
pub(super) fn why_no_signs(before: &Side, after: &PluginSide) -> Option<String> {
    let before = match before {
        Side::Plugin(side) => Some(side),
        Side::Recorded => None,
    };
    let one_sided = before.into_iter().chain([after]).find(|side| !side.spans_zero())?;
    Some(format!(
        "{} {} declares totals from {} to {}, a range that does not span 0: the sign of a total does not say who wins, and no \
         signs are counted",
        one_sided.id, one_sided.version, one_sided.range.0, one_sided.range.1
    ))
}

/// Means of one reward component before and after, over the episodes that both sides scored. Some episodes may lack the component, for
/// example without a judge score.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ComponentChange {
    pub(crate) name: String,
    pub(crate) n_before: usize,
    pub(crate) before: Option<f64>,
    pub(crate) n_after: usize,
    pub(crate) after: Option<f64>,
    pub(crate) n_both: usize,
    pub(crate) change: Option<f64>,
}

#[derive(Default)]
struct ComponentValues {
    before: Vec<f64>,
    after: Vec<f64>,
    change: Vec<f64>,
}

/// Maximum number of components in a comparison.
const MOST_COMPONENTS: usize = 64;

/// The most used components in alphabetical order, and the number of components left out.
pub(super) fn components(scored: &[ScoredEpisode<'_>]) -> (Vec<ComponentChange>, usize) {
    let mut values: BTreeMap<&str, ComponentValues> = BTreeMap::new();
    for one in scored {
        let before = one.before.map_or(&[][..], |reward| &reward.components);
        before.iter().for_each(|part| values.entry(&part.name).or_default().before.push(part.value));
        for part in &one.after.components {
            let found = values.entry(&part.name).or_default();
            found.after.push(part.value);
            found
                .change
                .extend(one.before.and_then(|reward| component_of(reward, &part.name)).map(|old| part.value - old));
        }
    }
    let change = |(name, values): (&str, ComponentValues)| ComponentChange {
        name: name.to_owned(),
        n_before: values.before.len(),
        before: mean(&values.before),
        n_after: values.after.len(),
        after: mean(&values.after),
        n_both: values.change.len(),
        change: mean(&values.change),
    };
    let mut changes: Vec<ComponentChange> = values.into_iter().map(change).collect();
    let n_left_out = changes.len().saturating_sub(MOST_COMPONENTS);
    if n_left_out > 0 {
        changes.sort_by_key(|one| std::cmp::Reverse(one.n_before + one.n_after));
        changes.truncate(MOST_COMPONENTS);
        changes.sort_by(|one, other| one.name.cmp(&other.name));
    }
    (changes, n_left_out)
}

fn component_of(reward: &Reward, name: &str) -> Option<f64> {
    reward.components.iter().find(|part| part.name == name).map(|part| part.value)
}

/// Number of components shown per episode.
const N_COMPONENTS: usize = 3;

/// The episode of a query whose total reward changed most.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ChangedEpisode {
    pub(crate) id: String,
    /// Line of the episode in `episodes.jsonl`, from 1.
    pub(crate) line: usize,
    pub(crate) step: u64,
    pub(crate) query: String,
    pub(crate) policy: String,
    /// The teacher's rewrite; `None` if there is none.
    pub(crate) baseline: Option<String>,
    /// Retrieval quality of the policy's rewrite; `None` if retrieval failed or was not tried.
    pub(crate) policy_quality: Option<f64>,
    pub(crate) baseline_quality: Option<f64>,
    pub(crate) before: f64,
    pub(crate) after: f64,
    /// Number of episodes of the query that changed, in a list of flips those that changed their sign.
    pub(crate) n_changed: usize,
    /// The three components with the largest absolute changes.
    #[serde(rename = "parts")]
    pub(crate) components: Vec<ChangedComponent>,
}

/// Value of one reward component before and after.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ChangedComponent {
    pub(crate) name: String,
    /// Value before; `None` if the reward before does not have this component.
    pub(crate) before: Option<f64>,
    /// Value after; `None` if the reward after does not have this component.
    pub(crate) after: Option<f64>,
}

impl ChangedComponent {
    /// Absolute change, where a missing value is 0.
    fn size(&self) -> f64 {
        (self.after.unwrap_or(0.0) - self.before.unwrap_or(0.0)).abs()
    }

    fn is_changed(&self) -> bool {
        self.before.is_some() != self.after.is_some() || self.size() > DRAW_TOLERANCE
    }
}

/// The `n` queries with the largest changes of total among episodes whose sign changed, and among all episodes.
pub(super) fn largest(scored: &[ScoredEpisode<'_>], n: usize) -> (Vec<ChangedEpisode>, Vec<ChangedEpisode>) {
    let size = |one: &ScoredEpisode<'_>| one.change().map_or(0.0, f64::abs);
    let mut changed: Vec<&ScoredEpisode<'_>> = scored.iter().filter(|one| size(one) > DRAW_TOLERANCE).collect();
    // Stable sort: equal changes stay in the order of the file.
    changed.sort_by(|a, b| size(b).total_cmp(&size(a)));
    let flips = changed
        .iter()
        .filter(|one| one.before.is_some_and(|before| Sign::of(before.total) != Sign::of(one.after.total)));
    let flips: Vec<&ScoredEpisode<'_>> = flips.copied().collect();
    let shown = |changed: Vec<&ScoredEpisode<'_>>| {
        let by_query = first_of_queries(changed, |one| &one.recorded.episode.id);
        by_query.into_iter().take(n).filter_map(|(one, n_changed)| ChangedEpisode::new(one, n_changed)).collect()
    };
    (shown(flips), shown(changed))
}

impl ChangedEpisode {
    fn new(one: &ScoredEpisode<'_>, n_changed: usize) -> Option<Self> {
        let episode = one.recorded.episode;
        Some(Self {
            id: episode.id.clone(),
            line: one.recorded.line,
            step: one.recorded.step,
            query: episode.query.clone(),
            policy: episode.policy.rewrite.clone(),
            baseline: episode.baseline.as_ref().map(|baseline| baseline.rewrite.clone()),
            policy_quality: quality(&episode.policy),
            baseline_quality: episode.baseline.as_ref().and_then(quality),
            before: one.before?.total,
            after: one.after.total,
            n_changed,
            components: changed_components(one),
        })
    }
}

fn quality(candidate: &Candidate) -> Option<f64> {
    candidate.found().map(retrieval_quality)
}

fn changed_components(one: &ScoredEpisode<'_>) -> Vec<ChangedComponent> {
    let Some(before) = one.before else { return Vec::new() };
    let after = one.after;
    let gone = before.components.iter().filter(|part| component_of(after, &part.name).is_none());
    let names = after.components.iter().chain(gone).map(|part| &part.name);
    let component = |name: &String| ChangedComponent {
        name: name.clone(),
        before: component_of(before, name),
        after: component_of(after, name),
    };
    let mut components: Vec<ChangedComponent> = names.map(component).filter(ChangedComponent::is_changed).collect();
    components.sort_by(|a, b| b.size().total_cmp(&a.size()));
    components.truncate(N_COMPONENTS);
    components
}
