//! `querl model measure`: what a device does with a model of some shape, without any file of it.

mod shown;

use super::usage;
use crate::cli::Format;
use crate::terminal::Terminal;
use clap::{Args, ValueEnum};
use querl_core::config::{BaseDtype, ModelConfig, RlConfig, SftConfig};
use querl_device::memory::Types;
use querl_device::{Job, Lengths, Measuring, Part, Work};
use querl_model::{CardUse, DecoderConfig};
use querl_pipeline::device::{Needs, Place};
use querl_pipeline::failure::Stop;
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;

/// What `querl model measure` takes.
#[derive(Debug, Args)]
pub(crate) struct MeasureArgs {
    /// A published model's name and size, such as qwen2.5-7b, or tiny
    #[arg(long, value_name = "SHAPE")]
    shape: String,
    /// What is measured: cpu, cuda:N, or auto
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: String,
    /// How the frozen base is stored
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = dtype)]
    dtype: BaseDtype,
    /// Which parts; load writes a checkpoint first
    #[arg(long, value_name = "PARTS", value_enum, value_delimiter = ',', default_value = "sft,rollout,ppo")]
    what: Vec<PartName>,
    /// Measured repetitions of each part
    #[arg(long, value_name = "N", default_value_t = 5)]
    repeats: usize,
    /// Rows of data of a fine-tuning step
    #[arg(long, value_name = "N", default_value_t = 64)]
    rows: usize,
    /// Tokens that every prompt begins with
    #[arg(long, value_name = "N", default_value_t = 160)]
    shared_tokens: usize,
    /// Tokens of a prompt's own: fewest and most
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "40,140")]
    own_tokens: Vec<usize>,
    /// Tokens of an answer that is learned
    #[arg(long, value_name = "N", default_value_t = 30)]
    answer_tokens: usize,
    /// Answers in progress at once, for each rollout that is measured
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8,64,256")]
    sequences: Vec<usize>,
    /// Answers to each prompt of a rollout
    #[arg(long, value_name = "N", default_value_t = 4)]
    samples: usize,
    /// Answers of an iteration of PPO
    #[arg(long, value_name = "N", default_value_t = 64)]
    batch: usize,
    /// Epochs of updates of an iteration of PPO
    #[arg(long, value_name = "N", default_value_t = 4)]
    ppo_epochs: usize,
    /// Tokens of the longest answer that is written
    #[arg(long, value_name = "N", default_value_t = 32)]
    max_new_tokens: usize,
    /// Rank of the adapters
    #[arg(long, value_name = "N", default_value_t = 16)]
    lora_rank: usize,
    /// Most tokens of one pass [default: what fits the card, at most 16384]
    #[arg(long, value_name = "N")]
    tokens_per_pass: Option<usize>,
    /// Compute layers again in the backward pass [default: where nothing else fits the card]
    #[arg(long, value_name = "BOOL")]
    gradient_checkpointing: Option<bool>,
    /// Decides weights and rows
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    Load,
    Sft,
    Rollout,
    Ppo,
}

impl From<PartName> for Part {
    fn from(name: PartName) -> Self {
        match name {
            PartName::Load => Self::Load,
            PartName::Sft => Self::Sft,
            PartName::Rollout => Self::Rollout,
            PartName::Ppo => Self::Ppo,
        }
    }
}

/// A storage by its name in a configuration.
pub(super) fn dtype(text: &str) -> Result<BaseDtype, String> {
    let known = Types::PROCESSOR.storages;
    let names = || known.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ");
    known.iter().copied().find(|dtype| dtype.name() == text).ok_or_else(|| format!("expected one of {}", names()))
}

/// Measures and says what was found.
///
/// # Errors
/// There is no such shape or device, nothing of what was asked for could be measured, or the user said stop.
pub(crate) fn run(args: &MeasureArgs) -> anyhow::Result<()> {
    let shapes = check(args)?;
    let place = place(&args.device, args.dtype, &shapes)?;
    let mut parts: Vec<Part> = args.what.iter().map(|name| Part::from(*name)).collect();
    parts.sort();
    parts.dedup();
    let mut job = random_job(&place, &args.shape, args.dtype, args.seed, args.threads, &parts);
    if let Work::Measure(measuring) = &mut job.work {
        set(measuring, args);
    }
    querl_pipeline::training::fit(&place, &mut job, args.tokens_per_pass, args.gradient_checkpointing, &Terminal)?;
    let measured = querl_pipeline::training::measure(&place, &job, "measure", &Terminal)?;
    print(args.format, &measured, || shown::lines(&measured))?;
    interrupted()?;
    let n_left_out = measured.left_out.len();
    match n_left_out > 0 && n_left_out == parts.len() {
        true => anyhow::bail!("nothing was measured: {}", measured.left_out.join("; ")),
        false => Ok(()),
    }
}

