//! `querl export verl`, `trl`, `swift` and `openrlhf`: exports a run as a folder with which another engine trains.

use crate::args::{Format, load_config, one_of};
use crate::commands::deploy::base_files;
use crate::model_hub;
use crate::new_folder::write_folder;
use clap::builder::TypedValueParser;
use clap::{Args, value_parser};
use querl_core::config::{Overrides, RlAlgorithm};
use querl_pipeline::exchange::{Cluster, Exported, ExportedRun, export_verl};
use querl_pipeline::serving::BaseFiles;
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    /// A run with finished data stages, whose SFT adapter is exported if there is one; or its configuration
    #[arg(value_name = "RUN_DIR|CONFIG")]
    run: PathBuf,
    /// Where to write: a new or empty folder
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Copy the base model, or name the folder where it is
    #[arg(long, value_name = "WHAT", default_value = "reference", value_parser = base_files())]
    base: BaseFiles,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
pub(crate) struct VerlArgs {
    #[command(flatten)]
    engine: EngineArgs,
    /// Number of machines
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u16).range(1..=4096))]
    nodes: u16,
    /// GPUs of each machine
    #[arg(long, value_name = "M", default_value_t = 8, value_parser = value_parser!(u16).range(1..=64))]
    gpus: u16,
    /// Another algorithm than `rl.algorithm`: ppo, grpo
    #[arg(long, value_name = "NAME", value_parser = algorithm(), hide_possible_values = true)]
    algorithm: Option<RlAlgorithm>,
}

fn algorithm() -> impl TypedValueParser<Value = RlAlgorithm> {
    one_of([("ppo", RlAlgorithm::Ppo, ""), ("grpo", RlAlgorithm::Grpo, "")])
}

pub(super) fn verl(args: &VerlArgs) -> anyhow::Result<()> {
    let VerlArgs { engine, nodes, gpus, algorithm } = args;
    let run = open(&engine.run)?;
    let run = match algorithm {
        Some(algorithm) => run.with_algorithm(*algorithm)?,
        None => run,
    };
    let cluster = Cluster { n_nodes: usize::from(*nodes), gpus_per_node: usize::from(*gpus) };
    let exported = write_folder(&engine.out, |folder| export_verl(&run, cluster, engine.base, folder))?;
    engine.print(&exported)
}

/// Function that writes the folder for one engine.
type Export = fn(&ExportedRun, BaseFiles, &Path) -> anyhow::Result<Exported>;

pub(super) fn run(args: &EngineArgs, export: Export) -> anyhow::Result<()> {
    let run = open(&args.run)?;
    let exported = write_folder(&args.out, |folder| export(&run, args.base, folder))?;
    args.print(&exported)
}

/// Opens the run in a folder, or the run of a configuration file.
fn open(path: &Path) -> anyhow::Result<ExportedRun> {
    if path.is_dir() {
        return ExportedRun::in_folder(path);
    }
    let overrides = Overrides { model_hub: Some(model_hub::find), without_keys: true, ..Overrides::default() };
    ExportedRun::of_config(load_config(path, overrides)?)
}

impl EngineArgs {
    fn print(&self, exported: &Exported) -> anyhow::Result<()> {
        self.format.print(exported, || text(exported, &self.out, self.base))
    }
}

fn text(exported: &Exported, out: &Path, base: BaseFiles) -> String {
    let Exported { n_train, n_val, has_adapter, plugins, without_equivalent, notes, outside } = exported;
    let adapter = if *has_adapter { "the SFT adapter" } else { "no adapter" };
    let out = out.display();
    let mut text = format!(
        "{out}: {n_train} prompts to train on, {n_val} to validate on, {adapter}, plugins {}\n",
        plugins.join(", ")
    );
    for key in without_equivalent {
        let _ = writeln!(text, "no equivalent: {key}");
    }
    for note in notes {
        let _ = writeln!(text, "note: {note}");
    }
    for path in outside {
        let _ = writeln!(text, "outside of the folder: {}", path.display());
    }
    if !outside.is_empty() {
        let remedy = match base {
            BaseFiles::Referenced => "; `--base copy` copies the base model into the folder",
            BaseFiles::Copied => "",
        };
        let _ = writeln!(text, "each machine that trains needs them at the same path{remedy}");
    }
    let _ = writeln!(text, "{out}/README.md has the commands, {out}/mapping.md each key");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_model_outside_of_the_folder_has_a_remedy() {
        let exported = Exported {
            n_train: 1,
            n_val: 1,
            has_adapter: false,
            plugins: Vec::new(),
            without_equivalent: Vec::new(),
            notes: Vec::new(),
            outside: vec!["/models/qwen".into()],
        };
        let text = |base| text(&exported, Path::new("verl"), base);
        let referenced = text(BaseFiles::Referenced);
        assert!(referenced.contains("outside of the folder: /models/qwen\n"), "{referenced}");
        assert!(referenced.contains("`--base copy` copies the base model into the folder\n"), "{referenced}");
        assert!(!text(BaseFiles::Copied).contains("--base copy"));
    }
}
