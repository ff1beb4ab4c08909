//! `querl serve`: the style model of a folder or of a run, over HTTP.

use super::style::{self, ServeOptions};
use clap::Args;
use querl_core::config::{Config, Overrides, StyleModelConfig, load, load_resolved};
use querl_core::run_dir::RunDir;
use querl_pipeline::failure::Stop;
use querl_style::ClassifierOptions;
use std::path::{Path, PathBuf};

/// What `querl serve` takes.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ServeArgs {
    /// A classifier's folder; or a run's folder or configuration, whose style model is served
    #[arg(value_name = "CONFIG|DIR", required_unless_present = "model")]
    place: Option<PathBuf>,
    /// A classifier's folder, as `querl style serve` has it
    #[arg(long, value_name = "DIR", conflicts_with = "place")]
    model: Option<PathBuf>,
    /// The model that an adapter was trained on [default: the run's]
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Most tokens of a text; of longer ones question and answer are shortened [default: the run's, else 512]
    #[arg(long, visible_alias = "max-length", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_length: Option<u32>,
    /// Give probabilities as sure as they are right: by the temperature that was fitted in training
    #[arg(long)]
    calibrated: bool,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
    #[command(flatten)]
    options: ServeOptions,
}

/// Serves until interrupted.
///
/// # Errors
/// The place holds nothing that can be served, or as `querl style serve`.
pub fn run(args: &ServeArgs) -> anyhow::Result<()> {
    style::serve(&model_of(args)?, &args.options)
}

fn model_of(args: &ServeArgs) -> anyhow::Result<ClassifierOptions> {
    let named = match (&args.model, &args.place) {
        (None, Some(place)) => of_run(place)?,
        _ => None,
    };
    let folder = args.model.as_ref().or(args.place.as_ref()).expect("the grammar asks for one of them");
    let config = named.unwrap_or_else(|| StyleModelConfig { path: Some(folder.clone()), ..Default::default() });
    let mut model = ClassifierOptions::of(&config).expect("a path is there");
    model.base = args.base.clone().or(model.base);
    model.max_length = args.max_length.unwrap_or(model.max_length);
    model.calibrated |= args.calibrated;
    model.threads = args.threads;
    Ok(model)
}

/// The style model that a run names; `None` where the place is no run's.
fn of_run(place: &Path) -> anyhow::Result<Option<StyleModelConfig>> {
    let resolved = RunDir::new(place).config();
    let config: Config = match (place.is_dir(), resolved.is_file()) {
        (true, false) => return Ok(None),
        (true, true) => load_resolved(&resolved)?,
        (false, _) => load(place, &Overrides::default())?,
    };
    let style = config.plugins.style_model;
    match style.path {
        Some(_) => Ok(Some(style)),
        None => {
            let message =
                "has no style model to serve; name a classifier of `querl style train` as plugins.style_model.path";
            Err(Stop::usage(format!("{}: {message}", place.display())).into())
        }
    }
}
