//! One step: prefill or decode of many sequences as one batch.

use super::backend::{KvCache, LastRows, PagedAttention};
use super::buffers::{FrameLayout, PassShape, StepBuffers};
use super::weights::PolicyWeights;
use crate::device::{
    CudaSlice, Gpu, Graph, Matrix, ResponseTokens, SampledTokens, SamplingRows, SamplingRules, Scale, Sequences,
    n_splits,
};
use candle_core::{Error, Result as TensorResult};
use half::bf16;
use querl_model::backend::{
    BLOCK_TOKENS, HiddenState, LayerRows, LogitsConsumer, LogitsProcessor, QueryRows, Rows, SampledToken,
    ScheduledSequence, bucket,
};
use querl_model::{DecoderConfig, Decoding, ModelError};
use rand::Rng;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The parameters that determine the launches of a decode step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct GraphKey {
    /// Number of sequences, padded to a bucket.
    n: usize,
    n_splits: usize,
}

enum GraphState {
    /// Launched once without a graph, so that all code is loaded.
    WarmedUp,
    Captured(Graph),
    /// Capture is impossible or has failed.
    NotCapturable,
}

pub(super) struct GraphCache {
    graphs: HashMap<GraphKey, GraphState>,
    can_capture: bool,
}

impl GraphCache {
    /// `can_capture`: whether decode steps allocate nothing and no rank waits for another rank within a step.
    pub(super) fn new(can_capture: bool) -> Self {
        Self { graphs: HashMap::new(), can_capture }
    }

    #[cfg(test)]
    pub(super) fn n_captured(&self) -> usize {
        self.graphs.values().filter(|state| matches!(state, GraphState::Captured(_))).count()
    }
}

pub(super) struct Step<'p> {
    pub(super) gpu: &'p Gpu,
    pub(super) config: &'p DecoderConfig,
    pub(super) weights: &'p PolicyWeights,
    pub(super) buffers: &'p mut StepBuffers,
    pub(super) cache: &'p mut KvCache,
    pub(super) graphs: &'p mut GraphCache,
    pub(super) sampling: &'p SamplingRules,
}

/// New tokens of one sequence in a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Span {
    unit: usize,
    tokens: Range<usize>,
    /// The row of its hidden state.
    hidden: usize,
}

