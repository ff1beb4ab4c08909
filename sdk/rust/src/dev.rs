//! Scores recorded episodes natively, for `querl plugin dev`, which builds the plugin with the feature `dev` and calls the function that
//! [`export!`](crate::export) then defines in the dynamic library.

use crate::testing::form::HostCallForm;
use crate::testing::{self, HostFunctions};
use crate::{Episode, GroupReward, Inputs, Rejection, Reward, Score, SettingError, Settings, log};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, Location, PanicHookInfo, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// Path of a file of recorded episodes (`episodes.jsonl`).
    episodes: PathBuf,
    settings: BTreeMap<String, Value>,
    /// Path of the file to write. Each line is a JSON object. First `{"begun": id}` for each episode or group, written when its scoring
    /// begins. Then `{"range": [low, high]}`, and for each episode `{"scored": ...}`, `{"rejected": ...}` or
    /// `{"fault": {"message", "file", "line"}}`, with its log lines under `log`. Last `{"seconds": ...}`, the time of scoring. If the
    /// plugin refuses a setting, `{"refused": {"message", "file", "line"}}` is the only line.
    results: PathBuf,
}

/// A reward plugin of either kind, which scores single episodes or groups.
pub trait Scorer: Sized {
    /// Inputs that the reward declares to read.
    const INPUTS: Inputs;
    /// True if [`Self::score`] gets all episodes of a group, false if it gets one episode.
    const BY_GROUP: bool;

    /// Reads the settings.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// Lowest and highest total that the reward can return.
    fn range(&self) -> RangeInclusive<f64>;

    /// Scores episodes: one result per episode, in order.
    fn score(&self, episodes: &[Episode]) -> Vec<Result<Score, Rejection>>;
}

/// A [`Reward`] as a [`Scorer`].
pub struct Single<R>(R);

impl<R: Reward> Scorer for Single<R> {
    const INPUTS: Inputs = R::INPUTS;
    const BY_GROUP: bool = false;

    fn new(settings: &Settings) -> Result<Self, SettingError> {
        R::new(settings).map(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        self.0.range()
    }

    fn score(&self, episodes: &[Episode]) -> Vec<Result<Score, Rejection>> {
        episodes.iter().map(|episode| self.0.score(episode)).collect()
    }
}

/// A [`GroupReward`] as a [`Scorer`].
pub struct Grouped<R>(R);

impl<R: GroupReward> Scorer for Grouped<R> {
    const INPUTS: Inputs = R::INPUTS;
    const BY_GROUP: bool = true;

