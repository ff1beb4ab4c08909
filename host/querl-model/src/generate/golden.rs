//! Limits and filters against transformers' processors, from `tests/reference/generation.py`.
#![allow(clippy::unwrap_used)]

use super::filters::Rules;
use super::sampling::{Softmax, choose};
use super::{Decoding, SamplingSettings};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

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
fn limits_and_filters_agree_with_transformers() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/golden/generation.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let golden = &golden["processors"];
    let (answer, stop_ids) = (ids(&golden["answer"]), ids(&golden["stop_ids"]).into_iter().collect::<BTreeSet<u32>>());
    for case in golden["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let settings = settings(&case["settings"]);
        let rules = Rules { settings: &settings, stop_ids: &stop_ids };
        let logits = floats(&case["logits"]);
        let mut left = logits.clone();
        rules.limit(&mut left, &answer);
        rules.filter(&mut left);
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
        // What is drawn says both: its place in the distribution that is left, and in the whole one.
        let whole = Softmax::of(&logits, settings.temperature as f32);
        for seed in 0..20 {
            let rng = &mut ChaCha8Rng::seed_from_u64(seed);
            let choice = choose(&mut logits.clone(), &answer, &rules, Decoding::Sample, rng).unwrap();
            assert_eq!(choice.behaviour_logprob, found[&choice.token], "{name}");
            assert_eq!(choice.logprob, whole.logprob(logits[choice.token as usize]), "{name}");
        }
    }
}
