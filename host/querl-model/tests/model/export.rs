//! Exported models: merged weights give the logits of base plus adapter, and a folder is complete.

use crate::{golden, json, model_with_tokenizer as model};
use candle_core::{DType, Tensor};
use querl_model::{
    Decoder, DecoderConfig, ExportSettings, LoraAdapter, PackedBatch, TextTokenizer, Weights, export_model,
    load_tensors,
};

const SETTINGS: ExportSettings = ExportSettings { dtype: None, max_shard_bytes: 5_000_000_000 };
const TOKENS: [&[u32]; 2] = [&[3, 14, 15, 9, 26, 5, 35, 8], &[63, 9, 7]];

fn logits(decoder: &Decoder, adapter: Option<&LoraAdapter>) -> Vec<f32> {
    let hidden = decoder.hidden_states(&PackedBatch::new(TOKENS), adapter).unwrap();
    decoder.logits(&hidden, adapter).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn merged_weights_give_the_logits_of_base_and_adapter() {
    for entry in std::fs::read_dir(golden("lora")).unwrap() {
        let directory = entry.unwrap().path();
        let base = model(json(&directory.join("adapter_config.json"))["base_model_name_or_path"].as_str().unwrap());
        let decoder = Decoder::load(base.path(), Weights::Frozen).unwrap();
        let adapter = LoraAdapter::load(&directory, decoder.config()).unwrap();
        let out = tempfile::tempdir().unwrap();
        let settings = ExportSettings { dtype: Some(DType::F32), ..SETTINGS };
        export_model(base.path(), Some(&adapter), out.path(), &settings).unwrap();
        let merged = Decoder::load(out.path(), Weights::Frozen).unwrap();
        let (found, expected) = (logits(&merged, None), logits(&decoder, Some(&adapter)));
        let scale = expected.iter().fold(1f32, |max, x| max.max(x.abs()));
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(worst <= 1e-5 * scale, "{}: off by {worst}, largest {scale}", directory.display());
    }
}

#[test]
fn embedding_and_head_that_an_adapter_unties_are_both_written() {
    for (name, is_tied) in [
        ("qwen2-tied-copies", false),
        ("qwen3-tied-embedding", false),
        ("qwen2-tied-copy", true),
        ("qwen2-tied-pair", true),
        ("qwen2-tied", true),
    ] {
        let base = model(&name[..10]);
        let config = DecoderConfig::load(&base.path().join("config.json")).unwrap();
        let adapter = LoraAdapter::load(&golden(&format!("lora/{name}")), &config).unwrap();
        let out = tempfile::tempdir().unwrap();
        export_model(base.path(), Some(&adapter), out.path(), &SETTINGS).unwrap();
        assert_eq!(json(&out.path().join("config.json"))["tie_word_embeddings"], is_tied, "{name}");
        let tensors = load_tensors(&out.path().join("model.safetensors")).unwrap();
        assert_eq!(tensors.contains_key("lm_head.weight"), !is_tied, "{name}");
    }
}

#[test]
fn shards_hold_each_tensor_once_within_their_limit() {
    let (base, out) = (model("qwen2-untied"), tempfile::tempdir().unwrap());
    let settings = ExportSettings { dtype: Some(DType::BF16), max_shard_bytes: 9000 };
    let exported = export_model(base.path(), None, out.path(), &settings).unwrap();
    let index = json(&out.path().join("model.safetensors.index.json"));
    assert_eq!(index["metadata"]["total_size"], exported.n_bytes);
    assert_eq!((exported.n_bytes, exported.dtype.as_str()), (exported.n_parameters * 2, "bfloat16"));
    let whole = load_tensors(&base.path().join("model.safetensors")).unwrap();
    let mut n_tensors = 0;
    let shards: Vec<&String> = exported.files.iter().filter(|file| file.ends_with(".safetensors")).collect();
    assert!(shards.len() > 2 && shards[0] == &format!("model-00001-of-{:05}.safetensors", shards.len()));
    for shard in shards {
        let tensors = load_tensors(&out.path().join(shard)).unwrap();
        assert!(tensors.values().map(|tensor| tensor.elem_count() * 2).sum::<usize>() <= 9000);
        for (name, tensor) in &tensors {
            assert_eq!(index["weight_map"][name], **shard);
            let values =
                |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values(tensor), values(&whole[name].to_dtype(DType::BF16).unwrap()));
        }
        n_tensors += tensors.len();
    }
    assert_eq!(n_tensors, whole.len());
    let (found, expected) =
        (Decoder::load(out.path(), Weights::Frozen).unwrap(), Decoder::load(base.path(), Weights::Frozen).unwrap());
    let worst =
        logits(&found, None).iter().zip(logits(&expected, None)).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst > 0.0 && worst < 0.5, "{worst}");
}

#[test]
fn an_exported_folder_is_a_complete_model() {
    let (base, parent) = (model("qwen3-tied"), tempfile::tempdir().unwrap());
    let out = parent.path().join("new/folder");
    let exported = export_model(base.path(), None, &out, &SETTINGS).unwrap();
    let expected =
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(exported.files, expected);
    let mut found: Vec<String> =
        std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    found.sort();
    assert_eq!(found, expected);
    let config = json(&out.join("config.json"));
    assert_eq!((&config["dtype"], &config["torch_dtype"]), (&"float32".into(), &"float32".into()));
    let tokenizer = TextTokenizer::load(&out).unwrap();
    let generation = json(&out.join("generation_config.json"));
    assert_eq!(generation["eos_token_id"], serde_json::json!(tokenizer.stop_ids()));
}

#[test]
fn a_folder_with_files_and_a_model_without_tokenizer_are_refused() {
    let base = model("qwen3-tied");
    let error = export_model(base.path(), None, base.path(), &SETTINGS).unwrap_err().to_string();
    assert!(error.ends_with("is not empty; name a new folder"), "{error}");
    std::fs::remove_file(base.path().join("tokenizer.json")).unwrap();
    let out = tempfile::tempdir().unwrap();
    let error = export_model(base.path(), None, out.path(), &SETTINGS).unwrap_err().to_string();
    assert!(error.contains("no `tokenizer.json` there"), "{error}");
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0);
}
