//! Log-probabilities and entropies straight from hidden states and the language-model head, in chunks of rows: `(N, V)` is
//! never held.

use super::{FrozenWeight, Mat, Threads, Weight, exp, floats, matmul, with_floats};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;
use std::sync::Arc;

#[derive(Clone)]
struct TokenLogprobs {
    targets: Arc<Vec<u32>>,
    inverse_temperature: f32,
}

/// Log-probability of each row's target and entropy of each row's distribution, `softmax(hidden head^T / temperature)`.
///
/// `hidden`: `(N, H)`; `head`: `(V, H)`; `targets`: N token ids. Returns `(N, 2)`: log-probability in nats, entropy in nats.
/// Gradients reach `hidden`, and `head` where it is trained.
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
    let op = TokenLogprobs { targets: targets.clone(), inverse_temperature: (1.0 / temperature) as f32 };
    let hidden = hidden.contiguous()?;
    match head {
        Weight::Frozen(head) => hidden.apply_op1(FrozenHead { op, head: head.clone() }),
        Weight::Trained(head) => hidden.apply_op2(&head.contiguous()?, op),
    }
}

/// The head in a product.
#[derive(Clone, Copy)]
enum HeadValues<'a> {
    Frozen(&'a FrozenWeight),
    Trained(Mat<'a>, usize),
}

impl HeadValues<'_> {
    fn n_vocabulary(self) -> usize {
        match self {
            Self::Frozen(head) => head.dims().0,
            Self::Trained(_, n_vocabulary) => n_vocabulary,
        }
    }

    /// `hidden head^T`.
    fn logits(self, hidden: &[f32], n_rows: usize) -> Result<Vec<f32>> {
        let mut logits = vec![0f32; n_rows * self.n_vocabulary()];
        match self {
            Self::Frozen(head) => head.forward(hidden, &mut logits, 0.0)?,
            Self::Trained(head, _) => {
                let hidden = Mat::new(hidden, n_rows, hidden.len() / n_rows);
                matmul(&mut logits, 0.0, 1.0, hidden, head.t(), Threads::All)?;
            }
        }
        Ok(logits)
    }

    /// `dlogits head`.
    fn backward(self, dlogits: &[f32], n_rows: usize, dhidden: &mut [f32]) -> Result<()> {
        match self {
            Self::Frozen(head) => head.backward(dlogits, dhidden, 0.0),
            Self::Trained(head, n_vocabulary) => {
                matmul(dhidden, 0.0, 1.0, Mat::new(dlogits, n_rows, n_vocabulary), head, Threads::All)
            }
        }
    }
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

    /// Logits over the temperature.
    fn logits(&self, hidden: &[f32], n_rows: usize, head: HeadValues<'_>) -> Result<Vec<f32>> {
        let mut logits = head.logits(hidden, n_rows)?;
        if self.inverse_temperature != 1.0 {
            logits
                .par_chunks_mut(1 << 14)
                .for_each(|part| part.iter_mut().for_each(|x| *x *= self.inverse_temperature));
        }
        Ok(logits)
    }

    fn forward(&self, hidden: &[f32], head: HeadValues<'_>, width: usize) -> Result<Vec<f32>> {
        let n_vocabulary = head.n_vocabulary();
        let chunk = Self::chunk_rows(n_vocabulary);
        let mut out = Vec::with_capacity(self.targets.len() * 2);
        for (hidden, targets) in hidden.chunks(chunk * width).zip(self.targets.chunks(chunk)) {
            let logits = self.logits(hidden, targets.len(), head)?;
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
                *logit = -p * (grad[0] + grad[1] * (log_p + summary.entropy)) * self.inverse_temperature;
            }
            row[target as usize] += grad[0] * self.inverse_temperature;
        });
    }

    /// Gradient of `hidden`; that of a trained head is added to `dhead`.
    fn backward(
        &self,
        hidden: &[f32],
        head: HeadValues<'_>,
        grad: &[f32],
        width: usize,
        mut dhead: Option<&mut [f32]>,
    ) -> Result<Vec<f32>> {
        let n_vocabulary = head.n_vocabulary();
        let chunk = Self::chunk_rows(n_vocabulary);
        let mut dhidden = vec![0f32; hidden.len()];
        let chunks = hidden.chunks(chunk * width).zip(dhidden.chunks_mut(chunk * width));
        for (((hidden, dhidden), targets), grad) in chunks.zip(self.targets.chunks(chunk)).zip(grad.chunks(chunk * 2)) {
            let n_rows = targets.len();
            let mut dlogits = self.logits(hidden, n_rows, head)?;
            self.logit_gradients(&mut dlogits, targets, grad, n_vocabulary);
            head.backward(&dlogits, n_rows, dhidden)?;
            if let Some(dhead) = &mut dhead {
                let hidden = Mat::new(hidden, n_rows, width);
                matmul(dhead, 1.0, 1.0, Mat::new(&dlogits, n_rows, n_vocabulary).t(), hidden, Threads::All)?;
            }
        }
        Ok(dhidden)
    }
}

struct FrozenHead {
    op: TokenLogprobs,
    head: FrozenWeight,
}

impl CustomOp1 for FrozenHead {
    fn name(&self) -> &'static str {
        "token-logprobs"
    }

    fn cpu_fwd(&self, hidden: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (n_rows, width) = layout.shape().dims2()?;
        let out = self.op.forward(floats(hidden, layout)?, HeadValues::Frozen(&self.head), width)?;
        Ok((CpuStorage::F32(out), (n_rows, 2).into()))
    }

    fn bwd(&self, hidden: &Tensor, _out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let (width, head) = (hidden.dim(1)?, HeadValues::Frozen(&self.head));
        let dhidden =
            with_floats(hidden, |hidden| with_floats(grad, |grad| self.op.backward(hidden, head, grad, width, None)))?;
        Ok(Some(Tensor::from_vec(dhidden, hidden.shape(), hidden.device())?))
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
        let n_vocabulary = head_layout.shape().dims2()?.0;
        let head = HeadValues::Trained(Mat::new(floats(head, head_layout)?, n_vocabulary, width), n_vocabulary);
        let out = self.forward(floats(hidden, hidden_layout)?, head, width)?;
        Ok((CpuStorage::F32(out), (n_rows, 2).into()))
    }

    fn bwd(
        &self,
        hidden: &Tensor,
        head: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (n_vocabulary, width) = head.dims2()?;
        let mut dhead = vec![0f32; n_vocabulary * width];
        let dhidden = with_floats(hidden, |hidden| {
            with_floats(head, |head| {
                let head = HeadValues::Trained(Mat::new(head, n_vocabulary, width), n_vocabulary);
                with_floats(grad, |grad| self.backward(hidden, head, grad, width, Some(&mut dhead)))
            })
        })?;
        let dhead = Tensor::from_vec(dhead, head.shape(), head.device())?;
        Ok((Some(Tensor::from_vec(dhidden, hidden.shape(), hidden.device())?), Some(dhead)))
    }
}
