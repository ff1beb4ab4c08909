//! Products with weights, block by block: `y = keep * y + sum of x W^T` and `dx = keep * dx + sum of g W`.
//!
//! A block of 64 columns of the result and up to [`STEPS`] steps of the sum reads one *slab* of the weight: 64 values wide,
//! either straight from the panels in which the weight is packed, or unpacked into a scratch that stays in the first-level
//! cache while all rows pass over it. Each value of the result is one chain of additions in the order of the sum, wherever its
//! row stands and however many rows there are: a row's result does not depend on its neighbours.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
mod source;
mod tile;

use super::cpu::Level;
use candle_core::{Result, bail};
use rayon::prelude::*;
use source::{Reuse, Scratch, with_scratch};
pub(super) use source::{Source, transpose};
use std::marker::PhantomData;
use tile::Block;

/// Columns of a panel and of a block.
pub(super) const WIDTH: usize = 64;

/// Steps of the sum that one slab holds: 32 KiB in f32.
const STEPS: usize = 128;

/// Rows that one task works on: their part of `x` stays in the second-level cache while panels pass over it.
const ROWS_PER_TASK: usize = 256;

/// Rows of a result for which a slab is read where it stands: copying it side by side pays for more.
const FEW_ROWS: usize = 24;

/// Multiplications below which handing work to other threads costs more than it saves.
const SERIAL_WORK: usize = 1 << 18;

/// One product of a sum: the left matrix `(N, in)` going forward, `(N, out)` going backward, and the weight.
#[derive(Clone, Copy)]
pub(super) struct Term<'a> {
    pub(super) left: &'a [f32],
    pub(super) weight: Source<'a>,
}

/// Where a result goes. With `keep` 0 every value is written and none is read, so that it may be fresh memory.
pub(super) struct Output<'a> {
    start: *mut f32,
    len: usize,
    keep: f32,
    memory: PhantomData<&'a mut f32>,
}

// SAFETY: it is a mutable slice in other words, and tasks write to parts of it that do not overlap.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// Into `values`, of which `keep` times what they are remains.
    pub(super) fn new(values: &'a mut [f32], keep: f32) -> Self {
        Self { start: values.as_mut_ptr(), len: values.len(), keep, memory: PhantomData }
    }
}

impl Output<'_> {
    /// `keep * c` in a block: what a sum of no steps comes to.
    ///
    /// # Safety
    /// `block` lies within the output, whose rows have `n_cols` values, and no other thread touches it; where `keep` is not 0
    /// its values have been written.
    unsafe fn scale(&self, block: &Rectangle, n_cols: usize, keep: f32) {
        for (row, column) in block.rows.clone().flat_map(|row| block.cols.clone().map(move |column| (row, column))) {
            // SAFETY: row and column lie within the output, and the value is read only where it has been written.
            unsafe {
                let value = self.start.add(row * n_cols + column);
                value.write(if keep == 0.0 { 0.0 } else { keep * value.read() });
            }
        }
    }
}

