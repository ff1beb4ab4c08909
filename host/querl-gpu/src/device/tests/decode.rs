use super::super::{BLOCK_TOKENS, CacheShape, DeviceRope, Epilogue, HeadNorms, LoraAOut, LoraB, Sequences, n_splits};
use super::*;
use querl_model::kernels::{self, Queries, RopeTable, RowTree};

struct Case {
    n_heads: usize,
    shape: CacheShape,
    lengths: Vec<usize>,
    /// Number of blocks of the common prefix of all sequences.
    n_shared: usize,
}

impl Case {
    fn width(&self) -> usize {
        self.shape.n_kv_heads * self.shape.head_dim
    }

    /// Blocks of each sequence: the shared ones, then its own from the end of the pool.
    fn tables(&self) -> Vec<Vec<u32>> {
        let mut next = self.shape.n_blocks as u32;
        let mut own = |_| {
            next -= 1;
            next
        };
        let of = |length: &usize| length.div_ceil(BLOCK_TOKENS);
        self.lengths
            .iter()
            .map(|length| {
                (0..of(length).min(self.n_shared) as u32).chain((self.n_shared..of(length)).map(&mut own)).collect()
            })
            .collect()
    }
}

/// Attention of each sequence's last token, on the CPU.
fn expected(case: &Case, q: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>]) -> Vec<f32> {
    let width = case.n_heads * case.shape.head_dim;
    let mut out = Vec::new();
    for (index, &length) in case.lengths.iter().enumerate() {
        if length == 0 {
            out.extend(vec![0f32; width]);
            continue;
        }
        let queries = Queries::some(&RowTree::separate(&[length]), &[length as u32 - 1]).unwrap();
        let inputs = [&q[index * width..][..width], &keys[index], &values[index]];
        out.extend(kernels::attention_forward(&queries, case.shape.head_dim, inputs).unwrap().0);
    }
    out
}

/// Writes a token's keys or values `(kv_heads, D)` to its block.
fn put(cache: &mut [f32], shape: CacheShape, block: usize, token: usize, row: &[f32]) {
    for (head, values) in row.chunks_exact(shape.head_dim).enumerate() {
        let to = ((block * shape.n_kv_heads + head) * BLOCK_TOKENS + token) * shape.head_dim;
        cache[to..to + shape.head_dim].copy_from_slice(values);
    }
}

fn check(case: &Case, seed: u64) {
    let (mut rng, width) = (rng(seed), case.width());
    let tables = case.tables();
    let q = rounded(&mut rng, case.lengths.len() * case.n_heads * case.shape.head_dim);
    // Shared blocks are stored once, so values are drawn per block.
    let pools = [(); 2].map(|()| rounded(&mut rng, case.shape.n_blocks * BLOCK_TOKENS * width));
    let rows_of = |pool: &[f32], sequence: usize| -> Vec<f32> {
        let slot = |token: usize| tables[sequence][token / BLOCK_TOKENS] as usize * BLOCK_TOKENS + token % BLOCK_TOKENS;
        (0..case.lengths[sequence]).flat_map(|token| pool[slot(token) * width..][..width].to_vec()).collect()
    };
    let sequences: Vec<usize> = (0..case.lengths.len()).collect();
    let [keys, values] = [0, 1].map(|i| sequences.iter().map(|&s| rows_of(&pools[i], s)).collect::<Vec<_>>());

    // Slots that belong to no sequence are NaN.
    let [k_cache, v_cache] = [&keys, &values].map(|rows| {
        let mut cache = vec![f32::NAN; case.shape.len()];
        for (table, rows) in tables.iter().zip(rows) {
            for (token, row) in rows.chunks_exact(width).enumerate() {
                put(&mut cache, case.shape, table[token / BLOCK_TOKENS] as usize, token % BLOCK_TOKENS, row);
            }
        }
        halves(&cache)
    });
    let room = tables.iter().map(Vec::len).max().unwrap() + 1;
    let padded: Vec<u32> =
        tables.iter().flat_map(|table| [table.clone(), vec![u32::MAX; room - table.len()]].concat()).collect();
    let lengths: Vec<u32> = case.lengths.iter().map(|&length| length as u32).collect();
    let (tables, lengths) = (gpu().upload(&padded).unwrap(), gpu().upload(&lengths).unwrap());
    let needed = n_splits(case.lengths.iter().copied().max().unwrap());
    let attend = |n_splits: usize| {
        let (tables, lengths) = (tables.as_view(), lengths.as_view());
        let sequences = Sequences { tables, width: room, table_rows: None, lengths, n_splits };
        gpu().decode_attention(&halves(&q), &k_cache, &v_cache, case.shape, &sequences).unwrap()
    };
    assert_close("decode", &floats(&attend(needed)), &expected(case, &q, &keys, &values), 1.0 / 256.0, 1.0 / 256.0);
    assert_repeatable("decode", || floats(&attend(needed)));
    assert_eq!(floats(&attend(needed)), floats(&attend(needed + 2)), "more parts than are needed");
}

