//! Products of int8 weights with activations in int8: sums of integers over each group of 64 inputs, scaled to f32. For inference.
//!
//! With AVX-512 VNNI one instruction multiplies and adds 64 pairs of int8 (f32: 16). Other processors multiply the rounded activations in f32, so
//! that the result is the same up to the rounding of sums.
//!
//! Sources: Dettmers et al. 2022, "LLM.int8()" (both sides in int8, outputs in f32); groups as in llama.cpp's q8_0.

#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports))] // only used by the integer product

use super::packed_matmul::{Output, WIDTH};
use super::packed_weight::{GROUP, Packed};
use super::simd::{SimdLevel, vectorised};
use querl_core::config::BaseDtype;
use rayon::prelude::*;
use std::sync::OnceLock;

/// Inputs per step of the integer product: a vector contains four inputs of each of 16 outputs.
const QUAD: usize = 4;

/// Rows per task: their codes stay in the L2 cache while the panels of the weight are read.
const ROWS_PER_TASK: usize = 128;

/// Number of multiplications below which one thread is faster than several.
const SERIAL_WORK: usize = 1 << 19;

/// Activations `(N, in)` quantized to int8, with one scale per [`GROUP`] consecutive values of a row: `value = code * scale`.
pub(crate) struct Int8Rows {
    n_in: usize,
    /// Number of codes per row, a multiple of [`QUAD`]. Codes after the last input are 0.
    stride: usize,
    codes: Vec<i8>,
    /// `(N, groups)`.
    scales: Vec<f32>,
    /// Initial values of the integer sums, `(N, groups)`. They compensate for weights being stored as code plus 128.
    starts: Vec<i32>,
    /// The dequantized values `(N, in)`, computed when needed.
    floats: OnceLock<Vec<f32>>,
}

impl Int8Rows {
    /// Quantizes `x` `(N, in)`: each value to one of 255 equidistant steps up to the largest absolute value of its group. A group with NaN
    /// or Inf becomes NaN.
    pub(crate) fn quantize(x: &[f32], n_in: usize) -> Self {
        let (n_rows, n_groups, stride) = (x.len() / n_in.max(1), n_in.div_ceil(GROUP), n_in.next_multiple_of(QUAD));
        let (mut codes, mut scales) = (vec![0i8; n_rows * stride], vec![0f32; n_rows * n_groups]);
        let mut starts = vec![0i32; n_rows * n_groups];
        let rows = x.par_chunks_exact(n_in.max(1)).zip(codes.par_chunks_exact_mut(stride.max(1)));
        let groups = scales.par_chunks_exact_mut(n_groups.max(1)).zip(starts.par_chunks_exact_mut(n_groups.max(1)));
        rows.zip(groups)
            .with_min_len(16)
            .for_each(|((x, codes), (scales, starts))| quantize_row(x, codes, scales, starts));
        Self { n_in, stride, codes, scales, starts, floats: OnceLock::new() }
    }

    fn n_rows(&self) -> usize {
        self.codes.len() / self.stride.max(1)
    }

    /// True if a product with a weight `(n_out, n_in)` has `len` values.
    pub(super) fn fits(&self, n_in: usize, len: usize, n_out: usize) -> bool {
        n_in == self.n_in && len == self.n_rows() * n_out
    }

    /// The dequantized values, `(N, in)`.
    pub(super) fn to_floats(&self) -> &[f32] {
        self.floats.get_or_init(|| {
            let n_groups = self.n_in.div_ceil(GROUP).max(1);
            let rows = self.codes.chunks_exact(self.stride.max(1)).zip(self.scales.chunks_exact(n_groups));
            let row = |(codes, scales): (&[i8], &[f32])| -> Vec<f32> {
                codes[..self.n_in].iter().enumerate().map(|(i, &code)| f32::from(code) * scales[i / GROUP]).collect()
            };
            rows.flat_map(row).collect()
        })
    }
}

vectorised! {
    fn quantize_row(x: &[f32], codes: &mut [i8], scales: &mut [f32], starts: &mut [i32]) {
        let (groups, rest) = x.as_chunks::<GROUP>();
        let (codes, rest_codes) = codes.split_at_mut(groups.len() * GROUP);
        for (group, x) in groups.iter().enumerate() {
            (scales[group], starts[group]) = quantize_group(x, &mut codes[group * GROUP..][..GROUP]);
        }
        if !rest.is_empty() {
            (scales[groups.len()], starts[groups.len()]) = quantize_group(rest, rest_codes);
        }
    }
}

