//! Gradients of layers, put aside; and gradient checkpointing: a layer keeps its input, and its inside is computed again when its
//! gradient is due.
//!
//! A candle operation has at most three inputs, and a layer with an adapter has fifteen. So the layer is an operation of its
//! input alone; what its backward pass finds for everything else is put aside and joined in [`backward`].

use super::layer::{Layer, Rows, Wanted};
use super::pass::{Dropout, Pass};
use crate::{LoraAdapter, ModelError};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Device, Layout, Result as TensorResult, Shape, Storage,
    Tensor, TensorId, Var, bail,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

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
    pub(super) fn keeps_inputs(&self) -> bool {
        self.keep == Keep::Inputs
    }

    /// The same gradients, for the inside of a checkpointed layer.
    fn inside(&self) -> Self {
        Self { keep: Keep::Activations, ..self.clone() }
    }

    /// An input of an operation that must not be left out.
    pub(super) fn anchor(&self, device: &Device) -> TensorResult<Tensor> {
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
    pub(super) fn add(&self, id: TensorId, gradient: Tensor) -> TensorResult<()> {
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

/// One layer that keeps its input alone.
pub(super) struct CheckpointedLayer {
    pub(super) layer: Arc<Layer>,
    pub(super) rows: Rows,
    /// Which rows of its output are computed; `None` is all.
    pub(super) wanted: Option<Wanted>,
    pub(super) adapter: Option<Arc<LoraAdapter>>,
    pub(super) dropout: Option<Dropout>,
    pub(super) recompute: Recompute,
    /// The input, without graph.
    pub(super) input: Tensor,
}

impl CheckpointedLayer {
    pub(super) fn apply(self, x: &Tensor) -> TensorResult<Tensor> {
        let anchor = self.recompute.anchor(x.device())?;
        x.apply_op2(&anchor, self)
    }

    fn forward(&self, x: &Tensor) -> TensorResult<Tensor> {
        let inside = self.recompute.inside();
        let pass = Pass { adapter: self.adapter.as_deref(), dropout: self.dropout, recompute: Some(&inside) };
        match &self.wanted {
            None => self.layer.forward(x, &self.rows, &pass),
            Some(wanted) => self.layer.forward_at(x, &self.rows, wanted, &pass),
        }
    }
}

impl CustomOp2 for CheckpointedLayer {
    fn name(&self) -> &'static str {
        "checkpointed-layer"
    }

    fn cpu_fwd(
        &self,
        _x: &CpuStorage,
        _x_layout: &Layout,
        _anchor: &CpuStorage,
        _anchor_layout: &Layout,
    ) -> TensorResult<(CpuStorage, Shape)> {
        // The graph of the inside ends with this function: its memory is free again at the next layer.
        let y = self.forward(&self.input)?;
        let (storage, layout) = y.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("a layer ran on another device than its input's") };
        Ok((storage.try_clone(layout)?, y.shape().clone()))
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> TensorResult<(CudaStorage, Shape)> {
        let y = self.forward(&self.input)?;
        let (storage, layout) = y.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("a layer ran on another device than its input's") };
        Ok((storage.try_clone(layout)?, y.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        _anchor: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> TensorResult<(Option<Tensor>, Option<Tensor>)> {
        let input = if x.track_op() { Var::from_tensor(x)?.into_inner() } else { x.clone() };
        let y = self.forward(&input)?;
        let mut gradients = y.apply_op1(Seed { gradient: grad.clone() })?.backward()?;
        drop(y);
        let dx = gradients.remove(&input);
        let ids: Vec<TensorId> = gradients.get_ids().copied().collect();
        for id in ids {
            if let Some(gradient) = gradients.get_id(id) {
                self.recompute.add(id, gradient.clone())?;
            }
        }
        Ok((dx, None))
    }
}

/// A scalar whose backward pass begins with a given gradient.
struct Seed {
    gradient: Tensor,
}

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, _storage: &CpuStorage, _layout: &Layout) -> TensorResult<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, _layout: &Layout) -> TensorResult<(CudaStorage, Shape)> {
        Ok((storage.device().zeros_impl(&Shape::from(()), DType::F32)?, Shape::from(())))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, _grad: &Tensor) -> TensorResult<Option<Tensor>> {
        Ok(Some(self.gradient.clone()))
    }
}
