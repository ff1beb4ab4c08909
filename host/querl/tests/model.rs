//! `querl model inspect`, `merge`, `export`, `logprobs` and `init`.
#![allow(clippy::unwrap_used)]

mod support;

use querl_model::{Decoder, LoraAdapter, LoraSettings, Weights};
use serde_json::{Value, json};
use support::{Project, model};

/// A project with a copy of the tiny model and an adapter that changes the logits.
fn project() -> Project {
    let project = Project::new();
    project.copy_model("model");
    let decoder = Decoder::load(model(), Weights::Frozen).unwrap();
    let settings = LoraSettings { use_dora: true, rank_pattern: one("q_proj", 2), ..LoraSettings::all_linear(4, 8.0) };
    let adapter = LoraAdapter::new(&decoder, settings, 3).unwrap();
    for (name, var) in adapter.vars().iter().filter(|(name, _)| !name.contains("lora_A")) {
        let shift = if name.contains("lora_B") { 0.05 } else { 0.2 };
        var.set(&(var.as_tensor() + shift).unwrap()).unwrap();
    }
    adapter.save(&project.path("adapter"), "model").unwrap();
    project.write("lines.jsonl", "{\"token_ids\": [5, 6, 7, 300, 8]}\n{\"text\": \"鱼油怎么吃\"}\n");
    project
}

fn one(pattern: &str, rank: usize) -> querl_model::Patterns<usize> {
    [(pattern.to_owned(), rank)].into_iter().collect()
}

fn logprobs(project: &Project, arguments: &[&str]) -> Vec<f64> {
    let said = project.querl(&[&["model", "logprobs", "--input", "lines.jsonl"], arguments].concat()).ok();
    let lines = said.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.flat_map(|line| line["logprobs"].as_array().unwrap().clone()).filter_map(|value| value.as_f64()).collect()
}

