//! The most suspicious episodes: of those with a high reward and no high quality, the ones with very low quality, or that show one of the
//! signs.

use super::clusters::{SameRewrite, TokenRule};
use super::measures::{Measure, qualities};
use super::rows::{AuditRow, AuditRows};
use super::signs::{Sign, SignKind};
use super::words::{normalised, tokens};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Added to the suspicion for each reason that a sign gives. Without reasons it is the difference of the quantiles of reward and quality,
/// -1 to 1.
const REASON: f64 = 0.5;

/// Maximum number of listed episodes with the same text or the same query.
const MOST_ALIKE: usize = 2;

/// Quantile above which a reward is a reason; the corresponding lower quantile of quality is one, too.
const HIGH: f64 = 0.75;
const LOW: f64 = 0.25;

/// An episode is listed only with a reward above this quantile and no higher quality.
const MEDIAN: f64 = 0.5;

/// Signs whose subject is a property of the text or a component, in whose direction rewrites are suspicious.
const OF_MEASURE: [SignKind; 6] = [
    SignKind::RewardFollowsText,
    SignKind::RewardFollowsComponent,
    SignKind::SharedText,
    SignKind::Repetition,
    SignKind::LengthGrowth,
    SignKind::CopiedTerms,
];

/// An episode with the reasons why it is listed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct SuspiciousEpisode {
    pub(crate) id: String,
    /// Line of the episode in `episodes.jsonl`, from 1.
    pub(crate) line: usize,
    pub(crate) step: u64,
    pub(crate) query: String,
    pub(crate) rewrite: String,
    pub(crate) reward: f64,
    /// Values of the measures of quality, by name.
    pub(crate) quality: BTreeMap<String, f64>,
    /// Quantile of the reward minus the lowest quantile of the measures of quality, plus 0.5 for each reason that a sign gives.
    pub(crate) suspicion: f64,
    pub(crate) reasons: Vec<String>,
}

/// Inputs for the selection of suspicious episodes.
pub(super) struct Suspects<'a> {
    pub(super) rows: &'a AuditRows<'a>,
    pub(super) measures: &'a [Measure],
    pub(super) same_rewrite: &'a SameRewrite,
    pub(super) terms: &'a [TokenRule],
    pub(super) signs: &'a [Sign],
}

