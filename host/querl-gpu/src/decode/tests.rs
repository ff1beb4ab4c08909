//! Generation on a GPU compared with generation on the CPU, and with itself under other conditions. Run by tests/cuda/run.sh.

#[path = "../../../querl-model/tests/support/prompts.rs"]
mod prompts;
mod shards;

use super::GpuPolicy;
use crate::device::{Gpu, by_cublas_alone, n_launches};
use candle_core::Tensor;
use prompts::prompts;
use querl_core::config::BaseDtype;
use querl_model::{
    CacheRoom, ComputeDevice, Decoder, DecoderConfig, Decoding, Engine, EngineSettings, Generated, GenerationRequest,
    LoraAdapter, LoraSettings, PackedBatch, Pass, PrefixLife, SamplingSettings, Weights,
};
use std::any::Any;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// The other checkpoints have head sizes that no kernel supports.
const NAMES: [&str; 3] = ["qwen2-tied", "qwen2-untied", "qwen3-tied"];

/// Next to the sources, or in the folder that the environment names: this program is copied to machines with a GPU.
fn golden(name: &str) -> PathBuf {
    let carried = std::env::var_os("QUERL_TEST_GOLDENS").map(PathBuf::from);
    let goldens = carried.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden"));
    goldens.join("decoders").join(name)
}

fn gpu_device() -> ComputeDevice {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    crate::install();
    device_of_gpu(GPU.get_or_init(|| Gpu::new(0).unwrap()).clone())
}

fn device_of_gpu(gpu: Gpu) -> ComputeDevice {
    ComputeDevice::Accelerator(Arc::new(gpu))
}

fn n_captured(engine: &Engine<'_>) -> usize {
    let policy: &dyn Any = engine.device_policy().unwrap();
    policy.downcast_ref::<GpuPolicy>().unwrap().n_captured()
}

fn decoder(name: &str, place: &ComputeDevice) -> Decoder {
    Decoder::load_on(&golden(name), Weights::Frozen, BaseDtype::Bf16, place).unwrap()
}

fn adapter(decoder: &Decoder, seed: usize) -> LoraAdapter {
    let adapter = LoraAdapter::new(decoder, LoraSettings::all_linear(3, 6.0), 5).unwrap();
    for (index, var) in adapter.vars().values().enumerate() {
        let value = |i: usize| ((i * 7 + index * 31 + seed * 1009) as f32 * 12.9898).sin() * 0.2;
        let values: Vec<f32> = (0..var.elem_count()).map(value).collect();
        var.set(&Tensor::from_vec(values, var.shape(), var.device()).unwrap()).unwrap();
    }
    adapter
}

/// Requests for 1 response, 2 responses, and so on up to 4.
fn requests(prompts: &[Vec<u32>]) -> Vec<GenerationRequest<'_>> {
    prompts.iter().enumerate().map(|(i, prompt)| GenerationRequest { prompt, seed: i as u64, n: 1 + i % 4 }).collect()
}

fn sampling(max_new_tokens: usize) -> SamplingSettings {
    SamplingSettings { max_new_tokens, ..SamplingSettings::default() }
}

fn engine(decoder: &Decoder, max_sequences: usize) -> Engine<'_> {
    Engine::new(decoder, EngineSettings { max_sequences, ..EngineSettings::default() }).unwrap()
}

