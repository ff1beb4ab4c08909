//! The replay comparison as text for a terminal, and table rows that the HTML page uses too.

use super::Replay;
use super::changes::{Change, ChangedComponent, ChangedEpisode, ComponentChange, SignCounts, Signs, Third};
use super::episodes::{Order, PluginSide, Side, largest_of};
use super::statistics::{Correlation, Distribution, Histogram, Pairs};
use crate::bootstrap::Interval;
use crate::text::{
    Digits, MAX_WIDTH, NOT_APPLICABLE, aligned, counted, cut, left, one_line, or_dash, printable, right, wrapped,
};
use unicode_width::UnicodeWidthStr;

const BAR_WIDTH: usize = 26;

/// Renders the comparison in lines of at most 100 columns. Ends with a line break.
pub fn replay_text(replay: &Replay) -> String {
    let sections = [
        sides(replay),
        replay.notes.iter().flat_map(|note| wrapped(&printable(note), MAX_WIDTH)).collect(),
        counts(replay),
        total_lines(replay),
        histogram(replay.totals.histogram.as_ref()),
        change_lines(&replay.change),
        correlation_lines(replay),
        sign_lines(replay),
        component_lines(replay),
        shown(replay),
        replay.change.mean.map_or_else(Vec::new, |_| wrapped(&explanation(replay), MAX_WIDTH)),
    ];
    let sections = sections.into_iter().filter(|lines| !lines.is_empty());
    let texts: Vec<String> = sections.map(|lines| lines.join("\n") + "\n").collect();
    texts.join("\n")
}

/// Name of a side: `reward-competition 0.1.0 (tanh_scale = 1.0)`, or `recorded outcomes`.
pub(super) fn title(side: &Side) -> String {
    let Side::Plugin(PluginSide { id, version, settings, .. }) = side else { return "recorded outcomes".to_owned() };
    let settings: Vec<String> = settings.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    let settings = if settings.is_empty() { String::new() } else { format!(" ({})", settings.join(", ")) };
    printable(&format!("{id} {version}{settings}"))
}

/// Declared range and SHA-256 of a side's plugin; empty for recorded outcomes.
pub(super) fn facts(side: &Side) -> String {
    let Side::Plugin(PluginSide { digest, range, .. }) = side else { return String::new() };
    format!("range {} to {}, sha256 {}", range.0, range.1, digest.get(..12).unwrap_or(digest))
}

/// An interval as `mean [low, high]`, with `*` if it excludes 0.
pub(super) fn interval(found: Option<Interval>) -> String {
    let Some(Interval { mean, low, high }) = found else { return NOT_APPLICABLE.to_owned() };
    let digits = Digits::for_values([mean, low, high].into_iter());
    let star = if low > 0.0 || high < 0.0 { "*" } else { "" };
    let [mean, low, high] = [mean, low, high].map(|value| digits.signed(value));
    format!("{mean} [{low}, {high}]{star}")
}

fn sides(replay: &Replay) -> Vec<String> {
    let line = |label: &str, side: &Side| {
        let facts = facts(side);
        let mut lines = wrapped(&title(side), MAX_WIDTH - 8);
        lines.extend((!facts.is_empty()).then_some(facts));
        let label = std::iter::once(label).chain(std::iter::repeat(""));
        label.zip(lines).map(|(label, line)| format!("{label:<8}{line}")).collect::<Vec<_>>()
    };
    [line("before", &replay.before), line("after", &replay.after)].concat()
}

fn counts(replay: &Replay) -> Vec<String> {
    let rows = replay.counts.rows();
    let label_width = rows.iter().map(|row| row.0.len()).max().unwrap_or(0);
    let number_width = replay.counts.n_episodes.to_string().len();
    let line = |(label, n, codes): (&str, usize, String)| {
        to_edge(&format!("{label:<label_width$}  {n:>number_width$}  {}", one_line(&printable(&codes))))
    };
    rows.into_iter().map(line).collect()
}

fn to_edge(line: &str) -> String {
    cut(line.trim_end(), MAX_WIDTH)
}

fn table(rows: &[Vec<String>]) -> Vec<String> {
    aligned(rows, &[0])
}

