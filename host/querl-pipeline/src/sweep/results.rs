//! Results of a sweep: a measurement of each trial on the validation split, the ranking of the combinations, `sweep.json` and a table.

use super::grid::Settings;
use crate::failure::Stop;
use crate::ledger::StageName;
use crate::run_logs;
use anyhow::Context;
use querl_core::run_dir::RunDir;
use serde::Serialize;
use serde_json::Value;
use std::cmp::Ordering;
use std::path::PathBuf;

/// The metric that decides which checkpoint of a trial is its best.
const REWARD: &str = "val/reward";
/// Tolerance for equal means.
const EQUAL: f64 = 1e-9;

/// The evaluation of a trial with the highest validation reward so far. The evaluated policy is `rl/best` if every evaluation scored the
/// same rows (checkpoints are compared on the rows that both scored) and no earlier call trained further.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Measurement {
    /// Step of the newest evaluation.
    pub(super) step: u64,
    /// Step of the evaluation with the highest validation reward.
    pub(super) best_step: u64,
    /// Value of the sweep's metric at that evaluation.
    pub(super) value: f64,
}

impl Measurement {
    /// Reads the measurement from the evaluations of a run, up to the step `last`; `None`: all evaluations.
    ///
    /// # Errors
    /// `metrics.jsonl` cannot be read or has no evaluation, or evaluations do not have the metric.
    pub(super) fn read(dir: &RunDir, metric: &str, last: Option<u64>) -> anyhow::Result<Self> {
        let rows = run_logs::metrics_of_stage(dir, StageName::Rl)?;
        Self::of(&rows, metric, last)
            .with_context(|| format!("{}: has no evaluation of rl", dir.metrics().display()))?
    }

    fn of(rows: &[Value], metric: &str, last: Option<u64>) -> Option<anyhow::Result<Self>> {
        let evaluation = |row: &Value| Some((row["step"].as_u64()?, row[REWARD].as_f64()?));
        let evaluations = rows.iter().filter_map(|row| Some((evaluation(row)?, row)));
        let evaluations: Vec<_> = evaluations.filter(|((step, _), _)| last.is_none_or(|last| *step <= last)).collect();
        let step = evaluations.iter().map(|((step, _), _)| *step).max()?;
        // On ties the first: a later checkpoint must exceed it to become the best.
        let best = evaluations.iter().rev().max_by(|(one, _), (other, _)| one.1.total_cmp(&other.1))?;
        let ((best_step, _), row) = best;
        Some(match row[metric].as_f64() {
            Some(value) => Ok(Self { step, best_step: *best_step, value }),
            None => Err(unknown_metric(row, metric).into()),
        })
    }
}

fn unknown_metric(row: &Value, metric: &str) -> Stop {
    let names = row.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
    let names: Vec<&str> = names.filter(|name| name.starts_with("val/")).collect();
    Stop::usage(format!("--metric {metric}: is no number of the evaluations; expected one of {}", names.join(", ")))
}

/// Outcome of one trial of a combination.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TrialOutcome {
    /// The trial was measured.
    Measured(Measurement),
    /// Training failed, with the reason.
    Failed(String),
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct TrialResult {
    pub(super) seed: u64,
    /// Run directory of the trial, relative to the folder of the sweep.
    pub(super) dir: PathBuf,
    #[serde(flatten)]
    pub(super) outcome: TrialOutcome,
}

impl TrialResult {
    fn value(&self) -> Option<f64> {
        match &self.outcome {
            TrialOutcome::Measured(measurement) => Some(measurement.value),
            TrialOutcome::Failed(_) => None,
        }
    }

    /// True if no step of RL was better than the SFT policy, with which it begins.
    fn is_unimproved(&self) -> bool {
        matches!(&self.outcome, TrialOutcome::Measured(measurement) if measurement.best_step == 0)
    }
}

/// Mean of values and its standard error; `None` for one value.
fn mean_and_error(values: &[f64]) -> (f64, Option<f64>) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (values.len() > 1).then(|| (squares / (n - 1.0) / n).sqrt()))
}

/// A combination of values with its trials, one per seed.
#[derive(Debug, Clone, Serialize)]
pub struct CombinationResult {
    /// Rank of the combination, from 1.
    pub(super) rank: usize,
    /// Settings of the combination: `KEY=VALUE` for each key.
    pub(super) settings: Settings,
    /// Mean of the metric over the seeds; `None` if a trial failed.
    pub(super) mean: Option<f64>,
    /// Standard error of the mean over the seeds; `None` for one seed.
    pub(super) standard_error: Option<f64>,
    /// Number of rungs of successive halving for which the combination was trained; 1 without halving.
    pub(super) n_rungs: usize,
    pub(super) trials: Vec<TrialResult>,
}

