//! The evaluation as tables for a terminal.

use crate::bootstrap::Interval;
use crate::evaluation::{Difference, Evaluation, SecondEvaluation, SeedsEvaluation, StyleEvaluation, Styles};
use crate::facts::RunFacts;
use crate::metric::{Metric, RETRIEVAL_FAILED, TEACHER_FAILED};
use crate::text::{MAX_WIDTH, one_line, or_dash, printable, wrapped};
use crate::verdict::first_paragraph;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Renders what is outdated, the verdict on RL, the metrics of the systems, paired differences, controls, failures and notes. Ends with a
/// line break.
pub fn table(evaluation: &Evaluation, facts: &RunFacts) -> String {
    paragraphs(&evaluation.outdated) + &figures(evaluation, facts)
}

fn paragraphs(lines: &[String]) -> String {
    lines.iter().map(|line| wrapped(&printable(line), MAX_WIDTH).join("\n") + "\n").collect()
}

fn figures(evaluation: &Evaluation, facts: &RunFacts) -> String {
    let mut text = head(evaluation, facts);
    let verdict = wrapped(&first_paragraph(evaluation), MAX_WIDTH);
    if !verdict.is_empty() {
        text.push_str(&(verdict.join("\n") + "\n\n"));
    }
    text.push_str(&blocks("", &systems_grid(evaluation)));
    let pairs = differences_grid(evaluation, &evaluation.pairs, &compared(evaluation));
    if pairs.len() > 1 {
        text.push_str(&format!("\n{}", blocks("paired differences on the same queries", &pairs)));
    }
    text.push_str(&second_text(evaluation));
    text.push_str(&controls_text(evaluation));
    text.push_str(&pass_at_k_text(evaluation));
    text.push_str(&styles_text(evaluation));
    text.push('\n');
    text.push_str(&notes(evaluation, facts));
    printable(&text)
}

/// Systems and pairs on the second retriever; empty without one.
fn second_text(evaluation: &Evaluation) -> String {
    let Some(second) = &evaluation.second_retrieval else { return String::new() };
    let mut systems = vec![head_row("system", &SecondEvaluation::METRICS)];
    for (name, _) in evaluation.systems_in_order() {
        let found = |metric: &Metric| second.systems.get(name)?.get(metric).copied().flatten();
        let cells = SecondEvaluation::METRICS.iter().map(|metric| interval_text(*metric, found(metric)));
        systems.push(std::iter::once(name.to_owned()).chain(cells).collect());
    }
    let pairs = differences_grid(evaluation, &second.pairs, &SecondEvaluation::METRICS);
    let not_trained_on = if second.is_of_training() { "" } else { ", not used in training" };
    let title = format!("on a second retriever ({}){not_trained_on}", second.retriever);
    format!("\n{}\n{}", blocks(&title, &systems), blocks("", &pairs))
}

fn differences_grid(
    evaluation: &Evaluation,
    pairs: &BTreeMap<String, BTreeMap<Metric, Option<Difference>>>,
    metrics: &[Metric],
) -> Grid {
    let mut grid = vec![head_row("pair", metrics)];
    for (first, second, _) in evaluation.pairs_in_order() {
        let differences = pairs.get(&format!("{first}-{second}"));
        let cells = metrics.iter().map(|metric| {
            let found = differences.and_then(|differences| differences.get(metric).copied().flatten());
            or_dash(found, |found| difference_text(*metric, found))
        });
        grid.push(std::iter::once(format!("{first} - {second}")).chain(cells).collect());
    }
    grid
}

/// Length and words of the rewrites, and paired differences at equal length.
fn controls_text(evaluation: &Evaluation) -> String {
    let Some(controls) = &evaluation.controls else { return String::new() };
    let heads = ["system", "characters", "kept words %", "new gold words %"];
    let mut grid = vec![heads.map(str::to_owned).to_vec()];
    for (name, _) in evaluation.systems_in_order() {
        let Some(found) = controls.systems.get(name) else { continue };
        let characters = interval_text(Metric::LatencyMs, found.n_chars);
        let shares = [found.kept_terms, found.new_gold_terms].map(|share| interval_text(Metric::Top1, share));
        grid.push([name.to_owned(), characters].into_iter().chain(shares).collect());
    }
    let mut text = format!("\n{}", blocks("length and words of the rewrites", &grid));
    let metrics = evaluation.length_matched_metrics();
    let mut matched = differences_grid(evaluation, &controls.length_matched, &metrics);
    if matched.len() > 1 {
        matched[0].push("queries".to_owned());
        for (row, (first, second, _)) in matched[1..].iter_mut().zip(evaluation.pairs_in_order()) {
            let of_pair = controls.length_matched.get(&format!("{first}-{second}"));
            let n = |metric: &Metric| Some(of_pair?.get(metric)?.as_ref()?.n.to_string());
            let mut ns: Vec<String> = metrics.iter().filter_map(n).collect();
            ns.dedup();
            row.push(or_dash((!ns.is_empty()).then_some(ns), |ns| ns.join(" / ")));
        }
        let title = "paired differences where both rewrites have about the same length";
        let _ = write!(text, "\n{}", blocks(title, &matched));
    }
    text
}

