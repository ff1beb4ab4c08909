//! `querl model init`: a model of random weights, of any published shape.

use crate::args::{Format, usage};
use crate::terminal;
use clap::Args;
use querl_core::config::BaseDtype;
use querl_model::{ComputeDevice, DType, Decoder, DecoderConfig, ExportSettings, write_random_model};
use querl_pipeline::failure::Stop;
use querl_train::job::memory_plan::{DeviceSizes, base_bytes};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What `querl model init` takes.
#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// A published model's name and size, such as qwen2.5-7b, or tiny
    #[arg(long, value_name = "SHAPE")]
    shape: String,
    /// Write a checkpoint without a tokenizer to a new or empty folder
    #[arg(long, value_name = "DIR", required_unless_present = "no_save")]
    out: Option<PathBuf>,
    /// Make the model in memory, report size and time, and discard it
    #[arg(long, conflicts_with = "out")]
    no_save: bool,
    /// Only cpu (and auto, which is cpu here); querl-bench makes models on a GPU
    #[arg(long, value_name = "DEVICE", default_value = "auto", conflicts_with = "out")]
    device: String,
    /// How the weights are stored: f32, bf16, f16; with --no-save int8, fp8 and nf4 too
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = dtype)]
    dtype: BaseDtype,
    /// Decides the weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    #[command(flatten)]
    format: Format,
}

pub(crate) fn run(args: &InitArgs) -> anyhow::Result<()> {
    let shapes = shapes_of(&args.shape)?;
    match &args.out {
        Some(out) => write(args, &shapes, out),
        None => make(args, &shapes),
    }
}

fn write(args: &InitArgs, shapes: &DecoderConfig, out: &Path) -> anyhow::Result<()> {
    let dtype = match args.dtype {
        BaseDtype::F32 => DType::F32,
        BaseDtype::Bf16 => DType::BF16,
        BaseDtype::F16 => DType::F16,
        other => {
            return Err(
                usage(format!("--dtype {} is no type of a file; expected f32, bf16 or f16", other.name())).into()
            );
        }
    };
    querl_model::set_threads(args.threads);
    let settings = ExportSettings { dtype: Some(dtype), max_shard_bytes: ExportSettings::SHARD_BYTES };
    let written = write_random_model(shapes, args.seed, out, &settings)?;
    if args.format.json {
        let result = json!({
            "out": out, "parameters": written.n_parameters, "bytes": written.n_bytes, "dtype": written.dtype,
            "files": written.files,
        });
        writeln!(std::io::stdout().lock(), "{result:#}")?;
    } else {
        let (n, dtype, n_files) = (written.n_parameters, written.dtype, written.files.len());
        terminal::say(&format!("{n} random parameters in {dtype}, {n_files} files in {}", out.display()));
    }
    Ok(())
}

fn make(args: &InitArgs, shapes: &DecoderConfig) -> anyhow::Result<()> {
    if !matches!(args.device.as_str(), "cpu" | "auto") {
        let message = format!(
            "--device {}: a model on a GPU is made by querl-bench: cargo run --release -p querl-bench --features cuda -- --shape {}",
            args.device, args.shape
        );
        return Err(usage(message).into());
    }
    querl_model::set_threads(args.threads);
    let started = Instant::now();
    let decoder = Decoder::random(shapes.clone(), args.seed, args.dtype, &ComputeDevice::Cpu)?;
    let seconds = started.elapsed().as_secs_f64();
    drop(decoder);
    let (parameters, bytes) = (shapes.n_parameters(), base_bytes(shapes, args.dtype));
    let (shape, dtype) = (&args.shape, args.dtype.name());
    let mut out = std::io::stdout().lock();
    if args.format.json {
        let result = json!({
            "shape": shape, "device": "cpu", "dtype": dtype, "parameters": parameters, "bytes": bytes, "seconds": seconds,
        });
        writeln!(out, "{result:#}")?;
        return Ok(());
    }
    let gib = bytes as f64 / f64::from(1 << 30);
    writeln!(out, "shape       {shape}\ndevice      cpu\nparameters  {parameters} in {dtype}, {gib:.2} GiB")?;
    writeln!(out, "seconds     {seconds:.2}")?;
    Ok(())
}

fn dtype(text: &str) -> Result<BaseDtype, String> {
    let known = DeviceSizes::CPU.storages;
    let names = || known.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ");
    known.iter().copied().find(|dtype| dtype.name() == text).ok_or_else(|| format!("expected one of {}", names()))
}

fn shapes_of(name: &str) -> Result<DecoderConfig, Stop> {
    DecoderConfig::of_shape(name).ok_or_else(|| {
        let known: Vec<&str> = DecoderConfig::shape_names().collect();
        usage(format!("there is no shape {name:?}; expected one of {}, or tiny", known.join(", ")))
    })
}
