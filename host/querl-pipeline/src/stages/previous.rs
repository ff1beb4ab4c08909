//! Earlier results of a stage, kept in `previous/STAGE/` while the stage runs again on other inputs. They are restored if the new run fails
//! before it has saved anything, or if the inputs change back to those of the earlier run; and removed once the new result is complete.
//!
//! `previous/STAGE/finished` and `previous/STAGE/stopped` each have `entry.json` (the entry of the ledger), `config.resolved.toml`,
//! `metrics.jsonl` (the stage's lines) and `files`. While files are moved, a marker `moving` exists, with which [`recover`] completes moves
//! that a kill interrupted.

use super::stage::{Stage, remove};
use super::stage_of;
use crate::ledger::{Entry, Inputs, Ledger, StageName};
use crate::metrics_log;
use crate::run::Run;
use crate::run_logs;
use anyhow::Context;
use querl_core::fsx::write_atomic;
use querl_core::run_dir::RunDir;
use std::path::{Path, PathBuf};

/// A kept earlier result of a stage.
pub(super) struct Previous {
    name: StageName,
    folder: PathBuf,
}

/// Moves the results of `stage` to `previous/`; `None` if there are none. Call [`Previous::settle`] once the ledger has the new run.
pub(super) fn set_aside(run: &Run, ledger: &Ledger, stage: &dyn Stage) -> anyhow::Result<Option<Previous>> {
    let (dir, name) = (&run.dir, stage.name());
    let (entry, metrics) = (ledger.entry(name), run_logs::lines_of(dir, name)?);
    let owned: Vec<PathBuf> = owned(dir, stage).into_iter().filter(|path| path.exists()).collect();
    if entry.is_none() && owned.is_empty() && metrics.is_empty() {
        return Ok(None);
    }
    let slot = if entry.is_some_and(|entry| entry.finished) { SLOTS[0] } else { SLOTS[1] };
    let kept = Previous { name, folder: folder(dir, name).join(slot) };
    let moved = || -> anyhow::Result<()> {
        remove(&kept.folder)?;
        write_atomic(&kept.moving(), b"")?;
        write_atomic(&kept.metrics(), metrics.as_bytes())?;
        // A run directory whose first command was refused has no configuration.
        let config = if dir.config().exists() { std::fs::read(dir.config())? } else { run.config.to_toml().into() };
        write_atomic(&kept.config(), &config)?;
        write_atomic(&kept.folder.join(ENTRY), &serde_json::to_vec(&entry)?)?;
        for path in &owned {
            rename(path, &kept.files().join(path.strip_prefix(dir.root())?))?;
        }
        Ok(metrics_log::remove_lines(&dir.metrics(), name.as_str())?)
    };
    moved().with_context(|| format!("{name}: the earlier result cannot be moved to {}", kept.folder.display()))?;
    Ok(Some(kept))
}

/// The kept result of a stage that was computed from `inputs`; `None` if there is none.
pub(super) fn of_inputs(dir: &RunDir, name: StageName, inputs: &Inputs) -> Option<Previous> {
    let kept = SLOTS.map(|slot| Previous { name, folder: folder(dir, name).join(slot) });
    let is_of = |entry: Option<Entry>| entry.is_some_and(|entry| inputs.changed_since(&entry.inputs).is_empty());
    kept.into_iter().find(|kept| kept.entry().is_ok_and(is_of))
}

/// Completes moves that a kill interrupted, and restores the earlier result of each stage that was ended before it had anything to resume
/// from. Returns the stages whose earlier result was restored.
pub(super) fn recover(dir: &RunDir, ledger: &mut Ledger) -> anyhow::Result<Vec<StageName>> {
    let mut restored = Vec::new();
    for name in StageName::ALL {
        let kept = || SLOTS.map(|slot| Previous { name, folder: folder(dir, name).join(slot) }).into_iter();
        for moved in kept().filter(|kept| kept.moving().exists()) {
            let is_whole = moved.entry().is_ok();
            moved.move_back(dir, ledger)?;
            restored.extend(is_whole.then_some(name));
        }
        let is_unfinished = ledger.entry(name).is_some_and(|entry| !entry.finished);
        // The stopped result was set aside last.
        let earlier = kept().rev().find(|kept| kept.entry().is_ok());
        if let Some(earlier) = earlier.filter(|_| is_unfinished && !stage_of(name).is_resumable(dir)) {
            earlier.restore(dir, ledger)?;
            restored.push(name);
        }
    }
    Ok(restored)
}