/// Scale of a group, and the initial value of its integer sum.
#[inline(always)]
fn quantize_group(x: &[f32], codes: &mut [i8]) -> (f32, i32) {
    // Compared as bits without the sign, NaN is larger than Inf and Inf larger than all numbers.
    let largest = f32::from_bits(x.iter().map(|x| x.to_bits() & 0x7fff_ffff).fold(0, u32::max));
    // If the largest value is 0, or so small that the inverse overflows, all codes are 0.
    let inverse = if 127.0 / largest < f32::INFINITY { 127.0 / largest } else { 0.0 };
    let rounding = 12_582_912.0_f32; // 1.5 * 2^23: adding it rounds to the nearest integer, held in the lowest bits
    let mut sum = 0;
    for (code, x) in codes.iter_mut().zip(x) {
        let rounded = (x * inverse + rounding).to_bits() as i8;
        sum += i32::from(rounded);
        *code = rounded;
    }
    (if largest < f32::INFINITY { largest / 127.0 } else { f32::NAN }, -128 * sum)
}

/// `y = keep * y + x W^T` for `y` `(N, out)`; `false` (and `y` unchanged) if the processor lacks the instructions.
pub(super) fn forward(level: SimdLevel, weight: &Packed, x: &Int8Rows, y: &mut [f32], keep: f32) -> bool {
    // The unsafe reads and writes below rely on this.
    assert!(weight.dtype == BaseDtype::Int8 && x.fits(weight.n_in, y.len(), weight.n_out));
    #[cfg(target_arch = "x86_64")]
    if level == SimdLevel::Avx512 && is_x86_feature_detected!("avx512vnni") {
        let n_rows = x.n_rows();
        let (n_panels, n_chunks) = (weight.n_out.div_ceil(WIDTH), n_rows.div_ceil(ROWS_PER_TASK));
        let out = Output::new(y, keep);
        let run = |task: usize| {
            // Consecutive tasks share their rows.
            let (chunk, panel) = (task / n_panels, task % n_panels);
            let first = chunk * n_rows / n_chunks;
            let rows = first..(chunk + 1) * n_rows / n_chunks;
            // SAFETY: the processor has the instructions; by the assertion the rows are those of `x` and `y`; the panel is one of the
            // weight, and blocks of different tasks do not overlap.
            unsafe { vnni::panel(weight, panel, x, rows, &out) };
        };
        match n_rows * weight.n_out * weight.n_in < SERIAL_WORK {
            true => (0..n_panels * n_chunks).for_each(run),
            false => (0..n_panels * n_chunks).into_par_iter().for_each(run),
        }
        return true;
    }
    let _ = (level, weight, x, y, keep);
    false
}

/// Tiles of the result in registers.
#[cfg(target_arch = "x86_64")]
mod vnni {
    use super::super::packed_matmul::{load_sums, store_sums};
    use super::{GROUP, Int8Rows, Output, Packed, QUAD, WIDTH};
    use std::arch::x86_64::*;
    use std::ops::Range;

    const LANES: usize = 16;

    /// Vectors per row of a panel.
    const VECTORS: usize = WIDTH / LANES;

    /// Rows per tile. The integer sums take 24 of 32 registers; the f32 sums are updated once per group and stay in memory.
    const ROWS: usize = 6;

    /// Prefetch distance in bytes. The hardware prefetcher does not cross page boundaries.
    const AHEAD: usize = 4096;

    /// A tile: some rows of the input by one panel of the weight.
    #[derive(Clone, Copy)]
    struct Tile {
        /// Weight codes: each step reads [`QUAD`] inputs of WIDTH outputs.
        weight: *const u8,
        weight_scales: *const f32,
        codes: *const i8,
        /// Stride of the rows of codes.
        stride: usize,
        scales: *const f32,
        starts: *const i32,
        n_in: usize,
        c: *mut f32,
        /// Stride of the rows of `c`.
        c_row: usize,
        /// Number of valid columns of `c`.
        n_cols: usize,
        /// What the sums begin with, times `keep`.
        from: *const f32,
        from_row: usize,
        keep: f32,
        prefetches: bool,
    }

