//! [`Accelerator`] of a GPU.

use super::adamw::AdamTensor;
use super::norm_rope::DeviceRope;
use super::operations::{self, GpuWeight};
use super::training::{GpuBackend, LayerRows};
use super::{BorrowedValues, DeviceWeight, Gpu, Matrix, PackedFormat, Scale, contiguous};
use crate::decode::GpuPolicy;
use candle_core::{DType, Device, Error, Result, Tensor};
use half::bf16;
use querl_core::config::BaseDtype;
use querl_model::backend::{Backend, DropoutMask, LayerAccelerator, LayerPass, LayerWeights, forward_layer};
use querl_model::kernels::RopeTable;
use querl_model::{
    Accelerator, AcceleratorWeight, Accelerators, AdamWStep, AdamWTensors, DeviceMemory, DeviceState, GradientNorm,
    KernelLaunch, LoraAdapter, PackedBatch, Ranks, Recompute, WeightValues,
};
use std::sync::Arc;

struct Gpus;

pub(super) const BACKEND: Backend = Backend {
    accelerators: &Gpus,
    layers: |device| Ok(Arc::new(Gpu::of(device)?)),
    new_policy: |decoder, adapter| {
        let gpu = Gpu::of(&decoder.compute_device().device())?;
        Ok(Box::new(GpuPolicy::new(&gpu, decoder, adapter)?))
    },
};

impl Accelerators for Gpus {
    fn open(&self, index: usize) -> Result<Arc<dyn Accelerator>> {
        Ok(Arc::new(Gpu::new(index)?))
    }

    fn of(&self, device: &Device) -> Result<Arc<dyn Accelerator>> {
        Ok(Arc::new(Gpu::of(device)?))
    }
}

/// State that querl-model stores for this backend.
fn state<T: 'static>(state: &DeviceState) -> Result<&T> {
    state.downcast_ref().ok_or_else(|| Error::Msg("state of another accelerator on a GPU".into()))
}

impl LayerAccelerator for Gpu {
    fn upload_rope(&self, rope: &RopeTable) -> Result<DeviceState> {
        Ok(Arc::new(DeviceRope::new(self, rope)?))
    }

    fn upload_rows(
        &self,
        rope: &DeviceState,
        batch: &PackedBatch,
        query_rows: Option<&[u32]>,
        dropout: Option<&DropoutMask>,
    ) -> Result<DeviceState> {
        let rope = rope.clone().downcast::<DeviceRope>();
        let rope = rope.map_err(|_| Error::Msg("a RoPE table of another accelerator on a GPU".into()))?;
        Ok(Arc::new(LayerRows::new(self, rope, batch, query_rows, dropout)?))
    }

    fn forward_layer(
        &self,
        weights: &LayerWeights,
        adapter: Option<&LoraAdapter>,
        x: &Tensor,
        pass: LayerPass,
        collected: Option<&Recompute>,
    ) -> Result<Tensor> {
        forward_layer(GpuBackend::new(self), weights, adapter, x, pass, collected)
    }
}

impl Accelerator for Gpu {
    fn device(&self) -> Device {
        self.device()
    }

    fn name(&self) -> Option<String> {
        self.stream().context().name().ok()
    }

    fn synchronize(&self) -> Result<()> {
        self.synchronize()
    }

    fn upload_weight(&self, values: WeightValues<'_>, dtype: BaseDtype) -> Result<Arc<dyn AcceleratorWeight>> {
        let format = PackedFormat::of(dtype);
        let weight = match (values, format) {
            (WeightValues::Bytes { bytes, dtype, dims }, Some(format)) => {
                self.upload_packed(&bytes, dtype, dims, format)?
            }
            (WeightValues::Bytes { bytes, dtype, dims: (n_out, n_in) }, None) => {
                DeviceWeight::new(self.upload_floats(&bytes, dtype)?, n_out, n_in)?
            }
            (WeightValues::Tensor(tensor), Some(format)) => {
                let values: Vec<f32> = tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?;
                DeviceWeight::packed(self, &self.upload(&values)?, tensor.dims2()?, format)?
            }
            (WeightValues::Tensor(tensor), None) => {
                let ((n_out, n_in), tensor) = (tensor.dims2()?, tensor.flatten_all()?.to_dtype(DType::BF16)?);
                DeviceWeight::new(self.upload(&tensor.to_vec1::<bf16>()?)?, n_out, n_in)?
            }
            (WeightValues::Random { rows, columns, width, seed, deviation }, format) => {
                let (n_out, n_in) = (rows.len(), columns.len());
                let values = self.normal_part(rows, columns, width, seed, deviation)?;
                match format {
                    Some(format) => DeviceWeight::packed(self, &values, (n_out, n_in), format)?,
                    None => DeviceWeight::new(values, n_out, n_in)?,
                }
            }
        };
        Ok(Arc::new(GpuWeight::new(self, weight)))
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
        operations::rms_norm(self, x, weight, eps)
    }

