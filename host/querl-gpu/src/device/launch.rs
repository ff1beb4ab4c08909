//! Parameters of a kernel, and how many blocks a launch takes.

use std::ffi::c_void;

/// One parameter. The driver reads as many of the bytes as the kernel declares, and integers of the card are little-endian: a
/// `usize` serves for `int` and for `long long`.
pub(super) struct Arg(u64);

impl Arg {
    pub(super) fn pointer(address: u64) -> Self {
        Self(address)
    }

    /// What a kernel takes for "not there".
    pub(super) fn null() -> Self {
        Self(0)
    }

    pub(super) fn address(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }
}

impl From<usize> for Arg {
    fn from(value: usize) -> Self {
        Self(value as u64)
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Self {
        Self(u64::from(value))
    }
}

impl From<u64> for Arg {
    fn from(value: u64) -> Self {
        Self(value)
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self(u64::from(value.to_bits()))
    }
}

impl From<f64> for Arg {
    fn from(value: f64) -> Self {
        Self(value.to_bits())
    }
}

/// Threads of a block where nothing asks for another number.
pub(super) const THREADS: usize = 256;

/// Values that a thread of an element-wise kernel takes at a time: 16 bytes of bf16.
const VALUES_PER_THREAD: usize = 8;

/// Blocks of an element-wise kernel over `n` values: each thread goes on in steps of the grid, so no more than fill the card.
pub(super) fn blocks_for(n: usize, n_processors: usize) -> usize {
    n.div_ceil(THREADS * VALUES_PER_THREAD).min(n_processors * 16)
}

#[cfg(test)]
thread_local! {
    static LAUNCHES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Remembers a kernel or a product that this thread asks for.
#[cfg(test)]
pub(super) fn count() {
    LAUNCHES.set(LAUNCHES.get() + 1);
}

/// Kernels and products that this thread has asked for; what a graph launches is not counted.
#[cfg(test)]
pub(crate) fn n_launches() -> usize {
    LAUNCHES.get()
}
