//! Blocked matrix products with packed weights: `y = keep * y + sum of x W^T` and `dx = keep * dx + sum of g W`.
//!
//! A block of 64 columns of the result and up to [`STEPS`] steps of the sum reads one *slab* of the weight: 64 values wide,
//! either straight from the panels in which the weight is packed, or unpacked into a scratch that stays in the first-level
//! cache while all rows pass over it. Each value of the result is one chain of additions in the order of the sum, for any number
//! of rows: a row's result does not depend on its neighbours.

mod microkernel;
mod weight_view;

use super::simd::SimdLevel;
use candle_core::{Result, bail};
pub(super) use microkernel::WIDTH;
#[cfg(target_arch = "x86_64")]
pub(super) use microkernel::avx512::{load_sums, store_sums};
use microkernel::{Ahead, Block};
use rayon::prelude::*;
use std::marker::PhantomData;
use weight_view::{Reuse, Scratch, with_scratch};
pub(super) use weight_view::{WeightView, transpose};

/// Steps of the sum per slab: 32 KiB in f32.
const STEPS: usize = 128;

/// Rows per task: their part of `x` stays in the L2 cache while the panels of the weight are read.
const ROWS_PER_TASK: usize = 512;

/// Maximum number of rows for which a slab is read in place. With more rows, copying it is faster.
const FEW_ROWS: usize = 24;

/// Maximum number of rows for which the next slab is prefetched. With more rows the computation takes longer than the memory access.
const AHEAD_ROWS: usize = 96;

/// Number of multiplications below which one thread is faster than several.
const SERIAL_WORK: usize = 1 << 18;

/// One product in a sum of products: the weight, and the left matrix, which is `(N, in)` in the forward pass and `(N, out)` in the backward
/// pass.
#[derive(Clone, Copy)]
pub(super) struct Term<'a> {
    pub(super) left: &'a [f32],
    pub(super) weight: WeightView<'a>,
}

/// Destination of a result, and the initial values of its sums.
pub(super) struct Output<'a> {
    pub(super) values: *mut f32,
    len: usize,
    start: Start<'a>,
    memory: PhantomData<&'a mut f32>,
}

// SAFETY: the pointer comes from a mutable slice, and tasks write to disjoint parts of it.
unsafe impl Sync for Output<'_> {}

/// Initial values of the sums of a product.
#[derive(Clone, Copy)]
pub(super) enum Start<'a> {
    /// 0. The output may be uninitialised, because it is not read.
    Zero,
    /// The current values of the output times this factor.
    Itself(f32),
    /// Another matrix of the same shape.
    Matrix(&'a [f32]),
    /// The same row, such as a bias, for all rows of the result.
    Row(&'a [f32]),
}

impl<'a> Output<'a> {
    pub(super) fn new(values: &'a mut [f32], keep: f32) -> Self {
        let start = if keep == 0.0 { Start::Zero } else { Start::Itself(keep) };
        Self { values: values.as_mut_ptr(), len: values.len(), start, memory: PhantomData }
    }

    fn fits(&self, n_cols: usize) -> bool {
        match self.start {
            Start::Zero | Start::Itself(_) => true,
            Start::Matrix(values) => values.len() == self.len,
            Start::Row(values) => values.len() == n_cols,
        }
    }

    /// Pointer to the initial values of the sums of a block at `row` and `col`, the stride of their rows, and the factor on them.
    pub(super) fn beginning(&self, row: usize, col: usize, n_cols: usize) -> (*const f32, usize, f32) {
        let at = row * n_cols + col;
        match self.start {
            Start::Zero => (self.values, n_cols, 0.0),
            Start::Itself(keep) => (self.values.wrapping_add(at), n_cols, keep),
            Start::Matrix(values) => (values.as_ptr().wrapping_add(at), n_cols, 1.0),
            Start::Row(values) => (values.as_ptr().wrapping_add(col), 0, 1.0),
        }
    }
}

/// Allocates `len` values without clearing them and lets a product write them.
pub(super) fn alloc_output(len: usize, product: impl FnOnce(Output<'_>) -> Result<()>) -> Result<Vec<f32>> {
    let mut values: Vec<f32> = Vec::with_capacity(len);
    product(Output { values: values.as_mut_ptr(), len, start: Start::Zero, memory: PhantomData })?;
    // SAFETY: a product that returns without an error has at least one term, and its first term has written all values of an output: the
    // initial value if the sum has no steps.
    unsafe { values.set_len(len) };
    Ok(values)
}

/// Whether the sum runs over the weight's inputs (forward) or outputs (backward).
#[derive(Clone, Copy)]
pub(super) enum Direction {
    Forward,
    Backward,
}

struct Job<'a> {
    terms: &'a [Term<'a>],
    out: Output<'a>,
}