fn generate(
    engine: &mut Engine<'_>,
    requests: &[GenerationRequest<'_>],
    decoding: Decoding,
    sampling: &SamplingSettings,
) -> Vec<Generated> {
    engine.generate(requests, decoding, sampling, &BTreeSet::from([2])).unwrap().into_iter().flatten().collect()
}

/// Maximum difference of log-probabilities in nats, because activations are bf16. The largest measured difference is 0.08.
const TOLERANCE: f32 = 0.2;

struct Pair {
    on_cpu: (Decoder, LoraAdapter),
    on_gpu: (Decoder, LoraAdapter),
}

impl Pair {
    fn new(name: &str) -> Self {
        let on_cpu = decoder(name, &ComputeDevice::Cpu);
        let of_cpu = adapter(&on_cpu, 0);
        let of_gpu = of_cpu.snapshot().unwrap().on(&gpu_device()).unwrap();
        Self { on_cpu: (on_cpu, of_cpu), on_gpu: (decoder(name, &gpu_device()), of_gpu) }
    }

    fn engine(&self, max_sequences: usize) -> Engine<'_> {
        let mut engine = engine(&self.on_gpu.0, max_sequences);
        engine.set_policy(Some(&self.on_gpu.1), 1).unwrap();
        engine
    }

    /// Log-probabilities of every token of the vocabulary before each token of an answer, computed on the CPU in one pass.
    fn distributions(&self, prompt: &[u32], answer: &[u32], temperature: f64) -> Vec<Vec<f32>> {
        let (decoder, adapter) = &self.on_cpu;
        let sequence = [prompt, answer].concat();
        let hidden = decoder.hidden_states(&PackedBatch::new([sequence.as_slice()]), Some(adapter)).unwrap();
        let logits = decoder.logits(&hidden, Some(adapter)).unwrap().to_vec2::<f32>().unwrap();
        let logprobs = |row: &Vec<f32>| {
            let scaled: Vec<f64> = row.iter().map(|&logit| f64::from(logit) / temperature).collect();
            let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum = max + scaled.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
            scaled.iter().map(|x| (x - sum) as f32).collect()
        };
        logits[prompt.len() - 1..sequence.len() - 1].iter().map(logprobs).collect()
    }

    /// Compares a response of the GPU with the CPU's log-probabilities of its tokens. Returns the largest difference.
    fn compared(&self, prompt: &[u32], answer: &Generated, decoding: Decoding, temperature: f64) -> f32 {
        let mut worst = 0f32;
        let rows = self.distributions(prompt, &answer.token_ids, temperature);
        for ((row, &token), &found) in rows.iter().zip(&answer.token_ids).zip(&answer.logprobs) {
            let expected = row[token as usize];
            worst = worst.max((found - expected).abs());
            let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            if decoding == Decoding::Greedy {
                assert!(best - expected <= 2.0 * TOLERANCE, "a token {} nats below the likeliest", best - expected);
            }
        }
        worst
    }
}

/// Log-probabilities of a response's tokens in the training pass.
fn trained_logprobs(
    decoder: &Decoder,
    adapter: &LoraAdapter,
    prompt: &[u32],
    answer: &[u32],
    temperature: f64,
) -> Vec<f32> {
    let sequence = [prompt, answer].concat();
    let rows: Vec<u32> = (prompt.len() as u32 - 1..sequence.len() as u32 - 1).collect();
    let batch = PackedBatch::new([sequence.as_slice()]);
    let hidden = decoder.hidden_at(&batch, &rows, &Pass::with(Some(adapter))).unwrap();
    let found = decoder.token_logprobs(&hidden, answer.to_vec(), temperature, Some(adapter)).unwrap();
    found.to_vec2::<f32>().unwrap().into_iter().map(|row| row[0]).collect()
}

fn n_same(a: &[Generated], b: &[Generated]) -> usize {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).filter(|(a, b)| a.token_ids == b.token_ids).count()
}

