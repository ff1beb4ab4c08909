//! The check of a run before its release: a paired comparison on held-out queries, stored as evidence.

use crate::exchange::shell_word;
use crate::failure::Stop;
use crate::files::{unreadable, write_json};
use crate::ledger::{Inputs, Ledger, StageName, rows_of};
use crate::report::{evaluation_options, outdated_by, scores_count_words};
use crate::serving::{IdentityReader, ModelIdentity, PROMPT_PLUGIN, ServedRun};
use crate::stages::eval::add_decoding;
use anyhow::Context;
use chrono::{SecondsFormat, Utc};
use querl_core::config::RetrievalConfig;
use querl_core::dir_lock::DirLock;
use querl_core::fsx;
use querl_core::records::{DatasetRow, EvalRecord, Split};
use querl_core::run_dir::RunDir;
use querl_eval::{ComparedSystem, Comparison, ComparisonOptions, ComparisonVerdict, EvalOptions, Metric, compare};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// Maximum size of an evidence file, which lists the groups of queries.
const MAX_EVIDENCE_BYTES: u64 = 64 << 20;

/// Names of inputs in the ledger.
const TENANT: &str = "tenant";
const TEACHER_REWRITES: &str = "validated.jsonl of validate";

/// The system that a run is compared with.
pub enum Against {
    /// The raw queries, with the results of the run's evaluation.
    Raw,
    /// The teacher's rewrites, with the results of the run's evaluation.
    Teacher,
    /// Another run.
    Run(Box<ServedRun>),
}

/// Metric and margin of the comparison.
#[derive(Debug, Clone, Copy)]
pub struct CheckOptions {
    /// The metric that decides.
    pub metric: Metric,
    /// Non-inferiority margin: the largest accepted loss, in units of the metric; at most a tenth of the metric's scale.
    pub margin: f64,
}

/// Result of a check: the comparison, the names of the compared systems, and the evidence.
pub struct CheckedComparison {
    /// Figures of the comparison.
    pub comparison: Comparison,
    /// The comparison by top-1 accuracy, if another metric than those of gold passages decides and queries have gold passages.
    pub by_gold: Option<Comparison>,
    /// Names of the two compared systems.
    pub names: [String; 2],
    /// Evidence as JSON, as stored in the folder of the run.
    pub evidence: Value,
}

/// The fields of an evidence file that a promotion reads.
#[derive(Debug, Deserialize)]
struct StoredEvidence {
    time: String,
    model: ModelIdentity,
    against: StoredAgainst,
    margin: f64,
    /// Result by the metric that decided.
    #[serde(flatten)]
    result: StoredResult,
    /// Result by top-1 accuracy, if another metric decided; checks of earlier versions lack it.
    by_gold: Option<StoredResult>,
}

/// Result of a comparison by one metric.
#[derive(Debug, Serialize, Deserialize)]
struct StoredResult {
    metric: Metric,
    verdict: ComparisonVerdict,
    n: usize,
    difference: Value,
}

