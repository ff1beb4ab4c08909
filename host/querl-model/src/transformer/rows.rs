//! The rows of a packed batch as transformer layers see them: positions, attention, dropout.

use crate::dropout::DropoutMask;
use crate::kernels::{Queries, RopeTable};
use crate::sharding::TensorParallel;
use candle_core::Tensor;
use std::sync::Arc;

/// The rows of a batch that enter a layer, and the settings of the model that every layer needs.
#[derive(Clone)]
pub(crate) struct BatchRows {
    pub(crate) rope: RopeTable,
    pub(crate) positions: Arc<Vec<u32>>,
    pub(crate) queries: Queries,
    pub(crate) head_dim: usize,
    pub(crate) eps: f64,
    /// Ranks over which row-parallel products are summed.
    pub(crate) parallel: TensorParallel,
    /// Dropout on the inputs of adapters: one key per row.
    pub(crate) dropout: Option<DropoutMask>,
    /// The same rows on the GPU.
    #[cfg(feature = "cuda")]
    pub(crate) on_card: Option<Arc<crate::decoder::CardRows>>,
}

/// The rows whose output is needed: the last layer computes queries and everything after them for these rows alone.
#[derive(Clone)]
pub(crate) struct QueryRows {
    /// Row indices, ascending.
    pub(crate) list: Arc<Vec<u32>>,
    pub(crate) indices: Tensor, // (rows) u32
    pub(crate) rows: BatchRows,
}
