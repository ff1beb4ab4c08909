//! Ranks: threads of this process that do one job together, each with a GPU of its own, or all on the CPU.
//!
//! Every rank runs the same code and makes the same collective calls in the same order; a call returns when all ranks have made it.
//! All-reduce adds in the order of the ranks, so that every rank gets the same bits. When a rank fails, the pending calls of the
//! others return an error that names it. Collective calls must not be made from rayon's workers: a thread that waits would hold up
//! the work of the other ranks.

mod process_group;
#[cfg(test)]
mod tests;

pub use process_group::{Communicator, RankFailure, run_ranks};

use crate::accelerator::{DeviceState, accelerator_of};
use candle_core::{Error, Result as TensorResult, Tensor};
use process_group::ProcessGroup;
use rayon::prelude::*;
use std::sync::{Arc, OnceLock};

/// Why ranks cannot continue together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum RanksError {
    /// A rank failed, so that the others cannot continue.
    #[error("rank {rank} failed: {message}")]
    Failed { rank: usize, message: String },
    /// Two ranks made different collective calls.
    #[error("rank {rank} is at `{operation}` and rank {other_rank} at `{other}`; internal error, please report it")]
    Differ { rank: usize, operation: String, other_rank: usize, other: String },
}

/// One rank of a process group. Clones are the same rank.
#[derive(Clone, Default)]
pub struct Ranks {
    /// `None` if there is only one rank.
    member: Option<Member>,
}

#[derive(Clone)]
struct Member {
    group: Arc<ProcessGroup>,
    index: usize,
    /// This rank's communicator between devices, once it is connected.
    communicator: Arc<OnceLock<DeviceState>>,
}

impl Ranks {
    /// A process group of one rank.
    pub fn alone() -> Self {
        Self::default()
    }

    fn of(group: &Arc<ProcessGroup>, index: usize) -> Self {
        let member = Member { group: group.clone(), index, communicator: Arc::default() };
        Self { member: (group.members.len() > 1).then_some(member) }
    }

    /// Index of this rank in its process group, from 0.
    pub fn rank(&self) -> usize {
        self.member.as_ref().map_or(0, |member| member.index)
    }

    /// Number of ranks in the process group.
    pub fn world_size(&self) -> usize {
        self.member.as_ref().map_or(1, |member| member.group.members.len())
    }

    /// Whether this is rank 0, which alone writes files and reports.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// A rank has failed, or made another collective call.
    pub fn barrier(&self) -> Result<(), RanksError> {
        self.exchange("a barrier".into(), ()).map(drop)
    }

    /// A barrier before a collective operation of an accelerator; `operation`: its name, which must be the same on all ranks.
    ///
    /// # Errors
    /// As [`Ranks::barrier`].
    pub fn barrier_before(&self, operation: String) -> Result<(), RanksError> {
        self.exchange(operation, ()).map(drop)
    }