impl CombinationResult {
    pub(super) fn new(settings: Settings, n_rungs: usize, trials: Vec<TrialResult>) -> Self {
        let values: Option<Vec<f64>> = trials.iter().map(TrialResult::value).collect();
        let found = values.filter(|values| !values.is_empty()).map(|values| mean_and_error(&values));
        let (mean, standard_error) = (found.map(|(mean, _)| mean), found.and_then(|(_, error)| error));
        Self { rank: 0, settings, mean, standard_error, n_rungs, trials }
    }

    /// True if the mean difference from `other` on the same seeds is below two standard errors of that difference. Both have a result of
    /// each seed.
    fn is_within_noise_of(&self, other: &Self) -> bool {
        let differences =
            self.trials.iter().zip(&other.trials).filter_map(|(one, other)| Some(one.value()? - other.value()?));
        let differences: Vec<f64> = differences.collect();
        let (mean, standard_error) = mean_and_error(&differences);
        standard_error.is_some_and(|error| mean.abs() < 2.0 * error)
    }

    /// Ranking order, the better first: combinations without a failed trial, then those with more rungs, then those with the higher mean.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        let mean = |result: &Self| result.mean.unwrap_or(f64::NEG_INFINITY);
        let by_failure = self.mean.is_none().cmp(&other.mean.is_none());
        by_failure.then(other.n_rungs.cmp(&self.n_rungs)).then(mean(other).total_cmp(&mean(self)))
    }
}

/// The result of a sweep, as `sweep.json` has it.
#[derive(Debug, Clone, Serialize)]
pub struct SweepReport {
    /// The options of the search; a sweep with other options needs another folder.
    pub(super) search: Value,
    /// The metric that ranks the combinations; higher is better.
    pub(super) metric: String,
    /// Combinations with a result, in the order of rank.
    pub(super) combinations: Vec<CombinationResult>,
    /// The best combination as flags of `querl run`, with all combinations that tie with it; empty until one has results of all seeds.
    pub(super) best: Vec<String>,
    /// Whether every trial has a result.
    pub(super) finished: bool,
}

impl SweepReport {
    pub(super) fn new(search: Value, metric: &str, results: &[CombinationResult], finished: bool) -> Self {
        let mut combinations = results.to_vec();
        combinations.sort_by(CombinationResult::order);
        (1..).zip(&mut combinations).for_each(|(rank, result)| result.rank = rank);
        let is_best = |one: &&CombinationResult| {
            let difference = one.mean.zip(combinations[0].mean).map(|(one, best)| (one - best).abs());
            one.n_rungs == combinations[0].n_rungs && difference.is_some_and(|difference| difference < EQUAL)
        };
        let best = combinations.iter().filter(is_best).map(|result| flags(&result.settings)).collect();
        Self { search, metric: metric.to_owned(), combinations, best, finished }
    }

    /// Reason of the first failed trial; `None` if no trial failed.
    pub(super) fn first_failure(&self) -> Option<&str> {
        self.combinations.iter().flat_map(|result| &result.trials).find_map(|trial| match &trial.outcome {
            TrialOutcome::Failed(reason) => Some(reason.as_str()),
            TrialOutcome::Measured(_) => None,
        })
    }

