//! Linear layers with LoRA and dropout: counterpart of `kernels/projection.rs` in querl-model.

use super::elementwise::{Element, same_length, whole_rows};
use super::gpu::Gpu;
use super::launch::{THREADS, blocks_for};
use super::matmul::{Matrix, Scale};
use super::weight::DeviceWeight;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DevicePtr, DevicePtrMut};
use half::bf16;

/// Parameters of one linear layer.
pub struct Projection<'a> {
    pub weight: &'a DeviceWeight,
    /// Frozen bias `(out)`.
    pub bias: Option<CudaView<'a, f32>>,
    pub lora: Option<LoraWeights<'a>>,
}

/// LoRA matrices of a linear layer, which add `scale * B A` to its weight; A and B are rounded to bf16 (see [`Gpu::to_bf16`]).
pub struct LoraWeights<'a> {
    /// LoRA A `(rank, in)`.
    pub a: CudaView<'a, bf16>,
    /// LoRA B `(out, rank)`.
    pub b: CudaView<'a, bf16>,
    pub rank: usize,
    pub scale: f32,
    /// Dropout on the input of A; `None` without dropout.
    pub masks: Option<DropoutMasks<'a>>,
}

/// Gradients of a layer's LoRA matrices; empty if it has none.
pub struct ParameterGradients {
    /// Gradient of LoRA A `(rank, in)`.
    pub a: CudaSlice<f32>,
    /// Gradient of LoRA B `(out, rank)`.
    pub b: CudaSlice<f32>,
    /// `scale * g B`, `(N, rank)`: needed for the input's gradient in addition to `g`.
    low: CudaSlice<bf16>,
}

