//! The operations of a transformer layer, forward and backward, on one kind of device, and the rows (tokens) that they work on.

use super::linear::LoraLinear;
use crate::Ranks;
use crate::dropout::DropoutMask;
use crate::kernels::{Queries, RopeTable};
use crate::sharding::TensorParallel;
use candle_core::{Result, Storage, Tensor};
use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;

/// Parameters that all layers of a model share, in addition to the weights of each.
#[derive(Clone)]
pub struct LayerContext {
    /// RoPE table of all positions.
    pub rope: RopeTable,
    /// Width H of the residual.
    pub hidden_size: usize,
    /// Epsilon of all RMSNorms.
    pub eps: f32,
    /// Tensor-parallel ranks, over which the outputs of row-parallel layers are all-reduced.
    pub parallel: TensorParallel,
}

/// Rows (tokens) that enter a linear layer.
#[derive(Clone)]
pub struct Rows {
    /// Position of each row in its sequence.
    pub positions: Arc<Vec<u32>>,
    /// Dropout on the inputs of adapters, with one key per row; `None` without dropout.
    pub dropout: Option<DropoutMask>,
    /// The rows in device memory, in the backend's form; `None` on the CPU.
    pub device_rows: Option<Arc<dyn Any + Send + Sync>>,
}

/// The rows whose output is needed. The last layer computes keys and values for all rows, everything else for these alone.
#[derive(Clone)]
pub struct QueryRows {
    /// Row indices, ascending.
    pub indices: Arc<Vec<u32>>,
    /// Positions and dropout of the query rows.
    pub rows: Rows,
}

/// The rows of one pass through a layer.
#[derive(Clone)]
pub struct LayerRows {
    /// Parameters that all layers of the model share.
    pub context: LayerContext,
    /// Input rows of the layer, for which keys and values are computed.
    pub rows: Rows,
    /// Rows whose output is computed; `None` means all.
    pub query_rows: Option<QueryRows>,
}

impl LayerRows {
    /// The query rows, for which everything but keys and values is computed.
    pub fn queries(&self) -> &Rows {
        self.query_rows.as_ref().map_or(&self.rows, |query_rows| &query_rows.rows)
    }
}

/// Causal attention among the rows of a packed batch; different sequences do not attend to each other.
#[derive(Clone)]
pub struct PackedAttention {
    /// Query rows and the prefix tree that they attend in.
    pub queries: Queries,
    /// Head size D.
    pub head_dim: usize,
    /// Positions and dropout of the query rows, for GPU backends.
    pub rows: Rows,
}

/// Forward operations on one kind of device. [`super::TransformerLayer`] decides on their order and on what is saved; a backend
/// decides how an operation is computed and in which types.
///
/// There are two kinds of buffers, row-major `(rows, width)`. The *residual* stream is f32 on every device. *Activations* inside a
/// layer have the type in which the device multiplies (f32 on the CPU, bf16 on a GPU).
pub trait LayerBackend: Sized {
    /// An owned f32 residual buffer.
    type Residual: Deref<Target = Self::ResidualSlice>;
    /// A borrowed f32 residual buffer.
    type ResidualSlice: ?Sized;
    /// An owned buffer of activations.
    type Activations: Deref<Target = Self::ActivationSlice>;
    /// A borrowed buffer of activations.
    type ActivationSlice: ?Sized;
    /// Weight of a norm.
    type Norm;
    /// `N` linear layers that read the same input.
    type Linears<const N: usize>: Send + Sync;
    /// LoRA A's output `scale * x A^T`, saved for the backward pass.
    type LoraAOut;

