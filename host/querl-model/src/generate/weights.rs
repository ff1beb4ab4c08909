//! What decoding computes with: the base's weights as they stand in memory, and an adapter's values as they were when the
//! policy was set.

use crate::decoder::{LayerParts, LinearParts};
use crate::kernels::{FrozenWeight, RopeTable, Weight, with_floats};
use crate::sharding::TensorParallel;
use crate::{Decoder, DecoderConfig, LoraAdapter, ModelError};
use candle_core::{Result, Tensor};
use querl_core::config::BaseDtype;
use std::sync::{Mutex, PoisonError};

/// A policy ready to decode with. It does not follow later training.
pub(super) struct DecodeWeights {
    /// Of what stands here.
    pub(super) config: DecoderConfig,
    pub(super) parallel: TensorParallel,
    pub(super) layers: Vec<DecodeLayer>,
    pub(super) final_norm: Vec<f32>,
    pub(super) rope: RopeTable,
    pub(super) head: FrozenWeight,
    embedding: FrozenWeight,
    /// Memory for logits that no step uses now: fresh pages for it in every step cost more than the softmax.
    logits: Mutex<Vec<Vec<f32>>>,
}

/// One layer.
pub(super) struct DecodeLayer {
    pub(super) input_norm: Vec<f32>,
    pub(super) post_attention_norm: Vec<f32>,
    pub(super) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) qkv: LinearGroup,
    pub(super) o: LinearGroup,
    pub(super) gate_up: LinearGroup,
    pub(super) down: LinearGroup,
}

/// Linear layers with one input: their low-rank matrices A are one product.
pub(super) struct LinearGroup {
    a: Option<FrozenWeight>, // (sum of ranks, in)
    members: Vec<DecodeLinear>,
}

struct DecodeLinear {
    weight: FrozenWeight,
    bias: Option<Vec<f32>>,
    low_rank: Option<LowRank>,
    /// DoRA's, on each output before the bias.
    factor: Option<Vec<f32>>,
}

struct LowRank {
    b: FrozenWeight, // (out, rank), times the adapter's scale
    first: usize,    // its first column in the group's product with A
}

impl DecodeWeights {
    pub(super) fn new(decoder: &Decoder, adapter: Option<&LoraAdapter>) -> Result<Self> {
        let layers = decoder.layer_parts(adapter).map(|parts| DecodeLayer::new(parts?)).collect::<Result<_>>()?;
        let embedding = frozen(&decoder.adapted_embedding(adapter)?)?;
        let is_tied = decoder.config().tie_word_embeddings;
        let head = match decoder.adapted_head(adapter)? {
            Weight::Trained(_) if is_tied && adapter.is_none() => embedding.clone(),
            head => frozen(&head)?,
        };
        Ok(Self {
            config: decoder.local_config().clone(),
            parallel: decoder.parallel().clone(),
            layers,
            final_norm: floats(decoder.final_norm())?,
            rope: decoder.rope().clone(),
            head,
            embedding,
            logits: Mutex::default(),
        })
    }

    /// Weights of one layer's products.
    pub(super) fn weights_per_layer(&self) -> usize {
        let sizes = self.layers.first().map(|layer| {
            [&layer.qkv, &layer.o, &layer.gate_up, &layer.down].map(|group| {
                group.members.iter().map(|member| member.weight.dims()).map(|(n_out, n_in)| n_out * n_in).sum::<usize>()
            })
        });
        sizes.map_or(0, |sizes| sizes.iter().sum())
    }

    /// `n` values of any kind, to be given back.
    pub(super) fn take_logits(&self, n: usize) -> Vec<f32> {
        let mut logits = self.logits.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        logits.resize(n, 0.0);
        logits
    }

    /// Adds the outputs of a layer that is split by its inputs to `sum`: those of all ranks, and what stood there once.
    pub(super) fn add(
        &self,
        group: &LinearGroup,
        x: &[f32],
        sum: &mut Vec<f32>,
    ) -> std::result::Result<(), ModelError> {
        if !self.parallel.shard().is_first() {
            sum.fill(0.0);
        }
        group.forward(x, &mut [&mut *sum], Into::Sum)?;
        Ok(self.parallel.ranks().sum(sum)?)
    }

    pub(super) fn give_back(&self, logits: Vec<f32>) {
        self.logits.lock().unwrap_or_else(PoisonError::into_inner).push(logits);
    }

    /// Rows of the embedding, `(N, H)`.
    pub(super) fn embed(&self, ids: &[u32]) -> std::result::Result<Vec<f32>, ModelError> {
        Ok(floats(&self.embedding.rows(ids)?)?)
    }
}

impl DecodeLayer {
    fn new(parts: LayerParts<'_>) -> Result<Self> {
        let qk_norm = match parts.qk_norm {
            Some((q, k)) => Some((floats(q)?, floats(k)?)),
            None => None,
        };
        Ok(Self {
            input_norm: floats(parts.input_norm)?,
            post_attention_norm: floats(parts.post_attention_norm)?,
            qk_norm,
            qkv: LinearGroup::new(&parts.qkv)?,
            o: LinearGroup::new(&[parts.o])?,
            gate_up: LinearGroup::new(&parts.gate_up)?,
            down: LinearGroup::new(&[parts.down])?,
        })
    }
}

