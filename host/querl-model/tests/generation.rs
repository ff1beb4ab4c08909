//! Generation against the plain forward pass, on a tiny random checkpoint.
#![allow(clippy::unwrap_used)]

use querl_model::{
    Decoder, Decoding, GenerationRequest, LoraAdapter, LoraSettings, PackedBatch, SamplingSettings, Weights, generate,
};
use std::collections::BTreeSet;
use std::path::Path;

fn decoder() -> Decoder {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/decoders/qwen3-untied");
    Decoder::load(&directory, Weights::Frozen).unwrap()
}

const PROMPTS: [&[u32]; 3] = [&[5, 9, 2, 7], &[5, 9, 2, 7, 11, 30], &[5, 9, 44]];

fn requests() -> Vec<GenerationRequest<'static>> {
    PROMPTS.iter().enumerate().map(|(i, prompt)| GenerationRequest { prompt, seed: i as u64, n: 1 }).collect()
}

fn settings(temperature: f64, max_new_tokens: usize) -> SamplingSettings {
    SamplingSettings { temperature, max_new_tokens, ..SamplingSettings::default() }
}

#[test]
fn greedy_decoding_follows_the_full_forward_pass() {
    let decoder = decoder();
    let answers = generate(&decoder, None, &requests(), Decoding::Greedy, &settings(1.0, 8), &BTreeSet::new()).unwrap();
    for (prompt, answer) in PROMPTS.iter().zip(&answers) {
        assert!(answer.truncated);
        let mut sequence = prompt.to_vec();
        for &id in &answer.token_ids {
            let hidden = decoder.hidden_states(&PackedBatch::new([sequence.as_slice()]), None).unwrap();
            let logits = decoder.logits(&hidden, None).unwrap().get(sequence.len() - 1).unwrap();
            assert_eq!(id, logits.argmax(0).unwrap().to_scalar::<u32>().unwrap());
            sequence.push(id);
        }
    }
}

#[test]
fn sampled_logprobs_are_those_of_the_training_pass() {
    let decoder = decoder();
    let adapter = LoraAdapter::new(&decoder, LoraSettings::all_linear(4, 8.0), 7).unwrap();
    let temperature = 0.7;
    let answers =
        generate(&decoder, Some(&adapter), &requests(), Decoding::Sample, &settings(temperature, 6), &BTreeSet::new())
            .unwrap();
    for (prompt, answer) in PROMPTS.iter().zip(&answers) {
        let sequence = [prompt, answer.token_ids.as_slice()].concat();
        let hidden = decoder.hidden_states(&PackedBatch::new([sequence.as_slice()]), Some(&adapter)).unwrap();
        let rows = hidden.narrow(0, prompt.len() - 1, answer.token_ids.len()).unwrap();
        let found = decoder.token_logprobs(&rows, answer.token_ids.clone(), temperature, Some(&adapter)).unwrap();
        let found: Vec<Vec<f32>> = found.to_vec2().unwrap();
        for (found, sampled) in found.iter().zip(&answer.logprobs) {
            assert!((found[0] - sampled).abs() < 1e-5, "{} against {sampled}", found[0]);
        }
    }
}

#[test]
fn an_answer_does_not_depend_on_its_neighbours() {
    let decoder = decoder();
    let temperature = 1.0;
    let together =
        generate(&decoder, None, &requests(), Decoding::Sample, &settings(temperature, 6), &BTreeSet::new()).unwrap();
    for (request, answer) in requests().iter().zip(&together) {
        let alone =
            generate(&decoder, None, &[*request], Decoding::Sample, &settings(temperature, 6), &BTreeSet::new())
                .unwrap();
        assert_eq!(alone[0].token_ids, answer.token_ids);
    }
}

#[test]
fn a_stop_token_ends_an_answer_and_is_part_of_it() {
    let decoder = decoder();
    let free = generate(&decoder, None, &requests(), Decoding::Greedy, &settings(1.0, 8), &BTreeSet::new()).unwrap();
    let stop = free[0].token_ids[2];
    let answers =
        generate(&decoder, None, &requests(), Decoding::Greedy, &settings(1.0, 8), &BTreeSet::from([stop])).unwrap();
    assert_eq!(answers[0].token_ids.last(), Some(&stop));
    assert!(!answers[0].truncated);
    assert!(answers[0].token_ids.len() <= 3);
}
