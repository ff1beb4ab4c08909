//! The stages of a run, one file each, and their runner: skips finished stages, resumes interrupted ones, runs again those whose inputs changed.
//!
//! The inputs of a stage include the content of files that earlier stages wrote. A change reaches the later stages whose input files
//! differ, and no others: rows that fail again do not cause another training.

mod convert;
mod edit_targets;
pub(crate) mod eval;
mod expansion;
pub mod funnel;
pub(crate) mod imported_stage;
pub mod leaks;
pub(crate) mod noise;
mod previous;
mod rewrite;
mod rl;
mod sft;
pub(crate) mod spending;
mod stage;
mod validate;

use crate::failure::Stop;
use crate::interrupt;
use crate::ledger::{Decision, Entry, Facts, FileDigest, Inputs, Ledger, Outputs, StageName, decide, listing};
use crate::plugins::Plugins;
use crate::run::Run;
use crate::run_logs;
use crate::training;
use anyhow::Context;
pub(crate) use expansion::MAX_LOOKUPS_OF_EXPANSIONS;
use previous::Previous;
use querl_core::config::{Config, OnNoise, RewriteForm, TableFormat};
use querl_core::ports::Reporter;
use querl_core::run_dir::RunDir;
use querl_data::{check_knowledge_base, open_queries, table_path};
use spending::Counted;
use stage::Stage;
pub(crate) use stage::knowledge_base_of_expansions;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
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

/// The stages that a command runs, and those that run again even if finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// First stage that the command runs.
    pub first: StageName,
    /// Last stage that the command runs.
    pub last: StageName,
    /// `Some`: this stage and all later ones run again even if finished.
    pub forced_from: Option<StageName>,
}

impl Window {
    pub(crate) fn stages(self) -> impl Iterator<Item = StageName> {
        StageName::ALL.into_iter().filter(move |name| (self.first..=self.last).contains(name))
    }
}

/// Outcome of one stage of a command.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// The stage.
    pub stage: StageName,
    /// Whether the stage ran; false if it was already finished.
    pub ran: bool,
    /// Figures of the stage's summary.
    pub facts: Facts,
    /// Wall-clock seconds of the stage's run, also of an earlier one.
    pub seconds: f64,
}

/// Runs the stages of `window`.
///
/// # Errors
/// A stage failed or was interrupted; the stages before it are recorded in the ledger.
pub fn run_stages(run: &Run, window: Window) -> anyhow::Result<Vec<Outcome>> {
    recover(&run.dir, run.reporter.as_ref())?;
    let mut ledger = Ledger::open(&run.dir.stages())?;
    check_upstream(run, &ledger, window.first)?;
    let pending = pending(run, &ledger, window)?;
    let trains = pending.last().is_some_and(|last| *last >= StageName::Sft);
    if trains {
        querl_model::check_weights(&run.config.model.path).map_err(Stop::of_model)?;
    }
    if pending.first().is_some_and(|first| *first <= StageName::Validate) {
        let table = open_queries(&run.config.data)?;
        if trains {
            training::check_first_prompt(&run.config, &table, run.plugins.prompts.as_ref())?;
        }
        if let Some(unknown) = check_knowledge_base(&run.config, &table)? {
            run.reporter.message(&format!("warning: {unknown}"));
        }
    }
    for name in pending {
        if name == StageName::Rewrite {
            check_input(run)?;
        }
        stage_of(name).check(run)?;
    }
    let outcomes = window.stages().map(|name| run_stage(run, &mut ledger, name, window)).collect::<Result<_, _>>()?;
    interrupt::check()?;
    run.write_config()?;
    Ok(outcomes)
}

/// Restores the earlier result of each stage whose new run was killed or interrupted before it had anything to resume from.
///
/// # Errors
/// A file cannot be moved, or the ledger cannot be read or written.
pub fn recover(dir: &RunDir, reporter: &dyn Reporter) -> anyhow::Result<()> {
    for name in previous::recover(dir, &mut Ledger::open(&dir.stages())?)? {
        reporter.message(&format!("{name}: what was there before is back in place"));
    }
    Ok(())
}

/// Refuses a query table or a dataset that the stages of this run would overwrite or remove.
fn check_input(run: &Run) -> anyhow::Result<()> {
    let (dir, data) = (&run.dir, &run.config.data);
    let outputs = StageName::ALL.into_iter().flat_map(|name| stage_of(name).outputs(dir));
    let tables = [dir.rewrites(), dir.validated()].into_iter();
    let tables = tables.flat_map(|output| TableFormat::ALL.map(|format| table_path(&output, format)));
    let written: Vec<_> = outputs.chain(tables).filter_map(|path| path.canonicalize().ok()).collect();
    let is_written = |path: &&Path| path.canonicalize().is_ok_and(|real| written.contains(&real));
    if let Some(input) = data.query_files().into_iter().find(is_written) {
        let (input, key) = (input.display(), if data.dataset.is_set() { "data.dataset" } else { "data.input" });
        let message = format!("{key} is {input}, which this run writes itself; give it a copy, or another --out");
        return Err(Stop::usage(message).into());
    }
    Ok(())
}

