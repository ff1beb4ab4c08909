//! The microkernel: one block of the result in register tiles, with prefetching.

use super::super::simd::Level;
#[cfg(target_arch = "x86_64")]
use super::avx512;

/// Bytes that come from memory at once.
pub(super) const LINE_BYTES: usize = 64;

/// What will be read after a block: it is asked for while the block is computed, since with few rows a weight comes no faster
/// from memory than it is multiplied.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub(super) start: *const u8,
    pub(super) bytes: usize,
    /// Lines to ask for at each step of the sum.
    pub(super) n_lines: usize,
}

impl Ahead {
    pub(super) const NOTHING: Self = Self { start: std::ptr::null(), bytes: 0, n_lines: 0 };

    /// The share of a tile of rows `from..to` of `n_rows`: all tiles together ask for each line once.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn of_rows(self, from: usize, to: usize, n_rows: usize) -> Self {
        let (first, end) = (self.n_lines * from / n_rows, self.n_lines * to / n_rows);
        Self { start: self.start.wrapping_add(first * LINE_BYTES), n_lines: end - first, ..self }
    }
}

/// `c = keep * from + a b`: rows of `a` by a slab `b`, [`super::WIDTH`] columns for each step.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) a: *const f32,
    /// Values between rows of `a`.
    pub(super) a_row: usize,
    pub(super) b: *const f32,
    /// Values between steps of `b`.
    pub(super) b_step: usize,
    pub(super) n_steps: usize,
    pub(super) c: *mut f32,
    /// Values between rows of `c`.
    pub(super) c_row: usize,
    /// What sums begin with: `c` itself, rows of another matrix, or one row for all.
    pub(super) from: *const f32,
    /// Values between rows of `from`.
    pub(super) from_row: usize,
    /// Columns of `c`, at most [`super::WIDTH`].
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
    pub(super) unsafe fn run(&self, level: Level, n_rows: usize) {
        match level {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            Level::Avx512 => unsafe { avx512::block(self, n_rows) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            Level::Avx2 => unsafe { portable::block_avx2(self, n_rows) },
            // SAFETY: the caller's promise.
            _ => unsafe { portable::block(self, n_rows) },
        }
    }

    /// The same block from `row` on.
    ///
    /// # Safety
    /// The block has that row.
    pub(super) unsafe fn at_row(&self, row: usize) -> Self {
        let from = self.from.wrapping_add(row * self.from_row);
        // SAFETY: the row is within `a` and `c`.
        unsafe { Self { a: self.a.add(row * self.a_row), c: self.c.add(row * self.c_row), from, ..*self } }
    }
}

/// Microkernel in plain Rust, compiled for the build target and for AVX2.
mod portable {
    use super::Block;

    /// Values of one vector of the tile.
    const LANES: usize = 16;

    /// Rows of a tile: with 256-bit vectors its sums take 8 of 16 registers.
    const ROWS: usize = 4;

    /// # Safety
    /// As [`Block::run`].
    pub(super) unsafe fn block(block: &Block, n_rows: usize) {
        // SAFETY: the caller's promise.
        unsafe { tiles::<false>(block, n_rows) }
    }

    /// # Safety
    /// As [`Block::run`], on a processor with AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn block_avx2(block: &Block, n_rows: usize) {
        // SAFETY: the caller's promise.
        unsafe { tiles::<true>(block, n_rows) }
    }

    #[inline(always)]
    unsafe fn tiles<const FUSED: bool>(block: &Block, n_rows: usize) {
        for row in (0..n_rows).step_by(ROWS) {
            // SAFETY: the row is one of the block's.
            let rows = unsafe { block.at_row(row) };
            for column in (0..block.n_cols).step_by(LANES) {
                // SAFETY: as many rows as are left, columns within the block.
                unsafe {
                    match n_rows - row {
                        1 => tile::<1, FUSED>(&rows, column),
                        2 => tile::<2, FUSED>(&rows, column),
                        3 => tile::<3, FUSED>(&rows, column),
                        _ => tile::<ROWS, FUSED>(&rows, column),
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<const M: usize, const FUSED: bool>(block: &Block, column: usize) {
        let n_cols = (block.n_cols - column).min(LANES);
        let mut sums = [[0f32; LANES]; M];
        if block.keep != 0.0 {
            for (m, sums) in sums.iter_mut().enumerate() {
                for (lane, sum) in sums.iter_mut().enumerate().take(n_cols) {
                    // SAFETY: row and column are within `from`, which is readable since something of it is kept. No slice: it may
                    // be `c`.
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
                    sums[lane] = if FUSED { a.mul_add(b[lane], sums[lane]) } else { a * b[lane] + sums[lane] };
                }
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            // SAFETY: row and columns are within `c`; the copy works on memory that was never written, too.
            unsafe { block.c.add(m * block.c_row + column).copy_from_nonoverlapping(sums.as_ptr(), n_cols) };
        }
    }
}
