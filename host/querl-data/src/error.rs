//! Errors of files, settings and stages. The failure of a single row is not an error, but part of its record.

use querl_core::fsx::{ReadError, exhaustion, io_problem};
use querl_core::ports::PluginFault;
use querl_core::records::CallFailure;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Once;

/// Errors with file, location, value and remedy. A field `problem` is the end of a sentence that begins with the file or key.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DataError {
    #[error("{path}: {problem}")]
    File { path: String, problem: String },
    #[error(transparent)]
    Lines(#[from] ReadError),
    #[error("{path}: cannot be written: {}", io_problem(source))]
    Write { path: String, source: std::io::Error },
    /// A setting is missing or invalid; `key` is its dotted configuration key.
    #[error("{key} {problem}")]
    Setting { key: String, problem: String },
    /// A service fails in a way that every further call would too; finished rows are saved.
    #[error("stopped, as every further call would fail too: {0}")]
    Service(CallFailure),
    /// A batch failed or its status is unknown; submitted batches stay in the state file.
    #[error("{problem}; {remedy}")]
    Batch { problem: String, remedy: String },
    /// The first rows all failed with the same kind of failure, or no row of the stage succeeded; `failure` is the most common one.
    #[error("none of {n_failed} row(s) tried succeeded; {n_alike} failed like this: {failure}")]
    NoSuccess { n_failed: usize, n_alike: usize, failure: CallFailure },
    #[error("interrupted; finished work is saved, run the same command to resume")]
    Interrupted,
    #[error(transparent)]
    Plugin(#[from] PluginFault),
    #[error(
        "{n_groups} group(s) of queries cannot fill {n_splits} splits; add queries or set the share of a split to 0"
    )]
    TooFewGroups { n_groups: usize, n_splits: usize },
}

impl DataError {
    pub(crate) fn file(path: &Path, problem: impl std::fmt::Display) -> Self {
        Self::File { path: path.display().to_string(), problem: problem.to_string() }
    }

    /// An error of a line, counted from 1.
    pub(crate) fn line(path: &Path, line: usize, problem: String) -> Self {
        Self::File { path: format!("{}:{line}", path.display()), problem }
    }

    pub(crate) fn read(path: &Path, source: std::io::Error) -> Self {
        Self::Lines(ReadError::Io { path: path.display().to_string(), source })
    }

    /// `otherwise`, unless the cause of `error` is that the machine lacks a resource, which has a remedy of its own.
    pub(crate) fn reading(
        path: &Path,
        error: &(dyn std::error::Error + 'static),
        otherwise: impl FnOnce() -> Self,
    ) -> Self {
        exhaustion(error).map_or_else(otherwise, |source| Self::read(path, source))
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

/// Runs `work` and returns a panic as an error without printing it. After a panic, data that `work` was changing must not be used.
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