impl Step<'_> {
    pub(super) fn run(
        &mut self,
        units: &mut [ScheduledSequence<'_>],
        rules: &LogitsProcessor<'_>,
    ) -> Result<(), ModelError> {
        let lengths: Vec<usize> = units.iter().map(|unit| unit.tokens.len()).collect();
        let passes = passes(&lengths, self.buffers.sizes.n_rows);
        // Row of the hidden state that each response continues.
        let sources: Vec<usize> = hidden_rows(units)
            .into_iter()
            .zip(&*units)
            .flat_map(|(row, unit)| vec![row; unit.consumers.len()])
            .collect();
        let is_decode =
            passes.len() == 1 && units.iter().all(|unit| unit.tokens.len() == 1 && unit.consumers.len() == 1);
        for (index, spans) in passes.iter().enumerate() {
            let sources: &[usize] = if index + 1 == passes.len() { &sources } else { &[] };
            let shape = self.send(units, spans, sources, is_decode, rules)?;
            self.copy_blocks(&shape)?;
            match is_decode {
                true => self.decode(&shape)?,
                false => self.forward(&shape, spans[0].hidden)?,
            }
        }
        if passes.is_empty() && !sources.is_empty() {
            self.send(units, &[], &sources, false, rules)?;
        }
        self.exchange_hidden(units)?;
        self.choose(units, is_decode, rules)
    }

    /// Extends the sequences' KV caches, and copies the lists that the kernels read to the GPU as one frame.
    fn send(
        &mut self,
        units: &mut [ScheduledSequence<'_>],
        spans: &[Span],
        sources: &[usize],
        is_decode: bool,
        rules: &LogitsProcessor<'_>,
    ) -> Result<PassShape, ModelError> {
        for span in spans {
            units[span.unit].cache.extend(span.tokens.len())?;
        }
        let copies = units.first().map(|unit| unit.cache.take_copies()).unwrap_or_default();
        let n_rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let mut shape = PassShape {
            n_rows,
            n_tables: spans.len(),
            table_width: self.buffers.sizes.table_width,
            is_one_each: n_rows == spans.len(),
            n_samples: sources.len(),
            is_in_order: sources.iter().enumerate().all(|(index, hidden)| index == *hidden),
            n_response_tokens: self.n_response_tokens(rules),
            n_copies: copies.len(),
        };
        if is_decode {
            let n = bucket(n_rows);
            shape = PassShape { n_rows: n, n_tables: n, n_samples: n, ..shape };
        }
        let layout = FrameLayout::new(&shape);
        self.buffers.longest = spans.iter().map(|span| units[span.unit].cache.len()).max().unwrap_or(0);
        self.buffers.frame.send(self.gpu, layout.len, |words| {
            words.fill(0); // padding rows: token 0, which attends to nothing
            write_rows(words, &layout, &shape, units, spans);
            write_responses(words, &layout, &shape, units, sources);
            words[layout.copies.clone()].copy_from_slice(copies.as_flattened());
        })?;
        self.buffers.layout = layout;
        Ok(shape)
    }

    /// Number of response tokens that the logits processors read.
    fn n_response_tokens(&self, rules: &LogitsProcessor<'_>) -> usize {
        if self.sampling.read_responses() { rules.settings.max_new_tokens } else { 0 }
    }

    fn copy_blocks(&mut self, shape: &PassShape) -> Result<(), ModelError> {
        if shape.n_copies == 0 {
            return Ok(());
        }
        let KvCache { keys, values, shape, n_layers } = &mut *self.cache;
        let copies = self.buffers.frame.words(self.buffers.layout.copies.clone());
        Ok(self.gpu.copy_blocks(keys, values, &copies, *shape, *n_layers)?)
    }

    /// One token for each sequence. The second step of a key is captured as a CUDA graph, later ones replay it.
    fn decode(&mut self, shape: &PassShape) -> TensorResult<()> {
        if self.gpu.is_traced() {
            return self.forward_to_logits(shape);
        }
        let key = GraphKey { n: shape.n_rows, n_splits: self.n_splits() };
        match self.graphs.graphs.get_mut(&key) {
            Some(GraphState::Captured(graph)) => return graph.launch(),
            Some(GraphState::NotCapturable) => return self.forward_to_logits(shape),
            Some(GraphState::WarmedUp) => {}
            None => {
                let state = if self.graphs.can_capture { GraphState::WarmedUp } else { GraphState::NotCapturable };
                self.graphs.graphs.insert(key, state);
                return self.forward_to_logits(shape);
            }
        }
        let gpu = self.gpu;
        // SAFETY: no other thread uses the policy's stream, and graphs are dropped before the weights, cache and buffers that they
        // use are freed.
        match unsafe { gpu.capture(|| self.forward_to_logits(shape)) } {
            Ok(mut graph) => {
                graph.launch()?;
                self.graphs.graphs.insert(key, GraphState::Captured(graph));
                Ok(())
            }
            // A step that cannot be captured can still be launched; any other error will occur again.
            Err(_) => {
                self.graphs.graphs.insert(key, GraphState::NotCapturable);
                self.forward_to_logits(shape)
            }
        }
    }

    /// Whether a decode step of `n` sequences computes its logits, so that they are part of the graph.
    fn has_logits(&self, n: usize) -> bool {
        bucket(n) <= self.buffers.sizes.n_logit_rows
    }

    /// Split-K count of attention, a power of two to bound the number of captured graphs.
    fn n_splits(&self) -> usize {
        n_splits(self.buffers.longest).next_power_of_two().min(self.buffers.sizes.n_splits)
    }

    fn forward_to_logits(&mut self, shape: &PassShape) -> TensorResult<()> {
        self.forward(shape, 0)?;
        if self.has_logits(shape.n_rows) { self.logits(0..shape.n_rows) } else { Ok(()) }
    }

    /// Runs all layers; the hidden states after the final norm go to rows `first_hidden` and following.
    fn forward(&mut self, shape: &PassShape, first_hidden: usize) -> TensorResult<()> {
        let (n_splits, weights, context) = (self.n_splits(), self.weights, &self.weights.context);
        let StepBuffers { backend, hidden, frame, layout, .. } = &mut *self.buffers;
        let words = |range: &Range<usize>| frame.words(range.clone());
        let rows = |device_rows| Rows { positions: Arc::default(), dropout: None, device_rows };
        let all = LayerRows { context: context.clone(), rows: rows(None), query_rows: None };
        // The last layer needs keys and values of all rows, but only the last row of each sequence as query.
        let last =
            (!shape.is_one_each).then(|| Arc::new(LastRows { words: frame.shared(), range: layout.last_rows.clone() }));
        let device_rows = last.clone().map(|last| last as Arc<_>);
        let query_rows = QueryRows { indices: Arc::default(), rows: rows(device_rows) };
        let of_last = LayerRows { query_rows: last.is_some().then_some(query_rows), ..all.clone() };

        let mut x = backend.embed(&weights.embedding, &words(&layout.tokens))?;
        for (index, layer) in weights.layers.iter().enumerate() {
            let query_rows = last.as_deref().filter(|_| index + 1 == weights.layers.len());
            let (table_rows, lengths) = match query_rows {
                None => (&layout.table_rows, &layout.lengths),
                Some(_) => (&(0..0), &layout.last_lengths),
            };
            let sequences = Sequences {
                tables: words(&layout.tables),
                width: shape.table_width,
                table_rows: (!table_rows.is_empty()).then(|| words(table_rows)),
                lengths: words(lengths),
                n_splits,
            };
            let mut attention = PagedAttention {
                cache: &mut *self.cache,
                layer: index,
                rope: &weights.rope,
                eps: context.eps,
                positions: words(&layout.positions),
                slots: words(&layout.slots),
                sequences,
                query_rows,
            };
            let layer_rows = if query_rows.is_some() { &of_last } else { &all };
            let (out, _saved) = layer.forward(backend, &mut attention, layer_rows, &x)?;
            x = out;
        }
        let start = first_hidden * context.hidden_size;
        x.with(|x| {
            let mut hidden = hidden.slice_mut(start..start + x.len());
            self.gpu.rms_norm_into(x, &weights.final_norm, context.eps, &mut hidden)
        })
    }

    /// Uploads known hidden states after the computed ones, and downloads those that are needed later.
    fn exchange_hidden(&mut self, units: &mut [ScheduledSequence<'_>]) -> Result<(), ModelError> {
        let width = self.config.hidden_size;
        for (row, unit) in hidden_rows(units).into_iter().zip(units) {
            let row = row * width..(row + 1) * width;
            match (&*unit.hidden, unit.tokens.is_empty()) {
                (HiddenState::Device(values), true) => {
                    let Some(values) = values.downcast_ref::<CudaSlice<bf16>>() else {
                        return Err(ModelError::Generation("a hidden state of another accelerator".into()));
                    };
                    let mut to = self.buffers.hidden.slice_mut(row);
                    self.gpu.stream().memcpy_dtod(values, &mut to).map_err(Error::wrap)?;
                }
                (_, true) => return Err(ModelError::Generation("a prompt whose hidden state is not known".into())),
                (_, false) if unit.keeps_hidden => {
                    *unit.hidden = HiddenState::Device(Box::new(self.gpu.copy(&self.buffers.hidden.slice(row))?));
                }
                (_, false) => {}
            }
        }
        Ok(())
    }

    /// Samples the next token of each response, or passes the logits to beam search. `has_logits`: true if the pass computed the logits.
    fn choose(
        &mut self,
        units: &mut [ScheduledSequence<'_>],
        has_logits: bool,
        rules: &LogitsProcessor<'_>,
    ) -> Result<(), ModelError> {
        let mut consumers: Vec<&mut LogitsConsumer<'_>> =
            units.iter_mut().flat_map(|unit| &mut unit.consumers).collect();
        let (n, chunk) = (consumers.len(), self.buffers.sizes.n_logit_rows);
        for start in (0..n).step_by(chunk) {
            let rows = start..n.min(start + chunk);
            if !(has_logits && self.has_logits(n)) {
                self.logits(rows.clone())?;
            }
            match &consumers[start] {
                LogitsConsumer::Sampler(draw) => self.sample(n, rows, draw.decoding, rules)?,
                LogitsConsumer::BeamCandidates(_) => {
                    let n_vocabulary = self.config.vocab_size;
                    let mut logits = self.gpu.download(&self.buffers.logits.slice(..rows.len() * n_vocabulary))?;
                    let logits = logits.chunks_exact_mut(n_vocabulary);
                    consumers[rows].iter_mut().zip(logits).for_each(|(consumer, row)| consumer.consume(row, rules));
                }
            }
        }
        if matches!(consumers.first(), Some(LogitsConsumer::Sampler(_))) {
            self.push_tokens(&mut consumers)
        } else {
            Ok(())
        }
    }

    /// Logits of the hidden states that some responses continue.
    fn logits(&mut self, rows: Range<usize>) -> TensorResult<()> {
        let (width, n_vocabulary) = (self.config.hidden_size, self.config.vocab_size);
        let StepBuffers { hidden, picked, logits, frame, layout, .. } = &mut *self.buffers;
        let (gpu, mut logits) = (self.gpu, logits.slice_mut(..rows.len() * n_vocabulary));
        let hidden = match layout.hidden_rows.is_empty() {
            true => hidden.slice(rows.start * width..rows.end * width),
            false => {
                let list = frame.words(layout.hidden_rows.start + rows.start..layout.hidden_rows.start + rows.end);
                gpu.pick_into(hidden, &list, width, &mut picked.slice_mut(..rows.len() * width))?;
                picked.slice(..rows.len() * width)
            }
        };
        self.weights.head.multiply(gpu, &Matrix::of(gpu, &hidden, width)?, &mut logits, Scale::WRITE)
    }

    fn sample(
        &mut self,
        n: usize,
        rows: Range<usize>,
        decoding: Decoding,
        rules: &LogitsProcessor<'_>,
    ) -> TensorResult<()> {
        let max_tokens = self.n_response_tokens(rules);
        let StepBuffers { logits, original_logits, frame, layout, read_back, .. } = &mut *self.buffers;
        let of = |range: &Range<usize>, size: usize| range.start + rows.start * size..range.start + rows.end * size;
        let responses = (max_tokens > 0).then(|| ResponseTokens {
            tokens: frame.words(of(&layout.responses, max_tokens)),
            max_tokens,
            original_logits: original_logits.slice_mut(..rows.len() * max_tokens),
        });
        let uniforms = match decoding {
            Decoding::Sample => Some(frame.doubles(of(&layout.uniforms, 2))?),
            Decoding::Greedy | Decoding::Beam { .. } => None,
        };
        let sampling_rows = SamplingRows { lengths: frame.words(of(&layout.n_generated, 1)), responses, uniforms };
        let mut logits = logits.slice_mut(..rows.len() * self.config.vocab_size);
        read_back.write(n, rows.clone(), |sampled| self.gpu.choose(&mut logits, sampling_rows, self.sampling, sampled))
    }

    /// Waits for the GPU, and appends the sampled tokens to the responses.
    fn push_tokens(&mut self, consumers: &mut [&mut LogitsConsumer<'_>]) -> Result<(), ModelError> {
        let [tokens, logprobs, behaviour] = self.buffers.read_back.read(self.gpu, consumers.len())?;
        for (index, consumer) in consumers.iter_mut().enumerate() {
            let LogitsConsumer::Sampler(draw) = consumer else { continue };
            let (token, logprob) = (tokens[index], f32::from_bits(logprobs[index]));
            match token {
                SampledTokens::NOT_FINITE => {
                    let n = draw.token_ids.len();
                    return Err(ModelError::Generation(format!(
                        "the logits of token {n} of a response are not finite"
                    )));
                }
                SampledTokens::NOTHING_LEFT => {
                    let message = "no_repeat_ngram_size and min_new_tokens leave no token to sample";
                    return Err(ModelError::Generation(message.into()));
                }
                _ => draw.push(SampledToken { token, logprob, behaviour_logprob: f32::from_bits(behaviour[index]) }),
            }
        }
        Ok(())
    }
}

/// The row of each sequence's hidden state: first the computed ones in order, then the known ones.
fn hidden_rows(units: &[ScheduledSequence<'_>]) -> Vec<usize> {
    let (mut computed, mut known) = (0, units.iter().filter(|unit| !unit.tokens.is_empty()).count());
    let row = |unit: &ScheduledSequence<'_>| {
        let next = if unit.tokens.is_empty() { &mut known } else { &mut computed };
        *next += 1;
        *next - 1
    };
    units.iter().map(row).collect()
}

/// Divides the new tokens of all sequences into passes of at most `max_rows` rows.
fn passes(lengths: &[usize], max_rows: usize) -> Vec<Vec<Span>> {
    let (mut passes, mut spans, mut n_rows, mut hidden) = (Vec::new(), Vec::new(), 0, 0);
    for (unit, &len) in lengths.iter().enumerate().filter(|(_, len)| **len > 0) {
        let mut start = 0;
        while start < len {
            let n = (len - start).min(max_rows - n_rows);
            spans.push(Span { unit, tokens: start..start + n, hidden });
            (start, n_rows) = (start + n, n_rows + n);
            if n_rows == max_rows {
                passes.push(std::mem::take(&mut spans));
                n_rows = 0;
            }
        }
        hidden += 1;
    }
    passes.extend((!spans.is_empty()).then_some(spans));
    passes
}

/// Writes tokens, KV cache slots, and block tables to the frame.
fn write_rows(
    words: &mut [u32],
    layout: &FrameLayout,
    shape: &PassShape,
    units: &[ScheduledSequence<'_>],
    spans: &[Span],
) {
    words[layout.slots.clone()].fill(u32::MAX);
    let mut row = 0;
    for (index, span) in spans.iter().enumerate() {
        let unit = &units[span.unit];
        let (first, blocks) = (unit.cache.len() - span.tokens.len(), unit.cache.blocks());
        for (position, &token) in (first..).zip(&unit.tokens[span.tokens.clone()]) {
            words[layout.tokens.start + row] = token;
            words[layout.positions.start + row] = position as u32;
            let slot = blocks[position / BLOCK_TOKENS].number() as usize * BLOCK_TOKENS + position % BLOCK_TOKENS;
            words[layout.slots.start + row] = slot as u32;
            words[layout.lengths.start + row] = position as u32 + 1;
            if !shape.is_one_each {
                words[layout.table_rows.start + row] = index as u32;
            }
            row += 1;
        }
        if !shape.is_one_each {
            words[layout.last_rows.start + index] = row as u32 - 1;
            words[layout.last_lengths.start + index] = unit.cache.len() as u32;
        }
        let table = layout.tables.start + index * shape.table_width;
        words[table..].iter_mut().zip(blocks).for_each(|(word, block)| *word = block.number());
    }
}

/// Writes the inputs of sampling for each response, and its random numbers, to the frame.
fn write_responses(
    words: &mut [u32],
    layout: &FrameLayout,
    shape: &PassShape,
    units: &mut [ScheduledSequence<'_>],
    sources: &[usize],
) {
    let consumers = units.iter_mut().flat_map(|unit| &mut unit.consumers);
    for (index, (consumer, &hidden)) in consumers.zip(sources).enumerate() {
        if !shape.is_in_order {
            words[layout.hidden_rows.start + index] = hidden as u32;
        }
        let LogitsConsumer::Sampler(draw) = consumer else { continue };
        words[layout.n_generated.start + index] = draw.token_ids.len() as u32;
        if draw.decoding == Decoding::Sample {
            let bits = draw.rng.random::<f64>().to_bits();
            let at = layout.uniforms.start + 2 * index;
            (words[at], words[at + 1]) = (bits as u32, (bits >> 32) as u32);
        }
        if shape.n_response_tokens > 0 {
            let start = layout.responses.start + index * shape.n_response_tokens;
            words[start..].iter_mut().zip(&draw.token_ids).for_each(|(word, token)| *word = *token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_are_cut_and_short_ones_run_together() {
        let span = |unit, tokens, hidden| Span { unit, tokens, hidden };
        let found = passes(&[1, 0, 12, 3], 8);
        let expected = [vec![span(0, 0..1, 0), span(2, 0..7, 1)], vec![span(2, 7..12, 1), span(3, 0..3, 2)]];
        assert_eq!(found, expected);
        assert!(passes(&[0, 0], 8).is_empty());
    }
}
