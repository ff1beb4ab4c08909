//! The rows (tokens) of a packed batch as transformer layers see them, and the settings of the model that every layer needs.

use crate::dropout::DropoutMask;
use crate::kernels::{Queries, RopeTable};
use crate::sharding::TensorParallel;
use std::any::Any;
use std::sync::Arc;

/// What every layer of a model needs in addition to its weights.
#[derive(Clone)]
pub(crate) struct LayerContext {
    pub(crate) rope: RopeTable,
    pub(crate) hidden_size: usize,
    pub(crate) eps: f32,
    /// Ranks over which products that are split by their inputs are summed.
    pub(crate) parallel: TensorParallel,
}

/// Rows that enter a linear layer.
#[derive(Clone)]
pub(crate) struct Rows {
    pub(crate) positions: Arc<Vec<u32>>,
    /// Dropout on the inputs of adapters: one key per row.
    pub(crate) dropout: Option<DropoutMask>,
    /// The same rows as a backend keeps them on its device.
    pub(crate) device_rows: Option<Arc<dyn Any + Send + Sync>>,
}

/// The rows whose output is needed. The last layer computes keys and values for all rows, everything else for these alone.
#[derive(Clone)]
pub(crate) struct QueryRows {
    /// Row indices, ascending.
    pub(crate) indices: Arc<Vec<u32>>,
    pub(crate) rows: Rows,
}

/// The rows of one pass through a layer.
#[derive(Clone)]
pub(crate) struct LayerRows {
    pub(crate) context: LayerContext,
    /// Input rows: keys and values.
    pub(crate) rows: Rows,
    /// Output rows; `None` means all.
    pub(crate) query_rows: Option<QueryRows>,
}

impl LayerRows {
    /// The rows of queries and of everything after attention.
    pub(crate) fn queries(&self) -> &Rows {
        self.query_rows.as_ref().map_or(&self.rows, |query_rows| &query_rows.rows)
    }
}

/// Causal attention among the rows of a packed batch; sequences do not see each other.
#[derive(Clone)]
pub(crate) struct PackedAttention {
    pub(crate) queries: Queries,
    pub(crate) head_dim: usize,
    /// The rows that are queries.
    #[allow(dead_code)] // backends of GPUs read it
    pub(crate) rows: Rows,
}