impl Suspects<'_> {
    /// The `n` most suspicious episodes, the highest suspicion first; ties in the order of the file.
    pub(super) fn worst(&self, n: usize) -> Vec<SuspiciousEpisode> {
        let Some(total) = self.measures.first() else { return Vec::new() };
        let rewards = quantiles(&total.values);
        let qualities: Vec<Vec<Option<f64>>> = qualities(self.measures).map(|one| quantiles(&one.values)).collect();
        let one = |(index, row): (usize, &AuditRow<'_>)| {
            let reward = rewards[index].unwrap_or(0.5);
            // Of several measures, the lowest value.
            let quality = qualities.iter().filter_map(|values| values[index]).min_by(f64::total_cmp);
            let mut reasons = self.reasons_of_signs(index, row);
            let suspicion = reward - quality.unwrap_or(0.5) + REASON * reasons.len() as f64;
            if let Some(quality) = quality.filter(|quality| reward >= HIGH && *quality <= LOW) {
                let percent = |quantile: f64| format!("{:.0} %", 100.0 * quantile);
                reasons.insert(0, format!("reward above {}, quality above {}", percent(reward), percent(quality)));
            }
            (suspicion, index, reasons)
        };
        // Rewards relative to the teacher are 0 for a tie; rewards that are never positive are costs.
        let has_gains = total.values.iter().flatten().any(|total| *total > 0.0);
        let is_suspect = |(index, row): &(usize, &AuditRow<'_>)| {
            let is_high = rewards[*index].is_some_and(|reward| reward > MEDIAN);
            let quality = qualities.iter().filter_map(|values| values[*index]).min_by(f64::total_cmp);
            let is_low = quality.is_none_or(|quality| quality <= MEDIAN);
            is_high && is_low && (row.reward.total > 0.0 || !has_gains) && !equals_teacher(row)
        };
        let candidates = self.rows.rows.iter().enumerate().filter(is_suspect);
        let mut all: Vec<(f64, usize, Vec<String>)> = candidates.map(one).collect();
        all.retain(|(_, _, reasons)| !reasons.is_empty());
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let (mut of_text, mut of_query) = (BTreeMap::<String, usize>::new(), BTreeMap::<usize, usize>::new());
        let mut worst = Vec::new();
        for (suspicion, index, reasons) in all {
            if worst.len() == n {
                break;
            }
            let row = &self.rows.rows[index];
            let n_text = of_text.entry(normalised(&row.episode().policy.rewrite)).or_default();
            let n_query = of_query.entry(row.query).or_default();
            if *n_text < MOST_ALIKE && *n_query < MOST_ALIKE {
                *n_text += 1;
                *n_query += 1;
                worst.push(self.episode(index, suspicion, reasons));
            }
        }
        worst
    }

    fn reasons_of_signs(&self, index: usize, row: &AuditRow<'_>) -> Vec<String> {
        let rewrite = &row.episode().policy.rewrite;
        let has =
            |kind: SignKind, subject: &str| self.signs.iter().any(|sign| sign.kind == kind && sign.subject == subject);
        let mut reasons = Vec::new();
        if self.signs.iter().any(|sign| sign.kind == SignKind::SameRewrite) {
            let n_targets = self.same_rewrite.texts.get(&normalised(rewrite));
            reasons.extend(n_targets.map(|n| format!("the same rewrite for {n} different targets")));
        }
        let own = if self.terms.is_empty() { BTreeSet::new() } else { tokens(rewrite) };
        let terms = self.terms.iter().filter(|rule| own.contains(&rule.token));
        reasons.extend(terms.map(|rule| format!("has `{}`", rule.token)));
        for measure in self.measures {
            let (Some(change), Some(value)) = (measure.change, measure.values[index]) else { continue };
            let name = measure.name.as_str();
            let is_named = OF_MEASURE.iter().any(|kind| has(*kind, name));
            // Beyond the late mean, in the direction of the measure's change.
            let is_beyond = (value - change.late) * change.interval.mean >= 0.0;
            if is_named && is_beyond {
                reasons.push(format!("{name} {value:.3}, {:.3} in the first steps", change.early));
            }
        }
        reasons
    }

    fn episode(&self, index: usize, suspicion: f64, reasons: Vec<String>) -> SuspiciousEpisode {
        let row = &self.rows.rows[index];
        let episode = row.episode();
        let quality = qualities(self.measures).filter_map(|one| Some((one.name.clone(), one.values[index]?)));
        SuspiciousEpisode {
            id: episode.id.clone(),
            line: row.recorded.line,
            step: row.recorded.step,
            query: episode.query.clone(),
            rewrite: episode.policy.rewrite.clone(),
            reward: row.reward.total,
            quality: quality.collect(),
            suspicion,
            reasons,
        }
    }
}

/// True if the rewrite is the teacher's, whose reward is that of a tie.
fn equals_teacher(row: &AuditRow<'_>) -> bool {
    let teacher = row.episode().baseline.as_ref();
    teacher.is_some_and(|teacher| normalised(&teacher.rewrite) == normalised(&row.episode().policy.rewrite))
}

/// For each value the share of smaller values; equal values count half.
fn quantiles(values: &[Option<f64>]) -> Vec<Option<f64>> {
    let mut sorted: Vec<f64> = values.iter().copied().flatten().collect();
    sorted.sort_by(f64::total_cmp);
    let quantile = |value: f64| {
        let below = sorted.partition_point(|other| *other < value);
        let up_to = sorted.partition_point(|other| *other <= value);
        (below + up_to) as f64 / 2.0 / sorted.len() as f64
    };
    values.iter().map(|value| value.map(quantile)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_share_a_quantile() {
        let found = quantiles(&[Some(1.0), None, Some(0.0), Some(1.0), Some(2.0)]);
        assert_eq!(found, [Some(0.5), None, Some(0.125), Some(0.5), Some(0.875)]);
    }
}
