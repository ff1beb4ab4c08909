//! The microkernel: one block of the result in register tiles, with prefetching.

use super::super::simd::SimdLevel;

/// Number of columns of a panel of a packed weight, and of a block of the result.
pub(in super::super) const WIDTH: usize = 64;

pub(super) const LINE_BYTES: usize = 64;

/// Prefetch of the next block's weights during this block: with few rows, memory is the bottleneck.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub(super) start: *const u8,
    pub(super) bytes: usize,
    /// Number of cache lines to prefetch in each step of the sum.
    pub(super) n_lines: usize,
}

impl Ahead {
    pub(super) const NOTHING: Self = Self { start: std::ptr::null(), bytes: 0, n_lines: 0 };

    /// The share of the parts `from..to` of `n_parts`. All shares together prefetch each line once.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn of_parts(self, from: usize, to: usize, n_parts: usize) -> Self {
        let (first, end) = (self.n_lines * from / n_parts, self.n_lines * to / n_parts);
        Self { start: self.start.wrapping_add(first * LINE_BYTES), n_lines: end - first, ..self }
    }
}

/// Computes `c = keep * from + a b`: rows of `a` by a slab `b`, which has [`WIDTH`] columns per step.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) a: *const f32,
    /// Stride of the rows of `a`.
    pub(super) a_row: usize,
    pub(super) b: *const f32,
    /// Stride of the steps of `b`.
    pub(super) b_step: usize,
    pub(super) n_steps: usize,
    pub(super) c: *mut f32,
    /// Stride of the rows of `c`.
    pub(super) c_row: usize,
    /// Initial values of the sums: `c` itself, rows of another matrix, or one row for all.
    pub(super) from: *const f32,
    /// Stride of the rows of `from`.
    pub(super) from_row: usize,
    /// Number of columns of `c`, at most [`WIDTH`].
    pub(super) n_cols: usize,
    pub(super) keep: f32,
    pub(super) ahead: Ahead,
}

impl Block {
    /// Computes `n_rows` rows.
    ///
    /// # Safety
    /// `a` has `n_rows` rows of `n_steps` readable values, `b` has `n_steps` rows of WIDTH, `c` has `n_rows` rows of `n_cols`
    /// writable values, `from` as many readable ones where `keep` is not 0; the processor has what `level` names.
    pub(super) unsafe fn run(&self, level: SimdLevel, n_rows: usize) {
        match level {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            SimdLevel::Avx512 => unsafe { avx512::block(self, n_rows) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            SimdLevel::Avx2 => unsafe { avx2::block(self, n_rows) },
            // SAFETY: the caller's promise.
            _ => unsafe { portable::block(self, n_rows) },
        }
    }

    /// The block starting at `row`.
    ///
    /// # Safety
    /// The block has that row.
    pub(super) unsafe fn at_row(&self, row: usize) -> Self {
        let from = self.from.wrapping_add(row * self.from_row);
        // SAFETY: the row is within `a` and `c`.
        unsafe { Self { a: self.a.add(row * self.a_row), c: self.c.add(row * self.c_row), from, ..*self } }
    }
}

/// Microkernel in plain Rust, compiled for the build target.
mod portable {
    use super::Block;

    const LANES: usize = 16;

    /// Rows of a tile.
    const ROWS: usize = 4;

