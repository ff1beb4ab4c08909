//! Summary of the scores of one plugin: distribution, rejections, and episodes whose outcome changed.

use super::changes::DRAW_TOLERANCE;
use super::episodes::{Outcome, first_of_queries, largest_of};
use super::statistics::{Distribution, Histogram};
use crate::text::{Digits, MAX_WIDTH, counted, cut, left, one_line, printable};
use querl_core::text::grouped;
use serde::Serialize;
use std::collections::BTreeMap;

/// Summary of the outcomes of one plugin over a set of episodes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScoreSummary {
    n_episodes: usize,
    n_scored: usize,
    /// Number of rejections by code.
    rejected: BTreeMap<String, usize>,
    /// The declared range.
    range: (f64, f64),
    /// Share of the declared range that the totals span, 0 to 1; `None` without scored episodes.
    range_used: Option<f64>,
    totals: Option<Distribution>,
    histogram: Option<Histogram>,
}

impl ScoreSummary {
    /// Summarises one outcome per episode (`None` if the call failed); `range` is the reward range that the plugin declares.
    pub fn of<'a>(outcomes: impl Iterator<Item = Option<&'a Outcome>>, range: (f64, f64)) -> Self {
        let (mut n_episodes, mut rejected, mut totals) = (0, BTreeMap::new(), Vec::new());
        for outcome in outcomes {
            n_episodes += 1;
            match outcome {
                Some(Ok(reward)) => totals.push(reward.total),
                Some(Err(rejection)) => *rejected.entry(rejection.code.clone()).or_default() += 1,
                None => {}
            }
        }
        let distribution = Distribution::of(&totals);
        let range_used = distribution.map(|found| (found.max - found.min) / (range.1 - range.0));
        let histogram = Histogram::of(&[], &totals);
        Self { n_episodes, n_scored: totals.len(), rejected, range, range_used, totals: distribution, histogram }
    }

    /// Renders the summary as lines for a terminal.
    pub fn lines(&self) -> Vec<String> {
        let n = self.n_episodes as u64;
        let mut lines = vec![format!("scored     {}", counted(self.n_scored as u64, n))];
        let mut codes: Vec<(&String, &usize)> = self.rejected.iter().collect();
        codes.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
        let code = |(code, n): (&String, &usize)| {
            format!("{} {}", printable(code), counted(*n as u64, self.n_episodes as u64))
        };
        lines.extend(
            (!codes.is_empty())
                .then(|| format!("rejected   {}", codes.into_iter().map(code).collect::<Vec<_>>().join(", "))),
        );
        if let (Some(totals), Some(histogram)) = (&self.totals, &self.histogram) {
            let digits = Digits::for_values([totals.min, totals.mean, totals.max].into_iter());
            let [min, mean, max] = [totals.min, totals.mean, totals.max].map(|value| digits.plain(value));
            let edges = histogram.edges.first().zip(histogram.edges.last()).map_or((0.0, 0.0), |(a, b)| (*a, *b));
            let (low, high) = (digits.plain(edges.0), digits.plain(edges.1));
            lines.push(format!(
                "totals     {low} {} {high}   min {min}, mean {mean}, max {max}",
                bars(&histogram.after)
            ));
            let share = 100.0 * self.range_used.unwrap_or(0.0);
            lines.push(format!("range      {} to {}, totals span {share:.0} %", self.range.0, self.range.1));
        }
        lines.into_iter().map(|line| cut(&line, MAX_WIDTH)).collect()
    }
}

/// One block character per bin, whose height is its count; a space for an empty bin.
fn bars(counts: &[u64]) -> String {
    const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let largest = counts.iter().copied().max().unwrap_or(0).max(1);
    counts.iter().map(|n| if *n == 0 { ' ' } else { HEIGHTS[((n * 8).div_ceil(largest) - 1) as usize] }).collect()
}

/// The outcome of an episode in short: the total reward, or the rejection code.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum BriefOutcome {
    Total(f64),
    Rejected(String),
}

impl From<&Outcome> for BriefOutcome {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Ok(reward) => Self::Total(reward.total),
            Err(rejection) => Self::Rejected(rejection.code.clone()),
        }
    }
}

impl std::fmt::Display for BriefOutcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Total(total) => f.write_str(&Digits::for_values(std::iter::once(*total)).plain(*total)),
            Self::Rejected(code) => f.write_str(&printable(code)),
        }
    }
}

/// An episode whose outcome changed, with both outcomes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OutcomeChange {
    id: String,
    query: String,
    before: BriefOutcome,
    after: BriefOutcome,
    /// Number of episodes of the query that changed, this one included.
    n_changed: usize,
}

impl OutcomeChange {
    /// The change of an episode's outcome; `None` if the totals differ by at most 1e-9 or both are rejections with the same code.
    pub fn of(id: &str, query: &str, before: &Outcome, after: &Outcome) -> Option<Self> {
        let (id, query) = (id.to_owned(), query.to_owned());
        let change = Self { id, query, before: before.into(), after: after.into(), n_changed: 1 };
        let is_same = change.before == change.after || change.size() <= DRAW_TOLERANCE;
        (!is_same).then_some(change)
    }

