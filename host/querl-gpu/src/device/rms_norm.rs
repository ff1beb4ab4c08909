//! Root-mean-square normalisation on the card: twin of `kernels::rms_norm`.

use super::elementwise::{Element, same_length, whole_rows};
use super::gpu::Gpu;
use super::launch::{Arg, THREADS};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use half::bf16;

/// Most blocks whose parts of a weight's gradient are kept: a function of nothing but this number, so that sums do not depend on
/// the card.
const MAX_PARTS: usize = 256;

impl Gpu {
    /// `x / sqrt(mean(x^2) + eps) * weight` over rows of as many values as the weight has.
    ///
    /// # Errors
    /// Values that are not whole rows.
    pub fn normed<T: Element>(
        &self,
        x: &impl DevicePtr<T>,
        weight: &impl DevicePtr<f32>,
        eps: f32,
    ) -> Result<CudaSlice<bf16>> {
        let mut y = self.alloc(x.len())?;
        self.normed_into(x, weight, eps, &mut y)?;
        Ok(y)
    }

    /// The same, into memory that is there.
    ///
    /// # Errors
    /// Values that are not whole rows, or lengths that differ.
    pub fn normed_into<T: Element>(
        &self,
        x: &impl DevicePtr<T>,
        weight: &impl DevicePtr<f32>,
        eps: f32,
        y: &mut impl DevicePtrMut<bf16>,
    ) -> Result<()> {
        let (width, n_rows) = (weight.len(), whole_rows("normed", x.len(), weight.len())?);
        same_length("normed", y.len(), x.len())?;
        let mut args = [self.input(x), self.input(weight), self.output(y), n_rows.into(), width.into(), eps.into()];
        let name = T::kernel(["normed_f32", "normed_bf16"]);
        // SAFETY: as `cuda/rms_norm.cuh` declares it; lengths are whole rows.
        unsafe { self.launch(name, [n_rows, 1, 1], THREADS, 0, &mut args) }
    }

    /// Gradients of `x`, to which `more` is added where there is any, and of the first `n_wanted` values of the weight (none or
    /// all), for the gradient of [`Gpu::normed`]'s result.
    ///
    /// # Errors
    /// As [`Gpu::normed`].
    pub fn norm_gradients(
        &self,
        x: &impl DevicePtr<f32>,
        weight: &impl DevicePtr<f32>,
        eps: f32,
        grad: &impl DevicePtr<f32>,
        more: Option<&CudaSlice<f32>>,
        n_wanted: usize,
    ) -> Result<(CudaSlice<f32>, CudaSlice<f32>)> {
        let (width, n_rows) = (weight.len(), whole_rows("norm_gradients", x.len(), weight.len())?);
        same_length("norm_gradients", grad.len(), x.len())?;
        same_length("norm_gradients", more.map_or(x.len(), |more| more.len()), x.len())?;
        let mut dx = self.alloc(x.len())?;
        let mut args = vec![self.input(x), self.input(weight), self.input(grad)];
        args.extend([more.map_or(Arg::null(), |more| self.input(more)), self.output(&mut dx)]);
        args.extend([n_rows.into(), width.into(), eps.into()]);
        // SAFETY: as `cuda/rms_norm.cuh` declares it; all are whole rows of one number.
        unsafe { self.launch("norm_gradients", [n_rows, 1, 1], THREADS, 0, &mut args)? };
        if n_wanted == 0 {
            return Ok((dx, self.zeros(0)?));
        }
        let dw = self.norm_weight_gradient(self.input(x), self.input(grad), n_rows, width, eps)?;
        Ok((dx, dw))
    }

    fn norm_weight_gradient(&self, x: Arg, grad: Arg, n_rows: usize, width: usize, eps: f32) -> Result<CudaSlice<f32>> {
        let n_parts = n_rows.clamp(1, MAX_PARTS);
        let mut parts = self.alloc::<f32>(n_parts * width)?;
        let mut args = [x, grad, self.output(&mut parts), n_rows.into(), width.into(), eps.into()];
        // SAFETY: as `cuda/rms_norm.cuh` declares it; each block writes one row of `parts`.
        unsafe { self.launch("norm_weight_gradient", [n_parts, 1, 1], THREADS, width * 4, &mut args)? };
        self.column_sums(&parts, width)
    }

    /// Sums over the rows of `x` `(N, width)`, in an order that depends on their number alone.
    pub(super) fn column_sums<T: Element>(&self, x: &impl DevicePtr<T>, width: usize) -> Result<CudaSlice<f32>> {
        let n_rows = whole_rows("column_sums", x.len(), width)?;
        let mut sums = self.alloc(width)?;
        let mut args = [self.input(x), self.output(&mut sums), n_rows.into(), width.into()];
        let name = T::kernel(["column_sums_f32", "column_sums_bf16"]);
        // SAFETY: as `cuda/rms_norm.cuh` declares it.
        unsafe { self.launch(name, [width.div_ceil(32), 1, 1], THREADS, 0, &mut args)? };
        Ok(sums)
    }
}
