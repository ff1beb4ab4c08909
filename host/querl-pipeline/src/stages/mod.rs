//! The stages of a run, one file each, and their runner: skips finished stages, resumes interrupted ones, runs again those whose inputs changed.
//!
//! The inputs of a stage include the content of the files of earlier stages. A change therefore reaches every later stage that can see it,
//! and stops where it makes no difference: failed rows that fail again do not cause another training.

mod convert;
mod eval;
pub mod funnel;
pub mod leaks;
mod rewrite;
mod rl;
mod sft;
pub(crate) mod spending;
mod stage;
mod validate;

use crate::failure::Stop;
use crate::interrupt;
use crate::ledger::{Decision, Entry, Facts, Inputs, Ledger, StageName, decide, listing};
use crate::run::Run;
use anyhow::Context;
use querl_core::config::TableFormat;
use querl_data::table_path;
use spending::Counted;
use stage::Stage;
use std::collections::BTreeSet;
use std::time::Instant;

fn stage_of(name: StageName) -> &'static dyn Stage {
    match name {
        StageName::Rewrite => &rewrite::Rewrite,
        StageName::Validate => &validate::Validate,
        StageName::Convert => &convert::Convert,
        StageName::Sft => &sft::Sft,
        StageName::Rl => &rl::Rl,
        StageName::Eval => &eval::Eval,
    }
}

/// Which stages to look at, and which of them to run whatever the ledger says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The first.
    pub first: StageName,
    /// The last.
    pub last: StageName,
    /// This stage and all later ones run again.
    pub forced_from: Option<StageName>,
}

impl Window {
    fn stages(self) -> impl Iterator<Item = StageName> {
        StageName::ALL.into_iter().filter(move |name| (self.first..=self.last).contains(name))
    }
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
    check_upstream(run, &ledger, window.first)?;
    for name in pending(run, &ledger, window)? {
        if name == StageName::Rewrite {
            check_input(run)?;
        }
        stage_of(name).check(run)?;
    }
    window.stages().map(|name| run_stage(run, &mut ledger, name, window)).collect()
}

/// Refuses a query table that the stages of this run would write over or remove.
fn check_input(run: &Run) -> anyhow::Result<()> {
    let (dir, input) = (&run.dir, &run.config.data.input);
    let outputs = StageName::ALL.into_iter().flat_map(|name| stage_of(name).outputs(dir));
    let tables = [dir.rewrites(), dir.validated()].into_iter();
    let tables = tables.flat_map(|output| TableFormat::ALL.map(|format| table_path(&output, format)));
    let Ok(real) = input.canonicalize() else { return Ok(()) };
    if outputs.chain(tables).any(|path| path.canonicalize().is_ok_and(|path| path == real)) {
        let input = input.display();
        let message = format!("data.input is {input}, which this run writes itself; give it a copy, or another --out");
        return Err(Stop::usage(message).into());
    }
    Ok(())
}

/// Refuses a first stage whose input was made from what is no longer there: the stages before it are not run here, so their
/// place in the chain of files is looked at. Other settings of theirs are said and used as they are: who runs a single stage
/// may want to try a setting on what the run holds.
fn check_upstream(run: &Run, ledger: &Ledger, first: StageName) -> anyhow::Result<()> {
    let mut open: BTreeSet<StageName> = stages_behind(&stage_of(first).inputs(run, ledger)?);
    // Latest first: what an earlier one needs comes before it.
    while let Some(name) = open.pop_last() {
        let inputs = stage_of(name).inputs(run, ledger)?;
        let Some(entry) = ledger.entry(name.as_str()) else { continue };
        let changed = inputs.changed_since(&entry.inputs);
        let stale = inputs.upstream().into_iter().find(|(file, _)| changed.iter().any(|name| name == file));
        if let Some((file, _)) = stale {
            let message = format!("{name} ran before {file} changed; run `querl {name}` first, or `querl run`");
            return Err(Stop::usage(message).into());
        }
        if !changed.is_empty() {
            run.reporter.message(&format!("{name}: {} changed since it ran; what it left is used", listing(&changed)));
        }
        open.extend(stages_behind(&inputs));
    }
    Ok(())
}

fn stages_behind(inputs: &Inputs) -> BTreeSet<StageName> {
    inputs.upstream().into_iter().map(|(_, stage)| stage).collect()
}

/// The stages that may have work to do: from the first on that is not finished, since what it leaves decides on the others.
fn pending(run: &Run, ledger: &Ledger, window: Window) -> anyhow::Result<Vec<StageName>> {
    for name in window.stages() {
        let inputs = stage_of(name).inputs(run, ledger)?;
        if !matches!(decide_on(run, ledger, name, &inputs, window), Decision::Skip(_)) {
            return Ok(Window { first: name, ..window }.stages().collect());
        }
    }
    Ok(Vec::new())
}

