//! Frozen weights on the GPU, in bf16 or packed: counterpart of [`querl_model::kernels::FrozenWeight`].
//!
//! Codes and scales of packed weights are those of the CPU.

use super::elementwise::{Element, same_length};
use super::gpu::{Gpu, UnpackBuffer};
use super::launch::{Arg, THREADS, blocks_for};
use super::matmul::{Matrix, Scale};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle_core::{Result, bail};
use half::bf16;
use querl_core::config::BaseDtype;
use querl_model::kernels::GROUP;
use std::ops::Range;
use std::sync::Arc;

/// A frozen weight `(out, in)`, row-major; clones share it.
#[derive(Clone)]
pub struct DeviceWeight {
    stored: Arc<Stored>,
    n_out: usize,
    n_in: usize,
}

pub(super) enum Stored {
    Bf16(CudaSlice<bf16>),
    Packed(PackedRows),
}

/// Some rows of a weight in bf16.
pub(super) enum WeightRows<'a> {
    Stored(Matrix<'a>),
    /// Unpacked values of a packed weight, and their number of rows.
    Unpacked(UnpackBuffer<'a>, usize),
}

impl WeightRows<'_> {
    pub(super) fn matrix(&self, gpu: &Gpu, n_in: usize) -> Result<Matrix<'_>> {
        match self {
            Self::Stored(matrix) => Ok(*matrix),
            Self::Unpacked(values, n_rows) => Matrix::beginning(gpu, &**values, *n_rows, n_in),
        }
    }
}

impl DeviceWeight {
    /// A weight of bf16 values `(n_out, n_in)`, row-major.
    pub fn new(values: CudaSlice<bf16>, n_out: usize, n_in: usize) -> Result<Self> {
        if values.len() != n_out * n_in {
            bail!("a weight ({n_out}, {n_in}) of {} values", values.len());
        }
        Ok(Self { stored: Arc::new(Stored::Bf16(values)), n_out, n_in })
    }

    /// Packs values; the values themselves are not kept.
    pub fn packed<T: Element>(
        gpu: &Gpu,
        values: &impl DevicePtr<T>,
        (n_out, n_in): (usize, usize),
        format: PackedFormat,
    ) -> Result<Self> {
        if values.len() != n_out * n_in {
            bail!("a weight ({n_out}, {n_in}) of {} values", values.len());
        }
        let mut rows = PackedRows::new(gpu, (n_out, n_in), format)?;
        rows.put(gpu, 0, values)?;
        Ok(Self::of_rows(rows, (n_out, n_in)))
    }

    /// A weight whose packed rows are complete.
    pub(super) fn of_rows(rows: PackedRows, (n_out, n_in): (usize, usize)) -> Self {
        Self { stored: Arc::new(Stored::Packed(rows)), n_out, n_in }
    }

    pub(super) fn stored(&self) -> &Stored {
        &self.stored
    }

    pub fn dims(&self) -> (usize, usize) {
        (self.n_out, self.n_in)
    }

    pub fn memory_bytes(&self) -> usize {
        match &*self.stored {
            Stored::Bf16(values) => values.num_bytes(),
            Stored::Packed(rows) => rows.codes.num_bytes() + rows.scales.num_bytes(),
        }
    }

    /// `out = alpha * x W^T + beta * out` for `x` `(N, in)` and `out` `(N, out)`. For few rows a kernel reads the weight as stored; for
    /// many cuBLAS is used, after a packed weight is unpacked to bf16.
    pub fn multiply<T: Element>(
        &self,
        gpu: &Gpu,
        x: &Matrix<'_>,
        out: &mut impl DevicePtrMut<T>,
        scale: Scale,
    ) -> Result<()> {
        if x.n_rows() <= self.most_few_rows() {
            return self.multiply_few_rows(gpu, x, out, scale);
        }
        let rows = self.rows(gpu, 0..self.n_out)?;
        gpu.product(x, &rows.matrix(gpu, self.n_in)?.t(), out, scale)
    }

    /// The stored values if they are bf16, `None` if they are packed; reading them allocates nothing.
    pub(crate) fn bf16(&self) -> Option<&CudaSlice<bf16>> {
        match &*self.stored {
            Stored::Bf16(values) => Some(values),
            Stored::Packed(_) => None,
        }
    }

