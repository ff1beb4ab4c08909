//! Linear layers: the base's, and the base's with an adapter as one pass trains it.

use super::backend::Rows;
use crate::LoraAdapter;
use crate::adapter::LoraPair;
use crate::dropout::DropoutMask;
use crate::kernels::{self, Weight};
use candle_core::{Result, Tensor, bail};
use std::any::Any;
use std::sync::{Arc, OnceLock};

/// A linear layer of the base model, by its path in the checkpoint.
pub struct Linear {
    /// Without `.weight`.
    pub path: String,
    /// `(out, in)`.
    pub weight: Weight,
    /// `(out)`.
    pub bias: Option<Tensor>,
    /// Squared lengths of the weight's rows `(out)`, for DoRA.
    squares: OnceLock<Tensor>,
}

impl Linear {
    pub(crate) fn new(path: String, weight: Weight, bias: Option<Tensor>) -> Self {
        Self { path, weight, bias, squares: OnceLock::new() }
    }

    /// DoRA's factor on each output `(out)`: magnitude over length; `None` for an adapter without magnitudes.
    pub(crate) fn dora_factor(&self, pair: &LoraPair) -> Result<Option<Tensor>> {
        let Some(magnitude) = &pair.magnitude else { return Ok(None) };
        Ok(Some(magnitude.div(&self.lengths(pair)?)?))
    }

    fn lengths(&self, pair: &LoraPair) -> Result<Tensor> {
        let squares = match self.squares.get() {
            Some(squares) => squares,
            None => {
                let squares = self.weight.to_tensor()?.sqr()?.sum(1)?;
                self.squares.get_or_init(|| squares)
            }
        };
        pair.lengths(&kernels::linear(&pair.a.detach(), &self.weight, None)?.detach(), squares)
    }
}

/// A linear layer with its adapter in one pass; clones of tensors share their values. `S` is what the device caches of it.
pub struct LoraLinear<S> {
    /// `(out, in)`.
    pub weight: Weight,
    /// `(out)`.
    pub bias: Option<Tensor>,
    /// LoRA A and B.
    pub lora: Option<Lora>,
    /// What the device caches.
    pub state: S,
}

/// `scale * B A`, added to a weight.
pub struct Lora {
    /// `(rank, in)`.
    pub a: Tensor,
    /// `(out, rank)`.
    pub b: Tensor,
    /// Alpha over rank.
    pub scale: f32,
    /// DoRA.
    pub magnitude: Option<Magnitude>,
    /// Path of the linear layer: it seeds the dropout masks.
    pub path: String,
    /// Dropout on A's input.
    pub dropout: Option<DropoutMask>,
    /// See [`Rows::device_rows`].
    pub device_rows: Option<Arc<dyn Any + Send + Sync>>,
}

/// DoRA: each output before its bias is multiplied by a trained magnitude over the length of the changed weight's row.
pub struct Magnitude {
    /// `(out)`.
    pub trained: Tensor,
    /// Magnitude over length `(out)`, without a gradient.
    pub factor: Tensor,
    /// `(out)`: the gradient of the magnitude is that of the factor times this.
    pub inverse_length: Tensor,
}

impl Magnitude {
    fn new(trained: &Tensor, linear: &Linear, pair: &LoraPair) -> Result<Self> {
        let inverse_length = linear.lengths(pair)?.recip()?;
        let factor = (trained.detach() * &inverse_length)?;
        Ok(Self { trained: trained.clone(), factor, inverse_length })
    }
}

impl<S: Default> LoraLinear<S> {
    /// `rows`: those that enter the layer.
    ///
    /// # Errors
    /// An adapter on a weight that is trained itself.
    pub fn new(linear: &Linear, adapter: Option<&LoraAdapter>, rows: &Rows) -> Result<Self> {
        let pair = adapter.and_then(|adapter| adapter.pair(&linear.path));
        if pair.is_some() && matches!(linear.weight, Weight::Trained(_)) {
            bail!("an adapter on `{}`, whose own weight is trained", linear.path);
        }
        Ok(Self {
            weight: linear.weight.clone(),
            bias: linear.bias.clone(),
            lora: pair.map(|pair| Lora::new(pair, linear, rows)).transpose()?,
            state: S::default(),
        })
    }

    /// Everything that may be trained: weight, bias, A, B, magnitude.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = Vec::new();
        if let Weight::Trained(weight) = &self.weight {
            tensors.push(weight);
            tensors.extend(&self.bias);
        }
        if let Some(Lora { a, b, magnitude, .. }) = &self.lora {
            tensors.extend([a, b]);
            tensors.extend(magnitude.as_ref().map(|magnitude| &magnitude.trained));
        }
        tensors
    }
}

impl Lora {
    fn new(pair: &LoraPair, linear: &Linear, rows: &Rows) -> Result<Self> {
        let magnitude = pair.magnitude.as_ref().map(|trained| Magnitude::new(trained, linear, pair)).transpose()?;
        Ok(Self {
            a: pair.a.clone(),
            b: pair.b.clone(),
            scale: pair.scale,
            magnitude,
            path: linear.path.clone(),
            dropout: rows.dropout.clone(),
            device_rows: rows.device_rows.clone(),
        })
    }

    /// The rank, if the matrices fit a weight `(n_out, n_in)`.
    pub fn rank(&self, (n_out, n_in): (usize, usize)) -> Result<usize> {
        let rank = self.a.dim(0)?;
        if self.a.dims() != [rank, n_in] || self.b.dims() != [n_out, rank] {
            let (a, b) = (self.a.dims(), self.b.dims());
            bail!("adapter of shapes {a:?} and {b:?} on a weight ({n_out}, {n_in})");
        }
        Ok(rank)
    }
}
