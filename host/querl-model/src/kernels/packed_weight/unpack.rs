//! Dequantization of packed panels to f32.

use super::super::simd::{SimdLevel, vectorised};
use super::{GROUP, Packed, WIDTH, values};
use querl_core::config::BaseDtype;
use std::ops::Range;

/// The 16 values of NormalFloat4: quantiles of the normal distribution, scaled to [-1, 1], 0 among them.
///
/// Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", appendix E.
pub(super) const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Prefetches data that follows, across page boundaries. With few rows memory is the bottleneck.
#[inline(always)]
fn prefetch<T>(place: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: no address can fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(place.cast::<i8>().wrapping_add(4096));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// f16 to f32 by integer arithmetic, so that subnormal numbers take no longer than others. The input must be finite.
#[inline(always)]
fn from_f16(bits: u16) -> f32 {
    let (sign, size) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff));
    let magnitude = f32::from_bits((size << 13) + (112 << 23));
    let least = f32::from_bits(113 << 23); // 2^-14
    let magnitude = if size < 0x400 { f32::from_bits((size << 13) + (113 << 23)) - least } else { magnitude };
    f32::from_bits(magnitude.to_bits() | sign)
}

fn unpack_f16(level: SimdLevel, from: &[u16], to: &mut [f32]) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the processor has the instructions.
        SimdLevel::Avx512 => unsafe { avx512::unpack_f16(from, to) },
        _ => unpack_f16_plain(from, to),
    }
}

vectorised! {
    fn unpack_f16_plain(from: &[u16], to: &mut [f32]) {
        for (to, from) in to.chunks_mut(32).zip(from.chunks(32)) {
            prefetch(from.as_ptr());
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from_f16(*from));
        }
    }
}

/// Unpacks pairs of inputs: each row of WIDTH pairs becomes two rows of WIDTH values.
fn unpack_pairs(level: SimdLevel, from: &[u32], to: &mut [f32]) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the processor has the instructions.
        SimdLevel::Avx512 => unsafe { avx512::unpack_pairs(from, to) },
        _ => unpack_pairs_plain(from, to),
    }
}

vectorised! {
    fn unpack_pairs_plain(from: &[u32], to: &mut [f32]) {
        for (rows, pairs) in to.chunks_exact_mut(2 * WIDTH).zip(from.chunks_exact(WIDTH)) {
            (0..WIDTH).step_by(16).for_each(|i| prefetch(&raw const pairs[i]));
            let (even, odd) = rows.split_at_mut(WIDTH);
            even.iter_mut().zip(pairs).for_each(|(value, pair)| *value = f32::from_bits(pair << 16));
            odd.iter_mut().zip(pairs).for_each(|(value, pair)| *value = f32::from_bits(pair & 0xffff_0000));
        }
    }
}

/// The code of one input, of four that are stored together.
#[inline(always)]
fn int8_code(four: u32, input: usize) -> i8 {
    ((four ^ 0x8080_8080) >> (8 * (input % 4))) as i8
}

vectorised! {
    fn unpack_int8(from: &[u32], scales: &[f32; WIDTH], to: &mut [f32]) {
        for (to, from) in to.chunks_mut(4 * WIDTH).zip(from.chunks_exact(WIDTH)) {
            (0..WIDTH).step_by(16).for_each(|i| prefetch(&raw const from[i]));
            for (input, to) in to.chunks_exact_mut(WIDTH).enumerate() {
                for i in 0..WIDTH {
                    to[i] = f32::from(int8_code(from[i], input)) * scales[i];
                }
            }
        }
    }
}

/// e4m3 to f32 by integer arithmetic, as in [`from_f16`]. The input must be finite.
#[inline(always)]
pub(super) fn from_e4m3(code: u8) -> f32 {
    let (sign, size) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7f));
    let least = f32::from_bits(121 << 23); // 2^-6
    let small = f32::from_bits((size << 20) + (121 << 23)) - least;
    let magnitude = if size < 8 { small } else { f32::from_bits((size << 20) + (120 << 23)) };
    f32::from_bits(magnitude.to_bits() | sign)
}

vectorised! {
    fn unpack_fp8(from: &[u8], scales: &[f32; WIDTH], to: &mut [f32]) {
        for (to, from) in to.chunks_exact_mut(WIDTH).zip(from.chunks_exact(WIDTH)) {
            prefetch(from.as_ptr());
            for i in 0..WIDTH {
                to[i] = from_e4m3(from[i]) * scales[i];
            }
        }
    }
}

