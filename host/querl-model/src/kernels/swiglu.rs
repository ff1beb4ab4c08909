//! The gated activation of the feed-forward layers.

use super::simd::vectorised;
use super::{exp, filled, floats, with_floats};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;
use std::mem::MaybeUninit;

struct SwiGlu;

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
    gate.contiguous()?.apply_op2(&up.contiguous()?, SwiGlu)
}

vectorised! {
    fn activate(gate: &[f32], up: &[f32], y: &mut [MaybeUninit<f32>]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            y.write(gate * (1.0 / (1.0 + exp(-gate))) * up);
        }
    }
}

vectorised! {
    /// `out`: the result, gradients of gate and up. With `s` the sigmoid of the gate:
    /// `d silu / d gate = s (1 + gate (1 - s))`.
    fn gradients(gate: &[f32], up: &[f32], grad: &[f32], out: [&mut [MaybeUninit<f32>]; 3]) {
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

/// [`swiglu`] on slices.
pub fn gated(gate: &[f32], up: &[f32]) -> Vec<f32> {
    assert_eq!(gate.len(), up.len(), "a gate for each value");
    let fill = |y: &mut [MaybeUninit<f32>]| {
        let tasks = y.par_chunks_mut(VALUES_PER_TASK).zip(gate.par_chunks(VALUES_PER_TASK));
        tasks.zip(up.par_chunks(VALUES_PER_TASK)).for_each(|((y, gate), up)| activate(gate, up, y));
    };
    // SAFETY: the slices are equally long, and each value of a chunk is written.
    unsafe { filled(gate.len(), fill) }.0
}

/// [`gated`]'s result again, and the gradients of `gate` and `up` for its gradient.
pub fn gated_gradients(gate: &[f32], up: &[f32], grad: &[f32]) -> [Vec<f32>; 3] {
    assert!(gate.len() == up.len() && gate.len() == grad.len(), "a gate and a gradient for each value");
    let fill = |y: &mut [MaybeUninit<f32>], dgate: &mut [MaybeUninit<f32>], dup: &mut [MaybeUninit<f32>]| {
        let out = dgate.par_chunks_mut(VALUES_PER_TASK).zip(dup.par_chunks_mut(VALUES_PER_TASK));
        let inputs = gate.par_chunks(VALUES_PER_TASK).zip(up.par_chunks(VALUES_PER_TASK));
        y.par_chunks_mut(VALUES_PER_TASK)
            .zip(out)
            .zip(inputs)
            .zip(grad.par_chunks(VALUES_PER_TASK))
            .for_each(|(((y, (dgate, dup)), (gate, up)), grad)| gradients(gate, up, grad, [y, dgate, dup]));
    };
    let n = gate.len();
    // SAFETY: the slices are equally long, and each value of all three is written.
    let (y, (dgate, (dup, ()))) = unsafe { filled(n, |y| filled(n, |dgate| filled(n, |dup| fill(y, dgate, dup)))) };
    [y, dgate, dup]
}

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let y = gated(floats(gate, gate_layout)?, floats(up, up_layout)?);
        Ok((CpuStorage::F32(y), gate_layout.shape().clone()))
    }

    fn bwd(&self, gate: &Tensor, up: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [_, dgate, dup] = with_floats(gate, |gate| {
            with_floats(up, |up| with_floats(grad, |grad| Ok(gated_gradients(gate, up, grad))))
        })?;
        Ok((
            Some(Tensor::from_vec(dgate, gate.shape(), gate.device())?),
            Some(Tensor::from_vec(dup, up.shape(), up.device())?),
        ))
    }
}
