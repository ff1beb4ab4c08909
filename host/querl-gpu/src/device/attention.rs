//! Causal attention over packed sequences: counterpart of [`querl_model::kernels::attention()`].
//!
//! A row sees another one if that stands before it or is itself, and if it belongs to what branches off the other's run of
//! rows: `key <= query < end of the key's run`. So a mask is one number for each key. Queries and keys are worked on in tiles;
//! the host lists once which pairs of tiles see each other at all, and which need the mask.

use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{Result, bail};
use half::bf16;
use querl_model::kernels::RowTree;

/// Number of queries and of keys in a tile.
const TILE: usize = 64;

/// Queries of a tile that the backward pass for keys has in memory at a time.
const QUERIES_AT_ONCE: usize = 32;

/// Threads per block: four warps.
const TILE_THREADS: usize = 128;

/// Maximum size of a work item (the work of one thread block in the backward pass for keys), as a divisor of the number of tile pairs. All
/// sequences attend to a shared prefix, and a single block for it would still run when all others are done. There are as many blocks for
/// each key-value head, so that each is a small part of a multiprocessor's work.
const ITEMS: usize = 256;

/// Minimum for the maximum number of tiles of `QUERIES_AT_ONCE` per item: writing and adding more partial sums costs more than it saves.
const LEAST_TILES_PER_ITEM: usize = 8;

/// Marks the only item of a tile of keys, which writes no partial sums.
const ALONE: u32 = u32::MAX;

/// The query rows of a prefix tree, and which tiles of queries and keys see each other.
pub struct TreeQueries {
    n_queries: usize,
    n_rows: usize,
    /// Row of each query.
    rows: CudaSlice<u32>,
    /// For each row, the end of the range of rows that attend to it.
    ends: CudaSlice<u32>,
    /// For each tile of queries: its index, and start and end of its list; longest list first. `(tiles, 3)`.
    forward: CudaSlice<u32>,
    /// Tiles of keys that a tile of queries attends to, times 2, plus 1 if the mask is needed.
    keys: CudaSlice<u32>,
    /// For each item: its tile of keys, start and end of its list, and the index of its partial sums or `ALONE`; longest list first.
    /// `(items, 4)`.
    backward: CudaSlice<u32>,
    /// Tiles of `QUERIES_AT_ONCE` queries that attend to a tile of keys, encoded as above.
    queries: CudaSlice<u32>,
    /// Tiles of keys with several (or no) items, and start and end of their partial sums. `(tiles, 3)`.
    joined: CudaSlice<u32>,
    n_items: usize,
    n_joined: usize,
    /// Number of items with partial sums.
    n_parts: usize,
}

/// The lists of tiles, computed on the CPU, so that they can be tested without a GPU.
#[derive(Debug, Default, PartialEq)]
struct Tiles {
    rows: Vec<u32>,
    ends: Vec<u32>,
    forward: Vec<u32>,
    keys: Vec<u32>,
    backward: Vec<u32>,
    queries: Vec<u32>,
    joined: Vec<u32>,
    n_parts: u32,
}

impl Tiles {
    fn new(tree: &RowTree, rows: Vec<u32>) -> Self {
        let ends: Vec<u32> = tree.nodes().iter().flat_map(|node| vec![node.end as u32; node.len]).collect();
        let mut tiles = Self { rows, ends, ..Self::default() };
        let mut lists: Vec<[u32; 3]> = Vec::new();
        for (tile, seen) in tiles.pairs(TILE).iter().enumerate() {
            let start = tiles.keys.len() as u32;
            tiles.keys.extend(seen.iter().map(|&(key_tile, masked)| key_tile << 1 | masked));
            lists.push([tile as u32, start, tiles.keys.len() as u32]);
        }
        lists.sort_by_key(|list| std::cmp::Reverse(list[2] - list[1]));
        tiles.forward = lists.concat();
        tiles.turn();
        tiles
    }