fn unpack_nf4(level: SimdLevel, from: &[u8], scales: &[f32; WIDTH], to: &mut [f32]) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the processor has the instructions.
        SimdLevel::Avx512 => unsafe { avx512::unpack_nf4(from, scales, to) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        SimdLevel::Avx2 => unsafe { avx2::unpack_nf4(from, scales, to) },
        _ => {
            for (to, from) in to.chunks_exact_mut(WIDTH).zip(from.chunks_exact(WIDTH / 2)) {
                for (i, &byte) in from.iter().enumerate() {
                    to[i] = NF4[usize::from(byte & 15)] * scales[i];
                    to[i + WIDTH / 2] = NF4[usize::from(byte >> 4)] * scales[i + WIDTH / 2];
                }
            }
        }
    }
}

/// 256-bit vectors, for loops that the compiler does not vectorise.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{NF4, WIDTH, prefetch};
    use std::arch::x86_64::*;

    /// The table of 16 values takes two vectors; bit 3 of an index selects one.
    #[target_feature(enable = "avx2")]
    pub(super) fn unpack_nf4(from: &[u8], scales: &[f32; WIDTH], to: &mut [f32]) {
        // SAFETY: the loads and stores below are of 8 values within the lengths of the chunks and arrays.
        unsafe {
            let [low, high] = [0, 8].map(|first| _mm256_loadu_ps(NF4.as_ptr().add(first)));
            let look_up = |index| {
                let (low, high) = (_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index));
                _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
            };
            for (to, from) in to.chunks_exact_mut(WIDTH).zip(from.chunks_exact(WIDTH / 2)) {
                prefetch(from.as_ptr());
                for first in (0..WIDTH / 2).step_by(8) {
                    let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().add(first).cast()));
                    for (first, index) in [(first, bytes), (first + WIDTH / 2, _mm256_srli_epi32::<4>(bytes))] {
                        let scale = _mm256_loadu_ps(scales.as_ptr().add(first));
                        _mm256_storeu_ps(to.as_mut_ptr().add(first), _mm256_mul_ps(look_up(index), scale));
                    }
                }
            }
        }
    }
}

/// The same functions with 512-bit vectors.
#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{NF4, WIDTH, prefetch};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub(super) fn unpack_f16(from: &[u16], to: &mut [f32]) {
        for (to, from) in to.as_chunks_mut::<32>().0.iter_mut().zip(from.as_chunks::<32>().0) {
            prefetch(from.as_ptr());
            for half in [0, 16] {
                // SAFETY: a chunk is 32 values, two vectors.
                unsafe {
                    let bits = _mm256_loadu_si256(from.as_ptr().add(half).cast());
                    _mm512_storeu_ps(to.as_mut_ptr().add(half), _mm512_cvtph_ps(bits));
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn unpack_pairs(from: &[u32], to: &mut [f32]) {
        let high = _mm512_set1_epi32(-65_536);
        for (rows, pairs) in to.chunks_exact_mut(2 * WIDTH).zip(from.chunks_exact(WIDTH)) {
            for start in (0..WIDTH).step_by(16) {
                prefetch(&raw const pairs[start]);
                // SAFETY: a row of pairs is four vectors, and so is each of the two rows it holds.
                unsafe {
                    let pairs = _mm512_loadu_si512(pairs.as_ptr().add(start).cast());
                    let (even, odd) = (_mm512_slli_epi32::<16>(pairs), _mm512_and_si512(pairs, high));
                    _mm512_storeu_si512(rows.as_mut_ptr().add(start).cast(), even);
                    _mm512_storeu_si512(rows.as_mut_ptr().add(WIDTH + start).cast(), odd);
                }
            }
        }
    }

    /// The table of 16 values is one vector, and a lookup one instruction.
    #[target_feature(enable = "avx512f")]
    pub(super) fn unpack_nf4(from: &[u8], scales: &[f32; WIDTH], to: &mut [f32]) {
        // SAFETY: the loads and stores below are of 16 values within the lengths of the chunks and arrays.
        unsafe {
            let table = _mm512_loadu_ps(NF4.as_ptr());
            let scales: [__m512; 4] = std::array::from_fn(|v| _mm512_loadu_ps(scales.as_ptr().add(16 * v)));
            for (to, from) in to.chunks_exact_mut(WIDTH).zip(from.chunks_exact(WIDTH / 2)) {
                prefetch(from.as_ptr());
                for half in 0..2 {
                    let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().add(16 * half).cast()));
                    // A lookup reads the low 4 bits of an index.
                    let low = _mm512_permutexvar_ps(bytes, table);
                    let high = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), table);
                    _mm512_storeu_ps(to.as_mut_ptr().add(16 * half), _mm512_mul_ps(low, scales[half]));
                    _mm512_storeu_ps(to.as_mut_ptr().add(32 + 16 * half), _mm512_mul_ps(high, scales[2 + half]));
                }
            }
        }
    }
}

