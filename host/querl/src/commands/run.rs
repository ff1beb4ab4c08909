//! `querl run`, the commands of single stages, and `querl report`.

use super::track::TrackerProcess;
use crate::args::{ConfigArgs, Format, ThreadsArg, check_model_last, stage_name, stage_up_to, with_location};
use crate::model_hub;
use crate::terminal::{self, Terminal};
use clap::{Arg, Args};
use querl_core::config::{Config, ConfigFile, Overrides, load_resolved, load_with_file};
use querl_core::dir_lock::DirLock;
use querl_core::run_dir::RunDir;
use querl_pipeline::estimate::estimate;
use querl_pipeline::failure::{Stop, run_in};
use querl_pipeline::ledger::{Ledger, StageName};
use querl_pipeline::pins::OnPluginChange;
use querl_pipeline::plan::log_summary;
use querl_pipeline::pooling::{Pooling, check_distinct};
use querl_pipeline::report::{self, Reported};
use querl_pipeline::run::Run;
use querl_pipeline::stages::{Outcome, Window, funnel, recover, run_stages, summary};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

/// Arguments of `querl run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    stage: StageArgs,
    #[command(flatten)]
    threads: ThreadsArg,
    /// Stop after this stage
    #[arg(long, value_name = "STAGE", value_parser = stage_name())]
    to: Option<StageName>,
}

/// Arguments of the command of a stage that computes with a model.
#[derive(Debug, Args)]
pub struct ModelStageArgs {
    #[command(flatten)]
    stage: StageArgs,
    #[command(flatten)]
    threads: ThreadsArg,
}

/// Arguments of the command of any stage.
#[derive(Debug, Args)]
pub struct StageArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Run this stage and all later ones again, even if they are finished
    #[arg(long, value_name = "STAGE", value_parser = stage_name())]
    from: Option<StageName>,
    /// Accept plugins that differ from querl.lock, and record the change there
    #[arg(long)]
    accept_plugin_change: bool,
    /// Refuse to run where querl.lock is missing or would change
    #[arg(long, conflicts_with = "accept_plugin_change")]
    locked: bool,
    /// Print the calls that would be made and what they may cost; builds, writes and calls nothing, needs no key
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    format: Format,
}

/// Adapts the option `--from` to the command of stage `last`: its values are the stages up to `last`.
pub fn from_up_to(last: StageName) -> impl FnOnce(Arg) -> Arg {
    let help = match last {
        StageName::Rewrite => "Run this stage again, even if it is finished",
        _ => "Run the stages from this one to that of the command again, even if they are finished",
    };
    move |arg| arg.help(help).value_parser(stage_up_to(last))
}

pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    run_window(&args.stage, args.threads.threads, StageName::Rewrite, args.to.unwrap_or(StageName::Eval))
}

/// Runs one stage if its result is missing or out of date; with `--from`, also the stages from there on.
pub fn stage(name: StageName, args: &StageArgs) -> anyhow::Result<()> {
    run_window(args, None, args.from.unwrap_or(name), name)
}

/// Like [`stage`], for a stage that computes with a model.
pub fn model_stage(name: StageName, args: &ModelStageArgs) -> anyhow::Result<()> {
    run_window(&args.stage, args.threads.threads, args.stage.from.unwrap_or(name), name)
}

fn run_window(args: &StageArgs, threads: Option<usize>, first: StageName, last: StageName) -> anyhow::Result<()> {
    if let Some(from) = args.from.filter(|from| *from > last) {
        let message = format!(
            "--from {from} comes after {last}, the last stage to run; choose an earlier --from or a later --to"
        );
        return Err(Stop::usage(message).into());
    }
    let window = Window { first, last, forced_from: args.from };
    let on_change = match (args.accept_plugin_change, args.locked) {
        (true, _) => OnPluginChange::Accept,
        (false, true) => OnPluginChange::RefuseUnlocked,
        (false, false) => OnPluginChange::Refuse,
    };
    if args.dry_run {
        let window = Window { first: args.from.map_or(first, |from| from.max(first)), ..window };
        let path = &args.config.path;
        let overrides = Overrides { threads, without_keys: true, ..args.config.overrides(model_hub::find_cached) };
        let estimated = |config: &Config, _: &ConfigFile| estimate(config, path, window, on_change);
        let (_, estimate) = check_model_last(path, overrides, last, estimated)?;
        return args.format.print(&estimate, || estimate.to_text() + "\n");
    }
    let overrides = Overrides { threads, ..args.config.overrides(model_hub::find) };
    let (config, file) = load_with_file(&args.config.path, &overrides)?;
    let locate = |error| with_location(error, &file);
    let mut run = Run::open(config, &args.config.path, last, on_change, Arc::new(Terminal)).map_err(locate)?;
    if args.from.is_some() {
        run.outside = run.outside.with_fresh_retrievals();
    }
    if first == StageName::Rewrite && last > StageName::Rewrite {
        log_summary(&run.config, &args.config.path);
    }
    // Data stages have almost no metrics for a tracker.
    let tracker = if last >= StageName::Sft { TrackerProcess::start(&run.config.tracking, &run.dir) } else { None };
    let done = run_and_report(&run, window, args.format).map_err(locate);
    // Releases the lock of the run directory, so that the tracker's process ends.
    drop(run);
    if let Some(tracker) = tracker {
        tracker.finish();
    }
    done
}

