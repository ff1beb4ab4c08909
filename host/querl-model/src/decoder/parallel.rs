//! What ranks that hold one model together tell each other in a pass: sums forward behind what is split by its inputs, sums of
//! gradients backward where every rank goes on from the same values.
//!
//! Here as operations of the graph, for layers that are composed of single ones; a fused layer does the same in its own steps.
//!
//! Source: Shoeybi et al. 2019, "Megatron-LM", figure 3 (`f` and `g`).

use super::shard::{Shard, Split};
use crate::adapter::LoraPair;
use crate::kernels::floats;
use crate::{DecoderConfig, ModelError, Ranks};
use candle_core::{CpuStorage, CustomOp1, Error, Layout, Result as TensorResult, Shape, Tensor};
use querl_core::config::BaseDtype;
use std::borrow::Cow;

/// The ranks that hold one model together, as one of them sees them; by default one holds all of it.
#[derive(Clone)]
pub(crate) struct TensorParallel {
    shard: Shard,
    ranks: Ranks,
}

impl Default for TensorParallel {
    fn default() -> Self {
        Self { shard: Shard::WHOLE, ranks: Ranks::alone() }
    }
}

impl std::fmt::Debug for TensorParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.shard.fmt(f)
    }
}

impl TensorParallel {
    /// # Errors
    /// See [`Shard::check`].
    pub(super) fn new(ranks: &Ranks, config: &DecoderConfig, dtype: BaseDtype) -> Result<Self, ModelError> {
        let shard = Shard::new(ranks.rank(), ranks.world_size(), config, dtype)?;
        Ok(Self { shard, ranks: ranks.clone() })
    }

    pub(crate) fn shard(&self) -> Shard {
        self.shard
    }

    pub(crate) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    pub(crate) fn is_split(&self) -> bool {
        self.shard.size() > 1
    }

    /// Refuses what a part of a model does not do.
    ///
    /// # Errors
    /// There are several ranks.
    pub(crate) fn only_whole(&self, what: &str) -> Result<(), ModelError> {
        match self.is_split() {
            true => Err(ModelError::Shard(format!("{what} is not split over ranks; set `model.tensor_parallel = 1`"))),
            false => Ok(()),
        }
    }

    /// `x`, which is the same on all ranks, where each goes on with it in its own way: its gradient is the sum of theirs.
    pub(super) fn shared(&self, x: &Tensor) -> TensorResult<Tensor> {
        if !self.is_split() || !x.track_op() {
            return Ok(x.clone());
        }
        x.contiguous()?.apply_op1(Shared(self.ranks.clone()))
    }

    /// The sum of all ranks' `x`; its gradient is that of each.
    pub(super) fn summed(&self, x: &Tensor) -> TensorResult<Tensor> {
        if !self.is_split() {
            return Ok(x.clone());
        }
        x.contiguous()?.apply_op1(Summed(self.ranks.clone()))
    }

    /// A layer's pair, of which the matrix that every rank has whole gets the sum of what the ranks find.
    ///
    /// With `g` the gradient of the outputs, `dA = (s g B)^T x` and `dB = g^T (s x A^T)`. Split by outputs, each rank knows some
    /// columns of `g` and rows of `B`, so that its `s g B` is a summand of the whole one; split by inputs, its `s x A^T` is. The
    /// other matrix of each pair is split, and its part of the gradient is complete.
    pub(super) fn with_whole_gradients<'a>(&self, pair: &'a LoraPair, path: &str) -> TensorResult<Cow<'a, LoraPair>> {
        let split = Split::of(path).filter(|_| self.is_split());
        let Some(split) = split else { return Ok(Cow::Borrowed(pair)) };
        let mut pair = pair.clone();
        match split {
            Split::Outputs => pair.a = self.shared(&pair.a)?,
            Split::Inputs => pair.b = self.shared(&pair.b)?,
        }
        Ok(Cow::Owned(pair))
    }
}

struct Shared(Ranks);

impl CustomOp1 for Shared {
    fn name(&self) -> &'static str {
        "shared-by-ranks"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> TensorResult<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(floats(x, layout)?.to_vec()), layout.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad: &Tensor) -> TensorResult<Option<Tensor>> {
        Ok(Some(self.0.sum_tensor(grad)?))
    }
}

struct Summed(Ranks);

impl CustomOp1 for Summed {
    fn name(&self) -> &'static str {
        "summed-over-ranks"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> TensorResult<(CpuStorage, Shape)> {
        let mut sum = floats(x, layout)?.to_vec();
        self.0.sum(&mut sum).map_err(Error::wrap)?;
        Ok((CpuStorage::F32(sum), layout.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad: &Tensor) -> TensorResult<Option<Tensor>> {
        Ok(Some(grad.clone()))
    }
}
