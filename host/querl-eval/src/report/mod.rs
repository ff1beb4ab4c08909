//! `report.html`: the HTML report of a run.

mod curves;
mod examples;
mod tables;

use crate::error::EvalError;
use crate::evaluation::{Evaluation, SecondEvaluation};
use crate::facts::{FunnelStep, RunFacts, StageTiming};
use crate::metric::Metric;
use crate::page::{self, charts};
use crate::table::{failure_lines, system_title};
use crate::verdict::first_paragraph;
use querl_core::records::EvalRecord;
use serde::Serialize;
use std::cmp::Ordering;

/// The input of [`report_html`].
#[derive(Debug, Clone, Copy)]
pub struct ReportInput<'a> {
    /// Tenant, model, services and plugins of the run, shown above the metrics.
    pub facts: &'a RunFacts,
    /// Metrics of the tables and plots.
    pub evaluation: &'a Evaluation,
    /// The evaluation records, for the examples.
    pub records: &'a [EvalRecord],
    /// Lines of `metrics.jsonl`: objects with `stage`, `step` and metrics by name. Of several lines of the same step the last one counts.
    pub metrics: &'a [serde_json::Value],
    /// Number of rows after each step from the query table to the dataset, in order; may be empty.
    pub funnel: &'a [FunnelStep],
    /// Wall-clock time of each stage, in order; may be empty.
    pub timings: &'a [StageTiming],
    /// Calls to external services as (service and stage, sentence with number, time and cost); may be empty.
    pub calls: &'a [(String, String)],
    /// Number of example queries whose rewrites are shown.
    pub n_examples: usize,
}

/// Renders the report as an HTML page.
///
/// # Errors
/// The template engine failed, which no content of `input` causes.
pub fn report_html(input: &ReportInput<'_>) -> Result<String, EvalError> {
    page::render(page::REPORT, &Page::new(input))
}

/// The fields of the template.
#[derive(Debug, Serialize)]
struct Page {
    tenant: String,
    /// What changed after the evaluation, one sentence each.
    outdated: Vec<String>,
    split: &'static str,
    n_queries: usize,
    n_resamples: usize,
    facts: Vec<(&'static str, String)>,
    stand_ins: Vec<String>,
    cautions: Vec<String>,
    /// Whether RL earned its cost: one paragraph.
    verdict: String,
    summary: Vec<String>,
    systems: tables::SystemsTable,
    components: tables::SystemsTable,
    n_components_left_out: usize,
    styles: tables::SystemsTable,
    style_shifts: tables::SystemsTable,
    second_name: String,
    second: tables::SystemsTable,
    second_pairs: tables::SystemsTable,
    controls: tables::SystemsTable,
    length_matched: tables::SystemsTable,
    pass_at_k: tables::SystemsTable,
    forests: Vec<charts::Forest>,
    curves: curves::Curves,
    funnel: Vec<tables::FunnelRow>,
    timings: Vec<(String, String)>,
    calls: Vec<(String, String)>,
    examples: examples::Examples,
}

impl Page {
    fn new(input: &ReportInput<'_>) -> Self {
        let evaluation = input.evaluation;
        let second = evaluation.second_retrieval.as_ref();
        let length_matched = evaluation.controls.as_ref().map(|controls| &controls.length_matched);
        Self {
            tenant: input.facts.tenant.clone(),
            outdated: evaluation.outdated.clone(),
            split: evaluation.split.name(),
            n_queries: evaluation.n,
            n_resamples: evaluation.n_resamples,
            facts: facts(input),
            stand_ins: input.facts.stand_in_notes(),
            cautions: cautions(input),
            verdict: first_paragraph(evaluation),
            summary: summary(evaluation),
            systems: tables::systems(evaluation),
            components: tables::components(evaluation),
            n_components_left_out: evaluation.n_components_left_out,
            styles: tables::styles(evaluation),
            style_shifts: tables::style_shifts(evaluation),
            second_name: second.map(|second| second.retriever.clone()).unwrap_or_default(),
            second: tables::second(evaluation),
            second_pairs: tables::differences(
                evaluation,
                second.map(|second| &second.pairs),
                &SecondEvaluation::METRICS,
            ),
            controls: tables::controls(evaluation),
            length_matched: tables::differences(evaluation, length_matched, &evaluation.length_matched_metrics()),
            pass_at_k: tables::pass_at_k(evaluation),
            forests: charts::forests(evaluation),
            curves: curves::Curves::new(input.metrics, &input.facts.retrieval, evaluation),
            funnel: tables::funnel(input.funnel),
            timings: tables::timings(input.timings),
            calls: input.calls.to_vec(),
            examples: examples::Examples::new(input.records, evaluation, input.n_examples),
        }
    }
}

fn facts(input: &ReportInput<'_>) -> Vec<(&'static str, String)> {
    let (facts, evaluation) = (input.facts, input.evaluation);
    vec![
        ("tenant", facts.tenant.clone()),
        ("model", facts.model.clone()),
        ("teacher", facts.teacher.to_string()),
        ("judge", facts.judge.as_ref().map_or("none".to_owned(), ToString::to_string)),
        ("retrieval", facts.retrieval.to_string()),
        ("split", evaluation.split.name().to_owned()),
        ("queries", format!("{}, {} with gold", evaluation.n, evaluation.n_gold)),
        ("groups of paraphrases", evaluation.n_groups.to_string()),
        ("seed", evaluation.seed.to_string()),
        ("plugins", facts.plugins.join("; ")),
    ]
}

fn cautions(input: &ReportInput<'_>) -> Vec<String> {
    let mut cautions = failure_lines(input.evaluation);
    cautions.extend(input.evaluation.too_few_groups());
    cautions.extend(input.facts.plugin_notes.iter().cloned());
    cautions
}

/// The most important comparisons, one sentence each.
fn summary(evaluation: &Evaluation) -> Vec<String> {
    let comparisons = [("rl", "sft", Metric::Reward), ("rl", "teacher", Metric::Top1), ("sft", "raw", Metric::Top1)];
    let mut sentences = Vec::new();
    for (first, second, metric) in comparisons {
        let pair = evaluation.pairs.get(&format!("{first}-{second}"));
        let Some(found) = pair.and_then(|pair| pair.get(&metric).copied().flatten()) else { continue };
        let verdict = match found.shown() {
            Ordering::Greater => "better",
            Ordering::Less => "worse",
            Ordering::Equal => "no difference shown",
        };
        let [mean, low, high] = [found.mean, found.low, found.high].map(|value| metric.format_signed(value));
        let (first, second) = (system_title(first), system_title(second));
        sentences.push(format!("{first} against {second}, {}: {mean} [{low}, {high}], {verdict}", metric.label()));
    }
    sentences
}
