//! `querl plugin dev`: the author's development loop. After each save, the plugin scores recorded episodes natively, its tests run, and its
//! component is built in the background and compared with the native run.
//!
//! Threads: one watches the folder, one runs the native code of the newest save, one builds the component; the main thread draws. A newer
//! save kills the processes of an earlier one.

mod component;
mod files;
mod native;
mod picture;

pub use native::{LibraryArgs, REPLAY_COMMAND, replay_library};

use super::replay::{RecordedResults, find, made_comparable, read};
use crate::args::{Format, parse_settings};
use anyhow::Context;
use clap::Args;
use component::Comparison;
use files::{Files, Save};
use native::{Fault, NativeReplay, Tests};
use picture::{Picture, Recorded, Scores};
use querl_bundle::{Kind, Manifest};
use querl_conformance::{GoldenEpisodes, golden_episodes};
use querl_core::config::PluginLimits;
use querl_core::episodes::RecordedEpisode;
use querl_core::records::{Episode, EpisodeRecord};
use querl_eval::{Outcome, PluginSide};
use querl_pipeline::failure::Stop;
use querl_pipeline::faults::FaultFile;
use querl_pipeline::interrupt;
use querl_pipeline::plugins::host_options;
use querl_plugin::{NativeFolder, PluginHost, PluginSettings, Scratch, kill_children};
use ratatui::crossterm::terminal;
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

#[derive(Debug, Args)]
pub struct DevArgs {
    /// A plugin's source folder
    #[arg(value_name = "FOLDER", default_value = ".")]
    folder: PathBuf,
    /// Recorded episodes to score: a run folder, or a file of episodes (JSON lines) [default: those of the golden cases]
    #[arg(long, value_name = "FILE|RUN_DIR")]
    episodes: Option<PathBuf>,
    /// Run once, with tests and component, and end; exit code 1 if something has to be repaired
    #[arg(long)]
    once: bool,
    /// Do not build the component
    #[arg(long)]
    no_component: bool,
    /// A setting of the plugin, such as max_chars=40, not a key of a configuration: a TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    #[command(flatten)]
    format: Format,
}

/// Interval at which the interrupt flag is checked.
const TICK: Duration = Duration::from_millis(100);

/// Inputs that are the same for all saves.
struct Job {
    source: NativeFolder,
    /// The folder as given, for messages.
    folder: PathBuf,
    /// Id and version.
    title: String,
    scores_episodes: bool,
    settings: PluginSettings,
    /// File with the episodes and their calls of host functions, in the newest format, for native runs.
    file: PathBuf,
    /// Folder for temporary files of native runs.
    scratch: PathBuf,
    episodes: Vec<Episode>,
    recording: RecordedResults,
    /// Recorded outcomes, one per episode, after [`made_comparable`].
    recorded: Vec<Option<Outcome>>,
    notes: Vec<String>,
    /// `None` if no component is built.
    host: Option<PluginHost>,
}

/// Runs `querl plugin dev`: shows the plugin's results after each save, until an interrupt.
pub fn run(args: &DevArgs) -> anyhow::Result<()> {
    let scratch = tempfile::Builder::new().prefix("querl-dev-").tempdir().map(Scratch::new);
    // Owned by this function, so that the folder is removed at its end although threads may still hold the job.
    let scratch = scratch.context("a temporary folder")?;
    let job = Job::open(args, scratch.path())?;
    if args.once {
        return once(&job, args.format);
    }
    // An interrupt must not end the process before the terminal is restored and temporary files are removed.
    let _at_safe_points = interrupt::at_safe_points();
    let known = Files::of(&job.source.folder);
    let shown = follow(&Arc::new(job), known, Screen::of(args.format));
    kill_children();
    shown
}

