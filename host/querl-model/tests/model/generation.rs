//! Generation compared with the training pass, with itself under other settings, and with transformers' `generate`
//! (`tests/reference/generation.py`), on tiny random checkpoints.

use crate::prompts::prompts;
use crate::{golden, json};
use candle_core::Tensor;
use querl_model::{
    Decoder, Decoding, Engine, EngineSettings, FinishReason, Generated, GenerationRequest, LoraAdapter, LoraSettings,
    ModelError, PackedBatch, SamplingSettings, TokenText, Weights, generate,
};
use serde_json::Value;
use std::collections::BTreeSet;

fn decoder() -> Decoder {
    Decoder::load(&golden("decoders/qwen3-untied"), Weights::Frozen).unwrap()
}

const PROMPTS: [&[u32]; 3] = [&[5, 9, 2, 7], &[5, 9, 2, 7, 11, 30], &[5, 9, 44]];

fn requests() -> Vec<GenerationRequest<'static>> {
    PROMPTS.iter().enumerate().map(|(i, prompt)| GenerationRequest { prompt, seed: i as u64, n: 1 }).collect()
}

/// Requests for 1 response, 2 responses, and so on up to 4.
fn many(prompts: &[Vec<u32>]) -> Vec<GenerationRequest<'_>> {
    prompts.iter().enumerate().map(|(i, prompt)| GenerationRequest { prompt, seed: i as u64, n: 1 + i % 4 }).collect()
}

fn settings(temperature: f64, max_new_tokens: usize) -> SamplingSettings {
    SamplingSettings { temperature, max_new_tokens, ..SamplingSettings::default() }
}

fn engine(decoder: &Decoder, max_sequences: usize) -> Engine<'_> {
    Engine::new(decoder, EngineSettings { max_sequences, ..EngineSettings::default() }).unwrap()
}

/// Log-probabilities of a response in the training pass.
fn trained_logprobs(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    prompt: &[u32],
    answer: &Generated,
    temperature: f64,
) -> Vec<f32> {
    let sequence = [prompt, answer.token_ids.as_slice()].concat();
    let hidden = decoder.hidden_states(&PackedBatch::new([sequence.as_slice()]), adapter).unwrap();
    let rows = hidden.narrow(0, prompt.len() - 1, answer.token_ids.len()).unwrap();
    let found = decoder.token_logprobs(&rows, answer.token_ids.clone(), temperature, adapter).unwrap();
    found.to_vec2::<f32>().unwrap().into_iter().map(|row| row[0]).collect()
}

fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5, "{found} against {expected}");
    }
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
fn sampled_logprobs_are_those_of_the_training_pass_for_every_kind_of_adapter() {
    for entry in std::fs::read_dir(golden("lora")).unwrap() {
        let directory = entry.unwrap().path();
        let name = directory.file_name().unwrap().to_str().unwrap().to_owned();
        let base = ["qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied", "qwen3-bias"];
        let Some(base) = base.iter().find(|base| name.starts_with(**base)) else { continue };
        let decoder = Decoder::load(&golden(&format!("decoders/{base}")), Weights::Frozen).unwrap();
        let adapter = LoraAdapter::load(&directory, decoder.config()).unwrap();
        let temperature = 0.7;
        let sampling = SamplingSettings { top_k: 9, repetition_penalty: 1.5, ..settings(temperature, 12) };
        let answers =
            generate(&decoder, Some(&adapter), &requests(), Decoding::Sample, &sampling, &BTreeSet::new()).unwrap();
        for (prompt, answer) in PROMPTS.iter().zip(&answers) {
            let expected = trained_logprobs(&decoder, Some(&adapter), prompt, answer, temperature);
            // Rounding differs between the two passes, and the logits of these random adapters spread over tens of nats.
            let worst = answer.logprobs.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(worst < 1e-4, "{name}: off by {worst}");
            assert!(answer.behaviour_logprobs.iter().all(|logprob| *logprob <= 0.0), "{name}");
        }
    }
}

