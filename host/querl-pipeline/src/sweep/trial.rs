//! One trial of a sweep: a run directory whose stages end with `rl`, which may stop at a rung and resume. Finished stages of another trial
//! with the same inputs are copied.

use super::grid::rung_step;
use crate::failure::{Ending, Stop, ending_of, sentence};
use crate::files::{copy, unwritable};
use crate::interrupt;
use crate::ledger::{Ledger, StageName, rows_of};
use crate::pins::OnPluginChange;
use crate::run::Run;
use crate::run_logs;
use crate::stages::{Window, run_stages};
use crate::training;
use anyhow::Context;
use querl_core::config::{Config, load_resolved};
use querl_core::dir_lock::DirLock;
use querl_core::fsx::write_atomic;
use querl_core::ports::Reporter;
use querl_core::records::{DatasetRow, Split};
use querl_core::run_dir::RunDir;
use querl_data::open_queries;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

pub(super) struct Trial {
    pub(super) dir: RunDir,
    pub(super) config: Config,
}

/// Result of training a trial to the end of a rung.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TrialProgress {
    /// The trial has reached the end of the rung, at this step of `rl` (`None`: end of the training), or an earlier call trained further.
    Reached(Option<u64>),
    /// Training failed or collapsed, as with too high a learning rate, with the reason.
    Failed(String),
}

/// The stages that a trial may take over from another.
const SHARED: [StageName; 4] = [StageName::Rewrite, StageName::Validate, StageName::Convert, StageName::Sft];

impl Trial {
    /// Trains to the end of a rung ([`rung_step`]), from the beginning or from where an earlier call stopped. The learning-rate schedule is
    /// always that of the full length, so a trial that stops at a rung is the same, up to there, as one that does not.
    ///
    /// # Errors
    /// A data stage or a service failed, a limit was reached, a setting cannot be used, or a signal has arrived.
    pub(super) fn advance(
        &self,
        config_path: &Path,
        shift: u32,
        reporter: &Arc<dyn Reporter>,
    ) -> anyhow::Result<TrialProgress> {
        let mut run =
            Run::open(self.config.clone(), config_path, StageName::Rl, OnPluginChange::Refuse, reporter.clone())?;
        let stages = |first, last| Window { first, last, forced_from: None };
        training::check_first_prompt(&run.config, &open_queries(&run.config.data)?, run.plugins.prompts.as_ref())?;
        run_stages(&run, stages(StageName::Rewrite, StageName::Convert))?;
        let rl = &self.config.rl;
        let n_steps = rl.n_steps(rows_of::<DatasetRow>(&self.dir.split(Split::Train))?.len());
        let last = rung_step(n_steps, rl.eval_steps, shift);
        run.stop_after = (last < n_steps).then_some(last as u64);
        match run_stages(&run, stages(StageName::Sft, StageName::Rl)) {
            Ok(_) => Ok(TrialProgress::Reached(run.stop_after)),
            Err(error) => match ending_of(&error) {
                Ending::Interrupted if run.stop_after.is_some() && interrupt::check().is_ok() => {
                    Ok(TrialProgress::Reached(run.stop_after))
                }
                Ending::Failed => Ok(TrialProgress::Failed(sentence(&error))),
                Ending::Limit if is_collapse(&error) => Ok(TrialProgress::Failed(sentence(&error))),
                Ending::Interrupted | Ending::Usage | Ending::Limit => Err(error),
            },
        }
    }

    /// If this trial has not begun, copies the finished stages of the most similar of `sources` that can be copied. Stages whose recorded
    /// inputs differ from this trial's run again. A source that cannot be copied is reported.
    ///
    /// # Errors
    /// The configuration has no TOML form.
    pub(super) fn take_over<'a>(
        &self,
        sources: impl Iterator<Item = &'a RunDir>,
        reporter: &dyn Reporter,
    ) -> anyhow::Result<()> {
        if self.dir.stages().exists() {
            return Ok(());
        }
        let own = prepared_settings(&self.config)?;
        let skipped = |source: &RunDir, why: &str| {
            reporter.message(&format!("sweep: {}: its stages are not taken over: {why}", source.root().display()));
        };
        let mut candidates: Vec<(usize, &RunDir)> = Vec::new();
        for source in sources {
            match n_different(source, &own) {
                Ok(n_different) => candidates.extend(n_different.map(|n| (n, source))),
                Err(error) => skipped(source, &sentence(&error)),
            }
        }
        candidates.sort_by_key(|(n_different, _)| *n_different);
        for (_, source) in candidates {
            match copy_stages(source, &self.dir) {
                Ok(true) => break,
                Ok(false) => skipped(source, "another process uses it"),
                Err(error) => skipped(source, &sentence(&error)),
            }
        }
        Ok(())
    }
}