impl Job {
    fn open(args: &DevArgs, scratch: &Path) -> anyhow::Result<Self> {
        super::folder::check(&args.folder)?;
        if !args.folder.join("plugin.toml").is_file() {
            let message = format!("the folder holds no plugin.toml; {}", super::folder::REMEDY);
            return Err(Stop::usage(format!("{}: {message}", args.folder.display())).into());
        }
        let source = NativeFolder::read(&args.folder)?;
        let manifest = Manifest::read(&source.folder).map_err(Stop::usage)?;
        let settings = parse_settings(&args.set, "--set")?;
        // Without settings in plugin.toml, the plugin checks them.
        if !manifest.settings.is_empty() {
            let refused = |problem| Stop::usage(format!("{}: --set: {problem}", args.folder.display()));
            manifest.check_settings(&settings).map_err(refused)?;
        }
        let is_reward = manifest.plugin.kinds.iter().any(|kind| matches!(kind, Kind::Reward | Kind::GroupReward));
        let (mut limits, mut recorded, mut notes) = (PluginLimits::default(), Vec::new(), Vec::new());
        match (&args.episodes, is_reward) {
            (Some(path), true) => {
                let (file, config) = find(path)?;
                if FaultFile::read(path)?.is_some() {
                    let path = path.display();
                    let expected = format!("`querl plugin replay {path}` repeats it");
                    return Err(Stop::usage(format!("{path}: is the call of a fault in a run; {expected}")).into());
                }
                recorded = read(&file)?;
                let mut outcomes: Vec<Option<Outcome>> =
                    recorded.iter_mut().map(|recorded| recorded.outcome.take()).collect();
                notes = made_comparable(&mut outcomes, &side(&manifest, &settings)?, config.as_ref());
                recorded.iter_mut().zip(outcomes).for_each(|(recorded, outcome)| recorded.outcome = outcome);
                limits = config.map_or(limits, |config| config.plugins.limits);
            }
            (Some(path), false) => {
                let expected =
                    "episodes are for rewards; leave --episodes out, and tests and golden cases show what it does";
                return Err(Stop::usage(format!(
                    "{}: {} is no reward: {expected}",
                    path.display(),
                    manifest.plugin.id
                ))
                .into());
            }
            (None, true) => {
                let GoldenEpisodes { episodes, n_left_out } =
                    golden_episodes(&args.folder, &manifest).map_err(Stop::usage)?;
                if episodes.is_empty() {
                    let message = "golden/ has no case without settings; name recorded episodes with --episodes: a run folder, or a \
                                   file of episodes (JSON lines)";
                    return Err(Stop::usage(format!("{}: {message}", args.folder.display())).into());
                }
                notes.push("episodes of the golden cases; --episodes FILE|RUN_DIR scores recorded ones".to_owned());
                let left_out = format!("{n_left_out} golden case(s) with settings or a repeated name are left out");
                notes.extend((n_left_out > 0).then_some(left_out));
                recorded = episodes;
            }
            (None, false) => {}
        }
        let recording = RecordedResults::of(&recorded);
        let n_recorded = recorded.len();
        recorded.retain(|recorded| !recorded.is_left_out());
        let n_left_out = n_recorded - recorded.len();
        notes.extend(
            (n_left_out > 0).then(|| format!("{n_left_out} episode(s) that the run gave to no reward are left out")),
        );
        let file = scratch.join("episodes.jsonl");
        std::fs::write(&file, for_native_runs(&recorded)).context("a temporary file")?;
        let (episodes, recorded) =
            recorded.into_iter().map(|RecordedEpisode { episode, outcome, .. }| (episode, outcome)).unzip();
        Ok(Self {
            source,
            folder: args.folder.clone(),
            title: format!("{} {}", manifest.plugin.id, manifest.plugin.version),
            scores_episodes: is_reward,
            settings,
            file,
            scratch: scratch.to_owned(),
            episodes,
            recording,
            recorded,
            notes,
            host: (!args.no_component)
                .then(|| Ok::<_, anyhow::Error>(PluginHost::new(host_options(&limits)?)?))
                .transpose()?,
        })
    }

    /// Scores the episodes natively; `None` for a plugin that is not a reward.
    fn replay(&self) -> anyhow::Result<Option<Result<NativeReplay, Fault>>> {
        self.scores_episodes
            .then(|| native::replay(&self.source, &self.file, &self.settings, &self.scratch))
            .transpose()
    }

    fn picture(
        &self,
        save: Option<&Save>,
        replayed: Option<&Result<NativeReplay, Fault>>,
        previous: Option<&NativeReplay>,
        seconds: f64,
    ) -> Picture {
        let recorded = self.episodes.iter().zip(&self.recorded);
        let recorded: Vec<Recorded<'_>> = recorded
            .map(|(episode, outcome)| Recorded { id: &episode.id, query: &episode.query, outcome: outcome.as_ref() })
            .collect();
        let scores = replayed.and_then(|replayed| replayed.as_ref().ok());
        Picture {
            plugin: self.title.clone(),
            language: self.source.language.name(),
            saved: save
                .map_or_else(Vec::new, |save| save.files.iter().map(|file| file.display().to_string()).collect()),
            seconds,
            scores: scores.map(|replay| Scores::of(&recorded, replay, previous, &self.notes)),
            refused: replayed.and_then(|replayed| replayed.as_ref().err().cloned()),
            tests: None,
            component: None,
        }
    }

    /// Builds the component and compares it with the native run; `None` with `--no-component`.
    fn compare(&self, native: Option<&NativeReplay>) -> Option<Comparison> {
        let host = self.host.as_ref()?;
        Some(component::compare(host, &self.folder, &self.settings, (&self.episodes, &self.recording), native))
    }
}

