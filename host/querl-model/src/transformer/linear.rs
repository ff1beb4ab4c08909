//! One linear layer: frozen, trained, or frozen with an adapter.

use super::pass::Pass;
use super::rows::BatchRows;
use crate::adapter::LoraPair;
use crate::dropout::{DropoutMask, lora_dropout};
use crate::kernels::{self, FrozenWeight, Weight};
use crate::sharding::{Split, TensorParallel};
use candle_core::{Result as TensorResult, Tensor, bail};
use std::borrow::Cow;
use std::sync::OnceLock;

/// A linear layer by its path in the checkpoint.
pub(crate) struct Linear {
    pub(crate) path: String,
    pub(crate) weight: Weight, // (out, in)
    pub(crate) bias: Option<Tensor>,
    /// Squared lengths of the weight's rows `(out)`, for adapters with magnitudes.
    squares: OnceLock<Tensor>,
}

impl Linear {
    pub(crate) fn new(path: String, weight: Weight, bias: Option<Tensor>) -> Self {
        Self { path, weight, bias, squares: OnceLock::new() }
    }

    /// Outputs `(N, out)` of rows `(N, in)`.
    pub(crate) fn forward(&self, x: &Tensor, rows: &BatchRows, pass: &Pass<'_>) -> TensorResult<Tensor> {
        let Some(pair) = pass.adapter.and_then(|adapter| adapter.pair(&self.path)) else {
            return kernels::linear(x, &self.weight, self.bias.as_ref());
        };
        let Weight::Frozen(weight) = &self.weight else {
            bail!("an adapter on `{}`, whose own weight is trained", self.path)
        };
        let pair = &with_whole_gradients(&rows.parallel, pair, &self.path)?;
        match (self.dora_factor(pair)?, &rows.dropout) {
            (None, None) => kernels::lora_linear(x, weight, self.bias.as_ref(), &pair.a, &pair.b, pair.scale),
            (None, Some(mask)) => {
                let base = kernels::frozen_linear(x, weight, self.bias.as_ref())?;
                base + lora_dropout(x, &pair.a, &pair.b, pair.scale, mask, &self.path)?
            }
            (Some(factor), None) => {
                let changed = kernels::lora_linear(x, weight, None, &pair.a, &pair.b, pair.scale)?;
                let y = changed.broadcast_mul(&factor)?;
                self.bias.as_ref().map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
            }
            (Some(factor), Some(mask)) => self.dora_dropout(x, weight, pair, &factor, mask),
        }
    }

    /// `W x + b + (m - 1) W d(x) + m s B A d(x)` with dropout `d` and DoRA's factor `m`: the bare weight sees all inputs.
    ///
    /// Source: PEFT's `DoraLinearVariant.forward`, the form for training with dropout.
    fn dora_dropout(
        &self,
        x: &Tensor,
        weight: &FrozenWeight,
        pair: &LoraPair,
        factor: &Tensor,
        mask: &DropoutMask,
    ) -> TensorResult<Tensor> {
        let base = kernels::frozen_linear(x, weight, self.bias.as_ref())?;
        let dropped = mask.dropped(x, &self.path)?;
        let low_rank = (dropped.matmul(&pair.a.t()?)?.matmul(&pair.b.t()?)? * f64::from(pair.scale))?;
        let on_dropped = kernels::frozen_linear(&dropped, weight, None)?;
        (base + on_dropped.broadcast_mul(&(factor - 1.0)?)?)? + low_rank.broadcast_mul(factor)?
    }

    /// DoRA's factor on each output `(out)`; `None` for an adapter without magnitudes.
    pub(crate) fn dora_factor(&self, pair: &LoraPair) -> TensorResult<Option<Tensor>> {
        let Some(magnitude) = &pair.magnitude else { return Ok(None) };
        Ok(Some(magnitude.div(&self.lengths(pair)?)?))
    }

    /// See [`LoraPair::lengths`].
    pub(crate) fn lengths(&self, pair: &LoraPair) -> TensorResult<Tensor> {
        let squares = match self.squares.get() {
            Some(squares) => squares,
            None => {
                let values = match &self.weight {
                    Weight::Frozen(weight) => weight.to_tensor()?,
                    Weight::Trained(weight) => weight.detach(),
                    #[cfg(feature = "cuda")]
                    Weight::OnCard(weight) => kernels::card_tensor(weight, pair.a.device())?,
                };
                let squares = values.sqr()?.sum(1)?;
                self.squares.get_or_init(|| squares)
            }
        };
        pair.lengths(&kernels::linear(&pair.a.detach(), &self.weight, None)?.detach(), squares)
    }
}

/// A layer's pair, of which the matrix that every rank has whole gets the sum of what the ranks find.
///
/// With `g` the gradient of the outputs, `dA = (s g B)^T x` and `dB = g^T (s x A^T)`. Split by outputs, each rank knows some
/// columns of `g` and rows of `B`, so that its `s g B` is a summand of the whole one; split by inputs, its `s x A^T` is. The
/// other matrix of each pair is split, and its part of the gradient is complete.
fn with_whole_gradients<'a>(
    parallel: &TensorParallel,
    pair: &'a LoraPair,
    path: &str,
) -> TensorResult<Cow<'a, LoraPair>> {
    let split = Split::of(path).filter(|_| parallel.is_split());
    let Some(split) = split else { return Ok(Cow::Borrowed(pair)) };
    let mut pair = pair.clone();
    match split {
        Split::Outputs => pair.a = parallel.shared(&pair.a)?,
        Split::Inputs => pair.b = parallel.shared(&pair.b)?,
    }
    Ok(Cow::Owned(pair))
}