impl StoredEvidence {
    /// The metric by which the check found a loss.
    fn lost_metric(&self) -> Option<Metric> {
        let mut results = std::iter::once(&self.result).chain(&self.by_gold);
        results.find(|result| result.verdict == ComparisonVerdict::Lost).map(|result| result.metric)
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredAgainst {
    /// Name of the system compared with: `raw`, `teacher`, or a run's folder.
    name: String,
    /// Model identity of another run; `None` for `raw` and `teacher`.
    #[serde(flatten)]
    identity: Option<ModelIdentity>,
}

/// Compares a run with another system on the queries that are held out for both, and stores the result in the folder of the run.
///
/// # Errors
/// A run has no evaluation of its present model, a file differs from what its stage wrote, or the evaluations cannot be compared.
pub fn check(run: &ServedRun, against: &Against, options: &CheckOptions) -> anyhow::Result<CheckedComparison> {
    let _lock = DirLock::take(run.dir.root())?;
    let mut identities = IdentityReader::default();
    let own = Evaluated::read(run, &mut identities)?;
    if let Some(warning) = word_scores(&own.name, &own.records, &run.config.retrieval, options.metric)? {
        tracing::warn!("{warning}");
    }
    let other = match against {
        Against::Run(other) => Some(Evaluated::read(other, &mut identities)?),
        Against::Raw | Against::Teacher => None,
    };
    if let Some(other) = &other {
        own.check_comparable(other, options.metric)?;
        if own.identity == other.identity {
            let problem =
                format!("{} and {} are the same model, which has no difference to itself", own.name, other.name);
            return Err(Stop::usage(format!("{problem}; name another run, or check against raw or teacher")).into());
        }
    }
    let (second, system) = match (&other, against) {
        (Some(other), _) => (other, other.system),
        (None, Against::Teacher) => (&own, "teacher"),
        (None, _) => (&own, "raw"),
    };
    if system == "teacher" && options.metric == Metric::WinRate {
        return Err(
            Stop::usage("win_rate counts wins against the teacher; choose another metric to compare with it").into()
        );
    }
    let name = |evaluated: &Evaluated, system: &str| match other {
        Some(_) => evaluated.name.clone(),
        None => system.to_owned(),
    };
    let names = [name(&own, own.system), name(second, system)];
    let EvalOptions { seed, n_resamples, .. } = evaluation_options(&run.config);
    let settings = ComparisonOptions { metric: options.metric, margin: options.margin, seed, n_resamples };
    let sides = [own.side(own.system, &names[0]), second.side(system, &names[1])];
    let comparison = compare(sides, &settings).map_err(Stop::usage)?;
    // Without gold passages there is no top-1 accuracy.
    let by_gold = (!matches!(options.metric, Metric::Top1 | Metric::Mrr))
        .then(|| compare(sides, &ComparisonOptions { metric: Metric::Top1, margin: 0.0, ..settings }).ok())
        .flatten();
    let against = StoredAgainst { name: names[1].clone(), identity: other.map(|other| other.identity) };
    let mut evidence = evidence(&own.identity, &against, &comparison)?;
    if let Some(Comparison { metric, verdict, n, difference, .. }) = &by_gold {
        let result = StoredResult { metric: *metric, verdict: *verdict, n: *n, difference: json!(difference) };
        evidence["by_gold"] = json!(result);
    }
    let file =
        format!("{}.{}.json", against.identity.as_ref().map_or(&against.name, |of| &of.version), options.metric.name());
    let path = run.dir.release().join(file);
    write_json(&path, &evidence)?;
    Ok(CheckedComparison { comparison, by_gold, names, evidence })
}

/// The warning that a metric by scores of hits counts shared words; `None` for other metrics and scores.
///
/// # Errors
/// Queries have gold passages, which do tell right from wrong.
fn word_scores(
    name: &str,
    records: &[EvalRecord],
    retrieval: &RetrievalConfig,
    metric: Metric,
) -> anyhow::Result<Option<String>> {
    let has_gold = records.iter().any(|record| !record.query.gold_ids.is_empty());
    let reads_scores = match metric {
        Metric::Top1Score | Metric::WinRate => true,
        // Rewards may count the ranks of gold passages.
        Metric::Reward => !has_gold,
        _ => false,
    };
    if !reads_scores || !scores_count_words(retrieval) {
        return Ok(None);
    }
    let problem = format!(
        "{name}: {} {} scores of hits, which without a reranker or lexicon count shared words and cannot tell right \
         from wrong passages",
        metric.name(),
        if metric == Metric::Reward { "may read" } else { "reads" }
    );
    if has_gold {
        return Err(Stop::usage(format!("{problem}; the queries have gold ids: use --metric top1 or mrr")).into());
    }
    Ok(Some(format!("{problem}; add gold ids to the query table and use --metric top1 or mrr")))
}

fn evidence(model: &ModelIdentity, against: &StoredAgainst, comparison: &Comparison) -> anyhow::Result<Value> {
    let mut evidence = serde_json::to_value(comparison).context("the comparison has no JSON form")?;
    evidence["time"] = Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true).into();
    evidence["model"] = json!(model);
    evidence["against"] = json!(against);
    Ok(evidence)
}

/// The evaluation of a run's present model.
struct Evaluated {
    name: String,
    system: &'static str,
    identity: ModelIdentity,
    records: Vec<EvalRecord>,
    /// Ids of the queries of train and val.
    seen: BTreeSet<String>,
    inputs: Inputs,
}

impl Evaluated {
    fn read(run: &ServedRun, identities: &mut IdentityReader) -> anyhow::Result<Self> {
        let (dir, name) = (&run.dir, run.dir.root().display().to_string());
        let ledger = Ledger::open(&dir.stages())?;
        let entry = ledger.finished(StageName::Eval).ok_or_else(|| {
            Stop::usage(format!("{name}: not evaluated yet; run `querl eval CONFIG` first, or `querl run CONFIG`"))
        })?;
        entry.outputs.check(dir.root(), StageName::Eval, &dir.eval_records())?;
        // An evaluation of an earlier checkpoint, or with other decoding settings, does not apply to this model.
        let mut now = run.checkpoint_inputs()?;
        add_decoding(&mut now, &run.config)?;
        now.made_by(&ledger, StageName::Convert, &dir.split(Split::Test))?;
        let identity = identities.read(run)?;
        let mut changed = now.changed_since(&entry.inputs.only(|name| now.has(name)));
        let plugin = &identity.digests[PROMPT_PLUGIN];
        changed.extend(
            entry.inputs.first_of(PROMPT_PLUGIN).filter(|used| !used.starts_with(plugin)).map(|_| PROMPT_PLUGIN.into()),
        );
        if let Some(outdated) = outdated_by(&changed) {
            return Err(Stop::usage(format!("{name}: {outdated}")).into());
        }
        let mut seen = BTreeSet::new();
        for split in [Split::Train, Split::Val] {
            let path = dir.split(split);
            Inputs::default().made_by(&ledger, StageName::Convert, &path)?;
            let rows: Vec<DatasetRow> = rows_of(&path)?;
            seen.extend(rows.into_iter().map(|row| row.metadata.query.id));
        }
        let (system, records) = (run.system(), rows_of(&dir.eval_records())?);
        Ok(Self { name, system, identity, records, seen, inputs: entry.inputs.clone() })
    }

