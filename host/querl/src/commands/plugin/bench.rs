//! `querl plugin bench`: what a plugin costs, by the size of the batch, and the limits that follow from it.

mod material;
mod measure;
mod shown;
mod suggest;

use super::settings;
use crate::args::Format;
use clap::Args;
use measure::{Bench, Job};
use querl_pipeline::failure::Stop;
use querl_plugin::{PluginKind, PluginSettings};
use std::io::Write;
use std::path::PathBuf;
use suggest::Suggestion;

/// Options of `querl plugin bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// A bundle, a component or a source folder
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Episodes to call it with, as a run records them or written by hand [default: 256 made-up ones]
    #[arg(long, value_name = "FILE.jsonl")]
    episodes: Option<PathBuf>,
    /// Sizes of batches
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [1, 8, 64],
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: Vec<u32>,
    /// A setting of the plugin: TOML value; a bare word is a text
    #[arg(long, value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Suggested limits are the most that was measured, times this
    #[arg(long, value_name = "FACTOR", default_value_t = 4.0, value_parser = factor)]
    margin: f64,
    #[command(flatten)]
    format: Format,
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(factor) if (1.0..=1000.0).contains(&factor) => Ok(factor),
        _ => Err("expected a number from 1 to 1000".into()),
    }
}

/// Calls the plugin with batches of each size and prints fuel, time, memory and limits.
pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let settings = settings::parse(&args.settings, "--settings")?;
    let episodes = match &args.episodes {
        Some(path) => material::read(path)?,
        None => material::invented(),
    };
    let bench = Bench::open(&args.path)?;
    let mut results = Vec::new();
    for kind in bench.plugin.kinds() {
        let job = Job::new(&bench, *kind, &settings, &episodes)?;
        // A prompt is made for one query at a time.
        let batches = if *kind == PluginKind::Prompt { &[1][..] } else { &args.batch };
        for n_items in batches {
            results.push(bench.measure(&job, *n_items as usize)?);
        }
    }
    let suggestion = Suggestion::of(&results, args.margin);
    let mut stdout = std::io::stdout().lock();
    match args.format.json {
        true => writeln!(stdout, "{:#}", shown::json(&bench, &results, &suggestion))?,
        false => stdout.write_all(shown::text(&bench, &results, &suggestion).as_bytes())?,
    }
    Ok(())
}
