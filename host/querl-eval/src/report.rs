//! The page for a browser: one file, no outside request, light and dark.
//!
//! Rust computes what is shown (texts, coordinates); the template beside this file places it. Every value passes the template
//! engine's HTML escaping, and a content security policy in the page forbids scripts and requests.

pub(crate) mod chart;
mod curves;
mod examples;
mod forest;
mod tables;

use crate::error::EvalError;
use crate::evaluation::Evaluation;
use crate::facts::{FunnelStep, RunFacts, StageTiming};
use crate::metric::Metric;
use crate::printable::printable;
use crate::table::{failure_lines, system_title};
use querl_core::records::EvalRecord;
use serde::Serialize;

/// What the page shows.
#[derive(Debug, Clone, Copy)]
pub struct ReportInput<'a> {
    /// Stands above the figures.
    pub facts: &'a RunFacts,
    /// The figures.
    pub evaluation: &'a Evaluation,
    /// The records that `evaluation` was made from: rewrites are shown from here.
    pub records: &'a [EvalRecord],
    /// Lines of `metrics.jsonl`: objects with `stage`, `step` and numbers by name. Where a step appears twice, the later line
    /// counts.
    pub metrics: &'a [serde_json::Value],
    /// From the query table to the dataset, in order; may be empty.
    pub funnel: &'a [FunnelStep],
    /// In order; may be empty.
    pub timings: &'a [StageTiming],
    /// What calls to outside services took: whom, in which stage, and the figures in words; may be empty.
    pub calls: &'a [(String, String)],
    /// Queries shown side by side.
    pub n_examples: usize,
}

/// The page as HTML.
///
/// # Errors
/// The template engine failed; not for any content of `input`.
pub fn report_html(input: &ReportInput<'_>) -> Result<String, EvalError> {
    page(include_str!("report/report.html"), &Page::new(input))
}

/// A page of this look: `template` with the stylesheet as `css`, `line_chart.html` to import, and the fields of `content`.
pub(crate) fn page(template: &str, content: &impl Serialize) -> Result<String, EvalError> {
    let mut environment = minijinja::Environment::new();
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::Html);
    environment.set_undefined_behavior(minijinja::UndefinedBehavior::Strict);
    // The stylesheet is a constant of this crate: the one text that is not escaped.
    environment.add_global("css", minijinja::Value::from_safe_string(include_str!("report/report.css").to_owned()));
    environment.add_template("line_chart.html", include_str!("report/line_chart.html"))?;
    environment.add_template("page.html", template)?;
    let html = environment.get_template("page.html")?.render(minijinja::value::Serde(content))?;
    Ok(printable(&html))
}

/// Everything the template places.
#[derive(Debug, Serialize)]
struct Page {
    tenant: String,
    split: &'static str,
    n_queries: usize,
    n_resamples: usize,
    facts: Vec<(&'static str, String)>,
    stand_ins: Vec<String>,
    cautions: Vec<String>,
    summary: Vec<String>,
    systems: tables::SystemsTable,
    components: tables::SystemsTable,
    styles: tables::SystemsTable,
    style_shifts: tables::SystemsTable,
    forests: Vec<forest::Forest>,
    curves: curves::Curves,
    funnel: Vec<tables::FunnelRow>,
    timings: Vec<(String, String)>,
    calls: Vec<(String, String)>,
    examples: examples::Examples,
}

impl Page {
    fn new(input: &ReportInput<'_>) -> Self {
        let evaluation = input.evaluation;
        Self {
            tenant: input.facts.tenant.clone(),
            split: evaluation.split.name(),
            n_queries: evaluation.n,
            n_resamples: evaluation.n_resamples,
            facts: facts(input),
            stand_ins: input.facts.stand_in_notes(),
            cautions: cautions(input),
            summary: summary(evaluation),
            systems: tables::systems(evaluation),
            components: tables::components(evaluation),
            styles: tables::styles(evaluation),
            style_shifts: tables::style_shifts(evaluation),
            forests: forest::forests(evaluation),
            curves: curves::Curves::new(input.metrics, &input.facts.retrieval),
            funnel: tables::funnel(input.funnel),
            timings: tables::timings(input.timings),
            calls: input.calls.to_vec(),
            examples: examples::Examples::new(input.records, input.n_examples),
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

/// What the comparisons that matter most say, one sentence each.
fn summary(evaluation: &Evaluation) -> Vec<String> {
    let asked = [("rl", "sft", Metric::Reward), ("rl", "teacher", Metric::Top1), ("sft", "raw", Metric::Top1)];
    let mut sentences = Vec::new();
    for (first, second, metric) in asked {
        let pair = evaluation.pairs.get(&format!("{first}-{second}"));
        let Some(found) = pair.and_then(|pair| pair.get(&metric).copied().flatten()) else { continue };
        let verdict = match (found.low > 0.0, found.high < 0.0) {
            (true, _) => "better",
            (_, true) => "worse",
            _ => "no difference shown",
        };
        let [mean, low, high] = [found.mean, found.low, found.high].map(|value| metric.format_signed(value));
        let (first, second) = (system_title(first), system_title(second));
        sentences.push(format!("{first} against {second}, {}: {mean} [{low}, {high}], {verdict}", metric.label()));
    }
    sentences
}