    /// # Safety
    /// As [`Block::run`].
    pub(super) unsafe fn block(block: &Block, n_rows: usize) {
        for row in (0..n_rows).step_by(ROWS) {
            // SAFETY: the row is one of the block's.
            let rows = unsafe { block.at_row(row) };
            for column in (0..block.n_cols).step_by(LANES) {
                // SAFETY: as many rows as are left, columns within the block.
                unsafe {
                    match n_rows - row {
                        1 => tile::<1>(&rows, column),
                        2 => tile::<2>(&rows, column),
                        3 => tile::<3>(&rows, column),
                        _ => tile::<ROWS>(&rows, column),
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<const M: usize>(block: &Block, column: usize) {
        let n_cols = (block.n_cols - column).min(LANES);
        let mut sums = [[0f32; LANES]; M];
        if block.keep != 0.0 {
            for (m, sums) in sums.iter_mut().enumerate() {
                for (lane, sum) in sums.iter_mut().enumerate().take(n_cols) {
                    // SAFETY: row and column are within `from`, which is readable because `keep` is not 0. A pointer instead of a slice,
                    // because it may alias `c`.
                    *sum = block.keep * unsafe { *block.from.add(m * block.from_row + column + lane) };
                }
            }
        }
        for step in 0..block.n_steps {
            // SAFETY: a slab has WIDTH values for each step, and `column` is a multiple of LANES below WIDTH.
            let b: [f32; LANES] = unsafe { block.b.add(step * block.b_step + column).cast::<[f32; LANES]>().read() };
            for (m, sums) in sums.iter_mut().enumerate() {
                // SAFETY: row and step are within `a`.
                let a = unsafe { *block.a.add(m * block.a_row + step) };
                for lane in 0..LANES {
                    sums[lane] += a * b[lane];
                }
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            // SAFETY: row and columns are within `c`; the copy does not read `c`, which may be uninitialised.
            unsafe { block.c.add(m * block.c_row + column).copy_from_nonoverlapping(sums.as_ptr(), n_cols) };
        }
    }
}

/// Tiles and transposes with 256-bit vectors.
#[cfg(target_arch = "x86_64")]
pub(super) mod avx2 {
    use super::{Block, LINE_BYTES, WIDTH};
    use std::arch::x86_64::*;

    const LANES: usize = 8;

    /// Rows of a tile that is two vectors wide: its sums take 12 of 16 registers.
    const ROWS: usize = 6;

    /// Steps of the sum between prefetches.
    const PREFETCH_STEPS: usize = 16;

    /// # Safety
    /// As [`Block::run`], on a processor with AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn block(block: &Block, n_rows: usize) {
        let n_vectors = block.n_cols.div_ceil(LANES);
        // SAFETY: the caller's promise; tiles cover the rows below `n_rows` and the columns of the block once.
        unsafe {
            match n_rows {
                1 if n_vectors == 8 => tile::<1, 8>(block, 0),
                2 if n_vectors == 8 => {
                    for half in 0..2 {
                        let block = Block { ahead: block.ahead.of_parts(half, half + 1, 2), ..*block };
                        tile::<2, 4>(&block, half * WIDTH / 2);
                    }
                }
                _ => columns(block, n_rows, n_vectors),
            }
        }
    }

    /// Computes all rows of two vectors of columns, then of the next two, so that this part of the slab stays in the L1 cache.
    ///
    /// # Safety
    /// As [`block`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn columns(block: &Block, n_rows: usize, n_vectors: usize) {
        let n_parts = n_rows * n_vectors.div_ceil(2);
        for first in (0..n_vectors).step_by(2) {
            let mut row = 0;
            while row < n_rows {
                // Tiles of nearly equal size: 7 rows are 4 and 3, not 6 and 1.
                let left = n_rows - row;
                let n = left.div_ceil(left.div_ceil(ROWS));
                let part = first / 2 * n_rows + row;
                // SAFETY: the rows and columns are the block's.
                unsafe {
                    let rows = Block { ahead: block.ahead.of_parts(part, part + n, n_parts), ..block.at_row(row) };
                    match (n, n_vectors - first) {
                        (1, 1) => tile::<1, 1>(&rows, first * LANES),
                        (2, 1) => tile::<2, 1>(&rows, first * LANES),
                        (3, 1) => tile::<3, 1>(&rows, first * LANES),
                        (4, 1) => tile::<4, 1>(&rows, first * LANES),
                        (5, 1) => tile::<5, 1>(&rows, first * LANES),
                        (_, 1) => tile::<6, 1>(&rows, first * LANES),
                        (1, _) => tile::<1, 2>(&rows, first * LANES),
                        (2, _) => tile::<2, 2>(&rows, first * LANES),
                        (3, _) => tile::<3, 2>(&rows, first * LANES),
                        (4, _) => tile::<4, 2>(&rows, first * LANES),
                        (5, _) => tile::<5, 2>(&rows, first * LANES),
                        _ => tile::<6, 2>(&rows, first * LANES),
                    }
                }
                row += n;
            }
        }
    }

    /// Computes M rows by V vectors of columns, starting at `column`.
    ///
    /// # Safety
    /// The block has those rows, and `column` is one of its columns.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn tile<const M: usize, const V: usize>(block: &Block, column: usize) {
        let Block { a, a_row, b, b_step, n_steps, c, c_row, from, from_row, n_cols, keep, ahead } = *block;
        let is_whole = column + V * LANES <= n_cols;
        let n_left = |v: usize| n_cols.saturating_sub(column + v * LANES).min(LANES);
        let mut sums = [[_mm256_setzero_ps(); V]; M];
        if keep != 0.0 {
            for (m, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    let from = from.wrapping_add(m * from_row + column + v * LANES);
                    // SAFETY: the columns of row `m` that are read are the block's.
                    let from = unsafe { if is_whole { _mm256_loadu_ps(from) } else { load_some(from, n_left(v)) } };
                    *sum = if keep == 1.0 { from } else { _mm256_mul_ps(from, _mm256_set1_ps(keep)) };
                }
            }
        }
        let (mut slab, mut next) = (b.wrapping_add(column), ahead.start); // both advance with each step
        for first in (0..n_steps).step_by(PREFETCH_STEPS) {
            let steps = first..(first + PREFETCH_STEPS).min(n_steps);
            if ahead.n_lines > 0 {
                for _ in steps.clone() {
                    for line in 0..ahead.n_lines {
                        _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(line * LINE_BYTES).cast()); // no address can fault
                    }
                    next = next.wrapping_add(ahead.bytes);
                }
            }
            // Two row pointers, three rows apart: the other rows are one and two strides from them.
            let (mut upper, mut lower) = (a.wrapping_add(first), a.wrapping_add(first + 3 * a_row));
            for _ in steps {
                let mut vectors = [_mm256_setzero_ps(); V];
                for (v, vector) in vectors.iter_mut().enumerate() {
                    // SAFETY: a slab has WIDTH values for each step.
                    *vector = unsafe { _mm256_loadu_ps(slab.add(v * LANES)) };
                    if V > 2 && v.is_multiple_of(2) {
                        // With few rows memory is the bottleneck: prefetch over page boundaries. No address can fault.
                        _mm_prefetch::<_MM_HINT_T0>(slab.wrapping_add(v * LANES + 1024).cast());
                    }
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let x = if m < 3 { upper.wrapping_add(m * a_row) } else { lower.wrapping_add((m - 3) * a_row) };
                    // SAFETY: row and step are within `a`.
                    let x = unsafe { _mm256_broadcast_ss(&*x) };
                    for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                        *sum = _mm256_fmadd_ps(x, vector, *sum);
                    }
                }
                (slab, upper, lower) = (slab.wrapping_add(b_step), upper.wrapping_add(1), lower.wrapping_add(1));
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                let c = c.wrapping_add(m * c_row + column + v * LANES);
                // SAFETY: the columns of row `m` that are written are the block's.
                unsafe { if is_whole { _mm256_storeu_ps(c, sum) } else { store_some(sum, c, n_left(v)) } };
            }
        }
    }