    /// See [`crate::kernels::rms_norm`].
    fn rms_norm(&self, x: &Self::ResidualSlice, weight: &Self::Norm, eps: f32) -> Result<Self::Activations>;
    /// Outputs of linear layers with the same input.
    fn project<const N: usize>(
        &self,
        linears: &Self::Linears<N>,
        x: &Self::ActivationSlice,
    ) -> Result<[ProjectionOut<Self>; N]>;
    /// Queries of the query rows (`None`: all rows), keys and values of all rows.
    fn project_qkv(
        &self,
        qkv: &Self::Linears<3>,
        x: &Self::ActivationSlice,
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<[ProjectionOut<Self>; 3]>;
    /// RoPE of queries or keys, after the per-head norm where there is one; see [`crate::kernels::norm_rope`].
    fn apply_rope(
        &self,
        x: &Self::ActivationSlice,
        norm: Option<&Self::Norm>,
        context: &LayerContext,
        rows: &Rows,
    ) -> Result<Self::Activations>;
    /// The query rows of the residual; all of it where `query_rows` is `None`.
    fn query_residual<'a>(
        &self,
        x: &'a Self::ResidualSlice,
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<MaybeBorrowed<'a, Self::Residual>>;
    /// `residual` plus the output of a linear layer.
    fn add_projection(
        &self,
        linear: &Self::Linears<1>,
        x: &Self::ActivationSlice,
        residual: &Self::ResidualSlice,
    ) -> Result<(Self::Residual, Self::LoraAOut)>;
    /// See [`crate::kernels::swiglu`].
    fn swiglu(&self, gate: &Self::ActivationSlice, up: &Self::ActivationSlice) -> Result<Self::Activations>;
    /// A residual buffer of zeros, of the same length as `residual`.
    fn zeros_like(&self, residual: &Self::ResidualSlice) -> Result<Self::Residual>;
    /// Replaces a buffer by its sum over all ranks; a collective operation.
    fn all_reduce(&self, ranks: &Ranks, sum: &mut Self::Residual) -> Result<()>;
}

/// Outputs of a linear layer and of its LoRA A.
pub type ProjectionOut<B> = (<B as LayerBackend>::Activations, <B as LayerBackend>::LoraAOut);

/// Attention of a layer: among the rows of a packed batch ([`PackedAttention`]), or over a paged KV cache.
pub trait Attention<B: LayerBackend> {
    /// Values that attention saves for its backward pass.
    type Saved;

    /// Attention output `(queries, heads * D)` for queries, keys and values with RoPE applied, and what is saved for the backward pass.
    fn attend(&mut self, backend: &B, qkv: [&B::ActivationSlice; 3]) -> Result<(B::Activations, Self::Saved)>;
}

impl<B: TrainingBackend> Attention<B> for PackedAttention {
    type Saved = B::LogSumExp;

    fn attend(&mut self, backend: &B, qkv: [&B::ActivationSlice; 3]) -> Result<(B::Activations, B::LogSumExp)> {
        backend.attend(self, qkv)
    }
}

/// A backend that also computes gradients.
pub trait TrainingBackend:
    LayerBackend<Norm = Tensor, Residual: Send + Sync, Activations: Send + Sync, LoraAOut: Send + Sync>
    + Send
    + Sync
    + 'static
{
    /// Values of a linear layer that the device caches from the forward to the backward pass.
    type LinearState: Default + Send + Sync;
    /// Log-sum-exp of the attention scores, saved for the backward pass.
    type LogSumExp: Send + Sync;
    /// Gradients of a linear layer's parameters; the default is none.
    type LinearGradients: Default;
    /// The values of a tensor, borrowed.
    type Borrowed<'a>: Deref<Target = Self::ResidualSlice>;

    /// Linear layers with the same input as one group.
    fn group<const N: usize>(linears: [LoraLinear<Self::LinearState>; N]) -> Self::Linears<N>;
    /// The linear layers of a group.
    fn members<const N: usize>(linears: &Self::Linears<N>) -> [&LoraLinear<Self::LinearState>; N];
    /// Refuses a linear layer that the device cannot train.
    fn check(&self, _linear: &LoraLinear<Self::LinearState>) -> Result<()> {
        Ok(())
    }

    /// The tensor, or a copy of it, in a layout that [`TrainingBackend::borrow`] takes.
    fn contiguous(&self, tensor: &Tensor) -> Result<Tensor>;
    /// Borrows the values of a contiguous f32 tensor.
    fn borrow<'a>(&self, tensor: &'a Tensor) -> Result<Self::Borrowed<'a>>;
    /// Converts a buffer to the storage of a candle tensor.
    fn storage(&self, buffer: Self::Residual) -> Result<Storage>;
    /// Number of values of a buffer.
    fn len(&self, buffer: &Self::ResidualSlice) -> usize;
    /// Concatenates buffers.
    fn concat(&self, parts: Vec<Self::Residual>) -> Result<Self::Residual>;

