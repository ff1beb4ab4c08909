//! The gated activation of the feed-forward layers.

use super::{exp, floats, with_floats};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

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
    gate.contiguous()?.apply_op2(&up.contiguous()?, SwiGlu)
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
        let (gate, up) = (floats(gate, gate_layout)?, floats(up, up_layout)?);
        let mut y = vec![0f32; gate.len()];
        let tasks = y.par_chunks_mut(VALUES_PER_TASK).zip(gate.par_chunks(VALUES_PER_TASK));
        tasks.zip(up.par_chunks(VALUES_PER_TASK)).for_each(|((y, gate), up)| {
            for i in 0..y.len() {
                y[i] = gate[i] / (1.0 + exp(-gate[i])) * up[i];
            }
        });
        Ok((CpuStorage::F32(y), gate_layout.shape().clone()))
    }

    /// With `s` the sigmoid of the gate: `d silu / d gate = s (1 + gate (1 - s))`.
    fn bwd(&self, gate: &Tensor, up: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dgate, dup) = with_floats(gate, |gate| {
            with_floats(up, |up| {
                with_floats(grad, |grad| {
                    let (mut dgate, mut dup) = (vec![0f32; gate.len()], vec![0f32; gate.len()]);
                    let out = dgate.par_chunks_mut(VALUES_PER_TASK).zip(dup.par_chunks_mut(VALUES_PER_TASK));
                    let inputs = gate.par_chunks(VALUES_PER_TASK).zip(up.par_chunks(VALUES_PER_TASK));
                    out.zip(inputs).zip(grad.par_chunks(VALUES_PER_TASK)).for_each(
                        |(((dgate, dup), (gate, up)), grad)| {
                            for i in 0..grad.len() {
                                let sigmoid = 1.0 / (1.0 + exp(-gate[i]));
                                dgate[i] = grad[i] * up[i] * sigmoid * (1.0 + gate[i] * (1.0 - sigmoid));
                                dup[i] = grad[i] * gate[i] * sigmoid;
                            }
                        },
                    );
                    Ok((dgate, dup))
                })
            })
        })?;
        Ok((
            Some(Tensor::from_vec(dgate, gate.shape(), gate.device())?),
            Some(Tensor::from_vec(dup, up.shape(), up.device())?),
        ))
    }
}
