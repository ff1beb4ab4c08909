//! Linear layers on slices, for operations that join several of them and keep no more than they need.

use super::product::{self, Output, Source, Term, transpose, written};
use super::{FrozenWeight, Level};
use candle_core::Result;

/// What one linear layer multiplies with.
pub(crate) enum Projection<'a> {
    /// A frozen weight, perhaps with a low-rank change that is trained.
    Frozen { weight: &'a FrozenWeight, bias: Option<&'a [f32]>, low_rank: Option<LowRank<'a>> },
    /// A trained weight `(out, in)`.
    Trained { weight: &'a [f32], n_in: usize, bias: Option<&'a [f32]> },
}

/// `scale * B A` beside a weight.
#[derive(Clone, Copy)]
pub(crate) struct LowRank<'a> {
    pub(crate) a: &'a [f32], // (rank, in)
    pub(crate) b: &'a [f32], // (out, rank)
    pub(crate) rank: usize,
    pub(crate) scale: f32,
}

/// What a backward pass finds for a layer's own parameters; empty where there is nothing to train.
#[derive(Default)]
pub(crate) struct ParameterGradients {
    pub(crate) weight: Vec<f32>, // (out, in)
    pub(crate) bias: Vec<f32>,   // (out)
    pub(crate) a: Vec<f32>,      // (rank, in)
    pub(crate) b: Vec<f32>,      // (out, rank)
    /// `scale * g B`, `(N, rank)`: what the input's gradient needs besides `g`.
    low: Vec<f32>,
}

impl<'a> Projection<'a> {
    fn level(&self) -> Level {
        match self {
            Self::Frozen { weight, .. } => weight.level(),
            Self::Trained { .. } => Level::detected(),
        }
    }

    fn source(&self) -> Source<'_> {
        match self {
            Self::Frozen { weight, .. } => weight.source(),
            Self::Trained { weight, n_in, .. } => Source::rows(weight, *n_in),
        }
    }

    fn dims(&self) -> (usize, usize) {
        match self {
            Self::Frozen { weight, .. } => weight.dims(),
            Self::Trained { weight, n_in, .. } => (weight.len() / n_in, *n_in),
        }
    }

    fn bias(&self) -> Option<&'a [f32]> {
        match self {
            Self::Frozen { bias, .. } | Self::Trained { bias, .. } => *bias,
        }
    }

    fn low_rank(&self) -> Option<LowRank<'a>> {
        match self {
            Self::Frozen { low_rank, .. } => *low_rank,
            Self::Trained { .. } => None,
        }
    }

    /// `x W^T + b` and `scale * x A^T`, which the backward pass wants again. `x`: `(N, in)`.
    pub(crate) fn forward(&self, x: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let (n_out, n_in) = self.dims();
        let n_rows = x.len() / n_in;
        if let Some(bias) = self.bias() {
            let mut y = bias.repeat(n_rows);
            let low = self.add_product(x, Output::new(&mut y, 1.0))?;
            return Ok((y, low));
        }
        let mut low = Vec::new();
        let y = written(n_rows * n_out, |y| {
            low = self.add_product(x, y)?;
            Ok(())
        })?;
        Ok((y, low))
    }

    /// The same, added to `y`.
    pub(crate) fn add_to(&self, x: &[f32], y: &mut [f32]) -> Result<Vec<f32>> {
        if let Some(bias) = self.bias() {
            y.chunks_exact_mut(bias.len()).for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
        }
        self.add_product(x, Output::new(y, 1.0))
    }

    fn add_product(&self, x: &[f32], y: Output<'_>) -> Result<Vec<f32>> {
        let (level, base) = (self.level(), Term { left: x, weight: self.source() });
        let Some(LowRank { a, b, rank, scale }) = self.low_rank() else {
            product::forward(level, &[base], y)?;
            return Ok(Vec::new());
        };
        let n_in = self.dims().1;
        let down = [Term { left: x, weight: Source::rows(a, n_in) }];
        let mut low = written(x.len() / n_in * rank, |low| product::forward(level, &down, low))?;
        low.iter_mut().for_each(|x| *x *= scale);
        product::forward(level, &[base, Term { left: &low, weight: Source::rows(b, rank) }], y)?;
        Ok(low)
    }

    /// Gradients of the layer's parameters for the gradient `grad` `(N, out)` of its output; `low` is what the forward pass
    /// returned.
    ///
    /// With `g` the gradient, `d = scale * x A^T` and `v = scale * g B`: `dW = g^T x`, `db = sum of g`, `dA = v^T x`,
    /// `dB = g^T d`.
    pub(crate) fn parameter_gradients(&self, x: &[f32], low: &[f32], grad: &[f32]) -> Result<ParameterGradients> {
        let (level, (n_out, n_in)) = (self.level(), self.dims());
        let mut found = ParameterGradients::default();
        let backward = |len, term: Term<'_>| written(len, |out| product::backward(level, &[term], out));
        if let Some(LowRank { b, rank, scale, .. }) = self.low_rank() {
            found.low = backward(x.len() / n_in * rank, Term { left: grad, weight: Source::rows(b, rank) })?;
            found.low.iter_mut().for_each(|x| *x *= scale);
            let low_t = transpose(level, &found.low, rank); // (rank, N)
            found.a = backward(rank * n_in, Term { left: &low_t, weight: Source::rows(x, n_in) })?;
            let low_t = transpose(level, low, rank); // (rank, N)
            let db = backward(rank * n_out, Term { left: &low_t, weight: Source::rows(grad, n_out) })?; // (rank, out)
            found.b = transpose(level, &db, n_out);
        }
        if let Self::Trained { bias, .. } = self {
            let grad_t = transpose(level, grad, n_out); // (out, N)
            found.weight = backward(n_out * n_in, Term { left: &grad_t, weight: Source::rows(x, n_in) })?;
            if bias.is_some() {
                found.bias = vec![0.0; n_out];
                for row in grad.chunks_exact(n_out) {
                    found.bias.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
                }
            }
        }
        Ok(found)
    }
}

/// Gradient of the input that several layers share: the sum of `g W + v A` over them. Each layer comes with the gradient of its
/// output and what was found for its parameters.
pub(crate) fn input_gradient(layers: &[(&Projection<'_>, &[f32], &ParameterGradients)]) -> Result<Vec<f32>> {
    let Some((first, grad, _)) = layers.first() else { return Ok(Vec::new()) };
    let (n_out, n_in) = first.dims();
    let mut terms = Vec::new();
    for (layer, grad, found) in layers {
        terms.push(Term { left: grad, weight: layer.source() });
        if let Some(LowRank { a, .. }) = layer.low_rank() {
            terms.push(Term { left: &found.low, weight: Source::rows(a, n_in) });
        }
    }
    written(grad.len() / n_out * n_in, |dx| product::backward(first.level(), &terms, dx))
}
