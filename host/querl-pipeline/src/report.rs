//! Writes `eval.json`, `report.html` and the table of a run. Every number comes from a file of the run directory.

use crate::environment::DEADLINE_CODE;
use crate::failure::Stop;
use crate::files::{write_json, write_text};
use crate::ledger::{Ledger, PART, StageName, listing, rows_of};
use crate::pooling::{Pooling, differences, listed};
use crate::run_logs::whole_metrics;
use crate::stages::{funnel, leaks, spending};
use anyhow::Context;
use querl_bundle::lock::{LockChange, LockEntry, LockFile};
use querl_core::config::{Config, RerankKind, RetrievalConfig, RetrievalKind, load_resolved};
use querl_core::records::{EvalRecord, Split};
use querl_core::run_dir::RunDir;
use querl_eval::{
    EvalOptions, Evaluation, FunnelStep, Lookups, Metric, ReportInput, RunFacts, SeedsEvaluation, ServiceName,
    StageTiming, evaluate, evaluate_seeds, report_html, seeds_table, table,
};
use querl_plugin::LIMIT_CODE;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Names of the services that an evaluation used, for the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// Name of the teacher.
    pub teacher: String,
    /// Name of the judge; `None` without one.
    pub judge: Option<String>,
    /// Name of the retrieval backend.
    pub retrieval: String,
}

/// Reads the names of the services of an evaluated run.
///
/// # Errors
/// The run was not evaluated.
pub fn names(dir: &RunDir) -> anyhow::Result<Names> {
    let ledger = Ledger::open(&dir.stages())?;
    let facts = ledger.finished(StageName::Eval).map(|entry| &entry.facts);
    let text = |name| facts.and_then(|facts| facts.get(name)).and_then(|value| value.as_str()).map(str::to_owned);
    match (text("teacher"), text("retrieval")) {
        (Some(teacher), Some(retrieval)) => Ok(Names { teacher, judge: text("judge"), retrieval }),
        _ if ledger.entry(StageName::Eval).is_none() && dir.eval_records().exists() => {
            let problem = format!("has no finished eval for {}", dir.eval_records().display());
            let remedy = "put the file back, or run `querl eval CONFIG --from eval` to make the result again";
            Err(Stop::usage(format!("{}: {problem}; {remedy}", dir.stages().display())).into())
        }
        _ => {
            let run = dir.root().display();
            let is_unfinished = |stage: &StageName| ledger.entry(*stage).is_some_and(|entry| !entry.finished);
            Err(Stop::usage(match StageName::ALL.into_iter().find(is_unfinished) {
                Some(stage) => {
                    format!("{run}: the run was stopped in `{stage}`; `querl run CONFIG --out {run}` resumes it")
                }
                None => format!("{run}: not an evaluated run; run `querl eval CONFIG` first"),
            })
            .into())
        }
    }
}

/// Figures of an evaluation, and their table.
#[derive(Debug)]
pub struct Reported {
    /// The figures, as in `eval.json`.
    pub evaluation: Evaluation,
    /// The table as text for a terminal; ends with a line break.
    pub table: String,
}

/// Evaluates the records in `dir` and writes `eval.json` and `report.html`.
///
/// # Errors
/// The run was not evaluated yet, or a file cannot be read or written.
pub fn write(config: &Config, dir: &RunDir, names: &Names) -> anyhow::Result<Reported> {
    if !dir.eval_records().exists() {
        let path = dir.eval_records();
        return Err(Stop::usage(format!("{}: not there; run `querl eval CONFIG` first", path.display())).into());
    }
    let ledger = Ledger::open(&dir.stages())?;
    let written = ledger.entry(StageName::Eval).map(|entry| &entry.outputs);
    written.map_or(Ok(()), |outputs| outputs.check(dir.root(), StageName::Eval, &dir.eval_records()))?;
    let records: Vec<EvalRecord> = rows_of(&dir.eval_records())?;
    let mut evaluation = evaluate(&records, &evaluation_options(config)).context("evaluation")?;
    evaluation.outdated.extend(outdated(&ledger));
    let mut facts = facts(config, names, dir, &ledger)?;
    let (metrics, lost) = whole_metrics(dir, &ledger)?;
    facts.plugin_notes.extend(lost.into_iter().chain(untrained(&ledger)).chain(funnel::notes(&ledger, dir)?));
    let shown = shown(&evaluation, &config.retrieval);
    let html = report_html(&ReportInput {
        facts: &facts,
        evaluation: &shown,
        records: &records,
        metrics: &metrics,
        funnel: &funnel(&ledger, dir)?,
        timings: &timings(&ledger),
        calls: &spending::report_lines(dir)?,
        n_examples: config.eval.n_examples,
    })?;
    write_json(&dir.eval(), &evaluation)?;
    write_text(&dir.report(), &html)?;
    Ok(Reported { table: table(&shown, &facts), evaluation })
}

