//! Log-probabilities and entropies from hidden states and `lm_head`, fused and chunked over the vocabulary: the logits
//! `(N, V)` are never stored as a whole.

use super::packed_matmul::{self, Output, Term, WeightView, alloc_output, transpose};
use super::simd::vectorised;
use super::{LANES, SimdLevel, Weight, exp, slice_op};
use crate::accelerator::accelerator_of;
use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

struct TokenLogprobs {
    targets: Arc<Vec<u32>>,
    inverse_temperature: f32,
    /// Sums of each row, saved for the backward pass.
    rows: OnceLock<Vec<Row>>,
    /// The logits of the last part divided by the temperature, from which the backward pass starts. With a small vocabulary or few rows
    /// they are all logits.
    last_part: Mutex<Vec<f32>>,
}

impl TokenLogprobs {
    fn new(targets: &Arc<Vec<u32>>, inverse_temperature: f32) -> Self {
        Self { targets: targets.clone(), inverse_temperature, rows: OnceLock::new(), last_part: Mutex::default() }
    }
}

/// Log-probability of each row's target and entropy of each row's distribution, `softmax(hidden head^T / temperature)`.
///
/// `hidden`: `(N, H)`; `head`: `(V, H)`; `targets`: N token ids. Returns `(N, 2)`: log-probability in nats, entropy in nats.
/// Gradients reach `hidden`, and `head` where it is trained. Memory in addition to the result: about [`PART_VALUES`] logits.
///
/// # Errors
/// A target outside the vocabulary, a temperature that is not above 0, or tensors other than f32 on the CPU.
pub fn token_logprobs(hidden: &Tensor, head: &Weight, targets: &Arc<Vec<u32>>, temperature: f64) -> Result<Tensor> {
    let n_tokens = head.dims()?.0;
    if targets.len() != hidden.dim(0)? {
        bail!("token_logprobs: {} targets for {} rows", targets.len(), hidden.dim(0)?);
    }
    if let Some(target) = targets.iter().find(|&&target| target as usize >= n_tokens) {
        bail!("token id {target} is outside the vocabulary of {n_tokens}");
    }
    if temperature.is_nan() || temperature <= 0.0 {
        bail!("temperature is {temperature}; expected above 0");
    }
    let forward = Arc::new(TokenLogprobs::new(targets, (1.0 / temperature) as f32));
    let (backward, hidden) = (forward.clone(), hidden.contiguous()?);
    let (name, shape, width) = ("token-logprobs", (targets.len(), 2), hidden.dims2()?.1);
    match head {
        Weight::Frozen(head) => {
            let (head, again) = (head.clone(), head.clone());
            slice_op(
                name,
                [&hidden],
                shape,
                move |[hidden]| forward.forward(hidden, head.source(), head.level()),
                move |[hidden], [_, grad]| {
                    Ok([Some(backward.backward(hidden, again.source(), again.level(), grad, None)?)])
                },
            )
        }
        Weight::Trained(head) => match accelerator_of(head)? {
            Some(accelerator) => accelerator.trained_token_logprobs(&hidden, head, targets, temperature),
            None => slice_op(
                name,
                [&hidden, &head.contiguous()?],
                shape,
                move |[hidden, head]| forward.forward(hidden, WeightView::rows(head, width), SimdLevel::detected()),
                move |[hidden, head], [_, grad]| {
                    let mut dhead = vec![0f32; head.len()];
                    let (view, level) = (WeightView::rows(head, width), SimdLevel::detected());
                    let dhidden = backward.backward(hidden, view, level, grad, Some(&mut dhead))?;
                    Ok([Some(dhidden), Some(dhead)])
                },
            ),
        },
        Weight::Accelerator(head) => head.token_logprobs(&hidden, targets, temperature),
    }
}

/// Number of logits in memory at a time: 8 MiB, which fit into the caches.
const PART_VALUES: usize = 1 << 21;

/// Number of logits in GPU memory at a time: 128 MiB as f32, and half of that for their gradients. A matrix product of this size is large
/// enough to reach the GPU's peak.
pub const GPU_LOGITS: usize = 1 << 25;

/// Minimum number of logits of each row at a time: chunks of the vocabulary are multiples of it, so that rows are read in full vectors.
pub const GPU_LOGITS_PER_ROW: usize = 512;

/// Number of tokens that are added to a row's sums at once. The size of a part depends on the number of rows; it is a multiple of this
/// number, so that a row's result does not.
const TOKENS_AT_ONCE: usize = 512;

#[derive(Clone, Copy)]
struct Row {
    max: f32,
    /// Sum of `e^(logit - max)`.
    sum: f64,
    /// Sum of `e^(logit - max) (logit - max)`.
    weighted: f64,
    target: f32,
}

impl Row {
    const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0, weighted: 0.0, target: f32::NAN };

    fn log_sum(&self) -> f32 {
        (f64::from(self.max) + self.sum.ln()) as f32
    }

    fn entropy(&self) -> f32 {
        (self.sum.ln() - self.weighted / self.sum) as f32
    }

    /// Adds logits divided by the temperature.
    fn add(&mut self, logits: &[f32]) {
        for logits in logits.chunks(TOKENS_AT_ONCE) {
            let max = self.max.max(largest(logits));
            let shift = if self.sum > 0.0 { f64::from(self.max - max) } else { 0.0 };
            let (sum, weighted) = sums(logits, max);
            self.weighted = shift.exp() * (self.weighted + shift * self.sum) + f64::from(weighted);
            self.sum = shift.exp() * self.sum + f64::from(sum);
            self.max = max;
        }
    }
}

