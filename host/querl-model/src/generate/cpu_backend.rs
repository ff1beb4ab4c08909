//! Inference on the CPU: weights of the base and of adapters, and the backend that runs transformer layers with them. No graph, no
//! gradients. Rows of one pass may have different adapters: the base's products are formed for all of them together (multi-LoRA). LoRA A of
//! all linear layers with the same input is one product; buffers are reused.
//!
//! Source of multi-LoRA: Chen et al. 2023, "Punica"; Sheng et al. 2023, "S-LoRA".

use crate::decoder::{AdaptedLayer, AdaptedLinear};
use crate::kernels::simd::{exp_or_zero, vectorised};
use crate::kernels::{FrozenWeight, Int8Rows, LANES, Weight, with_floats};
use crate::transformer::{LayerBackend, LayerContext, MaybeBorrowed, ProjectionOut, QueryRows, Rows, TransformerLayer};
use crate::{Decoder, DecoderConfig, LoraAdapter, ModelError, Ranks};
use candle_core::{Error, Result, Tensor};
use querl_core::config::BaseDtype;
use rayon::prelude::*;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A copy of the base model's weights for decoding; later training does not change it.
pub(super) struct BaseWeights {
    pub(super) config: DecoderConfig,
    pub(super) context: LayerContext,
    pub(super) layers: Vec<TransformerLayer<CpuInference>>,
    pub(super) final_norm: Vec<f32>,
    head: FrozenWeight,
    embedding: FrozenWeight,
    /// Free buffers for logits: page faults of a new buffer would take longer than the softmax.
    logits: Mutex<Vec<Vec<f32>>>,
}

/// Weights of an adapter, prepared for decoding with its base model. Later training does not change them.
pub struct AdapterWeights {
    /// Changes of each group of linear layers, by [`LinearGroup::index`].
    groups: Vec<Option<GroupAdapter>>,
    head: Option<FrozenWeight>,
    embedding: Option<FrozenWeight>,
}

/// An adapter; `None` is the base model alone.
pub(super) type Adapter = Option<Arc<AdapterWeights>>;

/// True if both are the same object; equal copies do not count.
pub(super) fn is_same(a: &Adapter, b: &Adapter) -> bool {
    a.as_ref().map(Arc::as_ptr) == b.as_ref().map(Arc::as_ptr)
}

/// Consecutive rows of a batch that use the same adapter.
#[derive(Clone)]
pub(super) struct Segment {
    pub(super) adapter: Adapter,
    pub(super) n_rows: usize,
}

impl Segment {
    /// Appends rows to segments.
    pub(super) fn extend(segments: &mut Vec<Self>, adapter: &Adapter, n_rows: usize) {
        match segments.last_mut().filter(|last| is_same(&last.adapter, adapter)) {
            Some(last) => last.n_rows += n_rows,
            None => segments.push(Self { adapter: adapter.clone(), n_rows }),
        }
    }

    /// The adapter's own head.
    fn head(&self) -> Option<&FrozenWeight> {
        self.adapter.as_ref()?.head.as_ref()
    }

    /// The adapter's changes of a group of linear layers.
    fn group(&self, index: usize) -> Option<&GroupAdapter> {
        self.adapter.as_ref()?.groups[index].as_ref()
    }
}

