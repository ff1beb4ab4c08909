//! The audit as text for a terminal, and table rows that the HTML page uses too.

use super::measures::{Measure, MeasureKind};
use super::rows::Window;
use super::signs::Sign;
use super::suspicious::SuspiciousEpisode;
use super::{Audit, counted};
use crate::text::{MAX_WIDTH, NOT_APPLICABLE, aligned, cut, one_line, or_dash, printable, wrapped};
use querl_core::text::grouped;

/// Renders the audit in lines of at most 100 columns, with the signs and the verdict last. With too few steps the verdict is first, and
/// there is no table. Ends with a line break.
pub fn audit_text(audit: &Audit) -> String {
    let is_too_short = audit.windows.is_empty() && audit.signs.is_empty();
    let sections = [
        if is_too_short { wrapped(&audit.verdict, MAX_WIDTH) } else { Vec::new() },
        std::iter::once(head(audit)).chain(windows(audit)).collect(),
        audit.notes.iter().flat_map(|note| wrapped(&printable(note), MAX_WIDTH)).collect(),
        if is_too_short { Vec::new() } else { table(audit) },
        training(audit),
        suspicious(audit),
        if is_too_short { Vec::new() } else { sign_lines(audit) },
    ];
    let sections = sections.into_iter().filter(|lines: &Vec<String>| !lines.is_empty());
    let texts: Vec<String> = sections.map(|lines| lines.join("\n") + "\n").collect();
    texts.join("\n")
}

/// One line with the numbers of rollouts, queries and steps.
pub(super) fn head(audit: &Audit) -> String {
    let [episodes, queries, steps] = [audit.n_episodes, audit.n_queries, audit.n_steps].map(|n| grouped(n as u64));
    format!("{episodes} scored rollouts of {queries} queries, {steps} steps")
}

pub(super) fn windows(audit: &Audit) -> Option<String> {
    let text = |window: &Window| {
        let (first, last) = window.steps;
        format!("steps {first} to {last} ({} episodes)", grouped(window.n_episodes as u64))
    };
    let (early, late) = audit.windows.first().zip(audit.windows.last())?;
    Some(format!("early: {}; late: {}", text(early), text(late)))
}

pub(super) const HEADS: [&str; 6] =
    ["measure", "early", "late", "change [95% interval]", "effect", "r reward, quality"];

/// The table row of one measure; the columns are [`HEADS`].
pub(super) fn cells(one: &Measure) -> [String; 6] {
    let name = cut(&one_line(&printable(&one.name)), 24);
    let r = |value: Option<f64>| or_dash(value, |value| format!("{value:+.2}"));
    let correlations = match one.kind {
        MeasureKind::Reward => format!("{NOT_APPLICABLE}, {}", r(one.r_quality)),
        MeasureKind::Quality => format!("{}, {NOT_APPLICABLE}", r(one.r_reward)),
        _ => format!("{}, {}", r(one.r_reward), r(one.r_quality)),
    };
    let Some(change) = one.change else {
        return [
            name,
            NOT_APPLICABLE.into(),
            NOT_APPLICABLE.into(),
            NOT_APPLICABLE.into(),
            NOT_APPLICABLE.into(),
            correlations,
        ];
    };
    let star = if change.rises() || change.falls() { "*" } else { "" };
    let interval = change.interval;
    [
        name,
        format!("{:.3}", change.early),
        format!("{:.3}", change.late),
        format!("{:+.3} [{:+.3}, {:+.3}]{star}", interval.mean, interval.low, interval.high),
        format!("{:+.2}", change.effect),
        correlations,
    ]
}

/// The heading of a group of measures of one kind.
pub(super) fn title(kind: MeasureKind) -> &'static str {
    match kind {
        MeasureKind::Reward | MeasureKind::Component => "reward",
        MeasureKind::Quality => "quality",
        MeasureKind::Hint => "hints of quality",
        MeasureKind::Text => "text",
    }
}

fn table(audit: &Audit) -> Vec<String> {
    let rows: Vec<_> = std::iter::once(HEADS.map(str::to_owned)).chain(audit.measures.iter().map(cells)).collect();
    let mut rows = aligned(&rows, &[0, 3]).into_iter();
    let mut lines: Vec<String> = rows.next().into_iter().collect();
    let mut last = None;
    for (measure, row) in audit.measures.iter().zip(rows) {
        let title = title(measure.kind);
        if last.replace(title) != Some(title) {
            lines.push(format!("- {title}"));
        }
        lines.push(row);
    }
    lines
}

/// One line per training metric with its means in the early and the late window: `objective/kl 0.41 -> 1.72`.
pub(super) fn training(audit: &Audit) -> Vec<String> {
    let line = |(name, (early, late)): (&String, &(f64, f64))| format!("{name}  {early:.3} -> {late:.3}");
    audit.training.iter().map(line).collect()
}

fn suspicious(audit: &Audit) -> Vec<String> {
    if audit.suspicious.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![
        format!("most suspicious episodes ({}), with their lines of episodes.jsonl", audit.suspicious.len()),
        "high reward with low quality, or one of the signs; an episode here is not a sign by itself".to_owned(),
    ];
    lines.extend((1..).zip(&audit.suspicious).flat_map(|(number, one)| episode(number, one)));
    lines
}

fn episode(number: usize, one: &SuspiciousEpisode) -> Vec<String> {
    let text = |label: &str, text: &str| format!("     {label:<9}{}", cut(&one_line(&printable(text)), MAX_WIDTH - 14));
    let head = format!("{number:>3}. line {}, {}", one.line, one_line(&printable(&one.id)));
    let scores = scores(one);
    vec![
        cut(&head, MAX_WIDTH),
        text("query", &one.query),
        text("rewrite", &one.rewrite),
        text("scores", &scores),
        text("reasons", &one.reasons.join("; ")),
    ]
}

/// Reward and measures of quality of an episode in one line: `reward 0.950, gold_rank 0.000, second_retriever 0.067`.
pub(super) fn scores(one: &SuspiciousEpisode) -> String {
    let quality = one.quality.iter().map(|(name, value)| format!("{name} {value:.3}"));
    std::iter::once(format!("reward {:.3}", one.reward)).chain(quality).collect::<Vec<_>>().join(", ")
}

fn sign_lines(audit: &Audit) -> Vec<String> {
    let indented = |(number, sign): (usize, &Sign)| {
        let lines = wrapped(&printable(&sign.to_string()), MAX_WIDTH - 5);
        let starts = std::iter::once(format!("{number:>3}. ")).chain(std::iter::repeat("     ".to_owned()));
        starts.zip(lines).map(|(start, line)| start + &line).collect::<Vec<_>>()
    };
    let mut lines: Vec<String> = (1..).zip(&audit.signs).flat_map(indented).collect();
    lines.push(conclusion(audit));
    lines
}

/// The number of signs, or the verdict if there are none.
pub(super) fn conclusion(audit: &Audit) -> String {
    if audit.signs.is_empty() { audit.verdict.clone() } else { counted(&audit.signs) }
}

/// Explanation of the columns of the table.
pub(super) fn explanation(audit: &Audit) -> String {
    format!(
        "mean change [95% interval], {} bootstrap resamples of whole queries; `*`: the interval excludes 0; effect: the change by the \
         standard deviation of single episodes; r: correlation within queries",
        audit.n_resamples
    )
}
