//! Which backend runs a layer.

use super::autograd::{self, LayerPass};
use super::cpu::Cpu;
use super::layer::LayerWeights;
use super::pass::Recompute;
use crate::LoraAdapter;
use candle_core::{Result, Tensor};

/// Output of a layer on the device of its input; see [`autograd::forward`].
pub(crate) fn forward(
    weights: &LayerWeights,
    adapter: Option<&LoraAdapter>,
    x: &Tensor,
    pass: LayerPass,
    collected: Option<&Recompute>,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if !x.device().is_cpu() {
        return autograd::forward(super::card::Card::of(x)?, weights, adapter, x, pass, collected);
    }
    autograd::forward(Cpu, weights, adapter, x, pass, collected)
}
