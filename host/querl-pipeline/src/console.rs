//! Where the pipeline reports to a person: lines and progress of stages. The library prints nothing itself; the program installs a
//! [`Console`], and without one everything is discarded.

use crate::interrupt;
use querl_core::ports::{Progress, Silent};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

/// Shows lines and progress, for example on a terminal.
pub trait Console: Send + Sync {
    /// Shows one line.
    fn say(&self, text: &str);

    /// Starts showing the progress of a stage; it ends when the result is dropped.
    fn start(&self, stage: &'static str) -> Box<dyn Progress>;
}

static CONSOLE: OnceLock<Box<dyn Console>> = OnceLock::new();

/// Sets the console of this process. Only the first call counts.
pub fn install(console: impl Console + 'static) {
    // An error means that a console is installed already.
    let _ = CONSOLE.set(Box::new(console));
}

/// Shows one line on the installed console.
pub fn say(text: &str) {
    if let Some(console) = CONSOLE.get() {
        console.say(text);
    }
}

/// Progress of one stage on the installed console; reports a requested stop as [`Progress::is_stopped`].
pub struct StageProgress(Box<dyn Progress>);

impl StageProgress {
    /// Starts showing `stage`.
    pub fn start(stage: &'static str) -> Self {
        Self(CONSOLE.get().map_or_else(|| Box::new(Silent) as Box<dyn Progress>, |console| console.start(stage)))
    }
}

impl Progress for StageProgress {
    fn update(&self, n_done: u64, n_total: u64, note: &str) {
        self.0.update(n_done, n_total, note);
    }

    fn line(&self, text: &str) {
        self.0.line(text);
    }

    fn is_stopped(&self) -> bool {
        interrupt::flag().load(Ordering::Relaxed)
    }
}
