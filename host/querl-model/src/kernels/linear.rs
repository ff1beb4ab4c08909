//! Linear layers. For a frozen weight no gradient is computed or kept.

use super::{FrozenWeight, Mat, Threads, floats, matmul, with_floats};
use candle_core::{CpuStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Tensor};

/// The weight of a linear layer, of the embedding or of the language-model head, `(out, in)`.
#[derive(Clone)]
pub enum Weight {
    /// No gradient for it.
    Frozen(FrozenWeight),
    /// A variable, row-major f32.
    Trained(Tensor),
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
        Weight::Trained(weight) => trained_linear(x, weight, bias),
    }
}

struct FrozenLinear {
    weight: FrozenWeight,
    bias: Option<Tensor>,
}

/// `x W^T + b` with frozen `W` and `b`.
///
/// `x`: `(N, in)`; `weight`: `(out, in)`; `bias`: `(out)`. Returns `(N, out)`. The gradient reaches `x` alone.
///
/// # Errors
/// Shapes that do not fit, or tensors other than contiguous f32 on the CPU.
pub fn frozen_linear(x: &Tensor, weight: &FrozenWeight, bias: Option<&Tensor>) -> Result<Tensor> {
    x.contiguous()?.apply_op1(FrozenLinear { weight: weight.clone(), bias: bias.map(Tensor::detach) })
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
    let base = FrozenLinear { weight: weight.clone(), bias: bias.map(Tensor::detach) };
    x.contiguous()?.apply_op3(lora_a, lora_b, LoraLinear { base, scale })
}

/// `x W^T + b` with a weight that is trained; gradients reach `x`, `weight` and `bias`.
///
/// Shapes as for [`frozen_linear`].
///
/// # Errors
/// As [`frozen_linear`].
pub fn trained_linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = x.matmul(&weight.t()?)?;
    bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
}

impl FrozenLinear {
    fn forward(&self, x: &[f32], n_rows: usize) -> Result<Vec<f32>> {
        let n_out = self.weight.dims().0;
        let mut y = vec![0f32; n_rows * n_out];
        if let Some(bias) = &self.bias {
            with_floats(bias, |bias| {
                y.chunks_exact_mut(n_out).for_each(|row| row.copy_from_slice(bias));
                Ok(())
            })?;
        }
        let keep = if self.bias.is_some() { 1.0 } else { 0.0 };
        self.weight.forward(x, &mut y, keep)?;
        Ok(y)
    }

    fn backward(&self, grad: &[f32], n_rows: usize) -> Result<Vec<f32>> {
        let n_in = self.weight.dims().1;
        let mut dx = vec![0f32; n_rows * n_in];
        self.weight.backward(grad, &mut dx, 0.0)?;
        Ok(dx)
    }
}

impl CustomOp1 for FrozenLinear {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let n_rows = layout.shape().dims2()?.0;
        let y = self.forward(floats(storage, layout)?, n_rows)?;
        Ok((CpuStorage::F32(y), (n_rows, self.weight.dims().0).into()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let n_rows = x.dim(0)?;
        let dx = with_floats(grad, |grad| self.backward(grad, n_rows))?;
        Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
    }
}

struct LoraLinear {
    base: FrozenLinear,
    scale: f32,
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
        let (n_out, n_in) = self.base.weight.dims();
        let n_rows = x_layout.shape().dims2()?.0;
        let rank = a_layout.shape().dims2()?.0;
        let (x, a, b) = (floats(x, x_layout)?, floats(a, a_layout)?, floats(b, b_layout)?);
        let mut y = self.base.forward(x, n_rows)?;
        let mut down = vec![0f32; n_rows * rank];
        matmul(&mut down, 0.0, 1.0, Mat::new(x, n_rows, n_in), Mat::new(a, rank, n_in).t(), Threads::All)?;
        let (down, b) = (Mat::new(&down, n_rows, rank), Mat::new(b, n_out, rank));
        matmul(&mut y, 1.0, self.scale, down, b.t(), Threads::All)?;
        Ok((CpuStorage::F32(y), (n_rows, n_out).into()))
    }

    /// With `g` the gradient of `y` and `v = scale * g B`: `dx = g W + v A`, `dA = v^T x`, `dB = scale * g^T (x A^T)`.
    fn bwd(
        &self,
        x: &Tensor,
        a: &Tensor,
        b: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (n_rows, n_in) = x.dims2()?;
        let (rank, n_out) = (a.dim(0)?, b.dim(0)?);
        let (mut da, mut db) = (vec![0f32; rank * n_in], vec![0f32; n_out * rank]);
        let dx = with_floats(x, |x| {
            with_floats(grad, |grad| {
                let (x, g) = (Mat::new(x, n_rows, n_in), Mat::new(grad, n_rows, n_out));
                let mut dx = self.base.backward(grad, n_rows)?;
                with_floats(a, |a| {
                    let a = Mat::new(a, rank, n_in);
                    let (mut down, mut v) = (vec![0f32; n_rows * rank], vec![0f32; n_rows * rank]);
                    matmul(&mut down, 0.0, 1.0, x, a.t(), Threads::All)?;
                    with_floats(b, |b| matmul(&mut v, 0.0, self.scale, g, Mat::new(b, n_out, rank), Threads::All))?;
                    let v = Mat::new(&v, n_rows, rank);
                    matmul(&mut dx, 1.0, 1.0, v, a, Threads::All)?;
                    matmul(&mut da, 0.0, 1.0, v.t(), x, Threads::All)?;
                    matmul(&mut db, 0.0, self.scale, g.t(), Mat::new(&down, n_rows, rank), Threads::All)
                })?;
                Ok(dx)
            })
        })?;
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), x.device())?),
            Some(Tensor::from_vec(da, a.shape(), a.device())?),
            Some(Tensor::from_vec(db, b.shape(), b.device())?),
        ))
    }
}
