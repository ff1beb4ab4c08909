//! A decoder's weights with what an adapter makes of them: for decoding without a graph.

use super::Decoder;
use crate::accelerator::DeviceState;
use crate::adapter::{EMBEDDING, LoraAdapter, LoraPair};
use crate::kernels::Weight;
use crate::transformer::{LayerWeights, Linear};
use candle_core::{Result as TensorResult, Tensor};

/// One linear layer.
pub struct AdaptedLinear<'a> {
    pub weight: &'a Weight,
    pub bias: Option<&'a Tensor>,
    pub pair: Option<&'a LoraPair>,
    /// DoRA's factor on each output `(out)`, before the bias.
    pub factor: Option<Tensor>,
}

/// One decoder layer.
pub struct AdaptedLayer<'a> {
    pub input_norm: &'a Tensor,
    pub post_attention_norm: &'a Tensor,
    /// Weights of the per-head norms of queries and keys.
    pub qk_norm: Option<&'a [Tensor; 2]>,
    /// Queries, keys, values.
    pub qkv: [AdaptedLinear<'a>; 3],
    pub o: [AdaptedLinear<'a>; 1],
    /// Gate and up.
    pub gate_up: [AdaptedLinear<'a>; 2],
    pub down: [AdaptedLinear<'a>; 1],
}

impl Decoder {
    /// Every layer in order.
    pub fn adapted_layers<'a>(
        &'a self,
        adapter: Option<&'a LoraAdapter>,
    ) -> impl Iterator<Item = TensorResult<AdaptedLayer<'a>>> {
        self.layers.iter().map(move |layer| layer.parts(adapter))
    }

    /// Weight of the last norm `(H)`.
    pub fn final_norm(&self) -> &Tensor {
        &self.norm
    }

    /// See [`crate::Accelerator::upload_rope`].
    pub fn device_rope(&self) -> Option<&DeviceState> {
        self.device_rope.as_ref()
    }

    /// The embedding `(V, H)`; a tensor of its own, independent of later training, where an adapter changes it.
    pub fn adapted_embedding(&self, adapter: Option<&LoraAdapter>) -> TensorResult<Weight> {
        if let Some(saved) = adapter.and_then(|adapter| adapter.saved_module(EMBEDDING)) {
            return Ok(Weight::Trained(saved.detach().copy()?));
        }
        let Some(pair) = adapter.and_then(|adapter| adapter.pair(EMBEDDING)) else { return Ok(self.embedding.clone()) };
        let change = (pair.b.detach().matmul(&pair.a.detach())?.t()? * f64::from(pair.scale))?; // (V, H)
        Ok(Weight::Trained((self.base_weight(EMBEDDING)? + change)?))
    }

    /// The head `(V, H)`, as the embedding.
    pub fn adapted_head(&self, adapter: Option<&LoraAdapter>) -> TensorResult<Weight> {
        match self.head(adapter)? {
            Weight::Trained(head) => Ok(Weight::Trained(head.detach().copy()?)),
            frozen => Ok(frozen),
        }
    }
}

impl LayerWeights {
    fn parts<'a>(&'a self, adapter: Option<&'a LoraAdapter>) -> TensorResult<AdaptedLayer<'a>> {
        let parts = |linear: &'a Linear| linear.parts(adapter);
        Ok(AdaptedLayer {
            input_norm: &self.input_norm,
            post_attention_norm: &self.post_attention_norm,
            qk_norm: self.qk_norm.as_ref(),
            qkv: [parts(&self.q)?, parts(&self.k)?, parts(&self.v)?],
            o: [parts(&self.o)?],
            gate_up: [parts(&self.gate)?, parts(&self.up)?],
            down: [parts(&self.down)?],
        })
    }
}

impl Linear {
    fn parts<'a>(&'a self, adapter: Option<&'a LoraAdapter>) -> TensorResult<AdaptedLinear<'a>> {
        let pair = adapter.and_then(|adapter| adapter.pair(&self.path));
        let factor = match (&self.weight, pair) {
            (Weight::Trained(_), _) | (_, None) => None,
            (_, Some(pair)) => self.dora_factor(pair)?.map(|factor| factor.detach()),
        };
        Ok(AdaptedLinear { weight: &self.weight, bias: self.bias.as_ref(), pair, factor })
    }
}
