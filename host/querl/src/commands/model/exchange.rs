//! `querl model merge` and `querl model export`: models and adapters for other programs.

use crate::args::Format;
use crate::args::usage;
use crate::terminal;
use anyhow::Context;
use clap::{Args, ValueEnum};
use querl_model::{DType, DecoderConfig, ExportSettings, Exported, LoraAdapter, dtype_name, export_model};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What `querl model merge` takes.
#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// A Hugging Face directory
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A PEFT adapter for it
    #[arg(long, value_name = "DIR")]
    adapter: PathBuf,
    #[command(flatten)]
    output: OutputArgs,
}

/// What `querl model export` takes.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// A Hugging Face directory
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Write this adapter alone, checked against the model, not the model
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
    /// Type of the weights; as they are stored where it is left out
    #[arg(long, value_enum)]
    dtype: Option<StoredType>,
    /// Largest file of weights: a number with MB or GB
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = size)]
    max_shard_size: u64,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum StoredType {
    F32,
    Bf16,
    F16,
}

impl From<StoredType> for DType {
    fn from(dtype: StoredType) -> Self {
        match dtype {
            StoredType::F32 => Self::F32,
            StoredType::Bf16 => Self::BF16,
            StoredType::F16 => Self::F16,
        }
    }
}

/// `5GB`, `200MB`: powers of ten, as transformers counts them.
fn size(text: &str) -> Result<u64, String> {
    let units = [("GB", 1_000_000_000), ("MB", 1_000_000)];
    let parsed = units.into_iter().find_map(|(unit, bytes)| {
        let number: u64 = text.strip_suffix(unit)?.trim().parse().ok()?;
        number.checked_mul(bytes).filter(|size| *size > 0)
    });
    parsed.ok_or_else(|| "expected a number above 0 with MB or GB, such as 5GB".into())
}

/// Writes a model with an adapter's changes in its weights.
pub(crate) fn merge(args: &MergeArgs) -> anyhow::Result<()> {
    let adapter = load(&args.model, &args.adapter)?;
    write_model(&args.model, Some(&adapter), &args.output)
}

/// Writes a model, or an adapter alone.
pub(crate) fn export(args: &ExportArgs) -> anyhow::Result<()> {
    match &args.adapter {
        None => write_model(&args.model, None, &args.output),
        Some(adapter) => write_adapter(&args.model, &load(&args.model, adapter)?, &args.output),
    }
}

fn load(model: &Path, adapter: &Path) -> anyhow::Result<LoraAdapter> {
    querl_model::check_directory(model).map_err(usage)?;
    let config = DecoderConfig::load(&model.join("config.json")).map_err(usage)?;
    Ok(LoraAdapter::load(adapter, &config).map_err(usage)?)
}

fn write_model(model: &Path, adapter: Option<&LoraAdapter>, args: &OutputArgs) -> anyhow::Result<()> {
    let settings = ExportSettings { dtype: args.dtype.map(DType::from), max_shard_bytes: args.max_shard_size };
    let exported = export_model(model, adapter, &args.out, &settings)?;
    say(args, &exported)
}

fn write_adapter(model: &Path, adapter: &LoraAdapter, args: &OutputArgs) -> anyhow::Result<()> {
    let dtype = args.dtype.map_or(adapter.stored_dtype(), DType::from);
    let is_taken = args.out.read_dir().is_ok_and(|mut entries| entries.next().is_some());
    if is_taken {
        return Err(usage(format!("{}: is not empty; name a new folder", args.out.display())).into());
    }
    // A path would only be right on this machine.
    let model = model.canonicalize().with_context(|| format!("{}: cannot be found", model.display()))?;
    let base = model.file_name().unwrap_or(model.as_os_str()).to_string_lossy().into_owned();
    adapter.save_as(&args.out, &base, dtype)?;
    let n_parameters = adapter.n_parameters() as u64;
    say(
        args,
        &Exported {
            n_parameters,
            n_bytes: n_parameters * dtype.size_in_bytes() as u64,
            dtype: dtype_name(dtype).into(),
            files: ["adapter_config.json", "adapter_model.safetensors"].map(String::from).into(),
        },
    )
}

fn say(args: &OutputArgs, exported: &Exported) -> anyhow::Result<()> {
    if args.format.json {
        let mut out = std::io::stdout().lock();
        let result = json!({
            "out": args.out, "parameters": exported.n_parameters, "bytes": exported.n_bytes, "dtype": exported.dtype,
            "files": exported.files,
        });
        serde_json::to_writer_pretty(&mut out, &result)?;
        writeln!(out)?;
        return Ok(());
    }
    let Exported { n_parameters, dtype, files, .. } = exported;
    terminal::say(&format!("{n_parameters} parameters in {dtype}, {} files in {}", files.len(), args.out.display()));
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn sizes_are_powers_of_ten_with_a_unit() {
        assert_eq!((super::size("5GB"), super::size("20 MB")), (Ok(5_000_000_000), Ok(20_000_000)));
        for wrong in ["5", "GB", "0GB", "-1MB", "1GiB", "99999999999999GB"] {
            assert!(super::size(wrong).is_err(), "{wrong}");
        }
    }
}
