//! Stage 3: filters keep or drop, and the rows become train, val and test.

use super::ledger::Ledger;
use super::{Done, Facts, Inputs, Stage, StageName, mean, rows_of, teacher_name};
use crate::run::Run;
use anyhow::Context;
use querl_core::fsx::write_jsonl;
use querl_core::ports::Progress;
use querl_core::records::{DatasetRow, Split, ValidatedRecord};
use querl_core::run_dir::RunDir;
use querl_data::{Converted, convert};
use std::path::PathBuf;

/// The stage.
pub struct Convert;

impl Stage for Convert {
    fn name(&self) -> StageName {
        StageName::Convert
    }

    fn inputs(&self, run: &Run, ledger: &Ledger) -> anyhow::Result<Inputs> {
        let mut inputs = Inputs::default();
        inputs.section("data", &run.config.data, &["input"])?;
        inputs.made_by(ledger, StageName::Validate, &run.dir.validated())?;
        inputs.text("teacher", teacher_name(&run.dir)?);
        run.plugins.add_prompts(&mut inputs);
        run.plugins.add_filters(&mut inputs);
        Ok(inputs)
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        let mut outputs: Vec<PathBuf> = Split::ALL.into_iter().map(|split| dir.split(split)).collect();
        outputs.push(dir.dropped());
        outputs
    }

    fn execute(&self, run: &Run, _: &dyn Progress) -> anyhow::Result<Done> {
        let records: Vec<ValidatedRecord> = rows_of(&run.dir.validated())?;
        let teacher = teacher_name(&run.dir)?;
        let plugins = &run.plugins;
        let converted = convert(&records, plugins.prompts.as_ref(), &plugins.filters, &run.config.data, &teacher)?;
        for (split, rows) in Split::ALL.into_iter().zip(&converted.splits) {
            let path = run.dir.split(split);
            write_jsonl(&path, rows).with_context(|| format!("{}: cannot be written", path.display()))?;
        }
        let path = run.dir.dropped();
        write_jsonl(&path, &converted.dropped).with_context(|| format!("{}: cannot be written", path.display()))?;
        Ok(Done { facts: facts(&converted), n_failed: 0 })
    }
}

fn facts(converted: &Converted) -> Facts {
    let kept = || converted.splits.iter().flatten().filter(|row| row.target().is_some());
    let mut facts = Facts::default();
    facts.add("kept", kept().count());
    facts.add("dropped", converted.dropped.len());
    facts.add_parts(&converted.counts.iter().map(|(code, n)| (code.clone(), *n as u64)).collect());
    facts.add("rows for training and evaluation", converted.splits.iter().map(Vec::len).sum::<usize>());
    for (split, rows) in Split::ALL.into_iter().zip(&converted.splits) {
        facts.add_part(split.name(), rows.len() as u64);
    }
    facts.add("mean top1 of the kept", mean(kept().filter_map(top1_score)));
    facts
}

fn top1_score(row: &DatasetRow) -> Option<f64> {
    row.metadata.top1_score
}
