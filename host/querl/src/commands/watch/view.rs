//! Draws the display of `querl watch`: stages, progress, charts of metrics, time of a step, warnings, newest episodes.

use super::{EpisodeLine, Snapshot, StageState, Training};
use querl_pipeline::ledger::StageName;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Gauge, Paragraph, Sparkline};

/// Metrics that are shown as curves, in the order of display: name in `metrics.jsonl`, name on screen.
const CURVES: [(&str, &str); 12] = [
    ("avg_reward", "reward"),
    ("val/reward", "val reward"),
    ("win_rate", "win rate"),
    ("loss", "loss"),
    ("eval_loss", "eval loss"),
    ("actor/pg_loss", "policy loss"),
    ("actor/ref_kl", "KL to SFT"),
    ("actor/entropy", "entropy"),
    ("actor/pg_clipfrac", "clip fraction"),
    ("critic/vf_explained_var", "explained variance"),
    ("grad_norm", "gradient norm"),
    ("response_length/mean", "response length"),
];

/// Size of one curve in columns and rows, name included.
const CURVE_WIDTH: u16 = 34;
const CURVE_HEIGHT: u16 = 3;

pub(super) fn draw(snapshot: &Snapshot, frame: &mut Frame<'_>) {
    let curves = snapshot.training.as_ref().map(curves_of).unwrap_or_default();
    let per_row = usize::from((frame.area().width / CURVE_WIDTH).max(1));
    let n_rows = curves.len().div_ceil(per_row) as u16;
    let of_training = snapshot.training.iter().flat_map(|training| training.warnings.iter().rev().take(4));
    let warnings_shown: Vec<&String> = snapshot.notes.iter().chain(of_training).collect();
    let [head, progress, figures, timing, warnings, episodes] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(2),
        Constraint::Length(n_rows * CURVE_HEIGHT),
        Constraint::Length(2),
        Constraint::Length(warnings_shown.len() as u16),
        Constraint::Fill(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(head_lines(snapshot)), head);
    if let Some(training) = &snapshot.training {
        draw_progress(snapshot, training, frame, progress);
        draw_curves(&curves, per_row, frame, figures);
        frame.render_widget(Paragraph::new(timing_line(training)), timing);
    } else {
        frame.render_widget(Paragraph::new("no training step yet"), progress);
    }
    let lines: Vec<Line<'_>> =
        warnings_shown.into_iter().map(|text| Line::from(text.as_str()).fg(Color::Yellow)).collect();
    frame.render_widget(Paragraph::new(lines), warnings);
    draw_episodes(&snapshot.episodes, frame, episodes);
}

fn head_lines(snapshot: &Snapshot) -> Vec<Line<'_>> {
    let state = if snapshot.is_running { "running".fg(Color::Green) } else { "not running".fg(Color::DarkGray) };
    let tenant = snapshot.tenant.as_deref().unwrap_or("querl");
    let title =
        Line::from(vec![tenant.bold(), Span::raw("  "), Span::raw(snapshot.folder.as_str()), Span::raw("  "), state]);
    let stage = |(name, state): &(StageName, StageState)| match state {
        StageState::Finished => format!("{name} done").fg(Color::Green),
        StageState::Outdated => format!("{name} outdated").fg(Color::Yellow),
        StageState::Begun => format!("{name} begun").fg(Color::Cyan),
        StageState::NotBegun => name.to_string().fg(Color::DarkGray),
    };
    let stages = snapshot.stages.iter().flat_map(|entry| [stage(entry), Span::raw("  ")]);
    vec![title, stages.collect::<Vec<_>>().into()]
}

fn draw_progress(snapshot: &Snapshot, training: &Training, frame: &mut Frame<'_>, area: Rect) {
    let ratio = training.n_steps.map_or(0.0, |n_steps| training.step as f64 / n_steps.max(1) as f64).clamp(0.0, 1.0);
    let mut label = format!("{}  step {}", training.stage, training.step);
    if let Some(n_steps) = training.n_steps {
        label.push_str(&format!(" of {n_steps}"));
    }
    if let Some(step_s) = training.step_s() {
        label.push_str(&format!("  {step_s:.1} s a step"));
    }
    // Remaining time, only while the run is running.
    let left_s = training.left_s().filter(|left_s| snapshot.is_running && *left_s > 0.0);
    if let Some(left_s) = left_s {
        label.push_str(&format!("  {} left", duration(left_s)));
    }
    if let Some(throughput) = training.last("perf/throughput") {
        label.push_str(&format!("  {throughput:.0} tokens/s"));
    }
    let [bar, _] = Layout::vertical([Constraint::Length(1), Constraint::Length(1)]).areas(area);
    frame.render_widget(Gauge::default().ratio(ratio).label(label).gauge_style(Style::new().fg(Color::Blue)), bar);
}

