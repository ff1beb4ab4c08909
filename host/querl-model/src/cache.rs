//! Keys and values of tokens in blocks of a pool: sequences that begin alike hold the same blocks, and copy one only when they
//! write to it.

use crate::DecoderConfig;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Tokens of a block: as many as an AVX-512 register has lanes, so that one instruction sees one value of all their keys.
pub const BLOCK_TOKENS: usize = 16;

/// Where keys and values stand in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockShape {
    n_layers: usize,
    n_kv_heads: usize,
    pub(crate) head_dim: usize,
}

/// Blocks that are free, and how many are not.
#[derive(Debug)]
pub(crate) struct BlockPool {
    shape: BlockShape,
    free: Mutex<Vec<Vec<f32>>>,
    n_live: AtomicUsize,
    n_peak: AtomicUsize,
}

/// Keys and values of up to [`BLOCK_TOKENS`] tokens in all layers; goes back to its pool when the last sequence lets go of it.
pub(crate) struct Block {
    values: Vec<f32>,
    pool: Arc<BlockPool>,
}

/// One sequence's keys and values. A clone goes on from the same tokens in another way.
#[derive(Clone)]
pub(crate) struct SequenceCache {
    pool: Arc<BlockPool>,
    blocks: Vec<Arc<Block>>,
    len: usize,
}

impl BlockShape {
    pub(crate) fn new(config: &DecoderConfig) -> Self {
        Self { n_layers: config.n_layers, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim }
    }

    #[cfg(test)]
    pub(crate) fn of(n_layers: usize, n_kv_heads: usize, head_dim: usize) -> Self {
        Self { n_layers, n_kv_heads, head_dim }
    }

    /// Values of one head's keys: `(D, BLOCK_TOKENS)`.
    fn key_values(self) -> usize {
        self.head_dim * BLOCK_TOKENS
    }

    /// Width of a row of values: the head's, filled up to whole vectors.
    pub(crate) fn value_width(self) -> usize {
        self.head_dim.next_multiple_of(16)
    }

    /// Values of one head's keys and values.
    fn head_values(self) -> usize {
        self.key_values() + BLOCK_TOKENS * self.value_width()
    }

    fn block_values(self) -> usize {
        self.n_layers * self.n_kv_heads * self.head_values()
    }

    fn head_start(self, layer: usize, kv_head: usize) -> usize {
        (layer * self.n_kv_heads + kv_head) * self.head_values()
    }
}

impl BlockPool {
    pub(crate) fn new(shape: BlockShape) -> Arc<Self> {
        Arc::new(Self { shape, free: Mutex::default(), n_live: AtomicUsize::new(0), n_peak: AtomicUsize::new(0) })
    }

    pub(crate) fn block_bytes(&self) -> usize {
        self.shape.block_values() * size_of::<f32>()
    }

    /// Blocks that sequences hold.
    pub(crate) fn n_live(&self) -> usize {
        self.n_live.load(Ordering::Relaxed)
    }

    /// Most blocks that were held at once: what the pool has taken from memory.
    pub(crate) fn n_peak(&self) -> usize {
        self.n_peak.load(Ordering::Relaxed)
    }

    /// A block of zeros: what stands behind a sequence's last token is multiplied by 0, so it has to be finite.
    fn take(pool: &Arc<Self>) -> Block {
        let n_live = pool.n_live.fetch_add(1, Ordering::Relaxed) + 1;
        pool.n_peak.fetch_max(n_live, Ordering::Relaxed);
        let used = pool.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let values = match used {
            Some(mut values) => {
                values.fill(0.0);
                values
            }
            None => vec![0.0; pool.shape.block_values()],
        };
        Block { values, pool: pool.clone() }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pool.n_live.fetch_sub(1, Ordering::Relaxed);
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(std::mem::take(&mut self.values));
    }
}

impl Clone for Block {
    fn clone(&self) -> Self {
        let mut copy = BlockPool::take(&self.pool);
        copy.values.copy_from_slice(&self.values);
        copy
    }
}

impl Block {
    /// Keys of one head in one layer: `(D, BLOCK_TOKENS)`.
    pub(crate) fn keys(&self, layer: usize, kv_head: usize) -> &[f32] {
        let shape = self.pool.shape;
        let start = shape.head_start(layer, kv_head);
        &self.values[start..start + shape.key_values()]
    }

    /// Values of one head in one layer: `(BLOCK_TOKENS, value_width)`.
    pub(crate) fn values(&self, layer: usize, kv_head: usize) -> &[f32] {
        let shape = self.pool.shape;
        let start = shape.head_start(layer, kv_head);
        &self.values[start + shape.key_values()..start + shape.head_values()]
    }
}

