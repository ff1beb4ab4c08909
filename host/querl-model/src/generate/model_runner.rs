//! One step of many sequences on the CPU, prefill or decode: their new tokens through the model, their logits to the samplers.

use super::cpu_backend::{CpuInference, PolicyWeights};
use super::draw::Taker;
use super::filters::Rules;
use super::paged_attention::{Heads, PagedAttention, Row};
use super::rows::rms_norm;
use crate::ModelError;
use crate::cache::SequenceCache;
use crate::transformer::{LayerRows, QueryRows, Rows};
use rayon::prelude::*;
use std::any::Any;
use std::sync::Arc;

/// The hidden state of a sequence's last token after the final norm, `(H)`, where its policy keeps it.
#[derive(Default)]
pub enum Hidden {
    #[default]
    Unknown,
    Host(Vec<f32>),
    /// In the memory of the policy's accelerator.
    Device(Box<dyn Any + Send + Sync>),
}

impl Hidden {
    fn host(&self) -> &[f32] {
        match self {
            Self::Host(values) => values,
            _ => &[],
        }
    }

    fn set_host(&mut self, values: &[f32]) {
        match self {
            Self::Host(known) => {
                known.clear();
                known.extend_from_slice(values);
            }
            _ => *self = Self::Host(values.to_vec()),
        }
    }
}

/// One sequence of a step.
pub struct Unit<'s> {
    pub cache: &'s mut SequenceCache,
    /// New tokens; none where the hidden state is known.
    pub tokens: &'s [u32],
    /// What comes in where there are no tokens, what comes out where there are.
    pub hidden: &'s mut Hidden,
    /// Whether the hidden state is needed later: an accelerator returns it only then.
    pub is_held: bool,
    pub takers: Vec<Taker<'s>>,
}

/// Most rows of one pass: bounds the memory of a step.
const MAX_ROWS: usize = 256;

/// Most rows of logits at once.
const MAX_LOGIT_ROWS: usize = 128;

/// Fewest rows for which a thread takes sequences of its own. With fewer, all threads work on one product, so that each reads
/// its part of the weights only.
const ROWS_PER_THREAD: usize = 16;

/// Most weights of a layer for which threads take sequences of their own: larger ones do not stay in a core's cache, and every
/// thread would read (and unpack) all of them.
const MAX_SHARED_NOTHING: usize = 4 << 20;

