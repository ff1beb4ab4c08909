//! Python classes of results: scores and rejections.

use crate::convert::to_python;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use querl_core::records::{self, Episode, RejectedBy, Verdict};

/// A score of an episode or a dialogue.
#[pyclass(frozen, module = "querl")]
pub(crate) struct Score {
    #[pyo3(get)]
    total: f64,
    components: Vec<records::RewardComponent>,
    episode: Option<Episode>,
}

#[pymethods]
impl Score {
    /// Named components of the score, in the plugin's order.
    #[getter]
    fn components<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let components = PyDict::new(py);
        self.components.iter().try_for_each(|part| components.set_item(&part.name, part.value))?;
        Ok(components)
    }

    /// The scored episode as a dictionary, with hits, judgements and style; `None` for a score of a single plugin.
    #[getter]
    fn episode(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.episode.as_ref().map(|episode| to_python(py, episode)).transpose()
    }

    fn __repr__(&self) -> String {
        format!("Score(total={}, {} components)", self.total, self.components.len())
    }
}

/// Why an episode or dialogue has no score. A rejection never becomes a number.
#[pyclass(frozen, module = "querl")]
pub(crate) struct Rejection {
    /// Code of the reason, which stays the same between versions, for counting.
    #[pyo3(get)]
    code: String,
    #[pyo3(get)]
    detail: String,
    /// Who rejected the item: `plugin` or `host`.
    #[pyo3(get)]
    by: &'static str,
    episode: Option<Episode>,
}

#[pymethods]
impl Rejection {
    #[getter]
    fn episode(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.episode.as_ref().map(|episode| to_python(py, episode)).transpose()
    }

    fn __repr__(&self) -> String {
        format!("Rejection(code={:?}, detail={:?}, by={:?})", self.code, self.detail, self.by)
    }
}

/// The result of one item as a Python object: a `Score` or a `Rejection`.
pub(crate) fn outcome(
    py: Python<'_>,
    outcome: Result<records::Reward, records::Rejection>,
    episode: Option<Episode>,
) -> PyResult<Py<PyAny>> {
    match outcome {
        Ok(records::Reward { total, components }) => Ok(Py::new(py, Score { total, components, episode })?.into_any()),
        Err(records::Rejection { code, detail, by }) => {
            let by = if by == RejectedBy::Host { "host" } else { "plugin" };
            Ok(Py::new(py, Rejection { code, detail, by, episode })?.into_any())
        }
    }
}

/// The verdict of a filter on a row as a Python object: a `Rejection`, or `None` for a row that is kept.
pub(crate) fn verdict(py: Python<'_>, verdict: Verdict) -> PyResult<Py<PyAny>> {
    match verdict {
        Verdict::Keep => Ok(py.None()),
        Verdict::Drop { code, detail } => {
            Ok(Py::new(py, Rejection { code, detail, by: "plugin", episode: None })?.into_any())
        }
    }
}