/// A product whose result is a new vector.
pub(super) struct MatmulSpec<'a> {
    pub(super) len: usize,
    pub(super) start: Start<'a>,
    pub(super) terms: Vec<Term<'a>>,
}

/// The results of several products that run in parallel.
pub(super) fn matmul_alloc(level: SimdLevel, direction: Direction, wanted: &[MatmulSpec<'_>]) -> Result<Vec<Vec<f32>>> {
    if wanted.iter().any(|fresh| matches!(fresh.start, Start::Itself(_))) {
        bail!("a sum that starts with fresh memory");
    }
    let mut results: Vec<Vec<f32>> = wanted.iter().map(|fresh| Vec::with_capacity(fresh.len)).collect();
    let mut jobs = Vec::with_capacity(wanted.len());
    for (values, MatmulSpec { len, start, terms }) in results.iter_mut().zip(wanted) {
        let out = Output { values: values.as_mut_ptr(), len: *len, start: *start, memory: PhantomData };
        jobs.push(Job { terms, out });
    }
    products(level, &jobs, direction)?;
    drop(jobs);
    for (values, fresh) in results.iter_mut().zip(wanted) {
        // SAFETY: as for `alloc_output`.
        unsafe { values.set_len(fresh.len) };
    }
    Ok(results)
}

/// `y = start + sum of left W^T`; `y`: `(N, out)`.
pub(super) fn forward(level: SimdLevel, terms: &[Term<'_>], y: Output<'_>) -> Result<()> {
    products(level, &[Job { terms, out: y }], Direction::Forward)
}

/// `dx = start + sum of left W`; `dx`: `(N, in)`.
pub(super) fn backward(level: SimdLevel, terms: &[Term<'_>], dx: Output<'_>) -> Result<()> {
    products(level, &[Job { terms, out: dx }], Direction::Backward)
}

impl Term<'_> {
    fn shape(&self, direction: Direction) -> (usize, usize) {
        match direction {
            Direction::Forward => (self.weight.n_in, self.weight.n_out),
            Direction::Backward => (self.weight.n_out, self.weight.n_in),
        }
    }
}

/// Runs the tasks of all jobs in parallel.
fn products(level: SimdLevel, jobs: &[Job<'_>], direction: Direction) -> Result<()> {
    let mut work = 0;
    let mut shapes = Vec::with_capacity(jobs.len());
    for job in jobs {
        let shape = job.shape(direction)?;
        work += job.terms.iter().map(|term| shape.0 * shape.1 * term.shape(direction).0).sum::<usize>();
        shapes.push(shape);
    }
    // Numbers the tasks of all jobs consecutively; each job has the number of tasks before it.
    let mut n_tasks = 0;
    let tasks = |&(n_rows, n_cols): &(usize, usize)| {
        let tasks = Tasks::new(n_rows, n_cols, work, jobs.len());
        n_tasks += tasks.len();
        (n_tasks - tasks.len(), tasks)
    };
    let tasks: Vec<(usize, Tasks)> = shapes.iter().map(tasks).collect();
    let run = |task: usize| {
        let index = tasks.partition_point(|(first, _)| *first <= task) - 1;
        let (first, tasks) = &tasks[index];
        // SAFETY: the shapes were checked above, and blocks of different tasks do not overlap.
        unsafe { jobs[index].run(level, direction, &tasks.block(task - first), tasks.n_cols) };
    };
    if work < SERIAL_WORK {
        (0..n_tasks).for_each(run);
    } else {
        (0..n_tasks).into_par_iter().for_each(run);
    }
    Ok(())
}

impl Job<'_> {
    fn shape(&self, direction: Direction) -> Result<(usize, usize)> {
        let Job { terms, out } = self;
        let Some(first) = terms.first() else { bail!("a product without terms into {} values", out.len) };
        let n_cols = first.shape(direction).1;
        let n_rows = out.len.checked_div(n_cols).unwrap_or(0);
        for term in *terms {
            let (n_steps, cols) = term.shape(direction);
            if cols != n_cols || n_rows * n_cols != out.len || term.left.len() != n_rows * n_steps {
                bail!(
                    "product: {} values by ({}, {}) into {}",
                    term.left.len(),
                    term.weight.n_out,
                    term.weight.n_in,
                    out.len
                );
            }
        }
        if !out.fits(n_cols) {
            bail!("product: sums of {} values by {n_cols} start with something of another shape", out.len);
        }
        Ok((n_rows, n_cols))
    }

    /// Computes one block of the result.
    ///
    /// # Safety
    /// [`Job::shape`] returned `n_cols` without an error, the block lies within the output, and no other thread accesses it.
    unsafe fn run(&self, level: SimdLevel, direction: Direction, block: &Rectangle, n_cols: usize) {
        with_scratch(|scratch| {
            let accumulate = Output { start: Start::Itself(1.0), ..self.out };
            for (index, term) in self.terms.iter().enumerate() {
                let out = if index == 0 { &self.out } else { &accumulate };
                // SAFETY: the caller's promise.
                unsafe { term.multiply(level, direction, block, out, n_cols, scratch) };
            }
        });
    }
}

/// The division of a result into blocks of some rows by 64 columns, one per task.
struct Tasks {
    n_rows: usize,
    n_cols: usize,
    n_row_chunks: usize,
    n_col_blocks: usize,
}

struct Rectangle {
    rows: std::ops::Range<usize>,
    cols: std::ops::Range<usize>,
}

impl Tasks {
    /// `work`: number of multiplications of all `n_jobs` that run in parallel.
    fn new(n_rows: usize, n_cols: usize, work: usize, n_jobs: usize) -> Self {
        let n_col_blocks = n_cols.div_ceil(WIDTH);
        let wanted = if work < SERIAL_WORK { 1 } else { (4 * rayon::current_num_threads()).div_ceil(n_jobs) };
        let for_threads = wanted.div_ceil(n_col_blocks.max(1)).min(n_rows.div_ceil(24));
        let n_row_chunks = n_rows.div_ceil(ROWS_PER_TASK).max(for_threads);
        Self { n_rows, n_cols, n_row_chunks, n_col_blocks }
    }

    fn len(&self) -> usize {
        self.n_row_chunks * self.n_col_blocks
    }

    /// The block of a task. Consecutive tasks share their rows.
    fn block(&self, task: usize) -> Rectangle {
        let (chunk, column) = (task / self.n_col_blocks, task % self.n_col_blocks * WIDTH);
        let start = |chunk: usize| chunk * self.n_rows / self.n_row_chunks;
        Rectangle { rows: start(chunk)..start(chunk + 1), cols: column..(column + WIDTH).min(self.n_cols) }
    }
}

impl Term<'_> {
    /// Adds this product to one block of the result.
    ///
    /// # Safety
    /// `block` lies within `out`, whose rows have `n_cols` values, and no other thread accesses it; the left matrix has those rows and the
    /// steps of the weight.
    unsafe fn multiply(
        &self,
        level: SimdLevel,
        direction: Direction,
        block: &Rectangle,
        out: &Output<'_>,
        n_cols: usize,
        scratch: &mut Scratch,
    ) {
        let n_steps = self.shape(direction).0;
        let n_rows = block.rows.len();
        // SAFETY: the block lies within the output.
        let c = unsafe { out.values.add(block.rows.start * n_cols + block.cols.start) };
        // A sum without steps still writes its initial values, so run at least once.
        for start in (0..n_steps.max(1)).step_by(STEPS) {
            let steps = start..(start + STEPS).min(n_steps);
            let (from, from_row, keep) = match start {
                0 => out.beginning(block.rows.start, block.cols.start, n_cols),
                _ => (c.cast_const(), n_cols, 1.0),
            };
            let slab = match direction {
                _ if steps.is_empty() => scratch.slab(),
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
                from,
                from_row,
                n_cols: block.cols.len(),
                keep,
                ahead: match direction {
                    // One or two rows of f32 are prefetched by the microkernel.
                    Direction::Forward if n_rows <= AHEAD_ROWS && (n_rows > 2 || slab.is_unpacked) => {
                        self.weight.ahead(block.cols.start, steps.end)
                    }
                    _ => Ahead::NOTHING,
                },
            };
            // SAFETY: `a` has `n_rows` rows of these steps, the slab holds the steps, `c` has the rows and columns, and so have the initial
            // values of the sums.
            unsafe { block.run(level, n_rows) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_sums_accumulate_or_write_zeros() {
        let (n_rows, n_cols) = (5, 70);
        let none = Term { left: &[], weight: WeightView::rows(&[], n_cols) };
        let (left, weight) = (vec![1.0; n_rows], vec![3.0; n_cols]);
        let one = Term { left: &left, weight: WeightView::rows(&weight, n_cols) };
        for level in SimdLevel::all() {
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
    fn batched_products_equal_single_ones_and_start_from_their_initial_value() {
        let number = |i: usize| ((i * 37 + 11) % 23) as f32 / 8.0 - 1.0;
        let (x, weights): (Vec<f32>, Vec<f32>) =
            ((0..30 * 150).map(number).collect(), (0..220 * 150).map(number).collect());
        let term = |n_out: usize| Term { left: &x, weight: WeightView::rows(&weights[..n_out * 150], 150) };
        let (bias, base): (Vec<f32>, Vec<f32>) = ((0..70).map(number).collect(), (0..30 * 220).map(number).collect());
        for level in SimdLevel::all() {
            let alone = |n_out: usize| alloc_output(30 * n_out, |out| forward(level, &[term(n_out)], out)).unwrap();
            let wanted = [
                MatmulSpec { len: 30 * 70, start: Start::Row(&bias), terms: vec![term(70)] },
                MatmulSpec { len: 30 * 220, start: Start::Matrix(&base), terms: vec![term(220)] },
                MatmulSpec { len: 30 * 16, start: Start::Zero, terms: vec![term(16)] },
            ];
            let found = matmul_alloc(level, Direction::Forward, &wanted).unwrap();
            let near = |found: &[f32], expected: &mut dyn Iterator<Item = f32>| {
                found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-4)
            };
            assert!(near(&found[0], &mut alone(70).iter().zip(bias.iter().cycle()).map(|(y, b)| y + b)), "{level:?}");
            assert!(near(&found[1], &mut alone(220).iter().zip(&base).map(|(y, b)| y + b)), "{level:?}");
            assert_eq!(found[2], alone(16), "{level:?}");
            let misfit = MatmulSpec { len: 30 * 70, start: Start::Row(&bias[1..]), terms: vec![term(70)] };
            assert!(matmul_alloc(level, Direction::Forward, &[misfit]).is_err());
        }
    }

    #[test]
    fn a_product_of_no_terms_is_an_error() {
        let error = alloc_output(3, |out| forward(SimdLevel::detected(), &[], out)).unwrap_err();
        assert!(error.to_string().contains("a product without terms into 3 values"), "{error}");
    }
}
