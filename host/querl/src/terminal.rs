//! Output on stderr: progress bars on a terminal, plain lines elsewhere, and log lines that do not break the bars.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use querl_core::ports::{Progress, Reporter};
use querl_pipeline::interrupt;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    Quiet,
    Normal,
    Verbose,
    Debug,
}

static VERBOSITY: AtomicU8 = AtomicU8::new(Verbosity::Normal as u8);

/// True once this process is a server that accepts connections.
static SERVES: AtomicBool = AtomicBool::new(false);

static BARS: LazyLock<MultiProgress> = LazyLock::new(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr()));

/// Sets the verbosity and installs the log subscriber. `QUERL_LOG` replaces the log filter, in the syntax of `tracing-subscriber`.
pub fn init(verbosity: Verbosity) {
    VERBOSITY.store(verbosity as u8, Ordering::Relaxed);
    let default = match verbosity {
        Verbosity::Quiet => "error",
        // At level info: builds of plugins, which take seconds to minutes; the summary of the plan at the start of a run; and what a server
        // loads and removes.
        Verbosity::Normal => "warn,querl_plugin::source=info,querl_pipeline::plan=info,querl_serve=info",
        Verbosity::Verbose => {
            "warn,querl=info,querl_pipeline=info,querl_serve=info,querl_style=info,querl_data=info,querl_plugin=info,querl_model=info,querl_train=info"
        }
        Verbosity::Debug => {
            "info,querl=debug,querl_pipeline=debug,querl_serve=debug,querl_style=debug,querl_data=debug,querl_plugin=debug,querl_model=debug,querl_train=debug"
        }
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("QUERL_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    let ansi = std::io::stderr().is_terminal();
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| LogWriter).with_ansi(ansi);
    // `log_internal_errors(false)`: a log line that cannot be written is not reported, because that would panic if stderr is closed.
    subscriber.without_time().with_target(false).log_internal_errors(false).init();
}

/// From now on, log lines begin with the time. For servers.
pub fn begin_server_log() {
    SERVES.store(true, Ordering::Relaxed);
}

pub fn is_server() -> bool {
    SERVES.load(Ordering::Relaxed)
}

/// The current time and a space for a server, else an empty string.
fn log_time() -> String {
    match is_server() {
        false => String::new(),
        true => {
            let mut time = String::new();
            // Writing to a string does not fail.
            let _ = SystemTime.format_time(&mut Writer::new(&mut time));
            time + " "
        }
    }
}

pub fn print(text: &str) {
    if VERBOSITY.load(Ordering::Relaxed) > Verbosity::Quiet as u8 {
        BARS.suspend(|| print_error(&(log_time() + text)));
    }
}

/// Shows what runs now, on a terminal only. The next [`print`] replaces the line.
pub fn show_running(text: &str) {
    if VERBOSITY.load(Ordering::Relaxed) > Verbosity::Quiet as u8 && std::io::stderr().is_terminal() {
        // The cursor returns to the start of the line, and `print` overwrites it with a longer one.
        let _ = write!(std::io::stderr(), "{text} ...\r");
    }
}

/// Prints a line on stderr. Errors, such as a closed terminal or pipe or a full disk, are ignored; `eprintln!` would panic.
pub fn print_error(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

pub fn report_new_form(old: &str, new: &str) {
    print(&format!("note: `{old}` is now `{new}`; the old form still works"));
}

pub struct Terminal;

impl Reporter for Terminal {
    fn message(&self, text: &str) {
        print(text);
    }

    fn stage(&self, name: &'static str) -> Box<dyn Progress> {
        Box::new(StageProgress::start(name))
    }
}

/// Writer of log lines to stderr that hides the progress bars meanwhile.
struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // The subscriber writes complete lines.
        let line = [log_time().as_bytes(), bytes].concat();
        BARS.suspend(|| std::io::stderr().write_all(&line))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}

pub struct StageProgress {
    stage: &'static str,
    how: How,
}

enum How {
    Bar(ProgressBar),
    Lines(Mutex<LastLine>),
    Nothing,
}

struct LastLine {
    at: Instant,
    n_done: u64,
}

/// Minimum interval between progress lines if stderr is not a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

impl StageProgress {
    pub fn start(stage: &'static str) -> Self {
        let how = if VERBOSITY.load(Ordering::Relaxed) == Verbosity::Quiet as u8 {
            How::Nothing
        } else if std::io::stderr().is_terminal() {
            let bar = BARS.add(ProgressBar::no_length());
            bar.set_style(bar_style());
            bar.set_prefix(stage);
            bar.enable_steady_tick(Duration::from_millis(200));
            How::Bar(bar)
        } else {
            How::Lines(Mutex::new(LastLine { at: Instant::now(), n_done: 0 }))
        };
        Self { stage, how }
    }

    fn print_now_and_then(&self, last: &Mutex<LastLine>, n_done: u64, n_total: u64, note: &str) {
        let mut last = last.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // A stage starts counting again for each system that it evaluates.
        last.n_done = last.n_done.min(n_done);
        let is_end = n_done == n_total && last.n_done != n_done;
        if last.at.elapsed() >= LINE_EVERY || is_end {
            *last = LastLine { at: Instant::now(), n_done };
            print(format!("{}: {n_done}/{n_total} {note}", self.stage).trim_end());
        }
    }
}

fn bar_style() -> ProgressStyle {
    ProgressStyle::with_template("{prefix:>8} {wide_bar} {pos}/{len} {elapsed} (left {eta}) {msg}")
        .expect("the template is fixed and valid")
}

impl Progress for StageProgress {
    fn update(&self, n_done: u64, n_total: u64, note: &str) {
        match &self.how {
            How::Bar(bar) => {
                let is_first = bar.length().is_none();
                bar.set_length(n_total);
                bar.set_position(n_done);
                bar.set_message(note.to_owned());
                if is_first {
                    // Steps of an earlier process must not count for the speed of this one.
                    bar.reset_eta();
                }
            }
            How::Lines(last) => self.print_now_and_then(last, n_done, n_total, note),
            How::Nothing => {}
        }
    }

    fn line(&self, text: &str) {
        print(&format!("{}: {text}", self.stage));
    }

    fn is_stopped(&self) -> bool {
        interrupt::flag().load(Ordering::Relaxed)
    }
}

impl Drop for StageProgress {
    fn drop(&mut self) {
        if let How::Bar(bar) = &self.how {
            bar.finish_and_clear();
            BARS.remove(bar);
        }
    }
}
