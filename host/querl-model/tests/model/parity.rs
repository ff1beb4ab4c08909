//! Compares logits and gradients with transformers and PEFT, on tiny random checkpoints made by `tests/reference/decoders.py` and
//! `tests/reference/lora.py`; storage types; chat templates with `apply_chat_template` (`tests/reference/template.py`).
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
    ChatTemplate, Decoder, DecoderConfig, Dropout, LoraAdapter, PackedBatch, Pass, RopeScaling, SecondOpinion, Weights,
    load_tensors,
};
use serde_json::{Value, json};
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

/// Compares within the tolerance, which is relative to the largest expected value if that is above 1.
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
const DECODERS: &str = "\
    qwen2-tied qwen2-untied qwen3-tied qwen3-untied qwen3-bias llama-bias llama3-scaled mistral yarn-scaling \
    yarn-parameters yarn-attention-factor linear dynamic window-mistral window-qwen2 window-qwen3";

/// Golden checkpoints with a sequence of 4,096 tokens.
const LONG: [&str; 5] = ["long-yarn", "long-linear", "long-dynamic", "long-window-mistral", "long-window-qwen3"];

#[test]
fn decoders_agree_with_transformers_in_logits_and_gradients() {
    for name in DECODERS.split(' ') {
        let directory = golden(&format!("decoders/{name}"));
        let golden = load_tensors(&directory.join("golden.safetensors")).unwrap();
        let decoder = Decoder::load(&directory, Weights::Trained).unwrap();
        let pass = Pass::default();
        check_logits(&decoder, &pass, &golden);
        check_gradients(&loss(&decoder, &pass, &sequences(&golden)), decoder.vars(), "", &golden);
    }
}

/// Expected log-probabilities of the next token at some positions of 4,096 tokens, and the decoder's.
fn long_logprobs(name: &str, directory: &Path) -> (Vec<f32>, Vec<f32>) {
    let golden = load_tensors(&golden(&format!("decoders/{name}/golden.safetensors"))).unwrap();
    let ids: Vec<u32> = golden["input_ids"].to_vec1::<u8>().unwrap().into_iter().map(u32::from).collect();
    let positions: Vec<u32> =
        golden["positions"].to_vec1::<i64>().unwrap().into_iter().map(|position| position as u32).collect();
    let decoder = Decoder::load(directory, Weights::Frozen).unwrap();
    let targets = positions.iter().map(|position| ids[*position as usize + 1]).collect();
    let hidden = decoder.hidden_at(&PackedBatch::new([ids.as_slice()]), &positions, &Pass::default()).unwrap();
    let found = decoder.token_logprobs(&hidden, targets, 1.0, None).unwrap().narrow(1, 0, 1).unwrap();
    (values(&found), values(&golden["logprobs"]))
}

/// Regression: YaRN under `rope_parameters` was ignored, and log-probabilities at 2,500 tokens were off by 1.9.
#[test]
fn scaled_rope_and_sliding_windows_agree_with_transformers_to_4096_tokens() {
    for name in LONG {
        let (found, expected) = long_logprobs(name, &golden(&format!("decoders/{name}")));
        assert!(expected.len() > 90, "{name}");
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(worst < 5e-5, "{name}: off by {worst}");
    }
    // The expected values depend on each setting: without it the comparison fails.
    let without = [
        ("long-yarn", "\"type\": \"yarn\"", "\"type\": \"linear\", \"original_max_position_embeddings\": null"),
        ("long-linear", "\"factor\": 4.0", "\"factor\": 3.5"),
        ("long-window-mistral", "\"sliding_window\": 700", "\"sliding_window\": 699"),
        ("long-window-qwen3", "\"max_window_layers\": 1", "\"max_window_layers\": 2"),
    ];
    for (name, old, new) in without {
        let (found, expected) = long_logprobs(name, with_config(name, old, new).path());
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(worst > 1e-3, "{name}: off by {worst} alone");
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
        // The right number of rows, but other row indices.
        let error = decoder.hidden_at(&batch, &[0, 1, 3], &Pass::default()).unwrap_err();
        assert!(error.to_string().contains("there is no row 3 among 3"), "{error}");
    }
}

