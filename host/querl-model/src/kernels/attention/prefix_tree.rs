//! The prefix tree of a packed batch, and how attention over it is divided into tasks.

use std::ops::Range;

/// A node of the prefix tree: consecutive tokens (rows) shared by exactly the same sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node {
    /// Index of the node's first row.
    pub start: usize,
    /// Number of rows, at least one.
    pub len: usize,
    /// The first row after this node and its descendants.
    pub end: usize,
    /// Position of the node's first token in its sequences: the length of the prefix before it.
    pub depth: usize,
    /// Index of the node whose tokens directly precede this node's; `None` at the start of a sequence.
    pub parent: Option<usize>,
}

/// Sequences as a tree: rows are in depth-first order, so that the descendants of a node follow it directly.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowTree {
    nodes: Vec<Node>, // by `start`
}

impl RowTree {
    /// The tree of sequences with these lengths that share no prefix.
    pub fn separate(lengths: &[usize]) -> Self {
        let mut start = 0;
        let node = |&len: &usize| {
            start += len;
            Node { start: start - len, len, end: start, depth: 0, parent: None }
        };
        Self::new(lengths.iter().map(node).collect())
    }

    /// A tree of `nodes`, given in the order of their rows, which they cover without gaps.
    pub fn new(nodes: Vec<Node>) -> Self {
        debug_assert!(nodes.windows(2).all(|pair| pair[0].start + pair[0].len == pair[1].start));
        Self { nodes }
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.nodes.last().map_or(0, |node| node.start + node.len)
    }

    /// The nodes, in the order of their rows.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    fn node_of(&self, row: usize) -> usize {
        self.nodes.partition_point(|node| node.start + node.len <= row)
    }

    /// Number of rows that a row attends to, without itself.
    fn depth_of(&self, row: usize) -> usize {
        let node = self.nodes[self.node_of(row)];
        node.depth + row - node.start
    }
}

/// A chunk of consecutive queries, and every key that one of them attends to. Chunks are independent and can be computed in any order.
///
/// The chunk's keys are indexed as follows: first the `n_before` rows before the first query that it attends to, by depth; then the rows
/// from the first query to the last one.
pub(super) struct QueryChunk {
    /// Range of the chunk's queries in the list of all queries.
    pub(super) queries: Range<usize>,
    /// Number of keys that each query of the chunk attends to, itself included.
    pub(super) n_seen: Vec<usize>,
    /// Row ranges of the keys before the first query.
    pub(super) before: Vec<Range<usize>>,
    pub(super) n_before: usize,
    /// Row range of the other keys.
    pub(super) rows: Range<usize>,
    pub(super) spans: Vec<Span>,
}

/// Keys that are consecutive in the sequences of all queries that attend to them.
pub(super) struct Span {
    pub(super) keys: Range<usize>,
    pub(super) depth: usize,
    /// The chunk's queries that attend to these keys: to all of them, or (causal) up to themselves.
    pub(super) queries: Range<usize>,
}

/// Queries per chunk: enough for a task, few enough that there are tasks for many threads. Depends only on the number of queries, so that
/// sums do not depend on the machine.
fn chunk_size(n_queries: usize) -> usize {
    (n_queries / 16).clamp(32, 256)
}

/// Divides queries, given by their rows in ascending order, into chunks.
pub(super) fn query_chunks(tree: &RowTree, queries: &[u32]) -> Vec<QueryChunk> {
    let size = chunk_size(queries.len());
    (0..queries.len())
        .step_by(size)
        .map(|start| QueryChunk::new(tree, queries, start..(start + size).min(queries.len())))
        .collect()
}

impl QueryChunk {
    fn new(tree: &RowTree, all_queries: &[u32], range: Range<usize>) -> Self {
        let queries = &all_queries[range.clone()];
        let rows = queries[0] as usize..queries[queries.len() - 1] as usize + 1;
        let n_before = tree.depth_of(rows.start);
        let mut chunk = Self {
            n_seen: queries.iter().map(|&row| tree.depth_of(row as usize) + 1).collect(),
            queries: range,
            before: Vec::new(),
            n_before,
            rows: rows.clone(),
            spans: Vec::new(),
        };
        chunk.look_back(tree, queries);
        for node in &tree.nodes[tree.node_of(rows.start)..] {
            if node.start >= rows.end {
                break;
            }
            let (first, last) = (node.start.max(rows.start), (node.start + node.len).min(rows.end));
            let keys = n_before + first - rows.start..n_before + last - rows.start;
            let seen_by = below(queries, first)..below(queries, node.end);
            chunk.push(Span { keys, depth: node.depth + first - node.start, queries: seen_by });
        }
        chunk
    }

    /// Adds the spans of the keys before the first query.
    fn look_back(&mut self, tree: &RowTree, queries: &[u32]) {
        let mut path = Vec::new();
        let mut next = Some(tree.node_of(self.rows.start));
        while let Some(index) = next {
            path.push(tree.nodes[index]);
            next = tree.nodes[index].parent;
        }
        for node in path.into_iter().rev() {
            let last = (node.start + node.len).min(self.rows.start);
            if last == node.start {
                continue; // the first query is the first row of this node
            }
            self.before.push(node.start..last);
            let keys = node.depth..node.depth + last - node.start;
            self.push(Span { keys, depth: node.depth, queries: 0..below(queries, node.end) });
        }
    }

    /// Adds a span, or extends the last span if the same queries attend to the keys right after it.
    fn push(&mut self, span: Span) {
        if span.queries.is_empty() {
            return;
        }
        match self.spans.last_mut() {
            Some(last) if last.queries == span.queries && last.keys.end == span.keys.start => {
                last.keys.end = span.keys.end;
            }
            _ => self.spans.push(span),
        }
    }

    pub(super) fn n_keys(&self) -> usize {
        self.n_before + self.rows.len()
    }
}

/// Number of queries with a smaller row index.
fn below(queries: &[u32], row: usize) -> usize {
    queries.partition_point(|&query| (query as usize) < row)
}
