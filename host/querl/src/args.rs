//! Options that several commands share.

use crate::model_hub;
use anyhow::Context;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use querl_core::config::{Config, Overrides, load};
use querl_pipeline::failure::Stop;
use querl_pipeline::interrupt;
use querl_pipeline::ledger::StageName;
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;

/// How results are printed.
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
    pub fn load(&self) -> anyhow::Result<Config> {
        let overrides = Overrides {
            set: self.set.clone(),
            out: self.out.clone(),
            threads: self.threads,
            model_hub: Some(model_hub::find),
        };
        let config = load(&self.path, &overrides);
        interrupt::check()?;
        Ok(config?)
    }
}

/// Parses one of some names, each with its value and its help, which may be empty.
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
    one_of(StageName::ALL.map(|stage| (stage.as_str(), stage, stage.meaning())))
}

/// An input or a setting that cannot be used: exit code 2.
pub fn usage(error: impl std::fmt::Display) -> Stop {
    Stop::usage(error)
}
