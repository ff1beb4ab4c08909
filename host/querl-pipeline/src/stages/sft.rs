//! Stage 4: supervised fine-tuning on the rewrites that passed the filters.

use super::leaks;
use super::stage::{Done, Stage, remove};
use crate::ledger::{Facts, Inputs, Ledger, StageName, rows_of};
use crate::metrics_log::{self, MetricsLog};
use crate::run::Run;
use crate::training;
use querl_core::ports::Progress;
use querl_core::records::{DatasetRow, Split};
use querl_core::run_dir::RunDir;
use std::path::PathBuf;

/// The stage.
pub struct Sft;

impl Stage for Sft {
    fn name(&self) -> StageName {
        StageName::Sft
    }

    fn inputs(&self, run: &Run, ledger: &Ledger) -> anyhow::Result<Inputs> {
        let mut inputs = Inputs::default();
        inputs.section("sft", &run.config.sft, &["save_steps", "save_total_limit"])?;
        inputs.text("seed", run.config.seed).text("model.dtype", run.config.model.dtype.name());
        inputs.model(&run.config.model.path)?;
        for split in [Split::Train, Split::Val] {
            inputs.made_by(ledger, StageName::Convert, &run.dir.split(split))?;
        }
        Ok(inputs)
    }

    fn permit(&self, run: &Run, _: StageName, progress: &dyn Progress) -> anyhow::Result<Facts> {
        leaks::before_training(run, progress)
    }

    fn reminder(&self, run: &Run, facts: &Facts) -> Option<String> {
        leaks::reminder(run, self.name(), facts)
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![training::best(&dir.sft())]
    }

    fn clean(&self, dir: &RunDir) -> std::io::Result<()> {
        remove(&dir.sft())?;
        metrics_log::remove_stage(&dir.metrics(), "sft")
    }

    fn settle(&self, dir: &RunDir) -> std::io::Result<()> {
        remove(&training::state(&dir.sft()))
    }

    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done> {
        let fingerprint =
            self.inputs(run, &Ledger::open(&run.dir.stages())?)?.fingerprint(&run.config.model, run.place.arithmetic());
        let train: Vec<DatasetRow> = rows_of(&run.dir.split(Split::Train))?;
        let val: Vec<DatasetRow> = rows_of(&run.dir.split(Split::Val))?;
        let metrics = MetricsLog::open(&run.dir.metrics(), self.name().as_str())?;
        let facts = training::sft(run, &train, &val, &fingerprint, metrics, progress)?;
        Ok(Done { facts, n_failed: 0 })
    }
}