impl BaseWeights {
    /// `int8_activations`: see [`super::EngineSettings`].
    pub(super) fn new(decoder: &Decoder, int8_activations: bool) -> Result<Self> {
        let layers = decoder.adapted_layers(None).enumerate();
        let layer =
            |(index, layer): (usize, Result<AdaptedLayer<'_>>)| inference_layer(index, &layer?, int8_activations);
        let layers = layers.map(layer).collect::<Result<Vec<_>>>()?;
        let embedding = frozen(&decoder.adapted_embedding(None)?)?;
        let head = match decoder.adapted_head(None)? {
            Weight::Trained(_) if decoder.config().tie_word_embeddings => embedding.clone(),
            head => frozen(&head)?,
        };
        // The head of a checkpoint is never int8, so look at a layer.
        let is_int8 = layers.first().is_some_and(|layer| layer.down.is_int8);
        let head = if is_int8 { head.to_dtype(BaseDtype::Int8)? } else { head };
        Ok(Self {
            config: decoder.local_config().clone(),
            context: decoder.context(),
            layers,
            final_norm: floats(decoder.final_norm())?,
            head,
            embedding,
            logits: Mutex::default(),
        })
    }

    pub(super) fn weights_per_layer(&self) -> usize {
        self.layers.first().map_or(0, |layer| {
            layer.qkv.n_weights() + layer.o.n_weights() + layer.gate_up.n_weights() + layer.down.n_weights()
        })
    }

    /// Takes a buffer for `n` logits from the pool. Its values are undefined.
    pub(super) fn take_logits(&self, n: usize) -> Vec<f32> {
        let mut logits = lock(&self.logits).pop().unwrap_or_default();
        logits.resize(n, 0.0);
        logits
    }

    pub(super) fn give_back(&self, logits: Vec<f32>) {
        lock(&self.logits).push(logits);
    }

    pub(super) fn embed(&self, ids: &[u32], segments: &[Segment]) -> Result<Vec<f32>> {
        let (mut embedded, mut rest) = (Vec::with_capacity(ids.len() * self.config.hidden_size), ids);
        for Segment { adapter, n_rows } in segments {
            let (ids, others) = rest.split_at(*n_rows);
            rest = others;
            let embedding = adapter.as_ref().and_then(|adapter| adapter.embedding.as_ref()).unwrap_or(&self.embedding);
            with_floats(&embedding.rows(ids)?, |rows| {
                embedded.extend_from_slice(rows);
                Ok(())
            })?;
        }
        Ok(embedded)
    }

    /// Logits `(N, V)` of N rows of hidden states.
    pub(super) fn logits(&self, hidden: &[f32], segments: &[Segment], logits: &mut [f32]) -> Result<()> {
        let (mut hidden, mut logits) = (hidden, logits);
        for run in segments.chunk_by(|a, b| a.head().is_none() && b.head().is_none()) {
            let n_rows = run.iter().map(|segment| segment.n_rows).sum::<usize>();
            let (own, rest) = hidden.split_at(n_rows * self.config.hidden_size);
            hidden = rest;
            let own_logits = logits.split_off_mut(..n_rows * self.config.vocab_size).unwrap_or_default();
            let head = run[0].head().unwrap_or(&self.head);
            match head.dtype() == BaseDtype::Int8 {
                true => head.forward_int8(&Int8Rows::quantize(own, head.dims().1), own_logits, 0.0)?,
                false => head.forward(own, own_logits, 0.0)?,
            }
        }
        Ok(())
    }
}

impl AdapterWeights {
    /// Prepares an adapter for decoding with its base model, both on the CPU.
    ///
    /// # Errors
    /// The adapter does not fit the decoder, or holds values that are not finite.
    pub fn new(decoder: &Decoder, adapter: &LoraAdapter) -> std::result::Result<Self, ModelError> {
        let mut groups = Vec::new();
        for layer in decoder.adapted_layers(Some(adapter)) {
            let layer = layer?;
            let linears: [&[AdaptedLinear<'_>]; N_GROUPS] = [&layer.qkv, &layer.o, &layer.gate_up, &layer.down];
            groups.extend(linears.into_iter().map(GroupAdapter::new).collect::<Result<Vec<_>>>()?);
        }
        let changed = |weight: Weight| match weight {
            Weight::Trained(_) => frozen(&weight).map(Some),
            _ => Ok(None),
        };
        let head = changed(decoder.adapted_head(Some(adapter))?)?;
        Ok(Self { groups, head, embedding: changed(decoder.adapted_embedding(Some(adapter))?)? })
    }
}

/// Groups of linear layers in a transformer layer: qkv, o, gate_up, down.
const N_GROUPS: usize = 4;

fn inference_layer(
    index: usize,
    layer: &AdaptedLayer<'_>,
    int8_activations: bool,
) -> Result<TransformerLayer<CpuInference>> {
    let qk_norm = match layer.qk_norm {
        Some([q, k]) => Some([floats(q)?, floats(k)?]),
        None => None,
    };
    let group = |number, linears| LinearGroup::new(index * N_GROUPS + number, linears, int8_activations);
    Ok(TransformerLayer {
        input_norm: floats(layer.input_norm)?,
        qkv: group(0, &layer.qkv)?,
        qk_norm,
        o: group(1, &layer.o)?,
        post_attention_norm: floats(layer.post_attention_norm)?,
        gate_up: group(2, &layer.gate_up)?,
        down: group(3, &layer.down)?,
    })
}

/// Linear layers of the base with the same input.
pub(super) struct LinearGroup {
    /// Index in [`AdapterWeights::groups`].
    index: usize,
    members: Vec<BaseLinear>,
    /// Inputs are rounded to int8 for integer products with int8 weights.
    is_int8: bool,
}

struct BaseLinear {
    weight: FrozenWeight,
    bias: Option<Vec<f32>>,
}

/// Inputs `(N, in)` of the base's linear layers.
enum Inputs<'x> {
    F32(&'x [f32]),
    Int8(Int8Rows),
}

/// An adapter's changes of a group. The A matrices of all members are concatenated, so that they take one product.
struct GroupAdapter {
    a: FrozenWeight, // (sum of ranks, in)
    /// `None` for a member without LoRA.
    members: Vec<Option<MemberAdapter>>,
}

struct MemberAdapter {
    b: FrozenWeight, // (out, rank), times the adapter's scale
    first: usize,    // its first column in the group's product with A
    /// DoRA's factor on each output, applied before the bias.
    factor: Option<Vec<f32>>,
}

/// Whether a product overwrites its output or is added to it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Output {
    Replace,
    Add,
}

impl LinearGroup {
    fn new(index: usize, linears: &[AdaptedLinear<'_>], int8_activations: bool) -> Result<Self> {
        let member = |linear: &AdaptedLinear<'_>| {
            Ok(BaseLinear { weight: frozen(linear.weight)?, bias: linear.bias.map(floats).transpose()? })
        };
        let members = linears.iter().map(member).collect::<Result<Vec<_>>>()?;
        let is_int8 = int8_activations && members.iter().all(|member| member.weight.dtype() == BaseDtype::Int8);
        Ok(Self { index, members, is_int8 })
    }