/// Removes the kept earlier results of a stage.
pub(super) fn discard(dir: &RunDir, name: StageName) -> std::io::Result<()> {
    remove(&folder(dir, name))?;
    // Fails where another stage has a kept result.
    let _ = std::fs::remove_dir(dir.previous());
    Ok(())
}

impl Previous {
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Marks the move as complete, after the ledger has the new run.
    pub(super) fn settle(&self) -> std::io::Result<()> {
        remove(&self.moving())
    }

    /// Restores the kept result, which replaces the files that the stage has written since.
    pub(super) fn restore(&self, dir: &RunDir, ledger: &mut Ledger) -> anyhow::Result<()> {
        for path in owned(dir, stage_of(self.name)) {
            remove(&path).with_context(|| format!("{}: cannot be removed", path.display()))?;
        }
        write_atomic(&self.moving(), b"").with_context(|| format!("{}: cannot be written", self.folder.display()))?;
        self.move_back(dir, ledger)
    }

    fn move_back(&self, dir: &RunDir, ledger: &mut Ledger) -> anyhow::Result<()> {
        let back = |ledger: &mut Ledger| -> anyhow::Result<()> {
            // The entry is the last file that is written before files are moved here.
            if let Ok(entry) = self.entry() {
                ledger.put(self.name, entry)?;
                merge(&self.files(), dir.root())?;
                let lines = metrics_log::read(&self.metrics())?;
                metrics_log::replace_lines(&dir.metrics(), self.name.as_str(), &lines)?;
                write_atomic(&dir.config(), &std::fs::read(self.config())?)?;
            }
            Ok(self.discard(dir)?)
        };
        back(ledger).with_context(|| format!("{}: cannot be moved back", self.folder.display()))
    }

    /// Removes the remaining files of this result.
    fn discard(&self, dir: &RunDir) -> std::io::Result<()> {
        remove(&self.folder)?;
        // Both fail if there are other kept results.
        let _ = std::fs::remove_dir(folder(dir, self.name)).and_then(|()| std::fs::remove_dir(dir.previous()));
        Ok(())
    }

    fn entry(&self) -> anyhow::Result<Option<Entry>> {
        Ok(serde_json::from_slice(&std::fs::read(self.folder.join(ENTRY))?)?)
    }

    fn moving(&self) -> PathBuf {
        self.folder.join("moving")
    }

    fn metrics(&self) -> PathBuf {
        self.folder.join("metrics.jsonl")
    }

    fn config(&self) -> PathBuf {
        self.folder.join("config.resolved.toml")
    }

    fn files(&self) -> PathBuf {
        self.folder.join("files")
    }
}

const SLOTS: [&str; 2] = ["finished", "stopped"];

const ENTRY: &str = "entry.json";

fn folder(dir: &RunDir, name: StageName) -> PathBuf {
    dir.previous().join(name.as_str())
}

fn owned(dir: &RunDir, stage: &dyn Stage) -> Vec<PathBuf> {
    let events = RunDir::tensorboard(&dir.metrics(), stage.name().as_str());
    stage.owned(dir).into_iter().chain([events]).collect()
}

fn rename(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to.parent().unwrap_or(Path::new(".")))?;
    std::fs::rename(from, to)
}

/// Moves the files in `from` to the same relative paths in `to`.
fn merge(from: &Path, to: &Path) -> std::io::Result<()> {
    if from.is_dir() && to.is_dir() {
        return std::fs::read_dir(from)?.try_for_each(|entry| {
            let entry = entry?;
            merge(&entry.path(), &to.join(entry.file_name()))
        });
    }
    if from.exists() { rename(from, to) } else { Ok(()) }
}
