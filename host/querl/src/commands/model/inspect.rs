//! `querl model inspect`: what a model directory or an adapter holds.

use crate::args::Format;
use crate::args::usage;
use clap::Args;
use querl_model::{AdapterSummary, ModelSummary, inspect_adapter, inspect_model, is_adapter};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;

/// What `querl model inspect` takes.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A Hugging Face directory, or an adapter's folder
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    #[command(flatten)]
    format: Format,
}

/// Looks at the folder and says what is in it.
pub(crate) fn run(args: &InspectArgs) -> anyhow::Result<()> {
    if is_adapter(&args.directory) {
        let summary = inspect_adapter(&args.directory).map_err(usage)?;
        return print(args.format, &summary, adapter_lines(&summary));
    }
    let summary = inspect_model(&args.directory).map_err(usage)?;
    print(args.format, &summary, model_lines(&summary))
}

fn print(format: Format, summary: &impl Serialize, lines: Vec<(&str, String)>) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if format.json {
        serde_json::to_writer_pretty(&mut out, summary)?;
        writeln!(out)?;
        return Ok(());
    }
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    for (name, value) in lines {
        writeln!(out, "{name:width$}  {value}")?;
    }
    Ok(())
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
        ("tied embedding", model.tied_embedding.to_string()),
    ]
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
