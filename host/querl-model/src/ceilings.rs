//! Measured peak throughput of a device: products of large matrices, and copies.

use crate::kernels::{FrozenWeight, Weight, linear};
use crate::{ComputeDevice, ModelError};
use candle_core::{Device, Result, Tensor};
use querl_core::config::BaseDtype;
use std::time::Instant;

/// Timings of an operation that was called several times.
#[derive(Debug, Clone, PartialEq)]
pub struct Repeated {
    /// Rows and columns of the square matrices, or number of bytes copied.
    pub size: usize,
    /// Wall-clock seconds of each call.
    pub seconds: Vec<f64>,
}

const REPEATS: usize = 10;

/// Seconds. Sizes are doubled until one call takes this long, because overhead dominates shorter calls.
const LONG: f64 = 2e-3;

/// Rows and columns of the largest matrices: 2^40 operations, more than a millisecond on any GPU.
const LARGEST_MATRIX: usize = 8192;

/// The largest copy, beyond any cache.
const LARGEST_COPY: usize = 1 << 30;

/// Times products of square matrices (2 `size`^3 operations): on a GPU in bf16 by cuBLAS, on the CPU in f32 by the kernels of this crate.
///
/// # Errors
/// The device cannot compute, or has no memory left.
pub fn matrix_products(place: &ComputeDevice) -> std::result::Result<Repeated, ModelError> {
    growing(256, LARGEST_MATRIX, |size| match place {
        ComputeDevice::Cpu => products_on_cpu(size),
        ComputeDevice::Accelerator(accelerator) => timed(accelerator.matrix_product(size)?),
    })
}

/// Times copies within the device's memory; each copy reads and writes `size` bytes.
///
/// # Errors
/// As [`matrix_products`].
pub fn copies(place: &ComputeDevice) -> std::result::Result<Repeated, ModelError> {
    growing(1 << 20, LARGEST_COPY, |size| match place {
        ComputeDevice::Cpu => copies_on_cpu(size),
        ComputeDevice::Accelerator(accelerator) => timed(accelerator.memory_copy(size)?),
    })
}

fn growing(
    first: usize,
    largest: usize,
    call: impl Fn(usize) -> Result<Vec<f64>>,
) -> std::result::Result<Repeated, ModelError> {
    let mut size = first;
    loop {
        let seconds = call(size)?;
        let shortest = seconds.iter().copied().fold(f64::INFINITY, f64::min);
        if size >= largest || shortest >= LONG {
            return Ok(Repeated { size, seconds });
        }
        size *= 2;
    }
}

fn timed(mut work: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    let mut seconds = Vec::with_capacity(REPEATS);
    // The first call loads code and allocates memory.
    for index in 0..=REPEATS {
        let started = Instant::now();
        work()?;
        if index > 0 {
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    Ok(seconds)
}

/// Time per call of a product of activations and a frozen weight, as in a layer.
fn products_on_cpu(n: usize) -> Result<Vec<f64>> {
    let values: Vec<f32> = (0..n * n).map(|index| (index % 17) as f32 / 16.0 - 0.5).collect();
    let made = Tensor::from_vec(values, (n, n), &Device::Cpu)?;
    let weight = Weight::Frozen(FrozenWeight::pack(&made, BaseDtype::F32)?);
    timed(|| linear(&made, &weight, None).map(drop))
}

/// Time per call of a memory copy, split over all cores.
fn copies_on_cpu(n_bytes: usize) -> Result<Vec<f64>> {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (from, mut to) = (vec![1u8; n_bytes], vec![0u8; n_bytes]);
    let part = n_bytes.div_ceil(n_threads);
    timed(|| {
        std::thread::scope(|scope| {
            for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
                scope.spawn(|| to.copy_from_slice(from));
            }
        });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_grow_until_a_call_is_long_or_the_largest() {
        let of = |long_from| growing(2, 64, |size| Ok(vec![if size >= long_from { 1.0 } else { 1e-6 }])).unwrap().size;
        assert_eq!((of(1), of(16), of(1000)), (2, 16, 64));
    }

    #[test]
    fn the_cpu_multiplies_and_copies() {
        for found in [matrix_products(&ComputeDevice::Cpu).unwrap(), copies(&ComputeDevice::Cpu).unwrap()] {
            assert!(found.seconds.len() == REPEATS && found.seconds.iter().all(|seconds| *seconds > 0.0), "{found:?}");
        }
    }
}
