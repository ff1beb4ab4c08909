//! A layer that has run, as a node of the graph.

use super::backend::Steps;
use super::fused::{FusedLayer, Input, Kept};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, DType, Layout, Result, Shape, Storage, Tensor, bail};
use std::sync::{Mutex, PoisonError};

/// Inputs: `x` `(N, H)` and the trained tensors, flattened and joined; or, where their gradients are put aside, an anchor.
struct Operation<S: Steps> {
    steps: S,
    layer: FusedLayer,
    kept: Kept<S>,
    /// The result, handed on once.
    out: Mutex<Option<Storage>>,
    shape: Shape,
}

impl FusedLayer {
    /// Output of the layer for its input `(N, H)`, with a gradient where something is trained.
    pub(crate) fn apply_with<S: Steps>(self, steps: S, x: &Tensor) -> Result<Tensor> {
        let (x, width) = (steps.prepared(x)?, x.dim(1)?);
        let (out, kept) = self.run(&steps, &*steps.borrowed(&x)?)?;
        let shape = Shape::from((steps.n_sums(&out) / width, width));
        let out = steps.storage(out)?;
        let trained = self.trained();
        if trained.is_empty() && !x.track_op() {
            return Ok(Tensor::from_storage(out, shape, BackpropOp::none(), false));
        }
        let joined = match &self.gradients {
            Some(gradients) => gradients.anchor(x.device())?,
            None if trained.is_empty() => Tensor::zeros(1, DType::F32, x.device())?,
            None => {
                let flat: Vec<Tensor> = trained.iter().map(|tensor| tensor.flatten_all()).collect::<Result<_>>()?;
                Tensor::cat(&flat, 0)?
            }
        };
        drop(trained);
        x.apply_op2(&joined, Operation { steps, layer: self, kept, out: Mutex::new(Some(out)), shape })
    }
}

impl<S: Steps> Operation<S> {
    fn take(&self) -> Result<Storage> {
        match self.out.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(out) => Ok(out),
            None => bail!("a layer's result is asked for twice"),
        }
    }
}

impl<S: Steps> CustomOp2 for Operation<S> {
    fn name(&self) -> &'static str {
        "decoder-layer"
    }

    fn cpu_fwd(
        &self,
        _x: &CpuStorage,
        _x_layout: &Layout,
        _trained: &CpuStorage,
        _trained_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let Storage::Cpu(out) = self.take()? else { bail!("a layer ran on another device than its input's") };
        Ok((out, self.shape.clone()))
    }

    fn cuda_fwd(
        &self,
        _x: &CudaStorage,
        _x_layout: &Layout,
        _trained: &CudaStorage,
        _trained_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let Storage::Cuda(out) = self.take()? else { bail!("a layer ran on another device than its input's") };
        Ok((out, self.shape.clone()))
    }

    fn bwd(&self, x: &Tensor, joined: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (steps, is_tracked) = (&self.steps, x.track_op());
        let grad = steps.prepared(grad)?;
        let input = Input { values: &*steps.borrowed(x)?, is_tracked };
        let (dx, all) = self.layer.gradients(steps, &self.kept, input, &*steps.borrowed(&grad)?)?;
        let tensor = |sums: S::Sums, shape: &Shape| -> Result<Tensor> {
            Ok(Tensor::from_storage(steps.storage(sums)?, shape, BackpropOp::none(), false))
        };
        let dx = dx.filter(|_| is_tracked).map(|dx| tensor(dx, x.shape())).transpose()?;
        let tensors = self.layer.tensors();
        let trained = tensors.into_iter().zip(all).filter(|(tensor, _)| tensor.track_op());
        if let Some(gradients) = &self.layer.gradients {
            for (variable, found) in trained {
                found.map_or(Ok(()), |found| gradients.add(variable.id(), tensor(found, variable.shape())?))?;
            }
            return Ok((dx, None));
        }
        let trained: Vec<S::Sums> = trained.filter_map(|(_, gradient)| gradient).collect();
        if trained.is_empty() {
            return Ok((dx, None));
        }
        Ok((dx, Some(tensor(steps.joined(trained)?, joined.shape())?)))
    }
}
