//! Stage 4: supervised fine-tuning on the rewrites that passed the filters.

use super::stage::{self, Done, Stage, has_content, remove};
use super::{leaks, noise};
use crate::failure::{Stop, ending};
use crate::interrupt;
use crate::ledger::{Facts, Inputs, Ledger, StageName, rows_of};
use crate::metrics_log::MetricsLog;
use crate::run::Run;
use crate::training::{self, RowLength, TokenLimit, memory};
use querl_core::ports::Progress;
use querl_core::records::{DatasetRow, Split};
use querl_core::run_dir::RunDir;
use querl_model::{DecoderConfig, ModelError, TextTokenizer};
use querl_train::Example;
use querl_train::job::memory_plan::{MemoryRequest, PlannedStage};
use querl_train::job::{Callbacks, SftJob};
use std::path::PathBuf;
use std::sync::Mutex;

/// Keys that do not change the result.
const WITHOUT_EFFECT: [&str; 4] = ["save_steps", "save_interval_s", "save_total_limit", "on_noise"];

pub(crate) struct Sft;

impl Stage for Sft {
    fn name(&self) -> StageName {
        StageName::Sft
    }

    fn inputs(&self, run: &Run, ledger: &Ledger) -> anyhow::Result<Inputs> {
        let mut inputs = Inputs::default();
        inputs.section("sft", &run.config.sft, &WITHOUT_EFFECT)?;
        inputs.text("seed", run.config.seed).text("model.dtype", run.config.model.dtype.name());
        stage::add_thinking(&mut inputs, &run.config);
        inputs.model("model", &run.config.model.path)?;
        for split in [Split::Train, Split::Val] {
            inputs.made_by(ledger, StageName::Convert, &run.dir.split(split))?;
        }
        stage::add_expansion(&mut inputs, run, ledger)?;
        Ok(inputs)
    }

    fn permit(&self, run: &Run, _: StageName, progress: &dyn Progress) -> anyhow::Result<Facts> {
        let facts = leaks::before_training(run, progress)?;
        let (_, request) = job(run, String::new())?;
        memory::check(run.executor.gpu(), &request, progress)?;
        Ok(facts)
    }

    fn reminder(&self, run: &Run, facts: &Facts) -> Option<String> {
        leaks::reminder(run, self.name(), facts)
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![training::best(&dir.sft())]
    }

    fn owned(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.sft()]
    }

    fn is_resumable(&self, dir: &RunDir) -> bool {
        has_content(&training::state(&dir.sft()))
    }

    fn settle(&self, dir: &RunDir) -> std::io::Result<()> {
        remove(&training::state(&dir.sft()))
    }

    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done> {
        let fingerprint = self
            .inputs(run, &Ledger::open(&run.dir.stages())?)?
            .fingerprint(&run.config.model, run.executor.arithmetic());
        let metrics = Mutex::new(MetricsLog::open(&run.dir.metrics(), self.name().as_str())?);
        let callbacks = Callbacks { progress, metrics: &metrics, stop: interrupt::flag() };
        let (job, request) = job(run, fingerprint)?;
        let summary = run.executor.run_sft(&job, run.config.threads, &callbacks);
        let summary = summary.map_err(|error| ending(memory::explain(run.executor.gpu(), &request, error)))?;
        let mut facts = Facts::default();
        facts.add("rows", job.train.len()).add("steps", summary.n_steps).add("answer tokens", summary.n_tokens);
        facts.add("train loss", summary.train_loss).add(noise::EVAL_LOSS, summary.best_val_loss);
        facts.add(noise::UNIGRAM_LOSS, noise::unigram_loss(&job.train, &job.val));
        if let Some((_, share)) = noise::equal_share(job.train.iter().map(|row| &row.response)) {
            facts.add(noise::EQUAL_TARGETS, share);
        }
        facts.add("best step", summary.best_step);
        training::add_device(&mut facts, run);
        Ok(Done { facts, n_failed: 0 })
    }
}

/// The job, and the request for its memory plan.
fn job(run: &Run, fingerprint: String) -> anyhow::Result<(SftJob, MemoryRequest)> {
    let config = &run.config;
    let train_rows: Vec<DatasetRow> = rows_of(&run.dir.split(Split::Train))?;
    let val_rows: Vec<DatasetRow> = rows_of(&run.dir.split(Split::Val))?;
    let tokenizer = TextTokenizer::for_policy(&config.model)?;
    let n_positions = DecoderConfig::load(&config.model.path.join("config.json"))?.max_positions;
    let (train, val) = (examples(&train_rows, &tokenizer)?, examples(&val_rows, &tokenizer)?);
    let limits = [TokenLimit::SftMaxLength(config.sft.max_length), TokenLimit::Learned(n_positions)];
    check_lengths(Split::Train, &train_rows, &train, &limits)?;
    check_lengths(Split::Val, &val_rows, &val, &limits)?;
    let longest_row = train.iter().chain(&val).map(Example::len).max().unwrap_or(0);
    let request = memory::request(config, PlannedStage::Sft { config: config.sft.clone(), longest_row })?;
    let job = SftJob {
        model: config.model.clone(),
        seed: config.seed,
        config: config.sft.clone(),
        train,
        val,
        fingerprint: Some(fingerprint),
        output_dir: run.dir.sft(),
    };
    Ok((job, request))
}

/// Checks rows against `sft.max_length` and the model's positions.
fn check_lengths(split: Split, rows: &[DatasetRow], examples: &[Example], limits: &[TokenLimit]) -> Result<(), Stop> {
    let with_target = rows.iter().filter(|row| row.target().is_some());
    let lengths = examples.iter().map(|row| RowLength { prompt: row.prompt.len(), answer: row.response.len() });
    training::check_lengths(split, with_target.zip(lengths), limits)
}

fn examples(rows: &[DatasetRow], tokenizer: &TextTokenizer) -> Result<Vec<Example>, ModelError> {
    let pairs = rows.iter().filter_map(|row| Some((row.prompt(), row.target()?)));
    pairs
        .map(|(prompt, target)| {
            Ok(Example { prompt: tokenizer.encode_prompt(prompt)?, response: tokenizer.encode_response(target)? })
        })
        .collect()
}
