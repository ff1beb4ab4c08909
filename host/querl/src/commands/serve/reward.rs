//! `querl serve reward`: scores responses of other RL engines over HTTP, in the environment of a run.

use super::{ListenArgs, announce, is_interrupted, served};
use crate::model_hub;
use crate::terminal::Terminal;
use clap::Args;
use querl_core::config::Overrides;
use querl_core::ports::{EnvironmentError, RewardRange};
use querl_core::records::EpisodeRecord;
use querl_core::scoring::{RewardRequest, RewardService};
use querl_pipeline::{RewardEnvironment, interrupt};
use querl_serve::{RewardOptions, bind, block_on, reward_router, serve, wait_until};
use std::path::PathBuf;
use std::sync::{Arc, Weak};

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub(super) struct RewardArgs {
    /// A run's folder, or a configuration; queries are known by id where its data stages are finished
    #[arg(value_name = "CONFIG|RUN_DIR")]
    path: PathBuf,
    /// Replace a key of the configuration, such as rl.max_steps=5: a TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    #[command(flatten)]
    listen: ListenArgs,
    /// The reward of a rejected response for engines that expect a number [default: the request is answered with 422]
    #[arg(long, visible_alias = "rejected-reward", value_name = "NUMBER", allow_negative_numbers = true, value_parser = finite)]
    rejected_reward: Option<f64>,
    /// Maximum requests that are scored at once
    #[arg(long, visible_alias = "max-concurrent", value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    max_concurrent: u32,
    /// Maximum requests in the queue; further ones are answered with 429
    #[arg(long, visible_alias = "max-waiting", value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    max_waiting: u32,
}

/// Weak reference to the environment, which the command owns. The environment has an async runtime, which must not be dropped in a handler
/// of another async runtime.
struct OpenEnvironment {
    environment: Weak<RewardEnvironment>,
    range: RewardRange,
}

impl RewardService for OpenEnvironment {
    fn score(&self, requests: &[RewardRequest]) -> Result<Vec<EpisodeRecord>, EnvironmentError> {
        let ended = || EnvironmentError::Record("the server has ended".into());
        self.environment.upgrade().ok_or_else(ended)?.score(requests)
    }

    fn range(&self) -> RewardRange {
        self.range
    }
}

/// Runs `querl serve reward`: serves the rewards of an environment over HTTP until it is interrupted.
pub(super) fn reward(args: &RewardArgs) -> anyhow::Result<()> {
    let options = RewardOptions {
        rejected_reward: args.rejected_reward,
        max_concurrent: args.max_concurrent as usize,
        max_waiting: args.max_waiting as usize,
        api_key: args.listen.api_key()?,
        ..RewardOptions::default()
    };
    let overrides = Overrides { set: args.set.clone(), model_hub: Some(model_hub::find), ..Overrides::default() };
    let (config, path) = RewardEnvironment::read_config(&args.path, &overrides)?;
    let environment = Arc::new(RewardEnvironment::open(config, &path, Arc::new(Terminal))?);
    args.listen.warn_if_open();
    let range = environment.range();
    let service = OpenEnvironment { environment: Arc::downgrade(&environment), range };
    let app = reward_router(Arc::new(service), options);
    let _at_safe_points = interrupt::at_safe_points();
    served(block_on(async {
        let listener = bind(args.listen.addr).await?;
        announce(&listener.local_addr()?.to_string())?;
        serve(listener, app, args.listen.limits(), wait_until(is_interrupted)).await;
        Ok(())
    }))
}

fn finite(text: &str) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|number| number.is_finite()).ok_or_else(|| "expected a finite number".to_owned())
}
