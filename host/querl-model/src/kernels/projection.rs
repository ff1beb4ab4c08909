//! Linear layers (frozen, LoRA, trained) on slices, for fused operations over several layers with the same input.

use super::packed_matmul::{self, Direction, MatmulSpec, Start, Term, WeightView, alloc_output, transpose};
use super::{FrozenWeight, SimdLevel};
use crate::dropout::LayerMask;
use candle_core::Result;
use std::borrow::Cow;

/// Parameters of one linear layer.
#[allow(missing_docs)]
pub enum Projection<'a> {
    /// A frozen weight, optionally with trained LoRA matrices.
    Frozen { weight: &'a FrozenWeight, bias: Option<&'a [f32]>, lora: Option<LoraMatrices<'a>> },
    /// A trained weight `(out, in)`.
    Trained { weight: &'a [f32], n_in: usize, bias: Option<&'a [f32]> },
}

/// LoRA matrices of a linear layer, which add `scale * B A` to its weight.
#[derive(Clone, Copy)]
pub struct LoraMatrices<'a> {
    /// LoRA A `(rank, in)`.
    pub a: &'a [f32],
    /// LoRA B `(out, rank)`.
    pub b: &'a [f32],
    /// LoRA rank.
    pub rank: usize,
    /// Scale of `B A`: alpha over rank, or over its square root with rsLoRA.
    pub scale: f32,
    /// Dropout on the input of A; `None` without dropout.
    pub dropout: Option<&'a LayerMask<'a>>,
}

impl LoraMatrices<'_> {
    /// The input of LoRA A for the layer's input `x`.
    fn input<'x>(&self, x: &'x [f32]) -> Cow<'x, [f32]> {
        let Some(mask) = self.dropout else { return Cow::Borrowed(x) };
        let mut dropped = x.to_vec();
        mask.apply(&mut dropped);
        Cow::Owned(dropped)
    }
}

/// Gradients of a layer's parameters; empty if they are frozen.
#[derive(Default)]
pub struct ParameterGradients {
    /// Gradient of the weight `(out, in)`.
    pub weight: Vec<f32>,
    /// Gradient of the bias `(out)`.
    pub bias: Vec<f32>,
    /// Gradient of LoRA A `(rank, in)`.
    pub a: Vec<f32>,
    /// Gradient of LoRA B `(out, rank)`.
    pub b: Vec<f32>,
    /// `scale * g B`, `(N, rank)`: for the gradients of A and of the input.
    lora_b_grad: Vec<f32>,
}

impl<'a> Projection<'a> {
    fn level(&self) -> SimdLevel {
        match self {
            Self::Frozen { weight, .. } => weight.level(),
            Self::Trained { .. } => SimdLevel::detected(),
        }
    }

    fn source(&self) -> WeightView<'_> {
        match self {
            Self::Frozen { weight, .. } => weight.source(),
            Self::Trained { weight, n_in, .. } => WeightView::rows(weight, *n_in),
        }
    }

    fn dims(&self) -> (usize, usize) {
        match self {
            Self::Frozen { weight, .. } => weight.dims(),
            Self::Trained { weight, n_in, .. } => (weight.len() / n_in, *n_in),
        }
    }

    fn bias(&self) -> Option<&'a [f32]> {
        match self {
            Self::Frozen { bias, .. } | Self::Trained { bias, .. } => *bias,
        }
    }

    fn lora(&self) -> Option<LoraMatrices<'a>> {
        match self {
            Self::Frozen { lora, .. } => *lora,
            Self::Trained { .. } => None,
        }
    }

    /// Forward pass for `x` `(N, in)`: the layer's output `(N, out)`, LoRA included, and `scale * x A^T`, which is saved for the backward
    /// pass.
    pub fn forward(&self, x: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let [result] = forward([self], x)?;
        Ok(result)
    }

    /// Like [`Projection::forward`], but returns `base` `(N, out)` plus the output.
    pub(crate) fn added(&self, x: &[f32], base: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let [lora_a_out] = lora_a_out([self], x)?;
        let sum = |start| single(self.level(), Direction::Forward, self.product(x, &lora_a_out, start));
        let Some(bias) = self.bias() else { return Ok((sum(Start::Matrix(base))?, lora_a_out)) };
        let mut base = base.to_vec();
        base.chunks_exact_mut(bias.len()).for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
        Ok((sum(Start::Matrix(&base))?, lora_a_out))
    }

    /// `start + x W^T + lora_a_out B^T`.
    fn product<'x>(&'x self, x: &'x [f32], lora_a_out: &'x [f32], start: Start<'x>) -> MatmulSpec<'x> {
        let (n_out, n_in) = self.dims();
        let mut terms = vec![Term { left: x, weight: self.source() }];
        if let Some(LoraMatrices { b, rank, .. }) = self.lora() {
            terms.push(Term { left: lora_a_out, weight: WeightView::rows(b, rank) });
        }
        MatmulSpec { len: x.len() / n_in * n_out, start, terms }
    }
}