fn run_and_report(run: &Run, window: Window, format: Format) -> anyhow::Result<()> {
    let outcomes = run_stages(run, window)?;
    print_result(run, &outcomes, format)?;
    if window.last == StageName::Eval {
        terminal::print(&format!("report: {}", run.dir.report().display()));
    }
    terminal::print(&format!("everything is in {}", run.dir.root().display()));
    Ok(())
}

/// Prints the result on stdout: the table of the evaluation, or else the summary of the last stage.
fn print_result(run: &Run, outcomes: &[Outcome], format: Format) -> anyhow::Result<()> {
    let reported = match outcomes.last() {
        Some(last) if last.stage == StageName::Eval => {
            Some(report::write(&run.config, &run.dir, &report::names(&run.dir)?)?)
        }
        _ => None,
    };
    let stages: Vec<Value> = outcomes.iter().map(outcome_json).collect();
    let evaluation = reported.as_ref().map(|reported| &reported.evaluation);
    let result = json!({ "run_dir": run.dir.root(), "stages": stages, "funnel": funnel(run)?, "eval": evaluation });
    format.print(&result, || match (&reported, outcomes.last()) {
        (Some(reported), _) => reported.table.clone(),
        (None, Some(last)) => summary(last) + "\n",
        (None, None) => String::new(),
    })
}

fn funnel(run: &Run) -> anyhow::Result<Vec<funnel::Step>> {
    funnel::steps(&Ledger::open(&run.dir.stages())?, &run.dir)
}

fn outcome_json(outcome: &Outcome) -> Value {
    json!({
        "stage": outcome.stage.as_str(),
        "status": if outcome.ran { "done" } else { "skipped" },
        "seconds": outcome.seconds,
        "facts": outcome.facts.to_json(),
    })
}

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The run folder; several (other seeds of one experiment) are pooled query by query
    #[arg(value_name = "DIR", required = true)]
    dirs: Vec<PathBuf>,
    /// Pool runs that differ in more than their seed, or have the same seed, too; the table says so
    #[arg(long)]
    pool: bool,
    #[command(flatten)]
    format: Format,
}

/// Runs `querl report`: writes `eval.json` and `report.html` of each folder again and prints the table, pooled if there are
/// several.
pub fn report(args: &ReportArgs) -> anyhow::Result<()> {
    let runs = args.dirs.iter().map(|dir| run_in(dir)).collect::<Result<Vec<RunDir>, Stop>>()?;
    check_distinct(&runs)?;
    let written = runs.iter().map(rewrite_report).collect::<anyhow::Result<Vec<_>>>()?;
    if let [reported] = written.as_slice() {
        return args.format.print(&reported.evaluation, || reported.table.clone());
    }
    let pooling = if args.pool { Pooling::Any } else { Pooling::Seeds };
    let pooled = report::pooled(&runs, pooling)?;
    args.format.print(&pooled.evaluation, || pooled.table.clone())
}

fn rewrite_report(dir: &RunDir) -> anyhow::Result<Reported> {
    let _lock = DirLock::take(dir.root())?;
    recover(dir, &Terminal)?;
    let config = load_resolved(&dir.config())?;
    let reported = report::write(&config, dir, &report::names(dir)?)?;
    for outdated in &reported.evaluation.outdated {
        terminal::print(&format!("warning: {}: {outdated}", dir.root().display()));
    }
    Ok(reported)
}
