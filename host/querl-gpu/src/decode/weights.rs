//! The weights of a policy: those of the base as they are on the GPU, and the adapter's.

use super::backend::DecodeBackend;
use super::linear::{LinearGroup, TensorReader};
use crate::device::{CudaSlice, DeviceRope, DeviceWeight, Gpu};
use candle_core::{Error, Result};
use querl_model::backend::{AdaptedLayer, LayerContext, TransformerLayer};
use querl_model::kernels::Weight;
use querl_model::{Decoder, LoraAdapter, ModelError};
use std::sync::Arc;

/// Weights of a policy, prepared for decoding. Later training does not change them.
pub(super) struct PolicyWeights {
    pub(super) context: LayerContext,
    pub(super) layers: Vec<TransformerLayer<DecodeBackend>>,
    pub(super) final_norm: CudaSlice<f32>,
    pub(super) rope: Arc<DeviceRope>,
    pub(super) head: DeviceWeight,
    pub(super) embedding: DeviceWeight,
    /// Whether all weights but those of adapters are frozen, so that another policy can replace this one in place.
    is_frozen: bool,
}

impl PolicyWeights {
    /// `tensor_gpu`: the GPU with the stream on which the decoder's tensors were written.
    pub(super) fn new(
        gpu: &Gpu,
        tensor_gpu: &Gpu,
        decoder: &Decoder,
        adapter: Option<&LoraAdapter>,
    ) -> std::result::Result<Self, ModelError> {
        let layers = decoder.adapted_layers(adapter).collect::<Result<Vec<_>>>()?;
        let (embedding, head) = (decoder.adapted_embedding(adapter)?, decoder.adapted_head(adapter)?);
        let mut linears = layers.iter().flat_map(|layer| {
            [&layer.qkv[..], &layer.o, &layer.gate_up, &layer.down].into_iter().flatten().map(|linear| linear.weight)
        });
        let is_frozen = is_frozen(&embedding) && is_frozen(&head) && linears.all(is_frozen);
        let reader = TensorReader::new(gpu, tensor_gpu)?;
        let rope = decoder.device_rope().and_then(|rope| rope.clone().downcast::<DeviceRope>().ok());
        let weights = Self {
            context: decoder.context(),
            layers: layers.iter().map(|layer| decode_layer(&reader, layer)).collect::<Result<_>>()?,
            final_norm: reader.floats(decoder.final_norm())?,
            rope: rope.ok_or_else(|| Error::Msg("a decoder on the CPU where one on a GPU is expected".into()))?,
            head: reader.weight(&head)?,
            embedding: reader.weight(&embedding)?,
            is_frozen,
        };
        reader.finish()?;
        Ok(weights)
    }

    /// Overwrites this policy with another one, so that captured CUDA graphs stay valid. Returns false, and changes nothing, if shapes or
    /// scales differ. After an error the weights must not be used.
    pub(super) fn replace(
        &mut self,
        gpu: &Gpu,
        tensor_gpu: &Gpu,
        decoder: &Decoder,
        adapter: Option<&LoraAdapter>,
    ) -> std::result::Result<bool, ModelError> {
        let layers = decoder.adapted_layers(adapter).collect::<Result<Vec<_>>>()?;
        let is_frozen = is_frozen(&decoder.adapted_embedding(adapter)?) && is_frozen(&decoder.adapted_head(adapter)?);
        let fits = |(own, layer): (&TransformerLayer<DecodeBackend>, &AdaptedLayer<'_>)| {
            own.qkv.fits(&layer.qkv)
                && own.o.fits(&layer.o)
                && own.gate_up.fits(&layer.gate_up)
                && own.down.fits(&layer.down)
        };
        if !self.is_frozen || !is_frozen || self.layers.len() != layers.len() {
            return Ok(false);
        }
        if !self.layers.iter().zip(&layers).all(fits) {
            return Ok(false);
        }
        let reader = TensorReader::new(gpu, tensor_gpu)?;
        for (own, layer) in self.layers.iter_mut().zip(&layers) {
            owned(&mut own.qkv)?.replace(&reader, &layer.qkv)?;
            owned(&mut own.o)?.replace(&reader, &layer.o)?;
            owned(&mut own.gate_up)?.replace(&reader, &layer.gate_up)?;
            owned(&mut own.down)?.replace(&reader, &layer.down)?;
        }
        reader.finish()?;
        Ok(true)
    }

    /// True if decode steps after the first allocate nothing, so that they can be captured. With a packed embedding, rows are unpacked into
    /// new memory in each step.
    pub(super) fn can_be_captured(&self) -> bool {
        self.embedding.bf16().is_some()
    }

    /// Largest sum of LoRA ranks of linear layers with the same input.
    pub(super) fn lora_width(&self) -> usize {
        let groups = |layer: &TransformerLayer<DecodeBackend>| {
            [&layer.qkv, &layer.o, &layer.gate_up, &layer.down].map(|group| group.lora_width)
        };
        self.layers.iter().flat_map(groups).max().unwrap_or(0)
    }
}

/// Mutable access to a group: between steps no activations refer to it.
fn owned(group: &mut Arc<LinearGroup>) -> Result<&mut LinearGroup> {
    Arc::get_mut(group).ok_or_else(|| Error::Msg("weights in use; internal error, please report it".into()))
}

fn decode_layer(reader: &TensorReader<'_>, layer: &AdaptedLayer<'_>) -> Result<TransformerLayer<DecodeBackend>> {
    let norm = |weight| Ok::<_, Error>(Arc::new(reader.floats(weight)?));
    let qk_norm = match layer.qk_norm {
        Some([q, k]) => Some([norm(q)?, norm(k)?]),
        None => None,
    };
    Ok(TransformerLayer {
        input_norm: norm(layer.input_norm)?,
        qkv: Arc::new(LinearGroup::new(reader, &layer.qkv)?),
        qk_norm,
        o: Arc::new(LinearGroup::new(reader, &layer.o)?),
        post_attention_norm: norm(layer.post_attention_norm)?,
        gate_up: Arc::new(LinearGroup::new(reader, &layer.gate_up)?),
        down: Arc::new(LinearGroup::new(reader, &layer.down)?),
    })
}

fn is_frozen(weight: &Weight) -> bool {
    matches!(weight, Weight::Accelerator(_))
}
