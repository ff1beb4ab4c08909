//! Packed batches: sequences concatenated without padding, optionally as a prefix tree.

use crate::kernels::{Node, RowTree};
use crate::random::{STEP, mix};
use std::sync::Arc;

/// Token ids of several sequences without padding, with each token's position in its own sequence.
#[derive(Debug, Clone)]
pub struct PackedBatch {
    pub(crate) token_ids: Vec<u32>,
    /// Position of each row in its own sequence, from 0.
    pub positions: Arc<Vec<u32>>,
    /// Prefix tree of the rows, which determines which rows attend to which.
    pub tree: Arc<RowTree>,
    /// For each sequence, the trie node of its last token.
    last_nodes: Vec<Option<usize>>,
}

impl PackedBatch {
    /// Packs sequences in order, without sharing prefixes; empty sequences take no rows.
    pub fn new<'a>(sequences: impl IntoIterator<Item = &'a [u32]>) -> Self {
        let (mut token_ids, mut positions) = (Vec::new(), Vec::new());
        let (mut nodes, mut last_nodes) = (Vec::new(), Vec::new());
        for sequence in sequences {
            let (start, len) = (token_ids.len(), sequence.len());
            last_nodes.push((len > 0).then_some(nodes.len()));
            if len > 0 {
                nodes.push(Node { start, len, end: start + len, depth: 0, parent: None });
            }
            token_ids.extend_from_slice(sequence);
            positions.extend(0..len as u32);
        }
        Self { token_ids, positions: Arc::new(positions), tree: Arc::new(RowTree::new(nodes)), last_nodes }
    }

    /// Packs sequences as a prefix tree: shared prefixes are in the batch once, such as the system prompt, the prompt of several
    /// responses, or a duplicate sequence. Each row's result is the same as with [`PackedBatch::new`].
    pub fn shared<'a>(sequences: impl IntoIterator<Item = &'a [u32]>) -> Self {
        let mut trie = Trie::default();
        let last: Vec<Option<usize>> = sequences.into_iter().map(|sequence| trie.insert(sequence)).collect();
        trie.pack(&last)
    }

    /// Hash of each row's prefix: the tokens of its sequence up to and including its own.
    pub(crate) fn row_keys(&self) -> Vec<u64> {
        let mut keys: Vec<u64> = Vec::with_capacity(self.n_rows());
        for node in self.tree.nodes() {
            let parent = node.parent.map(|parent| self.tree.nodes()[parent]);
            let mut key = parent.map_or(0, |parent| keys[parent.start + parent.len - 1]);
            for &id in &self.token_ids[node.start..node.start + node.len] {
                key = row_key(key, id);
                keys.push(key);
            }
        }
        keys
    }

    /// Number of rows (tokens) of the batch.
    pub fn n_rows(&self) -> usize {
        self.token_ids.len()
    }

    /// Number of (query, key) pairs of attention: for each row the rows that it attends to, itself included.
    pub fn n_pairs(&self) -> u64 {
        self.positions.iter().map(|position| u64::from(*position) + 1).sum()
    }

    /// Row index of the token at `position` (from 0) of a sequence.
    ///
    /// # Panics
    /// There is no such sequence, or it has no such token.
    pub fn row_of(&self, sequence: usize, position: usize) -> usize {
        let nodes = self.tree.nodes();
        let mut next = self.last_nodes[sequence];
        while let Some(node) = next.map(|index| nodes[index]) {
            if node.depth <= position {
                assert!(position < node.depth + node.len, "sequence {sequence} has no token {position}");
                return node.start + position - node.depth;
            }
            next = node.parent;
        }
        panic!("sequence {sequence} is empty: it has no token {position}");
    }
}

/// Hash of a row's prefix, from its parent row's hash (0 for the first row of a sequence) and its token id.
pub(crate) fn row_key(parent: u64, token_id: u32) -> u64 {
    mix(parent.wrapping_add(STEP) ^ (u64::from(token_id) + 1).wrapping_mul(STEP))
}

/// A trie of sequences; a node is a run of tokens.
#[derive(Default)]
struct Trie<'a> {
    nodes: Vec<TrieNode<'a>>,
    roots: Vec<usize>,
}

struct TrieNode<'a> {
    tokens: &'a [u32],
    parent: Option<usize>,
    children: Vec<usize>,
}

impl<'a> Trie<'a> {
    /// Inserts a sequence. Returns the node that ends with its last token; later insertions keep the index of that node.
    fn insert(&mut self, mut rest: &'a [u32]) -> Option<usize> {
        let mut parent = None;
        while let Some(&first) = rest.first() {
            let siblings = parent.map_or(&self.roots, |parent: usize| &self.nodes[parent].children);
            let Some(&child) = siblings.iter().find(|&&child| self.nodes[child].tokens[0] == first) else {
                return Some(self.add(TrieNode { tokens: rest, parent, children: Vec::new() }));
            };
            let n_common = self.nodes[child].tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
            parent = Some(if n_common < self.nodes[child].tokens.len() { self.split(child, n_common) } else { child });
            rest = &rest[n_common..];
        }
        parent
    }

