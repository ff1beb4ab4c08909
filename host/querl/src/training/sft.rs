//! Fine-tuning, wired.

use super::{Sink, ending, lora};
use crate::failure::Stop;
use crate::interrupt;
use crate::lengths::{self, Limit, RowLength};
use crate::metrics_log::MetricsLog;
use crate::run::Run;
use crate::stages::facts::Facts;
use querl_core::config::TuningMethod;
use querl_core::ports::Progress;
use querl_core::records::{DatasetRow, Split};
use querl_model::{Decoder, LoraAdapter, ModelError, TextTokenizer, Weights};
use querl_train::sft::{self, SftTask};
use querl_train::{Example, Policy};

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
    let weights = match config.sft.method {
        TuningMethod::Lora => Weights::Frozen,
        TuningMethod::Full => Weights::Trained,
    };
    let decoder = Decoder::load_as(&config.model.path, weights, config.model.dtype)?;
    let adapter = match config.sft.method {
        TuningMethod::Lora => Some(LoraAdapter::new(&decoder, lora(config), config.seed)?),
        TuningMethod::Full => None,
    };
    let (train_rows, val_rows) = (train, val);
    let (train, val) = (examples(train_rows, &tokenizer)?, examples(val_rows, &tokenizer)?);
    let limits = [Limit::SftMaxLength(config.sft.max_length), Limit::Learned(decoder.config().max_positions)];
    check_examples(Split::Train, train_rows, &train, &limits)?;
    check_examples(Split::Val, val_rows, &val, &limits)?;
    let task = SftTask {
        policy: Policy { decoder: &decoder, adapter: adapter.as_ref() },
        base_path: &config.model.path,
        train: &train,
        val: &val,
        config: &config.sft,
        tokens_per_pass: config.model.tokens_per_pass,
        gradient_checkpointing: config.model.gradient_checkpointing,
        seed: config.seed,
        fingerprint: Some(fingerprint),
        output_dir: &run.dir.sft(),
        progress,
        stop: interrupt::flag(),
    };
    let summary = sft::train(&task, &mut Sink(metrics)).map_err(ending)?;
    let mut facts = Facts::default();
    facts.add("rows", train.len()).add("steps", summary.n_steps).add("answer tokens", summary.n_tokens);
    facts.add("train loss", summary.train_loss).add("eval loss", summary.best_val_loss);
    facts.add("best step", summary.best_step);
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
