//! The steps of a layer on the CPU: slices of f32, nothing copied that can be borrowed.

use super::backend::{Lent, Projected, Steps, Trained};
use super::fused_linear::{FusedLinear, LowRankTensors};
use super::rows::{BatchRows, QueryRows};
use crate::Ranks;
use crate::kernels::{
    Floats, LogSums, LowRank, ParameterGradients, Projection, Weight, attend, attention_gradients, gated,
    gated_gradients, input_gradient, norm_gradients, normed, projection,
};
use candle_core::{CpuStorage, Error, Result, Storage, Tensor};
use rayon::prelude::*;

/// The processor.
pub(crate) struct Cpu;

/// A linear layer with its tensors borrowed.
struct Open<'a> {
    weight: OpenWeight<'a>,
    bias: Option<Floats<'a>>,
    low_rank: Option<OpenLowRank<'a>>,
}

enum OpenWeight<'a> {
    Frozen(&'a crate::kernels::FrozenWeight),
    Trained { values: Floats<'a>, n_in: usize },
}

struct OpenLowRank<'a> {
    a: Floats<'a>,
    b: Floats<'a>,
    rank: usize,
    scale: f32,
}

impl<'a> Open<'a> {
    fn new(linear: &'a FusedLinear) -> Result<Self> {
        let weight = match &linear.weight {
            Weight::Frozen(weight) => OpenWeight::Frozen(weight),
            Weight::Trained(weight) => OpenWeight::Trained { values: Floats::of(weight)?, n_in: weight.dim(1)? },
            #[cfg(feature = "cuda")]
            Weight::OnCard(_) => candle_core::bail!("a layer on the cpu with a weight of the card"),
        };
        let low_rank = linear.low_rank.as_ref().map(|low_rank| -> Result<OpenLowRank<'a>> {
            let rank = low_rank.rank(linear.weight.dims()?)?;
            let LowRankTensors { a, b, scale, .. } = low_rank;
            Ok(OpenLowRank { a: Floats::of(a)?, b: Floats::of(b)?, rank, scale: *scale })
        });
        let bias = linear.bias.as_ref().map(Floats::of).transpose()?;
        Ok(Self { weight, bias, low_rank: low_rank.transpose()? })
    }

    fn projection(&self) -> Projection<'_> {
        let bias = self.bias.as_deref();
        match &self.weight {
            OpenWeight::Frozen(weight) => {
                let low_rank = self.low_rank.as_ref();
                let low_rank =
                    low_rank.map(|OpenLowRank { a, b, rank, scale }| LowRank { a, b, rank: *rank, scale: *scale });
                Projection::Frozen { weight, bias, low_rank }
            }
            OpenWeight::Trained { values, n_in } => Projection::Trained { weight: values, n_in: *n_in, bias },
        }
    }
}

