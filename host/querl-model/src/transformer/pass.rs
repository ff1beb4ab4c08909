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
    /// Beside the base's weights; `None` is the bare base.
    pub adapter: Option<&'a LoraAdapter>,
    /// On the inputs of the adapter's layers; `None` in rollouts, references and evaluation.
    pub dropout: Option<Dropout>,
    /// What layers keep for the backward pass, and where they put the gradients they find; `None` keeps activations and leaves
    /// gradients to the graph.
    pub recompute: Option<&'a Recompute>,
}

impl<'a> Pass<'a> {
    /// A pass with an adapter and nothing else.
    pub fn with(adapter: Option<&'a LoraAdapter>) -> Self {
        Self { adapter, ..Self::default() }
    }
}

/// What a layer keeps for its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// What is dear to compute again.
    Activations,
    /// Its input alone: gradient checkpointing.
    Inputs,
}

/// What layers find in a backward pass, beside the graph. One serves any number of passes, one after another.
#[derive(Debug, Clone)]
pub struct Recompute {
    keep: Keep,
    found: Arc<Mutex<HashMap<TensorId, Tensor>>>,
    /// A variable among the inputs of every such layer: candle leaves out operations without one. Made with the first.
    anchor: Arc<OnceLock<Var>>,
}

impl Recompute {
    /// With nothing found yet.
    pub fn new(keep: Keep) -> Self {
        Self { keep, found: Arc::default(), anchor: Arc::default() }
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

    fn found(&self) -> MutexGuard<'_, HashMap<TensorId, Tensor>> {
        // A panic elsewhere leaves sums that are whole: each entry is replaced at once.
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a gradient of a variable.
    pub(crate) fn add(&self, id: TensorId, gradient: Tensor) -> TensorResult<()> {
        let mut found = self.found();
        let sum = match found.remove(&id) {
            Some(earlier) => (earlier + gradient)?,
            None => gradient,
        };
        found.insert(id, sum);
        Ok(())
    }
}

/// Gradients of a loss with respect to every variable, those inside checkpointed layers included.
///
/// # Errors
/// A tensor operation fails.
pub fn backward(loss: &Tensor, recompute: Option<&Recompute>) -> Result<GradStore, ModelError> {
    if let Some(recompute) = recompute {
        recompute.found().clear(); // left over where an earlier backward pass failed
    }
    let mut gradients = loss.backward()?;
    let found = recompute.map(|recompute| std::mem::take(&mut *recompute.found())).unwrap_or_default();
    for (id, gradient) in found {
        let sum = match gradients.get_id(id) {
            Some(other) => (other + gradient)?,
            None => gradient,
        };
        gradients.insert_id(id, sum);
    }
    Ok(gradients)
}