#[test]
fn one_token_attends_to_keys_in_blocks_as_on_the_cpu() {
    for (n_heads, n_kv_heads, head_dim) in
        [(1, 1, 8), (4, 2, 64), (7, 1, 32), (2, 2, 80), (3, 1, 96), (5, 1, 128), (20, 1, 16)]
    {
        let shape = CacheShape { n_blocks: 40, n_kv_heads, head_dim };
        check(&Case { n_heads, shape, lengths: vec![1, 16, 17, 0, 100, 255], n_shared: 0 }, head_dim as u64);
    }
}

#[test]
fn long_sequences_are_split_and_joined() {
    let shape = CacheShape { n_blocks: 120, n_kv_heads: 2, head_dim: 16 };
    check(&Case { n_heads: 4, shape, lengths: vec![256, 257, 700, 3, 512], n_shared: 0 }, 1);
}

#[test]
fn sequences_share_the_blocks_that_they_begin_with() {
    let shape = CacheShape { n_blocks: 30, n_kv_heads: 1, head_dim: 32 };
    check(&Case { n_heads: 2, shape, lengths: vec![70, 49, 90, 33], n_shared: 2 }, 2);
}

#[test]
fn other_sequences_of_a_batch_do_not_change_a_result() {
    let shape = CacheShape { n_blocks: 60, n_kv_heads: 1, head_dim: 16 };
    let cache = halves(&rounded(&mut rng(3), shape.len()));
    let q = rounded(&mut rng(4), 3 * 16);
    let attend = |n: usize, max_length: usize| {
        let tables: Vec<u32> =
            (0..n as u32).flat_map(|sequence| (0..20).map(move |block| sequence * 20 + block)).collect();
        let lengths: Vec<u32> = [40, 300, 200][..n].to_vec();
        let (tables, lengths) = (gpu().upload(&tables).unwrap(), gpu().upload(&lengths).unwrap());
        let (tables, lengths) = (tables.as_view(), lengths.as_view());
        let sequences = Sequences { tables, width: 20, table_rows: None, lengths, n_splits: n_splits(max_length) };
        floats(&gpu().decode_attention(&halves(&q[..n * 16]), &cache, &cache, shape, &sequences).unwrap())
    };
    assert_eq!(attend(1, 40), attend(3, 300)[..16]);
}

