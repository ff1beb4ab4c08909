//! Training backend of the CPU: slices of f32, nothing copied that can be borrowed.

use super::backend::{
    LayerBackend, LayerContext, LinearBackward, LinearGrad, MaybeBorrowed, PackedAttention, ProjectionOut, QueryRows,
    Rows, TrainingBackend,
};
use super::linear::{Lora, LoraLinear};
use crate::Ranks;
use crate::dropout::LayerMask;
use crate::kernels::projection::{self, Trained};
use crate::kernels::{
    Floats, FrozenWeight, LogSumExp, LoraMatrices, ParameterGradients, Projection, Weight, attention_backward,
    attention_forward, input_backward_sum, rms_norm_backward, rms_norm_forward, swiglu_backward, swiglu_forward,
};
use candle_core::{CpuStorage, Error, Result, Storage, Tensor, bail};
use rayon::prelude::*;

pub(crate) struct Cpu;

#[derive(Default)]
pub(crate) struct LinearGradients {
    /// Gradients of the product's parameters; with DoRA computed from the scaled gradient.
    product: ParameterGradients,
    /// DoRA: the output's gradient times the factor.
    scaled: Option<Vec<f32>>,
    magnitude: Option<Vec<f32>>,
}

impl LinearGradients {
    /// The gradient of the product without DoRA's factor, given the gradient of the output.
    fn product_grad<'a>(&'a self, grad: &'a [f32]) -> &'a [f32] {
        self.scaled.as_deref().unwrap_or(grad)
    }
}

struct Open<'a> {
    weight: OpenWeight<'a>,
    bias: Option<Floats<'a>>,
    lora: Option<OpenLora<'a>>,
}

enum OpenWeight<'a> {
    Frozen(&'a FrozenWeight),
    Trained { values: Floats<'a>, n_in: usize },
}

struct OpenLora<'a> {
    a: Floats<'a>,
    b: Floats<'a>,
    rank: usize,
    scale: f32,
    dropout: Option<LayerMask<'a>>,
    magnitude: Option<OpenMagnitude<'a>>,
}

struct OpenMagnitude<'a> {
    factor: Floats<'a>,
    inverse_length: Floats<'a>,
}

impl<'a> Open<'a> {
    fn new(linear: &'a LoraLinear<()>) -> Result<Self> {
        let weight = match &linear.weight {
            Weight::Frozen(weight) => OpenWeight::Frozen(weight),
            Weight::Trained(weight) => OpenWeight::Trained { values: Floats::of(weight)?, n_in: weight.dim(1)? },
            #[allow(unreachable_patterns)] // weights of other devices
            _ => bail!("a layer on the CPU with a weight of another device"),
        };
        let dims = linear.weight.dims()?;
        let lora = linear.lora.as_ref().map(|lora| OpenLora::new(lora, dims)).transpose()?;
        Ok(Self { weight, bias: linear.bias.as_ref().map(Floats::of).transpose()?, lora })
    }

    fn projection(&self) -> Projection<'_> {
        let bias = self.bias.as_deref();
        match &self.weight {
            OpenWeight::Frozen(weight) => {
                Projection::Frozen { weight, bias, lora: self.lora.as_ref().map(OpenLora::matrices) }
            }
            OpenWeight::Trained { values, n_in } => Projection::Trained { weight: values, n_in: *n_in, bias },
        }
    }

    /// DoRA, if the layer uses it: the frozen weight, the adapter and the magnitude.
    fn dora(&self) -> Option<Dora<'_>> {
        let (OpenWeight::Frozen(weight), Some(lora)) = (&self.weight, &self.lora) else { return None };
        let magnitude = lora.magnitude.as_ref()?;
        Some(Dora { weight, lora, magnitude, bias: self.bias.as_deref() })
    }

    fn add_projection(&self, x: &[f32], residual: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let Some(dora) = self.dora() else { return self.projection().added(x, residual) };
        let (mut sum, lora_a_out) = dora.forward(x)?;
        add(&mut sum, residual);
        Ok((sum, lora_a_out))
    }
}

