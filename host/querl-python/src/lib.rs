//! The Python module `querl._querl`: plugins and the environment of a configuration, for other training engines.
//!
//! Objects are frozen and can be used from any thread; the GIL is released while they are opened and while plugins and services work. After a
//! fork the first call opens plugins and services again, with the GIL held, since their threads do not survive it.

mod convert;
mod errors;
mod fork;
mod plugins;
mod results;
mod scorer;

use pyo3::prelude::*;
use std::path::PathBuf;

/// Names the `querl` program, which compiles plugins in a process of its own.
#[pyfunction]
fn set_program(path: PathBuf) {
    querl_pipeline::plugins::set_program(path);
}

/// A resolved configuration as a dictionary.
#[pyfunction]
#[pyo3(signature = (path, overrides=None))]
fn load_config(py: Python<'_>, path: PathBuf, overrides: Option<Vec<String>>) -> PyResult<Py<PyAny>> {
    convert::to_python(py, &scorer::read_config(&path, overrides.unwrap_or_default())?.0)
}

#[pymodule]
fn _querl(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<plugins::Reward>()?;
    module.add_class::<plugins::Prompt>()?;
    module.add_class::<plugins::Filter>()?;
    module.add_class::<plugins::StyleScorer>()?;
    module.add_class::<scorer::Scorer>()?;
    module.add_class::<results::Score>()?;
    module.add_class::<results::Rejection>()?;
    module.add("QuerlError", module.py().get_type::<errors::QuerlError>())?;
    module.add("PluginFault", module.py().get_type::<errors::PluginFault>())?;
    module.add_function(wrap_pyfunction!(set_program, module)?)?;
    module.add_function(wrap_pyfunction!(load_config, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
