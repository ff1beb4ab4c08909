//! New tokens through all layers: launches alone, into memory that is there.

use super::fields::Counts;
use super::graphs::{Kind, Known};
use super::places::{Cache, Places};
use super::step::Step;
use super::weights::CardGroup;
use crate::device::{
    CudaSlice, CudaView, CudaViewMut, DeviceWeight, FinishRows, Gpu, HeadNorms, Matrix, Scale, Sequences, n_splits,
};
use candle_core::{Error, Result};
use half::bf16;
use querl_model::backend::TensorParallel;
use querl_model::backend::bucket;

impl Step<'_> {
    /// A step of one token for each sequence, as the graph that was recorded of the second of its kind.
    pub(super) fn one_token_each(&mut self, counts: &Counts) -> Result<()> {
        if self.gpu.is_traced() {
            return self.forward_to_logits(counts);
        }
        let kind = Kind { n: counts.n_rows, n_splits: self.n_splits(self.places.longest) };
        match self.graphs.known(kind) {
            Some(Known::Recorded(graph)) => return graph.launch(),
            Some(Known::Once) => {}
            Some(Known::Refused) => return self.forward_to_logits(counts),
            None => {
                self.graphs.met(kind);
                return self.forward_to_logits(counts);
            }
        }
        let gpu = self.gpu;
        // SAFETY: nobody else uses the policy's stream, and where weights, cache or places are made anew no graph of the old is
        // launched any more: the policy forgets them.
        match unsafe { gpu.recorded(|| self.forward_to_logits(counts)) } {
            Ok(mut graph) => {
                graph.launch()?;
                self.graphs.set(kind, Known::Recorded(graph));
                Ok(())
            }
            // What cannot be recorded can be launched; where the fault is another one, it comes again.
            Err(_) => {
                self.graphs.set(kind, Known::Refused);
                self.forward_to_logits(counts)
            }
        }
    }

    /// Whether a step of one token for each of `n` sequences goes on to the logits.
    pub(super) fn has_logits_of(&self, n: usize) -> bool {
        bucket(n) <= self.places.sizes.n_logit_rows
    }

    /// Parts of the keys: few different numbers, so that few kinds of steps are recorded.
    fn n_splits(&self, longest: usize) -> usize {
        n_splits(longest).next_power_of_two().min(self.places.sizes.n_splits)
    }

    fn forward_to_logits(&mut self, counts: &Counts) -> Result<()> {
        self.forward(counts, 0)?;
        if self.has_logits_of(counts.n_rows) { self.logits(0..counts.n_rows) } else { Ok(()) }
    }

    /// Through all layers; the hidden states after the final norm go to rows `first_hidden` and following.
    pub(super) fn forward(&mut self, counts: &Counts, first_hidden: usize) -> Result<()> {
        let n_splits = self.n_splits(self.places.longest);
        let (gpu, config, weights, parallel) = (self.gpu, self.config, self.weights, self.parallel);
        let (eps, width, mut n) = (config.rms_norm_eps as f32, config.hidden_size, counts.n_rows);
        let (q_width, kv_width) = (config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim);
        let Cache { keys, values, shape, .. } = &mut *self.cache;
        let Places {
            x, last_x, normed, q, last_q, k, v, attended, parts, gate, up, low, hidden, frame, fields, ..
        } = &mut *self.places;
        let (mut x, mut q) = (x, q);
        // Behind the last layer's keys and values, only what is asked for is computed.
        let mut last = (!counts.is_one_each).then_some((last_x, last_q));
        let words = |range: &std::ops::Range<usize>| frame.words(range.clone());
        embed(gpu, &weights.embedding, &words(&fields.tokens), &mut x.slice_mut(..n * width))?;
        for (index, layer) in weights.layers.iter().enumerate() {
            gpu.normed_into(&x.slice(..n * width), &layer.input_norm, eps, &mut normed.slice_mut(..n * width))?;
            let of_layer = index * shape.len()..(index + 1) * shape.len();
            {
                let mut queries = q.slice_mut(..n * q_width);
                let (mut k, mut v) = (k.slice_mut(..n * kv_width), v.slice_mut(..n * kv_width));
                let input = normed.slice(..n * width);
                products(gpu, &layer.qkv, &input, [&mut queries, &mut k, &mut v], low, n)?;
                let norms = HeadNorms { weights: layer.qk_norm.as_ref().map(|[q, k]| [q, k]), eps };
                gpu.finish_heads(
                    [&mut queries, &mut k, &mut v],
                    &finish_rows(&layer.qkv, low, n),
                    &layer.qkv.table,
                    &norms,
                    (&weights.rope, &words(&fields.positions)),
                    &words(&fields.slots),
                    [&mut keys.slice_mut(of_layer.clone()), &mut values.slice_mut(of_layer.clone())],
                    *shape,
                )?;
            }
            let (mut lines, mut lengths) = (&fields.lines, &fields.lengths);
            if index + 1 == weights.layers.len()
                && let Some((last_x, last_q)) = last.take()
            {
                let (list, n_last) = (words(&fields.last), fields.last.len());
                gpu.pick_into(&x.slice(..n * width), &list, width, &mut last_x.slice_mut(..n_last * width))?;
                gpu.pick_into(&q.slice(..n * q_width), &list, q_width, &mut last_q.slice_mut(..n_last * q_width))?;
                (x, q, n) = (last_x, last_q, n_last);
                (lines, lengths) = (&(0..0), &fields.last_lengths);
            }
            let sequences = Sequences {
                tables: words(&fields.tables),
                width: counts.width,
                lines: (!lines.is_empty()).then(|| words(lines)),
                lengths: words(lengths),
                n_splits,
            };
            let seen = [&keys.slice(of_layer.clone()), &values.slice(of_layer)];
            let mut attended = attended.slice_mut(..n * q_width);
            gpu.decode_attention_into(&q.slice(..n * q_width), seen, *shape, &sequences, parts, &mut attended)?;
            let mut sum = x.slice_mut(..n * width);
            added_by_all(parallel, gpu, &layer.o, &attended.as_view(), &mut sum, (low, normed), n)?;
            gpu.normed_into(&sum, &layer.post_attention_norm, eps, &mut normed.slice_mut(..n * width))?;
            let (mut gate, mut up) =
                (gate.slice_mut(..n * config.intermediate_size), up.slice_mut(..n * config.intermediate_size));
            products(gpu, &layer.gate_up, &normed.slice(..n * width), [&mut gate, &mut up], low, n)?;
            let rows = finish_rows(&layer.gate_up, low, n);
            gpu.finish_gated(&mut gate, &up, &rows, &layer.gate_up.table, n)?;
            added_by_all(parallel, gpu, &layer.down, &gate.as_view(), &mut sum, (low, normed), n)?;
        }
        let mut hidden = hidden.slice_mut(first_hidden * width..(first_hidden + n) * width);
        gpu.normed_into(&x.slice(..n * width), &weights.final_norm, eps, &mut hidden)
    }
}

