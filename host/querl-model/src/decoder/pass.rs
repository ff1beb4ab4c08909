//! What a forward pass is told besides its tokens.

use super::Recompute;
use crate::LoraAdapter;

/// How a pass over a batch is to be run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pass<'a> {
    /// Beside the base's weights; `None` is the bare base.
    pub adapter: Option<&'a LoraAdapter>,
    /// On the inputs of the adapter's layers; `None` in rollouts, references and evaluation.
    pub dropout: Option<Dropout>,
    /// What layers keep for the backward pass, and where they put the gradients they find; `None` keeps activations and leaves
    /// gradients to the graph.
    pub recompute: Option<&'a Recompute>,
}

impl<'a> Pass<'a> {
    /// A pass with an adapter and nothing else.
    pub fn with(adapter: Option<&'a LoraAdapter>) -> Self {
        Self { adapter, ..Self::default() }
    }
}

/// Which share of an adapter's inputs is set to zero; the others are scaled by `1 / (1 - p)`. The mask of a row depends on the
/// seed, the layer and the row's tokens up to itself alone: a pass that is computed again sees the same one, and so does a row
/// that stands in another pass or is shared by several sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Share that is zeroed, 0 to below 1.
    pub p: f64,
    /// Another one for each pass.
    pub seed: u64,
}
