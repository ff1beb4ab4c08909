//! Causal attention over packed sequences with prefix sharing: sequences are concatenated without padding, shared prefixes
//! are stored once (prefix tree), and each row attends to the earlier rows of its own sequence and itself.
//!
//! The queries are divided into chunks of a few dozen to a few hundred, which are independent of each other. In a chunk, the scores
//! of a block of queries are a matrix whose column is a key's depth in its sequence, so that queries of different branches share the
//! columns of their common prefix: one product computes all of their scores with it. With a sliding window a row attends to the
//! last keys alone: columns before them are left out of the products where no query of the block sees them, and zeroed elsewhere.

mod prefix_tree;
mod query_chunk;
#[cfg(test)]
mod tests;

pub use prefix_tree::{Node, RowTree};

use super::slice_op;
use candle_core::{Result, Tensor, bail};
use prefix_tree::{QueryChunk, query_chunks};
use query_chunk::{Inputs, KeyGradients, Outputs};
use rayon::prelude::*;
use std::sync::{Arc, OnceLock};

/// The division of the columns of queries, keys and values into heads.
#[derive(Clone, Copy)]
struct Heads {
    n_kv_heads: usize,
    group: usize, // query heads that share one key-value head
    head_dim: usize,
}

impl Heads {
    fn new(q_width: usize, kv_width: usize, head_dim: usize) -> Result<Self> {
        if head_dim == 0 || kv_width == 0 || !kv_width.is_multiple_of(head_dim) || !q_width.is_multiple_of(kv_width) {
            bail!("attention: widths {q_width} and {kv_width} do not divide into heads of {head_dim}");
        }
        Ok(Self { n_kv_heads: kv_width / head_dim, group: q_width / kv_width, head_dim })
    }

    fn q_width(self) -> usize {
        self.n_kv_heads * self.group * self.head_dim
    }

    fn kv_width(self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    fn scale(self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// The query rows of a prefix tree; all rows are keys.
#[derive(Clone)]
pub struct Queries {
    chunks: Arc<Vec<QueryChunk>>,
    n_queries: usize,
    n_rows: usize,
    /// Maximum number of keys that a query attends to, itself included.
    window: usize,
}

impl Queries {
    /// All rows of the tree as queries.
    pub fn all(tree: &RowTree) -> Self {
        let rows: Vec<u32> = (0..tree.n_rows() as u32).collect();
        let n_queries = rows.len();
        Self { chunks: Arc::new(query_chunks(tree, &rows)), n_queries, n_rows: n_queries, window: usize::MAX }
    }

    /// The rows with these indices, in ascending order, as queries.
    ///
    /// # Errors
    /// The rows are not ascending, or a row is not in the tree.
    pub fn some(tree: &RowTree, rows: &[u32]) -> Result<Self> {
        if rows.windows(2).any(|pair| pair[0] >= pair[1]) {
            bail!("attention: query row indices must be ascending");
        }
        if let Some(row) = rows.last().filter(|&&row| row as usize >= tree.n_rows()) {
            bail!("attention: there is no row {row} among {}", tree.n_rows());
        }
        let (n_queries, n_rows) = (rows.len(), tree.n_rows());
        Ok(Self { chunks: Arc::new(query_chunks(tree, rows)), n_queries, n_rows, window: usize::MAX })
    }

    /// The same queries with a sliding window: each sees at most the last `window` keys of its sequence, itself included; `None` means all.
    ///
    /// Source: `sliding_window_overlay` of transformers' `masking_utils.py`.
    #[must_use]
    pub fn with_window(&self, window: Option<usize>) -> Self {
        Self { window: window.unwrap_or(usize::MAX), ..self.clone() }
    }

    /// Heads of queries `(queries, heads * D)` and keys `(N, kv_heads * D)`.
    fn heads(&self, head_dim: usize, q: &[f32], k: &[f32]) -> Result<Heads> {
        Heads::new(q.len() / self.n_queries.max(1), k.len() / self.n_rows.max(1), head_dim)
    }

    /// The rows of each chunk in a tensor `(queries, heads * D)`.
    fn parts<'a>(&self, mut all: &'a mut [f32], heads: Heads) -> Vec<&'a mut [f32]> {
        let of_chunk = |chunk: &QueryChunk| {
            let (part, rest) = std::mem::take(&mut all).split_at_mut(chunk.queries.len() * heads.q_width());
            all = rest;
            part
        };
        self.chunks.iter().map(of_chunk).collect()
    }
}

/// Softmax attention, each query over its own sequence up to itself, or over the window of [`Queries::with_window`].
///
/// `q`: `(queries, heads * D)`; `k`, `v`: `(N, kv_heads * D)`, with `heads` a multiple of `kv_heads`. Returns
/// `(queries, heads * D)`. Gradients reach all three; the keys and values of what sequences share collect the gradients of all
/// of them. Probabilities are computed again in the backward pass: memory grows with N and not with the square of a sequence.
///
/// # Errors
/// Shapes that do not fit, or tensors other than f32 on the CPU.
///
/// Source: Vaswani et al. 2017; grouped heads of Ainslie et al. 2023; the backward pass of Dao et al. 2022, "FlashAttention".
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, queries: &Queries, head_dim: usize) -> Result<Tensor> {
    let Queries { n_queries, n_rows, .. } = *queries;
    if n_queries != q.dim(0)? || n_rows != k.dim(0)? || n_rows != v.dim(0)? {
        bail!("attention: {n_queries} queries and {n_rows} rows; found {}, {} and {}", q.dim(0)?, k.dim(0)?, v.dim(0)?);
    }
    let (forward, saved) = (queries.clone(), Arc::new(OnceLock::new()));
    let (backward, logsumexp) = (queries.clone(), saved.clone());
    slice_op(
        "tree-attention",
        [&q.contiguous()?, &k.contiguous()?, &v.contiguous()?],
        q.shape(),
        move |qkv| {
            let (out, logsumexp) = attention_forward(&forward, head_dim, qkv)?;
            // A second forward pass of the same operation would compute the same values.
            saved.get_or_init(|| logsumexp);
            Ok(out)
        },
        move |qkv, [out, grad]| {
            let Some(logsumexp) = logsumexp.get() else { bail!("attention: a backward pass before the forward pass") };
            Ok(attention_backward(&backward, head_dim, qkv, out, logsumexp, grad)?.map(Some))
        },
    )
}

