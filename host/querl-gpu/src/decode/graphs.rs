//! Steps that were recorded.

use crate::device::Graph;
use std::collections::HashMap;

/// What the launches of a step of one token for each sequence depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    pub(super) n: usize,
    /// Parts of the longest one's keys.
    pub(super) n_splits: usize,
}

/// What is known of a kind of step.
pub(super) enum Known {
    /// It was launched one by one: everything that it needs is loaded.
    Once,
    /// It is launched in one call.
    Recorded(Graph),
    /// It is always launched one by one.
    Refused,
}

pub(super) struct Graphs {
    kinds: HashMap<Kind, Known>,
    is_possible: bool,
}

impl Graphs {
    /// `is_possible`: whether steps allocate nothing.
    pub(super) fn new(is_possible: bool) -> Self {
        Self { kinds: HashMap::new(), is_possible }
    }

    pub(super) fn known(&mut self, kind: Kind) -> Option<&mut Known> {
        self.kinds.get_mut(&kind)
    }

    pub(super) fn set(&mut self, kind: Kind, known: Known) {
        self.kinds.insert(kind, known);
    }

    /// What becomes of a kind that was launched for the first time.
    pub(super) fn met(&mut self, kind: Kind) {
        self.set(kind, if self.is_possible { Known::Once } else { Known::Refused });
    }

    /// Kinds that are launched in one call.
    #[cfg(test)]
    pub(super) fn n_recorded(&self) -> usize {
        self.kinds.values().filter(|known| matches!(known, Known::Recorded(_))).count()
    }
}
