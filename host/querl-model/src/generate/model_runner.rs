//! The model runner: one forward pass for many sequences, prefill or decode step. Their new tokens go through the model, the logits
//! that follow to the samplers. On the CPU it is here; a GPU has its own behind [`DecodePolicy`].

use super::SamplingSettings;
use super::cpu_backend::{Adapter, AdapterWeights, BaseWeights, CpuInference, Segment, rms_norm};
use super::logits_processor::LogitsProcessor;
use super::paged_attention::{Heads, NewTokens, PagedAttention, Row};
use super::sampler::LogitsConsumer;
use crate::kv_cache::SequenceKvCache;
use crate::transformer::{LayerRows, QueryRows, Rows};
use crate::{Decoder, LoraAdapter, ModelError};
use rayon::prelude::*;
use std::any::Any;
use std::sync::{Arc, OnceLock};

/// The hidden state of a sequence's last token after the final norm, `(H)`, where its policy keeps it.
#[derive(Default)]
pub enum HiddenState {
    /// Not computed yet, or no longer needed.
    #[default]
    Unknown,
    /// Hidden state in CPU memory: H values.
    Host(Vec<f32>),
    /// Hidden state in the memory of the policy's accelerator.
    Device(Box<dyn Any + Send + Sync>),
}

impl HiddenState {
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

/// One sequence of a forward pass: a prompt in prefill, or a running sequence in a decode step.
pub struct ScheduledSequence<'s> {
    /// Adapter of this sequence on the CPU; a policy on an accelerator has one adapter for all sequences.
    pub adapter: Option<Arc<AdapterWeights>>,
    /// Sampling settings of this sequence on the CPU, in place of the call's; `None` takes the call's.
    pub sampling: Option<&'s SamplingSettings>,
    /// KV cache of the sequence, to which the keys and values of the new tokens are written.
    pub cache: &'s mut SequenceKvCache,
    /// Ids of the new tokens; empty if the hidden state of the last token is known.
    pub tokens: &'s [u32],
    /// Hidden state of the last token: input if `tokens` is empty, otherwise output.
    pub hidden: &'s mut HiddenState,
    /// Whether the hidden state is needed later: an accelerator returns it only then.
    pub keeps_hidden: bool,
    /// Consumers of the logits that follow the last token; empty in prefill of a shared prefix.
    pub consumers: Vec<LogitsConsumer<'s>>,
}

/// A policy on an accelerator, with its buffers and its KV cache.
pub trait DecodePolicy: Any + Send {
    /// Sets the policy to the adapter's current values, `None` for the base model. After an error there is no policy.
    ///
    /// # Errors
    /// The adapter does not fit the decoder, or the device is out of memory.
    fn set(&mut self, decoder: &Decoder, adapter: Option<&LoraAdapter>) -> Result<(), ModelError>;
    /// Replaces the KV cache by one of `n_blocks` blocks.
    ///
    /// # Errors
    /// The device is out of memory.
    fn allocate_blocks(&mut self, n_blocks: usize) -> Result<(), ModelError>;
    /// Allocates buffers for `n_sequences` sequences of at most `longest` tokens.
    ///
    /// # Errors
    /// The device is out of memory.
    fn reserve(
        &mut self,
        n_sequences: usize,
        longest: usize,
        processor: &LogitsProcessor<'_>,
    ) -> Result<(), ModelError>;
    /// One forward pass: feeds the new tokens of all sequences, and passes each sequence's logits to its consumer.
    ///
    /// # Errors
    /// Logits are NaN or Inf, or the device fails.
    fn forward(
        &mut self,
        sequences: &mut [ScheduledSequence<'_>],
        processor: &LogitsProcessor<'_>,
    ) -> Result<(), ModelError>;
}

/// Creates a decode policy for a decoder on an accelerator. Later training does not change the policy.
pub type NewDecodePolicy = fn(&Decoder, Option<&LoraAdapter>) -> Result<Box<dyn DecodePolicy>, ModelError>;

static INSTALLED: OnceLock<NewDecodePolicy> = OnceLock::new();

pub(crate) fn install(new_policy: NewDecodePolicy) {
    let _ = INSTALLED.set(new_policy);
}

/// The policy's weights at the time when it was set.
pub(super) enum Policy {
    /// The CPU. Threads work on separate sequences or on one product together.
    Cpu(Box<BaseWeights>),
    /// A policy on an accelerator, which runs all sequences as one batch.
    Accelerator(Box<dyn DecodePolicy>),
}

impl Policy {
    pub(super) fn on_accelerator(decoder: &Decoder, adapter: Option<&LoraAdapter>) -> Result<Self, ModelError> {
        let missing = || ModelError::Generation("no accelerator is installed".into());
        Ok(Self::Accelerator(INSTALLED.get().ok_or_else(missing)?(decoder, adapter)?))
    }

