//! What the machine can do at most.

use rayon::prelude::*;
use std::hint::black_box;
use std::time::Instant;

pub(crate) struct Peaks {
    pub(crate) f32_flops: f64,
    /// Peak rate of bf16 dot products, or of f32 arithmetic on a CPU without them.
    pub(crate) bf16_flops: f64,
    pub(crate) bytes_per_second: f64,
}

/// Measures for about two seconds.
pub(crate) fn measure(n_threads: usize) -> Peaks {
    let f32_flops = best_rate(n_threads, f32_chains);
    let bf16_flops = best_rate(n_threads, bf16_chains).max(f32_flops);
    Peaks { f32_flops, bf16_flops, bytes_per_second: bandwidth(n_threads) }
}

/// Operations per second of `work`, which returns its number of operations, run on all threads.
fn best_rate(n_threads: usize, work: fn() -> f64) -> f64 {
    let mut best = 0f64;
    for _ in 0..20 {
        let start = Instant::now();
        let done: f64 = (0..n_threads).into_par_iter().with_max_len(1).map(|_| work()).sum();
        best = best.max(done / start.elapsed().as_secs_f64());
    }
    best
}

const STEPS: usize = 4_000_000;

fn f32_chains() -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the instructions.
        return unsafe { f32_chains_avx512() };
    }
    plain_chains()
}

/// Chains of additions and multiplications that the compiler may vectorise.
fn plain_chains() -> f64 {
    let (mut sums, factor) = ([[1f32; 16]; 6], black_box(0.999f32));
    for _ in 0..STEPS {
        sums.iter_mut().flatten().for_each(|sum| *sum = *sum * factor + 1e-3);
    }
    black_box(sums);
    (STEPS * 6 * 16 * 2) as f64
}

/// 12 independent chains hide the latency of the two FMA units.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn f32_chains_avx512() -> f64 {
    use std::arch::x86_64::*;
    let (x, y) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(1e-3)));
    let mut sums = [_mm512_set1_ps(1.0); 12];
    for _ in 0..STEPS {
        sums.iter_mut().for_each(|sum| *sum = _mm512_fmadd_ps(*sum, x, y));
    }
    black_box(sums);
    (STEPS * 12 * 16 * 2) as f64
}

fn bf16_chains() -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bf16") {
        // SAFETY: the processor has the instructions.
        return unsafe { bf16_chains_avx512() };
    }
    0.0
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16_chains_avx512() -> f64 {
    use std::arch::x86_64::*;
    let x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(0.25)));
    let mut sums = [_mm512_set1_ps(1.0); 16];
    for _ in 0..STEPS / 2 {
        sums.iter_mut().for_each(|sum| *sum = _mm512_dpbf16_ps(*sum, x, x));
    }
    black_box(sums);
    (STEPS / 2 * 16 * 32 * 2) as f64
}

/// Memory bandwidth, measured by summing 512 MB, which exceeds all caches.
fn bandwidth(n_threads: usize) -> f64 {
    let values = vec![1u64; 64 << 20];
    let part = values.len() / n_threads;
    let mut best = 0f64;
    for _ in 0..5 {
        let start = Instant::now();
        let sums: u64 = values.par_chunks(part).map(|part| part.iter().copied().fold(0, u64::wrapping_add)).sum();
        black_box(sums);
        best = best.max(size_of_val(values.as_slice()) as f64 / start.elapsed().as_secs_f64());
    }
    best
}
