//! A search for settings: trials of each combination of a grid with several seeds, measured on the validation split. The test split is not
//! evaluated.
//!
//! Each trial is a run directory, trained by the stages of a run up to `rl`; finished stages of earlier trials are taken over. With successive
//! halving trials stop at rungs and resume: a checkpoint makes a trial in parts equal to one that was never stopped, so the learning rate
//! schedule is always that of the whole length. Decisions follow from the metrics in the run directories, so the same command resumes a sweep
//! wherever it was ended.
//!
//! | file | what |
//! |---|---|
//! | `grid.rs` | combinations and rungs |
//! | `trial.rs` | one trial: take over, train to a rung |
//! | `results.rs` | measurements, ranking, `sweep.json`, the table |

mod grid;
mod results;
mod trial;

pub use grid::GridKey;
pub use results::{CombinationResult, SweepReport};

use crate::failure::Stop;
use crate::files::{unreadable, write_json};
use anyhow::Context;
use grid::{Settings, combinations, rungs};
use querl_core::config::{Config, ConfigError, ConfigLocation, Overrides, RetrievalKind, load};
use querl_core::dir_lock::DirLock;
use querl_core::fsx::read_bounded;
use querl_core::ports::Reporter;
use querl_core::run_dir::RunDir;
use querl_train::rl::{EVALUATION_RETRIEVAL, EVALUATION_REWARD};
use results::{Measurement, TrialOutcome, TrialResult};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trial::{Trial, TrialProgress};

/// Length of the trials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrialLength {
    /// Every trial trains to the end.
    Full,
    /// Successive halving: the worse half of the combinations stops at each rung.
    Halving,
}

/// Options of a sweep: grid, seeds, metric and length.
#[derive(Debug, Clone)]
pub struct SweepOptions {
    /// Configuration keys with the values to try.
    pub grid: Vec<GridKey>,
    /// Number of combinations to draw from the grid; `None`: all combinations.
    pub n_random: Option<usize>,
    /// Seeds with which each combination is trained.
    pub seeds: Vec<u64>,
    /// Name of the validation metric that ranks combinations; higher is better.
    pub metric: String,
    /// Length of the trials.
    pub length: TrialLength,
    /// Folder in which the sweep is written.
    pub out: PathBuf,
}

/// Report of a sweep, in its folder.
const REPORT: &str = "sweep.json";

/// Run directories of the trials, in the folder of the sweep.
const TRIALS: &str = "trials";

/// Maximum size of a report, which has a few hundred bytes for each trial.
const MAX_REPORT_BYTES: u64 = 64 << 20;

/// Runs a trial of every combination with every seed, and writes `sweep.json` after each. `base`: configuration overrides of all trials.
///
/// # Errors
/// Options or a configuration of a trial are invalid, the folder has another sweep, a data stage or a service failed, a signal has arrived, or
/// every trial failed. A training that fails or collapses on the way, as with too high a learning rate, is a result of its combination.
pub fn sweep(
    config: &Path,
    base: &Overrides,
    options: &SweepOptions,
    reporter: &Arc<dyn Reporter>,
) -> anyhow::Result<SweepReport> {
    check(options)?;
    let mut sweep = Sweep::new(config, base, options, reporter)?;
    let _lock = DirLock::take(&options.out)?;
    sweep.check_folder()?;
    sweep.run()
}

fn check(options: &SweepOptions) -> Result<(), Stop> {
    let mut seen = BTreeSet::new();
    if let Some(twice) = options.seeds.iter().find(|seed| !seen.insert(**seed)) {
        return Err(Stop::usage(format!("--seeds: {twice} is given twice; expected once")));
    }
    Ok(())
}

/// Refuses a metric that no evaluation has. Components of rewards are known only after the first evaluation.
fn check_metric(metric: &str, config: &Config) -> Result<(), Stop> {
    let is_component = metric.strip_prefix("val/reward/").is_some_and(|component| !component.is_empty());
    let mut known = vec![EVALUATION_REWARD];
    if config.retrieval.kind != RetrievalKind::None {
        known.extend(EVALUATION_RETRIEVAL);
        // If queries have gold passages, as the first evaluation shows.
        known.push("val/avg_mrr");
    }
    if is_component || known.contains(&metric) {
        return Ok(());
    }
    let known = known.join(", ");
    Err(Stop::usage(format!(
        "--metric {metric}: expected a metric of the evaluations on the validation split: {known}, or val/reward/COMPONENT"
    )))
}

