//! One step: which tokens run together, what the card is told of them, and where what comes of them goes.

use super::fields::{Counts, Fields};
use super::graphs::Graphs;
use super::places::{Cache, Places};
use super::weights::CardWeights;
use crate::device::{CudaSlice, Gpu, SamplingRules};
use candle_core::Error;
use half::bf16;
use querl_model::Decoding;
use querl_model::backend::BLOCK_TOKENS;
use querl_model::backend::LogitsConsumer;
use querl_model::backend::LogitsProcessor;
use querl_model::backend::TensorParallel;
use querl_model::backend::bucket;
use querl_model::backend::{HiddenState, ScheduledSequence};
use querl_model::{DecoderConfig, ModelError};
use rand::Rng;
use std::ops::Range;

/// One step on its way.
pub(super) struct Step<'p> {
    pub(super) gpu: &'p Gpu,
    pub(super) config: &'p DecoderConfig,
    pub(super) parallel: &'p TensorParallel,
    pub(super) weights: &'p CardWeights,
    pub(super) places: &'p mut Places,
    pub(super) cache: &'p mut Cache,
    pub(super) graphs: &'p mut Graphs,
    pub(super) sampling: &'p SamplingRules,
}

/// Tokens of one sequence in a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    unit: usize,
    tokens: Range<usize>,
    /// The row in which its hidden state goes.
    hidden: usize,
}

