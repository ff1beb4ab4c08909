//! Compares attention with a version composed of candle's operations, with a full mask.

use super::{Node, Queries, RowTree, attention, attention_forward};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const DIM: usize = 8;

/// Adds a node with up to three children, `levels` deep.
fn grow(nodes: &mut Vec<Node>, parent: Option<usize>, levels: usize, rng: &mut ChaCha8Rng) {
    let before = parent.map_or(0, |parent: usize| nodes[parent].depth + nodes[parent].len);
    let start = nodes.last().map_or(0, |node| node.start + node.len);
    let len = if rng.random_bool(0.3) { rng.random_range(1..4) } else { rng.random_range(4..90) };
    let index = nodes.len();
    nodes.push(Node { start, len, end: 0, depth: before, parent });
    for _ in 0..if levels == 0 { 0 } else { rng.random_range(0..4) } {
        grow(nodes, Some(index), levels - 1, rng);
    }
    nodes[index].end = nodes.last().map_or(0, |node| node.start + node.len);
}

fn random_tree(seed: u64) -> RowTree {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut nodes = Vec::new();
    for _ in 0..2 {
        grow(&mut nodes, None, 3, &mut rng);
    }
    RowTree::new(nodes)
}

/// Additive mask `(queries, N)`: 0 where a row attends to another one, a large negative number elsewhere.
fn mask(tree: &RowTree, queries: &[u32], window: Option<usize>) -> Tensor {
    let n = tree.n_rows();
    let node_of = |row: usize| tree.nodes().iter().rposition(|node| node.start <= row).unwrap();
    let mut mask = vec![-1e30f32; queries.len() * n];
    for (line, &query) in queries.iter().enumerate() {
        let mut next = Some(node_of(query as usize));
        let own = tree.nodes()[node_of(query as usize)];
        let position = own.depth + query as usize - own.start;
        while let Some(node) = next.map(|index| tree.nodes()[index]) {
            for key in node.start..(node.start + node.len).min(query as usize + 1) {
                let distance = position - (node.depth + key - node.start);
                if window.is_none_or(|window| distance < window) {
                    mask[line * n + key] = 0.0;
                }
            }
            next = node.parent;
        }
    }
    Tensor::from_vec(mask, (queries.len(), n), &Device::Cpu).unwrap()
}

fn composed(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let split = |x: &Tensor, n_heads: usize| x.reshape((x.dim(0)?, n_heads, DIM))?.transpose(0, 1)?.contiguous();
    let repeat = |x: Tensor| -> Result<Tensor> {
        let n = x.dim(1)?;
        x.unsqueeze(1)?.broadcast_as((KV_HEADS, HEADS / KV_HEADS, n, DIM))?.contiguous()?.reshape((HEADS, n, DIM))
    };
    let (q, k, v) = (split(q, HEADS)?, repeat(split(k, KV_HEADS)?)?, repeat(split(v, KV_HEADS)?)?);
    let scores = (q.matmul(&k.t()?)? / (DIM as f64).sqrt())?.broadcast_add(mask)?;
    let p = candle_nn::ops::softmax(&scores, D::Minus1)?;
    let n = q.dim(1)?;
    p.matmul(&v)?.transpose(0, 1)?.contiguous()?.reshape((n, HEADS * DIM))
}

