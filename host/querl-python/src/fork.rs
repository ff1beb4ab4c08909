//! Values that each process opens once, so that they survive a fork.

use pyo3::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};

/// A value with threads of its own, which do not survive a fork: a child process opens the value again, or drops it without using
/// it.
pub(crate) struct PerProcess<T: ?Sized>(Mutex<Held<T>>);

struct Held<T: ?Sized> {
    process: u32,
    /// `None` only within `Drop`.
    value: Option<Arc<T>>,
}

impl<T: ?Sized> PerProcess<T> {
    pub(crate) fn new(value: Arc<T>) -> Self {
        Self(Mutex::new(Held::new(value)))
    }

    /// Opens the value in this process if it is not open yet, and returns it. The lock is held only together with the GIL, as a
    /// fork from Python is, so that no child finds it locked by a thread that it does not have. For this reason `open` keeps the
    /// GIL, unlike a constructor: it is called once in a forked process.
    pub(crate) fn get(&self, _: Python<'_>, open: impl FnOnce() -> PyResult<Arc<T>>) -> PyResult<Arc<T>> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if held.is_inherited() {
            let opened = Held::new(open()?);
            std::mem::replace(&mut *held, opened).forget();
        }
        Ok(held.value.clone().expect("the value is taken only in drop"))
    }
}

impl<T: ?Sized> Held<T> {
    fn new(value: Arc<T>) -> Self {
        Self { process: std::process::id(), value: Some(value) }
    }

    fn is_inherited(&self) -> bool {
        self.process != std::process::id()
    }

    /// Keeps the value's memory: its destructor would wait for threads that are not there.
    fn forget(mut self) {
        std::mem::forget(self.value.take());
    }
}

impl<T: ?Sized> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let held = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if held.is_inherited() {
            std::mem::forget(held.value.take());
        }
    }
}
