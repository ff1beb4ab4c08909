//! `querl model init`: a model of random weights, of any shape.

use super::measure::{dtype, place, print, random_job, shapes_of};
use super::usage;
use crate::cli::Format;
use crate::terminal::{self, Terminal};
use clap::Args;
use querl_core::config::BaseDtype;
use querl_device::{Measured, Part};
use querl_model::{DType, DecoderConfig, ExportSettings, write_random_model};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What `querl model init` takes.
#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// A published model's name and size, such as qwen2.5-7b, or tiny
    #[arg(long, value_name = "SHAPE")]
    shape: String,
    /// Write a checkpoint without a tokenizer to a new or empty folder
    #[arg(long, value_name = "DIR", required_unless_present = "no_save")]
    out: Option<PathBuf>,
    /// Make the model on the device, say what that took, and throw it away
    #[arg(long, conflicts_with = "out")]
    no_save: bool,
    /// Where it is made: cpu, cuda:N, or auto
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

/// Makes one.
///
/// # Errors
/// There is no such shape or device, the model does not fit, or the folder cannot be written.
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
    let place = place(&args.device, args.dtype, shapes)?;
    let parts: [Part; 0] = [];
    let job = random_job(&place, &args.shape, args.dtype, args.seed, args.threads, &parts);
    let Measured { shape, device, dtype, parameters, base_bytes, made_s, .. } =
        querl_pipeline::training::measure(&place, &job, "init", &Terminal)?;
    let result = json!({
        "shape": shape, "device": device, "dtype": dtype, "parameters": parameters, "bytes": base_bytes, "seconds": made_s,
    });
    print(args.format, &result, || {
        vec![
            ("shape".into(), shape.clone()),
            ("device".into(), device.clone()),
            (
                "parameters".into(),
                format!("{parameters} in {dtype}, {:.2} GiB", base_bytes as f64 / f64::from(1 << 30)),
            ),
            ("seconds".into(), format!("{made_s:.2}")),
        ]
    })
}
