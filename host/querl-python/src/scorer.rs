//! The Python class that scores with the environment of a configuration.

use crate::convert::records;
use crate::errors::{failed, failed_with_causes, of_environment};
use crate::fork::PerProcess;
use crate::results;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use querl_core::config::{Config, Overrides};
use querl_core::ports::Silent;
use querl_core::scoring::{RewardRequest, RewardService};
use querl_pipeline::RewardEnvironment;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The environment of a configuration or of a run: parses responses, retrieves passages for the rewrites, has them judged, and
/// scores them as in training.
#[pyclass(frozen, module = "querl")]
pub(crate) struct Scorer {
    path: PathBuf,
    overrides: Vec<String>,
    digests: Vec<String>,
    uses_local_models: bool,
    environment: PerProcess<RewardEnvironment>,
}

/// The arguments of the constructor: path, overrides and digests of the plugins.
type Arguments = (PathBuf, Vec<String>, Vec<String>);

#[pymethods]
impl Scorer {
    #[new]
    #[pyo3(signature = (config, overrides=None, digests=None))]
    fn new(
        py: Python<'_>,
        config: PathBuf,
        overrides: Option<Vec<String>>,
        digests: Option<Vec<String>>,
    ) -> PyResult<Self> {
        let (path, overrides) = (std::path::absolute(&config)?, overrides.unwrap_or_default());
        let environment = py.detach(|| open(&path, &overrides, digests.as_deref()))?;
        let (digests, uses_local_models) = (environment.plugin_digests(), environment.uses_local_models());
        Ok(Self { path, overrides, digests, uses_local_models, environment: PerProcess::new(environment) })
    }

    /// One `Score` or `Rejection` for each request, in order. Requests of one `group_id` must be in one call where a reward scores groups.
    fn score(&self, py: Python<'_>, requests: &Bound<'_, PyList>) -> PyResult<Vec<Py<PyAny>>> {
        let requests: Vec<RewardRequest> = records(requests, "requests", |_, _| Ok(()))?;
        let environment = self.environment(py)?;
        let records = py.detach(|| environment.score(&requests)).map_err(|error| of_environment(&error))?;
        records.into_iter().map(|record| results::outcome(py, record.outcome, Some(record.episode))).collect()
    }

    /// Lowest and highest total of the weighted rewards.
    #[getter]
    fn range(&self, py: Python<'_>) -> PyResult<(f64, f64)> {
        let range = self.environment(py)?.range();
        Ok((range.min, range.max))
    }

    /// `tenant` of the configuration.
    #[getter]
    fn tenant(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.environment(py)?.config().tenant.clone())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyAny>, Arguments) {
        let Self { path, overrides, digests, .. } = slf.get();
        (slf.get_type().into_any(), (path.clone(), overrides.clone(), digests.clone()))
    }

    fn __repr__(&self) -> String {
        format!("Scorer({})", self.path.display())
    }
}

/// rayon's pool is one of the process, and is not started again in a child.
const LOCAL_MODELS: &str = "the configuration has local models, whose threads do not survive a fork; start workers with the method `spawn` or `forkserver`";

impl Scorer {
    /// # Errors
    /// After a fork, in addition to those of [`open`]: the configuration has local models.
    fn environment(&self, py: Python<'_>) -> PyResult<Arc<RewardEnvironment>> {
        self.environment.get(py, || match self.uses_local_models {
            true => Err(failed(LOCAL_MODELS)),
            false => open(&self.path, &self.overrides, Some(&self.digests)),
        })
    }
}

/// # Errors
/// The environment cannot be opened, or its plugins are others than `digests`.
fn open(path: &Path, overrides: &[String], digests: Option<&[String]>) -> PyResult<Arc<RewardEnvironment>> {
    let (config, config_path) = read_config(path, overrides.to_vec())?;
    let environment = RewardEnvironment::open(config, &config_path, Arc::new(Silent));
    let environment = environment.map_err(|error| failed_with_causes(&error))?;
    let found = environment.plugin_digests();
    if let Some(expected) = digests.filter(|expected| *expected != found.as_slice()) {
        let (path, found, expected) = (path.display(), found.join(", "), expected.join(", "));
        let message = format!(
            "{path}: the digests of its plugins are {found}; expected {expected}, as where it was opened first"
        );
        return Err(PyValueError::new_err(message));
    }
    Ok(Arc::new(environment))
}

/// Reads the configuration in a file or of a run; returns it with the path of the file.
pub(crate) fn read_config(path: &Path, set: Vec<String>) -> PyResult<(Config, PathBuf)> {
    let overrides = Overrides { set, ..Overrides::default() };
    RewardEnvironment::read_config(path, &overrides).map_err(|error| failed_with_causes(&error))
}