impl Packed {
    /// Inputs `inputs` of a panel as f32, `(inputs, WIDTH)`; `inputs` begins at a multiple of [`GROUP`].
    pub(in super::super) fn unpack(&self, level: SimdLevel, panel: usize, inputs: Range<usize>, to: &mut [f32]) {
        debug_assert!(inputs.start.is_multiple_of(GROUP) && to.len() == inputs.len() * WIDTH);
        let offset = self.offset(panel, inputs.start);
        match self.dtype {
            BaseDtype::F32 => to.copy_from_slice(&values::<f32>(&self.data)[offset..][..to.len()]),
            BaseDtype::F16 => unpack_f16(level, &values::<u16>(&self.data)[offset..][..to.len()], to),
            BaseDtype::Bf16 => {
                let pairs = &values::<u32>(&self.data)[offset / 2..];
                let whole = to.len() / (2 * WIDTH) * (2 * WIDTH);
                unpack_pairs(level, &pairs[..whole / 2], &mut to[..whole]);
                let last = &pairs[whole / 2..];
                to[whole..].iter_mut().zip(last).for_each(|(to, pair)| *to = f32::from_bits(pair << 16));
            }
            BaseDtype::Int8 | BaseDtype::Fp8 | BaseDtype::Nf4 => self.unpack_groups(level, panel, inputs, to),
        }
    }

    fn unpack_groups(&self, level: SimdLevel, panel: usize, inputs: Range<usize>, to: &mut [f32]) {
        for (part, to) in to.chunks_mut(GROUP * WIDTH).enumerate() {
            let input = inputs.start + part * GROUP;
            let (offset, group) = (self.offset(panel, input), panel * self.n_groups() + self.group_of(input));
            let scales = &self.scales.as_chunks::<WIDTH>().0[group]; // every group of a panel has WIDTH scales
            let bytes = values::<u8>(&self.data);
            match self.dtype {
                BaseDtype::Int8 => unpack_int8(&values::<u32>(&self.data)[offset / 4..], scales, to),
                BaseDtype::Fp8 => unpack_fp8(&bytes[offset..][..to.len()], scales, to),
                _ => unpack_nf4(level, &bytes[offset / 2..][..to.len() / 2], scales, to),
            }
        }
    }

    /// One row of the weight: `(in)`.
    pub(in super::super) fn row(&self, output: usize, row: &mut [f32]) {
        let (panel, lane) = (output / WIDTH, output % WIDTH);
        let offset = self.offset(panel, 0);
        match self.dtype {
            BaseDtype::F32 => {
                let from = values::<f32>(&self.data)[offset + lane..].iter().step_by(WIDTH);
                row.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            }
            BaseDtype::F16 => {
                let from = values::<u16>(&self.data)[offset + lane..].iter().step_by(WIDTH);
                row.iter_mut().zip(from).for_each(|(to, from)| *to = from_f16(*from));
            }
            BaseDtype::Bf16 => {
                let from = values::<u32>(&self.data)[offset / 2 + lane..].iter().step_by(WIDTH);
                for (to, pair) in row.chunks_mut(2).zip(from) {
                    to[0] = f32::from_bits(pair << 16);
                    if let Some(to) = to.get_mut(1) {
                        *to = f32::from_bits(pair & 0xffff_0000);
                    }
                }
            }
            BaseDtype::Int8 | BaseDtype::Fp8 | BaseDtype::Nf4 => self.quantised_row(panel, lane, row),
        }
    }

    fn quantised_row(&self, panel: usize, lane: usize, row: &mut [f32]) {
        let (offset, bytes) = (self.offset(panel, 0), values::<u8>(&self.data));
        let scales = &self.scales[panel * self.n_groups() * WIDTH..];
        for (input, value) in row.iter_mut().enumerate() {
            let share = match self.dtype {
                BaseDtype::Int8 => {
                    f32::from(int8_code(values::<u32>(&self.data)[(offset + input / 4 * 4 * WIDTH) / 4 + lane], input))
                }
                BaseDtype::Fp8 => from_e4m3(bytes[offset + input * WIDTH + lane]),
                _ => NF4[usize::from(bytes[(offset + input * WIDTH) / 2 + lane % 32] >> (lane / 32 * 4) & 15)],
            };
            *value = share * scales[self.group_of(input) * WIDTH + lane];
        }
    }
}
