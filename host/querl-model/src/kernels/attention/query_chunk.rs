//! Attention of one chunk of queries, forward and backward, one key-value head after another, and its softmax kernels.
//!
//! Sums run over 16 SIMD lanes that are added at the end at every SIMD level: results do not depend on the CPU.

use super::Heads;
use super::prefix_tree::QueryChunk;
use crate::kernels::simd::vectorised;
use crate::kernels::{LANES, Mat, dot, exp, matmul, matmul_into};
use candle_core::Result;
use std::ops::Range;

/// Number of scores in memory at a time: they fit into the L2 cache, and memory does not grow with the square of the sequence length.
const MAX_SCORES: usize = 1 << 16;

/// Inputs: queries `(queries, heads * D)` of all chunks; keys and values `(N, kv_heads * D)` of all rows.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub(super) q: &'a [f32],
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
    /// Sliding window: the maximum number of keys that a query attends to.
    pub(super) window: usize,
}

/// The keys that the queries of a block attend to: positions from `n_seen - window` to `n_seen` for each query.
#[derive(Clone, Copy)]
struct Visible<'a> {
    n_seen: &'a [usize],
    window: usize,
    /// Rows of scores per query: the query heads of a group.
    group: usize,
}

impl Visible<'_> {
    #[inline(always)]
    fn of_row(self, row: usize) -> Range<usize> {
        let n_seen = self.n_seen[row / self.group];
        n_seen.saturating_sub(self.window)..n_seen
    }
}

/// Gradients of a chunk's keys and values, indexed by the chunk's keys: `(keys, kv_heads * D)` each.
pub(super) struct KeyGradients {
    pub(super) dk: Vec<f32>,
    pub(super) dv: Vec<f32>,
}

/// Results of the forward pass for the chunk's queries, which the backward pass reads.
#[derive(Clone, Copy)]
pub(super) struct Outputs<'a> {
    /// `(queries, heads * D)`.
    pub(super) out: &'a [f32],
    pub(super) grad: &'a [f32],
    /// `(kv_heads, queries, group)`.
    pub(super) logsumexp: &'a [f32],
}

#[derive(Default)]
struct Buffers {
    q: Vec<f32>,    // (rows, D), where rows are queries by heads of the group
    out: Vec<f32>,  // (rows, D)
    grad: Vec<f32>, // (rows, D)
    p: Vec<f32>,    // (rows, width)
    ds: Vec<f32>,   // (rows, width)
    dots: Vec<f32>, // (rows)
}

/// Queries whose scores are in memory at the same time.
struct Block {
    queries: Range<usize>,
    /// Maximum number of keys that one of the queries attends to.
    width: usize,
}

