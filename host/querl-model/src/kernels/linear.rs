//! Weights of linear layers, and their products as operations of candle's graph: frozen, frozen with LoRA, trained.

use super::int8_matmul::{self, Int8Rows};
use super::packed_matmul::{self, Output, Term, WeightView};
use super::packed_weight::{Packed, pack, pack_rows};
use super::projection::{
    LoraMatrices, ParameterGradients, Projection, Trained, input_backward_sum, lora_a_out, lora_b_gradients,
    parameter_gradients,
};
use super::{SimdLevel, slice_op, with_floats};
use crate::accelerator::{AcceleratorWeight, accelerator_of};
use candle_core::{Device, Result, Tensor, bail};
use querl_core::config::BaseDtype;
use rayon::prelude::*;
use std::sync::Arc;

/// A frozen weight `(out, in)`. Forward and backward read one packed copy; clones share it.
///
/// | dtype | bytes a weight | a stored value |
/// |---|---|---|
/// | f32 | 4 | the weight |
/// | bf16 | 2 | rounded to 8 bits of mantissa |
/// | f16 | 2 | rounded to 11 bits of mantissa |
/// | int8 | 1.0625 | one of 255 even steps up to its group's largest |
/// | fp8 | 1 | rounded to 4 bits of mantissa (e4m3) as a share of its row's largest, which is 448 |
/// | nf4 | 0.5625 | one of 16 shares of its group's largest |
///
/// A group is 64 neighbours of one output row. Stored values are widened block by block and multiplied in f32: with the bf16 dot products
/// of Intel's fifth generation a core does 90 GFLOP/s, with f32 187. Activations are rounded in [`FrozenWeight::forward_int8`] alone.
///
/// Sources: Dettmers et al. 2022, "LLM.int8()" (symmetric absolute-maximum steps); Micikevicius et al. 2022, "FP8 Formats for Deep
/// Learning" (e4m3);
/// Dettmers et al. 2023, "QLoRA", appendix E (the 16 values).
#[derive(Clone)]
pub struct FrozenWeight {
    packed: Arc<Packed>,
    level: SimdLevel,
}

impl FrozenWeight {
    /// Packs a weight. `weight`: `(out, in)` of any float type.
    ///
    /// # Errors
    /// A tensor that is not a matrix of floats, or a value that is not finite in `dtype`.
    pub fn pack(weight: &Tensor, dtype: BaseDtype) -> Result<Self> {
        Ok(Self { packed: Arc::new(pack(weight, dtype)?), level: SimdLevel::detected() })
    }

    /// Packs the stored values in another type.
    ///
    /// # Errors
    /// A value that is not finite in `dtype`.
    pub(crate) fn to_dtype(&self, dtype: BaseDtype) -> Result<Self> {
        let (_, n_in) = self.dims();
        let rows = |first: usize, n: usize| {
            let mut values = vec![0f32; n * n_in];
            values.chunks_exact_mut(n_in).enumerate().for_each(|(i, row)| self.packed.row(first + i, row));
            Tensor::from_vec(values, (n, n_in), &Device::Cpu)
        };
        Ok(Self { packed: Arc::new(pack_rows(self.dims(), dtype, rows)?), level: self.level })
    }

    /// Number of outputs and of inputs.
    pub fn dims(&self) -> (usize, usize) {
        (self.packed.n_out, self.packed.n_in)
    }

    /// Storage type.
    pub fn dtype(&self) -> BaseDtype {
        self.packed.dtype
    }

    /// Bytes in memory, padding and scales included.
    pub fn memory_bytes(&self) -> usize {
        self.packed.memory_bytes()
    }

    /// The stored values as a tensor `(out, in)` f32.
    ///
    /// # Errors
    /// The tensor cannot be made.
    pub fn to_tensor(&self) -> Result<Tensor> {
        let (n_out, n_in) = self.dims();
        let mut values = vec![0f32; n_out * n_in];
        values.par_chunks_mut(n_in.max(1)).enumerate().for_each(|(output, row)| self.packed.row(output, row));
        Tensor::from_vec(values, (n_out, n_in), &Device::Cpu)
    }