/// Checks the stages before `first`, which this command does not run. An error if one ran on files that have changed since. Changed
/// settings of such a stage are only reported: a user may try a setting in a single stage on existing files.
fn check_upstream(run: &Run, ledger: &Ledger, first: StageName) -> anyhow::Result<()> {
    let mut open: BTreeSet<StageName> = stages_behind(&stage_of(first).inputs(run, ledger)?);
    // From the latest to the earliest stage, because a stage depends only on earlier ones.
    while let Some(name) = open.pop_last() {
        let inputs = stage_of(name).inputs(run, ledger)?;
        let Some(entry) = ledger.entry(name) else { continue };
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

/// Names of the settings and files, and of the `plugins` if given, that have changed in `config` since the data stages ran.
///
/// # Errors
/// A file that the configuration names cannot be read.
pub(crate) fn changed_since_data(
    config: &Config,
    plugins: Option<&Plugins>,
    ledger: &Ledger,
) -> anyhow::Result<Vec<String>> {
    let mut then = Inputs::default();
    for name in [StageName::Rewrite, StageName::Validate, StageName::Convert] {
        if let Some(entry) = ledger.entry(name) {
            then.extend(&entry.inputs);
        }
    }
    let upstream: BTreeSet<String> = then.upstream().into_iter().map(|(name, _)| name.to_owned()).collect();
    let is_setting = |name: &str| {
        let is_derived = name == "teacher" || name == "data.export" || upstream.contains(name);
        !is_derived && (plugins.is_some() || !name.contains(" plugin "))
    };
    let mut now = Inputs::default();
    now.section("data", &config.data, &["input", "dataset", "export", "leak_similarity", "on_leak"])?;
    stage::add_queries(&mut now, &config.data)?;
    if config.called_teacher().is_some() {
        stage::add_teacher(&mut now, config)?;
    }
    stage::add_retrieval(&mut now, config)?;
    stage::add_target_forms(&mut now, config);
    if let Some(plugins) = plugins {
        ["prompt", "filter"].iter().for_each(|role| plugins.add_inputs(&mut now, role));
    }
    Ok(now.changed_since(&then.only(is_setting)))
}

/// The stages that may run: the first unfinished one and all after it, whose inputs depend on its outputs.
fn pending(run: &Run, ledger: &Ledger, window: Window) -> anyhow::Result<Vec<StageName>> {
    for name in window.stages() {
        let inputs = stage_of(name).inputs(run, ledger)?;
        if !matches!(decide_on(run, ledger, name, &inputs, window), Decision::Skip(_)) {
            return Ok(Window { first: name, ..window }.stages().collect());
        }
    }
    Ok(Vec::new())
}

/// Lists the unfinished stages of `window` that are in `asking` (stages that call external services), without running them. A stage whose
/// input files do not exist yet counts as never run, and all stages after an unfinished one as unfinished.
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

/// Whether an unfinished stage resumes from its partial outputs or starts over.
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
        _ => decide(ledger.entry(name), inputs, &left, |input| stage.keeps_rows(input)),
    }
}

fn run_stage(run: &Run, ledger: &mut Ledger, name: StageName, window: Window) -> anyhow::Result<Outcome> {
    interrupt::check()?;
    let stage = stage_of(name);
    let inputs = stage.inputs(run, ledger)?;
    let mut decision = decide_on(run, ledger, name, &inputs, window);
    let is_forced = window.forced_from.is_some_and(|first| name >= first);
    if matches!(decision, Decision::StartOver(_))
        && !is_forced
        && let Some(kept) = previous::of_inputs(&run.dir, name, &inputs)
    {
        kept.restore(&run.dir, ledger)?;
        run.reporter.message(&format!("{name}: its earlier result on the same inputs is back in place"));
        decision = decide_on(run, ledger, name, &inputs, window);
    }
    let found = match decision {
        Decision::Skip(_) => Facts::default(),
        _ => {
            if name == StageName::Rl {
                // If the command does not include SFT, the user requests RL on the existing model. Edits can keep the query, whatever the
                // model can do.
                let is_asked_for = window.first > StageName::Sft;
                let has_edits = run.config.data.rewrite_form == RewriteForm::Edit;
                let on_noise = if is_asked_for || has_edits { OnNoise::Warn } else { run.config.sft.on_noise };
                noise::before_rl(run, ledger, on_noise)?;
            }
            stage.permit(run, window.last, run.reporter.stage(name.as_str()).as_ref())?
        }
    };
    let (reason, earlier) = match decision {
        Decision::Skip(Entry { facts, seconds, outputs, .. }) => {
            outputs.check(run.dir.root(), name, run.dir.root())?;
            // The process may have been killed between writing the ledger and this call.
            settle(run, stage)?;
            run.reporter.message(&format!("{name}: finished earlier, skipped"));
            for warning in stage.warning(run, &facts).into_iter().chain(stage.reminder(run, &facts)) {
                run.reporter.message(&format!("warning: {warning}"));
            }
            return Ok(Outcome { stage: name, ran: false, facts, seconds });
        }
        Decision::StartOver(reason) => (reason, previous::set_aside(run, ledger, stage)?),
        Decision::Continue(reason) => (reason, None),
    };
    run.reporter.message(&format!("{name}: running ({reason})"));
    let outcome = execute(run, ledger, stage, inputs, found, earlier.as_ref());
    let outcome = outcome.inspect_err(|_| keep(run, ledger, stage, earlier))?;
    if (name, window.last) == (StageName::Sft, StageName::Sft)
        && let Some(warning) = noise::warning(&outcome.facts, run.config.data.rewrite_form)
    {
        run.reporter.message(&format!("warning: {warning}"));
    }
    // The facts of the last stage are the command's result on stdout; that of the evaluation is its table.
    if name != window.last || name == StageName::Eval {
        run.reporter.message(&summary(&outcome));
    }
    Ok(outcome)
}

