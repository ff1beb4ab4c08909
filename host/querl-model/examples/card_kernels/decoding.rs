//! Calls of a decoding step.

use crate::cases::{bytes, case, halves};
use crate::{Case, Floor, Sizes};
use candle_core::Result;
use querl_model::device::{BLOCK_TOKENS, CacheShape, Gpu, ReadBack, SamplingRows, SamplingRules, Sequences, n_splits};

/// Tokens of a prompt with half of its answer.
const CONTEXT: usize = 288;

/// Hands every case to `measure`.
pub(crate) fn each(gpu: &Gpu, sizes: &Sizes, measure: &mut dyn FnMut(Case<'_>)) {
    for group in [attention, sampling] {
        if let Err(error) = group(gpu, sizes, measure) {
            println!("| FAILED: {} | | | | |", error.to_string().lines().next().unwrap_or_default());
        }
    }
}

/// Each sequence in blocks of its own.
fn attention(gpu: &Gpu, sizes: &Sizes, measure: &mut dyn FnMut(Case<'_>)) -> Result<()> {
    let (n, shape) = (sizes.n_sequences, &sizes.shape);
    let (head_dim, n_kv_heads) = (shape.head_dim, shape.n_kv_heads);
    let width = CONTEXT.div_ceil(BLOCK_TOKENS);
    let cache = CacheShape { n_blocks: n * width, n_kv_heads, head_dim };
    let (mut keys, values) = (halves(gpu, cache.len())?, halves(gpu, cache.len())?);
    let new = halves(gpu, n * n_kv_heads * head_dim)?;
    let last = |sequence: usize| ((sequence * width + width - 1) * BLOCK_TOKENS) as u32;
    let slots = gpu.upload(&(0..n).map(last).collect::<Vec<_>>())?;
    measure(case(format!("store: {n} tokens"), bytes("store", 4 * new.len()), || {
        gpu.store(&new, &slots, &mut keys, cache)
    }));
    let q = halves(gpu, n * shape.n_heads * head_dim)?;
    let tables = gpu.upload(&(0..(n * width) as u32).collect::<Vec<_>>())?;
    let lengths = gpu.upload(&vec![CONTEXT as u32; n])?;
    let (tables, lengths) = (tables.as_view(), lengths.as_view());
    let sequences = Sequences { tables, width, lines: None, lengths, n_splits: n_splits(CONTEXT) };
    // Keys and values of every token once.
    let floor = Floor::Bytes((4 * n * CONTEXT * n_kv_heads * head_dim) as f64);
    let names = ["decode_attention_32", "decode_attention_64", "decode_attention_96", "decode_attention_128"];
    let floors = vec![(names[(head_dim.div_ceil(32) - 1).min(3)], floor)];
    measure(case(format!("decode_attention: {n} sequences of {CONTEXT}"), floors, || {
        gpu.decode_attention(&q, &keys, &values, cache, &sequences).map(drop)
    }));
    Ok(())
}

/// From the whole distribution, then with every filter.
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
        // The floor is one pass over the logits; see the note beside the table of floors.
        measure(case(format!("choose: {n} rows of {n_tokens}, {name}"), bytes("choose", 4 * n * n_tokens), || {
            let uniforms = Some(uniforms.as_view());
            let rows = SamplingRows { lengths: lengths.as_view(), answers: None, uniforms };
            drawn.write(n, 0..n, |drawn| gpu.choose(&mut logits, rows, &rules, drawn))
        }));
    }
    Ok(())
}
