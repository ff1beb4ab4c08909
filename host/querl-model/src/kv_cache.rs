//! Paged KV cache: keys and values of tokens in blocks of a pool. Sequences with a common prefix share its blocks; a shared block is
//! copied before one of them writes to it (copy-on-write). A GPU's memory for it is `KvCache` of `querl-gpu/src/decode/backend.rs`.
//!
//! Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".

use crate::{DecoderConfig, ModelError};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of tokens in a block: as many as an AVX-512 register has lanes, so that one instruction sees one value of all their keys.
pub const BLOCK_TOKENS: usize = 16;

/// Keys per thread block of split-K attention on a GPU. Constant, so that the result of a sequence does not depend on its batch.
const SPLIT_KEYS: usize = 256;

/// Number of splits of the keys in split-K attention on a GPU, for sequences of at most `max_length` keys. A shorter sequence leaves some
/// splits empty, which does not change its result.
pub fn n_splits(max_length: usize) -> usize {
    max_length.div_ceil(SPLIT_KEYS).max(1)
}

/// Number of intermediate f32 values of split-K attention for `n` rows.
pub fn split_values(n: usize, n_heads: usize, head_dim: usize, n_splits: usize) -> usize {
    if n_splits > 1 { n * n_heads * n_splits * (head_dim + 2) } else { 0 }
}

/// Dimensions of a KV cache block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    n_layers: usize,
    n_kv_heads: usize,
    pub(crate) head_dim: usize,
}

/// Pool of KV cache blocks: on the CPU they are allocated as needed, on a GPU their number is fixed.
#[derive(Debug)]
pub struct BlockPool {
    shape: BlockShape,
    memory: Memory,
    n_live: AtomicUsize,
    n_peak: AtomicUsize,
}

#[derive(Debug)]
enum Memory {
    /// Freed blocks, for reuse.
    Host(Mutex<Vec<Vec<f32>>>),
    /// Indices of the free blocks in GPU memory.
    Device(Mutex<DeviceBlocks>),
}

#[derive(Debug)]
struct DeviceBlocks {
    n_blocks: usize,
    free: Vec<u32>,
    /// Pending copy-on-write block copies (source, destination).
    copies: Vec<[u32; 2]>,
}

/// Keys and values of up to [`BLOCK_TOKENS`] tokens in all layers; returns to its pool when no sequence uses it.
pub struct Block {
    values: Vec<f32>, // empty for blocks in GPU memory
    number: u32,
    pool: Arc<BlockPool>,
}

/// The block table of one sequence. A clone shares all blocks, and can be extended by other tokens.
#[derive(Clone)]
pub struct SequenceKvCache {
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

    /// Number of f32 values of one head's keys in a block, shape `(D, BLOCK_TOKENS)`.
    fn key_values(self) -> usize {
        self.head_dim * BLOCK_TOKENS
    }

    /// Width of a row of V: the head size, padded to a multiple of 16.
    pub(crate) fn value_width(self) -> usize {
        self.head_dim.next_multiple_of(16)
    }

    /// Number of f32 values of one head's keys and values in a block: the keys, then V with shape `(BLOCK_TOKENS, value_width)`.
    fn head_values(self) -> usize {
        self.key_values() + BLOCK_TOKENS * self.value_width()
    }

    fn block_values(self) -> usize {
        self.n_layers * self.n_kv_heads * self.head_values()
    }

    /// Bytes on a GPU: bf16, without padding.
    fn block_bytes_on_device(self) -> usize {
        self.n_layers * self.n_kv_heads * self.head_dim * BLOCK_TOKENS * 2 * 2
    }

    fn head_start(self, layer: usize, kv_head: usize) -> usize {
        (layer * self.n_kv_heads + kv_head) * self.head_values()
    }
}

impl BlockPool {
    /// A pool in CPU memory, without a limit on the number of blocks.
    pub(crate) fn new(shape: BlockShape) -> Arc<Self> {
        Self::with(shape, Memory::Host(Mutex::default()))
    }

    /// A pool of `n_blocks` blocks in GPU memory.
    pub(crate) fn of_device(shape: BlockShape, n_blocks: usize) -> Arc<Self> {
        let free = (0..n_blocks as u32).rev().collect();
        Self::with(shape, Memory::Device(Mutex::new(DeviceBlocks { n_blocks, free, copies: Vec::new() })))
    }

    fn with(shape: BlockShape, memory: Memory) -> Arc<Self> {
        Arc::new(Self { shape, memory, n_live: AtomicUsize::new(0), n_peak: AtomicUsize::new(0) })
    }

    pub(crate) fn block_bytes(&self) -> usize {
        match self.memory {
            Memory::Host(_) => self.shape.block_values() * size_of::<f32>(),
            Memory::Device(_) => self.shape.block_bytes_on_device(),
        }
    }

    pub(crate) fn n_live(&self) -> usize {
        self.n_live.load(Ordering::Relaxed)
    }