impl<'a> OpenLora<'a> {
    fn new(lora: &'a Lora, (n_out, n_in): (usize, usize)) -> Result<Self> {
        let Lora { a, b, scale, magnitude, path, dropout, .. } = lora;
        let magnitude = magnitude.as_ref().map(|magnitude| -> Result<_> {
            let (factor, inverse_length) = (&magnitude.factor, &magnitude.inverse_length);
            Ok(OpenMagnitude { factor: Floats::of(factor)?, inverse_length: Floats::of(inverse_length)? })
        });
        Ok(Self {
            a: Floats::of(a)?,
            b: Floats::of(b)?,
            rank: lora.rank((n_out, n_in))?,
            scale: *scale,
            dropout: dropout.as_ref().map(|mask| mask.of_layer(path, n_in)),
            magnitude: magnitude.transpose()?,
        })
    }

    fn matrices(&self) -> LoraMatrices<'_> {
        LoraMatrices { a: &self.a, b: &self.b, rank: self.rank, scale: self.scale, dropout: self.dropout.as_ref() }
    }
}

/// A linear layer with DoRA. With the factor `f`, magnitude over length, and dropout `d`:
/// `y = f * (x W^T + s x A^T B^T) + b`, and with dropout `y = x W^T + b + (f - 1) * d(x) W^T + f * s d(x) A^T B^T`.
///
/// Source: PEFT's `DoraLinearVariant.forward`.
struct Dora<'a> {
    weight: &'a FrozenWeight,
    lora: &'a OpenLora<'a>,
    magnitude: &'a OpenMagnitude<'a>,
    bias: Option<&'a [f32]>,
}

impl Dora<'_> {
    fn base<'b>(&'b self, bias: Option<&'b [f32]>) -> Projection<'b> {
        Projection::Frozen { weight: self.weight, bias, lora: None }
    }

    fn changed(&self) -> Projection<'_> {
        Projection::Frozen { weight: self.weight, bias: None, lora: Some(self.lora.matrices()) }
    }

    /// The output of LoRA alone: `lora_a_out B^T`.
    fn lora_out(&self, lora_a_out: &[f32]) -> Result<Vec<f32>> {
        let b = Projection::Trained { weight: &self.lora.b, n_in: self.lora.rank, bias: None };
        Ok(b.forward(lora_a_out)?.0)
    }

    fn dropped(&self, mask: &LayerMask<'_>, x: &[f32]) -> Vec<f32> {
        let mut dropped = x.to_vec();
        mask.apply(&mut dropped);
        dropped
    }

    fn forward(&self, x: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let factor = &*self.magnitude.factor;
        let Some(mask) = &self.lora.dropout else {
            let (mut y, lora_a_out) = self.changed().forward(x)?;
            each_row(&mut y, factor, |y, factor| *y *= factor);
            if let Some(bias) = self.bias {
                each_row(&mut y, bias, |y, bias| *y += bias);
            }
            return Ok((y, lora_a_out));
        };
        let (mut y, _) = self.base(self.bias).forward(x)?;
        let (of_dropped, _) = self.base(None).forward(&self.dropped(mask, x))?;
        let [lora_a_out] = projection::lora_a_out([&self.changed()], x)?;
        let of_lora = self.lora_out(&lora_a_out)?;
        let n_out = factor.len();
        let rows = y.par_chunks_mut(n_out).zip(of_dropped.par_chunks(n_out)).zip(of_lora.par_chunks(n_out));
        rows.for_each(|((y, of_dropped), of_lora)| {
            for (((y, base), lora), factor) in y.iter_mut().zip(of_dropped).zip(of_lora).zip(factor) {
                *y = (*y + base * (factor - 1.0)) + lora * factor;
            }
        });
        Ok((y, lora_a_out))
    }

    /// The output before multiplication by the factor, `(N, out)`.
    fn unscaled(&self, x: &[f32], lora_a_out: &[f32]) -> Result<Vec<f32>> {
        let Some(mask) = &self.lora.dropout else { return Ok(self.changed().forward(x)?.0) };
        let (mut y, _) = self.base(None).forward(&self.dropped(mask, x))?;
        add(&mut y, &self.lora_out(lora_a_out)?);
        Ok(y)
    }

    /// `f * g` for the gradient `g` of the output.
    fn scaled(&self, grad: &[f32]) -> Vec<f32> {
        let mut scaled = grad.to_vec();
        each_row(&mut scaled, &self.magnitude.factor, |g, factor| *g *= factor);
        scaled
    }

    /// Gradient of the magnitude; no gradient flows through the length.
    fn magnitude_gradient(&self, x: &[f32], lora_a_out: &[f32], grad: &[f32]) -> Result<Vec<f32>> {
        let (unscaled, inverse_length) = (self.unscaled(x, lora_a_out)?, &*self.magnitude.inverse_length);
        let n_out = inverse_length.len();
        let mut sum = vec![0.0; n_out];
        for (y, g) in unscaled.chunks_exact(n_out).zip(grad.chunks_exact(n_out)) {
            sum.iter_mut().zip(y).zip(g).for_each(|((sum, y), g)| *sum += y * g);
        }
        sum.iter_mut().zip(inverse_length).for_each(|(sum, inverse)| *sum *= inverse);
        Ok(sum)
    }
}

