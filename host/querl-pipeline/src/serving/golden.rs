//! The golden check of a tenant's model before it accepts requests: it must repeat rewrites of the run's evaluation.

use super::tenant::ServedRun;
use crate::failure::Stop;
use crate::ledger::{Ledger, StageName};
use anyhow::Context as _;
use querl_core::fsx::open_jsonl;
use querl_core::records::{Context, EvalRecord, QueryRow};
use querl_core::serving::{EventSink, GenerationEvent};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

/// Number of queries that are rewritten.
const N_REQUESTS: usize = 3;

const TIMEOUT: Duration = Duration::from_secs(120);

/// Event sink that sends the last event of a request to a thread that waits for it.
pub(super) struct Waiting(pub(super) Sender<GenerationEvent>);

impl EventSink for Waiting {
    fn send(&self, event: GenerationEvent) {
        let _ = self.0.send(event);
    }

    fn is_open(&self) -> bool {
        true
    }

    /// Treated as a shadow request, because a full queue of clients must not fail the check of a model.
    fn is_shadow(&self) -> bool {
        true
    }
}

/// Waits for a request to finish and returns its text.
pub(super) fn wait(events: &Receiver<GenerationEvent>) -> anyhow::Result<String> {
    loop {
        match events.recv_timeout(TIMEOUT).context("no response from the model")? {
            GenerationEvent::Text(_) => {}
            GenerationEvent::Done(Ok(generation)) => return Ok(generation.text),
            GenerationEvent::Done(Err(failure)) => anyhow::bail!("{}: {}", failure.code, failure.message),
        }
    }
}

/// Rewrites the first queries of the run's evaluation again and compares. A run without an evaluation is not checked.
///
/// # Errors
/// No rewrite equals that of the evaluation, or generation fails. Single differences are only logged, since another CPU may sum in another
/// order.
pub(super) fn check(run: &ServedRun, rewrite: impl Fn(&str, &Context) -> anyhow::Result<String>) -> anyhow::Result<()> {
    let (mut n_equal, mut difference, mut failure) = (0, None, None);
    for EvalRecord { query, outcome, .. } in records(run)? {
        let Ok(answer) = outcome else { continue };
        let (expected, QueryRow { original_query: query, user_profile, history_summary, .. }) =
            (answer.candidate.rewrite, query);
        match rewrite(&query, &Context { user_profile, history_summary }) {
            Ok(found) if found == expected => n_equal += 1,
            Ok(found) => {
                difference = Some(format!("`{query}` was rewritten as `{expected}` in eval, and now as `{found}`"))
            }
            Err(error) => failure = Some(format!("`{query}` was not rewritten: {error:#}")),
        }
    }
    let folder = run.dir.root().display();
    match (n_equal, difference, failure) {
        (0, Some(difference), _) => anyhow::bail!(
            "{folder}: the model does not repeat the rewrites of its evaluation: {difference}; run `querl eval` again"
        ),
        (0, None, Some(failure)) => anyhow::bail!("{folder}: the model could not be checked: {failure}"),
        (_, difference, failure) => {
            for problem in [difference, failure].into_iter().flatten() {
                tracing::warn!("{folder}: {problem}");
            }
            Ok(())
        }
    }
}

/// The first records in `eval/records.jsonl` whose query the served system rewrote.
pub(super) fn records(run: &ServedRun) -> anyhow::Result<Vec<EvalRecord>> {
    let path = run.dir.eval_records();
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let ledger = Ledger::open(&run.dir.stages())?;
    if let Some(entry) = ledger.finished(StageName::Eval) {
        entry.outputs.check(run.dir.root(), StageName::Eval, &path)?;
    }
    let mut found = Vec::new();
    for line in open_jsonl::<EvalRecord>(&path).map_err(Stop::usage)? {
        let record = line.map_err(Stop::usage)?.value;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: with a full queue of clients a rollback was refused, since the model "does not repeat the rewrites".
    #[test]
    fn requests_that_check_a_model_take_no_place_of_clients() {
        let (sender, _receiver) = std::sync::mpsc::channel();
        assert!(Waiting(sender).is_shadow());
    }
}
