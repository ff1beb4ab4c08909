//! The stages of a run, one file each, and what runs them.

mod convert;
pub mod eval;
pub mod facts;
pub mod funnel;
pub mod inputs;
pub mod leaks;
pub mod ledger;
mod local_teacher;
mod rewrite;
mod rl;
pub mod runner;
mod sft;
pub mod spending;
mod validate;
mod world;

use crate::failure::Stop;
use crate::run::Run;
use anyhow::Context;
use facts::Facts;
use inputs::Inputs;
use ledger::Ledger;
use querl_core::config::TableFormat;
use querl_core::fsx::{ReadError, read_jsonl};
use querl_core::ports::Progress;
use querl_core::run_dir::RunDir;
use querl_data::{Tabled, write_tables};
use std::path::{Path, PathBuf};

/// The stages in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum StageName {
    /// The teacher rewrites each query.
    Rewrite,
    /// Retrieval says what each rewrite finds.
    Validate,
    /// Filters keep or drop; the dataset is split.
    Convert,
    /// Supervised fine-tuning.
    Sft,
    /// Reinforcement learning.
    Rl,
    /// The table and the report.
    Eval,
}

impl StageName {
    /// In order.
    pub const ALL: [Self; 6] = [Self::Rewrite, Self::Validate, Self::Convert, Self::Sft, Self::Rl, Self::Eval];

    /// As the command line and the ledger call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rewrite => "rewrite",
            Self::Validate => "validate",
            Self::Convert => "convert",
            Self::Sft => "sft",
            Self::Rl => "rl",
            Self::Eval => "eval",
        }
    }

    /// The stage itself.
    pub fn stage(self) -> &'static dyn Stage {
        match self {
            Self::Rewrite => &rewrite::Rewrite,
            Self::Validate => &validate::Validate,
            Self::Convert => &convert::Convert,
            Self::Sft => &sft::Sft,
            Self::Rl => &rl::Rl,
            Self::Eval => &eval::Eval,
        }
    }
}

impl std::fmt::Display for StageName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a stage that ended well says.
#[derive(Debug, Default)]
pub struct Done {
    /// What it found.
    pub facts: Facts,
    /// Rows whose outside call failed and may succeed another time.
    pub n_failed: u64,
}

/// One stage: files in the run folder in, files in the run folder out.
pub trait Stage: Sync {
    /// Which.
    fn name(&self) -> StageName;

    /// Everything that its result depends on.
    ///
    /// # Errors
    /// An input is missing, made by a stage that is not finished, or cannot be read.
    fn inputs(&self, run: &Run, ledger: &Ledger) -> anyhow::Result<Inputs>;

    /// True where what was done before a change of the input `name` is still good, row by row.
    fn keeps_rows(&self, name: &str) -> bool {
        let _ = name;
        false
    }

    /// Opens what the stage will need of the outside, so that what is wrong with it shows before any stage runs.
    ///
    /// # Errors
    /// A table, a service or a key is missing or cannot be used.
    fn check(&self, run: &Run) -> anyhow::Result<()> {
        let _ = run;
        Ok(())
    }

    /// Refuses what should not be done although it could be, before anything of an earlier run is removed. `last` is the last
    /// stage of the command. What was found is added to the stage's facts.
    ///
    /// # Errors
    /// The work would be of no use.
    fn permit(&self, run: &Run, last: StageName, progress: &dyn Progress) -> anyhow::Result<Facts> {
        let _ = (run, last, progress);
        Ok(Facts::default())
    }

    /// What is to be said of its result where it is used again as it is.
    fn reminder(&self, run: &Run, facts: &Facts) -> Option<String> {
        let _ = (run, facts);
        None
    }

    /// What it leaves, whole or not at all.
    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf>;

    /// What it leaves beside them for people, in the formats that the configuration names.
    fn tables(&self, run: &Run) -> Vec<PathBuf> {
        let _ = run;
        Vec::new()
    }

    /// Removes what an earlier run of it left.
    ///
    /// # Errors
    /// As the file system says.
    fn clean(&self, dir: &RunDir) -> std::io::Result<()> {
        self.outputs(dir).iter().try_for_each(|path| remove(path))
    }

    /// Removes what only an unfinished stage needs, once it is known to be finished.
    ///
    /// # Errors
    /// As the file system says.
    fn settle(&self, dir: &RunDir) -> std::io::Result<()> {
        let _ = dir;
        Ok(())
    }

    /// Does the work. Partial outputs of an interrupted run on the same inputs may be there.
    ///
    /// # Errors
    /// The stage cannot go on; what is done is saved.
    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done>;
}

/// Removes a file or a folder; a missing one is fine.
pub fn remove(path: &Path) -> std::io::Result<()> {
    let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The rows that an earlier stage left.
///
/// # Errors
/// The file cannot be read, or somebody has changed it since.
pub fn rows_of<T: serde::de::DeserializeOwned>(path: &Path) -> anyhow::Result<Vec<T>> {
    read_jsonl(path).map_err(|error| match error {
        ReadError::Line { path, line, problem } => {
            let remedy = "remove the file, and `querl run` makes it again";
            Stop::usage(format!("{path}:{line}: not a valid record: {problem}; {remedy}")).into()
        }
        ReadError::Io { .. } => error.into(),
    })
}

/// Who rewrote, as the rewrite stage noted it.
///
/// # Errors
/// That stage is not finished.
pub fn teacher_name(dir: &RunDir) -> anyhow::Result<String> {
    let ledger = Ledger::open(&dir.stages())?;
    let name = ledger.entry(StageName::Rewrite.as_str()).and_then(|entry| entry.facts.get("teacher")?.as_str());
    let message = || Stop::usage(format!("{}: no rewrites yet; run `querl rewrite` first", dir.root().display()));
    Ok(name.ok_or_else(message)?.to_owned())
}

/// Makes the tables beside `output`, and removes those of formats that are not asked for.
fn make_tables<R: Tabled>(output: &Path, formats: &[TableFormat]) -> anyhow::Result<()> {
    write_tables::<R>(output, formats)?;
    remove_tables(output, formats).context("tables of other formats cannot be removed")
}

/// Removes the tables beside `output` but for those of the formats `but`.
fn remove_tables(output: &Path, but: &[TableFormat]) -> std::io::Result<()> {
    let unwanted = TableFormat::ALL.into_iter().filter(|format| !but.contains(format));
    unwanted.map(|format| querl_data::table_path(output, format)).try_for_each(|path| remove(&path))
}

/// A mean of values that come one by one.
#[derive(Default)]
struct Mean {
    sum: f64,
    n: u64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.n += 1;
    }

    /// `None` of nothing.
    fn value(&self) -> Option<f64> {
        (self.n > 0).then(|| self.sum / self.n as f64)
    }
}