/// Mean and largest difference between the log-probabilities of answers and those of the training pass, both of the GPU.
fn off_the_training_pass(
    (decoder, adapter): (&Decoder, &LoraAdapter),
    requests: &[GenerationRequest<'_>],
    answers: &[Generated],
    temperature: f64,
) -> (f32, f32) {
    let prompts = requests.iter().flat_map(|request| vec![request.prompt; request.n]);
    let mut differences = Vec::new();
    for (prompt, answer) in prompts.zip(answers) {
        let trained = trained_logprobs(decoder, adapter, prompt, &answer.token_ids, temperature);
        differences.extend(trained.iter().zip(&answer.logprobs).map(|(a, b)| (a - b).abs()));
    }
    let mean = differences.iter().sum::<f32>() / differences.len() as f32;
    (mean, differences.into_iter().fold(0f32, f32::max))
}

#[test]
fn answers_are_those_of_the_cpu_but_for_rounding() {
    let (prompts, sampling) = (prompts(), SamplingSettings { temperature: 0.8, ..sampling(14) });
    let requests = requests(&prompts);
    for (index, name) in NAMES.into_iter().enumerate() {
        let pair = Pair::new(name);
        let decoding = if index % 2 == 0 { Decoding::Greedy } else { Decoding::Sample };
        let found = generate(&mut pair.engine(5), &requests, decoding, &sampling);
        let mut of_cpu = engine(&pair.on_cpu.0, 5);
        of_cpu.set_policy(Some(&pair.on_cpu.1), 1).unwrap();
        let n_same = n_same(&found, &generate(&mut of_cpu, &requests, decoding, &sampling));
        let prompts = requests.iter().flat_map(|request| vec![request.prompt; request.n]);
        let off = |(prompt, answer)| pair.compared(prompt, answer, decoding, sampling.temperature);
        let worst = prompts.zip(&found).map(off).fold(0f32, f32::max);
        let of_gpu = (&pair.on_gpu.0, &pair.on_gpu.1);
        let (mean, max) = off_the_training_pass(of_gpu, &requests, &found, sampling.temperature);
        println!("{name}, {decoding:?}: {n_same} of {} answers are the same, off by {worst}", found.len());
        println!("{name}, {decoding:?}: off the GPU's training pass by {mean} on average, {max} at worst");
        assert!(2 * n_same >= found.len() && worst <= TOLERANCE, "{name}, {decoding:?}: {n_same}, {worst}");
        assert!(mean <= 0.02 && max <= TOLERANCE, "{name}: off the training pass by {mean}, {max} at worst");
    }
}

/// The simulated cuBLAS has one order of summation for any product size. A GPU's cuBLAS may not, and the kernel for few rows has another
/// order.
#[test]
fn answers_do_not_depend_on_what_else_is_in_progress() {
    by_cublas_alone(in_other_company);
}

fn in_other_company() {
    let (pair, prompts) = (Pair::new("qwen3-tied"), prompts());
    let sampling = SamplingSettings { top_p: 0.9, no_repeat_ngram_size: 3, temperature: 1.2, ..sampling(36) };
    let expected = generate(&mut pair.engine(1), &requests(&prompts), Decoding::Sample, &sampling);
    assert!(expected.iter().any(|answer| answer.token_ids.len() > 16), "no answer goes beyond a block");
    for (max_sequences, max_prefix_tokens, prefix_life) in
        [(3, 4096, PrefixLife::Policy), (20, 0, PrefixLife::Policy), (20, 64, PrefixLife::Call)]
    {
        let settings = EngineSettings { max_sequences, max_prefix_tokens, prefix_life, ..EngineSettings::default() };
        let mut engine = Engine::new(&pair.on_gpu.0, settings).unwrap();
        engine.set_policy(Some(&pair.on_gpu.1), 1).unwrap();
        for _ in 0..2 {
            let found = generate(&mut engine, &requests(&prompts), Decoding::Sample, &sampling);
            assert!(found == expected, "{settings:?}");
        }
        let memory = engine.cache_memory();
        assert!(memory.peak_bytes <= memory.room_bytes);
        assert!(memory.live_bytes <= max_prefix_tokens / 16 * memory.block_bytes);
    }
}

#[test]
fn steps_are_recorded_and_a_policy_takes_the_place_of_the_one_before() {
    let (pair, prompts) = (Pair::new("qwen2-untied"), prompts());
    let other = adapter(&pair.on_gpu.0, 1);
    let mut engine = pair.engine(6);
    let mut answers = |adapter: Option<&LoraAdapter>, version| {
        engine.set_policy(adapter, version).unwrap();
        let found = generate(&mut engine, &requests(&prompts), Decoding::Sample, &sampling(12));
        (found, n_captured(&engine))
    };
    let (first, n_first) = answers(Some(&pair.on_gpu.1), 1);
    let (second, n_second) = answers(Some(&other), 2);
    let (third, n_third) = answers(Some(&pair.on_gpu.1), 3);
    assert!(n_first > 0 && n_second >= n_first && n_third >= n_second, "{n_first}, {n_second}, {n_third} steps");
    assert!(first == third && first != second);
    let alone = |adapter: Option<&LoraAdapter>| {
        let mut engine = self::engine(&pair.on_gpu.0, 6);
        engine.set_policy(adapter, 1).unwrap();
        generate(&mut engine, &requests(&prompts), Decoding::Sample, &sampling(12))
    };
    assert!(second == alone(Some(&other)));
    assert!(answers(None, 4).0 == alone(None), "the bare base, of other shapes");
}

/// With more sequences than `few_rows` supports, a packed weight is unpacked, into memory that must stay valid for a captured step.
#[test]
fn captured_steps_of_many_sequences_unpack_the_base() {
    let decoder = Decoder::load_on(&golden("qwen2-tied"), Weights::Frozen, BaseDtype::Nf4, &gpu_device()).unwrap();
    let (adapter, prompts) = (adapter(&decoder, 0), prompts());
    let n = 48usize.div_ceil(prompts.len());
    let requests: Vec<_> = requests(&prompts).into_iter().map(|request| GenerationRequest { n, ..request }).collect();
    let mut engine = engine(&decoder, 48);
    let mut answers = |version| {
        engine.set_policy(Some(&adapter), version).unwrap();
        generate(&mut engine, &requests, Decoding::Sample, &sampling(6))
    };
    let (first, second) = (answers(1), answers(2));
    assert!(first == second && n_captured(&engine) > 0);
}

/// Regression: captured steps used the scale of the previous policy if only `lora_alpha` was different.
#[test]
fn a_policy_of_another_scale_has_steps_of_its_own() {
    let (decoder, prompts) = (decoder("qwen3-tied", &gpu_device()), prompts());
    let weak = adapter(&decoder, 1);
    let strong = LoraAdapter::new(&decoder, LoraSettings::all_linear(3, 24.0), 5).unwrap();
    for (to, from) in strong.vars().values().zip(weak.vars().values()) {
        to.set(from.as_tensor()).unwrap();
    }
    let answers = |engine: &mut Engine<'_>, adapter: &LoraAdapter, version: u64| {
        engine.set_policy(Some(adapter), version).unwrap();
        generate(engine, &requests(&prompts), Decoding::Sample, &sampling(12))
    };
    let mut engine = engine(&decoder, 6);
    let found = [(&weak, 1), (&strong, 2), (&weak, 3)].map(|(adapter, version)| answers(&mut engine, adapter, version));
    let alone = |adapter| answers(&mut self::engine(&decoder, 6), adapter, 1);
    assert!(found[0] != found[1] && found[0] == found[2] && found[1] == alone(&strong));
}

