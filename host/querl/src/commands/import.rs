//! `querl import`: imports an adapter that another engine trained as the result of a run's stage `rl`.

use crate::args::{Format, load_config};
use crate::model_hub;
use crate::terminal::Terminal;
use clap::{Args, Subcommand};
use querl_core::config::Overrides;
use querl_pipeline::exchange::{CheckpointFormat, Imported, import_adapter};
use querl_pipeline::failure::run_in;
use querl_pipeline::ledger::StageName;
use querl_pipeline::pins::OnPluginChange;
use querl_pipeline::run::Run;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, Subcommand)]
pub(crate) enum ImportCommand {
    /// Import the adapter in a folder that PEFT wrote: of TRL, ms-swift, OpenRLHF
    Peft(PeftArgs),
    /// Import the adapter of a checkpoint of verl, from which its merger has made `lora_adapter`
    Verl(VerlArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The run directory whose `rl` result the adapter becomes; an earlier result is kept in `previous`
    #[arg(long, value_name = "RUN_DIR")]
    run: PathBuf,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
pub(crate) struct PeftArgs {
    /// The folder with adapter_config.json; with it metrics.jsonl or trainer_state.json, whose figures are imported
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Debug, Args)]
pub(crate) struct VerlArgs {
    /// The folder of a step (`global_step_100`), or that of the merger; metrics.jsonl there or in the exported folder is imported
    #[arg(value_name = "CHECKPOINT")]
    folder: PathBuf,
    #[command(flatten)]
    run: RunArgs,
}

pub(crate) fn run(command: &ImportCommand) -> anyhow::Result<()> {
    let (format, folder, args) = match command {
        ImportCommand::Peft(PeftArgs { folder, run }) => (CheckpointFormat::Peft, folder, run),
        ImportCommand::Verl(VerlArgs { folder, run }) => (CheckpointFormat::Verl, folder, run),
    };
    let imported = import_adapter(&open(&args.run)?, format, folder)?;
    args.format.print(&imported, || text(&imported, &args.run))
}

/// Opens the run in a folder, which may have been moved since it was made.
fn open(folder: &Path) -> anyhow::Result<Run> {
    let config_path = run_in(folder)?.config();
    let overrides = Overrides {
        out: Some(folder.to_owned()),
        model_hub: Some(model_hub::find),
        without_keys: true,
        ..Overrides::default()
    };
    let config = load_config(&config_path, overrides)?;
    // `StageName::Convert`: as for the data stages, no model is opened on a device.
    Run::open(config, &config_path, StageName::Convert, OnPluginChange::Refuse, Arc::new(Terminal))
}

fn text(imported: &Imported, run: &Path) -> String {
    let Imported { adapter, metrics, n_steps_with_metrics, previous } = imported;
    let (adapter, run) = (adapter.display(), run.display());
    let figures = match metrics {
        Some(log) => format!("with metrics of {n_steps_with_metrics} steps from {}", log.display()),
        None => "without metrics: no metrics.jsonl or trainer_state.json was found".to_owned(),
    };
    let kept =
        previous.as_ref().map(|path| format!("; the earlier results are in {}", path.display())).unwrap_or_default();
    format!(
        "{run}: rl is {adapter}, {figures}{kept}\nevaluate it with `querl eval {run}/config.resolved.toml --out {run}`\n"
    )
}