    /// # Safety
    /// `from` has `n` readable values.
    #[target_feature(enable = "avx2")]
    unsafe fn load_some(from: *const f32, n: usize) -> __m256 {
        let mut values = [0f32; LANES];
        // SAFETY: the caller's promise; `n` is at most LANES.
        unsafe {
            values.as_mut_ptr().copy_from_nonoverlapping(from, n);
            _mm256_loadu_ps(values.as_ptr())
        }
    }

    /// # Safety
    /// `to` has `n` writable values.
    #[target_feature(enable = "avx2")]
    unsafe fn store_some(vector: __m256, to: *mut f32, n: usize) {
        let mut values = [0f32; LANES];
        // SAFETY: the caller's promise; `n` is at most LANES.
        unsafe {
            _mm256_storeu_ps(values.as_mut_ptr(), vector);
            to.copy_from_nonoverlapping(values.as_ptr(), n);
        }
    }

    /// Transposes 8 by 8 values.
    ///
    /// # Safety
    /// `from` has 8 rows of 8 values that start `from_row` apart, and `to` 8 rows `to_row` apart; on a CPU with AVX2.
    #[target_feature(enable = "avx2")]
    pub(in super::super) unsafe fn transpose8(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        // SAFETY: row `i` has 8 values.
        let r: [__m256; 8] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(from.add(i * from_row)) });
        let mut t = r;
        for i in (0..8).step_by(2) {
            t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        }
        // q[4 g + j] holds columns j and 4 + j of rows 4 g to 4 g + 3, half a vector each.
        let mut q = t;
        for i in (0..8).step_by(4) {
            q[i] = _mm256_shuffle_ps::<0x44>(t[i], t[i + 2]);
            q[i + 1] = _mm256_shuffle_ps::<0xee>(t[i], t[i + 2]);
            q[i + 2] = _mm256_shuffle_ps::<0x44>(t[i + 1], t[i + 3]);
            q[i + 3] = _mm256_shuffle_ps::<0xee>(t[i + 1], t[i + 3]);
        }
        for j in 0..4 {
            // SAFETY: rows `j` and `4 + j` of the result have 8 values.
            unsafe {
                _mm256_storeu_ps(to.add(j * to_row), _mm256_permute2f128_ps::<0x20>(q[j], q[4 + j]));
                _mm256_storeu_ps(to.add((4 + j) * to_row), _mm256_permute2f128_ps::<0x31>(q[j], q[4 + j]));
            }
        }
    }
}