    /// The ranking as a table for a terminal; ends with a line break.
    pub fn to_text(&self) -> String {
        let head = ["rank", self.metric.as_str(), "standard error", "seeds", "steps", "settings"];
        let mut grid = vec![head.map(str::to_owned)];
        grid.extend(self.combinations.iter().map(row));
        let width = |column: usize| grid.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        let line = |row: &[String; 6]| {
            let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}"));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
        };
        let mut text: String = grid.iter().map(line).collect();
        for result in &self.combinations {
            for TrialResult { seed, outcome, .. } in &result.trials {
                if let TrialOutcome::Failed(reason) = outcome {
                    text += &format!("failed: {}, seed {seed}: {reason}\n", result.settings.join(" "));
                }
            }
        }
        let unimproved = self.combinations.iter().filter_map(|result| {
            let n = result.trials.iter().filter(|trial| trial.is_unimproved()).count();
            (n > 0).then(|| format!("{} in {n} of {} trials", result.settings.join(" "), result.trials.len()))
        });
        let unimproved: Vec<String> = unimproved.collect();
        if !unimproved.is_empty() {
            text += &format!("no step of RL is better than the SFT policy (best step 0): {}\n", unimproved.join("; "));
        }
        match &self.best[..] {
            [] => {}
            [best] => text += &format!("best settings on the validation split: {best}{}\n", self.doubt()),
            [first, ..] => {
                let (n, metric) = (self.best.len(), &self.metric);
                text += &format!("{n} combinations tie for the best {metric}, one of them {first}\n");
            }
        }
        text
    }

    /// The combinations that the best one is not shown to differ from, as the end of a sentence; empty if there is none.
    fn doubt(&self) -> String {
        let Some((best, others)) = self.combinations.split_first() else { return String::new() };
        let mut others = others.iter().filter(|other| other.n_rungs == best.n_rungs && other.mean.is_some()).peekable();
        if others.peek().is_some() && best.trials.len() == 1 {
            return "; with one seed the order may be chance".to_owned();
        }
        let near: Vec<String> =
            others.filter(|other| best.is_within_noise_of(other)).map(|other| flags(&other.settings)).collect();
        match &near[..] {
            [] => String::new(),
            [one] => format!(", within two standard errors of {one}"),
            [first, more @ ..] => format!(", within two standard errors of {first} and {} more", more.len()),
        }
    }
}

fn row(result: &CombinationResult) -> [String; 6] {
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.4}"));
    let steps = result.trials.iter().filter_map(|trial| match trial.outcome {
        TrialOutcome::Measured(Measurement { step, .. }) => Some(step),
        TrialOutcome::Failed(_) => None,
    });
    [
        result.rank.to_string(),
        number(result.mean),
        number(result.standard_error),
        result.trials.len().to_string(),
        steps.max().map_or("-".to_owned(), |step| step.to_string()),
        result.settings.join(" "),
    ]
}

