//! The replay comparison as an HTML page.

use super::changes::{ChangedEpisode, StepMeans};
use super::episodes::largest_of;
use super::{Replay, text};
use crate::error::EvalError;
use crate::page::{self, charts};
use crate::text::{Digits, or_dash};
use serde::Serialize;

/// Renders the replay comparison as an HTML page.
///
/// # Errors
/// The template engine failed, which no content of `replay` causes.
pub fn replay_html(replay: &Replay) -> Result<String, EvalError> {
    page::render(page::REPLAY, &Page::new(replay))
}

/// The fields of the template.
#[derive(Debug, Serialize)]
struct Page {
    before: (String, String),
    after: (String, String),
    notes: Vec<String>,
    has_before: bool,
    summary: Vec<String>,
    counts: Vec<(&'static str, usize, String)>,
    totals: Vec<[String; 4]>,
    histograms: Option<charts::HistogramPair>,
    joint: Option<charts::JointHistogram>,
    trend: Option<charts::LineChart>,
    changes: Vec<[String; 3]>,
    correlations: [(&'static str, String); 3],
    order_heads: [&'static str; 5],
    orders: [(&'static str, [String; 5]); 2],
    signs: Vec<(&'static str, [String; 3], usize)>,
    moves: Option<String>,
    components: Vec<(String, [String; 5])>,
    shown_title: &'static str,
    shown: Vec<Shown>,
    explanation: String,
}

#[derive(Debug, Serialize)]
struct Shown {
    id: String,
    line: usize,
    largest_of: String,
    query: String,
    before: String,
    after: String,
    is_better: bool,
    policy: String,
    policy_quality: String,
    baseline: Option<String>,
    baseline_quality: String,
    parts: String,
}

impl Page {
    fn new(replay: &Replay) -> Self {
        let (shown_title, shown) = replay.shown();
        let side = |side| (text::title(side), text::facts(side));
        Self {
            before: side(&replay.before),
            after: side(&replay.after),
            notes: replay.notes.clone(),
            has_before: replay.totals.before.is_some(),
            summary: summary(replay),
            counts: replay.counts.rows(),
            totals: text::totals(replay),
            histograms: replay.totals.histogram.as_ref().map(charts::HistogramPair::new),
            joint: replay.totals.histogram.as_ref().and_then(charts::JointHistogram::new),
            trend: trend(replay),
            changes: replay.change.mean.map_or_else(Vec::new, |_| text::changes(&replay.change)),
            correlations: text::correlations(&replay.correlation),
            order_heads: text::ORDER_HEADS,
            orders: text::orders(&replay.order),
            signs: text::signs(replay),
            moves: replay.signs.as_ref().filter(|signs| signs.before.is_some()).map(text::moves),
            components: text::components(replay),
            shown_title,
            shown: shown.iter().map(Shown::new).collect(),
            explanation: text::explanation(replay),
        }
    }
}

/// The most important results, one sentence each.
fn summary(replay: &Replay) -> Vec<String> {
    let Some(found) = replay.change.mean else { return Vec::new() };
    let n = replay.counts.n_scored_by_both;
    let mut sentences = vec![
        format!("{} of {n} totals change", replay.change.n_changed),
        format!("mean change {}, over {} queries", text::interval(Some(found)), replay.change.n_queries),
    ];
    sentences.extend(replay.signs.as_ref().map(|signs| format!("{} of {n} change their sign", signs.n_changed)));
    let flips = replay.order.any_step.flip_share();
    sentences.extend(
        flips.map(|share| format!("{:.1} % of the ordered pairs of one query change their order", 100.0 * share)),
    );
    sentences
}

/// Mean totals by step; `None` for a single step.
fn trend(replay: &Replay) -> Option<charts::LineChart> {
    let steps = &replay.change.by_step;
    let curve = |label: &'static str, value: fn(&StepMeans) -> Option<f64>| {
        let points: Vec<(f64, f64)> = steps.iter().filter_map(|step| Some((step.step as f64, value(step)?))).collect();
        (!points.is_empty()).then(|| charts::Points { label, name: format!("mean total {label}"), points })
    };
    let curves = [curve("before", |step| step.before), curve("after", |step| step.after)];
    (steps.len() > 1)
        .then(|| charts::LineChart::new("Mean total by step", "total", curves.into_iter().flatten().collect()))?
}

impl Shown {
    fn new(one: &ChangedEpisode) -> Self {
        let digits = Digits::for_values([one.before, one.after].into_iter());
        let quality = |quality| or_dash(quality, |value| format!("{value:.3}"));
        Self {
            id: one.id.clone(),
            line: one.line,
            largest_of: largest_of(one.n_changed),
            query: one.query.clone(),
            before: digits.signed(one.before),
            after: digits.signed(one.after),
            is_better: one.after > one.before,
            policy: one.policy.clone(),
            policy_quality: quality(one.policy_quality),
            baseline: one.baseline.clone(),
            baseline_quality: quality(one.baseline_quality),
            parts: text::components_of(one),
        }
    }
}