/// Calls `f` with every value and the element of `columns` for its column.
fn each_row(values: &mut [f32], columns: &[f32], f: impl Fn(&mut f32, f32) + Sync) {
    let rows = values.par_chunks_mut(columns.len().max(1)).with_min_len(16);
    rows.for_each(|row| row.iter_mut().zip(columns).for_each(|(value, column)| f(value, *column)));
}

/// Values that one parallel task adds.
const VALUES_PER_TASK: usize = 16_384;

fn add(sum: &mut [f32], more: &[f32]) {
    sum.par_chunks_mut(VALUES_PER_TASK).zip(more.par_chunks(VALUES_PER_TASK)).for_each(|(sum, more)| {
        sum.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
    });
}

fn opened<const N: usize>(linears: [&LoraLinear<()>; N]) -> Result<Vec<Open<'_>>> {
    linears.into_iter().map(Open::new).collect()
}

impl LayerBackend for Cpu {
    type Residual = Vec<f32>;
    type ResidualSlice = [f32];
    type Activations = Vec<f32>;
    type ActivationSlice = [f32];
    type Norm = Tensor;
    type Linears<const N: usize> = [LoraLinear<()>; N];
    type LoraAOut = Vec<f32>;

    fn rms_norm(&self, x: &[f32], weight: &Tensor, eps: f32) -> Result<Vec<f32>> {
        Ok(rms_norm_forward(x, &Floats::of(weight)?, eps))
    }

    fn project<const N: usize>(&self, linears: &[LoraLinear<()>; N], x: &[f32]) -> Result<[ProjectionOut<Self>; N]> {
        project(linears.each_ref(), x)
    }

    fn project_qkv(
        &self,
        qkv: &[LoraLinear<()>; 3],
        x: &[f32],
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<[ProjectionOut<Self>; 3]> {
        if query_rows.is_none() {
            return self.project(qkv, x);
        }
        let [q, k, v] = qkv;
        let [k, v] = project([k, v], x)?;
        let [q] = project([q], &self.query_activations(x, width, query_rows)?)?;
        Ok([q, k, v])
    }

    fn apply_rope(&self, x: &[f32], norm: Option<&Tensor>, context: &LayerContext, rows: &Rows) -> Result<Vec<f32>> {
        let norm = norm.map(Floats::of).transpose()?;
        context.rope.apply(x, norm.as_deref().map(|weight| (weight, context.eps)), &rows.positions)
    }

    fn query_residual<'a>(
        &self,
        x: &'a [f32],
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<MaybeBorrowed<'a, Vec<f32>>> {
        self.query_activations(x, width, query_rows)
    }

    fn add_projection(
        &self,
        [linear]: &[LoraLinear<()>; 1],
        x: &[f32],
        residual: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        Open::new(linear)?.add_projection(x, residual)
    }

    fn swiglu(&self, gate: &[f32], up: &[f32]) -> Result<Vec<f32>> {
        Ok(swiglu_forward(gate, up))
    }

    fn zeros_like(&self, residual: &[f32]) -> Result<Vec<f32>> {
        Ok(vec![0.0; residual.len()])
    }

    fn all_reduce(&self, ranks: &Ranks, sum: &mut Vec<f32>) -> Result<()> {
        ranks.sum(sum).map_err(Error::wrap)
    }
}

