//! Layers in candle's graph: which backend runs one, its backward pass, and gradient checkpointing.
//!
//! A candle operation has at most three inputs, and a layer with an adapter has fifteen. So the layer's trained tensors are joined to
//! one input, an operation whose gradient is split into theirs; or, where the pass collects gradients in a [`Recompute`], they are no
//! inputs at all, and [`backward`] adds the collected gradients to those of the graph.

use super::backend::{LayerRows, PackedAttention, TrainingBackend};
use super::cpu::Cpu;
use super::layer::{LayerInput, LayerWeights, SavedActivations, TransformerLayer};
use crate::accelerator::DeviceState;
use crate::dropout::{Dropout, DropoutMask};
use crate::kernels::RopeTable;
use crate::{LoraAdapter, ModelError, PackedBatch};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Device, Layout, Result, Shape, Storage, Tensor, TensorId,
    Var, bail,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The rows of a pass through a layer, and how they attend to each other.
#[derive(Clone)]
pub struct LayerPass {
    /// Rows of the batch, and parameters that all layers share.
    pub layer_rows: LayerRows,
    /// Attention of the query rows over the prefix tree of the batch.
    pub attention: PackedAttention,
}

/// Transformer layers on a device other than the CPU.
///
/// # Errors
/// Methods fail if the device is out of memory, or if earlier work on it failed.
pub trait LayerAccelerator: Send + Sync {
    /// Uploads the RoPE table of a decoder, which is used in all passes.
    fn upload_rope(&self, rope: &RopeTable) -> Result<DeviceState>;
    /// Uploads the row indices of a pass, which are used in all layers; `rope` from [`LayerAccelerator::upload_rope`]. `query_rows`:
    /// ascending, `None` means all.
    fn upload_rows(
        &self,
        rope: &DeviceState,
        batch: &PackedBatch,
        query_rows: Option<&[u32]>,
        dropout: Option<&DropoutMask>,
    ) -> Result<DeviceState>;
    /// Computes one layer in training; see [`forward_on`].
    fn forward_layer(
        &self,
        weights: &LayerWeights,
        adapter: Option<&LoraAdapter>,
        x: &Tensor,
        pass: LayerPass,
        collected: Option<&Recompute>,
    ) -> Result<Tensor>;
}

/// Finds the accelerator of a device.
pub type LayerAcceleratorOf = fn(&Device) -> Result<Arc<dyn LayerAccelerator>>;

static INSTALLED: OnceLock<LayerAcceleratorOf> = OnceLock::new();

pub(crate) fn install(accelerator_of: LayerAcceleratorOf) {
    let _ = INSTALLED.set(accelerator_of);
}

pub(crate) fn layer_accelerator_of(device: &Device) -> Result<Option<Arc<dyn LayerAccelerator>>> {
    match (device, INSTALLED.get()) {
        (Device::Cpu, _) => Ok(None),
        (device, Some(accelerator_of)) => accelerator_of(device).map(Some),
        (device, None) => bail!("no accelerator is installed for {:?}", device.location()),
    }
}

/// Output of a layer on the device of its input; see [`forward_on`].
pub(crate) fn forward(
    weights: &LayerWeights,
    adapter: Option<&LoraAdapter>,
    x: &Tensor,
    pass: LayerPass,
    collected: Option<&Recompute>,
) -> Result<Tensor> {
    match layer_accelerator_of(x.device())? {
        Some(accelerator) => accelerator.forward_layer(weights, adapter, x, pass, collected),
        None => forward_on(Cpu, weights, adapter, x, pass, collected),
    }
}

/// A transformer layer as one operation of candle's graph. Its inputs are `x` `(N, H)` and the trained tensors, flattened and concatenated;
/// if gradients are collected outside of the graph, `x` and an anchor.
struct LayerOp<B: TrainingBackend> {
    backend: B,
    layer: TransformerLayer<B>,
    pass: LayerPass,
    saved: SavedActivations<B, B::LogSumExp>,
    /// The collection for gradients of trained tensors; `None` if they are part of the graph.
    collected: Option<Recompute>,
    out: Mutex<Option<Storage>>,
    shape: Shape,
}

