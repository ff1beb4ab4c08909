//! `querl serve WHAT`: a style model or knowledge bases over HTTP.

use super::rag;
use super::style::{self, ServeOptions};
use crate::terminal::report_new_form;
use clap::{Args, Subcommand};
use querl_core::config::{Config, Overrides, StyleModelConfig, load, load_resolved};
use querl_core::run_dir::RunDir;
use querl_pipeline::failure::Stop;
use querl_style::ClassifierOptions;
use std::path::{Path, PathBuf};

/// Options of `querl serve`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct ServeArgs {
    #[command(subcommand)]
    what: Option<ServeCommand>,
    /// The form before there was something else to serve.
    #[command(flatten)]
    style: StyleArgs,
}

#[derive(Debug, Subcommand)]
enum ServeCommand {
    /// Serve a style model: /predict, /classify, /health, /ready, /metrics, /openapi.json
    Style(StyleArgs),
    /// Serve knowledge bases over the general_rag interface, each under the tenant and kb_name of its configuration
    Rag(rag::ServeArgs),
}

/// Options of `querl serve style`.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
struct StyleArgs {
    /// A classifier's folder; or a run's folder or configuration, whose style model is served
    #[arg(value_name = "CONFIG|DIR")]
    path: Option<PathBuf>,
    /// A classifier's folder
    #[arg(long, value_name = "DIR", conflicts_with = "path")]
    model: Option<PathBuf>,
    /// The model that an adapter was trained on [default: the run's]
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Most tokens of a text; of longer ones question and answer are shortened [default: the run's, else 512]
    #[arg(long, visible_alias = "max-length", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_length: Option<u32>,
    /// Calibrate probabilities by the temperature that was fitted in training
    #[arg(long)]
    calibrated: bool,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
    #[command(flatten)]
    options: ServeOptions,
}

pub fn run(args: &ServeArgs) -> anyhow::Result<()> {
    match &args.what {
        Some(ServeCommand::Style(args)) if args.model.is_none() && args.path.is_none() => {
            // The former `querl serve FOLDER`, of a folder that is called `style`.
            let path = Some(PathBuf::from("style")).filter(|folder| folder.is_dir());
            serve_style(&StyleArgs { path, ..args.clone() })
        }
        Some(ServeCommand::Style(args)) => serve_style(args),
        Some(ServeCommand::Rag(args)) => rag::serve(args),
        None => {
            report_new_form("querl serve DIR", "querl serve style DIR");
            serve_style(&args.style)
        }
    }
}

fn serve_style(args: &StyleArgs) -> anyhow::Result<()> {
    style::serve(&model_of(args)?, &args.options)
}

fn model_of(args: &StyleArgs) -> anyhow::Result<ClassifierOptions> {
    let named = match (&args.model, &args.path) {
        (None, Some(path)) => of_run(path)?,
        _ => None,
    };
    let missing = || Stop::usage("nothing to serve; name a classifier's folder, or a run's folder or configuration");
    let folder = args.model.as_ref().or(args.path.as_ref()).ok_or_else(missing)?;
    let config = named.unwrap_or_else(|| StyleModelConfig { path: Some(folder.clone()), ..Default::default() });
    let mut model = ClassifierOptions::of(&config).expect("a path is there");
    model.base = args.base.clone().or(model.base);
    model.max_length = args.max_length.unwrap_or(model.max_length);
    model.calibrated |= args.calibrated;
    model.threads = args.threads;
    Ok(model)
}

/// The style model that a run names; `None` where the path is no run's.
fn of_run(path: &Path) -> anyhow::Result<Option<StyleModelConfig>> {
    let resolved = RunDir::new(path).config();
    let config: Config = match (path.is_dir(), resolved.is_file()) {
        (true, false) => return Ok(None),
        (true, true) => load_resolved(&resolved)?,
        (false, _) => load(path, &Overrides::default())?,
    };
    let style = config.plugins.style_model;
    match style.path {
        Some(_) => Ok(Some(style)),
        None => {
            let message =
                "has no style model to serve; name a classifier of `querl style train` as plugins.style_model.path";
            Err(Stop::usage(format!("{}: {message}", path.display())).into())
        }
    }
}
