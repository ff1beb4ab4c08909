//! Weights of linear layers, and their products as operations of candle's graph: frozen, frozen with LoRA, trained.

use super::packed_matmul::{self, Output, Term, WeightView, alloc_output, transpose};
use super::packed_weight::{Packed, pack};
use super::{SimdLevel, floats, with_floats};
use crate::accelerator::{AcceleratorWeight, accelerator_of};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Device, Layout, Result, Shape, Tensor, bail};
use querl_core::config::BaseDtype;
use rayon::prelude::*;
use std::sync::{Arc, OnceLock};

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
/// A group is 64 neighbours of one output row. Stored values are widened block by block and multiplied in f32, activations are
/// never rounded: with the bf16 dot products of Intel's fifth generation a core does 90 GFLOP/s, with f32 187.
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

    /// Outputs and inputs.
    pub fn dims(&self) -> (usize, usize) {
        (self.packed.n_out, self.packed.n_in)
    }

    /// How it is stored.
    pub fn dtype(&self) -> BaseDtype {
        self.packed.dtype
    }

    /// Bytes that it takes, padding and scales included.
    pub fn memory_bytes(&self) -> usize {
        self.packed.memory_bytes()
    }

    /// The values that are stored: `(out, in)` f32.
    ///
    /// # Errors
    /// The tensor cannot be made.
    pub fn to_tensor(&self) -> Result<Tensor> {
        let (n_out, n_in) = self.dims();
        let mut values = vec![0f32; n_out * n_in];
        values.par_chunks_mut(n_in.max(1)).enumerate().for_each(|(output, row)| self.packed.row(output, row));
        Tensor::from_vec(values, (n_out, n_in), &Device::Cpu)
    }

    /// Rows by index: `(n, in)` f32. An embedding that is also the head is held once.
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
    /// Lengths that do not fit.
    pub fn forward(&self, x: &[f32], y: &mut [f32], keep: f32) -> Result<()> {
        packed_matmul::forward(self.level, &[Term { left: x, weight: self.source() }], Output::new(y, keep))
    }

    /// `dx = keep * dx + grad W` for `grad` `(N, out)` and `dx` `(N, in)`.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn backward(&self, grad: &[f32], dx: &mut [f32], keep: f32) -> Result<()> {
        packed_matmul::backward(self.level, &[Term { left: grad, weight: self.source() }], Output::new(dx, keep))
    }

    pub(super) fn source(&self) -> WeightView<'_> {
        WeightView::packed(&self.packed)
    }

    pub(super) fn level(&self) -> SimdLevel {
        self.level
    }

    /// The same weight with the instructions of `level`.
    #[cfg(test)]
    pub(super) fn at_level(&self, level: SimdLevel) -> Self {
        Self { packed: self.packed.clone(), level }
    }
}

/// The weight of a linear layer, of the embedding or of the language-model head, `(out, in)`.
#[derive(Clone)]
pub enum Weight {
    /// No gradient for it.
    Frozen(FrozenWeight),
    /// A variable, row-major f32.
    Trained(Tensor),
    /// Frozen, in the memory of an accelerator.
    Accelerator(Arc<dyn AcceleratorWeight>),
}

impl Weight {
    /// Outputs and inputs.
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
}

/// `x W^T + b`: [`frozen_linear`] or [`trained_linear`].
///
/// # Errors
/// As theirs.
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
    x.contiguous()?.apply_op1(FrozenLinear::new(weight, bias)?)
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
    let op = LoraLinear { base: FrozenLinear::new(weight, bias)?, scale, down: OnceLock::new() };
    x.contiguous()?.apply_op3(&lora_a.contiguous()?, &lora_b.contiguous()?, op)
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
        None => x.apply_op2(&weight, TrainedLinear),
        Some(bias) => x.apply_op3(&weight, &bias.contiguous()?, TrainedLinear),
    }
}