impl Projection<'_> {
    /// Forward pass for `x` `(N, in)`: the layer's output `x W^T + b`, LoRA included, and `scale * x A^T` for the backward pass (empty
    /// without LoRA).
    pub fn forward(&self, gpu: &Gpu, x: &impl DevicePtr<bf16>) -> Result<(CudaSlice<bf16>, CudaSlice<bf16>)> {
        let (n_out, n_in) = self.weight.dims();
        let n_rows = whole_rows("projection", x.len(), n_in)?;
        let (mut y, scale) = match &self.bias {
            Some(bias) => (gpu.repeated(bias, n_rows)?, Scale::ADD),
            None => (gpu.alloc(n_rows * n_out)?, Scale::WRITE),
        };
        let low = self.add_product(gpu, x, &mut y, scale)?;
        Ok((y, low))
    }

    /// Like [`Projection::forward`], with the output added to `y`.
    pub fn add_to(
        &self,
        gpu: &Gpu,
        x: &impl DevicePtr<bf16>,
        y: &mut impl DevicePtrMut<f32>,
    ) -> Result<CudaSlice<bf16>> {
        if let Some(bias) = &self.bias {
            gpu.add_row(y, bias)?;
        }
        self.add_product(gpu, x, y, Scale::ADD)
    }

    fn add_product<T: Element>(
        &self,
        gpu: &Gpu,
        x: &impl DevicePtr<bf16>,
        y: &mut impl DevicePtrMut<T>,
        scale: Scale,
    ) -> Result<CudaSlice<bf16>> {
        let n_in = self.weight.dims().1;
        self.weight.multiply(gpu, &Matrix::of(gpu, x, n_in)?, y, scale)?;
        let Some(LoraWeights { a, b, rank, scale, masks }) = &self.lora else { return gpu.zeros(0) };
        let dropout = masks.map(|masks| gpu.dropout(x, n_in, masks)).transpose()?;
        let x = match &dropout {
            Some(dropout) => Matrix::of(gpu, dropout, n_in)?,
            None => Matrix::of(gpu, x, n_in)?,
        };
        let mut low = gpu.alloc(x.n_rows() * rank)?;
        gpu.product(&x, &Matrix::of(gpu, a, n_in)?.t(), &mut low, Scale { alpha: *scale, beta: 0.0 })?;
        gpu.product(&Matrix::of(gpu, &low, *rank)?, &Matrix::of(gpu, b, *rank)?.t(), y, Scale::ADD)?;
        Ok(low)
    }

    /// `scale * g B` for the gradient `g` of the output (`grad`, `(N, out)`), which the gradients of A and of the input need in addition to
    /// `g`. `None` without LoRA.
    pub fn lora_b_gradient(&self, gpu: &Gpu, grad: &impl DevicePtr<bf16>) -> Result<Option<ParameterGradients>> {
        let Some(LoraWeights { b, rank, scale, .. }) = &self.lora else { return Ok(None) };
        let grad = Matrix::of(gpu, grad, self.weight.dims().0)?;
        let mut low = gpu.alloc(grad.n_rows() * rank)?;
        gpu.product(&grad, &Matrix::of(gpu, b, *rank)?, &mut low, Scale { alpha: *scale, beta: 0.0 })?;
        Ok(Some(ParameterGradients { a: gpu.zeros(0)?, b: gpu.zeros(0)?, low }))
    }

    /// Adds the gradients of A and B to the result of [`Projection::lora_b_gradient`]; `low`: the second result of [`Projection::forward`].
    ///
    /// With `g` the gradient of the output, `d = scale * x A^T` and `v = scale * g B`: `dA = v^T x`, `dB = g^T d`; with dropout
    /// the masked `x`.
    pub fn parameter_gradients(
        &self,
        gpu: &Gpu,
        x: &impl DevicePtr<bf16>,
        low: &impl DevicePtr<bf16>,
        grad: &impl DevicePtr<bf16>,
        found: &mut ParameterGradients,
    ) -> Result<()> {
        let ((n_out, n_in), Some(LoraWeights { rank, masks, .. })) = (self.weight.dims(), &self.lora) else {
            return Ok(());
        };
        let dropout = masks.map(|masks| gpu.dropout(x, n_in, masks)).transpose()?;
        let x = match &dropout {
            Some(dropout) => Matrix::of(gpu, dropout, n_in)?,
            None => Matrix::of(gpu, x, n_in)?,
        };
        let (grad, down) = (Matrix::of(gpu, grad, n_out)?, Matrix::of(gpu, low, *rank)?);
        (found.a, found.b) = (gpu.alloc(rank * n_in)?, gpu.alloc(n_out * rank)?);
        gpu.product(&Matrix::of(gpu, &found.low, *rank)?.t(), &x, &mut found.a, Scale::WRITE)?;
        gpu.product(&grad.t(), &down, &mut found.b, Scale::WRITE)
    }

    /// Gradient of the weight, `g^T x`, `(out, in)`.
    pub fn weight_gradient(
        &self,
        gpu: &Gpu,
        x: &impl DevicePtr<bf16>,
        grad: &impl DevicePtr<bf16>,
    ) -> Result<CudaSlice<f32>> {
        let (n_out, n_in) = self.weight.dims();
        let mut found = gpu.alloc(n_out * n_in)?;
        let (x, grad) = (Matrix::of(gpu, x, n_in)?, Matrix::of(gpu, grad, n_out)?);
        gpu.product(&grad.t(), &x, &mut found, Scale::WRITE)?;
        Ok(found)
    }

    /// Gradient of the input, `out = alpha * (g W) + beta * out + v A` with the factors of `scale`, for the gradient `g` of the output
    /// (`grad`, `(N, out)`). `found`: the result of [`Projection::lora_b_gradient`], which holds `v`.
    pub fn input_gradient_into<T: Element>(
        &self,
        gpu: &Gpu,
        grad: &impl DevicePtr<bf16>,
        found: Option<&ParameterGradients>,
        out: &mut impl DevicePtrMut<T>,
        scale: Scale,
    ) -> Result<()> {
        let (n_out, n_in) = self.weight.dims();
        let weight = self.weight.rows(gpu, 0..n_out)?;
        gpu.product(&Matrix::of(gpu, grad, n_out)?, &weight.matrix(gpu, n_in)?, out, scale)?;
        drop(weight);
        let (Some(LoraWeights { a, rank, masks, .. }), Some(found)) = (&self.lora, found) else { return Ok(()) };
        let (low, a) = (Matrix::of(gpu, &found.low, *rank)?, Matrix::of(gpu, a, n_in)?);
        let Some(masks) = masks else { return gpu.product(&low, &a, out, Scale::ADD) };
        let mut of_dropped = gpu.alloc(low.n_rows() * n_in)?;
        gpu.product(&low, &a, &mut of_dropped, Scale::WRITE)?;
        gpu.add_dropout(out, &of_dropped, n_in, *masks)
    }
}