    /// Peak number of live blocks; on the CPU also the number allocated, since freed blocks are reused.
    pub(crate) fn n_peak(&self) -> usize {
        self.n_peak.load(Ordering::Relaxed)
    }

    /// Number of blocks of a pool in GPU memory; `None` on the CPU.
    pub(crate) fn n_blocks(&self) -> Option<usize> {
        match &self.memory {
            Memory::Host(_) => None,
            Memory::Device(numbers) => Some(lock(numbers).n_blocks),
        }
    }

    /// Removes and returns the pending copy-on-write block copies (source, destination); the GPU must make them before sequences write.
    pub fn take_copies(&self) -> Vec<[u32; 2]> {
        match &self.memory {
            Memory::Host(_) => Vec::new(),
            Memory::Device(numbers) => std::mem::take(&mut lock(numbers).copies),
        }
    }

    /// Blocks in CPU memory are zeroed: attention multiplies the slots after a sequence's last token by 0, so they must be finite.
    fn take(pool: &Arc<Self>) -> Result<Block, ModelError> {
        let block = match &pool.memory {
            Memory::Host(free) => {
                let used = lock(free).pop();
                let values = match used {
                    Some(mut values) => {
                        values.fill(0.0);
                        values
                    }
                    None => vec![0.0; pool.shape.block_values()],
                };
                Block { values, number: 0, pool: pool.clone() }
            }
            Memory::Device(numbers) => {
                let mut numbers = lock(numbers);
                let number = numbers.free.pop().ok_or_else(|| {
                    let n = numbers.n_blocks;
                    ModelError::Generation(format!(
                        "all {n} KV cache blocks are in use; internal error, please report it"
                    ))
                })?;
                Block { values: Vec::new(), number, pool: pool.clone() }
            }
        };
        let n_live = pool.n_live.fetch_add(1, Ordering::Relaxed) + 1;
        pool.n_peak.fetch_max(n_live, Ordering::Relaxed);
        Ok(block)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pool.n_live.fetch_sub(1, Ordering::Relaxed);
        match &self.pool.memory {
            Memory::Host(free) => lock(free).push(std::mem::take(&mut self.values)),
            Memory::Device(numbers) => lock(numbers).free.push(self.number),
        }
    }
}

impl Block {
    /// Copies the block. On a GPU the copy is pending until [`BlockPool::take_copies`].
    fn copied(&self) -> Result<Self, ModelError> {
        let mut copy = BlockPool::take(&self.pool)?;
        match &self.pool.memory {
            Memory::Host(_) => copy.values.copy_from_slice(&self.values),
            Memory::Device(numbers) => lock(numbers).copies.push([self.number, copy.number]),
        }
        Ok(copy)
    }

    /// Number of the block in GPU memory.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Keys of one head in one layer: `(D, BLOCK_TOKENS)`.
    pub fn keys(&self, layer: usize, kv_head: usize) -> &[f32] {
        let shape = self.pool.shape;
        let start = shape.head_start(layer, kv_head);
        &self.values[start..start + shape.key_values()]
    }

    /// Values of one head in one layer: `(BLOCK_TOKENS, value_width)`.
    pub fn values(&self, layer: usize, kv_head: usize) -> &[f32] {
        let shape = self.pool.shape;
        let start = shape.head_start(layer, kv_head);
        &self.values[start + shape.key_values()..start + shape.head_values()]
    }
}

impl SequenceKvCache {
    /// The block table of an empty sequence.
    pub fn new(pool: &Arc<BlockPool>) -> Self {
        Self { pool: pool.clone(), blocks: Vec::new(), len: 0 }
    }

    /// Number of tokens in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The block table: blocks in the order of the tokens.
    pub fn blocks(&self) -> &[Arc<Block>] {
        &self.blocks
    }

    pub(crate) fn shape(&self) -> BlockShape {
        self.pool.shape
    }

    /// Pending copy-on-write block copies of the pool; see [`BlockPool::take_copies`].
    pub fn take_copies(&self) -> Vec<[u32; 2]> {
        self.pool.take_copies()
    }

    pub(crate) fn prefix(&self, len: usize) -> Self {
        let len = len.min(self.len);
        Self { pool: self.pool.clone(), blocks: self.blocks[..len.div_ceil(BLOCK_TOKENS)].to_vec(), len }
    }

    /// Appends `n` tokens, in blocks that no other sequence uses. Their keys and values must be written next.
    ///
    /// # Errors
    /// The GPU has no free block.
    pub fn extend(&mut self, n: usize) -> Result<(), ModelError> {
        if n == 0 {
            return Ok(());
        }
        if !self.len.is_multiple_of(BLOCK_TOKENS) {
            // Copies a shared last block before `write` is called.
            self.own(self.blocks.len() - 1)?;
        }
        self.len += n;
        while self.blocks.len() * BLOCK_TOKENS < self.len {
            self.blocks.push(Arc::new(BlockPool::take(&self.pool)?));
        }
        Ok(())
    }