impl Step<'_> {
    pub(super) fn run(
        &mut self,
        units: &mut [ScheduledSequence<'_>],
        rules: &LogitsProcessor<'_>,
    ) -> Result<(), ModelError> {
        let lengths: Vec<usize> = units.iter().map(|unit| unit.tokens.len()).collect();
        let (passes, followed) = (passes(&lengths, self.places.sizes.n_rows), followed(units));
        let is_one_each =
            passes.len() == 1 && units.iter().all(|unit| unit.tokens.len() == 1 && unit.consumers.len() == 1);
        for (index, parts) in passes.iter().enumerate() {
            let followed: &[usize] = if index + 1 == passes.len() { &followed } else { &[] };
            let counts = self.send(units, parts, followed, is_one_each, rules)?;
            self.copy_blocks(&counts)?;
            match is_one_each {
                true => self.one_token_each(&counts)?,
                false => self.forward(&counts, parts[0].hidden)?,
            }
        }
        if passes.is_empty() && !followed.is_empty() {
            self.send(units, &[], &followed, false, rules)?;
        }
        self.exchange_hidden(units)?;
        self.choose(units, is_one_each, rules)
    }

    /// Makes room for the new tokens in their caches, and copies what the kernels have to know to the card.
    fn send(
        &mut self,
        units: &mut [ScheduledSequence<'_>],
        parts: &[Part],
        followed: &[usize],
        is_one_each: bool,
        rules: &LogitsProcessor<'_>,
    ) -> Result<Counts, ModelError> {
        for part in parts {
            units[part.unit].cache.extend(part.tokens.len())?;
        }
        let copies = units.first().map(|unit| unit.cache.take_copies()).unwrap_or_default();
        let n_rows: usize = parts.iter().map(|part| part.tokens.len()).sum();
        let mut counts = Counts {
            n_rows,
            n_lines: parts.len(),
            width: self.places.sizes.table_width,
            is_one_each: n_rows == parts.len(),
            n_draws: followed.len(),
            is_in_order: followed.iter().enumerate().all(|(index, hidden)| index == *hidden),
            n_answer_tokens: if self.sampling.look_at_answers() { rules.settings.max_new_tokens } else { 0 },
            n_copies: copies.len(),
        };
        if is_one_each {
            let n = bucket(n_rows);
            counts = Counts { n_rows: n, n_lines: n, n_draws: n, ..counts };
        }
        let fields = Fields::new(&counts);
        self.places.longest = parts.iter().map(|part| units[part.unit].cache.len()).max().unwrap_or(0);
        self.places.frame.send(self.gpu, fields.len, |words| {
            words.fill(0); // rows and answers that fill a step up: token 0, which sees nothing
            write_rows(words, &fields, &counts, units, parts);
            write_answers(words, &fields, &counts, units, followed);
            let copies = copies.as_flattened();
            words[fields.copies.clone()].copy_from_slice(copies);
        })?;
        self.places.fields = fields;
        Ok(counts)
    }

    fn copy_blocks(&mut self, counts: &Counts) -> Result<(), ModelError> {
        if counts.n_copies == 0 {
            return Ok(());
        }
        let Cache { keys, values, shape, n_layers } = &mut *self.cache;
        let copies = self.places.frame.words(self.places.fields.copies.clone());
        Ok(self.gpu.copy_blocks(keys, values, &copies, *shape, *n_layers)?)
    }

    /// Puts known hidden states behind those that were computed, and hands out those that are asked for again.
    fn exchange_hidden(&mut self, units: &mut [ScheduledSequence<'_>]) -> Result<(), ModelError> {
        let width = self.config.hidden_size;
        for (row, unit) in hidden_rows(units).into_iter().zip(units) {
            let row = row * width..(row + 1) * width;
            match (&*unit.hidden, unit.tokens.is_empty()) {
                (HiddenState::Device(values), true) => {
                    let Some(values) = values.downcast_ref::<CudaSlice<bf16>>() else {
                        return Err(ModelError::Generation("a hidden state of another accelerator".into()));
                    };
                    let mut to = self.places.hidden.slice_mut(row);
                    self.gpu.stream().memcpy_dtod(values, &mut to).map_err(Error::wrap)?;
                }
                (_, true) => return Err(ModelError::Generation("a prompt whose hidden state is not known".into())),
                (_, false) if unit.keeps_hidden => {
                    *unit.hidden = HiddenState::Device(Box::new(self.gpu.copy(&self.places.hidden.slice(row))?));
                }
                (_, false) => {}
            }
        }
        Ok(())
    }
}

/// The row of each unit's hidden state: those that are computed in their order, then those that are known.
fn hidden_rows(units: &[ScheduledSequence<'_>]) -> Vec<usize> {
    let (mut computed, mut known) = (0, units.iter().filter(|unit| !unit.tokens.is_empty()).count());
    let row = |unit: &ScheduledSequence<'_>| {
        let next = if unit.tokens.is_empty() { &mut known } else { &mut computed };
        *next += 1;
        *next - 1
    };
    units.iter().map(row).collect()
}

/// For each consumer the row of the hidden state that it follows.
fn followed(units: &[ScheduledSequence<'_>]) -> Vec<usize> {
    hidden_rows(units).into_iter().zip(units).flat_map(|(row, unit)| vec![row; unit.consumers.len()]).collect()
}

/// Cuts the new tokens of all sequences into passes of at most `max_rows` rows.
fn passes(lengths: &[usize], max_rows: usize) -> Vec<Vec<Part>> {
    let (mut passes, mut parts, mut n_rows, mut hidden) = (Vec::new(), Vec::new(), 0, 0);
    for (unit, &len) in lengths.iter().enumerate().filter(|(_, len)| **len > 0) {
        let mut start = 0;
        while start < len {
            let n = (len - start).min(max_rows - n_rows);
            parts.push(Part { unit, tokens: start..start + n, hidden });
            (start, n_rows) = (start + n, n_rows + n);
            if n_rows == max_rows {
                passes.push(std::mem::take(&mut parts));
                n_rows = 0;
            }
        }
        hidden += 1;
    }
    passes.extend((!parts.is_empty()).then_some(parts));
    passes
}

/// Tokens, their places, and the tables of their sequences.
fn write_rows(words: &mut [u32], fields: &Fields, counts: &Counts, units: &[ScheduledSequence<'_>], parts: &[Part]) {
    words[fields.slots.clone()].fill(u32::MAX);
    let mut row = 0;
    for (line, part) in parts.iter().enumerate() {
        let (unit, n) = (&units[part.unit], part.tokens.len());
        let first = unit.cache.len() - n;
        let blocks = unit.cache.blocks();
        for (position, &token) in (first..).zip(&unit.tokens[part.tokens.clone()]) {
            words[fields.tokens.start + row] = token;
            words[fields.positions.start + row] = position as u32;
            let slot = blocks[position / BLOCK_TOKENS].number() as usize * BLOCK_TOKENS + position % BLOCK_TOKENS;
            words[fields.slots.start + row] = slot as u32;
            words[fields.lengths.start + row] = position as u32 + 1;
            if !counts.is_one_each {
                words[fields.lines.start + row] = line as u32;
            }
            row += 1;
        }
        if !counts.is_one_each {
            words[fields.last.start + line] = row as u32 - 1;
            words[fields.last_lengths.start + line] = unit.cache.len() as u32;
        }
        let table = fields.tables.start + line * counts.width;
        words[table..].iter_mut().zip(blocks).for_each(|(word, block)| *word = block.number());
    }
}

/// What the choice of the next tokens looks at, and the numbers of the draws.
fn write_answers(
    words: &mut [u32],
    fields: &Fields,
    counts: &Counts,
    units: &mut [ScheduledSequence<'_>],
    followed: &[usize],
) {
    if followed.is_empty() {
        return;
    }
    let consumers = units.iter_mut().flat_map(|unit| &mut unit.consumers);
    for (index, (consumer, &hidden)) in consumers.zip(followed).enumerate() {
        if !counts.is_in_order {
            words[fields.taken.start + index] = hidden as u32;
        }
        let LogitsConsumer::Sampler(draw) = consumer else { continue };
        words[fields.written.start + index] = draw.token_ids.len() as u32;
        if draw.decoding == Decoding::Sample {
            let bits = draw.rng.random::<f64>().to_bits();
            let at = fields.uniforms.start + 2 * index;
            (words[at], words[at + 1]) = (bits as u32, (bits >> 32) as u32);
        }
        let line = fields.answers.start + index * counts.n_answer_tokens;
        if counts.n_answer_tokens > 0 {
            words[line..].iter_mut().zip(&draw.token_ids).for_each(|(word, token)| *word = *token);
        }
    }
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn long_prompts_are_cut_and_short_ones_run_together() {
        let part = |unit, tokens, hidden| Part { unit, tokens, hidden };
        let found = passes(&[1, 0, 12, 3], 8);
        let expected = [vec![part(0, 0..1, 0), part(2, 0..7, 1)], vec![part(2, 7..12, 1), part(3, 0..3, 2)]];
        assert_eq!(found, expected);
        assert!(passes(&[0, 0], 8).is_empty());
    }
}
