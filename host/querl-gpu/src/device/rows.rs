//! Rows of the card by index, some of them more than once, and fresh weights.

use super::elementwise::{same_length, whole_rows};
use super::gpu::Gpu;
use super::launch::{THREADS, blocks_for};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{Result, bail};
use half::bf16;
use std::ops::Range;

/// For each of some rows the places that name it, in their order.
pub struct Namers {
    /// Where each row's list begins, `(rows + 1)`.
    starts: CudaSlice<u32>,
    /// The lists, one after another.
    index: CudaSlice<u32>,
    n_rows: usize,
}

impl Namers {
    /// `places`: rows below `n_rows`.
    ///
    /// # Errors
    /// A place that is not below `n_rows`.
    pub fn new(gpu: &Gpu, places: &[u32], n_rows: usize) -> Result<Self> {
        let (starts, index) = lists(places, n_rows)?;
        Ok(Self { starts: gpu.upload(&starts)?, index: gpu.upload(&index)?, n_rows })
    }
}

/// Where each row's list begins, and the lists.
fn lists(places: &[u32], n_rows: usize) -> Result<(Vec<u32>, Vec<u32>)> {
    if let Some(place) = places.iter().find(|&&place| place as usize >= n_rows) {
        bail!("there is no row {place} among {n_rows}");
    }
    let mut starts = vec![0; n_rows + 1];
    places.iter().for_each(|&place| starts[place as usize + 1] += 1);
    (0..n_rows).for_each(|row| starts[row + 1] += starts[row]);
    let (mut next, mut index) = (starts.clone(), vec![0; places.len()]);
    for (place, &row) in places.iter().enumerate() {
        index[next[row as usize] as usize] = place as u32;
        next[row as usize] += 1;
    }
    Ok((starts, index))
}

impl Gpu {
    /// `(rows, width)`: for each row the sum of the rows of `grad` `(places, width)` that name it.
    ///
    /// # Errors
    /// Another number of places.
    pub fn sum_rows(&self, grad: &impl DevicePtr<f32>, namers: &Namers, width: usize) -> Result<CudaSlice<f32>> {
        same_length("sum_rows", whole_rows("sum_rows", grad.len(), width)?, namers.index.len())?;
        let mut out = self.alloc(namers.n_rows * width)?;
        let mut args = [
            self.input(grad),
            self.input(&namers.starts),
            self.input(&namers.index),
            self.output(&mut out),
            namers.n_rows.into(),
            width.into(),
        ];
        // SAFETY: as `cuda/rows.cuh` declares it; lists hold places below the number of `grad`'s rows.
        unsafe { self.launch("sum_rows", [namers.n_rows, 1, 1], THREADS, 0, &mut args)? };
        Ok(out)
    }

    /// `n` normal numbers times `scale`; see [`querl_model::random`].
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn normal(&self, n: usize, seed: u64, scale: f32) -> Result<CudaSlice<bf16>> {
        let mut values = self.alloc(n)?;
        let mut args = [self.output(&mut values), n.into(), seed.into(), scale.into()];
        // SAFETY: as `cuda/random.cuh` declares it.
        unsafe { self.launch("normal_bf16", [blocks_for(n, self.n_processors()), 1, 1], THREADS, 0, &mut args)? };
        Ok(values)
    }

    /// The same numbers where they stand in a matrix of `width` columns: of its rows and columns some.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn normal_part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        width: usize,
        seed: u64,
        scale: f32,
    ) -> Result<CudaSlice<bf16>> {
        if columns == (0..width) && rows.start == 0 {
            return self.normal(rows.len() * width, seed, scale);
        }
        let n = rows.len() * columns.len();
        let mut values = self.alloc(n)?;
        let mut args = [
            self.output(&mut values),
            n.into(),
            columns.len().into(),
            (rows.start * width + columns.start).into(),
            width.into(),
            seed.into(),
            scale.into(),
        ];
        // SAFETY: as `cuda/random.cuh` declares it.
        unsafe { self.launch("normal_part_bf16", [blocks_for(n, self.n_processors()), 1, 1], THREADS, 0, &mut args)? };
        Ok(values)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::lists;

    #[test]
    fn places_stand_under_the_row_they_name_in_their_order() {
        let (starts, index) = lists(&[2, 0, 2, 2, 3], 5).unwrap();
        assert_eq!(starts, [0, 1, 1, 4, 5, 5]);
        assert_eq!(index, [1, 0, 2, 3, 4]);
        assert!(lists(&[5], 5).is_err());
    }
}
