//! Differentiable operations on tensors of a GPU: f32 in and out, products in bf16.

use super::{
    BorrowedValues, CudaSlice, DeviceWeight, Gpu, InverseIndex, LogprobRows, Projection, contiguous, input_gradient,
    rounded_weight, storage,
};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, Error, Layout, Result, Shape, Storage, Tensor, bail};
use querl_model::AcceleratorWeight;
use std::any::Any;
use std::sync::OnceLock;

pub(super) fn tensor(gpu: &Gpu, values: CudaSlice<f32>, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage(gpu, values)), shape, BackpropOp::none(), false)
}

fn not_on_the_cpu<T>() -> Result<T> {
    bail!("this operation runs on the GPU")
}

/// A frozen weight together with the GPU that holds it.
pub(crate) struct GpuWeight {
    gpu: Gpu,
    weight: DeviceWeight,
}

impl GpuWeight {
    pub(super) fn new(gpu: &Gpu, weight: DeviceWeight) -> Self {
        Self { gpu: gpu.clone(), weight }
    }
}

pub(crate) fn gpu_weight(weight: &dyn AcceleratorWeight) -> Result<&DeviceWeight> {
    let weight = (weight as &dyn Any).downcast_ref::<GpuWeight>();
    weight.map(|weight| &weight.weight).ok_or_else(|| Error::Msg("a weight of another accelerator on a GPU".into()))
}

impl AcceleratorWeight for GpuWeight {
    fn dims(&self) -> (usize, usize) {
        self.weight.dims()
    }

    fn linear(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let bias = bias.map(contiguous).transpose()?;
        contiguous(x)?.apply_op1(GpuLinear { gpu: self.gpu.clone(), weight: self.weight.clone(), bias })
    }

    fn token_logprobs(&self, hidden: &Tensor, targets: &[u32], temperature: f64) -> Result<Tensor> {
        contiguous(hidden)?.apply_op1(GpuLogprobs::new(&self.gpu, self.weight.clone(), targets, temperature)?)
    }

    fn rows(&self, ids: &[u32]) -> Result<Tensor> {
        let (n_rows, width) = self.weight.dims();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= n_rows) {
            bail!("token id {id} is outside the vocabulary of {n_rows}");
        }
        let rows = self.weight.rows_at(&self.gpu, &self.gpu.upload(ids)?)?;
        Ok(tensor(&self.gpu, rows, (ids.len(), width)))
    }

    fn to_tensor(&self) -> Result<Tensor> {
        Ok(tensor(&self.gpu, self.weight.to_f32(&self.gpu)?, self.weight.dims()))
    }
}

struct GpuNorm {
    gpu: Gpu,
    eps: f32,
}

/// RMSNorm with gradients; see [`querl_model::kernels::rms_norm()`].
pub(super) fn rms_norm(gpu: &Gpu, x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    contiguous(x)?.apply_op2(&contiguous(weight)?, GpuNorm { gpu: gpu.clone(), eps })
}

impl CustomOp2 for GpuNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        not_on_the_cpu()
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        layout: &Layout,
        weight: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let y = self.gpu.rms_norm(x.as_cuda_slice::<f32>()?, weight.as_cuda_slice::<f32>()?, self.eps)?;
        Ok((storage(&self.gpu, self.gpu.to_f32(&y)?), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, weight: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (grad, n_wanted) = (contiguous(grad)?, if weight.is_variable() { weight.elem_count() } else { 0 });
        let (values, norm, grad) = (BorrowedValues::of(x)?, BorrowedValues::of(weight)?, BorrowedValues::of(&grad)?);
        let (dx, dw) = self.gpu.rms_norm_gradients(&*values, &*norm, self.eps, &*grad, None, n_wanted)?;
        let dw = (n_wanted > 0).then(|| tensor(&self.gpu, dw, weight.shape()));
        Ok((Some(tensor(&self.gpu, dx, x.shape())), dw))
    }
}

struct GpuLinear {
    gpu: Gpu,
    weight: DeviceWeight,
    bias: Option<Tensor>,
}

impl GpuLinear {
    fn with<R>(&self, f: impl FnOnce(&Projection<'_>) -> Result<R>) -> Result<R> {
        let bias = self.bias.as_ref().map(BorrowedValues::of).transpose()?;
        let bias = bias.as_ref().map(|bias| bias.as_view());
        f(&Projection { weight: &self.weight, bias, lora: None })
    }
}

impl CustomOp1 for GpuLinear {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        not_on_the_cpu()
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (n_rows, n_out) = (layout.shape().dims2()?.0, self.weight.dims().0);
        let x = self.gpu.to_bf16(x.as_cuda_slice::<f32>()?)?;
        let mut y = self.gpu.zeros::<f32>(n_rows * n_out)?;
        self.with(|layer| layer.add_to(&self.gpu, &x, &mut y))?;
        Ok((storage(&self.gpu, y), (n_rows, n_out).into()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = contiguous(grad)?;
        let grad = self.gpu.to_bf16(&*BorrowedValues::of(&grad)?)?;
        let dx = self.with(|layer| input_gradient(&self.gpu, &[(layer, &grad, None)]))?;
        Ok(Some(tensor(&self.gpu, dx, x.shape())))
    }
}

/// See [`querl_model::kernels::trained_linear`]; without a bias, because it is only used for the head, which has none.
pub(super) fn trained_linear(gpu: &Gpu, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if bias.is_some() {
        bail!("a trained linear layer with a bias outside of a transformer layer on the GPU");
    }
    let weight = contiguous(weight)?;
    let op = GpuLinear { weight: rounded_weight(gpu, &weight)?, gpu: gpu.clone(), bias: None };
    contiguous(x)?.apply_op2(&weight, op)
}

/// With the values of the weight, which is trained, as the second input.
impl CustomOp2 for GpuLinear {
    fn name(&self) -> &'static str {
        "trained-linear"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        not_on_the_cpu()
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        CustomOp1::cuda_fwd(self, x, layout)
    }