/// Formats a duration: `2 h 05 min`, `7 min 30 s`, `12 s`.
fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    match seconds {
        3600.. => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
        60.. => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{seconds} s"),
    }
}

/// The curves that this stage has: display name and values.
fn curves_of(training: &Training) -> Vec<(&'static str, &[f64])> {
    let curve = |(name, shown): &(&str, &'static str)| Some((*shown, training.series.get(*name)?.as_slice()));
    CURVES.iter().filter_map(curve).collect()
}

fn draw_curves(curves: &[(&str, &[f64])], per_row: usize, frame: &mut Frame<'_>, area: Rect) {
    let n_rows = curves.len().div_ceil(per_row);
    let rows = Layout::vertical(vec![Constraint::Length(CURVE_HEIGHT); n_rows]).split(area);
    for (row, curves) in rows.iter().zip(curves.chunks(per_row)) {
        let cells = Layout::horizontal(vec![Constraint::Fill(1); per_row]).split(*row);
        for (cell, (name, values)) in cells.iter().zip(curves) {
            draw_curve(name, values, frame, *cell);
        }
    }
}

/// Draws a curve: its name with the newest value, and the values as bars, scaled from the minimum to the maximum.
fn draw_curve(name: &str, values: &[f64], frame: &mut Frame<'_>, area: Rect) {
    let newest = values.last().copied().unwrap_or_default();
    let title = Line::from(vec![Span::raw(name.to_owned()), Span::raw(" "), format!("{newest:.4}").bold()]);
    let inner = Rect { width: area.width.saturating_sub(2), ..area };
    let shown = &values[values.len().saturating_sub(usize::from(inner.width))..];
    let (low, high) =
        shown.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(*x), high.max(*x)));
    let spread = (high - low).max(f64::MIN_POSITIVE);
    let bars: Vec<u64> = shown.iter().map(|x| 1 + ((x - low) / spread * 15.0) as u64).collect();
    let chart = Sparkline::default().block(Block::new().title(title)).data(&bars).max(16);
    frame.render_widget(chart.style(Style::new().fg(Color::Cyan)), inner);
}

fn timing_line(training: &Training) -> Line<'static> {
    let parts = training.timing();
    // Phases overlap, contain others, or come after the step, so they have no shares of it.
    let part = |(name, seconds): &(&str, f64)| [Span::raw(format!("{name} ")), format!("{seconds:.2} s  ").bold()];
    if parts.is_empty() {
        return Line::default();
    }
    let mut spans = vec![Span::raw("time  ")];
    spans.extend(parts.iter().take(6).flat_map(part));
    Line::from(spans)
}

fn draw_episodes(episodes: &[EpisodeLine], frame: &mut Frame<'_>, area: Rect) {
    let line = |episode: &EpisodeLine| {
        let reward = match &episode.reward {
            Ok(total) => format!("{total:+.2} ").fg(if *total >= 0.0 { Color::Green } else { Color::Red }),
            Err(code) => format!("{code} ").fg(Color::Yellow),
        };
        let (query, policy, baseline) = (episode.query.clone(), episode.policy.clone(), episode.baseline.clone());
        let arrow = || " -> ".fg(Color::DarkGray);
        let teacher =
            |baseline: String| Line::from(vec![Span::raw("      teacher"), arrow(), baseline.fg(Color::DarkGray)]);
        let policy = Line::from(vec![reward, Span::raw(query), arrow(), policy.bold()]);
        std::iter::once(policy).chain(baseline.map(teacher))
    };
    if episodes.is_empty() {
        return;
    }
    let mut lines = vec![Line::from("newest episodes".bold())];
    lines.extend(episodes.iter().flat_map(line));
    frame.render_widget(Paragraph::new(lines), area);
}
