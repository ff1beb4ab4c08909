//! GGUF files, as llama.cpp loads them: a model as it is, or with an adapter merged into it, with its tokenizer and chat template.
//!
//! Source: llama.cpp, `convert_hf_to_gguf.py` (`conversion/llama.py`, `qwen.py`) and `src/models/`. What llama.cpp would compute in
//! another way is refused. Departures: the pre-tokenizer is found by comparing tokens ([`tokenizer`]); `add_bos_token` says what the chat
//! template does; `rope.scaling.attn_factor` is relative to YaRN's own factor, since llama.cpp multiplies the two.

mod tokenizer;
mod writer;

use crate::checkpoint::StoredModel;
use crate::config::inverse_frequencies;
use crate::export::{Merge, OutTensor, main_dtype};
use crate::{DecoderConfig, Family, LoraAdapter, ModelError, RopeScaling};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use querl_core::fsx::AtomicFile;
use safetensors::View;
use std::io::Write;
use std::path::Path;
use writer::{MetadataValue, TensorInfo, write_head, write_tensor};

pub use writer::GgufDtype;

/// Summary of a written GGUF file.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct GgufExport {
    /// Number of parameters.
    pub n_parameters: u64,
    /// Total bytes of all tensors.
    pub n_bytes: u64,
    /// Type of the matrices, such as `q8_0`.
    pub dtype: &'static str,
    /// Value of `general.architecture` in the file.
    pub architecture: &'static str,
    /// Value of `tokenizer.ggml.pre` in the file.
    pub pre_tokenizer: &'static str,
    /// Maximum number of tokens of a sequence.
    pub context_length: usize,
}

/// Writes a model, with an adapter merged into it if there is one, to a GGUF file, which becomes visible when it is complete. `dtype`: type
/// of the matrices; `None` takes the type of most stored weights.
///
/// # Errors
/// The model or its tokenizer cannot be read, the adapter is for another one, llama.cpp cannot represent the model, or the file exists or
/// cannot be written.
pub fn export_gguf(
    model: &Path,
    adapter: Option<&LoraAdapter>,
    out: &Path,
    dtype: Option<GgufDtype>,
) -> Result<GgufExport, ModelError> {
    if out.exists() {
        return Err(ModelError::bad_file(out, "exists; name a new file"));
    }
    let stored = StoredModel::open(model)?;
    let config = &stored.config;
    let refused = |problem| ModelError::bad_file(&model.join("config.json"), problem);
    check(config).map_err(refused)?;
    let merge = Merge { stored: &stored, adapter };
    let tensors = merge.tensors(None)?;
    let dtype = dtype.unwrap_or(match main_dtype(&tensors) {
        DType::BF16 => GgufDtype::Bf16,
        DType::F16 => GgufDtype::F16,
        _ => GgufDtype::F32,
    });
    let tokenizer = tokenizer::read(model, config.vocab_size)?;
    let mut infos: Vec<TensorInfo> = tensors.iter().map(|tensor| tensor_info(tensor, dtype)).collect();
    let factors = rope_factors(config);
    infos.extend(factors.iter().map(|factors| TensorInfo {
        name: "rope_freqs.weight".into(),
        shape: vec![factors.len()],
        dtype: GgufDtype::F32,
    }));
    let mut metadata = describe(config, &model_name(model), dtype);
    metadata.extend(tokenizer.metadata);
    let io = |source| ModelError::io(out)(source);
    let mut file = AtomicFile::create(out).map_err(io)?;
    write_head(&mut file, &metadata, &infos).map_err(io)?;
    for (tensor, info) in tensors.into_iter().zip(&infos) {
        let of_f32 = OutTensor { dtype: DType::F32, ..tensor };
        let value = permuted(&merge.value(&of_f32)?, &of_f32.name, config)?;
        write_tensor(&mut file, &bytes(&value, info.dtype)?).map_err(io)?;
    }
    if let Some(factors) = factors {
        let bytes: Vec<u8> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        write_tensor(&mut file, &bytes).map_err(io)?;
    }
    file.flush().and_then(|()| file.commit()).map_err(io)?;
    Ok(GgufExport {
        n_parameters: infos.iter().map(|info| info.shape.iter().product::<usize>() as u64).sum(),
        n_bytes: infos.iter().map(TensorInfo::n_bytes).sum(),
        dtype: dtype.name(),
        architecture: architecture(config.family),
        pre_tokenizer: tokenizer.pre_tokenizer,
        context_length: context_length(config),
    })
}

