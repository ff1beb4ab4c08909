//! Encoders compared with transformers on the same checkpoints (tests/reference/encoders.py).
#![allow(clippy::unwrap_used)]

use querl_core::ports::{Embedder, PairScorer};
use querl_encoder::{CrossEncoder, EmbeddingModel};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/encoders").join(name)
}

fn expected(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden(name).join("expected.json")).unwrap()).unwrap()
}

fn texts(expected: &Value) -> Vec<&str> {
    expected["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Sums of f32 in another order differ by a few units in the last place; values are near 1.
const TOLERANCE: f64 = 2e-6;

#[test]
fn vectors_are_those_of_transformers() {
    for name in ["bert-cls", "xlm-roberta-mean", "bert-wordpiece", "xlm-roberta-unigram"] {
        let expected = expected(name);
        let model = EmbeddingModel::open(&golden(name), None).unwrap();
        assert_eq!(model.dimension(), 32);
        let vectors = model.embed(&texts(&expected)).unwrap();
        let wanted: Vec<Vec<f64>> = expected["vectors"].as_array().unwrap().iter().map(numbers).collect();
        assert_eq!((vectors.len(), texts(&expected).len()), (wanted.len(), wanted.len()), "{name}");
        for (vector, wanted) in vectors.iter().zip(&wanted) {
            assert_eq!((vector.len(), wanted.len()), (32, 32), "{name}");
            for (number, wanted) in vector.iter().zip(wanted) {
                let difference = (f64::from(*number) - wanted).abs();
                assert!(difference < TOLERANCE, "{name}: {difference}");
            }
        }
    }
}

#[test]
fn scores_are_those_of_transformers() {
    for name in ["bert-reranker", "xlm-roberta-reranker", "xlm-roberta-unigram-reranker"] {
        let expected = expected(name);
        let model = CrossEncoder::open(&golden(name), None).unwrap();
        let query = expected["query"].as_str().unwrap();
        let logits = model.logits(query, &texts(&expected)).unwrap();
        let scores = model.scores(query, &texts(&expected)).unwrap();
        let wanted = numbers(&expected["logits"]);
        assert_eq!((logits.len(), scores.len(), wanted.len()), (4, 4, 4), "{name}");
        for ((logit, score), wanted) in logits.iter().zip(scores).zip(wanted) {
            assert!((f64::from(*logit) - wanted).abs() < 4.0 * TOLERANCE, "{name}: {logit} {wanted}");
            assert!((score - 1.0 / (1.0 + (-wanted).exp())).abs() < TOLERANCE, "{name}");
        }
    }
}

#[test]
fn padding_and_batches_change_no_vector() {
    let model = EmbeddingModel::open(&golden("xlm-roberta-mean"), None).unwrap();
    let expected = expected("xlm-roberta-mean");
    // More texts than fit into one pass, of different lengths, so that passes reorder them.
    let texts: Vec<&str> = texts(&expected).into_iter().cycle().take(70).collect();
    let together = model.embed(&texts).unwrap();
    assert_eq!(together.len(), 70);
    for (text, vector) in texts.iter().zip(&together) {
        let alone = model.embed(&[text]).unwrap();
        assert_eq!(alone[0].len(), vector.len());
        let largest = alone[0].iter().zip(vector).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest < 1e-6, "{text}: {largest}");
    }
    assert!(model.embed(&[]).unwrap().is_empty());
}

/// A copy of a golden model's folder.
fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::copy(golden(name).join(file), folder.path().join(file)).unwrap();
    }
    folder
}

fn write(folder: &Path, file: &str, value: &Value) {
    let path = folder.join(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, value.to_string()).unwrap();
}