/// Outputs and LoRA A outputs of several linear layers with the same input.
fn project<const N: usize>(linears: [&LoraLinear<()>; N], x: &[f32]) -> Result<[(Vec<f32>, Vec<f32>); N]> {
    let open = opened(linears)?;
    if open.iter().all(|linear| linear.dora().is_none()) {
        let projections: Vec<Projection<'_>> = open.iter().map(Open::projection).collect();
        return projection::forward(std::array::from_fn(|index| &projections[index]), x);
    }
    let one = |linear: &Open<'_>| match linear.dora() {
        Some(dora) => dora.forward(x),
        None => linear.projection().forward(x),
    };
    let mut results = open.iter().map(one).collect::<Result<Vec<_>>>()?.into_iter();
    Ok(std::array::from_fn(|_| results.next().unwrap_or_default()))
}

impl TrainingBackend for Cpu {
    type LinearState = ();
    type LogSumExp = LogSumExp;
    type LinearGradients = LinearGradients;
    type Borrowed<'a> = Floats<'a>;

    fn group<const N: usize>(linears: [LoraLinear<()>; N]) -> [LoraLinear<()>; N] {
        linears
    }

    fn members<const N: usize>(linears: &[LoraLinear<()>; N]) -> [&LoraLinear<()>; N] {
        linears.each_ref()
    }

    fn contiguous(&self, tensor: &Tensor) -> Result<Tensor> {
        tensor.contiguous()
    }