    /// Absolute change of the total; infinite if one side is a rejection.
    fn size(&self) -> f64 {
        match (&self.before, &self.after) {
            (BriefOutcome::Total(before), BriefOutcome::Total(after)) => (after - before).abs(),
            _ => f64::INFINITY,
        }
    }
}

/// Number of compared and of changed episodes, and the largest changes.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct OutcomeChanges {
    n_compared: usize,
    n_changed: usize,
    /// The largest change of each query; a rejection that became a score, or the reverse, comes first.
    largest: Vec<OutcomeChange>,
}

impl OutcomeChanges {
    /// Collects the changes of the compared episodes (`None` for an unchanged one) and keeps the largest of `n_shown` queries.
    pub fn of(compared: impl Iterator<Item = Option<OutcomeChange>>, n_shown: usize) -> Self {
        let mut n_compared = 0;
        let mut changed: Vec<OutcomeChange> = compared.inspect(|_| n_compared += 1).flatten().collect();
        let n_changed = changed.len();
        changed.sort_by(|a, b| b.size().total_cmp(&a.size()));
        let by_query = first_of_queries(changed, |change| &change.id).into_iter().take(n_shown);
        let largest = by_query.map(|(change, n_changed)| OutcomeChange { n_changed, ..change }).collect();
        Self { n_compared, n_changed, largest }
    }

    /// Renders the changes as lines for a terminal; `title` says which outcomes are compared.
    pub fn lines(&self, title: &str) -> Vec<String> {
        let head =
            format!("{title}: {} of {} changed", grouped(self.n_changed as u64), grouped(self.n_compared as u64));
        let line = |change: &OutcomeChange| {
            let moved = left(&format!("{} -> {}", change.before, change.after), 18);
            let [id, query] = [&change.id, &change.query].map(|text| one_line(&printable(text)));
            cut(&format!("  {moved}  {}{id}  {query}", largest_of(change.n_changed)), MAX_WIDTH)
        };
        std::iter::once(head).chain(self.largest.iter().map(line)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::records::{Rejection, Reward};

    fn scored(total: f64) -> Outcome {
        Ok(Reward { total, components: Vec::new() })
    }

    fn rejected(code: &str) -> Outcome {
        Err(Rejection::new(code, ""))
    }

    #[test]
    fn summary_counts_scores_rejections_and_the_used_range() {
        let outcomes = [scored(0.0), scored(0.5), scored(0.5), rejected("no_hits")];
        let summary = ScoreSummary::of(outcomes.iter().map(Some).chain([None]), (0.0, 1.0));
        assert_eq!((summary.n_episodes, summary.n_scored, summary.range_used), (5, 3, Some(0.5)));
        let text = summary.lines().join("\n");
        assert!(text.contains("rejected   no_hits 1 (20.0 %)"), "{text}");
        assert!(text.contains("min 0.0000, mean 0.3333, max 0.5000"), "{text}");
        assert!(text.contains("totals span 50 %"), "{text}");
    }

    #[test]
    fn nothing_scored_has_no_totals() {
        let summary = ScoreSummary::of(std::iter::once(None), (0.0, 1.0));
        assert_eq!(summary.lines(), ["scored     0 (0.0 %)"]);
    }

    #[test]
    fn rejections_that_became_scores_come_before_the_largest_changes_of_totals() {
        let change = |id: &str, before: Outcome, after: Outcome| OutcomeChange::of(id, "q", &before, &after);
        let compared = [
            change("same", scored(0.1), scored(0.1 + 1e-12)),
            change("small", scored(0.1), scored(0.2)),
            change("large", scored(0.1), scored(0.9)),
            change("now scored", rejected("x"), scored(0.0)),
            change("same code", rejected("x"), rejected("x")),
        ];
        let changes = OutcomeChanges::of(compared.into_iter(), 2);
        assert_eq!((changes.n_compared, changes.n_changed), (5, 3));
        let lines = changes.lines("against the recording");
        assert_eq!(lines[0], "against the recording: 3 of 5 changed");
        assert!(lines[1].contains("x -> 0.000") && lines[2].contains("0.1000 -> 0.9000"), "{lines:?}");
    }

    /// Symptom: the list had the same query several times, once for each of its samples.
    #[test]
    fn a_query_is_listed_once_with_its_largest_change() {
        let change = |id: &str, after: f64| OutcomeChange::of(id, "一天几粒啊", &scored(0.0), &scored(after));
        let samples = [
            change("step-1/q/0", 0.1),
            change("step-1/q/1", 0.3),
            change("step-2/q/0", 0.2),
            change("step-2/r/0", 0.25),
        ];
        let lines = OutcomeChanges::of(samples.into_iter(), 5).lines("since the recording");
        let expected = [
            "since the recording: 4 of 4 changed",
            "  0.000 -> 0.3000     largest of 3, step-1/q/1  一天几粒啊",
            "  0.000 -> 0.2500     step-2/r/0  一天几粒啊",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn bars_are_as_high_as_counts() {
        assert_eq!(bars(&[0, 1, 50, 100]), " ▁▄█");
    }
}
