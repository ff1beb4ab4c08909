//! Gradient checkpointing: a layer keeps its input, and its inside is computed again when its gradient is due.
//!
//! A candle operation has at most three inputs, and a layer with an adapter has fifteen. So the layer is an operation of its
//! input alone; the gradients of everything else go to [`Recompute`] and are joined in [`super::backward`].

use super::autograd::LayerPass;
use super::forward;
use super::layer::LayerWeights;
use super::pass::Recompute;
use crate::LoraAdapter;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Layout, Result as TensorResult, Shape, Storage, Tensor,
    TensorId, Var, bail,
};
use std::sync::Arc;

/// One layer that keeps its input alone.
pub(crate) struct CheckpointedLayer {
    pub(crate) weights: Arc<LayerWeights>,
    pub(crate) pass: LayerPass,
    pub(crate) adapter: Option<Arc<LoraAdapter>>,
    pub(crate) recompute: Recompute,
    pub(crate) input: Tensor,
}

impl CheckpointedLayer {
    pub(crate) fn apply(self, x: &Tensor) -> TensorResult<Tensor> {
        let anchor = self.recompute.anchor(x.device())?;
        x.apply_op2(&anchor, self)
    }

    fn forward(&self, x: &Tensor) -> TensorResult<Tensor> {
        let inside = self.recompute.inside();
        forward(&self.weights, self.adapter.as_deref(), x, self.pass.clone(), Some(&inside))
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
