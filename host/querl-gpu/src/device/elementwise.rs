//! Values one by one, rows by index.

use super::gpu::Gpu;
use super::launch::{THREADS, blocks_for};
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::cublas::sys::cudaDataType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, ValidAsZeroBits};
use candle_core::{Result, bail};
use half::bf16;

/// What our kernels compute with: f32 and bf16.
pub trait Element: DeviceRepr + ValidAsZeroBits + CudaDType + Copy + 'static {
    /// cuBLAS's name of the type.
    const CUDA_TYPE: cudaDataType;

    /// One of two kernels: the first is for f32, the second for bf16.
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

/// Refuses two lengths that have to be one.
pub(super) fn same_length(what: &str, a: usize, b: usize) -> Result<()> {
    if a != b {
        bail!("{what}: {a} values for {b}");
    }
    Ok(())
}

impl Gpu {
    /// Rounds to bf16.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn to_bf16(&self, x: &impl DevicePtr<f32>) -> Result<CudaSlice<bf16>> {
        let mut y = self.alloc(x.len())?;
        self.to_bf16_into(x, &mut y)?;
        Ok(y)
    }

    /// Rounds to bf16, into memory that is there.
    ///
    /// # Errors
    /// Lengths that differ.
    pub fn to_bf16_into(&self, x: &impl DevicePtr<f32>, y: &mut impl DevicePtrMut<bf16>) -> Result<()> {
        same_length("to_bf16", y.len(), x.len())?;
        self.over("to_bf16", x.len(), &mut [self.input(x), self.output(y), x.len().into()])
    }

    /// Sets `mark`, one number, to 1 where a value is not finite in bf16, and leaves it as it is elsewhere.
    ///
    /// # Errors
    /// More than one number as the mark.
    pub fn mark_not_finite(&self, x: &impl DevicePtr<f32>, mark: &mut impl DevicePtrMut<u32>) -> Result<()> {
        same_length("mark_not_finite", mark.len(), 1)?;
        self.over("mark_not_finite", x.len(), &mut [self.input(x), self.output(mark), x.len().into()])
    }

    /// Widens to f32.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn to_f32(&self, x: &impl DevicePtr<bf16>) -> Result<CudaSlice<f32>> {
        let mut y = self.alloc(x.len())?;
        self.over("to_f32", x.len(), &mut [self.input(x), self.output(&mut y), x.len().into()])?;
        Ok(y)
    }

    /// `sum += x`, value by value.
    ///
    /// # Errors
    /// Lengths that differ.
    pub fn add(&self, sum: &mut impl DevicePtrMut<f32>, x: &impl DevicePtr<f32>) -> Result<()> {
        same_length("add", x.len(), sum.len())?;
        self.over("add", x.len(), &mut [self.output(sum), self.input(x), x.len().into()])
    }

    /// `silu(gate) * up`: twin of `kernels::gated`.
    ///
    /// # Errors
    /// Lengths that differ.
    pub fn gated(&self, gate: &impl DevicePtr<bf16>, up: &impl DevicePtr<bf16>) -> Result<CudaSlice<bf16>> {
        same_length("gated", up.len(), gate.len())?;
        let mut y = self.alloc(gate.len())?;
        let mut args = [self.input(gate), self.input(up), self.output(&mut y), gate.len().into()];
        self.over("gated", gate.len(), &mut args)?;
        Ok(y)
    }

    /// [`Gpu::gated`]'s result again, and the gradients of `gate` and `up` for its gradient: twin of
    /// `kernels::gated_gradients`.
    ///
    /// # Errors
    /// Lengths that differ.
    pub fn gated_gradients(
        &self,
        gate: &impl DevicePtr<bf16>,
        up: &impl DevicePtr<bf16>,
        grad: &impl DevicePtr<bf16>,
    ) -> Result<[CudaSlice<bf16>; 3]> {
        same_length("gated_gradients", up.len(), gate.len())?;
        same_length("gated_gradients", grad.len(), gate.len())?;
        let n = gate.len();
        let (mut y, mut dgate, mut dup) = (self.alloc(n)?, self.alloc(n)?, self.alloc(n)?);
        let mut args = vec![self.input(gate), self.input(up), self.input(grad)];
        args.extend([self.output(&mut y), self.output(&mut dgate), self.output(&mut dup), n.into()]);
        self.over("gated_gradients", n, &mut args)?;
        Ok([y, dgate, dup])
    }

    /// Rows of a table `(n, width)`, widened: `(ids, width)` f32. Twin of `FrozenWeight::rows`; the caller has checked that ids
    /// are below `n`, a row beyond it is zeros.
    ///
    /// # Errors
    /// A table that is not whole rows.
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

    /// The same, into memory that is there.
    ///
    /// # Errors
    /// A table that is not whole rows, or lengths that differ.
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

    /// The listed rows of `all` `(N, width)`; a row beyond the last is zeros.
    ///
    /// # Errors
    /// Values that are not whole rows.
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

    /// The same, into memory that is there.
    ///
    /// # Errors
    /// Values that are not whole rows, or lengths that differ.
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

    /// Adds `picked` `(list, width)` to the listed rows of `all` `(N, width)`. No row is listed twice.
    ///
    /// # Errors
    /// Values that are not whole rows.
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

    /// `n` rows of `row` each, as the start of a product that is added to them.
    pub(super) fn repeated<T: Element>(&self, row: &impl DevicePtr<f32>, n: usize) -> Result<CudaSlice<T>> {
        let mut y = self.alloc(n * row.len())?;
        let mut args = [self.input(row), self.output(&mut y), n.into(), row.len().into()];
        self.over(T::kernel(["repeat_row_f32", "repeat_row_bf16"]), y.len(), &mut args)?;
        Ok(y)
    }

    /// Adds `row` to every row of `y`.
    pub(super) fn add_row(&self, y: &mut impl DevicePtrMut<f32>, row: &impl DevicePtr<f32>) -> Result<()> {
        let (len, width) = (y.len(), row.len());
        let n_rows = whole_rows("add_row", len, width)?;
        let row = self.input(row);
        self.over("add_row", len, &mut [row, self.output(y), n_rows.into(), width.into()])
    }

    /// Starts an element-wise kernel over `n` values.
    fn over(&self, name: &'static str, n: usize, args: &mut [super::launch::Arg]) -> Result<()> {
        // SAFETY: each caller above gives the parameters of its kernel in `cuda/elementwise.cuh`, and the lengths it checked.
        unsafe { self.launch(name, [blocks_for(n, self.n_processors()), 1, 1], THREADS, 0, args) }
    }
}

/// How many rows of `width` there are.
pub(super) fn whole_rows(what: &str, len: usize, width: usize) -> Result<usize> {
    if width == 0 || !len.is_multiple_of(width) {
        bail!("{what}: {len} values are not rows of {width}");
    }
    Ok(len / width)
}
