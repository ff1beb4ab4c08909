//! Matrix products by cuBLAS: bf16 factors, f32 accumulation, a result of either type.

use super::elementwise::{Element, whole_rows};
use super::gpu::Gpu;
use super::launch::Arg;
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DevicePtrMut};
use candle_core::{Error, Result, bail};
use half::bf16;
use std::marker::PhantomData;
use std::ops::Range;

/// A factor of a matrix product: row-major bf16 values, possibly read as their transpose.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    address: u64,
    values: PhantomData<&'a [bf16]>,
    n_rows: usize,
    n_columns: usize,
    is_transposed: bool,
}

/// Factors of a product that is written or added to its output: `out = alpha * product + beta * out`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    pub alpha: f32,
    /// Factor on the previous output; with 0 the output is not read.
    pub beta: f32,
}

impl Scale {
    pub const WRITE: Self = Self { alpha: 1.0, beta: 0.0 };
    /// Adds the product to the output.
    pub const ADD: Self = Self { alpha: 1.0, beta: 1.0 };
}

impl<'a> Matrix<'a> {
    /// A matrix of all `values`, with `n_columns` columns.
    pub fn of(gpu: &Gpu, values: &'a impl DevicePtr<bf16>, n_columns: usize) -> Result<Self> {
        let n_rows = whole_rows("product", values.len(), n_columns)?;
        let address = values.device_ptr(gpu.stream()).0;
        Ok(Self { address, values: PhantomData, n_rows, n_columns, is_transposed: false })
    }

    /// A matrix of the first `n_rows * n_columns` of `values`.
    pub fn beginning(gpu: &Gpu, values: &'a impl DevicePtr<bf16>, n_rows: usize, n_columns: usize) -> Result<Self> {
        if values.len() < n_rows * n_columns {
            bail!("product: {n_rows} rows of {n_columns} in {} values", values.len());
        }
        let address = values.device_ptr(gpu.stream()).0;
        Ok(Self { address, values: PhantomData, n_rows, n_columns, is_transposed: false })
    }

    /// The given rows, counted as stored (before a transpose).
    pub fn part(&self, rows: Range<usize>) -> Result<Self> {
        if rows.start > rows.end || rows.end > self.n_rows {
            bail!("product: rows {rows:?} of {}", self.n_rows);
        }
        let address = self.address + (rows.start * self.n_columns * size_of::<bf16>()) as u64;
        Ok(Self { address, n_rows: rows.len(), ..*self })
    }

    /// Number of rows as stored, before a transpose.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    pub(super) fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// Address of the matrix, for a kernel.
    pub(super) fn input(&self) -> Arg {
        Arg::pointer(self.address)
    }

    /// The transpose, without a copy.
    pub fn t(&self) -> Self {
        Self { is_transposed: !self.is_transposed, ..*self }
    }

    fn dims(&self) -> (usize, usize) {
        if self.is_transposed { (self.n_columns, self.n_rows) } else { (self.n_rows, self.n_columns) }
    }

    fn operation(&self) -> sys::cublasOperation_t {
        if self.is_transposed { sys::cublasOperation_t::CUBLAS_OP_T } else { sys::cublasOperation_t::CUBLAS_OP_N }
    }
}

impl Gpu {
    /// Matrix product `left right`, `(M, K) (K, N)`, into `out` `(M, N)` row-major.
    pub fn product<T: Element>(
        &self,
        left: &Matrix<'_>,
        right: &Matrix<'_>,
        out: &mut impl DevicePtrMut<T>,
        scale: Scale,
    ) -> Result<()> {
        let ((m, k), (k_right, n)) = (left.dims(), right.dims());
        if k != k_right || out.len() != m * n {
            bail!("product: ({m}, {k}) and ({k_right}, {n}) into {} values", out.len());
        }
        if m == 0 || n == 0 {
            return Ok(());
        }
        if k == 0 {
            return self.without_terms(out, scale);
        }
        let int = |value: usize| i32::try_from(value).map_err(|_| Error::Msg(format!("product: {value} is too wide")));
        let stream = self.stream();
        let (out_at, _guard) = out.device_ptr_mut(stream);
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        #[cfg(test)]
        super::launch::count();
        // cuBLAS is column-major: it sees the transpose of every matrix, and computes `out^T = right^T left^T`.
        self.timed("product", || {
            // SAFETY: all three are on the GPU with the lengths checked above, and the scalars outlive the call.
            unsafe {
                result::gemm_ex(
                    *self.blas().handle(),
                    right.operation(),
                    left.operation(),
                    int(n)?,
                    int(m)?,
                    int(k)?,
                    (&raw const scale.alpha).cast(),
                    right.address as *const _,
                    bf16::CUDA_TYPE,
                    int(right.n_columns)?,
                    left.address as *const _,
                    bf16::CUDA_TYPE,
                    int(left.n_columns)?,
                    (&raw const scale.beta).cast(),
                    out_at as *mut _,
                    T::CUDA_TYPE,
                    int(n)?,
                    sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
                )
            }
            .map_err(|error| self.blas_error(error).context(format!("product of ({m}, {k}) and ({k}, {n})")))
        })
    }

    fn without_terms<T: Element>(&self, out: &mut impl DevicePtrMut<T>, scale: Scale) -> Result<()> {
        if scale.beta == 1.0 {
            return Ok(());
        }
        if scale.beta != 0.0 {
            bail!("product: nothing to add to {} values times {}", out.len(), scale.beta);
        }
        self.stream().memset_zeros(out).map_err(Error::wrap)
    }
}
