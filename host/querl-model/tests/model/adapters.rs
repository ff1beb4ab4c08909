//! Adapters: initialisation, dropout in a forward pass, and refused files.

use crate::{golden, json};
use candle_core::{DType, Tensor};
use querl_model::{
    Decoder, Decoding, Dropout, GenerationRequest, LoraAdapter, LoraSettings, Modules, PackedBatch, Pass,
    SamplingSettings, SavedCopies, Weights, generate, load_tensors, save_tensors,
};
use std::collections::{BTreeMap, BTreeSet};

fn decoder(name: &str) -> Decoder {
    Decoder::load(&golden(&format!("decoders/{name}")), Weights::Frozen).unwrap()
}

fn adapter(name: &str, decoder: &Decoder) -> LoraAdapter {
    LoraAdapter::load(&golden(&format!("lora/{name}")), decoder.config()).unwrap()
}

const SEQUENCES: [&[u32]; 3] = [&[3, 14, 15, 9, 26], &[3, 14, 15, 9, 26, 5, 35], &[8, 9, 7]];

fn hidden(decoder: &Decoder, sequences: &[&[u32]], pass: &Pass<'_>) -> Vec<Vec<f32>> {
    let batch = PackedBatch::new(sequences.iter().copied());
    let rows: Vec<u32> = (0..batch.n_rows() as u32).collect();
    decoder.hidden_at(&batch, &rows, pass).unwrap().to_vec2().unwrap()
}

