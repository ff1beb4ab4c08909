//! Calls of a decoding step.

use crate::cases::{RANK, bytes, case, floats, halves};
use crate::{Case, Floor, Sizes};
use candle_core::Result;
use half::bf16;
use querl_cuda::device::{
    BLOCK_TOKENS, CacheShape, CudaSlice, DeviceRope, Epilogue, Gpu, HeadNorms, LoraAOut, LoraB, ReadBack, SamplingRows,
    SamplingRules, Sequences, n_splits,
};
use querl_model::kernels::RopeTable;

/// Number of tokens of a prompt with half of its response.
const CONTEXT: usize = 288;

pub(crate) fn each(gpu: &Gpu, sizes: &Sizes, measure: &mut dyn FnMut(Case<'_>)) {
    for group in [attention, finished_heads, finished_products, copies, sampling] {
        if let Err(error) = group(gpu, sizes, measure) {
            println!("| FAILED: {} | | | | |", error.to_string().lines().next().unwrap_or_default());
        }
    }
}

/// Slots in the last block of each sequence, if no blocks are shared.
fn last_slots(gpu: &Gpu, n: usize, width: usize) -> Result<CudaSlice<u32>> {
    let last = |sequence: usize| ((sequence * width + width - 1) * BLOCK_TOKENS) as u32;
    gpu.upload(&(0..n).map(last).collect::<Vec<_>>())
}

/// Attention over sequences that share no blocks.
fn attention(gpu: &Gpu, sizes: &Sizes, measure: &mut dyn FnMut(Case<'_>)) -> Result<()> {
    let (n, shape) = (sizes.n_sequences, &sizes.shape);
    let (head_dim, n_kv_heads) = (shape.head_dim, shape.n_kv_heads);
    let width = CONTEXT.div_ceil(BLOCK_TOKENS);
    let cache = CacheShape { n_blocks: n * width, n_kv_heads, head_dim };
    let (keys, values) = (halves(gpu, cache.len())?, halves(gpu, cache.len())?);
    let q = halves(gpu, n * shape.n_heads * head_dim)?;
    let tables = gpu.upload(&(0..(n * width) as u32).collect::<Vec<_>>())?;
    let lengths = gpu.upload(&vec![CONTEXT as u32; n])?;
    let (tables, lengths) = (tables.as_view(), lengths.as_view());
    let sequences = Sequences { tables, width, table_rows: None, lengths, n_splits: n_splits(CONTEXT) };
    // Keys and values of every token once.
    let floor = Floor::Bytes((4 * n * CONTEXT * n_kv_heads * head_dim) as f64);
    let names = ["decode_attention_32", "decode_attention_64", "decode_attention_96", "decode_attention_128"];
    let floors = vec![(names[(head_dim.div_ceil(32) - 1).min(3)], floor)];
    measure(case(format!("decode_attention: {n} sequences of {CONTEXT}"), floors, || {
        gpu.decode_attention(&q, &keys, &values, cache, &sequences).map(drop)
    }));
    Ok(())
}

/// Epilogues with an adapter.
struct Epilogues {
    table: CudaSlice<Epilogue>,
    lora_a_out: CudaSlice<bf16>,
    width: usize,
    b_bytes: usize,
    _lora_b: Vec<LoraB>,
}

impl Epilogues {
    /// Epilogues for `n` rows and products of these widths.
    fn new(gpu: &Gpu, n: usize, widths: &[usize], bias: Option<&CudaSlice<f32>>) -> Result<Self> {
        let lora_b = |(index, width): (usize, &usize)| {
            Ok(LoraB { b: halves(gpu, width * RANK)?, rank: RANK, first: index * RANK, scale: 2.0 })
        };
        let lora_b = widths.iter().enumerate().map(lora_b).collect::<Result<Vec<_>>>()?;
        // SAFETY: LoRA B is dropped with the table, and the caller's bias after it.
        let epilogue = |(&width, b): (&usize, &LoraB)| unsafe { Epilogue::new(gpu, width, Some(b), bias, None) };
        let table = widths.iter().zip(&lora_b).map(epilogue).collect::<Result<Vec<_>>>()?;
        let width = widths.len() * RANK;
        let b_bytes = lora_b.iter().map(|lora_b| 2 * lora_b.b.len()).sum();
        let lora_a_out = halves(gpu, n * width)?;
        Ok(Self { table: gpu.upload(&table)?, lora_a_out, width, b_bytes, _lora_b: lora_b })
    }

    fn lora_a_out(&self) -> LoraAOut<'_> {
        LoraAOut { values: self.lora_a_out.as_view(), width: self.width }
    }
}

/// The epilogue of query, key and value projections: LoRA B, norm, RoPE, write to the KV cache.
fn finished_heads(gpu: &Gpu, sizes: &Sizes, measure: &mut dyn FnMut(Case<'_>)) -> Result<()> {
    let (n, shape) = (sizes.n_sequences, &sizes.shape);
    let (head_dim, n_kv_heads) = (shape.head_dim, shape.n_kv_heads);
    let width = CONTEXT.div_ceil(BLOCK_TOKENS);
    let cache = CacheShape { n_blocks: n * width, n_kv_heads, head_dim };
    let rope = DeviceRope::new(gpu, &RopeTable::new(shape.max_positions, head_dim, shape.rope_theta))?;
    let position = CONTEXT.min(shape.max_positions) as u32 - 1;
    let (positions, slots) = (gpu.upload(&vec![position; n])?, last_slots(gpu, n, width)?);
    let (mut keys, mut values) = (halves(gpu, cache.len())?, halves(gpu, cache.len())?);
    let widths = [shape.n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim];
    let epilogues = Epilogues::new(gpu, n, &widths, None)?;
    let (mut q, mut k, mut v) = (halves(gpu, n * widths[0])?, halves(gpu, n * widths[1])?, halves(gpu, n * widths[2])?);
    let norm = floats(gpu, head_dim)?;
    let floor = 4 * n * widths.iter().sum::<usize>() + epilogues.b_bytes;
    for (weights, name) in [(None, ""), (Some([&norm, &norm]), ", rms_norm")] {
        let norms = HeadNorms { weights, eps: 1e-6 };
        measure(case(format!("finish_heads: {n} rows of {}{name}", widths[0]), bytes("finish_heads", floor), || {
            gpu.finish_heads(
                [&mut q.as_view_mut(), &mut k.as_view_mut(), &mut v.as_view_mut()],
                &epilogues.lora_a_out(),
                &epilogues.table,
                &norms,
                (&rope, &positions.as_view()),
                &slots.as_view(),
                [&mut keys.as_view_mut(), &mut values.as_view_mut()],
                cache,
            )
        }));
    }
    Ok(())
}

/// The epilogues of gate and up projections, and of an output projection with a bias.
fn finished_products(gpu: &Gpu, sizes: &Sizes, measure: &mut dyn FnMut(Case<'_>)) -> Result<()> {
    let (n, hidden, wide) = (sizes.n_sequences, sizes.shape.hidden_size, sizes.shape.intermediate_size);
    let epilogues = Epilogues::new(gpu, n, &[wide, wide], None)?;
    let (mut gate, mut up) = (halves(gpu, n * wide)?, halves(gpu, n * wide)?); // `up` is only read
    let floor = 6 * n * wide + epilogues.b_bytes;
    measure(case(format!("finish_gated: {n} rows of {wide}"), bytes("finish_gated", floor), || {
        gpu.finish_gated(&mut gate.as_view_mut(), &up.as_view_mut(), &epilogues.lora_a_out(), &epilogues.table, n)
    }));
    let bias = floats(gpu, hidden)?;
    let epilogues = Epilogues::new(gpu, n, &[hidden], Some(&bias))?;
    let (mut sum, y) = (floats(gpu, n * hidden)?, halves(gpu, n * hidden)?);
    let floor = 10 * n * hidden + epilogues.b_bytes;
    measure(case(format!("finish_added: {n} rows of {hidden}"), bytes("finish_added", floor), || {
        gpu.finish_added(&mut sum, &y, &epilogues.lora_a_out(), &epilogues.table, n)
    }));
    Ok(())
}

/// Copies of a prompt's last block for every response, in all layers.
fn copies(gpu: &Gpu, sizes: &Sizes, measure: &mut dyn FnMut(Case<'_>)) -> Result<()> {
    let (n, shape) = (sizes.n_sequences, &sizes.shape);
    let cache = CacheShape { n_blocks: 2 * n, n_kv_heads: shape.n_kv_heads, head_dim: shape.head_dim };
    let all = shape.n_layers * cache.len();
    let (mut keys, mut values) = (halves(gpu, all)?, halves(gpu, all)?);
    let pairs = gpu.upload(&(0..n as u32).flat_map(|block| [block, block + n as u32]).collect::<Vec<_>>())?;
    // Half of the keys and values are read, and the same amount is written.
    measure(case(format!("copy_blocks: {n} in {} layers", shape.n_layers), bytes("copy_blocks", 4 * all), || {
        gpu.copy_blocks(&mut keys, &mut values, &pairs, cache, shape.n_layers)
    }));
    Ok(())
}

/// Sampling without and with all filters.
fn sampling(gpu: &Gpu, sizes: &Sizes, measure: &mut dyn FnMut(Case<'_>)) -> Result<()> {
    let (n, n_tokens) = (sizes.n_sequences, sizes.shape.vocab_size);
    let mut logits = gpu.to_f32(&halves(gpu, n * n_tokens)?)?;
    let uniforms = gpu.upload(&(0..n).map(|row| (row as f64 + 0.5) / n as f64).collect::<Vec<_>>())?;
    let (lengths, mut drawn) = (gpu.zeros::<u32>(n)?, ReadBack::new(gpu, 3 * n)?);
    for (name, top_p, top_k) in [("whole", 1.0, 0), ("top_k 50, top_p 0.9", 0.9, 50)] {
        let rules = SamplingRules {
            temperature: 1.0,
            top_p,
            top_k,
            repetition_penalty: 1.0,
            no_repeat_ngram_size: 0,
            min_new_tokens: 0,
            stop_ids: gpu.upload(&[2u32])?,
        };
        // The minimum work is one pass over the logits; see the note at the table.
        measure(case(format!("choose: {n} rows of {n_tokens}, {name}"), bytes("choose", 4 * n * n_tokens), || {
            let uniforms = Some(uniforms.as_view());
            let rows = SamplingRows { lengths: lengths.as_view(), responses: None, uniforms };
            drawn.write(n, 0..n, |drawn| gpu.choose(&mut logits, rows, &rules, drawn))
        }));
    }
    Ok(())
}
