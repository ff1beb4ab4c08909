//! The comparison as a page for a browser: one file, no script, no outside request, light and dark, as the report of a run.

mod charts;

use super::changed::ChangedEpisode;
use super::numbers::{Digits, or_dash};
use super::signs::SignCounts;
use super::{Distribution, Replay, text};
use crate::error::EvalError;
use crate::report::chart::{LineChart, Points};
use crate::report::page;
use serde::Serialize;

/// The page as HTML.
///
/// # Errors
/// The template engine failed; not for any content of `replay`.
pub fn replay_html(replay: &Replay) -> Result<String, EvalError> {
    page(include_str!("page/replay.html"), &Page::new(replay))
}

/// Everything the template places.
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
    joint: Option<charts::Joint>,
    trend: Option<LineChart>,
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

/// An episode shown.
#[derive(Debug, Serialize)]
struct Shown {
    id: String,
    line: usize,
    query: String,
    before: String,
    after: String,
    is_better: bool,
    policy: String,
    policy_quality: String,
    baseline: String,
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
            totals: totals(replay),
            histograms: replay.totals.histogram.as_ref().map(charts::HistogramPair::new),
            joint: replay.totals.histogram.as_ref().and_then(charts::Joint::new),
            trend: trend(replay),
            changes: changes(replay),
            correlations: text::correlations(&replay.correlation),
            order_heads: text::ORDER_HEADS,
            orders: text::orders(&replay.order),
            signs: signs(replay),
            moves: replay.signs.as_ref().filter(|signs| signs.before.is_some()).map(text::moves),
            components: components(replay),
            shown_title,
            shown: shown.iter().map(Shown::new).collect(),
            explanation: text::explanation(replay),
        }
    }
}

/// What matters most, one sentence each.
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

fn totals(replay: &Replay) -> Vec<[String; 4]> {
    let Some(after) = replay.totals.after else { return Vec::new() };
    let (before, after) = (replay.totals.before.map(|found| found.figures()), after.figures());
    let digits = Digits::for_values(before.into_iter().flatten().chain(after).flatten());
    let row = |(index, name): (usize, &str)| {
        let (before, after) = (before.and_then(|figures| figures[index]), after[index]);
        let change = before.zip(after).map(|(before, after)| after - before);
        let plain = |value| or_dash(value, |value| digits.plain(value));
        [name.to_owned(), plain(before), plain(after), or_dash(change, |value| digits.signed(value))]
    };
    Distribution::FIGURES.into_iter().enumerate().map(row).collect()
}

/// Mean totals by step; `None` for a single step.
fn trend(replay: &Replay) -> Option<LineChart> {
    let steps = &replay.change.by_step;
    let curve = |label: &'static str, value: fn(&super::StepMeans) -> Option<f64>| {
        let points: Vec<(f64, f64)> = steps.iter().filter_map(|step| Some((step.step as f64, value(step)?))).collect();
        (!points.is_empty()).then(|| Points { label, name: format!("mean total {label}"), points })
    };
    let curves = [curve("before", |step| step.before), curve("after", |step| step.after)];
    (steps.len() > 1).then(|| LineChart::new("Mean total by step", "total", curves.into_iter().flatten().collect()))?
}

fn changes(replay: &Replay) -> Vec<[String; 3]> {
    if replay.change.mean.is_some() { text::changes(&replay.change) } else { Vec::new() }
}

fn signs(replay: &Replay) -> Vec<(&'static str, [String; 3], usize)> {
    let row = |label, counts: &SignCounts| (label, counts.cells(), counts.n());
    let signs = replay.signs.as_ref();
    let before = signs.and_then(|signs| signs.before.as_ref()).map(|counts| row("sign of total before", counts));
    let after = signs.map(|signs| row("sign of total after", &signs.after));
    before.into_iter().chain(after).chain([row("retrieval quality", &replay.retrieval)]).collect()
}

fn components(replay: &Replay) -> Vec<(String, [String; 5])> {
    let row = |part: &super::ComponentChange| {
        let digits = Digits::for_values([part.before, part.after, part.change].into_iter().flatten());
        let plain = |value| or_dash(value, |value| digits.plain(value));
        let change = or_dash(part.change, |value| digits.signed(value));
        let [n_before, n_after] = [part.n_before, part.n_after].map(|n| n.to_string());
        (part.name.clone(), [plain(part.before), plain(part.after), change, n_before, n_after])
    };
    replay.components.iter().map(row).collect()
}

impl Shown {
    fn new(one: &ChangedEpisode) -> Self {
        let digits = Digits::for_values([one.before, one.after].into_iter());
        let quality = |quality| or_dash(quality, |value| format!("{value:.3}"));
        Self {
            id: one.id.clone(),
            line: one.line,
            query: one.query.clone(),
            before: digits.signed(one.before),
            after: digits.signed(one.after),
            is_better: one.after > one.before,
            policy: one.policy.clone(),
            policy_quality: quality(one.policy_quality),
            baseline: one.baseline.clone(),
            baseline_quality: quality(one.baseline_quality),
            parts: text::parts(one),
        }
    }
}
