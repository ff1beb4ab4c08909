//! GGUF files read back with candle's reader: metadata, weights and tokenizer, and refusal of models that llama.cpp cannot represent.
//! `tests/serve/gguf.py` compares tokens with llama.cpp itself.

use crate::{golden, json, values};
use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value};
use querl_model::{DecoderConfig, GgufDtype, LoraAdapter, export_gguf, load_tensors};
use std::fs::File;
use std::path::Path;

/// A golden checkpoint with a tokenizer that fits its small vocabulary. All 256 bytes would not fit: the tokens are the bytes of the text.
fn model(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden(&format!("decoders/{name}/{file}")), folder.path().join(file)).unwrap();
    }
    let tokens: Vec<String> = ["<|endoftext|>", "<|im_end|>"].into_iter().map(String::from).collect();
    let letters = ('a'..='z').map(String::from).chain(["Ġ".into(), "Ċ".into(), "ab".into(), "ĊĊ".into(), "ĠĠ".into()]);
    let vocab: serde_json::Map<String, serde_json::Value> =
        tokens.iter().cloned().chain(letters).enumerate().map(|(id, text)| (text, id.into())).collect();
    let special = |id: usize| {
        serde_json::json!({"id": id, "content": tokens[id], "special": true, "normalized": false,
        "lstrip": false, "rstrip": false, "single_word": false})
    };
    let tokenizer = serde_json::json!({
        "version": "1.0", "normalizer": {"type": "NFC"}, "added_tokens": [special(0), special(1)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+"}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"], ["Ċ", "Ċ"], ["Ġ", "Ġ"]]},
    });
    let write = |file: &str, text: &str| std::fs::write(folder.path().join(file), text).unwrap();
    write("tokenizer.json", &tokenizer.to_string());
    let template = "{{ bos_token }}{{ messages }}";
    let config =
        serde_json::json!({"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": template});
    write("tokenizer_config.json", &config.to_string());
    folder
}

fn change(folder: &Path, file: &str, change: impl FnOnce(&mut serde_json::Value)) {
    let mut value = json(&folder.join(file));
    change(&mut value);
    std::fs::write(folder.join(file), value.to_string()).unwrap();
}

fn export(model: &Path, adapter: Option<&LoraAdapter>, dtype: Option<GgufDtype>) -> (Content, File, tempfile::TempDir) {
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("new/model.gguf");
    export_gguf(model, adapter, &path, dtype).unwrap();
    let mut file = File::open(path).unwrap();
    (Content::read(&mut file).unwrap(), file, out)
}

fn weights(content: &Content, file: &mut File, name: &str) -> Vec<f32> {
    values(&content.tensor(file, name, &Device::Cpu).unwrap().dequantize(&Device::Cpu).unwrap())
}

fn refused(model: &Path) -> String {
    let out = tempfile::tempdir().unwrap();
    let message = export_gguf(model, None, &out.path().join("model.gguf"), None).unwrap_err().to_string();
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0, "nothing is left");
    message
}

