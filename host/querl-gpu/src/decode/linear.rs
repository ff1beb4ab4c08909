//! Linear layers for decoding: frozen weights, and an adapter's matrices rounded to bf16 once for each policy.

use crate::device::{
    BorrowedValues, CudaSlice, CudaViewMut, DeviceWeight, Epilogue, Gpu, LoraAOut, LoraB, contiguous, gpu_weight,
};
use candle_core::{Error, Result, Tensor, bail};
use half::bf16;
use querl_model::backend::AdaptedLinear;
use querl_model::kernels::Weight;
use std::cell::RefCell;

/// Reads tensors that were written on one CUDA stream, for work on another stream.
pub(super) struct TensorReader<'g> {
    pub(super) gpu: &'g Gpu,
    tensor_gpu: &'g Gpu,
    /// Contiguous copies, freed when they have been read.
    copies: RefCell<Vec<Tensor>>,
    /// A flag, set to a value other than 0 if a trained value is NaN or Inf.
    non_finite: RefCell<CudaSlice<u32>>,
}

impl<'g> TensorReader<'g> {
    /// `tensor_gpu`: the GPU with the stream on which the tensors were written.
    pub(super) fn new(gpu: &'g Gpu, tensor_gpu: &'g Gpu) -> Result<Self> {
        gpu.wait_for(tensor_gpu)?;
        Ok(Self { gpu, tensor_gpu, copies: RefCell::default(), non_finite: RefCell::new(gpu.zeros(1)?) })
    }

    fn read<R>(&self, tensor: &Tensor, read: impl FnOnce(&CudaSlice<f32>) -> Result<R>) -> Result<R> {
        let values = contiguous(tensor)?;
        if values.id() != tensor.id() {
            self.gpu.wait_for(self.tensor_gpu)?;
            self.copies.borrow_mut().push(values.clone());
        }
        read(&*BorrowedValues::of(&values)?)
    }

    /// Reads trained values; [`TensorReader::finish`] reports whether they are finite.
    fn read_trained<R>(&self, tensor: &Tensor, read: impl FnOnce(&CudaSlice<f32>) -> Result<R>) -> Result<R> {
        self.read(tensor, |values| {
            self.gpu.mark_not_finite(values, &mut *self.non_finite.borrow_mut())?;
            read(values)
        })
    }

    pub(super) fn floats(&self, tensor: &Tensor) -> Result<CudaSlice<f32>> {
        self.read(tensor, |values| self.gpu.copy(values))
    }

    fn round_into(&self, tensor: &Tensor, to: &mut CudaViewMut<'_, bf16>) -> Result<()> {
        self.read_trained(tensor, |values| self.gpu.to_bf16_into(values, to))
    }

    /// The weight of a linear layer: a frozen weight itself, or a copy of a trained weight's current values, rounded to bf16.
    pub(super) fn weight(&self, weight: &Weight) -> Result<DeviceWeight> {
        match weight {
            Weight::Accelerator(weight) => Ok(gpu_weight(&**weight)?.clone()),
            Weight::Trained(tensor) => {
                let (n_out, n_in) = tensor.dims2()?;
                DeviceWeight::new(self.read_trained(tensor, |values| self.gpu.to_bf16(values))?, n_out, n_in)
            }
            Weight::Frozen(_) => {
                bail!("a frozen weight is in CPU memory but the decoder is on a GPU; internal error, please report it")
            }
        }
    }

    /// Finishes reading; the tensors may be modified or freed afterwards. Returns an error if a trained value is NaN or Inf.
    pub(super) fn finish(self) -> Result<()> {
        self.tensor_gpu.wait_for(self.gpu)?;
        // With such values every logit would be NaN. Reported here, as on the CPU, instead of at the first sampled token.
        if self.gpu.download(&*self.non_finite.borrow())? != [0] {
            bail!("a weight of the policy holds a value that is not finite as bf16");
        }
        Ok(())
    }
}

/// Linear layers that read the same input: their LoRA A matrices are concatenated for one product.
pub(super) struct LinearGroup {
    /// LoRA A of all members, `(sum of ranks, in)`; `None` without an adapter.
    pub(super) lora_a: Option<CudaSlice<bf16>>,
    pub(super) lora_width: usize,
    pub(super) members: Vec<DecodeLinear>,
    /// LoRA B, DoRA's factor and the bias of each member, as kernels read them.
    pub(super) epilogues: CudaSlice<Epilogue>,
    uploaded: Vec<Epilogue>,
}

pub(super) struct DecodeLinear {
    pub(super) weight: DeviceWeight,
    pub(super) lora_b: Option<LoraB>,
    bias: Option<CudaSlice<f32>>,
    /// DoRA's factor on each output, before the bias.
    factor: Option<CudaSlice<f32>>,
}

