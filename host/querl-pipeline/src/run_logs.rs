//! Comparison of the logs of finished stages, `metrics.jsonl` and `episodes.jsonl`, with the digests in the ledger, so that a truncated or
//! removed log is never shown as if it were complete.

use crate::failure::sentence;
use crate::files::unreadable;
use crate::ledger::{Entry, FileDigest, Ledger, Outputs, StageName};
use crate::metrics_log::{self, StageLines};
use anyhow::Context;
use querl_core::run_dir::RunDir;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const METRICS: &str = "metrics.jsonl";

const EPISODES: &str = "episodes.jsonl";

/// A note for each log of a finished stage that differs from what the stage wrote.
///
/// # Errors
/// The ledger or a log cannot be read.
pub fn notes(dir: &RunDir) -> anyhow::Result<Vec<String>> {
    let ledger = Ledger::open(&dir.stages())?;
    let mut lines = read_metrics(dir)?;
    let mut notes = Vec::new();
    for stage in StageName::ALL {
        notes.extend(metrics_of(&mut lines, &ledger, stage).1);
    }
    notes.extend(episodes_changes(dir, &ledger)?);
    Ok(notes)
}

/// The note that logs could not be compared because of `error`, such as a damaged ledger.
pub fn not_compared(error: &anyhow::Error) -> String {
    format!("the logs are not compared with those that the stages wrote: {}", sentence(error))
}

/// The notes on `episodes.jsonl` only.
///
/// # Errors
/// As [`notes`].
pub fn episodes_notes(dir: &RunDir) -> anyhow::Result<Vec<String>> {
    episodes_changes(dir, &Ledger::open(&dir.stages())?)
}

/// The lines of `metrics.jsonl` of all stages whose lines are complete, and a note on each stage with changed lines or changed episodes.
pub(crate) fn whole_metrics(dir: &RunDir, ledger: &Ledger) -> anyhow::Result<(Vec<Value>, Vec<String>)> {
    let mut lines = read_metrics(dir)?;
    let (mut metrics, mut notes) = (Vec::new(), Vec::new());
    for stage in StageName::ALL {
        match metrics_of(&mut lines, ledger, stage) {
            (_, Some(change)) => notes.push(format!("{change}: its curves are not drawn")),
            (rows, None) => metrics.extend(rows),
        }
    }
    notes.extend(episodes_changes(dir, ledger)?);
    Ok((metrics, notes))
}

/// The lines of `metrics.jsonl` in the order of the file, as JSON; empty for a missing file. Lines that a killed process left incomplete do
/// not count.
///
/// # Errors
/// The file cannot be read.
pub fn metrics(dir: &RunDir) -> anyhow::Result<Vec<Value>> {
    let text = metrics_log::read(&dir.metrics()).with_context(|| unreadable(&dir.metrics()))?;
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// The lines of one stage in `metrics.jsonl`, as in the file.
pub(crate) fn lines_of(dir: &RunDir, stage: StageName) -> anyhow::Result<String> {
    metrics_log::lines_of(&dir.metrics(), stage.as_str()).with_context(|| unreadable(&dir.metrics()))
}

/// The lines of one stage in `metrics.jsonl`, as JSON.
pub(crate) fn metrics_of_stage(dir: &RunDir, stage: StageName) -> anyhow::Result<Vec<Value>> {
    Ok(read_metrics(dir)?.remove(stage.as_str()).unwrap_or_default().rows)
}

fn read_metrics(dir: &RunDir) -> anyhow::Result<BTreeMap<String, StageLines>> {
    metrics_log::by_stage(&dir.metrics()).with_context(|| unreadable(&dir.metrics()))
}

/// Adds the lines of one stage, and a note on how they differ from the lines that the stage wrote.
fn metrics_of(
    lines: &mut BTreeMap<String, StageLines>,
    ledger: &Ledger,
    stage: StageName,
) -> (Vec<Value>, Option<String>) {
    let StageLines { text, rows } = lines.remove(stage.as_str()).unwrap_or_default();
    let change = ledger.finished(stage).and_then(|entry| changed_metrics(entry, &text, &rows));
    (rows, change.map(|change| format!("{METRICS} of {stage} {change}")))
}

/// A stopped stage may have lost lines before it was resumed.
fn changed_metrics(entry: &Entry, lines: &str, rows: &[Value]) -> Option<String> {
    let now = (!lines.is_empty()).then(|| FileDigest::of_bytes(lines.as_bytes()));
    let known: BTreeSet<u64> = rows.iter().filter_map(|row| row["step"].as_u64()).collect();
    let n_steps = entry.facts.count("steps");
    let n_missing = (1..=n_steps).filter(|step| !known.contains(step)).count();
    let missing = (n_missing > 0).then(|| format!("has no line for {n_missing} of {n_steps} steps"));
    entry.logs.get(METRICS).and_then(|written| written.difference(now.as_ref())).or(missing)
}

fn episodes_changes(dir: &RunDir, ledger: &Ledger) -> anyhow::Result<Vec<String>> {
    let mut changes = Vec::new();
    for stage in StageName::ALL {
        let Some(written) = ledger.finished(stage).and_then(|entry| entry.logs.get(EPISODES)) else { continue };
        let now = Outputs::of(dir.root(), &[dir.episodes()])?.into_iter().next().map(|(_, digest)| digest);
        changes.extend(written.difference(now.as_ref()).map(|change| format!("{EPISODES} of {stage} {change}")));
    }
    Ok(changes)
}