/// Log-sum-exp of the attention scores for each chunk of queries, `(kv_heads, queries, group)`: saved for the backward pass.
pub type LogSumExp = Vec<Vec<f32>>;

/// Like [`attention`], on slices; also returns the log-sum-exp of the scores.
pub fn attention_forward(queries: &Queries, head_dim: usize, [q, k, v]: [&[f32]; 3]) -> Result<(Vec<f32>, LogSumExp)> {
    let (heads, x) = (queries.heads(head_dim, q, k)?, Inputs { q, k, v, window: queries.window });
    let mut out = vec![0f32; q.len()];
    let tasks: Vec<_> = queries.chunks.iter().zip(queries.parts(&mut out, heads)).collect();
    let logsumexp: Result<LogSumExp> = tasks
        .into_par_iter()
        .map(|(chunk, out)| {
            let mut logsumexp = vec![0f32; chunk.queries.len() * heads.group * heads.n_kv_heads];
            chunk.forward(heads, x, out, &mut logsumexp)?;
            Ok(logsumexp)
        })
        .collect();
    Ok((out, logsumexp?))
}

/// Gradients of queries, keys and values for the gradient `grad` of [`attention_forward`]'s result `out`.
pub fn attention_backward(
    queries: &Queries,
    head_dim: usize,
    [q, k, v]: [&[f32]; 3],
    out: &[f32],
    logsumexp: &LogSumExp,
    grad: &[f32],
) -> Result<[Vec<f32>; 3]> {
    let (heads, x) = (queries.heads(head_dim, q, k)?, Inputs { q, k, v, window: queries.window });
    let mut dq = vec![0f32; q.len()];
    let width = heads.q_width();
    let tasks: Vec<_> = queries.chunks.iter().zip(logsumexp).zip(queries.parts(&mut dq, heads)).collect();
    let found: Result<Vec<KeyGradients>> = tasks
        .into_par_iter()
        .map(|((chunk, logsumexp), dq)| {
            let own = chunk.queries.start * width..chunk.queries.end * width;
            chunk.backward(heads, x, Outputs { out: &out[own.clone()], grad: &grad[own], logsumexp }, dq)
        })
        .collect();
    // Summed in the order of chunks, so that the result does not depend on thread timing.
    let (mut dk, mut dv) = (vec![0f32; k.len()], vec![0f32; v.len()]);
    for (chunk, found) in queries.chunks.iter().zip(found?) {
        add_rows(&mut dk, &found.dk, chunk, heads.kv_width());
        add_rows(&mut dv, &found.dv, chunk, heads.kv_width());
    }
    Ok([dq, dk, dv])
}

/// Adds `(keys, width)`, indexed by the chunk's keys, to the rows of all keys.
fn add_rows(all: &mut [f32], mut part: &[f32], chunk: &QueryChunk, width: usize) {
    for rows in chunk.before.iter().chain([&chunk.rows]) {
        let (head, tail) = part.split_at(rows.len() * width);
        let all = &mut all[rows.start * width..rows.end * width];
        all.iter_mut().zip(head).for_each(|(sum, part)| *sum += part);
        part = tail;
    }
}