    fn bwd(&self, x: &Tensor, weight: &Tensor, y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dx = CustomOp1::bwd(self, x, y, grad)?;
        let grad = contiguous(grad)?;
        let (grad, x) = (self.gpu.to_bf16(&*BorrowedValues::of(&grad)?)?, self.gpu.to_bf16(&*BorrowedValues::of(x)?)?);
        let dw = self.with(|layer| layer.weight_gradient(&self.gpu, &x, &grad))?;
        Ok((dx, Some(tensor(&self.gpu, dw, weight.shape()))))
    }
}

struct GpuLogprobs {
    gpu: Gpu,
    head: DeviceWeight,
    targets: CudaSlice<u32>,
    temperature: f64,
    rows: OnceLock<LogprobRows>,
}

/// Log-probabilities and entropies with a trained head; see [`querl_model::kernels::token_logprobs`], which has checked the targets.
pub(super) fn trained_token_logprobs(
    gpu: &Gpu,
    hidden: &Tensor,
    head: &Tensor,
    targets: &[u32],
    temperature: f64,
) -> Result<Tensor> {
    let trained = contiguous(head)?;
    let head = rounded_weight(gpu, &trained)?;
    contiguous(hidden)?.apply_op2(&trained, GpuLogprobs::new(gpu, head, targets, temperature)?)
}

impl GpuLogprobs {
    fn new(gpu: &Gpu, head: DeviceWeight, targets: &[u32], temperature: f64) -> Result<Self> {
        let (gpu, targets) = (gpu.clone(), gpu.upload(targets)?);
        Ok(Self { gpu, head, targets, temperature, rows: OnceLock::new() })
    }

    /// Gradient of the hidden states, and of the head if memory for it is given.
    fn gradients(&self, hidden: &Tensor, grad: &Tensor, of_head: Option<&mut CudaSlice<f32>>) -> Result<Tensor> {
        let Some(rows) = self.rows.get() else { bail!("backward before the log-probabilities were computed") };
        let grad = contiguous(grad)?;
        let values = self.gpu.to_bf16(&*BorrowedValues::of(hidden)?)?;
        let (head, targets, grad) = (&self.head, &self.targets, BorrowedValues::of(&grad)?);
        let found = self.gpu.token_logprob_gradients(&values, head, targets, rows, &*grad, of_head)?;
        Ok(tensor(&self.gpu, found, hidden.shape()))
    }
}

/// With the values of the head, which is trained, as the second input.
impl CustomOp2 for GpuLogprobs {
    fn name(&self) -> &'static str {
        "token-logprobs"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        not_on_the_cpu()
    }

    fn cuda_fwd(
        &self,
        hidden: &CudaStorage,
        layout: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        CustomOp1::cuda_fwd(self, hidden, layout)
    }

    fn bwd(
        &self,
        hidden: &Tensor,
        head: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let mut of_head = self.gpu.zeros(head.elem_count())?;
        let of_hidden = self.gradients(hidden, grad, Some(&mut of_head))?;
        Ok((Some(of_hidden), Some(tensor(&self.gpu, of_head, head.shape()))))
    }
}

impl CustomOp1 for GpuLogprobs {
    fn name(&self) -> &'static str {
        "token-logprobs"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        not_on_the_cpu()
    }

    fn cuda_fwd(&self, hidden: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let hidden = self.gpu.to_bf16(hidden.as_cuda_slice::<f32>()?)?;
        let (out, rows) = self.gpu.token_logprobs(&hidden, &self.head, &self.targets, self.temperature)?;
        self.rows.get_or_init(|| rows);
        Ok((storage(&self.gpu, out), (layout.shape().dims2()?.0, 2).into()))
    }

    fn bwd(&self, hidden: &Tensor, _out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.gradients(hidden, grad, None)?))
    }
}

struct SelectRows {
    gpu: Gpu,
    indices: Vec<u32>,
}

/// Rows of a tensor by index, with gradients; see [`querl_model::kernels::select_rows`].
pub(super) fn select_rows(gpu: &Gpu, x: &Tensor, indices: Vec<u32>) -> Result<Tensor> {
    contiguous(x)?.apply_op1(SelectRows { gpu: gpu.clone(), indices })
}

impl CustomOp1 for SelectRows {
    fn name(&self) -> &'static str {
        "select-rows"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        not_on_the_cpu()
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (n_rows, width) = layout.shape().dims2()?;
        if let Some(row) = self.indices.iter().find(|&&row| row as usize >= n_rows) {
            bail!("there is no row {row} among {n_rows}");
        }
        let picked = self.gpu.pick(x.as_cuda_slice::<f32>()?, &self.gpu.upload(&self.indices)?, width)?;
        Ok((storage(&self.gpu, picked), (self.indices.len(), width).into()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let ((n_rows, width), grad) = (x.dims2()?, contiguous(grad)?);
        let namers = InverseIndex::new(&self.gpu, &self.indices, n_rows)?;
        let dx = self.gpu.sum_rows(&*BorrowedValues::of(&grad)?, &namers, width)?;
        Ok(Some(tensor(&self.gpu, dx, x.shape())))
    }
}