#[test]
fn metadata_say_what_llama_cpp_reads() {
    let folder = model("qwen3-tied");
    change(folder.path(), "tokenizer_config.json", |config| {
        (config["pad_token"], config["unk_token"]) = ("<|endoftext|>".into(), "<|im_end|>".into());
    });
    let (content, ..) = export(folder.path(), None, Some(GgufDtype::F32));
    let text = |key: &str| content.metadata[key].to_string().unwrap().clone();
    let number = |key: &str| content.metadata[key].to_u32().unwrap();
    assert_eq!(text("general.architecture"), "qwen3");
    for (key, expected) in [
        ("general.file_type", 0),
        ("qwen3.block_count", 2),
        ("qwen3.context_length", 64),
        ("qwen3.embedding_length", 32),
        ("qwen3.vocab_size", 64),
        ("qwen3.attention.head_count", 4),
        ("qwen3.attention.head_count_kv", 2),
        ("qwen3.attention.key_length", 16),
        ("qwen3.rope.dimension_count", 16),
        ("tokenizer.ggml.bos_token_id", 0),
        ("tokenizer.ggml.eos_token_id", 1),
        ("tokenizer.ggml.padding_token_id", 0),
        ("tokenizer.ggml.unknown_token_id", 1),
    ] {
        assert_eq!(number(key), expected, "{key}");
    }
    assert_eq!(text("tokenizer.ggml.model"), "gpt2");
    assert_eq!(text("tokenizer.ggml.pre"), "qwen2");
    assert_eq!(text("tokenizer.chat_template"), "{{ bos_token }}{{ messages }}");
    assert!(content.metadata["tokenizer.ggml.add_bos_token"].to_bool().unwrap(), "the template begins with it");
    let list = |key: &str| content.metadata[key].to_vec().unwrap().clone();
    let texts: Vec<String> =
        list("tokenizer.ggml.tokens").iter().map(|value| value.to_string().unwrap().clone()).collect();
    let types: Vec<i32> = list("tokenizer.ggml.token_type").iter().map(|value| value.to_i32().unwrap()).collect();
    assert_eq!((texts.len(), types.len()), (64, 64), "as many as the embedding has rows");
    assert_eq!((texts[1].as_str(), types[1]), ("<|im_end|>", 3));
    assert_eq!((texts[2].as_str(), types[2]), ("a", 1));
    // Runs of spaces that llama.cpp would split are marked as user-defined tokens.
    assert_eq!((texts[32].as_str(), types[32]), ("  ", 4));
    assert_eq!((texts[63].as_str(), types[63]), ("[PAD63]", 5));
    let merges = list("tokenizer.ggml.merges");
    assert_eq!(merges[0].to_string().unwrap(), "a b");
    assert!(matches!(content.metadata["qwen3.attention.layer_norm_rms_epsilon"], Value::F32(_)));
}

#[test]
fn weights_are_those_of_the_merged_model() {
    let (folder, adapter) = (model("qwen3-tied"), golden("lora/qwen3-tied"));
    let config = DecoderConfig::load(&folder.path().join("config.json")).unwrap();
    let adapter = LoraAdapter::load(&adapter, &config).unwrap();
    let merged = tempfile::tempdir().unwrap();
    let settings = querl_model::ExportSettings { dtype: None, max_shard_bytes: 1 << 30 };
    querl_model::export_model(folder.path(), Some(&adapter), merged.path(), &settings).unwrap();
    let expected = load_tensors(&merged.path().join("model.safetensors")).unwrap();
    let (content, mut file, _out) = export(folder.path(), Some(&adapter), Some(GgufDtype::F32));
    assert_eq!(content.tensor_infos.len(), expected.len());
    for (name, of_gguf) in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"),
    ] {
        assert_eq!(content.tensor_infos[of_gguf].shape.dims(), expected[name].dims(), "{name}");
        assert_eq!(weights(&content, &mut file, of_gguf), values(&expected[name]), "{name}");
    }
    let (content, mut file, _out) = export(folder.path(), Some(&adapter), Some(GgufDtype::Q8_0));
    let found = weights(&content, &mut file, "blk.0.attn_q.weight");
    let exact = values(&expected["model.layers.0.self_attn.q_proj.weight"]);
    let largest = exact.iter().fold(0f32, |most, value| most.max(value.abs()));
    assert!(found.iter().zip(&exact).all(|(a, b)| (a - b).abs() < largest / 200.0), "q8_0 rounds to 1/127");
    assert_ne!(found, exact);
}

/// llama.cpp's RoPE rotates adjacent dimensions.
#[test]
fn queries_and_keys_of_llama_are_interleaved_and_other_rows_are_not() {
    let folder = model("llama-bias");
    let stored = load_tensors(&folder.path().join("model.safetensors")).unwrap();
    let (content, mut file, _out) = export(folder.path(), None, Some(GgufDtype::F32));
    let (n_heads, head_dim) = (4, 8);
    for (name, of_gguf, width) in
        [("self_attn.q_proj.weight", "attn_q.weight", 32), ("self_attn.k_proj.bias", "attn_k.bias", 1)]
    {
        let rows = values(&stored[&format!("model.layers.0.{name}")]);
        let found = weights(&content, &mut file, &format!("blk.0.{of_gguf}"));
        let mut expected = Vec::new();
        for row in 0..n_heads * head_dim {
            let (head, dim) = (row / head_dim, row % head_dim);
            let from = head * head_dim + dim % 2 * head_dim / 2 + dim / 2;
            expected.extend_from_slice(&rows[from * width..(from + 1) * width]);
        }
        assert_eq!(found, expected, "{name}");
    }
    let value = values(&stored["model.layers.0.self_attn.v_proj.weight"]);
    assert_eq!(weights(&content, &mut file, "blk.0.attn_v.weight"), value);
    assert!(content.tensor_infos.contains_key("output.weight"), "it is not tied");
}

