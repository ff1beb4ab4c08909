//! Rotary position embedding.

use super::{ROWS_PER_TASK, floats, with_floats};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;
use std::sync::Arc;

/// Cosines and sines of every position and frequency.
#[derive(Clone)]
pub struct RopeTable {
    cos: Arc<Vec<f32>>, // (positions, D / 2)
    sin: Arc<Vec<f32>>,
    head_dim: usize,
}

impl RopeTable {
    /// Angles `position * theta^(-2j / head_dim)` for positions below `n_positions`.
    pub fn new(n_positions: usize, head_dim: usize, theta: f64) -> Self {
        let half = head_dim / 2;
        let inverse_frequencies: Vec<f32> =
            (0..half).map(|j| 1f32 / (theta.powf(2.0 * j as f64 / head_dim as f64) as f32)).collect();
        let angles = (0..n_positions).flat_map(|p| inverse_frequencies.iter().map(move |f| p as f32 * f));
        let (cos, sin) = angles.map(|angle| (angle.cos(), angle.sin())).unzip();
        Self { cos: Arc::new(cos), sin: Arc::new(sin), head_dim }
    }

    fn n_positions(&self) -> usize {
        self.cos.len() / (self.head_dim / 2)
    }
}

struct Rope {
    table: RopeTable,
    positions: Arc<Vec<u32>>,
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
    if positions.len() != x.dim(0)? {
        bail!("rope: {} positions for {} rows", positions.len(), x.dim(0)?);
    }
    if let Some(position) = positions.iter().find(|&&p| p as usize >= table.n_positions()) {
        bail!("position {position} is beyond the model's {} positions", table.n_positions());
    }
    x.contiguous()?.apply_op1(Rope { table: table.clone(), positions: positions.clone() })
}

impl Rope {
    /// `direction` 1 rotates, -1 rotates back, which is the gradient.
    fn rotate(&self, x: &[f32], width: usize, direction: f32) -> Vec<f32> {
        let half = self.table.head_dim / 2;
        let mut y = vec![0f32; x.len()];
        let tasks = y.par_chunks_mut(width * ROWS_PER_TASK).zip(x.par_chunks(width * ROWS_PER_TASK));
        tasks.zip(self.positions.par_chunks(ROWS_PER_TASK)).for_each(|((y, x), positions)| {
            for ((y, x), &position) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(positions) {
                let angles = position as usize * half..(position as usize + 1) * half;
                let (cos, sin) = (&self.table.cos[angles.clone()], &self.table.sin[angles]);
                for (y, x) in y.chunks_exact_mut(2 * half).zip(x.chunks_exact(2 * half)) {
                    let (y0, y1) = y.split_at_mut(half);
                    let (x0, x1) = x.split_at(half);
                    for j in 0..half {
                        let sin = sin[j] * direction;
                        y0[j] = x0[j] * cos[j] - x1[j] * sin;
                        y1[j] = x1[j] * cos[j] + x0[j] * sin;
                    }
                }
            }
        });
        y
    }
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let width = layout.shape().dims2()?.1;
        let y = self.rotate(floats(storage, layout)?, width, 1.0);
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let width = x.dim(1)?;
        let dx = with_floats(grad, |grad| Ok(self.rotate(grad, width, -1.0)))?;
        Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
    }
}
