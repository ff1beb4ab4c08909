//! `querl model`: inspects models and prints log-probabilities. `export.rs` and `pretrain.rs` have the commands that write models, and
//! `corpus.rs` the one that writes a pretraining corpus.

mod corpus;
mod export;
mod pretrain;

use crate::args::{Format, usage};
use crate::model_hub;
use anyhow::Context;
use clap::{Args, Subcommand};
use querl_model::{
    AdapterSummary, Decoder, LoraAdapter, ModelSummary, PackedBatch, SecondOpinion, TextTokenizer, Weights,
    inspect_adapter, inspect_model, is_adapter,
};
use querl_pipeline::failure::Stop;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Print what a model directory or an adapter holds
    Inspect(InspectArgs),
    /// Create a model with random weights of any shape, for measurements: on a device, or as a checkpoint
    Init(export::InitArgs),
    /// Moved to querl-bench
    #[command(hide = true, disable_help_flag = true)]
    Measure {
        /// Ignored
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Print the log-probability of each token of each line as JSON lines
    Logprobs(LogprobsArgs),
    /// Merge an adapter into its base model, as transformers and vLLM load it
    Merge(export::MergeArgs),
    /// Export a model or an adapter, as transformers, PEFT and vLLM load it: other dtype, shards
    Export(export::ExportArgs),
    /// Write the pretraining corpus of a small model from a knowledge base: passages, and conversations made of their words
    Corpus(corpus::CorpusArgs),
    /// Pretrain a small model of one domain from a text: tokenizer, random weights, training
    Pretrain {
        /// The file of the pretraining: corpus, output folder, shape, training settings; `querl model corpus` writes one
        #[arg(value_name = "CONFIG")]
        config: PathBuf,
    },
}

pub(crate) fn run(command: &ModelCommand) -> anyhow::Result<()> {
    match command {
        ModelCommand::Inspect(args) => inspect(args),
        ModelCommand::Init(args) => export::init(args),
        ModelCommand::Measure { .. } => Err(usage(
            "`querl model measure` is the program querl-bench now: cargo run --release -p querl-bench -- --shape NAME --device cpu",
        )
        .into()),
        ModelCommand::Logprobs(args) => logprobs(args),
        ModelCommand::Merge(args) => export::merge(args),
        ModelCommand::Export(args) => export::export(args),
        ModelCommand::Corpus(args) => corpus::run(args),
        ModelCommand::Pretrain { config } => pretrain::run(config),
    }
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A Hugging Face directory, or an adapter's folder; or a model's name on the hub, ORG/NAME[@REVISION]
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    #[command(flatten)]
    format: Format,
}

fn inspect(args: &InspectArgs) -> anyhow::Result<()> {
    let directory = model_hub::folder(&args.directory)?;
    if is_adapter(&directory) {
        let summary = inspect_adapter(&directory).map_err(Stop::of_model)?;
        return args.format.print(&summary, || columns(&adapter_lines(&summary)));
    }
    let summary = inspect_model(&directory).map_err(Stop::of_model)?;
    args.format.print(&summary, || columns(&model_lines(&summary)))
}

fn columns(lines: &[(&str, String)]) -> String {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    lines.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}

fn model_lines(model: &ModelSummary) -> Vec<(&'static str, String)> {
    let mebibytes = model.bytes as f64 / f64::from(1 << 20);
    vec![
        ("family", format!("{:?}", model.family)),
        ("parameters", model.parameters.to_string()),
        ("weights", format!("{} in {} file(s), {mebibytes:.1} MiB", model.dtypes.join(" and "), model.weight_files)),
        (
            "layers",
            format!("{} of width {}, feed-forward {}", model.layers, model.hidden_size, model.intermediate_size),
        ),
        ("heads", format!("{} of width {}, {} for keys and values", model.heads, model.head_dim, model.kv_heads)),
        ("vocabulary", format!("{} (tokenizer {})", model.vocab_size, model.tokenizer_vocab_size)),
        ("positions", model.positions.to_string()),
        ("rope scaling", model.rope_scaling.map_or_else(|| "none".into(), |scaling| scaling.to_string())),
        ("sliding window", sliding_window(model)),
        ("tied embedding", model.tied_embedding.to_string()),
    ]
}