    /// For each tile of `n_queries` queries: the tiles of keys that it attends to, and 1 if the mask is needed.
    fn pairs(&self, n_queries: usize) -> Vec<Vec<(u32, u32)>> {
        let reach = |ends: &[u32]| (ends.iter().copied().min(), ends.iter().copied().max());
        let of_keys: Vec<_> = self.ends.chunks(TILE).map(reach).collect();
        let of_tile = |rows: &[u32]| {
            let (first, last) = (rows[0], rows[rows.len() - 1]);
            let key_tiles = of_keys.iter().enumerate().take(last as usize / TILE + 1);
            key_tiles
                .filter_map(|(tile, &(lowest, highest))| {
                    let is_whole = (tile + 1) * TILE <= first as usize + 1 && lowest? > last;
                    (highest? > first).then_some((tile as u32, u32::from(!is_whole)))
                })
                .collect()
        };
        self.rows.chunks(n_queries).map(of_tile).collect()
    }

    /// Computes the lists by tiles of keys, in items of bounded length.
    fn turn(&mut self) {
        let mut seen_by = vec![Vec::new(); self.ends.len().div_ceil(TILE)];
        for (tile, seen) in self.pairs(QUERIES_AT_ONCE).iter().enumerate() {
            for &(key_tile, masked) in seen {
                seen_by[key_tile as usize].push((tile as u32) << 1 | masked);
            }
        }
        let longest = (seen_by.iter().map(Vec::len).sum::<usize>() / ITEMS).max(LEAST_TILES_PER_ITEM);
        let mut items: Vec<[u32; 4]> = Vec::new();
        for (key_tile, list) in seen_by.iter().enumerate() {
            let (n_items, first_part) = (list.len().div_ceil(longest), self.n_parts);
            for part in list.chunks(list.len().div_ceil(n_items.max(1)).max(1)) {
                let start = self.queries.len() as u32;
                self.queries.extend(part);
                let place = if n_items == 1 { ALONE } else { self.n_parts };
                self.n_parts += u32::from(n_items > 1);
                items.push([key_tile as u32, start, self.queries.len() as u32, place]);
            }
            if n_items != 1 {
                self.joined.extend([key_tile as u32, first_part, self.n_parts]);
            }
        }
        items.sort_by_key(|item| std::cmp::Reverse(item[2] - item[1]));
        self.backward = items.concat();
    }
}

impl TreeQueries {
    pub fn all(gpu: &Gpu, tree: &RowTree) -> Result<Self> {
        Self::new(gpu, tree, (0..tree.n_rows() as u32).collect())
    }

    /// The rows with these indices, in ascending order, as queries.
    pub fn some(gpu: &Gpu, tree: &RowTree, rows: &[u32]) -> Result<Self> {
        if rows.windows(2).any(|pair| pair[0] >= pair[1]) {
            bail!("attention: the rows of queries do not rise");
        }
        if let Some(row) = rows.last().filter(|&&row| row as usize >= tree.n_rows()) {
            bail!("attention: there is no row {row} among {}", tree.n_rows());
        }
        Self::new(gpu, tree, rows.to_vec())
    }

    fn new(gpu: &Gpu, tree: &RowTree, rows: Vec<u32>) -> Result<Self> {
        if tree.n_rows() > i32::MAX as usize {
            bail!("attention: {} rows are more than an index holds", tree.n_rows());
        }
        let tiles = Tiles::new(tree, rows);
        Ok(Self {
            n_queries: tiles.rows.len(),
            n_rows: tiles.ends.len(),
            n_items: tiles.backward.len() / 4,
            n_joined: tiles.joined.len() / 3,
            n_parts: tiles.n_parts as usize,
            rows: gpu.upload(&tiles.rows)?,
            ends: gpu.upload(&tiles.ends)?,
            forward: gpu.upload(&tiles.forward)?,
            keys: gpu.upload(&tiles.keys)?,
            backward: gpu.upload(&tiles.backward)?,
            queries: gpu.upload(&tiles.queries)?,
            joined: gpu.upload(&tiles.joined)?,
        })
    }

    /// Row indices, on the GPU.
    pub fn rows(&self) -> &CudaSlice<u32> {
        &self.rows
    }

    fn n_tiles(&self) -> usize {
        self.n_queries.div_ceil(TILE)
    }

