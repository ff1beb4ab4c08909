//! Log-probabilities and entropies from hidden states and the language-model head, a chunk of the vocabulary at a time: counterpart of
//! [`querl_model::kernels::token_logprobs`].

use super::elementwise::same_length;
use super::gpu::Gpu;
use super::matmul::{Matrix, Scale};
use super::weight::DeviceWeight;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{Result, bail};
use half::bf16;
use querl_model::kernels::{GPU_LOGITS, GPU_LOGITS_PER_ROW};
use std::ops::Range;

/// Sums of each row, saved by the forward pass for the backward pass.
pub struct LogprobRows {
    /// Log-sum-exp and entropy of each row: `(N, 2)`.
    sums: CudaSlice<f32>,
    temperature: f64,
}

/// Threads per row of a part.
const ROW_THREADS: usize = 512;

/// The token ranges of the parts of the vocabulary.
fn parts(n_rows: usize, n_tokens: usize) -> impl Iterator<Item = Range<usize>> {
    let size = (GPU_LOGITS / n_rows.max(1) / GPU_LOGITS_PER_ROW).max(1) * GPU_LOGITS_PER_ROW;
    (0..n_tokens).step_by(size).map(move |start| start..(start + size).min(n_tokens))
}

impl Gpu {
    /// Log-probability of each row's target and entropy of each row's distribution, `softmax(hidden head^T / temperature)`: `(N, 2)` in
    /// nats. `hidden`: `(N, H)`; `targets`: N token ids, which the caller must check against the vocabulary.
    pub fn token_logprobs(
        &self,
        hidden: &impl DevicePtr<bf16>,
        head: &DeviceWeight,
        targets: &impl DevicePtr<u32>,
        temperature: f64,
    ) -> Result<(CudaSlice<f32>, LogprobRows)> {
        let (n_rows, (n_tokens, width)) = (targets.len(), head.dims());
        same_length("token_logprobs", hidden.len(), n_rows * width)?;
        if temperature.is_nan() || temperature <= 0.0 {
            bail!("temperature is {temperature}; expected above 0");
        }
        let hidden = Matrix::of(self, hidden, width)?;
        let mut state = self.alloc::<f64>(n_rows * 4)?;
        let mut logits = self.alloc::<f32>(n_rows * parts(n_rows, n_tokens).next().map_or(0, |part| part.len()))?;
        for part in parts(n_rows, n_tokens) {
            let mut logits = logits.slice_mut(..n_rows * part.len());
            let scale = Scale { alpha: (1.0 / temperature) as f32, beta: 0.0 };
            let rows = head.rows(self, part.clone())?;
            self.product(&hidden, &rows.matrix(self, width)?.t(), &mut logits, scale)?;
            drop(rows);
            let mut args = [
                self.input(&logits),
                self.input(targets),
                self.output(&mut state),
                part.start.into(),
                part.len().into(),
            ];
            // SAFETY: as `cuda/logprobs.cuh` declares it: a block for each row.
            unsafe { self.launch("logprob_part", [n_rows, 1, 1], ROW_THREADS, 0, &mut args)? };
        }
        let (mut out, mut sums) = (self.alloc(n_rows * 2)?, self.alloc(n_rows * 2)?);
        let mut args = [self.input(&state), self.output(&mut out), self.output(&mut sums), n_rows.into()];
        // SAFETY: as `cuda/logprobs.cuh` declares it: a thread for each row.
        unsafe { self.launch("logprob_end", [n_rows.div_ceil(256), 1, 1], 256, 0, &mut args)? };
        Ok((out, LogprobRows { sums, temperature }))
    }

    /// Gradient of `hidden`, `(N, H)` f32, for the gradient `grad` `(N, 2)` of [`Gpu::token_logprobs`]'s result; the gradient of a trained
    /// head `(V, H)` is written to `of_head`.
    ///
    /// With `p` the probabilities, `a` and `b` the gradients of log-probability and entropy `E`:
    /// `d logit_j = a (1[j = target] - p_j) - b p_j (ln p_j + E)`, over the temperature.
    pub fn token_logprob_gradients(
        &self,
        hidden: &impl DevicePtr<bf16>,
        head: &DeviceWeight,
        targets: &impl DevicePtr<u32>,
        rows: &LogprobRows,
        grad: &impl DevicePtr<f32>,
        mut of_head: Option<&mut CudaSlice<f32>>,
    ) -> Result<CudaSlice<f32>> {
        let (n_rows, (n_tokens, width)) = (targets.len(), head.dims());
        let n_of_head = of_head.as_ref().map_or(n_tokens * width, |of_head| of_head.len());
        same_length("token_logprob_gradients", n_of_head, n_tokens * width)?;
        same_length("token_logprob_gradients", hidden.len(), n_rows * width)?;
        same_length("token_logprob_gradients", grad.len(), n_rows * 2)?;
        let inverse_temperature = (1.0 / rows.temperature) as f32;
        let hidden = Matrix::of(self, hidden, width)?;
        let mut dhidden = self.alloc::<f32>(n_rows * width)?;
        let n_logits = n_rows * parts(n_rows, n_tokens).next().map_or(0, |part| part.len());
        let (mut logits, mut dlogits) = (self.alloc::<f32>(n_logits)?, self.alloc::<bf16>(n_logits)?);
        for part in parts(n_rows, n_tokens) {
            let n = n_rows * part.len();
            let (mut logits, mut dlogits) = (logits.slice_mut(..n), dlogits.slice_mut(..n));
            let part_rows = head.rows(self, part.clone())?;
            let head = part_rows.matrix(self, width)?;
            self.product(&hidden, &head.t(), &mut logits, Scale { alpha: inverse_temperature, beta: 0.0 })?;
            let mut args = [
                self.input(&logits),
                self.input(targets),
                self.input(&rows.sums),
                self.input(grad),
                self.output(&mut dlogits),
                part.start.into(),
                part.len().into(),
                inverse_temperature.into(),
            ];
            // SAFETY: as `cuda/logprobs.cuh` declares it: a block for each row.
            unsafe { self.launch("logit_gradients", [n_rows, 1, 1], ROW_THREADS, 0, &mut args)? };
            let scale = if part.start == 0 { Scale::WRITE } else { Scale::ADD };
            let dlogits = Matrix::of(self, &dlogits, part.len())?;
            self.product(&dlogits, &head, &mut dhidden, scale)?;
            if let Some(of_head) = &mut of_head {
                let mut of_part = of_head.slice_mut(part.start * width..part.end * width);
                self.product(&dlogits.t(), &hidden, &mut of_part, Scale::WRITE)?;
            }
        }
        Ok(dhidden)
    }
}
