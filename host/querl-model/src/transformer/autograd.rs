//! A layer as a node of candle's graph.
//!
//! A candle operation has at most three inputs. So the layer's trained tensors are joined to one input, an operation whose gradient
//! is cut into theirs; or, where the pass collects gradients in a [`Recompute`], they are no inputs at all.

use super::backend::TrainingBackend;
use super::layer::{LayerInput, LayerWeights, SavedActivations, TransformerLayer};
use super::pass::Recompute;
use super::rows::{LayerRows, PackedAttention};
use crate::LoraAdapter;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, DType, Layout, Result, Shape, Storage, Tensor, bail};
use std::sync::{Mutex, PoisonError};

/// The rows of a pass through a layer, and how they attend to each other.
#[derive(Clone)]
pub struct LayerPass {
    pub layer_rows: LayerRows,
    pub attention: PackedAttention,
}

/// Inputs: `x` `(N, H)` and the trained tensors, flattened and joined; or, where gradients are collected, an anchor.
struct LayerOp<B: TrainingBackend> {
    backend: B,
    layer: TransformerLayer<B>,
    pass: LayerPass,
    saved: SavedActivations<B, B::LogSumExp>,
    /// Where the gradients of trained tensors are collected, if not in the graph.
    collected: Option<Recompute>,
    out: Mutex<Option<Storage>>,
    shape: Shape,
}

/// Output of a layer for its input `(N, H)`, with a gradient where something is trained.
pub fn forward<B: TrainingBackend>(
    backend: B,
    weights: &LayerWeights,
    adapter: Option<&LoraAdapter>,
    x: &Tensor,
    mut pass: LayerPass,
    collected: Option<&Recompute>,
) -> Result<Tensor> {
    let layer = TransformerLayer::new(&backend, weights, adapter, &pass.layer_rows)?;
    let (x, width) = (backend.contiguous(x)?, x.dim(1)?);
    let (out, saved) = layer.forward(&backend, &mut pass.attention, &pass.layer_rows, &*backend.borrow(&x)?)?;
    let shape = Shape::from((backend.len(&out) / width, width));
    let out = backend.storage(out)?;
    let trained = layer.trained();
    if trained.is_empty() && !x.track_op() {
        return Ok(Tensor::from_storage(out, shape, BackpropOp::none(), false));
    }
    let joined = match collected {
        Some(collected) => collected.anchor(x.device())?,
        None if trained.is_empty() => Tensor::zeros(1, DType::F32, x.device())?,
        None => {
            let flat: Vec<Tensor> = trained.iter().map(|tensor| tensor.flatten_all()).collect::<Result<_>>()?;
            Tensor::cat(&flat, 0)?
        }
    };
    drop(trained);
    let (collected, out) = (collected.cloned(), Mutex::new(Some(out)));
    x.apply_op2(&joined, LayerOp { backend, layer, pass, saved, collected, out, shape })
}

impl<B: TrainingBackend> LayerOp<B> {
    fn take_output(&self) -> Result<Storage> {
        match self.out.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(out) => Ok(out),
            None => bail!("the output of a layer was taken before"),
        }
    }
}

impl<B: TrainingBackend> CustomOp2 for LayerOp<B> {
    fn name(&self) -> &'static str {
        "transformer-layer"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let Storage::Cpu(out) = self.take_output()? else { bail!("a layer ran on another device than its input's") };
        Ok((out, self.shape.clone()))
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let Storage::Cuda(out) = self.take_output()? else { bail!("a layer ran on another device than its input's") };
        Ok((out, self.shape.clone()))
    }

    fn bwd(&self, x: &Tensor, joined: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (backend, needs_gradient) = (&self.backend, x.track_op());
        let LayerPass { layer_rows, attention } = &self.pass;
        let grad = backend.contiguous(grad)?;
        let input = LayerInput { values: &*backend.borrow(x)?, needs_gradient };
        let (dx, all) =
            self.layer.backward(backend, attention, layer_rows, &self.saved, input, &*backend.borrow(&grad)?)?;
        let tensor = |buffer: B::Residual, shape: &Shape| -> Result<Tensor> {
            Ok(Tensor::from_storage(backend.storage(buffer)?, shape, BackpropOp::none(), false))
        };
        let dx = dx.filter(|_| needs_gradient).map(|dx| tensor(dx, x.shape())).transpose()?;
        let tensors = self.layer.tensors();
        let trained = tensors.into_iter().zip(all).filter(|(tensor, _)| tensor.track_op());
        if let Some(collected) = &self.collected {
            for (variable, gradient) in trained {
                gradient
                    .map_or(Ok(()), |gradient| collected.add(variable.id(), tensor(gradient, variable.shape())?))?;
            }
            return Ok((dx, None));
        }
        let trained: Vec<B::Residual> = trained.filter_map(|(_, gradient)| gradient).collect();
        if trained.is_empty() {
            return Ok((dx, None));
        }
        Ok((dx, Some(tensor(backend.concat(trained)?, joined.shape())?)))
    }
}