/// A sentence on the files that changed after the evaluation of a run, such as a model that was trained again: the figures are not those of
/// what the run has now. `None` if none changed.
pub fn outdated(ledger: &Ledger) -> Option<String> {
    if let Some(stage) = ledger.unfinished_before(StageName::Eval) {
        return Some(format!(
            "{stage} began again after the evaluation and is not finished; `querl run CONFIG` resumes it"
        ));
    }
    outdated_by(&ledger.changed_after(StageName::Eval))
}

pub(crate) fn outdated_by(changed: &[String]) -> Option<String> {
    (!changed.is_empty()).then(|| format!("{} changed after the evaluation; run `querl eval` again", listing(changed)))
}

pub(crate) fn evaluation_options(config: &Config) -> EvalOptions {
    let lookups = if config.retrieval.kind == RetrievalKind::None { Lookups::None } else { Lookups::Made };
    EvalOptions { split: Split::Test, seed: config.seed, n_resamples: config.eval.bootstrap, lookups }
}

/// Pooled figures of several runs, and their table.
#[derive(Debug)]
pub struct Pooled {
    /// Figures over all runs, and of each run.
    pub evaluation: SeedsEvaluation,
    /// The table as text for a terminal; ends with a line break.
    pub table: String,
}

/// Pools evaluated runs: each query's value is averaged over the runs. Runs that differ in more than their seed, or have the same seed, are
/// refused, or, with [`Pooling::Any`], named before the table.
///
/// # Errors
/// As [`write`]; or the runs have different test queries, or are refused because they differ.
pub fn pooled(dirs: &[RunDir], pooling: Pooling) -> anyhow::Result<Pooled> {
    let records: Vec<Vec<EvalRecord>> =
        dirs.iter().map(|dir| rows_of(&dir.eval_records())).collect::<anyhow::Result<Vec<_>>>()?;
    check_same_queries(dirs, &records)?;
    let first = dirs.first().context("no run")?;
    let notes = [differing(first, &dirs[1..])?, same_seeds(dirs)?].concat();
    if let (Pooling::Seeds, Some(note)) = (pooling, notes.first()) {
        let remedy = "pool them all the same with `--pool`, or report each alone";
        return Err(Stop::usage(format!("{note}; {remedy}")).into());
    }
    let config = load_resolved(&first.config())?;
    let mut evaluation = evaluate_seeds(&records, &evaluation_options(&config)).context("evaluation")?;
    let ledger = Ledger::open(&first.stages())?;
    let mut facts = facts(&config, &names(first)?, first, &ledger)?;
    for (dir, run) in dirs.iter().zip(&mut evaluation.runs) {
        let ledger = Ledger::open(&dir.stages())?;
        run.outdated.extend(outdated(&ledger));
        let named = run.outdated.iter().map(|outdated| format!("{}: {outdated}", dir.root().display()));
        evaluation.pooled.outdated.extend(named);
        let notes =
            whole_metrics(dir, &ledger)?.1.into_iter().chain(untrained(&ledger)).chain(funnel::notes(&ledger, dir)?);
        facts.plugin_notes.extend(notes.map(|note| format!("{}: {note}", dir.root().display())));
    }
    let shown_runs = evaluation.runs.iter().map(|run| shown(run, &config.retrieval)).collect();
    let shown = SeedsEvaluation { pooled: shown(&evaluation.pooled, &config.retrieval), runs: shown_runs };
    Ok(Pooled { table: seeds_table(&shown, &facts, &notes), evaluation })
}