fn worst(a: &Tensor, b: &Tensor) -> f32 {
    let largest = b.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    // With a window of one position, the gradients of queries and keys are 0 up to the rounding of terms of about 1.
    let scale = if largest < 1e-4 { 1.0 } else { largest };
    (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap() / scale
}

fn check(tree: &RowTree, rows: &[u32], queries: &Queries, seed: u64) {
    check_window(tree, rows, queries, None, seed);
}

fn check_window(tree: &RowTree, rows: &[u32], queries: &Queries, window: Option<usize>, seed: u64) {
    let queries = &queries.with_window(window);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut random = |n: usize, width: usize| {
        let values: Vec<f32> = (0..n * width).map(|_| rng.random_range(-2.0..2.0)).collect();
        Var::from_vec(values, (n, width), &Device::Cpu).unwrap()
    };
    let n = tree.n_rows();
    let (q, k, v) = (random(rows.len(), HEADS * DIM), random(n, KV_HEADS * DIM), random(n, KV_HEADS * DIM));
    let weights = random(rows.len(), HEADS * DIM);
    let out = attention(&q, &k, &v, queries, DIM).unwrap();
    let expected = composed(&q, &k, &v, &mask(tree, rows, window)).unwrap();
    assert!(worst(&out, &expected) < 1e-5, "values are off by {}", worst(&out, &expected));
    let gradients = |out: &Tensor| (out * weights.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
    let (found, expected) = (gradients(&out), gradients(&expected));
    for (name, var) in [("q", &q), ("k", &k), ("v", &v)] {
        let off = worst(found.get(var).unwrap(), expected.get(var).unwrap());
        assert!(off < 1e-5, "the gradient of {name} is off by {off}");
    }
}

#[test]
fn every_row_sees_its_ancestors_and_itself_and_gives_them_their_gradients() {
    for seed in 0..4 {
        let tree = random_tree(seed);
        let rows: Vec<u32> = (0..tree.n_rows() as u32).collect();
        check(&tree, &rows, &Queries::all(&tree), seed);
    }
}

#[test]
fn some_rows_are_queries() {
    for seed in 0..4 {
        let tree = random_tree(seed);
        let rows: Vec<u32> = (0..tree.n_rows() as u32).filter(|row| row % 7 == 3 || row % 50 > 40).collect();
        check(&tree, &rows, &Queries::some(&tree, &rows).unwrap(), seed);
    }
}

#[test]
fn long_sequences_are_cut_into_blocks() {
    let tree = RowTree::new(vec![
        Node { start: 0, len: 900, end: 1300, depth: 0, parent: None },
        Node { start: 900, len: 350, end: 1250, depth: 900, parent: Some(0) },
        Node { start: 1250, len: 50, end: 1300, depth: 900, parent: Some(0) },
    ]);
    let rows: Vec<u32> = (0..tree.n_rows() as u32).collect();
    check(&tree, &rows, &Queries::all(&tree), 7);
    check_window(&tree, &rows, &Queries::all(&tree), Some(130), 8);
}

#[test]
fn a_row_with_a_window_sees_the_last_positions_of_its_sequence() {
    for (seed, window) in [(0, 1), (1, 3), (2, 20), (3, 70)] {
        let tree = random_tree(seed);
        let rows: Vec<u32> = (0..tree.n_rows() as u32).collect();
        check_window(&tree, &rows, &Queries::all(&tree), Some(window), seed);
        let rows: Vec<u32> = rows.into_iter().filter(|row| row % 7 == 3 || row % 50 > 40).collect();
        check_window(&tree, &rows, &Queries::some(&tree, &rows).unwrap(), Some(window), seed);
    }
}

#[test]
fn a_window_that_holds_every_position_changes_no_bit() {
    let tree = random_tree(2);
    let longest = tree.nodes().iter().map(|node| node.depth + node.len).max().unwrap();
    let all = Queries::all(&tree);
    let values = |width: usize| (0..tree.n_rows() * width).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
    let (q, k): (Vec<f32>, Vec<f32>) = (values(HEADS * DIM), values(KV_HEADS * DIM));
    let run = |window| attention_forward(&all.with_window(window), DIM, [&q, &k, &k]).unwrap().0;
    assert_eq!(run(Some(longest)), run(None));
    assert_ne!(run(Some(longest - 1)), run(None));
}

#[test]
fn rows_of_queries_must_rise_and_be_there() {
    let tree = random_tree(0);
    assert!(Queries::some(&tree, &[3, 2]).is_err());
    assert!(Queries::some(&tree, &[tree.n_rows() as u32]).is_err());
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let tree = random_tree(3);
    let n = tree.n_rows();
    let values = |width: usize, offset: usize| {
        let values: Vec<f32> = (0..n * width).map(|i| ((i * 7919 + offset) % 1000) as f32 / 500.0 - 1.0).collect();
        Var::from_vec(values, (n, width), &Device::Cpu).unwrap()
    };
    let (q, k, v) = (values(HEADS * DIM, 1), values(KV_HEADS * DIM, 2), values(KV_HEADS * DIM, 3));
    let run = |n_threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        pool.install(|| {
            let out = attention(&q, &k, &v, &Queries::all(&tree), DIM).unwrap();
            let gradients = out.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            let bits = |tensor: &Tensor| -> Vec<u32> {
                let values: Vec<f32> = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
                values.into_iter().map(f32::to_bits).collect()
            };
            [
                bits(&out),
                bits(gradients.get(&q).unwrap()),
                bits(gradients.get(&k).unwrap()),
                bits(gradients.get(&v).unwrap()),
            ]
        })
    };
    assert_eq!(run(1), run(3));
}
