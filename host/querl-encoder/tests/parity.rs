//! Against what transformers makes of the same checkpoints (tests/reference/encoders.py).
#![allow(clippy::unwrap_used)]

use querl_core::ports::{Embedder, PairScorer};
use querl_encoder::{CrossEncoder, EmbeddingModel};
use serde_json::Value;
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

/// f32 sums in another order: a few units in the last place of numbers near 1.
const TOLERANCE: f64 = 2e-6;

#[test]
fn vectors_are_those_of_transformers() {
    for name in ["bert-cls", "xlm-roberta-mean"] {
        let expected = expected(name);
        let model = EmbeddingModel::open(&golden(name)).unwrap();
        assert_eq!(model.dimension(), 32);
        let vectors = model.embed(&texts(&expected)).unwrap();
        for (vector, wanted) in vectors.iter().zip(expected["vectors"].as_array().unwrap()) {
            for (number, wanted) in vector.iter().zip(wanted.as_array().unwrap()) {
                let difference = (f64::from(*number) - wanted.as_f64().unwrap()).abs();
                assert!(difference < TOLERANCE, "{name}: {difference}");
            }
        }
    }
}

#[test]
fn scores_are_those_of_transformers() {
    for name in ["bert-reranker", "xlm-roberta-reranker"] {
        let expected = expected(name);
        let model = CrossEncoder::open(&golden(name)).unwrap();
        let query = expected["query"].as_str().unwrap();
        let logits = model.logits(query, &texts(&expected)).unwrap();
        let scores = model.scores(query, &texts(&expected)).unwrap();
        assert_eq!(logits.len(), 4);
        for ((logit, score), wanted) in logits.iter().zip(scores).zip(expected["logits"].as_array().unwrap()) {
            let wanted = wanted.as_f64().unwrap();
            assert!((f64::from(*logit) - wanted).abs() < 4.0 * TOLERANCE, "{name}: {logit} {wanted}");
            assert!((score - 1.0 / (1.0 + (-wanted).exp())).abs() < TOLERANCE, "{name}");
        }
    }
}

#[test]
fn padding_changes_no_vector() {
    let model = EmbeddingModel::open(&golden("xlm-roberta-mean")).unwrap();
    let expected = expected("xlm-roberta-mean");
    let texts = texts(&expected);
    let together = model.embed(&texts).unwrap();
    for (text, vector) in texts.iter().zip(&together) {
        let alone = model.embed(&[text]).unwrap();
        let largest = alone[0].iter().zip(vector).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest < 1e-6, "{text}: {largest}");
    }
}

#[test]
fn the_digest_is_of_what_decides() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::copy(golden("bert-cls").join(name), folder.path().join(name)).unwrap();
    }
    let digest = || EmbeddingModel::open(folder.path()).unwrap().digest().to_owned();
    let first = digest();
    std::fs::write(folder.path().join("README.md"), "no part of it").unwrap();
    assert_eq!(digest(), first);
    std::fs::create_dir(folder.path().join("1_Pooling")).unwrap();
    std::fs::write(folder.path().join("1_Pooling/config.json"), r#"{"pooling_mode_mean_tokens": true}"#).unwrap();
    assert_ne!(digest(), first);
}

#[test]
fn what_is_no_such_model_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = |text: &str| {
        std::fs::write(folder.path().join("config.json"), text).unwrap();
        CrossEncoder::open(folder.path()).err().unwrap().to_string()
    };
    let said = error(r#"{"model_type": "qwen2"}"#);
    assert!(said.ends_with("config.json: model_type is `qwen2`; expected bert or xlm-roberta"), "{said}");
    let said = error(r#"{"model_type": "bert", "id2label": {"0": "a", "1": "b"}}"#);
    assert!(said.ends_with("config.json: has 2 labels; a reranker has 1"), "{said}");
    let said = error(r#"{"model_type": "bert", "position_embedding_type": "relative_key"}"#);
    assert!(said.ends_with("position_embedding_type is `relative_key`; expected absolute"), "{said}");
    let said = error(r#"{"model_type": "bert", "id2label": {"0": "a"}}"#);
    assert!(said.contains("model.safetensors: cannot be read"), "{said}");
    // A network without the head of a reranker.
    let said = CrossEncoder::open(&golden("bert-cls")).err().unwrap().to_string();
    assert!(said.contains("labels") || said.contains("pooler") || said.contains("classifier"), "{said}");
}
