//! What a card decodes with: the base's weights as they stand there, and an adapter's matrices rounded to bf16 once for each policy.

use crate::device::{
    Change, CudaSlice, CudaViewMut, DecoderRope, DeviceRope, DeviceWeight, Gpu, Loan, Member, gpu_weight, whole,
};
use candle_core::{Error, Result, Tensor, bail};
use half::bf16;
use querl_model::backend::{AdaptedLayer, AdaptedLinear};
use querl_model::kernels::Weight;
use querl_model::{Decoder, LoraAdapter, ModelError};
use std::cell::RefCell;
use std::sync::Arc;

/// Reads tensors, which are made on one stream, for work on another.
struct Reader<'g> {
    gpu: &'g Gpu,
    /// On whose stream tensors are made.
    of_tensors: &'g Gpu,
    /// Copies that were made on the way, which are given back when they were read.
    copies: RefCell<Vec<Tensor>>,
    /// One number, not 0 where a value of the policy's own is not finite.
    mark: RefCell<CudaSlice<u32>>,
}

impl<'g> Reader<'g> {
    /// For tensors that are asked for already.
    fn new(gpu: &'g Gpu, of_tensors: &'g Gpu) -> Result<Self> {
        gpu.wait_for(of_tensors)?;
        Ok(Self { gpu, of_tensors, copies: RefCell::default(), mark: RefCell::new(gpu.zeros(1)?) })
    }

    /// Calls `read` with the values of a tensor.
    fn read<R>(&self, tensor: &Tensor, read: impl FnOnce(&CudaSlice<f32>) -> Result<R>) -> Result<R> {
        let values = whole(tensor)?;
        if values.id() != tensor.id() {
            self.gpu.wait_for(self.of_tensors)?;
            self.copies.borrow_mut().push(values.clone());
        }
        read(&*Loan::of(&values)?)
    }

    /// The same with values that training has changed, of which [`Reader::finish`] says whether they are finite.
    fn read_trained<R>(&self, tensor: &Tensor, read: impl FnOnce(&CudaSlice<f32>) -> Result<R>) -> Result<R> {
        self.read(tensor, |values| {
            self.gpu.mark_not_finite(values, &mut *self.mark.borrow_mut())?;
            read(values)
        })
    }

    /// A copy of one's own, f32.
    fn floats(&self, tensor: &Tensor) -> Result<CudaSlice<f32>> {
        self.read(tensor, |values| self.gpu.copy(values))
    }

    fn round_into(&self, tensor: &Tensor, to: &mut CudaViewMut<'_, bf16>) -> Result<()> {
        self.read_trained(tensor, |values| self.gpu.to_bf16_into(values, to))
    }

    /// The weight itself where it is frozen; a copy of the values as they are now, rounded, where it is trained.
    fn weight(&self, weight: &Weight) -> Result<DeviceWeight> {
        match weight {
            Weight::Accelerator(weight) => Ok(gpu_weight(&**weight)?.clone()),
            Weight::Trained(tensor) => {
                let (n_out, n_in) = tensor.dims2()?;
                DeviceWeight::new(self.read_trained(tensor, |values| self.gpu.to_bf16(values))?, n_out, n_in)
            }
            Weight::Frozen(_) => bail!("a weight of the cpu in a decoder on a card"),
        }
    }

    /// What was read may be written to, or given back, behind this.
    fn finish(self) -> Result<()> {
        self.of_tensors.wait_for(self.gpu)?;
        // Behind such values every score is NaN or none: that is said here, as on the CPU, and not by what is drawn.
        if self.gpu.download(&*self.mark.borrow())? != [0] {
            bail!("a weight of the policy holds a value that is not finite as bf16");
        }
        Ok(())
    }
}

