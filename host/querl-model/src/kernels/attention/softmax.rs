//! Rows of scores to probabilities and back, compiled for AVX-512 where the processor has it.
//!
//! Sums run over 16 lanes that are joined at the end, in every form of the code: the results do not depend on the processor.

use crate::kernels::exp;

const LANES: usize = 16;

/// The same function compiled twice, and the choice at run time.
macro_rules! for_processor {
    ($name:ident, $fast:ident, $plain:ident, ($($arg:ident: $type:ty),*)) => {
        pub(super) fn $name($($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            if std::is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has the one feature that the function asks for.
                return unsafe { $fast($($arg),*) };
            }
            $plain($($arg),*);
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f")]
        fn $fast($($arg: $type),*) {
            $plain($($arg),*);
        }
    };
}

for_processor!(probabilities, probabilities_avx512, probabilities_plain,
    (scores: &mut [f32], width: usize, n_seen: &[usize], group: usize, log_sums: &mut [f32]));
for_processor!(probabilities_again, probabilities_again_avx512, probabilities_again_plain,
    (scores: &mut [f32], width: usize, n_seen: &[usize], group: usize, log_sums: &[f32]));
for_processor!(score_gradients, score_gradients_avx512, score_gradients_plain,
    (dp: &mut [f32], p: &[f32], width: usize, n_seen: &[usize], group: usize, dots: &[f32]));
for_processor!(dot_products, dot_products_avx512, dot_products_plain,
    (dots: &mut [f32], a: &[f32], b: &[f32], width: usize));

/// Softmax of what each row sees, zero beyond; also the logarithm of each row's sum of exponentials. `scores`: rows of
/// `width`, `group` of them for each entry of `n_seen`.
#[inline(always)]
fn probabilities_plain(scores: &mut [f32], width: usize, n_seen: &[usize], group: usize, log_sums: &mut [f32]) {
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

/// The same probabilities from scores and logarithms of sums.
#[inline(always)]
fn probabilities_again_plain(scores: &mut [f32], width: usize, n_seen: &[usize], group: usize, log_sums: &[f32]) {
    for (index, (row, log_sum)) in scores.chunks_exact_mut(width).zip(log_sums).enumerate() {
        let (seen, unseen) = row.split_at_mut(n_seen[index / group]);
        seen.iter_mut().for_each(|score| *score = exp(*score - log_sum));
        unseen.fill(0.0);
    }
}

/// `dS = P * (dP - dot)`, in the place of `dP`; zero beyond what a row sees.
#[inline(always)]
fn score_gradients_plain(dp: &mut [f32], p: &[f32], width: usize, n_seen: &[usize], group: usize, dots: &[f32]) {
    let rows = dp.chunks_exact_mut(width).zip(p.chunks_exact(width)).zip(dots);
    for (index, ((dp, p), dot)) in rows.enumerate() {
        let (seen, unseen) = dp.split_at_mut(n_seen[index / group]);
        seen.iter_mut().zip(p).for_each(|(dp, p)| *dp = p * (*dp - dot));
        unseen.fill(0.0);
    }
}

/// The product of each row of `a` with the same row of `b`.
#[inline(always)]
fn dot_products_plain(dots: &mut [f32], a: &[f32], b: &[f32], width: usize) {
    for ((dot, a), b) in dots.iter_mut().zip(a.chunks_exact(width)).zip(b.chunks_exact(width)) {
        let mut lanes = [0f32; LANES];
        let (a, a_rest) = a.as_chunks::<LANES>();
        let (b, b_rest) = b.as_chunks::<LANES>();
        for (a, b) in a.iter().zip(b) {
            for lane in 0..LANES {
                lanes[lane] += a[lane] * b[lane];
            }
        }
        let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
        *dot = lanes.iter().sum::<f32>() + rest;
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
