//! `querl watch DIR`: shows a running or finished run in the terminal. It only reads the files of the run directory.

mod view;

use anyhow::Context;
use clap::Args;
use querl_core::config::{Config, load_resolved};
use querl_core::dir_lock::DirLock;
use querl_core::records::{EpisodeRecord, Split};
use querl_core::run_dir::RunDir;
use querl_core::text::printable;
use querl_pipeline::failure::Stop;
use querl_pipeline::interrupt;
use querl_pipeline::ledger::{Ledger, StageName};
use querl_pipeline::report;
use querl_pipeline::run_logs;
use querl_pipeline::stages::leaks::n_lines;
use querl_train::{Health, Metrics, ValidationProgress};
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::{DefaultTerminal, Terminal};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, Args)]
pub struct WatchArgs {
    /// The run folder
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Print the display once as plain text and exit, as without a terminal (a pipe, a file)
    #[arg(long)]
    once: bool,
    /// Width of the printed display in columns
    #[arg(long, value_name = "COLUMNS", default_value_t = 110, value_parser = clap::value_parser!(u16).range(60..=300))]
    width: u16,
}

/// Interval at which the files are read. Most training steps take longer.
const REFRESH: Duration = Duration::from_millis(1000);

/// Height of the display with `--once`, in rows.
const HEIGHT: u16 = 40;

/// Runs `querl watch`: shows the run until the user presses `q`; without a terminal, or with `--once`, prints it once.
pub fn run(args: &WatchArgs) -> anyhow::Result<()> {
    let dir = RunDir::new(&args.dir);
    let first = Snapshot::read(&dir, None)?;
    if args.once || !std::io::stdout().is_terminal() {
        let text = picture(&first, args.width)?;
        return std::io::stdout().write_all(text.as_bytes()).context("stdout");
    }
    // An interrupt must not end the process before the terminal is restored.
    let _at_safe_points = interrupt::at_safe_points();
    let mut terminal = ratatui::try_init().context("the terminal cannot be used; try --once")?;
    let watched = watch(&mut terminal, &dir, first);
    ratatui::restore();
    watched?;
    Ok(interrupt::check()?)
}

fn watch(terminal: &mut DefaultTerminal, dir: &RunDir, mut snapshot: Snapshot) -> anyhow::Result<()> {
    loop {
        terminal.draw(|frame| view::draw(&snapshot, frame)).context("the terminal cannot be used")?;
        if wants_to_leave()? || interrupt::check().is_err() {
            return Ok(());
        }
        snapshot = Snapshot::read(dir, Some(&snapshot))?;
    }
}

/// Waits for the next refresh, or for a change of the window's size; true if the user pressed a key to quit.
fn wants_to_leave() -> anyhow::Result<bool> {
    if !event::poll(REFRESH).context("the terminal cannot be used")? {
        return Ok(false);
    }
    Ok(match event::read().context("the terminal cannot be used")? {
        Event::Key(key) if key.kind == KeyEventKind::Press => {
            let interrupts = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
            interrupts || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
        }
        _ => false,
    })
}

fn picture(snapshot: &Snapshot, width: u16) -> anyhow::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, HEIGHT))?;
    terminal.draw(|frame| view::draw(snapshot, frame))?;
    Ok(text_of(terminal.backend().buffer()))
}

