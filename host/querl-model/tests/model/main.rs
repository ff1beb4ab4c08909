//! Models compared with transformers, PEFT and themselves, on the checkpoints of `tests/reference`.
#![allow(clippy::unwrap_used)]

mod adapters;
mod classifier;
mod export;
mod generation;
mod parity;
#[path = "../support/prompts.rs"]
mod prompts;
#[path = "../support/sequences.rs"]
mod sequences;
mod tensor_parallel;
mod trees;

use candle_core::{DType, Tensor};
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

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}
