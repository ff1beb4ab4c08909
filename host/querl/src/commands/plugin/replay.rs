//! `querl plugin replay`: what another plugin, version or setting would have said of a run's episodes.

mod recorded;
mod scoring;
mod styles;

use super::settings;
use crate::args::Format;
use anyhow::Context;
use clap::Args;
use querl_core::config::{Config, PluginLimits, load_resolved};
use querl_core::episodes::{self, RecordedEpisode};
use querl_core::fsx::write_atomic;
use querl_core::ports::RewardModel;
use querl_core::records::Episode;
use querl_core::run_dir::RunDir;
use querl_eval::{Outcome, PluginSide, Replay, ReplayEpisode, ReplayOptions, Side, replay, replay_html, replay_text};
use querl_pipeline::failure::Stop;
use querl_pipeline::plugins::host;
use querl_pipeline::plugins::scores_style;
use querl_plugin::{HostOptions, PluginHost, PluginPort};
use querl_style::StyleReward;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use styles::RecordedStyles;

/// Of the bootstrap. Intervals of thousands of episodes are narrow: more resamples change no digit that is shown.
const N_RESAMPLES: usize = 1000;

/// Of the bootstrap: the same episodes and scores give the same text.
const SEED: u64 = 42;

/// Options of `querl plugin replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// A run folder, or a file of episodes (JSON lines)
    #[arg(value_name = "RUN_DIR|EPISODES.jsonl")]
    episodes: PathBuf,
    /// The reward plugin, or the scorer of style, to ask: a bundle, a component or a source folder
    #[arg(long, value_name = "PATH")]
    plugin: PathBuf,
    /// Compare with this plugin instead of the recorded outcomes
    #[arg(long, value_name = "PATH")]
    against: Option<PathBuf>,
    /// A setting of the plugin: TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// A setting of the plugin that is compared with
    #[arg(long, value_name = "KEY=VALUE", requires = "against")]
    against_settings: Vec<String>,
    /// Only the first N episodes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Episodes shown one by one
    #[arg(long, value_name = "N", default_value_t = 20)]
    show: usize,
    #[command(flatten)]
    format: Format,
    /// Write the comparison as a page for a browser too
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Scores the episodes and says what differs.
pub fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    let (file, config) = find(&args.episodes)?;
    let mut recorded = read(&file)?;
    recorded.truncate(args.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX)));
    let limits = config.as_ref().map_or_else(PluginLimits::default, |config| config.plugins.limits.clone());
    let host = PluginHost::new(HostOptions { n_slots: n_slots(), ..host::options(&limits)? })?;
    let styles = RecordedStyles::of(recorded.iter().map(|recorded| &recorded.episode));
    let open = |path: &Path, settings: &[String], flag| Asked::open((&host, styles.as_ref()), path, settings, flag);
    let plugin = open(&args.plugin, &args.settings, "--settings")?;
    let other = args.against.as_ref();
    let other = other.map(|path| open(path, &args.against_settings, "--against-settings")).transpose()?;
    let compared = compare(recorded, plugin, other, config.as_ref(), args)?;
    if let Some(path) = &args.html {
        write_atomic(path, replay_html(&compared)?.as_bytes()).with_context(|| path.display().to_string())?;
    }
    print(&compared, args.format).context("stdout")
}

/// A call for each core at the same time, but never fewer than usual, and no more than memory is easily set aside for.
fn n_slots() -> u32 {
    let usual = HostOptions::default().n_slots;
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(n_cores).unwrap_or(usual).clamp(usual, 8 * usual)
}

/// The file of episodes, and the configuration of the run that wrote it, where that is known.
fn find(path: &Path) -> Result<(PathBuf, Option<Config>), Stop> {
    if path.is_dir() {
        let dir = RunDir::new(path);
        let file = dir.episodes();
        if !file.exists() {
            return Err(Stop::usage(format!("{}: there is no such file; the stage `rl` writes it", file.display())));
        }
        return Ok((file, load_resolved(&dir.config()).ok()));
    }
    if path.exists() {
        return Ok((path.to_owned(), None));
    }
    let expected = "expected a run folder, or a file of episodes, one JSON object a line";
    Err(Stop::usage(format!("{}: there is no such file or folder; {expected}", path.display())))
}

