//! Python exceptions.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use querl_core::ports::EnvironmentError;
use std::fmt::Display;

create_exception!(
    _querl,
    QuerlError,
    PyException,
    "A file, a setting or a service cannot be used; the message says which and why."
);
create_exception!(_querl, PluginFault, QuerlError, "A plugin broke its contract or exceeded a limit.");

/// A Python exception [`QuerlError`] with the text of `error`.
pub(crate) fn failed(error: impl Display) -> PyErr {
    QuerlError::new_err(error.to_string())
}

/// A Python exception [`QuerlError`] with the text of `error` and all of its causes.
pub(crate) fn failed_with_causes(error: &anyhow::Error) -> PyErr {
    QuerlError::new_err(format!("{error:#}"))
}

pub(crate) fn fault(fault: &querl_core::ports::PluginFault) -> PyErr {
    PluginFault::new_err(fault.to_string())
}

pub(crate) fn of_environment(error: &EnvironmentError) -> PyErr {
    match error {
        EnvironmentError::Plugin(plugin_fault) => fault(plugin_fault),
        EnvironmentError::Service(_) | EnvironmentError::Record(_) | EnvironmentError::Request(_) => failed(error),
    }
}
