//! Attention of a decoding step: new queries against a cache, without gradient.

use super::{Heads, Segment};
use crate::kernels::{Mat, Threads, exp, matmul};
use candle_core::Result;
use rayon::prelude::*;

impl Heads {
    /// One query head of `n_rows` rows that begin at `data[0]`.
    fn q_head<'a>(self, data: &'a [f32], n_rows: usize, head: usize) -> Mat<'a> {
        Mat::strided(&data[head * self.head_dim..], n_rows, self.head_dim, self.q_width())
    }

    /// One key or value head of `n_rows` rows that begin at `data[0]`.
    fn kv_head<'a>(self, data: &'a [f32], n_rows: usize, head: usize) -> Mat<'a> {
        Mat::strided(&data[head * self.head_dim..], n_rows, self.head_dim, self.kv_width())
    }
}

/// One sequence of a decoding step: its new queries against all of its keys and values, the new ones included.
pub struct CachedSegment<'a> {
    /// Rows of the queries.
    pub queries: Segment,
    /// `(rows, kv_heads * D)`: the cache, new rows last.
    pub keys: &'a [f32],
    /// As `keys`.
    pub values: &'a [f32],
}

/// The same attention for decoding, without gradient. `q`: `(N, heads * D)`; returns `N * heads * D` values.
///
/// # Errors
/// Shapes that do not fit.
pub fn attention_cached(
    q: &[f32],
    segments: &[CachedSegment<'_>],
    q_width: usize,
    kv_width: usize,
    head_dim: usize,
) -> Result<Vec<f32>> {
    let heads = Heads::new(q_width, kv_width, head_dim)?;
    let parts: Vec<Vec<f32>> = segments
        .par_iter()
        .map(|segment| {
            let rows = &q[segment.queries.start * q_width..];
            let mut out = vec![0f32; segment.queries.len * q_width];
            for kv_head in 0..heads.n_kv_heads {
                let part = attend(heads, kv_head, rows, segment.queries.len, segment.keys, segment.values)?;
                place(&mut out, &part, heads, kv_head);
            }
            Ok(out)
        })
        .collect::<Result<_>>()?;
    Ok(parts.concat())
}

/// Probabilities of one query head: `(n_queries, n_keys)`, the last query seeing all keys.
fn probabilities(heads: Heads, q: Mat<'_>, k: Mat<'_>, n_queries: usize, n_keys: usize) -> Result<Vec<f32>> {
    let mut scores = vec![0f32; n_queries * n_keys];
    matmul(&mut scores, 0.0, heads.scale(), q, k.t(), Threads::One)?;
    for (i, row) in scores.chunks_exact_mut(n_keys).enumerate() {
        let (seen, unseen) = row.split_at_mut(n_keys - n_queries + i + 1);
        let max = seen.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0f32;
        for score in seen.iter_mut() {
            *score = exp(*score - max);
            sum += *score;
        }
        let inverse = 1.0 / sum;
        seen.iter_mut().for_each(|p| *p *= inverse);
        unseen.fill(0.0);
    }
    Ok(scores)
}

/// Output of the query heads that share one key-value head: `(group, n_queries, D)`.
fn attend(heads: Heads, kv_head: usize, q: &[f32], n_queries: usize, keys: &[f32], values: &[f32]) -> Result<Vec<f32>> {
    let n_keys = keys.len() / heads.kv_width();
    let (k, v) = (heads.kv_head(keys, n_keys, kv_head), heads.kv_head(values, n_keys, kv_head));
    let mut out = vec![0f32; heads.group * n_queries * heads.head_dim];
    for (g, out) in out.chunks_exact_mut(n_queries * heads.head_dim).enumerate() {
        let q = heads.q_head(q, n_queries, kv_head * heads.group + g);
        let p = probabilities(heads, q, k, n_queries, n_keys)?;
        matmul(out, 0.0, 1.0, Mat::new(&p, n_queries, n_keys), v, Threads::One)?;
    }
    Ok(out)
}

/// Copies `(group, rows, D)` into the columns of its heads in `(rows, heads * D)`.
fn place(out: &mut [f32], part: &[f32], heads: Heads, kv_head: usize) {
    let (width, dim) = (heads.q_width(), heads.head_dim);
    let n_rows = out.len() / width;
    for (g, head) in part.chunks_exact(n_rows * dim).enumerate() {
        let column = (kv_head * heads.group + g) * dim;
        for (out, row) in out.chunks_exact_mut(width).zip(head.chunks_exact(dim)) {
            out[column..column + dim].copy_from_slice(row);
        }
    }
}
