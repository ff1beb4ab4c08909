//! The serving engine compared with the engine that rollouts and evaluation use.

use crate::golden;
use querl_core::config::BaseDtype;
use querl_model::{
    AdapterWeights, Decoder, Decoding, Engine, EngineSettings, Generated, LoraAdapter, SamplingSettings, ServingEngine,
    ServingRequest, ServingSettings, StepOutput, Weights, generate,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const BASES: [&str; 5] = ["qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied", "qwen3-bias"];

fn load(base: &str) -> Arc<Decoder> {
    Arc::new(Decoder::load(&golden(&format!("decoders/{base}")), Weights::Frozen).unwrap())
}

/// The golden adapters of a base (LoRA, DoRA, of embedding and head, with saved modules), and `None` for the base alone.
fn adapters(base: &str, decoder: &Decoder) -> Vec<Option<LoraAdapter>> {
    let folders = std::fs::read_dir(golden("lora")).unwrap().map(|entry| entry.unwrap().path());
    let of_base = folders.filter(|folder| folder.file_name().unwrap().to_str().unwrap().starts_with(base));
    let adapters = of_base.map(|folder| Some(LoraAdapter::load(&folder, decoder.config()).unwrap()));
    adapters.chain([None]).collect()
}

fn prompt(tenant: usize, i: usize) -> Vec<u32> {
    let shared = (0..20).map(|position| (position * (tenant as u32 + 3) + 5) % 60 + 3);
    shared.chain((0..i as u32 * 3 + 1).map(|position| (position * 7 + i as u32) % 60 + 3)).collect()
}

fn sampling(i: usize) -> (Decoding, SamplingSettings) {
    let settings = SamplingSettings { max_new_tokens: 6 + i, ..SamplingSettings::default() };
    match i % 4 {
        0 => (Decoding::Greedy, settings),
        1 => (Decoding::Sample, SamplingSettings { temperature: 0.7, top_p: 0.9, ..settings }),
        2 => (Decoding::Sample, SamplingSettings { top_k: 9, repetition_penalty: 1.5, ..settings }),
        _ => (Decoding::with_beams(3), SamplingSettings { repetition_penalty: 1.2, ..settings }),
    }
}

fn engine(decoder: &Arc<Decoder>, settings: ServingSettings) -> ServingEngine {
    ServingEngine::new(decoder.clone(), Arc::new(BTreeSet::from([1, 2])), settings).unwrap()
}

/// Runs all requests; returns the responses by id.
fn finish(engine: &mut ServingEngine) -> BTreeMap<u64, Generated> {
    let mut responses = BTreeMap::new();
    while engine.n_waiting() + engine.n_running() > 0 {
        collect(engine.step().unwrap(), &mut responses);
    }
    responses
}

fn collect(outputs: Vec<StepOutput>, responses: &mut BTreeMap<u64, Generated>) {
    responses.extend(outputs.into_iter().filter_map(|output| Some((output.id, output.finished?.unwrap()))));
}

#[test]
fn responses_are_those_of_evaluation_whatever_shares_the_batch() {
    for base in BASES {
        let decoder = load(base);
        let adapters = adapters(base, &decoder);
        let weights: Vec<Option<Arc<AdapterWeights>>> = adapters
            .iter()
            .map(|adapter| Some(Arc::new(AdapterWeights::new(&decoder, adapter.as_ref()?).unwrap())))
            .collect();
        let mut requests = Vec::new();
        for i in 0..5 {
            for (tenant, adapter) in weights.iter().enumerate() {
                let (decoding, sampling) = sampling(i);
                let (id, adapter, prompt) = (requests.len() as u64, adapter.clone(), prompt(tenant, i));
                requests.push(ServingRequest { id, adapter, prompt, seed: id, decoding, sampling });
            }
        }
        let mut engine = engine(&decoder, ServingSettings { max_running: 7, ..ServingSettings::default() });
        let mut responses = BTreeMap::new();
        for pair in requests.chunks(2) {
            pair.iter().for_each(|request| engine.add(request.clone()).unwrap());
            collect(engine.step().unwrap(), &mut responses);
        }
        responses.extend(finish(&mut engine));
        assert_eq!(responses.len(), requests.len());
        for (id, request) in requests.iter().enumerate() {
            let alone = querl_model::GenerationRequest { prompt: &request.prompt, seed: request.seed, n: 1 };
            let adapter = adapters[id % adapters.len()].as_ref();
            let text = BTreeSet::from([1, 2]);
            let expected = generate(&decoder, adapter, &[alone], request.decoding, &request.sampling, &text).unwrap();
            assert_eq!(responses[&(id as u64)], expected[0], "{base}, request {id}");
        }
    }
}

#[test]
fn an_int8_base_is_served_as_it_is_evaluated_and_close_to_its_training_pass() {
    for base in ["qwen2-tied", "qwen3-untied"] {
        let path = golden(&format!("decoders/{base}"));
        let decoder = Arc::new(Decoder::load_as(&path, Weights::Frozen, BaseDtype::Int8).unwrap());
        let (tokens, text) = (prompt(0, 2), BTreeSet::from([1u32, 2]));
        let of_evaluation = |int8_activations| {
            let settings = EngineSettings { int8_activations, ..EngineSettings::default() };
            let request = querl_model::GenerationRequest { prompt: &tokens, seed: 0, n: 1 };
            let sampling = SamplingSettings { max_new_tokens: 6, ..SamplingSettings::default() };
            let mut evaluation = Engine::new(&decoder, settings).unwrap();
            evaluation.generate(&[request], Decoding::Greedy, &sampling, &text).unwrap().concat()
        };
        let (of_int8, of_f32) = (of_evaluation(true), of_evaluation(false));
        let mut engine = engine(&decoder, ServingSettings::default());
        engine.add(greedy(0, tokens.clone(), 6)).unwrap();
        assert_eq!(finish(&mut engine)[&0], of_int8[0], "{base}");
        let first = [&of_int8, &of_f32].map(|responses| responses[0].logprobs[0]);
        assert!(first[0] != first[1] && (first[0] - first[1]).abs() < 0.1, "{base}: {first:?}");
    }
}

fn greedy(id: u64, prompt: Vec<u32>, max_new_tokens: usize) -> ServingRequest {
    let sampling = SamplingSettings { max_new_tokens, ..SamplingSettings::default() };
    ServingRequest { id, adapter: None, prompt, seed: 0, decoding: Decoding::Greedy, sampling }
}

#[test]
fn an_adapter_whose_logits_overflow_fails_alone() {
    let decoder = load("qwen3-tied");
    let folder = tempfile::tempdir().unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(golden("lora/qwen3-tied").join(file), folder.path().join(file)).unwrap();
    }
    let path = folder.path().join("adapter_config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["lora_alpha"] = 1e37.into();
    std::fs::write(&path, config.to_string()).unwrap();
    let adapter = LoraAdapter::load(folder.path(), decoder.config()).unwrap();
    let broken = Some(Arc::new(AdapterWeights::new(&decoder, &adapter).unwrap()));
    let mut engine = engine(&decoder, ServingSettings::default());
    for (decoding, n_beams) in [(Decoding::Greedy, 1), (Decoding::with_beams(2), 2)] {
        engine.add(greedy(0, prompt(1, 2), 8)).unwrap();
        engine.add(ServingRequest { adapter: broken.clone(), decoding, ..greedy(1, prompt(0, 1), 8) }).unwrap();
        let (mut error, mut response) = (None, None);
        while engine.n_waiting() + engine.n_running() > 0 {
            for StepOutput { id, n_sequences, finished, .. } in engine.step().unwrap() {
                assert_eq!(n_sequences, if id == 1 { n_beams } else { 1 }, "each beam is a sequence of the batch");
                match finished {
                    Some(Ok(generated)) => response = Some((id, generated.token_ids.len())),
                    Some(Err(reason)) => error = Some((id, reason.to_string())),
                    None => {}
                }
            }
        }
        assert!(response.is_some_and(|(id, n_tokens)| id == 0 && n_tokens > 0));
        assert!(error.as_ref().is_some_and(|(id, reason)| *id == 1 && reason.contains("not finite")), "{error:?}");
    }
}

#[test]
fn a_shared_prefix_is_computed_once_and_dropped_requests_free_their_blocks() {
    let decoder = load("qwen3-untied");
    let mut engine = engine(&decoder, ServingSettings::default());
    for i in 0..3 {
        engine.add(greedy(i, prompt(0, i as usize), 8)).unwrap();
        engine.step().unwrap();
    }
    let n_cached: Vec<usize> = engine.step().unwrap().iter().map(|output| output.n_cached).collect();
    assert_eq!(n_cached, [0, 20, 20], "the first prompt had nothing to share");
    engine.retain(|id| id != 1);
    assert_eq!(finish(&mut engine).into_keys().collect::<Vec<_>>(), [0, 2]);
    let kept = engine.kv_cache_bytes();
    engine.add(greedy(3, prompt(0, 1), 4)).unwrap();
    finish(&mut engine);
    assert_eq!(engine.kv_cache_bytes(), kept, "only prefixes stay");
}

#[test]
fn a_request_waits_for_room_in_the_kv_cache_and_one_that_never_fits_is_refused() {
    let decoder = load("qwen3-untied");
    let block_bytes = {
        let mut engine = engine(&decoder, ServingSettings::default());
        engine.add(greedy(0, vec![5], 9)).unwrap();
        engine.step().unwrap();
        engine.kv_cache_bytes()
    };
    // Four blocks: enough for one of these requests, with two blocks of its prompt and two of its response.
    let mut engine =
        engine(&decoder, ServingSettings { kv_cache_bytes: 8 * block_bytes, ..ServingSettings::default() });
    (0..3).for_each(|id| engine.add(greedy(id, vec![5, 9, 7], 8)).unwrap());
    engine.step().unwrap();
    assert_eq!((engine.n_running(), engine.n_waiting()), (1, 2));
    assert_eq!(finish(&mut engine).len(), 3);
    let error = engine.add(greedy(4, vec![5; 20], 40)).unwrap_err().to_string();
    assert!(error.contains("has room for 64"), "{error}");
}

#[test]
fn requests_that_do_not_fit_the_model_are_refused() {
    let decoder = load("qwen3-untied");
    let mut engine = engine(&decoder, ServingSettings::default());
    let beams = |n_beams| ServingRequest { decoding: Decoding::with_beams(n_beams), ..greedy(0, vec![5], 4) };
    for (request, expected) in [
        (greedy(0, vec![], 4), "the prompt is empty"),
        (greedy(0, vec![5], 1 << 20), "beyond the model's"),
        (greedy(0, vec![u32::MAX], 4), "outside the vocabulary"),
        (greedy(0, vec![5], 0), "max_new_tokens is 0"),
        (beams(0), "expected at least 1 beam"),
        (beams(65), "65 beams; the server runs at most 64 at once"),
    ] {
        let error = engine.add(request).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(engine.step().unwrap().is_empty());
}