    /// Converts the inputs for the base's products.
    fn inputs<'x>(&self, x: &'x [f32]) -> Inputs<'x> {
        if self.is_int8 { Inputs::Int8(Int8Rows::quantize(x, self.n_in())) } else { Inputs::F32(x) }
    }

    fn n_weights(&self) -> usize {
        self.members.iter().map(|member| member.weight.dims()).map(|(n_out, n_in)| n_out * n_in).sum()
    }

    fn n_in(&self) -> usize {
        self.members.first().map_or(0, |member| member.weight.dims().1)
    }

    /// Writes or adds the outputs `(N, out)` of each member for `x` `(N, in)`. The base's products run over all rows together, the LoRA
    /// products over the rows of each adapter.
    fn forward(&self, segments: &[Segment], x: &[f32], mut outputs: Vec<&mut [f32]>, output: Output) -> Result<()> {
        let has_factors = |segment: &Segment| segment.group(self.index).is_some_and(GroupAdapter::has_factors);
        let mut x = x;
        for run in segments.chunk_by(|a, b| !has_factors(a) && !has_factors(b)) {
            let n_rows: usize = run.iter().map(|segment| segment.n_rows).sum();
            let own = x.split_off(..n_rows * self.n_in()).unwrap_or_default();
            let outputs = self.split_rows(&mut outputs, n_rows);
            match run[0].group(self.index).filter(|adapter| adapter.has_factors()) {
                Some(adapter) => self.forward_dora(adapter, own, outputs, output)?,
                None => self.forward_lora(run, own, outputs, output)?,
            }
        }
        Ok(())
    }

