//! A decoder as it is asked while it is trained: the same values, no gradients.

use super::Decoder;
use crate::kernels::Weight;
use crate::transformer::{LayerWeights, Linear};
use candle_core::Tensor;
use std::sync::Arc;

impl Decoder {
    /// A view that records no gradients: a pass through it keeps no layer's activations. It shares the values, so it follows training.
    pub fn without_gradient(&self) -> Self {
        let layers = match self.vars.is_empty() {
            // Frozen layers record nothing, and keep what they have computed of their weights.
            true => self.layers.clone(),
            false => self.layers.iter().map(|layer| Arc::new(detached(layer))).collect(),
        };
        Self {
            config: self.config.clone(),
            local: self.local.clone(),
            parallel: self.parallel.clone(),
            embedding: still(&self.embedding),
            layers,
            norm: self.norm.detach(),
            head: still(&self.head),
            rope: self.rope.clone(),
            vars: self.vars.clone(),
            place: self.place.clone(),
            device_rope: self.device_rope.clone(),
        }
    }
}

fn still(weight: &Weight) -> Weight {
    match weight {
        Weight::Trained(tensor) => Weight::Trained(tensor.detach()),
        other => other.clone(),
    }
}

fn detached(layer: &LayerWeights) -> LayerWeights {
    let linear = |linear: &Linear| {
        Linear::new(linear.path.clone(), still(&linear.weight), linear.bias.as_ref().map(Tensor::detach))
    };
    LayerWeights {
        input_norm: layer.input_norm.detach(),
        post_attention_norm: layer.post_attention_norm.detach(),
        q: linear(&layer.q),
        k: linear(&layer.k),
        v: linear(&layer.v),
        o: linear(&layer.o),
        qk_norm: layer.qk_norm.as_ref().map(|[q, k]| [q.detach(), k.detach()]),
        gate: linear(&layer.gate),
        up: linear(&layer.up),
        down: linear(&layer.down),
    }
}
