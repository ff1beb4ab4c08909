//! Options that several commands share.

use crate::{model_hub, terminal};
use anyhow::Context;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use querl_core::config::{Config, ConfigFile, MissingModel, ModelHub, Overrides, load, load_with_file};
use querl_pipeline::failure::{Stop, key_of};
use querl_pipeline::ledger::StageName;
use querl_plugin::PluginSettings;
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Option for the format in which a command prints its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Args)]
pub struct Format {
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

impl Format {
    /// Prints a result on stdout: JSON, or `text`, which ends with a line break.
    pub fn print(self, result: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
        let text = if self.json { serde_json::to_string_pretty(result)? + "\n" } else { text() };
        std::io::stdout().write_all(text.as_bytes()).context("stdout")
    }
}

/// Options for a configuration file and overrides of its keys.
#[derive(Debug, Clone, Args)]
pub struct ConfigArgs {
    /// The configuration file
    #[arg(value_name = "CONFIG")]
    pub path: PathBuf,
    /// Replace a key of the configuration, such as rl.max_steps=5: a TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// The run directory [default: output_dir of the file]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Option for the number of worker threads, of commands that compute or print the configuration.
#[derive(Debug, Clone, Copy, Args)]
pub struct ThreadsArg {
    /// Worker threads [default: threads of the file, else all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

impl ConfigArgs {
    /// Reads and checks the configuration, for a command that opens no model: models that are not downloaded keep their names, and the
    /// folder of `model.path` need not exist.
    pub fn load_without_model(&self) -> anyhow::Result<Config> {
        let overrides = self.overrides(model_hub::find_cached);
        load_config(&self.path, Overrides { missing_model: MissingModel::Allowed, ..overrides })
    }

    /// Like [`Self::load_without_model`], but downloads the models of retrieval, for a command that opens them.
    pub fn load_for_retrieval(&self) -> anyhow::Result<Config> {
        let overrides = Overrides { retrieval_hub: Some(model_hub::find), ..self.overrides(model_hub::find_cached) };
        load_config(&self.path, Overrides { missing_model: MissingModel::Allowed, ..overrides })
    }

    /// The configuration overrides that the flags set; models that the configuration names are looked up in `hub`.
    pub fn overrides(&self, hub: ModelHub) -> Overrides {
        Overrides { set: self.set.clone(), out: self.out.clone(), model_hub: Some(hub), ..Overrides::default() }
    }
}

/// Adds to an error about a configuration key the file and line that set the key.
pub fn with_location(error: anyhow::Error, file: &ConfigFile) -> anyhow::Error {
    match key_of(&error).and_then(|key| file.location_of(&key)) {
        Some(location) => error.context(location),
        None => error,
    }
}

/// Prints that `model.path` was taken as a model's name on a hub, because there is no such folder.
pub fn note_hub_name(config: &Config) {
    if let Some(name) = querl_pipeline::hub_name(config) {
        let note = "no such folder; taken as a model's name on a hub, which is downloaded when it is needed";
        terminal::print(&format!("model.path is {:?}: {note}", name.display().to_string()));
    }
}

/// Reads and checks the configuration, runs `checks`, and checks the model's folder last, so that a missing folder hides no other
/// error.
pub fn check_model_last<T>(
    path: &Path,
    overrides: Overrides,
    last: StageName,
    checks: impl FnOnce(&Config, &ConfigFile) -> anyhow::Result<T>,
) -> anyhow::Result<(Config, T)> {
    let overrides = Overrides { missing_model: MissingModel::Allowed, ..overrides };
    let (config, file) = load_with_file(path, &overrides)?;
    let checked = checks(&config, &file)?;
    file.check_model(&config)?;
    note_hub_name(&config);
    querl_pipeline::preflight(&config, last)?;
    Ok((config, checked))
}

pub fn load_config(path: &Path, overrides: Overrides) -> anyhow::Result<Config> {
    Ok(load(path, &overrides)?)
}

/// A clap value parser for one of several names. `values`: name, value and help text, which may be empty.
pub fn one_of<T: Clone + Send + Sync + 'static>(
    values: impl IntoIterator<Item = (&'static str, T, &'static str)>,
) -> impl TypedValueParser<Value = T> {
    let values: Vec<(&str, T, &str)> = values.into_iter().collect();
    let possible = |(name, _, help): &(&'static str, T, &'static str)| match help.is_empty() {
        true => PossibleValue::new(*name),
        false => PossibleValue::new(*name).help(*help),
    };
    PossibleValuesParser::new(values.iter().map(possible).collect::<Vec<_>>()).map(move |name| {
        let found = values.iter().find(|(known, ..)| *known == name);
        found.expect("the parser accepts only these names").1.clone()
    })
}

pub fn stage_name() -> impl TypedValueParser<Value = StageName> {
    stage_up_to(StageName::Eval)
}

/// A clap value parser for the name of a stage up to `last`.
pub fn stage_up_to(last: StageName) -> impl TypedValueParser<Value = StageName> {
    let stages = StageName::ALL.into_iter().filter(move |stage| *stage <= last);
    one_of(stages.map(|stage| (stage.as_str(), stage, stage.meaning())))
}

/// An error about an input or setting that cannot be used; the exit code is 2.
pub fn usage(error: impl std::fmt::Display) -> Stop {
    Stop::usage(error)
}

/// Parses assignments `KEY=VALUE` with TOML values; a value that is not valid TOML is a string. `flag`: the option, for error messages.
pub fn parse_settings(assignments: &[String], flag: &str) -> Result<PluginSettings, Stop> {
    let mut settings = PluginSettings::new();
    for text in assignments {
        let (key, value) = text.split_once('=').filter(|(key, _)| !key.trim().is_empty()).ok_or_else(|| {
            Stop::usage(format!("{flag} `{text}`: expected KEY=VALUE, for example `{flag} max_chars=40`"))
        })?;
        if settings.insert(key.trim().to_owned(), toml_value(value.trim())).is_some() {
            return Err(Stop::usage(format!("{flag}: `{}` is given twice; expected once", key.trim())));
        }
    }
    Ok(settings)
}

fn toml_value(text: &str) -> toml::Value {
    // With more than one key, the text contains a line break and another assignment.
    let table = toml::from_str::<toml::Table>(&format!("value = {text}")).ok().filter(|table| table.len() == 1);
    table.and_then(|mut table| table.remove("value")).unwrap_or_else(|| toml::Value::String(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::parse_settings;

    #[test]
    fn values_are_toml_or_texts() {
        let texts = ["a=40", "b=短", "c=['x', 'y']", "d = 0.5", "e=x=y", "f=1\ng = 2"].map(str::to_owned);
        let settings = parse_settings(&texts, "--settings").unwrap();
        let shown: Vec<_> = settings.values().map(ToString::to_string).collect();
        assert_eq!(shown, ["40", "\"短\"", "[\"x\", \"y\"]", "0.5", "\"x=y\"", "\"\"\"\n1\ng = 2\"\"\""]);
        for bad in ["a", "=1"] {
            assert!(
                parse_settings(&[bad.to_owned()], "--settings").unwrap_err().to_string().contains("expected KEY=VALUE")
            );
        }
        let twice = ["a=1".to_owned(), "a=2".to_owned()];
        let expected = "--settings: `a` is given twice; expected once";
        assert_eq!(parse_settings(&twice, "--settings").unwrap_err().to_string(), expected);
    }
}