#[test]
fn both_forms_of_config_json_are_read() {
    for name in DECODERS.split(' ') {
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

/// Tensors are checked before the forward pass.
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

/// The error for a golden configuration with some keys changed.
fn refusal(name: &str, changes: &Value) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let mut config = json(&golden(&format!("decoders/{name}/config.json")));
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    std::fs::write(&path, config.to_string()).unwrap();
    let message = DecoderConfig::load(&path).err()?.to_string();
    assert!(message.starts_with(&format!("{}: ", path.display())) && !message.contains('\n'), "{message}");
    Some(message)
}

/// Each line: name of a golden checkpoint, changed keys of its configuration, and a part of the error message.
fn assert_refused(cases: &str) {
    for case in cases.trim().lines() {
        let [name, changes, expected] = case.split(" | ").collect::<Vec<_>>()[..] else { panic!("{case}") };
        let changes: Value = serde_json::from_str(changes).unwrap();
        let found = refusal(name, &changes).unwrap_or_else(|| panic!("{name} with {changes} is not refused"));
        assert!(found.contains(expected), "{name} with {changes}: {found}");
    }
}

#[test]
fn keys_that_change_the_computation_or_are_unknown_are_refused() {
    assert_refused(
        r#"
llama-bias | {"mlp_bias": true} | `mlp_bias` is true; expected false
llama-bias | {"hidden_act": "gelu"} | `hidden_act` is `gelu`; expected `silu`
llama-bias | {"model_type": "mistral"} | `model_type` is `mistral`; expected `llama`
qwen3-tied | {"attention_dropout": 0.1} | `attention_dropout` is 0.1; expected 0
qwen3-tied | {"embedding_multiplier": 12.0} | `embedding_multiplier` is 12.0; expected 1
qwen3-tied | {"final_logit_softcapping": 30.0} | `final_logit_softcapping` is 30.0; expected no value
qwen2-tied | {"quantization_config": {"quant_method": "awq"}} | expected no value
qwen2-tied | {"partial_rotary_factor": 0.5} | `partial_rotary_factor` is 0.5; expected 1
qwen2-tied | {"is_causal": false} | `is_causal` is false; expected true
qwen2-tied | {"auto_map": {"AutoModelForCausalLM": "a.B"}} | `auto_map` names model code
qwen2-tied | {"head_gate": "sigmoid"} | `head_gate` is `sigmoid`, a key that querl does not know
"#,
    );
    assert_eq!(refusal("llama-bias", &json!({"pretraining_tp": 2})), None);
    assert_eq!(refusal("qwen2-tied", &json!({"head_gate": null, "temperature": 0.7, "use_mrope": false})), None);
}

#[test]
fn absurd_sizes_are_refused_before_memory_is_taken() {
    assert_refused(
        r#"
qwen3-tied | {"hidden_size": 0} | `hidden_size` is 0; expected a whole number from 1 to 131072
qwen3-tied | {"num_hidden_layers": 1099511627776} | expected a whole number from 1 to 1024
qwen3-tied | {"vocab_size": -1} | `vocab_size` is -1
qwen3-tied | {"num_attention_heads": 1e9} | `num_attention_heads` is 1000000000.0
qwen3-tied | {"num_key_value_heads": 3} | is not a multiple of num_key_value_heads 3
qwen3-tied | {"head_dim": 7} | head_dim is 7; rotary embeddings need an even number
qwen2-tied | {"num_attention_heads": 6} | hidden_size 32 is not a multiple of num_attention_heads 6
qwen3-tied | {"max_position_embeddings": 4194305} | expected a whole number from 1 to 4194304
qwen3-tied | {"max_position_embeddings": 4194304, "head_dim": 512} | expected at most 1048576 with
qwen3-tied | {"rms_norm_eps": -1.0} | `rms_norm_eps` is -1.0; expected 0 or more
qwen3-tied | {"rope_theta": 0.0} | rope_theta is 0; expected a number above 1
qwen3-tied | {"num_hidden_layers": 1024, "hidden_size": 131072, "intermediate_size": 1048576} | parameters; expected at most 4398046511104
"#,
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, " ".repeat(17 << 20)).unwrap();
    assert!(DecoderConfig::load(&path).unwrap_err().to_string().contains("larger than 16 MiB"));
}

#[test]
fn rope_scaling_is_read_under_both_keys_or_refused() {
    assert_refused(
        r#"
qwen2-tied | {"rope_scaling": {"type": "longrope"}} | rope type `longrope` is not supported; expected `default`
qwen2-tied | {"rope_scaling": {"type": "yarn"}} | has no `rope_scaling.factor`
qwen2-tied | {"rope_scaling": {"type": "yarn", "factor": 0}} | `rope_scaling.factor` is 0; expected a number above 0
qwen2-tied | {"rope_scaling": {"type": "yarn", "factor": 1e9}} | positions with YaRN; expected at most 4194304
qwen2-tied | {"rope_scaling": {"type": "linear", "factor": 1e9}} | positions with linear scaling; expected at most 4194304
qwen2-tied | {"rope_scaling": {"type": "yarn", "factor": 2, "extrapolation_factor": 1}} | does not know
qwen2-tied | {"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 40}} | expected 0 < beta_slow <= beta_fast
qwen2-tied | {"rope_scaling": {"factor": 4.0}} | rope type `default`: `rope_scaling.factor` is 4.0
qwen2-tied | {"rope_scaling": {"partial_rotary_factor": 0.5}} | `rope_scaling.partial_rotary_factor` is 0.5
qwen2-tied | {"rope_scaling": {"type": "yarn", "rope_type": "default"}} | expected one rope type
qwen2-tied | {"rope_scaling": "yarn"} | `rope_scaling` is `yarn`; expected an object
dynamic | {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}} | expected max_position_embeddings, 64, with rope type `dynamic`
llama3-scaled | {"rope_parameters": {"type": "yarn", "factor": 4.0}} | `rope_parameters` and `rope_scaling` differ
llama3-scaled | {"rope_parameters": {"rope_theta": 1e4}} | `rope_parameters` and `rope_scaling` differ
llama3-scaled | {"original_max_position_embeddings": 128} | original_max_position_embeddings is 64 and 128
qwen2-tied | {"rope_parameters": {"full_attention": {"factor": 2}, "sliding_attention": {"factor": 3}}} | expected the same parameters for all layer types
"#,
    );
    let llama3 = |low: f64| {
        let sizes =
            json!({"type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
        let mut sizes = sizes.as_object().unwrap().clone();
        sizes.insert("low_freq_factor".into(), low.into());
        json!({"rope_scaling": sizes})
    };
    assert_eq!(refusal("llama3-scaled", &llama3(1.0)), None);
    assert!(refusal("llama3-scaled", &llama3(4.0)).unwrap().contains("0 < low_freq_factor < high_freq_factor"));
    assert_eq!(refusal("llama3-scaled", &json!({"rope_parameters": {"rope_type": "default"}})), None);

    let load = |name: &str| DecoderConfig::load(&golden(&format!("decoders/{name}/config.json"))).unwrap();
    let Some(RopeScaling::Yarn(yarn)) = load("yarn-scaling").rope_scaling else { panic!("no YaRN") };
    assert_eq!((yarn.factor, yarn.original_max_position_embeddings, yarn.truncate), (4.0, 16, true));
    // As in vLLM: the positions in pretraining times the factor, if that is more than `max_position_embeddings`.
    let folder = with_config("yarn-scaling", "\"max_position_embeddings\": 64", "\"max_position_embeddings\": 16");
    assert_eq!(DecoderConfig::load(&folder.path().join("config.json")).unwrap().max_positions, 64);
    assert_eq!(load("linear").max_positions, 160, "64 times the factor 2.5");
    assert_eq!(load("dynamic").max_positions, 64);
    let nested = json!({"rope_type": "linear", "factor": 2.0});
    for sliding in [nested.clone(), Value::Null] {
        let uniform = json!({"rope_parameters": {"full_attention": nested, "sliding_attention": sliding}});
        assert_eq!(refusal("qwen2-tied", &uniform), None);
    }
}

#[test]
fn longer_sequences_than_dynamic_rope_keeps_unscaled_are_refused() {
    let decoder = Decoder::load(&golden("decoders/dynamic"), Weights::Frozen).unwrap();
    let hidden = |n: usize| decoder.hidden_states(&PackedBatch::new([vec![5; n].as_slice()]), None);
    assert!(hidden(64).is_ok());
    let error = hidden(65).unwrap_err().to_string();
    assert!(error.contains("position 64 is beyond the model's 64 positions"), "{error}");
}

#[test]
fn sliding_windows_are_those_of_each_layer_in_transformers() {
    let windows = |name: &str, changes: &Value| {
        let folder = tempfile::tempdir().unwrap();
        let mut config = json(&golden(&format!("decoders/{name}/config.json")));
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        config.as_object_mut().unwrap().retain(|_, value| value != "absent");
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        DecoderConfig::load(&folder.path().join("config.json")).unwrap().sliding_windows
    };
    let none = Vec::<Option<usize>>::new();
    assert_eq!(windows("window-mistral", &json!({})), [Some(5), Some(5)]);
    assert_eq!(windows("window-qwen2", &json!({})), [None, Some(4)]);
    assert_eq!(windows("window-qwen3", &json!({})), [Some(6), None]);
    assert_eq!(windows("window-qwen2", &json!({"max_window_layers": 0})), [Some(4), Some(4)]);
    // Window disabled, as long as the longest sequence, or on no layer.
    assert_eq!(windows("window-qwen2", &json!({"use_sliding_window": false})), none);
    assert_eq!(windows("window-mistral", &json!({"sliding_window": 64})), none);
    assert_eq!(windows("window-qwen2", &json!({"max_window_layers": 2})), none);
    assert_eq!(
        windows("llama-bias", &json!({"sliding_window": 4096, "layer_types": ["full_attention", "full_attention"]})),
        none
    );
    // Mistral's default window is 4096 tokens; `null` means none.
    let long = |window: &str| json!({"max_position_embeddings": 5000, "sliding_window": window});
    assert_eq!(windows("mistral", &long("absent")), [Some(4096), Some(4096)]);
    assert_eq!(windows("mistral", &json!({"max_position_embeddings": 5000, "sliding_window": null})), none);
    assert_refused(
        r#"
llama-bias | {"sliding_window": 8} | `sliding_window` is 8; expected no value
window-mistral | {"sliding_window": 0} | `sliding_window` is 0; expected a whole number from 1
window-mistral | {"layer_types": ["sliding_attention", "full_attention"]} | which Mistral has in all layers
window-qwen2 | {"layer_types": ["full_attention"]} | for each of 2 layers
window-qwen2 | {"layer_types": ["chunked_attention", "full_attention"]} | or `sliding_attention` for each
qwen2-tied | {"layer_types": ["sliding_attention", "full_attention"]} | and no sliding window is used
window-qwen2 | {"use_sliding_window": "yes"} | `use_sliding_window` is `yes`; expected true or false
"#,
    );
}

/// The keys of published checkpoints, from their pages on Hugging Face.
#[test]
fn configurations_of_published_models_are_accepted() {
    let published: Vec<Value> = serde_json::from_str(include_str!("published_configs.json")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    for model in published {
        std::fs::write(&path, model["config"].to_string()).unwrap();
        let found = DecoderConfig::load(&path).unwrap();
        let found = json!([found.max_positions, found.sliding_windows.len()]);
        assert_eq!(found, json!([model["max_positions"], model["n_sliding_windows"]]), "{}", model["name"]);
    }
}

#[test]
fn frozen_weights_give_the_same_logits_as_trained_ones() {
    let directory = golden("decoders/qwen2-untied");
    let golden = load_tensors(&directory.join("golden.safetensors")).unwrap();
    check_logits(&Decoder::load(&directory, Weights::Frozen).unwrap(), &Pass::default(), &golden);
}

#[test]
fn adapters_agree_with_peft_in_logits_and_gradients() {
    for name in ADAPTERS.split(' ') {
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

/// The golden adapters; their configuration names the base.
const ADAPTERS: &str = "\
    qwen2-tied qwen2-tied-copies qwen2-tied-copy qwen2-tied-f16 qwen2-tied-layers qwen2-tied-pair qwen2-tied-rslora \
    qwen2-untied-dora qwen2-untied-dora-dropout qwen2-untied-ends qwen3-tied qwen3-tied-bf16 \
    qwen3-tied-dora-rslora qwen3-tied-dropout qwen3-tied-embedding qwen3-tied-rslora qwen3-untied-head \
    qwen3-untied-patterns";

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
    for name in ADAPTERS.split(' ') {
        let (decoder, adapter) = adapter(name);
        let folder = tempfile::tempdir().unwrap();
        adapter.save_as(folder.path(), "a-base", adapter.stored_dtype()).unwrap();
        let read = |path: &Path| load_tensors(&path.join("adapter_model.safetensors")).unwrap();
        let (found, mut expected) = (read(folder.path()), read(&golden(&format!("lora/{name}"))));
        // Copies of the base weights of an adapted embedding or head are not written again.
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

/// candle-transformers' decoders support neither LoRA nor gradients, but are an independent second reference.
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

/// Root mean squared difference, relative to the root mean square of the values.
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

/// Regression: special tokens were passed as a list of pairs, so that prompts of Llama 3 lacked `<|begin_of_text|>`.
#[test]
fn special_tokens_are_variables_of_a_template() {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(name, text)| (name.to_owned(), text.to_owned()));
    let template = ChatTemplate::new("{{ bos_token }}x{{ eos_token }}{{ pad_token }}", tokens.to_vec()).unwrap();
    assert_eq!(template.render(&[], true).unwrap(), "<s>x</s>");
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