/// pass@k of the systems with samples.
fn pass_at_k_text(evaluation: &Evaluation) -> String {
    let ks: BTreeSet<usize> = evaluation.pass_at_k.values().flat_map(|found| found.k.keys().copied()).collect();
    if ks.is_empty() {
        return String::new();
    }
    let mut grid: Grid =
        vec![std::iter::once("pass@k %".to_owned()).chain(ks.iter().map(ToString::to_string)).collect()];
    for (name, _) in evaluation.systems_in_order() {
        let Some(found) = evaluation.pass_at_k.get(name) else { continue };
        let cells = ks.iter().map(|k| interval_text(Metric::Top1, found.k.get(k).copied()));
        grid.push(std::iter::once(name.to_owned()).chain(cells).collect());
    }
    format!("\n{}", blocks("a gold passage first with at least one of k samples", &grid))
}

/// The styles of the answers and their shifts; empty without a style model.
fn styles_text(evaluation: &Evaluation) -> String {
    let Some(style) = &evaluation.style else { return String::new() };
    let mut text = String::new();
    for (model, styles) in style.models() {
        let title = format!("mean probability of each style{model}");
        let _ = write!(text, "\n{}", blocks(&title, &styles_grid(evaluation, style, styles)));
        let shifts = shifts_grid(evaluation, styles);
        if shifts.len() > 1 {
            let title = format!("shift of style on the same queries{model}");
            let _ = write!(text, "\n{}", blocks(&title, &shifts));
        }
    }
    text
}

fn styles_grid(evaluation: &Evaluation, style: &StyleEvaluation, styles: &Styles) -> Grid {
    let classes = styles.classes();
    let heads = ["system"].into_iter().chain(classes.iter().copied()).chain(["characters", "distinct %"]);
    let mut grid = vec![heads.map(str::to_owned).collect::<Vec<_>>()];
    for (system, _) in evaluation.systems_in_order() {
        let of_class = |class: &&str| styles.systems.get(system).and_then(|found| found.get(*class).copied()).flatten();
        let mut row = vec![system.to_owned()];
        row.extend(classes.iter().map(|class| interval_text(Metric::Reward, of_class(class))));
        row.push(interval_text(Metric::LatencyMs, style.n_chars.get(system).copied().flatten()));
        row.push(or_dash(style.distinct.get(system), |share| format!("{:.1}", 100.0 * share)));
        grid.push(row);
    }
    grid
}

fn shifts_grid(evaluation: &Evaluation, styles: &Styles) -> Grid {
    let classes = styles.classes();
    let mut grid = vec![["pair"].into_iter().chain(classes.iter().copied()).map(str::to_owned).collect::<Vec<_>>()];
    for (first, second, _) in evaluation.pairs_in_order() {
        let shift = styles.shifts.get(&format!("{first}-{second}"));
        let cells = classes.iter().map(|class| {
            let found = shift.and_then(|classes| classes.get(*class).copied()).flatten();
            or_dash(found, |found| difference_text(Metric::Reward, found))
        });
        grid.push(std::iter::once(format!("{first} - {second}")).chain(cells).collect());
    }
    grid
}

fn interval_text(metric: Metric, found: Option<Interval>) -> String {
    or_dash(found, |found| {
        format!("{} [{}, {}]", metric.format(found.mean), metric.format(found.low), metric.format(found.high))
    })
}

fn difference_text(metric: Metric, found: Difference) -> String {
    let [mean, low, high] = [found.mean, found.low, found.high].map(|value| metric.format_signed(value));
    format!("{mean} [{low}, {high}]{}", if found.excludes_zero() { "*" } else { " " })
}

