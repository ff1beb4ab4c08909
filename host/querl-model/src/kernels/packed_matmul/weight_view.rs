//! Views of a packed weight or a row-major matrix, and the slabs that the microkernel reads.

use super::super::packed_weight::Packed;
use super::super::simd::SimdLevel;
use super::STEPS;
use super::microkernel::{Ahead, LINE_BYTES, WIDTH};
#[cfg(target_arch = "x86_64")]
use super::microkernel::{avx2, avx512};
use rayon::prelude::*;
use std::cell::RefCell;
use std::ops::Range;

/// A view of a weight `(out, in)`, or of a range of its outputs.
#[derive(Clone, Copy)]
pub(in super::super) struct WeightView<'a> {
    stored: Stored<'a>,
    /// Index of the first output; in a packed weight a multiple of WIDTH.
    first: usize,
    pub(in super::super) n_out: usize,
    pub(in super::super) n_in: usize,
}

#[derive(Clone, Copy)]
enum Stored<'a> {
    Packed(&'a Packed),
    /// Row-major f32.
    Rows(&'a [f32]),
}

/// The weights of a block; consecutive steps of the sum are `step` values apart.
pub(super) struct Slab {
    pub(super) start: *const f32,
    pub(super) step: usize,
    /// True for a copy in the scratch memory, false for the weight itself.
    pub(super) is_unpacked: bool,
}

/// How often a slab is read after it is unpacked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reuse {
    Seldom,
    Often,
}

/// Scratch memory of one thread: the current slab, and intermediate values.
#[repr(C, align(64))]
pub(super) struct Scratch {
    slab: [f32; STEPS * WIDTH],
    block: [f32; WIDTH * WIDTH],
}

thread_local! {
    static SCRATCH: RefCell<Box<Scratch>> =
        RefCell::new(Box::new(Scratch { slab: [0.0; STEPS * WIDTH], block: [0.0; WIDTH * WIDTH] }));
}

impl Scratch {
    pub(super) fn slab(&self) -> Slab {
        Slab { start: self.slab.as_ptr(), step: WIDTH, is_unpacked: true }
    }
}

/// Calls `f` with this thread's scratch memory. `f` must not run parallel tasks, which could call this function again on the same thread.
pub(super) fn with_scratch(f: impl FnOnce(&mut Scratch)) {
    SCRATCH.with_borrow_mut(|scratch| f(scratch));
}

impl<'a> WeightView<'a> {
    /// A row-major matrix of `n_in` columns.
    pub(in super::super) fn rows(values: &'a [f32], n_in: usize) -> Self {
        Self { stored: Stored::Rows(values), first: 0, n_out: values.len() / n_in.max(1), n_in }
    }

    pub(in super::super) fn packed(packed: &'a Packed) -> Self {
        Self { stored: Stored::Packed(packed), first: 0, n_out: packed.n_out, n_in: packed.n_in }
    }

    /// A view of some outputs, starting at a multiple of WIDTH.
    pub(in super::super) fn part(self, outputs: Range<usize>) -> Self {
        debug_assert!(outputs.start.is_multiple_of(WIDTH) && outputs.end <= self.n_out);
        Self { first: self.first + outputs.start, n_out: outputs.len(), ..self }
    }

    /// The inputs `steps` of WIDTH outputs, starting at `output`. Values after the last output are undefined.
    pub(super) fn outputs_slab(
        self,
        level: SimdLevel,
        output: usize,
        steps: Range<usize>,
        scratch: &mut Scratch,
    ) -> Slab {
        let output = self.first + output;
        match self.stored {
            Stored::Packed(packed) => match packed.floats() {
                Some(floats) => {
                    let start = floats[packed.offset(output / WIDTH, steps.start)..].as_ptr();
                    return Slab { start, step: WIDTH, is_unpacked: false };
                }
                None => packed.unpack(level, output / WIDTH, steps.clone(), &mut scratch.slab[..steps.len() * WIDTH]),
            },
            Stored::Rows(values) => {
                let outputs = output..(output + WIDTH).min(self.first + self.n_out);
                transpose_part(level, values, self.n_in, outputs, steps, &mut scratch.slab);
            }
        }
        scratch.slab()
    }

    /// The memory that is read after some steps of a panel: the rest of the panel, or the next panel.
    pub(super) fn ahead(self, output: usize, step: usize) -> Ahead {
        let Stored::Packed(packed) = self.stored else { return Ahead::NOTHING };
        let panel = (self.first + output) / WIDTH;
        let (panel, step) = if step < packed.n_in { (panel, step) } else { (panel + 1, 0) };
        if panel * WIDTH >= packed.n_out {
            return Ahead::NOTHING;
        }
        let (start, bytes) = packed.stored(panel, step);
        Ahead { start, bytes, n_lines: bytes / LINE_BYTES }
    }