#[test]
fn bases_of_every_kind_decode_as_they_train() {
    let qwen = ["qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied", "qwen3-bias"];
    let others =
        ["llama-bias", "llama3-scaled", "mistral", "yarn-scaling", "yarn-attention-factor", "linear", "dynamic"];
    let windows = ["window-mistral", "window-qwen2", "window-qwen3"];
    for name in qwen.into_iter().chain(others).chain(windows) {
        for weights in [Weights::Frozen, Weights::Trained] {
            let decoder = Decoder::load(&golden(&format!("decoders/{name}")), weights).unwrap();
            let answers =
                generate(&decoder, None, &requests(), Decoding::Sample, &settings(1.0, 20), &BTreeSet::new()).unwrap();
            for (prompt, answer) in PROMPTS.iter().zip(&answers) {
                assert_close(&answer.logprobs, &trained_logprobs(&decoder, None, prompt, answer, 1.0));
                assert_eq!(answer.logprobs, answer.behaviour_logprobs);
            }
        }
    }
}

/// Prompts of many blocks with a common prefix, longer than the window.
#[test]
fn long_prompts_decode_as_they_train_with_windows_and_scaled_rope() {
    let shared: Vec<u32> = (0..1500).map(|i| (i * i + 29 * i) % 61 + 3).collect();
    let prompts = [shared.clone(), [&shared[..1100], &[5, 9, 2, 7]].concat()];
    for name in ["long-window-mistral", "long-window-qwen3", "long-yarn"] {
        let decoder = Decoder::load(&golden(&format!("decoders/{name}")), Weights::Frozen).unwrap();
        let requests: Vec<GenerationRequest<'_>> =
            prompts.iter().map(|prompt| GenerationRequest { prompt, seed: 3, n: 2 }).collect();
        let mut engine = engine(&decoder, 3);
        let all = engine.generate(&requests, Decoding::Sample, &settings(1.0, 20), &BTreeSet::new()).unwrap();
        for (prompt, answers) in prompts.iter().zip(&all) {
            for answer in answers {
                let expected = trained_logprobs(&decoder, None, prompt, answer, 1.0);
                let worst = answer.logprobs.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                assert!(worst < 5e-5, "{name}: off by {worst}");
            }
        }
    }
}

#[test]
fn answers_do_not_depend_on_how_many_are_in_progress() {
    let decoder = decoder();
    let prompts = prompts();
    let requests = many(&prompts);
    let sampling = SamplingSettings { top_p: 0.9, no_repeat_ngram_size: 3, ..settings(1.2, 30) };
    let stop_ids = BTreeSet::from([1, 2, 40, 41]);
    let run = |max_sequences: usize| {
        engine(&decoder, max_sequences).generate(&requests, Decoding::Sample, &sampling, &stop_ids).unwrap()
    };
    let all = run(1000);
    assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2, 3, 4, 1, 2, 3, 4]);
    assert!(all.iter().flatten().any(|answer| answer.truncated));
    assert!(all.iter().flatten().any(|answer| !answer.truncated));
    for max_sequences in [1, 3, 7] {
        assert_eq!(run(max_sequences), all, "{max_sequences} at once");
    }
    for (request, together) in requests.iter().zip(&all) {
        let alone = engine(&decoder, 1).generate(&[*request], Decoding::Sample, &sampling, &stop_ids).unwrap();
        assert_eq!(alone[0], *together);
    }
}

#[test]
fn a_stop_ends_generation_before_the_next_step_and_leaves_nothing_behind() {
    let decoder = decoder();
    let prompts = prompts();
    let (requests, sampling, stop_ids) = (many(&prompts), settings(1.0, 20), BTreeSet::new());
    for decoding in [Decoding::Sample, Decoding::Beam { n_beams: 4, length_penalty: 1.0 }] {
        let expected = engine(&decoder, 8).generate(&requests, decoding, &sampling, &stop_ids).unwrap();
        let mut stopped = engine(&decoder, 8);
        for n_steps in [0, 1, 9] {
            let generated = generate_steps(&mut stopped, &requests, &[], decoding, &sampling, n_steps);
            assert!(generated.iter().flatten().any(|response| response.finish_reason.is_none()), "{decoding:?}");
        }
        let again = stopped.generate(&requests, decoding, &sampling, &stop_ids).unwrap();
        assert_eq!(again, expected, "{decoding:?}");
    }
}

