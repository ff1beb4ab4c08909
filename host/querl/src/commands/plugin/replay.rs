//! `querl plugin replay`: scores the recorded episodes of a run with another plugin, version or setting, and compares the outcomes. Also
//! repeats the call of a recorded fault.

pub(super) mod scoring;

use crate::args::{Format, parse_settings};
use crate::terminal;
use anyhow::Context;
use clap::Args;
use querl_core::config::{Config, PluginLimits, is_registry_reference, load_resolved};
use querl_core::episodes::{self, RecordedEpisode};
use querl_core::fsx::write_atomic;
use querl_core::ports::RewardModel;
use querl_core::records::{Episode, HostCall, HostRequest, HostResponse, Reward, RewardComponent};
use querl_core::run_dir::RunDir;
use querl_eval::{
    BriefOutcome, Outcome, PluginSide, Replay, ReplayEpisode, ReplayOptions, Side, replay, replay_html, replay_text,
};
use querl_pipeline::failure::{Stop, run_in};
use querl_pipeline::faults::{FaultFile, FaultedCall};
use querl_pipeline::host_functions::{RecordedCalls, RunHostFunctions};
use querl_pipeline::plugins::{host_options, n_slots, scores_style};
use querl_pipeline::report::scores_count_words;
use querl_pipeline::run_logs;
use querl_plugin::{CallReport, HostOptions, Observer, Plugin, PluginHost, PluginPort, PluginSettings};
use querl_style::{StyleReward, turns_of_side};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Number of bootstrap resamples. With thousands of episodes the intervals are narrow, and more resamples do not change the shown digits.
const N_RESAMPLES: usize = 1000;

/// Seed of the bootstrap: a constant, so that the same episodes and scores give the same text.
const SEED: u64 = 42;

#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// A run folder, a file of episodes (JSON lines), or a file of `faults/` in a run folder
    #[arg(value_name = "RUN_DIR|FILE.jsonl")]
    episodes: PathBuf,
    /// The reward plugin or style scorer to score with: a bundle, a component or a source folder [for a fault: the one that faulted]
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
    /// Compare with this plugin instead of the recorded outcomes
    #[arg(long, value_name = "PATH")]
    against: Option<PathBuf>,
    /// A setting of the plugin, such as max_chars=40, not a key of a configuration: a TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// A setting of the plugin of --against, as --settings
    #[arg(long, value_name = "KEY=VALUE", requires = "against")]
    against_settings: Vec<String>,
    /// Only the first N episodes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Queries shown one by one, each with its largest change
    #[arg(long, value_name = "N", default_value_t = 20)]
    show: usize,
    /// Print, instead of the comparison, what the plugin logs for each episode, and the host functions that it called in the run
    #[arg(long, conflicts_with_all = ["against", "html"])]
    trace: bool,
    #[command(flatten)]
    format: Format,
    /// Write the comparison as a page for a browser too
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Runs `querl plugin replay`: scores the episodes and prints what differs from the recorded scores.
pub fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    if let Some(fault) = FaultFile::read(&args.episodes)? {
        return repeat(args, fault);
    }
    let Some(path) = &args.plugin else {
        let message = "names no plugin, as a file of `faults/` does; name one with --plugin PATH";
        return Err(Stop::usage(format!("{}: {message}", args.episodes.display())).into());
    };
    let (file, config) = find(&args.episodes)?;
    if args.episodes.is_dir() {
        let notes = run_logs::episodes_notes(&RunDir::new(&args.episodes));
        let notes = notes.unwrap_or_else(|error| vec![run_logs::not_compared(&error)]);
        notes.iter().for_each(|note| terminal::print(&format!("warning: {note}")));
    }
    let mut recorded = read(&file)?;
    recorded.truncate(args.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX)));
    let limits = config.as_ref().map_or_else(PluginLimits::default, |config| config.plugins.limits.clone());
    let log: CallLog = Arc::default();
    let observer = args.trace.then(|| keep_log(&log));
    let host = PluginHost::new(HostOptions { n_slots: n_slots(), observer, ..host_options(&limits)? })?;
    let results = RecordedResults::of(&recorded);
    let open = |path: &Path, settings: &[String], flag| ReplayPlugin::open((&host, &results), path, settings, flag);
    let plugin = open(path, &args.settings, "--settings")?;
    if args.trace {
        return trace(&recorded, plugin.model.as_ref(), &log, args.format);
    }
    let other = args.against.as_ref();
    let other = other.map(|path| open(path, &args.against_settings, "--against-settings")).transpose()?;
    let compared = compare(recorded, plugin, other, config.as_ref(), args)?;
    if let Some(path) = &args.html {
        write_atomic(path, replay_html(&compared)?.as_bytes()).with_context(|| path.display().to_string())?;
    }
    args.format.print(&compared, || replay_text(&compared))
}