    fn trained_linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        operations::trained_linear(self, x, weight, bias)
    }

    fn trained_token_logprobs(
        &self,
        hidden: &Tensor,
        head: &Tensor,
        targets: &[u32],
        temperature: f64,
    ) -> Result<Tensor> {
        operations::trained_token_logprobs(self, hidden, head, targets, temperature)
    }

    fn select_rows(&self, x: &Tensor, rows: Vec<u32>) -> Result<Tensor> {
        operations::select_rows(self, x, rows)
    }

    fn all_reduce(&self, ranks: &Ranks, tensor: &Tensor) -> Result<Tensor> {
        let mut sum = self.copy(&*BorrowedValues::of(&contiguous(tensor)?)?)?;
        self.all_reduce(ranks, &mut sum)?;
        Ok(operations::tensor(self, sum, tensor.shape()))
    }

    fn connect(&self, ranks: &Ranks) -> Result<()> {
        self.connect(ranks)
    }

    fn settle(&self, ranks: &Ranks) -> Result<()> {
        self.settle(ranks)
    }

    fn gradient_norm(&self, gradients: &[Tensor], scale: f32, max_norm: Option<f32>) -> Result<GradientNorm> {
        let gradients: Vec<Tensor> = gradients.iter().map(contiguous).collect::<Result<_>>()?;
        let loans: Vec<BorrowedValues<'_>> = gradients.iter().map(BorrowedValues::of).collect::<Result<_>>()?;
        let views: Vec<_> = loans.iter().map(|loan| loan.as_view()).collect();
        let values = self.gradient_norm(&views, scale, max_norm)?;
        let (norm, scale) = values.read(self)?;
        Ok(GradientNorm { norm, scale, on_device: Arc::new(values) })
    }

    fn known_norm(&self, norm: f32, scale: f32) -> Result<GradientNorm> {
        Ok(GradientNorm { norm, scale, on_device: Arc::new(self.known_norm(norm, scale)?) })
    }

    fn adamw(&self, tensors: &[AdamWTensors<'_>], step: AdamWStep, norm: Option<&GradientNorm>) -> Result<()> {
        let gradients: Vec<Tensor> =
            tensors.iter().map(|tensors| contiguous(tensors.gradient)).collect::<Result<_>>()?;
        let borrowed = tensors.iter().zip(&gradients).map(|(tensors, gradient)| {
            let values = BorrowedValues::of;
            Ok([values(tensors.values)?, values(gradient)?, values(tensors.first)?, values(tensors.second)?])
        });
        let borrowed = borrowed.collect::<Result<Vec<_>>>()?;
        let tensors = borrowed.iter().zip(tensors).map(|(borrowed, tensors)| {
            let [values, gradient, first, second] = borrowed.each_ref().map(|values| values.as_view());
            AdamTensor { values, gradient, first, second, decay: tensors.decay }
        });
        let norm = norm.map(|norm| state(&norm.on_device)).transpose()?;
        self.adamw(&tensors.collect::<Vec<_>>(), step, norm)
    }

    fn memory(&self) -> Result<DeviceMemory> {
        self.memory()
    }

    fn reset_peak_memory(&self) -> Result<()> {
        self.reset_peak_memory()
    }

    fn trace(&self, work: &mut dyn FnMut()) -> Result<Vec<KernelLaunch>> {
        Ok(self.traced(work)?.1)
    }

    fn matrix_product(&self, n: usize) -> Result<Box<dyn FnMut() -> Result<()> + '_>> {
        let random = |seed| self.normal(n * n, seed, 1.0);
        let (left, right, mut out) = (random(1)?, random(2)?, random(3)?);
        self.synchronize()?;
        Ok(Box::new(move || {
            let (left, right) = (Matrix::of(self, &left, n)?, Matrix::of(self, &right, n)?.t());
            self.product(&left, &right, &mut out, Scale::WRITE)?;
            self.synchronize()
        }))
    }

    /// The memory of the copy is returned to the pool after each call and taken from it again, which takes no time.
    fn memory_copy(&self, n_bytes: usize) -> Result<Box<dyn FnMut() -> Result<()> + '_>> {
        let from = self.zeros::<u8>(n_bytes)?;
        self.synchronize()?;
        Ok(Box::new(move || {
            let copy = self.copy(&from)?;
            self.synchronize()?;
            drop(copy);
            Ok(())
        }))
    }
}
