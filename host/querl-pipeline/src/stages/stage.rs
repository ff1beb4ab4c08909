//! What a stage of the pipeline is: files in the run directory in, files in the run directory out.

use crate::ledger::{Facts, Inputs, Ledger, StageName};
use crate::run::Run;
use anyhow::Context;
use querl_core::config::TableFormat;
use querl_core::ports::Progress;
use querl_core::run_dir::RunDir;
use querl_data::{TableRecord, write_tables};
use std::path::{Path, PathBuf};

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

/// Makes the tables beside `output`, and removes those of formats that are not asked for.
pub(super) fn make_tables<R: TableRecord>(output: &Path, formats: &[TableFormat]) -> anyhow::Result<()> {
    write_tables::<R>(output, formats)?;
    remove_tables(output, formats).context("tables of other formats cannot be removed")
}

/// Removes the tables beside `output` but for those of the formats `but`.
pub(super) fn remove_tables(output: &Path, but: &[TableFormat]) -> std::io::Result<()> {
    let unwanted = TableFormat::ALL.into_iter().filter(|format| !but.contains(format));
    unwanted.map(|format| querl_data::table_path(output, format)).try_for_each(|path| remove(&path))
}

/// A mean of values that come one by one.
#[derive(Default)]
pub(super) struct Mean {
    sum: f64,
    n: u64,
}

impl Mean {
    pub(super) fn add(&mut self, value: f64) {
        self.sum += value;
        self.n += 1;
    }

    /// `None` of nothing.
    pub(super) fn value(&self) -> Option<f64> {
        (self.n > 0).then(|| self.sum / self.n as f64)
    }
}