/// Regression: NaN in an adapter gave attention outputs of 0, and generation continued.
#[test]
fn a_nan_policy_is_refused_and_the_next_one_is_accepted() {
    let pair = Pair::new("qwen3-tied");
    let (prompts, bad) = (prompts(), adapter(&pair.on_gpu.0, 0));
    let requests = requests(&prompts);
    let mut engine = pair.engine(6);
    let expected = generate(&mut engine, &requests, Decoding::Sample, &sampling(6));
    let var = bad.vars().values().nth(3).unwrap().clone();
    for (value, version) in [(f32::NAN, 2), (f32::INFINITY, 3)] {
        let mut values = var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values[5] = value;
        var.set(&Tensor::from_vec(values, var.shape(), var.device()).unwrap()).unwrap();
        // Replaces the previous policy, and sets one if there is none.
        for version in [10 * version, 10 * version + 1] {
            let refused = engine.set_policy(Some(&bad), version).unwrap_err().to_string();
            assert!(refused.contains("not finite as bf16"), "{refused}");
        }
        let stopped = engine.generate(&requests, Decoding::Sample, &sampling(6), &BTreeSet::from([2])).unwrap_err();
        assert!(stopped.to_string().contains("without a policy"), "{stopped}");
    }
    engine.set_policy(Some(&pair.on_gpu.1), 4).unwrap();
    assert!(generate(&mut engine, &requests, Decoding::Sample, &sampling(6)) == expected);
}

/// Regression: after a call that ran out of memory, all further calls lacked a KV cache.
#[test]
fn after_a_call_too_large_for_the_gpu_others_work() {
    let (pair, prompts) = (Pair::new("qwen2-tied"), prompts());
    let requests = requests(&prompts);
    let mut engine = pair.engine(1 << 40);
    let answers = |engine: &mut Engine<'_>| generate(engine, &requests, Decoding::Sample, &sampling(6));
    let expected = answers(&mut engine);
    let large = GenerationRequest { prompt: &prompts[0], seed: 1, n: 1 << 34 };
    let refused = engine.generate(&[large], Decoding::Sample, &sampling(6), &BTreeSet::new()).unwrap_err();
    assert!(refused.to_string().contains("OUT_OF_MEMORY"), "{refused}");
    assert!(answers(&mut engine) == expected);
}