impl LinearGroup {
    fn new(parts: &[LinearParts<'_>]) -> Result<Self> {
        let pairs: Vec<Tensor> = parts.iter().filter_map(|linear| Some(linear.pair?.a.detach())).collect();
        let a =
            if pairs.is_empty() { None } else { Some(FrozenWeight::pack(&Tensor::cat(&pairs, 0)?, BaseDtype::F32)?) };
        let mut first = 0;
        let members = parts.iter().map(|linear| DecodeLinear::new(linear, &mut first)).collect::<Result<_>>()?;
        Ok(Self { a, members })
    }

    /// Outputs of each member in turn for rows `x` `(N, in)`. With `Into::Sum`, they are added to what stands there.
    pub(super) fn forward(&self, x: &[f32], outputs: &mut [&mut Vec<f32>], into: Into) -> Result<()> {
        let Some((_, n_in)) = self.members.first().map(|member| member.weight.dims()) else { return Ok(()) };
        let n_rows = x.len() / n_in;
        let down = match &self.a {
            Some(a) => {
                let mut down = vec![0f32; n_rows * a.dims().0];
                a.forward(x, &mut down, 0.0)?;
                down
            }
            None => Vec::new(),
        };
        for (member, y) in self.members.iter().zip(outputs) {
            member.forward(x, &down, n_rows, y, into)?;
        }
        Ok(())
    }
}

/// What becomes of what stands in an output.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Into {
    /// It is written over.
    Fresh,
    /// The result is added to it.
    Sum,
}

impl DecodeLinear {
    fn new(parts: &LinearParts<'_>, first: &mut usize) -> Result<Self> {
        let low_rank = match parts.pair {
            Some(pair) => {
                let b = FrozenWeight::pack(&(pair.b.detach() * f64::from(pair.scale))?, BaseDtype::F32)?;
                let low_rank = LowRank { b, first: *first };
                *first += pair.a.dim(0)?;
                Some(low_rank)
            }
            None => None,
        };
        let bias = match parts.bias {
            Some(bias) => Some(floats(bias)?),
            None => None,
        };
        let factor = match &parts.factor {
            Some(factor) => Some(floats(factor)?),
            None => None,
        };
        Ok(Self { weight: frozen(parts.weight)?, bias, low_rank, factor })
    }

    fn forward(&self, x: &[f32], down: &[f32], n_rows: usize, y: &mut Vec<f32>, into: Into) -> Result<()> {
        let n_out = self.weight.dims().0;
        let Some(factor) = &self.factor else {
            y.resize(n_rows * n_out, 0.0);
            let mut keep = if into == Into::Sum { 1.0 } else { 0.0 };
            if let Some(bias) = &self.bias {
                y.chunks_exact_mut(n_out).for_each(|row| match into {
                    Into::Sum => row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias),
                    Into::Fresh => row.copy_from_slice(bias),
                });
                keep = 1.0;
            }
            self.weight.forward(x, y, keep)?;
            return self.add_low_rank(down, n_rows, y);
        };
        let mut changed = vec![0f32; n_rows * n_out];
        self.weight.forward(x, &mut changed, 0.0)?;
        self.add_low_rank(down, n_rows, &mut changed)?;
        if into == Into::Fresh {
            y.clear();
            y.resize(n_rows * n_out, 0.0);
        }
        for (y, changed) in y.chunks_exact_mut(n_out).zip(changed.chunks_exact(n_out)) {
            for (i, (y, changed)) in y.iter_mut().zip(changed).enumerate() {
                *y += changed * factor[i] + self.bias.as_ref().map_or(0.0, |bias| bias[i]);
            }
        }
        Ok(())
    }

    fn add_low_rank(&self, down: &[f32], n_rows: usize, y: &mut [f32]) -> Result<()> {
        let Some(LowRank { b, first }) = &self.low_rank else { return Ok(()) };
        let (rank, stride) = (b.dims().1, down.len() / n_rows);
        if stride == rank {
            return b.forward(down, y, 1.0);
        }
        let own: Vec<f32> = down.chunks_exact(stride).flat_map(|row| &row[*first..first + rank]).copied().collect();
        b.forward(&own, y, 1.0)
    }
}

fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    with_floats(tensor, |values| Ok(values.to_vec()))
}

/// The weight itself where it is frozen; a copy of the values as they are now where it is trained.
fn frozen(weight: &Weight) -> Result<FrozenWeight> {
    match weight {
        Weight::Frozen(weight) => Ok(weight.clone()),
        Weight::Trained(weight) => FrozenWeight::pack(&weight.detach(), BaseDtype::F32),
        #[cfg(feature = "cuda")]
        Weight::OnCard(_) => candle_core::bail!("a weight of the card in a decoder of the cpu"),
    }
}
