//! Scores recorded episodes natively, for `querl plugin dev`, which builds the plugin with the feature `dev` and calls the function that
//! [`export!`](crate::export) then defines in the dynamic library.

use crate::{Episode, Reward, Settings, log, testing};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, Location, PanicHookInfo, catch_unwind};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// A file of recorded episodes.
    episodes: PathBuf,
    settings: BTreeMap<String, Value>,
    /// The file to write. A line is a JSON object: first `{"range": [low, high]}`, then for each episode `{"scored": ...}`, `{"rejected": ...}` or
    /// `{"fault": {"message", "file", "line"}}`, with its log lines under `log`, and last `{"seconds": ...}`, the time that scoring took.
    /// Where the plugin refuses a setting, `{"refused": {"message", "file", "line"}}` is the only line.
    results: PathBuf,
}

/// Message and place of the last panic.
static PANIC: Mutex<Value> = Mutex::new(Value::Null);

/// Scores the episodes that a JSON request names, and writes the results. False where that is not possible; stderr says why.
pub fn replay<R: Reward>(request: &[u8]) -> bool {
    std::panic::set_hook(Box::new(keep));
    let done = catch_unwind(|| {
        let Request { episodes, settings, results } =
            serde_json::from_slice(request).map_err(|error| format!("not a request: {error}"))?;
        let text = results_of::<R>(settings, || testing::read_episodes(&episodes));
        std::fs::write(&results, text).map_err(|error| format!("{}: {error}", results.display()))
    });
    let message = match done {
        Ok(Ok(())) => return true,
        Ok(Err(message)) => message,
        Err(_) => taken()["message"].to_string(),
    };
    eprintln!("{message}");
    false
}

fn results_of<R: Reward>(settings: BTreeMap<String, Value>, episodes: impl FnOnce() -> Vec<Episode>) -> String {
    let texts = settings.into_iter().map(|(key, value)| match value {
        Value::String(text) => (key, text),
        other => (key, other.to_string()),
    });
    let settings = Settings::from_pairs(texts);
    let made = catch_unwind(AssertUnwindSafe(|| R::new(&settings).map(|plugin| (plugin.range(), plugin))));
    let (range, plugin) = match made {
        Ok(Ok(made)) => made,
        Ok(Err(error)) => return format!("{}\n", json!({ "refused": { "message": error.to_string() } })),
        Err(_) => return format!("{}\n", json!({ "refused": taken() })),
    };
    let mut text = format!("{}\n", json!({ "range": [range.start(), range.end()] }));
    let mut seconds = Duration::ZERO;
    log::keep();
    for episode in episodes() {
        let started = Instant::now();
        let scored = catch_unwind(AssertUnwindSafe(|| plugin.score(&episode)));
        seconds += started.elapsed();
        let mut result = match scored {
            Ok(Ok(score)) => match not_finite(&score) {
                Some(message) => json!({ "fault": { "message": message } }),
                None => {
                    let parts = score.components.iter().map(|part| json!({ "name": part.name, "value": part.value }));
                    json!({ "scored": { "total": score.total, "components": parts.collect::<Vec<_>>() } })
                }
            },
            Ok(Err(rejection)) => json!({ "rejected": { "code": rejection.code, "detail": rejection.detail } }),
            Err(_) => json!({ "fault": taken() }),
        };
        let lines = log::taken();
        if !lines.is_empty() {
            result["log"] = lines.into();
        }
        writeln!(text, "{result}").expect("writing to a String succeeds");
    }
    writeln!(text, "{}", json!({ "seconds": seconds.as_secs_f64() })).expect("as above");
    text
}

fn not_finite(score: &crate::Score) -> Option<String> {
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
        /// Scores recorded episodes for `querl plugin dev`.
        ///
        /// # Safety
        /// `request` has `n_bytes` bytes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn querl_dev_replay(request: *const u8, n_bytes: usize) -> bool {
            // SAFETY: the caller keeps what this function asks for.
            $crate::__dev::replay::<$plugin>(unsafe { ::std::slice::from_raw_parts(request, n_bytes) })
        }
    };
    ($other:ident, $plugin:ty) => {};
}