    fn borrow<'a>(&self, tensor: &'a Tensor) -> Result<Floats<'a>> {
        Floats::of(tensor)
    }

    fn storage(&self, buffer: Vec<f32>) -> Result<Storage> {
        Ok(Storage::Cpu(CpuStorage::F32(buffer)))
    }

    fn len(&self, buffer: &[f32]) -> usize {
        buffer.len()
    }

    fn concat(&self, parts: Vec<Vec<f32>>) -> Result<Vec<f32>> {
        let mut joined = Vec::with_capacity(parts.iter().map(Vec::len).sum());
        parts.into_iter().for_each(|part| joined.extend_from_slice(&part));
        Ok(joined)
    }

    fn to_activations<'a>(&self, x: &'a [f32]) -> Result<MaybeBorrowed<'a, Vec<f32>>> {
        Ok(MaybeBorrowed::Borrowed(x))
    }

    fn query_activations<'a>(
        &self,
        x: &'a [f32],
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<MaybeBorrowed<'a, Vec<f32>>> {
        let Some(query_rows) = query_rows else { return Ok(MaybeBorrowed::Borrowed(x)) };
        let mut rows = Vec::with_capacity(query_rows.indices.len() * width);
        for &row in query_rows.indices.iter() {
            rows.extend_from_slice(&x[row as usize * width..(row as usize + 1) * width]);
        }
        Ok(MaybeBorrowed::Owned(rows))
    }

    fn add_query_rows(
        &self,
        sum: &mut Vec<f32>,
        part: &[f32],
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<()> {
        let Some(query_rows) = query_rows else {
            add(sum, part);
            return Ok(());
        };
        for (&row, part) in query_rows.indices.iter().zip(part.chunks_exact(width)) {
            let sum = &mut sum[row as usize * width..(row as usize + 1) * width];
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
        Ok(())
    }

    fn rms_norm_backward(
        &self,
        x: &[f32],
        weight: &Tensor,
        eps: f32,
        grad: &[f32],
        residual_grad: Option<&[f32]>,
    ) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
        let weight = Floats::of(weight)?;
        let (dx, dweight) = rms_norm_backward(x, &weight, eps, grad, residual_grad, weight.len());
        Ok((dx, Some(dweight)))
    }

    fn lora_b_backward<const N: usize>(&self, layers: [(&LoraLinear<()>, &[f32]); N]) -> Result<[LinearGradients; N]> {
        let open = opened(layers.map(|(linear, _)| linear))?;
        let mut gradients: [LinearGradients; N] = std::array::from_fn(|index| LinearGradients {
            scaled: open[index].dora().map(|dora| dora.scaled(layers[index].1)),
            ..LinearGradients::default()
        });
        let projections: Vec<Projection<'_>> = open.iter().map(Open::projection).collect();
        let of_products = projection::lora_b_gradients::<N>(std::array::from_fn(|index| {
            (&projections[index], gradients[index].product_grad(layers[index].1))
        }))?;
        gradients.iter_mut().zip(of_products).for_each(|(gradients, product)| gradients.product = product);
        Ok(gradients)
    }

    fn parameter_backward<const N: usize>(&self, layers: [LinearBackward<'_, Self>; N]) -> Result<()> {
        let open: Vec<Open<'_>> = layers.iter().map(|layer| Open::new(layer.linear)).collect::<Result<_>>()?;
        let projections: Vec<Projection<'_>> = open.iter().map(Open::projection).collect();
        let mut trained = Vec::with_capacity(N);
        for ((open, layer), LinearBackward { x, lora_a_out, grad, gradients, .. }) in
            open.iter().zip(&projections).zip(layers)
        {
            let LinearGradients { product, scaled, magnitude } = gradients;
            *magnitude = open.dora().map(|dora| dora.magnitude_gradient(x, lora_a_out, grad)).transpose()?;
            trained.push(Trained { layer, x, lora_a_out, grad: scaled.as_deref().unwrap_or(grad), found: product });
        }
        projection::parameter_gradients(&mut trained)
    }

    fn input_backward(&self, linear: &LoraLinear<()>, grad: &[f32], gradients: &LinearGradients) -> Result<Vec<f32>> {
        self.shared_input_backward(&[(linear, grad, gradients)])
    }

    fn shared_input_backward(&self, layers: &[LinearGrad<'_, Self>]) -> Result<Vec<f32>> {
        let open: Vec<Open<'_>> = layers.iter().map(|(linear, ..)| Open::new(linear)).collect::<Result<_>>()?;
        let projections: Vec<Projection<'_>> = open.iter().map(Open::projection).collect();
        let with_gradients = projections
            .iter()
            .zip(layers)
            .map(|(layer, (_, grad, gradients))| (layer, gradients.product_grad(grad), &gradients.product));
        let mut dx = input_backward_sum(&with_gradients.collect::<Vec<_>>())?;
        // DoRA with dropout: in the product with the weight alone, the gradient is `g` for all inputs, plus `(f - 1) g` for the inputs
        // after dropout.
        for (open, (_, grad, gradients)) in open.iter().zip(layers) {
            let (Some(dora), Some(scaled)) = (open.dora(), &gradients.scaled) else { continue };
            let Some(mask) = &dora.lora.dropout else { continue };
            let change: Vec<f32> = scaled.iter().zip(*grad).map(|(scaled, g)| scaled - g).collect();
            let none = ParameterGradients::default();
            let mut part = input_backward_sum(&[(&dora.base(None), &change, &none)])?;
            add(&mut dx, &part.iter().map(|part| -part).collect::<Vec<_>>());
            mask.apply(&mut part);
            add(&mut dx, &part);
        }
        Ok(dx)
    }

    fn gradients_of(&self, linear: &LoraLinear<()>, gradients: LinearGradients) -> Vec<Vec<f32>> {
        let (mut all, product) = (Vec::new(), gradients.product);
        if matches!(linear.weight, Weight::Trained(_)) {
            all.push(product.weight);
            all.extend(linear.bias.is_some().then_some(product.bias));
        }
        if linear.lora.is_some() {
            all.extend([product.a, product.b]);
            all.extend(gradients.magnitude);
        }
        all
    }

    fn rope_backward(
        &self,
        x: Option<&[f32]>,
        norm: Option<&Tensor>,
        context: &LayerContext,
        rows: &Rows,
        grad: &[f32],
    ) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
        let norm = norm.map(Floats::of).transpose()?;
        let norm = norm.as_deref().map(|weight| (weight, context.eps));
        let n_wanted = norm.map_or(0, |(weight, _)| weight.len());
        let (dx, dnorm) = context.rope.apply_backward(x.unwrap_or_default(), norm, &rows.positions, grad, n_wanted);
        Ok((dx, norm.is_some().then_some(dnorm)))
    }

    fn attend(&self, attention: &PackedAttention, qkv: [&[f32]; 3]) -> Result<(Vec<f32>, LogSumExp)> {
        attention_forward(&attention.queries, attention.head_dim, qkv)
    }

    fn attention_backward(
        &self,
        attention: &PackedAttention,
        qkv: [&[f32]; 3],
        out: &[f32],
        logsumexp: &LogSumExp,
        grad: &[f32],
    ) -> Result<[Vec<f32>; 3]> {
        attention_backward(&attention.queries, attention.head_dim, qkv, out, logsumexp, grad)
    }

    fn swiglu_backward(&self, gate: &[f32], up: &[f32], grad: Vec<f32>) -> Result<[Vec<f32>; 3]> {
        Ok(swiglu_backward(gate, up, &grad))
    }
}
