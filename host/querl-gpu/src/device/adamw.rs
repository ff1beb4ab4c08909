//! The optimizer's step over all trained tensors in one launch, and the norm of all gradients: twin of `querl_train::AdamW` and
//! of `Gradients::clip`.

use super::gpu::Gpu;
use super::launch::Arg;
use super::tensors::Loan;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut};
use candle_core::{Result, bail};
use querl_model::AdamWStep;

/// A trained tensor with its gradient and its moments, of one length.
pub struct AdamTensor<'a> {
    /// Changed by a step.
    pub values: CudaViewMut<'a, f32>,
    /// Before the factor that clipping asks for.
    pub gradient: CudaView<'a, f32>,
    /// First moments.
    pub first: CudaViewMut<'a, f32>,
    /// Second moments.
    pub second: CudaViewMut<'a, f32>,
    /// Factor on the values: what decay leaves, 1 for vectors.
    pub keep: f32,
}

/// The same of candle's tensors, which lend their values for reading alone: the card changes `values`, `first` and `second`, in the
/// order of the stream, and no value of them is on the host.
pub struct AdamLoan<'a> {
    /// Changed by a step.
    pub values: Loan<'a>,
    /// Before the factor that clipping asks for.
    pub gradient: Loan<'a>,
    /// First moments.
    pub first: Loan<'a>,
    /// Second moments.
    pub second: Loan<'a>,
    /// Factor on the values: what decay leaves, 1 for vectors.
    pub keep: f32,
}

/// The global norm of gradients and the factor that clipping makes of it, on the card: `(2)`.
pub struct GradientNorm {
    values: CudaSlice<f32>,
}

/// Values that one block works on. Sums are formed by chunk and then in the chunks' order.
const CHUNK: usize = 8192;

impl GradientNorm {
    /// The norm before clipping, and the factor; the host waits for the card.
    ///
    /// # Errors
    /// Something that was asked of the card failed.
    pub fn read(&self, gpu: &Gpu) -> Result<(f32, f32)> {
        match gpu.download(&self.values)?[..] {
            [norm, scale] => Ok((norm, scale)),
            _ => bail!("a norm of {} values", self.values.len()),
        }
    }
}

/// Six numbers for each tensor: four addresses, its length, and where its chunks begin with `keep` in the upper half.
struct Table {
    entries: Vec<u64>,
    n_tensors: usize,
    n_chunks: usize,
}

impl Table {
    fn new() -> Self {
        Self { entries: Vec::new(), n_tensors: 0, n_chunks: 0 }
    }

    fn push(&mut self, addresses: [u64; 4], len: usize, keep: f32) -> Result<()> {
        let Ok(first_chunk) = u32::try_from(self.n_chunks) else {
            bail!("adamw: {} chunks are too many", self.n_chunks)
        };
        self.entries.extend(addresses);
        self.entries.extend([len as u64, u64::from(first_chunk) | u64::from(keep.to_bits()) << 32]);
        self.n_tensors += 1;
        self.n_chunks += len.div_ceil(CHUNK);
        Ok(())
    }
}

impl Gpu {
    /// Global norm over all gradients times `scale`, and `scale` times what clipping to `max_norm` makes of it.
    ///
    /// # Errors
    /// The card has no memory left.
    ///
    /// Source: torch `clip_grad_norm_`.
    pub fn gradient_norm(
        &self,
        gradients: &[CudaView<'_, f32>],
        scale: f32,
        max_norm: Option<f32>,
    ) -> Result<GradientNorm> {
        let mut table = Table::new();
        for gradient in gradients.iter().filter(|gradient| !gradient.is_empty()) {
            let address = gradient.device_ptr(self.stream()).0;
            table.push([0, address, 0, 0], gradient.len(), 1.0)?;
        }
        let entries = self.upload(&table.entries)?;
        let (mut parts, mut values) = (self.alloc::<f64>(table.n_chunks)?, self.alloc::<f32>(2)?);
        let mut args = [self.input(&entries), table.n_tensors.into(), self.output(&mut parts)];
        // SAFETY: as `cuda/adamw.cuh` declares it; each block writes one part.
        unsafe { self.launch("squared_norm_parts", [table.n_chunks, 1, 1], 256, 0, &mut args)? };
        let mut args = [
            self.input(&parts),
            table.n_chunks.into(),
            scale.into(),
            max_norm.unwrap_or(f32::INFINITY).into(),
            self.output(&mut values),
        ];
        // SAFETY: as `cuda/adamw.cuh` declares it.
        unsafe { self.launch("gradient_norm", [1, 1, 1], 256, 0, &mut args)? };
        Ok(GradientNorm { values })
    }

    /// The same where the host has found both.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn known_norm(&self, norm: f32, factor: f32) -> Result<GradientNorm> {
        Ok(GradientNorm { values: self.upload(&[norm, factor])? })
    }

    /// Takes one step for every tensor. Gradients are multiplied by the factor that `norm` holds.
    ///
    /// # Errors
    /// Lengths that differ.
    pub fn adamw(&self, tensors: &mut [AdamTensor<'_>], step: AdamWStep, norm: Option<&GradientNorm>) -> Result<()> {
        let mut table = Table::new();
        for tensor in tensors.iter_mut().filter(|tensor| !tensor.values.is_empty()) {
            let n = tensor.values.len();
            if [tensor.gradient.len(), tensor.first.len(), tensor.second.len()] != [n; 3] {
                bail!("adamw: a tensor of {n} values with a gradient of {}", tensor.gradient.len());
            }
            let stream = self.stream();
            let addresses = [
                tensor.values.device_ptr_mut(stream).0,
                tensor.gradient.device_ptr(stream).0,
                tensor.first.device_ptr_mut(stream).0,
                tensor.second.device_ptr_mut(stream).0,
            ];
            table.push(addresses, n, tensor.keep)?;
        }
        self.step_of(&table, step, norm)
    }

    /// The same for tensors of candle.
    ///
    /// # Errors
    /// Lengths that differ.
    pub fn adamw_of_loans(&self, tensors: &[AdamLoan<'_>], step: AdamWStep, norm: Option<&GradientNorm>) -> Result<()> {
        let mut table = Table::new();
        for AdamLoan { values, gradient, first, second, keep } in tensors {
            let n = values.len();
            if [gradient.len(), first.len(), second.len()] != [n; 3] {
                bail!("adamw: a tensor of {n} values with a gradient of {}", gradient.len());
            }
            let addresses = [values, gradient, first, second].map(|values| values.device_ptr(self.stream()).0);
            table.push(addresses, n, *keep)?;
        }
        self.step_of(&table, step, norm)
    }

    fn step_of(&self, table: &Table, step: AdamWStep, norm: Option<&GradientNorm>) -> Result<()> {
        let entries = self.upload(&table.entries)?;
        let AdamWStep { step_size, correction, beta1, beta2, eps } = step;
        let mut args = vec![self.input(&entries), table.n_tensors.into()];
        args.push(norm.map_or(Arg::null(), |norm| self.input(&norm.values)));
        args.extend([step_size, correction, beta1, beta2, eps].map(Arg::from));
        // SAFETY: as `cuda/adamw.cuh` declares it; the tensors are borrowed until the launch is in the stream's order.
        unsafe { self.launch("adamw", [table.n_chunks, 1, 1], 256, 0, &mut args) }
    }
}
