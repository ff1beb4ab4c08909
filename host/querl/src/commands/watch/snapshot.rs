//! What a run's folder says at one moment.

use querl_core::config::{Config, load_resolved};
use querl_core::dir_lock::LOCK_FILE;
use querl_core::records::EpisodeRecord;
use querl_core::run_dir::RunDir;
use querl_core::text::printable;
use querl_pipeline::failure::Stop;
use querl_pipeline::ledger::Ledger;
use querl_pipeline::ledger::StageName;
use querl_train::{Health, Metrics};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// A run at one moment.
pub(super) struct Snapshot {
    pub(super) folder: String,
    pub(super) tenant: Option<String>,
    pub(super) is_running: bool,
    /// Every stage and where it stands.
    pub(super) stages: Vec<(StageName, Standing)>,
    /// The stage that trained last.
    pub(super) training: Option<Training>,
    pub(super) episodes: Vec<EpisodeLine>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    NotBegun,
    Begun,
    Finished,
}

/// Steps of one training stage.
pub(super) struct Training {
    pub(super) stage: String,
    pub(super) step: u64,
    pub(super) n_steps: Option<u64>,
    /// Figures by name, one value per step that has it.
    pub(super) series: BTreeMap<String, Vec<f64>>,
    pub(super) warnings: Vec<String>,
}

/// A scored answer in one line.
pub(super) struct EpisodeLine {
    pub(super) reward: Result<f64, String>,
    pub(super) query: String,
    pub(super) policy: String,
    pub(super) baseline: String,
}

const N_EPISODES: usize = 6;

/// End of `episodes.jsonl` that is read for them: a record has a few kilobytes.
const EPISODES_TAIL_BYTES: u64 = 128 << 10;

/// Longest text of an episode that is kept: a line of a wide terminal.
const TEXT_BYTES: usize = 300;

/// Steps whose mean time makes the estimate of what is left.
const RATE_WINDOW: usize = 20;

impl Snapshot {
    pub(super) fn read(dir: &RunDir) -> anyhow::Result<Self> {
        if !dir.stages().is_file() && !dir.metrics().is_file() {
            let folder = dir.root().display();
            return Err(
                Stop::usage(format!("{folder}: holds no run; expected the output folder of `querl run`")).into()
            );
        }
        let ledger = Ledger::open(&dir.stages())?;
        let standing = |stage: StageName| match ledger.entry(stage.as_str()) {
            None => Standing::NotBegun,
            Some(entry) if entry.finished => Standing::Finished,
            Some(_) => Standing::Begun,
        };
        // The configuration names what is planned; without it the rest can still be shown.
        let config = load_resolved(&dir.config()).ok();
        Ok(Self {
            folder: dir.root().display().to_string(),
            tenant: config.as_ref().map(|config| config.tenant.clone()),
            is_running: is_held(&dir.root().join(LOCK_FILE)),
            stages: StageName::ALL.map(|stage| (stage, standing(stage))).into(),
            training: Training::read(&dir.metrics(), config.as_ref())?,
            episodes: newest_episodes(&dir.episodes()).unwrap_or_default(),
        })
    }
}

/// True while a querl process works in the folder whose lock this is.
fn is_held(lock: &Path) -> bool {
    File::open(lock).is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

impl Training {
    fn read(path: &Path, config: Option<&Config>) -> anyhow::Result<Option<Self>> {
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        // The last line may be half written.
        let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let Some(stage) = lines.last().and_then(|line| line["stage"].as_str()) else { return Ok(None) };
        let mut training =
            Self { stage: stage.to_owned(), step: 0, n_steps: None, series: BTreeMap::new(), warnings: Vec::new() };
        let mut health = Health::default();
        for line in lines.iter().filter(|line| line["stage"] == stage) {
            training.step = line["step"].as_u64().unwrap_or(training.step);
            let figures = figures(line);
            training
                .warnings
                .extend(health.check(&figures).into_iter().map(|text| format!("step {}: {text}", training.step)));
            for (name, value) in figures {
                training.series.entry(name).or_default().push(value);
            }
        }
        training.n_steps = config.and_then(|config| training.planned(config));
        Ok(Some(training))
    }

    fn planned(&self, config: &Config) -> Option<u64> {
        if self.stage == StageName::Rl.as_str() {
            return Some(config.rl.max_steps as u64);
        }
        let per_epoch = self.step as f64 / self.last("epoch")?;
        let planned = (per_epoch * config.sft.epochs as f64).round() as u64;
        let limit = config.sft.max_steps as u64;
        Some(if limit > 0 { planned.min(limit) } else { planned })
    }

    /// The newest value of a figure.
    pub(super) fn last(&self, name: &str) -> Option<f64> {
        self.series.get(name)?.last().copied()
    }

    /// Mean seconds of the last steps.
    pub(super) fn step_s(&self) -> Option<f64> {
        let times = self.series.get("timing_s/step")?;
        let window = &times[times.len().saturating_sub(RATE_WINDOW)..];
        Some(window.iter().sum::<f64>() / window.len() as f64)
    }

    /// Seconds until the planned steps are done.
    pub(super) fn left_s(&self) -> Option<f64> {
        Some(self.step_s()? * self.n_steps?.saturating_sub(self.step) as f64)
    }

    /// Where the newest step's time went, largest first.
    pub(super) fn timing<'a>(&'a self) -> Vec<(&'a str, f64)> {
        let part =
            |(name, values): (&'a String, &'a Vec<f64>)| Some((name.strip_prefix("timing_s/")?, *values.last()?));
        let mut parts: Vec<(&str, f64)> =
            self.series.iter().filter_map(part).filter(|(name, _)| *name != "step").collect();
        parts.sort_by(|a, b| b.1.total_cmp(&a.1));
        parts
    }
}

/// The numbers of one line of `metrics.jsonl`.
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
            baseline: printable(&episode.baseline.rewrite, TEXT_BYTES),
        }
    }
}