    fn side<'a>(&'a self, system: &'a str, name: &'a str) -> ComparedSystem<'a> {
        ComparedSystem { name, system, records: &self.records, seen: &self.seen }
    }

    /// Refuses two evaluations whose scores are not comparable.
    fn check_comparable(&self, other: &Self, metric: Metric) -> anyhow::Result<()> {
        let is_compared = |name: &str| is_of_scores(name, metric);
        let changed = self.inputs.only(is_compared).changed_since(&other.inputs.only(is_compared));
        if changed.is_empty() {
            return Ok(());
        }
        let (what, metric) = (changed.join(", "), metric.name());
        let (name, other_name) = (&self.name, &other.name);
        if changed.iter().any(|name| name == TENANT) {
            let remedy =
                "compare runs of one tenant, or each with its own queries by `--against raw` or `--against teacher`";
            return Err(Stop::usage(format!("{name} and {other_name} are of different tenants; {remedy}")).into());
        }
        if changed == [TEACHER_REWRITES] {
            let problem = format!(
                "{name} and {other_name} have different rewrites of the teacher, which {metric} is relative to"
            );
            let command = format!("querl release check {} --against {}", shell_word(name), shell_word(other_name));
            let remedy = format!("run `{command} --metric top1_score`, or name top1, mrr or judge_score");
            return Err(Stop::usage(format!("{problem}; {remedy}")).into());
        }
        let problem = format!("{} and {} were evaluated with different {what}", self.name, other.name);
        let message = format!(
            "{problem}: their {metric} cannot be compared; evaluate one of them again with the settings of the other"
        );
        Err(Stop::usage(message).into())
    }
}

/// True if an input of the evaluation affects the scores of a rewrite, but not the rewrite.
fn is_of_scores(name: &str, metric: Metric) -> bool {
    const FILES: [&str; 4] = ["knowledge base", "lexicon", "user dictionary", "synonyms"];
    let ends = |model: &str| name == model || name.ends_with(&format!(" of {model}"));
    let is_retrieval = name == TENANT
        || name.starts_with("retrieval.")
        || FILES.contains(&name)
        || ["embedding model", "cross-encoder"].into_iter().any(ends);
    let is_judge = name.starts_with("judge.");
    match metric {
        Metric::JudgeScore => is_retrieval || is_judge,
        Metric::WinRate => is_retrieval || name == TEACHER_REWRITES,
        Metric::Reward => {
            let is_reward = name.starts_with("reward plugin") || name.contains("style") || name == TEACHER_REWRITES;
            is_retrieval || is_judge || is_reward
        }
        _ => is_retrieval,
    }
}

