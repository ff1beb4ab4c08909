//! `querl export gguf`: writes a model as a GGUF file for llama.cpp.

use crate::args::{Format, one_of, usage};
use crate::model_hub;
use clap::Args;
use querl_core::config::RewriteForm;
use querl_core::edits::ARE_EDITS;
use querl_core::run_dir::RunDir;
use querl_model::{DecoderConfig, GgufDtype, GgufExport, LoraAdapter, ModelError, check_directory, export_gguf};
use querl_pipeline::failure::Stop;
use querl_pipeline::serving::ServedRun;
use serde::Serialize;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(crate) struct GgufArgs {
    /// A finished run, whose last trained model is written; or a Hugging Face directory, or a model's name on the hub
    #[arg(value_name = "RUN_DIR|MODEL_DIR")]
    model: PathBuf,
    /// A PEFT adapter that is merged into MODEL_DIR
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// The file to write, a new one
    #[arg(long, value_name = "FILE.gguf")]
    out: PathBuf,
    /// Type of the matrices: f32, f16, bf16, q8_0 [default: as they are stored]
    #[arg(long, value_parser = one_of(GgufDtype::ALL.map(|dtype| (dtype.name(), dtype, ""))), hide_possible_values = true)]
    dtype: Option<GgufDtype>,
    #[command(flatten)]
    format: Format,
}

pub(super) fn run(args: &GgufArgs) -> anyhow::Result<()> {
    let (model, adapter, form) = trained_model(args)?;
    check_directory(&model).map_err(Stop::of_model)?;
    let config = DecoderConfig::load(&model.join("config.json")).map_err(Stop::of_model)?;
    let adapter = adapter.map(|path| LoraAdapter::load(&path, &config)).transpose().map_err(Stop::of_model)?;
    let written = export_gguf(&model, adapter.as_ref(), &args.out, args.dtype).map_err(|error| match error {
        ModelError::BadFile { .. } | ModelError::MissingFile { .. } => usage(error).into(),
        error => anyhow::Error::from(error),
    })?;
    let note = (form == RewriteForm::Edit).then(|| format!("responses {ARE_EDITS}; the client must apply them"));
    let exported = Exported { written, note };
    args.format.print(&exported, || text(&exported, &args.out))
}

/// The written file, and a note if a client must convert the responses.
#[derive(Serialize)]
struct Exported {
    #[serde(flatten)]
    written: GgufExport,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// Folders of the model and its adapter, and the form of the model's responses.
fn trained_model(args: &GgufArgs) -> anyhow::Result<(PathBuf, Option<PathBuf>, RewriteForm)> {
    if !RunDir::new(&args.model).config().is_file() {
        return Ok((model_hub::folder(&args.model)?, args.adapter.clone(), RewriteForm::Full));
    }
    if args.adapter.is_some() {
        let run = args.model.display();
        return Err(usage(format!("--adapter: {run} is a run, which has its own; name a model's folder")).into());
    }
    let run = ServedRun::in_folder(&args.model)?;
    let (model, adapter) = run.trained_model()?;
    Ok((model, adapter, run.config.data.rewrite_form))
}

fn text(Exported { written, note }: &Exported, out: &Path) -> String {
    let GgufExport { n_parameters, dtype, architecture, pre_tokenizer, context_length, .. } = written;
    let note = note.as_ref().map_or_else(String::new, |note| format!("note: {note}\n"));
    format!(
        "{n_parameters} parameters in {dtype}, architecture {architecture}, pre-tokenizer {pre_tokenizer}, {context_length} positions: {}\n{note}",
        out.display()
    )
}