/// Names `--grid` in an error about a setting of the grid, which a trial has as `--set`.
fn naming_grid(mut error: ConfigError, grid: &[GridKey]) -> ConfigError {
    if let ConfigError::Flag { flag, .. } | ConfigError::Invalid { location: ConfigLocation::Flag(flag), .. } =
        &mut error
        && let Some(key) = flag.strip_prefix("--set ").filter(|key| grid.iter().any(|varied| varied.key == *key))
    {
        *flag = format!("--grid {key}");
    }
    error
}

/// A combination with a trial for each seed.
struct Combination {
    settings: Settings,
    trials: Vec<Trial>,
    result: Option<CombinationResult>,
}

struct Sweep<'a> {
    config: &'a Path,
    options: &'a SweepOptions,
    reporter: &'a Arc<dyn Reporter>,
    /// Run directory of the configuration itself, whose stages may already be finished.
    base_run: RunDir,
    combinations: Vec<Combination>,
    rungs: Vec<u32>,
    search: Value,
}

impl<'a> Sweep<'a> {
    fn new(
        config: &'a Path,
        base: &Overrides,
        options: &'a SweepOptions,
        reporter: &'a Arc<dyn Reporter>,
    ) -> anyhow::Result<Self> {
        let own = load(config, base)?;
        check_metric(&options.metric, &own)?;
        let all = combinations(&options.grid, &options.metric, options.n_random, own.seed)?;
        let rungs = match options.length {
            TrialLength::Full => vec![0],
            TrialLength::Halving => rungs(all.len(), planned_steps(&own), own.rl.eval_steps),
        };
        // Every configuration is checked before anything runs.
        let combination = |(number, settings): (usize, Settings)| -> anyhow::Result<Combination> {
            let trial = |seed: &u64| -> anyhow::Result<Trial> {
                let dir = options.out.join(TRIALS).join(format!("c{number:03}-s{seed}"));
                let set = [base.set.as_slice(), settings.as_slice(), &[format!("seed={seed}")]].concat();
                let config = load(config, &Overrides { set, out: Some(dir), ..base.clone() });
                let config = config.map_err(|error| naming_grid(error, &options.grid))?;
                Ok(Trial { dir: RunDir::new(&config.output_dir), config })
            };
            let trials = options.seeds.iter().map(trial).collect::<anyhow::Result<Vec<_>>>()?;
            Ok(Combination { settings, trials, result: None })
        };
        let combinations = (1..).zip(all).map(combination).collect::<anyhow::Result<Vec<_>>>()?;
        let search = json!({
            "set": base.set,
            "combinations": combinations.iter().map(|one| &one.settings).collect::<Vec<_>>(),
            "seeds": options.seeds,
            "halving": options.length == TrialLength::Halving,
            // Without halving, the metric affects only the ranking, not the trials.
            "metric": (options.length == TrialLength::Halving).then_some(&options.metric),
        });
        Ok(Self { config, options, reporter, base_run: RunDir::new(&own.output_dir), combinations, rungs, search })
    }

    /// Refuses the folder of another sweep or of a run.
    fn check_folder(&self) -> anyhow::Result<()> {
        let out = &self.options.out;
        let path = out.join(REPORT);
        if RunDir::new(out).stages().exists() {
            let message = format!("{}: is a run directory; name a folder of the sweep's own with --out", out.display());
            return Err(Stop::usage(message).into());
        }
        if !path.exists() {
            return Ok(());
        }
        let bytes = read_bounded(&path, MAX_REPORT_BYTES).with_context(|| unreadable(&path))?;
        let known: Value = serde_json::from_slice(&bytes).map_err(|error| {
            Stop::usage(format!("{}: not the report of a sweep ({error}); name another --out", path.display()))
        })?;
        let changed = ["set", "combinations", "seeds", "halving", "metric"]
            .into_iter()
            .find(|name| known["search"][name] != self.search[name]);
        match changed {
            None => Ok(()),
            Some(name) => {
                let message =
                    format!("holds a sweep with other {name}; repeat its command to resume it, or name another --out");
                Err(Stop::usage(format!("{}: {message}", path.display())).into())
            }
        }
    }