/// Rows of the embedding, widened.
fn embed(gpu: &Gpu, table: &DeviceWeight, ids: &CudaView<'_, u32>, x: &mut CudaViewMut<'_, f32>) -> Result<()> {
    if let Some(values) = table.bf16() {
        return gpu.rows_into(values, ids, table.dims().1, x);
    }
    let mut own = gpu.alloc(ids.len())?;
    gpu.stream().memcpy_dtod(ids, &mut own).map_err(Error::wrap)?;
    gpu.stream().memcpy_dtod(&table.rows_at(gpu, &own)?, x).map_err(Error::wrap)
}

/// Products of one input with the weights of a group, and with all its A at once.
fn products<const N: usize>(
    gpu: &Gpu,
    group: &CardGroup,
    x: &CudaView<'_, bf16>,
    outputs: [&mut CudaViewMut<'_, bf16>; N],
    low: &mut CudaSlice<bf16>,
    n: usize,
) -> Result<()> {
    for (member, output) in group.members.iter().zip(outputs) {
        member.weight.multiply(gpu, &Matrix::of(gpu, x, member.weight.dims().1)?, output, Scale::WRITE)?;
    }
    low_product(gpu, group, x, low, n)
}

fn low_product(
    gpu: &Gpu,
    group: &CardGroup,
    x: &CudaView<'_, bf16>,
    low: &mut CudaSlice<bf16>,
    n: usize,
) -> Result<()> {
    let Some(a) = &group.a else { return Ok(()) };
    let n_in = x.len() / n.max(1);
    let mut low = low.slice_mut(..n * group.low_width);
    gpu.product(&Matrix::of(gpu, x, n_in)?, &Matrix::of(gpu, a, n_in)?.t(), &mut low, Scale::WRITE)
}

fn finish_rows<'l>(group: &CardGroup, low: &'l CudaSlice<bf16>, n: usize) -> FinishRows<'l> {
    FinishRows { low: low.slice(..n * group.low_width), low_width: group.low_width }
}

/// Adds the outputs of a layer that is split by its inputs to `sum`: those of all ranks, and what stood there once.
fn added_by_all(
    parallel: &TensorParallel,
    gpu: &Gpu,
    group: &CardGroup,
    x: &CudaView<'_, bf16>,
    sum: &mut CudaViewMut<'_, f32>,
    places: (&mut CudaSlice<bf16>, &mut CudaSlice<bf16>),
    n: usize,
) -> Result<()> {
    if !parallel.shard().is_first() {
        gpu.stream().memset_zeros(sum).map_err(Error::wrap)?;
    }
    added(gpu, group, x, sum, places, n)?;
    gpu.all_reduce(parallel.ranks(), sum)
}

/// Adds the output of a group of one layer to `sum`. `low`, `between`: written over.
fn added(
    gpu: &Gpu,
    group: &CardGroup,
    x: &CudaView<'_, bf16>,
    sum: &mut CudaViewMut<'_, f32>,
    (low, between): (&mut CudaSlice<bf16>, &mut CudaSlice<bf16>),
    n: usize,
) -> Result<()> {
    let Some(member) = group.members.first() else { return Ok(()) };
    low_product(gpu, group, x, low, n)?;
    if !group.is_plain() {
        let mut y = between.slice_mut(..n * member.weight.dims().0);
        member.weight.multiply(gpu, &Matrix::of(gpu, x, member.weight.dims().1)?, &mut y, Scale::WRITE)?;
        return gpu.finish_added(sum, &y, &finish_rows(group, low, n), &group.table, n);
    }
    member.weight.multiply(gpu, &Matrix::of(gpu, x, member.weight.dims().1)?, sum, Scale::ADD)?;
    let Some(low_rank) = &member.low_rank else { return Ok(()) };
    let (low, rank) = (low.slice(..n * low_rank.rank), low_rank.rank);
    let scale = Scale { alpha: low_rank.scale, keep: 1.0 };
    gpu.product(&Matrix::of(gpu, &low, rank)?, &Matrix::of(gpu, &low_rank.b, rank)?.t(), sum, scale)
}