/// A note on each run that differs from the first in more than the seed.
fn differing(first: &RunDir, others: &[RunDir]) -> anyhow::Result<Vec<String>> {
    let mut notes = Vec::new();
    for other in others {
        let found = differences(first, other)?;
        if !found.is_empty() {
            let (one, other) = (first.root().display(), other.root().display());
            notes.push(format!("{one} and {other} differ in more than the seed: {}", listed(&found)));
        }
    }
    Ok(notes)
}

/// A note on each run with the seed of an earlier one: such runs are no independent samples of the experiment.
fn same_seeds(dirs: &[RunDir]) -> anyhow::Result<Vec<String>> {
    let (mut known, mut notes) = (BTreeMap::new(), Vec::new());
    for dir in dirs {
        let (seed, run) = (load_resolved(&dir.config())?.seed, dir.root().display());
        match known.get(&seed) {
            Some(first) => notes.push(format!("{first} and {run} have the same seed ({seed})")),
            None => _ = known.insert(seed, run),
        }
    }
    Ok(notes)
}

/// Checks that the runs have the same queries, since they are pooled by query.
fn check_same_queries(dirs: &[RunDir], records: &[Vec<EvalRecord>]) -> anyhow::Result<()> {
    let queries =
        |records: &[EvalRecord]| -> BTreeSet<String> { records.iter().map(|record| record.query.id.clone()).collect() };
    let mut sets = dirs.iter().zip(records.iter().map(|records| queries(records)));
    let Some((first, expected)) = sets.next() else { return Ok(()) };
    let Some((other, found)) = sets.find(|(_, found)| *found != expected) else { return Ok(()) };
    let n_shared = found.intersection(&expected).count();
    let message = format!(
        "{} and {} were evaluated on different test queries ({} and {}, {n_shared} of them in both); runs can be pooled that \
         share their data and differ in their seed",
        first.root().display(),
        other.root().display(),
        expected.len(),
        found.len(),
    );
    Err(Stop::usage(message).into())
}

fn facts(config: &Config, names: &Names, dir: &RunDir, ledger: &Ledger) -> anyhow::Result<RunFacts> {
    let (lock, unknown) = lock(dir);
    let model = model_name(&config.model.path);
    let rewritten = ledger.entry(StageName::Rewrite);
    let not_recorded = rewritten.and_then(|entry| funnel::not_recorded(config, &entry.facts));
    let notes = unknown.into_iter().chain(not_recorded).chain(win_rate_note(&config.retrieval)).chain(changes(&lock));
    Ok(RunFacts {
        tenant: config.tenant.clone(),
        model,
        teacher: ServiceName::from_port_name(&names.teacher),
        judge: names.judge.as_deref().map(ServiceName::from_port_name),
        retrieval: ServiceName::from_port_name(&names.retrieval),
        plugins: plugins(&lock, config),
        plugin_notes: notes.chain(drops(ledger)).chain(leaks(ledger)).collect(),
    })
}

/// Name of a model's folder, with that of the folder above where it is called `model`; of a snapshot from a hub `ORG/NAME`.
fn model_name(path: &Path) -> String {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (own, above) = (name(path), path.parent().map(name).unwrap_or_default());
    let repository = path.ancestors().nth(2).map(name).unwrap_or_default();
    match repository.strip_prefix("models--").filter(|_| above == "snapshots") {
        Some(repository) => repository.replacen("--", "/", 1),
        None if own == "model" && !above.is_empty() => format!("{above}/{own}"),
        None => own,
    }
}

/// The lock file, or a note if it cannot be read. Metrics need only the records.
fn lock(dir: &RunDir) -> (LockFile, Option<String>) {
    let path = dir.lock();
    if !path.exists() {
        return (LockFile::default(), None);
    }
    match LockFile::read(&path) {
        Ok(lock) => (lock, None),
        Err(error) => (LockFile::default(), Some(format!("the plugins of this run are not known: {error}"))),
    }
}

/// The plugins of a run, a short description of each.
fn plugins(lock: &LockFile, config: &Config) -> Vec<String> {
    let mut weights = config.plugins.rewards.iter().map(|reward| reward.weight);
    let phrase = |entry: &LockEntry| {
        let weight = (entry.role == "reward").then(|| weights.next()).flatten();
        let weight = weight.map(|weight| format!(", weight {weight}")).unwrap_or_default();
        let signer = entry.signed_by.as_ref().map(|key| format!(", signed by {key}")).unwrap_or_default();
        format!("{} {} {}{weight}{signer}", entry.role, entry.id, entry.title())
    };
    lock.entries.iter().map(phrase).collect()
}

