//! The steps that a decoder layer consists of, each with its gradient, on one kind of device.

use super::fused_linear::FusedLinear;
use super::rows::{BatchRows, QueryRows};
use crate::Ranks;
use candle_core::{Result, Storage, Tensor};
use std::ops::Deref;

/// What a layer is computed with. A layer says in which order its steps come and what it keeps; a device says how a step is done
/// and in which types.
///
/// There are two kinds of values. *Sums* are the residual stream, its gradient and the gradients of parameters: f32 everywhere.
/// *Values* are the activations inside a layer and their gradients, in the type in which the device multiplies. BatchRows stand one
/// after another, `(N, width)`.
pub(crate) trait Steps: Send + Sync + 'static {
    /// Sums of one's own.
    type Sums: Deref<Target = Self::SumSlice> + Send + Sync;
    /// Sums that may be another's.
    type SumSlice: ?Sized;
    /// Values of one's own.
    type Values: Deref<Target = Self::ValueSlice> + Send + Sync;
    /// Values that may be another's.
    type ValueSlice: ?Sized;
    /// What attention's backward pass wants again.
    type LogSums: Send + Sync;
    /// What a backward pass finds for the parameters of a linear layer; the default is nothing.
    type Found: Default;
    /// The sums of a tensor, as long as they are looked at.
    type Borrowed<'a>: Deref<Target = Self::SumSlice>;

    /// A tensor whose values can be borrowed: itself where they follow each other.
    fn prepared(&self, tensor: &Tensor) -> Result<Tensor>;
    /// The values of a prepared f32 tensor.
    fn borrowed<'a>(&self, tensor: &'a Tensor) -> Result<Self::Borrowed<'a>>;
    /// Sums as the storage of a tensor.
    fn storage(&self, sums: Self::Sums) -> Result<Storage>;
    /// Sums one after another; those before are given back on the way.
    fn joined(&self, parts: Vec<Self::Sums>) -> Result<Self::Sums>;
    /// How many they are.
    fn n_sums(&self, sums: &Self::SumSlice) -> usize;
    /// As many zeros.
    fn zeros(&self, n: usize) -> Result<Self::Sums>;
    /// Replaces sums by their sum over ranks, which all come to it.
    fn sum_over(&self, ranks: &Ranks, sums: &mut Self::Sums) -> Result<()>;

    /// Sums as values.
    fn values<'a>(&self, sums: &'a Self::SumSlice) -> Result<Lent<'a, Self::Values>>;
    /// The wanted rows; all of them where `wanted` is `None`.
    fn picked<'a>(
        &self,
        all: &'a Self::ValueSlice,
        width: usize,
        wanted: Option<&QueryRows>,
    ) -> Result<Lent<'a, Self::Values>>;
    /// The same of sums.
    fn picked_sums<'a>(
        &self,
        all: &'a Self::SumSlice,
        width: usize,
        wanted: Option<&QueryRows>,
    ) -> Result<Lent<'a, Self::Sums>>;
    /// Adds values of the wanted rows to all rows.
    fn add_picked(
        &self,
        all: &mut Self::Sums,
        picked: &Self::SumSlice,
        width: usize,
        wanted: Option<&QueryRows>,
    ) -> Result<()>;

    /// See [`crate::kernels::rms_norm`].
    fn normed(&self, x: &Self::SumSlice, norm: &Tensor, eps: f32) -> Result<Self::Values>;
    /// Gradients of `x`, to which `more` is added where there is any, and of the norm's weight where that is trained.
    fn norm_gradients(
        &self,
        x: &Self::SumSlice,
        norm: &Tensor,
        eps: f32,
        grad: &Self::SumSlice,
        more: Option<&Self::SumSlice>,
    ) -> Result<(Self::Sums, Option<Self::Sums>)>;

    /// Of each linear layer with the same input its outputs, and those of its A, which the backward pass wants again.
    fn forward<const N: usize>(
        &self,
        linears: [&FusedLinear; N],
        x: &Self::ValueSlice,
    ) -> Result<[(Self::Values, Self::Values); N]>;
    /// `base` with the outputs of a linear layer added, and the outputs of its A.
    fn added(
        &self,
        linear: &FusedLinear,
        x: &Self::ValueSlice,
        base: &Self::SumSlice,
    ) -> Result<(Self::Sums, Self::Values)>;
    /// What the gradients of a linear layer's input need besides the gradient `grad` of its output, for each of some layers.
    fn low_gradients<const N: usize>(&self, layers: [(&FusedLinear, &Self::ValueSlice); N])
    -> Result<[Self::Found; N]>;
    /// Adds the gradients of the parameters to what [`Steps::low_gradients`] found.
    fn parameter_gradients<const N: usize>(&self, layers: [Trained<'_, Self>; N]) -> Result<()>;
    /// Gradient of a linear layer's input; `found` is what [`Steps::low_gradients`] returned.
    fn input_gradient(
        &self,
        linear: &FusedLinear,
        grad: &Self::ValueSlice,
        found: &Self::Found,
    ) -> Result<Self::Values>;
    /// Gradient of the input that several linear layers share.
    fn shared_input_gradient(&self, layers: &[Projected<'_, Self>]) -> Result<Self::Sums>;
    /// What was found for a layer's tensors, in the order of [`FusedLinear::tensors`].
    fn gradients_of(&self, linear: &FusedLinear, found: Self::Found) -> Vec<Self::Sums>;

    /// Heads of queries or keys after their norm, where there is one, turned by their positions; see
    /// [`crate::kernels::norm_rope`].
    fn turned(&self, x: &Self::ValueSlice, norm: Option<&Tensor>, rows: &BatchRows) -> Result<Self::Values>;
    /// The same; without a norm there is no `x`.
    fn turned_gradients(
        &self,
        x: Option<&Self::ValueSlice>,
        norm: Option<&Tensor>,
        rows: &BatchRows,
        grad: &Self::ValueSlice,
    ) -> Result<(Self::Values, Option<Self::Sums>)>;

    /// See [`crate::kernels::attention`]; of queries, keys and values.
    fn attend(&self, rows: &BatchRows, qkv: [&Self::ValueSlice; 3]) -> Result<(Self::Values, Self::LogSums)>;
    /// Gradients of queries, keys and values for the gradient of [`Steps::attend`]'s result `out`.
    fn attention_gradients(
        &self,
        rows: &BatchRows,
        qkv: [&Self::ValueSlice; 3],
        out: &Self::ValueSlice,
        log_sums: &Self::LogSums,
        grad: &Self::ValueSlice,
    ) -> Result<[Self::Values; 3]>;

    /// See [`crate::kernels::swiglu`].
    fn gated(&self, gate: &Self::ValueSlice, up: &Self::ValueSlice) -> Result<Self::Values>;
    /// The gated values again, and the gradients of gate and up.
    fn gated_gradients(
        &self,
        gate: &Self::ValueSlice,
        up: &Self::ValueSlice,
        grad: Self::Values,
    ) -> Result<[Self::Values; 3]>;
}

/// A linear layer whose parameters get their gradients.
pub(crate) struct Trained<'a, S: Steps + ?Sized> {
    pub(crate) linear: &'a FusedLinear,
    pub(crate) x: &'a S::ValueSlice,
    /// What the forward pass returned beside the outputs.
    pub(crate) low: &'a S::ValueSlice,
    /// Gradient of the outputs.
    pub(crate) grad: &'a S::ValueSlice,
    pub(crate) found: &'a mut S::Found,
}

/// A linear layer with the gradient of its output and what was found for its parameters.
pub(crate) type Projected<'a, S> = (&'a FusedLinear, &'a <S as Steps>::ValueSlice, &'a <S as Steps>::Found);

/// Another's, or one's own.
pub(crate) enum Lent<'a, T: Deref> {
    /// Somebody else keeps it.
    Borrowed(&'a T::Target),
    /// Made for this use.
    Owned(T),
}

impl<T: Deref> Deref for Lent<'_, T> {
    type Target = T::Target;

    fn deref(&self) -> &T::Target {
        match self {
            Self::Borrowed(borrowed) => borrowed,
            Self::Owned(owned) => owned,
        }
    }
}