/// Regression: attention with a key or query that was NaN gave zeros, as if it attended to nothing.
#[test]
fn nan_stays_nan_within_its_sequence() {
    let (shape, n_heads) = (CacheShape { n_blocks: 40, n_kv_heads: 1, head_dim: 16 }, 2);
    let clean = rounded(&mut rng(11), shape.len());
    let tables: Vec<u32> = (0..40).collect();
    let attend = |keys: &[f32], q: &[f32], n_splits: usize| {
        let (tables, lengths) = (gpu().upload(&tables).unwrap(), gpu().upload(&[300u32, 300]).unwrap());
        let (tables, lengths) = (tables.as_view(), lengths.as_view());
        let sequences = Sequences { tables, width: 20, table_rows: None, lengths, n_splits };
        floats(&gpu().decode_attention(&halves(q), &halves(keys), &halves(&clean), shape, &sequences).unwrap())
    };
    let q = rounded(&mut rng(12), 2 * n_heads * 16);
    for n_splits in [2, 4] {
        let expected = attend(&clean, &q, n_splits);
        // A token that is attended to, together with others of its warp and alone; and one after the last attended token.
        for (sequence, token, is_seen) in [(0, 5, true), (1, 299, true), (1, 0, true), (0, 300, false)] {
            let mut keys = clean.clone();
            put(&mut keys, shape, sequence * 20 + token / BLOCK_TOKENS, token % BLOCK_TOKENS, &[f32::NAN; 16]);
            let found = attend(&keys, &q, n_splits);
            let (own, other) = (sequence * n_heads * 16, (1 - sequence) * n_heads * 16);
            assert_eq!(found[other..][..32], expected[other..][..32], "the other sequence, token {token}");
            match is_seen {
                true => {
                    assert!(found[own..][..32].iter().all(|x| x.is_nan()), "token {token} of {sequence}: {found:?}")
                }
                false => assert_eq!(found, expected),
            }
        }
        let mut of_no_number = q.clone();
        of_no_number[16 + 3] = f32::NAN; // the second head of the first sequence
        let found = attend(&clean, &of_no_number, n_splits);
        assert!(found[16..32].iter().all(|x| x.is_nan()), "{found:?}");
        assert_eq!((&found[..16], &found[32..]), (&expected[..16], &expected[32..]));
    }
}

#[test]
fn a_sequence_in_one_part_keeps_nan() {
    let shape = CacheShape { n_blocks: 1, n_kv_heads: 1, head_dim: 8 };
    let cache = halves(&rounded(&mut rng(13), shape.len()));
    let (table, lengths) = (gpu().upload(&[0u32, 0]).unwrap(), gpu().upload(&[1u32, 0]).unwrap());
    let (tables, lengths) = (table.as_view(), lengths.as_view());
    let sequences = Sequences { tables, width: 1, table_rows: None, lengths, n_splits: 1 };
    let found = gpu().decode_attention(&halves(&[f32::NAN; 16]), &cache, &cache, shape, &sequences).unwrap();
    let found = floats(&found);
    assert!(found[..8].iter().all(|x| x.is_nan()) && found[8..] == [0.0; 8], "who sees nothing gets zeros: {found:?}");
}

#[test]
fn rows_of_one_sequence_share_its_line() {
    let shape = CacheShape { n_blocks: 40, n_kv_heads: 2, head_dim: 16 };
    let cache = halves(&rounded(&mut rng(7), shape.len()));
    let q = rounded(&mut rng(8), 5 * 4 * 16);
    let tables: Vec<u32> = (0..40).map(|block| block * 7 % 40).collect();
    let (lines, lengths) = ([1u32, 1, 0, 1, 0], [3u32, 300, 17, 290, 1]);
    let attend = |tables: &[u32], lines: Option<&[u32]>| {
        let (tables, lengths) = (gpu().upload(tables).unwrap(), gpu().upload(&lengths).unwrap());
        let lines = lines.map(|lines| gpu().upload(lines).unwrap());
        let (tables, lengths) = (tables.as_view(), lengths.as_view());
        let lines = lines.as_ref().map(|lines| lines.as_view());
        let sequences = Sequences { tables, width: 20, table_rows: lines, lengths, n_splits: 2 };
        floats(&gpu().decode_attention(&halves(&q), &cache, &cache, shape, &sequences).unwrap())
    };
    let own: Vec<u32> = lines.iter().flat_map(|&line| tables[line as usize * 20..][..20].to_vec()).collect();
    assert_eq!(attend(&tables, Some(&lines)), attend(&own, None));
}

