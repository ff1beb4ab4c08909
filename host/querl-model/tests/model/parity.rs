//! Logits and gradients against transformers and PEFT, on tiny random checkpoints made by `tests/reference/decoders.py` and
//! `tests/reference/lora.py`; storage types; chat templates against `apply_chat_template` (`tests/reference/template.py`).
//!
//! ```python
//! out = model(input_ids, attention_mask=attention_mask)
//! loss = cross_entropy(out.logits[:, :-1][valid], input_ids[:, 1:][valid])  # mean over valid next tokens
//! loss.backward()
//! ```

use crate::{golden, json, values};
use candle_core::{Tensor, Var};
use querl_core::config::BaseDtype;
use querl_model::{
    ChatTemplate, Decoder, DecoderConfig, Dropout, LoraAdapter, PackedBatch, Pass, SecondOpinion, Weights, load_tensors,
};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

const TOLERANCE: f32 = 1e-4;

fn sequences(golden: &HashMap<String, Tensor>) -> Vec<Vec<u32>> {
    let ids: Vec<Vec<i64>> = golden["input_ids"].to_vec2().unwrap();
    let mask: Vec<Vec<i64>> = golden["attention_mask"].to_vec2().unwrap();
    ids.iter()
        .zip(mask)
        .map(|(ids, mask)| ids.iter().zip(mask).filter(|(_, keep)| *keep == 1).map(|(id, _)| *id as u32).collect())
        .collect()
}

/// Compares to within the tolerance, relative to the largest expected value where that is above 1.
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1f32, |max, x| max.max(x.abs()));
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst <= TOLERANCE * scale, "{what}: off by {worst}, largest value {scale}");
}

/// Mean next-token cross-entropy over all valid tokens.
fn loss(decoder: &Decoder, pass: &Pass<'_>, sequences: &[Vec<u32>]) -> Tensor {
    let batch = PackedBatch::new(sequences.iter().map(Vec::as_slice));
    let hidden = hidden(decoder, &batch, pass);
    let (mut rows, mut targets) = (Vec::new(), Vec::new());
    for (index, sequence) in sequences.iter().enumerate() {
        rows.extend((0..sequence.len() - 1).map(|position| batch.row_of(index, position) as u32));
        targets.extend_from_slice(&sequence[1..]);
    }
    let n_rows = rows.len();
    let hidden = hidden.index_select(&Tensor::from_vec(rows, n_rows, hidden.device()).unwrap(), 0).unwrap();
    let logprobs = decoder.token_logprobs(&hidden, targets, 1.0, pass.adapter).unwrap().narrow(1, 0, 1).unwrap();
    logprobs.mean_all().unwrap().neg().unwrap()
}

fn hidden(decoder: &Decoder, batch: &PackedBatch, pass: &Pass<'_>) -> Tensor {
    let rows: Vec<u32> = (0..batch.n_rows() as u32).collect();
    decoder.hidden_at(batch, &rows, pass).unwrap()
}

fn check_logits(decoder: &Decoder, pass: &Pass<'_>, golden: &HashMap<String, Tensor>) {
    let sequences = sequences(golden);
    let batch = PackedBatch::new(sequences.iter().map(Vec::as_slice));
    let logits = decoder.logits(&hidden(decoder, &batch, pass), pass.adapter).unwrap();
    for (row, sequence) in sequences.iter().enumerate() {
        let found = values(&logits.narrow(0, batch.row_of(row, 0), sequence.len()).unwrap());
        let expected = values(&golden["logits"].get(row).unwrap().narrow(0, 0, sequence.len()).unwrap());
        assert_close(&format!("logits of row {row}"), &found, &expected);
    }
}

fn check_gradients(loss: &Tensor, vars: &BTreeMap<String, Var>, prefix: &str, golden: &HashMap<String, Tensor>) {
    assert_close("loss", &values(loss), &values(&golden["loss"]));
    let gradients = loss.backward().unwrap();
    assert_eq!(vars.len(), golden.keys().filter(|key| key.starts_with("grad.")).count());
    for (name, var) in vars {
        let found = values(gradients.get(var).unwrap_or_else(|| panic!("no gradient reached {name}")));
        assert!(found.iter().any(|g| *g != 0.0), "the gradient of {name} is zero");
        assert_close(name, &found, &values(&golden[&format!("grad.{prefix}{name}")]));
    }
}

