//! Where a run keeps its files. One place names them all.

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

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The configuration this run resolved to.
    pub fn config(&self) -> PathBuf {
        self.root.join("config.resolved.toml")
    }

    /// Digests of the plugins this run used.
    pub fn lock(&self) -> PathBuf {
        self.root.join("querl.lock")
    }

    /// Which stages are finished, and on which inputs.
    pub fn stages(&self) -> PathBuf {
        self.root.join("stages.json")
    }

    /// Queries with the teacher's rewrites, one JSON record a line.
    pub fn rewrites(&self) -> PathBuf {
        self.root.join("data/rewrites.jsonl")
    }

    /// Batches that the teacher works on; gone when the rewrites are there.
    pub fn batches(&self) -> PathBuf {
        self.root.join("data/rewrites.batches.json")
    }

    /// Rewrites with what retrieval found, one JSON record a line.
    pub fn validated(&self) -> PathBuf {
        self.root.join("data/validated.jsonl")
    }

    /// Rows that the filters dropped, with reasons.
    pub fn dropped(&self) -> PathBuf {
        self.root.join("data/dropped.jsonl")
    }

    /// The dataset of one split.
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

    /// What calls to outside services cost, by stage and provider.
    pub fn calls(&self) -> PathBuf {
        self.root.join("calls.json")
    }

    /// Every scored episode.
    pub fn episodes(&self) -> PathBuf {
        self.root.join("episodes.jsonl")
    }

    /// Training metrics, one JSON object a line: `{"stage": "rl", "step": 3, "actor/pg_loss": ...}`.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// The metrics of one stage for TensorBoard: the folder of an event file, beside `metrics`.
    pub fn tensorboard(metrics: &Path, stage: &str) -> PathBuf {
        metrics.with_file_name("tensorboard").join(stage)
    }

    /// What each system wrote and found on the evaluated split, one JSON record a line.
    pub fn eval_records(&self) -> PathBuf {
        self.root.join("eval/records.jsonl")
    }

    /// The table of systems and metrics.
    pub fn eval(&self) -> PathBuf {
        self.root.join("eval.json")
    }

    /// The report for a browser.
    pub fn report(&self) -> PathBuf {
        self.root.join("report.html")
    }
}