/// The episodes as input of native runs: in the newest format, without outcomes.
fn for_native_runs(recorded: &[RecordedEpisode]) -> String {
    let line = |RecordedEpisode { step, episode, calls, .. }: &RecordedEpisode| {
        format!("{}\n", json!({ "format": EpisodeRecord::FORMAT, "step": step, "episode": episode, "calls": calls }))
    };
    recorded.iter().map(line).collect()
}

/// The plugin as a side of a comparison with recorded outcomes.
fn side(manifest: &Manifest, settings: &PluginSettings) -> anyhow::Result<PluginSide> {
    let settings = settings.iter().map(|(key, value)| Ok((key.clone(), serde_json::to_value(value)?)));
    Ok(PluginSide {
        id: manifest.plugin.id.clone(),
        version: manifest.plugin.version.to_string(),
        digest: String::new(),
        settings: settings.collect::<serde_json::Result<_>>()?,
        range: (0.0, 0.0),
    })
}

/// Runs `querl plugin dev --once`: prints scores, tests and component together.
fn once(job: &Job, format: Format) -> anyhow::Result<()> {
    let started = Instant::now();
    let replayed = job.replay()?;
    let mut picture = job.picture(None, replayed.as_ref(), None, started.elapsed().as_secs_f64());
    if picture.refused.is_none() {
        picture.tests = native::test(&job.source)?;
        picture.component = job.compare(replayed.as_ref().and_then(|replayed| replayed.as_ref().ok()));
    }
    let lines = [picture.lines(), vec![String::new()], picture.test_lines(), picture.component_lines()].concat();
    format.print(&picture, || lines.join("\n") + "\n")?;
    let failures = picture.failures();
    let message = format!("plugin {}: {}", job.title, failures.join("; "));
    match (failures.is_empty(), &picture.refused) {
        (true, _) => Ok(()),
        (false, Some(refused)) if refused.is_of_setting() => Err(Stop::usage(message).into()),
        (false, _) => Err(anyhow::Error::msg(message)),
    }
}

/// Events for the main thread; results have the number of their save.
enum Event {
    Saved(Save),
    Replayed(u64, anyhow::Result<Option<Result<NativeReplay, Fault>>>),
    Tested(u64, anyhow::Result<Option<Tests>>),
    Compared(u64, Comparison),
}

/// A request to the thread that builds: number of a save, and the native run to compare its component with.
struct ToCompare {
    number: u64,
    native: Option<Arc<NativeReplay>>,
}

fn follow(job: &Arc<Job>, known: Files, screen: Screen) -> anyhow::Result<()> {
    let (events, received) = channel();
    let newest = Arc::new(AtomicU64::new(0));
    let builds = start_builds(job, &newest, &events);
    let watched = events.clone();
    let folder = job.source.folder.clone();
    std::thread::spawn(move || files::watch(&folder, known, |save| watched.send(Event::Saved(save)).is_ok()));
    start_native(job, &newest, &events);
    let mut state = State { save: None, started: SystemTime::now(), picture: None, native: None, screen };
    loop {
        let event = match received.recv_timeout(TICK) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) if interrupt::check().is_ok() => continue,
            Err(_) => return Ok(()),
        };
        let current = newest.load(Ordering::SeqCst);
        match event {
            Event::Saved(save) => {
                newest.fetch_add(1, Ordering::SeqCst);
                kill_children();
                state.started = save.at;
                state.save = Some(save);
                start_native(job, &newest, &events);
            }
            Event::Replayed(number, replayed) if number == current => {
                state.replayed(job, replayed?)?;
            }
            Event::Tested(number, tests) if number == current => {
                let native = state.tested(tests?)?;
                // Fails only if the thread has ended, which happens at the end of this process.
                let _ = builds.send(ToCompare { number, native });
            }
            Event::Compared(number, comparison) if number == current => state.compared(comparison)?,
            Event::Replayed(..) | Event::Tested(..) | Event::Compared(..) => {}
        }
    }
}

/// Starts a thread that scores the episodes with the newest save and then runs its tests.
fn start_native(job: &Arc<Job>, newest: &Arc<AtomicU64>, events: &Sender<Event>) {
    let (job, newest, events) = (job.clone(), newest.clone(), events.clone());
    let number = newest.load(Ordering::SeqCst);
    std::thread::spawn(move || {
        let replayed = job.replay();
        let can_test = matches!(&replayed, Ok(None | Some(Ok(_))));
        let _ = events.send(Event::Replayed(number, replayed));
        if can_test && newest.load(Ordering::SeqCst) == number {
            let _ = events.send(Event::Tested(number, native::test(&job.source)));
        }
    });
}