impl SequenceCache {
    pub(crate) fn new(pool: &Arc<BlockPool>) -> Self {
        Self { pool: pool.clone(), blocks: Vec::new(), len: 0 }
    }

    /// Tokens held.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Its blocks, oldest first.
    pub(crate) fn blocks(&self) -> &[Arc<Block>] {
        &self.blocks
    }

    pub(crate) fn shape(&self) -> BlockShape {
        self.pool.shape
    }

    /// The same sequence as it was when it held `len` tokens.
    pub(crate) fn prefix(&self, len: usize) -> Self {
        let len = len.min(self.len);
        Self { pool: self.pool.clone(), blocks: self.blocks[..len.div_ceil(BLOCK_TOKENS)].to_vec(), len }
    }

    /// Makes room for `n` more tokens, in blocks that no other sequence holds. Their keys and values are still to be written.
    pub(crate) fn extend(&mut self, n: usize) {
        if n == 0 {
            return;
        }
        if !self.len.is_multiple_of(BLOCK_TOKENS) {
            // What others share is copied here, so that `write` finds it unshared.
            self.blocks.last_mut().map(Arc::make_mut);
        }
        self.len += n;
        while self.blocks.len() * BLOCK_TOKENS < self.len {
            self.blocks.push(Arc::new(BlockPool::take(&self.pool)));
        }
    }

    /// Writes the keys and values `(kv_heads * D)` of one token in one layer. Its place was made by `extend` since the last
    /// clone; a block that is shared all the same is copied first.
    pub(crate) fn write(&mut self, layer: usize, position: usize, keys: &[f32], values: &[f32]) {
        let (shape, slot) = (self.pool.shape, position % BLOCK_TOKENS);
        let block = Arc::make_mut(&mut self.blocks[position / BLOCK_TOKENS]);
        let heads = keys.chunks_exact(shape.head_dim).zip(values.chunks_exact(shape.head_dim));
        for (kv_head, (keys, values)) in heads.enumerate() {
            let start = shape.head_start(layer, kv_head);
            let head = &mut block.values[start..start + shape.head_values()];
            let (key_part, value_part) = head.split_at_mut(shape.key_values());
            key_part.iter_mut().skip(slot).step_by(BLOCK_TOKENS).zip(keys).for_each(|(to, key)| *to = *key);
            value_part[slot * shape.value_width()..][..shape.head_dim].copy_from_slice(values);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: BlockShape = BlockShape { n_layers: 2, n_kv_heads: 2, head_dim: 3 };

    fn token(value: f32) -> Vec<f32> {
        (0..6).map(|i| value + i as f32).collect()
    }

    fn written(pool: &Arc<BlockPool>, n: usize) -> SequenceCache {
        let mut cache = SequenceCache::new(pool);
        cache.extend(n);
        (0..n)
            .for_each(|position| cache.write(1, position, &token(position as f32 * 10.0), &token(-(position as f32))));
        cache
    }

    #[test]
    fn keys_stand_by_value_and_values_by_token() {
        let cache = written(&BlockPool::new(SHAPE), 18);
        let block = &cache.blocks()[1];
        assert_eq!((block.keys(1, 1)[0], block.keys(1, 1)[1], block.keys(1, 1)[BLOCK_TOKENS]), (163.0, 173.0, 164.0));
        assert_eq!(block.values(1, 1)[16..19], [-14.0, -13.0, -12.0]);
        assert!(block.keys(0, 0).iter().all(|&key| key == 0.0));
    }

    #[test]
    fn a_shared_block_is_copied_by_the_one_that_writes_to_it() {
        let pool = BlockPool::new(SHAPE);
        let first = written(&pool, 20);
        let mut second = first.prefix(18);
        assert_eq!(pool.n_live(), 2);
        second.extend(1);
        second.write(1, 18, &token(7.0), &token(7.0));
        assert_eq!(pool.n_live(), 3);
        assert!(Arc::ptr_eq(&first.blocks()[0], &second.blocks()[0]));
        assert_eq!((first.blocks()[1].keys(1, 0)[2], second.blocks()[1].keys(1, 0)[2]), (180.0, 7.0));
        assert_eq!(second.blocks()[1].keys(1, 0)[1], 170.0);
    }

    #[test]
    fn blocks_that_are_let_go_of_are_used_again() {
        let pool = BlockPool::new(SHAPE);
        (0..5).for_each(|_| drop(written(&pool, 40)));
        assert_eq!((pool.n_live(), pool.n_peak()), (0, 3));
        let cache = written(&pool, 1);
        assert_eq!(cache.blocks()[0].keys(1, 0)[1], 0.0);
    }
}
