//! Weights with NaN or Inf and damaged files are refused with the name of the file and the tensor.

use crate::{golden, json, model_with_tokenizer};
use candle_core::{DType, Tensor};
use querl_core::config::BaseDtype;
use querl_model::classifier::Classifier;
use querl_model::{
    Decoder, ExportSettings, SecondOpinion, Weights, check_directory, export_model, inspect_model, load_tensors,
    save_tensors,
};
use std::collections::BTreeMap;
use std::path::Path;

const TENSOR: &str = "model.layers.1.mlp.up_proj.weight";
const SETTINGS: ExportSettings = ExportSettings { dtype: None, max_shard_bytes: 5_000_000_000 };

/// Sets one value of a file's tensor, and gives the tensor another type.
fn damage(path: &Path, value: f32, dtype: DType) {
    let mut tensors: BTreeMap<String, Tensor> = load_tensors(path).unwrap().into_iter().collect();
    let mut rows: Vec<Vec<f32>> = tensors[TENSOR].to_dtype(DType::F32).unwrap().to_vec2().unwrap();
    rows[3][5] = value;
    let changed = Tensor::new(rows, &candle_core::Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    tensors.insert(TENSOR.to_owned(), changed);
    save_tensors(path, &tensors).unwrap();
}

fn loading(folder: &Path) -> String {
    Decoder::load(folder, Weights::Frozen).err().unwrap().to_string()
}

#[test]
fn nan_and_inf_of_every_type_name_file_tensor_and_place() {
    for (dtype, value, name) in [
        (DType::F32, f32::NAN, "NaN"),
        (DType::F32, f32::INFINITY, "Inf"),
        (DType::BF16, f32::NEG_INFINITY, "-Inf"),
        (DType::F16, f32::NAN, "NaN"),
        (DType::F64, f32::INFINITY, "Inf"),
        (DType::F8E4M3, f32::NAN, "NaN"),
    ] {
        let (folder, out) = (model_with_tokenizer("qwen3-tied"), tempfile::tempdir().unwrap());
        let path = folder.path().join("model.safetensors");
        damage(&path, value, dtype);
        let place = format!("{}: tensor `{TENSOR}` holds {name} at [3, 5]; ", path.display());
        let expected = format!("{place}the file is damaged: download it or save the model again");
        assert_eq!(loading(folder.path()), expected);
        assert_eq!(Decoder::load(folder.path(), Weights::Trained).err().unwrap().to_string(), expected);
        assert_eq!(inspect_model(folder.path()).unwrap_err().to_string(), expected);
        assert_eq!(export_model(folder.path(), None, out.path(), &SETTINGS).unwrap_err().to_string(), expected);
        assert!(out.path().read_dir().unwrap().next().is_none(), "nothing is written");
    }
}

#[test]
fn a_value_that_the_type_of_the_base_cannot_hold_is_named() {
    let folder = model_with_tokenizer("qwen3-tied");
    let path = folder.path().join("model.safetensors");
    damage(&path, 1e6, DType::F32);
    Decoder::load(folder.path(), Weights::Frozen).unwrap();
    let error = Decoder::load_as(folder.path(), Weights::Frozen, BaseDtype::F16).err().unwrap().to_string();
    let expected = "a weight holds a value that is not finite as f16; try `f32` or `bf16`";
    assert_eq!(error, format!("{}: tensor `{TENSOR}`: {expected}", path.display()));
}

#[test]
fn nan_in_a_classifier_is_named_in_safetensors_and_in_pickled_weights() {
    let load = |folder: &Path| Classifier::load(folder, Weights::Frozen, BaseDtype::F32).err().unwrap().to_string();
    for (name, weights) in [("qwen2", "model.safetensors"), ("qwen3", "pytorch_model.bin")] {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(golden("classifiers").join(name)).unwrap().flatten() {
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        let path = folder.path().join(weights);
        let whole = std::fs::read(&path).unwrap();
        if name == "qwen2" {
            damage(&path, f32::NAN, DType::F32);
        } else {
            // The middle of the file contains tensor values, at addresses that are multiples of 64.
            let (mut bytes, middle) = (whole.clone(), whole.len() / 128 * 64);
            bytes[middle..middle + 4].copy_from_slice(&f32::NAN.to_le_bytes());
            std::fs::write(&path, bytes).unwrap();
        }
        let error = load(folder.path());
        assert!(error.starts_with(&format!("{}: tensor `model.", path.display())), "{error}");
        assert!(error.contains("` holds NaN at ["), "{error}");
        std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        assert!(load(folder.path()).starts_with(&format!("{}: ", path.display())), "{}", load(folder.path()));
    }
}

/// A sharded model, and the name of the shard with [`TENSOR`].
fn in_shards() -> (tempfile::TempDir, String) {
    let (whole, folder) = (model_with_tokenizer("qwen2-untied"), tempfile::tempdir().unwrap());
    export_model(whole.path(), None, folder.path(), &ExportSettings { max_shard_bytes: 18_000, ..SETTINGS }).unwrap();
    let shard = json(&folder.path().join(INDEX))["weight_map"][TENSOR].as_str().unwrap().to_owned();
    (folder, shard)
}

const INDEX: &str = "model.safetensors.index.json";

#[test]
fn a_damaged_shard_is_named() {
    let (folder, shard) = in_shards();
    let path = folder.path().join(&shard);
    let whole = std::fs::read(&path).unwrap();
    damage(&path, f32::NAN, DType::F32);
    let expected = format!("{}: tensor `{TENSOR}` holds NaN at [3, 5]; ", path.display());
    assert!(loading(folder.path()).starts_with(&expected), "{}", loading(folder.path()));
    for n_bytes in [0, 5, 300, whole.len() - 1] {
        std::fs::write(&path, &whole[..n_bytes]).unwrap();
        let expected = format!("{}: damaged or truncated safetensors file (", path.display());
        for error in [loading(folder.path()), check_directory(folder.path()).unwrap_err().to_string()] {
            assert!(error.starts_with(&expected) && error.lines().count() == 1, "{n_bytes}: {error}");
        }
    }
    std::fs::remove_file(&path).unwrap();
    let expected =
        format!("`weight_map` names the shard `{shard}`, which is not in the folder; download the model again");
    let index = folder.path().join(INDEX);
    for error in [loading(folder.path()), SecondOpinion::load(folder.path()).err().unwrap().to_string()] {
        assert_eq!(error, format!("{}: {expected}", index.display()));
    }
}

#[test]
fn an_index_names_files_of_the_folder_that_hold_its_tensors() {
    let (folder, shard) = in_shards();
    let path = folder.path().join(INDEX);
    let whole = json(&path);
    let error = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut index = whole.clone();
        change(&mut index["weight_map"]);
        std::fs::write(&path, index.to_string()).unwrap();
        loading(folder.path())
    };
    for name in ["../outside.safetensors", "/etc/passwd", "..", "", ".", "a\\b", "c:d"] {
        let expected = format!(
            "{}: `weight_map` has `{name}` for the tensor `{TENSOR}`; expected the name of a file in the model's folder",
            path.display()
        );
        assert_eq!(error(&|map| map[TENSOR] = name.into()), expected);
    }
    let other = whole["weight_map"]["model.embed_tokens.weight"].as_str().unwrap();
    assert_ne!(other, shard);
    let expected = format!(
        "{}: no tensor `{TENSOR}` there, which {INDEX} places in it; download the model again",
        folder.path().join(other).display()
    );
    assert_eq!(error(&|map| map[TENSOR] = other.into()), expected);
    let empty = error(&|map| *map = serde_json::json!({}));
    assert_eq!(empty, format!("{}: `weight_map` names no tensors; download the model again", path.display()));
}
