//! Calls of a training pass.

use crate::{Case, Floor, Sizes};
use candle_core::Result;
use half::bf16;
use querl_cuda::device::{
    AdamTensor, AdamWStep, CudaSlice, DeviceRope, DeviceWeight, DropoutMasks, Gpu, InverseIndex, LoraWeights, Matrix,
    PackedFormat, Projection, Scale, TreeQueries,
};
use querl_model::DecoderConfig;
use querl_model::kernels::{Node, RopeTable, RowTree};

pub(crate) const RANK: usize = 16;

/// Number of tokens per sequence.
const SEQUENCE: usize = 256;

/// Calls `measure` with each case in turn, so that memory is freed in between.
pub(crate) fn each(gpu: &Gpu, sizes: &Sizes, measure: &mut dyn FnMut(Case<'_>)) {
    let forward = [elementwise, rows, norms, rotary, attention, projections, products, logprobs];
    for group in forward.into_iter().chain([optimizer, packed, dropout, columns, random]) {
        if let Err(error) = group(gpu, sizes, measure) {
            println!("| FAILED: {} | | | | |", error.to_string().lines().next().unwrap_or_default());
        }
    }
}

type Measure<'m> = &'m mut dyn FnMut(Case<'_>);

/// A call with the minimum work of its kernels.
pub(crate) fn case<'a>(
    name: impl Into<String>,
    floors: Vec<(&'static str, Floor)>,
    run: impl FnMut() -> Result<()> + 'a,
) -> Case<'a> {
    Case { name: name.into(), run: Box::new(run), floors }
}

pub(crate) fn bytes(kernel: &'static str, n: usize) -> Vec<(&'static str, Floor)> {
    vec![(kernel, Floor::Bytes(n as f64))]
}

/// Normally distributed values in bf16.
pub(crate) fn halves(gpu: &Gpu, n: usize) -> Result<CudaSlice<bf16>> {
    gpu.normal(n, n as u64, 0.5)
}

pub(crate) fn floats(gpu: &Gpu, n: usize) -> Result<CudaSlice<f32>> {
    gpu.to_f32(&halves(gpu, n)?)
}

fn elementwise(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (n_rows, wide) = (sizes.n_rows, sizes.shape.intermediate_size);
    let n = n_rows * sizes.shape.hidden_size;
    let (x, mut sum, half) = (floats(gpu, n)?, floats(gpu, n)?, halves(gpu, n)?);
    measure(case(format!("to_bf16 of {n}"), bytes("to_bf16", 6 * n), || gpu.to_bf16(&x).map(drop)));
    let mut mark = gpu.zeros(1)?;
    measure(case(format!("mark_not_finite of {n}"), bytes("mark_not_finite", 4 * n), || {
        gpu.mark_not_finite(&x, &mut mark)
    }));
    measure(case(format!("to_f32 of {n}"), bytes("to_f32", 6 * n), || gpu.to_f32(&half).map(drop)));
    measure(case(format!("add of {n}"), bytes("add", 12 * n), || gpu.add(&mut sum, &x)));
    drop((x, sum, half));
    let n = n_rows * wide;
    let (gate, up, grad) = (halves(gpu, n)?, halves(gpu, n)?, halves(gpu, n)?);
    measure(case(format!("swiglu of {n}"), bytes("swiglu", 6 * n), || gpu.swiglu(&gate, &up).map(drop)));
    measure(case(format!("swiglu_gradients of {n}"), bytes("swiglu_gradients", 12 * n), || {
        gpu.swiglu_gradients(&gate, &up, &grad).map(drop)
    }));
    Ok(())
}

fn rows(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (n, width, vocabulary) = (sizes.n_rows, sizes.shape.hidden_size, sizes.shape.vocab_size);
    let ids: Vec<u32> = (0..n).map(|row| (row * 7919 % vocabulary) as u32).collect();
    let list: Vec<u32> = (0..n as u32).collect();
    let (table, ids, list) = (halves(gpu, vocabulary * width)?, gpu.upload(&ids)?, gpu.upload(&list)?);
    let (mut all, picked, half) = (floats(gpu, n * width)?, floats(gpu, n * width)?, halves(gpu, n * width)?);
    let size = format!("{n} rows of {width}");
    measure(case(format!("rows: {size}"), bytes("gather_rows", 6 * n * width), || {
        gpu.rows(&table, &ids, width).map(drop)
    }));
    measure(case(format!("pick: {size}"), bytes("pick_f32", 8 * n * width), || gpu.pick(&all, &list, width).map(drop)));
    measure(case(format!("pick: {size}"), bytes("pick_bf16", 4 * n * width), || {
        gpu.pick(&half, &list, width).map(drop)
    }));
    measure(case(format!("add_picked: {size}"), bytes("add_picked", 12 * n * width), || {
        gpu.add_picked(&mut all, &picked, &list, width)
    }));
    let places: Vec<u32> = (0..n).map(|row| (row / 4) as u32).collect();
    let namers = InverseIndex::new(gpu, &places, n.div_ceil(4))?;
    measure(case(format!("sum_rows: {size}, four a sum"), bytes("sum_rows", 5 * n * width), || {
        gpu.sum_rows(&picked, &namers, width).map(drop)
    }));
    Ok(())
}

fn norms(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (n_rows, width) = (sizes.n_rows, sizes.shape.hidden_size);
    let n = n_rows * width;
    let (x, weight, grad, more) = (floats(gpu, n)?, floats(gpu, width)?, floats(gpu, n)?, floats(gpu, n)?);
    let half = halves(gpu, n)?;
    let size = format!("{n_rows} rows of {width}");
    measure(case(format!("rms_norm: {size}"), bytes("rms_norm_f32", 6 * n), || {
        gpu.rms_norm(&x, &weight, 1e-6).map(drop)
    }));
    measure(case(format!("rms_norm: {size}, bf16"), bytes("rms_norm_bf16", 4 * n), || {
        gpu.rms_norm(&half, &weight, 1e-6).map(drop)
    }));
    let mut floors = bytes("rms_norm_gradients", 12 * n);
    floors.extend(bytes("norm_weight_gradient", 8 * n));
    measure(case(format!("rms_norm_gradients: {size}"), floors, || {
        gpu.rms_norm_gradients(&x, &weight, 1e-6, &grad, None, n_rows).map(drop)
    }));
    measure(case(format!("rms_norm_gradients and a sum: {size}"), bytes("rms_norm_gradients", 16 * n), || {
        gpu.rms_norm_gradients(&x, &weight, 1e-6, &grad, Some(&more), 0).map(drop)
    }));
    Ok(())
}

fn rotary(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (n_rows, shape) = (sizes.n_rows, &sizes.shape);
    let rope = DeviceRope::new(gpu, &RopeTable::new(shape.max_positions, shape.head_dim, shape.rope_theta))?;
    let positions: Vec<u32> = (0..n_rows).map(|row| (row % SEQUENCE) as u32).collect();
    let positions = rope.positions(gpu, &positions)?;
    let n = n_rows * shape.n_heads * shape.head_dim;
    let (x, grad, weight) = (halves(gpu, n)?, halves(gpu, n)?, floats(gpu, shape.head_dim)?);
    for norm in [None, Some((&weight.as_view(), 1e-6f32))] {
        let name = |call: &str| format!("{call}: {n} values{}", if norm.is_some() { ", rms_norm" } else { "" });
        measure(case(name("norm_rope"), bytes("norm_rope", 4 * n), || {
            rope.norm_rope(gpu, &x, norm, &positions).map(drop)
        }));
        // Without a norm the gradient is the inverse rotation.
        let floor = if norm.is_some() { bytes("norm_rope_gradients", 6 * n) } else { bytes("norm_rope", 4 * n) };
        measure(case(name("norm_rope_gradients"), floor, || {
            rope.norm_rope_gradients(gpu, &x, norm, &positions, &grad, 0).map(drop)
        }));
    }
    Ok(())
}

/// Separate sequences, and the same number of rows in sequences with a common prefix.
fn attention(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let length = SEQUENCE.min(sizes.n_rows);
    let n = (sizes.n_rows / SEQUENCE).max(1);
    let name = format!("{n} sequences of {length}");
    attention_of(gpu, &sizes.shape, &RowTree::separate(&vec![length; n]), &name, measure)?;
    let (shared, own) = (length * 5 / 8, length - length * 5 / 8);
    let n = (sizes.n_rows - shared) / own;
    let mut nodes = vec![Node { start: 0, len: shared, end: shared + n * own, depth: 0, parent: None }];
    let branch = |start: usize| Node { start, len: own, end: start + own, depth: shared, parent: Some(0) };
    nodes.extend((0..n).map(|i| branch(shared + i * own)));
    let name = format!("{n} sequences of {length} that share {shared}");
    attention_of(gpu, &sizes.shape, &RowTree::new(nodes), &name, measure)
}

fn attention_of(gpu: &Gpu, shape: &DecoderConfig, tree: &RowTree, name: &str, measure: Measure<'_>) -> Result<()> {
    let n_rows = tree.n_rows();
    let queries = TreeQueries::all(gpu, tree)?;
    let (q_width, kv_width) = (shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim);
    let (q, k, v) = (halves(gpu, n_rows * q_width)?, halves(gpu, n_rows * kv_width)?, halves(gpu, n_rows * kv_width)?);
    let grad = halves(gpu, n_rows * q_width)?;
    let (out, logsumexp) = gpu.attend(&queries, shape.head_dim, &q, &k, &v)?;
    let pairs: usize = tree.nodes().iter().map(|node| node.len * node.depth + node.len * (node.len + 1) / 2).sum();
    let work = (pairs * shape.n_heads * shape.head_dim) as f64;
    let size = format!("{name}, heads of {}", shape.head_dim);
    let of_width = |names: [&'static str; 4]| names[(shape.head_dim.div_ceil(32) - 1).min(3)];
    let attend = of_width(["attend_32", "attend_64", "attend_96", "attend_128"]);
    measure(case(format!("attend: {size}"), vec![(attend, Floor::Operations(4.0 * work))], || {
        gpu.attend(&queries, shape.head_dim, &q, &k, &v).map(drop)
    }));
    let of_queries =
        of_width(["query_gradients_32", "query_gradients_64", "query_gradients_96", "query_gradients_128"]);
    let of_keys = of_width(["key_gradients_32", "key_gradients_64", "key_gradients_96", "key_gradients_128"]);
    let mut floors = vec![(of_queries, Floor::Operations(6.0 * work)), (of_keys, Floor::Operations(8.0 * work))];
    floors.extend(bytes("attention_delta", 4 * n_rows * q_width));
    measure(case(format!("attention_gradients: {size}"), floors, || {
        gpu.attention_gradients(&queries, shape.head_dim, &q, &k, &v, &out, &logsumexp, &grad).map(drop)
    }));
    Ok(())
}

/// A layer's widest projection with its adapter; cuBLAS computes the products.
fn projections(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (n, n_in, n_out) = (sizes.n_rows, sizes.shape.hidden_size, sizes.shape.intermediate_size);
    let weight = DeviceWeight::new(halves(gpu, n_out * n_in)?, n_out, n_in)?;
    let (a, b, bias) = (halves(gpu, RANK * n_in)?, halves(gpu, n_out * RANK)?, floats(gpu, n_out)?);
    let (x, mut y) = (halves(gpu, n * n_in)?, floats(gpu, n * n_out)?);
    let lora = || LoraWeights { a: a.as_view(), b: b.as_view(), rank: RANK, scale: 2.0, masks: None };
    let layer = Projection { weight: &weight, bias: Some(bias.as_view()), lora: Some(lora()) };
    let operations = (2 * n * n_in * n_out + 2 * n * RANK * (n_in + n_out)) as f64;
    let size = format!("({n}, {n_in}) to {n_out}, rank {RANK}");
    let mut floors = vec![("product", Floor::Operations(operations))];
    floors.extend(bytes("repeat_row_bf16", 2 * n * n_out));
    measure(case(format!("projection: {size}"), floors, || layer.forward(gpu, &x).map(drop)));
    let mut floors = vec![("product", Floor::Operations(operations))];
    floors.extend(bytes("add_row", 8 * n * n_out));
    measure(case(format!("projection, added: {size}"), floors, || layer.add_to(gpu, &x, &mut y).map(drop)));
    Ok(())
}

/// Products of the frozen weights: limited by compute with many rows, by memory bandwidth with few.
fn products(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (hidden, wide) = (sizes.shape.hidden_size, sizes.shape.intermediate_size);
    let q_width = sizes.shape.n_heads * sizes.shape.head_dim;
    for (name, n_in, n_out) in [("q_proj", hidden, q_width), ("gate_proj", hidden, wide), ("down_proj", wide, hidden)] {
        let weight = halves(gpu, n_out * n_in)?;
        for n in [1, 8, 64, 512, sizes.n_rows] {
            let (x, mut y) = (halves(gpu, n * n_in)?, halves(gpu, n * n_out)?);
            let floor = match n {
                ..=64 => Floor::Bytes((2 * (n_in * n_out + n * (n_in + n_out))) as f64),
                _ => Floor::Operations((2 * n * n_in * n_out) as f64),
            };
            measure(case(format!("{name} of {n} rows"), vec![("product", floor)], || {
                let (x, weight) = (Matrix::of(gpu, &x, n_in)?, Matrix::of(gpu, &weight, n_in)?.t());
                gpu.product(&x, &weight, &mut y, Scale::WRITE)
            }));
        }
    }
    Ok(())
}

fn logprobs(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (width, n_tokens) = (sizes.shape.hidden_size, sizes.shape.vocab_size);
    // Only response rows are needed: an eighth of all rows.
    let n = (sizes.n_rows / 8).max(1);
    let head = DeviceWeight::new(halves(gpu, n_tokens * width)?, n_tokens, width)?;
    let targets: Vec<u32> = (0..n).map(|row| (row * 7919 % n_tokens) as u32).collect();
    let (hidden, targets, grad) = (halves(gpu, n * width)?, gpu.upload(&targets)?, floats(gpu, 2 * n)?);
    let (_, sums) = gpu.token_logprobs(&hidden, &head, &targets, 1.0)?;
    let (logits, operations) = (n * n_tokens, (2 * n * n_tokens * width) as f64);
    let size = format!("{n} rows, {n_tokens} tokens");
    let mut floors = bytes("logprob_part", 4 * logits);
    floors.push(("product", Floor::Operations(operations)));
    measure(case(format!("token_logprobs: {size}"), floors, || {
        gpu.token_logprobs(&hidden, &head, &targets, 1.0).map(drop)
    }));
    let mut floors = bytes("logit_gradients", 6 * logits);
    floors.push(("product", Floor::Operations(2.0 * operations)));
    measure(case(format!("token_logprob_gradients: {size}"), floors, || {
        gpu.token_logprob_gradients(&hidden, &head, &targets, &sums, &grad, None).map(drop)
    }));
    Ok(())
}

/// All adapter tensors of the shape in one launch.
fn optimizer(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (hidden, wide) = (sizes.shape.hidden_size, sizes.shape.intermediate_size);
    let lengths: Vec<usize> = (0..sizes.shape.n_layers).flat_map(|_| [RANK * hidden, RANK * wide].repeat(7)).collect();
    let n: usize = lengths.iter().sum();
    let make = || lengths.iter().map(|&len| gpu.zeros::<f32>(len)).collect::<Result<Vec<_>>>();
    let (values, gradients, first, second) = (make()?, make()?, make()?, make()?);
    let views: Vec<_> = gradients.iter().map(CudaSlice::as_view).collect();
    measure(case(format!("gradient_norm of {n}"), bytes("squared_norm_parts", 4 * n), || {
        gpu.gradient_norm(&views, 1.0, Some(1.0)).map(drop)
    }));
    let step = AdamWStep { step_size: 1e-4, correction: 1.0, beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    measure(case(format!("adamw of {n}"), bytes("adamw", 28 * n), || {
        let tensors = values.iter().zip(&gradients).zip(first.iter().zip(&second));
        let tensor = |((values, gradient), (first, second)): (_, _)| {
            let [values, gradient, first, second] =
                [values, gradient, first, second].map(|values: &CudaSlice<f32>| values.as_view());
            AdamTensor { values, gradient, first, second, decay: 1.0 }
        };
        gpu.adamw(&tensors.map(tensor).collect::<Vec<_>>(), step, None)
    }));
    Ok(())
}

/// Quantized weights: packing, unpacking, and products with few rows without unpacking.
fn packed(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (n_in, n_out) = (sizes.shape.hidden_size, sizes.shape.intermediate_size);
    let (n, values) = (n_in * n_out, halves(gpu, n_in * n_out)?);
    few_rows(gpu, &DeviceWeight::new(gpu.copy(&values)?, n_out, n_in)?, "few_rows_bf16_bf16", measure)?;
    let formats = [
        (PackedFormat::Int8, "pack_int8_bf16", "unpack_int8", "few_rows_int8_bf16"),
        (PackedFormat::Nf4, "pack_nf4_bf16", "unpack_nf4", "few_rows_nf4_bf16"),
        (PackedFormat::Fp8, "pack_fp8_bf16", "unpack_fp8", "few_rows_fp8_bf16"),
    ];
    for (format, pack, unpack, few) in formats {
        let weight = DeviceWeight::packed(gpu, &values, (n_out, n_in), format)?;
        let floor = 2 * n + weight.memory_bytes();
        measure(case(format!("packed: ({n_out}, {n_in}) as {format:?}"), bytes(pack, floor), || {
            DeviceWeight::packed(gpu, &values, (n_out, n_in), format).map(drop)
        }));
        measure(case(format!("widened: ({n_out}, {n_in}) of {format:?}"), bytes(unpack, floor), || {
            weight.to_f32(gpu).map(drop)
        }));
        few_rows(gpu, &weight, few, measure)?;
    }
    Ok(())
}

fn few_rows(gpu: &Gpu, weight: &DeviceWeight, kernel: &'static str, measure: Measure<'_>) -> Result<()> {
    let (n_out, n_in) = weight.dims();
    for n in [1, 8, 16, 32, 48, 64] {
        let (x, mut y) = (halves(gpu, n * n_in)?, halves(gpu, n * n_out)?);
        let floor = Floor::Bytes((weight.memory_bytes() + 2 * n * (n_in + n_out)) as f64);
        let floors = vec![(kernel, floor), ("product", floor)];
        measure(case(format!("multiply: {n} rows, ({n_out}, {n_in})"), floors, || {
            weight.multiply(gpu, &Matrix::of(gpu, &x, n_in)?, &mut y, Scale::WRITE)
        }));
    }
    Ok(())
}

fn dropout(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (n_rows, width) = (sizes.n_rows, sizes.shape.hidden_size);
    let n = n_rows * width;
    let keys = gpu.upload(&(0..n_rows as u64).collect::<Vec<_>>())?;
    let (x, mut sum) = (halves(gpu, n)?, floats(gpu, n)?);
    let masks = || DropoutMasks { row_keys: &keys, layer_seed: 3, first_input: 0, p: 0.05 };
    measure(case(format!("dropout of {n}"), bytes("drop_bf16", 4 * n), || gpu.dropout(&x, width, masks()).map(drop)));
    measure(case(format!("add_dropout of {n}"), bytes("drop_f32", 10 * n), || {
        gpu.add_dropout(&mut sum, &x, width, masks())
    }));
    Ok(())
}

/// Kernels of DoRA, without products.
fn columns(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (n_rows, width) = (sizes.n_rows, sizes.shape.hidden_size);
    let (n, size) = (n_rows * width, format!("{n_rows} rows of {width}"));
    let (x, mut sum, half, other) = (floats(gpu, n)?, floats(gpu, n)?, halves(gpu, n)?, halves(gpu, n)?);
    let factors = floats(gpu, width)?;
    measure(case(format!("scaled_columns: {size}"), bytes("scale_columns_f32_bf16", 6 * n), || {
        gpu.scaled_columns(&x, &factors, None).map(drop)
    }));
    measure(case(format!("add_scaled_columns: {size}"), bytes("scale_columns_f32_f32", 12 * n), || {
        gpu.add_scaled_columns(&x, &factors, None, &mut sum)
    }));
    measure(case(format!("scaled_values: {size}"), bytes("scale_columns_bf16_bf16", 4 * n), || {
        gpu.scaled_values(&half, &factors).map(drop)
    }));
    measure(case(format!("column_totals: {size}"), bytes("column_totals", 4 * n), || {
        gpu.column_totals(&half, Some(&other), width).map(drop)
    }));
    Ok(())
}

/// Random weights, for models without a file.
fn random(gpu: &Gpu, sizes: &Sizes, measure: Measure<'_>) -> Result<()> {
    let (n_rows, width) = (sizes.shape.intermediate_size, sizes.shape.hidden_size);
    let (n, half) = (n_rows * width, width / 2);
    measure(case(format!("normal of {n}"), bytes("normal_bf16", 2 * n), || gpu.normal(n, 7, 0.02).map(drop)));
    measure(case(format!("normal_part of {n}"), bytes("normal_part_bf16", 2 * n_rows * half), || {
        gpu.normal_part(0..n_rows, 0..half, width, 7, 0.02).map(drop)
    }));
    Ok(())
}
