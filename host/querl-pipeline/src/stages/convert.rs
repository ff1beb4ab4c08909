//! Stage 3: filters keep or drop rows, and the kept rows are split into train, val and test.

use super::edit_targets::{EditTargets, FORMS, edit_targets, form_of};
use super::expansion::{Expansion, UsedExpansion, expansion};
use super::stage::{self, Done, Mean, Stage};
use crate::ledger::{Facts, Inputs, Ledger, StageName, rows_of, teacher_name};
use crate::run::Run;
use anyhow::Context as _;
use querl_core::config::RewriteForm;
use querl_core::edits::ARE_EDITS;
use querl_core::ports::Progress;
use querl_core::records::{Split, ValidatedRecord};
use querl_core::run_dir::RunDir;
use querl_data::{Conversion, ConvertedRow, DataError, RecordFile, RecordWriter, convert};
use std::collections::BTreeMap;
use std::path::PathBuf;

pub(crate) struct Convert;

impl Stage for Convert {
    fn name(&self) -> StageName {
        StageName::Convert
    }

    fn inputs(&self, run: &Run, ledger: &Ledger) -> anyhow::Result<Inputs> {
        let mut inputs = Inputs::default();
        // Width was already applied, and the leak settings do not change rows.
        let except = ["input", "dataset", "export", "width", "leak_similarity", "on_leak"];
        inputs.section("data", &run.config.data, &except)?;
        inputs.made_by(ledger, StageName::Validate, &run.dir.validated())?;
        inputs.text("teacher", teacher_name(&run.dir)?);
        ["prompt", "filter"].iter().for_each(|role| run.plugins.add_inputs(&mut inputs, role));
        // For a dataset: the prompts, and the files that define the splits.
        if run.config.data.dataset.is_set() || conversion(run, "", &EditTargets::default(), None).reads_columns() {
            stage::add_queries(&mut inputs, &run.config.data)?;
        }
        stage::add_target_forms(&mut inputs, &run.config);
        if run.config.data.rewrite_form == RewriteForm::Edit {
            stage::add_retrieval(&mut inputs, &run.config)?;
        } else if run.plugins.filters_use_words {
            stage::add_vocabulary(&mut inputs, &run.config)?;
        }
        Ok(inputs)
    }

    fn check(&self, run: &Run) -> anyhow::Result<()> {
        match run.config.data.rewrite_form {
            RewriteForm::Full => Ok(()),
            RewriteForm::Edit => run.retriever().map(drop),
        }
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        let mut outputs: Vec<PathBuf> = Split::ALL.into_iter().map(|split| dir.split(split)).collect();
        outputs.push(dir.dropped());
        outputs
    }

    fn optional_outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.expansion()]
    }

    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done> {
        let records = RecordFile::<ValidatedRecord>::new(&run.dir.validated());
        let teacher_name = teacher_name(&run.dir)?;
        let (expansion, targets) = match run.config.data.rewrite_form {
            RewriteForm::Full => (Expansion::default(), EditTargets::default()),
            RewriteForm::Edit => edits(run, progress)?,
        };
        let conversion = conversion(run, &teacher_name, &targets, expansion.used.as_ref());
        let mut dataset = Dataset::create(&run.dir, run.config.data.rewrite_form)?;
        let n_other_prompts = convert(&records, &conversion, &mut |made| dataset.put(&made))?;
        if n_other_prompts > 0 {
            progress.line(&format!(
                "warning: {n_other_prompts} row(s) of data.dataset have another prompt than plugins.prompt writes: the model is trained and \
                 evaluated with that of the dataset, and `querl serve rewrite` asks it as the plugin does"
            ));
        }
        let mut facts = dataset.commit()?;
        match &expansion.used {
            Some(UsedExpansion { model, .. }) => {
                model.write(&run.dir.expansion())?;
                if model.n_terms() > 0 {
                    facts.add("words that expansion terms are chosen from", model.n_terms());
                }
            }
            None => stage::remove(&run.dir.expansion()).context("data/expansion.json cannot be removed")?,
        }
        let n_failed = targets.failed.union(&expansion.failed).count() as u64;
        if run.config.data.rewrite_form == RewriteForm::Edit {
            progress.line(&format!("targets {ARE_EDITS}"));
        }
        if n_failed > 0 {
            facts.add("rows whose lookup failed", n_failed);
        }
        if !targets.failed.is_empty() {
            progress.line(&format!(
                "{} rows keep the teacher's rewrite because a lookup failed; run convert again",
                targets.failed.len()
            ));
        }
        Ok(Done { facts, n_failed })
    }
}

