//! Attention of new tokens over the paged KV cache of their sequences. Neighbouring rows with the same block in their block tables
//! attend to it together: a prefix that many sequences share is read once. The result of a row does not depend on that, since each
//! of its sums is formed in the order of the tokens.

use super::cpu_backend::{CpuInference, PooledBuffer};
use crate::kernels::LANES;
use crate::kernels::simd::{Arithmetic, exp_or_zero, vectorised};
use crate::kv_cache::{BLOCK_TOKENS, Block, SequenceKvCache};
use crate::transformer::Attention;
use candle_core::{Error, Result};
use rayon::prelude::*;
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

pub(super) struct NewTokens<'s> {
    pub(super) cache: &'s mut SequenceKvCache,
    pub(super) tokens: &'s [u32],
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub(super) cache: usize,
    /// Number of tokens that the row attends to without a window: those before it and itself.
    pub(super) n_visible: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) head_dim: usize,
}

pub(super) struct PagedAttention<'a, 's> {
    pub(super) sequences: &'a mut [NewTokens<'s>],
    /// Rows whose keys and values are written to the cache.
    pub(super) rows: &'a [Row],
    /// Rows whose output is computed.
    pub(super) queries: &'a [Row],
    pub(super) layer: usize,
    /// Sliding window: the maximum number of keys that a row attends to, its own included; `None` means all.
    pub(super) window: Option<usize>,
    pub(super) heads: Heads,
}

impl Attention<CpuInference> for PagedAttention<'_, '_> {
    type Saved = ();

    fn attend(&mut self, backend: &CpuInference, [q, k, v]: [&[f32]; 3]) -> Result<(PooledBuffer, ())> {
        let width = k.len() / self.rows.len();
        for ((key, value), row) in k.chunks_exact(width).zip(v.chunks_exact(width)).zip(self.rows) {
            let cache = &mut self.sequences[row.cache].cache;
            cache.write(self.layer, row.n_visible - 1, key, value).map_err(Error::wrap)?;
        }
        let caches: Vec<&SequenceKvCache> = self.sequences.iter().map(|sequence| &*sequence.cache).collect();
        let mut out = backend.buffer(q.len());
        let caches = Caches { caches: &caches, window: self.window.unwrap_or(usize::MAX) };
        attend(caches, self.queries, self.layer, q, self.heads, &mut out);
        Ok((out, ()))
    }
}

/// The block tables that rows attend over.
#[derive(Clone, Copy)]
struct Caches<'a> {
    caches: &'a [&'a SequenceKvCache],
    window: usize,
}

impl<'a> Caches<'a> {
    /// Position of the first token that a row attends to.
    fn first_visible(self, row: &Row) -> usize {
        row.n_visible.saturating_sub(self.window)
    }

    /// Position of the first token of the block with that token.
    fn first_of_blocks(self, row: &Row) -> usize {
        self.first_visible(row) / BLOCK_TOKENS * BLOCK_TOKENS
    }

    /// The block with this index, if the row attends to a token of it.
    fn block_of(self, row: &Row, index: usize) -> Option<&'a Arc<Block>> {
        let first = index * BLOCK_TOKENS;
        let is_seen = (self.first_of_blocks(row)..row.n_visible).contains(&first);
        is_seen.then(|| &self.caches[row.cache].blocks()[index])
    }
}

/// Rows per task: enough to share a block, few enough that their scores fit into the L2 cache.
const ROWS_PER_TASK: usize = 32;

thread_local! {
    static SCRATCH: Cell<Scratch> = const { Cell::new(Scratch { queries: Vec::new(), scores: Vec::new(), sums: Vec::new() }) };
}

#[derive(Default)]
struct Scratch {
    queries: Vec<f32>, // (rows * group, D), scaled
    scores: Vec<f32>,  // (rows * group, longest)
    sums: Vec<f32>,    // (rows * group, value width)
}

/// Computes `out` `(N, heads * D)` for queries of the same shape. The caches already contain the keys and values of the rows themselves.
fn attend(caches: Caches<'_>, rows: &[Row], layer: usize, queries: &[f32], heads: Heads, out: &mut [f32]) {
    let width = heads.n_heads * heads.head_dim;
    let per_task = (ROWS_PER_TASK * width).max(1);
    let tasks = out.par_chunks_mut(per_task).zip(queries.par_chunks(per_task));
    tasks.zip(rows.par_chunks(ROWS_PER_TASK)).for_each(|((out, queries), rows)| {
        let mut scratch = SCRATCH.take();
        for kv_head in 0..heads.n_kv_heads {
            scratch.attend(caches, rows, (layer, kv_head), queries, heads, out);
        }
        SCRATCH.set(scratch);
    });
}

