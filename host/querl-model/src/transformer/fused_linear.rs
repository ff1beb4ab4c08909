//! The linear layers of a fused layer: what they hold, whatever the device.

use super::linear::Linear;
use super::pass::Pass;
use super::rows::BatchRows;
use crate::adapter::LoraPair;
use crate::kernels::Weight;
use crate::place::only_on_cpu;
use candle_core::{Result, Tensor, bail};

/// A linear layer with what an adapter adds to it; clones of tensors share their values.
pub(crate) struct FusedLinear {
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Tensor>,
    pub(crate) low_rank: Option<LowRankTensors>,
    /// A trained weight as a card multiplies with it.
    #[cfg(feature = "cuda")]
    pub(crate) rounded: std::sync::OnceLock<crate::device::DeviceWeight>,
}

/// `scale * B A` beside a weight.
pub(crate) struct LowRankTensors {
    pub(crate) a: Tensor, // (rank, in)
    pub(crate) b: Tensor, // (out, rank)
    pub(crate) scale: f32,
    /// DoRA's, on a card.
    pub(crate) magnitude: Option<Magnitude>,
    /// Of the layer in the checkpoint; and the rows that come to it on a card, which know its dropout.
    #[cfg(feature = "cuda")]
    pub(crate) path: String,
    #[cfg(feature = "cuda")]
    pub(crate) rows: Option<std::sync::Arc<crate::decoder::CardRows>>,
    /// A and B as a card multiplies with them.
    #[cfg(feature = "cuda")]
    pub(crate) rounded: std::sync::OnceLock<super::card::Rounded>,
}

/// A factor on each output before its bias: a trained magnitude over the length of the changed weight's row.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // on the CPU such a layer is composed of single operations
pub(crate) struct Magnitude {
    pub(crate) trained: Tensor, // (out)
    /// The factor, without a gradient.
    pub(crate) factor: Tensor, // (out)
    /// One over the length: what the gradient of the factor becomes that of the magnitude by.
    pub(crate) inverse_length: Tensor, // (out)
}

impl Magnitude {
    fn new(trained: &Tensor, linear: &Linear, pair: &LoraPair) -> Result<Self> {
        let inverse_length = linear.lengths(pair)?.recip()?;
        let factor = (trained.detach() * &inverse_length)?;
        Ok(Self { trained: trained.clone(), factor, inverse_length })
    }
}

impl FusedLinear {
    /// `None` where the layer does more on the CPU than a weight and a low-rank change: magnitudes. `rows`: those that come to it.
    ///
    /// # Errors
    /// An adapter on a weight that is trained itself, or magnitudes with dropout on a card.
    pub(crate) fn new(linear: &Linear, rows: &BatchRows, pass: &Pass<'_>) -> Result<Option<Self>> {
        let pair = pass.adapter.and_then(|adapter| adapter.pair(&linear.path));
        let is_trained = matches!(linear.weight, Weight::Trained(_));
        let is_composed = |pair: &LoraPair| is_trained || pair.magnitude.is_some() && pair.a.device().is_cpu();
        if pair.is_some_and(is_composed) {
            return Ok(None);
        }
        if rows.dropout.is_some() && pair.is_some_and(|pair| pair.magnitude.is_some()) {
            return Err(only_on_cpu("an adapter with magnitudes and dropout (`sft.use_dora`, `sft.lora_dropout`)"));
        }
        Ok(Some(Self {
            weight: linear.weight.clone(),
            bias: linear.bias.clone(),
            low_rank: pair.map(|pair| LowRankTensors::new(pair, linear, rows)).transpose()?,
            #[cfg(feature = "cuda")]
            rounded: std::sync::OnceLock::new(),
        }))
    }

    /// Everything that may be trained: weight, bias, A, B, magnitude.
    pub(crate) fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = Vec::new();
        if let Weight::Trained(weight) = &self.weight {
            tensors.push(weight);
            tensors.extend(&self.bias);
        }
        if let Some(LowRankTensors { a, b, magnitude, .. }) = &self.low_rank {
            tensors.extend([a, b]);
            tensors.extend(magnitude.as_ref().map(|magnitude| &magnitude.trained));
        }
        tensors
    }
}

impl LowRankTensors {
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))] // a card alone asks for path and rows here
    fn new(pair: &LoraPair, linear: &Linear, rows: &BatchRows) -> Result<Self> {
        let magnitude = pair.magnitude.as_ref().map(|trained| Magnitude::new(trained, linear, pair)).transpose()?;
        Ok(Self {
            a: pair.a.clone(),
            b: pair.b.clone(),
            scale: pair.scale,
            magnitude,
            #[cfg(feature = "cuda")]
            path: linear.path.clone(),
            #[cfg(feature = "cuda")]
            rows: rows.on_card.clone(),
            #[cfg(feature = "cuda")]
            rounded: std::sync::OnceLock::new(),
        })
    }

    /// The rank, if the matrices fit a weight `(n_out, n_in)`.
    pub(crate) fn rank(&self, (n_out, n_in): (usize, usize)) -> Result<usize> {
        let rank = self.a.dim(0)?;
        if self.a.dims() != [rank, n_in] || self.b.dims() != [n_out, rank] {
            let (a, b) = (self.a.dims(), self.b.dims());
            bail!("adapter of shapes {a:?} and {b:?} on a weight ({n_out}, {n_in})");
        }
        Ok(rank)
    }
}