/// A vector of `len` values that a product writes: the memory is not cleared before.
pub(super) fn written(len: usize, product: impl FnOnce(Output<'_>) -> Result<()>) -> Result<Vec<f32>> {
    let mut values: Vec<f32> = Vec::with_capacity(len);
    product(Output { start: values.as_mut_ptr(), len, keep: 0.0, memory: PhantomData })?;
    // SAFETY: a product that returns without an error has at least one term, and its first term has written all values of an
    // output that keeps nothing: zeros where its sum has no steps.
    unsafe { values.set_len(len) };
    Ok(values)
}

#[derive(Clone, Copy)]
enum Direction {
    Forward,
    Backward,
}

/// `y = keep * y + sum of left W^T`; `y`: `(N, out)`.
pub(super) fn forward(level: Level, terms: &[Term<'_>], y: Output<'_>) -> Result<()> {
    product(level, terms, y, Direction::Forward)
}

/// `dx = keep * dx + sum of left W`; `dx`: `(N, in)`.
pub(super) fn backward(level: Level, terms: &[Term<'_>], dx: Output<'_>) -> Result<()> {
    product(level, terms, dx, Direction::Backward)
}

impl Term<'_> {
    /// Steps of its sum and columns of its result.
    fn shape(&self, direction: Direction) -> (usize, usize) {
        match direction {
            Direction::Forward => (self.weight.n_in(), self.weight.n_out()),
            Direction::Backward => (self.weight.n_out(), self.weight.n_in()),
        }
    }
}

fn product(level: Level, terms: &[Term<'_>], out: Output<'_>, direction: Direction) -> Result<()> {
    let Some(first) = terms.first() else { bail!("a product of no terms into {} values", out.len) };
    let n_cols = first.shape(direction).1;
    let n_rows = out.len.checked_div(n_cols).unwrap_or(0);
    for term in terms {
        let (n_steps, cols) = term.shape(direction);
        if cols != n_cols || n_rows * n_cols != out.len || term.left.len() != n_rows * n_steps {
            bail!(
                "product: {} values by ({}, {}) into {}",
                term.left.len(),
                term.weight.n_out(),
                term.weight.n_in(),
                out.len
            );
        }
    }
    let work: usize = terms.iter().map(|term| n_rows * n_cols * term.shape(direction).0).sum();
    let tasks = Tasks::new(n_rows, n_cols, work);
    let run = |task: usize| {
        let block = tasks.block(task);
        with_scratch(|scratch| {
            for (index, term) in terms.iter().enumerate() {
                let keep = if index == 0 { out.keep } else { 1.0 };
                // SAFETY: the shapes were checked above, and blocks of different tasks do not overlap.
                unsafe { term.multiply(level, direction, &block, &out, n_cols, keep, scratch) };
            }
        });
    };
    if work < SERIAL_WORK {
        (0..tasks.len()).for_each(run);
    } else {
        (0..tasks.len()).into_par_iter().for_each(run);
    }
    Ok(())
}

/// The result cut into blocks: chunks of rows, in each of them one block for 64 columns.
struct Tasks {
    n_rows: usize,
    n_cols: usize,
    n_row_chunks: usize,
    n_col_blocks: usize,
}

/// Rows and columns of one task.
struct Rectangle {
    rows: std::ops::Range<usize>,
    cols: std::ops::Range<usize>,
}

impl Tasks {
    fn new(n_rows: usize, n_cols: usize, work: usize) -> Self {
        let n_col_blocks = n_cols.div_ceil(WIDTH);
        let wanted = if work < SERIAL_WORK { 1 } else { 4 * rayon::current_num_threads() };
        let for_threads = wanted.div_ceil(n_col_blocks.max(1)).min(n_rows.div_ceil(24));
        let n_row_chunks = n_rows.div_ceil(ROWS_PER_TASK).max(for_threads);
        Self { n_rows, n_cols, n_row_chunks, n_col_blocks }
    }

    fn len(&self) -> usize {
        self.n_row_chunks * self.n_col_blocks
    }

    /// Tasks that follow one another share their rows.
    fn block(&self, task: usize) -> Rectangle {
        let (chunk, column) = (task / self.n_col_blocks, task % self.n_col_blocks * WIDTH);
        let start = |chunk: usize| chunk * self.n_rows / self.n_row_chunks;
        Rectangle { rows: start(chunk)..start(chunk + 1), cols: column..(column + WIDTH).min(self.n_cols) }
    }
}

impl Term<'_> {
    /// One block of the result.
    ///
    /// # Safety
    /// `block` lies within `out`, whose rows have `n_cols` values, and no other thread touches it; the left matrix has those
    /// rows and the steps of the weight.
    #[allow(clippy::too_many_arguments)] // one call site; a struct would only name the same values again
    unsafe fn multiply(
        &self,
        level: Level,
        direction: Direction,
        block: &Rectangle,
        out: &Output<'_>,
        n_cols: usize,
        keep: f32,
        scratch: &mut Scratch,
    ) {
        let n_steps = self.shape(direction).0;
        let n_rows = block.rows.len();
        if n_steps == 0 {
            // SAFETY: the caller's promise.
            unsafe { out.scale(block, n_cols, keep) };
            return;
        }
        // SAFETY: the block lies within the output.
        let c = unsafe { out.start.add(block.rows.start * n_cols + block.cols.start) };
        for start in (0..n_steps).step_by(STEPS) {
            let steps = start..(start + STEPS).min(n_steps);
            let slab = match direction {
                Direction::Forward => self.weight.outputs_slab(level, block.cols.start, steps.clone(), scratch),
                Direction::Backward => {
                    let reuse = if n_rows > FEW_ROWS { Reuse::Often } else { Reuse::Seldom };
                    self.weight.inputs_slab(level, steps.clone(), block.cols.clone(), reuse, scratch)
                }
            };
            let block = Block {
                // SAFETY: this row and step are within the left matrix, which has the block's rows and all steps.
                a: unsafe { self.left.as_ptr().add(block.rows.start * n_steps + start) },
                a_row: n_steps,
                b: slab.start,
                b_step: slab.step,
                n_steps: steps.len(),
                c,
                c_row: n_cols,
                n_cols: block.cols.len(),
                keep: if start == 0 { keep } else { 1.0 },
            };
            // SAFETY: `a` has `n_rows` rows of these steps, the slab holds the steps, `c` has the rows and columns.
            unsafe { block.run(level, n_rows) };
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_no_steps_keep_what_is_asked_and_write_zeros_otherwise() {
        let (n_rows, n_cols) = (5, 70);
        let none = Term { left: &[], weight: Source::rows(&[], n_cols) };
        let (left, weight) = (vec![1.0; n_rows], vec![3.0; n_cols]);
        let one = Term { left: &left, weight: Source::rows(&weight, n_cols) };
        for level in Level::all() {
            let of = |terms: &[Term<'_>], before: f32, keep: f32| {
                let mut values = vec![before; n_rows * n_cols];
                backward(level, terms, Output::new(&mut values, keep)).unwrap();
                assert!(values.iter().all(|x| x.to_bits() == values[0].to_bits()), "{level:?}: {values:?}");
                values[0]
            };
            assert_eq!(of(&[none], f32::NAN, 0.0), 0.0);
            assert_eq!(of(&[none], 2.0, 0.5), 1.0);
            assert_eq!(of(&[none, one], f32::NAN, 0.0), 3.0);
            assert_eq!(of(&[one, none], 2.0, 1.0), 5.0);
        }
    }

    #[test]
    fn a_product_of_no_terms_is_an_error() {
        let error = written(3, |out| forward(Level::detected(), &[], out)).unwrap_err();
        assert!(error.to_string().contains("a product of no terms into 3 values"), "{error}");
    }
}
