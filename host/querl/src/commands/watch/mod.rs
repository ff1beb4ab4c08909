//! `querl watch DIR`: a live run in the terminal, from what its folder holds. Reads only: it can be started and left at will.

mod snapshot;
mod view;

use anyhow::Context;
use clap::Args;
use querl_core::run_dir::RunDir;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::{DefaultTerminal, Terminal};
use snapshot::Snapshot;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

/// Options of `querl watch`.
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// The run folder
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Print one picture to stdout and end
    #[arg(long)]
    once: bool,
    /// Width of that picture in columns
    #[arg(long, value_name = "COLUMNS", default_value_t = 110, value_parser = clap::value_parser!(u16).range(60..=300))]
    width: u16,
}

/// Time between two looks at the folder: training steps take longer.
const REFRESH: Duration = Duration::from_millis(1000);

/// Rows of a picture printed with `--once`.
const HEIGHT: u16 = 40;

/// Shows the run until the user presses `q`; without a terminal, or with `--once`, one picture.
pub fn run(args: &WatchArgs) -> anyhow::Result<()> {
    let dir = RunDir::new(&args.dir);
    let first = Snapshot::read(&dir)?;
    if args.once || !std::io::stdout().is_terminal() {
        let text = picture(&first, args.width)?;
        return std::io::stdout().write_all(text.as_bytes()).context("stdout");
    }
    let mut terminal = ratatui::try_init().context("the terminal cannot be used; try --once")?;
    let watched = watch(&mut terminal, &dir, first);
    ratatui::restore();
    watched
}

fn watch(terminal: &mut DefaultTerminal, dir: &RunDir, mut snapshot: Snapshot) -> anyhow::Result<()> {
    loop {
        terminal.draw(|frame| view::draw(&snapshot, frame)).context("the terminal cannot be used")?;
        if wants_to_leave()? {
            return Ok(());
        }
        snapshot = Snapshot::read(dir)?;
    }
}

/// Waits for the next refresh; true if the user asked to leave meanwhile. A change of the window's size ends the wait.
fn wants_to_leave() -> anyhow::Result<bool> {
    if !event::poll(REFRESH).context("the terminal cannot be used")? {
        return Ok(false);
    }
    Ok(match event::read().context("the terminal cannot be used")? {
        Event::Key(key) if key.kind == KeyEventKind::Press => {
            let interrupts = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
            interrupts || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
        }
        _ => false,
    })
}

fn picture(snapshot: &Snapshot, width: u16) -> anyhow::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, HEIGHT))?;
    terminal.draw(|frame| view::draw(snapshot, frame))?;
    Ok(text_of(terminal.backend().buffer()))
}

/// The characters of a picture, without the empty lines at its end.
fn text_of(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width);
    let mut text = String::new();
    for row in buffer.content.chunks(width) {
        let mut line = String::new();
        let mut skip = 0;
        for cell in row {
            // A wide character covers the cell behind it, which holds a blank of its own.
            if skip > 0 {
                skip -= 1;
                continue;
            }
            skip = unicode_width::UnicodeWidthStr::width(cell.symbol()).saturating_sub(1);
            line.push_str(cell.symbol());
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    format!("{}\n", text.trim_end())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;

    /// A run folder with ten steps of reinforcement learning; the policy falls silent on the way.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let line = |step: u32| {
            let (reward, entropy) = (f64::from(step) * 0.05, 2.0 / f64::from(step * step * step));
            format!(
                "{{\"stage\":\"rl\",\"step\":{step},\"avg_reward\":{reward},\"actor/entropy\":{entropy},\"timing_s/gen\":1.5,\
                 \"timing_s/update\":0.5,\"timing_s/step\":2.0,\"perf/throughput\":320.0}}\n"
            )
        };
        fs::write(
            folder.path().join("metrics.jsonl"),
            (1..=10).map(line).collect::<String>() + "{\"stage\":\"rl\",\"st",
        )
        .unwrap();
        folder
    }

    #[test]
    fn a_picture_shows_step_figures_timing_and_warnings() {
        let folder = folder();
        let snapshot = Snapshot::read(&RunDir::new(folder.path())).unwrap();
        let text = picture(&snapshot, 110).unwrap();
        for expected in ["rl", "step 10", "reward", "0.5", "gen", "update", "2.0 s a step", "the entropy has collapsed"]
        {
            assert!(text.contains(expected), "no {expected:?} in\n{text}");
        }
        assert!(text.lines().all(|line| unicode_width::UnicodeWidthStr::width(line) <= 110));
    }

    #[test]
    fn a_folder_without_a_run_is_one_sentence() {
        let folder = tempfile::tempdir().unwrap();
        let error = Snapshot::read(&RunDir::new(folder.path())).err().unwrap().to_string();
        assert!(error.contains("holds no run"), "{error}");
    }
}
