//! `querl model pretrain`: a small model of one domain from a text: tokenizer, random weights, training.

use crate::args::usage;
use crate::terminal::{self, StageProgress};
use anyhow::Context;
use querl_core::config::SftConfig;
use querl_core::fsx::{digest_file, digest_hex, read_jsonl};
use querl_core::records::Message;
use querl_model::{Decoder, DecoderConfig, Mesh, TextTokenizer, small_model};
use querl_pipeline::failure::{Stop, ending};
use querl_pipeline::interrupt;
use querl_pipeline::metrics_log::MetricsLog;
use querl_train::sft::{self, SftTask};
use querl_train::{Example, Policy, STATE, TrainError};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// What to make and from what; paths are relative to the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PretrainConfig {
    corpus: PathBuf,
    output_dir: PathBuf,
    seed: u64,
    vocab_size: usize,
    model: small_model::Shape,
    train: SftConfig,
}

/// A line of the corpus: a text, or a conversation whose answer is learned.
#[derive(Deserialize)]
#[serde(untagged)]
enum CorpusLine {
    Text { text: String },
    Chat { messages: Vec<Message> },
}

pub(super) fn run(path: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(path).map_err(|error| usage(format!("{}: {error}", path.display())))?;
    let config: PretrainConfig = toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        usage(format!("{}:{line}: {}", path.display(), error.message()))
    })?;
    check(&config).map_err(|complaint| usage(format!("{}: {complaint}", path.display())))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let (corpus, output) = (folder.join(&config.corpus), folder.join(&config.output_dir));
    let lines: Vec<CorpusLine> = read_jsonl(&corpus).map_err(usage)?;
    let texts: Vec<String> = lines.iter().flat_map(texts_of).collect();
    // In a folder of its own until it is complete: an old model is never replaced in part.
    let (work, new) = (output.join(WORK), output.join(WORK).join("model"));
    std::fs::create_dir_all(&new).with_context(|| format!("{}: cannot be made", new.display()))?;
    let corpus_digest = digest_file(&corpus).with_context(|| format!("{}: cannot be read", corpus.display()))?;
    let fingerprint =
        digest_hex(format!("{} {} {corpus_digest} {text}", env!("CARGO_PKG_VERSION"), config.seed).as_bytes());
    let made = small_model::write_files(&new, &texts, config.vocab_size, &config.model)
        .map_err(|error| usage(format!("{}: no model can be made of it: {error}", path.display())).into())
        .and_then(|decoder_config| make(decoder_config, &lines, &config, &new, &fingerprint));
    made.inspect_err(|_| {
        // Kept where there is something to resume from.
        if !work.join(STATE).exists() {
            let _ = std::fs::remove_dir_all(&work);
        }
    })?;
    // An earlier model is not replaced in part.
    let _at_safe_points = interrupt::at_safe_points();
    move_files(&new, &output).with_context(|| format!("{}: cannot be written", output.display()))?;
    std::fs::remove_dir_all(&work).with_context(|| format!("{}: cannot be removed", work.display()))?;
    terminal::print(&format!("written to {}", output.display()));
    Ok(())
}

/// Trains a model from random weights and writes it to the folder of its tokenizer.
fn make(
    decoder_config: DecoderConfig,
    lines: &[CorpusLine],
    config: &PretrainConfig,
    new: &Path,
    fingerprint: &str,
) -> anyhow::Result<()> {
    let tokenizer = TextTokenizer::load(new)?;
    let examples: Vec<Example> = lines.iter().map(|line| example(line, &tokenizer)).collect::<anyhow::Result<_>>()?;
    let decoder = Decoder::init(decoder_config, config.seed)?;
    terminal::print(&format!("{} parameters, {} examples", decoder.config().n_parameters(), examples.len()));
    train(&decoder, &examples, config, new, fingerprint)?;
    Ok(decoder.save(new, small_model::STORED_DTYPE)?)
}

/// What of `[train]` cannot be used; adapters have no place in a model that is made from nothing.
fn check(config: &PretrainConfig) -> Result<(), String> {
    let train = &config.train;
    let counts = [
        ("batch_size", train.batch_size),
        ("gradient_accumulation_steps", train.gradient_accumulation_steps),
        ("epochs", train.epochs),
    ];
    if let Some((key, _)) = counts.into_iter().find(|(_, value)| *value == 0) {
        return Err(format!("train.{key} is 0; expected at least 1"));
    }
    if !(train.learning_rate > 0.0 && train.learning_rate <= 1.0) {
        return Err(format!("train.learning_rate is {}; expected more than 0, at most 1", train.learning_rate));
    }
    Ok(())
}

fn move_files(from: &Path, to: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        std::fs::rename(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}

/// Folder in the output for checkpoints and the unfinished model; removed at the end.
const WORK: &str = ".pretrain";

fn train(
    decoder: &Decoder,
    examples: &[Example],
    config: &PretrainConfig,
    new: &Path,
    fingerprint: &str,
) -> anyhow::Result<()> {
    let work = new.parent().context("the folder of the new model has no parent")?;
    let progress = StageProgress::start("pretrain");
    let task = SftTask {
        policy: Policy { decoder, adapter: None },
        base_path: new,
        train: examples,
        val: &[],
        config: &config.train,
        tokens_per_pass: TOKENS_PER_PASS,
        gradient_checkpointing: false,
        seed: config.seed,
        mesh: &Mesh::alone(),
        fingerprint: Some(fingerprint),
        output_dir: work,
        progress: &progress,
        stop: interrupt::flag(),
    };
    let mut sink = MetricsLog::open(&work.join("metrics.jsonl"), "sft")?;
    let summary = sft::train(&task, &mut sink).map_err(|error| match error {
        TrainError::Interrupted { step, .. } => {
            Stop::interrupted(format!("interrupted at step {step}; the same command resumes there")).into()
        }
        error => ending(error.into()),
    })?;
    terminal::print(&format!("{} steps, final loss {:.3}", summary.n_steps, summary.train_loss));
    Ok(())
}

/// Most tokens of one forward and backward pass: small models need little memory for each.
const TOKENS_PER_PASS: usize = 8192;

fn texts_of(line: &CorpusLine) -> Vec<String> {
    match line {
        CorpusLine::Text { text } => vec![text.clone()],
        CorpusLine::Chat { messages } => messages.iter().map(|message| message.content.clone()).collect(),
    }
}

/// A text is learned from its first token on, behind an end of text; of a conversation only the answer is learned.
fn example(line: &CorpusLine, tokenizer: &TextTokenizer) -> anyhow::Result<Example> {
    Ok(match line {
        CorpusLine::Text { text } => {
            Example { prompt: vec![small_model::END_OF_TEXT_ID], response: tokenizer.encode(text)? }
        }
        CorpusLine::Chat { messages } => {
            let (answer, prompt) = messages
                .split_last()
                .ok_or_else(|| usage("corpus: a conversation without messages; remove its line"))?;
            Example { prompt: tokenizer.encode_prompt(prompt)?, response: tokenizer.encode_response(&answer.content)? }
        }
    })
}
