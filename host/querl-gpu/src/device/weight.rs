//! Frozen weights on the card: twin of `kernels::FrozenWeight`.

use super::elementwise::Element;
use super::gpu::{Gpu, Widening};
use super::packed::{PackedFormat, PackedRows};
use super::product::{Matrix, Scale};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle_core::{Result, bail};
use half::bf16;
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

/// Some rows of a weight, as bf16.
pub(super) enum WeightRows<'a> {
    Stored(Matrix<'a>),
    /// With the number of rows.
    Widened(Widening<'a>, usize),
}

impl WeightRows<'_> {
    pub(super) fn matrix(&self, gpu: &Gpu, n_in: usize) -> Result<Matrix<'_>> {
        match self {
            Self::Stored(matrix) => Ok(*matrix),
            Self::Widened(values, n_rows) => Matrix::beginning(gpu, &**values, *n_rows, n_in),
        }
    }
}

impl DeviceWeight {
    /// `values`: `(n_out, n_in)` row-major.
    ///
    /// # Errors
    /// Another number of values.
    pub fn new(values: CudaSlice<bf16>, n_out: usize, n_in: usize) -> Result<Self> {
        if values.len() != n_out * n_in {
            bail!("a weight ({n_out}, {n_in}) of {} values", values.len());
        }
        Ok(Self { stored: Arc::new(Stored::Bf16(values)), n_out, n_in })
    }

    /// Packs values, which are not kept.
    ///
    /// # Errors
    /// As [`DeviceWeight::new`], or no memory left on the card.
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

    /// Of rows that have all been put.
    pub(super) fn of_rows(rows: PackedRows, (n_out, n_in): (usize, usize)) -> Self {
        Self { stored: Arc::new(Stored::Packed(rows)), n_out, n_in }
    }

    pub(super) fn stored(&self) -> &Stored {
        &self.stored
    }

    /// Outputs and inputs.
    pub fn dims(&self) -> (usize, usize) {
        (self.n_out, self.n_in)
    }

    /// Bytes on the card.
    pub fn memory_bytes(&self) -> usize {
        match &*self.stored {
            Stored::Bf16(values) => values.num_bytes(),
            Stored::Packed(rows) => rows.codes.num_bytes() + rows.scales.num_bytes(),
        }
    }

    /// `out = alpha * x W^T + keep * out` for `x` `(N, in)` as it stands and `out` `(N, out)`: for few rows from the weight as it is
    /// stored, for many by cuBLAS, widened first where it is packed.
    ///
    /// # Errors
    /// Shapes that do not fit, or the card has no memory left.
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

    /// Its values, where they are stored as bf16: what reads them allocates nothing.
    pub(crate) fn bf16(&self) -> Option<&CudaSlice<bf16>> {
        match &*self.stored {
            Stored::Bf16(values) => Some(values),
            Stored::Packed(_) => None,
        }
    }

    /// Rows by index: `(ids, in)` f32. The caller has checked that ids are below `out`, a row beyond it is zeros.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn rows_at(&self, gpu: &Gpu, ids: &CudaSlice<u32>) -> Result<CudaSlice<f32>> {
        match &*self.stored {
            Stored::Bf16(values) => gpu.rows(values, ids, self.n_in),
            Stored::Packed(rows) => {
                let mut values = gpu.alloc(ids.len() * self.n_in)?;
                rows.widen(gpu, Some(ids), 0..ids.len(), &mut values)?;
                gpu.to_f32(&values)
            }
        }
    }

    /// All values, `(out, in)` f32.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn to_f32(&self, gpu: &Gpu) -> Result<CudaSlice<f32>> {
        match &*self.stored {
            Stored::Bf16(values) => gpu.to_f32(values),
            Stored::Packed(rows) => {
                let mut values = gpu.alloc(self.n_out * self.n_in)?;
                rows.widen(gpu, None, 0..self.n_out, &mut values)?;
                gpu.to_f32(&values)
            }
        }
    }

    /// Some outputs, for a product. What has to be widened stands in the card's one place for that, until it is dropped.
    pub(super) fn rows<'a>(&'a self, gpu: &'a Gpu, outputs: Range<usize>) -> Result<WeightRows<'a>> {
        match &*self.stored {
            Stored::Bf16(values) => Ok(WeightRows::Stored(Matrix::of(gpu, values, self.n_in)?.part(outputs)?)),
            Stored::Packed(rows) => {
                let mut values = gpu.widening(outputs.len() * self.n_in)?;
                rows.widen(gpu, None, outputs.clone(), &mut *values)?;
                Ok(WeightRows::Widened(values, outputs.len()))
            }
        }
    }
}
