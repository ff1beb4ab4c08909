//! Why a table, a recording, a lexicon or a whole stage could not be used. One row's failure is in its record instead.

use querl_core::fsx::ReadError;
use querl_core::ports::PluginFault;
use querl_core::records::CallFailure;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Once;

/// Why nothing came, in one sentence that names file, place, value and remedy.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file's content is not what it should be, or it cannot be read.
    #[error("{path}: {problem}")]
    File {
        /// Path of the file.
        path: String,
        /// Location, what was found, remedy.
        problem: String,
    },
    /// A file of JSON lines.
    #[error(transparent)]
    Lines(#[from] ReadError),
    /// A file could not be written.
    #[error("{path}: cannot be written: {source}")]
    Write {
        /// Path of the file.
        path: String,
        /// Cause.
        source: std::io::Error,
    },
    /// A setting that the chosen kind needs is absent or unusable.
    #[error("{key} {problem}")]
    Setting {
        /// Dotted configuration key.
        key: String,
        /// Location, what was found, remedy.
        problem: String,
    },
    /// A service refuses us, is down, or the budget is spent; rows done so far are kept.
    #[error("stopped, as every further call would fail too: {0}")]
    Service(CallFailure),
    /// A batch failed or its outcome is unknown; submitted batches stay in the state file.
    #[error("{problem}; {kept}")]
    Batch {
        /// Location, what was found, remedy.
        problem: String,
        /// What is saved, and the remedy.
        kept: String,
    },
    /// The first rows all failed alike, or the whole stage has no success; rows done so far are kept.
    #[error("none of {n_failed} row(s) tried succeeded; {n_alike} failed like this: {failure}")]
    NoSuccess {
        /// Rows tried.
        n_failed: usize,
        /// Rows that failed for the most common reason.
        n_alike: usize,
        /// The first such failure.
        failure: CallFailure,
    },
    /// Interrupted before all rows were done; finished rows are saved.
    #[error("interrupted; finished work is saved, run the same command to resume")]
    Interrupted,
    /// A plugin broke its contract.
    #[error(transparent)]
    Plugin(#[from] PluginFault),
    /// The groups cannot fill the splits.
    #[error(
        "{n_groups} group(s) of queries cannot fill {n_splits} splits; add queries or set the share of a split to 0"
    )]
    TooFewGroups {
        /// Groups in the table.
        n_groups: usize,
        /// Splits with a share above 0.
        n_splits: usize,
    },
}

impl DataError {
    pub(crate) fn file(path: &Path, problem: impl std::fmt::Display) -> Self {
        Self::File { path: path.display().to_string(), problem: problem.to_string() }
    }

    pub(crate) fn write(path: &Path, source: std::io::Error) -> Self {
        Self::Write { path: path.display().to_string(), source }
    }

    pub(crate) fn setting(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Setting { key: key.into(), problem: problem.into() }
    }
}

thread_local! {
    static IS_SILENT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`; a panic in it is a result, and nothing is printed of it. After one, nothing that `work` was changing may be used.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> std::thread::Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !IS_SILENT.get() {
                before(panic);
            }
        }));
    });
    let was_silent = IS_SILENT.replace(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    IS_SILENT.set(was_silent);
    done
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("it gives no reason").replace('\n', " ")
}
