//! Rotary position embedding, alone or after the norm of each head.

use super::elementwise::{inverse_rms, row_gradient, sum_of};
use super::simd::vectorised;
use super::{ROWS_PER_TASK, filled, slice_op, values_per_task};
use crate::RopeScaling;
use crate::config::inverse_frequencies;
use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// RoPE table: cosines and sines of every position and frequency, multiplied by YaRN's attention factor if the scaling is YaRN.
#[derive(Clone)]
pub struct RopeTable {
    cos: Arc<Vec<f32>>, // (positions, D / 2)
    sin: Arc<Vec<f32>>,
    head_dim: usize,
}

impl RopeTable {
    /// A table of the angles `position * theta^(-2j / head_dim)` for positions below `n_positions`.
    pub fn new(n_positions: usize, head_dim: usize, theta: f64) -> Self {
        Self::scaled(n_positions, head_dim, theta, None)
    }

    /// Like [`RopeTable::new`], with scaled frequencies.
    pub fn scaled(n_positions: usize, head_dim: usize, theta: f64, scaling: Option<&RopeScaling>) -> Self {
        let (frequencies, factor) = inverse_frequencies(head_dim, theta, scaling);
        let angles = (0..n_positions).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
        let (cos, sin) = angles.map(|angle| (angle.cos() * factor, angle.sin() * factor)).unzip();
        Self { cos: Arc::new(cos), sin: Arc::new(sin), head_dim }
    }

    /// Cosines and sines of one position, `D / 2` each.
    pub fn angles(&self, position: usize) -> (&[f32], &[f32]) {
        let half = self.head_dim / 2;
        let angles = position * half..(position + 1) * half;
        (&self.cos[angles.clone()], &self.sin[angles])
    }

    /// All cosines and all sines, `(positions, D / 2)` each, and the head size D.
    pub fn tables(&self) -> (&[f32], &[f32], usize) {
        (&self.cos, &self.sin, self.head_dim)
    }

    fn n_positions(&self) -> usize {
        self.cos.len() / (self.head_dim / 2)
    }

    /// [`rope`], or with the weight and epsilon of a norm [`norm_rope`], on slices: `x` is `(N, heads * D)`.
    pub fn apply(&self, x: &[f32], norm: Option<(&[f32], f32)>, positions: &[u32]) -> Result<Vec<f32>> {
        let width = x.len() / positions.len().max(1);
        self.check(positions.len(), width, positions)?;
        Ok(self.rotate(x, norm, positions, 1.0))
    }

    /// Gradients of `x`, and of the first `n_trained` values of the norm's weight, for the gradient of [`RopeTable::apply`]'s
    /// result. Without a norm `x` is not read.
    pub fn apply_backward(
        &self,
        x: &[f32],
        norm: Option<(&[f32], f32)>,
        positions: &[u32],
        grad: &[f32],
        n_trained: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        match norm {
            None => (self.rotate(grad, None, positions, -1.0), Vec::new()),
            Some(norm) => self.norm_rotate_backward(x, norm, positions, grad, n_trained),
        }
    }

    fn check(&self, n_rows: usize, width: usize, positions: &[u32]) -> Result<()> {
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            bail!("rope: heads of {}; expected an even width above 0", self.head_dim);
        }
        if positions.len() != n_rows || !width.is_multiple_of(self.head_dim) {
            bail!("rope: {} positions for {n_rows} rows of {width}, heads of {}", positions.len(), self.head_dim);
        }
        match positions.iter().find(|&&p| p as usize >= self.n_positions()) {
            Some(position) => bail!("position {position} is beyond the model's {} positions", self.n_positions()),
            None => Ok(()),
        }
    }
}