    /// Rows of the weight by index: `(n, in)` f32. So one copy serves as an embedding and a tied head.
    ///
    /// # Errors
    /// An index that is not below the number of rows.
    pub fn rows(&self, ids: &[u32]) -> Result<Tensor> {
        let (n_out, n_in) = self.dims();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= n_out) {
            bail!("token id {id} is outside the vocabulary of {n_out}");
        }
        let mut values = vec![0f32; ids.len() * n_in];
        values.par_chunks_mut(n_in.max(1)).zip(ids).for_each(|(row, &id)| self.packed.row(id as usize, row));
        Tensor::from_vec(values, (ids.len(), n_in), &Device::Cpu)
    }

    /// `y = keep * y + x W^T` for `x` `(N, in)` and `y` `(N, out)`.
    ///
    /// # Errors
    /// Lengths do not match.
    pub fn forward(&self, x: &[f32], y: &mut [f32], keep: f32) -> Result<()> {
        packed_matmul::forward(self.level, &[Term { left: x, weight: self.source() }], Output::new(y, keep))
    }

    /// Like [`FrozenWeight::forward`], for an int8 weight and inputs that are rounded to int8 as well: sums of integers.
    ///
    /// # Errors
    /// The weight is not int8, or lengths do not match.
    pub(crate) fn forward_int8(&self, x: &Int8Rows, y: &mut [f32], keep: f32) -> Result<()> {
        let (n_out, n_in) = self.dims();
        if self.dtype() != BaseDtype::Int8 || !x.fits(n_in, y.len(), n_out) {
            bail!(
                "int8 matmul: the input or output ({} values) does not fit the weight ({n_out}, {n_in}), or its dtype {} is not int8",
                y.len(),
                self.dtype().name()
            );
        }
        match int8_matmul::forward(self.level, &self.packed, x, y, keep) {
            true => Ok(()),
            false => self.forward(x.to_floats(), y, keep),
        }
    }

    /// `dx = keep * dx + grad W` for `grad` `(N, out)` and `dx` `(N, in)`.
    ///
    /// # Errors
    /// Lengths do not match.
    pub fn backward(&self, grad: &[f32], dx: &mut [f32], keep: f32) -> Result<()> {
        packed_matmul::backward(self.level, &[Term { left: grad, weight: self.source() }], Output::new(dx, keep))
    }

    pub(super) fn source(&self) -> WeightView<'_> {
        WeightView::packed(&self.packed)
    }

    pub(super) fn level(&self) -> SimdLevel {
        self.level
    }

    #[cfg(test)]
    pub(super) fn at_level(&self, level: SimdLevel) -> Self {
        Self { packed: self.packed.clone(), level }
    }
}

/// The weight of a linear layer, of the embedding or of the language-model head, `(out, in)`.
#[derive(Clone)]
pub enum Weight {
    /// A frozen weight in CPU memory.
    Frozen(FrozenWeight),
    /// A trained weight: a variable, row-major f32.
    Trained(Tensor),
    /// A frozen weight in the memory of an accelerator.
    Accelerator(Arc<dyn AcceleratorWeight>),
}

impl Weight {
    /// Number of outputs and of inputs.
    ///
    /// # Errors
    /// A trained tensor that is not a matrix.
    pub fn dims(&self) -> Result<(usize, usize)> {
        match self {
            Self::Frozen(weight) => Ok(weight.dims()),
            Self::Trained(weight) => weight.dims2(),
            Self::Accelerator(weight) => Ok(weight.dims()),
        }
    }

    /// The values as a tensor `(out, in)` f32, without a gradient.
    pub(crate) fn to_tensor(&self) -> Result<Tensor> {
        match self {
            Self::Frozen(weight) => weight.to_tensor(),
            Self::Trained(weight) => Ok(weight.detach()),
            Self::Accelerator(weight) => weight.to_tensor(),
        }
    }
}