    /// Splits off the next rows of each output.
    fn split_rows<'y>(&self, outputs: &mut [&'y mut [f32]], n_rows: usize) -> Vec<&'y mut [f32]> {
        let n_out = self.members.iter().map(|member| member.weight.dims().0);
        let rows = outputs.iter_mut().zip(n_out);
        rows.map(|(y, n_out)| y.split_off_mut(..n_rows * n_out).unwrap_or_default()).collect()
    }

    fn forward_lora(
        &self,
        segments: &[Segment],
        x: &[f32],
        mut outputs: Vec<&mut [f32]>,
        output: Output,
    ) -> Result<()> {
        let inputs = self.inputs(x);
        for (member, y) in self.members.iter().zip(&mut outputs) {
            member.forward(&inputs, y, output)?;
        }
        let (mut tasks, mut x) = (Vec::with_capacity(segments.len()), x);
        for segment in segments {
            let own = x.split_off(..segment.n_rows * self.n_in()).unwrap_or_default();
            let rows = self.split_rows(&mut outputs, segment.n_rows);
            if let Some(adapter) = segment.group(self.index) {
                tasks.push((adapter, segment.n_rows, own, rows));
            }
        }
        let add = |(adapter, n_rows, x, outputs): (&GroupAdapter, usize, &[f32], Vec<&mut [f32]>)| {
            let lora_a_out = adapter.lora_a_out(x, n_rows)?;
            let mut members = adapter.members.iter().zip(outputs);
            members
                .try_for_each(|(member, y)| member.as_ref().map_or(Ok(()), |member| member.add(&lora_a_out, n_rows, y)))
        };
        match tasks.len() {
            0 | 1 => tasks.into_iter().try_for_each(add),
            _ => tasks.into_par_iter().try_for_each(add),
        }
    }

    fn forward_dora(&self, adapter: &GroupAdapter, x: &[f32], outputs: Vec<&mut [f32]>, output: Output) -> Result<()> {
        let n_rows = x.len() / self.n_in();
        let (lora_a_out, inputs) = (adapter.lora_a_out(x, n_rows)?, self.inputs(x));
        for ((base, member), y) in self.members.iter().zip(&adapter.members).zip(outputs) {
            let Some(MemberAdapter { factor: Some(factor), .. }) = member else {
                base.forward(&inputs, y, output)?;
                if let Some(member) = member {
                    member.add(&lora_a_out, n_rows, y)?;
                }
                continue;
            };
            let mut changed = vec![0f32; y.len()];
            base.product(&inputs, &mut changed, 0.0)?;
            if let Some(member) = member {
                member.add(&lora_a_out, n_rows, &mut changed)?;
            }
            if output == Output::Replace {
                y.fill(0.0);
            }
            for (y, changed) in y.chunks_exact_mut(factor.len()).zip(changed.chunks_exact(factor.len())) {
                for (i, (y, changed)) in y.iter_mut().zip(changed).enumerate() {
                    *y += changed * factor[i] + base.bias.as_ref().map_or(0.0, |bias| bias[i]);
                }
            }
        }
        Ok(())
    }
}

impl BaseLinear {
    /// Writes or adds the outputs `(N, out)` for `x` `(N, in)`.
    fn forward(&self, x: &Inputs<'_>, y: &mut [f32], output: Output) -> Result<()> {
        let mut keep = if output == Output::Add { 1.0 } else { 0.0 };
        if let Some(bias) = &self.bias {
            y.chunks_exact_mut(bias.len()).for_each(|row| match output {
                Output::Add => row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias),
                Output::Replace => row.copy_from_slice(bias),
            });
            keep = 1.0;
        }
        self.product(x, y, keep)
    }

    fn product(&self, x: &Inputs<'_>, y: &mut [f32], keep: f32) -> Result<()> {
        match x {
            Inputs::F32(x) => self.weight.forward(x, y, keep),
            Inputs::Int8(x) => self.weight.forward_int8(x, y, keep),
        }
    }
}

impl GroupAdapter {
    fn new(linears: &[AdaptedLinear<'_>]) -> Result<Option<Self>> {
        let pairs: Vec<Tensor> = linears.iter().filter_map(|linear| Some(linear.pair?.a.detach())).collect();
        if pairs.is_empty() {
            return Ok(None);
        }
        let a = FrozenWeight::pack(&Tensor::cat(&pairs, 0)?, BaseDtype::F32)?;
        let mut first = 0;
        let member = |linear: &AdaptedLinear<'_>| {
            let Some(pair) = linear.pair else { return Ok(None) };
            let b = FrozenWeight::pack(&(pair.b.detach() * f64::from(pair.scale))?, BaseDtype::F32)?;
            let member = MemberAdapter { b, first, factor: linear.factor.as_ref().map(floats).transpose()? };
            first += pair.a.dim(0)?;
            Ok(Some(member))
        };
        Ok(Some(Self { a, members: linears.iter().map(member).collect::<Result<_>>()? }))
    }

    fn has_factors(&self) -> bool {
        self.members.iter().flatten().any(|member| member.factor.is_some())
    }

    /// LoRA A's output of all members, `(N, sum of ranks)`.
    fn lora_a_out(&self, x: &[f32], n_rows: usize) -> Result<Vec<f32>> {
        let mut lora_a_out = vec![0f32; n_rows * self.a.dims().0];
        self.a.forward(x, &mut lora_a_out, 0.0)?;
        Ok(lora_a_out)
    }
}