    /// The outputs `steps` of the inputs `columns`, at most WIDTH. Both ranges start at a multiple of WIDTH.
    pub(super) fn inputs_slab(
        self,
        level: SimdLevel,
        steps: Range<usize>,
        columns: Range<usize>,
        reuse: Reuse,
        scratch: &mut Scratch,
    ) -> Slab {
        let steps = self.first + steps.start..self.first + steps.end;
        match self.stored {
            Stored::Packed(packed) => packed_inputs(packed, level, steps, columns.start, scratch),
            Stored::Rows(values) if reuse == Reuse::Seldom && columns.len() == WIDTH => {
                let start = values[steps.start * self.n_in + columns.start..].as_ptr();
                return Slab { start, step: self.n_in, is_unpacked: false };
            }
            Stored::Rows(values) => {
                for (row, slab) in steps.zip(scratch.slab.chunks_exact_mut(WIDTH)) {
                    slab[..columns.len()].copy_from_slice(&values[row * self.n_in..][columns.clone()]);
                }
            }
        }
        scratch.slab()
    }
}

fn packed_inputs(packed: &Packed, level: SimdLevel, steps: Range<usize>, column: usize, scratch: &mut Scratch) {
    let inputs = column..(column + WIDTH).min(packed.n_in_padded);
    for (start, slab) in steps.step_by(WIDTH).zip(scratch.slab.chunks_exact_mut(WIDTH * WIDTH)) {
        let block = match packed.floats() {
            Some(floats) => &floats[packed.offset(start / WIDTH, column)..][..inputs.len() * WIDTH],
            None => {
                let block = &mut scratch.block[..inputs.len() * WIDTH];
                packed.unpack(level, start / WIDTH, inputs.clone(), block);
                block
            }
        };
        transpose_block(level, block, slab);
    }
}

/// Transposes `(n, WIDTH)`, with `n` a multiple of 16, into the first `n` columns of `(WIDTH, WIDTH)`.
fn transpose_block(level: SimdLevel, from: &[f32], to: &mut [f32]) {
    for row in (0..from.len() / WIDTH).step_by(16) {
        for column in (0..WIDTH).step_by(16) {
            transpose16(level, &from[row * WIDTH + column..], WIDTH, &mut to[column * WIDTH + row..], WIDTH);
        }
    }
}

/// Transposes the rows `outputs` and columns `steps` of a row-major matrix into `(steps, WIDTH)`; the rest of each row is 0.
fn transpose_part(
    level: SimdLevel,
    values: &[f32],
    n_in: usize,
    outputs: Range<usize>,
    steps: Range<usize>,
    to: &mut [f32],
) {
    for row in (0..WIDTH).step_by(16) {
        for step in (0..steps.len()).step_by(16) {
            let first = outputs.start + row;
            if first + 16 <= outputs.end && step + 16 <= steps.len() {
                let from = &values[first * n_in + steps.start + step..];
                transpose16(level, from, n_in, &mut to[step * WIDTH + row..], WIDTH);
                continue;
            }
            for step in step..(step + 16).min(steps.len()) {
                for row in row..row + 16 {
                    let output = outputs.start + row;
                    let is_there = output < outputs.end;
                    to[step * WIDTH + row] = if is_there { values[output * n_in + steps.start + step] } else { 0.0 };
                }
            }
        }
    }
}

/// Transposes 16 by 16 values; rows start `from_row` and `to_row` apart.
fn transpose16(level: SimdLevel, from: &[f32], from_row: usize, to: &mut [f32], to_row: usize) {
    assert!(from.len() >= 15 * from_row + 16 && to.len() >= 15 * to_row + 16, "16 rows of 16 values");
    match level {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => {
            // SAFETY: the lengths were checked, and the level says that the processor has the instructions.
            unsafe { avx512::transpose16(from.as_ptr().cast(), from_row, to.as_mut_ptr().cast(), to_row) }
        }
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => {
            for (row, column) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
                let (from, to) = (&from[row * from_row + column..], &mut to[column * to_row + row..]);
                // SAFETY: as above; each of the four quarters has 8 rows of 8 values within the 16 rows.
                unsafe { avx2::transpose8(from.as_ptr(), from_row, to.as_mut_ptr(), to_row) }
            }
        }
        _ => {
            (0..16).for_each(|row| (0..16).for_each(|column| to[column * to_row + row] = from[row * from_row + column]))
        }
    }
}

/// The transposed matrix: `(n_cols, n_rows)`.
pub(in super::super) fn transpose(level: SimdLevel, values: &[f32], n_cols: usize) -> Vec<f32> {
    let n_rows = values.len() / n_cols.max(1);
    let mut transposed = vec![0f32; n_rows * n_cols];
    transposed.par_chunks_mut((n_rows * 16).max(1)).enumerate().for_each(|(part, to)| {
        let columns = part * 16..(part * 16 + 16).min(n_cols);
        for row in (0..n_rows).step_by(16) {
            if row + 16 <= n_rows && columns.len() == 16 {
                transpose16(level, &values[row * n_cols + columns.start..], n_cols, &mut to[row..], n_rows);
                continue;
            }
            for row in row..(row + 16).min(n_rows) {
                for column in columns.clone() {
                    to[(column - columns.start) * n_rows + row] = values[row * n_cols + column];
                }
            }
        }
    });
    transposed
}
