//! Causal attention over packed sequences: rows of many sequences stand one after another, without padding, and each row
//! sees only the rows of its own sequence up to itself.

use super::{Mat, Threads, exp, floats, matmul, with_floats};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;
use std::sync::Arc;

/// Rows `start .. start + len` of a packed batch: one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// First row.
    pub start: usize,
    /// Number of rows.
    pub len: usize,
}

/// How the columns of queries, keys and values divide into heads.
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

    /// One query head of `n_rows` rows that begin at `data[0]`.
    fn q_head<'a>(self, data: &'a [f32], n_rows: usize, head: usize) -> Mat<'a> {
        Mat::strided(&data[head * self.head_dim..], n_rows, self.head_dim, self.q_width())
    }

    /// One key or value head of `n_rows` rows that begin at `data[0]`.
    fn kv_head<'a>(self, data: &'a [f32], n_rows: usize, head: usize) -> Mat<'a> {
        Mat::strided(&data[head * self.head_dim..], n_rows, self.head_dim, self.kv_width())
    }
}

struct Attention {
    segments: Arc<Vec<Segment>>,
    head_dim: usize,
}

/// Softmax attention, each row over its own sequence up to itself.
///
/// `q`: `(N, heads * D)`; `k`, `v`: `(N, kv_heads * D)`, with `heads` a multiple of `kv_heads`; `segments` cover the N rows in
/// order. Returns `(N, heads * D)`. Gradients reach all three; probabilities are computed again in the backward pass, so that
/// memory grows with N and not with the square of a sequence.
///
/// # Errors
/// Shapes that do not fit, or tensors other than f32 on the CPU.
///
/// Source: Vaswani et al. 2017; grouped heads of Ainslie et al. 2023.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, segments: &Arc<Vec<Segment>>, head_dim: usize) -> Result<Tensor> {
    let n_rows: usize = segments.iter().map(|segment| segment.len).sum();
    if n_rows != q.dim(0)? || n_rows != k.dim(0)? || n_rows != v.dim(0)? {
        bail!("attention: segments cover {n_rows} rows of {}", q.dim(0)?);
    }
    let op = Attention { segments: segments.clone(), head_dim };
    q.contiguous()?.apply_op3(&k.contiguous()?, &v.contiguous()?, op)
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

/// Copies `(rows, D)` into the columns of one key-value head in `(rows, kv_heads * D)`.
fn place_kv(out: &mut [f32], part: &[f32], heads: Heads, kv_head: usize) {
    let dim = heads.head_dim;
    for (out, row) in out.chunks_exact_mut(heads.kv_width()).zip(part.chunks_exact(dim)) {
        out[kv_head * dim..(kv_head + 1) * dim].copy_from_slice(row);
    }
}

/// Gradients of one key-value head and the query heads that share it.
struct HeadGradients {
    dq: Vec<f32>, // (group, T, D)
    dk: Vec<f32>, // (T, D)
    dv: Vec<f32>, // (T, D)
}

/// With `P` the probabilities and `g` the gradient of the output: `dV = P^T g`, `dP = g V^T`,
/// `dS = P * (dP - rowsum(P * dP))`, `dQ = scale dS K`, `dK = scale dS^T Q`.
fn head_gradients(
    heads: Heads,
    kv_head: usize,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    grad: &[f32],
) -> Result<HeadGradients> {
    let n = k.len() / heads.kv_width();
    let dim = heads.head_dim;
    let (k, v) = (heads.kv_head(k, n, kv_head), heads.kv_head(v, n, kv_head));
    let (mut dq, mut dk, mut dv) = (vec![0f32; heads.group * n * dim], vec![0f32; n * dim], vec![0f32; n * dim]);
    let mut ds = vec![0f32; n * n];
    for (g, dq) in dq.chunks_exact_mut(n * dim).enumerate() {
        let head = kv_head * heads.group + g;
        let (q, grad) = (heads.q_head(q, n, head), heads.q_head(grad, n, head));
        let p = probabilities(heads, q, k, n, n)?;
        matmul(&mut dv, 1.0, 1.0, Mat::new(&p, n, n).t(), grad, Threads::One)?;
        matmul(&mut ds, 0.0, 1.0, grad, v.t(), Threads::One)?;
        for (ds, p) in ds.chunks_exact_mut(n).zip(p.chunks_exact(n)) {
            let dot: f32 = ds.iter().zip(p).map(|(ds, p)| ds * p).sum();
            ds.iter_mut().zip(p).for_each(|(ds, p)| *ds = p * (*ds - dot));
        }
        let ds = Mat::new(&ds, n, n);
        matmul(dq, 0.0, heads.scale(), ds, k, Threads::One)?;
        matmul(&mut dk, 1.0, heads.scale(), ds.t(), q, Threads::One)?;
    }
    Ok(HeadGradients { dq, dk, dv })
}

