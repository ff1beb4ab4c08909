//! Tiles and rearrangements with 512-bit vectors.

use super::microkernel::{Block, LINE_BYTES};
use std::arch::x86_64::*;

const LANES: usize = 16;

/// Calls a tile of as many rows as are left: up to `6` rows of 4 vectors, or 12 of fewer, fill the 32 registers.
macro_rules! tiles {
    ($block:ident, $n_rows:ident) => {{
        let n_vectors = $block.n_cols.div_ceil(LANES);
        let most = if n_vectors > 2 { 6 } else { 12 };
        let mut row = 0;
        while row < $n_rows {
            let left = $n_rows - row;
            // Equal parts: 7 rows are 4 and 3, not 6 and 1.
            let n = if left >= 12 && most == 12 { 12 } else { left.div_ceil(left.div_ceil(6)) };
            let rows = Block { ahead: $block.ahead.of_rows(row, row + n, $n_rows), ..$block.at_row(row) };
            match (n, n_vectors) {
                (1, 1) => tile::<1, 1>(&rows),
                (2, 1) => tile::<2, 1>(&rows),
                (3, 1) => tile::<3, 1>(&rows),
                (4, 1) => tile::<4, 1>(&rows),
                (5, 1) => tile::<5, 1>(&rows),
                (6, 1) => tile::<6, 1>(&rows),
                (12, 1) => tile::<12, 1>(&rows),
                (1, 2) => tile::<1, 2>(&rows),
                (2, 2) => tile::<2, 2>(&rows),
                (3, 2) => tile::<3, 2>(&rows),
                (4, 2) => tile::<4, 2>(&rows),
                (5, 2) => tile::<5, 2>(&rows),
                (6, 2) => tile::<6, 2>(&rows),
                (12, 2) => tile::<12, 2>(&rows),
                (1, _) => tile::<1, 4>(&rows),
                (2, _) => tile::<2, 4>(&rows),
                (3, _) => tile::<3, 4>(&rows),
                (4, _) => tile::<4, 4>(&rows),
                (5, _) => tile::<5, 4>(&rows),
                _ => tile::<6, 4>(&rows),
            }
            row += n;
        }
    }};
}

/// # Safety
/// As [`Block::run`], on a processor with AVX-512F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn block(block: &Block, n_rows: usize) {
    // SAFETY: the caller's promise; tiles cover rows below `n_rows`.
    unsafe { tiles!(block, n_rows) }
}

/// Which of a vector's lanes are columns of the block.
fn mask(n_cols: usize, vector: usize) -> __mmask16 {
    match n_cols.saturating_sub(vector * LANES) {
        0 => 0,
        n if n >= LANES => !0,
        n => (1 << n) - 1,
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_sums<const M: usize, const V: usize>(
    from: *const f32,
    from_row: usize,
    n_cols: usize,
    keep: f32,
) -> [[__m512; V]; M] {
    let mut sums = [[_mm512_setzero_ps(); V]; M];
    if keep != 0.0 {
        for (m, sums) in sums.iter_mut().enumerate() {
            for (v, sum) in sums.iter_mut().enumerate() {
                // SAFETY: masked lanes are not read; the others are columns of row `m`.
                let from =
                    unsafe { _mm512_maskz_loadu_ps(mask(n_cols, v), from.wrapping_add(m * from_row + v * LANES)) };
                *sum = if keep == 1.0 { from } else { _mm512_mul_ps(from, _mm512_set1_ps(keep)) };
            }
        }
    }
    sums
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_sums<const M: usize, const V: usize>(
    sums: &[[__m512; V]; M],
    c: *mut f32,
    c_row: usize,
    n_cols: usize,
) {
    for (m, sums) in sums.iter().enumerate() {
        for (v, &sum) in sums.iter().enumerate() {
            // SAFETY: masked lanes are not written; the others are columns of row `m`.
            unsafe { _mm512_mask_storeu_ps(c.wrapping_add(m * c_row + v * LANES), mask(n_cols, v), sum) };
        }
    }
}

/// M rows by V vectors of columns.
#[target_feature(enable = "avx512f")]
unsafe fn tile<const M: usize, const V: usize>(block: &Block) {
    let Block { a, a_row, b, b_step, n_steps, c, c_row, from, from_row, n_cols, keep, ahead } = *block;
    // SAFETY: the block's columns of M rows are there.
    let mut sums: [[__m512; V]; M] = unsafe { load_sums(from, from_row, n_cols, keep) };
    let (mut slab, mut next) = (b, ahead.start); // both go on with each step
    for step in 0..n_steps {
        for line in 0..ahead.n_lines {
            _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(line * LINE_BYTES).cast()); // no address can fault
        }
        let mut vectors = [_mm512_setzero_ps(); V];
        for (v, vector) in vectors.iter_mut().enumerate() {
            // SAFETY: a slab has WIDTH values for each step.
            *vector = unsafe { _mm512_loadu_ps(slab.add(v * LANES)) };
            if M <= 2 {
                // Few rows wait for memory: the stream is asked for ahead, over the ends of pages. No address can fault.
                _mm_prefetch::<_MM_HINT_T0>(slab.wrapping_add(v * LANES + 1024).cast());
            }
        }
        for (m, sums) in sums.iter_mut().enumerate() {
            // SAFETY: row and step are within `a`.
            let x = _mm512_set1_ps(unsafe { *a.add(m * a_row + step) });
            for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                *sum = _mm512_fmadd_ps(x, vector, *sum);
            }
        }
        (slab, next) = (slab.wrapping_add(b_step), next.wrapping_add(ahead.bytes));
    }
    // SAFETY: as for loading.
    unsafe { store_sums(&sums, c, c_row, n_cols) };
}

/// Transposes 16 by 16 values of 32 bits.
///
/// # Safety
/// `from` has 16 rows of 16 values that start `from_row` apart, `to` likewise; on a processor with AVX-512F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transpose16(from: *const u32, from_row: usize, to: *mut u32, to_row: usize) {
    let mut r = [_mm512_setzero_si512(); LANES];
    for (i, r) in r.iter_mut().enumerate() {
        // SAFETY: row `i` has 16 values.
        *r = unsafe { _mm512_loadu_si512(from.add(i * from_row).cast()) };
    }
    // Pairs of rows, then fours, then quarters of vectors.
    let mut t = r;
    for i in (0..LANES).step_by(2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for i in (0..LANES).step_by(4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // r[4 g + j] holds columns j, 4 + j, 8 + j, 12 + j of rows 4 g to 4 g + 3, a quarter each.
    for j in 0..4 {
        let low = _mm512_shuffle_i32x4::<0x88>(r[j], r[4 + j]);
        let high = _mm512_shuffle_i32x4::<0xdd>(r[j], r[4 + j]);
        let low2 = _mm512_shuffle_i32x4::<0x88>(r[8 + j], r[12 + j]);
        let high2 = _mm512_shuffle_i32x4::<0xdd>(r[8 + j], r[12 + j]);
        let columns = [
            _mm512_shuffle_i32x4::<0x88>(low, low2),
            _mm512_shuffle_i32x4::<0x88>(high, high2),
            _mm512_shuffle_i32x4::<0xdd>(low, low2),
            _mm512_shuffle_i32x4::<0xdd>(high, high2),
        ];
        for (i, column) in columns.into_iter().enumerate() {
            // SAFETY: row `4 i + j` of the result has 16 values.
            unsafe { _mm512_storeu_si512(to.add((4 * i + j) * to_row).cast(), column) };
        }
    }
}