    fn run(&mut self) -> anyhow::Result<SweepReport> {
        let (n, n_seeds) = (self.combinations.len(), self.options.seeds.len());
        self.reporter.message(&format!(
            "sweep: {n} combinations with {n_seeds} seeds, measured by {} on the validation split; the test split is not evaluated",
            self.options.metric
        ));
        let mut alive: Vec<usize> = (0..n).collect();
        for (rung, shift) in self.rungs.clone().into_iter().enumerate() {
            if rung > 0 {
                alive = self.better_half(alive);
                self.reporter.message(&format!("sweep: {} of {n} combinations go to rung {}", alive.len(), rung + 1));
            }
            for index in &alive {
                self.advance(*index, rung, shift)?;
            }
        }
        let report = self.report(true);
        self.write(&report)?;
        if report.best.is_empty()
            && let Some(reason) = report.first_failure()
        {
            let message = "no combination has a result of all seeds; the first failure";
            return Err(anyhow::anyhow!("sweep: {message}: {reason}"));
        }
        Ok(report)
    }

    /// Trains the trials of a combination to the end of a rung and measures them.
    fn advance(&mut self, index: usize, rung: usize, shift: u32) -> anyhow::Result<()> {
        let (n, settings) = (self.combinations.len(), self.combinations[index].settings.clone());
        let mut results = Vec::new();
        for (position, seed) in self.options.seeds.iter().enumerate() {
            let place =
                format!("combination {} of {n}, seed {seed}, rung {} of {}", index + 1, rung + 1, self.rungs.len());
            self.reporter.message(&format!("sweep: {place}: {}", settings.join(" ")));
            let trial = &self.combinations[index].trials[position];
            let others = self.combinations.iter().flat_map(|one| &one.trials).map(|other| &other.dir);
            let sources = others.filter(|dir| **dir != trial.dir).chain([&self.base_run]);
            trial.take_over(sources, self.reporter.as_ref())?;
            let outcome = match trial.advance(self.config, shift, self.reporter)? {
                TrialProgress::Reached(last) => {
                    TrialOutcome::Measured(Measurement::read(&trial.dir, &self.options.metric, last)?)
                }
                TrialProgress::Failed(reason) => {
                    self.reporter.message(&format!("sweep: {place}: failed: {reason}"));
                    TrialOutcome::Failed(reason)
                }
            };
            let dir = Path::new(TRIALS).join(trial.dir.root().file_name().unwrap_or_default());
            results.push(TrialResult { seed: *seed, dir, outcome });
        }
        self.combinations[index].result = Some(CombinationResult::new(settings, rung + 1, results));
        self.write(&self.report(false))
    }

    /// The better half, rounded up, of the combinations with results of all seeds.
    fn better_half(&self, alive: Vec<usize>) -> Vec<usize> {
        let n_kept = alive.len().div_ceil(2);
        let mut ranked: Vec<(usize, &CombinationResult)> =
            alive.into_iter().filter_map(|index| Some((index, self.combinations[index].result.as_ref()?))).collect();
        ranked.retain(|(_, result)| result.mean.is_some());
        ranked.sort_by(|(_, one), (_, other)| one.order(other));
        let mut kept: Vec<usize> = ranked.into_iter().take(n_kept).map(|(index, _)| index).collect();
        kept.sort_unstable();
        kept
    }

    fn report(&self, finished: bool) -> SweepReport {
        let results: Vec<CombinationResult> = self.combinations.iter().filter_map(|one| one.result.clone()).collect();
        SweepReport::new(self.search.clone(), &self.options.metric, &results, finished)
    }

    fn write(&self, report: &SweepReport) -> anyhow::Result<()> {
        write_json(&self.options.out.join(REPORT), report)
    }
}

/// Steps of `rl`, by which equal rungs are found; with `rl.epochs` they depend on rows that may not exist yet, and no rungs count as equal.
fn planned_steps(config: &Config) -> usize {
    const UNKNOWN: usize = 1 << 40;
    if config.rl.epochs.is_some() { UNKNOWN } else { config.rl.max_steps }
}
