//! Compares the GPU with the CPU: the same inputs, results within stated tolerances.
//!
//! Inputs are rounded to bf16 if the GPU needs bf16, so that only the arithmetic is compared. A tolerance has two parts: relative to each
//! value, and relative to the largest value. Results in bf16 have a relative rounding error of 2^-9; the error of sums of rounded values
//! depends on their largest term.

mod attention;
mod decode;
mod elementwise;
mod gpu;
mod linear;
mod ranks;
mod sampling;

use super::{CudaSlice, Gpu};
use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::OnceLock;

/// The first GPU, shared by all tests of a process.
fn gpu() -> &'static Gpu {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    GPU.get_or_init(|| {
        crate::install();
        Gpu::new(0).unwrap()
    })
}

fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

fn random(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.random_range(-2.0..2.0)).collect()
}

/// Random values that are exact in bf16.
fn rounded(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
    random(rng, n).into_iter().map(|x| bf16::from_f32(x).to_f32()).collect()
}

fn halves(values: &[f32]) -> CudaSlice<bf16> {
    let values: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    gpu().upload(&values).unwrap()
}

fn floats(values: &CudaSlice<bf16>) -> Vec<f32> {
    gpu().download(values).unwrap().into_iter().map(bf16::to_f32).collect()
}

/// Checks that every value is within `relative` of itself plus `absolute` of the largest value.
#[track_caller]
fn assert_close(what: &str, actual: &[f32], expected: &[f32], relative: f32, absolute: f32) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        let allowed = relative * e.abs() + absolute * largest;
        assert!((a - e).abs() <= allowed, "{what}: value {index} of {} is {a}; expected {e}", actual.len());
    }
}

/// A result that was rounded to bf16 once.
#[track_caller]
fn assert_rounded(what: &str, actual: &CudaSlice<bf16>, expected: &[f32]) {
    assert_close(what, &floats(actual), expected, 1.0 / 256.0, 1e-5);
}

/// Checks that two calls give the same bits, so that results do not depend on the order of thread blocks.
#[track_caller]
fn assert_repeatable<T: PartialEq + std::fmt::Debug>(what: &str, call: impl Fn() -> Vec<T>) {
    assert_eq!(call(), call(), "{what}");
}
