//! `querl model merge`, `export` and `init`: writes models and adapters for other programs, and models with random weights.

use crate::args::{Format, one_of, usage};
use crate::model_hub;
use crate::terminal;
use anyhow::Context;
use clap::Args;
use clap::builder::TypedValueParser;
use querl_core::config::BaseDtype;
use querl_model::{
    ComputeDevice, DType, Decoder, DecoderConfig, ExportSettings, Exported, LoraAdapter, dtype_name, export_model,
    write_random_model,
};
use querl_pipeline::failure::Stop;
use querl_train::job::memory_plan::{DeviceSizes, base_bytes};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// A Hugging Face directory, or a model's name on the hub
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A PEFT adapter for it
    #[arg(long, value_name = "DIR")]
    adapter: PathBuf,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// A Hugging Face directory, or a model's name on the hub
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Write only this adapter, after a check that it fits the model
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct OutputArgs {
    /// Where to write: a new or empty folder
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Type of the written weights [default: as they are stored]
    #[arg(long, value_parser = stored_dtype())]
    dtype: Option<DType>,
    /// Maximum size of a file of weights: a number with MB or GB
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = size)]
    max_shard_size: u64,
    #[command(flatten)]
    format: Format,
}

fn stored_dtype() -> impl TypedValueParser<Value = DType> {
    one_of([("f32", DType::F32, ""), ("bf16", DType::BF16, ""), ("f16", DType::F16, "")])
}

/// Parses a size such as `5GB` or `0.5MB` to bytes. Units are powers of ten, as in transformers.
fn size(text: &str) -> Result<u64, String> {
    let units = [("GB", 1e9), ("MB", 1e6)];
    let parsed = units.into_iter().find_map(|(unit, bytes)| {
        let number: f64 = text.strip_suffix(unit)?.trim().parse().ok()?;
        Some((number * bytes).round()).filter(|size| (1.0..1e18).contains(size)).map(|size| size as u64)
    });
    parsed.ok_or_else(|| "expected a number above 0 with MB or GB, such as 5GB".into())
}

/// Runs `querl model merge`: writes a model with an adapter merged into its weights.
pub(crate) fn merge(args: &MergeArgs) -> anyhow::Result<()> {
    let model = model_hub::folder(&args.model)?;
    let adapter = load(&model, &args.adapter)?;
    write_model(&model, Some(&adapter), &args.output)
}

/// Runs `querl model export`: writes a model, or an adapter alone.
pub(crate) fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let model = model_hub::folder(&args.model)?;
    match &args.adapter {
        None => write_model(&model, None, &args.output),
        Some(adapter) => write_adapter(&model, &load(&model, adapter)?, &args.output),
    }
}

fn load(model: &Path, adapter: &Path) -> anyhow::Result<LoraAdapter> {
    querl_model::check_directory(model).map_err(Stop::of_model)?;
    let config = DecoderConfig::load(&model.join("config.json")).map_err(Stop::of_model)?;
    Ok(LoraAdapter::load(adapter, &config).map_err(Stop::of_model)?)
}

fn write_model(model: &Path, adapter: Option<&LoraAdapter>, args: &OutputArgs) -> anyhow::Result<()> {
    let settings = ExportSettings { dtype: args.dtype, max_shard_bytes: args.max_shard_size };
    let exported = export_model(model, adapter, &args.out, &settings)?;
    print_exported(args.format, &args.out, &exported, "parameters")
}

fn write_adapter(model: &Path, adapter: &LoraAdapter, args: &OutputArgs) -> anyhow::Result<()> {
    let dtype = args.dtype.unwrap_or(adapter.stored_dtype());
    let is_taken = args.out.read_dir().is_ok_and(|mut entries| entries.next().is_some());
    if is_taken {
        return Err(usage(format!("{}: is not empty; name a new folder", args.out.display())).into());
    }
    // The folder name, because a path is only valid on this machine.
    let model = model.canonicalize().with_context(|| format!("{}: cannot be found", model.display()))?;
    let base = model.file_name().unwrap_or(model.as_os_str()).to_string_lossy().into_owned();
    adapter.save_as(&args.out, &base, dtype)?;
    let n_parameters = adapter.n_parameters() as u64;
    let exported = Exported {
        n_parameters,
        n_bytes: n_parameters * dtype.size_in_bytes() as u64,
        dtype: dtype_name(dtype).into(),
        files: ["adapter_config.json", "adapter_model.safetensors"].map(String::from).into(),
    };
    print_exported(args.format, &args.out, &exported, "parameters")
}

/// Prints what was written. `what`: kind of parameters, for the text output.
fn print_exported(format: Format, out: &Path, exported: &Exported, what: &str) -> anyhow::Result<()> {
    let Exported { n_parameters, n_bytes, dtype, files } = exported;
    if format.json {
        let result = json!({"out": out, "parameters": n_parameters, "bytes": n_bytes, "dtype": dtype, "files": files});
        return format.print(&result, String::new);
    }
    terminal::print(&format!("{n_parameters} {what} in {dtype}, {} files in {}", files.len(), out.display()));
    Ok(())
}

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
    /// Only cpu, or auto, which is cpu here; querl-bench creates models on a GPU
    #[arg(long, value_name = "DEVICE", default_value = "auto", conflicts_with = "out")]
    device: String,
    /// Type of the weights: f32, bf16, f16; with --no-save also int8, fp8 and nf4
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = storage)]
    dtype: BaseDtype,
    /// Seed of the random weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    #[command(flatten)]
    format: Format,
}

pub(crate) fn init(args: &InitArgs) -> anyhow::Result<()> {
    let shapes = shapes_of(&args.shape)?;
    match &args.out {
        Some(out) => write_random(args, &shapes, out),
        None => make_in_memory(args, &shapes),
    }
}

fn write_random(args: &InitArgs, shapes: &DecoderConfig, out: &Path) -> anyhow::Result<()> {
    let dtype = match args.dtype {
        BaseDtype::F32 => DType::F32,
        BaseDtype::Bf16 => DType::BF16,
        BaseDtype::F16 => DType::F16,
        other => {
            return Err(usage(format!(
                "--dtype {} is not a type of weights in a file; expected f32, bf16 or f16",
                other.name()
            ))
            .into());
        }
    };
    querl_model::set_threads(args.threads);
    let settings = ExportSettings { dtype: Some(dtype), max_shard_bytes: ExportSettings::SHARD_BYTES };
    let written = write_random_model(shapes, args.seed, out, &settings)?;
    print_exported(args.format, out, &written, "random parameters")
}

fn make_in_memory(args: &InitArgs, shapes: &DecoderConfig) -> anyhow::Result<()> {
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
    let result = json!({
        "shape": shape, "device": "cpu", "dtype": dtype, "parameters": parameters, "bytes": bytes, "seconds": seconds,
    });
    args.format.print(&result, || {
        let gib = bytes as f64 / f64::from(1 << 30);
        format!(
            "shape       {shape}\ndevice      cpu\nparameters  {parameters} in {dtype}, {gib:.2} GiB\nseconds     {seconds:.2}\n"
        )
    })
}

fn storage(text: &str) -> Result<BaseDtype, String> {
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

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_are_powers_of_ten_with_a_unit() {
        assert_eq!((size("5GB"), size("20 MB")), (Ok(5_000_000_000), Ok(20_000_000)));
        // Regression: a fraction was refused.
        assert_eq!((size("0.5MB"), size("1.5GB")), (Ok(500_000), Ok(1_500_000_000)));
        for wrong in ["5", "GB", "0GB", "-1MB", "1GiB", "99999999999999GB", "NaNMB", "infGB", "0.0000001MB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
