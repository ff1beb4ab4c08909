//! Python classes for single plugins, opened without a configuration.

use crate::convert::{argument, records, to_python};
use crate::errors::{failed, failed_with_causes, fault};
use crate::fork::PerProcess;
use crate::results;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use querl_core::config::PluginLimits;
use querl_core::episodes::complete_and_check;
use querl_core::ports::{self, InputUse, PromptInput, PromptTask, Prompts, RewardModel};
use querl_core::records::{Context, Dialogue, Episode, Sample};
use querl_pipeline::plugins::open_host;
use querl_plugin::{Plugin, PluginPort, PluginSettings, SourceFolders};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// What opens a plugin again: in another process, and after a fork.
struct Origin {
    path: PathBuf,
    settings: PluginSettings,
    limits: PluginLimits,
    trusted_keys: Vec<String>,
}

/// A plugin of one kind, open in this process.
struct Opened<P: ?Sized> {
    origin: Origin,
    name: String,
    version: String,
    digest: String,
    port: PerProcess<P>,
}

/// The arguments of the constructor: path, settings, limits, trusted keys and digest.
type Arguments = (PathBuf, Py<PyAny>, Py<PyAny>, Vec<String>, String);

impl Origin {
    fn new(
        path: PathBuf,
        settings: Option<&Bound<'_, PyAny>>,
        limits: Option<&Bound<'_, PyAny>>,
        trusted_keys: Option<Vec<String>>,
    ) -> PyResult<Self> {
        Ok(Self {
            // A worker may have another working directory.
            path: std::path::absolute(&path)?,
            settings: argument(settings, "settings")?,
            limits: argument(limits, "limits")?,
            trusted_keys: trusted_keys.unwrap_or_default(),
        })
    }

    fn open<P: ?Sized>(&self, digest: Option<&str>, port: fn() -> PluginPort<P>) -> PyResult<(Plugin, Arc<P>)> {
        let host = open_host(&self.limits, &self.trusted_keys, SourceFolders::Build);
        let host = host.map_err(|error| failed_with_causes(&error))?;
        let plugin = host.load(&self.path).map_err(failed)?;
        if let Some(expected) = digest.filter(|expected| *expected != plugin.digest()) {
            let (path, found) = (self.path.display(), plugin.digest());
            let message =
                format!("{path}: the plugin's digest is {found}; expected {expected}, as where it was opened first");
            return Err(PyValueError::new_err(message));
        }
        let port = host.open(&plugin, &self.settings, port()).map_err(failed)?;
        Ok((plugin, Arc::from(port)))
    }
}

impl<P: ?Sized> Opened<P> {
    fn new(origin: Origin, digest: Option<&str>, port: fn() -> PluginPort<P>) -> PyResult<Self> {
        let (plugin, port) = origin.open(digest, port)?;
        let (name, version, digest) = (plugin.id().to_owned(), plugin.version().to_owned(), plugin.digest().to_owned());
        Ok(Self { origin, name, version, digest, port: PerProcess::new(port) })
    }

    fn port(&self, py: Python<'_>, port: fn() -> PluginPort<P>) -> PyResult<Arc<P>> {
        self.port.get(py, || Ok(self.origin.open(Some(&self.digest), port)?.1))
    }

    fn arguments(&self, py: Python<'_>) -> PyResult<Arguments> {
        let Origin { path, settings, limits, trusted_keys } = &self.origin;
        let (settings, limits) = (to_python(py, settings)?, to_python(py, limits)?);
        Ok((path.clone(), settings, limits, trusted_keys.clone(), self.digest.clone()))
    }
}