    /// Heads of queries `(queries, heads * D)` and keys `(N, kv_heads * D)`.
    fn heads(&self, head_dim: usize, [q, k, v]: [usize; 3]) -> Result<Heads> {
        let (q_width, kv_width) = (q / self.n_queries.max(1), k / self.n_rows.max(1));
        let fits = q == q_width * self.n_queries && k == kv_width * self.n_rows && v == k;
        let divides = head_dim > 0 && kv_width.is_multiple_of(head_dim) && q_width.is_multiple_of(head_dim);
        let (n_heads, n_kv_heads) = if divides { (q_width / head_dim, kv_width / head_dim) } else { (0, 0) };
        let one_is_none = (n_kv_heads == 0) != (n_heads == 0) && self.n_queries > 0;
        let too_wide = q_width.max(kv_width) > i32::MAX as usize / TILE; // kernels count a tile's values in `int`
        if !fits || !divides || one_is_none || too_wide || n_heads % n_kv_heads.max(1) != 0 {
            let (n_queries, n_rows) = (self.n_queries, self.n_rows);
            bail!("attention: {q}, {k}, {v} values for {n_queries} queries and {n_rows} rows in heads of {head_dim}");
        }
        let widths = [32, 64, 96, 128];
        let Some(shape) = widths.iter().position(|&width| head_dim <= width) else {
            bail!("attention: heads of {head_dim}; the kernels take up to 128");
        };
        Ok(Heads { n_heads, n_kv_heads, head_dim, shape, padded: widths[shape] })
    }
}

#[derive(Clone, Copy)]
struct Heads {
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    /// Index of the kernel variant for this head size.
    shape: usize,
    padded: usize,
}

impl Heads {
    /// Bytes of shared memory for `n_rows` rows. Rows are padded by 8 values, to avoid bank conflicts.
    fn bytes(self, n_rows: usize) -> usize {
        n_rows * (self.padded + 8) * size_of::<bf16>()
    }

