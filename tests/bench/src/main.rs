//! `querl-bench`: speed and memory of fine-tuning, generation and PPO on a device, with a model of random weights.
//!
//! ```sh
//! cargo run --release -p querl-bench -- --shape qwen2.5-0.5b --device cpu
//! ```

mod measure;
mod operations;
mod report;
mod rollout;
mod rows;
mod same_score;
mod training;

use anyhow::{Result, bail};
use clap::Parser;
use measure::{Bench, free_bytes, open_device, plan, synchronize};
use querl_core::config::{BaseDtype, ModelConfig, RlConfig, SftConfig};
use querl_model::{ComputeDevice, Decoder, DecoderConfig};
use querl_train::job::memory_plan::{DeviceSizes, PlannedStage};
use report::{BenchReport, Benchmark, Lengths};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

// The same allocator as in querl.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

static STOP: AtomicBool = AtomicBool::new(false);

/// Measures fine-tuning, generation and PPO of a model shape on a device, with random weights
#[derive(Debug, Parser)]
struct Args {
    /// A published model's name and size, such as qwen2.5-7b, or tiny
    #[arg(long, value_name = "SHAPE")]
    shape: String,
    /// cpu, cuda:N, or auto
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: String,
    /// Dtype of the frozen base
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = dtype)]
    dtype: BaseDtype,
    /// Benchmarks; load writes a checkpoint first
    #[arg(long, value_name = "PARTS", value_enum, value_delimiter = ',', default_value = "sft,rollout,ppo")]
    what: Vec<Benchmark>,
    /// Measured repetitions
    #[arg(long, value_name = "N", default_value_t = 5)]
    repeats: usize,
    /// Rows per fine-tuning step
    #[arg(long, value_name = "N", default_value_t = 64)]
    rows: usize,
    /// Tokens of the common prefix of all prompts
    #[arg(long, value_name = "N", default_value_t = 160)]
    shared_tokens: usize,
    /// Prompt tokens after the prefix: fewest and most
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "40,140")]
    own_tokens: Vec<usize>,
    /// Response tokens in fine-tuning
    #[arg(long, value_name = "N", default_value_t = 30)]
    answer_tokens: usize,
    /// Sequences generated at once, for each measured rollout
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8,64,256")]
    sequences: Vec<usize>,
    /// Responses to each prompt of a rollout
    #[arg(long, value_name = "N", default_value_t = 4)]
    samples: usize,
    /// Responses per PPO iteration
    #[arg(long, value_name = "N", default_value_t = 64)]
    batch: usize,
    /// Epochs of updates per PPO iteration
    #[arg(long, value_name = "N", default_value_t = 4)]
    ppo_epochs: usize,
    /// Most tokens of a generated response
    #[arg(long, value_name = "N", default_value_t = 32)]
    max_new_tokens: usize,
    /// LoRA rank
    #[arg(long, value_name = "N", default_value_t = 16)]
    lora_rank: usize,
    /// Most tokens of one micro-batch [default: what fits the GPU, at most 16384]
    #[arg(long, value_name = "N")]
    tokens_per_pass: Option<usize>,
    /// Gradient checkpointing [default: where nothing else fits the GPU]
    #[arg(long, value_name = "BOOL")]
    gradient_checkpointing: Option<bool>,
    /// Seeds weights and rows
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn dtype(text: &str) -> Result<BaseDtype, String> {
    let known = DeviceSizes::CPU.storages;
    let names = || known.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ");
    known.iter().copied().find(|dtype| dtype.name() == text).ok_or_else(|| format!("expected one of {}", names()))
}