/// Regression: NaN scores of damaged weights were below every threshold, so that nothing was found and nothing reported.
#[test]
fn nan_and_inf_are_a_failure() {
    for (name, tensor) in [("bert-reranker", "classifier.bias"), ("bert-cls", "embeddings.LayerNorm.bias")] {
        let folder = copy(name);
        let key = fill(folder.path(), tensor, f64::NAN);
        let refused = match name {
            "bert-cls" => EmbeddingModel::open(folder.path(), None).err(),
            _ => CrossEncoder::open(folder.path(), None).err(),
        };
        let expected = format!("model.safetensors: tensor `{key}` holds NaN at [0]; the file is damaged: ");
        assert!(refused.unwrap().to_string().contains(&expected), "{key}");
    }
    // Finite weights whose products overflow.
    for name in ["bert-reranker", "bert-cls"] {
        let folder = copy(name);
        fill(folder.path(), "embeddings.LayerNorm.bias", 1e38);
        let failed = match name {
            "bert-cls" => EmbeddingModel::open(folder.path(), None).unwrap().vectors(&["鱼油"]).err(),
            _ => CrossEncoder::open(folder.path(), None).unwrap().logits("鱼油", &["怎么吃"]).err(),
        };
        assert!(failed.unwrap().to_string().starts_with("the model produced NaN or Inf"));
    }
}

/// Sets all values of a tensor in a copied model. Returns the tensor's name in the file.
fn fill(folder: &Path, tensor: &str, value: f64) -> String {
    let path = folder.join("model.safetensors");
    let mut weights = candle_core::safetensors::load(&path, &candle_core::Device::Cpu).unwrap();
    let key = weights.keys().find(|key| key.ends_with(tensor)).unwrap().clone();
    let filled = weights[&key].affine(0.0, value).unwrap();
    weights.insert(key.clone(), filled);
    candle_core::safetensors::save(&weights, &path).unwrap();
    key
}

#[test]
fn truncated_weights_are_named() {
    let folder = copy("bert-cls");
    let path = folder.path().join("model.safetensors");
    let weights = std::fs::read(&path).unwrap();
    std::fs::write(&path, &weights[..weights.len() - 7]).unwrap();
    let said = EmbeddingModel::open(folder.path(), None).err().unwrap().to_string();
    assert!(said.contains("model.safetensors: damaged or truncated safetensors file ("), "{said}");
}

/// Newer versions of transformers do not write the padding token to config.json.
#[test]
fn a_padding_token_that_is_left_out_is_the_architectures_own() {
    let folder = copy("xlm-roberta-mean");
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let vectors = |folder: &Path| EmbeddingModel::open(folder, None).unwrap().vectors(&["鱼油怎么吃", "吃"]).unwrap();
    let whole = vectors(folder.path());
    assert_eq!(config["pad_token_id"], 1);
    config.as_object_mut().unwrap().remove("pad_token_id");
    std::fs::write(&path, config.to_string()).unwrap();
    assert_eq!(vectors(folder.path()), whole);
    write(folder.path(), "sentence_bert_config.json", &json!({"max_seq_length": 1}));
    let refused = EmbeddingModel::open(folder.path(), None).err().unwrap().to_string();
    assert!(refused.ends_with("sentence_bert_config.json: max_seq_length is 1; expected 8 or more"), "{refused}");
}

#[test]
fn the_digest_of_a_reranker_is_of_its_files_and_where_texts_are_cut() {
    let folder = copy("bert-reranker");
    let digest = |cut| CrossEncoder::open(folder.path(), cut).unwrap().digest().to_owned();
    let first = digest(None);
    assert_eq!(first, CrossEncoder::open(&golden("bert-reranker"), None).unwrap().digest());
    assert_ne!(first, digest(Some(16)));
    let path = folder.path().join("model.safetensors");
    let mut weights = std::fs::read(&path).unwrap();
    *weights.last_mut().unwrap() ^= 1;
    std::fs::write(&path, weights).unwrap();
    assert_ne!(first, digest(None));
}

