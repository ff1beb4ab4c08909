//! `querl config check` and `querl config schema`.

use crate::args::{ConfigArgs, Format, ThreadsArg, check_model_last, with_location};
use crate::model_hub;
use crate::terminal;
use clap::{Args, Subcommand};
use querl_core::config::{Config, KeyInfo, Overrides, json_schema, keys};
use querl_data::{check_knowledge_base, check_recording, open_queries};
use querl_pipeline::check_first_prompt;
use querl_pipeline::device;
use querl_pipeline::ledger::StageName;
use querl_pipeline::plugins::{PluginUse, Plugins};
use std::io::{ErrorKind, Write};

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check a configuration, the files that it names and its plugins' settings; builds no plugin. All values, defaults included, are
    /// printed on stdout; warnings and `FILE: ok` on stderr
    Check(CheckArgs),
    /// List every key: what it takes, its default, what it means (`--json`: as JSON Schema, for editors)
    Schema(Format),
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    threads: ThreadsArg,
    /// Skip the plugins: none is loaded, and their settings are not checked
    #[arg(long)]
    skip_plugins: bool,
}

pub fn run(command: &ConfigCommand) -> anyhow::Result<()> {
    let text = match command {
        ConfigCommand::Check(args) => return print_checked(args),
        ConfigCommand::Schema(Format { json: true }) => format!("{:#}\n", json_schema()),
        ConfigCommand::Schema(Format { json: false }) => schema_text(&keys()),
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// Prints the configuration, then the findings: a terminal ends with them. A reader of stdout that leaves early, such as `head`, changes
/// neither them nor the result.
fn print_checked(args: &CheckArgs) -> anyhow::Result<()> {
    let mut findings = Vec::new();
    let config = check(args, &mut findings);
    let text = config.as_ref().map_or_else(|_| String::new(), Config::to_toml);
    let written = std::io::stdout().write_all(text.as_bytes());
    findings.iter().for_each(|line| terminal::print(line));
    config?;
    if let Err(error) = written
        && error.kind() != ErrorKind::BrokenPipe
    {
        return Err(error.into());
    }
    terminal::print(&format!("{}: ok", args.config.path.display()));
    Ok(())
}

/// Adds to `findings` the warnings, and the planned GPU memory.
fn check(args: &CheckArgs, findings: &mut Vec<String>) -> anyhow::Result<Config> {
    let overrides = Overrides { threads: args.threads.threads, ..args.config.overrides(model_hub::find_cached) };
    let (config, opened) = check_model_last(&args.config.path, overrides, StageName::Eval, |config, file| {
        device::check_named(config)?;
        let table = open_queries(&config.data)?;
        let not_recorded = check_recording(config, &table)?;
        let unknown = check_knowledge_base(config, &table)?.map(|unknown| unknown.to_string());
        findings.extend(not_recorded.iter().chain(&unknown).map(|warning| format!("warning: {warning}")));
        if args.skip_plugins {
            return Ok(None);
        }
        let plugins = Plugins::open(config, PluginUse::Look).map_err(|error| with_location(error, file))?;
        Ok(Some((table, plugins)))
    })?;
    if let Some((table, plugins)) = opened {
        check_first_prompt(&config, &table, plugins.prompts.as_ref())?;
    }
    if config.device.starts_with("cuda") && config.model.path.join("config.json").is_file() {
        findings.extend(querl_pipeline::memory_of_config(&config)?);
    }
    Ok(config)
}

/// The keys in the layout of a TOML file: sections, then `key = default  # allowed values; meaning`.
fn schema_text(keys: &[KeyInfo]) -> String {
    let mut text = String::new();
    let mut section = "";
    for info in keys {
        let (own_section, name) = info.key.rsplit_once('.').unwrap_or(("", &info.key));
        if own_section != section {
            section = own_section;
            text.push_str(&match own_section.strip_suffix("[]") {
                Some(list) => format!("\n[[{list}]]\n"),
                None => format!("\n[{own_section}]\n"),
            });
        }
        let default = match (&info.default, info.required) {
            (Some(default), _) => default.as_str(),
            (None, true) => "(required)",
            (None, false) => "(unset)",
        };
        text.push_str(&format!("{name} = {default}  # {}; {}\n", info.expects, info.meaning));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schema_reads_like_a_file() {
        let text = schema_text(&keys());
        assert!(text.contains("\n[rl]\n"), "{text}");
        assert!(text.contains("gae_lambda = 0.95  # a number, 0.0 to 1.0; GAE's lambda.\n"), "{text}");
        assert!(text.contains("\n[[plugins.rewards]]\n"), "{text}");
        assert!(text.contains("path = (required)  # a string; A `.querl` bundle"), "{text}");
    }
}
