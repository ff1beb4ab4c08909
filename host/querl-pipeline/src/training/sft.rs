//! Fine-tuning, wired.

use super::host::StageHost;
use super::{add_device, job, memory, other_outcome};
use crate::failure::{Stop, ending};
use crate::ledger::Facts;
use crate::lengths::{self, Limit, RowLength};
use crate::metrics_log::MetricsLog;
use crate::run::Run;
use querl_core::ports::Progress;
use querl_core::records::{DatasetRow, Split};
use querl_device::memory::Stage;
use querl_device::{Fitting, Outcome, Work};
use querl_model::{DecoderConfig, ModelError, TextTokenizer};
use querl_train::Example;

/// Fine-tunes on the rows that have an answer. A checkpoint is gone on from if it has the same `fingerprint`.
///
/// # Errors
/// The model cannot be loaded or trained, or the user said stop.
pub fn sft(
    run: &Run,
    train: &[DatasetRow],
    val: &[DatasetRow],
    fingerprint: &str,
    metrics: MetricsLog,
    progress: &dyn Progress,
) -> anyhow::Result<Facts> {
    let config = &run.config;
    let tokenizer = TextTokenizer::load(&config.model.path)?;
    let n_positions = DecoderConfig::load(&config.model.path.join("config.json"))?.max_positions;
    let (train_rows, val_rows) = (train, val);
    let (train, val) = (examples(train_rows, &tokenizer)?, examples(val_rows, &tokenizer)?);
    let limits = [Limit::SftMaxLength(config.sft.max_length), Limit::Learned(n_positions)];
    check_examples(Split::Train, train_rows, &train, &limits)?;
    check_examples(Split::Val, val_rows, &val, &limits)?;
    let longest_row = train.iter().chain(&val).map(Example::len).max().unwrap_or(0);
    let asked = memory::asked(config, Stage::Sft { config: config.sft.clone(), longest_row })?;
    let (n_rows, fingerprint) = (train.len(), Some(fingerprint.to_owned()));
    let work = Fitting { config: config.sft.clone(), train, val, fingerprint, output_dir: run.dir.sft() };
    let job = job(run, config.model.path.clone(), Work::Sft(work));
    let host = StageHost::new(progress).with_metrics(metrics);
    memory::check(run.place.card(), &asked, progress)?;
    let explained = |error| ending(memory::explain(run.place.card(), &asked, error));
    let Outcome::Sft(summary) = run.place.run(&job, &host).map_err(explained)? else { return Err(other_outcome()) };
    let mut facts = Facts::default();
    facts.add("rows", n_rows).add("steps", summary.n_steps).add("answer tokens", summary.n_tokens);
    facts.add("train loss", summary.train_loss).add("eval loss", summary.best_val_loss);
    facts.add("best step", summary.best_step);
    add_device(&mut facts, run);
    Ok(facts)
}

/// Looks whether the rows to learn from fit `sft.max_length` and the model.
fn check_examples(split: Split, rows: &[DatasetRow], examples: &[Example], limits: &[Limit]) -> Result<(), Stop> {
    let answered = rows.iter().filter(|row| row.target().is_some());
    let lengths = examples.iter().map(|row| RowLength { prompt: row.prompt.len(), answer: row.response.len() });
    lengths::check(split, answered.zip(lengths), limits)
}

/// Rows that have an answer, as tokens.
fn examples(rows: &[DatasetRow], tokenizer: &TextTokenizer) -> Result<Vec<Example>, ModelError> {
    let answered = rows.iter().filter_map(|row| Some((row.prompt(), row.target()?)));
    answered
        .map(|(prompt, target)| {
            Ok(Example { prompt: tokenizer.encode_prompt(prompt)?, response: tokenizer.encode_response(target)? })
        })
        .collect()
}
