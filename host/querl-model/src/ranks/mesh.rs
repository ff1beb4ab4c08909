//! Data-parallel and tensor-parallel process groups of a job.

use super::{Ranks, RanksError};

/// The process groups of a rank. Neighbours are tensor parallel: of four ranks with `tensor_parallel` 2, ranks 0 and 1 hold one copy
/// of the model, 2 and 3 another, and 0 and 2 the same shard.
#[derive(Clone, Default)]
pub struct Mesh {
    /// All ranks of the job.
    pub all: Ranks,
    /// Ranks with the same shard: each has other rows, and gradients are all-reduced over them.
    pub data: Ranks,
    /// Ranks that hold one copy of the model together, and have the same rows.
    pub tensor: Ranks,
}

impl Mesh {
    /// A job of one rank.
    pub fn alone() -> Self {
        Self::default()
    }

    /// Data parallel: every rank has a copy of the model.
    pub fn of_data(all: Ranks) -> Self {
        Self { data: all.clone(), all, tensor: Ranks::alone() }
    }

    /// Whether each rank holds a shard of the model.
    pub fn is_split(&self) -> bool {
        self.tensor.world_size() > 1
    }

    /// Process groups of the same ranks for another thread of each.
    ///
    /// # Errors
    /// A rank has failed.
    pub fn again(&self) -> Result<Self, RanksError> {
        Ok(Self { all: self.all.split(0)?, data: self.data.split(0)?, tensor: self.tensor.split(0)? })
    }

    /// Shards each copy of the model over `tensor_parallel` ranks; a collective operation.
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
