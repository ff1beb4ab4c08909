//! `querl plan`: reports before a training whether it is likely to succeed; with `--on`, predicts memory and time on a cluster of GPUs.

use crate::args::{Format, ThreadsArg, usage};
use crate::model_hub;
use crate::terminal::Terminal;
use clap::Args;
use querl_core::config::{MissingModel, ModelHub, Overrides};
use querl_model::DecoderConfig;
use querl_pipeline::RewardEnvironment;
use querl_pipeline::failure::Stop;
use querl_pipeline::plan::scale::Cluster;
use querl_pipeline::plan::{PlanOptions, plan, plan_on};
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// A configuration, or a run's folder
    #[arg(value_name = "CONFIG|RUN_DIR")]
    path: PathBuf,
    /// Replace a key of the configuration, such as rl.max_steps=5: a TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The run directory of a configuration [default: output_dir of the file]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    threads: ThreadsArg,
    /// Leave out the forward pass of the base model, which need not be there; without it there is no trial rollout either
    #[arg(long = "no_model", visible_alias = "no-model")]
    no_model: bool,
    /// Leave out the trial rollout; no plugin is opened then
    #[arg(long = "no_rollout", visible_alias = "no-rollout")]
    no_rollout: bool,
    /// Predict memory, seconds and hours of the training with verl on these GPUs instead, such as 2x8xH100
    #[arg(long, value_name = "NxMxGPU")]
    on: Option<String>,
    /// Predict for another model: a config.json, a folder with one, or a shape such as qwen2.5-7b
    #[arg(long, value_name = "MODEL", requires = "on")]
    model: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

pub fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let cluster = args.on.as_deref().map(Cluster::parse).transpose();
    let cluster = cluster.map_err(|problem| usage(format!("--on: {problem}")))?;
    let shapes = args.model.as_deref().map(shapes_of).transpose()?;
    if args.out.is_some() && args.path.is_dir() {
        let path = args.path.display();
        return Err(usage(format!("{path}: a run's folder is its own run directory; leave out --out")).into());
    }
    let (hub, missing_model): (ModelHub, MissingModel) = match args.no_model {
        true => (model_hub::find_cached, MissingModel::Allowed),
        false => (model_hub::find, MissingModel::Refused),
    };
    let overrides = Overrides {
        set: args.set.clone(),
        out: args.out.clone(),
        threads: args.threads.threads,
        model_hub: Some(hub),
        // Retrieval is measured without the base model, too, so its models are downloaded.
        retrieval_hub: cluster.is_none().then_some(model_hub::find),
        missing_model,
        ..Overrides::default()
    };
    let (mut config, config_path) = RewardEnvironment::read_config(&args.path, &overrides)?;
    config.threads = args.threads.threads.unwrap_or(config.threads);
    if let Some(cluster) = cluster {
        let plan = plan_on(&config, cluster, shapes)?;
        return args.format.print(&plan, || plan.lines().join("\n") + "\n");
    }
    let options = PlanOptions { skip_model: args.no_model, skip_rollout: args.no_rollout };
    let plan = plan(&config, &config_path, options, Arc::new(Terminal))?;
    args.format.print(&plan, || plan.to_text())
}

fn shapes_of(model: &Path) -> Result<DecoderConfig, Stop> {
    if let Some(shapes) = model.to_str().and_then(DecoderConfig::of_shape) {
        return Ok(shapes);
    }
    let file = if model.is_dir() { model.join("config.json") } else { model.to_owned() };
    if file.is_file() {
        return DecoderConfig::load(&file).map_err(Stop::usage);
    }
    let known: Vec<&str> = DecoderConfig::shape_names().collect();
    Err(usage(format!(
        "--model {}: no such file or shape; expected a config.json, a folder with one, or one of {}",
        model.display(),
        known.join(", ")
    )))
}
