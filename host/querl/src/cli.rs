//! The command line as clap types, hints for misspelt commands and options, completions and man pages. The commands are in `commands/`.

use crate::commands::{
    audit, cache, config, data, deploy, doctor, export, import, model, plan, plugin, rag, release, run, serve, style,
    sweep, track, watch,
};
use crate::terminal::Verbosity;
use anyhow::Context;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, Parser, Subcommand};
use querl_core::config::keys;
use querl_core::text::misspelt;
use querl_pipeline::ledger::StageName;
use querl_pipeline::plugins::COMPILE_COMMAND;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Train a small language model to rewrite users' queries so that a knowledge base answers them better.
#[derive(Debug, Parser)]
#[command(name = "querl", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 success, 1 failure, 2 usage or configuration error, 3 stopped by a limit, 130 interrupted."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub noise: Noise,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Report before a training whether it can succeed, or what it takes on a cluster of GPUs
    Plan(plan::PlanArgs),
    /// Run all stages from query table to report; resume an interrupted run in the same folder
    Run(run::RunArgs),
    /// Run stage 1: the teacher rewrites each query
    #[command(mut_arg("from", run::from_up_to(StageName::Rewrite)))]
    Rewrite(run::ModelStageArgs),
    /// Run stage 2: retrieval looks up each rewrite
    #[command(mut_arg("from", run::from_up_to(StageName::Validate)))]
    Validate(run::ModelStageArgs),
    /// Run stage 3: filters keep or drop; train, val and test are split by query group
    #[command(mut_arg("from", run::from_up_to(StageName::Convert)))]
    Convert(run::StageArgs),
    /// Run stage 4: supervised fine-tuning
    #[command(mut_arg("from", run::from_up_to(StageName::Sft)))]
    Sft(run::ModelStageArgs),
    /// Run stage 5: reinforcement learning
    #[command(mut_arg("from", run::from_up_to(StageName::Rl)))]
    Rl(run::ModelStageArgs),
    /// Run stage 6: evaluate raw query, teacher, SFT and RL on the test split
    #[command(mut_arg("from", run::from_up_to(StageName::Eval)))]
    Eval(run::ModelStageArgs),
    /// Write eval.json and report.html of a run directory again and print the table
    Report(run::ReportArgs),
    /// Look for reward hacking in the recorded episodes of a run
    Audit(audit::AuditArgs),
    /// Search settings on the validation split: a grid over several seeds, with early stopping
    Sweep(sweep::SweepArgs),
    /// Show a running or finished run in the terminal
    Watch(watch::WatchArgs),
    /// Mirror a running or finished run to an experiment tracker
    Track(track::TrackArgs),
    /// Check a configuration, or list every key it may have
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Print statistics of the query table and of the data stages
    #[command(subcommand)]
    Data(data::DataCommand),
    /// Inspect, merge and export a model, or pretrain a small one
    #[command(subcommand)]
    Model(model::ModelCommand),
    /// Create, test, pack and inspect plugins
    #[command(subcommand)]
    Plugin(plugin::PluginCommand),
    /// Serve rewriters, a style model or knowledge bases over HTTP
    Serve(Box<serve::ServeArgs>),
    /// Check a run before its release, promote it, return to the one before
    #[command(subcommand)]
    Release(release::ReleaseCommand),
    /// Write a folder with all that serves the rewriters of runs on another machine
    Deploy(deploy::DeployArgs),
    /// Export a trained model for other programs, or a run for other engines
    #[command(subcommand)]
    Export(export::ExportCommand),
    /// Bring an adapter that another engine trained into a run
    #[command(subcommand)]
    Import(import::ImportCommand),
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
    /// Print the completion script of a shell
    #[command(hide = true)]
    Completions {
        /// bash, elvish, fish, powershell or zsh
        shell: clap_complete::Shell,
    },
    /// Print the man page of querl, or write the pages of all commands to a folder
    #[command(hide = true)]
    Man {
        /// Where querl.1, querl-run.1 and all others are written
        #[arg(value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Compile one plugin in a separate process that can be stopped
    #[command(name = COMPILE_COMMAND, hide = true)]
    CompilePlugin(plugin::CompileArgs),
    /// Score episodes with a plugin that was built as a dynamic library
    #[command(name = plugin::dev::REPLAY_COMMAND, hide = true)]
    ReplayNativeLibrary(plugin::dev::LibraryArgs),
}

impl Cli {
    /// Parses the command line; prints an error and ends the program if it is invalid.
    pub fn parse_or_exit() -> Self {
        let arguments: Vec<String> =
            std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect();
        Self::try_parse().unwrap_or_else(|error| with_hint(error, &arguments).exit())
    }
}

/// Adds a hint about what was probably meant: a command of a group, or `--set` for a key of the configuration.
fn with_hint(mut error: clap::Error, arguments: &[String]) -> clap::Error {
    if let Some(hint) = hint(&error, arguments) {
        // The usage line contains the suggested argument, too.
        if error.remove(ContextKind::SuggestedArg).is_some() {
            error.remove(ContextKind::Usage);
        }
        error.remove(ContextKind::SuggestedSubcommand);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
    }
    error
}