    fn new(settings: &Settings) -> Result<Self, SettingError> {
        R::new(settings).map(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        self.0.range()
    }

    fn score(&self, episodes: &[Episode]) -> Vec<Result<Score, Rejection>> {
        self.0.score_group(episodes)
    }
}

/// Message, file and line of the last panic, as JSON.
static PANIC: Mutex<Value> = Mutex::new(Value::Null);

/// Scores the episodes of the file in a JSON request and writes the results to the file in the request. Returns false if that is not
/// possible, and writes the reason to stderr.
pub fn replay<S: Scorer>(request: &[u8]) -> bool {
    std::panic::set_hook(Box::new(keep));
    let done = catch_unwind(|| {
        let Request { episodes, settings, results } =
            serde_json::from_slice(request).map_err(|error| format!("not a request: {error}"))?;
        let failed = |error: std::io::Error| format!("{}: {error}", results.display());
        let mut output = File::create(&results).map_err(failed)?;
        let text = results_of::<S>(settings, &episodes, &mut output)?;
        output.write_all(text.as_bytes()).map_err(failed)
    });
    let message = match done {
        Ok(Ok(())) => return true,
        Ok(Err(message)) => message,
        Err(_) => taken()["message"].to_string(),
    };
    eprintln!("{message}");
    false
}

fn results_of<S: Scorer>(settings: BTreeMap<String, Value>, file: &Path, output: &mut File) -> Result<String, String> {
    let texts = settings.into_iter().map(|(key, value)| match value {
        Value::String(text) => (key, text),
        other => (key, other.to_string()),
    });
    let settings = Settings::from_pairs(texts);
    let made = catch_unwind(AssertUnwindSafe(|| S::new(&settings).map(|plugin| (plugin.range(), plugin))));
    let (range, plugin) = match made {
        Ok(Ok(made)) => made,
        Ok(Err(error)) => return Ok(format!("{}\n", json!({ "refused": { "message": error.to_string() } }))),
        Err(_) => return Ok(format!("{}\n", json!({ "refused": taken() }))),
    };
    let mut episodes = testing::read_episodes(file);
    let mut calls = calls_of(file)?;
    episodes.iter_mut().for_each(|episode| testing::run::strip(episode, S::INPUTS));
    log::keep();
    let (mut results, mut seconds) = (vec![Value::Null; episodes.len()], Duration::ZERO);
    for members in groups(&episodes, S::BY_GROUP) {
        let begun = json!({ "begun": episodes[members[0]].id });
        writeln!(output, "{begun}").map_err(|error| format!("results: {error}"))?;
        let group: Vec<Episode> = members.iter().map(|index| episodes[*index].clone()).collect();
        let of_members = members.iter().flat_map(|index| std::mem::take(&mut calls[*index])).collect();
        let _installed = HostFunctions::recorded(of_members).install();
        let started = Instant::now();
        let scored = catch_unwind(AssertUnwindSafe(|| plugin.score(&group)));
        seconds += started.elapsed();
        let written: Vec<Value> = match scored {
            Ok(scored) if scored.len() == group.len() => scored.into_iter().map(written).collect(),
            Ok(scored) => {
                let message =
                    format!("gave {} results for {} episodes; expected one for each", scored.len(), group.len());
                vec![json!({ "fault": { "message": message } }); group.len()]
            }
            Err(_) => vec![json!({ "fault": taken() }); group.len()],
        };
        members.iter().zip(written).for_each(|(index, result)| results[*index] = result);
        let lines = log::taken();
        if !lines.is_empty() {
            results[members[0]]["log"] = lines.into();
        }
    }
    let mut text = format!("{}\n", json!({ "range": [range.start(), range.end()] }));
    for result in results.iter().chain([&json!({ "seconds": seconds.as_secs_f64() })]) {
        writeln!(text, "{result}").expect("writing to a String succeeds");
    }
    Ok(text)
}

/// Indices of the episodes of each group. Groups are in the order of their first episodes. If `by_group` is false, each episode is a group.
fn groups(episodes: &[Episode], by_group: bool) -> Vec<Vec<usize>> {
    if !by_group {
        return (0..episodes.len()).map(|index| vec![index]).collect();
    }
    let (mut places, mut groups) = (BTreeMap::new(), Vec::<Vec<usize>>::new());
    for (index, episode) in episodes.iter().enumerate() {
        let place = *places.entry(episode.group_id.as_str()).or_insert(groups.len());
        match groups.get_mut(place) {
            Some(group) => group.push(index),
            None => groups.push(vec![index]),
        }
    }
    groups
}

/// The recorded calls of host functions, per line of the file.
fn calls_of(file: &Path) -> Result<Vec<Vec<HostCallForm>>, String> {
    #[derive(Deserialize)]
    struct Line {
        #[serde(default)]
        calls: Vec<HostCallForm>,
    }
    let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let calls =
        |line: &str| serde_json::from_str::<Line>(line).map(|line| line.calls).map_err(|error| error.to_string());
    text.lines().filter(|line| !line.trim().is_empty()).map(calls).collect()
}

fn written(scored: Result<Score, Rejection>) -> Value {
    match scored {
        Ok(score) => match not_finite(&score) {
            Some(message) => json!({ "fault": { "message": message } }),
            None => {
                let parts = score.components.iter().map(|part| json!({ "name": part.name, "value": part.value }));
                json!({ "scored": { "total": score.total, "components": parts.collect::<Vec<_>>() } })
            }
        },
        Err(rejection) => json!({ "rejected": { "code": rejection.code, "detail": rejection.detail } }),
    }
}

fn not_finite(score: &Score) -> Option<String> {
    let parts = score.components.iter().map(|part| (part.name.as_str(), part.value));
    let (name, value) = std::iter::once(("total", score.total)).chain(parts).find(|(_, value)| !value.is_finite())?;
    Some(format!("`{name}` is {value}; expected a finite number"))
}

fn keep(panic: &PanicHookInfo<'_>) {
    let place = panic.location().map(|place: &Location<'_>| (place.file(), place.line()));
    let mut kept = json!({ "message": panic.payload_as_str().unwrap_or("panicked") });
    if let Some((file, line)) = place {
        (kept["file"], kept["line"]) = (file.into(), line.into());
    }
    *PANIC.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = kept;
}

fn taken() -> Value {
    PANIC.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
}

#[doc(hidden)]
#[macro_export]
macro_rules! __dev_entry {
    (reward, $plugin:ty) => {
        $crate::__dev_entry!($crate::__dev::Single<$plugin>);
    };
    (group_reward, $plugin:ty) => {
        $crate::__dev_entry!($crate::__dev::Grouped<$plugin>);
    };
    ($scorer:ty) => {
        /// Scores recorded episodes for `querl plugin dev`.
        ///
        /// # Safety
        /// `request` has `n_bytes` bytes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn querl_dev_replay(request: *const u8, n_bytes: usize) -> bool {
            // SAFETY: the caller guarantees that `request` has `n_bytes` bytes.
            $crate::__dev::replay::<$scorer>(unsafe { ::std::slice::from_raw_parts(request, n_bytes) })
        }
    };
    ($other:ident, $plugin:ty) => {};
}
