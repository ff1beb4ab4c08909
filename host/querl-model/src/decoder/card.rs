//! What the layers of a decoder on a card share: angles of the rotary embedding, and for each pass its rows.

use crate::PackedBatch;
use crate::device::{CudaSlice, DeviceRope, Gpu, Masks, TreeQueries};
use crate::dropout::DropoutMask;
use crate::kernels::RopeTable;
use candle_core::{Error, Result};
use std::sync::Arc;

/// A decoder's own, for all its passes.
#[derive(Clone)]
pub(crate) struct OnCard {
    gpu: Gpu,
    rope: Arc<DeviceRope>,
}

/// Rows of a pass, copied to the card once.
pub(crate) struct CardRows {
    shared: OnCard,
    positions: CudaSlice<u32>,
    queries: TreeQueries,
    /// With a key for each row, copied.
    dropout: Option<(DropoutMask, CudaSlice<u64>)>,
}

impl OnCard {
    /// # Errors
    /// The card has no memory left.
    pub(crate) fn new(gpu: &Gpu, rope: &RopeTable) -> Result<Self> {
        Ok(Self { gpu: gpu.clone(), rope: Arc::new(DeviceRope::new(gpu, rope)?) })
    }

    /// Angles of the rotary embedding, on the card.
    pub(crate) fn rope(&self) -> &Arc<DeviceRope> {
        &self.rope
    }

    /// All rows of a batch, or some in rising order, with the dropout of those rows.
    ///
    /// # Errors
    /// A sequence longer than the model's positions, or a row that is not there.
    pub(crate) fn rows(
        &self,
        batch: &PackedBatch,
        wanted: Option<&[u32]>,
        dropout: Option<&DropoutMask>,
    ) -> Result<CardRows> {
        let (queries, positions) = match wanted {
            None => (TreeQueries::all(&self.gpu, &batch.tree)?, self.rope.positions(&self.gpu, &batch.positions)?),
            Some(wanted) => {
                let queries = TreeQueries::some(&self.gpu, &batch.tree, wanted)?; // a row that is not there ends here
                let positions: Vec<u32> = wanted.iter().map(|&row| batch.positions[row as usize]).collect();
                (queries, self.rope.positions(&self.gpu, &positions)?)
            }
        };
        let dropout =
            dropout.map(|mask| Ok::<_, Error>((mask.clone(), self.gpu.upload(mask.row_keys())?))).transpose()?;
        Ok(CardRows { shared: self.clone(), positions, queries, dropout })
    }
}

impl CardRows {
    pub(crate) fn rope(&self) -> &DeviceRope {
        &self.shared.rope
    }

    /// Of each row its position.
    pub(crate) fn positions(&self) -> &CudaSlice<u32> {
        &self.positions
    }

    /// Which rows are queries, and what they see.
    pub(crate) fn queries(&self) -> &TreeQueries {
        &self.queries
    }

    /// What is set to zero of the `n_in` inputs of an adapter's layer.
    pub(crate) fn masks(&self, layer_path: &str, n_in: usize) -> Option<Masks<'_>> {
        let (mask, row_keys) = self.dropout.as_ref()?;
        let first_input = mask.first_input(layer_path, n_in);
        Some(Masks { row_keys, layer_seed: mask.seed_of(layer_path), first_input, p: mask.p() })
    }

    /// The rows that are queries.
    pub(crate) fn list(&self) -> &CudaSlice<u32> {
        self.queries.rows()
    }
}