    /// Computes all columns of a panel for some rows.
    ///
    /// # Safety
    /// `weight` is int8 and has the panel; `x` has the rows and the weight's inputs; `out` has as many rows of the weight's outputs, and no
    /// other thread accesses these columns of them. The processor has AVX-512 with VNNI.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) unsafe fn panel(weight: &Packed, panel: usize, x: &Int8Rows, rows: Range<usize>, out: &Output<'_>) {
        let (codes, weight_scales) = weight.int8_panel(panel);
        let (n_groups, first) = (x.n_in.div_ceil(GROUP), panel * WIDTH);
        let mut row = rows.start;
        while row < rows.end {
            let (from, from_row, keep) = out.beginning(row, first, weight.n_out);
            let part = Tile {
                weight: codes.as_ptr(),
                weight_scales: weight_scales.as_ptr(),
                codes: x.codes.as_ptr().wrapping_add(row * x.stride),
                stride: x.stride,
                scales: x.scales.as_ptr().wrapping_add(row * n_groups),
                starts: x.starts.as_ptr().wrapping_add(row * n_groups),
                n_in: x.n_in,
                c: out.values.wrapping_add(row * weight.n_out + first),
                c_row: weight.n_out,
                n_cols: (weight.n_out - first).min(WIDTH),
                from,
                from_row,
                keep,
                prefetches: row == rows.start,
            };
            // Tiles of nearly equal size: 7 rows are 4 and 3, not 6 and 1.
            let left = rows.end - row;
            let n = left.div_ceil(left.div_ceil(ROWS));
            // SAFETY: tiles cover each row and valid column once; a panel has WIDTH stored outputs.
            unsafe {
                match n {
                    1 => tile::<1>(&part),
                    2 => tile::<2>(&part),
                    3 => tile::<3>(&part),
                    4 => tile::<4>(&part),
                    5 => tile::<5>(&part),
                    _ => tile::<ROWS>(&part),
                }
            }
            row += n;
        }
    }

    /// Computes M rows by the columns of a panel.
    ///
    /// # Safety
    /// The pointers have M rows, as described by [`Tile`].
    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn tile<const M: usize>(tile: &Tile) {
        let Tile { mut weight, weight_scales, codes, stride, scales, starts, n_in, c, c_row, n_cols, .. } = *tile;
        let Tile { from, from_row, keep, prefetches, .. } = *tile;
        let n_groups = n_in.div_ceil(GROUP);
        // SAFETY: the valid columns of M rows exist.
        let mut sums: [[__m512; VECTORS]; M] = unsafe { load_sums(from, from_row, n_cols, keep) };
        for group in 0..n_groups {
            let mut integers = [[_mm512_setzero_si512(); VECTORS]; M];
            for (m, integers) in integers.iter_mut().enumerate() {
                // SAFETY: the row and the group exist.
                *integers = [_mm512_set1_epi32(unsafe { *starts.wrapping_add(m * n_groups + group) }); VECTORS];
            }
            let inputs = group * GROUP..(group * GROUP + GROUP).min(n_in);
            for input in inputs.step_by(QUAD) {
                let mut vectors = [_mm512_setzero_si512(); VECTORS];
                for (v, vector) in vectors.iter_mut().enumerate() {
                    let from = weight.wrapping_add(v * LANES * QUAD);
                    // SAFETY: a panel has WIDTH outputs for each QUAD of inputs.
                    *vector = unsafe { _mm512_loadu_si512(from.cast()) };
                    if prefetches {
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast()); // no address can fault
                    }
                }
                for (m, integers) in integers.iter_mut().enumerate() {
                    let quad = codes.wrapping_add(m * stride + input).cast::<i32>();
                    // SAFETY: a row's codes are a multiple of QUAD.
                    let quad = _mm512_set1_epi32(unsafe { quad.read_unaligned() });
                    for (integer, &vector) in integers.iter_mut().zip(&vectors) {
                        *integer = _mm512_dpbusd_epi32(*integer, vector, quad);
                    }
                }
                weight = weight.wrapping_add(QUAD * WIDTH);
            }
            for v in 0..VECTORS {
                // SAFETY: a panel has WIDTH scales for each group.
                let of_weight = unsafe { _mm512_loadu_ps(weight_scales.wrapping_add(group * WIDTH + v * LANES)) };
                for m in 0..M {
                    // SAFETY: the row and the group exist.
                    let of_row = _mm512_set1_ps(unsafe { *scales.wrapping_add(m * n_groups + group) });
                    let product = _mm512_mul_ps(of_weight, of_row);
                    sums[m][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers[m][v]), product, sums[m][v]);
                }
            }
        }
        // SAFETY: as for loading.
        unsafe { store_sums(&sums, c, c_row, n_cols) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::FrozenWeight;
    use candle_core::{Device, Tensor};

    fn number(i: usize) -> f32 {
        ((i * 7919 + 13) % 1009) as f32 / 504.0 - 1.0
    }

    fn weight(n_out: usize, n_in: usize) -> FrozenWeight {
        let values: Vec<f32> = (0..n_out * n_in).map(number).collect();
        FrozenWeight::pack(&Tensor::from_vec(values, (n_out, n_in), &Device::Cpu).unwrap(), BaseDtype::Int8).unwrap()
    }

    fn product(weight: &FrozenWeight, x: &[f32], start: f32, keep: f32) -> Vec<f32> {
        let (n_out, n_in) = weight.dims();
        let mut y = vec![start; x.len() / n_in * n_out];
        weight.forward_int8(&Int8Rows::quantize(x, n_in), &mut y, keep).unwrap();
        y
    }

    #[test]
    fn products_are_those_of_the_rounded_values_at_every_level() {
        // More columns than a panel, inputs that do not fill a group or a quad, all tile heights; the last size uses several threads.
        for (n_rows, n_out, n_in) in [(1, 64, 64), (2, 70, 150), (3, 5, 3), (13, 130, 257), (140, 200, 96)] {
            let x: Vec<f32> = (0..n_rows * n_in).map(|i| 3.0 * number(i * 31)).collect();
            let stored = weight(n_out, n_in).to_tensor().unwrap();
            let rounded =
                Tensor::from_vec(Int8Rows::quantize(&x, n_in).to_floats().to_vec(), (n_rows, n_in), &Device::Cpu)
                    .unwrap();
            let expected: Vec<f32> =
                rounded.matmul(&stored.t().unwrap()).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            for level in SimdLevel::all() {
                let found = level.with(|| product(&weight(n_out, n_in).at_level(level), &x, 2.0, 0.5));
                for (found, expected) in found.iter().zip(&expected) {
                    let difference = (found - expected - 1.0).abs();
                    assert!(difference < 1e-4 * (1.0 + n_in as f32).sqrt(), "{level:?}: {found}, {expected} + 1");
                }
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        let (n_rows, n_in) = (300, 200);
        let (weight, x) = (weight(100, n_in), (0..n_rows * n_in).map(number).collect::<Vec<f32>>());
        let all = product(&weight, &x, f32::NAN, 0.0);
        for (x, expected) in x.chunks(n_in).zip(all.chunks(100)) {
            assert_eq!(product(&weight, x, f32::NAN, 0.0), expected);
        }
    }

    #[test]
    fn rounding_is_within_half_a_step_and_what_is_not_finite_stays_so() {
        let mut x: Vec<f32> = (0..150).map(number).collect();
        let rounded = Int8Rows::quantize(&x, 150);
        for (group, rounded) in x.chunks(GROUP).zip(rounded.to_floats().chunks(GROUP)) {
            let step = group.iter().map(|x| x.abs()).fold(0f32, f32::max) / 127.0;
            let close = |(x, rounded): (&f32, &f32)| (x - rounded).abs() <= 0.501 * step;
            assert!(group.iter().zip(rounded).all(close));
        }
        assert!(Int8Rows::quantize(&[0.0; 70], 70).to_floats().iter().all(|&x| x == 0.0));
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            x[100] = value;
            let y = product(&weight(70, 150), &x, 0.0, 0.0);
            assert!(y.iter().all(|y| y.is_nan()), "{value}");
        }
    }
}
