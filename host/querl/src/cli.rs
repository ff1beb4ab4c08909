//! The command line's grammar. What each command does is in `commands/`, one file each.

use crate::commands::{
    cache, check, compile_plugin, data, doctor, model, plugin, rag, report, run, serve, style, watch,
};
use crate::terminal::Verbosity;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use querl_core::config::{Config, Overrides, load};
use querl_pipeline::ledger::StageName;
use querl_pipeline::plugins::host::COMPILE_COMMAND;
use std::path::PathBuf;

/// Train a small language model to rewrite users' queries so that a knowledge base answers them better.
#[derive(Debug, Parser)]
#[command(name = "querl", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 success, 1 failure, 2 usage or configuration error, 3 stopped by a limit, 130 interrupted."
)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
    /// Verbosity on stderr.
    #[command(flatten)]
    pub noise: Noise,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run all stages from query table to report; resume an interrupted run in the same folder
    Run(run::RunArgs),
    /// Run stage 1: the teacher rewrites each query
    Rewrite(run::StageArgs),
    /// Run stage 2: retrieval looks up each rewrite
    Validate(run::StageArgs),
    /// Run stage 3: filters keep or drop; train, val and test are split by query group
    Convert(run::StageArgs),
    /// Run stage 4: supervised fine-tuning
    Sft(run::StageArgs),
    /// Run stage 5: reinforcement learning
    Rl(run::StageArgs),
    /// Run stage 6: evaluate raw query, teacher, SFT and RL on the test split
    Eval(run::StageArgs),
    /// Write eval.json and report.html of a run directory again and print the table
    Report(report::ReportArgs),
    /// Show a running or finished run in the terminal
    Watch(watch::WatchArgs),
    /// Check a configuration, or list every key it may have
    #[command(subcommand)]
    Config(check::ConfigCommand),
    /// Print statistics of the query table and of the data stages
    #[command(subcommand)]
    Data(data::DataCommand),
    /// Inspect, merge and export a model, or pretrain a small one
    #[command(subcommand)]
    Model(model::ModelCommand),
    /// Create, test, pack and inspect plugins
    #[command(subcommand)]
    Plugin(plugin::PluginCommand),
    /// Serve a style model or knowledge bases over HTTP
    Serve(serve::ServeArgs),
    /// Check a retrieval service, or serve retrieval
    #[command(subcommand)]
    Rag(rag::RagCommand),
    /// Print statistics of the response cache, or clear it
    #[command(subcommand)]
    Cache(cache::CacheCommand),
    /// Train, evaluate and use the style reward model (alias: rm)
    #[command(subcommand, name = "style", alias = "rm")]
    Style(style::StyleCommand),
    /// Print the devices, toolchain and caches of this machine
    Doctor(doctor::DoctorArgs),
    /// Compile one plugin in a separate process that can be stopped
    #[command(name = COMPILE_COMMAND, hide = true)]
    CompilePlugin(compile_plugin::CompileArgs),
}

/// Verbosity on stderr.
#[derive(Debug, Args)]
pub struct Noise {
    /// Increase verbosity (-vv for debug)
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
    /// Print only errors on stderr
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
}

impl Noise {
    /// The flags as a level.
    pub fn verbosity(&self) -> Verbosity {
        match (self.quiet, self.verbose) {
            (true, _) => Verbosity::Quiet,
            (false, 0) => Verbosity::Normal,
            (false, 1) => Verbosity::Verbose,
            (false, _) => Verbosity::Debug,
        }
    }
}

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Args)]
pub struct Format {
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// A configuration file with overrides.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// The configuration file
    #[arg(value_name = "CONFIG")]
    pub path: PathBuf,
    /// Replace a key of the file: dotted key, TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// The run directory [default: output_dir of the file]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Worker threads [default: threads of the file, else all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

impl ConfigArgs {
    /// Reads and checks the configuration.
    ///
    /// # Errors
    /// As [`load()`].
    pub fn load(&self) -> anyhow::Result<Config> {
        let overrides = Overrides { set: self.set.clone(), out: self.out.clone(), threads: self.threads };
        Ok(load(&self.path, &overrides)?)
    }
}

/// Parses the name of a stage.
pub fn stage_name() -> impl TypedValueParser<Value = StageName> {
    let values = StageName::ALL.map(|stage| PossibleValue::new(stage.as_str()).help(stage.meaning()));
    PossibleValuesParser::new(values).map(|name| {
        let stage = StageName::ALL.into_iter().find(|stage| stage.as_str() == name);
        stage.expect("the parser takes names of stages alone")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn grammar_is_consistent() {
        Cli::command().debug_assert();
    }
}
