//! `querl model`: look at a model, make a small one.

use crate::failure::Stop;
use crate::interrupt;
use crate::metrics_log::MetricsLog;
use crate::terminal::{self, StageProgress};
use crate::training::{Sink, ending};
use anyhow::Context;
use clap::{Args, Subcommand};
use querl_core::config::SftConfig;
use querl_core::fsx::read_jsonl;
use querl_core::records::Message;
use querl_model::{Decoder, LoraAdapter, PackedBatch, TextTokenizer, Weights, small_model};
use querl_train::sft::{self, SftTask};
use querl_train::{Example, Policy};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};

/// The commands under `querl model`.
#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Say what a model directory holds
    Inspect {
        /// A Hugging Face directory
        #[arg(value_name = "DIR")]
        model: PathBuf,
    },
    /// Log-probability of each token of each line, given those before it
    Logprobs(LogprobsArgs),
    /// Make a small model of one domain from a text: tokenizer, random weights, training
    Pretrain {
        /// What to make and from what
        #[arg(value_name = "CONFIG")]
        config: PathBuf,
    },
}

/// What `querl model logprobs` takes.
#[derive(Debug, Args)]
pub(crate) struct LogprobsArgs {
    /// A Hugging Face directory
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A PEFT adapter
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Lines of {"token_ids": [...]} or {"text": "..."}
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
}

/// Runs one of them.
///
/// # Errors
/// A file cannot be used, or training fails.
pub(crate) fn run(command: &ModelCommand) -> anyhow::Result<()> {
    match command {
        ModelCommand::Inspect { model } => inspect(model),
        ModelCommand::Logprobs(args) => logprobs(args),
        ModelCommand::Pretrain { config } => pretrain(config),
    }
}

fn usage(error: impl std::fmt::Display) -> Stop {
    Stop::usage(error.to_string())
}

fn inspect(model: &Path) -> anyhow::Result<()> {
    let tokenizer = TextTokenizer::load(model).map_err(usage)?;
    let decoder = Decoder::load(model, Weights::Frozen).map_err(usage)?;
    let config = decoder.config();
    let mut out = std::io::stdout();
    writeln!(out, "family          {:?}", config.family)?;
    writeln!(out, "parameters      {}", config.n_parameters())?;
    writeln!(
        out,
        "layers          {} of width {}, feed-forward {}",
        config.n_layers, config.hidden_size, config.intermediate_size
    )?;
    writeln!(
        out,
        "heads           {} of width {}, {} for keys and values",
        config.n_heads, config.head_dim, config.n_kv_heads
    )?;
    writeln!(out, "vocabulary      {} (tokenizer {})", config.vocab_size, tokenizer.vocab_size())?;
    writeln!(out, "positions       {}", config.max_positions)?;
    writeln!(out, "tied embedding  {}", config.tie_word_embeddings)?;
    Ok(())
}

#[derive(Deserialize)]
#[serde(untagged)]
enum LogprobsInput {
    Tokens { token_ids: Vec<u32> },
    Text { text: String },
}

#[derive(Serialize)]
struct LogprobsOutput {
    token_ids: Vec<u32>,
    logprobs: Vec<Option<f32>>,
}

