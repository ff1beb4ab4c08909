//! Operations of a graph whose tensors are on a card: f32 in and out, products in bf16.

use crate::device::{
    CudaSlice, DeviceWeight, Gpu, Loan, LogprobRows, Namers, Projection, input_gradient, rounded_weight, storage, whole,
};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, Device, Layout, Result, Shape, Storage, Tensor, bail,
};
use std::sync::OnceLock;

fn tensor(gpu: &Gpu, values: CudaSlice<f32>, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage(gpu, values)), shape, BackpropOp::none(), false)
}

/// Every operation here starts from whole f32 tensors of the card.
fn not_on_the_cpu<T>() -> Result<T> {
    bail!("this operation runs on the card")
}

struct CardNorm {
    gpu: Gpu,
    eps: f32,
}

/// See [`super::rms_norm()`].
pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    whole(x)?.apply_op2(&whole(weight)?, CardNorm { gpu: Gpu::of(x.device())?, eps })
}

impl CustomOp2 for CardNorm {
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
        let y = self.gpu.normed(x.as_cuda_slice::<f32>()?, weight.as_cuda_slice::<f32>()?, self.eps)?;
        Ok((storage(&self.gpu, self.gpu.to_f32(&y)?), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, weight: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (grad, n_wanted) = (whole(grad)?, if weight.is_variable() { weight.elem_count() } else { 0 });
        let (values, norm, grad) = (Loan::of(x)?, Loan::of(weight)?, Loan::of(&grad)?);
        let (dx, dw) = self.gpu.norm_gradients(&*values, &*norm, self.eps, &*grad, None, n_wanted)?;
        let dw = (n_wanted > 0).then(|| tensor(&self.gpu, dw, weight.shape()));
        Ok((Some(tensor(&self.gpu, dx, x.shape())), dw))
    }
}

struct CardLinear {
    gpu: Gpu,
    weight: DeviceWeight,
    bias: Option<Tensor>,
}

/// See [`super::frozen_linear`].
pub(super) fn linear(x: &Tensor, weight: &DeviceWeight, bias: Option<&Tensor>) -> Result<Tensor> {
    let op = CardLinear { gpu: Gpu::of(x.device())?, weight: weight.clone(), bias: bias.map(whole).transpose()? };
    whole(x)?.apply_op1(op)
}

impl CardLinear {
    fn with<R>(&self, f: impl FnOnce(&Projection<'_>) -> Result<R>) -> Result<R> {
        let bias = self.bias.as_ref().map(Loan::of).transpose()?;
        let bias = bias.as_ref().map(|bias| bias.as_view());
        f(&Projection { weight: &self.weight, bias, low_rank: None })
    }
}

impl CustomOp1 for CardLinear {
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
        let grad = whole(grad)?;
        let grad = self.gpu.to_bf16(&*Loan::of(&grad)?)?;
        let dx = self.with(|layer| input_gradient(&self.gpu, &[(layer, &grad, None)]))?;
        Ok(Some(tensor(&self.gpu, dx, x.shape())))
    }
}

/// See [`super::trained_linear`], without a bias: on a card layers are fused, and the head has none.
pub(super) fn trained_linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if bias.is_some() {
        bail!("a trained linear layer with a bias is a part of a fused layer on the card");
    }
    let gpu = Gpu::of(x.device())?;
    let weight = whole(weight)?;
    let op = CardLinear { weight: rounded_weight(&gpu, &weight)?, gpu, bias: None };
    whole(x)?.apply_op2(&weight, op)
}

/// With the values of the weight, which is trained, as the second input.
impl CustomOp2 for CardLinear {
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
        let grad = whole(grad)?;
        let (grad, x) = (self.gpu.to_bf16(&*Loan::of(&grad)?)?, self.gpu.to_bf16(&*Loan::of(x)?)?);
        let dw = self.with(|layer| layer.weight_gradient(&self.gpu, &x, &grad))?;
        Ok((dx, Some(tensor(&self.gpu, dw, weight.shape()))))
    }
}

