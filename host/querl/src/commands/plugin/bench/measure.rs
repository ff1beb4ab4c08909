//! Calls, and what the host says that each used.

use super::{PluginKind, PluginSettings, material};
use anyhow::Context;
use querl_core::config::PluginLimits;
use querl_core::ports::{Filter, PluginFault, PromptInput, PromptTask, Prompts, RewardModel, StyleScorer};
use querl_core::records::{Dialogue, Episode, Sample};
use querl_pipeline::plugins::host;
use querl_plugin::{CallReport, HostOptions, Plugin, PluginHost, PluginPort};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Calls of one batch size: enough for a 95th percentile, and no longer than a person waits.
const MOST_CALLS: usize = 500;
const FEWEST_CALLS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(3);

/// A loaded plugin, how long loading took, and the calls heard of.
pub(super) struct Bench {
    pub(super) plugin: Plugin,
    /// With nothing in the cache.
    pub(super) compile: Duration,
    /// With the compiled code in the cache: to the plugin's name.
    pub(super) load: Duration,
    host: PluginHost,
    heard: Heard,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) fuel: u64,
    pub(super) wall: Duration,
    pub(super) memory_bytes: usize,
}

/// The calls of one kind and batch size.
#[derive(Debug, Clone)]
pub(super) struct Measured {
    pub(super) kind: PluginKind,
    pub(super) n_items: usize,
    pub(super) calls: Vec<Call>,
}

#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<Call>>>);

impl Heard {
    fn add(&self, report: &CallReport<'_>) {
        let call = Call { fuel: report.fuel, wall: report.wall, memory_bytes: report.memory_bytes };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }

    fn take(&self) -> Vec<Call> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Bench {
    /// Loads the plugin into an empty cache, and again from it.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let cache = tempfile::tempdir().context("no folder for temporary files")?;
        let heard = Heard::default();
        // So that building is no part of the time.
        if path.is_dir() {
            querl_plugin::build(path)?;
        }
        let load = || -> anyhow::Result<(PluginHost, Plugin, Duration)> {
            let observed = heard.clone();
            let options = HostOptions {
                cache_dir: Some(cache.path().to_owned()),
                observer: Some(Arc::new(move |report| observed.add(report))),
                ..host::options(&PluginLimits::default())?
            };
            let host = PluginHost::new(options)?;
            let start = Instant::now();
            let plugin = host.load(path)?;
            Ok((host, plugin, start.elapsed()))
        };
        let (_, _, compile) = load()?;
        let (host, plugin, load) = load()?;
        Ok(Self { plugin, compile, load, host, heard })
    }

    /// Calls `job` with batches of `n_items` until there is enough to tell.
    pub(super) fn measure(&self, job: &Job<'_>, n_items: usize) -> Result<Measured, PluginFault> {
        // The first call touches memory for the first time; a run makes thousands.
        job.call(0, n_items)?;
        self.heard.take();
        let start = Instant::now();
        for index in 0..MOST_CALLS {
            job.call(index, n_items)?;
            if index + 1 >= FEWEST_CALLS && start.elapsed() > PATIENCE {
                break;
            }
        }
        Ok(Measured { kind: job.kind, n_items, calls: self.heard.take() })
    }
}

/// A configured plugin of one kind with what it is called with.
pub(super) struct Job<'a> {
    kind: PluginKind,
    port: Port<'a>,
}

enum Port<'a> {
    Prompt(Box<dyn Prompts>, &'a [Episode]),
    Filter(Box<dyn Filter>, Vec<Sample>),
    Reward(Box<dyn RewardModel>, &'a [Episode]),
    Style(Box<dyn StyleScorer>, Vec<Dialogue>),
}

impl<'a> Job<'a> {
    pub(super) fn new(
        bench: &Bench,
        kind: PluginKind,
        settings: &PluginSettings,
        episodes: &'a [Episode],
    ) -> anyhow::Result<Self> {
        let (host, plugin) = (&bench.host, &bench.plugin);
        let port = match kind {
            PluginKind::Prompt => Port::Prompt(host.open(plugin, settings, PluginPort::prompts())?, episodes),
            PluginKind::Filter => Port::Filter(
                host.open(plugin, settings, PluginPort::filter())?,
                episodes.iter().map(material::sample).collect(),
            ),
            PluginKind::Reward => Port::Reward(host.open(plugin, settings, PluginPort::reward())?, episodes),
            PluginKind::StyleScorer => Port::Style(
                host.open(plugin, settings, PluginPort::style_scorer(None))?,
                episodes.iter().map(material::dialogue).collect(),
            ),
        };
        Ok(Self { kind, port })
    }

    /// The batch of place `index`, in a round over what there is.
    fn call(&self, index: usize, n_items: usize) -> Result<(), PluginFault> {
        match &self.port {
            Port::Filter(filter, samples) => filter.check_batch(&batch(samples, index, n_items)).map(drop),
            Port::Reward(reward, episodes) => reward.score_batch(&batch(episodes, index, n_items)).map(drop),
            Port::Style(scorer, dialogues) => scorer.score_batch(&batch(dialogues, index, n_items)).map(drop),
            Port::Prompt(prompts, episodes) => {
                let episode = &episodes[index % episodes.len()];
                let input = PromptInput { query: &episode.query, context: &episode.context, rewrite: None };
                prompts.messages(PromptTask::PolicyRewrite, &input)?;
                prompts.parse_rewrite(&episode.policy.rewrite).map(drop)
            }
        }
    }
}

/// `n_items` from a place that moves on by as many each time; a batch has each id once where there are enough.
fn batch<T: Clone>(items: &[T], index: usize, n_items: usize) -> Vec<T> {
    items.iter().cycle().skip(index * n_items % items.len()).take(n_items).cloned().collect()
}