impl Scratch {
    fn attend(
        &mut self,
        caches: Caches<'_>,
        rows: &[Row],
        (layer, kv_head): (usize, usize),
        queries: &[f32],
        heads: Heads,
        out: &mut [f32],
    ) {
        let (dim, group) = (heads.head_dim, heads.n_heads / heads.n_kv_heads);
        let longest = rows.iter().map(|row| row.n_visible).max().unwrap_or(0).next_multiple_of(BLOCK_TOKENS);
        let value_width = caches.caches.first().map_or(dim, |cache| cache.shape().value_width());
        let n = rows.len() * group;
        let columns = kv_head * group * dim..(kv_head + 1) * group * dim;
        let scale = 1.0 / (dim as f32).sqrt();
        self.queries.clear();
        for row in queries.chunks_exact(heads.n_heads * dim) {
            self.queries.extend(row[columns.clone()].iter().map(|query| query * scale));
        }
        self.scores.resize(n * longest, 0.0);
        self.sums.clear();
        self.sums.resize(n * value_width, 0.0);
        for_runs(caches, rows, |first, of_rows, block| {
            let (start, end) = (of_rows.start * group, of_rows.end * group);
            let scores = &mut self.scores[start * longest + first..(end - 1) * longest + first + BLOCK_TOKENS];
            score(&self.queries[start * dim..end * dim], dim, block.keys(layer, kv_head), scores, longest);
        });
        for (index, sums) in self.scores.chunks_exact_mut(longest).enumerate() {
            let (row, n_visible) = (&rows[index / group], rows[index / group].n_visible);
            let (first, start) = (caches.first_visible(row), caches.first_of_blocks(row));
            sums[n_visible..n_visible.next_multiple_of(BLOCK_TOKENS)].fill(f32::NEG_INFINITY);
            sums[start..first].fill(f32::NEG_INFINITY);
            let seen = &mut sums[start..n_visible.next_multiple_of(BLOCK_TOKENS)];
            self.queries[index * dim] = exponentials(seen); // reuses the memory of the queries for the sums
        }
        for_runs(caches, rows, |first, of_rows, block| {
            let (start, end) = (of_rows.start * group, of_rows.end * group);
            let weights = &self.scores[start * longest + first..(end - 1) * longest + first + BLOCK_TOKENS];
            let sums = &mut self.sums[start * value_width..end * value_width];
            add_values(weights, longest, block.values(layer, kv_head), value_width, sums);
        });
        for (row, out) in out.chunks_exact_mut(heads.n_heads * dim).enumerate() {
            for (g, out) in out[columns.clone()].chunks_exact_mut(dim).enumerate() {
                let index = row * group + g;
                let inverse = 1.0 / self.queries[index * dim];
                let sums = &self.sums[index * value_width..][..dim];
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum * inverse);
            }
        }
    }
}

/// Calls `visit(first token's position, rows, block)` for every block and every run of rows that attend to it.
fn for_runs(caches: Caches<'_>, rows: &[Row], mut visit: impl FnMut(usize, Range<usize>, &Block)) {
    let n_blocks = rows.iter().map(|row| row.n_visible.div_ceil(BLOCK_TOKENS)).max().unwrap_or(0);
    let first = rows.iter().map(|row| caches.first_visible(row)).min().unwrap_or(0) / BLOCK_TOKENS;
    for index in first..n_blocks {
        let mut start = 0;
        while start < rows.len() {
            let Some(block) = caches.block_of(&rows[start], index) else {
                start += 1;
                continue;
            };
            let same = |row: &&Row| caches.block_of(row, index).is_some_and(|other| Arc::ptr_eq(other, block));
            let end = start + rows[start..].iter().take_while(same).count();
            visit(index * BLOCK_TOKENS, start..end, block);
            start = end;
        }
    }
}

vectorised! {
    /// Computes scores of `queries` `(n, dim)` and the keys of one block. Rows of scores are `stride` apart.
    fn score<A>(queries: &[f32], dim: usize, keys: &[f32], scores: &mut [f32], stride: usize) {
        let (keys, _) = keys.as_chunks::<LANES>();
        let (n, mut row) = (queries.len() / dim, 0);
        while row < n {
            let (queries, scores) = (&queries[row * dim..], &mut scores[row * stride..]);
            row += match n - row {
                8.. => score_tile::<A, 8>(queries, dim, keys, scores, stride),
                4.. => score_tile::<A, 4>(queries, dim, keys, scores, stride),
                2.. => score_tile::<A, 2>(queries, dim, keys, scores, stride),
                _ => score_tile::<A, 1>(queries, dim, keys, scores, stride),
            };
        }
    }
}

