//! The linear layers of a fused layer: what they hold, whatever the device.

use crate::adapter::LoraPair;
use crate::decoder::layer::Rows;
use crate::decoder::linear::Linear;
use crate::decoder::pass::Pass;
use crate::kernels::Weight;
use candle_core::{Result, Tensor, bail};

/// A linear layer with what an adapter adds to it; clones of tensors share their values.
pub(super) struct FusedLinear {
    pub(super) weight: Weight,
    pub(super) bias: Option<Tensor>,
    pub(super) low_rank: Option<LowRankTensors>,
}

/// `scale * B A` beside a weight.
pub(super) struct LowRankTensors {
    pub(super) a: Tensor, // (rank, in)
    pub(super) b: Tensor, // (out, rank)
    pub(super) scale: f32,
    /// Of the layer in the checkpoint; and the rows that come to it on a card, which know its dropout.
    #[cfg(feature = "cuda")]
    pub(super) path: String,
    #[cfg(feature = "cuda")]
    pub(super) rows: Option<std::sync::Arc<crate::decoder::card::CardRows>>,
    /// A and B as a card multiplies with them.
    #[cfg(feature = "cuda")]
    pub(super) rounded: std::sync::OnceLock<super::card::Rounded>,
}

impl FusedLinear {
    /// `None` where the layer does more than a weight and a low-rank change: magnitudes. `rows`: those that come to it.
    pub(super) fn new(linear: &Linear, rows: &Rows, pass: &Pass<'_>) -> Option<Self> {
        let pair = pass.adapter.and_then(|adapter| adapter.pair(&linear.path));
        let is_trained = matches!(linear.weight, Weight::Trained(_));
        let is_plain = pair.is_none_or(|pair| pair.magnitude.is_none() && !is_trained);
        is_plain.then(|| Self {
            weight: linear.weight.clone(),
            bias: linear.bias.clone(),
            low_rank: pair.map(|pair| LowRankTensors::new(pair, linear, rows)),
        })
    }

    /// Everything that may be trained: weight, bias, A, B.
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = Vec::new();
        if let Weight::Trained(weight) = &self.weight {
            tensors.push(weight);
            tensors.extend(&self.bias);
        }
        if let Some(LowRankTensors { a, b, .. }) = &self.low_rank {
            tensors.extend([a, b]);
        }
        tensors
    }
}

impl LowRankTensors {
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))] // a card alone asks for path and rows here
    fn new(pair: &LoraPair, linear: &Linear, rows: &Rows) -> Self {
        Self {
            a: pair.a.clone(),
            b: pair.b.clone(),
            scale: pair.scale,
            #[cfg(feature = "cuda")]
            path: linear.path.clone(),
            #[cfg(feature = "cuda")]
            rows: rows.on_card.clone(),
            #[cfg(feature = "cuda")]
            rounded: std::sync::OnceLock::new(),
        }
    }

    /// The rank, if the matrices fit a weight `(n_out, n_in)`.
    pub(super) fn rank(&self, (n_out, n_in): (usize, usize)) -> Result<usize> {
        let rank = self.a.dim(0)?;
        if self.a.dims() != [rank, n_in] || self.b.dims() != [n_out, rank] {
            let (a, b) = (self.a.dims(), self.b.dims());
            bail!("adapter of shapes {a:?} and {b:?} on a weight ({n_out}, {n_in})");
        }
        Ok(rank)
    }
}
