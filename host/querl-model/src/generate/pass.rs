//! The forward pass of decoding: new tokens of several sequences through all layers, on slices and without a graph.

use super::attention::{Heads, Row, attend};
use super::rows::{normed, rotate, swiglu};
use super::weights::{DecodeLayer, DecodeWeights, Into};
use crate::ModelError;
use crate::cache::SequenceCache;

/// New tokens of one sequence, and what it holds already.
pub(super) struct Span<'s> {
    pub(super) cache: &'s mut SequenceCache,
    /// At least one.
    pub(super) tokens: &'s [u32],
}

/// Memory that all layers of a pass use in turn.
#[derive(Default)]
struct Buffers {
    normed: Vec<f32>,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
}

/// Feeds the tokens and returns the hidden state of each span's last one after the final norm, `(spans, H)`.
///
/// # Errors
/// A token outside the vocabulary.
pub(super) fn forward(weights: &DecodeWeights, spans: &mut [Span<'_>]) -> Result<Vec<f32>, ModelError> {
    let tokens: Vec<u32> = spans.iter().flat_map(|span| span.tokens).copied().collect();
    let mut rows = Vec::with_capacity(tokens.len());
    for (cache, span) in spans.iter_mut().enumerate() {
        let first = span.cache.len();
        rows.extend((0..span.tokens.len()).map(|i| Row { cache, n_visible: first + i + 1 }));
        span.cache.extend(span.tokens.len())?;
    }
    let mut x = weights.embed(&tokens)?; // (N, H)
    let mut buffers = Buffers::default();
    for (index, layer) in weights.layers.iter().enumerate() {
        queries_keys_values(weights, layer, &x, &rows, &mut buffers)?;
        write(spans, &rows, index, &buffers)?;
        if index + 1 == weights.layers.len() {
            // Behind the last layer's keys and values, only what is asked for is computed.
            keep_last(&mut rows, &mut x, &mut buffers.queries);
        }
        let caches: Vec<&SequenceCache> = spans.iter().map(|span| &*span.cache).collect();
        buffers.attended.resize(buffers.queries.len(), 0.0);
        attend(&caches, &rows, index, &buffers.queries, heads(weights), &mut buffers.attended);
        after_attention(weights, layer, &mut x, &mut buffers)?;
    }
    let mut hidden = Vec::new();
    normed(&x, &weights.final_norm, weights.config.rms_norm_eps as f32, &mut hidden);
    Ok(hidden)
}

fn heads(weights: &DecodeWeights) -> Heads {
    let config = &weights.config;
    Heads { n_heads: config.n_heads, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim }
}

fn queries_keys_values(
    weights: &DecodeWeights,
    layer: &DecodeLayer,
    x: &[f32],
    rows: &[Row],
    buffers: &mut Buffers,
) -> Result<(), ModelError> {
    let eps = weights.config.rms_norm_eps as f32;
    let Buffers { normed: input, queries, keys, values, attended, .. } = buffers;
    normed(x, &layer.input_norm, eps, input);
    layer.qkv.forward(input, &mut [&mut *queries, &mut *keys, values], Into::Fresh)?;
    if let Some((q_norm, k_norm)) = &layer.qk_norm {
        normed(queries, q_norm, eps, attended);
        std::mem::swap(queries, attended);
        normed(keys, k_norm, eps, attended);
        std::mem::swap(keys, attended);
    }
    for heads in [queries, keys] {
        let width = heads.len() / rows.len();
        for (heads, row) in heads.chunks_exact_mut(width).zip(rows) {
            let (cos, sin) = weights.rope.angles(row.n_visible - 1);
            rotate(heads, cos, sin);
        }
    }
    Ok(())
}

fn write(spans: &mut [Span<'_>], rows: &[Row], layer: usize, buffers: &Buffers) -> Result<(), ModelError> {
    let width = buffers.keys.len() / rows.len();
    let new = buffers.keys.chunks_exact(width).zip(buffers.values.chunks_exact(width));
    for ((keys, values), row) in new.zip(rows) {
        spans[row.cache].cache.write(layer, row.n_visible - 1, keys, values)?;
    }
    Ok(())
}

/// Keeps each sequence's last row.
fn keep_last(rows: &mut Vec<Row>, x: &mut Vec<f32>, queries: &mut Vec<f32>) {
    let last: Vec<usize> =
        (0..rows.len()).filter(|&row| rows.get(row + 1).is_none_or(|next| next.cache != rows[row].cache)).collect();
    if last.len() == rows.len() {
        return;
    }
    for values in [x, queries] {
        let width = values.len() / rows.len();
        *values = last.iter().flat_map(|row| &values[row * width..(row + 1) * width]).copied().collect();
    }
    *rows = last.iter().map(|&row| rows[row]).collect();
}

fn after_attention(
    weights: &DecodeWeights,
    layer: &DecodeLayer,
    x: &mut Vec<f32>,
    buffers: &mut Buffers,
) -> Result<(), ModelError> {
    weights.add(&layer.o, &buffers.attended, x)?;
    normed(x, &layer.post_attention_norm, weights.config.rms_norm_eps as f32, &mut buffers.normed);
    layer.gate_up.forward(&buffers.normed, &mut [&mut buffers.gate, &mut buffers.up], Into::Fresh)?;
    swiglu(&mut buffers.gate, &buffers.up);
    weights.add(&layer.down, &buffers.gate, x)
}