#[test]
fn blocks_are_copied_in_every_layer() {
    let (shape, n_layers) = (CacheShape { n_blocks: 4, n_kv_heads: 1, head_dim: 8 }, 2);
    let [keys, values] = [1, 2].map(|seed| rounded(&mut rng(seed), n_layers * shape.len()));
    let (mut on_gpu, copies) = ([halves(&keys), halves(&values)], gpu().upload(&[0u32, 3, 2, 1, 1, 9]).unwrap());
    let [of_keys, of_values] = &mut on_gpu;
    gpu().copy_blocks(of_keys, of_values, &copies, shape, n_layers).unwrap();
    for (found, expected) in on_gpu.iter().zip([keys, values]) {
        let (found, size) = (floats(found), 128);
        for layer in 0..n_layers {
            let block = |values: &[f32], index: usize| values[(layer * 4 + index) * size..][..size].to_vec();
            for (index, from) in [0, 2, 2, 0].into_iter().enumerate() {
                assert_eq!(block(&found, index), block(&expected, from), "layer {layer}, block {index}");
            }
        }
    }
}

#[test]
fn rows_that_are_taken_together_get_what_they_get_alone() {
    let shape = CacheShape { n_blocks: 90, n_kv_heads: 2, head_dim: 16 };
    let (cache, mut rng) = (halves(&rounded(&mut rng(9), shape.len())), rng(10));
    let (n, n_heads, width) = (42, 8, 20);
    let q = rounded(&mut rng, n * n_heads * 16);
    // The first blocks are shared by all sequences, later ones by some, the last one by none.
    let block = |line: u32, index: u32| match index {
        0..4 => index,
        4..8 => 4 + (line / 3) * 4 + index,
        _ => (line * 13 + index * 7) % 90,
    };
    let tables: Vec<u32> = (0..14).flat_map(|line| (0..width as u32).map(move |index| block(line, index))).collect();
    let lines: Vec<u32> = (0..n as u32).map(|row| row / 3).collect();
    let lengths: Vec<u32> = (0..n).map(|row| [0, 5, 64, 65, 130, 256, 290, 320][row % 8]).collect();
    let attend = |rows: std::ops::Range<usize>| {
        let queries = halves(&q[rows.start * n_heads * 16..rows.end * n_heads * 16]);
        let tables = gpu().upload(&tables).unwrap();
        let [lines, lengths] = [&lines, &lengths].map(|list| gpu().upload(&list[rows.clone()]).unwrap());
        let (tables, lines, lengths) = (tables.as_view(), Some(lines.as_view()), lengths.as_view());
        let sequences = Sequences { tables, width, table_rows: lines, lengths, n_splits: 2 };
        floats(&gpu().decode_attention(&queries, &cache, &cache, shape, &sequences).unwrap())
    };
    let alone: Vec<f32> = (0..n).flat_map(|row| attend(row..row + 1)).collect();
    assert!(attend(0..n) == alone);
}

/// LoRA B, DoRA's factor and bias in CPU memory.
struct HostEpilogue {
    n_out: usize,
    rank: usize,
    first: usize,
    b: Vec<f32>,
    bias: Vec<f32>,
    factor: Vec<f32>,
}

const SCALE: f32 = 1.5;

impl HostEpilogue {
    fn new(seed: u64, n_out: usize, rank: usize, first: usize) -> Self {
        let mut rng = rng(seed);
        let (b, bias) = (rounded(&mut rng, n_out * rank), random(&mut rng, n_out));
        let factor = random(&mut rng, n_out).into_iter().map(|x| 1.0 + 0.1 * x).collect();
        Self { n_out, rank, first, b, bias, factor }
    }

    /// `(y + scale * B lora_a_out) * factor + bias`.
    fn apply(&self, y: &[f32], lora_a_out: &[f32], width: usize) -> Vec<f32> {
        let row = |(y, lora_a_out): (&[f32], &[f32])| -> Vec<f32> {
            let own = &lora_a_out[self.first..self.first + self.rank];
            let lora = |out: usize| -> f32 {
                self.b[out * self.rank..(out + 1) * self.rank].iter().zip(own).map(|(b, x)| b * x).sum()
            };
            (0..self.n_out).map(|out| (y[out] + SCALE * lora(out)) * self.factor[out] + self.bias[out]).collect()
        };
        y.chunks_exact(self.n_out).zip(lora_a_out.chunks_exact(width)).flat_map(row).collect()
    }
}

