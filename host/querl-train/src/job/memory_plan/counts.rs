//! Numbers of weights, and bytes per token.

use super::SUM_BYTES;
use querl_core::config::{BaseDtype, SftConfig};
use querl_model::DecoderConfig;

/// The linear layers of a decoder layer, with their inputs and outputs.
pub fn linears(shapes: &DecoderConfig) -> [(&'static str, usize, usize); 7] {
    let DecoderConfig { hidden_size, intermediate_size, .. } = *shapes;
    let (q, kv) = (shapes.n_heads * shapes.head_dim, shapes.n_kv_heads * shapes.head_dim);
    [
        ("q_proj", hidden_size, q),
        ("k_proj", hidden_size, kv),
        ("v_proj", hidden_size, kv),
        ("o_proj", q, hidden_size),
        ("gate_proj", hidden_size, intermediate_size),
        ("up_proj", hidden_size, intermediate_size),
        ("down_proj", intermediate_size, hidden_size),
    ]
}

/// Weights of the largest linear layer of a decoder layer.
pub(super) fn largest_linear(shapes: &DecoderConfig) -> u64 {
    linears(shapes).into_iter().map(|(_, n_in, n_out)| (n_in * n_out) as u64).max().unwrap_or(0)
}

/// Bytes of a base by dtype: int8 and nf4 with a scale per 64 weights, fp8 with one per output; these three with embedding and head in
/// bf16.
pub fn base_bytes(shapes: &DecoderConfig, dtype: BaseDtype) -> u64 {
    let (of_linear, of_table) = match dtype {
        BaseDtype::F32 => (4.0, 4.0),
        BaseDtype::Bf16 | BaseDtype::F16 => (2.0, 2.0),
        BaseDtype::Int8 => (1.0625, 2.0),
        BaseDtype::Fp8 => (1.0, 2.0),
        BaseDtype::Nf4 => (0.5625, 2.0),
    };
    let of_layer: usize = linears(shapes).iter().map(|(_, n_in, n_out)| n_in * n_out).sum();
    let n_outputs: usize = linears(shapes).iter().map(|(_, _, n_out)| n_out).sum();
    let scales = if dtype == BaseDtype::Fp8 { shapes.n_layers * n_outputs } else { 0 };
    let n_tables = if shapes.tie_word_embeddings { 1 } else { 2 };
    let table = n_tables * shapes.vocab_size * shapes.hidden_size;
    let small = shapes.n_layers * small_of_layer(shapes) + shapes.hidden_size;
    let bytes = (shapes.n_layers * of_layer) as f64 * of_linear + table as f64 * of_table;
    bytes as u64 + ((small + scales) * SUM_BYTES) as u64
}

/// Norms and biases of a layer, always f32.
fn small_of_layer(shapes: &DecoderConfig) -> usize {
    let (q, kv) = (shapes.n_heads * shapes.head_dim, shapes.n_kv_heads * shapes.head_dim);
    let norms_of_heads = if shapes.family.has_qk_norm() { 2 * shapes.head_dim } else { 0 };
    let qkv = if shapes.qkv_bias { q + 2 * kv } else { 0 };
    let out = if shapes.output_bias { shapes.hidden_size } else { 0 };
    2 * shapes.hidden_size + norms_of_heads + qkv + out
}

pub(super) fn adapter_parameters(shapes: &DecoderConfig, lora: &SftConfig) -> u64 {
    let is_all = lora.lora_target_modules.iter().any(|name| name == "all-linear");
    let adapted = |name: &str| is_all || lora.lora_target_modules.iter().any(|target| target == name);
    let of_one = |n_in: usize, n_out: usize| lora.lora_rank * (n_in + n_out) + if lora.use_dora { n_out } else { 0 };
    let of_layer = linears(shapes).into_iter().filter(|(name, ..)| adapted(name));
    let of_layer: usize = of_layer.map(|(_, n_in, n_out)| of_one(n_in, n_out)).sum();
    (shapes.n_layers * of_layer) as u64
}

/// Weights of the largest tensor of an adapter.
pub(super) fn largest_trained(shapes: &DecoderConfig, lora: &SftConfig) -> u64 {
    let widest = linears(shapes).into_iter().map(|(_, n_in, n_out)| n_in.max(n_out)).max().unwrap_or(0);
    (lora.lora_rank * widest) as u64
}

/// Saved activations of a layer per token: queries, keys and values as attention reads them (for Qwen3 before their norms too),
/// attention output and logsumexp, the residuals after attention and after the layer, gate and up, LoRA A outputs.
pub(super) fn saved_bytes_of_row(shapes: &DecoderConfig, rank: usize, value_bytes: usize) -> u64 {
    let (q, kv) = (shapes.n_heads * shapes.head_dim, shapes.n_kv_heads * shapes.head_dim);
    let before_norm = if shapes.family.has_qk_norm() { q + kv } else { 0 };
    let values = 2 * q + 2 * kv + before_norm + 2 * shapes.intermediate_size + 7 * rank;
    let sums = 2 * shapes.hidden_size + shapes.n_heads;
    (values * value_bytes + sums * SUM_BYTES) as u64
}

/// Temporary buffers of a layer's backward pass per token, the larger of: in the MLP the gated values and three gradients of their
/// width with one of the layer's; in attention the gradients of queries, keys, values and attention output, before and after RoPE;
/// and the residual's gradients.
pub(super) fn scratch_bytes_of_row(shapes: &DecoderConfig, value_bytes: usize) -> u64 {
    let (q, kv) = (shapes.n_heads * shapes.head_dim, shapes.n_kv_heads * shapes.head_dim);
    let hidden = shapes.hidden_size;
    let feed_forward = (4 * shapes.intermediate_size + hidden) * value_bytes + 2 * hidden * SUM_BYTES;
    let attention = (3 * q + 3 * kv + hidden) * value_bytes + 3 * hidden * SUM_BYTES;
    feed_forward.max(attention) as u64
}