#[test]
fn the_digest_is_of_what_decides() {
    let folder = copy("bert-cls");
    let path = folder.path();
    let digest = || EmbeddingModel::open(path, None).unwrap().digest().to_owned();
    let mut seen = vec![digest()];
    std::fs::write(path.join("README.md"), "no part of it").unwrap();
    assert_eq!(digest(), seen[0]);
    let mut changed = |what: &str| {
        let found = digest();
        assert!(!seen.contains(&found), "{what} is no part of the digest");
        seen.push(found);
    };
    write(path, "1_Pooling/config.json", &json!({"pooling_mode_mean_tokens": true}));
    changed("pooling");
    write(path, "sentence_bert_config.json", &json!({"max_seq_length": 24}));
    changed("the length at which texts are cut");
    write(path, "config_sentence_transformers.json", &json!({"prompts": {"document": "文："}}));
    changed("what is put before passages");
    let mut config: Value = serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
    config["layer_norm_eps"] = json!(1e-5);
    write(path, "config.json", &config);
    changed("config.json");
    let tokenizer = std::fs::read_to_string(path.join("tokenizer.json")).unwrap();
    std::fs::write(path.join("tokenizer.json"), tokenizer + "\n").unwrap();
    changed("tokenizer.json");
    let mut weights = std::fs::read(path.join("model.safetensors")).unwrap();
    *weights.last_mut().unwrap() ^= 1;
    std::fs::write(path.join("model.safetensors"), weights).unwrap();
    changed("model.safetensors");
}

#[test]
fn texts_are_cut_where_a_setting_or_the_model_says() {
    let folder = copy("bert-cls");
    let open = |max_length| EmbeddingModel::open(folder.path(), max_length);
    let vector = |max_length, text: &str| open(max_length).unwrap().embed(&[text]).unwrap().remove(0);
    let (long, short) = ("饭".repeat(30), "饭".repeat(10));
    assert_ne!(vector(None, &long), vector(None, &short));
    // Ten characters, plus the special tokens at both ends.
    assert_eq!(vector(Some(12), &long), vector(Some(12), &short));
    write(folder.path(), "sentence_bert_config.json", &json!({"max_seq_length": 12, "do_lower_case": true}));
    assert_eq!(vector(None, &long), vector(Some(12), &short));
    assert_ne!(vector(Some(40), &long), vector(None, &long), "a setting goes before the file");
    let said = open(Some(41)).err().unwrap().to_string();
    assert!(said.ends_with("config.json: allows at most 40 tokens; max_length is 41"), "{said}");
}