vectorised! {
    fn largest(values: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (whole, rest) = values.as_chunks::<LANES>();
        for values in whole {
            for i in 0..LANES {
                lanes[i] = if values[i] > lanes[i] { values[i] } else { lanes[i] };
            }
        }
        lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max })
    }
}

vectorised! {
    /// Sums of `e^(x - max)` and of `e^(x - max) (x - max)`.
    fn sums(values: &[f32], max: f32) -> (f32, f32) {
        let (mut sum, mut weighted) = ([0f32; LANES], [0f32; LANES]);
        let (whole, rest) = values.as_chunks::<LANES>();
        for values in whole {
            for i in 0..LANES {
                let x = values[i] - max;
                let e = exp(x);
                sum[i] += e;
                weighted[i] += e * x;
            }
        }
        for (i, x) in rest.iter().enumerate() {
            let e = exp(x - max);
            sum[i] += e;
            weighted[i] += e * (x - max);
        }
        (sum.iter().sum(), weighted.iter().sum())
    }
}

vectorised! {
    fn scale(values: &mut [f32], factor: f32) {
        values.iter_mut().for_each(|x| *x *= factor);
    }
}

vectorised! {
    /// Converts logits to their gradients, without the target's share: `-factor p (grad[0] + grad[1] (ln p + entropy))`.
    fn logit_gradients(logits: &mut [f32], log_sum: f32, entropy: f32, grad: [f32; 2], factor: f32) {
        for logit in logits {
            let log_p = *logit - log_sum;
            *logit = -factor * exp(log_p) * (grad[0] + grad[1] * (log_p + entropy));
        }
    }
}

fn parts(n_rows: usize, n_tokens: usize) -> Vec<Range<usize>> {
    let size = (PART_VALUES / n_rows.max(1) / TOKENS_AT_ONCE).max(1) * TOKENS_AT_ONCE;
    (0..n_tokens).step_by(size).map(|start| start..(start + size).min(n_tokens)).collect()
}

impl TokenLogprobs {
    /// Logits of a part divided by the temperature, `(N, part)`.
    fn logits(&self, hidden: &[f32], part: WeightView<'_>, level: SimdLevel) -> Result<Vec<f32>> {
        let terms = [Term { left: hidden, weight: part }];
        let mut logits =
            alloc_output(self.targets.len() * part.n_out, |out| packed_matmul::forward(level, &terms, out))?;
        if self.inverse_temperature != 1.0 {
            let rows = logits.par_chunks_exact_mut(part.n_out);
            rows.for_each(|logits| scale(logits, self.inverse_temperature));
        }
        Ok(logits)
    }

    fn forward(&self, hidden: &[f32], head: WeightView<'_>, level: SimdLevel) -> Result<Vec<f32>> {
        let n_rows = self.targets.len();
        let mut rows = vec![Row::EMPTY; n_rows];
        let mut logits = Vec::new();
        for part in parts(n_rows, head.n_out) {
            drop(logits); // frees this part before the next
            logits = self.logits(hidden, head.part(part.clone()), level)?;
            rows.par_iter_mut().zip(logits.par_chunks_exact(part.len())).zip(self.targets.par_iter()).for_each(
                |((row, logits), &target)| {
                    row.add(logits);
                    if part.contains(&(target as usize)) {
                        row.target = logits[target as usize - part.start];
                    }
                },
            );
        }
        let out = rows.iter().flat_map(|row| [row.target - row.log_sum(), row.entropy()]).collect();
        self.rows.get_or_init(|| rows);
        *self.last_part.lock().unwrap_or_else(PoisonError::into_inner) = logits;
        Ok(out)
    }

    /// Gradient of `hidden`. The gradient of a trained head is written to `dhead`.
    ///
    /// With `p` the probabilities, `a` and `b` the gradients of log-probability and entropy `E`: `d logit_j = a (1[j = target] - p_j) - b
    /// p_j (ln p_j + E)`, divided by the temperature.
    fn backward(
        &self,
        hidden: &[f32],
        head: WeightView<'_>,
        level: SimdLevel,
        grad: &[f32],
        mut dhead: Option<&mut [f32]>,
    ) -> Result<Vec<f32>> {
        let Some(rows) = self.rows.get() else { bail!("token-logprobs: backward pass before the forward pass") };
        let (n_rows, width) = (rows.len(), head.n_in);
        let mut dhidden = vec![0f32; hidden.len()];
        let mut logits = std::mem::take(&mut *self.last_part.lock().unwrap_or_else(PoisonError::into_inner));
        for (index, part) in parts(n_rows, head.n_out).into_iter().rev().enumerate() {
            let head = head.part(part.clone());
            if index > 0 || logits.is_empty() {
                drop(logits);
                logits = self.logits(hidden, head, level)?;
            }
            logits.par_chunks_exact_mut(part.len()).enumerate().for_each(|(row, logits)| {
                let grad = [grad[2 * row], grad[2 * row + 1]];
                logit_gradients(logits, rows[row].log_sum(), rows[row].entropy(), grad, self.inverse_temperature);
                let target = self.targets[row] as usize;
                if part.contains(&target) {
                    logits[target - part.start] += grad[0] * self.inverse_temperature;
                }
            });
            packed_matmul::backward(level, &[Term { left: &logits, weight: head }], Output::new(&mut dhidden, 1.0))?;
            if let Some(dhead) = &mut dhead {
                let dlogits = transpose(level, &logits, part.len()); // (part, N)
                let terms = [Term { left: &dlogits, weight: WeightView::rows(hidden, width) }];
                let dhead = &mut dhead[part.start * width..part.end * width];
                packed_matmul::backward(level, &terms, Output::new(dhead, 0.0))?;
            }
        }
        Ok(dhidden)
    }
}