/// Starts a thread that builds and compares one component at a time. Of several requests in the channel only the newest is processed.
fn start_builds(job: &Arc<Job>, newest: &Arc<AtomicU64>, events: &Sender<Event>) -> Sender<ToCompare> {
    let (job, newest, events) = (job.clone(), newest.clone(), events.clone());
    let (sender, waiting): (Sender<ToCompare>, Receiver<ToCompare>) = channel();
    std::thread::spawn(move || {
        while let Ok(next) = waiting.recv() {
            let ToCompare { number, native } = waiting.try_iter().last().unwrap_or(next);
            if number == newest.load(Ordering::SeqCst) {
                let Some(comparison) = job.compare(native.as_deref()) else { continue };
                if events.send(Event::Compared(number, comparison)).is_err() {
                    return;
                }
            }
        }
    });
    sender
}

/// State of the main thread: the newest save and its results.
struct State {
    save: Option<Save>,
    started: SystemTime,
    picture: Option<Picture>,
    /// Native run of the newest save that could be run.
    native: Option<Arc<NativeReplay>>,
    screen: Screen,
}

impl State {
    fn replayed(&mut self, job: &Job, replayed: Option<Result<NativeReplay, Fault>>) -> anyhow::Result<()> {
        let seconds = self.started.elapsed().unwrap_or_default().as_secs_f64();
        let picture = job.picture(self.save.as_ref(), replayed.as_ref(), self.native.as_deref(), seconds);
        if let Some(Ok(native)) = replayed {
            self.native = Some(Arc::new(native));
        }
        self.screen.draw(&picture, ResultKind::Scores)?;
        self.picture = Some(picture);
        Ok(())
    }

    /// Shows the results of the tests, and returns the native run that the component is compared with.
    fn tested(&mut self, tests: Option<Tests>) -> anyhow::Result<Option<Arc<NativeReplay>>> {
        if let Some(picture) = &mut self.picture {
            picture.tests = tests;
            self.screen.draw(picture, ResultKind::Tests)?;
        }
        Ok(self.native.clone())
    }

    fn compared(&mut self, comparison: Comparison) -> anyhow::Result<()> {
        if let Some(picture) = &mut self.picture {
            picture.component = Some(comparison);
            self.screen.draw(picture, ResultKind::Component)?;
        }
        Ok(())
    }
}

/// Part of the output that is new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResultKind {
    Scores,
    Tests,
    Component,
}

/// Form of the output.
enum Screen {
    /// Redraws the terminal.
    Terminal,
    /// Prints each part once.
    Lines,
    /// Prints one JSON object per save, once the component is compared or the plugin cannot be run.
    Json,
}

impl Screen {
    fn of(format: Format) -> Self {
        match (format.json, std::io::stdout().is_terminal()) {
            (true, _) => Self::Json,
            (false, true) => Self::Terminal,
            (false, false) => Self::Lines,
        }
    }

    fn draw(&self, picture: &Picture, part: ResultKind) -> anyhow::Result<()> {
        let text = match self {
            Self::Terminal => full_screen(picture),
            Self::Lines => {
                let lines = match part {
                    ResultKind::Scores => picture.lines(),
                    ResultKind::Tests => picture.test_lines(),
                    ResultKind::Component => [picture.component_lines(), vec![String::new()]].concat(),
                };
                lines.iter().map(|line| format!("{line}\n")).collect()
            }
            Self::Json if part == ResultKind::Component || picture.refused.is_some() => {
                serde_json::to_string(picture)? + "\n"
            }
            Self::Json => String::new(),
        };
        let mut stdout = std::io::stdout();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("stdout")
    }
}

/// Text that clears the screen and fills it: the scores, as many lines as fit, and the state of tests and component in the last lines.
fn full_screen(picture: &Picture) -> String {
    const CLEAR: &str = "\x1b[H\x1b[2J";
    let waiting = |lines: Vec<String>, text: &str| if lines.is_empty() { vec![text.to_owned()] } else { lines };
    let last = match picture.refused {
        Some(_) => Vec::new(),
        None => [
            vec![String::new()],
            waiting(picture.test_lines(), "tests      ..."),
            waiting(picture.component_lines(), "component  ..."),
        ]
        .concat(),
    };
    let (columns, rows) = terminal::size().unwrap_or((100, 40));
    // One column less, because a line that fills the last column may wrap.
    let width = usize::from(columns).saturating_sub(1);
    let folded = |lines: Vec<String>| lines.iter().flat_map(|line| querl_eval::folded(line, width)).collect::<Vec<_>>();
    let last = folded(last);
    let n_first = usize::from(rows).saturating_sub(last.len() + 1);
    let lines = folded(picture.lines()).into_iter().take(n_first).chain(last);
    CLEAR.to_owned() + &lines.map(|line| line + "\n").collect::<String>()
}