fn logprobs(args: &LogprobsArgs) -> anyhow::Result<()> {
    let decoder = Decoder::load(&args.model, Weights::Frozen).map_err(usage)?;
    let adapter = args.adapter.as_ref().map(|path| LoraAdapter::load(path, decoder.config())).transpose();
    let adapter = adapter.map_err(usage)?;
    let file = std::fs::File::open(&args.input).map_err(|error| usage(format!("{}: {error}", args.input.display())))?;
    let mut tokenizer = None;
    let mut out = std::io::stdout().lock();
    for (index, line) in std::io::BufReader::new(file).lines().enumerate() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let place = || format!("{}:{}", args.input.display(), index + 1);
        let input: LogprobsInput = serde_json::from_str(&line)
            .map_err(|_| usage(format!("{}: expected {{\"token_ids\": [...]}} or {{\"text\": \"...\"}}", place())))?;
        let token_ids = match input {
            LogprobsInput::Tokens { token_ids } => token_ids,
            LogprobsInput::Text { text } => {
                if tokenizer.is_none() {
                    tokenizer = Some(TextTokenizer::load(&args.model).map_err(usage)?);
                }
                tokenizer.as_ref().map_or(Ok(Vec::new()), |tokenizer| tokenizer.encode(&text))?
            }
        };
        let output = line_logprobs(&decoder, adapter.as_ref(), token_ids).with_context(place)?;
        serde_json::to_writer(&mut out, &output)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

fn line_logprobs(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    token_ids: Vec<u32>,
) -> anyhow::Result<LogprobsOutput> {
    let (n_known, n_positions) = (decoder.config().vocab_size, decoder.config().max_positions);
    if let Some(id) = token_ids.iter().find(|&&id| id as usize >= n_known) {
        return Err(usage(format!("token id {id} is outside the vocabulary of {n_known}")).into());
    }
    if token_ids.len() > n_positions {
        return Err(
            usage(format!("{} tokens are more than the model's {n_positions} positions", token_ids.len())).into()
        );
    }
    let mut logprobs = vec![None; token_ids.len().min(1)];
    if token_ids.len() > 1 {
        let hidden = decoder.hidden_states(&PackedBatch::new([&token_ids[..token_ids.len() - 1]]), adapter)?;
        let found = decoder.token_logprobs(&hidden, token_ids[1..].to_vec(), 1.0, adapter)?.to_vec2::<f32>()?;
        logprobs.extend(found.into_iter().map(|row| Some(row[0])));
    }
    Ok(LogprobsOutput { token_ids, logprobs })
}

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

/// A line of the corpus: a text, or a conversation of which the answer is learned.
#[derive(Deserialize)]
#[serde(untagged)]
enum CorpusLine {
    Text { text: String },
    Chat { messages: Vec<Message> },
}

fn pretrain(path: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(path).map_err(|error| usage(format!("{}: {error}", path.display())))?;
    let config: PretrainConfig = toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        usage(format!("{}:{line}: {}", path.display(), error.message()))
    })?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let (corpus, output) = (folder.join(&config.corpus), folder.join(&config.output_dir));
    let lines: Vec<CorpusLine> = read_jsonl(&corpus).map_err(usage)?;
    let texts: Vec<String> = lines.iter().flat_map(texts_of).collect();
    // Beside what the folder holds until all is there: an old model is never half replaced.
    std::fs::create_dir_all(&output).with_context(|| format!("{}: cannot be made", output.display()))?;
    let new = tempfile::Builder::new().prefix(".new-").tempdir_in(&output)?;
    let decoder_config = small_model::write_files(new.path(), &texts, config.vocab_size, &config.model)?;
    let tokenizer = TextTokenizer::load(new.path())?;
    let examples: Vec<Example> = lines.iter().map(|line| example(line, &tokenizer)).collect::<anyhow::Result<_>>()?;
    let decoder = Decoder::init(decoder_config, config.seed)?;
    terminal::say(&format!("{} parameters, {} examples", decoder.config().n_parameters(), examples.len()));
    train(&decoder, &examples, &config, new.path())?;
    decoder.save(new.path(), small_model::STORED_DTYPE)?;
    move_files(new.path(), &output).with_context(|| format!("{}: cannot be written", output.display()))?;
    terminal::say(&format!("written to {}", output.display()));
    Ok(())
}

fn move_files(from: &Path, to: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        std::fs::rename(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}

fn train(decoder: &Decoder, examples: &[Example], config: &PretrainConfig, output: &Path) -> anyhow::Result<()> {
    let work = tempfile::tempdir()?;
    let progress = StageProgress::start("pretrain");
    let task = SftTask {
        policy: Policy { decoder, adapter: None },
        base_path: output,
        train: examples,
        val: &[],
        config: &config.train,
        seed: config.seed,
        output_dir: work.path(),
        progress: &progress,
        stop: interrupt::flag(),
    };
    let mut sink = Sink(MetricsLog::open(&work.path().join("metrics.jsonl"), "sft")?);
    let summary = sft::train(&task, &mut sink).map_err(ending)?;
    terminal::say(&format!("{} steps, final loss {:.3}", summary.n_steps, summary.train_loss));
    Ok(())
}

fn texts_of(line: &CorpusLine) -> Vec<String> {
    match line {
        CorpusLine::Text { text } => vec![text.clone()],
        CorpusLine::Chat { messages } => messages.iter().map(|message| message.content.clone()).collect(),
    }
}

/// A text is learned from its first token on, behind an end of text; of a conversation the answer is learned.
fn example(line: &CorpusLine, tokenizer: &TextTokenizer) -> anyhow::Result<Example> {
    Ok(match line {
        CorpusLine::Text { text } => {
            Example { prompt: vec![small_model::END_OF_TEXT_ID], response: tokenizer.encode(text)? }
        }
        CorpusLine::Chat { messages } => {
            let (answer, prompt) = messages.split_last().context("a conversation without messages")?;
            Example { prompt: tokenizer.encode_prompt(prompt)?, response: tokenizer.encode_response(&answer.content)? }
        }
    })
}
