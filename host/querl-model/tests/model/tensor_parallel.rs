//! Tensor parallelism compared with one rank.
//!
//! Sums over a layer's inputs are computed per rank and then over ranks, which changes the rounding; all other arithmetic is the same.
//! Values here are of the order of 1 and sums have at most some hundred terms in f32.

use crate::{decoder_files, values};
use candle_core::{Device, Tensor};
use querl_core::config::BaseDtype;
use querl_model::{
    ComputeDevice, Decoder, DecoderConfig, Decoding, Dropout, Family, GenerationRequest, Keep, LoraAdapter,
    LoraSettings, ModelError, PackedBatch, Pass, Ranks, Recompute, SamplingSettings, Weights, backward, generate,
    run_ranks,
};
use std::collections::{BTreeMap, BTreeSet};

/// A random model that can be sharded over four ranks, with shards wide enough for the groups of int8 and nf4.
fn wide() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 64,
        hidden_size: 64,
        intermediate_size: 256,
        n_layers: 2,
        n_heads: 8,
        n_kv_heads: 4,
        head_dim: 32,
        max_positions: 256,
        initializer_range: 0.1,
        ..DecoderConfig::of_shape("qwen3-0.6b").unwrap()
    }
}

#[derive(Clone, Copy)]
enum From {
    Golden(&'static str),
    Random(Family),
}

impl From {
    fn decoder(self, dtype: BaseDtype, ranks: &Ranks) -> Result<Decoder, ModelError> {
        match self {
            Self::Golden(name) => Decoder::load_shard(&decoder_files(name), dtype, &ComputeDevice::Cpu, ranks),
            Self::Random(family) => {
                let config = DecoderConfig { family, qkv_bias: family == Family::Qwen2, ..wide() };
                Decoder::random_shard(config, 5, dtype, &ComputeDevice::Cpu, ranks)
            }
        }
    }
}

fn numbers(name: &str, n: usize) -> Vec<f32> {
    let seed: u32 = name.bytes().fold(7, |seed, byte| seed.wrapping_mul(31).wrapping_add(u32::from(byte)));
    (0..n as u32)
        .map(|i| ((seed.wrapping_add(i).wrapping_mul(2_654_435_761) >> 8) as f32 / 16_777_216.0 - 0.5) * 0.4)
        .collect()
}

/// An adapter on every layer and the embedding, with nonzero effect.
fn adapter(base: &Decoder) -> LoraAdapter {
    let mut settings = LoraSettings::all_linear(3, 6.0);
    let names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"];
    settings.target_modules = querl_model::Modules::from_names(&names.map(String::from));
    let adapter = LoraAdapter::new(base, settings, 3).unwrap();
    let whole = adapter.whole().unwrap();
    for (name, var) in whole.vars() {
        let values = numbers(name, var.elem_count());
        var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap()).unwrap();
    }
    whole.for_decoder(base).unwrap()
}

fn sequences() -> [Vec<u32>; 3] {
    let tokens = |n: u32, step: u32| (0..n).map(|i| (i * step + 5) % 64).collect();
    [tokens(14, 37), tokens(14, 11), tokens(9, 23)]
}

/// Logits, log-probabilities and the gradients of the full adapter on one rank.
struct Outputs {
    logits: Vec<f32>,
    logprobs: Vec<f32>,
    gradients: BTreeMap<String, Vec<f32>>,
}

fn run(base: &Decoder, dropout: Option<Dropout>, recompute: Option<Keep>, wanted: Option<&[u32]>) -> Outputs {
    let (adapter, recompute) = (adapter(base), recompute.map(Recompute::new));
    let texts = sequences();
    let batch = PackedBatch::shared(texts.iter().map(Vec::as_slice));
    let rows: Vec<u32> = wanted.map_or((0..batch.n_rows() as u32).collect(), <[u32]>::to_vec);
    let pass = Pass { adapter: Some(&adapter), dropout, recompute: recompute.as_ref() };
    let hidden = base.hidden_at(&batch, &rows, &pass).unwrap();
    let targets: Vec<u32> = (0..rows.len() as u32).map(|i| (i * 29 + 3) % 64).collect();
    let logprobs = base.token_logprobs(&hidden, targets, 1.0, Some(&adapter)).unwrap();
    let loss = logprobs.narrow(1, 0, 1).unwrap().sum_all().unwrap();
    let store = backward(&loss, recompute.as_ref()).unwrap();
    // Set as a part of an adapter, so that gathering it uses the same code.
    let found = adapter.snapshot().unwrap();
    for (name, var) in adapter.vars() {
        let gradient = store.get(var).unwrap_or_else(|| panic!("no gradient of {name}"));
        found.vars()[name].set(gradient).unwrap();
    }
    let gradients = found.whole().unwrap().vars().iter().map(|(name, var)| (name.clone(), values(var))).collect();
    let logits = values(&base.logits(&hidden, Some(&adapter)).unwrap());
    Outputs { logits, logprobs: values(&logprobs), gradients }
}

fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    found.iter().zip(expected).fold(0f32, |worst, (a, b)| worst.max((a - b).abs())) / largest.max(1e-6)
}

/// Compares `n` ranks with one rank within the tolerance, and the ranks with each other bit by bit.
fn check(n: usize, from: From, dtype: BaseDtype, what: impl Fn(&Decoder) -> Outputs + Sync, tolerance: f32) {
    let [expected] =
        run_ranks(1, |ranks| from.decoder(dtype, &ranks).map(|base| what(&base))).unwrap().try_into().ok().unwrap();
    let all = run_ranks(n, |ranks| {
        let base = from.decoder(dtype, &ranks)?;
        assert_eq!((base.shard().rank(), base.shard().size()), (ranks.rank(), n));
        Ok::<_, ModelError>(what(&base))
    });
    let all = all.unwrap_or_else(|failures| panic!("{}", failures[0]));
    for found in &all {
        assert_eq!(found.logits, all[0].logits);
        assert_eq!(found.gradients, all[0].gradients);
    }
    let found = &all[0];
    let worst = difference(&found.logits, &expected.logits).max(difference(&found.logprobs, &expected.logprobs));
    assert!(worst <= tolerance, "logits and log-probabilities are off by {worst}");
    assert!(found.gradients.keys().eq(expected.gradients.keys()));
    for (name, expected) in &expected.gradients {
        let worst = difference(&found.gradients[name], expected);
        assert!(worst <= tolerance, "the gradient of {name} is off by {worst}");
        assert!(expected.iter().any(|x| *x != 0.0), "{name} has no gradient");
    }
}

/// Tolerance for f32: a sum of a hundred products has an error of a few units in the last place, and gradients pass through two layers.
const F32: f32 = 2e-5;

#[test]
fn two_ranks_compute_what_one_does() {
    for name in ["qwen2-tied", "qwen3-tied", "qwen3-bias"] {
        check(2, From::Golden(name), BaseDtype::F32, |base| run(base, None, None, None), F32);
    }
}

#[test]
fn four_ranks_compute_what_one_does() {
    for family in [Family::Qwen2, Family::Qwen3] {
        check(4, From::Random(family), BaseDtype::F32, |base| run(base, None, None, None), F32);
    }
}

#[test]
fn layers_that_keep_their_inputs_alone_and_rows_that_are_wanted_change_nothing() {
    let wanted = [3, 9, 20];
    for keep in [Keep::Inputs, Keep::Activations] {
        let run = |base: &Decoder| run(base, None, Some(keep), Some(&wanted));
        check(2, From::Golden("qwen3-bias"), BaseDtype::F32, run, F32);
    }
}

/// The path with separate operations instead of one per layer. Masks are slices of the unsharded model's masks.
#[test]
fn dropout_is_the_same_on_any_number_of_ranks() {
    let dropout = Some(Dropout { p: 0.3, seed: 11 });
    for (n, keep) in [(2, None), (4, Some(Keep::Inputs))] {
        check(n, From::Random(Family::Qwen2), BaseDtype::F32, |base| run(base, dropout, keep, None), F32);
        check(n, From::Random(Family::Qwen3), BaseDtype::F32, |base| run(base, dropout, keep, Some(&[1, 17, 30])), F32);
    }
}

/// Each rank quantizes its shard with the same scales and rounding as the unsharded model.
#[test]
fn weights_of_fewer_bits_are_those_of_the_whole_model() {
    for dtype in [BaseDtype::Bf16, BaseDtype::F16, BaseDtype::Int8, BaseDtype::Nf4] {
        for n in [2, 4] {
            check(n, From::Random(Family::Qwen3), dtype, |base| run(base, None, None, None), F32);
        }
    }
}

/// fp8 has one scale per row, and each part of a split row has a separate one: the rounding differs, with a 3-bit mantissa.
#[test]
fn a_part_of_a_row_in_fp8_has_a_scale_of_its_own() {
    check(2, From::Random(Family::Qwen3), BaseDtype::Fp8, |base| run(base, None, None, None), 0.2);
}