fn read(file: &Path) -> Result<Vec<RecordedEpisode>, Stop> {
    let episodes = episodes::read(file).map_err(|error| Stop::usage(error.to_string()))?;
    if episodes.is_empty() {
        let expected = "expected at least one line {\"format\": 2, \"episode\": {...}}";
        return Err(Stop::usage(format!("{}: holds no episode; {expected}", file.display())));
    }
    Ok(episodes)
}

/// A plugin with its settings, and how the comparison names it.
struct Asked {
    model: Box<dyn RewardModel>,
    side: PluginSide,
}

impl Asked {
    fn open(
        (host, styles): (&PluginHost, Option<&Arc<RecordedStyles>>),
        path: &Path,
        settings: &[String],
        flag: &str,
    ) -> anyhow::Result<Self> {
        let settings = settings::parse(settings, flag)?;
        let plugin = host.load(path)?;
        let model: Box<dyn RewardModel> = match (scores_style(&plugin), styles) {
            (false, _) => host.open(&plugin, &settings, PluginPort::reward())?,
            (true, Some(styles)) => Box::new(StyleReward::new(host.open(
                &plugin,
                &settings,
                PluginPort::style_scorer(Some(styles.clone())),
            )?)),
            (true, None) => {
                let expected = "it can score again what a run with plugins.style_model recorded";
                let message = format!("plugin {}: it scores style, and no episode has one; {expected}", plugin.id());
                return Err(Stop::usage(message).into());
            }
        };
        let side = PluginSide {
            id: plugin.id().to_owned(),
            version: plugin.version().to_owned(),
            digest: plugin.digest().to_owned(),
            range: PluginSide::range(model.range()),
            settings: settings
                .into_iter()
                .map(|(key, value)| Ok((key, serde_json::to_value(value)?)))
                .collect::<serde_json::Result<_>>()?,
        };
        Ok(Self { model, side })
    }
}

fn compare(
    recorded: Vec<RecordedEpisode>,
    plugin: Asked,
    other: Option<Asked>,
    config: Option<&Config>,
    args: &ReplayArgs,
) -> anyhow::Result<Replay> {
    let mut episodes: Vec<Episode> = Vec::with_capacity(recorded.len());
    let (mut places, mut befores) = (Vec::with_capacity(recorded.len()), Vec::with_capacity(recorded.len()));
    for RecordedEpisode { line, step, episode, outcome } in recorded {
        episodes.push(episode);
        places.push((line, step));
        befores.push(outcome);
    }
    let afters = scoring::score(plugin.model.as_ref(), &episodes, "replay")?;
    let (side, notes) = match other {
        Some(other) => {
            befores = scoring::score(other.model.as_ref(), &episodes, "against")?.into_iter().map(Some).collect();
            (Side::Plugin(other.side), Vec::new())
        }
        None => (Side::Recorded, recorded::made_comparable(&mut befores, &plugin.side, config)),
    };
    let compared: Vec<ReplayEpisode<'_>> = places
        .iter()
        .zip(&episodes)
        .zip(befores.iter().zip(&afters))
        .map(|(((line, step), episode), (before, after)): (_, (&Option<Outcome>, _))| ReplayEpisode {
            line: *line,
            step: *step,
            episode,
            before: before.as_ref(),
            after,
        })
        .collect();
    let options = ReplayOptions { n_shown: args.show, seed: SEED, n_resamples: N_RESAMPLES };
    Ok(replay(&compared, side, plugin.side, notes, options))
}

fn print(compared: &Replay, format: Format) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    if format.json {
        serde_json::to_writer_pretty(&mut stdout, compared)?;
        return writeln!(stdout);
    }
    stdout.write_all(replay_text(compared).as_bytes())
}