fn worst(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn inspect_distinguishes_models_from_adapters() {
    let project = project();
    let said = project.querl(&["model", "inspect", "adapter"]).ok();
    assert_eq!(
        said.stdout,
        "adapter        DoRA\n\
         base           model\n\
         parameters     3904 in float32\n\
         rank           4, alpha 8, 1 pattern(s)\n\
         layers         14\n\
         dropout        0\n\
         saved modules  none\n"
    );
    let said = project.querl(&["model", "inspect", "model"]).ok();
    assert!(said.stdout.starts_with("family          Qwen3\nparameters      "), "{}", said.stdout);
    assert!(said.stdout.contains("\nweights         float32 in 1 file(s), 0.2 MiB\n"), "{}", said.stdout);
    let json = project.json(&["model", "inspect", "model"]);
    assert_eq!((&json["family"], &json["layers"], &json["tied_embedding"]), (&"Qwen3".into(), &2.into(), &true.into()));
}

#[test]
fn inspect_shows_rope_scaling_and_sliding_windows_and_refuses_unknown_keys() {
    let project = Project::new();
    project.copy_model("model");
    let original: Value = serde_json::from_str(&project.read("model/config.json")).unwrap();
    let write = |changes: Value| {
        let mut config = original.clone();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        project.write("model/config.json", &config.to_string());
    };
    let plain = project.querl(&["model", "inspect", "model"]).ok().stdout;
    assert!(plain.contains("\nrope scaling    none\nsliding window  none\n"), "{plain}");
    write(json!({
        "rope_parameters": {"type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 2048},
        "use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1,
    }));
    let scaled = project.querl(&["model", "inspect", "model"]).ok().stdout;
    let expected = "\npositions       8192\nrope scaling    yarn, factor 4, pretrained with 2048 positions\n\
                    sliding window  16 tokens in 1 of 2 layers\n";
    assert!(scaled.contains(expected), "{scaled}");
    let found = project.json(&["model", "inspect", "model"]);
    assert_eq!((&found["rope_scaling"]["rope_type"], &found["sliding_window"]), (&"yarn".into(), &16.into()));
    project.write("lines.jsonl", "{\"token_ids\": [5, 6, 7]}\n");
    for (changes, expected) in [
        (
            json!({"quantization_config": {"bits": 4}}),
            "model/config.json: `quantization_config` is {\"bits\":4}; expected no value",
        ),
        (json!({"head_gate": 1}), "model/config.json: `head_gate` is 1, a key that querl does not know"),
        (
            json!({"num_hidden_layers": 1_u64 << 50}),
            "model/config.json: `num_hidden_layers` is 1125899906842624; expected",
        ),
    ] {
        write(changes);
        for command in
            [&["model", "inspect", "model"][..], &["model", "logprobs", "--model", "model", "--input", "lines.jsonl"]]
        {
            let message = project.refusal(command, 2);
            assert!(message.starts_with(expected), "{message}");
        }
    }
}

#[test]
fn a_merged_model_says_what_base_and_adapter_say() {
    let project = project();
    let said = project.querl(&["model", "merge", "--model", "model", "--adapter", "adapter", "--out", "merged"]).ok();
    assert!(said.stderr.contains(" parameters in float32, 5 files in merged"), "{}", said.stderr);
    let unmerged = logprobs(&project, &["--model", "model", "--adapter", "adapter"]);
    assert!(worst(&unmerged, &logprobs(&project, &["--model", "merged"])) < 1e-5);
    assert!(worst(&unmerged, &logprobs(&project, &["--model", "model"])) > 1e-2);
}

#[test]
fn an_adapter_is_written_again_in_another_type() {
    let project = project();
    let arguments =
        ["model", "export", "--model", "model", "--adapter", "adapter", "--out", "small", "--dtype", "bf16"];
    let expected = json!({
        "out": "small", "parameters": 3904, "bytes": 7808, "dtype": "bfloat16",
        "files": ["adapter_config.json", "adapter_model.safetensors"],
    });
    assert_eq!(project.json(&arguments), expected);
    let exact = logprobs(&project, &["--model", "model", "--adapter", "adapter"]);
    let difference = worst(&exact, &logprobs(&project, &["--model", "model", "--adapter", "small"]));
    assert!(difference > 0.0 && difference < 0.05, "{difference}");
}

#[test]
fn what_cannot_be_written_is_reported_in_one_sentence() {
    let project = project();
    std::fs::create_dir(project.path("bare")).unwrap();
    project.write("bare/adapter_config.json", "{\"peft_type\": \"LOHA\", \"r\": 4, \"lora_alpha\": 8}");
    project.write("bare/adapter_model.safetensors", "");
    let wide = "{\"peft_type\": \"LORA\", \"r\": 3, \"lora_alpha\": 8, \"use_dora\": true, \"target_modules\": \"all-linear\"}";
    std::fs::create_dir(project.path("other")).unwrap();
    project.write("other/adapter_config.json", wide);
    std::fs::copy(project.path("adapter/adapter_model.safetensors"), project.path("other/adapter_model.safetensors"))
        .unwrap();
    let cases = "
merge --model model --adapter nowhere --out out | nowhere: no `adapter_config.json` there; an adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`
merge --model model --adapter bare --out out | bare/adapter_config.json: peft_type is `LOHA`; expected `LORA`
merge --model model --adapter other --out out | other/adapter_model.safetensors: tensor `model.layers.0.mlp.down_proj.lora_A.weight` has shape [4, 48]; this model expects [3, 48]: the rank is not the configuration's
merge --model model --adapter adapter --out model | model: is not empty; name a new folder
export --model model --adapter adapter --out adapter | adapter: is not empty; name a new folder
export --model adapter --out out | adapter: no `config.json` there; a Hugging Face model directory needs config.json, tokenizer.json and model.safetensors (or its shards with model.safetensors.index.json)
logprobs --model model --adapter other --input lines.jsonl | other/adapter_model.safetensors: tensor `model.layers.0.mlp.down_proj.lora_A.weight` has shape [4, 48]; this model expects [3, 48]: the rank is not the configuration's
";
    for case in cases.trim().lines() {
        let (arguments, expected) = case.split_once(" | ").unwrap();
        let arguments: Vec<&str> = ["model"].into_iter().chain(arguments.split(' ')).collect();
        assert_eq!(project.refusal(&arguments, 2), expected);
    }
    // Regression: exit code 1 for a file that is not text, and for a folder that cannot be created.
    std::fs::write(project.path("bare/adapter_config.json"), b"\xff\xfe\0").unwrap();
    let message = project.refusal(&["model", "merge", "--model", "model", "--adapter", "bare", "--out", "out"], 2);
    assert!(message.starts_with("bare/adapter_config.json: "), "{message}");
    let file = "adapter/adapter_config.json/out";
    let message = project.refusal(&["model", "merge", "--model", "model", "--adapter", "adapter", "--out", file], 2);
    assert!(message.contains("adapter/adapter_config.json"), "{message}");
    let said = project.querl(&["model", "export", "--model", "model", "--out", "out", "--max-shard-size", "5"]);
    said.refused("expected a number above 0 with MB or GB");
    assert!(!project.path("out").exists());
}

#[test]
fn a_random_model_is_made_in_memory_or_written() {
    let project = Project::new();
    let made = project.json(&["model", "init", "--shape", "tiny", "--device", "cpu", "--no-save"]);
    assert!(made["parameters"].as_u64().unwrap() * 2 < made["bytes"].as_u64().unwrap(), "{made}");
    let written = project.json(&["model", "init", "--shape", "tiny", "--dtype", "f32", "--out", "tiny"]);
    assert_eq!((&written["parameters"], &written["dtype"]), (&made["parameters"], &"float32".into()));
    let loaded = Decoder::load(&project.path("tiny"), Weights::Frozen).unwrap();
    assert_eq!(loaded.config(), &querl_model::DecoderConfig::of_shape("tiny").unwrap());
}

#[test]
fn wrong_arguments_are_errors_and_measure_names_its_successor() {
    let project = Project::new();
    let rejected = |args: &[&str], what: &str| project.querl(args).refused(what);
    rejected(
        &["model", "init", "--shape", "gpt", "--no-save"],
        "there is no shape \"gpt\"; expected one of qwen2.5-0.5b, ",
    );
    rejected(&["model", "init", "--shape", "tiny"], "--out <DIR>");
    rejected(&["model", "init", "--shape", "tiny", "--dtype", "nf4", "--out", "x"], "expected f32, bf16 or f16");
    rejected(&["model", "init", "--shape", "tiny", "--no-save", "--device", "cuda:0"], "querl-bench");
    rejected(&["model", "measure", "--shape", "tiny", "--json"], "cargo run --release -p querl-bench");
}