impl Attention {
    /// Every pair of sequence and key-value head: the units of parallel work.
    fn tasks(&self, heads: Heads) -> Vec<(Segment, usize)> {
        self.segments.iter().flat_map(|&segment| (0..heads.n_kv_heads).map(move |head| (segment, head))).collect()
    }

    fn forward(&self, heads: Heads, q: &[f32], k: &[f32], v: &[f32]) -> Result<Vec<f32>> {
        let (qw, kvw) = (heads.q_width(), heads.kv_width());
        let tasks = self.tasks(heads);
        let parts: Vec<Vec<f32>> = tasks
            .par_iter()
            .map(|&(Segment { start, len }, head)| {
                let keys = start * kvw..(start + len) * kvw;
                attend(heads, head, &q[start * qw..(start + len) * qw], len, &k[keys.clone()], &v[keys])
            })
            .collect::<Result<_>>()?;
        let mut out = vec![0f32; q.len()];
        for ((Segment { start, len }, head), part) in tasks.into_iter().zip(parts) {
            place(&mut out[start * qw..(start + len) * qw], &part, heads, head);
        }
        Ok(out)
    }

    fn backward(&self, heads: Heads, q: &[f32], k: &[f32], v: &[f32], grad: &[f32]) -> Result<[Vec<f32>; 3]> {
        let (qw, kvw) = (heads.q_width(), heads.kv_width());
        let tasks = self.tasks(heads);
        let parts: Vec<HeadGradients> = tasks
            .par_iter()
            .map(|&(Segment { start, len }, head)| {
                let (rows, keys) = (start * qw..(start + len) * qw, start * kvw..(start + len) * kvw);
                head_gradients(heads, head, &q[rows.clone()], &k[keys.clone()], &v[keys], &grad[rows])
            })
            .collect::<Result<_>>()?;
        let (mut dq, mut dk, mut dv) = (vec![0f32; q.len()], vec![0f32; k.len()], vec![0f32; v.len()]);
        for ((Segment { start, len }, head), part) in tasks.into_iter().zip(parts) {
            let keys = start * kvw..(start + len) * kvw;
            place(&mut dq[start * qw..(start + len) * qw], &part.dq, heads, head);
            place_kv(&mut dk[keys.clone()], &part.dk, heads, head);
            place_kv(&mut dv[keys], &part.dv, heads, head);
        }
        Ok([dq, dk, dv])
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "packed-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let heads = Heads::new(q_layout.shape().dims2()?.1, k_layout.shape().dims2()?.1, self.head_dim)?;
        let out = self.forward(heads, floats(q, q_layout)?, floats(k, k_layout)?, floats(v, v_layout)?)?;
        Ok((CpuStorage::F32(out), q_layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let heads = Heads::new(q.dim(1)?, k.dim(1)?, self.head_dim)?;
        let [dq, dk, dv] = with_floats(q, |q| {
            with_floats(k, |k| with_floats(v, |v| with_floats(grad, |grad| self.backward(heads, q, k, v, grad))))
        })?;
        Ok((
            Some(Tensor::from_vec(dq, q.shape(), q.device())?),
            Some(Tensor::from_vec(dk, k.shape(), k.device())?),
            Some(Tensor::from_vec(dv, v.shape(), v.device())?),
        ))
    }
}
