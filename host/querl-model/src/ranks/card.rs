//! Sums over ranks of which each has a card: NCCL's, on the cards' streams.
//!
//! Before each sum the ranks meet on the host: where one has failed, the others hear of it and ask their cards for nothing. NCCL
//! gives every rank the same bits. From one run to the next they are the same where it chooses the same algorithm, as it does for
//! the same cards, links and number of values; sums within a switch (NVLink SHARP) are as the switch forms them, and
//! `NCCL_ALGO=Ring` in the environment does without.

use super::{Ranks, RanksError};
use crate::device::{DevicePtrMut, Element, Gpu, Loan, Nccl, storage, whole};
use candle_core::op::BackpropOp;
use candle_core::{Error, Result, Storage, Tensor};
use std::sync::Arc;

impl Ranks {
    /// Puts on the card's stream that `values` (f32 or bf16) become their sum over all ranks.
    ///
    /// # Errors
    /// A rank has failed, is elsewhere, or has another number of values; there is no NCCL, or it fails.
    pub fn sum_on_card<T: Element>(&self, gpu: &Gpu, values: &mut impl DevicePtrMut<T>) -> Result<()> {
        if self.world_size() == 1 {
            return Ok(());
        }
        let what = format!("a sum of {} values of {} on cards", values.len(), std::any::type_name::<T>());
        self.exchange(what, ()).map_err(Error::wrap)?;
        if values.is_empty() {
            return Ok(());
        }
        self.card(gpu)?.sum(gpu, values)
    }

    /// Joins the cards of all ranks, which come here together. NCCL takes memory of each card for it: who is to fill the card with
    /// a model does this before. Without it the first sum does.
    ///
    /// # Errors
    /// A rank has failed; there is no NCCL, or it fails.
    pub fn connect(&self, gpu: &Gpu) -> Result<()> {
        if self.world_size() > 1 { self.card(gpu).map(drop) } else { Ok(()) }
    }

    /// Waits until what this rank asked of its card is done on all ranks: a sum that another rank left in the middle is no sum.
    ///
    /// # Errors
    /// A rank has failed, or is elsewhere; the card's.
    pub fn settle(&self, tensor: &Tensor) -> Result<()> {
        if self.world_size() > 1 && !tensor.device().is_cpu() {
            Gpu::of(tensor.device())?.synchronize()?;
            self.barrier().map_err(Error::wrap)?;
        }
        Ok(())
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
        let id = self.is_first().then(Nccl::unique_id).transpose()?;
        let id = self.broadcast(0, id).map_err(Error::wrap)?;
        let joining = Nccl::begin_to_join(gpu, *id, self.world_size(), self.rank())?;
        // Where a rank has failed before it joined, or within, the others' cards would wait for it for ever.
        let nccl = Arc::new(joining.wait(|| others.meeting.party().check().map_err(Error::wrap))?);
        let woken = Arc::downgrade(&nccl);
        others.meeting.party().wake_by(move || woken.upgrade().into_iter().for_each(|nccl| nccl.abort()));
        Ok(others.card.get_or_init(|| nccl).clone())
    }
}