/// A policy on a card. It does not follow later training.
pub(super) struct CardWeights {
    pub(super) layers: Vec<CardLayer>,
    pub(super) final_norm: CudaSlice<f32>,
    pub(super) rope: Arc<DeviceRope>,
    pub(super) head: DeviceWeight,
    pub(super) embedding: DeviceWeight,
    /// Whether anything but matrices of adapters is the policy's own, which are written over for the next one.
    is_fixed: bool,
}

pub(super) struct CardLayer {
    pub(super) input_norm: CudaSlice<f32>,
    pub(super) post_attention_norm: CudaSlice<f32>,
    pub(super) qk_norm: Option<[CudaSlice<f32>; 2]>,
    pub(super) qkv: CardGroup,
    pub(super) o: CardGroup,
    pub(super) gate_up: CardGroup,
    pub(super) down: CardGroup,
}

/// Linear layers with one input: their low-rank matrices A are one product.
pub(super) struct CardGroup {
    /// `(sum of ranks, in)`.
    pub(super) a: Option<CudaSlice<bf16>>,
    pub(super) low_width: usize,
    pub(super) members: Vec<CardLinear>,
    /// Of each member what is made of its product's outputs.
    pub(super) table: CudaSlice<Member>,
    of_table: Vec<Member>,
}

pub(super) struct CardLinear {
    pub(super) weight: DeviceWeight,
    pub(super) low_rank: Option<CardLowRank>,
    bias: Option<CudaSlice<f32>>,
    /// DoRA's, on each output before the bias.
    factor: Option<CudaSlice<f32>>,
}

/// B of an adapter, `(out, rank)`.
pub(super) struct CardLowRank {
    pub(super) b: CudaSlice<bf16>,
    pub(super) rank: usize,
    pub(super) scale: f32,
    first: usize,
}

impl CardWeights {
    /// `gpu`: on whose stream values are rounded; `of_tensors`: on whose they are made.
    pub(super) fn new(
        gpu: &Gpu,
        of_tensors: &Gpu,
        decoder: &Decoder,
        adapter: Option<&LoraAdapter>,
    ) -> std::result::Result<Self, ModelError> {
        let parts = decoder.adapted_layers(adapter).collect::<Result<Vec<_>>>()?;
        let (embedding, head) = (decoder.adapted_embedding(adapter)?, decoder.adapted_head(adapter)?);
        let is_fixed = [&embedding, &head].into_iter().all(is_frozen)
            && parts.iter().flat_map(linears).all(|linear| is_frozen(linear.weight));
        let reader = Reader::new(gpu, of_tensors)?;
        let layers = parts.iter().map(|parts| CardLayer::new(&reader, parts)).collect::<Result<_>>()?;
        let rope = decoder.device_rope().and_then(|rope| rope.downcast_ref::<DecoderRope>());
        let rope = rope.ok_or_else(|| Error::Msg("a decoder of the CPU on a GPU".into()))?.table().clone();
        let weights = Self {
            layers,
            final_norm: reader.floats(decoder.final_norm())?,
            rope,
            head: reader.weight(&head)?,
            embedding: reader.weight(&embedding)?,
            is_fixed,
        };
        reader.finish()?;
        Ok(weights)
    }

    /// Takes another policy in the place of this one: what was recorded with its memory stays right. False, and nothing done, where
    /// the two are not of the same shapes and scales. After an error this is no policy.
    pub(super) fn replace(
        &mut self,
        gpu: &Gpu,
        of_tensors: &Gpu,
        decoder: &Decoder,
        adapter: Option<&LoraAdapter>,
    ) -> std::result::Result<bool, ModelError> {
        let parts = decoder.adapted_layers(adapter).collect::<Result<Vec<_>>>()?;
        let is_own = |weight: Weight| !is_frozen(&weight);
        if !self.is_fixed || is_own(decoder.adapted_embedding(adapter)?) || is_own(decoder.adapted_head(adapter)?) {
            return Ok(false);
        }
        let fit = self.layers.iter().zip(&parts).all(|(layer, parts)| layer.fits(parts));
        if self.layers.len() != parts.len() || !fit {
            return Ok(false);
        }
        let reader = Reader::new(gpu, of_tensors)?;
        for (layer, parts) in self.layers.iter_mut().zip(&parts) {
            layer.replace(&reader, parts)?;
        }
        reader.finish()?;
        Ok(true)
    }