/// The constructor, the properties and pickling of a class over one port.
macro_rules! plugin_class {
    ($(#[$meta:meta])* $class:ident, $port:ty, $open:path, { $($methods:tt)* }) => {
        $(#[$meta])*
        #[pyclass(frozen, module = "querl")]
        pub(crate) struct $class(Opened<$port>);

        #[pymethods]
        impl $class {
            #[new]
            #[pyo3(signature = (path, settings=None, limits=None, trusted_keys=None, digest=None))]
            fn new(
                py: Python<'_>,
                path: PathBuf,
                settings: Option<&Bound<'_, PyAny>>,
                limits: Option<&Bound<'_, PyAny>>,
                trusted_keys: Option<Vec<String>>,
                digest: Option<&str>,
            ) -> PyResult<Self> {
                let origin = Origin::new(path, settings, limits, trusted_keys)?;
                // It may compile the plugin.
                Ok(Self(py.detach(|| Opened::new(origin, digest, $open))?))
            }

            /// Name of the plugin, from its manifest.
            #[getter]
            fn name(&self) -> &str {
                &self.0.name
            }

            #[getter]
            fn version(&self) -> &str {
                &self.0.version
            }

            /// SHA-256 digest of the bundle or component.
            #[getter]
            fn digest(&self) -> &str {
                &self.0.digest
            }

            fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Arguments)> {
                Ok((slf.get_type().into_any(), slf.get().0.arguments(slf.py())?))
            }

            fn __repr__(&self) -> String {
                format!("{}({} {})", stringify!($class), self.0.name, self.0.version)
            }

            $($methods)*
        }
    };
}

plugin_class!(
    /// A reward plugin: scores episodes.
    Reward, dyn RewardModel, PluginPort::reward, {
    /// One `Score` or `Rejection` for each episode, in order. Episodes of one `group_id` must be in one call where the plugin scores groups.
    fn score(&self, py: Python<'_>, episodes: &Bound<'_, PyList>) -> PyResult<Vec<Py<PyAny>>> {
        let episodes: Vec<Episode> = records(episodes, "episodes", complete_and_check)?;
        let reward = self.0.port(py, PluginPort::reward)?;
        let scores = py.detach(|| reward.score_batch(&episodes)).map_err(|error| fault(&error))?;
        scores.into_iter().map(|score| results::outcome(py, score, None)).collect()
    }

    /// Lowest and highest total that the plugin declares.
    #[getter]
    fn range(&self, py: Python<'_>) -> PyResult<(f64, f64)> {
        let range = self.0.port(py, PluginPort::reward)?.range();
        Ok((range.min, range.max))
    }

    /// The parts of an episode that the plugin reads, each `optional` or `required`.
    #[getter]
    fn inputs(&self, py: Python<'_>) -> PyResult<BTreeMap<&'static str, &'static str>> {
        let name = |used| if used == InputUse::Required { "required" } else { "optional" };
        Ok(self.0.port(py, PluginPort::reward)?.inputs().used().map(|(input, used)| (input, name(used))).collect())
    }
});

plugin_class!(
    /// A prompt plugin: the prompts of a tenant, and the parsing of responses.
    Prompt, dyn Prompts, PluginPort::prompts, {
    /// The messages of a prompt for a task: `teacher`, `policy` or `judge`.
    #[pyo3(signature = (task, query, user_profile=String::new(), history_summary=String::new(), rewrite=None))]
    fn messages(
        &self,
        py: Python<'_>,
        task: &str,
        query: &str,
        user_profile: String,
        history_summary: String,
        rewrite: Option<&str>,
    ) -> PyResult<Py<PyAny>> {
        let task = match task {
            "teacher" => PromptTask::TeacherRewrite,
            "policy" => PromptTask::PolicyRewrite,
            "judge" => PromptTask::Judge,
            other => return Err(PyValueError::new_err(format!("task is `{other}`; expected teacher, policy or judge"))),
        };
        let context = Context { user_profile, history_summary };
        let prompts = self.0.port(py, PluginPort::prompts)?;
        let messages = py.detach(|| prompts.messages(task, &PromptInput { query, context: &context, rewrite }));
        to_python(py, &messages.map_err(|error| fault(&error))?)
    }

    /// The rewrite in a model's response; `None` if the plugin finds none.
    fn parse_rewrite(&self, py: Python<'_>, text: &str) -> PyResult<Option<String>> {
        let prompts = self.0.port(py, PluginPort::prompts)?;
        let parsed = py.detach(|| prompts.parse_rewrite(text)).map_err(|error| fault(&error))?;
        Ok(parsed.ok())
    }
});

plugin_class!(
    /// A filter plugin: which rows are kept in the training data.
    Filter, dyn ports::Filter, PluginPort::filter, {
    /// `None` for each sample that is kept, a `Rejection` for each that is dropped.
    fn check(&self, py: Python<'_>, samples: &Bound<'_, PyList>) -> PyResult<Vec<Py<PyAny>>> {
        let samples: Vec<Sample> = records(samples, "samples", |_, _| Ok(()))?;
        let filter = self.0.port(py, PluginPort::filter)?;
        let verdicts = py.detach(|| filter.check_batch(&samples)).map_err(|error| fault(&error))?;
        verdicts.into_iter().map(|verdict| results::verdict(py, verdict)).collect()
    }
});

fn style_scorer() -> PluginPort<dyn ports::StyleScorer> {
    PluginPort::style_scorer(None)
}

plugin_class!(
    /// A style scorer plugin: scores the style of answers in dialogues.
    StyleScorer, dyn ports::StyleScorer, style_scorer, {
    /// One `Score` or `Rejection` for each dialogue, in order.
    fn score(&self, py: Python<'_>, dialogues: &Bound<'_, PyList>) -> PyResult<Vec<Py<PyAny>>> {
        let dialogues: Vec<Dialogue> = records(dialogues, "dialogues", |_, _| Ok(()))?;
        let scorer = self.0.port(py, style_scorer)?;
        let scores = py.detach(|| scorer.score_batch(&dialogues)).map_err(|error| fault(&error))?;
        scores.into_iter().map(|score| results::outcome(py, score, None)).collect()
    }
});