fn cells(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

/// Table rows (name, before, after, change) of the statistics of the totals; none if no episode was scored by both sides.
pub(super) fn totals(replay: &Replay) -> Vec<[String; 4]> {
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

fn total_lines(replay: &Replay) -> Vec<String> {
    let rows = totals(replay);
    if rows.is_empty() {
        return vec!["no episode was scored by both".to_owned()];
    }
    let head = cells(&["total", "before", "after", "change"]);
    table(&std::iter::once(head).chain(rows.into_iter().map(Vec::from)).collect::<Vec<_>>())
}

fn histogram(histogram: Option<&Histogram>) -> Vec<String> {
    let Some(histogram) = histogram else { return Vec::new() };
    let labels = histogram.bin_labels();
    let label_width = labels.iter().map(String::len).max().unwrap_or(0).max(5);
    let longest = histogram.before.iter().chain(&histogram.after).copied().max().unwrap_or(0);
    let number_width = longest.to_string().len();
    let side = |n: Option<&u64>| {
        n.map(|n| left(&format!("{n:>number_width$} {}", bar(*n, longest)), number_width + 1 + BAR_WIDTH))
    };
    let head = |text: &str| left(text, number_width + 1 + BAR_WIDTH);
    let columns = if histogram.before.is_empty() { vec![head("after")] } else { vec![head("before"), head("after")] };
    let mut lines = vec![format!("{}  {}", left("total", label_width), columns.join("  "))];
    for (index, label) in labels.iter().enumerate() {
        let columns = [side(histogram.before.get(index)), side(histogram.after.get(index))];
        lines.push(format!(
            "{}  {}",
            right(label, label_width),
            columns.into_iter().flatten().collect::<Vec<_>>().join("  ")
        ));
    }
    lines.into_iter().map(|line| line.trim_end().to_owned()).collect()
}

fn bar(n: u64, longest: u64) -> String {
    if n == 0 {
        return String::new();
    }
    let eighths = (8.0 * BAR_WIDTH as f64 * n as f64 / longest as f64).round().max(1.0) as usize;
    let rest = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths % 8];
    "█".repeat(eighths / 8) + rest
}

fn change_lines(change: &Change) -> Vec<String> {
    if change.mean.is_none() {
        return Vec::new();
    }
    let rows = changes(change);
    let width = rows.iter().map(|row| row[1].width()).max().unwrap_or(0);
    let head = ["mean change", "95% interval", "episodes"].map(str::to_owned);
    // Padded to one width, so that the means are aligned.
    let padded =
        std::iter::once(&head).chain(&rows).map(|[label, found, n]| vec![label.clone(), left(found, width), n.clone()]);
    let mut lines = table(&padded.collect::<Vec<_>>());
    lines.push(format!("episodes changed: {}; queries: {}", change.n_changed, change.n_queries));
    lines
}

/// Table rows (label, mean with interval, number of episodes) for all steps, the first third and the last third.
pub(super) fn changes(change: &Change) -> Vec<[String; 3]> {
    let third = |label: &str, third: Third| {
        let (first, last) = third.steps;
        let steps = if first == last { format!("step {first}") } else { format!("steps {first} to {last}") };
        [format!("{label}, {steps}"), interval(third.mean), third.n.to_string()]
    };
    let n_all: usize = change.by_step.iter().map(|step| step.n).sum();
    let mut rows = vec![["all".to_owned(), interval(change.mean), n_all.to_string()]];
    rows.extend(change.first_third.map(|found| third("first third", found)));
    rows.extend(change.last_third.map(|found| third("last third", found)));
    rows
}

pub(super) fn correlations(found: &Correlation) -> [(&'static str, String); 3] {
    let text = |value: Option<f64>| or_dash(value, |value| format!("{value:.4}"));
    [("Pearson", text(found.pearson)), ("Spearman", text(found.spearman)), ("Kendall tau-b", text(found.kendall_tau_b))]
}

pub(super) const ORDER_HEADS: [&str; 5] = ["pairs", "ordered before", "flip", "become a tie", "ties broken"];

/// Table rows (label, counts) for pairs of the same step and of any steps.
pub(super) fn orders(order: &Order) -> [(&'static str, [String; 5]); 2] {
    [("same query and step", pairs(&order.same_step)), ("same query, any steps", pairs(&order.any_step))]
}

fn pairs(pairs: &Pairs) -> [String; 5] {
    let ordered = pairs.ordered_before();
    let share = |n: u64| counted(n, ordered);
    let [flipped, tied] = [pairs.flipped, pairs.became_tied].map(share);
    [pairs.n.to_string(), ordered.to_string(), flipped, tied, pairs.became_ordered.to_string()]
}

fn correlation_lines(replay: &Replay) -> Vec<String> {
    if replay.totals.before.is_none() {
        return Vec::new();
    }
    let mut lines: Vec<String> =
        correlations(&replay.correlation).into_iter().map(|(name, value)| format!("{name} {value}")).collect();
    lines = vec![format!("correlation  {}", lines.join("   "))];
    let head = std::iter::once("order of totals").chain(ORDER_HEADS).map(str::to_owned).collect();
    let rows = orders(&replay.order).map(|(label, cells)| std::iter::once(label.to_owned()).chain(cells).collect());
    lines.extend(table(&std::iter::once(head).chain(rows).collect::<Vec<_>>()));
    lines
}

/// Table rows (label, [won, drew, lost], number of episodes) by the totals and by retrieval quality.
pub(super) fn signs(replay: &Replay) -> Vec<(&'static str, [String; 3], usize)> {
    let row = |label, counts: &SignCounts| (label, counts.cells(), counts.n());
    let signs = replay.signs.as_ref();
    let before = signs.and_then(|signs| signs.before.as_ref()).map(|counts| row("sign of total before", counts));
    let after = signs.map(|signs| row("sign of total after", &signs.after));
    before.into_iter().chain(after).chain([row("retrieval quality", &replay.retrieval)]).collect()
}

fn sign_lines(replay: &Replay) -> Vec<String> {
    let mut rows = vec![cells(&["against the teacher", "won", "drew", "lost", "of"])];
    let row = |(label, [won, drew, lost], n): (&str, [String; 3], usize)| {
        vec![label.to_owned(), won, drew, lost, n.to_string()]
    };
    rows.extend(signs(replay).into_iter().map(row));
    let mut lines = table(&rows);
    if let Some(signs) = replay.signs.as_ref().filter(|signs| signs.before.is_some()) {
        lines.extend(wrapped(&moves(signs), MAX_WIDTH));
    }
    lines
}

/// Number of episodes by change of sign: `changes of sign: 4 (won to lost 3, drew to won 1)`.
pub(super) fn moves(signs: &Signs) -> String {
    let moves = signs.moves.iter().filter(|one| one.n > 0);
    let texts: Vec<String> = moves.map(|one| format!("{} to {} {}", one.from.name(), one.to.name(), one.n)).collect();
    let texts = if texts.is_empty() { String::new() } else { format!(" ({})", texts.join(", ")) };
    format!("changes of sign: {}{texts}", signs.n_changed)
}

/// Table rows of the components: name, and [before, after, change, episodes before, episodes after].
pub(super) fn components(replay: &Replay) -> Vec<(String, [String; 5])> {
    let row = |component: &ComponentChange| {
        let ComponentChange { name, before, after, change, n_before, n_after, .. } = component;
        let digits = Digits::for_values([*before, *after, *change].into_iter().flatten());
        let plain = |value: &Option<f64>| or_dash(*value, |value| digits.plain(value));
        let change = or_dash(*change, |value| digits.signed(value));
        (name.clone(), [plain(before), plain(after), change, n_before.to_string(), n_after.to_string()])
    };
    replay.components.iter().map(row).collect()
}

fn component_lines(replay: &Replay) -> Vec<String> {
    let rows = components(replay).into_iter();
    let rows: Vec<Vec<String>> =
        rows.map(|(name, cells)| [vec![cut(&one_line(&printable(&name)), 40)], cells.into()].concat()).collect();
    if rows.is_empty() {
        return Vec::new();
    }
    let head = cells(&["mean of a part", "before", "after", "change", "n before", "n after"]);
    table(&[vec![head], rows].concat())
}

fn shown(replay: &Replay) -> Vec<String> {
    let (title, shown) = replay.shown();
    if shown.is_empty() {
        return Vec::new();
    }
    let n_all = if replay.flips.is_empty() {
        replay.change.n_changed
    } else {
        replay.signs.as_ref().map_or(0, |signs| signs.n_changed)
    };
    let n_episodes: usize = shown.iter().map(|one| one.n_changed).sum();
    let mut lines = vec![format!("{title} ({n_episodes} of {n_all} episodes)")];
    lines.extend((1..).zip(shown).flat_map(|(number, one)| episode(number, one)));
    lines
}

fn episode(number: usize, one: &ChangedEpisode) -> Vec<String> {
    let text = |label: &str, text: &str| format!("     {label:<8}{}", cut(&one_line(&printable(text)), MAX_WIDTH - 13));
    let side = |label: &str, rewrite: &str, quality: Option<f64>| {
        let quality = or_dash(quality, |value| format!("{value:.3}"));
        format!("     {label:<8}{}  {}", left(&quality, 5), cut(&one_line(&printable(rewrite)), MAX_WIDTH - 20))
    };
    let digits = Digits::for_values([one.before, one.after].into_iter());
    let head = format!(
        "{number:>3}. {} -> {}  {}line {}, {}",
        digits.signed(one.before),
        digits.signed(one.after),
        largest_of(one.n_changed),
        one.line,
        one_line(&printable(&one.id))
    );
    let mut lines = vec![to_edge(&head), text("query", &one.query), side("policy", &one.policy, one.policy_quality)];
    lines.extend(one.baseline.as_ref().map(|baseline| side("teacher", baseline, one.baseline_quality)));
    lines.extend((!one.components.is_empty()).then(|| text("moved", &components_of(one))));
    lines
}

/// The changed components of an episode: `win 0.500 -> -0.300, judge none -> 0.120`.
pub(super) fn components_of(one: &ChangedEpisode) -> String {
    let component = |part: &ChangedComponent| {
        let digits = Digits::for_values([part.before, part.after].into_iter().flatten());
        let text = |value: Option<f64>| value.map_or_else(|| "none".to_owned(), |value| digits.plain(value));
        format!("{} {} -> {}", part.name, text(part.before), text(part.after))
    };
    one.components.iter().map(component).collect::<Vec<_>>().join(", ")
}

/// Explanation of the tables.
pub(super) fn explanation(replay: &Replay) -> String {
    format!(
        "mean [95% interval], {} bootstrap resamples of whole queries; `*`: the interval excludes 0; totals no further apart than \
         1e-9 are equal; the number before a rewrite is its retrieval quality",
        replay.n_resamples
    )
}