/// Log lines of plugin calls, in order.
type CallLog = Arc<Mutex<Vec<String>>>;

fn keep_log(log: &CallLog) -> Observer {
    let log = log.clone();
    Arc::new(move |call: &CallReport<'_>| {
        log.lock().unwrap_or_else(PoisonError::into_inner).extend(call.log.iter().cloned());
    })
}

/// Runs `--trace`: scores the episodes group by group, without those that the run left out, and prints what the plugin logs. Stops at the
/// first fault, whose log is printed.
fn trace(recorded: &[RecordedEpisode], model: &dyn RewardModel, log: &CallLog, format: Format) -> anyhow::Result<()> {
    let (mut traced, mut text) = (Vec::new(), String::new());
    let mut fault = None;
    take_log(log);
    for group in recorded.chunk_by(|a, b| a.episode.group_id == b.episode.group_id) {
        let given = group.iter().filter(|recorded| !recorded.is_left_out());
        let episodes: Vec<Episode> = given.map(|recorded| recorded.episode.clone()).collect();
        let scored = model.score_batch(&episodes);
        let lines = take_log(log);
        let scored = scored.unwrap_or_else(|found| {
            fault = Some(found);
            Vec::new()
        });
        let mut scored = scored.iter();
        let outcome = |recorded: &RecordedEpisode| match &recorded.outcome {
            Some(outcome) if recorded.is_left_out() => format!("left out, {}", BriefOutcome::from(outcome)),
            _ => scored.next().map_or_else(|| "fault".to_owned(), |outcome| BriefOutcome::from(outcome).to_string()),
        };
        let outcomes: Vec<String> = group.iter().map(outcome).collect();
        for (recorded, outcome) in group.iter().zip(&outcomes) {
            text += &format!("{}  {outcome}\n", recorded.episode.id);
            text.extend(recorded.calls.iter().map(|call| format!("  calls {}\n", serde_json::json!(call))));
        }
        text.extend(lines.iter().map(|line| format!("  {}\n", querl_core::text::printable(line, usize::MAX))));
        let ids: Vec<&str> = group.iter().map(|recorded| recorded.episode.id.as_str()).collect();
        let calls: Vec<&HostCall> = group.iter().flat_map(|recorded| &recorded.calls).collect();
        traced.push(serde_json::json!({ "episodes": ids, "outcomes": outcomes, "calls": calls, "log": lines }));
        if fault.is_some() {
            break;
        }
    }
    format.print(&traced, || text)?;
    fault.map_or(Ok(()), |fault| Err(fault.into()))
}