/// Rotates each head of each row by its position; the first half of a head pairs with the second.
///
/// `x`: `(N, heads * D)`; `positions`: N of them. Returns `(N, heads * D)`.
///
/// # Errors
/// A position outside the table, or tensors other than f32 on the CPU.
///
/// Source: Su et al. 2021, "RoFormer"; the half-split layout of transformers' `rotate_half`.
pub fn rope(x: &Tensor, table: &RopeTable, positions: &Arc<Vec<u32>>) -> Result<Tensor> {
    let (n_rows, width) = x.dims2()?;
    table.check(n_rows, width, positions)?;
    let (forward, backward) = ((table.clone(), positions.clone()), (table.clone(), positions.clone()));
    slice_op(
        "rope",
        [&x.contiguous()?],
        x.shape(),
        move |[x]| Ok(forward.0.rotate(x, None, &forward.1, 1.0)),
        move |_, [_, grad]| Ok([Some(backward.0.rotate(grad, None, &backward.1, -1.0))]),
    )
}

/// [`super::rms_norm`] of each head, then [`rope`], in one pass: queries and keys of Qwen3.
///
/// `x`: `(N, heads * D)`; `weight`: `(D)`; `positions`: N of them. Returns `(N, heads * D)`. Gradients reach `x`, and `weight`
/// where it is a variable.
///
/// # Errors
/// As [`rope`] and [`super::rms_norm`].
pub fn norm_rope(
    x: &Tensor,
    weight: &Tensor,
    table: &RopeTable,
    positions: &Arc<Vec<u32>>,
    eps: f64,
) -> Result<Tensor> {
    let (n_rows, width) = x.dims2()?;
    table.check(n_rows, width, positions)?;
    if weight.dims() != [table.head_dim] {
        bail!("norm_rope: a weight {:?} for heads of {}", weight.dims(), table.head_dim);
    }
    let (forward, backward) = ((table.clone(), positions.clone()), (table.clone(), positions.clone()));
    let (eps, n_trained) = (eps as f32, if weight.is_variable() { table.head_dim } else { 0 });
    slice_op(
        "norm-rope",
        [&x.contiguous()?, weight],
        x.shape(),
        move |[x, weight]| Ok(forward.0.rotate(x, Some((weight, eps)), &forward.1, 1.0)),
        move |[x, weight], [_, grad]| {
            let (table, positions) = &backward;
            let (dx, dweight) = table.norm_rotate_backward(x, (weight, eps), positions, grad, n_trained);
            Ok([Some(dx), (n_trained > 0).then_some(dweight)])
        },
    )
}

/// Applies RoPE to one head; `direction` -1 applies the inverse rotation, which is the gradient.
#[inline(always)]
fn rope_head(x: &[f32], cos: &[f32], sin: &[f32], direction: f32, y: &mut [MaybeUninit<f32>]) {
    let half = cos.len();
    let (y0, y1) = y.split_at_mut(half);
    let (x0, x1) = x.split_at(half);
    for ((((y0, y1), x0), x1), (cos, sin)) in y0.iter_mut().zip(y1).zip(x0).zip(x1).zip(cos.iter().zip(sin)) {
        let sin = sin * direction;
        y0.write(x0 * cos - x1 * sin);
        y1.write(x1 * cos + x0 * sin);
    }
}

vectorised! {
    fn rope_row(x: &[f32], cos: &[f32], sin: &[f32], direction: f32, y: &mut [MaybeUninit<f32>]) {
        let dim = 2 * cos.len();
        for (y, x) in y.chunks_exact_mut(dim).zip(x.chunks_exact(dim)) {
            rope_head(x, cos, sin, direction, y);
        }
    }
}

vectorised! {
    /// RMSNorm and RoPE of all heads of a row; `head` is scratch for one head.
    fn norm_rope_row(
        x: &[f32],
        weight: &[f32],
        eps: f32,
        angles: (&[f32], &[f32]),
        head: &mut [f32],
        y: &mut [MaybeUninit<f32>],
    ) {
        for (y, x) in y.chunks_exact_mut(weight.len()).zip(x.chunks_exact(weight.len())) {
            let inverse = inverse_rms(x, eps);
            for ((head, x), weight) in head.iter_mut().zip(x).zip(weight) {
                *head = x * inverse * weight;
            }
            rope_head(head, angles.0, angles.1, 1.0, y);
        }
    }
}