/// Scores of `ROWS` queries. A score is the sum over even elements of a head plus the sum over odd elements, for any tile size: two
/// independent chains of additions keep the CPU busy even with few rows. Returns `ROWS`.
#[inline(always)]
fn score_tile<A: Arithmetic, const ROWS: usize>(
    queries: &[f32],
    dim: usize,
    keys: &[[f32; LANES]],
    scores: &mut [f32],
    stride: usize,
) -> usize {
    let queries: [&[[f32; 2]]; ROWS] = std::array::from_fn(|row| queries[row * dim..(row + 1) * dim].as_chunks().0);
    let (keys, _) = keys[..dim].as_chunks::<2>(); // the head size is even
    let (mut even, mut odd) = ([[0f32; LANES]; ROWS], [[0f32; LANES]; ROWS]);
    for (d, [first, second]) in keys.iter().enumerate() {
        for row in 0..ROWS {
            let query = queries[row][d];
            for lane in 0..LANES {
                even[row][lane] = A::multiply_add(query[0], first[lane], even[row][lane]);
                odd[row][lane] = A::multiply_add(query[1], second[lane], odd[row][lane]);
            }
        }
    }
    for row in 0..ROWS {
        let scores = &mut scores[row * stride..][..LANES];
        for lane in 0..LANES {
            scores[lane] = even[row][lane] + odd[row][lane];
        }
    }
    ROWS
}

vectorised! {
    /// Replaces scores (their number is a multiple of 16) by `exp(score - max)`; returns the sum.
    fn exponentials<A>(scores: &mut [f32]) -> f32 {
        let (chunks, _) = scores.as_chunks_mut::<LANES>();
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for chunk in chunks.iter() {
            for lane in 0..LANES {
                lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
            }
        }
        let max = lanes.iter().fold(f32::NEG_INFINITY, |max, &lane| if lane > max { lane } else { max });
        let mut sums = [0f32; LANES];
        for chunk in chunks.iter_mut() {
            for lane in 0..LANES {
                chunk[lane] = exp_or_zero::<A>(chunk[lane] - max);
                sums[lane] += chunk[lane];
            }
        }
        sums.iter().sum()
    }
}

vectorised! {
    /// Adds the weighted values of one block to `sums` `(n, width)`. Rows of weights are `stride` apart.
    fn add_values<A>(weights: &[f32], stride: usize, values: &[f32], width: usize, sums: &mut [f32]) {
        let (n, mut row) = (sums.len() / width, 0);
        while row < n {
            let (weights, sums) = (&weights[row * stride..], &mut sums[row * width..]);
            let (rows, mut column) = ((n - row).min(4), 0);
            while column < width {
                let at = TileOffset { stride, width, column };
                column += match (rows, width - column) {
                    (4, 64..) => value_tile::<A, 4, 4>(weights, values, sums, at),
                    (2..4, 64..) => value_tile::<A, 2, 4>(weights, values, sums, at),
                    (1, 64..) => value_tile::<A, 1, 4>(weights, values, sums, at),
                    (4, _) => value_tile::<A, 4, 1>(weights, values, sums, at),
                    (2..4, _) => value_tile::<A, 2, 1>(weights, values, sums, at),
                    _ => value_tile::<A, 1, 1>(weights, values, sums, at),
                };
            }
            row += if rows == 3 { 2 } else { rows };
        }
    }
}

#[derive(Clone, Copy)]
struct TileOffset {
    stride: usize,
    /// Stride of the rows of values and of sums.
    width: usize,
    column: usize,
}