impl QueryChunk {
    fn blocks(&self, group: usize) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        for (query, &n_seen) in self.n_seen.iter().enumerate() {
            if let Some(block) = blocks.last_mut() {
                let width = block.width.max(n_seen);
                if (block.queries.len() + 1) * group * width <= MAX_SCORES {
                    (block.queries.end, block.width) = (query + 1, width);
                    continue;
                }
            }
            blocks.push(Block { queries: query..query + 1, width: n_seen });
        }
        blocks
    }

    /// The matrix products of a block, one per span: rows of the block (queries by heads), keys of the chunk, columns of scores.
    fn products<'a>(&'a self, block: &'a Block, visible: Visible<'a>) -> impl Iterator<Item = Product> + 'a {
        self.spans.iter().filter_map(move |span| {
            let first = span.queries.start.max(block.queries.start);
            let last = span.queries.end.min(block.queries.end);
            let n_seen = &self.n_seen[first.min(last)..last];
            let end = n_seen.iter().max()?.saturating_sub(span.depth).min(span.keys.len());
            let start = n_seen.iter().min()?.saturating_sub(visible.window).saturating_sub(span.depth);
            let group = visible.group;
            let rows = (first - block.queries.start) * group..(last - block.queries.start) * group;
            let (key, column) = (span.keys.start + start, span.depth + start);
            (start < end).then(|| Product { rows, key, n_keys: end - start, column })
        })
    }

    fn visible(&self, block: &Block, heads: Heads, x: Inputs<'_>) -> Visible<'_> {
        Visible { n_seen: &self.n_seen[block.queries.clone()], window: x.window, group: heads.group }
    }

    /// Computes attention of the chunk's queries into `out` `(queries, heads * D)` and `logsumexp` `(kv_heads, queries, group)`.
    pub(super) fn forward(&self, heads: Heads, x: Inputs<'_>, out: &mut [f32], logsumexp: &mut [f32]) -> Result<()> {
        let (group, dim) = (heads.group, heads.head_dim);
        let (mut k, mut v) = (Vec::new(), Vec::new());
        let mut buffers = Buffers::default();
        for (head, logsumexp) in logsumexp.chunks_exact_mut(self.n_seen.len() * group).enumerate() {
            self.gather(heads, head, x.k, &mut k);
            self.gather(heads, head, x.v, &mut v);
            for block in self.blocks(group) {
                let n_rows = block.queries.len() * group;
                let logsumexp = &mut logsumexp[block.queries.start * group..block.queries.end * group];
                let visible = self.visible(&block, heads, x);
                pack(heads, head, x.q, self.queries.start, &block.queries, &mut buffers.q);
                self.scores(heads, (&block, visible), &buffers.q, &k, heads.scale(), &mut buffers.p)?;
                probabilities(&mut buffers.p, block.width, visible, logsumexp);
                buffers.out.clear();
                buffers.out.resize(n_rows * dim, 0.0);
                for product in self.products(&block, visible) {
                    let rows = &mut buffers.out[product.rows.start * dim..product.rows.end * dim];
                    matmul(rows, 1.0, 1.0, product.of(&buffers.p, block.width), product.keys(&v, dim))?;
                }
                unpack(heads, head, &buffers.out, &block.queries, out);
            }
        }
        Ok(())
    }

    /// Writes the gradient of queries to `dq` `(queries, heads * D)`; returns the gradients of keys and values.
    ///
    /// With `P` the probabilities and `g` the gradient of the output `O`: `dV = P^T g`, `dP = g V^T`, `dS = P * (dP - rowsum(g * O))`,
    /// `dQ = scale dS K`, `dK = scale dS^T Q`.
    pub(super) fn backward(
        &self,
        heads: Heads,
        x: Inputs<'_>,
        outputs: Outputs<'_>,
        dq: &mut [f32],
    ) -> Result<KeyGradients> {
        let (group, dim, n_keys) = (heads.group, heads.head_dim, self.n_keys());
        let (mut k, mut v, mut buffers) = (Vec::new(), Vec::new(), Buffers::default());
        let mut gradients =
            KeyGradients { dk: vec![0.0; n_keys * heads.kv_width()], dv: vec![0.0; n_keys * heads.kv_width()] };
        let (mut dk, mut dv) = (vec![0f32; n_keys * dim], vec![0f32; n_keys * dim]);
        for (head, logsumexp) in outputs.logsumexp.chunks_exact(self.n_seen.len() * group).enumerate() {
            self.gather(heads, head, x.k, &mut k);
            self.gather(heads, head, x.v, &mut v);
            dk.fill(0.0);
            dv.fill(0.0);
            for block in self.blocks(group) {
                let (n_rows, width) = (block.queries.len() * group, block.width);
                let logsumexp = &logsumexp[block.queries.start * group..block.queries.end * group];
                let visible = self.visible(&block, heads, x);
                pack(heads, head, x.q, self.queries.start, &block.queries, &mut buffers.q);
                pack(heads, head, outputs.out, 0, &block.queries, &mut buffers.out);
                pack(heads, head, outputs.grad, 0, &block.queries, &mut buffers.grad);
                buffers.dots.resize(n_rows, 0.0);
                dot_products(&mut buffers.dots, &buffers.grad, &buffers.out, dim);
                self.scores(heads, (&block, visible), &buffers.q, &k, heads.scale(), &mut buffers.p)?;
                recompute_probabilities(&mut buffers.p, width, visible, logsumexp);
                self.scores(heads, (&block, visible), &buffers.grad, &v, 1.0, &mut buffers.ds)?;
                score_gradients(&mut buffers.ds, &buffers.p, width, visible, &buffers.dots);
                buffers.out.fill(0.0);
                for product in self.products(&block, visible) {
                    let (rows, keys) = (product.rows.start * dim..product.rows.end * dim, product.key_values(dim));
                    let (p, ds) = (product.of(&buffers.p, width), product.of(&buffers.ds, width));
                    let of_rows = |data| Mat::new(data, product.rows.len(), dim);
                    let (q, grad) = (of_rows(&buffers.q[rows.clone()]), of_rows(&buffers.grad[rows.clone()]));
                    let scale = heads.scale();
                    matmul(&mut dv[keys.clone()], 1.0, 1.0, p.t(), grad)?;
                    matmul(&mut dk[keys], 1.0, scale, ds.t(), q)?;
                    matmul(&mut buffers.out[rows], 1.0, scale, ds, product.keys(&k, dim))?;
                }
                unpack(heads, head, &buffers.out, &block.queries, dq);
            }
            place(heads, head, &dk, &mut gradients.dk);
            place(heads, head, &dv, &mut gradients.dv);
        }
        Ok(gradients)
    }

    /// Scores `scale * rows keys^T`, `(rows, width)`; undefined where a row does not attend to a key.
    fn scores(
        &self,
        heads: Heads,
        (block, visible): (&Block, Visible<'_>),
        rows: &[f32],
        keys: &[f32],
        scale: f32,
        scores: &mut Vec<f32>,
    ) -> Result<()> {
        let dim = heads.head_dim;
        scores.resize(block.queries.len() * heads.group * block.width, 0.0);
        for product in self.products(block, visible) {
            let lhs = Mat::new(&rows[product.rows.start * dim..product.rows.end * dim], product.rows.len(), dim);
            let into = &mut scores[product.rows.start * block.width + product.column..];
            matmul_into(into, block.width, 0.0, scale, lhs, product.keys(keys, dim).t())?;
        }
        Ok(())
    }

    /// Copies one head of the chunk's keys or values to `out` `(keys, D)`.
    fn gather(&self, heads: Heads, head: usize, all: &[f32], out: &mut Vec<f32>) {
        let (width, dim) = (heads.kv_width(), heads.head_dim);
        out.clear();
        for rows in self.before.iter().chain([&self.rows]) {
            for row in all[rows.start * width..rows.end * width].chunks_exact(width) {
                out.extend_from_slice(&row[head * dim..(head + 1) * dim]);
            }
        }
    }
}

/// One matrix product of a block: some rows and some keys.
struct Product {
    rows: Range<usize>,
    key: usize,
    n_keys: usize,
    column: usize,
}

impl Product {
    fn of<'a>(&self, scores: &'a [f32], width: usize) -> Mat<'a> {
        Mat::strided(&scores[self.rows.start * width + self.column..], self.rows.len(), self.n_keys, width)
    }

    fn key_values(&self, dim: usize) -> Range<usize> {
        self.key * dim..(self.key + self.n_keys) * dim
    }

    fn keys<'a>(&self, keys: &'a [f32], dim: usize) -> Mat<'a> {
        Mat::new(&keys[self.key_values(dim)], self.n_keys, dim)
    }
}