/// Output of a layer for its input `(N, H)`, with a gradient where something is trained.
pub fn forward_on<B: TrainingBackend>(
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

/// A transformer layer with gradient checkpointing: it saves only its input.
pub(crate) struct CheckpointedLayer {
    pub(crate) weights: Arc<LayerWeights>,
    pub(crate) pass: LayerPass,
    pub(crate) adapter: Option<Arc<LoraAdapter>>,
    pub(crate) recompute: Recompute,
    pub(crate) input: Tensor,
}

impl CheckpointedLayer {
    pub(crate) fn apply(self, x: &Tensor) -> Result<Tensor> {
        let anchor = self.recompute.anchor(x.device())?;
        x.apply_op2(&anchor, self)
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
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
    ) -> Result<(CpuStorage, Shape)> {
        // The inner graph is dropped at the end of this function, so that its memory is free for the next layer.
        let y = self.forward(&self.input)?;
        let (storage, layout) = y.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("a layer ran on another device than its input's") };
        Ok((storage.try_clone(layout)?, y.shape().clone()))
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
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
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
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

/// A scalar whose backward pass starts with a given gradient.
struct Seed {
    gradient: Tensor,
}

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, _storage: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, _layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((storage.device().zeros_impl(&Shape::from(()), DType::F32)?, Shape::from(())))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, _grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.gradient.clone()))
    }
}

/// Settings of a forward pass over a batch.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pass<'a> {
    /// The adapter; `None` for the base alone.
    pub adapter: Option<&'a LoraAdapter>,
    /// Dropout on the inputs of the adapter; `None` in rollouts, reference passes and evaluation.
    pub dropout: Option<Dropout>,
    /// Gradient checkpointing and the collection of gradients; `None` saves all activations and leaves gradients to candle's graph.
    pub recompute: Option<&'a Recompute>,
}

impl<'a> Pass<'a> {
    /// A forward pass with this adapter, or the base alone for `None`; no dropout, no recomputation.
    pub fn with(adapter: Option<&'a LoraAdapter>) -> Self {
        Self { adapter, ..Self::default() }
    }
}

/// What a layer saves for its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Saves activations that are expensive to recompute.
    Activations,
    /// Saves only the layer's input: gradient checkpointing.
    Inputs,
}

/// Collects gradients that layers compute outside of candle's graph. It serves any number of passes, one after another.
#[derive(Debug, Clone)]
pub struct Recompute {
    keep: Keep,
    gradients: Arc<Mutex<HashMap<TensorId, Tensor>>>,
    /// A variable that is an input of every such layer, because candle skips operations without variables. Created by the first layer.
    anchor: Arc<OnceLock<Var>>,
}

impl Recompute {
    /// An empty collection of gradients; `keep`: what layers save.
    pub fn new(keep: Keep) -> Self {
        Self { keep, gradients: Arc::default(), anchor: Arc::default() }
    }

    pub(crate) fn keeps_inputs(&self) -> bool {
        self.keep == Keep::Inputs
    }

    /// The same collection, for the recomputation inside a checkpointed layer.
    pub(crate) fn inside(&self) -> Self {
        Self { keep: Keep::Activations, ..self.clone() }
    }

    /// A variable as input of an operation that candle must not skip.
    pub(crate) fn anchor(&self, device: &Device) -> Result<Tensor> {
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
        // A panic in another thread leaves consistent sums, because each entry is replaced at once.
        self.gradients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, id: TensorId, gradient: Tensor) -> Result<()> {
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
pub fn backward(loss: &Tensor, recompute: Option<&Recompute>) -> std::result::Result<GradStore, ModelError> {
    if let Some(recompute) = recompute {
        recompute.gradients().clear(); // may contain gradients of a backward pass that failed
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
