//! Rows of scores to probabilities and back.
//!
//! Sums run over 16 lanes that are joined at the end, in every form of the code: the results do not depend on the processor.

use crate::kernels::cpu::vectorised;
use crate::kernels::{LANES, dot, exp};

vectorised! {
    /// Softmax of what each row sees, zero beyond; also the logarithm of each row's sum of exponentials. `scores`: rows of
    /// `width`, `group` of them for each entry of `n_seen`.
    pub(super) fn probabilities(scores: &mut [f32], width: usize, n_seen: &[usize], group: usize, log_sums: &mut [f32]) {
        for (index, (row, log_sum)) in scores.chunks_exact_mut(width).zip(log_sums).enumerate() {
            let (seen, unseen) = row.split_at_mut(n_seen[index / group]);
            let max = reduce(seen, f32::NEG_INFINITY, |max, x| if x > max { x } else { max });
            seen.iter_mut().for_each(|score| *score = exp(*score - max));
            let sum = reduce(seen, 0.0, |sum, x| sum + x);
            let inverse = 1.0 / sum;
            seen.iter_mut().for_each(|p| *p *= inverse);
            unseen.fill(0.0);
            *log_sum = max + sum.ln();
        }
    }
}

vectorised! {
    /// The same probabilities from scores and logarithms of sums.
    pub(super) fn probabilities_again(scores: &mut [f32], width: usize, n_seen: &[usize], group: usize, log_sums: &[f32]) {
        for (index, (row, log_sum)) in scores.chunks_exact_mut(width).zip(log_sums).enumerate() {
            let (seen, unseen) = row.split_at_mut(n_seen[index / group]);
            seen.iter_mut().for_each(|score| *score = exp(*score - log_sum));
            unseen.fill(0.0);
        }
    }
}

vectorised! {
    /// `dS = P * (dP - dot)`, in the place of `dP`; zero beyond what a row sees.
    pub(super) fn score_gradients(dp: &mut [f32], p: &[f32], width: usize, n_seen: &[usize], group: usize, dots: &[f32]) {
        let rows = dp.chunks_exact_mut(width).zip(p.chunks_exact(width)).zip(dots);
        for (index, ((dp, p), dot)) in rows.enumerate() {
            let (seen, unseen) = dp.split_at_mut(n_seen[index / group]);
            seen.iter_mut().zip(p).for_each(|(dp, p)| *dp = p * (*dp - dot));
            unseen.fill(0.0);
        }
    }
}

vectorised! {
    /// The product of each row of `a` with the same row of `b`.
    pub(super) fn dot_products(dots: &mut [f32], a: &[f32], b: &[f32], width: usize) {
        for ((result, a), b) in dots.iter_mut().zip(a.chunks_exact(width)).zip(b.chunks_exact(width)) {
            *result = dot(a, b);
        }
    }
}

#[inline(always)]
fn reduce(row: &[f32], start: f32, f: impl Fn(f32, f32) -> f32 + Copy) -> f32 {
    let mut lanes = [start; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = f(lanes[lane], chunk[lane]);
        }
    }
    lanes.iter().chain(rest).copied().fold(start, f)
}
