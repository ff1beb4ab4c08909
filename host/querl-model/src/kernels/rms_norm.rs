//! Root-mean-square normalisation.

use super::{ROWS_PER_TASK, floats, with_floats};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

struct RmsNorm {
    eps: f32,
}

/// `x / sqrt(mean(x^2) + eps) * weight` over the last axis.
///
/// `x`: `(..., size)`; `weight`: `(size)`. Gradients reach both.
///
/// # Errors
/// Shapes that do not fit, or tensors other than f32 on the CPU.
///
/// Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    x.contiguous()?.apply_op2(weight, RmsNorm { eps: eps as f32 })
}

fn inverse_rms(row: &[f32], eps: f32) -> f32 {
    let sum: f32 = row.iter().map(|x| x * x).sum();
    1.0 / (sum / row.len() as f32 + eps).sqrt()
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, weight) = (floats(x, x_layout)?, floats(weight, weight_layout)?);
        let size = weight.len();
        let mut y = vec![0f32; x.len()];
        y.par_chunks_mut(size * ROWS_PER_TASK).zip(x.par_chunks(size * ROWS_PER_TASK)).for_each(|(y, x)| {
            for (y, x) in y.chunks_exact_mut(size).zip(x.chunks_exact(size)) {
                let inverse = inverse_rms(x, self.eps);
                for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                    *y = x * inverse * weight;
                }
            }
        });
        Ok((CpuStorage::F32(y), x_layout.shape().clone()))
    }

    /// With `r` the inverse root: `dx = g w r - x r^3 / size * sum(g w x)`, `dw = sum over rows of g x r`.
    fn bwd(&self, x: &Tensor, weight: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let size = weight.dim(0)?;
        let (dx, dw) = with_floats(x, |x| {
            with_floats(weight, |weight| with_floats(grad, |grad| Ok(self.gradients(x, weight, grad))))
        })?;
        let dw = if weight.is_variable() { Some(Tensor::from_vec(dw, size, weight.device())?) } else { None };
        Ok((Some(Tensor::from_vec(dx, x.shape(), x.device())?), dw))
    }
}

impl RmsNorm {
    fn gradients(&self, x: &[f32], weight: &[f32], grad: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let size = weight.len();
        let task = size * ROWS_PER_TASK;
        let mut dx = vec![0f32; x.len()];
        let partial: Vec<Vec<f32>> = dx
            .par_chunks_mut(task)
            .zip(x.par_chunks(task))
            .zip(grad.par_chunks(task))
            .map(|((dx, x), grad)| {
                let mut dw = vec![0f32; size];
                let rows = dx.chunks_exact_mut(size).zip(x.chunks_exact(size)).zip(grad.chunks_exact(size));
                for ((dx, x), grad) in rows {
                    let inverse = inverse_rms(x, self.eps);
                    let dot: f32 = grad.iter().zip(weight).zip(x).map(|((g, w), x)| g * w * x).sum();
                    let pull = dot * inverse * inverse * inverse / size as f32;
                    for i in 0..size {
                        dx[i] = grad[i] * weight[i] * inverse - x[i] * pull;
                        dw[i] += grad[i] * x[i] * inverse;
                    }
                }
                dw
            })
            .collect();
        // Summed in task order: the result does not depend on which thread finished first.
        let mut dw = vec![0f32; size];
        for part in partial {
            dw.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        (dx, dw)
    }
}