/// Advances all units. Of a small model, each thread takes its own sequences through all layers and shares nothing meanwhile; of
/// a large one, all threads work on each product; and so where ranks hold the model together, which sum up in one order.
pub(super) fn advance(weights: &PolicyWeights, units: &mut [Unit<'_>], rules: &Rules<'_>) -> Result<(), ModelError> {
    let rows = |unit: &Unit<'_>| unit.tokens.len().max(1);
    let n_rows: usize = units.iter().map(rows).sum();
    let is_split = weights.context.parallel.is_split();
    let n_groups = match weights.weights_per_layer() <= MAX_SHARED_NOTHING && !is_split {
        true => rayon::current_num_threads().min(n_rows / ROWS_PER_THREAD).max(1),
        false => 1,
    };
    let mut groups: Vec<&mut [Unit<'_>]> = Vec::with_capacity(n_groups);
    if n_groups == 1 {
        // In this thread: where ranks hold the model together, they wait for each other, which none of rayon's may.
        pass(weights, units)?;
        return choose(weights, units, rules);
    }
    let (mut rest, mut n_taken) = (units, 0);
    for group in 1..=n_groups {
        let n_wanted = n_rows * group / n_groups;
        let mut n_units = 0;
        while n_units < rest.len() && n_taken < n_wanted {
            n_taken += rows(&rest[n_units]);
            n_units += 1;
        }
        let (own, others) = rest.split_at_mut(n_units);
        groups.push(own);
        rest = others;
    }
    groups.into_par_iter().try_for_each(|group| {
        pass(weights, group)?;
        choose(weights, group, rules)
    })
}

/// Feeds the tokens of all units, at most [`MAX_ROWS`] at once.
fn pass(weights: &PolicyWeights, units: &mut [Unit<'_>]) -> Result<(), ModelError> {
    let width = weights.config.hidden_size;
    let mut first = 0; // unit
    let mut n_done = 0; // tokens of that unit
    while first < units.len() {
        let mut spans = Vec::new();
        let mut targets = Vec::new();
        let (mut n_rows, mut next, mut n_next) = (0, first, n_done);
        for unit in &mut units[first..] {
            let tokens = &unit.tokens[n_next..];
            let n = tokens.len().min(MAX_ROWS - n_rows);
            if n > 0 {
                spans.push(NewTokens { cache: &mut *unit.cache, tokens: &tokens[..n] });
                targets.push(&mut *unit.hidden);
                n_rows += n;
            }
            if n < tokens.len() {
                n_next += n;
                break;
            }
            (next, n_next) = (next + 1, 0);
        }
        if !spans.is_empty() {
            let hidden = forward(weights, &mut spans)?;
            for (target, hidden) in targets.into_iter().zip(hidden.chunks_exact(width)) {
                target.set_host(hidden);
            }
        }
        (first, n_done) = (next, n_next);
    }
    Ok(())
}

/// New tokens of one sequence, and its KV cache.
pub(super) struct NewTokens<'s> {
    pub(super) cache: &'s mut SequenceCache,
    tokens: &'s [u32],
}

/// Runs new tokens through all layers; returns the hidden state of each sequence's last one after the final norm,
/// `(sequences, H)`.
fn forward(weights: &PolicyWeights, sequences: &mut [NewTokens<'_>]) -> Result<Vec<f32>, ModelError> {
    let tokens: Vec<u32> = sequences.iter().flat_map(|sequence| sequence.tokens).copied().collect();
    let (mut rows, mut last_rows) = (Vec::with_capacity(tokens.len()), Vec::with_capacity(sequences.len()));
    for (cache, sequence) in sequences.iter_mut().enumerate() {
        let n_cached = sequence.cache.len();
        rows.extend((0..sequence.tokens.len()).map(|i| Row { cache, n_visible: n_cached + i + 1 }));
        last_rows.push(rows.len() as u32 - 1);
        sequence.cache.extend(sequence.tokens.len())?;
    }
    let all = LayerRows { context: weights.context.clone(), rows: positions(&rows), query_rows: None };
    let queries: Vec<Row> = last_rows.iter().map(|&row| rows[row as usize]).collect();
    // After the last layer's keys and values, only the last row of each sequence is needed.
    let query_rows = QueryRows { rows: positions(&queries), indices: Arc::new(last_rows) };
    let last = LayerRows { query_rows: (queries.len() < rows.len()).then_some(query_rows), ..all.clone() };

    let config = &weights.config;
    let heads = Heads { n_heads: config.n_heads, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim };
    let backend = CpuInference::default();
    let embedded = weights.embed(&tokens)?; // (N, H)
    let mut x = backend.buffer(embedded.len());
    x.copy_from_slice(&embedded);
    for (layer, transformer_layer) in weights.layers.iter().enumerate() {
        let is_last = layer + 1 == weights.layers.len();
        let (layer_rows, queries) = if is_last { (&last, &queries) } else { (&all, &rows) };
        let mut attention = PagedAttention { sequences: &mut *sequences, rows: &rows, queries, layer, heads };
        let (out, _saved) = transformer_layer.forward(&backend, &mut attention, layer_rows, &x)?;
        x = out;
    }
    let mut hidden = vec![0.0; x.len()];
    rms_norm(&x, &weights.final_norm, weights.context.eps, &mut hidden);
    Ok(hidden)
}

fn positions(rows: &[Row]) -> Rows {
    let positions = rows.iter().map(|row| row.n_visible as u32 - 1).collect();
    Rows { positions: Arc::new(positions), dropout: None, device_rows: None }
}

/// Hands each unit's logits to its takers.
fn choose(weights: &PolicyWeights, units: &mut [Unit<'_>], rules: &Rules<'_>) -> Result<(), ModelError> {
    let mut units: Vec<&mut Unit<'_>> = units.iter_mut().filter(|unit| !unit.takers.is_empty()).collect();
    let n_vocabulary = weights.config.vocab_size;
    let mut logits = weights.take_logits(units.len().min(MAX_LOGIT_ROWS) * n_vocabulary);
    for units in units.chunks_mut(MAX_LOGIT_ROWS) {
        let hidden: Vec<f32> = units.iter().flat_map(|unit| unit.hidden.host().iter().copied()).collect();
        let logits = &mut logits[..units.len() * n_vocabulary];
        weights.head.forward(&hidden, logits, 0.0)?;
        units.par_iter_mut().zip(logits.par_chunks_exact_mut(n_vocabulary)).try_for_each(|(unit, row)| {
            let Some((last, others)) = unit.takers.split_last_mut() else { return Ok(()) };
            for taker in others {
                taker.take(&mut row.to_vec(), rules)?;
            }
            last.take(row, rules)
        })?;
    }
    weights.give_back(logits);
    Ok(())
}