/// Tiles and transposes with 512-bit vectors.
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512 {
    use super::{Block, LINE_BYTES};
    use std::arch::x86_64::*;

    const LANES: usize = 16;

    /// Calls tiles until no rows are left: tiles of up to 6 rows by 4 vectors, or 12 rows by fewer vectors, fill the 32 registers.
    macro_rules! tiles {
        ($block:ident, $n_rows:ident) => {{
            let n_vectors = $block.n_cols.div_ceil(LANES);
            let most = if n_vectors > 2 { 6 } else { 12 };
            let mut row = 0;
            while row < $n_rows {
                let left = $n_rows - row;
                // Tiles of nearly equal size: 7 rows are 4 and 3, not 6 and 1.
                let n = if left >= 12 && most == 12 { 12 } else { left.div_ceil(left.div_ceil(6)) };
                let rows = Block { ahead: $block.ahead.of_parts(row, row + n, $n_rows), ..$block.at_row(row) };
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
    pub(in super::super) unsafe fn block(block: &Block, n_rows: usize) {
        // SAFETY: the caller's promise; tiles cover rows below `n_rows`.
        unsafe { tiles!(block, n_rows) }
    }

    /// Mask of the lanes of a vector that are columns of the block.
    fn mask(n_cols: usize, vector: usize) -> __mmask16 {
        match n_cols.saturating_sub(vector * LANES) {
            0 => 0,
            n if n >= LANES => !0,
            n => (1 << n) - 1,
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(in crate::kernels) unsafe fn load_sums<const M: usize, const V: usize>(
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
    pub(in crate::kernels) unsafe fn store_sums<const M: usize, const V: usize>(
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

    /// Computes M rows by V vectors of columns.
    #[target_feature(enable = "avx512f")]
    unsafe fn tile<const M: usize, const V: usize>(block: &Block) {
        let Block { a, a_row, b, b_step, n_steps, c, c_row, from, from_row, n_cols, keep, ahead } = *block;
        // SAFETY: the block's columns of M rows are there.
        let mut sums: [[__m512; V]; M] = unsafe { load_sums(from, from_row, n_cols, keep) };
        let (mut slab, mut next) = (b, ahead.start); // both advance with each step
        for step in 0..n_steps {
            for line in 0..ahead.n_lines {
                _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(line * LINE_BYTES).cast()); // no address can fault
            }
            let mut vectors = [_mm512_setzero_ps(); V];
            for (v, vector) in vectors.iter_mut().enumerate() {
                // SAFETY: a slab has WIDTH values for each step.
                *vector = unsafe { _mm512_loadu_ps(slab.add(v * LANES)) };
                if M <= 2 {
                    // With few rows memory is the bottleneck: prefetch over page boundaries. No address can fault.
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
    /// `from` has 16 rows of 16 values that start `from_row` apart, and `to` 16 rows `to_row` apart; on a CPU with AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(in super::super) unsafe fn transpose16(from: *const u32, from_row: usize, to: *mut u32, to_row: usize) {
        let mut r = [_mm512_setzero_si512(); LANES];
        for (i, r) in r.iter_mut().enumerate() {
            // SAFETY: row `i` has 16 values.
            *r = unsafe { _mm512_loadu_si512(from.add(i * from_row).cast()) };
        }
        // Transposes pairs of rows, then groups of four, then 128-bit quarters of vectors.
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
}