/// [`Projection::forward`] of several layers with the same input.
pub(crate) fn forward<const N: usize>(layers: [&Projection<'_>; N], x: &[f32]) -> Result<[(Vec<f32>, Vec<f32>); N]> {
    let lora_a_outs = lora_a_out(layers, x)?;
    let mut products: Vec<MatmulSpec<'_>> = Vec::with_capacity(N);
    for (layer, lora_a_out) in layers.into_iter().zip(&lora_a_outs) {
        products.push(layer.product(x, lora_a_out, layer.bias().map_or(Start::Zero, Start::Row)));
    }
    let mut results = packed_matmul::matmul_alloc(level(&layers), Direction::Forward, &products)?.into_iter();
    drop(products);
    Ok(lora_a_outs.map(|lora_a_out| (results.next().unwrap_or_default(), lora_a_out)))
}

/// `scale * g B` `(N, rank)` of each layer, for the gradient `g` `(N, out)` of its output: all other gradients need it.
pub fn lora_b_gradients<const N: usize>(layers: [(&Projection<'_>, &[f32]); N]) -> Result<[ParameterGradients; N]> {
    let all = of_ranks(layers, Direction::Backward)?;
    Ok(all.map(|lora_b_grad| ParameterGradients { lora_b_grad, ..ParameterGradients::default() }))
}

/// Inputs and results of the backward pass of a linear layer's parameters.
pub struct Trained<'a> {
    /// Parameters of the layer in the forward pass.
    pub layer: &'a Projection<'a>,
    /// Input of the layer `(N, in)`.
    pub x: &'a [f32],
    /// Output of LoRA A, `scale * x A^T`, `(N, rank)`.
    pub lora_a_out: &'a [f32],
    /// Gradient of the outputs, `(N, out)`.
    pub grad: &'a [f32],
    /// Result of [`lora_b_gradients`], to which the gradients of parameters are added.
    pub found: &'a mut ParameterGradients,
}

/// Gradients of the parameters of several layers.
///
/// With `g` the gradient of the output, `d = scale * x A^T` and `v = scale * g B`: `dW = g^T x`, `db = sum of g`, `dA = v^T x`,
/// `dB = g^T d`.
pub fn parameter_gradients(layers: &mut [Trained<'_>]) -> Result<()> {
    let Some(level) = layers.first().map(|trained| trained.layer.level()) else { return Ok(()) };
    // Left matrices of the products `dA = lora_b_grad^T x` and `dB^T = lora_a_out^T g`.
    let transposed = |values: &[f32], width: usize| transpose(level, values, width);
    let lefts: Vec<Option<(Vec<f32>, Vec<f32>)>> = layers
        .iter()
        .map(|Trained { layer, lora_a_out, found, .. }| {
            let rank = layer.lora()?.rank;
            Some((transposed(&found.lora_b_grad, rank), transposed(lora_a_out, rank)))
        })
        .collect();
    let inputs: Vec<Cow<'_, [f32]>> = layers
        .iter()
        .map(|Trained { layer, x, .. }| layer.lora().map_or(Cow::Borrowed(*x), |lora| lora.input(x)))
        .collect();
    let mut wanted = Vec::new();
    for ((Trained { layer, grad, .. }, x), lefts) in layers.iter().zip(&inputs).zip(&lefts) {
        let (Some((of_a, of_b)), Some(LoraMatrices { rank, .. })) = (lefts, layer.lora()) else { continue };
        let (n_out, n_in) = layer.dims();
        let product = |left, right, width| {
            let terms = vec![Term { left, weight: WeightView::rows(right, width) }];
            MatmulSpec { len: rank * width, start: Start::Zero, terms }
        };
        wanted.extend([product(of_a, x, n_in), product(of_b, grad, n_out)]); // (rank, in), (rank, out)
    }
    let mut results = packed_matmul::matmul_alloc(level, Direction::Backward, &wanted)?.into_iter();
    drop(wanted);
    for Trained { layer, x, grad, found, .. } in layers {
        let (n_out, n_in) = layer.dims();
        if layer.lora().is_some() {
            found.a = results.next().unwrap_or_default();
            found.b = transpose(level, &results.next().unwrap_or_default(), n_out);
        }
        if let Projection::Trained { bias, .. } = layer {
            let grad_t = transpose(level, grad, n_out); // (out, N)
            let terms = vec![Term { left: &grad_t, weight: WeightView::rows(x, n_in) }];
            found.weight =
                single(level, Direction::Backward, MatmulSpec { len: n_out * n_in, start: Start::Zero, terms })?;
            if bias.is_some() {
                found.bias = vec![0.0; n_out];
                for row in grad.chunks_exact(n_out) {
                    found.bias.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
                }
            }
        }
    }
    Ok(())
}

fn level(layers: &[&Projection<'_>]) -> SimdLevel {
    layers.first().map_or_else(SimdLevel::detected, |layer| layer.level())
}

fn single(level: SimdLevel, direction: Direction, product: MatmulSpec<'_>) -> Result<Vec<f32>> {
    Ok(packed_matmul::matmul_alloc(level, direction, &[product])?.pop().unwrap_or_default())
}

/// `scale * x A^T` of each layer; empty without LoRA.
pub(crate) fn lora_a_out<const N: usize>(layers: [&Projection<'_>; N], x: &[f32]) -> Result<[Vec<f32>; N]> {
    of_ranks(layers.map(|layer| (layer, x)), Direction::Forward)
}

/// The product `(N, rank)` of each layer's inputs and A, or of its output gradients and B, times the scale; empty without LoRA.
fn of_ranks<const N: usize>(layers: [(&Projection<'_>, &[f32]); N], direction: Direction) -> Result<[Vec<f32>; N]> {
    let lefts = layers.map(|(layer, left)| match (layer.lora(), direction) {
        (Some(lora), Direction::Forward) => lora.input(left),
        _ => Cow::Borrowed(left),
    });
    let mut wanted = Vec::with_capacity(N);
    for ((layer, _), left) in layers.iter().zip(&lefts) {
        let Some(LoraMatrices { a, b, rank, .. }) = layer.lora() else { continue };
        let (n_out, n_in) = layer.dims();
        let (n_rows, weight) = match direction {
            Direction::Forward => (left.len() / n_in, WeightView::rows(a, n_in)),
            Direction::Backward => (left.len() / n_out, WeightView::rows(b, rank)),
        };
        wanted.push(MatmulSpec { len: n_rows * rank, start: Start::Zero, terms: vec![Term { left, weight }] });
    }
    let level = level(&layers.map(|(layer, _)| layer));
    let mut results = packed_matmul::matmul_alloc(level, direction, &wanted)?.into_iter();
    Ok(layers.map(|(layer, _)| {
        let Some(LoraMatrices { scale, .. }) = layer.lora() else { return Vec::new() };
        let mut result = results.next().unwrap_or_default();
        result.iter_mut().for_each(|x| *x *= scale);
        result
    }))
}

/// Gradient of the input that several layers share: the sum of `g W + d(v A)` over them, with `d` the dropout of each. Each layer comes
/// with the gradient of its output and the gradients of its parameters.
pub fn input_backward_sum(layers: &[(&Projection<'_>, &[f32], &ParameterGradients)]) -> Result<Vec<f32>> {
    let Some((first, grad, _)) = layers.first() else { return Ok(Vec::new()) };
    let (n_out, n_in) = first.dims();
    let (mut terms, mut dropped) = (Vec::new(), Vec::new());
    for (layer, grad, found) in layers {
        terms.push(Term { left: grad, weight: layer.source() });
        let Some(LoraMatrices { a, dropout, .. }) = layer.lora() else { continue };
        let term = Term { left: &found.lora_b_grad, weight: WeightView::rows(a, n_in) };
        match dropout {
            None => terms.push(term),
            Some(mask) => dropped.push((term, mask)),
        }
    }
    let len = grad.len() / n_out * n_in;
    let mut dx = alloc_output(len, |dx| packed_matmul::backward(first.level(), &terms, dx))?;
    for (term, mask) in dropped {
        let mut part = alloc_output(len, |part| packed_matmul::backward(first.level(), &[term], part))?;
        mask.apply(&mut part);
        dx.iter_mut().zip(part).for_each(|(dx, part)| *dx += part);
    }
    Ok(dx)
}
