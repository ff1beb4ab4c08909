//! The steps of a layer on a card: activations bf16, sums f32, every step a launch and none waits for the card.

use super::linear::{FusedLinear, LowRankTensors};
use super::steps::{Lent, Projected, Steps, Trained};
use crate::Ranks;
use crate::decoder::card::CardRows;
use crate::decoder::layer::{Rows, Wanted};
use crate::device::{CudaSlice, Gpu, Loan, LowRank, ParameterGradients, Projection, input_gradient, storage, whole};
use crate::kernels::Weight;
use candle_core::{Error, Result, Storage, Tensor, bail};
use half::bf16;
use std::ops::{Deref, DerefMut};

/// A card.
pub(super) struct Card(Gpu);

impl Card {
    /// The one that a tensor is on.
    pub(super) fn of(tensor: &Tensor) -> Result<Self> {
        Ok(Self(Gpu::of(tensor.device())?))
    }
}

/// Values on the card, of one's own.
pub(super) struct Buffer<T>(CudaSlice<T>);

impl<T> Deref for Buffer<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.0
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.0
    }
}

/// A and B as products read them: made once for a layer's forward and backward pass.
pub(super) struct Rounded {
    a: CudaSlice<bf16>,
    b: CudaSlice<bf16>,
    rank: usize,
}

/// A linear layer with its tensors borrowed.
struct Open<'a> {
    linear: &'a FusedLinear,
    bias: Option<Loan<'a>>,
    rounded: Option<(&'a Rounded, &'a LowRankTensors)>,
}

impl<'a> Open<'a> {
    fn new(gpu: &Gpu, linear: &'a FusedLinear) -> Result<Self> {
        let bias = linear.bias.as_ref().map(Loan::of).transpose()?;
        let rounded = linear.low_rank.as_ref().map(|low_rank| -> Result<_> {
            if let Some(rounded) = low_rank.rounded.get() {
                return Ok((rounded, low_rank));
            }
            let rounded = Rounded::new(gpu, low_rank, linear.weight.dims()?)?;
            Ok((low_rank.rounded.get_or_init(|| rounded), low_rank))
        });
        Ok(Self { linear, bias, rounded: rounded.transpose()? })
    }

    fn projection(&self) -> Result<Projection<'_>> {
        let Weight::OnCard(weight) = &self.linear.weight else { bail!("a layer on the card with a weight of the cpu") };
        let bias = self.bias.as_ref().map(|bias| bias.as_view());
        let low_rank = self.rounded.map(|(Rounded { a, b, rank }, low_rank)| LowRank {
            a: a.as_view(),
            b: b.as_view(),
            rank: *rank,
            scale: low_rank.scale,
            masks: low_rank.rows.as_ref().and_then(|rows| rows.masks(&low_rank.path, weight.dims().1)),
        });
        Ok(Projection { weight, bias, low_rank })
    }
}

impl Rounded {
    fn new(gpu: &Gpu, low_rank: &LowRankTensors, dims: (usize, usize)) -> Result<Self> {
        let rank = low_rank.rank(dims)?;
        let (a, b) = (whole(&low_rank.a)?, whole(&low_rank.b)?);
        Ok(Self { a: gpu.to_bf16(&*Loan::of(&a)?)?, b: gpu.to_bf16(&*Loan::of(&b)?)?, rank })
    }
}

/// What the rows of a pass on the card bring along.
fn on_card(rows: &Rows) -> Result<&CardRows> {
    rows.on_card.as_deref().ok_or_else(|| Error::Msg("rows of the cpu in a layer on the card".into()))
}

impl Steps for Card {
    type Sums = Buffer<f32>;
    type SumSlice = CudaSlice<f32>;
    type Values = Buffer<bf16>;
    type ValueSlice = CudaSlice<bf16>;
    type LogSums = CudaSlice<f32>;
    type Found = Option<ParameterGradients>;
    type Borrowed<'a> = Loan<'a>;

    fn prepared(&self, tensor: &Tensor) -> Result<Tensor> {
        whole(tensor)
    }

