//! Products of few rows with a frozen weight as it is stored: in decoding they wait for the weight's bytes alone.

use super::elementwise::{Element, same_length};
use super::gpu::Gpu;
use super::launch::Arg;
use super::packed::PackedFormat;
use super::product::{Matrix, Scale};
use super::weight::{DeviceWeight, Stored};
use candle_core::cuda_backend::cudarc::driver::DevicePtrMut;
use candle_core::{Result, bail};

/// Rows of a block (`2 * ROW_TILE` in `cuda/few_rows.cuh`); with more the weight is read again, by another block.
const ROWS_OF_BLOCK: usize = 16;

/// Outputs of a block (`BLOCK_OUTPUTS`).
const OUTPUTS_OF_BLOCK: usize = 32;

/// Up to so many rows a packed weight is read directly, in at most four blocks for the same outputs: widening it first reads it
/// once and moves four bytes a weight besides. Counted, and not measured on a card.
const MOST_OF_PACKED: usize = 4 * ROWS_OF_BLOCK;

/// Up to so many rows a weight in bf16 is: it is read once either way, and cuBLAS's tiles are made for more rows.
const MOST_OF_BF16: usize = ROWS_OF_BLOCK;

/// For tests that compare products of few rows with products of many, bit by bit: this thread's are all done by cuBLAS, of which the
/// simulated one sums in one order.
#[cfg(test)]
pub(crate) fn by_cublas_alone<R>(f: impl FnOnce() -> R) -> R {
    BY_CUBLAS_ALONE.set(true);
    let found = f();
    BY_CUBLAS_ALONE.set(false);
    found
}

#[cfg(test)]
thread_local! {
    static BY_CUBLAS_ALONE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

impl DeviceWeight {
    pub(super) fn most_few_rows(&self) -> usize {
        #[cfg(test)]
        if BY_CUBLAS_ALONE.get() {
            return 0;
        }
        match self.stored() {
            Stored::Bf16(_) => MOST_OF_BF16,
            Stored::Packed(_) => MOST_OF_PACKED,
        }
    }

    /// See [`DeviceWeight::multiply`]; for any number of rows.
    pub(super) fn multiply_few_rows<T: Element>(
        &self,
        gpu: &Gpu,
        x: &Matrix<'_>,
        out: &mut impl DevicePtrMut<T>,
        scale: Scale,
    ) -> Result<()> {
        let ((n_out, n_in), n_rows) = (self.dims(), x.n_rows());
        if x.n_columns() != n_in {
            bail!("few_rows: rows of {} values for {n_in} inputs", x.n_columns());
        }
        same_length("few_rows", out.len(), n_rows * n_out)?;
        let (weight, scales, line, names) = match self.stored() {
            Stored::Bf16(values) => {
                (gpu.input(values), Arg::null(), n_in * 2, ["few_rows_bf16_f32", "few_rows_bf16_bf16"])
            }
            Stored::Packed(rows) => {
                let names = match rows.format {
                    PackedFormat::Int8 => ["few_rows_int8_f32", "few_rows_int8_bf16"],
                    PackedFormat::Nf4 => ["few_rows_nf4_f32", "few_rows_nf4_bf16"],
                    PackedFormat::Fp8 => ["few_rows_fp8_f32", "few_rows_fp8_bf16"],
                };
                (gpu.input(&rows.codes), gpu.input(&rows.scales), rows.format.line(n_in), names)
            }
        };
        let mut args = [
            weight,
            scales,
            x.input(),
            gpu.output(out),
            n_rows.into(),
            n_out.into(),
            n_in.into(),
            line.into(),
            scale.alpha.into(),
            scale.keep.into(),
        ];
        let grid = [n_out.div_ceil(OUTPUTS_OF_BLOCK), n_rows.div_ceil(ROWS_OF_BLOCK), 1];
        // SAFETY: as `cuda/few_rows.cuh` declares it; lengths were held against the shapes.
        unsafe { gpu.launch(T::kernel(names), grid, 256, 0, &mut args) }
    }
}
