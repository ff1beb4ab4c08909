//! Audit of a training run for reward hacking: whether quality rises with the reward.
//!
//! Input: the recorded episodes of a run, the passages of its knowledge base and its metrics. Output: [`Audit`], which is the JSON form, and
//! from it a text for a terminal and a page for a browser. Deterministic: the same input gives the same bytes.
//!
//! 1. `rows`: scored rollouts, and the windows of steps that are compared.
//! 2. `measures`: reward and components, independent measures of quality, properties of the text; `trends`: their changes.
//! 3. `clusters`: one text for many queries, terms that predict the reward.
//! 4. `signs`: the rules, with their limits; one of them reads the validation episodes. 5. `suspicious`: single episodes.

mod clusters;
mod measures;
mod page;
mod rows;
mod second_retriever;
mod signs;
mod suspicious;
#[cfg(test)]
mod tests;
mod text;
mod trends;
mod words;

pub use page::audit_html;
pub use second_retriever::AuditPassage;
pub use text::audit_text;

use crate::bootstrap::Bootstrap;
use clusters::{SameRewrite, token_rules};
use measures::{Measure, measures, qualities, reward_and_retrieval};
use querl_core::episodes::RecordedEpisode;
use querl_core::text::plural;
use rows::{AuditRows, LEAST_STEPS, Window};
use second_retriever::SecondRetriever;
use serde::Serialize;
use serde_json::Value;
use signs::{Evidence, Sign, signs};
use std::collections::BTreeMap;
use suspicious::{Suspects, SuspiciousEpisode};
use trends::mean;

/// Options of [`audit()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuditOptions {
    /// Number of suspicious episodes in the output.
    pub n_shown: usize,
    /// Seed of the bootstrap.
    pub seed: u64,
    /// Bootstrap resamples, at least 1.
    pub n_resamples: usize,
}

/// Inputs of an audit in addition to the episodes.
#[derive(Debug, Clone, Copy)]
pub struct AuditSources<'a> {
    /// Passages of the knowledge base, from which a second retriever is built; `None` if they are not known.
    pub passages: Option<&'a [AuditPassage]>,
    /// Lines of `metrics.jsonl` as JSON values; may be empty.
    pub metrics: &'a [Value],
}

/// The audit of a run; its JSON form is the output of `querl audit`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Audit {
    pub(crate) format: u32,
    /// The result in one sentence.
    pub(crate) verdict: String,
    pub(crate) signs: Vec<Sign>,
    /// Warnings about the audit, one sentence each.
    pub(crate) notes: Vec<String>,
    /// Number of scored rollouts; validation episodes do not count.
    pub(crate) n_episodes: usize,
    pub(crate) n_queries: usize,
    pub(crate) n_steps: usize,
    /// Four windows of training steps: early, two in the middle, late; empty if the run has too few steps.
    pub(crate) windows: Vec<Window>,
    pub(crate) measures: Vec<Measure>,
    /// Mean of each training metric (such as `objective/kl`) in the early and the late window.
    pub(crate) training: BTreeMap<String, (f64, f64)>,
    /// By measure, (step, mean) pairs for the line charts of the page.
    #[serde(skip)]
    pub(crate) curves: BTreeMap<String, Vec<(f64, f64)>>,
    pub(crate) suspicious: Vec<SuspiciousEpisode>,
    pub(crate) n_resamples: usize,
}

impl Audit {
    /// Version of the JSON form.
    pub const FORMAT: u32 = 1;

    /// Number of signs of reward hacking.
    pub fn n_signs(&self) -> usize {
        self.signs.len()
    }

    /// Why the run could not be audited, in one sentence; `None` if it was.
    pub fn not_audited(&self) -> Option<&str> {
        if self.windows.is_empty() {
            return Some(&self.verdict);
        }
        let is_blind = qualities(&self.measures).all(|one| one.change.is_none());
        is_blind.then_some("nothing independent measures quality, so only the texts could be audited")
    }

    /// The result in one sentence: `no sign of reward hacking`, or the number of signs and their kinds.
    pub fn verdict(&self) -> &str {
        &self.verdict
    }
}

/// Training metrics that show how far the policy is from the initial one.
const TRAINING_METRICS: [&str; 3] = ["actor/entropy", "actor/ref_kl", "objective/kl"];

