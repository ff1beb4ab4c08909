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
    /// Path in the checkpoint, without `.weight`.
    pub path: String,
    /// Weight `(out, in)`.
    pub weight: Weight,
    /// Bias `(out)`.
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

/// A linear layer with its adapter in one pass; clones of tensors share their values. `S`: state that the device caches.
pub struct LoraLinear<S> {
    /// Weight `(out, in)`.
    pub weight: Weight,
    /// Bias `(out)`.
    pub bias: Option<Tensor>,
    /// LoRA matrices; `None` if the layer is not adapted.
    pub lora: Option<Lora>,
    /// State that the device caches from the forward to the backward pass.
    pub state: S,
}

/// LoRA matrices of a linear layer, which add `scale * B A` to its weight.
pub struct Lora {
    /// LoRA A `(rank, in)`.
    pub a: Tensor,
    /// LoRA B `(out, rank)`.
    pub b: Tensor,
    /// Scale of `B A`: alpha over rank, or over its square root with rsLoRA.
    pub scale: f32,
    /// DoRA magnitude; `None` without DoRA.
    pub magnitude: Option<Magnitude>,
    /// Path of the linear layer: it seeds the dropout masks.
    pub path: String,
    /// Dropout on the input of A; `None` without dropout.
    pub dropout: Option<DropoutMask>,
    /// Rows in device memory; see [`Rows::device_rows`].
    pub device_rows: Option<Arc<dyn Any + Send + Sync>>,
}

/// DoRA: each output before its bias is multiplied by a trained magnitude over the length of the changed weight's row.
pub struct Magnitude {
    /// Trained magnitude of each output `(out)`.
    pub trained: Tensor,
    /// Factor on each output `(out)`: magnitude over length of the adapted weight's row, without a gradient.
    pub factor: Tensor,
    /// Inverse length of each row `(out)`, by which a gradient of the factor is multiplied to give that of the magnitude.
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
    /// A layer of the base with its adapter. `rows`: the rows that enter the layer.
    ///
    /// # Errors
    /// The adapter is on a weight that is trained itself.
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

    /// All tensors that may be trained: weight, bias, A, B, magnitude.
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

    /// The LoRA rank, if A and B fit a weight `(n_out, n_in)`.
    pub fn rank(&self, (n_out, n_in): (usize, usize)) -> Result<usize> {
        let rank = self.a.dim(0)?;
        if self.a.dims() != [rank, n_in] || self.b.dims() != [n_out, rank] {
            let (a, b) = (self.a.dims(), self.b.dims());
            bail!("adapter of shapes {a:?} and {b:?} on a weight ({n_out}, {n_in})");
        }
        Ok(rank)
    }
}