impl MemberAdapter {
    fn add(&self, lora_a_out: &[f32], n_rows: usize, y: &mut [f32]) -> Result<()> {
        let (rank, stride) = (self.b.dims().1, lora_a_out.len() / n_rows);
        if stride == rank {
            return self.b.forward(lora_a_out, y, 1.0);
        }
        let columns = self.first..self.first + rank;
        let own: Vec<f32> = lora_a_out.chunks_exact(stride).flat_map(|row| &row[columns.clone()]).copied().collect();
        self.b.forward(&own, y, 1.0)
    }
}

/// CPU backend of one forward pass. Its layers reuse the same buffers.
pub(super) struct CpuInference {
    free: Arc<Mutex<Vec<Vec<f32>>>>,
    /// Segments of all rows, and of the query rows.
    segments: [Vec<Segment>; 2],
}

/// A buffer that returns to its backend when it is dropped.
pub(super) struct PooledBuffer {
    values: Vec<f32>,
    len: usize,
    pool: Arc<Mutex<Vec<Vec<f32>>>>,
}

impl CpuInference {
    /// `all`: the adapters of all rows; `queries`: those of the query rows of the last layer.
    pub(super) fn new(all: Vec<Segment>, queries: Vec<Segment>) -> Self {
        Self { free: Arc::default(), segments: [all, queries] }
    }

    /// The segments of all rows or of the query rows, selected by their number: the numbers are equal only if the rows are the same.
    fn segments(&self, n_rows: usize) -> &[Segment] {
        let [all, queries] = &self.segments;
        if all.iter().map(|segment| segment.n_rows).sum::<usize>() == n_rows { all } else { queries }
    }

    /// A buffer of `len` undefined values.
    pub(super) fn buffer(&self, len: usize) -> PooledBuffer {
        let mut values = lock(&self.free).pop().unwrap_or_default();
        if values.len() < len {
            values.resize(len, 0.0);
        }
        PooledBuffer { values, len, pool: self.free.clone() }
    }

    fn copy(&self, values: &[f32]) -> PooledBuffer {
        let mut copy = self.buffer(values.len());
        copy.copy_from_slice(values);
        copy
    }

    /// Selects the query rows; all rows if `query_rows` is `None`.
    fn pick(&self, x: &[f32], width: usize, query_rows: &QueryRows) -> PooledBuffer {
        let mut picked = self.buffer(query_rows.indices.len() * width);
        for (picked, &row) in picked.chunks_exact_mut(width).zip(query_rows.indices.iter()) {
            picked.copy_from_slice(&x[row as usize * width..(row as usize + 1) * width]);
        }
        picked
    }
}

impl Deref for PooledBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values[..self.len]
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.len]
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        lock(&self.pool).push(std::mem::take(&mut self.values));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LayerBackend for CpuInference {
    type Residual = PooledBuffer;
    type ResidualSlice = [f32];
    type Activations = PooledBuffer;
    type ActivationSlice = [f32];
    type Norm = Vec<f32>;
    type Linears<const N: usize> = LinearGroup;
    type LoraAOut = ();

    fn rms_norm(&self, x: &[f32], weight: &Vec<f32>, eps: f32) -> Result<PooledBuffer> {
        let mut y = self.buffer(x.len());
        rms_norm(x, weight, eps, &mut y);
        Ok(y)
    }

    fn project<const N: usize>(&self, linears: &LinearGroup, x: &[f32]) -> Result<[ProjectionOut<Self>; N]> {
        let n_rows = x.len() / linears.n_in();
        let buffer = |member: &BaseLinear| self.buffer(n_rows * member.weight.dims().0);
        let mut outputs: Vec<PooledBuffer> = linears.members.iter().map(buffer).collect();
        linears.forward(self.segments(n_rows), x, outputs.iter_mut().map(|y| &mut **y).collect(), Output::Replace)?;
        let outputs: Vec<ProjectionOut<Self>> = outputs.into_iter().map(|y| (y, ())).collect();
        outputs.try_into().map_err(|_| Error::Msg(format!("expected {N} linear layers to give as many outputs")))
    }

    fn project_qkv(
        &self,
        qkv: &LinearGroup,
        x: &[f32],
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<[ProjectionOut<Self>; 3]> {
        let [(q, ()), k, v] = self.project(qkv, x)?;
        let Some(query_rows) = query_rows else { return Ok([(q, ()), k, v]) };
        let q_width = q.len() * width / x.len();
        Ok([(self.pick(&q, q_width, query_rows), ()), k, v])
    }

    fn apply_rope(
        &self,
        x: &[f32],
        norm: Option<&Vec<f32>>,
        context: &LayerContext,
        rows: &Rows,
    ) -> Result<PooledBuffer> {
        let mut y = match norm {
            Some(norm) => self.rms_norm(x, norm, context.eps)?,
            None => self.copy(x),
        };
        let width = y.len() / rows.positions.len();
        for (heads, &position) in y.chunks_exact_mut(width).zip(rows.positions.iter()) {
            let (cos, sin) = context.rope.angles(position as usize);
            rotate(heads, cos, sin);
        }
        Ok(y)
    }

    fn query_residual<'a>(
        &self,
        x: &'a [f32],
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<MaybeBorrowed<'a, PooledBuffer>> {
        match query_rows {
            None => Ok(MaybeBorrowed::Borrowed(x)),
            Some(query_rows) => Ok(MaybeBorrowed::Owned(self.pick(x, width, query_rows))),
        }
    }

    fn add_projection(&self, linear: &LinearGroup, x: &[f32], residual: &[f32]) -> Result<(PooledBuffer, ())> {
        let mut y = self.copy(residual);
        linear.forward(self.segments(x.len() / linear.n_in()), x, vec![&mut *y], Output::Add)?;
        Ok((y, ()))
    }

    fn swiglu(&self, gate: &[f32], up: &[f32]) -> Result<PooledBuffer> {
        let mut y = self.buffer(gate.len());
        swiglu(gate, up, &mut y);
        Ok(y)
    }

    fn zeros_like(&self, residual: &[f32]) -> Result<PooledBuffer> {
        let mut zeros = self.buffer(residual.len());
        zeros.fill(0.0);
        Ok(zeros)
    }

    fn all_reduce(&self, ranks: &Ranks, sum: &mut PooledBuffer) -> Result<()> {
        ranks.sum(&mut *sum).map_err(Error::wrap)
    }
}

fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    with_floats(tensor, |values| Ok(values.to_vec()))
}

/// The weight itself if it is frozen; a copy of the current values if it is trained.
fn frozen(weight: &Weight) -> Result<FrozenWeight> {
    match weight {
        Weight::Frozen(weight) => Ok(weight.clone()),
        Weight::Trained(weight) => FrozenWeight::pack(&weight.detach(), BaseDtype::F32),
        #[allow(unreachable_patterns)] // weights of other devices
        _ => candle_core::bail!("a weight of another device in a decoder on the CPU"),
    }
}

/// Values that one parallel task works on.
const VALUES_PER_TASK: usize = 1 << 15;

/// `x / sqrt(mean(x^2) + eps) * weight` for each row of `weight.len()` values.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let per_task = VALUES_PER_TASK.next_multiple_of(weight.len().max(1));
    out.par_chunks_mut(per_task).zip(x.par_chunks(per_task)).for_each(|(out, x)| norm_rows(x, weight, eps, out));
}

fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let inputs = gate.par_chunks(VALUES_PER_TASK).zip(up.par_chunks(VALUES_PER_TASK));
    out.par_chunks_mut(VALUES_PER_TASK).zip(inputs).for_each(|(out, (gate, up))| gated(gate, up, out));
}

vectorised! {
    fn norm_rows<A>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let size = weight.len();
        for (out, x) in out.chunks_exact_mut(size).zip(x.chunks_exact(size)) {
            let mut lanes = [0f32; LANES];
            let (chunks, rest) = x.as_chunks::<LANES>();
            for chunk in chunks {
                for lane in 0..LANES {
                    lanes[lane] = A::multiply_add(chunk[lane], chunk[lane], lanes[lane]);
                }
            }
            let sum = lanes.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>();
            let inverse = 1.0 / (sum / size as f32 + eps).sqrt();
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = x * inverse * weight;
            }
        }
    }
}

vectorised! {
    fn gated<A>(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp_or_zero::<A>(-gate)) * up;
        }
    }
}

vectorised! {
    /// Rotates each head by the angles of its row's position; the first half of a head pairs with the second.
    ///
    /// Source: Su et al. 2021, "RoFormer"; the half-split layout of transformers' `rotate_half`.
    fn rotate<A>(heads: &mut [f32], cos: &[f32], sin: &[f32]) {
        let half = cos.len();
        let sin = &sin[..half];
        for head in heads.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for i in 0..half {
                let (a, b) = (first[i], second[i]);
                first[i] = a * cos[i] - b * sin[i];
                second[i] = b * cos[i] + a * sin[i];
            }
        }
    }
}
