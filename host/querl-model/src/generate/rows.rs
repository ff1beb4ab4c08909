//! What decoding does to rows one by one: norms, rotations, the gated activation.

use super::vectorised::{LANES, exp_or_zero, vectorised};
use rayon::prelude::*;

/// Values that one parallel task works on.
const VALUES_PER_TASK: usize = 1 << 15;

/// `x / sqrt(mean(x^2) + eps) * weight` for each row of `weight.len()` values.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let per_task = VALUES_PER_TASK.next_multiple_of(weight.len().max(1));
    out.par_chunks_mut(per_task).zip(x.par_chunks(per_task)).for_each(|(out, x)| norm_rows(x, weight, eps, out));
}

/// `silu(gate) * up`.
pub(super) fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let inputs = gate.par_chunks(VALUES_PER_TASK).zip(up.par_chunks(VALUES_PER_TASK));
    out.par_chunks_mut(VALUES_PER_TASK).zip(inputs).for_each(|(out, (gate, up))| gated(gate, up, out));
}

vectorised! {
    fn norm_rows<A>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let size = weight.len();
        for (out, x) in out.chunks_exact_mut(size).zip(x.chunks_exact(size)) {
            let mut lanes = [0f32; LANES];
            let (chunks, rest) = x.as_chunks::<LANES>();
            for chunk in chunks {
                for lane in 0..LANES {
                    lanes[lane] = A::multiply_add(chunk[lane], chunk[lane], lanes[lane]);
                }
            }
            let sum = lanes.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>();
            let inverse = 1.0 / (sum / size as f32 + eps).sqrt();
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = x * inverse * weight;
            }
        }
    }
}

vectorised! {
    fn gated<A>(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp_or_zero::<A>(-gate)) * up;
        }
    }
}

vectorised! {
    /// Rotates each head by the angles of its row's position; the first half of a head pairs with the second.
    ///
    /// Source: Su et al. 2021, "RoFormer"; the half-split layout of transformers' `rotate_half`.
    pub(super) fn rotate<A>(heads: &mut [f32], cos: &[f32], sin: &[f32]) {
        let half = cos.len();
        let sin = &sin[..half];
        for head in heads.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for i in 0..half {
                let (a, b) = (first[i], second[i]);
                first[i] = a * cos[i] - b * sin[i];
                second[i] = b * cos[i] + a * sin[i];
            }
        }
    }
}