    /// Rows by index: `(ids, in)` f32. The caller must check that ids are below `out`; a larger id gives zeros.
    pub fn rows_at(&self, gpu: &Gpu, ids: &CudaSlice<u32>) -> Result<CudaSlice<f32>> {
        match &*self.stored {
            Stored::Bf16(values) => gpu.rows(values, ids, self.n_in),
            Stored::Packed(rows) => {
                let mut values = gpu.alloc(ids.len() * self.n_in)?;
                rows.unpack(gpu, Some(ids), 0..ids.len(), &mut values)?;
                gpu.to_f32(&values)
            }
        }
    }

    /// All values of the weight as `(out, in)` f32.
    pub fn to_f32(&self, gpu: &Gpu) -> Result<CudaSlice<f32>> {
        match &*self.stored {
            Stored::Bf16(values) => gpu.to_f32(values),
            Stored::Packed(rows) => {
                let mut values = gpu.alloc(self.n_out * self.n_in)?;
                rows.unpack(gpu, None, 0..self.n_out, &mut values)?;
                gpu.to_f32(&values)
            }
        }
    }

    /// The rows of the given outputs, for a product. Packed rows are unpacked into the GPU's shared buffer, which is in use until the
    /// result is dropped.
    pub(super) fn rows<'a>(&'a self, gpu: &'a Gpu, outputs: Range<usize>) -> Result<WeightRows<'a>> {
        match &*self.stored {
            Stored::Bf16(values) => Ok(WeightRows::Stored(Matrix::of(gpu, values, self.n_in)?.part(outputs)?)),
            Stored::Packed(rows) => {
                let mut values = gpu.unpack_buffer(outputs.len() * self.n_in)?;
                rows.unpack(gpu, None, outputs.clone(), &mut *values)?;
                Ok(WeightRows::Unpacked(values, outputs.len()))
            }
        }
    }
}

/// Storage formats with fewer bits than bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedFormat {
    /// 1.0625 bytes per weight: 255 equidistant steps up to the largest absolute value of 64 consecutive weights of a row.
    Int8,
    /// 0.5625 bytes per weight: QLoRA's 16 values (NormalFloat), relative to the largest absolute value of 64 consecutive weights of a row.
    Nf4,
    /// 1 byte per weight: fp8 e4m3, scaled so that the largest absolute value of a row is 448.
    Fp8,
}

impl PackedFormat {
    /// The packed format of a storage type; `None` for a type that is not packed.
    pub fn of(dtype: BaseDtype) -> Option<Self> {
        match dtype {
            BaseDtype::Int8 => Some(Self::Int8),
            BaseDtype::Nf4 => Some(Self::Nf4),
            BaseDtype::Fp8 => Some(Self::Fp8),
            BaseDtype::F32 | BaseDtype::Bf16 | BaseDtype::F16 => None,
        }
    }

    fn groups(self, n_in: usize) -> usize {
        if self == Self::Fp8 { 1 } else { n_in.div_ceil(GROUP) }
    }

    /// Number of bytes of a row's codes.
    pub(super) fn line(self, n_in: usize) -> usize {
        if self == Self::Nf4 { n_in.div_ceil(2) } else { n_in }
    }

    fn unpack_kernel(self) -> &'static str {
        match self {
            Self::Int8 => "unpack_int8",
            Self::Nf4 => "unpack_nf4",
            Self::Fp8 => "unpack_fp8",
        }
    }

    fn pack_kernel<T: Element>(self) -> &'static str {
        T::kernel(match self {
            Self::Int8 => ["pack_int8_f32", "pack_int8_bf16"],
            Self::Nf4 => ["pack_nf4_f32", "pack_nf4_bf16"],
            Self::Fp8 => ["pack_fp8_f32", "pack_fp8_bf16"],
        })
    }
}

/// Codes and scales of a weight `(out, in)`, row by row.
pub(super) struct PackedRows {
    pub(super) format: PackedFormat,
    pub(super) codes: CudaSlice<u8>,
    pub(super) scales: CudaSlice<f32>,
    n_out: usize,
    n_in: usize,
}