fn sliding_window(model: &ModelSummary) -> String {
    match model.sliding_window {
        None => "none".into(),
        Some(window) => format!("{window} tokens in {} of {} layers", model.sliding_window_layers, model.layers),
    }
}

fn adapter_lines(adapter: &AdapterSummary) -> Vec<(&'static str, String)> {
    let kind = match (adapter.use_dora, adapter.use_rslora) {
        (false, false) => "LoRA",
        (false, true) => "LoRA, scaled by the root of the rank",
        (true, false) => "DoRA",
        (true, true) => "DoRA, scaled by the root of the rank",
    };
    let saved = if adapter.modules_to_save.is_empty() { "none".into() } else { adapter.modules_to_save.join(", ") };
    vec![
        ("adapter", kind.into()),
        ("base", adapter.base.clone().unwrap_or_else(|| "not named".into())),
        ("parameters", format!("{} in {}", adapter.parameters, adapter.dtype)),
        ("rank", format!("{}, alpha {}, {} pattern(s)", adapter.rank, adapter.alpha, adapter.patterns)),
        ("layers", adapter.adapted_layers.to_string()),
        ("dropout", adapter.dropout.to_string()),
        ("saved modules", saved),
    ]
}

#[derive(Debug, Args)]
pub(crate) struct LogprobsArgs {
    /// A Hugging Face directory, or a model's name on the hub
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A PEFT adapter
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Lines of {"token_ids": [...]} or {"text": "..."}; control tokens in a text are recognised, and none is added: as
    /// tokenizer(text, add_special_tokens=False) of transformers. For a text with BOS, give the ids of tokenizer(text)
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Add to each line the largest difference from candle-transformers' decoder of the same model, an independent implementation
    #[arg(long, conflicts_with = "adapter")]
    second_opinion: bool,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    largest_difference: Option<f32>,
}

/// Runs `querl model logprobs`: prints one line of JSON per input line.
fn logprobs(args: &LogprobsArgs) -> anyhow::Result<()> {
    let model = model_hub::folder(&args.model)?;
    let decoder = Decoder::load(&model, Weights::Frozen).map_err(Stop::of_model)?;
    let adapter = args.adapter.as_ref().map(|path| LoraAdapter::load(path, decoder.config())).transpose();
    let adapter = adapter.map_err(Stop::of_model)?;
    let file = std::fs::File::open(&args.input).map_err(|error| usage(format!("{}: {error}", args.input.display())))?;
    let other = if args.second_opinion { Some(SecondOpinion::load(&model).map_err(Stop::of_model)?) } else { None };
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
                    tokenizer = Some(TextTokenizer::load(&model).map_err(Stop::of_model)?);
                }
                tokenizer.as_ref().map_or(Ok(Vec::new()), |tokenizer| tokenizer.encode_rendered(&text))?
            }
        };
        let mut output = line_logprobs(&decoder, adapter.as_ref(), token_ids).with_context(place)?;
        if let Some(other) = &other {
            output.largest_difference = Some(largest_difference(&decoder, other, &output).with_context(place)?);
        }
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
    Ok(LogprobsOutput { token_ids, logprobs, largest_difference: None })
}

/// Largest difference of a line's log-probabilities from those of the other decoder's hidden states; 0 for fewer than two tokens.
fn largest_difference(decoder: &Decoder, other: &SecondOpinion, line: &LogprobsOutput) -> anyhow::Result<f32> {
    let Some((_, context)) = line.token_ids.split_last().filter(|(_, context)| !context.is_empty()) else {
        return Ok(0.0);
    };
    let targets = line.token_ids[1..].to_vec();
    let theirs = decoder.token_logprobs(&other.hidden_states(context)?, targets, 1.0, None)?.to_vec2::<f32>()?;
    let pairs = line.logprobs.iter().flatten().zip(theirs);
    Ok(pairs.map(|(ours, theirs)| (ours - theirs[0]).abs()).fold(0.0, f32::max))
}