fn take_log(log: &CallLog) -> Vec<String> {
    std::mem::take(&mut *log.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Repeats the recorded call in which a plugin faulted, with the settings and limits of its run. If it faults again, the command fails.
fn repeat(args: &ReplayArgs, FaultFile { header, call }: FaultFile) -> anyhow::Result<()> {
    let config = args.episodes.parent().and_then(Path::parent);
    let config = config.and_then(|folder| load_resolved(&RunDir::new(folder).config()).ok());
    let limits = config.as_ref().map_or_else(PluginLimits::default, |config| config.plugins.limits.clone());
    let host = PluginHost::new(host_options(&limits)?)?;
    let path = args.plugin.as_ref().unwrap_or(&header.path);
    let settings = match args.settings.is_empty() {
        true => header.settings.clone(),
        false => parse_settings(&args.settings, "--settings")?,
    };
    let plugin = match is_registry_reference(path) {
        true => return Err(Stop::usage(format!("{}: pull the bundle and name it as --plugin", path.display())).into()),
        false => host.load(path)?,
    };
    let n_items = match call {
        FaultedCall::Episodes(episodes, calls) => {
            let results = RecordedResults::new(calls, episodes.iter());
            open_reward(&host, &plugin, &settings, &results)?.score_batch(&episodes)?;
            episodes.len()
        }
        FaultedCall::Samples(samples) => {
            // Filters call their host functions again: only those of rewards are recorded.
            let port = PluginPort::filter().with_functions(Some(Arc::new(RunHostFunctions::of_filters(config))));
            host.open(&plugin, &settings, port)?.check_batch(&samples)?;
            samples.len()
        }
        FaultedCall::Prompt(call) => {
            call.repeat(host.open(&plugin, &settings, PluginPort::prompts())?.as_ref())?;
            1
        }
    };
    let title = format!("{} {}", plugin.id(), plugin.version());
    let result =
        serde_json::json!({ "plugin": title, "items": n_items, "fault": null, "recorded_fault": header.message });
    args.format.print(&result, || {
        format!(
            "plugin {title}: no fault with {n_items} item(s); the recorded fault of {} {} was: {}\n",
            header.plugin, header.version, header.message
        )
    })
}

/// The file with the episodes of a run directory or the file itself, and the run's configuration, if it is known.
pub(super) fn find(path: &Path) -> Result<(PathBuf, Option<Config>), Stop> {
    if path.is_dir() {
        let dir = RunDir::new(path);
        let file = dir.episodes();
        if !file.exists() {
            run_in(path)?;
            return Err(Stop::usage(format!("{}: there is no such file; the stage `rl` writes it", file.display())));
        }
        return Ok((file, load_resolved(&dir.config()).ok()));
    }
    if path.exists() {
        return Ok((path.to_owned(), None));
    }
    Err(Stop::usage(format!("{}, or name a file of episodes, one JSON object a line", Stop::not_a_run(path))))
}

pub(super) fn read(file: &Path) -> Result<Vec<RecordedEpisode>, Stop> {
    let episodes = episodes::read(file).map_err(Stop::usage)?;
    if episodes.is_empty() {
        let expected = "expected at least one line {\"format\": 3, \"episode\": {...}}";
        return Err(Stop::usage(format!("{}: holds no episode; {expected}", file.display())));
    }
    Ok(episodes)
}

/// A configured plugin, and its description in the comparison.
struct ReplayPlugin {
    model: Box<dyn RewardModel>,
    side: PluginSide,
}

impl ReplayPlugin {
    fn open(
        (host, results): (&PluginHost, &RecordedResults),
        path: &Path,
        settings: &[String],
        flag: &str,
    ) -> anyhow::Result<Self> {
        let settings = parse_settings(settings, flag)?;
        let plugin = host.load(path)?;
        let model = open_reward(host, &plugin, &settings, results)?;
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

/// Host functions that return the results that a run recorded.
pub(super) struct RecordedResults(Arc<RecordedCalls>);

impl RecordedResults {
    pub(super) fn of(recorded: &[RecordedEpisode]) -> Self {
        let mut calls = RecordedCalls::default();
        for RecordedEpisode { episode, calls: of_episode, .. } in recorded {
            calls.add_episode(episode, of_episode.clone());
        }
        Self::new(calls, recorded.iter().map(|recorded| &recorded.episode))
    }

    /// Adds the recorded style distributions of the policy's rewrites, for a style scorer that the run did not have.
    fn new<'a>(mut calls: RecordedCalls, episodes: impl Iterator<Item = &'a Episode>) -> Self {
        for episode in episodes {
            let Some(style) = episode.policy.style.clone() else { continue };
            let request = HostRequest::ClassifyStyle(turns_of_side(episode, &episode.policy));
            let call = HostCall { plugin: String::new(), request, response: Ok(HostResponse::Style(style)) };
            calls.add(&episode.id, vec![call]);
        }
        Self(Arc::new(calls))
    }
}

/// Opens a reward plugin, or a style scorer as a reward, with the recorded results of its host functions.
pub(super) fn open_reward(
    host: &PluginHost,
    plugin: &Plugin,
    settings: &PluginSettings,
    results: &RecordedResults,
) -> anyhow::Result<Box<dyn RewardModel>> {
    let calls = results.0.clone();
    if !scores_style(plugin) {
        return Ok(host.open(plugin, settings, PluginPort::reward().with_functions(Some(calls)))?);
    }
    if !calls.has_style() {
        let expected = "use a run with plugins.style_model";
        let message =
            format!("plugin {}: it scores style, and no episode has style probabilities; {expected}", plugin.id());
        return Err(Stop::usage(message).into());
    }
    let port = PluginPort::style_scorer(None).with_functions(Some(calls));
    Ok(Box::new(StyleReward::new(host.open(plugin, settings, port)?)))
}

fn compare(
    recorded: Vec<RecordedEpisode>,
    plugin: ReplayPlugin,
    other: Option<ReplayPlugin>,
    config: Option<&Config>,
    args: &ReplayArgs,
) -> anyhow::Result<Replay> {
    let mut episodes: Vec<Episode> = Vec::with_capacity(recorded.len());
    let (mut places, mut befores) = (Vec::with_capacity(recorded.len()), Vec::with_capacity(recorded.len()));
    // As in the run, a group is scored without the episodes that the run left out; these keep their recorded outcome.
    let (given, left_out): (Vec<_>, Vec<_>) = recorded.into_iter().partition(|one| !one.is_left_out());
    let n_given = given.len();
    for RecordedEpisode { line, step, episode, outcome, .. } in given.into_iter().chain(left_out) {
        episodes.push(episode);
        places.push((line, step));
        befores.push(outcome);
    }
    let kept: Vec<Outcome> = befores[n_given..].iter().flatten().cloned().collect();
    let score = |model: &dyn RewardModel, label| -> anyhow::Result<Vec<Outcome>> {
        Ok([scoring::score(model, &episodes[..n_given], label)?, kept.clone()].concat())
    };
    let afters = score(plugin.model.as_ref(), "replay")?;
    let (side, mut notes) = match other {
        Some(other) => {
            befores = score(other.model.as_ref(), "against")?.into_iter().map(Some).collect();
            (Side::Plugin(other.side), Vec::new())
        }
        None => (Side::Recorded, made_comparable(&mut befores, &plugin.side, config)),
    };
    if config.is_some_and(|config| scores_count_words(&config.retrieval)) {
        notes.push(WORD_SCORES.to_owned());
    }
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

/// A note on the wins by retrieval quality of a run whose scores of hits count words.
const WORD_SCORES: &str = "retrieval quality is of scores of hits, which without a reranker or lexicon count shared words and cannot tell \
                           right from wrong passages";

/// Suffix of the component with a plugin's own total, in the weighted sum of several plugins.
const TOTAL: &str = "/total";

/// Converts recorded outcomes so that they can be compared with those of `plugin`: its own part of a weighted sum, without weight. Returns
/// notes for the reader.
pub(super) fn made_comparable(
    outcomes: &mut [Option<Outcome>],
    plugin: &PluginSide,
    config: Option<&Config>,
) -> Vec<String> {
    let plugins = summed(outcomes);
    if !plugins.is_empty() {
        return vec![of_sum(outcomes, &plugins, &plugin.id)];
    }
    let Some([reward]) = config.map(|config| config.plugins.rewards.as_slice()) else { return Vec::new() };
    let mut notes = Vec::new();
    if reward.weight != 1.0 && reward.weight != 0.0 {
        scored_mut(outcomes).for_each(|one| one.total /= reward.weight);
        notes
            .push(format!("recorded totals are divided by the weight that the run gave its plugin, {}", reward.weight));
    }
    if !reward.settings.is_empty() && plugin.settings.is_empty() {
        let settings: Vec<String> =
            reward.settings.iter().map(|(key, value)| format!("--settings '{key}={value}'")).collect();
        notes.push(format!(
            "the run gave its plugin settings, this replay gives none; the same ones are: {}",
            settings.join(" ")
        ));
    }
    notes
}

fn scored_mut(outcomes: &mut [Option<Outcome>]) -> impl Iterator<Item = &mut Reward> {
    outcomes.iter_mut().filter_map(|outcome| outcome.as_mut()?.as_mut().ok())
}

/// Ids of the plugins whose weighted sum the totals are; empty for the totals of a single plugin.
fn summed(outcomes: &[Option<Outcome>]) -> Vec<String> {
    let first = outcomes.iter().find_map(|outcome| outcome.as_ref()?.as_ref().ok());
    let names = first.into_iter().flat_map(|reward| &reward.components);
    names.filter_map(|part| Some(part.name.strip_suffix(TOTAL)?.to_owned())).collect()
}

/// Replaces each sum by the part of plugin `id`, if it has one. Returns a note about it.
fn of_sum(outcomes: &mut [Option<Outcome>], plugins: &[String], id: &str) -> String {
    let all = plugins.join(", ");
    if !plugins.iter().any(|plugin| plugin == id) {
        return format!("recorded totals are weighted sums of {all}; {id} alone is compared with the sum");
    }
    for outcome in outcomes.iter_mut() {
        let Some(Ok(reward)) = outcome else { continue };
        match own_part(reward, id) {
            Some(part) => *reward = part,
            None => *outcome = None,
        }
    }
    format!("recorded totals are weighted sums of {all}; {id} is compared with its own part of them, unweighted")
}

/// Total and components of one plugin in a weighted sum.
fn own_part(sum: &Reward, id: &str) -> Option<Reward> {
    let own = |name: &str| name.strip_prefix(id)?.strip_prefix('/').map(str::to_owned);
    let parts =
        sum.components.iter().filter_map(|part| Some(RewardComponent { name: own(&part.name)?, ..part.clone() }));
    let (totals, components): (Vec<_>, Vec<_>) = parts.partition(|part| part.name == TOTAL[1..]);
    Some(Reward { total: totals.last()?.value, components })
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::ports::HostFunctions;
    use querl_core::records::{Candidate, FailureKind, HostCallError, StyleProbability};
    use querl_style::turns_of;

    fn side(id: &str) -> PluginSide {
        let (id, version, digest) = (id.to_owned(), "1.0.0".to_owned(), String::new());
        PluginSide { id, version, digest, settings: Default::default(), range: (-1.0, 1.0) }
    }

    fn sum() -> Vec<Option<Outcome>> {
        let parts = [("a/win", 0.5), ("a/total", 0.25), ("b/length", 9.0), ("b/total", 1.0)];
        let components = parts.map(|(name, value)| RewardComponent { name: name.into(), value }).to_vec();
        vec![Some(Ok(Reward { total: 0.75, components })), None]
    }

    #[test]
    fn a_plugin_is_compared_with_its_own_part_of_a_sum() {
        let mut outcomes = sum();
        let notes = made_comparable(&mut outcomes, &side("a"), None);
        let reward = outcomes[0].as_ref().unwrap().as_ref().unwrap();
        assert_eq!((reward.total, reward.components.len(), reward.components[0].name.as_str()), (0.25, 1, "win"));
        assert!(notes[0].contains("weighted sums of a, b; a is compared with its own part"), "{notes:?}");
    }

    #[test]
    fn a_plugin_that_was_not_in_the_sum_is_compared_with_all_of_it() {
        let mut outcomes = sum();
        let notes = made_comparable(&mut outcomes, &side("c"), None);
        assert_eq!(outcomes, sum());
        assert!(notes[0].ends_with("c alone is compared with the sum"), "{notes:?}");
    }

    #[test]
    fn recorded_distribution_of_the_rewrite_is_replayed_for_its_episode_and_others_are_not_recorded() {
        let style = vec![StyleProbability { label: "诚实".into(), probability: 1.0 }];
        let policy = Candidate { style: Some(style.clone()), ..Candidate::found_nothing("冷水洗".into()) };
        let episode = Episode { id: "a".into(), query: "怎么洗".into(), policy, ..Episode::default() };
        let results = RecordedResults::new(RecordedCalls::default(), [&episode].into_iter());
        let ask = |id: &str, rewrite: &str| {
            results.0.call("scorer", id, &HostRequest::ClassifyStyle(turns_of("怎么洗", rewrite)))
        };
        assert_eq!(ask("a", "冷水洗"), Ok(HostResponse::Style(style)));
        for missing in [ask("a", "热水洗"), ask("b", "冷水洗")] {
            let Err(HostCallError::Failed(failure)) = missing else { panic!("{missing:?}") };
            assert_eq!(failure.kind, FailureKind::NotRecorded);
        }
        let without = Episode { policy: Candidate::found_nothing("冷水洗".into()), ..episode };
        let results = |episode| RecordedResults::new(RecordedCalls::default(), [episode].into_iter());
        assert!(!results(&without).0.has_style());
    }
}