    /// The residual (or its gradient) in the type of activations.
    fn to_activations<'a>(&self, x: &'a Self::ResidualSlice) -> Result<MaybeBorrowed<'a, Self::Activations>>;
    /// The query rows of activations; all of them where `query_rows` is `None`.
    fn query_activations<'a>(
        &self,
        x: &'a Self::ActivationSlice,
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<MaybeBorrowed<'a, Self::Activations>>;
    /// Adds `part`, which contains only the query rows, to those rows of `sum`.
    fn add_query_rows(
        &self,
        sum: &mut Self::Residual,
        part: &Self::ResidualSlice,
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<()>;

    /// Gradient of `x`, plus `residual_grad` if given, and gradient of the norm's weight if it is trained.
    fn rms_norm_backward(
        &self,
        x: &Self::ResidualSlice,
        weight: &Tensor,
        eps: f32,
        grad: &Self::ResidualSlice,
        residual_grad: Option<&Self::ResidualSlice>,
    ) -> Result<(Self::Residual, Option<Self::Residual>)>;

    /// Gradient of each linear layer's LoRA A output: `scale * g B` for the gradient `g` of the layer's output; all other gradients depend
    /// on it.
    fn lora_b_backward<const N: usize>(
        &self,
        layers: [(&LoraLinear<Self::LinearState>, &Self::ActivationSlice); N],
    ) -> Result<[Self::LinearGradients; N]>;
    /// Computes gradients of parameters and adds them to the results of [`TrainingBackend::lora_b_backward`].
    fn parameter_backward<const N: usize>(&self, layers: [LinearBackward<'_, Self>; N]) -> Result<()>;
    /// Gradient of a linear layer's input.
    fn input_backward(
        &self,
        linear: &LoraLinear<Self::LinearState>,
        grad: &Self::ActivationSlice,
        gradients: &Self::LinearGradients,
    ) -> Result<Self::Activations>;
    /// Gradient of the input that several linear layers share.
    fn shared_input_backward(&self, layers: &[LinearGrad<'_, Self>]) -> Result<Self::Residual>;
    /// Gradients of a linear layer's tensors, in the order of [`LoraLinear::tensors`].
    fn gradients_of(
        &self,
        linear: &LoraLinear<Self::LinearState>,
        gradients: Self::LinearGradients,
    ) -> Vec<Self::Residual>;

    /// Gradients of [`LayerBackend::apply_rope`]'s input and norm; `x` is needed only with a norm.
    fn rope_backward(
        &self,
        x: Option<&Self::ActivationSlice>,
        norm: Option<&Tensor>,
        context: &LayerContext,
        rows: &Rows,
        grad: &Self::ActivationSlice,
    ) -> Result<(Self::Activations, Option<Self::Residual>)>;

    /// See [`crate::kernels::attention`].
    fn attend(
        &self,
        attention: &PackedAttention,
        qkv: [&Self::ActivationSlice; 3],
    ) -> Result<(Self::Activations, Self::LogSumExp)>;
    /// Gradients of queries, keys and values for the gradient of attention's output `out`.
    fn attention_backward(
        &self,
        attention: &PackedAttention,
        qkv: [&Self::ActivationSlice; 3],
        out: &Self::ActivationSlice,
        logsumexp: &Self::LogSumExp,
        grad: &Self::ActivationSlice,
    ) -> Result<[Self::Activations; 3]>;

    /// Recomputes the output of [`LayerBackend::swiglu`], and computes the gradients of gate and up.
    fn swiglu_backward(
        &self,
        gate: &Self::ActivationSlice,
        up: &Self::ActivationSlice,
        grad: Self::Activations,
    ) -> Result<[Self::Activations; 3]>;
}

/// Inputs and results of the backward pass of a linear layer's parameters.
pub struct LinearBackward<'a, B: TrainingBackend> {
    /// The linear layer.
    pub linear: &'a LoraLinear<B::LinearState>,
    /// Input of the forward pass.
    pub x: &'a B::ActivationSlice,
    /// Output of LoRA A in the forward pass.
    pub lora_a_out: &'a B::LoraAOut,
    /// Gradient of the layer's output.
    pub grad: &'a B::ActivationSlice,
    /// Result of [`TrainingBackend::lora_b_backward`], to which the gradients of parameters are added.
    pub gradients: &'a mut B::LinearGradients,
}

/// A linear layer with the gradients of its output and of its parameters.
pub type LinearGrad<'a, B> = (
    &'a LoraLinear<<B as TrainingBackend>::LinearState>,
    &'a <B as LayerBackend>::ActivationSlice,
    &'a <B as TrainingBackend>::LinearGradients,
);

/// A borrowed or an owned buffer: `Cow` without `ToOwned`.
pub enum MaybeBorrowed<'a, T: Deref> {
    /// A borrowed buffer.
    Borrowed(&'a T::Target),
    /// An owned buffer.
    Owned(T),
}

impl<T: Deref> Deref for MaybeBorrowed<'_, T> {
    type Target = T::Target;

    fn deref(&self) -> &T::Target {
        match self {
            Self::Borrowed(borrowed) => borrowed,
            Self::Owned(owned) => owned,
        }
    }
}