impl LinearGroup {
    pub(super) fn new(reader: &TensorReader<'_>, linears: &[AdaptedLinear<'_>]) -> Result<Self> {
        let (gpu, mut lora_width) = (reader.gpu, 0);
        let mut members = Vec::with_capacity(linears.len());
        for linear in linears {
            members.push(DecodeLinear::new(reader, linear, lora_width)?);
            lora_width += rank_of(linear);
        }
        let n_in = members.first().map_or(0, |member| member.weight.dims().1);
        let lora_a = if lora_width > 0 { Some(gpu.zeros(lora_width * n_in)?) } else { None };
        let uploaded: Vec<Epilogue> = members.iter().map(|member| member.epilogue(gpu)).collect::<Result<_>>()?;
        let mut group = Self { lora_a, lora_width, members, epilogues: gpu.upload(&uploaded)?, uploaded };
        group.replace(reader, linears)?;
        Ok(group)
    }

    /// Whether the matrices of an adapter for these linear layers can replace the current ones in captured CUDA graphs.
    pub(super) fn fits(&self, linears: &[AdaptedLinear<'_>]) -> bool {
        let is_plain = self.is_plain();
        self.members.iter().zip(linears).all(|(member, linear)| {
            let (rank, scale) = member.lora_b.as_ref().map_or((0, 0.0), |lora_b| (lora_b.rank, lora_b.scale));
            // A plain product gets its scale as a kernel argument, which is fixed in a captured graph; others read it from the table.
            let same_scale = !is_plain || scale == linear.pair.map_or(0.0, |pair| pair.scale);
            let same_dora = member.factor.is_some() == linear.factor.is_some();
            rank == rank_of(linear) && same_scale && same_dora && matches!(linear.weight, Weight::Accelerator(_))
        })
    }

    /// Overwrites the matrices of the adapter in place.
    pub(super) fn replace(&mut self, reader: &TensorReader<'_>, linears: &[AdaptedLinear<'_>]) -> Result<()> {
        let gpu = reader.gpu;
        for (member, linear) in self.members.iter_mut().zip(linears) {
            let n_in = member.weight.dims().1;
            if let (Some(lora_b), Some(pair), Some(a)) = (&mut member.lora_b, linear.pair, &mut self.lora_a) {
                let (first, end) = (lora_b.first * n_in, (lora_b.first + lora_b.rank) * n_in);
                reader.round_into(&pair.a, &mut a.slice_mut(first..end))?;
                reader.round_into(&pair.b, &mut lora_b.b.as_view_mut())?;
                lora_b.scale = pair.scale;
            }
            if let (Some(factor), Some(tensor)) = (&mut member.factor, &linear.factor) {
                let copied = |values: &CudaSlice<f32>| gpu.stream().memcpy_dtod(values, factor).map_err(Error::wrap);
                reader.read_trained(tensor, copied)?;
            }
        }
        let epilogues: Vec<Epilogue> = self.members.iter().map(|member| member.epilogue(gpu)).collect::<Result<_>>()?;
        if epilogues != self.uploaded {
            gpu.stream().memcpy_htod(&epilogues, &mut self.epilogues).map_err(Error::wrap)?;
            self.uploaded = epilogues;
        }
        Ok(())
    }

    /// Whether no member has a bias or a DoRA factor, so that cuBLAS alone can add the products to the residual.
    pub(super) fn is_plain(&self) -> bool {
        self.members.iter().all(|member| member.bias.is_none() && member.factor.is_none())
    }

    pub(super) fn n_in(&self) -> usize {
        self.members[0].weight.dims().1
    }

    /// LoRA A's output of `n` rows, stored at the start of `buffer`.
    pub(super) fn lora_a_out<'b>(&self, buffer: &'b CudaSlice<bf16>, n: usize) -> LoraAOut<'b> {
        LoraAOut { values: buffer.slice(..n * self.lora_width), width: self.lora_width }
    }
}

impl DecodeLinear {
    fn new(reader: &TensorReader<'_>, linear: &AdaptedLinear<'_>, first: usize) -> Result<Self> {
        let (gpu, weight) = (reader.gpu, reader.weight(linear.weight)?);
        let (n_out, n_in) = weight.dims();
        let lora_b = match linear.pair {
            Some(pair) => {
                let rank = pair.a.dim(0)?;
                if pair.a.dims() != [rank, n_in] || pair.b.dims() != [n_out, rank] {
                    let (a, b) = (pair.a.dims(), pair.b.dims());
                    bail!("adapter of shapes {a:?} and {b:?} on a weight ({n_out}, {n_in})");
                }
                Some(LoraB { b: gpu.zeros(n_out * rank)?, rank, first, scale: pair.scale })
            }
            None => None,
        };
        let bias = linear.bias.map(|bias| reader.floats(bias)).transpose()?;
        let factor = linear.factor.as_ref().map(|factor| reader.floats(factor)).transpose()?;
        Ok(Self { weight, lora_b, bias, factor })
    }

    fn epilogue(&self, gpu: &Gpu) -> Result<Epilogue> {
        let n_out = self.weight.dims().0;
        // SAFETY: the group owns the table and everything that its entries point to; neither is freed without the other.
        unsafe { Epilogue::new(gpu, n_out, self.lora_b.as_ref(), self.bias.as_ref(), self.factor.as_ref()) }
    }
}

fn rank_of(linear: &AdaptedLinear<'_>) -> usize {
    linear.pair.and_then(|pair| pair.a.dim(0).ok()).unwrap_or(0)
}
