//! Tokens per second of a rollout: 32 prompts of 128 tokens, of which the first 96 are the same in all, 4 samples each, 32 new
//! tokens, the whole distribution at temperature 1.
//!
//! ```sh
//! cargo run --release -p querl-model --example rollouts -- MODEL_DIR DTYPE [ADAPTER_DIR] [REPEATS]
//! ```
//!
//! Each repetition is a policy of its own, so that the shared prefix is computed anew.

use querl_core::config::BaseDtype;
use querl_model::{
    Decoder, Decoding, Engine, EngineSettings, GenerationRequest, LoraAdapter, SamplingSettings, Weights,
};
use std::collections::BTreeSet;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

const N_PROMPTS: u32 = 32;
const N_SAMPLES: usize = 4;
const N_SHARED: u32 = 96;
const N_OWN: u32 = 32;
const N_NEW: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let model = arguments.first().ok_or("expected a model directory")?;
    let dtype = match arguments.get(1).map(String::as_str) {
        Some("f32") => BaseDtype::F32,
        Some("bf16") => BaseDtype::Bf16,
        _ => return Err("expected the type of the base, f32 or bf16".into()),
    };
    let adapter = arguments.get(2).filter(|path| Path::new(path).is_dir());
    let repeats: u64 = arguments.last().and_then(|n| n.parse().ok()).unwrap_or(5);
    let decoder = Decoder::load_as(Path::new(model), Weights::Frozen, dtype)?;
    let adapter = adapter.map(|path| LoraAdapter::load(Path::new(path), decoder.config())).transpose()?;
    let id = |i: u32| 3 + i.wrapping_mul(2_654_435_761) % 2000;
    let prompt = |p: u32| (0..N_SHARED).map(id).chain((0..N_OWN).map(|i| id(1000 + p * 100 + i))).collect();
    let prompts: Vec<Vec<u32>> = (0..N_PROMPTS).map(prompt).collect();
    let requests: Vec<GenerationRequest<'_>> =
        prompts.iter().zip(0..).map(|(prompt, seed)| GenerationRequest { prompt, seed, n: N_SAMPLES }).collect();
    let sampling = SamplingSettings { max_new_tokens: N_NEW, min_new_tokens: N_NEW, ..SamplingSettings::default() };
    let mut engine = Engine::new(&decoder, EngineSettings::default())?;
    let mut seconds = Vec::new();
    for version in 0..repeats {
        let started = Instant::now();
        engine.set_policy(adapter.as_ref(), version)?;
        let answers = engine.generate(&requests, Decoding::Sample, &sampling, &BTreeSet::<u32>::new())?;
        let n_tokens: usize = answers.iter().flatten().map(|answer| answer.token_ids.len()).sum();
        seconds.push(started.elapsed().as_secs_f64());
        println!(
            "{n_tokens} tokens in {:.3} s: {:.0} a second",
            seconds[version as usize],
            n_tokens as f64 / seconds[version as usize]
        );
    }
    let best = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let n_tokens = N_PROMPTS as usize * N_SAMPLES * N_NEW;
    let memory = engine.cache_memory();
    println!(
        "quickest: {:.0} tokens a second; keys and values at most {:.1} MiB",
        n_tokens as f64 / best,
        memory.peak_bytes as f64 / f64::from(1 << 20)
    );
    Ok(())
}