    fn borrowed<'a>(&self, tensor: &'a Tensor) -> Result<Loan<'a>> {
        Loan::of(tensor)
    }

    fn storage(&self, sums: Buffer<f32>) -> Result<Storage> {
        Ok(Storage::Cuda(storage(&self.0, sums.0)))
    }

    fn joined(&self, parts: Vec<Buffer<f32>>) -> Result<Buffer<f32>> {
        let mut joined = self.0.zeros(parts.iter().map(|part| part.len()).sum())?;
        let mut start = 0;
        for part in parts {
            let end = start + part.len();
            self.0.stream().memcpy_dtod(&part.0, &mut joined.slice_mut(start..end)).map_err(Error::wrap)?;
            start = end;
        }
        Ok(Buffer(joined))
    }

    fn n_sums(&self, sums: &CudaSlice<f32>) -> usize {
        sums.len()
    }

    fn zeros(&self, n: usize) -> Result<Buffer<f32>> {
        Ok(Buffer(self.0.zeros(n)?))
    }

    fn sum_over(&self, ranks: &Ranks, sums: &mut Buffer<f32>) -> Result<()> {
        ranks.sum_on_card(&self.0, &mut sums.0)
    }

    fn values<'a>(&self, sums: &'a CudaSlice<f32>) -> Result<Lent<'a, Buffer<bf16>>> {
        Ok(Lent::Owned(Buffer(self.0.to_bf16(sums)?)))
    }

    fn picked<'a>(
        &self,
        all: &'a CudaSlice<bf16>,
        width: usize,
        wanted: Option<&Wanted>,
    ) -> Result<Lent<'a, Buffer<bf16>>> {
        let Some(wanted) = wanted else { return Ok(Lent::Borrowed(all)) };
        Ok(Lent::Owned(Buffer(self.0.pick(all, on_card(&wanted.rows)?.list(), width)?)))
    }

    fn picked_sums<'a>(
        &self,
        all: &'a CudaSlice<f32>,
        width: usize,
        wanted: Option<&Wanted>,
    ) -> Result<Lent<'a, Buffer<f32>>> {
        let Some(wanted) = wanted else { return Ok(Lent::Borrowed(all)) };
        Ok(Lent::Owned(Buffer(self.0.pick(all, on_card(&wanted.rows)?.list(), width)?)))
    }

    fn add_picked(
        &self,
        all: &mut Buffer<f32>,
        picked: &CudaSlice<f32>,
        width: usize,
        wanted: Option<&Wanted>,
    ) -> Result<()> {
        match wanted {
            None => self.0.add(&mut all.0, picked),
            Some(wanted) => self.0.add_picked(&mut all.0, picked, on_card(&wanted.rows)?.list(), width),
        }
    }

    fn normed(&self, x: &CudaSlice<f32>, norm: &Tensor, eps: f32) -> Result<Buffer<bf16>> {
        Ok(Buffer(self.0.normed(x, &*Loan::of(norm)?, eps)?))
    }

    fn norm_gradients(
        &self,
        x: &CudaSlice<f32>,
        norm: &Tensor,
        eps: f32,
        grad: &CudaSlice<f32>,
        more: Option<&CudaSlice<f32>>,
    ) -> Result<(Buffer<f32>, Option<Buffer<f32>>)> {
        let (gpu, weight) = (&self.0, Loan::of(norm)?);
        let n_wanted = if norm.track_op() { weight.len() } else { 0 };
        let (dx, dnorm) = gpu.norm_gradients(x, &*weight, eps, grad, more, n_wanted)?;
        Ok((Buffer(dx), (n_wanted > 0).then_some(Buffer(dnorm))))
    }

    fn forward<const N: usize>(
        &self,
        linears: [&FusedLinear; N],
        x: &CudaSlice<bf16>,
    ) -> Result<[(Buffer<bf16>, Buffer<bf16>); N]> {
        each(linears, |linear| {
            let (y, low) = Open::new(&self.0, linear)?.projection()?.forward(&self.0, x)?;
            Ok((Buffer(y), Buffer(low)))
        })
    }

    fn added(
        &self,
        linear: &FusedLinear,
        x: &CudaSlice<bf16>,
        base: &CudaSlice<f32>,
    ) -> Result<(Buffer<f32>, Buffer<bf16>)> {
        let mut y = self.0.copy(base)?;
        let low = Open::new(&self.0, linear)?.projection()?.add_to(&self.0, x, &mut y)?;
        Ok((Buffer(y), Buffer(low)))
    }

    fn low_gradients<const N: usize>(
        &self,
        layers: [(&FusedLinear, &CudaSlice<bf16>); N],
    ) -> Result<[Option<ParameterGradients>; N]> {
        each(layers, |(linear, grad)| Open::new(&self.0, linear)?.projection()?.low_gradient(&self.0, grad))
    }

    fn parameter_gradients<const N: usize>(&self, layers: [Trained<'_, Self>; N]) -> Result<()> {
        for Trained { linear, x, low, grad, found } in layers {
            if let Some(found) = found {
                Open::new(&self.0, linear)?.projection()?.parameter_gradients(&self.0, x, low, grad, found)?;
            }
        }
        Ok(())
    }

    fn input_gradient(
        &self,
        linear: &FusedLinear,
        grad: &CudaSlice<bf16>,
        found: &Option<ParameterGradients>,
    ) -> Result<Buffer<bf16>> {
        let open = Open::new(&self.0, linear)?;
        Ok(Buffer(input_gradient(&self.0, &[(&open.projection()?, grad, found.as_ref())])?))
    }

    fn shared_input_gradient(&self, layers: &[Projected<'_, Self>]) -> Result<Buffer<f32>> {
        let open: Vec<Open<'_>> =
            layers.iter().map(|(linear, ..)| Open::new(&self.0, linear)).collect::<Result<_>>()?;
        let projections: Vec<Projection<'_>> = open.iter().map(Open::projection).collect::<Result<_>>()?;
        let layers = projections.iter().zip(layers).map(|(layer, (_, grad, found))| (layer, *grad, found.as_ref()));
        Ok(Buffer(input_gradient(&self.0, &layers.collect::<Vec<_>>())?))
    }

    fn gradients_of(&self, _linear: &FusedLinear, found: Option<ParameterGradients>) -> Vec<Buffer<f32>> {
        found.map_or_else(Vec::new, |found| vec![Buffer(found.a), Buffer(found.b)])
    }

    fn turned(&self, x: &CudaSlice<bf16>, norm: Option<&Tensor>, rows: &Rows) -> Result<Buffer<bf16>> {
        let (rows_on_card, norm) = (on_card(rows)?, norm.map(Loan::of).transpose()?);
        let weight = norm.as_ref().map(|norm| norm.as_view());
        let norm = weight.as_ref().map(|weight| (weight, rows.eps as f32));
        Ok(Buffer(rows_on_card.rope().turned(&self.0, x, norm, rows_on_card.positions())?))
    }

    fn turned_gradients(
        &self,
        x: Option<&CudaSlice<bf16>>,
        norm: Option<&Tensor>,
        rows: &Rows,
        grad: &CudaSlice<bf16>,
    ) -> Result<(Buffer<bf16>, Option<Buffer<f32>>)> {
        let is_wanted = norm.is_some_and(Tensor::track_op);
        let (rows_on_card, loan) = (on_card(rows)?, norm.map(Loan::of).transpose()?);
        let weight = loan.as_ref().map(|norm| norm.as_view());
        let norm = weight.as_ref().map(|weight| (weight, rows.eps as f32));
        let n_wanted = if is_wanted { rows.head_dim } else { 0 };
        let (rope, positions) = (rows_on_card.rope(), rows_on_card.positions());
        let (dx, dnorm) = rope.turned_gradients(&self.0, x.unwrap_or(grad), norm, positions, grad, n_wanted)?;
        Ok((Buffer(dx), is_wanted.then_some(Buffer(dnorm))))
    }

    fn attend(&self, rows: &Rows, [q, k, v]: [&CudaSlice<bf16>; 3]) -> Result<(Buffer<bf16>, CudaSlice<f32>)> {
        let (out, log_sums) = self.0.attend(on_card(rows)?.queries(), rows.head_dim, q, k, v)?;
        Ok((Buffer(out), log_sums))
    }

    fn attention_gradients(
        &self,
        rows: &Rows,
        [q, k, v]: [&CudaSlice<bf16>; 3],
        out: &CudaSlice<bf16>,
        log_sums: &CudaSlice<f32>,
        grad: &CudaSlice<bf16>,
    ) -> Result<[Buffer<bf16>; 3]> {
        let queries = on_card(rows)?.queries();
        let found = self.0.attention_gradients(queries, rows.head_dim, q, k, v, out, log_sums, grad)?;
        Ok(found.map(Buffer))
    }

    fn gated(&self, gate: &CudaSlice<bf16>, up: &CudaSlice<bf16>) -> Result<Buffer<bf16>> {
        Ok(Buffer(self.0.gated(gate, up)?))
    }

    fn gated_gradients(
        &self,
        gate: &CudaSlice<bf16>,
        up: &CudaSlice<bf16>,
        grad: Buffer<bf16>,
    ) -> Result<[Buffer<bf16>; 3]> {
        Ok(self.0.gated_gradients(gate, up, &grad.0)?.map(Buffer))
    }
}

/// What `f` makes of each, or the first error.
fn each<T, R, const N: usize>(all: [T; N], f: impl FnMut(T) -> Result<R>) -> Result<[R; N]> {
    let done: Vec<R> = all.into_iter().map(f).collect::<Result<_>>()?;
    done.try_into().map_err(|_| Error::Msg(format!("{N} layers with another number of results")))
}