#[test]
fn ranks_generate_the_tokens_that_one_does() {
    let answers = |n: usize, from: From, decoding: Decoding| {
        let all = run_ranks(n, |ranks| {
            let base = from.decoder(BaseDtype::F32, &ranks)?;
            let adapter = adapter(&base);
            let prompts: [&[u32]; 3] = [&[5, 9, 2, 7], &[5, 9, 2, 7, 11, 30], &[5, 9, 44]];
            let requests = prompts.map(|prompt| GenerationRequest {
                prompt,
                seed: 3,
                n: if matches!(decoding, Decoding::Sample) { 20 } else { 1 },
            });
            let sampling = SamplingSettings { max_new_tokens: 20, ..SamplingSettings::default() };
            generate(&base, Some(&adapter), &requests, decoding, &sampling, &BTreeSet::new())
        });
        all.unwrap_or_else(|failures| panic!("{}", failures[0]))
    };
    for decoding in [Decoding::Sample, Decoding::Greedy, Decoding::Beam { n_beams: 3, length_penalty: 1.0 }] {
        for (n, from) in
            [(2, From::Golden("qwen3-bias")), (2, From::Golden("qwen2-tied")), (4, From::Random(Family::Qwen3))]
        {
            let (expected, found) = (answers(1, from, decoding), answers(n, from, decoding));
            for of_rank in &found {
                assert_eq!(*of_rank, found[0]);
                for (found, expected) in of_rank.iter().zip(&expected[0]) {
                    assert_eq!(found.token_ids, expected.token_ids);
                    assert!(difference(&found.logprobs, &expected.logprobs) <= F32);
                }
            }
        }
    }
}

#[test]
fn an_adapter_is_saved_whole_with_the_bytes_of_one_that_was_never_split() {
    let folder = tempfile::tempdir().unwrap();
    let save = |n: usize, name: &str| {
        let path = folder.path().join(name);
        let saved = run_ranks(n, |ranks| {
            let base = From::Random(Family::Qwen3).decoder(BaseDtype::F32, &ranks)?;
            let adapter = adapter(&base);
            let n_parameters = adapter.n_parameters();
            let whole = adapter.whole()?;
            assert_eq!(whole.n_parameters(), n_parameters);
            if ranks.is_first() {
                if n > 1 {
                    assert!(
                        adapter.save(&path, "base").unwrap_err().to_string().contains("`model.tensor_parallel = 1`")
                    );
                }
                whole.save(&path, "base")?;
            }
            ranks.barrier()?;
            // Loading and splitting it again gives the same adapter.
            let again = LoraAdapter::load(&path, base.config())?.for_decoder(&base)?;
            for (name, var) in adapter.vars() {
                assert_eq!(values(var), values(&again.vars()[name]), "{name}");
            }
            Ok::<_, ModelError>(())
        });
        saved.unwrap_or_else(|failures| panic!("{}", failures[0]));
        ["adapter_config.json", "adapter_model.safetensors"].map(|file| std::fs::read(path.join(file)).unwrap())
    };
    let expected = save(1, "one");
    assert!(save(2, "two") == expected && save(4, "four") == expected);
}

#[test]
fn what_is_not_split_is_refused_in_a_sentence() {
    let refused = |n: usize, from: From, settings: Option<LoraSettings>| {
        let failures = run_ranks(n, |ranks| {
            let base = from.decoder(BaseDtype::F32, &ranks)?;
            settings.clone().map_or(Ok(()), |settings| LoraAdapter::new(&base, settings, 1).map(drop))
        });
        failures.unwrap_err()[0].to_string()
    };
    let message = refused(2, From::Golden("qwen2-untied"), None);
    assert!(message.contains("1 heads of keys and values (4 of queries) cannot be split over 2 ranks"), "{message}");
    let dora = LoraSettings { use_dora: true, ..LoraSettings::all_linear(2, 4.0) };
    let message = refused(2, From::Golden("qwen2-tied"), Some(dora));
    assert!(message.contains("(`sft.use_dora`) is not split over ranks; set `model.tensor_parallel = 1`"), "{message}");
}

#[test]
fn a_rank_alone_has_the_whole_model() {
    let text = sequences();
    let batch = PackedBatch::new([text[0].as_slice()]);
    let whole = Decoder::load(&decoder_files("qwen3-bias"), Weights::Frozen).unwrap();
    let alone = From::Golden("qwen3-bias").decoder(BaseDtype::F32, &Ranks::alone()).unwrap();
    let [whole, alone] = [whole, alone].map(|base| values(&base.hidden_states(&batch, None).unwrap()));
    assert_eq!(whole, alone);
}