    /// Copy-on-write: replaces a shared block by a copy that only this sequence uses.
    fn own(&mut self, index: usize) -> Result<&mut Block, ModelError> {
        if Arc::get_mut(&mut self.blocks[index]).is_none() {
            self.blocks[index] = Arc::new(self.blocks[index].copied()?);
        }
        Arc::get_mut(&mut self.blocks[index]).ok_or_else(|| {
            ModelError::Generation("a KV cache block is used twice; internal error, please report it".into())
        })
    }

    /// Writes the keys and values `(kv_heads * D)` of one token that `extend` appended, in one layer, in CPU memory; on a GPU the kernels
    /// do this.
    pub(crate) fn write(
        &mut self,
        layer: usize,
        position: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), ModelError> {
        let (shape, slot) = (self.pool.shape, position % BLOCK_TOKENS);
        let block = self.own(position / BLOCK_TOKENS)?;
        let heads = keys.chunks_exact(shape.head_dim).zip(values.chunks_exact(shape.head_dim));
        for (kv_head, (keys, values)) in heads.enumerate() {
            let start = shape.head_start(layer, kv_head);
            let head = &mut block.values[start..start + shape.head_values()];
            let (key_part, value_part) = head.split_at_mut(shape.key_values());
            key_part.iter_mut().skip(slot).step_by(BLOCK_TOKENS).zip(keys).for_each(|(to, key)| *to = *key);
            value_part[slot * shape.value_width()..][..shape.head_dim].copy_from_slice(values);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: BlockShape = BlockShape { n_layers: 2, n_kv_heads: 2, head_dim: 3 };

    fn token(value: f32) -> Vec<f32> {
        (0..6).map(|i| value + i as f32).collect()
    }

    fn written(pool: &Arc<BlockPool>, n: usize) -> SequenceKvCache {
        let mut cache = SequenceKvCache::new(pool);
        cache.extend(n).unwrap();
        for position in 0..n {
            cache.write(1, position, &token(position as f32 * 10.0), &token(-(position as f32))).unwrap();
        }
        cache
    }

    #[test]
    fn keys_are_stored_by_dimension_and_values_by_token() {
        let cache = written(&BlockPool::new(SHAPE), 18);
        let block = &cache.blocks()[1];
        assert_eq!((block.keys(1, 1)[0], block.keys(1, 1)[1], block.keys(1, 1)[BLOCK_TOKENS]), (163.0, 173.0, 164.0));
        assert_eq!(block.values(1, 1)[16..19], [-14.0, -13.0, -12.0]);
        assert!(block.keys(0, 0).iter().all(|&key| key == 0.0));
    }

    #[test]
    fn writing_to_a_shared_block_copies_it() {
        let pool = BlockPool::new(SHAPE);
        let first = written(&pool, 20);
        let mut second = first.prefix(18);
        assert_eq!(pool.n_live(), 2);
        second.extend(1).unwrap();
        second.write(1, 18, &token(7.0), &token(7.0)).unwrap();
        assert_eq!(pool.n_live(), 3);
        assert!(Arc::ptr_eq(&first.blocks()[0], &second.blocks()[0]));
        assert_eq!((first.blocks()[1].keys(1, 0)[2], second.blocks()[1].keys(1, 0)[2]), (180.0, 7.0));
        assert_eq!(second.blocks()[1].keys(1, 0)[1], 170.0);
    }

    #[test]
    fn freed_blocks_are_reused() {
        let pool = BlockPool::new(SHAPE);
        (0..5).for_each(|_| drop(written(&pool, 40)));
        assert_eq!((pool.n_live(), pool.n_peak()), (0, 3));
        let cache = written(&pool, 1);
        assert_eq!(cache.blocks()[0].keys(1, 0)[1], 0.0);
    }

    fn numbers(cache: &SequenceKvCache) -> Vec<u32> {
        cache.blocks().iter().map(|block| block.number()).collect()
    }

    #[test]
    fn block_copies_on_a_gpu_are_pending_until_taken() {
        let pool = BlockPool::of_device(SHAPE, 5);
        let mut first = SequenceKvCache::new(&pool);
        first.extend(20).unwrap();
        let mut second = first.clone();
        assert_eq!(numbers(&second), [0, 1]);
        second.extend(1).unwrap();
        first.extend(1).unwrap();
        assert_eq!((numbers(&first), numbers(&second)), (vec![0, 1], vec![0, 2]));
        assert_eq!((pool.take_copies(), pool.take_copies()), (vec![[1, 2]], vec![]));
        drop(second);
        assert_eq!((pool.n_live(), pool.n_peak(), pool.n_blocks()), (2, 3, Some(5)));
    }

    #[test]
    fn a_gpu_without_a_free_block_is_an_error() {
        let pool = BlockPool::of_device(SHAPE, 2);
        let mut cache = SequenceKvCache::new(&pool);
        cache.extend(32).unwrap();
        let error = cache.extend(1).unwrap_err();
        assert!(error.to_string().contains("all 2 KV cache blocks"), "{error}");
    }
}
