//! The steps of a layer on a card: activations bf16, sums f32, every step a launch and none waits for the card.

use super::backend::{Lent, Projected, Steps, Trained};
use super::fused_linear::{FusedLinear, LowRankTensors, Magnitude};
use super::rows::{BatchRows, QueryRows};
use crate::Ranks;
use crate::decoder::CardRows;
use crate::device::{
    CudaSlice, Gpu, Loan, LowRank, ParameterGradients, Projection, input_gradient, rounded_weight, storage, whole,
};
use crate::kernels::Weight;
use candle_core::{Error, Result, Storage, Tensor, bail};
use half::bf16;
use std::ops::{Deref, DerefMut};

/// A card.
pub(crate) struct Card(Gpu);

impl Card {
    /// The one that a tensor is on.
    pub(crate) fn of(tensor: &Tensor) -> Result<Self> {
        Ok(Self(Gpu::of(tensor.device())?))
    }
}

/// Values on the card, of one's own.
pub(crate) struct Buffer<T>(CudaSlice<T>);

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
pub(crate) struct Rounded {
    a: CudaSlice<bf16>,
    b: CudaSlice<bf16>,
    rank: usize,
}

/// A linear layer with its tensors borrowed.
struct Open<'a> {
    linear: &'a FusedLinear,
    bias: Option<Loan<'a>>,
    magnitude: Option<OpenMagnitude<'a>>,
    rounded: Option<(&'a Rounded, &'a LowRankTensors)>,
}

/// DoRA's factor on each output, and what its gradient is multiplied with.
struct OpenMagnitude<'a> {
    factor: Loan<'a>,
    inverse_length: Loan<'a>,
}

impl<'a> OpenMagnitude<'a> {
    fn new(Magnitude { factor, inverse_length, .. }: &'a Magnitude) -> Result<Self> {
        Ok(Self { factor: Loan::of(factor)?, inverse_length: Loan::of(inverse_length)? })
    }
}

/// What a backward pass finds for a linear layer's own tensors.
#[derive(Default)]
pub(crate) struct Found {
    low_rank: Option<ParameterGradients>,
    /// With magnitudes: the gradient of the outputs times their factors, which is that of all but bias and magnitude.
    scaled: Option<CudaSlice<bf16>>,
    magnitude: Option<CudaSlice<f32>>,
    weight: Option<CudaSlice<f32>>,
    bias: Option<CudaSlice<f32>>,
}

impl Found {
    fn of_product<'a>(&'a self, grad: &'a CudaSlice<bf16>) -> &'a CudaSlice<bf16> {
        self.scaled.as_ref().unwrap_or(grad)
    }
}

impl<'a> Open<'a> {
    fn new(gpu: &Gpu, linear: &'a FusedLinear) -> Result<Self> {
        let bias = linear.bias.as_ref().map(Loan::of).transpose()?;
        if let (Weight::Trained(weight), None) = (&linear.weight, linear.rounded.get()) {
            let rounded = rounded_weight(gpu, weight)?;
            linear.rounded.get_or_init(|| rounded);
        }
        let magnitude = linear.low_rank.as_ref().and_then(|low_rank| low_rank.magnitude.as_ref());
        let magnitude = magnitude.map(OpenMagnitude::new).transpose()?;
        let rounded = linear.low_rank.as_ref().map(|low_rank| -> Result<_> {
            if let Some(rounded) = low_rank.rounded.get() {
                return Ok((rounded, low_rank));
            }
            let rounded = Rounded::new(gpu, low_rank, linear.weight.dims()?)?;
            Ok((low_rank.rounded.get_or_init(|| rounded), low_rank))
        });
        Ok(Self { linear, bias, magnitude, rounded: rounded.transpose()? })
    }