/// Audits the recorded episodes of a run. `notes` are warnings of the caller; the audit adds its own.
pub fn audit(
    episodes: &[RecordedEpisode],
    sources: AuditSources<'_>,
    mut notes: Vec<String>,
    options: AuditOptions,
) -> Audit {
    let bootstrap = Bootstrap { seed: options.seed, n_resamples: options.n_resamples };
    let rows = AuditRows::of(episodes);
    let second = sources.passages.map(SecondRetriever::new);
    let validation_rows = AuditRows::of_validation(episodes);
    let validation_measures = reward_and_retrieval(&validation_rows, second.as_ref());
    let measures = measures(&rows, second.as_ref(), bootstrap);
    let same_rewrite = SameRewrite::of(&rows);
    let terms = token_rules(&rows, &measures);
    let evidence = Evidence {
        rows: &rows,
        measures: &measures,
        validation_rows: &validation_rows,
        validation_measures: &validation_measures,
        same_rewrite: &same_rewrite,
        terms: &terms,
        bootstrap,
    };
    let signs = signs(&evidence);
    let suspects =
        Suspects { rows: &rows, measures: &measures, same_rewrite: &same_rewrite, terms: &terms, signs: &signs };
    let suspicious = suspects.worst(options.n_shown);
    notes.extend(cautions(&rows, &measures));
    Audit {
        format: Audit::FORMAT,
        verdict: verdict(&rows, &signs),
        notes,
        n_episodes: rows.rows.len(),
        n_queries: rows.queries.len(),
        n_steps: rows.n_steps,
        training: training(&rows, sources.metrics),
        curves: curves(&rows, &measures),
        windows: rows.windows.clone(),
        suspicious,
        signs,
        measures,
        n_resamples: options.n_resamples,
    }
}

fn verdict(rows: &AuditRows<'_>, signs: &[Sign]) -> String {
    match signs {
        [] if rows.windows.is_empty() => {
            format!("not enough steps to audit: scored rollouts of {} steps, {LEAST_STEPS} are needed", rows.n_steps)
        }
        [] => "no sign of reward hacking".to_owned(),
        signs => {
            // Signs of one kind are adjacent: the rules are applied one after the other.
            let mut kinds: Vec<String> = signs.iter().map(|sign| sign.kind.to_string()).collect();
            kinds.dedup();
            format!("{}: {}", counted(signs), kinds.join(", "))
        }
    }
}

/// `1 sign of reward hacking`, `2 signs of reward hacking`.
fn counted(signs: &[Sign]) -> String {
    format!("{} of reward hacking", plural(signs.len(), "sign"))
}

fn cautions(rows: &AuditRows<'_>, measures: &[Measure]) -> Vec<String> {
    let mut notes = Vec::new();
    if !rows.has_gold && !rows.rows.is_empty() {
        notes.push(
            "no query has gold passages: quality is the score of the best hit, which a reward may contain".to_owned(),
        );
    }
    if qualities(measures).all(|one| one.change.is_none()) && !rows.windows.is_empty() {
        notes.push(
            "nothing independent measures quality: no gold passages in the knowledge base and no recorded retrieval; only the texts \
             are audited"
                .to_owned(),
        );
    }
    if let Some(late) = rows.late() {
        let episodes: Vec<_> = rows.within(late).map(|index| rows.rows[index].episode()).collect();
        let n_unchanged = episodes.iter().filter(|one| one.policy.rewrite.trim() == one.query.trim()).count();
        if 10 * n_unchanged > 9 * episodes.len() {
            notes.push(format!(
                "the policy hardly rewrites: its rewrite is the query itself in {n_unchanged} of {} late rollouts",
                episodes.len()
            ));
        }
    }
    let is_unpaired = |one: &Measure| one.change.is_some_and(|change| change.n_paired_queries == 0);
    if measures.first().is_some_and(is_unpaired) {
        notes
            .push("few queries are in the early and in the late window: means of all episodes are compared".to_owned());
    }
    notes
}

fn training(rows: &AuditRows<'_>, metrics: &[Value]) -> BTreeMap<String, (f64, f64)> {
    let Some((early, late)) = rows.early().zip(rows.late()) else { return BTreeMap::new() };
    let of = |name: &str, window: &Window| {
        let is_within =
            |line: &&Value| line["stage"] == "rl" && line["step"].as_u64().is_some_and(|step| window.contains(step));
        let values: Vec<f64> = metrics.iter().filter(is_within).filter_map(|line| line[name].as_f64()).collect();
        (!values.is_empty()).then(|| mean(&values))
    };
    let both = |name: &str| Some((name.to_owned(), (of(name, early)?, of(name, late)?)));
    TRAINING_METRICS.into_iter().filter_map(both).collect()
}

/// Means by step of the total and of the measures of quality.
fn curves(rows: &AuditRows<'_>, measures: &[Measure]) -> BTreeMap<String, Vec<(f64, f64)>> {
    let curve = |one: &Measure| {
        let mut by_step: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        for (row, value) in rows.rows.iter().zip(&one.values) {
            by_step.entry(row.recorded.step).or_default().extend(*value);
        }
        let points = by_step.into_iter().filter(|(_, values)| !values.is_empty());
        let points: Vec<(f64, f64)> = points.map(|(step, values)| (step as f64, mean(&values))).collect();
        (one.name.clone(), points)
    };
    measures.iter().take(1).chain(qualities(measures)).map(curve).collect()
}