/// Whether the training itself reached a limit: too many dropped episodes, rollouts of another distribution, or noise after `sft`. A spent
/// budget is no [`Stop`] but the failure of a service.
fn is_collapse(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<Stop>())
}

/// The values that the stages before `rl` may depend on, by key.
fn prepared_settings(config: &Config) -> anyhow::Result<BTreeMap<String, String>> {
    let table = toml::Table::try_from(config).context("the configuration has no TOML form")?;
    let mut values = BTreeMap::new();
    for (section, value) in table.iter().filter(|(name, _)| !["rl", "eval", "output_dir"].contains(&name.as_str())) {
        match value {
            toml::Value::Table(keys) => {
                values.extend(keys.iter().map(|(key, value)| (format!("{section}.{key}"), value.to_string())));
            }
            value => drop(values.insert(section.clone(), value.to_string())),
        }
    }
    Ok(values)
}

/// In how many settings a run differs; `None` where it has no finished dataset.
fn n_different(source: &RunDir, own: &BTreeMap<String, String>) -> anyhow::Result<Option<usize>> {
    if !source.stages().exists() {
        return Ok(None);
    }
    let ledger = Ledger::open(&source.stages())?;
    let config = ledger.finished(StageName::Convert).and_then(|_| load_resolved(&source.config()).ok());
    let Some(theirs) = config.map(|config| prepared_settings(&config)).transpose()? else { return Ok(None) };
    let keys: BTreeSet<&String> = own.keys().chain(theirs.keys()).collect();
    Ok(Some(keys.into_iter().filter(|key| own.get(*key) != theirs.get(*key)).count()))
}

/// Copies the outputs of the finished stages before `rl` to a new run directory. The directory is complete or does not exist. Returns
/// false, without a copy, for a run that another process uses.
fn copy_stages(from: &RunDir, to: &RunDir) -> anyhow::Result<bool> {
    let Ok(_lock) = DirLock::take(from.root()) else { return Ok(false) };
    let ledger = Ledger::open(&from.stages())?;
    let stages: Vec<StageName> = SHARED.into_iter().take_while(|stage| ledger.finished(*stage).is_some()).collect();
    let unwritable = || unwritable(to.root());
    let name = to.root().file_name().unwrap_or_default().to_string_lossy();
    let copied = RunDir::new(to.root().with_file_name(format!(".querl-{name}")));
    // Removes the files of a process that was killed while copying.
    remove_folder(copied.root()).with_context(unwritable)?;
    std::fs::create_dir_all(copied.root()).with_context(unwritable)?;
    let data = |dir: &RunDir| dir.root().join("data");
    copy_folder(&data(from), &data(&copied))?;
    let mut metrics = String::new();
    for stage in &stages {
        metrics += &run_logs::lines_of(from, *stage)?;
        let events = |dir: &RunDir| RunDir::tensorboard(&dir.metrics(), stage.as_str());
        copy_folder(&events(from), &events(&copied))?;
    }
    if stages.contains(&StageName::Sft) {
        copy_folder(&training::best(&from.sft()), &training::best(&copied.sft()))?;
    }
    write_atomic(&copied.metrics(), metrics.as_bytes()).with_context(unwritable)?;
    let mut entries = Ledger::open(&copied.stages())?;
    for stage in &stages {
        entries.put(*stage, ledger.finished(*stage).cloned())?;
    }
    // Removes the files of a process that was killed before its first stage.
    remove_folder(to.root()).with_context(unwritable)?;
    std::fs::rename(copied.root(), to.root()).with_context(unwritable)?;
    Ok(true)
}

fn remove_folder(path: &Path) -> std::io::Result<()> {
    if path.exists() { std::fs::remove_dir_all(path) } else { Ok(()) }
}