    /// All-gather: the values of all ranks in rank order. They have one type, but may differ in size.
    ///
    /// # Errors
    /// A rank has failed, or made another collective call.
    pub fn all_gather<T: Send + Sync + 'static>(&self, value: T) -> Result<Vec<Arc<T>>, RanksError> {
        self.exchange(format!("all-gather of {}", std::any::type_name::<T>()), value)
    }

    /// Whether any rank passed `true`; a collective operation.
    ///
    /// # Errors
    /// A rank has failed, or made another collective call.
    pub fn any(&self, value: bool) -> Result<bool, RanksError> {
        Ok(self.exchange("any".into(), value)?.into_iter().any(|value| *value))
    }

    /// Broadcast: the value that rank `root` passed; the other ranks pass `None`.
    ///
    /// # Errors
    /// A rank has failed, or made another collective call; or `root` passed `None`.
    pub fn broadcast<T: Send + Sync + 'static>(&self, root: usize, value: Option<T>) -> Result<Arc<T>, RanksError> {
        let operation = format!("broadcast of {} from rank {root}", std::any::type_name::<T>());
        let all = self.exchange(operation, value.map(Arc::new))?;
        let nothing = || RanksError::Failed { rank: root, message: "it broadcast nothing".into() };
        all.get(root).and_then(|item| item.as_ref().clone()).ok_or_else(nothing)
    }

    /// All-reduce: replaces `values` by their sum over all ranks.
    ///
    /// # Errors
    /// A rank has failed, made another collective call, or has another number of values.
    pub fn sum(&self, values: &mut [f32]) -> Result<(), RanksError> {
        if self.world_size() == 1 {
            return Ok(());
        }
        let all = self.exchange(format!("all-reduce of {} values", values.len()), values.to_vec())?;
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

    /// All-reduce of an f32 tensor, which has the same shape on all ranks. No gradient flows through the sum.
    ///
    /// # Errors
    /// As [`Ranks::sum`]; or the tensor is not f32.
    pub fn sum_tensor(&self, tensor: &Tensor) -> TensorResult<Tensor> {
        if self.world_size() == 1 {
            return Ok(tensor.detach());
        }
        if let Some(accelerator) = accelerator_of(tensor)? {
            return accelerator.all_reduce(self, tensor);
        }
        let mut values = tensor.flatten_all()?.to_vec1::<f32>()?;
        self.sum(&mut values).map_err(Error::wrap)?;
        Tensor::from_vec(values, tensor.shape(), tensor.device())
    }

    /// Waits until the work submitted to the tensor's device is done on all ranks, so that results of all-reduces are complete; a
    /// collective operation.
    ///
    /// # Errors
    /// A rank has failed, or made another collective call; or submitted work failed.
    pub fn settle(&self, tensor: &Tensor) -> TensorResult<()> {
        match accelerator_of(tensor)? {
            Some(accelerator) if self.world_size() > 1 => accelerator.settle(self),
            _ => Ok(()),
        }
    }

    /// Splits the process group: returns the group of the ranks that passed the same `group`, in rank order. A failure in it still reaches
    /// all ranks of the job.
    ///
    /// # Errors
    /// A rank has failed, or made another collective call.
    pub fn split(&self, group: usize) -> Result<Self, RanksError> {
        let Some(Member { group: all, index, .. }) = &self.member else { return Ok(Self::alone()) };
        let chosen = self.exchange("split".into(), group)?;
        let indices: Vec<usize> = (0..chosen.len()).filter(|&index| *chosen[index] == group).collect();
        let members = indices.iter().map(|&index| all.members[index]).collect();
        let creates = indices[0] == *index;
        let created = self
            .exchange("process groups of a split".into(), creates.then(|| ProcessGroup::new(all.world(), members)))?;
        let group = created[indices[0]].as_ref().as_ref().expect("the first rank of a group creates it");
        let rank = indices.iter().position(|other| other == index).expect("a rank is in its own group");
        Ok(Self::of(group, rank))
    }

    /// The slot in which an accelerator stores this rank's communicator; `None` for a process group of one rank.
    pub fn communicator(&self) -> Option<&OnceLock<DeviceState>> {
        self.member.as_ref().map(|member| &*member.communicator)
    }

    /// Registers a communicator, which is aborted when a rank fails and closed when all ranks have finished.
    pub fn register(&self, communicator: Arc<dyn Communicator>) {
        if let Some(member) = &self.member {
            member.group.world().register(communicator);
        }
    }

    /// Returns an error if a rank has failed.
    ///
    /// # Errors
    /// A rank has failed.
    #[allow(missing_docs)]
    pub fn check(&self) -> Result<(), RanksError> {
        self.member.as_ref().map_or(Ok(()), |member| member.group.world().check())
    }

    /// Reports to all ranks at once that this one has failed. Returns the error to return here: the first failure, which may have
    /// caused this one.
    pub fn fail(&self, error: Error) -> Error {
        let Some(Member { group, index, .. }) = &self.member else { return error };
        let (world, rank) = (group.world(), group.members[*index]);
        let is_first = world.fail(RanksError::Failed { rank, message: error.to_string() });
        if is_first { error } else { world.check().map_or_else(Error::wrap, |()| error) }
    }

    fn exchange<T: Send + Sync + 'static>(&self, operation: String, value: T) -> Result<Vec<Arc<T>>, RanksError> {
        match &self.member {
            None => Ok(vec![Arc::new(value)]),
            Some(member) => member.group.exchange(member.index, operation, Arc::new(value)),
        }
    }
}

/// Number of values per task of an addition.
const CHUNK: usize = 1 << 15;

/// The process groups of a rank. Neighbours are tensor parallel: of four ranks with `tensor_parallel` 2, ranks 0 and 1 hold one copy
/// of the model, 2 and 3 another, and 0 and 2 the same shard.
#[derive(Clone, Default)]
pub struct Mesh {
    /// All ranks of the job.
    pub all: Ranks,
    /// Data-parallel ranks: they have the same shard but different rows, and all-reduce their gradients.
    pub data: Ranks,
    /// Tensor-parallel ranks: together they hold one copy of the model, and they have the same rows.
    pub tensor: Ranks,
}

impl Mesh {
    /// The process groups of a job with one rank.
    pub fn alone() -> Self {
        Self::default()
    }

    /// Data parallel: each of the ranks has a full copy of the model.
    pub fn of_data(all: Ranks) -> Self {
        Self { data: all.clone(), all, tensor: Ranks::alone() }
    }

    /// Whether each rank holds a shard of the model.
    pub fn is_split(&self) -> bool {
        self.tensor.world_size() > 1
    }

    /// Process groups of the same ranks for a second thread of each rank; a collective operation.
    ///
    /// # Errors
    /// A rank has failed.
    pub fn again(&self) -> Result<Self, RanksError> {
        Ok(Self { all: self.all.split(0)?, data: self.data.split(0)?, tensor: self.tensor.split(0)? })
    }

    /// Process groups in which each copy of the model is sharded over `tensor_parallel` ranks; a collective operation.
    ///
    /// # Errors
    /// A rank has failed; or `tensor_parallel` does not divide the number of ranks.
    pub fn new(all: Ranks, tensor_parallel: usize) -> Result<Self, RanksError> {
        let (rank, world_size) = (all.rank(), all.world_size());
        if tensor_parallel == 1 {
            return Ok(Self::of_data(all));
        }
        if tensor_parallel == 0 || !world_size.is_multiple_of(tensor_parallel) {
            let message = format!("{world_size} ranks cannot be divided into copies of {tensor_parallel} ranks each");
            return Err(RanksError::Failed { rank, message });
        }
        let (data, tensor) = (all.split(rank % tensor_parallel)?, all.split(rank / tensor_parallel)?);
        Ok(Self { all, data, tensor })
    }
}