/// The golden checkpoints of `tests/reference/decoders.py`.
const DECODERS: [&str; 8] = [
    "qwen2-tied",
    "qwen2-untied",
    "qwen3-tied",
    "qwen3-untied",
    "qwen3-bias",
    "llama-bias",
    "llama3-scaled",
    "mistral",
];

#[test]
fn decoders_agree_with_transformers_in_logits_and_gradients() {
    for name in DECODERS {
        let directory = golden(&format!("decoders/{name}"));
        let golden = load_tensors(&directory.join("golden.safetensors")).unwrap();
        let decoder = Decoder::load(&directory, Weights::Trained).unwrap();
        let pass = Pass::default();
        check_logits(&decoder, &pass, &golden);
        check_gradients(&loss(&decoder, &pass, &sequences(&golden)), decoder.vars(), "", &golden);
    }
}

#[test]
fn no_rows_have_no_hidden_states() {
    for weights in [Weights::Frozen, Weights::Trained] {
        let decoder = Decoder::load(&golden("decoders/qwen3-tied"), weights).unwrap();
        let width = decoder.config().hidden_size;
        let batch = PackedBatch::new([[1, 2, 3].as_slice()]);
        let found = decoder.hidden_at(&batch, &[], &Pass::default()).unwrap();
        assert_eq!(found.dims(), [0, width]);
        assert_eq!(decoder.token_logprobs(&found, Vec::new(), 1.0, None).unwrap().dims(), [0, 2]);
        let empty = PackedBatch::new(std::iter::empty());
        assert_eq!(decoder.hidden_states(&empty, None).unwrap().dims(), [0, width]);
        assert_eq!(decoder.hidden_at(&empty, &[], &Pass::default()).unwrap().dims(), [0, width]);
        assert!(decoder.hidden_at(&empty, &[0], &Pass::default()).is_err());
        // As many rows as the batch has, but not its own.
        let error = decoder.hidden_at(&batch, &[0, 1, 3], &Pass::default()).unwrap_err();
        assert!(error.to_string().contains("there is no row 3 among 3"), "{error}");
    }
}

#[test]
fn both_forms_of_config_json_are_read() {
    for name in DECODERS {
        let directory = golden(&format!("decoders/{name}"));
        let classic = DecoderConfig::load(&directory.join("config.json")).unwrap();
        assert_eq!(DecoderConfig::load(&directory.join("config.transformers-5.json")).unwrap(), classic, "{name}");
    }
}

/// A golden checkpoint with another `config.json`.
fn with_config(name: &str, old: &str, new: &str) -> tempfile::TempDir {
    let (from, folder) = (golden(&format!("decoders/{name}")), tempfile::tempdir().unwrap());
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    assert!(config.contains(old), "{name} has no {old}");
    std::fs::write(folder.path().join("config.json"), config.replace(old, new)).unwrap();
    std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    folder
}

/// They are named before anything is computed.
#[test]
fn tensors_without_a_place_or_of_another_shape_are_refused() {
    let refused = |name: &str, old: &str, new: &str| {
        Decoder::load(with_config(name, old, new).path(), Weights::Frozen).err().unwrap().to_string()
    };
    let error = refused("qwen3-bias", "\"attention_bias\": true", "\"attention_bias\": false");
    assert!(error.contains("_proj.bias` has no place"), "{error}");
    let error = refused("qwen2-untied", "\"intermediate_size\": 48", "\"intermediate_size\": 56");
    assert!(error.contains("_proj.weight` has shape [") && error.contains("config.json makes it ["), "{error}");
}

