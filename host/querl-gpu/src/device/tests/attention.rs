use super::super::TreeQueries;
use super::*;
use querl_model::kernels::{self, Node, Queries, RowTree};

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
    let (mut rng, mut nodes) = (rng(seed), Vec::new());
    for _ in 0..2 {
        grow(&mut nodes, None, 2, &mut rng);
    }
    RowTree::new(nodes)
}

#[derive(Clone, Copy)]
struct Shape {
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
}

fn check(tree: &RowTree, wanted: Option<&[u32]>, shape: Shape, seed: u64) {
    let Shape { n_heads, n_kv_heads, head_dim } = shape;
    let (on_device, on_cpu) = match wanted {
        None => (TreeQueries::all(gpu(), tree).unwrap(), Queries::all(tree)),
        Some(rows) => (TreeQueries::some(gpu(), tree, rows).unwrap(), Queries::some(tree, rows).unwrap()),
    };
    let mut rng = rng(seed);
    let (n_rows, n_queries) = (tree.n_rows(), wanted.map_or(tree.n_rows(), <[u32]>::len));
    let (kv, q) = (n_rows * n_kv_heads * head_dim, n_queries * n_heads * head_dim);
    let [q, k, v, grad] = [q, kv, kv, q].map(|n| rounded(&mut rng, n));
    let [q_at, k_at, v_at, grad_at] = [&q, &k, &v, &grad].map(|values| halves(values));

    let (out_at, log_sums_at) = gpu().attend(&on_device, head_dim, &q_at, &k_at, &v_at).unwrap();
    let (out, logsumexp) = kernels::attention_forward(&on_cpu, head_dim, [&q, &k, &v]).unwrap();
    // Probabilities are rounded to bf16 before they are multiplied with the values.
    assert_close("out", &floats(&out_at), &out, 1.0 / 256.0, 1.0 / 256.0);
    let gradients = || {
        gpu().attention_gradients(&on_device, head_dim, &q_at, &k_at, &v_at, &out_at, &log_sums_at, &grad_at).unwrap()
    };
    let found = gradients();
    let expected = kernels::attention_backward(&on_cpu, head_dim, [&q, &k, &v], &out, &logsumexp, &grad).unwrap();
    for (what, (found, expected)) in ["dq", "dk", "dv"].iter().zip(found.iter().zip(&expected)) {
        assert_close(what, &floats(found), expected, 1.0 / 128.0, 1.0 / 128.0);
    }
    assert_repeatable("gradients", || gradients().iter().flat_map(floats).collect());
}

#[test]
fn attention_over_random_trees_is_that_of_the_cpu() {
    let shape = Shape { n_heads: 2, n_kv_heads: 1, head_dim: 16 };
    for seed in 0..4 {
        check(&random_tree(seed), None, shape, seed);
    }
}

#[test]
fn heads_of_every_width_and_group_attend_as_on_the_cpu() {
    let tree = RowTree::separate(&[70, 1, 30]);
    for (n_heads, n_kv_heads, head_dim) in
        [(1, 1, 8), (3, 1, 6), (4, 2, 64), (7, 1, 32), (2, 2, 80), (2, 1, 96), (2, 1, 128), (1, 1, 5)]
    {
        check(&tree, None, Shape { n_heads, n_kv_heads, head_dim }, head_dim as u64);
    }
}

#[test]
fn wanted_queries_attend_as_on_the_cpu() {
    let shape = Shape { n_heads: 4, n_kv_heads: 2, head_dim: 32 };
    for seed in 0..3 {
        let (tree, mut rng) = (random_tree(seed + 10), rng(seed));
        let rows: Vec<u32> = (0..tree.n_rows() as u32).filter(|_| rng.random_bool(0.3)).collect();
        check(&tree, Some(&rows), shape, seed);
        check(&tree, Some(&[tree.n_rows() as u32 - 1]), shape, seed);
    }
}

#[test]
fn a_long_beginning_of_many_sequences_collects_gradients_in_parts() {
    // A common prefix, followed by enough rows that its list of tiles is split.
    let tree = |n: usize| {
        let mut nodes = vec![Node { start: 0, len: 20, end: 20 + n * 50, depth: 0, parent: None }];
        let branch = |start: usize| Node { start, len: 50, end: start + 50, depth: 20, parent: Some(0) };
        nodes.extend((0..n).map(|i| branch(20 + i * 50)));
        RowTree::new(nodes)
    };
    check(&tree(45), None, Shape { n_heads: 1, n_kv_heads: 1, head_dim: 16 }, 1);
    for (n_heads, n_kv_heads, head_dim) in [(3, 1, 64), (2, 2, 80), (2, 1, 128)] {
        check(&tree(9), None, Shape { n_heads, n_kv_heads, head_dim }, 2);
    }
}

#[test]
fn no_rows_are_no_work() {
    let queries = TreeQueries::all(gpu(), &RowTree::default()).unwrap();
    let empty = halves(&[]);
    let (out, logsumexp) = gpu().attend(&queries, 64, &empty, &empty, &empty).unwrap();
    assert_eq!((out.len(), logsumexp.len()), (0, 0));
}

#[test]
fn queries_that_do_not_fit_the_tree_are_refused() {
    let tree = RowTree::separate(&[4]);
    let refused = |rows: &[u32]| TreeQueries::some(gpu(), &tree, rows).err().unwrap().to_string();
    assert!(refused(&[2, 1]).starts_with("attention: the rows of queries do not rise"));
    assert!(refused(&[4]).starts_with("attention: there is no row 4 among 4"));
    let queries = TreeQueries::all(gpu(), &tree).unwrap();
    let wide = halves(&[0.0; 4 * 160]);
    let error = gpu().attend(&queries, 160, &wide, &wide, &wide).unwrap_err().to_string();
    assert!(error.starts_with("attention: heads of 160; the kernels take up to 128"), "{error}");
}

/// Regression: a query that was NaN, or attended to a key that was NaN, gave zeros, as if it attended to nothing.
#[test]
fn nan_stays_nan_where_it_is_attended_to() {
    let (head_dim, lengths) = (16, [70, 30]);
    let on_device = TreeQueries::all(gpu(), &RowTree::separate(&lengths)).unwrap();
    let mut rng = rng(9);
    let [q, k, v] = [(); 3].map(|()| rounded(&mut rng, 100 * head_dim));
    let attend = |q: &[f32], k: &[f32]| {
        let (out, logsumexp) = gpu().attend(&on_device, head_dim, &halves(q), &halves(k), &halves(&v)).unwrap();
        (floats(&out), gpu().download(&logsumexp).unwrap())
    };
    let (expected, _) = attend(&q, &k);
    for (is_key, row, until) in [(true, 0, 70), (true, 65, 70), (true, 99, 100), (false, 64, 65)] {
        let (mut q, mut k) = (q.clone(), k.clone());
        let wrong = if is_key { &mut k } else { &mut q };
        wrong[row * head_dim + 3] = f32::NAN;
        let (found, logsumexp) = attend(&q, &k);
        for at in 0..100 {
            let (own, before) = (&found[at * head_dim..][..head_dim], &expected[at * head_dim..][..head_dim]);
            match (row..until).contains(&at) {
                true => assert!(own.iter().all(|x| x.is_nan()) && logsumexp[at].is_nan(), "row {at} of {row}: {own:?}"),
                false => assert_eq!(own, before, "row {at}, which does not see {row}"),
            }
        }
    }
}
