//! Operations with a backward pass, as training calls them: forward, and forward and backward through the graph, with the sums
//! and clearings of gradients that the graph adds.

use super::kernels::numbers;
use super::{Kernel, ModelShape, Work};
use candle_core::{Device, Tensor, Var};
use querl_core::config::BaseDtype;
use querl_model::kernels::{
    FrozenWeight, Queries, RopeTable, RowTree, Weight, attention, lora_linear, norm_rope, rms_norm, swiglu,
    token_logprobs, trained_linear,
};
use std::rc::Rc;
use std::sync::Arc;

const RANK: usize = 16;
const TOKENS_PER_SEQUENCE: usize = 128;

fn var(rows: usize, cols: usize) -> Var {
    Var::from_vec(numbers(rows * cols), (rows, cols), &Device::Cpu).unwrap()
}

fn frozen(rows: usize, cols: usize) -> FrozenWeight {
    FrozenWeight::pack(&var(rows, cols), BaseDtype::F32).unwrap()
}

/// Number of multiplications and additions, and bytes, of an operation's forward pass, and of forward and backward pass.
struct Cost {
    forward: [f64; 2],
    both: [f64; 2],
}

/// Calls `measure` with every operation of a shape whose name contains `filter`.
pub(crate) fn each(shape: &ModelShape, rows: &[usize], filter: Option<&str>, mut measure: impl FnMut(Kernel)) {
    for &n_rows in rows.iter().filter(|&&n_rows| n_rows >= 128) {
        for (name, make) in OPERATIONS {
            if filter.is_some_and(|filter| !name.contains(filter)) {
                continue;
            }
            let (cost, run) = make(shape, n_rows);
            let run = Rc::new(run);
            let forward = run.clone();
            let kernel = |name: String, [operations, bytes]: [f64; 2], run: Box<dyn FnMut()>| Kernel {
                name,
                n_rows,
                work: Work { operations, bytes },
                run,
                reference: None,
            };
            measure(kernel(name.into(), cost.forward, Box::new(move || drop(forward()))));
            let both = move || drop(run().sum_all().unwrap().backward().unwrap());
            measure(kernel(format!("{name}, both ways"), cost.both, Box::new(both)));
        }
    }
}

type Operation = (Cost, Box<dyn Fn() -> Tensor>);

type Make = fn(&ModelShape, usize) -> Operation;

const OPERATIONS: [(&str, Make); 7] = [
    ("lora_linear gate", lora),
    ("trained_linear gate", trained),
    ("rms_norm", norm),
    ("norm_rope queries", heads),
    ("swiglu", activation),
    ("attention", attended),
    ("token_logprobs", logprobs),
];

fn lora(shape: &ModelShape, n: usize) -> Operation {
    let (n_in, n_out) = (shape.hidden, shape.intermediate);
    let (x, w, a, b) = (var(n, n_in), frozen(n_out, n_in), var(RANK, n_in), var(n_out, RANK));
    let (base, low) = ((2 * n * n_in * n_out) as f64, (2 * n * RANK * (n_in + n_out)) as f64);
    let bytes = (4 * (n * n_in + n * n_out + n_in * n_out)) as f64;
    let cost = Cost { forward: [base + low, bytes], both: [2.0 * base + 3.0 * low, 2.0 * bytes] };
    (cost, Box::new(move || lora_linear(&x, &w, None, &a, &b, 2.0).unwrap()))
}

fn trained(shape: &ModelShape, n: usize) -> Operation {
    let (n_in, n_out) = (shape.hidden, shape.intermediate);
    let (x, w) = (var(n, n_in), var(n_out, n_in));
    let (base, bytes) = ((2 * n * n_in * n_out) as f64, (4 * (n * n_in + n * n_out + n_in * n_out)) as f64);
    let cost = Cost { forward: [base, bytes], both: [3.0 * base, 3.0 * bytes] };
    (cost, Box::new(move || trained_linear(&x, &w, None).unwrap()))
}

fn norm(shape: &ModelShape, n: usize) -> Operation {
    let (x, w) = (var(n, shape.hidden), Tensor::ones(shape.hidden, candle_core::DType::F32, &Device::Cpu).unwrap());
    let values = (n * shape.hidden) as f64;
    let cost = Cost { forward: [4.0 * values, 8.0 * values], both: [15.0 * values, 20.0 * values] };
    (cost, Box::new(move || rms_norm(&x, &w, 1e-6).unwrap()))
}

fn heads(shape: &ModelShape, n: usize) -> Operation {
    let (x, dim) = (var(n, shape.hidden), shape.head_dim);
    let w = Tensor::ones(dim, candle_core::DType::F32, &Device::Cpu).unwrap();
    let (table, positions) = (RopeTable::new(n, dim, 1e6), Arc::new((0..n as u32).collect::<Vec<_>>()));
    let values = (n * shape.hidden) as f64;
    let cost = Cost { forward: [7.0 * values, 8.0 * values], both: [21.0 * values, 20.0 * values] };
    (cost, Box::new(move || norm_rope(&x, &w, &table, &positions, 1e-6).unwrap()))
}

fn activation(shape: &ModelShape, n: usize) -> Operation {
    let (gate, up) = (var(n, shape.intermediate), var(n, shape.intermediate));
    let values = (n * shape.intermediate) as f64;
    let cost = Cost { forward: [25.0 * values, 12.0 * values], both: [60.0 * values, 32.0 * values] };
    (cost, Box::new(move || swiglu(&gate, &up).unwrap()))
}

fn attended(shape: &ModelShape, n: usize) -> Operation {
    let (q, k, v) = (var(n, shape.hidden), var(n, shape.kv_width), var(n, shape.kv_width));
    let queries = Queries::all(&RowTree::separate(&vec![TOKENS_PER_SEQUENCE; n / TOKENS_PER_SEQUENCE]));
    let scores = (n * shape.hidden * TOKENS_PER_SEQUENCE) as f64; // causal mask: half of them, in two products
    let bytes = (8 * n * (shape.hidden + shape.kv_width)) as f64;
    let (cost, dim) = (Cost { forward: [2.0 * scores, bytes], both: [7.0 * scores, 3.0 * bytes] }, shape.head_dim);
    (cost, Box::new(move || attention(&q, &k, &v, &queries, dim).unwrap()))
}

fn logprobs(shape: &ModelShape, n: usize) -> Operation {
    let (hidden, head) = (var(n, shape.hidden), frozen(shape.vocabulary, shape.hidden));
    let product = (2 * n * shape.hidden * shape.vocabulary) as f64;
    let bytes = (4 * shape.hidden * (shape.vocabulary + n)) as f64;
    let cost = Cost { forward: [product, bytes], both: [3.0 * product, 3.0 * bytes] };
    let (head, targets) = (Weight::Frozen(head), Arc::new(vec![7u32; n]));
    (cost, Box::new(move || token_logprobs(&hidden, &head, &targets, 1.0).unwrap()))
}
