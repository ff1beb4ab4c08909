//! Sums over ranks of which each has a card: NCCL's, on the cards' streams.
//!
//! Before each sum the ranks meet on the host: where one has failed, the others hear of it and ask their cards for nothing. NCCL
//! gives every rank the same bits. From one run to the next they are the same where it chooses the same algorithm, as it does for
//! the same cards, links and number of values; sums within a switch (NVLink SHARP) are as the switch forms them, and
//! `NCCL_ALGO=Ring` in the environment does without.

use super::links::Link;
use super::{Ranks, RanksError, WithOthers};
use crate::device::{DevicePtrMut, Gpu, Loan, Nccl, storage, whole};
use candle_core::op::BackpropOp;
use candle_core::{Error, Result, Storage, Tensor};
use std::sync::Arc;

/// Numbers of values of the sums that [`Ranks::connect`] asks for: from 2.22 on NCCL takes memory for a way of summing when it first
/// goes it, and few values go another way than many.
const FIRST_SUMS: [usize; 2] = [1, 4 << 20];

impl Link for Nccl {
    fn abort(&self) {
        Self::abort(self);
    }

    fn close(&self) {
        Self::close(self);
    }
}

impl Ranks {
    /// Puts on the card's stream that `values` become their sum over all ranks.
    ///
    /// # Errors
    /// A rank has failed, is elsewhere, or has another number of values; there is no NCCL, or it fails. Then all ranks have failed.
    pub fn sum_on_card(&self, gpu: &Gpu, values: &mut impl DevicePtrMut<f32>) -> Result<()> {
        let Some(others) = &self.with_others else { return Ok(()) };
        self.exchange(what_of(values.len()), ()).map_err(Error::wrap)?;
        if values.is_empty() {
            return Ok(());
        }
        let nccl = self.card(gpu)?;
        nccl.sum(gpu, values, &|| others.check()).map_err(|error| others.tell(error))
    }

    /// Joins the cards of all ranks, which come here together. NCCL takes memory of each card for it: who is to fill the card with
    /// a model does this before. Without it the first sums do.
    ///
    /// # Errors
    /// A rank has failed; there is no NCCL, or it fails.
    pub fn connect(&self, gpu: &Gpu) -> Result<()> {
        if self.world_size() == 1 {
            return Ok(());
        }
        for n_values in FIRST_SUMS {
            self.sum_on_card(gpu, &mut gpu.zeros(n_values)?)?;
        }
        self.waited_for(gpu)
    }

    /// Waits until what this rank asked of its card is done on all ranks: a sum that another rank left in the middle is no sum.
    ///
    /// # Errors
    /// A rank has failed, or is elsewhere; the card's.
    pub fn settle(&self, tensor: &Tensor) -> Result<()> {
        if self.world_size() > 1 && !tensor.device().is_cpu() {
            self.waited_for(&Gpu::of(tensor.device())?)?;
        }
        Ok(())
    }

    pub(super) fn waited_for(&self, gpu: &Gpu) -> Result<()> {
        let waited = gpu.synchronize();
        // A card whose sum was ended may fail of it; what ended it is the reason.
        self.with_others.as_ref().map_or(Ok(()), WithOthers::check)?;
        waited?;
        self.barrier().map_err(Error::wrap)
    }

    pub(super) fn sum_tensor_on_card(&self, tensor: &Tensor) -> Result<Tensor> {
        let gpu = Gpu::of(tensor.device())?;
        let mut sum = gpu.copy(&*Loan::of(&whole(tensor)?)?)?;
        self.sum_on_card(&gpu, &mut sum)?;
        let storage = Storage::Cuda(storage(&gpu, sum));
        Ok(Tensor::from_storage(storage, tensor.shape().clone(), BackpropOp::none(), false))
    }

    /// This rank's end of the communicator, which is made when all ranks first come here.
    fn card(&self, gpu: &Gpu) -> Result<Arc<Nccl>> {
        let alone = || RanksError::Failed { rank: self.rank(), message: "it has nobody to sum with".into() };
        let others = self.with_others.as_ref().ok_or_else(alone).map_err(Error::wrap)?;
        if let Some(nccl) = others.card.get() {
            return Ok(nccl.clone());
        }
        // Before any rank's card reaches for another's memory all have come from here to the broadcast.
        let cards = self.all_gather(gpu.ordinal()).map_err(Error::wrap)?;
        gpu.open_to(cards.iter().map(|card| **card)).map_err(|error| others.tell(error))?;
        let id = self.is_first().then(Nccl::unique_id).transpose().map_err(|error| others.tell(error))?;
        let id = self.broadcast(0, id).map_err(Error::wrap)?;
        let joining = Nccl::join(gpu, *id, self.world_size(), self.rank());
        let nccl = Arc::new(joining.map_err(|error| others.tell(error))?);
        others.meeting.party().link(nccl.clone());
        nccl.joined(&|| others.check()).map_err(|error| others.tell(error))?;
        Ok(others.card.get_or_init(|| nccl).clone())
    }
}

impl WithOthers {
    fn check(&self) -> Result<()> {
        self.meeting.party().check().map_err(Error::wrap)
    }

    /// Tells the others at once that NCCL has failed here: what this rank gives back on its way out may wait for its card, which
    /// waits for theirs. What comes back is the failure that was first, of which this one may have come.
    fn tell(&self, error: Error) -> Error {
        let (party, rank) = (self.meeting.party(), self.meeting.members[self.index]);
        let is_first = party.fail(RanksError::Failed { rank, message: error.to_string() });
        if is_first { error } else { party.check().map_or_else(Error::wrap, |()| error) }
    }
}

/// How ranks at a sum on cards know that they are at the same.
pub(super) fn what_of(n_values: usize) -> String {
    format!("a sum of {n_values} values on cards")
}
