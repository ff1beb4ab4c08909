//! Element-wise kernels, rows by index, factors and sums of columns, random weights.

use super::gpu::Gpu;
use super::launch::{Arg, THREADS, blocks_for};
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::cublas::sys::cudaDataType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, ValidAsZeroBits};
use candle_core::{Result, bail};
use half::bf16;
use std::ops::Range;

/// Number type of kernels: f32 or bf16.
pub trait Element: DeviceRepr + ValidAsZeroBits + CudaDType + Copy + 'static {
    /// The type's constant in cuBLAS.
    const CUDA_TYPE: cudaDataType;

    /// The kernel for this type: `names[0]` is for f32, `names[1]` for bf16.
    fn kernel(names: [&'static str; 2]) -> &'static str;
}

impl Element for f32 {
    const CUDA_TYPE: cudaDataType = cudaDataType::CUDA_R_32F;

    fn kernel(names: [&'static str; 2]) -> &'static str {
        names[0]
    }
}

impl Element for bf16 {
    const CUDA_TYPE: cudaDataType = cudaDataType::CUDA_R_16BF;

    fn kernel(names: [&'static str; 2]) -> &'static str {
        names[1]
    }
}

pub(super) fn same_length(what: &str, a: usize, b: usize) -> Result<()> {
    if a != b {
        bail!("{what}: {a} values for {b}");
    }
    Ok(())
}

impl Gpu {
    /// Rounds values to bf16.
    pub fn to_bf16(&self, x: &impl DevicePtr<f32>) -> Result<CudaSlice<bf16>> {
        let mut y = self.alloc(x.len())?;
        self.to_bf16_into(x, &mut y)?;
        Ok(y)
    }

    /// Like [`Gpu::to_bf16`], into existing memory.
    pub fn to_bf16_into(&self, x: &impl DevicePtr<f32>, y: &mut impl DevicePtrMut<bf16>) -> Result<()> {
        same_length("to_bf16", y.len(), x.len())?;
        self.over("to_bf16", x.len(), &mut [self.input(x), self.output(y), x.len().into()])
    }

    /// Sets `mark`, a single number, to 1 if a value is not finite in bf16; otherwise leaves it as it is.
    pub fn mark_not_finite(&self, x: &impl DevicePtr<f32>, mark: &mut impl DevicePtrMut<u32>) -> Result<()> {
        same_length("mark_not_finite", mark.len(), 1)?;
        self.over("mark_not_finite", x.len(), &mut [self.input(x), self.output(mark), x.len().into()])
    }

    /// Converts values to f32.
    pub fn to_f32(&self, x: &impl DevicePtr<bf16>) -> Result<CudaSlice<f32>> {
        let mut y = self.alloc(x.len())?;
        self.over("to_f32", x.len(), &mut [self.input(x), self.output(&mut y), x.len().into()])?;
        Ok(y)
    }

    /// `sum += x`, value by value.
    pub fn add(&self, sum: &mut impl DevicePtrMut<f32>, x: &impl DevicePtr<f32>) -> Result<()> {
        same_length("add", x.len(), sum.len())?;
        self.over("add", x.len(), &mut [self.output(sum), self.input(x), x.len().into()])
    }

    /// `silu(gate) * up`: counterpart of [`querl_model::kernels::swiglu`].
    pub fn swiglu(&self, gate: &impl DevicePtr<bf16>, up: &impl DevicePtr<bf16>) -> Result<CudaSlice<bf16>> {
        same_length("swiglu", up.len(), gate.len())?;
        let mut y = self.alloc(gate.len())?;
        let mut args = [self.input(gate), self.input(up), self.output(&mut y), gate.len().into()];
        self.over("swiglu", gate.len(), &mut args)?;
        Ok(y)
    }

    /// The result of [`Gpu::swiglu`] again, and the gradients of `gate` and `up` for the gradient of this result: counterpart of
    /// [`querl_model::kernels::swiglu_backward`].
    pub fn swiglu_gradients(
        &self,
        gate: &impl DevicePtr<bf16>,
        up: &impl DevicePtr<bf16>,
        grad: &impl DevicePtr<bf16>,
    ) -> Result<[CudaSlice<bf16>; 3]> {
        same_length("swiglu_gradients", up.len(), gate.len())?;
        same_length("swiglu_gradients", grad.len(), gate.len())?;
        let n = gate.len();
        let (mut y, mut dgate, mut dup) = (self.alloc(n)?, self.alloc(n)?, self.alloc(n)?);
        let mut args = vec![self.input(gate), self.input(up), self.input(grad)];
        args.extend([self.output(&mut y), self.output(&mut dgate), self.output(&mut dup), n.into()]);
        self.over("swiglu_gradients", n, &mut args)?;
        Ok([y, dgate, dup])
    }

    /// Rows by id of a table `(n, width)`, converted to f32: `(ids, width)`. Counterpart of `FrozenWeight::rows`. The caller must check
    /// that ids are below `n`; a larger id gives zeros.
    pub fn rows(
        &self,
        table: &impl DevicePtr<bf16>,
        ids: &impl DevicePtr<u32>,
        width: usize,
    ) -> Result<CudaSlice<f32>> {
        let mut y = self.alloc(ids.len() * width)?;
        self.rows_into(table, ids, width, &mut y)?;
        Ok(y)
    }

    /// Like [`Gpu::rows`], into existing memory.
    pub fn rows_into(
        &self,
        table: &impl DevicePtr<bf16>,
        ids: &impl DevicePtr<u32>,
        width: usize,
        y: &mut impl DevicePtrMut<f32>,
    ) -> Result<()> {
        let n_rows = whole_rows("rows", table.len(), width)?;
        same_length("rows", y.len(), ids.len() * width)?;
        let mut args =
            [self.input(table), self.input(ids), self.output(y), ids.len().into(), width.into(), n_rows.into()];
        self.over("gather_rows", ids.len() * width, &mut args)
    }

    /// The listed rows of `all` `(N, width)`; an index of N or more gives zeros.
    pub fn pick<T: Element>(
        &self,
        all: &impl DevicePtr<T>,
        list: &impl DevicePtr<u32>,
        width: usize,
    ) -> Result<CudaSlice<T>> {
        let mut y = self.alloc(list.len() * width)?;
        self.pick_into(all, list, width, &mut y)?;
        Ok(y)
    }

    /// Like [`Gpu::pick`], into existing memory.
    pub fn pick_into<T: Element>(
        &self,
        all: &impl DevicePtr<T>,
        list: &impl DevicePtr<u32>,
        width: usize,
        y: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        let n_rows = whole_rows("pick", all.len(), width)?;
        same_length("pick", y.len(), list.len() * width)?;
        let mut args =
            [self.input(all), self.input(list), self.output(y), list.len().into(), width.into(), n_rows.into()];
        self.over(T::kernel(["pick_f32", "pick_bf16"]), list.len() * width, &mut args)
    }

    /// Adds `picked` `(list, width)` to the listed rows of `all` `(N, width)`. No row may be listed twice.
    pub fn add_picked(
        &self,
        all: &mut impl DevicePtrMut<f32>,
        picked: &impl DevicePtr<f32>,
        list: &impl DevicePtr<u32>,
        width: usize,
    ) -> Result<()> {
        let n_rows = whole_rows("add_picked", all.len(), width)?;
        same_length("add_picked", picked.len(), list.len() * width)?;
        let [all, list_at] = [self.output(all), self.input(list)];
        let mut args = [all, self.input(picked), list_at, list.len().into(), width.into(), n_rows.into()];
        self.over("add_picked", picked.len(), &mut args)
    }

    /// `n` copies of `row`, to which a product is added.
    pub(super) fn repeated<T: Element>(&self, row: &impl DevicePtr<f32>, n: usize) -> Result<CudaSlice<T>> {
        let mut y = self.alloc(n * row.len())?;
        let mut args = [self.input(row), self.output(&mut y), n.into(), row.len().into()];
        self.over(T::kernel(["repeat_row_f32", "repeat_row_bf16"]), y.len(), &mut args)?;
        Ok(y)
    }

    pub(super) fn add_row(&self, y: &mut impl DevicePtrMut<f32>, row: &impl DevicePtr<f32>) -> Result<()> {
        let (len, width) = (y.len(), row.len());
        let n_rows = whole_rows("add_row", len, width)?;
        let row = self.input(row);
        self.over("add_row", len, &mut [row, self.output(y), n_rows.into(), width.into()])
    }

    fn over(&self, name: &'static str, n: usize, args: &mut [super::launch::Arg]) -> Result<()> {
        // SAFETY: each caller above gives the parameters of its kernel in `cuda/elementwise.cuh`, and the lengths it checked.
        unsafe { self.launch(name, [blocks_for(n, self.n_processors()), 1, 1], THREADS, 0, args) }
    }
}

pub(super) fn whole_rows(what: &str, len: usize, width: usize) -> Result<usize> {
    if width == 0 || !len.is_multiple_of(width) {
        bail!("{what}: {len} values are not rows of {width}");
    }
    Ok(len / width)
}

impl Gpu {
    /// `factors * x + bias` for each row of `x` `(N, width)`; factors and bias: `(width)`.
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

    /// Adds `factors * x + bias` to `y`; see [`Gpu::scaled_columns`].
    pub fn add_scaled_columns(
        &self,
        x: &impl DevicePtr<f32>,
        factors: &impl DevicePtr<f32>,
        bias: Option<&CudaSlice<f32>>,
        y: &mut impl DevicePtrMut<f32>,
    ) -> Result<()> {
        self.scale(["scale_columns_f32_f32", "scale_columns_f32_bf16"], x, factors, bias, y, 1)
    }

    /// `factors * x` for each row of `x` `(N, width)` in bf16; factors: `(width)`.
    pub fn scaled_values(&self, x: &impl DevicePtr<bf16>, factors: &impl DevicePtr<f32>) -> Result<CudaSlice<bf16>> {
        let mut y: CudaSlice<bf16> = self.alloc(x.len())?;
        self.scale(["scale_columns_bf16_bf16"; 2], x, factors, None, &mut y, 0)?;
        Ok(y)
    }

    /// `names`: the kernels with f32 and bf16 results.
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
        // SAFETY: as `cuda/columns.cuh` declares it; lengths were checked.
        unsafe { self.launch(To::kernel(names), [blocks, 1, 1], THREADS, 0, &mut args) }
    }

    /// Sum over the rows of `a` times `b`, value by value, or of `a` alone if there is no `b`: `(width)`.
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

/// Inverse of a list of row indices: for each row, the positions in the list that name it, ascending.
pub struct InverseIndex {
    /// Start of each row's list, `(rows + 1)`.
    starts: CudaSlice<u32>,
    /// The concatenated lists.
    index: CudaSlice<u32>,
    n_rows: usize,
}

impl InverseIndex {
    /// `places`: the list of row indices, all below `n_rows`.
    pub fn new(gpu: &Gpu, places: &[u32], n_rows: usize) -> Result<Self> {
        let (starts, index) = lists(places, n_rows)?;
        Ok(Self { starts: gpu.upload(&starts)?, index: gpu.upload(&index)?, n_rows })
    }
}

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
    /// For each row, the sum of the rows of `grad` `(places, width)` whose list entry names it: `(rows, width)`. The backward pass of
    /// picking rows.
    pub fn sum_rows(&self, grad: &impl DevicePtr<f32>, namers: &InverseIndex, width: usize) -> Result<CudaSlice<f32>> {
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

    /// `n` normally distributed numbers times `scale`; see [`querl_model::random`].
    pub fn normal(&self, n: usize, seed: u64, scale: f32) -> Result<CudaSlice<bf16>> {
        let mut values = self.alloc(n)?;
        let mut args = [self.output(&mut values), n.into(), seed.into(), scale.into()];
        // SAFETY: as `cuda/random.cuh` declares it.
        unsafe { self.launch("normal_bf16", [blocks_for(n, self.n_processors()), 1, 1], THREADS, 0, &mut args)? };
        Ok(values)
    }

    /// The given rows and columns of a matrix with `width` columns that [`Gpu::normal`] fills row by row.
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