/// Rows of `bias` to add a product to, or nothing.
fn started(
    bias: Option<&[f32]>,
    n_rows: usize,
    n_out: usize,
    terms: &[Term<'_>],
    level: SimdLevel,
) -> Result<Vec<f32>> {
    let Some(bias) = bias else {
        return alloc_output(n_rows * n_out, |y| packed_matmul::forward(level, terms, y));
    };
    if bias.len() != n_out {
        bail!("a bias of {} values for {n_out} outputs", bias.len());
    }
    let mut y = bias.repeat(n_rows);
    packed_matmul::forward(level, terms, Output::new(&mut y, 1.0))?;
    Ok(y)
}

struct FrozenLinear {
    weight: FrozenWeight,
    bias: Option<Vec<f32>>,
}

impl FrozenLinear {
    fn new(weight: &FrozenWeight, bias: Option<&Tensor>) -> Result<Self> {
        let bias = bias.map(|bias| with_floats(bias, |bias| Ok(bias.to_vec()))).transpose()?;
        Ok(Self { weight: weight.clone(), bias })
    }

    /// `x W^T + b` plus another product.
    fn forward(&self, x: &[f32], n_rows: usize, more: Option<Term<'_>>) -> Result<Vec<f32>> {
        let base = Term { left: x, weight: self.weight.source() };
        let terms = [base, more.unwrap_or(base)];
        let n_terms = if more.is_some() { 2 } else { 1 };
        started(self.bias.as_deref(), n_rows, self.weight.dims().0, &terms[..n_terms], self.weight.level())
    }
}

impl CustomOp1 for FrozenLinear {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let n_rows = layout.shape().dims2()?.0;
        let y = self.forward(floats(storage, layout)?, n_rows, None)?;
        Ok((CpuStorage::F32(y), (n_rows, self.weight.dims().0).into()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let dx = with_floats(grad, |grad| {
            let terms = [Term { left: grad, weight: self.weight.source() }];
            alloc_output(x.elem_count(), |dx| packed_matmul::backward(self.weight.level(), &terms, dx))
        })?;
        Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
    }
}

struct LoraLinear {
    base: FrozenLinear,
    scale: f32,
    /// `scale * x A^T`, `(N, rank)`: kept for the backward pass.
    down: OnceLock<Vec<f32>>,
}

impl CustomOp3 for LoraLinear {
    fn name(&self) -> &'static str {
        "lora-linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (n_rows, n_in) = x_layout.shape().dims2()?;
        let (n_out, rank) = b_layout.shape().dims2()?;
        let (x, a, b) = (floats(x, x_layout)?, floats(a, a_layout)?, floats(b, b_layout)?);
        let terms = [Term { left: x, weight: WeightView::rows(a, n_in) }];
        let mut down =
            alloc_output(n_rows * rank, |down| packed_matmul::forward(self.base.weight.level(), &terms, down))?;
        down.iter_mut().for_each(|x| *x *= self.scale);
        let y = self.base.forward(x, n_rows, Some(Term { left: &down, weight: WeightView::rows(b, rank) }))?;
        self.down.get_or_init(|| down);
        Ok((CpuStorage::F32(y), (n_rows, n_out).into()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        a: &Tensor,
        b: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, da, db] = with_floats(x, |x| {
            with_floats(a, |a| with_floats(b, |b| with_floats(grad, |grad| self.gradients(x, a, b, grad))))
        })?;
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), x.device())?),
            Some(Tensor::from_vec(da, a.shape(), a.device())?),
            Some(Tensor::from_vec(db, b.shape(), b.device())?),
        ))
    }
}

