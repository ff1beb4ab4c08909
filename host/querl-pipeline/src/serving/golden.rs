//! The check of a tenant's model before it takes requests: it repeats rewrites of the run's evaluation.

use super::tenant::ServedRun;
use anyhow::Context as _;
use querl_core::records::{Context, EvalRecord, QueryRow};
use querl_core::serving::{EventSink, GenerationEvent};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

/// Queries that are rewritten.
const N_REQUESTS: usize = 3;

const TIMEOUT: Duration = Duration::from_secs(120);

/// Passes the last event of a request on to a thread that waits for it.
pub(super) struct Waiting(pub(super) Sender<GenerationEvent>);

impl EventSink for Waiting {
    fn send(&self, event: GenerationEvent) {
        let _ = self.0.send(event);
    }

    fn is_open(&self) -> bool {
        true
    }
}

/// The text of a finished request.
pub(super) fn wait(events: &Receiver<GenerationEvent>) -> anyhow::Result<String> {
    loop {
        match events.recv_timeout(TIMEOUT).context("no response from the model")? {
            GenerationEvent::Text(_) => {}
            GenerationEvent::Done(Ok(generation)) => return Ok(generation.text),
            GenerationEvent::Done(Err(failure)) => anyhow::bail!("{}: {}", failure.code, failure.message),
        }
    }
}

/// Rewrites the first queries of the evaluation again. A run without an evaluation has nothing to compare with.
///
/// # Errors
/// No rewrite is the evaluation's. Single differences are logged: another CPU may sum in another order.
pub(super) fn check(run: &ServedRun, rewrite: impl Fn(&str, &Context) -> anyhow::Result<String>) -> anyhow::Result<()> {
    let (mut n_equal, mut difference) = (0, None);
    for EvalRecord { query, outcome, .. } in records(run)? {
        let Ok(answer) = outcome else { continue };
        let (expected, QueryRow { original_query: query, user_profile, history_summary, .. }) =
            (answer.candidate.rewrite, query);
        match rewrite(&query, &Context { user_profile, history_summary }) {
            Ok(found) if found == expected => n_equal += 1,
            Ok(found) => {
                difference = Some(format!("`{query}` was rewritten as `{expected}` in eval, and now as `{found}`"))
            }
            Err(error) => difference = Some(format!("`{query}`: {error:#}")),
        }
    }
    let Some(difference) = difference else { return Ok(()) };
    let folder = run.dir.root().display();
    if n_equal == 0 {
        anyhow::bail!(
            "{folder}: the model does not repeat the rewrites of its evaluation: {difference}; run `querl eval` again"
        );
    }
    tracing::warn!("{folder}: {difference}");
    Ok(())
}

/// The first queries of `eval/records.jsonl` that the served system rewrote.
pub(super) fn records(run: &ServedRun) -> anyhow::Result<Vec<EvalRecord>> {
    let path = run.dir.eval_records();
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let unreadable = || format!("{}: cannot be read", path.display());
    let mut found = Vec::new();
    for line in BufReader::new(File::open(&path).with_context(unreadable)?).lines() {
        let record: EvalRecord = serde_json::from_str(&line.with_context(unreadable)?).with_context(unreadable)?;
        let is_rewritten = record.outcome.as_ref().is_ok_and(|answer| !answer.candidate.rewrite.is_empty());
        if record.system == run.system() && is_rewritten {
            found.push(record);
        }
        if found.len() == N_REQUESTS {
            break;
        }
    }
    Ok(found)
}
