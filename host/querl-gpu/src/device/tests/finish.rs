use super::super::{BLOCK_TOKENS, CacheShape, Change, DeviceRope, FinishRows, HeadNorms, Member};
use super::*;
use querl_model::kernels::RopeTable;

/// What follows a product, on the host.
struct Part {
    n_out: usize,
    rank: usize,
    first: usize,
    b: Vec<f32>,
    bias: Vec<f32>,
    factor: Vec<f32>,
}

const SCALE: f32 = 1.5;

impl Part {
    fn new(seed: u64, n_out: usize, rank: usize, first: usize) -> Self {
        let mut rng = rng(seed);
        let (b, bias) = (rounded(&mut rng, n_out * rank), random(&mut rng, n_out));
        let factor = random(&mut rng, n_out).into_iter().map(|x| 1.0 + 0.1 * x).collect();
        Self { n_out, rank, first, b, bias, factor }
    }

    /// `(y + scale * B low) * factor + bias`.
    fn finished(&self, y: &[f32], low: &[f32], low_width: usize) -> Vec<f32> {
        let row = |(y, low): (&[f32], &[f32])| -> Vec<f32> {
            let own = &low[self.first..self.first + self.rank];
            let change = |out: usize| -> f32 {
                self.b[out * self.rank..(out + 1) * self.rank].iter().zip(own).map(|(b, x)| b * x).sum()
            };
            (0..self.n_out).map(|out| (y[out] + SCALE * change(out)) * self.factor[out] + self.bias[out]).collect()
        };
        y.chunks_exact(self.n_out).zip(low.chunks_exact(low_width)).flat_map(row).collect()
    }
}

/// Parts on the card, with what their table names.
struct Parts {
    table: CudaSlice<Member>,
    _kept: Vec<(CudaSlice<bf16>, CudaSlice<f32>, CudaSlice<f32>)>,
}

impl Parts {
    fn new(parts: &[&Part]) -> Self {
        let upload =
            |part: &&Part| (halves(&part.b), gpu().upload(&part.bias).unwrap(), gpu().upload(&part.factor).unwrap());
        let kept: Vec<_> = parts.iter().map(upload).collect();
        let members: Vec<Member> = parts
            .iter()
            .zip(&kept)
            .map(|(part, (b, bias, factor))| {
                let change = Change { b, rank: part.rank, first: part.first, scale: SCALE };
                // SAFETY: what it names is kept beside the table.
                unsafe { Member::new(gpu(), part.n_out, Some(&change), Some(bias), Some(factor)) }.unwrap()
            })
            .collect();
        Self { table: gpu().upload(&members).unwrap(), _kept: kept }
    }
}

#[test]
fn gate_and_up_are_finished_and_multiplied_and_others_added() {
    for (n, n_out, ranks) in [(1, 40, [3, 3]), (9, 300, [8, 16]), (17, 64, [8, 8])] {
        let (gate, up) = (Part::new(1, n_out, ranks[0], 0), Part::new(2, n_out, ranks[1], ranks[0]));
        let (low_width, mut rng) = (ranks[0] + ranks[1], rng(3));
        let (of_gate, of_up) = (rounded(&mut rng, n * n_out), rounded(&mut rng, n * n_out));
        let low = rounded(&mut rng, n * low_width);
        let (low_on_card, parts) = (halves(&low), Parts::new(&[&gate, &up]));
        let rows = || FinishRows { low: low_on_card.as_view(), low_width };
        let finished = [gate.finished(&of_gate, &low, low_width), up.finished(&of_up, &low, low_width)];
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
        let alone = Parts::new(&[&up]);
        let mut sum = gpu().upload(&before).unwrap();
        gpu().finish_added(&mut sum, &halves(&of_up), &rows(), &alone.table, n).unwrap();
        let expected: Vec<f32> = finished[1].iter().zip(&before).map(|(y, x)| y + x).collect();
        assert_close("finish_added", &gpu().download(&sum).unwrap(), &expected, 1e-5, 1e-5);
    }
}

/// Each head normed, where there is a norm, and turned by its row's position.
fn turned(
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
        let normed: Vec<f32> = match norm {
            Some(weight) => head.iter().zip(weight).map(|(x, w)| x / (mean + 1e-6).sqrt() * w).collect(),
            None => head.to_vec(),
        };
        let (cos, sin) = table.angles(positions[index / n_heads] as usize);
        let first = (0..half).map(|i| normed[i] * cos[i] - normed[i + half] * sin[i]);
        let second = (0..half).map(|i| normed[i + half] * cos[i] + normed[i] * sin[i]);
        first.chain(second).collect()
    };
    x.chunks_exact(head_dim).enumerate().flat_map(head).collect()
}

#[test]
fn heads_are_finished_turned_and_stored() {
    for (n, n_heads, n_kv_heads, head_dim, has_norm) in
        [(1, 2, 1, 8, false), (19, 6, 2, 64, true), (16, 3, 3, 128, false)]
    {
        let shape = CacheShape { n_blocks: 3, n_kv_heads, head_dim };
        let widths = [n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim];
        let parts = [0, 1, 2].map(|i| Part::new(i as u64, widths[i], 8, 8 * i));
        let (low_width, mut rng) = (24, rng(4));
        let raw = widths.map(|width| rounded(&mut rng, n * width));
        let low = rounded(&mut rng, n * low_width);
        let norms = [(); 2].map(|()| random(&mut rng, head_dim));
        let positions: Vec<u32> = (0..n as u32).map(|row| row * 3 % 40).collect();
        let slots: Vec<u32> = (0..n as u32).map(|row| if row == 2 { u32::MAX } else { row * 5 % 48 }).collect();
        let table = RopeTable::new(40, head_dim, 10_000.0);
        let rope = DeviceRope::new(gpu(), &table).unwrap();
        let on_card = Parts::new(&[&parts[0], &parts[1], &parts[2]]);
        let [mut q, mut k, mut v] = [&raw[0], &raw[1], &raw[2]].map(|values| halves(values));
        let [mut keys, mut values] = [(); 2].map(|()| halves(&vec![0.0; shape.len()]));
        let weights = norms.each_ref().map(|norm| gpu().upload(norm).unwrap());
        let head_norms = HeadNorms { weights: has_norm.then_some(weights.each_ref()), eps: 1e-6 };
        let (positions_at, slots_at) = (gpu().upload(&positions).unwrap(), gpu().upload(&slots).unwrap());
        let low_on_card = halves(&low);
        gpu()
            .finish_heads(
                [&mut q.as_view_mut(), &mut k.as_view_mut(), &mut v.as_view_mut()],
                &FinishRows { low: low_on_card.as_view(), low_width },
                &on_card.table,
                &head_norms,
                (&rope, &positions_at.as_view()),
                &slots_at.as_view(),
                [&mut keys.as_view_mut(), &mut values.as_view_mut()],
                shape,
            )
            .unwrap();
        let finished: Vec<Vec<f32>> =
            parts.iter().zip(&raw).map(|(part, y)| part.finished(y, &low, low_width)).collect();
        let norm = |i: usize| has_norm.then_some(norms[i].as_slice());
        let queries = turned(&finished[0], norm(0), head_dim, n_heads, &positions, &table);
        assert_close("queries", &floats(&q), &queries, 1.0 / 256.0, 1e-4);
        let expected = [turned(&finished[1], norm(1), head_dim, n_kv_heads, &positions, &table), finished[2].clone()];
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