    pub(super) fn forward(
        &mut self,
        sequences: &mut [ScheduledSequence<'_>],
        processor: &LogitsProcessor<'_>,
    ) -> Result<(), ModelError> {
        match self {
            Self::Cpu(weights) => forward(weights, sequences, processor),
            Self::Accelerator(policy) => policy.forward(sequences, processor),
        }
    }
}

/// Maximum rows of one pass through the layers, which limits the memory of prefill.
const MAX_ROWS: usize = 256;

const MAX_LOGIT_ROWS: usize = 128;

/// Minimum rows per thread for separate sequences. With fewer rows all threads work on one product, so that each reads only its part of the
/// weights.
const ROWS_PER_THREAD: usize = 16;

/// Maximum number of weights in a layer for separate sequences. Larger layers do not fit into a core's cache, and every thread would read
/// and unpack all weights.
const MAX_SHARED_NOTHING: usize = 4 << 20;

/// One forward pass. With a small model each thread runs separate sequences through all layers. With a large model, or with tensor
/// parallelism, where ranks must all-reduce in the same order, all threads work on each product.
fn forward(
    weights: &BaseWeights,
    sequences: &mut [ScheduledSequence<'_>],
    processor: &LogitsProcessor<'_>,
) -> Result<(), ModelError> {
    let rows = |sequence: &ScheduledSequence<'_>| sequence.tokens.len().max(1);
    let n_rows: usize = sequences.iter().map(rows).sum();
    let is_split = weights.context.parallel.is_sharded();
    let n_groups = match weights.weights_per_layer() <= MAX_SHARED_NOTHING && !is_split {
        true => rayon::current_num_threads().min(n_rows / ROWS_PER_THREAD).max(1),
        false => 1,
    };
    let mut groups: Vec<&mut [ScheduledSequence<'_>]> = Vec::with_capacity(n_groups);
    if n_groups == 1 {
        // Runs in this thread: tensor-parallel ranks block on each other, which rayon workers must not do.
        run_layers(weights, sequences)?;
        return process_logits(weights, sequences, processor);
    }
    let (mut rest, mut n_assigned) = (sequences, 0);
    for group in 1..=n_groups {
        let end = n_rows * group / n_groups;
        let mut n_sequences = 0;
        while n_sequences < rest.len() && n_assigned < end {
            n_assigned += rows(&rest[n_sequences]);
            n_sequences += 1;
        }
        let (own, others) = rest.split_at_mut(n_sequences);
        groups.push(own);
        rest = others;
    }
    groups.into_par_iter().try_for_each(|group| {
        run_layers(weights, group)?;
        process_logits(weights, group, processor)
    })
}

/// Feeds the tokens of all sequences, at most [`MAX_ROWS`] at once (chunked prefill).
fn run_layers(weights: &BaseWeights, sequences: &mut [ScheduledSequence<'_>]) -> Result<(), ModelError> {
    let width = weights.config.hidden_size;
    let mut first = 0; // sequence
    let mut n_done = 0; // tokens of that sequence
    while first < sequences.len() {
        let mut spans = Vec::new();
        let (mut targets, mut adapters) = (Vec::new(), Vec::new());
        let (mut n_rows, mut next, mut n_next) = (0, first, n_done);
        for sequence in &mut sequences[first..] {
            let tokens = &sequence.tokens[n_next..];
            let n = tokens.len().min(MAX_ROWS - n_rows);
            if n > 0 {
                spans.push(NewTokens { cache: &mut *sequence.cache, tokens: &tokens[..n] });
                adapters.push(sequence.adapter.clone());
                targets.push(&mut *sequence.hidden);
                n_rows += n;
            }
            if n < tokens.len() {
                n_next += n;
                break;
            }
            (next, n_next) = (next + 1, 0);
        }
        if !spans.is_empty() {
            let hidden = last_hidden(weights, &mut spans, &adapters)?;
            for (target, hidden) in targets.into_iter().zip(hidden.chunks_exact(width)) {
                target.set_host(hidden);
            }
        }
        (first, n_done) = (next, n_next);
    }
    Ok(())
}

/// Runs new tokens through all layers; returns the hidden state of each sequence's last one after the final norm,
/// `(sequences, H)`.
fn last_hidden(
    weights: &BaseWeights,
    sequences: &mut [NewTokens<'_>],
    adapters: &[Adapter],
) -> Result<Vec<f32>, ModelError> {
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
    // The last layer needs keys and values of all rows, but only the last row of each sequence as query.
    let query_rows = QueryRows { rows: positions(&queries), indices: Arc::new(last_rows) };
    let last = LayerRows { query_rows: (queries.len() < rows.len()).then_some(query_rows), ..all.clone() };

    let config = &weights.config;
    let heads = Heads { n_heads: config.n_heads, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim };
    let (mut of_rows, mut of_queries) = (Vec::new(), Vec::new());
    for (sequence, adapter) in sequences.iter().zip(adapters) {
        Segment::extend(&mut of_rows, adapter, sequence.tokens.len());
        Segment::extend(&mut of_queries, adapter, 1);
    }
    let embedded = weights.embed(&tokens, &of_rows)?; // (N, H)
    let backend = CpuInference::new(of_rows, of_queries);
    let mut x = backend.buffer(embedded.len());
    x.copy_from_slice(&embedded);
    for (layer, transformer_layer) in weights.layers.iter().enumerate() {
        let is_last = layer + 1 == weights.layers.len();
        let (layer_rows, queries) = if is_last { (&last, &queries) } else { (&all, &rows) };
        let window = config.sliding_window(layer);
        let mut attention = PagedAttention { sequences: &mut *sequences, rows: &rows, queries, layer, window, heads };
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

fn process_logits(
    weights: &BaseWeights,
    sequences: &mut [ScheduledSequence<'_>],
    processor: &LogitsProcessor<'_>,
) -> Result<(), ModelError> {
    let has_consumers = |sequence: &&mut ScheduledSequence<'_>| !sequence.consumers.is_empty();
    let mut sequences: Vec<&mut ScheduledSequence<'_>> = sequences.iter_mut().filter(has_consumers).collect();
    let n_vocabulary = weights.config.vocab_size;
    let mut logits = weights.take_logits(sequences.len().min(MAX_LOGIT_ROWS) * n_vocabulary);
    for sequences in sequences.chunks_mut(MAX_LOGIT_ROWS) {
        let hidden: Vec<f32> = sequences.iter().flat_map(|sequence| sequence.hidden.host().iter().copied()).collect();
        let logits = &mut logits[..sequences.len() * n_vocabulary];
        let mut segments = Vec::new();
        sequences.iter().for_each(|sequence| Segment::extend(&mut segments, &sequence.adapter, 1));
        weights.logits(&hidden, &segments, logits)?;
        sequences.par_iter_mut().zip(logits.par_chunks_exact_mut(n_vocabulary)).for_each(|(sequence, row)| {
            let settings = sequence.sampling.unwrap_or(processor.settings);
            let processor = LogitsProcessor { settings, ..*processor };
            let Some((last, others)) = sequence.consumers.split_last_mut() else { return };
            others.iter_mut().for_each(|consumer| consumer.consume(&mut row.to_vec(), &processor));
            last.consume(row, &processor);
        });
    }
    weights.give_back(logits);
    Ok(())
}
