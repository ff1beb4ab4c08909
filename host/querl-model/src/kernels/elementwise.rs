//! Row-wise and element-wise operations: RMSNorm, and the gated activation SwiGLU.

use super::simd::vectorised;
use super::{dot, dot3, exp, filled, slice_op, values_per_task};
use crate::accelerator::accelerator_of;
use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;
use std::mem::MaybeUninit;

/// `x / sqrt(mean(x^2) + eps) * weight` over the last axis.
///
/// `x`: `(..., size)`; `weight`: `(size)`. Gradients reach `x`, and `weight` where it is a variable.
///
/// # Errors
/// Shapes that do not fit, or tensors other than f32 on the CPU.
///
/// Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let size = weight.dims1()?;
    if size == 0 || x.dims().last() != Some(&size) {
        bail!("rms_norm: a weight of {size} values for a tensor {:?}", x.dims());
    }
    if let Some(accelerator) = accelerator_of(x)? {
        return accelerator.rms_norm(x, weight, eps as f32);
    }
    let (eps, n_trained) = (eps as f32, if weight.is_variable() { size } else { 0 });
    slice_op(
        "rms-norm",
        [&x.contiguous()?, weight],
        x.shape(),
        move |[x, weight]| Ok(rms_norm_forward(x, weight, eps)),
        move |[x, weight], [_, grad]| {
            let (dx, dweight) = rms_norm_backward(x, weight, eps, grad, None, n_trained);
            Ok([Some(dx), (n_trained > 0).then_some(dweight)])
        },
    )
}

#[inline(always)]
pub(super) fn inverse_rms(row: &[f32], eps: f32) -> f32 {
    1.0 / (dot(row, row) / row.len() as f32 + eps).sqrt()
}

/// Gradient of RMSNorm for one row: `dx = g w r - x r^3 / size * sum(g w x)`, plus `more` if not empty; `dw += g x r`. `r` is the inverse
/// root mean square. An empty `dw` is not computed.
#[inline(always)]
pub(super) fn row_gradient(
    x: &[f32],
    weight: &[f32],
    grad: &[f32],
    eps: f32,
    more: Option<&[f32]>,
    dx: &mut [MaybeUninit<f32>],
    dw: &mut [f32],
) {
    let inverse = inverse_rms(x, eps);
    let pull = dot3(grad, weight, x) * inverse * inverse * inverse / x.len() as f32;
    let values = dx.iter_mut().zip(x).zip(grad).zip(weight);
    match more {
        None => values.for_each(|(((dx, x), grad), weight)| _ = dx.write(grad * weight * inverse - x * pull)),
        Some(more) => values
            .zip(more)
            .for_each(|((((dx, x), grad), weight), more)| _ = dx.write(grad * weight * inverse - x * pull + more)),
    }
    for ((dw, x), grad) in dw.iter_mut().zip(x).zip(grad) {
        *dw += grad * x * inverse;
    }
}

vectorised! {
    fn normalise(x: &[f32], weight: &[f32], eps: f32, y: &mut [MaybeUninit<f32>]) {
        for (y, x) in y.chunks_exact_mut(weight.len()).zip(x.chunks_exact(weight.len())) {
            let inverse = inverse_rms(x, eps);
            for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                y.write(x * inverse * weight);
            }
        }
    }
}

vectorised! {
    fn gradients(
        x: &[f32],
        weight: &[f32],
        grad: &[f32],
        eps: f32,
        more: Option<&[f32]>,
        dx: &mut [MaybeUninit<f32>],
        dw: &mut [f32],
    ) {
        let size = weight.len();
        let rows = dx.chunks_exact_mut(size).zip(x.chunks_exact(size)).zip(grad.chunks_exact(size));
        for (row, ((dx, x), grad)) in rows.enumerate() {
            row_gradient(x, weight, grad, eps, more.map(|more| &more[row * size..(row + 1) * size]), dx, dw);
        }
    }
}

/// Like [`rms_norm`], on slices: `x` has rows of as many values as `weight`.
pub fn rms_norm_forward(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let task = values_per_task(weight.len());
    assert!(x.len().is_multiple_of(weight.len()), "whole rows");
    let fill = |y: &mut [MaybeUninit<f32>]| {
        y.par_chunks_mut(task).zip(x.par_chunks(task)).for_each(|(y, x)| normalise(x, weight, eps, y));
    };
    // SAFETY: tasks are complete rows of a slice as long as the result, and each value of a row is written.
    unsafe { filled(x.len(), fill) }.0
}