    fn projection(&self) -> Result<Projection<'_>> {
        let weight = match &self.linear.weight {
            Weight::OnCard(weight) => weight,
            Weight::Trained(_) => match self.linear.rounded.get() {
                Some(weight) => weight,
                None => bail!("a trained weight was not rounded for its products"),
            },
            Weight::Frozen(_) => bail!("a layer on the card with a weight of the cpu"),
        };
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

/// Linear layers whose outputs have factors: `factor * (x W^T + s x A^T B^T) + b`.
///
/// Source: PEFT's `DoraLinearVariant.forward` without dropout.
impl Open<'_> {
    /// Outputs in f32 before factors and bias, and the outputs of A.
    fn unscaled(&self, gpu: &Gpu, x: &CudaSlice<bf16>) -> Result<(CudaSlice<f32>, CudaSlice<bf16>)> {
        let layer = Projection { bias: None, ..self.projection()? };
        let (n_out, n_in) = layer.weight.dims();
        let mut y = gpu.zeros(x.len() / n_in * n_out)?;
        let low = layer.add_to(gpu, x, &mut y)?;
        Ok((y, low))
    }

    fn forward(&self, gpu: &Gpu, x: &CudaSlice<bf16>) -> Result<(CudaSlice<bf16>, CudaSlice<bf16>)> {
        let Some(magnitude) = &self.magnitude else { return self.projection()?.forward(gpu, x) };
        let (y, low) = self.unscaled(gpu, x)?;
        Ok((gpu.scaled_columns(&y, &*magnitude.factor, self.bias.as_deref())?, low))
    }

    fn add_to(&self, gpu: &Gpu, x: &CudaSlice<bf16>, sum: &mut CudaSlice<f32>) -> Result<CudaSlice<bf16>> {
        let Some(magnitude) = &self.magnitude else { return self.projection()?.add_to(gpu, x, sum) };
        let (y, low) = self.unscaled(gpu, x)?;
        gpu.add_scaled_columns(&y, &*magnitude.factor, self.bias.as_deref(), sum)?;
        Ok(low)
    }

    fn low_gradient(&self, gpu: &Gpu, grad: &CudaSlice<bf16>) -> Result<Found> {
        let scaled =
            self.magnitude.as_ref().map(|magnitude| gpu.scaled_values(grad, &*magnitude.factor)).transpose()?;
        let low_rank = self.projection()?.low_gradient(gpu, scaled.as_ref().unwrap_or(grad))?;
        Ok(Found { low_rank, scaled, ..Found::default() })
    }

    fn parameter_gradients(
        &self,
        gpu: &Gpu,
        x: &CudaSlice<bf16>,
        low: &CudaSlice<bf16>,
        grad: &CudaSlice<bf16>,
        found: &mut Found,
    ) -> Result<()> {
        let layer = self.projection()?;
        let n_out = layer.weight.dims().0;
        if let Some(low_rank) = &mut found.low_rank {
            layer.parameter_gradients(gpu, x, low, found.scaled.as_ref().unwrap_or(grad), low_rank)?;
        }
        if let Some(magnitude) = &self.magnitude {
            let of_factor = gpu.column_totals(grad, Some(&gpu.to_bf16(&self.unscaled(gpu, x)?.0)?), n_out)?;
            let mut of_magnitude = gpu.zeros(n_out)?;
            gpu.add_scaled_columns(&of_factor, &*magnitude.inverse_length, None, &mut of_magnitude)?;
            found.magnitude = Some(of_magnitude);
        }
        if matches!(self.linear.weight, Weight::Trained(_)) {
            found.weight = Some(layer.weight_gradient(gpu, x, grad)?);
            found.bias = self.bias.is_some().then(|| gpu.column_totals(grad, None, n_out)).transpose()?;
        }
        Ok(())
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
fn on_card(rows: &BatchRows) -> Result<&CardRows> {
    rows.on_card.as_deref().ok_or_else(|| Error::Msg("rows of the cpu in a layer on the card".into()))
}

impl Steps for Card {
    type Sums = Buffer<f32>;
    type SumSlice = CudaSlice<f32>;
    type Values = Buffer<bf16>;
    type ValueSlice = CudaSlice<bf16>;
    type LogSums = CudaSlice<f32>;
    type Found = Found;
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
        wanted: Option<&QueryRows>,
    ) -> Result<Lent<'a, Buffer<bf16>>> {
        let Some(wanted) = wanted else { return Ok(Lent::Borrowed(all)) };
        Ok(Lent::Owned(Buffer(self.0.pick(all, on_card(&wanted.rows)?.list(), width)?)))
    }