/// Where the user said stop, what was measured until then is printed all the same.
fn interrupted() -> Result<(), Stop> {
    match querl_pipeline::interrupt::flag().load(std::sync::atomic::Ordering::SeqCst) {
        true => Err(Stop::interrupted("interrupted; what was measured until then is printed")),
        false => Ok(()),
    }
}

fn check(args: &MeasureArgs) -> Result<DecoderConfig, Stop> {
    let shapes = shapes_of(&args.shape)?;
    let counts = [
        ("--repeats", args.repeats),
        ("--rows", args.rows),
        ("--answer-tokens", args.answer_tokens),
        ("--own-tokens", args.own_tokens[0]),
        ("--sequences", args.sequences.iter().copied().min().unwrap_or_default()),
        ("--samples", args.samples),
        ("--batch", args.batch),
        ("--ppo-epochs", args.ppo_epochs),
        ("--max-new-tokens", args.max_new_tokens),
        ("--lora-rank", args.lora_rank),
        ("--tokens-per-pass", args.tokens_per_pass.unwrap_or(1)),
    ];
    if let Some((name, _)) = counts.into_iter().find(|(_, value)| *value == 0) {
        return Err(usage(format!("{name} is 0; expected at least 1")));
    }
    match args.own_tokens[..] {
        [least, most] if least <= most => Ok(shapes),
        _ => Err(usage("--own-tokens: expected the fewest and the most, in this order")),
    }
}

/// The shapes that a name stands for.
pub(super) fn shapes_of(name: &str) -> Result<DecoderConfig, Stop> {
    Measuring::shapes_of(name).map_err(Stop::of)
}

/// The device that a name stands for, if it can have a base of that storage and those shapes.
pub(super) fn place(device: &str, dtype: BaseDtype, shapes: &DecoderConfig) -> Result<Place, Stop> {
    let model = ModelConfig {
        path: PathBuf::new(),
        dtype,
        tokens_per_pass: 1,
        gradient_checkpointing: false,
        tensor_parallel: 1,
    };
    let (sft, head_dim, card_use) = (&SftConfig::default(), Some(shapes.head_dim), CardUse::Answers);
    Place::of(device, &Needs { model: &model, sft, head_dim, card_use })
}

/// A measurement with the usual settings; rows of about 280 tokens, as rewriting a query with a system prompt has.
pub(super) fn random_job(
    place: &Place,
    shape: &str,
    dtype: BaseDtype,
    seed: u64,
    threads: usize,
    parts: &[Part],
) -> Job {
    let measuring = Measuring {
        shape: shape.to_owned(),
        parts: parts.to_vec(),
        repeats: 1,
        lengths: Lengths { shared: 160, own_least: 40, own_most: 140, answer: 30 },
        sft: SftConfig::default(),
        rl: RlConfig::default(),
        sequences: Vec::new(),
        work_dir: PathBuf::new(),
    };
    let model = ModelConfig {
        path: PathBuf::new(),
        dtype,
        tokens_per_pass: 8192,
        gradient_checkpointing: false,
        tensor_parallel: 1,
    };
    let work = Work::Measure(Box::new(measuring));
    Job { devices: place.devices(), threads, model, seed, work }
}

fn set(measuring: &mut Measuring, args: &MeasureArgs) {
    measuring.repeats = args.repeats;
    let (own_least, own_most) = (args.own_tokens[0], args.own_tokens[1]);
    measuring.lengths = Lengths { shared: args.shared_tokens, own_least, own_most, answer: args.answer_tokens };
    measuring.sft.batch_size = args.rows;
    measuring.sft.gradient_accumulation_steps = 1;
    measuring.sft.lora_rank = args.lora_rank;
    measuring.sft.lora_alpha = 2.0 * args.lora_rank as f64;
    measuring.rl.batch_size = args.batch;
    measuring.rl.mini_batch_size = args.batch;
    measuring.rl.gradient_accumulation_steps = 1;
    measuring.rl.ppo_epochs = args.ppo_epochs;
    measuring.rl.n_samples = args.samples;
    measuring.rl.max_new_tokens = args.max_new_tokens;
    measuring.sequences.clone_from(&args.sequences);
}

/// Prints a result as JSON, or as names and values.
pub(super) fn print(
    format: Format,
    result: &impl Serialize,
    lines: impl FnOnce() -> Vec<(String, String)>,
) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if format.json {
        serde_json::to_writer_pretty(&mut out, result)?;
        writeln!(out)?;
        return Ok(());
    }
    let lines = lines();
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    for (name, value) in lines {
        writeln!(out, "{name:width$}  {value}")?;
    }
    Ok(())
}
