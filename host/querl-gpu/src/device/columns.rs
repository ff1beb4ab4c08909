//! Columns of rows: factors on them, sums over them.

use super::elementwise::{Element, same_length, whole_rows};
use super::gpu::Gpu;
use super::launch::{Arg, THREADS, blocks_for};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use half::bf16;

impl Gpu {
    /// `factors * x + bias` in each row of `x` `(N, width)`; factors and bias: `(width)`.
    ///
    /// # Errors
    /// Values that are not whole rows, a bias of another length, or no memory left.
    pub fn scaled_columns(
        &self,
        x: &impl DevicePtr<f32>,
        factors: &impl DevicePtr<f32>,
        bias: Option<&CudaSlice<f32>>,
    ) -> Result<CudaSlice<bf16>> {
        let mut y = self.alloc(x.len())?;
        self.scale(["scale_columns_f32_f32", "scale_columns_f32_bf16"], x, factors, bias, &mut y, 0)?;
        Ok(y)
    }

    /// The same, added to `y`.
    ///
    /// # Errors
    /// As [`Gpu::scaled_columns`], or another number of values.
    pub fn add_scaled_columns(
        &self,
        x: &impl DevicePtr<f32>,
        factors: &impl DevicePtr<f32>,
        bias: Option<&CudaSlice<f32>>,
        y: &mut impl DevicePtrMut<f32>,
    ) -> Result<()> {
        self.scale(["scale_columns_f32_f32", "scale_columns_f32_bf16"], x, factors, bias, y, 1)
    }

    /// `factors * x` of values in bf16.
    ///
    /// # Errors
    /// As [`Gpu::scaled_columns`].
    pub fn scaled_values(&self, x: &impl DevicePtr<bf16>, factors: &impl DevicePtr<f32>) -> Result<CudaSlice<bf16>> {
        let mut y: CudaSlice<bf16> = self.alloc(x.len())?;
        self.scale(["scale_columns_bf16_bf16"; 2], x, factors, None, &mut y, 0)?;
        Ok(y)
    }

    /// `names`: of the kernels whose results are f32 and bf16.
    fn scale<From: Element, To: Element>(
        &self,
        names: [&'static str; 2],
        x: &impl DevicePtr<From>,
        factors: &impl DevicePtr<f32>,
        bias: Option<&CudaSlice<f32>>,
        y: &mut impl DevicePtrMut<To>,
        adds: u32,
    ) -> Result<()> {
        let width = factors.len();
        let n_rows = whole_rows("scale_columns", x.len(), width)?;
        same_length("scale_columns", y.len(), x.len())?;
        bias.map_or(Ok(()), |bias| same_length("scale_columns", bias.len(), width))?;
        let mut args = [
            self.input(x),
            self.input(factors),
            bias.map_or(Arg::null(), |bias| self.input(bias)),
            self.output(y),
            n_rows.into(),
            width.into(),
            adds.into(),
        ];
        let blocks = blocks_for(x.len(), self.n_processors());
        // SAFETY: as `cuda/columns.cuh` declares it; lengths were held against each other.
        unsafe { self.launch(To::kernel(names), [blocks, 1, 1], THREADS, 0, &mut args) }
    }

    /// Sums over the rows of `a` times `b`, value by value, or of `a` alone: `(width)`.
    ///
    /// # Errors
    /// Values that are not whole rows, or lengths that differ.
    pub fn column_totals(
        &self,
        a: &impl DevicePtr<bf16>,
        b: Option<&CudaSlice<bf16>>,
        width: usize,
    ) -> Result<CudaSlice<f32>> {
        let n_rows = whole_rows("column_totals", a.len(), width)?;
        b.map_or(Ok(()), |b| same_length("column_totals", b.len(), a.len()))?;
        let mut sums = self.alloc(width)?;
        let mut args = [
            self.input(a),
            b.map_or(Arg::null(), |b| self.input(b)),
            self.output(&mut sums),
            n_rows.into(),
            width.into(),
        ];
        // SAFETY: as `cuda/columns.cuh` declares it: a block for each 64 columns; every sum is written.
        unsafe { self.launch("column_totals", [width.div_ceil(64), 1, 1], 256, 0, &mut args)? };
        Ok(sums)
    }
}