    fn picked_sums<'a>(
        &self,
        all: &'a CudaSlice<f32>,
        width: usize,
        wanted: Option<&QueryRows>,
    ) -> Result<Lent<'a, Buffer<f32>>> {
        let Some(wanted) = wanted else { return Ok(Lent::Borrowed(all)) };
        Ok(Lent::Owned(Buffer(self.0.pick(all, on_card(&wanted.rows)?.list(), width)?)))
    }

    fn add_picked(
        &self,
        all: &mut Buffer<f32>,
        picked: &CudaSlice<f32>,
        width: usize,
        wanted: Option<&QueryRows>,
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
            let (y, low) = Open::new(&self.0, linear)?.forward(&self.0, x)?;
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
        let low = Open::new(&self.0, linear)?.add_to(&self.0, x, &mut y)?;
        Ok((Buffer(y), Buffer(low)))
    }

    fn low_gradients<const N: usize>(&self, layers: [(&FusedLinear, &CudaSlice<bf16>); N]) -> Result<[Found; N]> {
        each(layers, |(linear, grad)| Open::new(&self.0, linear)?.low_gradient(&self.0, grad))
    }

    fn parameter_gradients<const N: usize>(&self, layers: [Trained<'_, Self>; N]) -> Result<()> {
        for Trained { linear, x, low, grad, found } in layers {
            Open::new(&self.0, linear)?.parameter_gradients(&self.0, x, low, grad, found)?;
        }
        Ok(())
    }

    fn input_gradient(&self, linear: &FusedLinear, grad: &CudaSlice<bf16>, found: &Found) -> Result<Buffer<bf16>> {
        let open = Open::new(&self.0, linear)?;
        Ok(Buffer(input_gradient(&self.0, &[(&open.projection()?, found.of_product(grad), found.low_rank.as_ref())])?))
    }

    fn shared_input_gradient(&self, layers: &[Projected<'_, Self>]) -> Result<Buffer<f32>> {
        let open: Vec<Open<'_>> =
            layers.iter().map(|(linear, ..)| Open::new(&self.0, linear)).collect::<Result<_>>()?;
        let projections: Vec<Projection<'_>> = open.iter().map(Open::projection).collect::<Result<_>>()?;
        let layers = projections.iter().zip(layers);
        let layers = layers.map(|(layer, &(_, grad, found))| (layer, found.of_product(grad), found.low_rank.as_ref()));
        Ok(Buffer(input_gradient(&self.0, &layers.collect::<Vec<_>>())?))
    }

    fn gradients_of(&self, _linear: &FusedLinear, found: Found) -> Vec<Buffer<f32>> {
        let (a, b) = found.low_rank.map(|found| (found.a, found.b)).unzip();
        [found.weight, found.bias, a, b, found.magnitude].into_iter().flatten().map(Buffer).collect()
    }

    fn turned(&self, x: &CudaSlice<bf16>, norm: Option<&Tensor>, rows: &BatchRows) -> Result<Buffer<bf16>> {
        let (rows_on_card, norm) = (on_card(rows)?, norm.map(Loan::of).transpose()?);
        let weight = norm.as_ref().map(|norm| norm.as_view());
        let norm = weight.as_ref().map(|weight| (weight, rows.eps as f32));
        Ok(Buffer(rows_on_card.rope().turned(&self.0, x, norm, rows_on_card.positions())?))
    }

    fn turned_gradients(
        &self,
        x: Option<&CudaSlice<bf16>>,
        norm: Option<&Tensor>,
        rows: &BatchRows,
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

    fn attend(&self, rows: &BatchRows, [q, k, v]: [&CudaSlice<bf16>; 3]) -> Result<(Buffer<bf16>, CudaSlice<f32>)> {
        let (out, log_sums) = self.0.attend(on_card(rows)?.queries(), rows.head_dim, q, k, v)?;
        Ok((Buffer(out), log_sums))
    }

    fn attention_gradients(
        &self,
        rows: &BatchRows,
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