/// The table of some epilogues, with the memory that it points to.
struct DeviceEpilogues {
    table: CudaSlice<Epilogue>,
    _memory: Vec<(LoraB, CudaSlice<f32>, CudaSlice<f32>)>,
}

impl DeviceEpilogues {
    fn new(epilogues: &[&HostEpilogue]) -> Self {
        let upload = |host: &&HostEpilogue| {
            let lora_b = LoraB { b: halves(&host.b), rank: host.rank, first: host.first, scale: SCALE };
            (lora_b, gpu().upload(&host.bias).unwrap(), gpu().upload(&host.factor).unwrap())
        };
        let memory: Vec<_> = epilogues.iter().map(upload).collect();
        let entry = |(host, (lora_b, bias, factor)): (&&HostEpilogue, &(LoraB, CudaSlice<f32>, CudaSlice<f32>))| {
            // SAFETY: the table and what it points to are dropped together.
            unsafe { Epilogue::new(gpu(), host.n_out, Some(lora_b), Some(bias), Some(factor)) }.unwrap()
        };
        let table: Vec<Epilogue> = epilogues.iter().zip(&memory).map(entry).collect();
        Self { table: gpu().upload(&table).unwrap(), _memory: memory }
    }
}

#[test]
fn epilogues_of_gate_and_up_are_multiplied_and_others_added() {
    for (n, n_out, ranks) in [(1, 40, [3, 3]), (9, 300, [8, 16]), (17, 64, [8, 8])] {
        let (gate, up) = (HostEpilogue::new(1, n_out, ranks[0], 0), HostEpilogue::new(2, n_out, ranks[1], ranks[0]));
        let (width, mut rng) = (ranks[0] + ranks[1], rng(3));
        let (of_gate, of_up) = (rounded(&mut rng, n * n_out), rounded(&mut rng, n * n_out));
        let lora_a_out = rounded(&mut rng, n * width);
        let (on_gpu, parts) = (halves(&lora_a_out), DeviceEpilogues::new(&[&gate, &up]));
        let rows = || LoraAOut { values: on_gpu.as_view(), width };
        let finished = [gate.apply(&of_gate, &lora_a_out, width), up.apply(&of_up, &lora_a_out, width)];
        let silu = |x: f32| x / (1.0 + (-x).exp());
        let expected: Vec<f32> = finished[0].iter().zip(&finished[1]).map(|(gate, up)| silu(*gate) * up).collect();
        let found = || {
            let (mut gate, mut up) = (halves(&of_gate), halves(&of_up));
            gpu().finish_gated(&mut gate.as_view_mut(), &up.as_view_mut(), &rows(), &parts.table, n).unwrap();
            floats(&gate)
        };
        assert_close("finish_gated", &found(), &expected, 1.0 / 256.0, 1e-5);
        assert_repeatable("finish_gated", found);

        let before = random(&mut rng, n * n_out);
        let alone = DeviceEpilogues::new(&[&up]);
        let mut sum = gpu().upload(&before).unwrap();
        gpu().finish_added(&mut sum, &halves(&of_up), &rows(), &alone.table, n).unwrap();
        let expected: Vec<f32> = finished[1].iter().zip(&before).map(|(y, x)| y + x).collect();
        assert_close("finish_added", &gpu().download(&sum).unwrap(), &expected, 1e-5, 1e-5);
    }
}

/// Per-head norm, if there is one, and RoPE.
fn norm_rope(
    x: &[f32],
    norm: Option<&[f32]>,
    head_dim: usize,
    n_heads: usize,
    positions: &[u32],
    table: &RopeTable,
) -> Vec<f32> {
    let half = head_dim / 2;
    let head = |(index, head): (usize, &[f32])| -> Vec<f32> {
        let mean = head.iter().map(|x| x * x).sum::<f32>() / head_dim as f32;
        let rms_norm: Vec<f32> = match norm {
            Some(weight) => head.iter().zip(weight).map(|(x, w)| x / (mean + 1e-6).sqrt() * w).collect(),
            None => head.to_vec(),
        };
        let (cos, sin) = table.angles(positions[index / n_heads] as usize);
        let first = (0..half).map(|i| rms_norm[i] * cos[i] - rms_norm[i + half] * sin[i]);
        let second = (0..half).map(|i| rms_norm[i + half] * cos[i] + rms_norm[i] * sin[i]);
        first.chain(second).collect()
    };
    x.chunks_exact(head_dim).enumerate().flat_map(head).collect()
}

