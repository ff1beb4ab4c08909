//! The rows (tokens) of a packed batch as transformer layers see them, and the settings of the model that every layer needs.

use crate::dropout::DropoutMask;
use crate::kernels::{Queries, RopeTable};
use crate::sharding::TensorParallel;
use std::any::Any;
use std::sync::Arc;

/// What every layer of a model needs in addition to its weights.
#[derive(Clone)]
pub struct LayerContext {
    pub rope: RopeTable,
    pub hidden_size: usize,
    pub eps: f32,
    /// Ranks over which products that are split by their inputs are summed.
    pub parallel: TensorParallel,
}

/// Rows that enter a linear layer.
#[derive(Clone)]
pub struct Rows {
    pub positions: Arc<Vec<u32>>,
    /// Dropout on the inputs of adapters: one key per row.
    pub dropout: Option<DropoutMask>,
    /// The same rows as a backend keeps them on its device.
    pub device_rows: Option<Arc<dyn Any + Send + Sync>>,
}

/// The rows whose output is needed. The last layer computes keys and values for all rows, everything else for these alone.
#[derive(Clone)]
pub struct QueryRows {
    /// Row indices, ascending.
    pub indices: Arc<Vec<u32>>,
    pub rows: Rows,
}

/// The rows of one pass through a layer.
#[derive(Clone)]
pub struct LayerRows {
    pub context: LayerContext,
    /// Input rows: keys and values.
    pub rows: Rows,
    /// Output rows; `None` means all.
    pub query_rows: Option<QueryRows>,
}

impl LayerRows {
    /// The rows of queries and of everything after attention.
    pub fn queries(&self) -> &Rows {
        self.query_rows.as_ref().map_or(&self.rows, |query_rows| &query_rows.rows)
    }
}

/// Causal attention among the rows of a packed batch; sequences do not see each other.
#[derive(Clone)]
pub struct PackedAttention {
    pub queries: Queries,
    pub head_dim: usize,
    /// The rows that are queries.
    #[allow(dead_code)] // backends of GPUs read it
    pub rows: Rows,
}