#[test]
fn what_sentence_transformers_says_is_kept_to_or_refused() {
    let folder = copy("bert-cls");
    let path = folder.path();
    let open = || EmbeddingModel::open(path, None);
    let vector = || open().unwrap().embed(&["鱼油怎么吃"]).unwrap();
    let first = vector();
    write(
        path,
        "1_Pooling/config.json",
        &json!({"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": true}),
    );
    let mean = vector();
    assert_ne!(mean, first);
    write(path, "1_Pooling/config.json", &json!({"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}));
    assert_eq!(vector(), mean);
    write(
        path,
        "1_Pooling/config.json",
        &json!({"embedding_dimension": 32, "pooling_mode": "cls", "include_prompt": true}),
    );
    assert_eq!(vector(), first);
    let module =
        |idx: u32, path: &str, kind: &str| json!({"idx": idx, "name": idx.to_string(), "path": path, "type": kind});
    let network = module(0, "", "sentence_transformers.models.Transformer");
    let pooling = module(1, "2_Pooling", "sentence_transformers.sentence_transformer.modules.pooling.Pooling");
    let length = module(2, "3_Normalize", "sentence_transformers.models.Normalize");
    write(path, "modules.json", &json!([network, pooling, length]));
    write(path, "2_Pooling/config.json", &json!({"pooling_mode": "mean"}));
    assert_eq!(vector(), mean, "pooling is where the list of modules says");
    write(path, "config_sentence_transformers.json", &json!({"prompts": {"query": "查询：", "document": "文："}}));
    let model = open().unwrap();
    assert_eq!((model.query_prefix(), model.passage_prefix()), ("查询：", "文："));
    let said = |file: &str, value: Value| {
        write(path, file, &value);
        open().err().unwrap().to_string()
    };
    let error = said("2_Pooling/config.json", json!({"pooling_mode": "max"}));
    assert!(error.ends_with(r#"chooses ["max"]; expected the mode cls or mean"#), "{error}");
    let error = said("2_Pooling/config.json", json!({"pooling_mode": "mean", "include_prompt": false}));
    assert!(error.contains("include_prompt"), "{error}");
    let error =
        said("modules.json", json!([network, pooling, module(3, "2_Dense", "sentence_transformers.models.Dense")]));
    let expected = "modules.json: has the module `sentence_transformers.models.Dense`; expected only Transformer, Pooling and Normalize";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn what_is_no_such_model_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = |text: &str| {
        std::fs::write(folder.path().join("config.json"), text).unwrap();
        CrossEncoder::open(folder.path(), None).err().unwrap().to_string()
    };
    let said = error(r#"{"model_type": "qwen2"}"#);
    assert!(said.ends_with("config.json: model_type is `qwen2`; expected bert or xlm-roberta"), "{said}");
    let said = error(r#"{"model_type": "bert", "id2label": {"0": "a", "1": "b"}}"#);
    assert!(said.ends_with("config.json: has 2 labels; a reranker has 1"), "{said}");
    let said = error(r#"{"model_type": "bert", "position_embedding_type": "relative_key"}"#);
    assert!(said.ends_with("position_embedding_type is `relative_key`; expected absolute"), "{said}");
    let said = error(r#"{"model_type": "bert", "id2label": {"0": "a"}}"#);
    assert!(said.contains("model.safetensors: cannot be read"), "{said}");
    // An embedding model without a classification head as reranker, and a reranker as embedding model.
    let said = CrossEncoder::open(&golden("bert-cls"), None).err().unwrap().to_string();
    assert!(said.ends_with("config.json: has 2 labels; a reranker has 1"), "{said}");
    let said = EmbeddingModel::open(&golden("bert-reranker"), None).err().unwrap().to_string();
    assert!(said.contains("config.json: is of a classifier, such as a reranker"), "{said}");
}

/// Regression: causal attention, and fewer layers than the checkpoint has, were computed without an error.
#[test]
fn a_configuration_that_computes_something_else_or_has_absurd_sizes_is_refused() {
    let folder = copy("bert-cls");
    let path = folder.path().join("config.json");
    let config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let refusal = |key: &str, value: Value| {
        let mut changed = config.clone();
        changed[key] = value;
        std::fs::write(&path, changed.to_string()).unwrap();
        EmbeddingModel::open(folder.path(), None).err().map(|error| error.to_string())
    };
    for (key, value, expected) in [
        ("is_decoder", json!(true), "`is_decoder` is true; expected false"),
        ("quantization_config", json!({"bits": 4}), "`quantization_config` is {\"bits\":4}; expected no value"),
        ("embedding_scale", json!(2), "`embedding_scale` is 2, a key that querl does not know"),
        ("num_hidden_layers", json!(1), "`num_hidden_layers` is 1; model.safetensors has more layers"),
        ("num_hidden_layers", json!(1_000_000_000), "expected a whole number from 1 to 1024"),
        ("hidden_size", json!(0), "`hidden_size` is 0; expected a whole number from 1 to 131072"),
        ("vocab_size", json!(1_u64 << 60), "`vocab_size` is 1152921504606846976; expected"),
        ("num_attention_heads", json!(3), "hidden_size 32 is not a multiple of num_attention_heads 3"),
        ("intermediate_size", json!(null), "has no `intermediate_size`"),
    ] {
        let found = refusal(key, value).unwrap();
        assert!(found.contains("config.json: ") && found.contains(expected), "{found}");
    }
    // The keys of bge-small-zh-v1.5, bge-m3 and cross-encoders of sentence-transformers.
    for (key, value) in [
        ("pooler_type", json!("first_token_transform")),
        ("directionality", json!("bidi")),
        ("output_past", json!(true)),
        ("position_embedding_type", json!("absolute")),
        ("torch_dtype", json!("float32")),
        ("hidden_dropout_prob", json!(0.1)),
        ("sentence_transformers", json!({"activation_fn": "torch.nn.modules.linear.Identity"})),
    ] {
        assert_eq!(refusal(key, value), None, "{key}");
    }
}
