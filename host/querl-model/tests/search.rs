//! Greedy decoding and beam search against transformers' `generate`, from `tests/reference/generation.py`.
#![allow(clippy::unwrap_used)]

use querl_model::{Decoder, Decoding, Engine, EngineSettings, GenerationRequest, SamplingSettings, Weights};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

fn ids(given: &Value) -> Vec<u32> {
    given.as_array().unwrap().iter().map(|value| value.as_u64().unwrap() as u32).collect()
}

#[test]
fn searches_find_the_answers_that_transformers_finds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden");
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("generation.json")).unwrap()).unwrap();
    for searches in golden["searches"].as_array().unwrap() {
        let name = searches["decoder"].as_str().unwrap();
        let decoder = Decoder::load(&folder.join("decoders").join(name), Weights::Frozen).unwrap();
        let stop_ids: BTreeSet<u32> = ids(&searches["stop_ids"]).into_iter().collect();
        let max_new_tokens = searches["max_new_tokens"].as_u64().unwrap() as usize;
        for case in searches["cases"].as_array().unwrap() {
            let (n_beams, prompt) = (case["n_beams"].as_u64().unwrap() as usize, ids(&case["prompt"]));
            let length_penalty = case["length_penalty"].as_f64().unwrap();
            let min_new_tokens = case["min_new_tokens"].as_u64().unwrap() as usize;
            let sampling = SamplingSettings { max_new_tokens, min_new_tokens, ..SamplingSettings::default() };
            let expected: Vec<Vec<u32>> = case["answers"].as_array().unwrap().iter().map(ids).collect();
            let decoding = if n_beams == 1 { Decoding::Greedy } else { Decoding::Beam { n_beams, length_penalty } };
            let request = GenerationRequest { prompt: &prompt, seed: 0, n: expected.len() };
            let mut engine = Engine::new(&decoder, EngineSettings::default()).unwrap();
            let answers = engine.generate(&[request], decoding, &sampling, &stop_ids).unwrap().swap_remove(0);
            let found: Vec<Vec<u32>> = answers.iter().map(|answer| answer.token_ids.clone()).collect();
            assert_eq!(found, expected, "{name}: {case}");
            if min_new_tokens == 0 {
                for (answer, score) in answers.iter().zip(case["scores"].as_array().unwrap()) {
                    let sum: f64 = answer.logprobs.iter().map(|logprob| f64::from(*logprob)).sum();
                    let found = sum / (answer.token_ids.len() as f64).powf(length_penalty);
                    assert!((found - score.as_f64().unwrap()).abs() < 1e-4, "{name}: {found} against {score}");
                }
            }
        }
    }
}

#[test]
fn a_search_does_not_depend_on_what_else_is_searched() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/decoders/qwen2-tied");
    let decoder = Decoder::load(&folder, Weights::Frozen).unwrap();
    let prompts: [&[u32]; 4] = [&[5, 9, 2, 7], &[17], &[5, 9, 2, 7, 11, 30], &[17]];
    let requests = prompts.map(|prompt| GenerationRequest { prompt, seed: 0, n: 2 });
    let (sampling, stop_ids) =
        (SamplingSettings { max_new_tokens: 12, ..SamplingSettings::default() }, BTreeSet::from([3]));
    let decoding = Decoding::Beam { n_beams: 3, length_penalty: 1.0 };
    let run = |requests: &[GenerationRequest<'_>], max_sequences: usize| {
        let mut engine = Engine::new(&decoder, EngineSettings { max_sequences, ..EngineSettings::default() }).unwrap();
        engine.generate(requests, decoding, &sampling, &stop_ids).unwrap()
    };
    let together = run(&requests, 100);
    assert_eq!(run(&requests, 4), together);
    for (request, together) in requests.iter().zip(&together) {
        assert_eq!(run(&[*request], 100)[0], *together);
    }
}
