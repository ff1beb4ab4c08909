//! `querl export`: exports a trained model in the format of another program, or a run for other engines. For the format of transformers and
//! vLLM see `querl model export`.

mod engines;
mod gguf;

use clap::Subcommand;
use querl_pipeline::exchange::{export_openrlhf, export_swift, export_trl};

#[derive(Debug, Subcommand)]
pub(crate) enum ExportCommand {
    /// Write a GGUF file for llama.cpp: the model with its adapter merged, tokenizer and chat template
    Gguf(gguf::GgufArgs),
    /// Write a folder that trains a run with verl on Ray: dataset, plugins, settings, adapter and scripts
    Verl(engines::VerlArgs),
    /// Write a folder that trains a run with GRPOTrainer of TRL: dataset, plugins, script and adapter
    Trl(engines::EngineArgs),
    /// Write a folder that trains a run with GRPO of ms-swift: dataset, plugins, script and adapter
    Swift(engines::EngineArgs),
    /// Write a folder that trains a run with OpenRLHF: dataset, plugins, scripts and adapter
    Openrlhf(engines::EngineArgs),
}

pub(crate) fn run(command: &ExportCommand) -> anyhow::Result<()> {
    match command {
        ExportCommand::Gguf(args) => gguf::run(args),
        ExportCommand::Verl(args) => engines::verl(args),
        ExportCommand::Trl(args) => engines::run(args, export_trl),
        ExportCommand::Swift(args) => engines::run(args, export_swift),
        ExportCommand::Openrlhf(args) => engines::run(args, export_openrlhf),
    }
}