    fn scale(self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

impl Gpu {
    /// Softmax attention of each query over its own sequence up to itself. Also returns the log-sum-exp of the scores, `(heads, queries)`,
    /// for the backward pass.
    ///
    /// `q`: `(queries, heads * D)`; `k`, `v`: `(N, kv_heads * D)`. Returns `(queries, heads * D)` bf16.
    ///
    /// Source: Dao 2023, "FlashAttention-2".
    pub fn attend(
        &self,
        queries: &TreeQueries,
        head_dim: usize,
        q: &impl DevicePtr<bf16>,
        k: &impl DevicePtr<bf16>,
        v: &impl DevicePtr<bf16>,
    ) -> Result<(CudaSlice<bf16>, CudaSlice<f32>)> {
        let heads = queries.heads(head_dim, [q.len(), k.len(), v.len()])?;
        let (mut out, mut logsumexp) = (self.alloc(q.len())?, self.alloc(queries.n_queries * heads.n_heads)?);
        let mut args = [
            self.input(q),
            self.input(k),
            self.input(v),
            self.output(&mut out),
            self.output(&mut logsumexp),
            self.input(&queries.forward),
            self.input(&queries.keys),
            self.input(&queries.rows),
            self.input(&queries.ends),
            queries.n_queries.into(),
            queries.n_rows.into(),
            heads.n_heads.into(),
            heads.n_kv_heads.into(),
            heads.head_dim.into(),
            heads.scale().into(),
        ];
        let name = ["attend_32", "attend_64", "attend_96", "attend_128"][heads.shape];
        let grid = [queries.n_tiles(), heads.n_heads, 1];
        // SAFETY: as `cuda/attention.cuh` declares it; lengths were checked by `heads`, lists are within them by construction.
        unsafe { self.launch(name, grid, TILE_THREADS, heads.bytes(3 * TILE), &mut args)? };
        Ok((out, logsumexp))
    }

    /// Gradients of queries, keys and values for the gradient `grad` of [`Gpu::attend`]'s output `out`.
    #[allow(clippy::too_many_arguments)] // the twin's arguments, with the three of the forward pass apart
    pub fn attention_gradients(
        &self,
        queries: &TreeQueries,
        head_dim: usize,
        q: &impl DevicePtr<bf16>,
        k: &impl DevicePtr<bf16>,
        v: &impl DevicePtr<bf16>,
        out: &impl DevicePtr<bf16>,
        logsumexp: &impl DevicePtr<f32>,
        grad: &impl DevicePtr<bf16>,
    ) -> Result<[CudaSlice<bf16>; 3]> {
        let heads = queries.heads(head_dim, [q.len(), k.len(), v.len()])?;
        if out.len() != q.len() || grad.len() != q.len() || logsumexp.len() != queries.n_queries * heads.n_heads {
            bail!("attention: {} results and {} gradients of {} queries", out.len(), grad.len(), q.len());
        }
        let deltas = self.attention_delta(queries, heads, out, grad)?;
        let sizes = [queries.n_queries, queries.n_rows, heads.n_heads, heads.n_kv_heads, heads.head_dim];
        let mut dq = self.alloc(q.len())?;
        let mut args = vec![self.input(q), self.input(k), self.input(v), self.input(grad)];
        args.extend([self.input(logsumexp), self.input(&deltas), self.output(&mut dq)]);
        args.extend([self.input(&queries.forward), self.input(&queries.keys)]);
        args.extend([self.input(&queries.rows), self.input(&queries.ends)]);
        args.extend(sizes.map(Into::into));
        args.push(heads.scale().into());
        let name = ["query_gradients_32", "query_gradients_64", "query_gradients_96", "query_gradients_128"];
        let grid = [queries.n_tiles(), heads.n_heads, 1];
        // SAFETY: as `cuda/attention.cuh` declares it; lengths were checked above.
        unsafe { self.launch(name[heads.shape], grid, TILE_THREADS, heads.bytes(4 * TILE), &mut args)? };

        let n_parts = queries.n_parts * heads.n_kv_heads * 2 * TILE * heads.padded;
        let (mut dk, mut dv, mut parts) = (self.alloc(k.len())?, self.alloc(v.len())?, self.alloc::<f32>(n_parts)?);
        let mut args = vec![self.input(q), self.input(k), self.input(v), self.input(grad)];
        args.extend([self.input(logsumexp), self.input(&deltas)]);
        args.extend([self.output(&mut dk), self.output(&mut dv), self.output(&mut parts)]);
        args.extend([self.input(&queries.backward), self.input(&queries.queries)]);
        args.extend([self.input(&queries.rows), self.input(&queries.ends)]);
        args.extend(sizes.map(Into::into));
        args.push(heads.scale().into());
        let name = ["key_gradients_32", "key_gradients_64", "key_gradients_96", "key_gradients_128"][heads.shape];
        let (grid, shared) = ([queries.n_items, heads.n_kv_heads, 1], heads.bytes(2 * TILE + 4 * QUERIES_AT_ONCE));
        // SAFETY: as above; each item has a tile of keys or a place in the parts of its own.
        unsafe { self.launch(name, grid, TILE_THREADS, shared, &mut args)? };

        let mut args =
            vec![self.input(&parts), self.input(&queries.joined), self.output(&mut dk), self.output(&mut dv)];
        args.extend([queries.n_rows, heads.n_kv_heads, heads.head_dim, heads.padded].map(Into::into));
        let grid = [queries.n_joined * heads.padded / 16, heads.n_kv_heads, 2];
        // SAFETY: as `cuda/attention.cuh` declares it; `joined` names parts below `n_parts`.
        unsafe { self.launch("key_gradient_sums", grid, 256, 0, &mut args)? };
        Ok([dq, dk, dv])
    }

    /// `sum(grad * out)` over each head of each query: `(heads, queries)`.
    fn attention_delta(
        &self,
        queries: &TreeQueries,
        heads: Heads,
        out: &impl DevicePtr<bf16>,
        grad: &impl DevicePtr<bf16>,
    ) -> Result<CudaSlice<f32>> {
        let mut deltas = self.alloc(queries.n_queries * heads.n_heads)?;
        let mut args = [self.input(out), self.input(grad), self.output(&mut deltas), queries.n_queries.into()]
            .into_iter()
            .chain([heads.n_heads.into(), heads.head_dim.into()])
            .collect::<Vec<_>>();
        let n_blocks = (queries.n_queries * heads.n_heads).div_ceil(8);
        // SAFETY: as `cuda/attention.cuh` declares it: a warp for each head of each query.
        unsafe { self.launch("attention_delta", [n_blocks, 1, 1], 256, 0, &mut args)? };
        Ok(deltas)
    }
}