#[test]
fn scaling_of_rope_and_sliding_windows_are_what_llama_cpp_computes_with() {
    let (content, mut file, _out) = export(model("llama3-scaled").path(), None, None);
    let factors = weights(&content, &mut file, "rope_freqs.weight");
    assert_eq!((factors.len(), factors[0], factors[7]), (8, 1.0, 8.0));
    let float = |content: &Content, key: &str| content.metadata[key].to_f32().unwrap();
    let (content, ..) = export(model("yarn-attention-factor").path(), None, None);
    assert_eq!(content.metadata["llama.rope.scaling.type"].to_string().unwrap(), "yarn");
    assert_eq!(content.metadata["llama.rope.scaling.original_context_length"].to_u32().unwrap(), 32);
    let expected = 1.5 / (1.0 + 0.1 * 2f32.ln());
    assert!((float(&content, "llama.rope.scaling.attn_factor") - expected).abs() < 1e-6);
    let (content, ..) = export(model("linear").path(), None, None);
    assert_eq!(float(&content, "llama.rope.scaling.factor"), 2.5);
    assert_eq!(content.metadata["llama.context_length"].to_u32().unwrap(), 160);
    let (content, ..) = export(model("window-mistral").path(), None, None);
    assert_eq!(content.metadata["llama.context_length"].to_u32().unwrap(), 5, "no longer than the window");
}

#[test]
fn what_llama_cpp_cannot_represent_is_refused() {
    let bias = refused(model("qwen3-bias").path());
    assert!(bias.contains("config.json: attention_bias is set"), "{bias}");
    let ramp = refused(model("yarn-parameters").path());
    assert!(ramp.contains("truncate = false"), "{ramp}");
    let folder = model("qwen3-tied");
    change(folder.path(), "tokenizer.json", |file| file["normalizer"] = serde_json::json!({"type": "Lowercase"}));
    let normalizer = refused(folder.path());
    assert!(normalizer.contains("tokenizer.json: its normalizer is \"Lowercase\""), "{normalizer}");
    let folder = model("qwen3-tied");
    // Splits every letter, so that "ab" is never merged.
    change(folder.path(), "tokenizer.json", |file| {
        file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}|\s+".into();
    });
    let pieces = refused(folder.path());
    assert!(pieces.contains("its pre-tokenizer is none of those of llama.cpp"), "{pieces}");
    let folder = model("qwen3-tied");
    change(folder.path(), "tokenizer.json", |file| file["model"]["vocab"]["zz"] = 64.into());
    assert!(refused(folder.path()).contains("the id of the token `zz` is not below 64"));
    let folder = model("qwen3-tied");
    let error = export_gguf(folder.path(), None, &folder.path().join("config.json"), None).unwrap_err().to_string();
    assert!(error.ends_with("exists; name a new file"), "{error}");
}

#[test]
fn the_pre_tokenizer_is_the_one_with_the_same_tokens() {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-qwen3");
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(tiny.join(file), folder.path().join(file)).unwrap();
    }
    let pre_tokenizer = || {
        let (content, ..) = export(folder.path(), None, None);
        assert!(!content.metadata["tokenizer.ggml.add_bos_token"].to_bool().unwrap(), "the template has none");
        content.metadata["tokenizer.ggml.pre"].to_string().unwrap().clone()
    };
    assert_eq!(pre_tokenizer(), "falcon");
    let qwen2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    change(folder.path(), "tokenizer.json", |file| {
        file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = qwen2.into();
    });
    assert_eq!(pre_tokenizer(), "qwen2");
}