/// Copies a folder if it exists. Weights are hard-linked if the file system permits it, because they are never modified in place.
fn copy_folder(from: &Path, to: &Path) -> anyhow::Result<()> {
    if !from.is_dir() {
        return Ok(());
    }
    for entry in std::fs::read_dir(from).with_context(|| format!("{}: cannot be read", from.display()))? {
        let path = entry.with_context(|| format!("{}: cannot be read", from.display()))?.path();
        let target = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy_folder(&path, &target)?;
            continue;
        }
        let is_weights = path.extension().is_some_and(|extension| extension == "safetensors");
        std::fs::create_dir_all(to).with_context(|| unwritable(to))?;
        if !is_weights || std::fs::hard_link(&path, &target).is_err() {
            copy(&path, &target)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Entry, Inputs};
    use querl_core::ports::EnvironmentError;
    use querl_core::records::{self, CallFailure};
    use querl_train::job::{Failure, FailureKind};

    const WHOLE: [StageName; 5] =
        [StageName::Rewrite, StageName::Validate, StageName::Convert, StageName::Sft, StageName::Rl];

    fn prepared(root: &Path, finished: &[StageName]) -> RunDir {
        let dir = RunDir::new(root);
        let mut ledger = Ledger::open(&dir.stages()).unwrap();
        for stage in WHOLE {
            let is_finished = finished.contains(&stage);
            ledger.put(stage, Entry { finished: is_finished, ..Entry::begun(Inputs::default()) }).unwrap();
        }
        for file in
            ["data/train.jsonl", "sft/best/adapter_model.safetensors", "sft/last/x", "rl/best/x", "episodes.jsonl"]
        {
            write_atomic(&dir.root().join(file), file.as_bytes()).unwrap();
        }
        let metrics = "{\"stage\":\"sft\",\"step\":1}\n{\"stage\":\"rl\",\"step\":1}\n";
        write_atomic(&dir.metrics(), metrics.as_bytes()).unwrap();
        dir
    }

    #[test]
    fn finished_stages_before_rl_are_taken_over_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let whole = prepared(&at("whole"), &WHOLE);
        let copied = RunDir::new(at("trials/one"));
        // A killed process had locked the folder.
        write_atomic(&copied.root().join(".in-use"), b"1").unwrap();
        assert!(copy_stages(&whole, &copied).unwrap());
        let has = |dir: &RunDir, file: &str| dir.root().join(file).exists();
        assert!(has(&copied, "data/train.jsonl") && has(&copied, "sft/best/adapter_model.safetensors"));
        assert!(["sft/last", "rl", "episodes.jsonl", "calls.json"].into_iter().all(|file| !has(&copied, file)));
        let ledger = Ledger::open(&copied.stages()).unwrap();
        assert!(ledger.finished(StageName::Sft).is_some() && ledger.entry(StageName::Rl).is_none());
        assert_eq!(std::fs::read_to_string(copied.metrics()).unwrap(), "{\"stage\":\"sft\",\"step\":1}\n");

        let half = prepared(&at("half"), &WHOLE[..3]);
        let copied = RunDir::new(at("trials/two"));
        assert!(copy_stages(&half, &copied).unwrap());
        assert!(has(&copied, "data/train.jsonl") && !has(&copied, "sft"));
        assert!(Ledger::open(&copied.stages()).unwrap().entry(StageName::Sft).is_none());
    }

    #[test]
    fn nothing_is_taken_from_a_run_that_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let source = prepared(&folder.path().join("source"), &WHOLE[..3]);
        let _lock = DirLock::take(source.root()).unwrap();
        let copied = RunDir::new(folder.path().join("one"));
        assert!(!copy_stages(&source, &copied).unwrap());
        assert!(!copied.root().exists());
    }

    #[test]
    fn a_collapse_is_a_limit_of_the_training_and_not_of_the_budget() {
        let failure = Failure { kind: FailureKind::Limit, message: "rl step 3: 9 of 9 episodes were dropped".into() };
        let noise = Stop::limit("the model is noise after sft");
        for collapse in [anyhow::Error::from(Stop::of(failure)).context("stage rl"), noise.into()] {
            assert!(ending_of(&collapse) == Ending::Limit && is_collapse(&collapse), "{collapse:?}");
        }
        let call = CallFailure { kind: records::FailureKind::OverBudget, message: "the budget is spent".into() };
        let budget = anyhow::Error::from(EnvironmentError::Service(call)).context("stage rl");
        assert!(ending_of(&budget) == Ending::Limit && !is_collapse(&budget));
    }
}