    /// Whether a step allocates nothing once another has run, so that it can be recorded: a packed weight that is widened for a
    /// product has a place that stays.
    pub(super) fn can_be_recorded(&self) -> bool {
        self.embedding.bf16().is_some()
    }

    /// Most rows of A of a group.
    pub(super) fn low_width(&self) -> usize {
        self.layers.iter().flat_map(CardLayer::groups).map(|group| group.low_width).max().unwrap_or(0)
    }
}

impl CardLayer {
    fn new(reader: &Reader<'_>, parts: &AdaptedLayer<'_>) -> Result<Self> {
        let qk_norm = match parts.qk_norm {
            Some([q, k]) => Some([reader.floats(q)?, reader.floats(k)?]),
            None => None,
        };
        Ok(Self {
            input_norm: reader.floats(parts.input_norm)?,
            post_attention_norm: reader.floats(parts.post_attention_norm)?,
            qk_norm,
            qkv: CardGroup::new(reader, &parts.qkv)?,
            o: CardGroup::new(reader, &parts.o)?,
            gate_up: CardGroup::new(reader, &parts.gate_up)?,
            down: CardGroup::new(reader, &parts.down)?,
        })
    }

    fn groups(&self) -> [&CardGroup; 4] {
        [&self.qkv, &self.o, &self.gate_up, &self.down]
    }

    fn fits(&self, parts: &AdaptedLayer<'_>) -> bool {
        self.groups().into_iter().zip(groups(parts)).all(|(group, parts)| group.fits(parts))
    }

    fn replace(&mut self, reader: &Reader<'_>, parts: &AdaptedLayer<'_>) -> Result<()> {
        let groups = [&mut self.qkv, &mut self.o, &mut self.gate_up, &mut self.down];
        groups.into_iter().zip(self::groups(parts)).try_for_each(|(group, parts)| group.replace(reader, parts))
    }
}

fn groups<'p>(parts: &'p AdaptedLayer<'p>) -> [&'p [AdaptedLinear<'p>]; 4] {
    [&parts.qkv, &parts.o, &parts.gate_up, &parts.down]
}

fn linears<'p>(parts: &'p AdaptedLayer<'p>) -> impl Iterator<Item = &'p AdaptedLinear<'p>> {
    groups(parts).into_iter().flatten()
}