/// What would become of stages that ask somebody outside, without running any: those of `window` that are finished are left out. A stage
/// whose files are not there yet is as one that never ran; after one that has work to do, nothing is finished.
pub(crate) fn plan(run: &Run, window: Window, asking: &[StageName]) -> anyhow::Result<Vec<(StageName, PlannedWork)>> {
    let ledger = Ledger::open(&run.dir.stages())?;
    let (mut ahead, mut has_work) = (Vec::new(), false);
    for name in window.stages() {
        let decision = match has_work && !asking.contains(&name) {
            true => continue,
            false => stage_of(name).inputs(run, &ledger).map(|inputs| decide_on(run, &ledger, name, &inputs, window)),
        };
        let found = match decision {
            Ok(Decision::Skip(_)) if !has_work => continue,
            Ok(Decision::Skip(_) | Decision::Continue(_)) => PlannedWork::Resumes,
            Ok(Decision::StartOver(_)) | Err(_) => PlannedWork::StartsOver,
        };
        has_work = true;
        if asking.contains(&name) {
            ahead.push((name, found));
        }
    }
    Ok(ahead)
}

/// What a stage with work to do makes of what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlannedWork {
    Resumes,
    StartsOver,
}

fn decide_on(run: &Run, ledger: &Ledger, name: StageName, inputs: &Inputs, window: Window) -> Decision {
    let stage = stage_of(name);
    let left = [stage.outputs(&run.dir), stage.tables(run)].concat();
    match window.forced_from {
        Some(first) if name >= first => Decision::StartOver(format!("--from {first}")),
        _ => decide(ledger.entry(name.as_str()), inputs, &left, |input| stage.keeps_rows(input)),
    }
}

fn run_stage(run: &Run, ledger: &mut Ledger, name: StageName, window: Window) -> anyhow::Result<Outcome> {
    interrupt::check()?;
    let stage = stage_of(name);
    let inputs = stage.inputs(run, ledger)?;
    let decision = decide_on(run, ledger, name, &inputs, window);
    let found = match decision {
        Decision::Skip(_) => Facts::default(),
        _ => stage.permit(run, window.last, run.reporter.stage(name.as_str()).as_ref())?,
    };
    let reason = match decision {
        Decision::Skip(Entry { facts, seconds, .. }) => {
            // A kill may have come between the ledger's last word and this.
            stage.settle(&run.dir).with_context(|| format!("{name}: what is no longer needed cannot be removed"))?;
            run.reporter.message(&format!("{name}: finished earlier, skipped"));
            if let Some(reminder) = stage.reminder(run, &facts) {
                run.reporter.message(&format!("warning: {reminder}"));
            }
            return Ok(Outcome { stage: name, ran: false, facts, seconds });
        }
        Decision::StartOver(reason) => {
            stage.clean(&run.dir).with_context(|| format!("{name}: what an earlier run left cannot be removed"))?;
            reason
        }
        Decision::Continue(reason) => reason,
    };
    run.reporter.message(&format!("{name}: running ({reason})"));
    let outcome = execute(run, ledger, stage, inputs, found)?;
    // What the last stage found is the command's result, which goes to stdout; the evaluation's is its table.
    if name != window.last || name == StageName::Eval {
        run.reporter.message(&summary(name, &outcome.facts, outcome.seconds));
    }
    Ok(outcome)
}

fn execute(run: &Run, ledger: &mut Ledger, stage: &dyn Stage, inputs: Inputs, found: Facts) -> anyhow::Result<Outcome> {
    let name = stage.name();
    let begun = Entry::begun(inputs);
    ledger.put(name.as_str(), begun.clone())?;
    let start = Instant::now();
    let done = {
        let account = run.outside.spend_tracker().clone();
        account.begin(name.as_str());
        let progress = run.reporter.stage(name.as_str());
        let done = stage.execute(run, &Counted { inner: progress.as_ref(), account, stage: name });
        // What was spent is spent, however it ended.
        let settled = spending::settle(run, name);
        let mut done = done?;
        settled?;
        done.facts.append(found);
        done
    };
    let seconds = start.elapsed().as_secs_f64();
    let entry = Entry { finished: true, n_failed: done.n_failed, facts: done.facts.clone(), seconds, ..begun };
    ledger.put(name.as_str(), entry)?;
    stage.settle(&run.dir).with_context(|| format!("{name}: what is no longer needed cannot be removed"))?;
    for warning in funnel::size_warnings(name, &done.facts) {
        run.reporter.message(&format!("warning: {warning}"));
    }
    if name == StageName::Convert {
        run.reporter.message("rows of each stage:");
        funnel::lines(&funnel::steps(ledger, &run.dir)?).iter().for_each(|line| run.reporter.message(line));
    }
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
