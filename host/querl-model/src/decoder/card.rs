//! What the layers of a decoder on a card share: angles of the rotary embedding, and for each pass its rows.

use crate::PackedBatch;
use crate::device::{CudaSlice, DeviceRope, Gpu, TreeQueries};
use crate::kernels::RopeTable;
use candle_core::Result;
use std::sync::Arc;

/// A decoder's own, for all its passes.
#[derive(Clone)]
pub(super) struct OnCard {
    gpu: Gpu,
    rope: Arc<DeviceRope>,
}

/// Rows of a pass, copied to the card once.
pub(super) struct CardRows {
    shared: OnCard,
    positions: CudaSlice<u32>,
    queries: TreeQueries,
}

impl OnCard {
    /// # Errors
    /// The card has no memory left.
    pub(super) fn new(gpu: &Gpu, rope: &RopeTable) -> Result<Self> {
        Ok(Self { gpu: gpu.clone(), rope: Arc::new(DeviceRope::new(gpu, rope)?) })
    }

    /// All rows of a batch, or some in rising order.
    ///
    /// # Errors
    /// A sequence longer than the model's positions, or a row that is not there.
    pub(super) fn rows(&self, batch: &PackedBatch, wanted: Option<&[u32]>) -> Result<CardRows> {
        let (queries, positions) = match wanted {
            None => (TreeQueries::all(&self.gpu, &batch.tree)?, self.rope.positions(&self.gpu, &batch.positions)?),
            Some(wanted) => {
                let queries = TreeQueries::some(&self.gpu, &batch.tree, wanted)?; // a row that is not there ends here
                let positions: Vec<u32> = wanted.iter().map(|&row| batch.positions[row as usize]).collect();
                (queries, self.rope.positions(&self.gpu, &positions)?)
            }
        };
        Ok(CardRows { shared: self.clone(), positions, queries })
    }
}

impl CardRows {
    pub(super) fn rope(&self) -> &DeviceRope {
        &self.shared.rope
    }

    /// Of each row its position.
    pub(super) fn positions(&self) -> &CudaSlice<u32> {
        &self.positions
    }

    /// Which rows are queries, and what they see.
    pub(super) fn queries(&self) -> &TreeQueries {
        &self.queries
    }

    /// The rows that are queries.
    pub(super) fn list(&self) -> &CudaSlice<u32> {
        self.queries.rows()
    }
}
