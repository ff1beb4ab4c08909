//! Which backend runs a layer.

use super::autograd::{self, LayerPass};
use super::cpu::Cpu;
use super::layer::LayerWeights;
use super::pass::Recompute;
use crate::LoraAdapter;
use crate::accelerator::accelerator_of;
use candle_core::{Result, Tensor};

/// Output of a layer on the device of its input; see [`autograd::forward`].
pub(crate) fn forward(
    weights: &LayerWeights,
    adapter: Option<&LoraAdapter>,
    x: &Tensor,
    pass: LayerPass,
    collected: Option<&Recompute>,
) -> Result<Tensor> {
    match accelerator_of(x)? {
        Some(accelerator) => accelerator.forward_layer(weights, adapter, x, pass, collected),
        None => autograd::forward(Cpu, weights, adapter, x, pass, collected),
    }
}
