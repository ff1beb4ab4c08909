//! Log-probabilities and entropies straight from hidden states and the language-model head, in chunks of rows: `(N, V)` is
//! never held.

use super::{Mat, Threads, exp, floats, matmul, with_floats};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;
use std::sync::Arc;

/// Whether the head's weight is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadGradient {
    /// Compute it: full fine-tuning.
    Needed,
    /// Do not: the head is frozen.
    NotNeeded,
}

struct TokenLogprobs {
    targets: Arc<Vec<u32>>,
    inverse_temperature: f32,
    head_gradient: HeadGradient,
}

/// Log-probability of each row's target and entropy of each row's distribution, `softmax(hidden head^T / temperature)`.
///
/// `hidden`: `(N, H)`; `head`: `(V, H)`; `targets`: N token ids. Returns `(N, 2)`: log-probability in nats, entropy in nats.
/// Gradients reach `hidden`, and `head` where needed.
///
/// # Errors
/// A target outside the vocabulary, a temperature that is not above 0, or tensors other than f32 on the CPU.
pub fn token_logprobs(
    hidden: &Tensor,
    head: &Tensor,
    targets: &Arc<Vec<u32>>,
    temperature: f64,
    head_gradient: HeadGradient,
) -> Result<Tensor> {
    let n_tokens = head.dim(0)?;
    if targets.len() != hidden.dim(0)? {
        bail!("token_logprobs: {} targets for {} rows", targets.len(), hidden.dim(0)?);
    }
    if let Some(target) = targets.iter().find(|&&target| target as usize >= n_tokens) {
        bail!("token id {target} is outside the vocabulary of {n_tokens}");
    }
    if temperature.is_nan() || temperature <= 0.0 {
        bail!("temperature is {temperature}; expected above 0");
    }
    let op = TokenLogprobs { targets: targets.clone(), inverse_temperature: (1.0 / temperature) as f32, head_gradient };
    hidden.contiguous()?.apply_op2(&head.contiguous()?, op)
}

/// Logits of one chunk are at most about this many values: they stay in the second-level cache's reach.
const CHUNK_VALUES: usize = 1 << 18;

/// What a row's logits come to.
struct RowSummary {
    logprob: f32,
    entropy: f32,
    log_sum: f32, // log of the sum of exponentials
}

fn summarise(logits: &[f32], target: usize) -> RowSummary {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (mut sum, mut weighted) = (0f32, 0f32);
    for &logit in logits {
        let e = exp(logit - max);
        sum += e;
        weighted += e * (logit - max);
    }
    let log_sum = max + sum.ln();
    RowSummary { logprob: logits[target] - log_sum, entropy: sum.ln() - weighted / sum, log_sum }
}

impl TokenLogprobs {
    fn chunk_rows(n_vocabulary: usize) -> usize {
        (CHUNK_VALUES / n_vocabulary).clamp(8, 512)
    }

    fn logits(&self, hidden: &[f32], n_rows: usize, head: Mat<'_>, n_vocabulary: usize) -> Result<Vec<f32>> {
        let width = hidden.len() / n_rows;
        let mut logits = vec![0f32; n_rows * n_vocabulary];
        let hidden = Mat::new(hidden, n_rows, width);
        matmul(&mut logits, 0.0, self.inverse_temperature, hidden, head.t(), Threads::All)?;
        Ok(logits)
    }

    fn forward(&self, hidden: &[f32], head: &[f32], width: usize) -> Result<Vec<f32>> {
        let n_vocabulary = head.len() / width;
        let chunk = Self::chunk_rows(n_vocabulary);
        let mut out = Vec::with_capacity(self.targets.len() * 2);
        for (hidden, targets) in hidden.chunks(chunk * width).zip(self.targets.chunks(chunk)) {
            let head = Mat::new(head, n_vocabulary, width);
            let logits = self.logits(hidden, targets.len(), head, n_vocabulary)?;
            let rows = logits.par_chunks_exact(n_vocabulary).zip(targets);
            let rows: Vec<RowSummary> = rows.map(|(row, &target)| summarise(row, target as usize)).collect();
            out.extend(rows.iter().flat_map(|row| [row.logprob, row.entropy]));
        }
        Ok(out)
    }

    /// With `p` the probabilities, `a` and `b` the gradients of log-probability and entropy `E`:
    /// `d logit_j = a (1[j = target] - p_j) - b p_j (ln p_j + E)`, over the temperature.
    fn logit_gradients(&self, logits: &mut [f32], targets: &[u32], grad: &[f32], n_vocabulary: usize) {
        let rows = logits.par_chunks_exact_mut(n_vocabulary).zip(targets).zip(grad.par_chunks_exact(2));
        rows.for_each(|((row, &target), grad)| {
            let summary = summarise(row, target as usize);
            for logit in row.iter_mut() {
                let log_p = *logit - summary.log_sum;
                let p = exp(log_p);
                *logit = -p * (grad[0] + grad[1] * (log_p + summary.entropy));
            }
            row[target as usize] += grad[0];
        });
    }

    fn backward(
        &self,
        hidden: &[f32],
        head: &[f32],
        grad: &[f32],
        width: usize,
    ) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
        let n_vocabulary = head.len() / width;
        let chunk = Self::chunk_rows(n_vocabulary);
        let head_mat = Mat::new(head, n_vocabulary, width);
        let mut dhidden = vec![0f32; hidden.len()];
        let mut dhead = (self.head_gradient == HeadGradient::Needed).then(|| vec![0f32; head.len()]);
        let chunks = hidden.chunks(chunk * width).zip(dhidden.chunks_mut(chunk * width));
        for (((hidden, dhidden), targets), grad) in chunks.zip(self.targets.chunks(chunk)).zip(grad.chunks(chunk * 2)) {
            let n_rows = targets.len();
            let mut dlogits = self.logits(hidden, n_rows, head_mat, n_vocabulary)?;
            self.logit_gradients(&mut dlogits, targets, grad, n_vocabulary);
            let dlogits = Mat::new(&dlogits, n_rows, n_vocabulary);
            matmul(dhidden, 0.0, self.inverse_temperature, dlogits, head_mat, Threads::All)?;
            if let Some(dhead) = &mut dhead {
                let hidden = Mat::new(hidden, n_rows, width);
                matmul(dhead, 1.0, self.inverse_temperature, dlogits.t(), hidden, Threads::All)?;
            }
        }
        Ok((dhidden, dhead))
    }
}

impl CustomOp2 for TokenLogprobs {
    fn name(&self) -> &'static str {
        "token-logprobs"
    }

    fn cpu_fwd(
        &self,
        hidden: &CpuStorage,
        hidden_layout: &Layout,
        head: &CpuStorage,
        head_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (n_rows, width) = hidden_layout.shape().dims2()?;
        let out = self.forward(floats(hidden, hidden_layout)?, floats(head, head_layout)?, width)?;
        Ok((CpuStorage::F32(out), (n_rows, 2).into()))
    }

    fn bwd(
        &self,
        hidden: &Tensor,
        head: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let width = hidden.dim(1)?;
        let (dhidden, dhead) = with_floats(hidden, |hidden_values| {
            with_floats(head, |head| with_floats(grad, |grad| self.backward(hidden_values, head, grad, width)))
        })?;
        let dhead = dhead.map(|dhead| Tensor::from_vec(dhead, head.shape(), head.device())).transpose()?;
        Ok((Some(Tensor::from_vec(dhidden, hidden.shape(), hidden.device())?), dhead))
    }
}