/// `x W^T + b`: [`frozen_linear`] or [`trained_linear`].
///
/// # Errors
/// As [`frozen_linear`].
pub fn linear(x: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> Result<Tensor> {
    match weight {
        Weight::Frozen(weight) => frozen_linear(x, weight, bias),
        Weight::Trained(weight) => match accelerator_of(weight)? {
            Some(accelerator) => accelerator.trained_linear(x, weight, bias),
            None => trained_linear(x, weight, bias),
        },
        Weight::Accelerator(weight) => weight.linear(x, bias),
    }
}

/// `x W^T + b` with frozen `W` and `b`.
///
/// `x`: `(N, in)`; `weight`: `(out, in)`; `bias`: `(out)`. Returns `(N, out)`. The gradient reaches `x` alone.
///
/// # Errors
/// Shapes that do not fit, or tensors other than f32 on the CPU.
pub fn frozen_linear(x: &Tensor, weight: &FrozenWeight, bias: Option<&Tensor>) -> Result<Tensor> {
    let forward = FrozenLayer::new(weight, bias, None)?;
    let backward = forward.clone();
    slice_op(
        "frozen-linear",
        [&x.contiguous()?],
        (x.dims2()?.0, weight.dims().0),
        move |[x]| Ok(forward.projection(&[], &[]).forward(x)?.0),
        move |_, [_, grad]| {
            let none = ParameterGradients::default();
            Ok([Some(input_backward_sum(&[(&backward.projection(&[], &[]), grad, &none)])?)])
        },
    )
}

/// `x W^T + b + scale * (x A^T) B^T` with frozen `W` and `b`.
///
/// `x`: `(N, in)`; `weight`: `(out, in)`; `lora_a`: `(rank, in)`; `lora_b`: `(out, rank)`. Returns `(N, out)`. Gradients
/// reach `x`, `lora_a` and `lora_b`.
///
/// # Errors
/// As [`frozen_linear`].
///
/// Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", equation 3.
pub fn lora_linear(
    x: &Tensor,
    weight: &FrozenWeight,
    bias: Option<&Tensor>,
    lora_a: &Tensor,
    lora_b: &Tensor,
    scale: f32,
) -> Result<Tensor> {
    let ((n_out, n_in), rank) = (weight.dims(), lora_a.dim(0)?);
    if lora_a.dims() != [rank, n_in] || lora_b.dims() != [n_out, rank] {
        bail!("adapter of shapes {:?} and {:?} on a weight ({n_out}, {n_in})", lora_a.dims(), lora_b.dims());
    }
    let forward = FrozenLayer::new(weight, bias, Some((rank, scale)))?;
    let backward = forward.clone();
    slice_op(
        "lora-linear",
        [&x.contiguous()?, &lora_a.contiguous()?, &lora_b.contiguous()?],
        (x.dims2()?.0, n_out),
        move |[x, a, b]| Ok(forward.projection(a, b).forward(x)?.0),
        move |[x, a, b], [_, grad]| {
            let (dx, found) = gradients(&backward.projection(a, b), x, grad)?;
            Ok([Some(dx), Some(found.a), Some(found.b)])
        },
    )
}

/// `x W^T + b` with a weight that is trained; gradients reach `x`, `weight` and `bias`.
///
/// Shapes as for [`frozen_linear`].
///
/// # Errors
/// As [`frozen_linear`].
pub fn trained_linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    match bias {
        None => trained_op([&x, &weight]),
        Some(bias) => trained_op([&x, &weight, &bias.contiguous()?]),
    }
}

/// `inputs`: x, weight, and optionally the bias.
fn trained_op<const N: usize>(inputs: [&Tensor; N]) -> Result<Tensor> {
    fn projection<'a>(inputs: &[&'a [f32]], n_in: usize) -> Projection<'a> {
        Projection::Trained { weight: inputs[1], n_in, bias: inputs.get(2).copied() }
    }
    let (n_out, n_in) = inputs[1].dims2()?;
    slice_op(
        "trained-linear",
        inputs,
        (inputs[0].dims2()?.0, n_out),
        move |inputs| Ok(projection(&inputs, n_in).forward(inputs[0])?.0),
        move |inputs, [_, grad]| {
            let (dx, found) = gradients(&projection(&inputs, n_in), inputs[0], grad)?;
            let mut all = [dx, found.weight, found.bias].into_iter();
            Ok(std::array::from_fn(|_| all.next()))
        },
    )
}

/// An owned frozen layer, for candle's graph.
struct FrozenLayer {
    weight: FrozenWeight,
    bias: Option<Vec<f32>>,
    lora: Option<(usize, f32)>,
}

impl FrozenLayer {
    fn new(weight: &FrozenWeight, bias: Option<&Tensor>, lora: Option<(usize, f32)>) -> Result<Arc<Self>> {
        let bias = bias.map(|bias| with_floats(bias, |bias| Ok(bias.to_vec()))).transpose()?;
        Ok(Arc::new(Self { weight: weight.clone(), bias, lora }))
    }

    fn projection<'a>(&'a self, a: &'a [f32], b: &'a [f32]) -> Projection<'a> {
        let lora = self.lora.map(|(rank, scale)| LoraMatrices { a, b, rank, scale, dropout: None });
        Projection::Frozen { weight: &self.weight, bias: self.bias.as_deref(), lora }
    }
}

/// Gradients of the input and of the parameters of a layer with input `x`, for the gradient of its output.
pub(crate) fn gradients(layer: &Projection<'_>, x: &[f32], grad: &[f32]) -> Result<(Vec<f32>, ParameterGradients)> {
    let ([lora_a_out], [mut found]) = (lora_a_out([layer], x)?, lora_b_gradients([(layer, grad)])?);
    parameter_gradients(&mut [Trained { layer, x, lora_a_out: &lora_a_out, grad, found: &mut found }])?;
    Ok((input_backward_sum(&[(layer, grad, &found)])?, found))
}