/// Calls `f` with linear layers whose tensors are borrowed.
fn opened<const N: usize, R>(
    linears: [&FusedLinear; N],
    f: impl FnOnce([&Projection<'_>; N]) -> Result<R>,
) -> Result<R> {
    let open: Vec<Open<'_>> = linears.into_iter().map(Open::new).collect::<Result<_>>()?;
    let projections: Vec<Projection<'_>> = open.iter().map(Open::projection).collect();
    f(std::array::from_fn(|index| &projections[index]))
}

/// Values that one parallel task adds.
const VALUES_PER_TASK: usize = 16_384;

fn add(sum: &mut [f32], more: &[f32]) {
    sum.par_chunks_mut(VALUES_PER_TASK).zip(more.par_chunks(VALUES_PER_TASK)).for_each(|(sum, more)| {
        sum.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
    });
}

impl Steps for Cpu {
    type Sums = Vec<f32>;
    type SumSlice = [f32];
    type Values = Vec<f32>;
    type ValueSlice = [f32];
    type LogSums = LogSums;
    type Found = ParameterGradients;
    type Borrowed<'a> = Floats<'a>;

    fn prepared(&self, tensor: &Tensor) -> Result<Tensor> {
        tensor.contiguous()
    }

    fn borrowed<'a>(&self, tensor: &'a Tensor) -> Result<Floats<'a>> {
        Floats::of(tensor)
    }

    fn storage(&self, sums: Vec<f32>) -> Result<Storage> {
        Ok(Storage::Cpu(CpuStorage::F32(sums)))
    }

    fn joined(&self, parts: Vec<Vec<f32>>) -> Result<Vec<f32>> {
        let mut joined = Vec::with_capacity(parts.iter().map(Vec::len).sum());
        parts.into_iter().for_each(|part| joined.extend_from_slice(&part));
        Ok(joined)
    }

    fn n_sums(&self, sums: &[f32]) -> usize {
        sums.len()
    }

    fn zeros(&self, n: usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; n])
    }

    fn sum_over(&self, ranks: &Ranks, sums: &mut Vec<f32>) -> Result<()> {
        ranks.sum(sums).map_err(Error::wrap)
    }

    fn values<'a>(&self, sums: &'a [f32]) -> Result<Lent<'a, Vec<f32>>> {
        Ok(Lent::Borrowed(sums))
    }

    fn picked<'a>(&self, all: &'a [f32], width: usize, wanted: Option<&QueryRows>) -> Result<Lent<'a, Vec<f32>>> {
        let Some(wanted) = wanted else { return Ok(Lent::Borrowed(all)) };
        let mut rows = Vec::with_capacity(wanted.list.len() * width);
        for &row in wanted.list.iter() {
            rows.extend_from_slice(&all[row as usize * width..(row as usize + 1) * width]);
        }
        Ok(Lent::Owned(rows))
    }

    fn picked_sums<'a>(&self, all: &'a [f32], width: usize, wanted: Option<&QueryRows>) -> Result<Lent<'a, Vec<f32>>> {
        self.picked(all, width, wanted)
    }

    fn add_picked(&self, all: &mut Vec<f32>, picked: &[f32], width: usize, wanted: Option<&QueryRows>) -> Result<()> {
        match wanted {
            None => add(all, picked),
            Some(wanted) => {
                for (&row, picked) in wanted.list.iter().zip(picked.chunks_exact(width)) {
                    let all = &mut all[row as usize * width..(row as usize + 1) * width];
                    all.iter_mut().zip(picked).for_each(|(sum, x)| *sum += x);
                }
            }
        }
        Ok(())
    }

    fn normed(&self, x: &[f32], norm: &Tensor, eps: f32) -> Result<Vec<f32>> {
        Ok(normed(x, &Floats::of(norm)?, eps))
    }

    fn norm_gradients(
        &self,
        x: &[f32],
        norm: &Tensor,
        eps: f32,
        grad: &[f32],
        more: Option<&[f32]>,
    ) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
        let norm = Floats::of(norm)?;
        let (dx, dnorm) = norm_gradients(x, &norm, eps, grad, more, norm.len());
        Ok((dx, Some(dnorm)))
    }

    fn forward<const N: usize>(&self, linears: [&FusedLinear; N], x: &[f32]) -> Result<[(Vec<f32>, Vec<f32>); N]> {
        opened(linears, |layers| projection::forward(layers, x))
    }

    fn added(&self, linear: &FusedLinear, x: &[f32], base: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        Open::new(linear)?.projection().added(x, base)
    }

    fn low_gradients<const N: usize>(&self, layers: [(&FusedLinear, &[f32]); N]) -> Result<[ParameterGradients; N]> {
        opened(layers.map(|(linear, _)| linear), |opened| {
            let mut grads = layers.iter().map(|(_, grad)| *grad);
            projection::low_gradients(opened.map(|layer| (layer, grads.next().unwrap_or_default())))
        })
    }

    fn parameter_gradients<const N: usize>(&self, layers: [Trained<'_, Self>; N]) -> Result<()> {
        let open: Vec<Open<'_>> = layers.iter().map(|trained| Open::new(trained.linear)).collect::<Result<_>>()?;
        let projections: Vec<Projection<'_>> = open.iter().map(Open::projection).collect();
        let trained = |(layer, Trained { x, low, grad, found, .. })| projection::Trained { layer, x, low, grad, found };
        projection::parameter_gradients(&mut projections.iter().zip(layers).map(trained).collect::<Vec<_>>())
    }

    fn input_gradient(&self, linear: &FusedLinear, grad: &[f32], found: &ParameterGradients) -> Result<Vec<f32>> {
        input_gradient(&[(&Open::new(linear)?.projection(), grad, found)])
    }

    fn shared_input_gradient(&self, layers: &[Projected<'_, Self>]) -> Result<Vec<f32>> {
        let open: Vec<Open<'_>> = layers.iter().map(|(linear, ..)| Open::new(linear)).collect::<Result<_>>()?;
        let projections: Vec<Projection<'_>> = open.iter().map(Open::projection).collect();
        let with_gradients = projections.iter().zip(layers).map(|(layer, (_, grad, found))| (layer, *grad, *found));
        input_gradient(&with_gradients.collect::<Vec<_>>())
    }

    fn gradients_of(&self, linear: &FusedLinear, found: ParameterGradients) -> Vec<Vec<f32>> {
        let mut gradients = Vec::new();
        if matches!(linear.weight, Weight::Trained(_)) {
            gradients.push(found.weight);
            gradients.extend(linear.bias.is_some().then_some(found.bias));
        }
        if linear.low_rank.is_some() {
            gradients.extend([found.a, found.b]);
        }
        gradients
    }

    fn turned(&self, x: &[f32], norm: Option<&Tensor>, rows: &BatchRows) -> Result<Vec<f32>> {
        let norm = norm.map(Floats::of).transpose()?;
        let norm = norm.as_deref().map(|weight| (weight, rows.eps as f32));
        rows.rope.turned(x, norm, &rows.positions)
    }

    fn turned_gradients(
        &self,
        x: Option<&[f32]>,
        norm: Option<&Tensor>,
        rows: &BatchRows,
        grad: &[f32],
    ) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
        let norm = norm.map(Floats::of).transpose()?;
        let norm = norm.as_deref().map(|weight| (weight, rows.eps as f32));
        let (dx, dnorm) = rows.rope.turned_gradients(x.unwrap_or_default(), norm, &rows.positions, grad, rows.head_dim);
        Ok((dx, norm.is_some().then_some(dnorm)))
    }

    fn attend(&self, rows: &BatchRows, qkv: [&[f32]; 3]) -> Result<(Vec<f32>, LogSums)> {
        attend(&rows.queries, rows.head_dim, qkv)
    }

    fn attention_gradients(
        &self,
        rows: &BatchRows,
        qkv: [&[f32]; 3],
        out: &[f32],
        log_sums: &LogSums,
        grad: &[f32],
    ) -> Result<[Vec<f32>; 3]> {
        attention_gradients(&rows.queries, rows.head_dim, qkv, out, log_sums, grad)
    }

    fn gated(&self, gate: &[f32], up: &[f32]) -> Result<Vec<f32>> {
        Ok(gated(gate, up))
    }

    fn gated_gradients(&self, gate: &[f32], up: &[f32], grad: Vec<f32>) -> Result<[Vec<f32>; 3]> {
        Ok(gated_gradients(gate, up, &grad))
    }
}
