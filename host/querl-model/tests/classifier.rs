//! Classifiers beside transformers and PEFT (tests/reference/classifiers.py).

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use querl_core::config::BaseDtype;
use querl_model::classifier::{Classifier, Labels, Tuning};
use querl_model::{LoraSettings, Weights};
use serde_json::Value;
use std::path::{Path, PathBuf};

const DTYPE: BaseDtype = BaseDtype::F32;
const LABELS: [&str; 5] = ["售前", "售后", "诚实", "有帮助", "无伤害"];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden").join(name)
}

struct Expected {
    texts: Vec<Vec<u32>>,
    logits: Vec<Vec<f64>>,
}

fn expected(name: &str) -> Expected {
    let text = std::fs::read_to_string(golden("classifiers").join(name).join("golden.json")).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    Expected {
        texts: serde_json::from_value(file["texts"].clone()).unwrap(),
        logits: serde_json::from_value(file["logits"].clone()).unwrap(),
    }
}

fn logits(classifier: &Classifier, texts: &[Vec<u32>], tokens_per_pass: usize) -> Vec<Vec<f64>> {
    let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    classifier.logits_of_all(&texts, tokens_per_pass).unwrap()
}

fn assert_near(found: &[Vec<f64>], expected: &[Vec<f64>], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() < tolerance, "{found} is not {expected}");
    }
}

fn loaded(name: &str) -> Classifier {
    Classifier::load(&golden("classifiers").join(name), Weights::Frozen, DTYPE).unwrap()
}

#[test]
fn logits_are_those_of_transformers_from_safetensors_and_from_pickled_weights() {
    for name in ["qwen2", "qwen3"] {
        let (classifier, expected) = (loaded(name), expected(name));
        assert_eq!(classifier.labels().names(), LABELS, "{name}");
        assert_near(&logits(&classifier, &expected.texts, 1000), &expected.logits, 1e-4);
    }
}

#[test]
fn logits_with_pefts_adapter_and_head_are_those_of_peft() {
    let (base, adapter) = (golden("decoders/qwen3-tied"), golden("classifiers/qwen3-peft"));
    let (classifier, expected) = (Classifier::load_adapted(&base, &adapter, DTYPE).unwrap(), expected("qwen3-peft"));
    assert_near(&logits(&classifier, &expected.texts, 1000), &expected.logits, 1e-4);
}

#[test]
fn what_a_text_comes_with_does_not_change_its_logits() {
    let (classifier, expected) = (loaded("qwen2"), expected("qwen2"));
    let together = logits(&classifier, &expected.texts, 1000);
    assert_near(&logits(&classifier, &expected.texts, 8), &together, 1e-5);
    for (text, row) in expected.texts.iter().zip(&together) {
        assert_near(&logits(&classifier, std::slice::from_ref(text), 1000), std::slice::from_ref(row), 1e-5);
        let padded = [text.as_slice(), &[0, 0, 0]].concat();
        assert_near(&logits(&classifier, &[padded], 1000), std::slice::from_ref(row), 1e-5);
    }
}

#[test]
fn a_whole_classifier_and_one_with_an_adapter_are_read_as_they_were_written() {
    let base = golden("decoders/qwen2-untied");
    let labels = Labels::new(LABELS.map(String::from).to_vec(), None).unwrap();
    let texts = expected("qwen2").texts;
    let folder = tempfile::tempdir().unwrap();
    let whole = Classifier::fresh(&base, labels.clone(), &Tuning::Full, (DTYPE, 3)).unwrap();
    assert!(whole.vars().contains_key("score.weight") && !whole.vars().contains_key("lm_head.weight"));
    whole.save(folder.path(), &base).unwrap();
    let again = Classifier::load(folder.path(), Weights::Frozen, DTYPE).unwrap();
    assert_near(&logits(&again, &texts, 1000), &logits(&whole, &texts, 1000), 1e-6);
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.path().join("config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"][0], "Qwen2ForSequenceClassification");
    assert_eq!((&config["id2label"]["3"], &config["label2id"]["无伤害"]), (&"有帮助".into(), &4.into()));

    let adapter = tempfile::tempdir().unwrap();
    let tuning = Tuning::Lora(LoraSettings::all_linear(4, 8.0));
    let adapted = Classifier::fresh(&base, labels, &tuning, (DTYPE, 3)).unwrap();
    adapted.save(adapter.path(), &base).unwrap();
    let again = Classifier::load_adapted(&base, adapter.path(), DTYPE).unwrap();
    assert_near(&logits(&again, &texts, 1000), &logits(&adapted, &texts, 1000), 1e-6);
    let settings = std::fs::read_to_string(adapter.path().join("adapter_config.json")).unwrap();
    let settings: Value = serde_json::from_str(&settings).unwrap();
    assert_eq!((&settings["task_type"], &settings["modules_to_save"][0]), (&"SEQ_CLS".into(), &"score".into()));
}

#[test]
fn what_is_no_classifier_is_told() {
    let error = |directory: &Path| match Classifier::load(directory, Weights::Frozen, DTYPE) {
        Ok(_) => panic!("loaded"),
        Err(error) => error.to_string(),
    };
    let found = error(&golden("decoders/qwen2-tied"));
    assert!(found.contains("`id2label`") || found.contains("no tensor `score.weight` there"), "{found}");
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("classifiers/qwen2").join(file), folder.path().join(file)).unwrap();
    }
    std::fs::write(folder.path().join("label_mapping.json"), r#"{"id_to_label": {"0": "a", "1": "b"}}"#).unwrap();
    let found = error(folder.path());
    assert!(found.contains("`score.weight` has shape [5, 32]; the 2 labels"), "{found}");
    let path = folder.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap().replace("Qwen2ForSequenceClassification", "BertModel");
    std::fs::write(&path, text).unwrap();
    let found = error(folder.path());
    assert!(found.contains("architecture `BertModel` is not supported"), "{found}");
}