/// Like [`table`], for several runs pooled, followed by the mean differences of each run. `differing` names what the runs differ in more
/// than their seeds.
pub fn seeds_table(evaluation: &SeedsEvaluation, facts: &RunFacts, differing: &[String]) -> String {
    let mut text = paragraphs(&evaluation.pooled.outdated) + &paragraphs(differing);
    text.push_str(&format!(
        "{} runs, each query averaged over them; intervals are for new queries, not for new seeds\n",
        evaluation.runs.len()
    ));
    text.push_str(&figures(&evaluation.pooled, facts));
    text.push_str(&format!("\n{}", blocks("mean differences of each run", &runs_grid(evaluation))));
    text
}

/// Rows of table cells: the first row is the head, the first column has the names.
pub(crate) type Grid = Vec<Vec<String>>;

fn head(evaluation: &Evaluation, facts: &RunFacts) -> String {
    let judge = facts.judge.as_ref().map_or("none".to_owned(), ToString::to_string);
    format!(
        "{} · {} split: {} queries in {} groups · teacher {} · judge {judge} · retrieval {}\n\n",
        facts.tenant,
        evaluation.split.name(),
        evaluation.n,
        evaluation.n_groups,
        facts.teacher,
        facts.retrieval,
    )
}

fn systems_grid(evaluation: &Evaluation) -> Grid {
    let systems = evaluation.systems_in_order();
    let has = |metric: &Metric| systems.iter().any(|(_, system)| matches!(system.metrics.get(metric), Some(Some(_))));
    let metrics: Vec<Metric> = Metric::ALL.into_iter().filter(has).collect();
    let mut grid = vec![head_row("system", &metrics)];
    for (name, system) in systems {
        let cells = metrics.iter().map(|metric| interval_text(*metric, system.metrics.get(metric).copied().flatten()));
        grid.push(std::iter::once(name.to_owned()).chain(cells).collect());
    }
    grid
}

fn runs_grid(evaluation: &SeedsEvaluation) -> Grid {
    let metrics = compared(&evaluation.pooled);
    let mut grid = vec![head_row("pair, run", &metrics)];
    for (first, second, pooled) in evaluation.pooled.pairs_in_order() {
        for (number, run) in (1..).zip(&evaluation.runs) {
            let differences = run.pairs.get(&format!("{first}-{second}"));
            let cells = metrics.iter().map(|metric| {
                let found = differences.and_then(|differences| differences.get(metric).copied().flatten());
                or_dash(found, |found| metric.format_signed(found.mean))
            });
            grid.push(std::iter::once(format!("{first} - {second}, {number}")).chain(cells).collect());
        }
        let cells = metrics.iter().map(|metric| {
            let ends = pooled.get(metric).copied().flatten().and_then(|found| found.over_runs);
            // Of equal runs, as where no seed takes part, there is none.
            let ends = ends.filter(|[low, high]| high - low > 1e-9);
            or_dash(ends, |ends| {
                let [low, high] = ends.map(|end| metric.format_signed(end));
                format!("[{low}, {high}]")
            })
        });
        if evaluation.runs.len() > 2 {
            grid.push(std::iter::once("  95% interval over the runs".to_owned()).chain(cells).collect());
        }
    }
    grid
}

/// The metrics of the paired differences: without those that [`Evaluation::without`] removed.
fn compared(evaluation: &Evaluation) -> Vec<Metric> {
    let has = |metric: &Metric| evaluation.pairs.values().any(|pair| matches!(pair.get(metric), Some(Some(_))));
    Metric::COMPARED.into_iter().filter(has).collect()
}

fn head_row(first: &str, metrics: &[Metric]) -> Vec<String> {
    std::iter::once(first).chain(metrics.iter().map(|metric| metric.label())).map(str::to_owned).collect()
}