fn worst(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn a_fresh_adapter_changes_nothing() {
    for (base, modules, copies) in [
        ("qwen2-tied", vec!["embed_tokens"], SavedCopies::Tied),
        ("qwen2-untied", vec!["embed_tokens", "lm_head"], SavedCopies::Apart),
        ("qwen3-tied", vec![], SavedCopies::Apart),
    ] {
        let decoder = decoder(base);
        let settings = LoraSettings {
            use_dora: true,
            rank_pattern: [("q_proj".to_owned(), 2)].into_iter().collect(),
            modules_to_save: modules.iter().map(|name| (*name).to_owned()).collect(),
            saved_copies: copies,
            ..LoraSettings::all_linear(4, 8.0)
        };
        let adapter = LoraAdapter::new(&decoder, settings, 3).unwrap();
        let (bare, adapted) = (Pass::with(None), Pass::with(Some(&adapter)));
        let (before, after) = (hidden(&decoder, &SEQUENCES, &bare), hidden(&decoder, &SEQUENCES, &adapted));
        assert!(worst(&before, &after) < 1e-5, "{base}: {}", worst(&before, &after));
        let q = &adapter.vars()["model.layers.0.self_attn.q_proj.lora_A.weight"];
        assert_eq!(q.dims()[0], 2);
    }
}

#[test]
fn dropout_does_not_depend_on_how_rows_are_packed() {
    for (base, name) in [("qwen3-tied", "qwen3-tied"), ("qwen2-untied", "qwen2-untied-dora")] {
        let decoder = decoder(base);
        let adapter = adapter(name, &decoder);
        let pass = Pass { dropout: Some(Dropout { p: 0.3, seed: 11 }), ..Pass::with(Some(&adapter)) };
        let together = hidden(&decoder, &SEQUENCES, &pass);
        let apart: Vec<Vec<f32>> =
            SEQUENCES.iter().rev().map(|one| hidden(&decoder, &[one], &pass)).rev().flatten().collect();
        assert!(worst(&together, &apart) < 1e-5, "{}", worst(&together, &apart));
        // Rows of a shared prefix have the same dropout mask, so that they can be computed once.
        assert!(worst(&together[..5], &together[5..10]) < 1e-5);
        assert!(worst(&together, &hidden(&decoder, &SEQUENCES, &Pass::with(Some(&adapter)))) > 1e-2);
        let other = Pass { dropout: Some(Dropout { p: 0.3, seed: 12 }), ..pass };
        assert!(worst(&together, &hidden(&decoder, &SEQUENCES, &other)) > 1e-2);
    }
}

#[test]
fn every_trained_tensor_gets_a_gradient_under_dropout() {
    for (base, name) in
        [("qwen3-tied", "qwen3-tied"), ("qwen3-tied", "qwen3-tied-dora-rslora"), ("qwen2-untied", "qwen2-untied-ends")]
    {
        let decoder = decoder(base);
        let adapter = adapter(name, &decoder);
        let pass = Pass { dropout: Some(Dropout { p: 0.3, seed: 11 }), ..Pass::with(Some(&adapter)) };
        let batch = PackedBatch::new(SEQUENCES);
        let rows: Vec<u32> = (0..batch.n_rows() as u32).collect();
        let states = decoder.hidden_at(&batch, &rows, &pass).unwrap();
        let targets = SEQUENCES.concat().iter().map(|id| (id + 1) % 64).collect();
        let logprobs = decoder.token_logprobs(&states, targets, 1.0, Some(&adapter)).unwrap();
        let gradients = logprobs.narrow(1, 0, 1).unwrap().sum_all().unwrap().backward().unwrap();
        for (path, var) in adapter.vars() {
            let gradient = gradients.get(var).unwrap_or_else(|| panic!("{name}: no gradient reached {path}"));
            assert!(gradient.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap() > 0.0, "{name}: {path}");
        }
    }
}

#[test]
fn what_is_sampled_is_what_is_trained_whatever_the_adapter() {
    for (base, name) in [
        ("qwen2-tied", "qwen2-tied-copies"),
        ("qwen2-untied", "qwen2-untied-dora"),
        ("qwen2-untied", "qwen2-untied-ends"),
        ("qwen2-tied", "qwen2-tied-pair"),
        ("qwen3-untied", "qwen3-untied-head"),
        ("qwen3-untied", "qwen3-untied-patterns"),
    ] {
        let decoder = decoder(base);
        let adapter = adapter(name, &decoder);
        let prompt: &[u32] = &[3, 14, 15, 9];
        let requests = [GenerationRequest { prompt, seed: 5, n: 2 }];
        let settings = SamplingSettings { max_new_tokens: 6, ..SamplingSettings::default() };
        let answers =
            generate(&decoder, Some(&adapter), &requests, Decoding::Sample, &settings, &BTreeSet::new()).unwrap();
        for answer in &answers {
            let sequence = [prompt, answer.token_ids.as_slice()].concat();
            let states = decoder.hidden_states(&PackedBatch::new([sequence.as_slice()]), Some(&adapter)).unwrap();
            let states = states.narrow(0, prompt.len() - 1, answer.token_ids.len()).unwrap();
            let found = decoder.token_logprobs(&states, answer.token_ids.clone(), 1.0, Some(&adapter)).unwrap();
            for (found, sampled) in found.to_vec2::<f32>().unwrap().iter().zip(&answer.logprobs) {
                assert!((found[0] - sampled).abs() < 1e-5, "{name}: {} against {sampled}", found[0]);
            }
        }
    }
}

#[test]
fn a_view_without_gradient_follows_the_values() {
    let decoder = decoder("qwen3-untied");
    let adapter = adapter("qwen3-untied-head", &decoder);
    let view = adapter.without_gradient();
    for var in adapter.vars().values() {
        var.set(&(var.as_tensor() * 0.5).unwrap()).unwrap();
    }
    let batch = PackedBatch::new(SEQUENCES);
    let logits = |adapter: &LoraAdapter| {
        let hidden = decoder.hidden_states(&batch, Some(adapter)).unwrap();
        decoder.logits(&hidden, Some(adapter)).unwrap()
    };
    let (found, expected) = (logits(&view), logits(&adapter));
    assert_eq!(found.to_vec2::<f32>().unwrap(), expected.to_vec2::<f32>().unwrap());
    assert!(!found.track_op());
}

/// Symptom: `tensor lm_head.lora_A.weight belongs to no layer that adapter_config.json adapts on this model`.
#[test]
fn a_tied_head_follows_the_embedding_s_matrices() {
    let decoder = decoder("qwen2-tied");
    let adapter = adapter("qwen2-tied-pair", &decoder);
    let (view, copy) = (adapter.without_gradient(), adapter.snapshot().unwrap());
    let hidden = decoder.hidden_states(&PackedBatch::new(SEQUENCES), None).unwrap();
    let logits = |adapter: &LoraAdapter| decoder.logits(&hidden, Some(adapter)).unwrap().to_vec2::<f32>().unwrap();
    let before = logits(&adapter);
    assert_eq!(before, logits(&copy));
    let b = &adapter.vars()["model.embed_tokens.lora_embedding_B"];
    b.set(&(b.as_tensor() * 2.0).unwrap()).unwrap();
    assert_ne!(before, logits(&adapter));
    assert_eq!(logits(&adapter), logits(&view));
    assert_eq!(before, logits(&copy));
}

/// PEFT ties them; a program that moved the model to a GPU after that may have trained them separately.
#[test]
fn a_tied_head_with_other_matrices_than_the_embedding_s_is_refused() {
    let other = |tensors: &mut BTreeMap<String, Tensor>| {
        let a = tensors.get_mut("base_model.model.lm_head.lora_A.weight").unwrap();
        *a = (&*a * 2.0).unwrap();
    };
    let error = refusal_of("qwen2-tied-pair", "qwen2-tied", |_| {}, other);
    assert!(error.contains("the LoRA matrices of `lm_head` are not those of `model.embed_tokens`"), "{error}");
    assert!(error.contains("set it to false there and add `lm_head` to target_modules"), "{error}");
}

/// Symptom: `no tensor lm_head.weight there`; PEFT ignores `ensure_weight_tying` where nothing is tied.
#[test]
fn ensure_weight_tying_has_no_effect_on_an_untied_model() {
    let (base, name) = ("qwen3-untied", "qwen3-untied-head");
    let (decoder, folder) = (decoder(base), tempfile::tempdir().unwrap());
    let from = golden(&format!("lora/{name}"));
    let mut config = json(&from.join("adapter_config.json"));
    config["ensure_weight_tying"] = true.into();
    std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::copy(from.join("adapter_model.safetensors"), folder.path().join("adapter_model.safetensors")).unwrap();
    let (found, expected) = (LoraAdapter::load(folder.path(), decoder.config()).unwrap(), adapter(name, &decoder));
    assert_eq!(found.settings(), expected.settings());
    assert!(found.vars().keys().eq(expected.vars().keys()));
}

#[test]
fn targets_that_are_no_layers_are_named() {
    let decoder = decoder("qwen3-tied");
    let refusal = |target_modules: Modules| {
        let settings = LoraSettings { target_modules, ..LoraSettings::all_linear(4, 8.0) };
        LoraAdapter::new(&decoder, settings, 1).err().unwrap().to_string()
    };
    let error = refusal(Modules::Named(vec!["q_proj".into(), "q_prj".into()]));
    let expected = "lora: target_modules: `q_prj` is not a layer of this model; expected `all-linear`";
    assert!(error.starts_with(expected), "{error}");
    let error = refusal(Modules::Pattern(".*nothing".into()));
    assert!(error.starts_with("lora: target_modules: no layer of this model is among them"), "{error}");
    assert!(refusal(Modules::Pattern("(".into())).contains("`(` is not a regular expression"));
}

/// Changes the configuration and the tensors of a golden adapter; returns the error.
fn refusal_of(
    name: &str,
    base: &str,
    change: impl Fn(&mut serde_json::Value),
    tensors: impl Fn(&mut BTreeMap<String, Tensor>),
) -> String {
    let (from, folder) = (golden(&format!("lora/{name}")), tempfile::tempdir().unwrap());
    let mut config = json(&from.join("adapter_config.json"));
    change(&mut config);
    std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
    let mut stored = load_tensors(&from.join("adapter_model.safetensors")).unwrap().into_iter().collect();
    tensors(&mut stored);
    save_tensors(&folder.path().join("adapter_model.safetensors"), &stored).unwrap();
    let error = LoraAdapter::load(folder.path(), decoder(base).config()).err().unwrap().to_string();
    error.split("/adapter_").last().unwrap().to_owned()
}

#[test]
fn an_adapter_of_another_model_is_refused_in_one_sentence() {
    let none = |_: &mut serde_json::Value| {};
    let same = |_: &mut BTreeMap<String, Tensor>| {};
    let error = refusal_of("qwen3-tied", "qwen2-tied", none, same);
    assert_eq!(
        error,
        "model.safetensors: tensor `model.layers.0.self_attn.k_proj.lora_B.weight` has shape [32, 4]; this model expects \
         [16, 4]: the adapter belongs to a model of another width"
    );
    let resized = |tensors: &mut BTreeMap<String, Tensor>| {
        let embedding = tensors.get_mut("base_model.model.model.embed_tokens.weight").unwrap();
        *embedding = Tensor::cat(&[&*embedding, &*embedding], 0).unwrap();
    };
    let error = refusal_of("qwen3-tied-embedding", "qwen3-tied", none, resized);
    assert_eq!(
        error,
        "model.safetensors: tensor `model.embed_tokens.weight` has shape [128, 32]; this model expects [64, 32]: the adapter was \
         trained with another vocabulary; take the base that it was trained on, with its embeddings resized"
    );
    let in_memory = |tensors: &mut BTreeMap<String, Tensor>| {
        let renamed = std::mem::take(tensors).into_iter();
        let renamed = renamed.map(|(name, tensor)| (name.replace(".lora_A.weight", ".lora_A.default.weight"), tensor));
        tensors.extend(renamed);
    };
    let error = refusal_of("qwen3-tied", "qwen3-tied", none, in_memory);
    assert!(error.contains(".lora_A.default.weight` belongs to no layer"), "{error}");
    assert!(error.ends_with("save_pretrained()"), "{error}");
    let words = refusal_of("qwen3-tied", "qwen3-tied", |config| config["r"] = "16".into(), same);
    assert!(words.contains("invalid type: string \"16\", expected a whole number"), "{words}");
    let missing = |tensors: &mut BTreeMap<String, Tensor>| drop(tensors.pop_last());
    assert!(refusal_of("qwen3-tied", "qwen3-tied", none, missing).contains("which `adapter_config.json` requires"));
}

/// Symptom: `NaN`, which Python writes, was refused with the JSON parser's message.
#[test]
fn a_setting_that_is_no_number_is_named_with_its_line() {
    let (from, folder) = (golden("lora/qwen3-tied"), tempfile::tempdir().unwrap());
    std::fs::copy(from.join("adapter_model.safetensors"), folder.path().join("adapter_model.safetensors")).unwrap();
    for value in ["NaN", "Infinity", "-Infinity"] {
        for (text, line) in
            [("{\n \"r\": 4,\n \"lora_alpha\": VALUE,\n", 3), ("{\"r\": 4, \"lora_alpha\": VALUE, \n", 1)]
        {
            let text = text.replace("VALUE", value) + "\"peft_type\": \"LORA\"}";
            std::fs::write(folder.path().join("adapter_config.json"), text).unwrap();
            let error = LoraAdapter::load(folder.path(), decoder("qwen3-tied").config()).err().unwrap().to_string();
            let expected = format!(
                "adapter_config.json: lora_alpha in line {line} is {value}; expected a number: correct it, or save the adapter again"
            );
            assert!(error.ends_with(&expected), "{error}");
        }
    }
}

#[test]
fn nan_in_an_adapter_or_a_saved_module_is_named() {
    for (name, base, tensor) in [
        ("qwen3-tied-bf16", "qwen3-tied", "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"),
        ("qwen3-tied-embedding", "qwen3-tied", "base_model.model.model.embed_tokens.weight"),
    ] {
        let damaged = |tensors: &mut BTreeMap<String, Tensor>| {
            let found = tensors.get_mut(tensor).unwrap();
            *found = found.affine(0.0, f64::NEG_INFINITY).unwrap();
        };
        let error = refusal_of(name, base, |_| {}, damaged);
        let expected = format!("model.safetensors: tensor `{tensor}` holds -Inf at [0, 0]; the file is damaged: ");
        assert!(error.starts_with(&expected), "{error}");
    }
}

#[test]
fn what_is_not_supported_is_refused_by_its_key() {
    let same = |_: &mut BTreeMap<String, Tensor>| {};
    for (key, value, expected) in [
        ("peft_type", "IA3".into(), "peft_type is `IA3`; expected `LORA`"),
        ("bias", "all".into(), "bias is `all`; expected `none`"),
        ("lora_bias", true.into(), "lora_bias is set and not supported"),
        (
            "init_lora_weights",
            "pissa_niter_4".into(),
            "init_lora_weights is `pissa_niter_4`, which changes the base too",
        ),
        ("modules_to_save", serde_json::json!(["norm"]), "modules_to_save: `norm` is not supported"),
        ("r", 0.into(), "r is 0; expected at least 1"),
        ("target_modules", serde_json::Value::Null, "target_modules is null"),
        ("rank_pattern", serde_json::json!({"q_proj": 2}), "has shape [4, 32]; this model expects [2, 32]"),
    ] {
        let error = refusal_of("qwen3-tied", "qwen3-tied", |config| config[key] = value.clone(), same);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_classifier_s_head_is_kept_and_saved() {
    let decoder = decoder("qwen3-tied");
    let folder = tempfile::tempdir().unwrap();
    let from = golden("lora/qwen3-tied-bf16");
    let mut config = json(&from.join("adapter_config.json"));
    (config["task_type"], config["modules_to_save"]) = ("SEQ_CLS".into(), serde_json::json!(["classifier", "score"]));
    std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
    let mut tensors: BTreeMap<_, _> =
        load_tensors(&from.join("adapter_model.safetensors")).unwrap().into_iter().collect();
    let score = Tensor::arange(0f32, 160.0, &candle_core::Device::Cpu).unwrap().reshape((5, 32)).unwrap();
    tensors.insert("base_model.model.score.weight".into(), score.to_dtype(DType::BF16).unwrap());
    save_tensors(&folder.path().join("adapter_model.safetensors"), &tensors).unwrap();

    let adapter = LoraAdapter::load(folder.path(), decoder.config()).unwrap();
    assert!(!adapter.vars().keys().any(|name| name.contains("score")));
    let again = tempfile::tempdir().unwrap();
    adapter.save(again.path(), "base").unwrap();
    let saved = load_tensors(&again.path().join("adapter_model.safetensors")).unwrap();
    assert_eq!(saved["base_model.model.score.weight"].to_vec2::<f32>().unwrap(), score.to_vec2::<f32>().unwrap());
    let saved = json(&again.path().join("adapter_config.json"));
    assert_eq!((&saved["task_type"], &saved["modules_to_save"]), (&config["task_type"], &config["modules_to_save"]));
}
