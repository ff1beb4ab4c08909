//! Blocks of a result and how they divide into tiles that fit the registers.

use super::super::cpu::Level;
#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::portable;

/// Bytes that come from memory at once.
pub(super) const LINE_BYTES: usize = 64;

/// What will be read after a block: it is asked for while the block is computed, since with few rows a weight comes no faster
/// from memory than it is multiplied.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub(super) start: *const u8,
    /// Of each step.
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
