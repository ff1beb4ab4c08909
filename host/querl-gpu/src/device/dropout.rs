//! Dropout on the card: twin of `dropout`, with the same masks.

use super::elementwise::{Element, same_length, whole_rows};
use super::gpu::Gpu;
use super::launch::{THREADS, blocks_for};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use half::bf16;

/// Which inputs of one layer's adapter are set to zero.
#[derive(Clone, Copy)]
pub struct Masks<'a> {
    /// A key for each row of the inputs.
    pub row_keys: &'a CudaSlice<u64>,
    /// A layer's own stream of masks.
    pub layer_seed: u64,
    /// Inputs of the layer that stand before these on other cards: an even number.
    pub first_input: usize,
    /// Share that is zeroed, 0 to below 1; the others are scaled by `1 / (1 - p)`.
    pub p: f64,
}

impl Gpu {
    /// `d(x)` for rows `x` of `width` values.
    ///
    /// # Errors
    /// Another number of rows than of keys.
    pub fn dropped(&self, x: &impl DevicePtr<bf16>, width: usize, masks: Masks<'_>) -> Result<CudaSlice<bf16>> {
        let mut y = self.alloc(x.len())?;
        self.drop_into(x, &mut y, width, masks, false)?;
        Ok(y)
    }

    /// `sum += d(x)`.
    ///
    /// # Errors
    /// As [`Gpu::dropped`], or lengths that differ.
    pub fn add_dropped<T: Element>(
        &self,
        sum: &mut impl DevicePtrMut<T>,
        x: &impl DevicePtr<bf16>,
        width: usize,
        masks: Masks<'_>,
    ) -> Result<()> {
        self.drop_into(x, sum, width, masks, true)
    }

    fn drop_into<T: Element>(
        &self,
        x: &impl DevicePtr<bf16>,
        to: &mut impl DevicePtrMut<T>,
        width: usize,
        Masks { row_keys, layer_seed, first_input, p }: Masks<'_>,
        adds: bool,
    ) -> Result<()> {
        let n_rows = whole_rows("dropout", x.len(), width)?;
        same_length("dropout", row_keys.len(), n_rows)?;
        same_length("dropout", to.len(), x.len())?;
        let mut args = [
            self.input(x),
            self.input(row_keys),
            self.output(to),
            n_rows.into(),
            width.into(),
            (first_input / 2).into(),
            layer_seed.into(),
            ((p * f64::from(u32::MAX)) as u32).into(),
            ((1.0 / (1.0 - p)) as f32).into(),
            u32::from(adds).into(),
        ];
        let blocks = blocks_for(x.len(), self.n_processors());
        // SAFETY: as `cuda/dropout.cuh` declares it; rows, keys and results are as many as was checked above.
        unsafe { self.launch(T::kernel(["drop_f32", "drop_bf16"]), [blocks, 1, 1], THREADS, 0, &mut args) }
    }
}