/// Copies the heads of one group of some queries to rows `(queries * group, D)`. `offset`: index of the chunk's first query in `all`.
fn pack(heads: Heads, head: usize, all: &[f32], offset: usize, queries: &Range<usize>, out: &mut Vec<f32>) {
    let (width, part) = (heads.q_width(), heads.group * heads.head_dim);
    out.clear();
    for row in all[(offset + queries.start) * width..(offset + queries.end) * width].chunks_exact(width) {
        out.extend_from_slice(&row[head * part..(head + 1) * part]);
    }
}

/// The inverse of [`pack`]; `all`: the chunk's queries.
fn unpack(heads: Heads, head: usize, rows: &[f32], queries: &Range<usize>, all: &mut [f32]) {
    let (width, part) = (heads.q_width(), heads.group * heads.head_dim);
    let all = all[queries.start * width..queries.end * width].chunks_exact_mut(width);
    for (row, part_row) in all.zip(rows.chunks_exact(part)) {
        row[head * part..(head + 1) * part].copy_from_slice(part_row);
    }
}

/// Copies `(keys, D)` into the columns of one key-value head.
fn place(heads: Heads, head: usize, part: &[f32], all: &mut [f32]) {
    let dim = heads.head_dim;
    for (row, part) in all.chunks_exact_mut(heads.kv_width()).zip(part.chunks_exact(dim)) {
        row[head * dim..(head + 1) * dim].copy_from_slice(part);
    }
}

