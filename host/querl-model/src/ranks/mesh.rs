//! How the ranks of a job divide its work.

use super::{Ranks, RanksError};

/// The ranks of a job: those that hold parts of one copy of the model, and those that hold the same part and take other rows.
///
/// Neighbours share a copy: of four ranks with two to a copy, 0 and 1 hold the first, 2 and 3 the second, and 0 and 2 the same
/// part.
#[derive(Clone, Default)]
pub struct Mesh {
    /// All of them. The first writes files and talks to people.
    pub all: Ranks,
    /// Those with this rank's part of the model: each takes other rows, and gradients are summed over them.
    pub data: Ranks,
    /// Those that hold this rank's copy of the model together, and take the same rows.
    pub tensor: Ranks,
}

impl Mesh {
    /// A job of one rank.
    pub fn alone() -> Self {
        Self::default()
    }

    /// Every rank with a copy of its own.
    pub fn of_data(all: Ranks) -> Self {
        Self { data: all.clone(), all, tensor: Ranks::alone() }
    }

    /// Whether each rank holds a part of the model.
    pub fn is_split(&self) -> bool {
        self.tensor.world_size() > 1
    }

    /// The same ranks at meetings of their own, for another thread of each.
    ///
    /// # Errors
    /// A rank has failed.
    pub fn again(&self) -> Result<Self, RanksError> {
        Ok(Self { all: self.all.split(0)?, data: self.data.split(0)?, tensor: self.tensor.split(0)? })
    }

    /// Copies of `tensor_parallel` ranks each; every rank calls this.
    ///
    /// # Errors
    /// A rank has failed; or `tensor_parallel` does not divide the number of ranks.
    pub fn new(all: Ranks, tensor_parallel: usize) -> Result<Self, RanksError> {
        let (rank, world_size) = (all.rank(), all.world_size());
        if tensor_parallel == 1 {
            return Ok(Self::of_data(all));
        }
        if tensor_parallel == 0 || !world_size.is_multiple_of(tensor_parallel) {
            let message = format!("{world_size} ranks make no copies of {tensor_parallel} ranks each");
            return Err(RanksError::Failed { rank, message });
        }
        let (data, tensor) = (all.split(rank % tensor_parallel)?, all.split(rank / tensor_parallel)?);
        Ok(Self { all, data, tensor })
    }
}