/// Settings as flags of a shell's command line.
fn flags(settings: &Settings) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._/+-=:".contains(c);
    let quoted = |text: &str| match text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    };
    settings.iter().map(|setting| format!("--set {}", quoted(setting))).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn measured(value: f64) -> TrialOutcome {
        TrialOutcome::Measured(Measurement { step: 20, best_step: 10, value })
    }

    fn result(name: &str, n_rungs: usize, outcomes: &[TrialOutcome]) -> CombinationResult {
        let trial = |(seed, outcome): (u64, &TrialOutcome)| TrialResult {
            seed,
            dir: format!("trials/{name}").into(),
            outcome: outcome.clone(),
        };
        CombinationResult::new(vec![format!("rl.x={name}")], n_rungs, (1..).zip(outcomes).map(trial).collect())
    }

    #[test]
    fn the_best_evaluation_counts_and_the_first_of_equal_ones() {
        let rows = [
            json!({"step": 0, "val/reward": 0.1, "val/win_rate": 0.5}),
            json!({"step": 10, "val/reward": 0.3, "val/win_rate": 0.4}),
            json!({"step": 10, "actor/pg_loss": 9.0}),
            json!({"step": 20, "val/reward": 0.3, "val/win_rate": 0.6}),
            json!({"step": 30, "val/reward": 0.9, "val/win_rate": 0.7}),
        ];
        let of = |metric, last| Measurement::of(&rows, metric, last).unwrap().map_err(|error| error.to_string());
        let found = Measurement { step: 20, best_step: 10, value: 0.4 };
        assert_eq!(of("val/win_rate", Some(20)), Ok(found));
        assert_eq!(of(REWARD, None), Ok(Measurement { step: 30, best_step: 30, value: 0.9 }));
        let message = "--metric val/mrr: is no number of the evaluations; expected one of val/reward, val/win_rate";
        assert_eq!(of("val/mrr", None), Err(message.into()));
        assert!(Measurement::of(&rows[2..3], REWARD, None).is_none());
    }

    #[test]
    fn combinations_are_ranked_by_rungs_then_means_and_failures_come_last() {
        let failed = TrialOutcome::Failed("the loss is not finite".into());
        let results = [
            result("a", 1, &[measured(0.9), measured(0.9)]),
            result("b", 2, &[measured(0.1), measured(0.3)]),
            result("c", 2, &[measured(0.5), measured(0.5)]),
            result("d", 1, &[measured(0.99), failed]),
        ];
        let report = SweepReport::new(json!({}), REWARD, &results, true);
        let order: Vec<&str> = report.combinations.iter().map(|result| result.settings[0].as_str()).collect();
        assert_eq!(order, ["rl.x=c", "rl.x=b", "rl.x=a", "rl.x=d"]);
        assert_eq!(report.combinations[1].mean.map(|mean| (mean * 10.0).round()), Some(2.0));
        // Standard deviation 0.1414 over the root of 2.
        assert!((report.combinations[1].standard_error.unwrap() - 0.1).abs() < 1e-12);
        assert_eq!(report.best, ["--set rl.x=c"]);
        assert_eq!(report.first_failure(), Some("the loss is not finite"));
        let text = report.to_text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "rank  val/reward  standard error  seeds  steps  settings");
        assert_eq!(lines[2], "2     0.2000      0.1000          2      20     rl.x=b");
        assert_eq!(lines[4], "4     -           -               2      20     rl.x=d");
        assert_eq!(lines[5], "failed: rl.x=d, seed 2: the loss is not finite");
        assert_eq!(lines[6], "best settings on the validation split: --set rl.x=c");
    }

    /// Regression: the first of two combinations with one value was called the best, and later was the only one in `sweep.json`.
    #[test]
    fn all_that_tie_are_the_best() {
        let results = [("a", 0.5), ("b", 0.5), ("c", 0.4)].map(|(name, value)| result(name, 1, &[measured(value)]));
        let report = SweepReport::new(json!({}), REWARD, &results, true);
        assert_eq!(report.best, ["--set rl.x=a", "--set rl.x=b"]);
        let text = report.to_text();
        let expected = "2 combinations tie for the best val/reward, one of them --set rl.x=a\n";
        assert!(text.ends_with(expected), "{text}");
    }

    /// Symptom: a winner within the noise of the next one was called the best, and trials without a gain over SFT were not named.
    #[test]
    fn a_best_within_noise_and_trials_without_a_gain_are_named() {
        let said = |others: &[CombinationResult]| {
            let best = result("a", 1, &[measured(0.5), measured(0.7), measured(0.6)]);
            SweepReport::new(json!({}), REWARD, &[&[best][..], others].concat(), true).to_text()
        };
        let (near, far) =
            ([measured(0.6), measured(0.5), measured(0.6)], [measured(0.1), measured(0.3), measured(0.2)]);
        let best = "best settings on the validation split: --set rl.x=a";
        let text = said(&[result("b", 1, &near), result("c", 1, &far)]);
        assert!(text.ends_with(&format!("{best}, within two standard errors of --set rl.x=b\n")), "{text}");
        let text = said(&[result("b", 1, &near), result("c", 1, &near), result("d", 1, &far)]);
        assert!(text.ends_with(&format!("{best}, within two standard errors of --set rl.x=b and 1 more\n")), "{text}");
        let start = TrialOutcome::Measured(Measurement { step: 20, best_step: 0, value: 0.2 });
        let text = said(&[result("c", 1, &[start, measured(0.3), measured(0.3)])]);
        let unimproved = "no step of RL is better than the SFT policy (best step 0): rl.x=c in 1 of 3 trials\n";
        assert!(text.ends_with(&format!("{unimproved}{best}\n")), "{text}");
        let alone = [("a", 0.5), ("b", 0.4)].map(|(name, value)| result(name, 1, &[measured(value)]));
        let text = SweepReport::new(json!({}), REWARD, &alone, true).to_text();
        assert!(text.ends_with(&format!("{best}; with one seed the order may be chance\n")), "{text}");
    }

    #[test]
    fn one_seed_has_no_standard_error_and_a_failure_is_never_the_best() {
        let one = result("a", 1, &[measured(0.5)]);
        assert_eq!((one.mean, one.standard_error), (Some(0.5), None));
        let failed = result("b", 1, &[TrialOutcome::Failed("no".into())]);
        assert!(SweepReport::new(json!({}), REWARD, &[failed], true).best.is_empty());
    }

    #[test]
    fn flags_are_quoted_for_a_shell() {
        let settings = vec!["rl.kl_coef=0.05".to_owned(), "rl.stop_strings=[\"it's\"]".to_owned()];
        assert_eq!(flags(&settings), "--set rl.kl_coef=0.05 --set 'rl.stop_strings=[\"it'\\''s\"]'");
    }
}