/// The passed check of a model against the release that serves now, as JSON for the history; against raw or teacher if there is none, or
/// if it was an earlier model of the same folder, which is gone. If any check against the same system is lost, a check passed with another
/// metric does not count.
///
/// # Errors
/// No check of exactly these models has passed, or one is lost; the message names the command that checks.
pub(super) fn passed_check(
    dir: &RunDir,
    model: &ModelIdentity,
    current: Option<(&Path, &ModelIdentity)>,
) -> anyhow::Result<Value> {
    let run = dir.root().display();
    let real = |path: &Path| path.canonicalize().ok();
    let is_retrained = current.is_some_and(|(folder, _)| real(folder).is_some_and(|of| real(dir.root()) == Some(of)));
    let is_against = |evidence: &StoredEvidence| match (current, &evidence.against.identity) {
        (Some((_, current)), Some(against)) => current == against,
        (_, None) => current.is_none() || is_retrained,
        (None, Some(_)) => false,
    };
    let about = stored(dir)?.into_iter().filter(|evidence| is_against(evidence));
    let (fitting, outdated): (Vec<_>, Vec<_>) = about.partition(|evidence| evidence.model == *model);
    let is_lost = |evidence: &StoredEvidence| evidence.lost_metric().is_some();
    // Raw and teacher are checked separately: a model may lose to its teacher.
    let is_same = |lost: &StoredEvidence, passed: &StoredEvidence| {
        lost.against.identity.is_some() || lost.against.name == passed.against.name
    };
    let is_passed = |evidence: &StoredEvidence| {
        let is_contradicted = || fitting.iter().any(|other| is_lost(other) && is_same(other, evidence));
        evidence.result.verdict == ComparisonVerdict::Passed && !is_contradicted()
    };
    if let Some(passed) = fitting.iter().find(|evidence| is_passed(evidence)) {
        let StoredEvidence {
            time, against, margin, result: StoredResult { metric, n, difference, .. }, by_gold, ..
        } = passed;
        let mut kept = json!({
            "check": "passed", "time": time, "against": against.name, "metric": metric, "margin": margin, "n": n, "difference": difference,
        });
        if let Some(by_gold) = by_gold {
            kept["by_gold"] = json!(by_gold);
        }
        return Ok(kept);
    }
    let lost = fitting.iter().find_map(|evidence| Some((&evidence.against, evidence.lost_metric()?)));
    if let Some((against, metric)) = lost {
        let problem = format!("its check against {} found a loss of {}", against.name, metric.name());
        let remedy = "check it again after a further training, or give a reason by --without_check";
        return Err(Stop::usage(format!("{run}: {problem}; {remedy}")).into());
    }
    let against =
        current.filter(|_| !is_retrained).map_or("raw".to_owned(), |(folder, _)| folder.display().to_string());
    let problem = match (fitting.last(), outdated.is_empty()) {
        (Some(StoredEvidence { result, .. }), _) => {
            format!("its check against {against} could not exclude a loss of {}", result.metric.name())
        }
        (None, false) => format!("it was checked against {against} with other digests, before its files changed"),
        (None, true) => format!(
            "it was not checked against {against}, which is {}",
            match current {
                Some(_) if is_retrained =>
                    "needed where the released model was trained in the same folder and is replaced",
                Some(_) => "what serves now",
                None => "needed first",
            }
        ),
    };
    let remedy = format!("run `querl release check {run} --against {against}`, or give a reason by --without_check");
    Err(Stop::usage(format!("{run}: {problem}; {remedy}")).into())
}

/// The evidence files of a run.
fn stored(dir: &RunDir) -> anyhow::Result<Vec<StoredEvidence>> {
    let folder = dir.release();
    let Ok(entries) = std::fs::read_dir(&folder) else { return Ok(Vec::new()) };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let bytes = fsx::read_bounded(path, MAX_EVIDENCE_BYTES).with_context(|| unreadable(path))?;
        serde_json::from_slice(&bytes).map_err(|error| {
            let problem = fsx::json_problem(&error);
            Stop::usage(format!("{}: not the result of a check ({problem}); check the run again", path.display()))
                .into()
        })
    };
    paths.iter().map(read).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use querl_core::records::QueryRow;

    /// Regression: a model of noise passed by scores that count the query's words.
    #[test]
    fn scores_that_count_words_decide_nothing_where_gold_passages_are_known() {
        let retrieval = |text: &str| -> RetrievalConfig { serde_json::from_str(text).unwrap() };
        let (words, lexicon) =
            (retrieval(r#"{"kind": "embedded"}"#), retrieval(r#"{"kind": "embedded", "lexicon": "lexicon.json"}"#));
        let with_gold = |gold_ids: &[&str]| {
            let gold_ids = gold_ids.iter().map(|id| (*id).to_owned()).collect();
            let query = QueryRow { gold_ids, ..QueryRow::default() };
            [EvalRecord { system: "rl".into(), query, outcome: Ok(Default::default()) }]
        };
        for metric in [Metric::Top1Score, Metric::WinRate] {
            let refused = word_scores("run", &with_gold(&["1"]), &words, metric).unwrap_err().to_string();
            assert!(refused.contains(metric.name()) && refused.ends_with("use --metric top1 or mrr"), "{refused}");
            let warning = word_scores("run", &with_gold(&[]), &words, metric).unwrap().unwrap();
            assert!(warning.contains("count shared words"), "{warning}");
            assert_eq!(word_scores("run", &with_gold(&["1"]), &lexicon, metric).unwrap(), None);
        }
        assert_eq!(word_scores("run", &with_gold(&["1"]), &words, Metric::Top1).unwrap(), None);
    }
}
