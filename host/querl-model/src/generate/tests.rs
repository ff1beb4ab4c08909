//! Logits processors compared with those of transformers (`tests/reference/generation.py`), and generation at each SIMD level.

use super::logits_processor::LogitsProcessor;
use super::sampler::{Softmax, sample_token};
use super::{Decoding, Generated, GenerationRequest, SamplingSettings, generate};
use crate::kernels::SimdLevel;
use crate::{Decoder, Weights};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

fn settings(given: &Value) -> SamplingSettings {
    let (float, count) = (|key: &str| given[key].as_f64().unwrap(), |key: &str| given[key].as_u64().unwrap() as usize);
    SamplingSettings {
        temperature: float("temperature"),
        top_p: float("top_p"),
        top_k: count("top_k"),
        repetition_penalty: float("repetition_penalty"),
        no_repeat_ngram_size: count("no_repeat_ngram_size"),
        min_new_tokens: count("min_new_tokens"),
        ..SamplingSettings::default()
    }
}

fn floats(given: &Value) -> Vec<f32> {
    given.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

fn ids(given: &Value) -> Vec<u32> {
    given.as_array().unwrap().iter().map(|value| value.as_u64().unwrap() as u32).collect()
}

#[test]
fn logits_processors_agree_with_transformers() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/golden/generation.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let golden = &golden["processors"];
    let (response, stop_ids) =
        (ids(&golden["answer"]), ids(&golden["stop_ids"]).into_iter().collect::<BTreeSet<u32>>());
    for case in golden["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let settings = settings(&case["settings"]);
        let processor = LogitsProcessor { settings: &settings, stop_ids: &stop_ids };
        let logits = floats(&case["logits"]);
        let mut left = logits.clone();
        processor.apply_penalties(&mut left, &response);
        processor.filter(&mut left);
        let softmax = Softmax::of(&left, settings.temperature as f32);
        let found: BTreeMap<u32, f32> = (0..)
            .zip(&left)
            .filter(|(_, logit)| logit.is_finite())
            .map(|(id, logit)| (id, softmax.logprob(*logit)))
            .collect();
        let kept = ids(&case["kept"]);
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), kept, "{name}");
        for (id, expected) in kept.iter().zip(floats(&case["logprobs"])) {
            assert!((found[id] - expected).abs() < 1e-5, "{name}: token {id}: {} against {expected}", found[id]);
        }
        // A sampled token has two log-probabilities: after penalties and filters, and without them.
        let whole = Softmax::of(&logits, settings.temperature as f32);
        for seed in 0..20 {
            let rng = &mut ChaCha8Rng::seed_from_u64(seed);
            let sampled = sample_token(&mut logits.clone(), &response, &processor, Decoding::Sample, rng).unwrap();
            assert_eq!(sampled.behaviour_logprob, found[&sampled.token], "{name}");
            assert_eq!(sampled.logprob, whole.logprob(logits[sampled.token as usize]), "{name}");
        }
    }
}

fn responses(level: SimdLevel, decoding: Decoding) -> Vec<Generated> {
    level.with(|| {
        let directory =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/decoders/qwen3-untied");
        let decoder = Decoder::load(&directory, Weights::Frozen).unwrap();
        let prompts: [&[u32]; 3] = [&[5, 9, 2, 7], &[5, 9, 2, 7, 11, 30], &[5, 9, 44]];
        let requests = prompts.map(|prompt| GenerationRequest { prompt, seed: 3, n: 3 });
        let sampling = SamplingSettings { max_new_tokens: 20, ..SamplingSettings::default() };
        generate(&decoder, None, &requests, decoding, &sampling, &BTreeSet::new()).unwrap()
    })
}

#[test]
fn responses_and_their_logprobs_agree_at_every_level() {
    for decoding in [Decoding::Greedy, Decoding::Sample] {
        let expected = responses(*SimdLevel::all().last().unwrap(), decoding);
        assert!(expected.iter().all(|response| response.token_ids.len() == 20));
        for level in SimdLevel::all() {
            for (found, expected) in responses(level, decoding).iter().zip(&expected) {
                assert_eq!(found.token_ids, expected.token_ids, "{level:?}");
                for (found, expected) in found.logprobs.iter().zip(&expected.logprobs) {
                    assert!((found - expected).abs() <= 1e-5, "{level:?}: {found} against {expected}");
                }
            }
        }
    }
}