fn hint(error: &clap::Error, arguments: &[String]) -> Option<String> {
    /// Maximum number of suggested keys: a key such as `path` is in many sections.
    const MAX_NAMED: usize = 4;
    let cli = Cli::command();
    // Because `querl serve DIR` is a valid command, clap takes a misspelt subcommand as the folder.
    if let [_, serve, name, _, ..] = arguments
        && serve == "serve"
        && error.kind() == ErrorKind::ArgumentConflict
    {
        let near = misspelt(name, cli.find_subcommand(serve)?.get_subcommands().map(clap::Command::get_name))?;
        return Some(format!("use `querl serve {near}`"));
    }
    if let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand) {
        let first = arguments.iter().skip(1).find(|argument| !argument.starts_with('-'));
        let is_new_config = match first.map(String::as_str) {
            Some("config") => ["init", "create", "new"].contains(&name.as_str()),
            first => first == Some(name.as_str()) && ["init", "create"].contains(&name.as_str()),
        };
        if is_new_config {
            let hint =
                "copy examples/appliances/querl.toml and change its paths: a configuration with what a run needs";
            return Some(hint.into());
        }
        let has = |group: &&clap::Command| group.find_subcommand(name).is_some_and(|found| !found.is_hide_set());
        let groups = cli.get_subcommands().filter(has).map(|group| format!("`querl {} {name}`", group.get_name()));
        let groups: Vec<String> = groups.collect();
        return (!groups.is_empty()).then(|| format!("use {}", groups.join(" or ")));
    }
    let unknown = error.get(ContextKind::InvalidArg).filter(|_| error.kind() == ErrorKind::UnknownArgument);
    let Some(ContextValue::String(unknown)) = unknown else { return None };
    let mut command = &cli;
    for argument in arguments.iter().skip(1) {
        let Some(inner) = command.find_subcommand(argument) else { break };
        command = inner;
    }
    let has_option = |name: &str| command.get_arguments().any(|argument| argument.get_long() == Some(name));
    if !has_option("set") {
        return None;
    }
    let key = unknown.split('=').next()?;
    let at = arguments.iter().position(|argument| argument.split('=').next() == Some(key))?;
    let following = || arguments.get(at + 1).filter(|next| !next.starts_with('-')).map(String::as_str);
    let value = arguments[at].split_once('=').map(|(_, value)| value).or_else(following);
    let name = key.trim_start_matches('-').replace('-', "_");
    if name == "output_dir" && has_option("out") {
        return Some(format!("use --out {}", value.unwrap_or("DIR")));
    }
    let keys = keys().into_iter().map(|info| info.key);
    let named = keys.filter(|key| !key.contains("[]") && (*key == name || key.ends_with(&format!(".{name}"))));
    let settings = named.take(MAX_NAMED).map(|key| format!("--set {key}={}", value.unwrap_or("VALUE")));
    let settings: Vec<String> = settings.collect();
    (!settings.is_empty()).then(|| format!("use {}", settings.join(" or ")))
}

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
    pub fn verbosity(&self) -> Verbosity {
        match (self.quiet, self.verbose) {
            (true, _) => Verbosity::Quiet,
            (false, 0) => Verbosity::Normal,
            (false, 1) => Verbosity::Verbose,
            (false, _) => Verbosity::Debug,
        }
    }
}

pub fn print_completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut script = Vec::new(); // in memory, because clap_complete panics if it cannot write
    clap_complete::generate(shell, &mut Cli::command(), "querl", &mut script);
    std::io::stdout().write_all(&script).context("stdout")
}

pub fn write_man_pages(dir: Option<&Path>) -> anyhow::Result<()> {
    let Some(dir) = dir else {
        return clap_mangen::Man::new(Cli::command()).render(&mut std::io::stdout()).context("stdout");
    };
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
        .with_context(|| format!("{}: cannot be written", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_key_without_set_and_a_command_without_its_group_are_recognised() {
        let said = |line: &str| {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            with_hint(Cli::try_parse_from(&arguments).unwrap_err(), &arguments).to_string()
        };
        let of_key = said("querl run a.toml --max_steps 5");
        assert!(of_key.contains("tip: use --set ") && of_key.contains("--set rl.max_steps=5"), "{of_key}");
        assert!(of_key.contains("--set sft.max_steps=5"), "{of_key}");
        for line in ["querl run a.toml rl.max_steps=5", "querl run a.toml --rl.max_steps=5 -q"] {
            assert!(said(line).contains("tip: use --set rl.max_steps=5\n"), "{}", said(line));
        }
        assert!(said("querl run a.toml --max-steps -q").contains("rl.max_steps=VALUE"));
        // Regression: the hint was `--set output_dir=X`, next to a usage line with `--out`.
        let of_folder = said("querl run a.toml --output_dir X");
        assert!(of_folder.contains("tip: use --out X\n") && !of_folder.contains("Usage:"), "{of_folder}");
        assert!(said("querl pretrain").contains("tip: use `querl model pretrain`\n"), "{}", said("querl pretrain"));
        let said_of_serve = said("querl serve rewrit DIR");
        assert!(said_of_serve.contains("tip: use `querl serve rewrite`\n"), "{said_of_serve}");
        // Regression: the hint was `querl model init`, which creates random weights.
        for line in ["querl init", "querl config init", "querl config new"] {
            let said = said(line);
            assert!(said.contains("copy examples/appliances/querl.toml") && !said.contains("model init"), "{said}");
        }
        for line in ["querl doctor --max_steps 5", "querl run a.toml --nonsense 5", "querl nonsense"] {
            assert!(!said(line).contains("tip: use "), "{}", said(line));
        }
    }
}
