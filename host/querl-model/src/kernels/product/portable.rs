//! Tiles in plain Rust, compiled for the program's target and for 256-bit vectors.

use super::tile::Block;

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
