//! Sequences packed one after another.

use crate::adapter::row_key;
use crate::kernels::Segment;
use std::sync::Arc;

/// Token ids of several sequences without padding, with each token's position in its own sequence.
#[derive(Debug, Clone)]
pub struct PackedBatch {
    pub(crate) token_ids: Vec<u32>,
    pub(crate) positions: Arc<Vec<u32>>,
    pub(crate) segments: Arc<Vec<Segment>>,
}

impl PackedBatch {
    /// Packs sequences in order; empty ones are allowed and take no rows.
    pub fn new<'a>(sequences: impl IntoIterator<Item = &'a [u32]>) -> Self {
        Self::with_offsets(sequences.into_iter().map(|sequence| (sequence, 0)))
    }

    /// Packs sequences so that what they begin with in common stands once.
    pub fn shared<'a>(sequences: impl IntoIterator<Item = &'a [u32]>) -> Self {
        Self::new(sequences)
    }

    /// The row of a sequence's token, `position` counted from the sequence's first.
    ///
    /// # Panics
    /// There is no such sequence, or it has no such token.
    pub fn row_of(&self, sequence: usize, position: usize) -> usize {
        let Segment { start, len } = self.segments[sequence];
        assert!(position < len, "sequence {sequence} has {len} tokens, none at {position}");
        start + position
    }

    /// As [`PackedBatch::new`], each sequence going on at a position of its own: behind what a cache already holds.
    pub(crate) fn with_offsets<'a>(sequences: impl IntoIterator<Item = (&'a [u32], usize)>) -> Self {
        let (mut token_ids, mut positions, mut segments) = (Vec::new(), Vec::new(), Vec::new());
        for (sequence, offset) in sequences {
            segments.push(Segment { start: token_ids.len(), len: sequence.len() });
            token_ids.extend_from_slice(sequence);
            positions.extend((offset..offset + sequence.len()).map(|position| position as u32));
        }
        Self { token_ids, positions: Arc::new(positions), segments: Arc::new(segments) }
    }

    /// For each row a number that depends on its tokens from the sequence's first up to itself, and on nothing else.
    pub(crate) fn row_keys(&self) -> Vec<u64> {
        let keys = |segment: &Segment| {
            let tokens = &self.token_ids[segment.start..segment.start + segment.len];
            tokens.iter().scan(0, |key, &id| {
                *key = row_key(*key, id);
                Some(*key)
            })
        };
        self.segments.iter().flat_map(keys).collect()
    }

    /// Rows of all sequences together.
    pub fn n_rows(&self) -> usize {
        self.token_ids.len()
    }

    /// Where each sequence's rows are.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }
}