/// Renders a table as blocks of aligned columns of at most [`MAX_WIDTH`] characters; each block repeats the first column, and the
/// title if it is not empty.
pub(crate) fn blocks(title: &str, grid: &Grid) -> String {
    let widths: Vec<usize> = (0..grid[0].len())
        .map(|column| grid.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let has_title = !title.is_empty();
    let mut text = if has_title { format!("{title}\n") } else { String::new() };
    let mut columns: Vec<usize> = Vec::new();
    for column in 1..widths.len() {
        let width: usize = widths[0] + columns.iter().chain([&column]).map(|column| widths[*column] + 2).sum::<usize>();
        if width > MAX_WIDTH && !columns.is_empty() {
            write_block(&mut text, grid, &widths, &std::mem::take(&mut columns));
            text.push_str(&if has_title { format!("\n{title}, continued\n") } else { "\n".to_owned() });
        }
        columns.push(column);
    }
    write_block(&mut text, grid, &widths, &columns);
    text
}

fn write_block(text: &mut String, grid: &Grid, widths: &[usize], columns: &[usize]) {
    for row in grid {
        let mut line = format!("{:<width$}", row[0], width = widths[0]);
        for column in columns {
            // Writing to a String cannot fail.
            let _ = write!(line, "  {:<width$}", row[*column], width = widths[*column]);
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

fn notes(evaluation: &Evaluation, facts: &RunFacts) -> String {
    let mut lines = facts.stand_in_notes();
    lines.extend(evaluation.too_few_groups());
    lines.extend(failure_lines(evaluation));
    lines.extend(facts.plugin_notes.iter().cloned());
    let mut differences = evaluation.pairs.values().flat_map(BTreeMap::values).flatten();
    let over_runs = match differences.any(|found| found.over_runs.is_some()) {
        true => ", and so does that over the runs (Student's t; last table)",
        false => "",
    };
    lines.push(format!(
        "mean [95% interval], {} bootstrap resamples of whole query groups; `*`: the interval of the difference excludes 0{over_runs}; `-` \
         means the metric does not apply; `querl release check` widens intervals of few groups, and where no group loses or gains \
         (rule of three)",
        evaluation.n_resamples
    ));
    lines.iter().fold(String::new(), |text, line| text + line + "\n")
}

/// One line for each system that failed on some queries, for tables and reports.
pub(crate) fn failure_lines(evaluation: &Evaluation) -> Vec<String> {
    let has_reward =
        |metrics: &BTreeMap<Metric, Option<Interval>>| metrics.get(&Metric::Reward).copied().flatten().is_some();
    let without = evaluation.systems_in_order().into_iter();
    let without = without.filter(|(_, system)| system.n_without_reward > 0 && has_reward(&system.metrics));
    let without: Vec<String> =
        without.map(|(name, system)| format!("{name} {} of {}", system.n_without_reward, system.n_scored)).collect();
    let without = (!without.is_empty()).then(|| {
        format!(
            "rewrites without a reward (one cause: the teacher has none to compare with): {}; left out of the means and differences of \
             rewards",
            without.join(", ")
        )
    });
    let failed = evaluation.systems_in_order().into_iter().filter(|(_, system)| system.n_failed > 0);
    failed
        .map(|(name, system)| {
            let total = system.n_scored + system.n_failed;
            // Codes are plugin text: a line break could imitate a line of the table.
            let reasons: Vec<String> =
                system.failures.iter().map(|(code, n)| format!("{} {n}", one_line(code))).collect();
            let n_of = |is_counted: fn(&str) -> bool| -> usize {
                system.failures.iter().filter(|(code, _)| is_counted(code)).map(|(_, n)| n).sum()
            };
            let n_without = n_of(|code| code == TEACHER_FAILED);
            let n_outages = n_of(|code| code.split_once(' ').is_some_and(|(first, _)| first == RETRIEVAL_FAILED));
            let mut pairs = String::new();
            if n_without > 0 {
                pairs += &format!("; its pairs leave out the {n_without} without a rewrite");
            }
            if n_outages > 0 {
                let place = if evaluation.second_retrieval.is_some() { " on the retriever of training" } else { "" };
                pairs += &format!("; differences from it{place} leave out the {n_outages} whose retrieval failed");
            }
            format!(
                "failed: {name} on {} of {total} ({}); misses for top-1 and MRR, left out of the other means{pairs}",
                system.n_failed,
                reasons.join(", ")
            )
        })
        .chain(without)
        .collect()
}

pub(crate) fn system_title(name: &str) -> &str {
    match name {
        "raw" => "Raw",
        "with_history" => "With history",
        "expanded" => "Expanded",
        "prompted" => "Prompted",
        "hyde" => "HyDE",
        "teacher" => "Teacher",
        "sft" => "SFT",
        "best_of_n" => "Best of n",
        "rl" => "RL",
        _ => name,
    }
}