/// Gradient of the input that several layers share: the sum of `g W + v A` over the layers. Each layer comes with the gradient of its
/// output and the result of [`Projection::lora_b_gradient`]. Counterpart of `kernels::input_backward_sum`; use f32 for several layers,
/// since sums in bf16 are rounded after each.
pub fn input_gradient<T: Element>(
    gpu: &Gpu,
    layers: &[(&Projection<'_>, &CudaSlice<bf16>, Option<&ParameterGradients>)],
) -> Result<CudaSlice<T>> {
    let Some((first, grad, _)) = layers.first() else { return gpu.zeros(0) };
    let (n_out, n_in) = first.weight.dims();
    let mut out = gpu.alloc(whole_rows("input_gradient", grad.len(), n_out)? * n_in)?;
    for (index, (layer, grad, found)) in layers.iter().enumerate() {
        let scale = if index == 0 { Scale::WRITE } else { Scale::ADD };
        layer.input_gradient_into(gpu, *grad, *found, &mut out, scale)?;
    }
    Ok(out)
}

/// Dropout masks of the inputs of one layer's LoRA A.
#[derive(Clone, Copy)]
pub struct DropoutMasks<'a> {
    /// Dropout key of each row of the inputs.
    pub row_keys: &'a CudaSlice<u64>,
    /// Seed of the layer's masks.
    pub layer_seed: u64,
    /// Index of this GPU's first input among all inputs of the full layer: an even number.
    pub first_input: usize,
    /// Dropout probability, 0 to below 1: the fraction of inputs that is zeroed; the others are scaled by `1 / (1 - p)`.
    pub p: f64,
}

impl Gpu {
    /// Applies dropout `d` to rows of `width` values: `d(x)`.
    pub fn dropout(&self, x: &impl DevicePtr<bf16>, width: usize, masks: DropoutMasks<'_>) -> Result<CudaSlice<bf16>> {
        let mut y = self.alloc(x.len())?;
        self.drop_into(x, &mut y, width, masks, false)?;
        Ok(y)
    }

    /// `sum += d(x)`, with the dropout `d` of [`Gpu::dropout`].
    pub fn add_dropout<T: Element>(
        &self,
        sum: &mut impl DevicePtrMut<T>,
        x: &impl DevicePtr<bf16>,
        width: usize,
        masks: DropoutMasks<'_>,
    ) -> Result<()> {
        self.drop_into(x, sum, width, masks, true)
    }

    fn drop_into<T: Element>(
        &self,
        x: &impl DevicePtr<bf16>,
        to: &mut impl DevicePtrMut<T>,
        width: usize,
        DropoutMasks { row_keys, layer_seed, first_input, p }: DropoutMasks<'_>,
        adds: bool,
    ) -> Result<()> {
        let n_rows = whole_rows("dropout", x.len(), width)?;
        same_length("dropout", row_keys.len(), n_rows)?;
        same_length("dropout", to.len(), x.len())?;
        let mut args = [
            self.input(x),
            self.input(row_keys),
            self.output(to),
            n_rows.into(),
            width.into(),
            (first_input / 2).into(),
            layer_seed.into(),
            ((p * f64::from(u32::MAX)) as u32).into(),
            ((1.0 / (1.0 - p)) as f32).into(),
            u32::from(adds).into(),
        ];
        let blocks = blocks_for(x.len(), self.n_processors());
        // SAFETY: as `cuda/dropout.cuh` declares it; rows, keys and results are as many as was checked above.
        unsafe { self.launch(T::kernel(["drop_f32", "drop_bf16"]), [blocks, 1, 1], THREADS, 0, &mut args) }
    }
}