#[test]
fn heads_get_lora_norm_and_rope_and_are_stored() {
    for (n, n_heads, n_kv_heads, head_dim, has_norm) in
        [(1, 2, 1, 8, false), (19, 6, 2, 64, true), (16, 3, 3, 128, false)]
    {
        let shape = CacheShape { n_blocks: 3, n_kv_heads, head_dim };
        let widths = [n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim];
        let hosts = [0, 1, 2].map(|i| HostEpilogue::new(i as u64, widths[i], 8, 8 * i));
        let (width, mut rng) = (24, rng(4));
        let raw = widths.map(|width| rounded(&mut rng, n * width));
        let lora_a_out = rounded(&mut rng, n * width);
        let norms = [(); 2].map(|()| random(&mut rng, head_dim));
        let positions: Vec<u32> = (0..n as u32).map(|row| row * 3 % 40).collect();
        let slots: Vec<u32> = (0..n as u32).map(|row| if row == 2 { u32::MAX } else { row * 5 % 48 }).collect();
        let table = RopeTable::new(40, head_dim, 10_000.0);
        let rope = DeviceRope::new(gpu(), &table).unwrap();
        let epilogues = DeviceEpilogues::new(&[&hosts[0], &hosts[1], &hosts[2]]);
        let [mut q, mut k, mut v] = [&raw[0], &raw[1], &raw[2]].map(|values| halves(values));
        let [mut keys, mut values] = [(); 2].map(|()| halves(&vec![0.0; shape.len()]));
        let weights = norms.each_ref().map(|norm| gpu().upload(norm).unwrap());
        let head_norms = HeadNorms { weights: has_norm.then_some(weights.each_ref()), eps: 1e-6 };
        let (positions_at, slots_at) = (gpu().upload(&positions).unwrap(), gpu().upload(&slots).unwrap());
        let on_gpu = halves(&lora_a_out);
        gpu()
            .finish_heads(
                [&mut q.as_view_mut(), &mut k.as_view_mut(), &mut v.as_view_mut()],
                &LoraAOut { values: on_gpu.as_view(), width },
                &epilogues.table,
                &head_norms,
                (&rope, &positions_at.as_view()),
                &slots_at.as_view(),
                [&mut keys.as_view_mut(), &mut values.as_view_mut()],
                shape,
            )
            .unwrap();
        let finished: Vec<Vec<f32>> =
            hosts.iter().zip(&raw).map(|(host, y)| host.apply(y, &lora_a_out, width)).collect();
        let norm = |i: usize| has_norm.then_some(norms[i].as_slice());
        let queries = norm_rope(&finished[0], norm(0), head_dim, n_heads, &positions, &table);
        assert_close("queries", &floats(&q), &queries, 1.0 / 256.0, 1e-4);
        let expected =
            [norm_rope(&finished[1], norm(1), head_dim, n_kv_heads, &positions, &table), finished[2].clone()];
        for (found, expected) in [&keys, &values].into_iter().zip(expected) {
            let mut stored = vec![0f32; shape.len()];
            for (row, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot != u32::MAX) {
                let (block, token) = (slot as usize / BLOCK_TOKENS, slot as usize % BLOCK_TOKENS);
                for head in 0..n_kv_heads {
                    let to = ((block * n_kv_heads + head) * BLOCK_TOKENS + token) * head_dim;
                    let from = (row * n_kv_heads + head) * head_dim;
                    stored[to..to + head_dim].copy_from_slice(&expected[from..from + head_dim]);
                }
            }
            assert_close("keys and values", &floats(found), &stored, 1.0 / 256.0, 1e-4);
        }
    }
}
