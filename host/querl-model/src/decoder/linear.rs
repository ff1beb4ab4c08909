//! One linear layer: frozen, trained, or frozen with an adapter.

use super::Weights;
use super::pass::Pass;
use crate::kernels;
use candle_core::{Result as TensorResult, Tensor};

/// A linear layer by its path in the checkpoint.
pub(super) struct Linear {
    pub(super) path: String,
    pub(super) weight: Tensor, // (out, in)
    pub(super) bias: Option<Tensor>,
    pub(super) weights: Weights,
}

impl Linear {
    pub(super) fn forward(&self, x: &Tensor, pass: &Pass<'_>) -> TensorResult<Tensor> {
        if let Some((adapter, pair)) = pass.adapter.and_then(|adapter| Some((adapter, adapter.pair(&self.path)?))) {
            return kernels::lora_linear(x, &self.weight, self.bias.as_ref(), &pair.a, &pair.b, adapter.scale());
        }
        match self.weights {
            Weights::Frozen => kernels::frozen_linear(x, &self.weight, self.bias.as_ref()),
            Weights::Trained => {
                let y = x.matmul(&self.weight.t()?)?;
                self.bias.as_ref().map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
            }
        }
    }
}
