//! What all layers of a decoder read: the RoPE table, and the rows of a pass.

use super::{CudaSlice, DeviceRope, Gpu, Masks, TreeQueries};
use candle_core::{Error, Result};
use querl_model::PackedBatch;
use querl_model::backend::DropoutMask;
use querl_model::kernels::RopeTable;
use std::sync::Arc;

/// Of a decoder, for all its passes.
pub(crate) struct DecoderRope(Arc<DeviceRope>);

impl DecoderRope {
    pub(super) fn new(gpu: &Gpu, rope: &RopeTable) -> Result<Self> {
        Ok(Self(Arc::new(DeviceRope::new(gpu, rope)?)))
    }

    pub(crate) fn table(&self) -> &Arc<DeviceRope> {
        &self.0
    }
}

/// Rows of a pass, uploaded once for all layers.
pub(super) struct LayerRows {
    pub(super) rope: Arc<DeviceRope>,
    pub(super) positions: CudaSlice<u32>,
    /// Which rows are queries, and which keys they attend to.
    pub(super) queries: TreeQueries,
    /// With the keys of all rows.
    dropout: Option<(DropoutMask, CudaSlice<u64>)>,
}

impl LayerRows {
    /// All rows of a batch, or the query rows, ascending.
    pub(super) fn new(
        gpu: &Gpu,
        rope: Arc<DeviceRope>,
        batch: &PackedBatch,
        query_rows: Option<&[u32]>,
        dropout: Option<&DropoutMask>,
    ) -> Result<Self> {
        let (queries, positions) = match query_rows {
            None => (TreeQueries::all(gpu, &batch.tree)?, rope.positions(gpu, &batch.positions)?),
            Some(rows) => {
                let queries = TreeQueries::some(gpu, &batch.tree, rows)?; // checks that the rows exist
                let positions: Vec<u32> = rows.iter().map(|&row| batch.positions[row as usize]).collect();
                (queries, rope.positions(gpu, &positions)?)
            }
        };
        let dropout = dropout.map(|mask| Ok::<_, Error>((mask.clone(), gpu.upload(mask.row_keys())?))).transpose()?;
        Ok(Self { rope, positions, queries, dropout })
    }

    /// Dropout of the `n_in` inputs of an adapter's layer.
    pub(super) fn masks(&self, layer_path: &str, n_in: usize) -> Option<Masks<'_>> {
        let (mask, row_keys) = self.dropout.as_ref()?;
        let first_input = mask.first_input(layer_path, n_in);
        Some(Masks { row_keys, layer_seed: mask.seed_of(layer_path), first_input, p: mask.p() })
    }

    /// The rows that are queries.
    pub(super) fn list(&self) -> &CudaSlice<u32> {
        self.queries.rows()
    }
}
