//! How a forward pass is run, and the gradients that its layers put aside.

use crate::dropout::Dropout;
use crate::{LoraAdapter, ModelError};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result as TensorResult, Tensor, TensorId, Var};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// How a pass over a batch is to be run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pass<'a> {
    /// `None`: the base alone.
    pub adapter: Option<&'a LoraAdapter>,
    /// Dropout on the inputs of the adapter; `None` in rollouts, reference passes and evaluation.
    pub dropout: Option<Dropout>,
    /// What layers save for the backward pass, and where they put gradients; `None` saves activations and leaves gradients to
    /// the graph.
    pub recompute: Option<&'a Recompute>,
}

impl<'a> Pass<'a> {
    /// A pass with an adapter and nothing else.
    pub fn with(adapter: Option<&'a LoraAdapter>) -> Self {
        Self { adapter, ..Self::default() }
    }
}

/// What a layer saves for its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Activations that are expensive to compute again.
    Activations,
    /// Its input alone: gradient checkpointing.
    Inputs,
}

/// Collects gradients that layers compute outside of candle's graph. It serves any number of passes, one after another.
#[derive(Debug, Clone)]
pub struct Recompute {
    keep: Keep,
    gradients: Arc<Mutex<HashMap<TensorId, Tensor>>>,
    /// A variable among the inputs of every such layer: candle leaves out operations without one. Made with the first.
    anchor: Arc<OnceLock<Var>>,
}

impl Recompute {
    /// Without gradients.
    pub fn new(keep: Keep) -> Self {
        Self { keep, gradients: Arc::default(), anchor: Arc::default() }
    }

    /// True where layers keep their inputs alone.
    pub(crate) fn keeps_inputs(&self) -> bool {
        self.keep == Keep::Inputs
    }

    /// The same gradients, for the inside of a checkpointed layer.
    pub(crate) fn inside(&self) -> Self {
        Self { keep: Keep::Activations, ..self.clone() }
    }

    /// An input of an operation that must not be left out.
    pub(crate) fn anchor(&self, device: &Device) -> TensorResult<Tensor> {
        let anchor = match self.anchor.get() {
            Some(anchor) => anchor,
            None => {
                let anchor = Var::zeros(1, DType::F32, device)?;
                self.anchor.get_or_init(|| anchor)
            }
        };
        Ok(anchor.as_tensor().clone())
    }

    fn gradients(&self) -> MutexGuard<'_, HashMap<TensorId, Tensor>> {
        // A panic elsewhere leaves sums that are whole: each entry is replaced at once.
        self.gradients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a gradient of a variable.
    pub(crate) fn add(&self, id: TensorId, gradient: Tensor) -> TensorResult<()> {
        let mut gradients = self.gradients();
        let sum = match gradients.remove(&id) {
            Some(earlier) => (earlier + gradient)?,
            None => gradient,
        };
        gradients.insert(id, sum);
        Ok(())
    }
}

/// Gradients of a loss with respect to every variable, those inside checkpointed layers included.
///
/// # Errors
/// A tensor operation fails.
pub fn backward(loss: &Tensor, recompute: Option<&Recompute>) -> Result<GradStore, ModelError> {
    if let Some(recompute) = recompute {
        recompute.gradients().clear(); // left over where an earlier backward pass failed
    }
    let mut gradients = loss.backward()?;
    let collected = recompute.map(|recompute| std::mem::take(&mut *recompute.gradients())).unwrap_or_default();
    for (id, gradient) in collected {
        let sum = match gradients.get_id(id) {
            Some(other) => (other + gradient)?,
            None => gradient,
        };
        gradients.insert_id(id, sum);
    }
    Ok(gradients)
}
