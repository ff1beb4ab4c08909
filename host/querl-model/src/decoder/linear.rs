//! One linear layer: frozen, trained, or frozen with an adapter.

use super::pass::Pass;
use crate::kernels::{self, Weight};
use candle_core::{Result as TensorResult, Tensor, bail};

/// A linear layer by its path in the checkpoint.
pub(super) struct Linear {
    pub(super) path: String,
    pub(super) weight: Weight, // (out, in)
    pub(super) bias: Option<Tensor>,
}

impl Linear {
    pub(super) fn forward(&self, x: &Tensor, pass: &Pass<'_>) -> TensorResult<Tensor> {
        if let Some((adapter, pair)) = pass.adapter.and_then(|adapter| Some((adapter, adapter.pair(&self.path)?))) {
            let Weight::Frozen(weight) = &self.weight else {
                bail!("an adapter on `{}`, whose own weight is trained", self.path)
            };
            return kernels::lora_linear(x, weight, self.bias.as_ref(), &pair.a, &pair.b, adapter.scale());
        }
        kernels::linear(x, &self.weight, self.bias.as_ref())
    }
}
