//! AdamW over all trained tensors in one launch, and the norm of all gradients: counterpart of `querl_train::AdamW` and
//! `Gradients::clip`.

use super::gpu::Gpu;
use super::launch::Arg;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DevicePtr};
use candle_core::{Result, bail};
use querl_model::AdamWStep;

/// A trained tensor with its gradient and moments, all of the same length. The GPU writes `values`, `first` and `second` in stream order;
/// candle's tensors can only be borrowed for reading.
pub struct AdamTensor<'a> {
    pub values: CudaView<'a, f32>,
    /// Gradient before clipping.
    pub gradient: CudaView<'a, f32>,
    pub first: CudaView<'a, f32>,
    pub second: CudaView<'a, f32>,
    /// Factor of weight decay on the values, `1 - lr * weight_decay`; 1 for 1-D parameters.
    pub decay: f32,
}

/// Global L2 norm of gradients and the factor to multiply them by, in GPU memory: `(2)`.
pub struct GradientNorm {
    values: CudaSlice<f32>,
}

/// Values per thread block. Sums are computed per chunk, then in the order of the chunks.
const CHUNK: usize = 8192;

impl GradientNorm {
    /// Reads the norm before clipping and the factor on gradients; synchronises.
    pub fn read(&self, gpu: &Gpu) -> Result<(f32, f32)> {
        match gpu.download(&self.values)?[..] {
            [norm, scale] => Ok((norm, scale)),
            _ => bail!("a norm of {} values", self.values.len()),
        }
    }
}

/// Six numbers for each tensor: four addresses, its length, and its first chunk with `decay` in the upper half.
#[derive(Default)]
struct Table {
    entries: Vec<u64>,
    n_tensors: usize,
    n_chunks: usize,
}

impl Table {
    fn push(&mut self, addresses: [u64; 4], len: usize, decay: f32) -> Result<()> {
        let Ok(first_chunk) = u32::try_from(self.n_chunks) else {
            bail!("adamw: {} chunks are too many", self.n_chunks)
        };
        self.entries.extend(addresses);
        self.entries.extend([len as u64, u64::from(first_chunk) | u64::from(decay.to_bits()) << 32]);
        self.n_tensors += 1;
        self.n_chunks += len.div_ceil(CHUNK);
        Ok(())
    }
}

impl Gpu {
    /// Global L2 norm of all gradients times `scale`, and `scale` times the factor of clipping to `max_norm`, in GPU memory.
    ///
    /// Source: torch `clip_grad_norm_`.
    pub fn gradient_norm(
        &self,
        gradients: &[CudaView<'_, f32>],
        scale: f32,
        max_norm: Option<f32>,
    ) -> Result<GradientNorm> {
        let mut table = Table::default();
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

    /// A [`GradientNorm`] from a norm and a factor that the host has computed.
    pub fn known_norm(&self, norm: f32, factor: f32) -> Result<GradientNorm> {
        Ok(GradientNorm { values: self.upload(&[norm, factor])? })
    }

    /// One AdamW step for all tensors in place. Gradients are multiplied by the factor of `norm`.
    pub fn adamw(&self, tensors: &[AdamTensor<'_>], step: AdamWStep, norm: Option<&GradientNorm>) -> Result<()> {
        let mut table = Table::default();
        for AdamTensor { values, gradient, first, second, decay } in tensors {
            let n = values.len();
            if [gradient.len(), first.len(), second.len()] != [n; 3] {
                bail!("adamw: a tensor of {n} values with a gradient of {}", gradient.len());
            }
            if n > 0 {
                let addresses = [values, gradient, first, second].map(|values| values.device_ptr(self.stream()).0);
                table.push(addresses, n, *decay)?;
            }
        }
        let entries = self.upload(&table.entries)?;
        let AdamWStep { step_size, correction, beta1, beta2, eps } = step;
        let mut args = vec![self.input(&entries), table.n_tensors.into()];
        args.push(norm.map_or(Arg::null(), |norm| self.input(&norm.values)));
        args.extend([step_size, correction, beta1, beta2, eps].map(Arg::from));
        // SAFETY: as `cuda/adamw.cuh` declares it; the tensors are borrowed until the launch is in the stream's order.
        unsafe { self.launch("adamw", [table.n_chunks, 1, 1], 256, 0, &mut args) }
    }
}