struct CardLogprobs {
    gpu: Gpu,
    head: DeviceWeight,
    targets: CudaSlice<u32>,
    temperature: f64,
    rows: OnceLock<LogprobRows>,
}

/// See [`super::token_logprobs`], which has checked the targets.
pub(super) fn token_logprobs(
    hidden: &Tensor,
    head: &DeviceWeight,
    targets: &[u32],
    temperature: f64,
) -> Result<Tensor> {
    let gpu = Gpu::of(hidden.device())?;
    let (targets, head) = (gpu.upload(targets)?, head.clone());
    whole(hidden)?.apply_op1(CardLogprobs { gpu, head, targets, temperature, rows: OnceLock::new() })
}

/// The same with a head that is trained.
pub(super) fn trained_token_logprobs(
    hidden: &Tensor,
    head: &Tensor,
    targets: &[u32],
    temperature: f64,
) -> Result<Tensor> {
    let gpu = Gpu::of(hidden.device())?;
    let trained = whole(head)?;
    let (targets, head) = (gpu.upload(targets)?, rounded_weight(&gpu, &trained)?);
    whole(hidden)?.apply_op2(&trained, CardLogprobs { gpu, head, targets, temperature, rows: OnceLock::new() })
}

impl CardLogprobs {
    /// Gradient of the hidden states, and of the head where there is memory for it.
    fn gradients(&self, hidden: &Tensor, grad: &Tensor, of_head: Option<&mut CudaSlice<f32>>) -> Result<Tensor> {
        let Some(rows) = self.rows.get() else { bail!("a gradient is asked of log-probabilities not computed yet") };
        let grad = whole(grad)?;
        let values = self.gpu.to_bf16(&*Loan::of(hidden)?)?;
        let (head, targets, grad) = (&self.head, &self.targets, Loan::of(&grad)?);
        let found = self.gpu.token_logprob_gradients(&values, head, targets, rows, &*grad, of_head)?;
        Ok(tensor(&self.gpu, found, hidden.shape()))
    }
}

/// With the values of the head, which is trained, as the second input.
impl CustomOp2 for CardLogprobs {
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

impl CustomOp1 for CardLogprobs {
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
    places: Vec<u32>,
}

/// See [`super::select_rows`].
pub(super) fn select_rows(x: &Tensor, places: Vec<u32>) -> Result<Tensor> {
    whole(x)?.apply_op1(SelectRows { gpu: Gpu::of(x.device())?, places })
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
        if let Some(place) = self.places.iter().find(|&&place| place as usize >= n_rows) {
            bail!("there is no row {place} among {n_rows}");
        }
        let picked = self.gpu.pick(x.as_cuda_slice::<f32>()?, &self.gpu.upload(&self.places)?, width)?;
        Ok((storage(&self.gpu, picked), (self.places.len(), width).into()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let ((n_rows, width), grad) = (x.dims2()?, whole(grad)?);
        let namers = Namers::new(&self.gpu, &self.places, n_rows)?;
        let dx = self.gpu.sum_rows(&*Loan::of(&grad)?, &namers, width)?;
        Ok(Some(tensor(&self.gpu, dx, x.shape())))
    }
}

/// Rows of a table by index, `(ids, width)` f32: see `FrozenWeight::rows`.
pub(crate) fn card_rows(table: &DeviceWeight, ids: &[u32], device: &Device) -> Result<Tensor> {
    let (n_rows, width) = table.dims();
    if let Some(id) = ids.iter().find(|&&id| id as usize >= n_rows) {
        bail!("token id {id} is outside the vocabulary of {n_rows}");
    }
    let gpu = Gpu::of(device)?;
    let rows = table.rows_at(&gpu, &gpu.upload(ids)?)?;
    Ok(tensor(&gpu, rows, (ids.len(), width)))
}

/// All values `(out, in)`, widened to f32.
pub(crate) fn card_tensor(weight: &DeviceWeight, device: &Device) -> Result<Tensor> {
    let gpu = Gpu::of(device)?;
    Ok(tensor(&gpu, weight.to_f32(&gpu)?, weight.dims()))
}