    fn add(&mut self, node: TrieNode<'a>) -> usize {
        let index = self.nodes.len();
        match node.parent {
            Some(parent) => self.nodes[parent].children.push(index),
            None => self.roots.push(index),
        }
        self.nodes.push(node);
        index
    }

    /// Splits a node after `n_tokens` tokens: a new parent node gets the first tokens, and `lower` keeps the rest.
    fn split(&mut self, lower: usize, n_tokens: usize) -> usize {
        let upper = self.nodes.len();
        let node = &mut self.nodes[lower];
        let (head, tail) = node.tokens.split_at(n_tokens);
        let parent = node.parent.replace(upper);
        node.tokens = tail;
        let siblings = parent.map_or(&mut self.roots, |parent| &mut self.nodes[parent].children);
        siblings.iter_mut().filter(|index| **index == lower).for_each(|index| *index = upper);
        self.nodes.push(TrieNode { tokens: head, parent, children: vec![lower] });
        upper
    }

    /// Lists rows depth-first; branches are in the order of insertion.
    fn pack(&self, last: &[Option<usize>]) -> PackedBatch {
        let (mut token_ids, mut positions, mut nodes) = (Vec::new(), Vec::new(), Vec::<Node>::new());
        let mut packed_as = vec![0; self.nodes.len()];
        let mut stack: Vec<usize> = self.roots.iter().rev().copied().collect();
        while let Some(index) = stack.pop() {
            let TrieNode { tokens, parent, children } = &self.nodes[index];
            let parent = parent.map(|parent| packed_as[parent]);
            let depth = parent.map_or(0, |parent: usize| nodes[parent].depth + nodes[parent].len);
            packed_as[index] = nodes.len();
            let start = token_ids.len();
            nodes.push(Node { start, len: tokens.len(), end: start + tokens.len(), depth, parent });
            token_ids.extend_from_slice(tokens);
            positions.extend((depth..depth + tokens.len()).map(|position| position as u32));
            stack.extend(children.iter().rev());
        }
        for index in (0..nodes.len()).rev() {
            if let Some(parent) = nodes[index].parent {
                nodes[parent].end = nodes[parent].end.max(nodes[index].end);
            }
        }
        let last_nodes: Vec<Option<usize>> = last.iter().map(|last| last.map(|index| packed_as[index])).collect();
        PackedBatch { token_ids, positions: Arc::new(positions), tree: Arc::new(RowTree::new(nodes)), last_nodes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(batch: &PackedBatch, sequence: usize, len: usize) -> Vec<usize> {
        (0..len).map(|position| batch.row_of(sequence, position)).collect()
    }

    #[test]
    fn shared_prefixes_are_stored_once_at_every_depth() {
        let sequences: [&[u32]; 6] = [&[1, 2, 3, 4], &[1, 2, 5], &[1, 2, 3, 6, 7], &[8], &[1, 2, 3], &[1, 2, 5]];
        let batch = PackedBatch::shared(sequences);
        assert_eq!(batch.token_ids, [1, 2, 3, 4, 6, 7, 5, 8]);
        assert_eq!(*batch.positions, [0, 1, 2, 3, 3, 4, 2, 0]);
        let ends: Vec<usize> = batch.tree.nodes().iter().map(|node| node.end).collect();
        assert_eq!(ends, [7, 6, 4, 6, 7, 8]);
        for (index, sequence) in sequences.iter().enumerate() {
            let tokens: Vec<u32> =
                rows(&batch, index, sequence.len()).iter().map(|&row| batch.token_ids[row]).collect();
            assert_eq!(tokens, *sequence);
        }
        assert_eq!(rows(&batch, 1, 3), rows(&batch, 5, 3));
    }

    #[test]
    fn new_shares_nothing() {
        let batch = PackedBatch::new([[1, 2].as_slice(), &[], &[1, 2]]);
        assert_eq!(batch.n_rows(), 4);
        assert_eq!(rows(&batch, 2, 2), [2, 3]);
        assert_eq!(PackedBatch::shared([[1, 2].as_slice(), &[], &[1, 2]]).n_rows(), 2);
    }

    #[test]
    #[should_panic(expected = "sequence 0 has no token 2")]
    fn a_token_that_is_not_there_has_no_row() {
        PackedBatch::shared([[1, 2].as_slice(), &[1, 2, 3]]).row_of(0, 2);
    }
}
