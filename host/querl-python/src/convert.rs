//! Python objects to records and back.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyList, PyTuple};
use pythonize::{depythonize, pythonize};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// One record for each element; `check` completes and checks it, given its index.
///
/// # Errors
/// An element is not such a record, or has a number that is NaN or Inf: `name[index]`, and what is wrong with it.
pub(crate) fn records<T: DeserializeOwned>(
    list: &Bound<'_, PyList>,
    name: &str,
    check: impl Fn(&mut T, usize) -> Result<(), String>,
) -> PyResult<Vec<T>> {
    let record = |(index, item): (usize, Bound<'_, PyAny>)| {
        let wrong = |problem: String| format!("{name}[{index}]: {problem}");
        if !is_finite(&item, MAX_DEPTH) {
            return Err(PyValueError::new_err(wrong("a number is NaN or Inf, or it is too deep".into())));
        }
        let mut record: T = depythonize(&item).map_err(|error| PyTypeError::new_err(wrong(error.to_string())))?;
        check(&mut record, index).map_err(|problem| PyValueError::new_err(wrong(problem)))?;
        Ok(record)
    };
    list.iter().enumerate().map(record).collect()
}

/// Dictionaries and lists within each other: more than any record has. Python's may contain themselves.
const MAX_DEPTH: u32 = 32;

/// Whether no float in dictionaries, lists and tuples is NaN or Inf, which would become null where a record has any JSON.
fn is_finite(value: &Bound<'_, PyAny>, depth: u32) -> bool {
    let Some(deeper) = depth.checked_sub(1) else { return false };
    if let Ok(number) = value.cast::<PyFloat>() {
        number.value().is_finite()
    } else if let Ok(entries) = value.cast::<PyDict>() {
        entries.iter().all(|(_, entry)| is_finite(&entry, deeper))
    } else if let Ok(items) = value.cast::<PyList>() {
        items.iter().all(|item| is_finite(&item, deeper))
    } else if let Ok(items) = value.cast::<PyTuple>() {
        items.iter().all(|item| is_finite(&item, deeper))
    } else {
        true
    }
}

/// A value of a keyword argument, the default where it is `None`.
pub(crate) fn argument<T: DeserializeOwned + Default>(value: Option<&Bound<'_, PyAny>>, name: &str) -> PyResult<T> {
    let Some(value) = value.filter(|value| !value.is_none()) else { return Ok(T::default()) };
    depythonize(value).map_err(|error| PyTypeError::new_err(format!("{name}: {error}")))
}

pub(crate) fn to_python(py: Python<'_>, value: &impl Serialize) -> PyResult<Py<PyAny>> {
    Ok(pythonize(py, value)?.unbind())
}