/// Expansions and targets of the rows that have a teacher's rewrite.
fn edits(run: &Run, progress: &dyn Progress) -> anyhow::Result<(Expansion, EditTargets)> {
    let mut records: Vec<ValidatedRecord> = rows_of(&run.dir.validated())?;
    let expansion = expansion(run, &records, progress)?;
    if let Some(UsedExpansion { by_id, .. }) = &expansion.used {
        let queries = records.iter_mut().map(|record| &mut record.rewritten.query);
        queries.for_each(|query| query.expansion = by_id.get(&query.id).cloned());
    }
    Ok((expansion, edit_targets(run, records)?))
}

fn conversion<'a>(
    run: &'a Run,
    teacher_name: &'a str,
    targets: &'a EditTargets,
    expansion: Option<&'a UsedExpansion>,
) -> Conversion<'a> {
    let (prompts, filters, config) = (run.plugins.prompts.as_ref(), &run.plugins.filters, &run.config.data);
    let expansions = expansion.map(|expansion| &expansion.by_id);
    Conversion { prompts, filters, config, teacher_name, targets: &targets.by_id, expansions }
}

/// Output files of the stage while they are written, with counts of their rows.
struct Dataset {
    splits: [RecordWriter; 3],
    dropped: RecordWriter,
    codes: BTreeMap<String, u64>,
    n_kept: u64,
    /// Kept rows of the training split.
    n_for_sft: u64,
    form: RewriteForm,
    /// Kept targets by [`FORMS`].
    n_by_form: [u64; 4],
    top1: Mean,
}

impl Dataset {
    fn create(dir: &RunDir, form: RewriteForm) -> Result<Self, DataError> {
        let [train, val, test] = Split::ALL.map(|split| RecordWriter::create(&dir.split(split)));
        let (splits, dropped) = ([train?, val?, test?], RecordWriter::create(&dir.dropped())?);
        let (codes, n_by_form, top1) = (BTreeMap::new(), [0; 4], Mean::default());
        Ok(Self { splits, dropped, codes, n_kept: 0, n_for_sft: 0, form, n_by_form, top1 })
    }

    fn put(&mut self, made: &ConvertedRow) -> Result<(), DataError> {
        match made {
            ConvertedRow::Dropped(row) => {
                *self.codes.entry(row.code.clone()).or_default() += 1;
                self.dropped.add(row)
            }
            ConvertedRow::Row(split, row) => {
                if let Some(target) = row.target() {
                    self.n_kept += 1;
                    self.n_for_sft += u64::from(*split == Split::Train);
                    self.n_by_form[form_of(target)] += 1;
                    row.metadata.top1_score.into_iter().for_each(|score| self.top1.add(score));
                }
                self.splits[*split as usize].add(row)
            }
        }
    }

    fn commit(self) -> Result<Facts, DataError> {
        let mut facts = Facts::default();
        facts.add("kept", self.n_kept);
        if self.form == RewriteForm::Edit {
            for (name, n) in FORMS.into_iter().zip(self.n_by_form) {
                facts.add_part(name, n);
            }
        }
        facts.add("dropped", self.dropped.n()).add_parts(&self.codes);
        facts.add("rows for training and evaluation", self.splits.iter().map(RecordWriter::n).sum::<u64>());
        for (split, rows) in Split::ALL.into_iter().zip(&self.splits) {
            facts.add_part(split.name(), rows.n());
        }
        facts.add("kept rows of train, for sft", self.n_for_sft);
        facts.add("mean score of the first hit of the kept", self.top1.value());
        self.splits.into_iter().chain([self.dropped]).try_for_each(RecordWriter::commit)?;
        Ok(facts)
    }
}