/// Refuses models with features that llama.cpp's format lacks. The error does not name the file.
fn check(config: &DecoderConfig) -> Result<(), String> {
    let is_llama = architecture(config.family) == "llama";
    let width = config.n_heads * config.head_dim;
    if config.family == Family::Qwen2 && width != config.hidden_size {
        let hidden = config.hidden_size;
        return Err(format!(
            "{} heads of {} are not hidden_size {hidden}; llama.cpp's qwen2 has no head_dim of its own",
            config.n_heads, config.head_dim
        ));
    }
    if config.output_bias && !is_llama {
        return Err("attention_bias is set; llama.cpp has no bias on the attention's output of qwen3".into());
    }
    match config.rope_scaling {
        Some(RopeScaling::Llama3(_)) if !is_llama => {
            Err("rope type `llama3`: llama.cpp reads its factors for llama alone; expected none, linear or yarn".into())
        }
        Some(RopeScaling::Yarn(yarn)) if !yarn.truncate => {
            Err("rope type `yarn` with truncate = false: llama.cpp always rounds the ends of the ramp".into())
        }
        _ => Ok(()),
    }
}

fn architecture(family: Family) -> &'static str {
    match family {
        Family::Qwen2 => "qwen2",
        Family::Qwen3 => "qwen3",
        Family::Llama | Family::Mistral => "llama",
    }
}

/// llama.cpp has full attention only for these architectures. It is equivalent up to the length of the shortest sliding window.
fn context_length(config: &DecoderConfig) -> usize {
    let windows = config.sliding_windows.iter().flatten();
    windows.copied().min().map_or(config.max_positions, |window| window.min(config.max_positions))
}

fn model_name(model: &Path) -> String {
    model.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}

/// The metadata without the tokenizer's.
fn describe(config: &DecoderConfig, name: &str, dtype: GgufDtype) -> Vec<(String, MetadataValue)> {
    use MetadataValue::{F32, Text, U32};
    let size = |size: usize| U32(u32::try_from(size).unwrap_or(u32::MAX));
    let number = |number: f64| F32(number as f32);
    let architecture = architecture(config.family);
    let mut keys = vec![
        ("general.architecture".to_owned(), Text(architecture.into())),
        ("general.type".to_owned(), Text("model".into())),
        ("general.name".to_owned(), Text(name.into())),
        ("general.file_type".to_owned(), U32(dtype.file_type())),
        ("general.quantization_version".to_owned(), U32(2)),
    ];
    let mut add = |key: &str, value| keys.push((format!("{architecture}.{key}"), value));
    add("block_count", size(config.n_layers));
    add("context_length", size(context_length(config)));
    add("embedding_length", size(config.hidden_size));
    add("feed_forward_length", size(config.intermediate_size));
    add("vocab_size", size(config.vocab_size));
    add("attention.head_count", size(config.n_heads));
    add("attention.head_count_kv", size(config.n_kv_heads));
    add("attention.key_length", size(config.head_dim));
    add("attention.value_length", size(config.head_dim));
    add("attention.layer_norm_rms_epsilon", number(config.rms_norm_eps));
    add("rope.dimension_count", size(config.head_dim));
    add("rope.freq_base", number(config.rope_theta));
    match config.rope_scaling {
        Some(RopeScaling::Linear { factor }) => {
            add("rope.scaling.type", Text("linear".into()));
            add("rope.scaling.factor", number(factor));
        }
        Some(RopeScaling::Yarn(yarn)) => {
            add("rope.scaling.type", Text("yarn".into()));
            add("rope.scaling.factor", number(yarn.factor));
            add("rope.scaling.original_context_length", size(yarn.original_max_position_embeddings));
            add("rope.scaling.yarn_beta_fast", number(yarn.beta_fast));
            add("rope.scaling.yarn_beta_slow", number(yarn.beta_slow));
            add("rope.scaling.attn_factor", number(yarn.attention_factor / (1.0 + 0.1 * yarn.factor.ln())));
        }
        // Dynamic NTK has no effect up to the model's positions. The factors of llama3 are written as a tensor.
        None | Some(RopeScaling::Dynamic { .. } | RopeScaling::Llama3(_)) => {}
    }
    keys
}