/// Accepted plugin changes: metrics before and after may come from different plugins.
fn changes(lock: &LockFile) -> impl Iterator<Item = String> {
    lock.changes.iter().map(|LockChange { at, role, id, from, to }| {
        let what = match (from.as_str(), to.as_str()) {
            (LockChange::NOTHING, to) => format!("was added within this run: {to}"),
            (from, LockChange::NOTHING) => format!("was removed within this run: {from}"),
            (from, to) => format!("changed within this run: from {from} to {to}"),
        };
        format!("the {role} plugin {id} {what}, accepted at {at}")
    })
}

/// Items dropped because a plugin hit a limit, by stage, and late episodes.
fn drops(ledger: &Ledger) -> impl Iterator<Item = String> {
    let dropped = move |name: StageName, code: &str| {
        ledger.entry(name)?.facts.get(&format!("{PART}{code}"))?.as_u64().filter(|n| *n > 0)
    };
    let at_limits = StageName::ALL.into_iter().filter_map(move |name| {
        let n = dropped(name, LIMIT_CODE)?;
        Some(format!("{n} item(s) of the stage {name} were dropped because a plugin hit a limit ({LIMIT_CODE})"))
    });
    let late = dropped(StageName::Rl, DEADLINE_CODE).map(|n| {
        format!("{n} episode(s) of the stage rl were dropped because a call took longer than rl.episode_deadline_ms ({DEADLINE_CODE})")
    });
    at_limits.chain(late)
}

/// Trainings whose test rows leaked into train.
fn leaks(ledger: &Ledger) -> impl Iterator<Item = String> {
    let note = move |name: StageName| leaks::note(name, &ledger.entry(name)?.facts);
    [StageName::Sft, StageName::Rl].into_iter().filter_map(note)
}

/// A note if RL's best step is 0, the initial model.
fn untrained(ledger: &Ledger) -> Option<String> {
    let facts = &ledger.finished(StageName::Rl)?.facts;
    let is_start = facts.get("best step")?.as_u64() == Some(0);
    is_start.then(|| "rl is the SFT model: no later step had a better validation reward than step 0".to_owned())
}

/// Whether scores of hits are shares of the query's words, so that they cannot tell right from wrong passages.
pub fn scores_count_words(retrieval: &RetrievalConfig) -> bool {
    retrieval.kind == RetrievalKind::Embedded
        && retrieval.lexicon.is_none()
        && retrieval.rerank.kind == RerankKind::None
}

/// A note that win rate and top-1 score are left out, if [`scores_count_words`]; `None` otherwise.
fn win_rate_note(retrieval: &RetrievalConfig) -> Option<String> {
    scores_count_words(retrieval).then(|| {
        "win rate and top-1 score are left out: they compare scores of hits, which without a reranker or lexicon count shared words and \
         cannot tell right from wrong passages"
            .to_owned()
    })
}

/// The evaluation as shown in tables and report: without win rate and top-1 score if [`win_rate_note`] says so.
fn shown(evaluation: &Evaluation, retrieval: &RetrievalConfig) -> Evaluation {
    match win_rate_note(retrieval) {
        Some(_) => evaluation.clone().without(Metric::WinRate).without(Metric::Top1Score),
        None => evaluation.clone(),
    }
}

fn timings(ledger: &Ledger) -> Vec<StageTiming> {
    let finished = StageName::ALL.into_iter().filter_map(|name| Some((name, ledger.finished(name)?)));
    finished.map(|(name, entry)| StageTiming { stage: name.to_string(), seconds: entry.seconds }).collect()
}

