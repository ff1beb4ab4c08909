//! Paths of all files in a run directory.

use crate::records::Split;
use std::path::{Path, PathBuf};

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

    /// The resolved configuration.
    pub fn config(&self) -> PathBuf {
        self.root.join("config.resolved.toml")
    }

    /// Digests of the plugins this run used.
    pub fn lock(&self) -> PathBuf {
        self.root.join("querl.lock")
    }

    /// The ledger: finished stages and the digests of their inputs.
    pub fn stages(&self) -> PathBuf {
        self.root.join("stages.json")
    }

    /// `RewriteRecord`s, one JSON object per line.
    pub fn rewrites(&self) -> PathBuf {
        self.root.join("data/rewrites.jsonl")
    }

    /// State of the teacher's batch jobs; removed once all rewrites are saved.
    pub fn batches(&self) -> PathBuf {
        self.root.join("data/rewrites.batches.json")
    }

    /// `ValidatedRecord`s, one JSON object per line.
    pub fn validated(&self) -> PathBuf {
        self.root.join("data/validated.jsonl")
    }

    /// Rows that the filters dropped, with reasons.
    pub fn dropped(&self) -> PathBuf {
        self.root.join("data/dropped.jsonl")
    }

    /// `DatasetRow`s of one split.
    pub fn split(&self, split: Split) -> PathBuf {
        self.root.join("data").join(format!("{}.jsonl", split.name()))
    }

    /// The fine-tuning stage's folder; `best` and `last` are checkpoints in it.
    pub fn sft(&self) -> PathBuf {
        self.root.join("sft")
    }

    /// The PPO stage's folder; `best` and `last` are checkpoints in it.
    pub fn rl(&self) -> PathBuf {
        self.root.join("rl")
    }

    /// Cost of external calls, by stage and provider.
    pub fn calls(&self) -> PathBuf {
        self.root.join("calls.json")
    }

    /// `EpisodeRecord`s of the rollouts.
    pub fn episodes(&self) -> PathBuf {
        self.root.join("episodes.jsonl")
    }

    /// Training metrics, one JSON object per line: `{"stage": "rl", "step": 3, "actor/pg_loss": ...}`.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// Folder of the TensorBoard event file of one stage, next to the file `metrics`.
    pub fn tensorboard(metrics: &Path, stage: &str) -> PathBuf {
        metrics.with_file_name("tensorboard").join(stage)
    }

    /// `EvalRecord`s, one JSON object per line.
    pub fn eval_records(&self) -> PathBuf {
        self.root.join("eval/records.jsonl")
    }

    /// Metrics of each evaluated system.
    pub fn eval(&self) -> PathBuf {
        self.root.join("eval.json")
    }

    /// The HTML report.
    pub fn report(&self) -> PathBuf {
        self.root.join("report.html")
    }
}