/// The numbers in the module's documentation, for two layers.
#[test]
fn a_step_takes_few_launches_whatever_the_number_of_sequences() {
    let decoder = decoder("qwen3-tied", &gpu_device());
    let adapter = adapter(&decoder, 0);
    let of_step = |adapter: Option<&LoraAdapter>, n: usize| {
        let mut engine = engine(&decoder, n);
        engine.set_policy(adapter, 1).unwrap();
        let prompts: Vec<[u32; 1]> = (0..n as u32).map(|token| [token]).collect();
        let requests: Vec<GenerationRequest<'_>> =
            prompts.iter().map(|prompt| GenerationRequest { prompt, seed: 1, n: 1 }).collect();
        let before = n_launches();
        generate(&mut engine, &requests, Decoding::Sample, &sampling(1));
        n_launches() - before
    };
    assert_eq!([1, 7].map(|n| of_step(None, n)), [2 * 12 + 4; 2]);
    assert_eq!([1, 7].map(|n| of_step(Some(&adapter), n)), [2 * 18 + 4; 2]);
}

#[test]
fn heads_that_no_kernel_takes_are_named() {
    let decoder = decoder("qwen3-untied", &gpu_device());
    let error = engine(&decoder, 4).set_policy(None, 1).unwrap_err().to_string();
    assert!(error.contains("heads of size 12") && error.contains("device = \"cpu\""), "{error}");
}

#[test]
fn limits_beams_and_stop_tokens_are_those_of_the_cpu() {
    let (pair, prompts) = (Pair::new("qwen3-tied"), prompts());
    let limited = SamplingSettings {
        repetition_penalty: 1.4,
        no_repeat_ngram_size: 2,
        min_new_tokens: 6,
        top_k: 12,
        ..sampling(12)
    };
    let beams = Decoding::Beam { n_beams: 4, length_penalty: 1.0 };
    for (decoding, sampling) in [(Decoding::Greedy, &limited), (Decoding::Sample, &limited), (beams, &sampling(8))] {
        let found = generate(&mut pair.engine(9), &requests(&prompts), decoding, sampling);
        let mut of_cpu = engine(&pair.on_cpu.0, 9);
        of_cpu.set_policy(Some(&pair.on_cpu.1), 1).unwrap();
        let expected = generate(&mut of_cpu, &requests(&prompts), decoding, sampling);
        let n_same = n_same(&found, &expected);
        println!("{decoding:?}: {n_same} of {} answers are the same", found.len());
        assert!(2 * n_same >= found.len(), "{decoding:?}: {n_same} of {}", found.len());
        let of_engine = |n| by_cublas_alone(|| generate(&mut pair.engine(n), &requests(&prompts), decoding, sampling));
        assert!(of_engine(9) == of_engine(64), "{decoding:?}");
        for answer in found.iter().filter(|_| decoding != beams) {
            let repeats = |tokens: &[u32]| tokens.windows(2).map(<[u32]>::to_vec).collect::<BTreeSet<_>>().len();
            assert!(answer.token_ids.len() >= 6 && repeats(&answer.token_ids) + 1 == answer.token_ids.len());
        }
    }
}

#[test]
fn answers_wait_for_blocks_and_one_that_never_fits_is_an_error() {
    by_cublas_alone(with_few_blocks);
}

