//! Runs stages in order: skips finished ones, goes on with interrupted ones, redoes those whose inputs changed.
//!
//! A stage's inputs include the content of what earlier stages left. So a change carries through to every later stage that
//! can see it, and stops where it makes no difference: failed rows that fail again do not train the model anew.

use super::facts::Facts;
use super::inputs::Inputs;
use super::ledger::{Decision, Entry, Ledger, decide};
use super::{Stage, StageName};
use crate::interrupt;
use crate::run::Run;
use crate::terminal::{self, StageProgress};
use anyhow::Context;
use std::time::Instant;

/// Which stages to look at, and which of them to run whatever the ledger says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The first.
    pub first: StageName,
    /// The last.
    pub last: StageName,
    /// This one and all after it are run anew.
    pub forced_from: Option<StageName>,
}

/// What became of one stage.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Which.
    pub stage: StageName,
    /// False where it was finished already.
    pub ran: bool,
    /// What it found, now or when it ran.
    pub facts: Facts,
    /// Wall-clock seconds, now or when it ran.
    pub seconds: f64,
}

/// Runs the stages of `window`.
///
/// # Errors
/// A stage failed or was interrupted; those before it are in the ledger.
pub fn run_stages(run: &Run, window: Window) -> anyhow::Result<Vec<Outcome>> {
    let mut ledger = Ledger::open(&run.dir.stages())?;
    let names = StageName::ALL.into_iter().filter(|name| (window.first..=window.last).contains(name));
    names.map(|name| run_stage(run, &mut ledger, name, window)).collect()
}

fn run_stage(run: &Run, ledger: &mut Ledger, name: StageName, window: Window) -> anyhow::Result<Outcome> {
    interrupt::check()?;
    let stage = name.stage();
    let inputs = stage.inputs(run)?;
    let decision = match window.forced_from {
        Some(first) if name >= first => Decision::Anew(format!("--from {first}")),
        _ => decide(ledger.entry(name.as_str()), &inputs, &stage.outputs(&run.dir)),
    };
    let reason = match decision {
        Decision::Skip(Entry { facts, seconds, .. }) => {
            terminal::say(&format!("{name}: finished earlier, skipped"));
            return Ok(Outcome { stage: name, ran: false, facts, seconds });
        }
        Decision::Anew(reason) => {
            stage.clean(&run.dir).with_context(|| format!("{name}: what an earlier run left cannot be removed"))?;
            reason
        }
        Decision::Continue(reason) => reason,
    };
    terminal::say(&format!("{name}: running ({reason})"));
    let outcome = execute(run, ledger, stage, inputs)?;
    // What the last stage found is the command's result, which goes to stdout; the evaluation's is its table.
    if name != window.last || name == StageName::Eval {
        terminal::say(&summary(name, &outcome.facts, outcome.seconds));
    }
    Ok(outcome)
}

fn execute(run: &Run, ledger: &mut Ledger, stage: &dyn Stage, inputs: Inputs) -> anyhow::Result<Outcome> {
    let name = stage.name();
    let begun = Entry { inputs, finished: false, n_failed: 0, facts: Facts::default(), seconds: 0.0 };
    ledger.put(name.as_str(), begun.clone())?;
    let start = Instant::now();
    let done = {
        let progress = StageProgress::start(name.as_str());
        stage.execute(run, &progress)?
    };
    let seconds = start.elapsed().as_secs_f64();
    let entry = Entry { finished: true, n_failed: done.n_failed, facts: done.facts.clone(), seconds, ..begun };
    ledger.put(name.as_str(), entry)?;
    Ok(Outcome { stage: name, ran: true, facts: done.facts, seconds })
}

/// The block of lines that ends a stage.
pub fn summary(name: StageName, facts: &Facts, seconds: f64) -> String {
    let mut lines = vec![format!("{name}: done in {}", duration(seconds))];
    lines.extend(facts.to_lines());
    lines.join("\n")
}

fn duration(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 60.0 => format!("{seconds:.1} s"),
        seconds => format!("{:.0} min {:.0} s", (seconds / 60.0).floor(), seconds % 60.0),
    }
}