/// Gradients of `x`, to which `more` is added if there is any, and of the first `n_trained` values of the weight, for the gradient of
/// [`rms_norm_forward`]'s result.
pub fn rms_norm_backward(
    x: &[f32],
    weight: &[f32],
    eps: f32,
    grad: &[f32],
    more: Option<&[f32]>,
    n_trained: usize,
) -> (Vec<f32>, Vec<f32>) {
    let task = values_per_task(weight.len());
    assert!(x.len().is_multiple_of(weight.len()) && x.len() == grad.len(), "whole rows, and a gradient for each value");
    assert!(more.is_none_or(|more| more.len() == x.len()), "as many values to add");
    let fill = |dx: &mut [MaybeUninit<f32>]| -> Vec<Vec<f32>> {
        let tasks = dx.par_chunks_mut(task).zip(x.par_chunks(task)).zip(grad.par_chunks(task));
        let parts = tasks.enumerate().map(|(index, ((dx, x), grad))| {
            let mut dw = vec![0f32; n_trained];
            let more = more.map(|more| &more[index * task..index * task + x.len()]);
            gradients(x, weight, grad, eps, more, dx, &mut dw);
            dw
        });
        parts.collect()
    };
    // SAFETY: as for `normed`.
    let (dx, parts) = unsafe { filled(x.len(), fill) };
    (dx, sum_of(parts, n_trained))
}

/// Sums the parts of all tasks in the order of tasks, so that the result does not depend on thread timing.
pub(super) fn sum_of(parts: Vec<Vec<f32>>, size: usize) -> Vec<f32> {
    let mut sum = vec![0f32; size];
    for part in parts {
        sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    sum
}

/// Values that one parallel task works on.
const VALUES_PER_TASK: usize = 16_384;

/// `silu(gate) * up`, value by value; gradients reach both.
///
/// # Errors
/// Shapes that differ, or tensors other than f32 on the CPU.
///
/// Source: Shazeer 2020, "GLU Variants Improve Transformer".
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.dims() != up.dims() {
        bail!("swiglu: a gate {:?} for {:?}", gate.dims(), up.dims());
    }
    slice_op(
        "swiglu",
        [&gate.contiguous()?, &up.contiguous()?],
        gate.shape(),
        |[gate, up]| Ok(swiglu_forward(gate, up)),
        |[gate, up], [_, grad]| {
            let [_, dgate, dup] = swiglu_backward(gate, up, grad);
            Ok([Some(dgate), Some(dup)])
        },
    )
}

vectorised! {
    fn activate(gate: &[f32], up: &[f32], y: &mut [MaybeUninit<f32>]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            y.write(gate * (1.0 / (1.0 + exp(-gate))) * up);
        }
    }
}

vectorised! {
    /// Writes the result and the gradients of gate and up into `out`. With `s` the sigmoid of the gate: `d silu / d gate = s (1 + gate (1 -
    /// s))`.
    fn swiglu_gradients(gate: &[f32], up: &[f32], grad: &[f32], out: [&mut [MaybeUninit<f32>]; 3]) {
        let [y, dgate, dup] = out;
        let outputs = y.iter_mut().zip(dgate).zip(dup);
        for (((((y, dgate), dup), gate), up), grad) in outputs.zip(gate).zip(up).zip(grad) {
            let sigmoid = 1.0 / (1.0 + exp(-gate));
            let silu = gate * sigmoid;
            y.write(silu * up);
            dgate.write(grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)));
            dup.write(grad * silu);
        }
    }
}

/// Like [`swiglu`], on slices.
pub fn swiglu_forward(gate: &[f32], up: &[f32]) -> Vec<f32> {
    assert_eq!(gate.len(), up.len(), "a gate for each value");
    let fill = |y: &mut [MaybeUninit<f32>]| {
        let tasks = y.par_chunks_mut(VALUES_PER_TASK).zip(gate.par_chunks(VALUES_PER_TASK));
        tasks.zip(up.par_chunks(VALUES_PER_TASK)).for_each(|((y, gate), up)| activate(gate, up, y));
    };
    // SAFETY: the slices are equally long, and each value of a chunk is written.
    unsafe { filled(gate.len(), fill) }.0
}

/// The result of [`swiglu_forward`], and the gradients of `gate` and `up` for the gradient `grad` of this result.
pub fn swiglu_backward(gate: &[f32], up: &[f32], grad: &[f32]) -> [Vec<f32>; 3] {
    assert!(gate.len() == up.len() && gate.len() == grad.len(), "a gate and a gradient for each value");
    let fill = |y: &mut [MaybeUninit<f32>], dgate: &mut [MaybeUninit<f32>], dup: &mut [MaybeUninit<f32>]| {
        let out = dgate.par_chunks_mut(VALUES_PER_TASK).zip(dup.par_chunks_mut(VALUES_PER_TASK));
        let inputs = gate.par_chunks(VALUES_PER_TASK).zip(up.par_chunks(VALUES_PER_TASK));
        y.par_chunks_mut(VALUES_PER_TASK)
            .zip(out)
            .zip(inputs)
            .zip(grad.par_chunks(VALUES_PER_TASK))
            .for_each(|(((y, (dgate, dup)), (gate, up)), grad)| swiglu_gradients(gate, up, grad, [y, dgate, dup]));
    };
    let n = gate.len();
    // SAFETY: the slices are equally long, and each value of all three is written.
    let (y, (dgate, (dup, ()))) = unsafe { filled(n, |y| filled(n, |dgate| filled(n, |dup| fill(y, dgate, dup)))) };
    [y, dgate, dup]
}