vectorised! {
    /// Gradient of [`norm_rope_row`]. `norm`: the weight and epsilon of the norm.
    fn norm_rope_gradient(
        x: &[f32],
        norm: (&[f32], f32),
        angles: (&[f32], &[f32]),
        grad: &[f32],
        head: &mut [MaybeUninit<f32>],
        dx: &mut [MaybeUninit<f32>],
        dw: &mut [f32],
    ) {
        let ((weight, eps), dim) = (norm, norm.0.len());
        for ((dx, x), grad) in dx.chunks_exact_mut(dim).zip(x.chunks_exact(dim)).zip(grad.chunks_exact(dim)) {
            rope_head(grad, angles.0, angles.1, -1.0, head);
            // SAFETY: the rotation writes both halves of a head.
            row_gradient(x, weight, unsafe { head.assume_init_ref() }, eps, None, dx, dw);
        }
    }
}

impl RopeTable {
    /// Number of values per row of `x`: complete heads, the same number for each position.
    fn row_width(&self, x: &[f32], positions: &[u32]) -> usize {
        let width = x.len() / positions.len().max(1);
        assert!(x.len() == positions.len() * width && width.is_multiple_of(self.head_dim), "whole heads");
        width
    }

    /// Applies the norm, if there is one, and then RoPE; `direction` -1 is the gradient of RoPE alone.
    fn rotate(&self, x: &[f32], norm: Option<(&[f32], f32)>, positions: &[u32], direction: f32) -> Vec<f32> {
        let width = self.row_width(x, positions);
        let task = values_per_task(width);
        assert!(norm.is_none_or(|(weight, _)| weight.len() == self.head_dim), "a weight for each value of a head");
        let fill = |y: &mut [MaybeUninit<f32>]| {
            let tasks = y.par_chunks_mut(task).zip(x.par_chunks(task));
            tasks.zip(positions.par_chunks(ROWS_PER_TASK)).for_each(|((y, x), positions)| {
                let mut head = vec![0f32; norm.map_or(0, |(weight, _)| weight.len())];
                for ((y, x), &position) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(positions) {
                    let (cos, sin) = self.angles(position as usize);
                    match norm {
                        None => rope_row(x, cos, sin, direction, y),
                        Some((weight, eps)) => norm_rope_row(x, weight, eps, (cos, sin), &mut head, y),
                    }
                }
            });
        };
        // SAFETY: there is a position for each row, and each value of a row's heads is written.
        unsafe { filled(x.len(), fill) }.0
    }

    fn norm_rotate_backward(
        &self,
        x: &[f32],
        norm: (&[f32], f32),
        positions: &[u32],
        grad: &[f32],
        n_trained: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let width = self.row_width(x, positions);
        let task = values_per_task(width);
        assert_eq!(norm.0.len(), self.head_dim, "a weight for each value of a head");
        assert_eq!(x.len(), grad.len(), "a gradient for each value");
        let fill = |dx: &mut [MaybeUninit<f32>]| -> Vec<Vec<f32>> {
            let tasks = dx.par_chunks_mut(task).zip(x.par_chunks(task)).zip(grad.par_chunks(task));
            let parts = tasks.zip(positions.par_chunks(ROWS_PER_TASK)).map(|(((dx, x), grad), positions)| {
                let (mut head, mut dw) = (vec![MaybeUninit::uninit(); self.head_dim], vec![0f32; n_trained]);
                let rows = dx.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(grad.chunks_exact(width));
                for (((dx, x), grad), &position) in rows.zip(positions) {
                    norm_rope_gradient(x, norm, self.angles(position as usize), grad, &mut head, dx, &mut dw);
                }
                dw
            });
            parts.collect()
        };
        // SAFETY: as for `rotate`.
        let (dx, parts) = unsafe { filled(x.len(), fill) };
        (dx, sum_of(parts, n_trained))
    }
}
