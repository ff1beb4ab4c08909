//! Ranks: threads of this process that do one job together, each on a card of its own, or all on the processor.
//!
//! Every rank runs the same code and comes to the same calls in the same order; a call returns when all ranks have come to it.
//! Sums are formed in the order of the ranks, so that every rank gets the same bits, whichever came first. A rank that fails
//! wakes the others: their calls return an error that names it. Nothing here may be called from within rayon's workers, where a
//! thread that waits keeps the others' work from being done.

#[cfg(feature = "cuda")]
mod card;
#[cfg(all(test, feature = "cuda"))]
mod card_tests;
mod links;
mod meeting;
mod mesh;
mod run;
#[cfg(test)]
mod tests;

pub use mesh::Mesh;
pub use run::{RankFailure, run_ranks};

use candle_core::{Error, Result as TensorResult, Tensor};
use meeting::Meeting;
use rayon::prelude::*;
use std::sync::Arc;

/// Why ranks do not go on together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RanksError {
    /// One of them failed, and the others have nothing to wait for.
    #[error("rank {rank} failed: {message}")]
    Failed {
        /// Which, from 0.
        rank: usize,
        /// What it said.
        message: String,
    },
    /// Two ranks are not at the same place.
    #[error(
        "rank {rank} is at `{what}` and rank {other_rank} at `{other}`; this is a fault of querl, please report it"
    )]
    Differ {
        /// A rank.
        rank: usize,
        /// Where it is.
        what: String,
        /// Another.
        other_rank: usize,
        /// Where that is.
        other: String,
    },
}

/// One rank's place among those that do a job together. A clone is the same rank's.
#[derive(Clone, Default)]
pub struct Ranks {
    /// `None` of a rank that is alone.
    with_others: Option<WithOthers>,
}

#[derive(Clone)]
struct WithOthers {
    meeting: Arc<Meeting>,
    index: usize,
    /// This rank's card among the others', once they have summed on them.
    #[cfg(feature = "cuda")]
    card: Arc<std::sync::OnceLock<Arc<crate::device::Nccl>>>,
}

impl Ranks {
    /// The only rank of a job.
    pub fn alone() -> Self {
        Self::default()
    }

    fn of(meeting: &Arc<Meeting>, index: usize) -> Self {
        let with_others = WithOthers {
            meeting: meeting.clone(),
            index,
            #[cfg(feature = "cuda")]
            card: Arc::default(),
        };
        Self { with_others: (meeting.members.len() > 1).then_some(with_others) }
    }

    /// Which rank this is, from 0.
    pub fn rank(&self) -> usize {
        self.with_others.as_ref().map_or(0, |others| others.index)
    }

    /// How many there are.
    pub fn world_size(&self) -> usize {
        self.with_others.as_ref().map_or(1, |others| others.meeting.members.len())
    }

    /// Whether this rank is the one that writes files and talks to people.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Returns when all ranks have come here.
    ///
    /// # Errors
    /// A rank has failed, or is elsewhere.
    pub fn barrier(&self) -> Result<(), RanksError> {
        self.exchange("a barrier".into(), ()).map(drop)
    }

    /// What every rank brings, in the order of the ranks. They must bring values of one type, whose size may differ.
    ///
    /// # Errors
    /// A rank has failed, or is elsewhere.
    pub fn all_gather<T: Send + Sync + 'static>(&self, mine: T) -> Result<Vec<Arc<T>>, RanksError> {
        self.exchange(format!("a gathering of {}", std::any::type_name::<T>()), mine)
    }

    /// Whether any rank says so.
    ///
    /// # Errors
    /// A rank has failed, or is elsewhere.
    pub fn any(&self, mine: bool) -> Result<bool, RanksError> {
        Ok(self.exchange("a question".into(), mine)?.into_iter().any(|says| *says))
    }

    /// What rank `root` brings; the others bring `None`.
    ///
    /// # Errors
    /// A rank has failed, or is elsewhere; or `root` brought nothing.
    pub fn broadcast<T: Send + Sync + 'static>(&self, root: usize, mine: Option<T>) -> Result<Arc<T>, RanksError> {
        let what = format!("a broadcast of {} from rank {root}", std::any::type_name::<T>());
        let all = self.exchange(what, mine.map(Arc::new))?;
        let nothing = || RanksError::Failed { rank: root, message: "it broadcast nothing".into() };
        all.get(root).and_then(|item| item.as_ref().clone()).ok_or_else(nothing)
    }

    /// Replaces `values` by their sum over all ranks.
    ///
    /// # Errors
    /// A rank has failed, is elsewhere, or has another number of values.
    pub fn sum(&self, values: &mut [f32]) -> Result<(), RanksError> {
        if self.world_size() == 1 {
            return Ok(());
        }
        let all = self.exchange(format!("a sum of {} values", values.len()), values.to_vec())?;
        let chunks = values.par_chunks_mut(CHUNK).enumerate();
        chunks.for_each(|(chunk, sum)| {
            let start = chunk * CHUNK;
            sum.copy_from_slice(&all[0][start..start + sum.len()]);
            for part in &all[1..] {
                sum.iter_mut().zip(&part[start..]).for_each(|(sum, value)| *sum += value);
            }
        });
        Ok(())
    }

    /// The sum over all ranks of a tensor of the same shape on each, which is f32. The sum is no part of a graph.
    ///
    /// # Errors
    /// As [`Ranks::sum`]; or another type.
    pub fn sum_tensor(&self, tensor: &Tensor) -> TensorResult<Tensor> {
        if self.world_size() == 1 {
            return Ok(tensor.detach());
        }
        #[cfg(feature = "cuda")]
        if !tensor.device().is_cpu() {
            return self.sum_tensor_on_card(tensor);
        }
        let mut values = tensor.flatten_all()?.to_vec1::<f32>()?;
        self.sum(&mut values).map_err(Error::wrap)?;
        Tensor::from_vec(values, tensor.shape(), tensor.device())
    }

    /// The ranks that come here with the same `group`, as ranks of their own in the same order. Where one fails, the ranks of all
    /// groups hear of it.
    ///
    /// # Errors
    /// A rank has failed, or is elsewhere.
    pub fn split(&self, group: usize) -> Result<Self, RanksError> {
        let Some(WithOthers { meeting, index, .. }) = &self.with_others else { return Ok(Self::alone()) };
        let groups = self.exchange("a split into groups".into(), group)?;
        let places: Vec<usize> = (0..groups.len()).filter(|&place| *groups[place] == group).collect();
        let members = places.iter().map(|&place| meeting.members[place]).collect();
        let leads = places[0] == *index;
        let made =
            self.exchange("the meetings of groups".into(), leads.then(|| Meeting::new(meeting.party(), members)))?;
        let of_group = made[places[0]].as_ref().as_ref().expect("the first of a group makes its meeting");
        let place = places.iter().position(|place| place == index).expect("a rank is in its own group");
        Ok(Self::of(of_group, place))
    }

    fn exchange<T: Send + Sync + 'static>(&self, what: String, mine: T) -> Result<Vec<Arc<T>>, RanksError> {
        match &self.with_others {
            None => Ok(vec![Arc::new(mine)]),
            Some(others) => others.meeting.exchange(others.index, what, Arc::new(mine)),
        }
    }
}

/// Values that one thread adds at a time.
const CHUNK: usize = 1 << 15;