impl LoraLinear {
    /// With `g` the gradient of `y`, `d = scale * x A^T` and `v = scale * g B`: `dx = g W + v A`, `dA = v^T x`, `dB = g^T d`.
    fn gradients(&self, x: &[f32], a: &[f32], b: &[f32], grad: &[f32]) -> Result<[Vec<f32>; 3]> {
        let (level, (n_out, n_in)) = (self.base.weight.level(), self.base.weight.dims());
        let (rank, n_rows) = (a.len() / n_in, x.len() / n_in);
        let backward = |len, terms: &[Term<'_>]| alloc_output(len, |out| packed_matmul::backward(level, terms, out));
        let Some(down) = self.down.get() else { bail!("lora-linear: backward pass before the forward pass") };
        let mut v = backward(n_rows * rank, &[Term { left: grad, weight: WeightView::rows(b, rank) }])?;
        v.iter_mut().for_each(|x| *x *= self.scale);
        let terms = [
            Term { left: grad, weight: self.base.weight.source() },
            Term { left: &v, weight: WeightView::rows(a, n_in) },
        ];
        let dx = backward(n_rows * n_in, &terms)?;
        let v = transpose(level, &v, rank); // (rank, N)
        let da = backward(rank * n_in, &[Term { left: &v, weight: WeightView::rows(x, n_in) }])?;
        let down = transpose(level, down, rank); // (rank, N)
        let db = backward(rank * n_out, &[Term { left: &down, weight: WeightView::rows(grad, n_out) }])?; // (rank, out)
        Ok([dx, da, transpose(level, &db, n_out)])
    }
}

struct TrainedLinear;

impl TrainedLinear {
    fn forward(
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: Option<&[f32]>,
    ) -> Result<(CpuStorage, Shape)> {
        let ((n_rows, _), (n_out, n_in)) = (x_layout.shape().dims2()?, weight_layout.shape().dims2()?);
        let terms =
            [Term { left: floats(x, x_layout)?, weight: WeightView::rows(floats(weight, weight_layout)?, n_in) }];
        let y = started(bias, n_rows, n_out, &terms, SimdLevel::detected())?;
        Ok((CpuStorage::F32(y), (n_rows, n_out).into()))
    }

    /// With `g` the gradient of `y`: `dx = g W`, `dW = g^T x`.
    fn backward(x: &Tensor, weight: &Tensor, grad: &[f32]) -> Result<(Tensor, Tensor)> {
        let ((n_out, n_in), level) = (weight.dims2()?, SimdLevel::detected());
        let dx = with_floats(weight, |weight| {
            let terms = [Term { left: grad, weight: WeightView::rows(weight, n_in) }];
            alloc_output(x.elem_count(), |dx| packed_matmul::backward(level, &terms, dx))
        })?;
        let dw = with_floats(x, |x| {
            let grad = transpose(level, grad, n_out); // (out, N)
            let terms = [Term { left: &grad, weight: WeightView::rows(x, n_in) }];
            alloc_output(n_out * n_in, |dw| packed_matmul::backward(level, &terms, dw))
        })?;
        Ok((Tensor::from_vec(dx, x.shape(), x.device())?, Tensor::from_vec(dw, weight.shape(), x.device())?))
    }
}

impl CustomOp2 for TrainedLinear {
    fn name(&self) -> &'static str {
        "trained-linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Self::forward(x, x_layout, weight, weight_layout, None)
    }

    fn bwd(&self, x: &Tensor, weight: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dx, dw) = with_floats(grad, |grad| Self::backward(x, weight, grad))?;
        Ok((Some(dx), Some(dw)))
    }
}

impl CustomOp3 for TrainedLinear {
    fn name(&self) -> &'static str {
        "trained-linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Self::forward(x, x_layout, weight, weight_layout, Some(floats(bias, bias_layout)?))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (dx, dw) = with_floats(grad, |grad| Self::backward(x, weight, grad))?;
        let dbias = with_floats(grad, |grad| {
            let mut sum = vec![0f32; bias.elem_count()];
            for row in grad.chunks_exact(sum.len()) {
                sum.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
            }
            Ok(sum)
        })?;
        Ok((Some(dx), Some(dw), Some(Tensor::from_vec(dbias, bias.shape(), bias.device())?)))
    }
}