fn main() -> ExitCode {
    // candle's thread pool would spin on the cores that querl's kernels use.
    // SAFETY: this is the program's first statement; there is no other thread that could read the environment meanwhile.
    unsafe { std::env::set_var("CANDLE_NUM_THREADS", "1") };
    // `mi_option_purge_delay`: freed memory is kept, as in querl.
    // SAFETY: it sets a number that the allocator reads; any number is allowed.
    unsafe { libmimalloc_sys::mi_option_set(15, -1) };
    let args = Args::parse();
    match run(&args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Exit codes: 0 finished, 1 nothing was measured, 130 stopped (completed measurements are printed).
///
/// # Errors
/// Wrong arguments, or the device cannot be used.
fn run(args: &Args) -> Result<ExitCode> {
    let shapes = check(args)?;
    let (place, device) = open_device(&args.device)?;
    querl_model::set_threads(args.threads);
    ctrlc::set_handler(|| STOP.store(true, Ordering::SeqCst))?;
    let sizes = if matches!(place, ComputeDevice::Cpu) { DeviceSizes::CPU } else { DeviceSizes::GPU };
    let mut benchmarks = args.what.clone();
    benchmarks.sort();
    benchmarks.dedup();
    let (sft, rl, lengths) = settings(args);
    let started = Instant::now();
    let decoder = Decoder::random(shapes.clone(), args.seed, args.dtype, &place)?;
    synchronize(&place)?;
    let made_s = started.elapsed().as_secs_f64();
    let folder = tempfile::tempdir()?;
    let mut bench = Bench {
        decoder: &decoder,
        place: &place,
        sizes,
        model: ModelConfig {
            path: PathBuf::new(),
            dtype: args.dtype,
            tokens_per_pass: args.tokens_per_pass.unwrap_or(8192),
            gradient_checkpointing: args.gradient_checkpointing.unwrap_or(false),
            tensor_parallel: 1,
            enable_thinking: None,
        },
        sft,
        rl,
        lengths,
        repeats: args.repeats,
        sequences: &args.sequences,
        seed: args.seed,
        folder: folder.path(),
        stop: &STOP,
    };
    fit_micro_batches(&mut bench, args, &benchmarks)?;
    let stage = PlannedStage::Sft { config: bench.sft.clone(), longest_row: 1 };
    let mut report = BenchReport {
        shape: args.shape.clone(),
        device,
        dtype: args.dtype.name().into(),
        parameters: shapes.n_parameters() as u64,
        base_bytes: plan(&shapes, &bench.model, stage, sizes).base,
        made_s,
        ceilings: None,
        load: None,
        sft: None,
        rollouts: Vec::new(),
        ppo: None,
        left_out: Vec::new(),
    };
    eprintln!("{}: {} parameters initialised in {made_s:.1} s", report.shape, report.parameters);
    for benchmark in &benchmarks {
        eprintln!("{}", benchmark.name());
        bench.run(*benchmark, &mut report);
    }
    print(&report, args.json)?;
    if STOP.load(Ordering::SeqCst) {
        eprintln!("interrupted; what was measured is printed");
        return Ok(ExitCode::from(130));
    }
    let is_empty = !report.left_out.is_empty() && report.left_out.len() == benchmarks.len();
    Ok(if is_empty { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn check(args: &Args) -> Result<DecoderConfig> {
    let known = || DecoderConfig::shape_names().collect::<Vec<_>>().join(", ");
    let Some(shapes) = DecoderConfig::of_shape(&args.shape) else {
        bail!("there is no shape {:?}; expected one of {}, or tiny", args.shape, known());
    };
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
        bail!("{name} is 0; expected at least 1");
    }
    match args.own_tokens[..] {
        [least, most] if least <= most => Ok(shapes),
        _ => bail!("--own-tokens: expected the fewest and the most, in this order"),
    }
}

fn settings(args: &Args) -> (SftConfig, RlConfig, Lengths) {
    let sft = SftConfig {
        batch_size: args.rows,
        gradient_accumulation_steps: 1,
        lora_rank: args.lora_rank,
        lora_alpha: 2.0 * args.lora_rank as f64,
        ..SftConfig::default()
    };
    let rl = RlConfig {
        batch_size: args.batch,
        mini_batch_size: args.batch,
        gradient_accumulation_steps: 1,
        ppo_epochs: args.ppo_epochs,
        n_samples: args.samples,
        max_new_tokens: args.max_new_tokens,
        ..RlConfig::default()
    };
    let (own_least, own_most) = (args.own_tokens[0], args.own_tokens[1]);
    (sft, rl, Lengths { shared: args.shared_tokens, own_least, own_most, answer: args.answer_tokens })
}

/// Tokens of a micro-batch, largest first: above the first value matrix products do not become faster.
const TOKENS_PER_PASS: [usize; 4] = [16_384, 8192, 4096, 2048];

/// Share of a GPU's free memory that a plan may use; the rest is for memory that the plan does not count.
const SHARE_OF_FREE: f64 = 0.97;

/// Chooses the settings that the arguments leave open. On a GPU: the largest micro-batches that fit by the memory plan, with gradient
/// checkpointing only if nothing else fits. On the CPU: 8192 tokens.
///
/// # Errors
/// The base and the adapters alone do not fit.
fn fit_micro_batches(bench: &mut Bench<'_>, args: &Args, benchmarks: &[Benchmark]) -> Result<()> {
    // Free memory plus the base model, which is already loaded and part of the plan.
    let Some(free) = free_bytes(bench.place)? else { return Ok(()) };
    let shapes = bench.decoder.config().clone();
    let longest_prompt = bench.lengths.longest_prompt();
    let rl = RlConfig { n_samples: 1, ..bench.rl.clone() };
    let sft = PlannedStage::Sft { config: bench.sft.clone(), longest_row: longest_prompt + bench.lengths.answer };
    let rl = PlannedStage::Rl { config: Box::new(rl), lora: bench.sft.clone(), longest_prompt };
    let stages: Vec<&PlannedStage> = benchmarks
        .iter()
        .filter_map(|benchmark| match benchmark {
            Benchmark::Sft => Some(&sft),
            Benchmark::Ppo | Benchmark::Rollout => Some(&rl),
            Benchmark::Load => None,
        })
        .collect();
    let base = plan(&shapes, &bench.model, sft.clone(), bench.sizes).base;
    let limit = ((free + base) as f64 * SHARE_OF_FREE) as u64;
    let lengths = args.tokens_per_pass.map_or(TOKENS_PER_PASS.to_vec(), |n| vec![n]);
    for checkpointing in args.gradient_checkpointing.map_or(vec![false, true], |is_on| vec![is_on]) {
        for tokens_per_pass in &lengths {
            (bench.model.gradient_checkpointing, bench.model.tokens_per_pass) = (checkpointing, *tokens_per_pass);
            let plans = stages.iter().map(|stage| plan(&shapes, &bench.model, (*stage).clone(), bench.sizes));
            if plans.map(|plan| plan.total()).max().unwrap_or(0) <= limit {
                return Ok(());
            }
        }
    }
    // The plan is an upper bound. Only settings that certainly do not fit are rejected; the others are tried.
    let certain = stages.iter().map(|stage| plan(&shapes, &bench.model, (*stage).clone(), bench.sizes).certain()).max();
    match certain {
        Some(certain) if certain > free + base => {
            bail!("the model and its adapters take {certain} bytes; the device has {} free", free + base)
        }
        _ => Ok(()),
    }
}

fn print(report: &BenchReport, as_json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if as_json {
        serde_json::to_writer_pretty(&mut out, report)?;
        writeln!(out)?;
        return Ok(());
    }
    let lines = report::lines(report);
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    for (name, value) in lines {
        writeln!(out, "{name:width$}  {value}")?;
    }
    Ok(())
}