/// Adds to `ROWS` rows of `COLUMNS` vectors each, token by token. Returns the number of columns.
#[inline(always)]
fn value_tile<A: Arithmetic, const ROWS: usize, const COLUMNS: usize>(
    weights: &[f32],
    values: &[f32],
    sums: &mut [f32],
    at: TileOffset,
) -> usize {
    let weights: [&[f32]; ROWS] = std::array::from_fn(|row| &weights[row * at.stride..][..BLOCK_TOKENS]);
    let mut totals = [[[0f32; LANES]; COLUMNS]; ROWS];
    for row in 0..ROWS {
        let (sums, _) = sums[row * at.width + at.column..][..COLUMNS * LANES].as_chunks::<LANES>();
        totals[row].copy_from_slice(sums);
    }
    for token in 0..BLOCK_TOKENS {
        let (values, _) = values[token * at.width + at.column..][..COLUMNS * LANES].as_chunks::<LANES>();
        for row in 0..ROWS {
            let weight = weights[row][token];
            for column in 0..COLUMNS {
                for lane in 0..LANES {
                    totals[row][column][lane] =
                        A::multiply_add(weight, values[column][lane], totals[row][column][lane]);
                }
            }
        }
    }
    for row in 0..ROWS {
        let (sums, _) = sums[row * at.width + at.column..][..COLUMNS * LANES].as_chunks_mut::<LANES>();
        sums.copy_from_slice(&totals[row]);
    }
    COLUMNS * LANES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::{BlockPool, BlockShape};

    const HEADS: Heads = Heads { n_heads: 6, n_kv_heads: 2, head_dim: 20 };

    fn number(seed: usize) -> f32 {
        ((seed.wrapping_mul(2_654_435_761) >> 7) % 1000) as f32 / 500.0 - 1.0
    }

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| number(seed * 100_003 + i)).collect()
    }

    /// Extends a cache to `to` tokens, with keys and values that depend on seed and position.
    fn filled(cache: &mut SequenceKvCache, to: usize, seed: usize) {
        let from = cache.len();
        cache.extend(to - from).unwrap();
        for position in from..to {
            let (keys, values) = (numbers(40, seed * 977 + position), numbers(40, seed * 977 + position + 500));
            (0..2).for_each(|layer| cache.write(layer, position, &keys, &values).unwrap());
        }
    }

    fn shape() -> BlockShape {
        BlockShape::of(2, HEADS.n_kv_heads, HEADS.head_dim)
    }

    /// Softmax attention of one query head over some tokens in f64, computed from the definition.
    fn expected(cache: &SequenceKvCache, query: &[f32], kv_head: usize, tokens: Range<usize>) -> Vec<f64> {
        let key = |t: usize, d: usize| cache.blocks()[t / 16].keys(1, kv_head)[d * 16 + t % 16];
        let value = |t: usize, d: usize| cache.blocks()[t / 16].values(1, kv_head)[t % 16 * 32 + d];
        let score = |t: usize| (0..20).map(|d| f64::from(query[d]) * f64::from(key(t, d))).sum::<f64>() / 20f64.sqrt();
        let weights: Vec<f64> = tokens.clone().map(|t| score(t).exp()).collect();
        let total: f64 = weights.iter().sum();
        let sum =
            |d: usize| tokens.clone().zip(&weights).map(|(t, weight)| weight * f64::from(value(t, d))).sum::<f64>();
        (0..20).map(|d| sum(d) / total).collect()
    }

    #[test]
    fn attention_over_shared_and_own_blocks_matches_the_definition_with_and_without_a_window() {
        let pool = BlockPool::new(shape());
        let mut prefix = SequenceKvCache::new(&pool);
        filled(&mut prefix, 37, 1);
        let caches: Vec<SequenceKvCache> = [37usize, 38, 50, 90]
            .iter()
            .enumerate()
            .map(|(seed, &len)| {
                let mut cache = prefix.clone();
                filled(&mut cache, len, seed + 2);
                cache
            })
            .collect();
        let rows: Vec<Row> = [(0, 37), (1, 38), (2, 49), (2, 50), (3, 1), (3, 64), (3, 90)]
            .map(|(cache, n_visible)| Row { cache, n_visible })
            .to_vec();
        let queries = numbers(rows.len() * 120, 9);
        // Windows within a block, over two blocks, of complete blocks, and longer than most rows need.
        for window in [None, Some(1), Some(7), Some(16), Some(21), Some(64)] {
            let caches: Vec<&SequenceKvCache> = caches.iter().collect();
            let window = window.unwrap_or(usize::MAX);
            let mut out = vec![0f32; queries.len()];
            attend(Caches { caches: &caches, window }, &rows, 1, &queries, HEADS, &mut out);
            for (index, row) in rows.iter().enumerate() {
                let tokens = row.n_visible.saturating_sub(window)..row.n_visible;
                for head in 0..6 {
                    let columns = index * 120 + head * 20..index * 120 + (head + 1) * 20;
                    let expected = expected(caches[row.cache], &queries[columns.clone()], head / 3, tokens.clone());
                    for (found, expected) in out[columns].iter().zip(expected) {
                        assert!(
                            (f64::from(*found) - expected).abs() < 2e-6,
                            "row {index}, {window}: {found}, {expected}"
                        );
                    }
                }
                // A row alone gives the same bits as in a batch.
                let mut alone = vec![0f32; 120];
                let query = &queries[index * 120..(index + 1) * 120];
                let own = Caches { caches: &[caches[row.cache]], window };
                attend(own, &[Row { cache: 0, ..*row }], 1, query, HEADS, &mut alone);
                assert_eq!(alone, out[index * 120..(index + 1) * 120]);
            }
        }
    }
}