fn with_few_blocks() {
    let (pair, prompts) = (Pair::new("qwen2-tied"), prompts());
    let sampling = sampling(20);
    let expected = generate(&mut pair.engine(30), &requests(&prompts), Decoding::Sample, &sampling);
    let room = CacheRoom { n_responses: 3, n_prompts: 2, longest_prompt: 27, max_new_tokens: 20 };
    let settings = EngineSettings { max_prefix_tokens: 32, room: Some(room), ..EngineSettings::default() };
    let mut engine = Engine::new(&pair.on_gpu.0, settings).unwrap();
    engine.set_policy(Some(&pair.on_gpu.1), 1).unwrap();
    let found = generate(&mut engine, &requests(&prompts), Decoding::Sample, &sampling);
    assert!(found == expected);
    let memory = engine.cache_memory();
    assert_eq!(memory.room_bytes, room.n_blocks(32) * memory.block_bytes);
    assert_eq!(memory.room_bytes as u64, room.cache_bytes(pair.on_gpu.0.config(), 32, 2));
    assert!(memory.peak_bytes <= memory.room_bytes, "{memory:?}");

    let settings = EngineSettings {
        room: Some(CacheRoom { n_responses: 1, n_prompts: 1, longest_prompt: 2, ..room }),
        ..settings
    };
    let mut engine = Engine::new(&pair.on_gpu.0, settings).unwrap();
    let request = GenerationRequest { prompt: &prompts[0], seed: 1, n: 1 };
    let refused = engine.generate(&[request], Decoding::Greedy, &sampling, &BTreeSet::new()).unwrap_err();
    assert!(refused.to_string().contains("a prompt of 26 tokens with max_new_tokens 20"), "{refused}");
}

fn shapes(n_layers: usize) -> DecoderConfig {
    let shapes = DecoderConfig::load(&golden("qwen2-untied").join("config.json")).unwrap();
    DecoderConfig {
        n_layers,
        vocab_size: 200,
        hidden_size: 64,
        intermediate_size: 128,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 16,
        max_positions: 1024,
        initializer_range: 0.125, // activations keep their magnitude through layers
        ..shapes
    }
}

#[test]
fn long_prompts_are_read_in_parts_as_at_once() {
    let [of_cpu, of_gpu] =
        [ComputeDevice::Cpu, gpu_device()].map(|place| Decoder::random(shapes(2), 3, BaseDtype::Bf16, &place).unwrap());
    let (adapter_of_cpu, adapter_of_gpu) = (adapter(&of_cpu, 0), adapter(&of_gpu, 0));
    let pair = Pair { on_cpu: (of_cpu, adapter_of_cpu), on_gpu: (of_gpu, adapter_of_gpu) };
    let long: Vec<u32> = (0..600).map(|i| (i * 29 + 3) % 64).collect();
    let prompts = [long.clone(), long[..300].to_vec(), [&long[..580], &[5, 6]].concat()];
    let requests: Vec<GenerationRequest<'_>> =
        prompts.iter().map(|prompt| GenerationRequest { prompt, seed: 4, n: 2 }).collect();
    let found = generate(&mut pair.engine(6), &requests, Decoding::Greedy, &sampling(4));
    for (prompt, answers) in prompts.iter().zip(found.chunks(2)) {
        assert_eq!(answers[0], answers[1]);
        let worst = pair.compared(prompt, &answers[0], Decoding::Greedy, 1.0);
        println!("a prompt of {}: off by {worst}", prompt.len());
        assert!(worst <= TOLERANCE, "a prompt of {}: off by {worst}", prompt.len());
    }
}

/// The measurements for the limits in `rl/rollout_check.rs`: the difference of rollouts and training pass on a GPU, in models of several
/// depths.
#[test]
fn rollouts_and_training_differ_by_rounding_at_every_depth() {
    let prompt: Vec<u32> = (0..20).map(|i| (i * 29 + 3) % 200).collect();
    for n_layers in [2, 8, 24] {
        let decoder = Decoder::random(shapes(n_layers), 3, BaseDtype::Bf16, &gpu_device()).unwrap();
        let adapter = LoraAdapter::new(&decoder, LoraSettings::all_linear(3, 6.0), 5).unwrap();
        let mut engine = engine(&decoder, 4);
        engine.set_policy(Some(&adapter), 1).unwrap();
        let requests = [GenerationRequest { prompt: &prompt, seed: 1, n: 4 }];
        let found = generate(&mut engine, &requests, Decoding::Sample, &sampling(24));
        let (mean, max) = off_the_training_pass((&decoder, &adapter), &requests, &found, 1.0);
        let least = found.iter().flat_map(|answer| &answer.logprobs).copied().fold(0f32, f32::min);
        println!("{n_layers} layers: {mean} on average, {max} at worst; the unlikeliest that was drawn has {least}");
        assert!(mean > 0.0 && mean < 0.03 && max < 0.3, "{n_layers} layers: {mean} on average, {max} at worst");
    }
}