/// Input rows, rows kept and dropped by code for each data stage, and the splits.
fn funnel(ledger: &Ledger, dir: &RunDir) -> anyhow::Result<Vec<FunnelStep>> {
    let steps = funnel::steps(ledger, dir)?;
    let rows_in =
        steps.first().map(|step| FunnelStep { label: "query table".into(), n: step.rows_in, parts: Vec::new() });
    let kept = steps.iter().map(|step| {
        let parts = step.dropped.iter().map(|(code, n)| (format!("dropped: {code}"), *n)).collect();
        FunnelStep { label: format!("kept by {}", step.stage), n: step.kept, parts }
    });
    let of_convert = ledger.finished(StageName::Convert).map(|entry| &entry.facts);
    let dataset = of_convert.map(|facts| {
        let label = "rows for training and evaluation";
        FunnelStep { label: label.into(), n: facts.count(label), parts: facts.parts(label).into_iter().collect() }
    });
    Ok(rows_in.into_iter().chain(kept).chain(dataset).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Entry, Facts, Inputs};

    /// Regression: the report had `model model`, and the commit of a snapshot as the name of a model.
    #[test]
    fn a_model_is_named_by_what_tells_it_from_others() {
        let names = ["/a/small/model", "/a/Qwen3-0.6B", "/model", "/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abcd"];
        let expected = ["small/model", "Qwen3-0.6B", "model", "Qwen/Qwen3-0.6B"];
        assert_eq!(names.map(|path| model_name(Path::new(path))), expected);
    }

    /// Symptom: an added plugin had changed "from nothing".
    #[test]
    fn plugins_that_were_added_or_removed_are_reported_as_such() {
        let change = |from: &str, to: &str| {
            let [at, role, id, from, to] = ["noon", "reward", "p", from, to].map(str::to_owned);
            LockChange { at, role, id, from, to }
        };
        let all = [change("1", "2"), change(LockChange::NOTHING, "2"), change("1", LockChange::NOTHING)];
        let expected = [
            "the reward plugin p changed within this run: from 1 to 2, accepted at noon",
            "the reward plugin p was added within this run: 2, accepted at noon",
            "the reward plugin p was removed within this run: 1, accepted at noon",
        ];
        let lock = LockFile { entries: Vec::new(), changes: all.into() };
        assert_eq!(changes(&lock).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn late_episodes_and_items_dropped_at_limits_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(&folder.path().join("stages.json")).unwrap();
        let mut facts = Facts::default();
        facts.add("dropped", 5).add_parts(&BTreeMap::from([("deadline".into(), 3), (LIMIT_CODE.into(), 2)]));
        ledger.put(StageName::Rl, Entry { facts, ..Entry::begun(Inputs::default()) }).unwrap();
        let expected = [
            "2 item(s) of the stage rl were dropped because a plugin hit a limit (plugin_limit)",
            "3 episode(s) of the stage rl were dropped because a call took longer than rl.episode_deadline_ms (deadline)",
        ];
        assert_eq!(drops(&ledger).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn an_rl_that_kept_its_start_and_scores_that_count_words_are_noted() {
        let folder = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(&folder.path().join("stages.json")).unwrap();
        let mut noted = |best_step: u64| {
            let mut facts = Facts::default();
            facts.add("best step", best_step);
            ledger.put(StageName::Rl, Entry { facts, finished: true, ..Entry::begun(Inputs::default()) }).unwrap();
            untrained(&ledger)
        };
        let expected = "rl is the SFT model: no later step had a better validation reward than step 0";
        assert_eq!((noted(0).as_deref(), noted(5)), (Some(expected), None));
        let note = |settings: serde_json::Value| win_rate_note(&serde_json::from_value(settings).unwrap()).is_some();
        assert!(note(serde_json::json!({"kind": "embedded"})));
        assert!(!note(serde_json::json!({"kind": "embedded", "lexicon": "lexicon.json"})));
        assert!(!note(serde_json::json!({"kind": "embedded", "rerank": {"kind": "local", "path": "m"}})));
        assert!(!note(serde_json::json!({"kind": "http"})));
    }

    #[test]
    fn a_training_that_saw_its_test_is_reported_and_another_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(&folder.path().join("stages.json")).unwrap();
        for (stage, n_seen) in [(StageName::Sft, 3), (StageName::Rl, 0)] {
            let mut facts = Facts::default();
            facts.add("rows of test nearly in train", n_seen);
            ledger.put(stage, Entry { facts, ..Entry::begun(Inputs::default()) }).unwrap();
        }
        let expected = "3 row(s) of test were in train or nearly equal to a row of it when sft was trained: its figures on test flatter it";
        assert_eq!(leaks(&ledger).collect::<Vec<_>>(), [expected]);
    }
}