impl CardGroup {
    fn new(reader: &Reader<'_>, parts: &[AdaptedLinear<'_>]) -> Result<Self> {
        let (gpu, mut low_width) = (reader.gpu, 0);
        let mut members = Vec::with_capacity(parts.len());
        for linear in parts {
            members.push(CardLinear::new(reader, linear, low_width)?);
            low_width += rank_of(linear);
        }
        let n_in = members.first().map_or(0, |member| member.weight.dims().1);
        let a = if low_width > 0 { Some(gpu.zeros(low_width * n_in)?) } else { None };
        let of_table: Vec<Member> = members.iter().map(|member| member.row_of_table(gpu)).collect::<Result<_>>()?;
        let mut group = Self { a, low_width, members, table: gpu.upload(&of_table)?, of_table };
        group.replace(reader, parts)?;
        Ok(group)
    }

    fn fits(&self, parts: &[AdaptedLinear<'_>]) -> bool {
        let is_plain = self.is_plain();
        self.members.iter().zip(parts).all(|(member, parts)| {
            let (rank, scale) = member.low_rank.as_ref().map_or((0, 0.0), |low_rank| (low_rank.rank, low_rank.scale));
            // A plain product takes its scale as a number, which a recorded step keeps; others read it from the table.
            let is_scaled_alike = !is_plain || scale == parts.pair.map_or(0.0, |pair| pair.scale);
            let is_factored_alike = member.factor.is_some() == parts.factor.is_some();
            rank == rank_of(parts) && is_scaled_alike && is_factored_alike && is_frozen(parts.weight)
        })
    }

    /// Rounds the adapter's matrices into their places.
    fn replace(&mut self, reader: &Reader<'_>, parts: &[AdaptedLinear<'_>]) -> Result<()> {
        let gpu = reader.gpu;
        for (member, linear) in self.members.iter_mut().zip(parts) {
            let n_in = member.weight.dims().1;
            if let (Some(low_rank), Some(pair), Some(a)) = (&mut member.low_rank, linear.pair, &mut self.a) {
                let (first, end) = (low_rank.first * n_in, (low_rank.first + low_rank.rank) * n_in);
                reader.round_into(&pair.a, &mut a.slice_mut(first..end))?;
                reader.round_into(&pair.b, &mut low_rank.b.as_view_mut())?;
                low_rank.scale = pair.scale;
            }
            if let (Some(factor), Some(tensor)) = (&mut member.factor, &linear.factor) {
                let copied = |values: &CudaSlice<f32>| gpu.stream().memcpy_dtod(values, factor).map_err(Error::wrap);
                reader.read_trained(tensor, copied)?;
            }
        }
        let of_table: Vec<Member> =
            self.members.iter().map(|member| member.row_of_table(gpu)).collect::<Result<_>>()?;
        if of_table != self.of_table {
            gpu.stream().memcpy_htod(&of_table, &mut self.table).map_err(Error::wrap)?;
            self.of_table = of_table;
        }
        Ok(())
    }

    /// Whether a product needs nothing but what cuBLAS adds to it.
    pub(super) fn is_plain(&self) -> bool {
        self.members.iter().all(|member| member.bias.is_none() && member.factor.is_none())
    }
}

impl CardLinear {
    fn new(reader: &Reader<'_>, parts: &AdaptedLinear<'_>, first: usize) -> Result<Self> {
        let (gpu, weight) = (reader.gpu, reader.weight(parts.weight)?);
        let (n_out, n_in) = weight.dims();
        let low_rank = match parts.pair {
            Some(pair) => {
                let rank = pair.a.dim(0)?;
                if pair.a.dims() != [rank, n_in] || pair.b.dims() != [n_out, rank] {
                    let (a, b) = (pair.a.dims(), pair.b.dims());
                    bail!("adapter of shapes {a:?} and {b:?} on a weight ({n_out}, {n_in})");
                }
                Some(CardLowRank { b: gpu.zeros(n_out * rank)?, rank, scale: pair.scale, first })
            }
            None => None,
        };
        let bias = parts.bias.map(|bias| reader.floats(bias)).transpose()?;
        let factor = parts.factor.as_ref().map(|factor| reader.floats(factor)).transpose()?;
        Ok(Self { weight, low_rank, bias, factor })
    }

    fn row_of_table(&self, gpu: &Gpu) -> Result<Member> {
        let change = self.low_rank.as_ref().map(|CardLowRank { b, rank, scale, first }| Change {
            b,
            rank: *rank,
            first: *first,
            scale: *scale,
        });
        // SAFETY: the group has the table and, beside it, everything that its members name; neither is let go of alone.
        unsafe { Member::new(gpu, self.weight.dims().0, change.as_ref(), self.bias.as_ref(), self.factor.as_ref()) }
    }
}

fn rank_of(linear: &AdaptedLinear<'_>) -> usize {
    linear.pair.and_then(|pair| pair.a.dim(0).ok()).unwrap_or(0)
}

fn is_frozen(weight: &Weight) -> bool {
    matches!(weight, Weight::Accelerator(_))
}
