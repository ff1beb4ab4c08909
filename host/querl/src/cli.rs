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

/// Trains a small model to rewrite users' questions so that a knowledge base answers them better.
#[derive(Debug, Parser)]
#[command(name = "querl", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 stopped by a limit, 130 interrupted."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// How much to say on stderr.
    #[command(flatten)]
    pub noise: Noise,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// All stages from spreadsheet to report; goes on where an earlier run in the same folder stopped
    Run(run::RunArgs),
    /// Stage 1: the teacher rewrites each query
    Rewrite(run::StageArgs),
    /// Stage 2: retrieval says what each rewrite finds
    Validate(run::StageArgs),
    /// Stage 3: filters keep or drop; train, val and test are split by query group
    Convert(run::StageArgs),
    /// Stage 4: supervised fine-tuning
    Sft(run::StageArgs),
    /// Stage 5: reinforcement learning
    Rl(run::StageArgs),
    /// Stage 6: raw query, teacher, SFT and RL on the test split
    Eval(run::StageArgs),
    /// Writes eval.json and report.html of a run folder again and prints the table
    Report(report::ReportArgs),
    /// Shows a run in the terminal while it goes on, or as it ended
    Watch(watch::WatchArgs),
    /// Checks a configuration, or lists every key it may have
    #[command(subcommand)]
    Config(check::ConfigCommand),
    /// Looks at the query table and at what the data stages made of it
    #[command(subcommand)]
    Data(data::DataCommand),
    /// Looks at a model, merges and exports it, or makes a small one
    #[command(subcommand)]
    Model(model::ModelCommand),
    /// Makes, tests, packs and looks at plugins
    #[command(subcommand)]
    Plugin(plugin::PluginCommand),
    /// Offers the style model of a folder or of a run over HTTP, as `querl rm serve` does
    Serve(serve::ServeArgs),
    /// Offers retrieval as a service, or looks at one
    #[command(subcommand)]
    Rag(rag::RagCommand),
    /// Says what is kept of answers of teachers, judges and retrieval services, or forgets it
    #[command(subcommand)]
    Cache(cache::CacheCommand),
    /// Trains a classifier of the style of answers, measures it and asks it
    #[command(subcommand, name = "style", alias = "rm")]
    Style(style::StyleCommand),
    /// Says what this machine offers: devices, toolchain, caches
    Doctor(doctor::DoctorArgs),
    /// Compiles one plugin, in a process of its own that can be stopped
    #[command(name = COMPILE_COMMAND, hide = true)]
    CompilePlugin(compile_plugin::CompileArgs),
}

/// How much to say on stderr.
#[derive(Debug, Args)]
pub struct Noise {
    /// Say more on stderr; twice for still more
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
    /// Say nothing on stderr but errors
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
    /// The run folder [default: output_dir of the file]
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