/// The text of a buffer, without trailing empty lines.
fn text_of(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width);
    let mut text = String::new();
    for row in buffer.content.chunks(width) {
        let mut line = String::new();
        let mut skip = 0;
        for cell in row {
            // A wide character covers the next cell, which contains a blank.
            if skip > 0 {
                skip -= 1;
                continue;
            }
            skip = unicode_width::UnicodeWidthStr::width(cell.symbol()).saturating_sub(1);
            line.push_str(cell.symbol());
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    format!("{}\n", text.trim_end())
}

struct Snapshot {
    folder: String,
    tenant: Option<String>,
    is_running: bool,
    stages: Vec<(StageName, StageState)>,
    /// Notes about an outdated evaluation, and about log files that were changed after their stage had finished.
    notes: Vec<String>,
    training: Option<Training>,
    episodes: Vec<EpisodeLine>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StageState {
    NotBegun,
    Begun,
    Finished,
    /// An evaluation whose model or data changed after it.
    Outdated,
}

struct Training {
    stage: String,
    step: u64,
    n_steps: Option<u64>,
    series: BTreeMap<String, Vec<f64>>,
    warnings: Vec<String>,
}

struct EpisodeLine {
    reward: Result<f64, String>,
    query: String,
    policy: String,
    baseline: Option<String>,
}

const N_EPISODES: usize = 6;

/// Size of the part at the end of `episodes.jsonl` that is read for [`N_EPISODES`] episodes; a record has a few kilobytes.
const EPISODES_TAIL_BYTES: u64 = 128 << 10;

/// Maximum length of a text of an episode: a line of a wide terminal.
const TEXT_BYTES: usize = 300;

/// Number of last steps whose mean time is used to estimate the remaining time.
const RATE_WINDOW: usize = 20;

impl Snapshot {
    /// Reads the state of a run. Log files are compared with their digests only if a stage has begun or finished since `before`.
    fn read(dir: &RunDir, before: Option<&Self>) -> anyhow::Result<Self> {
        if !dir.stages().is_file() && !dir.metrics().is_file() {
            return Err(Stop::not_a_run(dir.root()).into());
        }
        let ledger = Ledger::open(&dir.stages())?;
        let outdated = report::outdated(&ledger);
        let state = |stage: StageName| match ledger.entry(stage) {
            None => StageState::NotBegun,
            Some(_) if stage == StageName::Eval && outdated.is_some() => StageState::Outdated,
            Some(entry) if entry.finished => StageState::Finished,
            Some(_) => StageState::Begun,
        };
        let stages = StageName::ALL.map(|stage| (stage, state(stage)));
        let notes = match before.filter(|before| before.stages == stages) {
            Some(before) => before.notes.clone(),
            None => outdated.into_iter().chain(run_logs::notes(dir)?).collect(),
        };
        // The configuration is only needed for the planned number of steps.
        let config = load_resolved(&dir.config()).ok();
        Ok(Self {
            folder: dir.root().display().to_string(),
            tenant: config.as_ref().map(|config| config.tenant.clone()),
            is_running: DirLock::holder(dir.root()).is_some(),
            stages: stages.into(),
            notes,
            training: Training::read(dir, config.as_ref())?,
            episodes: newest_episodes(&dir.episodes()).unwrap_or_default(),
        })
    }
}

impl Training {
    fn read(dir: &RunDir, config: Option<&Config>) -> anyhow::Result<Option<Self>> {
        let lines = run_logs::metrics(dir)?;
        let Some(stage) = lines.last().and_then(|line| line["stage"].as_str()) else { return Ok(None) };
        let mut training =
            Self { stage: stage.to_owned(), step: 0, n_steps: None, series: BTreeMap::new(), warnings: Vec::new() };
        let (mut health, mut validation) = (Health::default(), ValidationProgress::default());
        let mut best_reward = f64::NEG_INFINITY;
        for line in lines.iter().filter(|line| line["stage"] == stage) {
            training.step = line["step"].as_u64().unwrap_or(training.step);
            let figures = figures(line);
            if let Some(&reward) = figures.get("val/reward") {
                validation.evaluated_step = training.step;
                if reward > best_reward {
                    (best_reward, validation.best_step) = (reward, training.step);
                }
            }
            let warnings = health.check(&figures, validation);
            training.warnings.extend(warnings.into_iter().map(|text| format!("step {}: {text}", training.step)));
            for (name, value) in figures {
                training.series.entry(name).or_default().push(value);
            }
        }
        if config.is_some_and(|config| report::scores_count_words(&config.retrieval)) {
            training.series.remove("win_rate");
        }
        training.n_steps = config.and_then(|config| training.planned(dir, config));
        Ok(Some(training))
    }

    fn planned(&self, dir: &RunDir, config: &Config) -> Option<u64> {
        if self.stage == StageName::Rl.as_str() {
            let n_rows = if config.rl.epochs.is_some() { n_lines(dir, Split::Train).ok()? } else { 0 };
            return Some(config.rl.n_steps(n_rows as usize) as u64);
        }
        let per_epoch = self.step as f64 / self.last("epoch")?;
        let planned = (per_epoch * config.sft.epochs as f64).round() as u64;
        let limit = config.sft.max_steps as u64;
        Some(if limit > 0 { planned.min(limit) } else { planned })
    }

    fn last(&self, name: &str) -> Option<f64> {
        self.series.get(name)?.last().copied()
    }

    /// Mean seconds per step, over the last [`RATE_WINDOW`] steps.
    fn step_s(&self) -> Option<f64> {
        let times = self.series.get("timing_s/step")?;
        let window = &times[times.len().saturating_sub(RATE_WINDOW)..];
        Some(window.iter().sum::<f64>() / window.len() as f64)
    }

    /// Estimated seconds for the remaining steps.
    fn left_s(&self) -> Option<f64> {
        Some(self.step_s()? * self.n_steps?.saturating_sub(self.step) as f64)
    }

    /// Seconds per phase of the newest step, longest first.
    fn timing<'a>(&'a self) -> Vec<(&'a str, f64)> {
        let part =
            |(name, values): (&'a String, &'a Vec<f64>)| Some((name.strip_prefix("timing_s/")?, *values.last()?));
        let mut parts: Vec<(&str, f64)> =
            self.series.iter().filter_map(part).filter(|(name, _)| *name != "step").collect();
        parts.sort_by(|a, b| b.1.total_cmp(&a.1));
        parts
    }
}

/// The metrics of one line of `metrics.jsonl`.
fn figures(line: &Value) -> Metrics {
    let object = line.as_object().into_iter().flatten();
    object
        .filter(|(name, _)| *name != "step")
        .filter_map(|(name, value)| Some((name.clone(), value.as_f64()?)))
        .collect()
}

fn newest_episodes(path: &Path) -> std::io::Result<Vec<EpisodeLine>> {
    let mut file = File::open(path)?;
    let start = file.metadata()?.len().saturating_sub(EPISODES_TAIL_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let record = |line: &[u8]| serde_json::from_slice::<EpisodeRecord>(line).ok();
    Ok(bytes.rsplit(|byte| *byte == b'\n').filter_map(record).take(N_EPISODES).map(EpisodeLine::of).collect())
}

impl EpisodeLine {
    fn of(record: EpisodeRecord) -> Self {
        let episode = record.episode;
        Self {
            reward: record
                .outcome
                .map(|reward| reward.total)
                .map_err(|rejection| printable(&rejection.code, TEXT_BYTES)),
            query: printable(&episode.query, TEXT_BYTES),
            policy: printable(&episode.policy.rewrite, TEXT_BYTES),
            baseline: episode.baseline.map(|baseline| printable(&baseline.rewrite, TEXT_BYTES)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A run folder with ten steps of reinforcement learning, in which the policy's responses become empty.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let line = |step: u32| {
            let (reward, entropy) = (f64::from(step) * 0.05, 2.0 / f64::from(step * step * step));
            format!(
                "{{\"stage\":\"rl\",\"step\":{step},\"avg_reward\":{reward},\"actor/entropy\":{entropy},\"timing_s/gen\":1.5,\
             \"timing_s/update\":0.5,\"timing_s/step\":2.0,\"perf/throughput\":320.0}}\n"
            )
        };
        fs::write(
            folder.path().join("metrics.jsonl"),
            (1..=10).map(line).collect::<String>() + "{\"stage\":\"rl\",\"st",
        )
        .unwrap();
        folder
    }

    #[test]
    fn a_picture_shows_step_figures_timing_and_warnings() {
        let folder = folder();
        let snapshot = Snapshot::read(&RunDir::new(folder.path()), None).unwrap();
        let text = picture(&snapshot, 110).unwrap();
        for expected in ["rl", "step 10", "reward", "0.5", "gen", "update", "2.0 s a step", "the entropy has collapsed"]
        {
            assert!(text.contains(expected), "no {expected:?} in\n{text}");
        }
        assert!(text.lines().all(|line| unicode_width::UnicodeWidthStr::width(line) <= 110));
    }

    #[test]
    fn an_evaluation_of_earlier_data_is_outdated_and_not_done() {
        let folder = folder();
        let text = |digest: &str, finished: bool| {
            let output = serde_json::json!({ "data/test.jsonl": { "bytes": 1, "sha256": "aa" } });
            let convert = serde_json::json!({ "inputs": {}, "finished": finished, "outputs": output });
            let eval = serde_json::json!({ "inputs": { "test.jsonl of convert": digest }, "finished": true });
            let ledger = serde_json::json!({ "format": 1, "stages": { "convert": convert, "eval": eval } });
            fs::write(folder.path().join("stages.json"), ledger.to_string()).unwrap();
            picture(&Snapshot::read(&RunDir::new(folder.path()), None).unwrap(), 110).unwrap()
        };
        let current = text("aa", true);
        assert!(current.contains("eval done") && !current.contains("after the evaluation"), "{current}");
        let unfinished = text("bb", false);
        assert!(unfinished.contains("convert began again after the evaluation and is not finished"), "{unfinished}");
        let outdated = text("bb", true);
        assert!(outdated.contains("eval outdated") && !outdated.contains("eval done"), "{outdated}");
        assert!(outdated.contains("test.jsonl of convert changed after the evaluation"), "{outdated}");
    }

    #[test]
    fn a_folder_without_a_run_is_one_sentence() {
        let folder = tempfile::tempdir().unwrap();
        let error = Snapshot::read(&RunDir::new(folder.path()), None).err().unwrap().to_string();
        assert!(error.contains("not a run's folder"), "{error}");
    }

    /// Regression: the message was only "Is a directory (os error 21)".
    #[test]
    fn metrics_that_cannot_be_read_are_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("stages.json"), "{\"format\": 1, \"stages\": {}}").unwrap();
        fs::create_dir(folder.path().join("metrics.jsonl")).unwrap();
        let error = Snapshot::read(&RunDir::new(folder.path()), None).err().unwrap().to_string();
        assert_eq!(error, format!("{}: cannot be read", folder.path().join("metrics.jsonl").display()));
    }
}
