//! The one place that calls the `gemm` crate.

use candle_core::{Result, bail};

/// A matrix view of shape `(rows, cols)` with arbitrary strides.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// A row-major matrix whose rows start `row_stride` apart.
    pub(crate) fn strided(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            data: self.data,
        }
    }

    fn fits(&self) -> bool {
        self.rows == 0
            || self.cols == 0
            || (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride < self.data.len()
    }
}

/// `dst = keep * dst + alpha * lhs rhs`, row-major `dst` of `lhs.rows` by `rhs.cols`; single-threaded, because the callers are parallel.
pub(crate) fn matmul(dst: &mut [f32], keep: f32, alpha: f32, lhs: Mat<'_>, rhs: Mat<'_>) -> Result<()> {
    if dst.len() != lhs.rows * rhs.cols {
        bail!("matmul: expected {} x {} values, got {}", lhs.rows, rhs.cols, dst.len());
    }
    matmul_into(dst, rhs.cols, keep, alpha, lhs, rhs)
}

/// Like [`matmul`], into rows that start `row_stride` values apart; the values between rows are not changed.
pub(crate) fn matmul_into(
    dst: &mut [f32],
    row_stride: usize,
    keep: f32,
    alpha: f32,
    lhs: Mat<'_>,
    rhs: Mat<'_>,
) -> Result<()> {
    let (m, n, k) = (lhs.rows, rhs.cols, lhs.cols);
    if m == 0 || n == 0 {
        return Ok(());
    }
    if rhs.rows != k || n > row_stride || (m - 1) * row_stride + n > dst.len() || !lhs.fits() || !rhs.fits() {
        bail!("matmul: ({m}, {k}) by ({}, {n}) into {} values", rhs.rows, dst.len());
    }
    // SAFETY: `fits` holds for both operands and `dst` has m rows of n values `row_stride` apart, so every address that gemm forms from these
    // pointers, sizes and strides lies inside its slice; `dst` is borrowed mutably, so it overlaps neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            row_stride as isize,
            keep != 0.0,
            lhs.data.as_ptr(),
            lhs.col_stride as isize,
            lhs.row_stride as isize,
            rhs.data.as_ptr(),
            rhs.col_stride as isize,
            rhs.row_stride as isize,
            keep,
            alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_transposes_and_accumulation() {
        let a = [1.0, 2.0, 9.0, 3.0, 4.0, 9.0]; // (2, 2) with row stride 3
        let b = [5.0, 6.0, 7.0, 8.0];
        let mut c = [1.0; 4];
        matmul(&mut c, 1.0, 2.0, Mat::strided(&a, 2, 2, 3), Mat::new(&b, 2, 2).t()).unwrap();
        assert_eq!(c, [1.0 + 2.0 * 17.0, 1.0 + 2.0 * 23.0, 1.0 + 2.0 * 39.0, 1.0 + 2.0 * 53.0]);
        assert!(matmul(&mut c, 0.0, 1.0, Mat::new(&a, 2, 3), Mat::new(&b, 2, 2)).is_err());
    }
}
