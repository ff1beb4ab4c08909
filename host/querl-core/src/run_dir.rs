//! Paths of all files in a run directory.

use crate::records::Split;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The folder of one run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir {
    root: PathBuf,
}

impl RunDir {
    /// A run in `root`, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Path of the run directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// File of the `DatasetRow`s of one split.
    pub fn split(&self, split: Split) -> PathBuf {
        self.root.join("data").join(format!("{}.jsonl", split.name()))
    }

    /// New file for the cost of calls while this process scores for another trainer; each call returns another name, since several
    /// processes may score at the same time.
    pub fn scoring_calls(&self) -> PathBuf {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let (process, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.root.join("scoring").join(format!("calls-{seconds}-{process}-{number}.json"))
    }

    /// Folder of the TensorBoard event file of one stage, next to the file `metrics`.
    pub fn tensorboard(metrics: &Path, stage: &str) -> PathBuf {
        metrics.with_file_name("tensorboard").join(stage)
    }
}

/// Declares methods for paths relative to the run directory.
macro_rules! paths {
    ($($(#[$doc:meta])* $name:ident: $path:literal,)*) => {
        impl RunDir {
            $($(#[$doc])* pub fn $name(&self) -> PathBuf {
                self.root.join($path)
            })*
        }
    };
}

paths! {
    /// The resolved configuration.
    config: "config.resolved.toml",
    /// Digests of the plugins this run used.
    lock: "querl.lock",
    /// The ledger: finished stages and the digests of their inputs.
    stages: "stages.json",
    /// Previous results of stages that run again on changed inputs, kept until the new results are complete.
    previous: "previous",
    /// `RewriteRecord`s, one JSON object per line.
    rewrites: "data/rewrites.jsonl",
    /// State of the teacher's batch jobs; removed once all rewrites are saved.
    batches: "data/rewrites.batches.json",
    /// `ValidatedRecord`s, one JSON object per line.
    validated: "data/validated.jsonl",
    /// Rows that the filters dropped, with reasons.
    dropped: "data/dropped.jsonl",
    /// The model of expansions, in runs that use them.
    expansion: "data/expansion.json",
    /// The fine-tuning stage's folder; `best` and `last` are checkpoints in it.
    sft: "sft",
    /// The PPO stage's folder; `best` and `last` are checkpoints in it.
    rl: "rl",
    /// Cost of external calls, by stage and provider.
    calls: "calls.json",
    /// `EpisodeRecord`s of the rollouts.
    episodes: "episodes.jsonl",
    /// Inputs of plugin calls that faulted.
    faults: "faults",
    /// Training metrics, one JSON object per line: `{"stage": "rl", "step": 3, "actor/pg_loss": ...}`.
    metrics: "metrics.jsonl",
    /// `EvalRecord`s, one JSON object per line.
    eval_records: "eval/records.jsonl",
    /// Metrics of each evaluated system.
    eval: "eval.json",
    /// Results of `querl release check`.
    release: "release",
    /// State, logs and local records of experiment trackers. A tracker's own process writes there at any time.
    tracking: "tracking",
    /// The HTML report.
    report: "report.html",
}