#[test]
fn a_configuration_that_changes_attention_or_rope_in_an_unsupported_way_is_refused() {
    let refused = |name: &str, old: &str, new: &str| {
        let folder = with_config(name, old, new);
        DecoderConfig::load(&folder.path().join("config.json")).err().map(|error| error.to_string())
    };
    let window = refused("mistral", "\"sliding_window\": null", "\"sliding_window\": 32").unwrap();
    assert!(window.contains("sliding_window is 32, below max_position_embeddings 64"), "{window}");
    // Without the key transformers takes a window of 4096, more than this model's 64 positions: it has no effect.
    assert_eq!(refused("mistral", "  \"sliding_window\": null,\n", ""), None);
    let yarn = refused("llama3-scaled", "\"llama3\"", "\"yarn\"").unwrap();
    assert!(yarn.contains("rope type `yarn` is not supported; expected `default` or `llama3`"), "{yarn}");
    // Scaling in either form, with either key, next to another form or without a type, is read or refused, never ignored.
    let null = "\"rope_theta\": 500000.0";
    for (added, expected) in [
        ("\"rope_parameters\": {\"rope_type\": \"default\"}", None),
        ("\"rope_parameters\": {\"type\": \"yarn\", \"factor\": 4.0}", Some("rope type `yarn` is not supported")),
        ("\"rope_parameters\": {\"factor\": 4.0}", Some("the rope parameter `factor` is not supported")),
        ("\"rope_parameters\": {\"partial_rotary_factor\": 0.5}", Some("`partial_rotary_factor` is not supported")),
        ("\"rope_parameters\": {\"type\": \"llama3\", \"rope_type\": \"default\"}", Some("expected one rope type")),
    ] {
        let found = refused("llama3-scaled", null, &format!("{null}, {added}"));
        assert_eq!(found.is_some(), expected.is_some(), "{added}: {found:?}");
        assert!(found.unwrap_or_default().contains(expected.unwrap_or_default()), "{added}");
    }
    let both = "\"type\": \"llama3\", \"rope_type\": \"llama3\"";
    assert_eq!(refused("llama3-scaled", "\"rope_type\": \"llama3\"", both), None);
    let order = refused("llama3-scaled", "\"low_freq_factor\": 1.0", "\"low_freq_factor\": 4.0").unwrap();
    assert!(order.contains("0 < low_freq_factor < high_freq_factor"), "{order}");
    let factor = refused("llama3-scaled", "\"low_freq_factor\"", "\"lowest\"").unwrap();
    assert!(factor.contains("missing field `low_freq_factor`"), "{factor}");
    let bias = refused("llama-bias", "\"mlp_bias\": false", "\"mlp_bias\": true").unwrap();
    assert!(bias.contains("mlp_bias is true"), "{bias}");
}

#[test]
fn frozen_weights_give_the_same_logits_as_trained_ones() {
    let directory = golden("decoders/qwen2-untied");
    let golden = load_tensors(&directory.join("golden.safetensors")).unwrap();
    check_logits(&Decoder::load(&directory, Weights::Frozen).unwrap(), &Pass::default(), &golden);
}

#[test]
fn adapters_agree_with_peft_in_logits_and_gradients() {
    for name in ADAPTERS {
        let (decoder, adapter) = adapter(name);
        let golden = load_tensors(&golden(&format!("lora/{name}/golden.safetensors"))).unwrap();
        let seed = golden.get("dropout_seed").map(|seed| seed.to_vec1::<i64>().unwrap()[0] as u64);
        let dropout = seed.map(|seed| Dropout { p: adapter.settings().dropout, seed });
        let pass = Pass { dropout, ..Pass::with(Some(&adapter)) };
        check_logits(&decoder, &pass, &golden);
        let loss = loss(&decoder, &pass, &sequences(&golden));
        check_gradients(&loss, adapter.vars(), "base_model.model.", &golden);
    }
}

/// The golden adapters, each on the base that its configuration names.
const ADAPTERS: [&str; 17] = [
    "qwen2-tied",
    "qwen2-tied-copies",
    "qwen2-tied-copy",
    "qwen2-tied-f16",
    "qwen2-tied-layers",
    "qwen2-tied-rslora",
    "qwen2-untied-dora",
    "qwen2-untied-dora-dropout",
    "qwen2-untied-ends",
    "qwen3-tied",
    "qwen3-tied-bf16",
    "qwen3-tied-dora-rslora",
    "qwen3-tied-dropout",
    "qwen3-tied-embedding",
    "qwen3-tied-rslora",
    "qwen3-untied-head",
    "qwen3-untied-patterns",
];

fn adapter(name: &str) -> (Decoder, LoraAdapter) {
    let directory = golden(&format!("lora/{name}"));
    let config = json(&directory.join("adapter_config.json"));
    let base = config["base_model_name_or_path"].as_str().unwrap();
    let decoder = Decoder::load(&golden(&format!("decoders/{base}")), Weights::Frozen).unwrap();
    let adapter = LoraAdapter::load(&directory, decoder.config()).unwrap();
    (decoder, adapter)
}