vectorised! {
    /// Softmax over the keys that each row attends to, 0 elsewhere; also the log-sum-exp of each row. `scores`: rows of `width` values.
    fn probabilities(scores: &mut [f32], width: usize, visible: Visible<'_>, logsumexp: &mut [f32]) {
        for (index, (row, row_logsumexp)) in scores.chunks_exact_mut(width).zip(logsumexp).enumerate() {
            let (before, seen, after) = parts(row, visible.of_row(index));
            let max = reduce(seen, f32::NEG_INFINITY, |max, x| if x > max { x } else { max });
            seen.iter_mut().for_each(|score| *score = exp(*score - max));
            let sum = reduce(seen, 0.0, |sum, x| sum + x);
            let inverse = 1.0 / sum;
            seen.iter_mut().for_each(|p| *p *= inverse);
            before.fill(0.0);
            after.fill(0.0);
            *row_logsumexp = max + sum.ln();
        }
    }
}

vectorised! {
    /// Recomputes the probabilities from scores and log-sum-exp.
    fn recompute_probabilities(scores: &mut [f32], width: usize, visible: Visible<'_>, logsumexp: &[f32]) {
        for (index, (row, row_logsumexp)) in scores.chunks_exact_mut(width).zip(logsumexp).enumerate() {
            let (before, seen, after) = parts(row, visible.of_row(index));
            seen.iter_mut().for_each(|score| *score = exp(*score - row_logsumexp));
            before.fill(0.0);
            after.fill(0.0);
        }
    }
}

vectorised! {
    /// Replaces `dP` by `dS = P * (dP - dot)`; 0 where a row does not attend to a key.
    fn score_gradients(dp: &mut [f32], p: &[f32], width: usize, visible: Visible<'_>, dots: &[f32]) {
        let rows = dp.chunks_exact_mut(width).zip(p.chunks_exact(width)).zip(dots);
        for (index, ((dp, p), dot)) in rows.enumerate() {
            let range = visible.of_row(index);
            let p = &p[range.clone()];
            let (before, seen, after) = parts(dp, range);
            seen.iter_mut().zip(p).for_each(|(dp, p)| *dp = p * (*dp - dot));
            before.fill(0.0);
            after.fill(0.0);
        }
    }
}

/// Splits a row into the columns before, within and after the range of keys that it attends to.
#[inline(always)]
fn parts(row: &mut [f32], seen: Range<usize>) -> (&mut [f32], &mut [f32], &mut [f32]) {
    let (row, after) = row.split_at_mut(seen.end);
    let (before, seen) = row.split_at_mut(seen.start);
    (before, seen, after)
}

vectorised! {
    fn dot_products(dots: &mut [f32], a: &[f32], b: &[f32], width: usize) {
        for ((result, a), b) in dots.iter_mut().zip(a.chunks_exact(width)).zip(b.chunks_exact(width)) {
            *result = dot(a, b);
        }
    }
}

#[inline(always)]
fn reduce(row: &[f32], start: f32, f: impl Fn(f32, f32) -> f32 + Copy) -> f32 {
    let mut lanes = [start; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = f(lanes[lane], chunk[lane]);
        }
    }
    lanes.iter().chain(rest).copied().fold(start, f)
}
