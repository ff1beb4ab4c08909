//! Models compared with transformers, PEFT and themselves, on the checkpoints of `tests/reference`.
#![allow(clippy::unwrap_used)]

mod adapters;
mod classifier;
mod control_tokens;
mod damaged;
mod export;
mod generation;
mod gguf;
mod parity;
#[path = "../support/prompts.rs"]
mod prompts;
#[path = "../support/sequences.rs"]
mod sequences;
mod serving;
mod tensor_parallel;
mod thinking;
mod trees;

use candle_core::{DType, Tensor};
use querl_model::{TokenizerSettings, train_tokenizer};
use std::path::{Path, PathBuf};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden").join(path)
}

fn decoder_files(name: &str) -> PathBuf {
    golden("decoders").join(name)
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A golden checkpoint with a tokenizer.
fn model_with_tokenizer(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden(&format!("decoders/{name}/{file}")), folder.path().join(file)).unwrap();
    }
    let settings = TokenizerSettings { vocab_size: 270, special_tokens: &["<|endoftext|>", "<|im_end|>"] };
    train_tokenizer(&["a b".to_owned()], &settings, &folder.path().join("tokenizer.json")).unwrap();
    let config = r#"{"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    folder
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}