#[test]
fn an_adapter_saved_in_its_own_type_is_peft_s_to_the_value() {
    for name in ADAPTERS {
        let (decoder, adapter) = adapter(name);
        let folder = tempfile::tempdir().unwrap();
        adapter.save_as(folder.path(), "a-base", adapter.stored_dtype()).unwrap();
        let read = |path: &Path| load_tensors(&path.join("adapter_model.safetensors")).unwrap();
        let (found, mut expected) = (read(folder.path()), read(&golden(&format!("lora/{name}"))));
        // The frozen weights under an adapted embedding or head are the base's: they are not written again.
        expected.retain(|key, _| !key.contains(".base_layer."));
        assert_eq!(found.len(), expected.len(), "{name}");
        for (key, tensor) in &expected {
            assert_eq!(found[key].dtype(), tensor.dtype(), "{name} {key}");
            assert_eq!(values(&found[key]), values(tensor), "{name} {key}");
        }
        let again = LoraAdapter::load(folder.path(), decoder.config()).unwrap();
        assert_eq!(again.settings(), adapter.settings(), "{name}");
    }
}

#[test]
fn other_keys_of_an_adapter_configuration_survive() {
    let (decoder, adapter) = adapter("qwen3-tied");
    let folder = tempfile::tempdir().unwrap();
    adapter.save(folder.path(), "another-base").unwrap();
    let read = |path: &Path| json(&path.join("adapter_config.json"));
    let (found, mut expected) = (read(folder.path()), read(&golden("lora/qwen3-tied")));
    expected["base_model_name_or_path"] = "another-base".into();
    assert_eq!(found, expected);
    assert!(LoraAdapter::load(folder.path(), decoder.config()).is_ok());
}

/// candle-transformers' own decoders know neither LoRA nor gradients, but are a second, independent reference.
#[test]
fn hidden_states_agree_with_candle_transformers() {
    for name in ["qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied"] {
        let directory = golden(&format!("decoders/{name}"));
        let tensors = load_tensors(&directory.join("golden.safetensors")).unwrap();
        let decoder = Decoder::load(&directory, Weights::Frozen).unwrap();
        let other = SecondOpinion::load(&directory).unwrap();
        for sequence in sequences(&tensors) {
            let ours = decoder.hidden_states(&PackedBatch::new([sequence.as_slice()]), None).unwrap();
            assert_close(name, &values(&ours), &values(&other.hidden_states(&sequence).unwrap()));
        }
    }
}

fn logits_as(name: &str, dtype: BaseDtype) -> Vec<f32> {
    let decoder = Decoder::load_as(&golden("decoders").join(name), Weights::Frozen, dtype).unwrap();
    assert!(decoder.vars().is_empty());
    let tokens: Vec<u32> = (0..12).map(|i| (i * 37 + 5) % 64).collect();
    let hidden = decoder.hidden_states(&PackedBatch::new([tokens.as_slice()]), None).unwrap();
    values(&decoder.logits(&hidden, None).unwrap())
}

/// Root of the mean squared difference, relative to the values' own.
fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x * x)).sum::<f64>();
    (sum(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / sum(&mut expected.iter().copied())).sqrt()
}

#[test]
fn a_base_in_half_precision_gives_nearly_the_same_logits() {
    for name in ["qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied", "qwen3-bias"] {
        let expected = logits_as(name, BaseDtype::F32);
        for (dtype, bound) in [(BaseDtype::Bf16, 2e-2), (BaseDtype::F16, 2e-3)] {
            let error = relative_error(&logits_as(name, dtype), &expected);
            assert!(error > 0.0 && error < bound, "{name} in {}: relative error {error}", dtype.name());
        }
    }
}

#[test]
fn templates_render_as_transformers_renders_them() {
    let golden = json(&golden("chat_template.json"));
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() >= 20);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let source = golden["templates"][case["template"].as_str().unwrap()].as_str().unwrap();
        let mut options = case["options"].as_object().cloned().unwrap_or_default();
        let generation_prompt = options.remove("add_generation_prompt").and_then(|v| v.as_bool()).unwrap_or(false);
        let template = ChatTemplate::new(source, Vec::new()).unwrap();
        let rendered = template.render_with(&case["messages"], generation_prompt, &options.into());
        match case["error"].as_str() {
            Some(message) => assert!(rendered.unwrap_err().to_string().contains(message), "{name}"),
            None => assert_eq!(rendered.unwrap(), case["rendered"].as_str().unwrap(), "{name}"),
        }
    }
}
