//! All-reduce over the GPUs of ranks: NCCL on the GPUs' streams.
//!
//! Before each all-reduce the ranks synchronise on the host, so that no rank submits work after another has failed. NCCL gives every
//! rank the same bits. Results are the same from run to run if NCCL chooses the same algorithm, which it does for the same GPUs, links
//! and number of values; NVLink SHARP adds in its own order, and `NCCL_ALGO=Ring` in the environment disables it.

use super::nccl::Nccl;
use super::{DevicePtrMut, Gpu};
use candle_core::{Error, Result};
use querl_model::{Communicator, Ranks, RanksError};
use std::sync::Arc;

/// Sizes of the all-reduces in [`Gpu::connect`]: since 2.22, NCCL allocates memory for an algorithm when it is first used, and small and
/// large sizes use different ones.
const WARM_UP_SIZES: [usize; 2] = [1, 4 << 20];

impl Communicator for Nccl {
    fn abort(&self) {
        Self::abort(self);
    }

    fn close(&self) {
        Self::close(self);
    }
}

impl Gpu {
    /// Submits an all-reduce: `values` become their sum over all ranks.
    ///
    /// # Errors
    /// A rank has failed, made another call, or has another number of values; NCCL is missing or fails. Then all ranks have failed.
    pub fn all_reduce(&self, ranks: &Ranks, values: &mut impl DevicePtrMut<f32>) -> Result<()> {
        if ranks.world_size() == 1 {
            return Ok(());
        }
        ranks.barrier_before(operation_name(values.len())).map_err(Error::wrap)?;
        if values.is_empty() {
            return Ok(());
        }
        let nccl = self.communicator(ranks)?;
        nccl.all_reduce(self, values, &|| ranks.check().map_err(Error::wrap)).map_err(|error| ranks.fail(error))
    }

    /// Creates the communicator of `ranks`, a collective operation. NCCL takes memory of each GPU for it, so this comes before the model
    /// fills the GPU; otherwise the first all-reduce does it.
    ///
    /// # Errors
    /// A rank has failed; NCCL is missing or fails.
    pub fn connect(&self, ranks: &Ranks) -> Result<()> {
        if ranks.world_size() == 1 {
            return Ok(());
        }
        for n_values in WARM_UP_SIZES {
            self.all_reduce(ranks, &mut self.zeros(n_values)?)?;
        }
        self.settle(ranks)
    }

    /// Waits until submitted work is done on all ranks.
    ///
    /// # Errors
    /// A rank has failed, or made another call; submitted work failed.
    pub fn settle(&self, ranks: &Ranks) -> Result<()> {
        let waited = self.synchronize();
        // An aborted all-reduce may make the GPU fail; what aborted it is the reason.
        ranks.check().map_err(Error::wrap)?;
        waited?;
        ranks.barrier().map_err(Error::wrap)
    }

    /// This rank's end of the communicator, which is created when all ranks first come here.
    fn communicator(&self, ranks: &Ranks) -> Result<Arc<Nccl>> {
        let alone = || RanksError::Failed { rank: ranks.rank(), message: "its process group has no other rank".into() };
        let created = ranks.communicator().ok_or_else(alone).map_err(Error::wrap)?;
        if let Some(nccl) = created.get().and_then(|nccl| nccl.clone().downcast().ok()) {
            return Ok(nccl);
        }
        // All ranks open their memory before the broadcast below, and so before any GPU accesses another's memory.
        let ordinals = ranks.all_gather(self.ordinal()).map_err(Error::wrap)?;
        self.open_to(ordinals.iter().map(|ordinal| **ordinal)).map_err(|error| ranks.fail(error))?;
        let id = ranks.is_first().then(Nccl::unique_id).transpose().map_err(|error| ranks.fail(error))?;
        let id = ranks.broadcast(0, id).map_err(Error::wrap)?;
        let joining = Nccl::join(self, *id, ranks.world_size(), ranks.rank());
        let nccl = Arc::new(joining.map_err(|error| ranks.fail(error))?);
        ranks.register(nccl.clone());
        nccl.joined(&|| ranks.check().map_err(Error::wrap)).map_err(|error| ranks.fail(error))?;
        created.get_or_init(|| nccl.clone());
        Ok(nccl)
    }
}

/// The name under which ranks agree on an all-reduce.
pub(super) fn operation_name(n_values: usize) -> String {
    format!("all-reduce of {n_values} values on GPUs")
}