fn generate_steps(
    engine: &mut Engine<'_>,
    requests: &[GenerationRequest<'_>],
    started: &[Vec<Generated>],
    decoding: Decoding,
    sampling: &SamplingSettings,
    n_steps: usize,
) -> Vec<Vec<Generated>> {
    let mut n_calls = 0;
    let mut stop = || {
        n_calls += 1;
        Ok(n_calls > n_steps)
    };
    engine.generate_until(requests, started, decoding, sampling, &BTreeSet::from([1, 2, 40]), &mut stop).unwrap()
}

/// Regression: a rollout that was interrupted repeatedly started from the beginning each time and never finished.
#[test]
fn stopped_responses_are_continued_with_equal_bits_by_the_same_and_by_another_engine() {
    let decoder = decoder();
    let prompts = prompts();
    let requests = many(&prompts);
    let sampling = SamplingSettings { top_p: 0.9, repetition_penalty: 1.1, ..settings(1.2, 30) };
    for (decoding, max_sequences) in [(Decoding::Sample, 100), (Decoding::Sample, 3), (Decoding::Greedy, 100)] {
        let new_engine = || engine(&decoder, max_sequences);
        let expected = generate_steps(&mut new_engine(), &requests, &[], decoding, &sampling, usize::MAX);
        let mut same = new_engine();
        for is_same in [true, false] {
            let (mut generated, mut n_stops) = (Vec::new(), 0);
            let n_tokens = |generated: &[Vec<Generated>]| {
                generated.iter().flatten().map(|response| response.token_ids.len()).sum::<usize>()
            };
            while generated.iter().flatten().any(|response: &Generated| response.finish_reason.is_none())
                || n_stops == 0
            {
                let before = n_tokens(&generated);
                let (mut other, n_steps) = (new_engine(), 2 + n_stops % 3);
                let engine = if is_same { &mut same } else { &mut other };
                generated = generate_steps(engine, &requests, &generated, decoding, &sampling, n_steps);
                assert!(n_tokens(&generated) > before, "no progress in {n_steps} steps");
                n_stops += 1;
            }
            assert!(n_stops > 5, "{n_stops} stops");
            assert_eq!(generated, expected, "{decoding:?}, {max_sequences} sequences, the same engine: {is_same}");
        }
    }
}

#[test]
fn samples_differ_and_more_of_them_leave_the_first_as_they_are() {
    let decoder = decoder();
    let ask = |n| {
        let request = GenerationRequest { prompt: PROMPTS[0], seed: 4, n };
        let sampling = settings(1.5, 10);
        engine(&decoder, 3).generate(&[request], Decoding::Sample, &sampling, &BTreeSet::new()).unwrap().swap_remove(0)
    };
    let (few, more) = (ask(2), ask(5));
    assert_eq!(more[..2], few[..]);
    let distinct: BTreeSet<&[u32]> = more.iter().map(|answer| answer.token_ids.as_slice()).collect();
    assert_eq!(distinct.len(), 5);
}

#[test]
fn memory_is_bounded_by_the_answers_in_progress() {
    let decoder = decoder();
    let prompts = prompts();
    let requests = many(&prompts);
    let (max_sequences, max_prefix_tokens) = (3, 25);
    let mut engine =
        Engine::new(&decoder, EngineSettings { max_sequences, max_prefix_tokens, ..EngineSettings::default() })
            .unwrap();
    for _ in 0..3 {
        engine.generate(&requests, Decoding::Sample, &settings(1.0, 30), &BTreeSet::new()).unwrap();
    }
    let memory = engine.cache_memory();
    let longest = prompts.iter().map(Vec::len).max().unwrap() + 30;
    // Each running response with a copy of its prompt, and the prefixes that are cached or being computed: at most two here.
    let bound = (max_sequences * (longest.div_ceil(16) + 1) + 2 * 25usize.div_ceil(16)) * memory.block_bytes;
    assert!(memory.peak_bytes <= bound, "{} of {bound} bytes", memory.peak_bytes);
    assert!(memory.live_bytes <= 25usize.div_ceil(16) * memory.block_bytes, "{} bytes", memory.live_bytes);
}

#[test]
fn a_policy_is_taken_as_it_is_and_prefixes_do_not_outlive_it() {
    let decoder = decoder();
    let adapter = LoraAdapter::new(&decoder, LoraSettings::all_linear(4, 8.0), 7).unwrap();
    let mut engine = engine(&decoder, 10);
    let prompts = prompts();
    let requests = many(&prompts);
    let ask = |engine: &mut Engine<'_>| {
        engine.generate(&requests, Decoding::Greedy, &settings(1.0, 5), &BTreeSet::new()).unwrap()
    };
    engine.set_policy(Some(&adapter), 1).unwrap();
    let before = ask(&mut engine);
    for (name, var) in adapter.vars() {
        if name.contains("lora_B") {
            var.set(&Tensor::full(0.3f32, var.shape(), var.device()).unwrap()).unwrap();
        }
    }
    engine.set_policy(Some(&adapter), 1).unwrap();
    assert_eq!(ask(&mut engine), before);
    engine.set_policy(Some(&adapter), 2).unwrap();
    let after = ask(&mut engine);
    assert_ne!(after, before);
    for (prompt, answers) in prompts.iter().zip(&after) {
        assert_close(&answers[0].logprobs, &trained_logprobs(&decoder, Some(&adapter), prompt, &answers[0], 1.0));
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
    assert_eq!((answers[0].truncated, answers[0].finish_reason), (false, Some(FinishReason::StopToken)));
    assert!(answers[0].token_ids.len() <= 3);
    let patient = SamplingSettings { min_new_tokens: 6, ..settings(1.0, 8) };
    let answers = generate(&decoder, None, &requests(), Decoding::Greedy, &patient, &BTreeSet::from([stop])).unwrap();
    assert!(answers[0].token_ids.len() >= 6 && !answers[0].token_ids[..6 - 1].contains(&stop));
}

/// A tokenizer: token 10 is `k`, 11 is `l`, and so on; one token is half of a UTF-8 character.
struct Letters(BTreeSet<u32>);

impl TokenText for Letters {
    fn stop_ids(&self) -> &BTreeSet<u32> {
        &self.0
    }

    fn text(&self, ids: &[u32]) -> Result<String, ModelError> {
        Ok(ids.iter().filter_map(|id| char::from_u32('a' as u32 + id)).collect())
    }
}

#[test]
fn a_stop_string_ends_an_answer_with_the_token_that_completes_it() {
    let decoder = decoder();
    let letters = Letters(BTreeSet::new());
    let ask = |sampling: &SamplingSettings| {
        generate(&decoder, None, &requests()[..1], Decoding::Greedy, sampling, &letters).unwrap().swap_remove(0)
    };
    let free = letters.text(&ask(&settings(1.0, 12)).token_ids).unwrap();
    let pair: String = free.chars().skip(3).take(2).collect();
    let end = free.find(&pair).unwrap();
    let stop_strings = vec!["not there".to_owned(), pair];
    let sampling = SamplingSettings { stop_strings, ..settings(1.0, 12) };
    let answer = ask(&sampling);
    let text = letters.text(&answer.token_ids).unwrap();
    assert_eq!((answer.finish_reason, answer.truncated), (Some(FinishReason::StopString { index: 1 }), false));
    assert_eq!(text, free[..end + sampling.stop_strings[1].len()]);
    assert_eq!(sampling.before_stop(&text), &free[..end]);
    let refused = generate(&decoder, None, &requests(), Decoding::Greedy, &sampling, &BTreeSet::new()).unwrap_err();
    assert!(refused.to_string().contains("need a tokenizer"), "{refused}");
}

#[test]
fn no_sequence_of_tokens_comes_twice_where_that_is_barred() {
    let decoder = decoder();
    let repeats = |answer: &Generated| {
        let pairs: BTreeSet<&[u32]> = answer.token_ids.windows(2).collect();
        pairs.len() < answer.token_ids.len() - 1
    };
    let ask = |no_repeat_ngram_size| {
        let sampling = SamplingSettings { no_repeat_ngram_size, ..settings(1.0, 40) };
        generate(&decoder, None, &requests(), Decoding::Greedy, &sampling, &BTreeSet::new()).unwrap()
    };
    assert!(ask(0).iter().any(repeats));
    assert!(!ask(2).iter().any(repeats));
}

#[test]
fn a_request_that_cannot_be_generated_is_refused_first() {
    let decoder = decoder();
    let ask = |prompt: &[u32], sampling: &SamplingSettings, decoding: Decoding| {
        let request = GenerationRequest { prompt, seed: 0, n: 2 };
        generate(&decoder, None, &[request], decoding, sampling, &BTreeSet::new()).unwrap_err().to_string()
    };
    let usual = settings(1.0, 8);
    assert!(ask(&[], &usual, Decoding::Greedy).contains("prompt 0 is empty"));
    assert!(ask(&[5; 60], &usual, Decoding::Greedy).contains("beyond the model's 64 positions"));
    assert!(ask(&[64], &usual, Decoding::Greedy).contains("outside the vocabulary of 64"));
    let beam = Decoding::Beam { n_beams: 1, length_penalty: 1.0 };
    assert!(ask(&[5], &usual, beam).contains("2 responses requested of 1 beams"));
    assert!(ask(&[5], &settings(0.0, 8), Decoding::Sample).contains("temperature is 0"));
    let barred = SamplingSettings { no_repeat_ngram_size: 1, max_new_tokens: 63, ..usual };
    let all: BTreeSet<u32> = (0..64).collect();
    let request = GenerationRequest { prompt: &[5], seed: 0, n: 1 };
    let patient = SamplingSettings { min_new_tokens: 1, ..barred };
    let error = generate(&decoder, None, &[request], Decoding::Sample, &patient, &all).unwrap_err().to_string();
    assert!(error.contains("leave no token"), "{error}");
}

fn ids(given: &Value) -> Vec<u32> {
    given.as_array().unwrap().iter().map(|value| value.as_u64().unwrap() as u32).collect()
}

#[test]
fn greedy_decoding_and_beam_search_agree_with_transformers() {
    let expected = json(&golden("generation.json"));
    for searches in expected["searches"].as_array().unwrap() {
        let name = searches["decoder"].as_str().unwrap();
        let decoder = Decoder::load(&golden("decoders").join(name), Weights::Frozen).unwrap();
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
            let answers =
                engine(&decoder, 256).generate(&[request], decoding, &sampling, &stop_ids).unwrap().swap_remove(0);
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
    let decoder = Decoder::load(&golden("decoders/qwen2-tied"), Weights::Frozen).unwrap();
    let prompts: [&[u32]; 4] = [&[5, 9, 2, 7], &[17], &[5, 9, 2, 7, 11, 30], &[17]];
    let requests = prompts.map(|prompt| GenerationRequest { prompt, seed: 0, n: 2 });
    let (sampling, stop_ids) =
        (SamplingSettings { max_new_tokens: 12, ..SamplingSettings::default() }, BTreeSet::from([3]));
    let decoding = Decoding::Beam { n_beams: 3, length_penalty: 1.0 };
    let run = |requests: &[GenerationRequest<'_>], max_sequences: usize| {
        engine(&decoder, max_sequences).generate(requests, decoding, &sampling, &stop_ids).unwrap()
    };
    let together = run(&requests, 100);
    assert_eq!(run(&requests, 4), together);
    for (request, together) in requests.iter().zip(&together) {
        assert_eq!(run(&[*request], 100)[0], *together);
    }
}