impl PackedRows {
    /// Allocates memory for a weight whose rows will be packed later.
    pub(super) fn new(gpu: &Gpu, (n_out, n_in): (usize, usize), format: PackedFormat) -> Result<Self> {
        if n_out == 0 || n_in == 0 {
            bail!("a weight of shape ({n_out}, {n_in}) holds nothing");
        }
        let (codes, scales) = (gpu.alloc(n_out * format.line(n_in))?, gpu.alloc(n_out * format.groups(n_in))?);
        Ok(Self { format, codes, scales, n_out, n_in })
    }

    /// Packs complete rows, the first of them at index `first`.
    pub(super) fn put<T: Element>(&mut self, gpu: &Gpu, first: usize, values: &impl DevicePtr<T>) -> Result<()> {
        let (n, line, groups) = (values.len() / self.n_in, self.format.line(self.n_in), self.format.groups(self.n_in));
        if values.len() != n * self.n_in || first + n > self.n_out {
            bail!("rows from {first} on, {} values, of a weight ({}, {})", values.len(), self.n_out, self.n_in);
        }
        let mut codes = self.codes.slice_mut(first * line..(first + n) * line);
        let mut scales = self.scales.slice_mut(first * groups..(first + n) * groups);
        let mut args = [
            gpu.input(values),
            gpu.output(&mut codes),
            gpu.output(&mut scales),
            n.into(),
            self.n_in.into(),
            line.into(),
        ];
        let n_blocks = blocks_for(values.len(), gpu.n_processors());
        // SAFETY: as `cuda/frozen.cuh` declares it; of these rows every byte of the codes and every scale is written.
        unsafe { gpu.launch(self.format.pack_kernel::<T>(), [n_blocks, 1, 1], THREADS, 0, &mut args) }
    }

    /// Unpacks a range of rows, or the rows `ids`, to bf16 at the start of `values`.
    pub(super) fn unpack(
        &self,
        gpu: &Gpu,
        ids: Option<&CudaSlice<u32>>,
        rows: Range<usize>,
        values: &mut impl DevicePtrMut<bf16>,
    ) -> Result<()> {
        let n = rows.len();
        if values.len() < n * self.n_in {
            bail!("{n} rows of {} in {} values", self.n_in, values.len());
        }
        let mut args = [
            gpu.input(&self.codes),
            gpu.input(&self.scales),
            ids.map_or(Arg::null(), |ids| gpu.input(ids)),
            rows.start.into(),
            gpu.output(values),
            n.into(),
            self.n_out.into(),
            self.n_in.into(),
            self.format.line(self.n_in).into(),
        ];
        let n_blocks = blocks_for(n * self.n_in, gpu.n_processors());
        // SAFETY: as `cuda/frozen.cuh` declares it; rows are checked against `n_out` on the GPU.
        unsafe { gpu.launch(self.format.unpack_kernel(), [n_blocks, 1, 1], THREADS, 0, &mut args) }
    }
}

/// Rows per block (`2 * ROW_TILE` in `cuda/few_rows.cuh`); with more rows, another block reads the weight again.
const ROWS_OF_BLOCK: usize = 16;

/// Outputs per block (`BLOCK_OUTPUTS`).
const OUTPUTS_OF_BLOCK: usize = 32;

/// Maximum number of rows for which a packed weight is read directly; with more, unpacking it for cuBLAS is faster. On an H200, for a
/// weight of (18944, 3584), `few_rows` took 49 to 64 us with 16 rows, 78 to 108 with 32 and 142 to 196 with 64; unpacking and the product
/// took 115 to 132.
const MOST_OF_PACKED: usize = 2 * ROWS_OF_BLOCK;

/// The same for a weight in bf16: it is read once either way, but cuBLAS's tiles are designed for more rows.
const MOST_OF_BF16: usize = ROWS_OF_BLOCK;

/// For tests that compare products of few rows with products of many rows bit by bit: cuBLAS computes all products of this thread. The
/// simulated cuBLAS has one order of summation.
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

    /// Computes [`DeviceWeight::multiply`] by the kernel for few rows, for any number of rows.
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
            scale.beta.into(),
        ];
        let grid = [n_out.div_ceil(OUTPUTS_OF_BLOCK), n_rows.div_ceil(ROWS_OF_BLOCK), 1];
        // SAFETY: as `cuda/few_rows.cuh` declares it; lengths were checked against the shapes.
        unsafe { gpu.launch(T::kernel(names), grid, 256, 0, &mut args) }
    }
}