/// The divisor of each RoPE frequency, with the scaling of Llama 3.
fn rope_factors(config: &DecoderConfig) -> Option<Vec<f32>> {
    let scaling = config.rope_scaling.as_ref().filter(|scaling| matches!(scaling, RopeScaling::Llama3(_)))?;
    let of = |scaling| inverse_frequencies(config.head_dim, config.rope_theta, scaling).0;
    Some(of(None).iter().zip(of(Some(scaling))).map(|(own, scaled)| own / scaled).collect())
}

fn tensor_info(tensor: &OutTensor, dtype: GgufDtype) -> TensorInfo {
    let dtype = if tensor.shape.len() == 2 { dtype.of_matrix(&tensor.shape) } else { GgufDtype::F32 };
    TensorInfo { name: gguf_name(&tensor.name), shape: tensor.shape.clone(), dtype }
}

/// llama.cpp's name of a decoder tensor.
fn gguf_name(name: &str) -> String {
    const PARTS: [(&str, &str); 15] = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
    ];
    PARTS.iter().fold(name.to_owned(), |name, (part, of_gguf)| name.replacen(part, of_gguf, 1))
}

/// For the architecture llama, llama.cpp's RoPE rotates adjacent dimensions, that of transformers the two halves of a head. So the rows of
/// query and key are interleaved within each head; the same for biases.
fn permuted(value: &Tensor, name: &str, config: &DecoderConfig) -> Result<Tensor, ModelError> {
    let n_heads = match () {
        () if architecture(config.family) != "llama" => return Ok(value.clone()),
        () if name.contains("self_attn.q_proj") => config.n_heads,
        () if name.contains("self_attn.k_proj") => config.n_kv_heads,
        () => return Ok(value.clone()),
    };
    let n_columns = value.elem_count() / value.dim(0)?;
    let halves = value.reshape((n_heads, 2, config.head_dim / 2, n_columns))?;
    Ok(halves.transpose(1, 2)?.contiguous()?.reshape(value.shape())?)
}

fn bytes(value: &Tensor, dtype: GgufDtype) -> Result<Vec<u8>, ModelError> {
    let plain = |dtype| Ok(value.to_dtype(dtype)?.to_device(&Device::Cpu)?.data().into_owned());
    match dtype {
        GgufDtype::F32 => plain(DType::F32),
        GgufDtype::F16 => plain(DType::F16),
        GgufDtype::Bf16 => plain(DType::BF16),
        GgufDtype::Q8_0 => Ok(QTensor::quantize(value, GgmlDType::Q8_0)?.data()?.into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::gguf_name;

    #[test]
    fn tensors_have_the_names_of_llama_cpp() {
        for (name, expected) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("model.norm.weight", "output_norm.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.layers.12.self_attn.q_proj.bias", "blk.12.attn_q.bias"),
            ("model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight"),
            ("model.layers.0.self_attn.k_norm.weight", "blk.0.attn_k_norm.weight"),
            ("model.layers.3.mlp.gate_proj.weight", "blk.3.ffn_gate.weight"),
            ("model.layers.3.input_layernorm.weight", "blk.3.attn_norm.weight"),
            ("model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"),
        ] {
            assert_eq!(gguf_name(name), expected);
        }
    }
}