/// After a failure or a stop: restores the earlier result, unless there is something new to resume from.
fn keep(run: &Run, ledger: &mut Ledger, stage: &dyn Stage, earlier: Option<Previous>) {
    let (name, Some(earlier)) = (stage.name(), earlier) else { return };
    let note = if stage.is_resumable(&run.dir) {
        format!("{name}: the earlier result is kept in {} until the new one is complete", earlier.folder().display())
    } else {
        match earlier.restore(&run.dir, ledger) {
            Ok(()) => format!("{name}: what was there before is back in place"),
            Err(error) => format!("warning: {error:#}"),
        }
    };
    run.reporter.message(&note);
}

/// Removes files that only an unfinished stage needs.
fn settle(run: &Run, stage: &dyn Stage) -> anyhow::Result<()> {
    let settled = stage.settle(&run.dir).and_then(|()| previous::discard(&run.dir, stage.name()));
    let root = run.dir.root().display();
    settled.with_context(|| format!("{}: what is no longer needed in {root} cannot be removed", stage.name()))
}

/// Digests of the logs of a stage, by file name: of `metrics.jsonl` the lines of the stage.
fn logs(run: &Run, stage: &dyn Stage) -> anyhow::Result<BTreeMap<String, FileDigest>> {
    let metrics = run_logs::lines_of(&run.dir, stage.name())?;
    let files = Outputs::of(run.dir.root(), &stage.logs(&run.dir))?;
    let own_lines = (!metrics.is_empty()).then(|| ("metrics.jsonl".into(), FileDigest::of_bytes(metrics.as_bytes())));
    Ok(files.into_iter().chain(own_lines).collect())
}

fn execute(
    run: &Run,
    ledger: &mut Ledger,
    stage: &dyn Stage,
    inputs: Inputs,
    found: Facts,
    earlier: Option<&Previous>,
) -> anyhow::Result<Outcome> {
    let name = stage.name();
    run.write_config()?;
    let begun = Entry::begun(inputs);
    ledger.put(name, begun.clone())?;
    earlier.map_or(Ok(()), Previous::settle).with_context(|| format!("{name}: previous cannot be written"))?;
    let start = Instant::now();
    let done = {
        let account = run.outside.spend_tracker().clone();
        account.begin(name.as_str());
        let progress = run.reporter.stage(name.as_str());
        let done = stage.execute(run, &Counted { inner: progress.as_ref(), account, stage: name });
        // Spending is recorded even if the stage failed.
        let settled = spending::settle(run, name);
        let mut done = done?;
        settled?;
        done.facts.append(found);
        done
    };
    let seconds = start.elapsed().as_secs_f64();
    let written = [stage.outputs(&run.dir), stage.optional_outputs(&run.dir)].concat();
    let (outputs, logs) = (Outputs::of(run.dir.root(), &written)?, logs(run, stage)?);
    let (n_failed, facts) = (done.n_failed, done.facts.clone());
    let entry = Entry { finished: true, n_failed, facts, seconds, outputs, logs, ..begun };
    ledger.put(name, entry)?;
    settle(run, stage)?;
    for warning in funnel::size_warning(name, &done.facts, ledger).into_iter().chain(stage.warning(run, &done.facts)) {
        run.reporter.message(&format!("warning: {warning}"));
    }
    if name == StageName::Convert {
        run.reporter.message("rows of each stage:");
        funnel::lines(&funnel::steps(ledger, &run.dir)?).iter().for_each(|line| run.reporter.message(line));
    }
    Ok(Outcome { stage: name, ran: true, facts: done.facts, seconds })
}

/// The summary of a stage as text, which is printed at its end.
pub fn summary(outcome: &Outcome) -> String {
    let how = if outcome.ran { "done" } else { "finished earlier," };
    let mut lines = vec![format!("{}: {how} in {}", outcome.stage, duration(outcome.seconds))];
    lines.extend(outcome.facts.to_lines());
    lines.join("\n")
}

fn duration(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 60.0 => format!("{seconds:.1} s"),
        seconds => format!("{:.0} min {:.0} s", (seconds / 60.0).floor(), seconds % 60.0),
    }
}
