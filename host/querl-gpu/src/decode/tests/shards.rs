//! A model on two GPUs, compared with one GPU. Skipped on a machine with one GPU.

use super::*;
use querl_model::{ModelError, Ranks, run_ranks};

fn has_two_gpus() -> bool {
    Gpu::new(1).is_ok()
}

fn device_of(ranks: &Ranks) -> Result<ComputeDevice, ModelError> {
    Ok(device_of_gpu(Gpu::new(ranks.rank())?))
}

/// The result of two ranks, which must be equal.
fn on_two_gpus<T: Send + PartialEq>(work: impl Fn(Ranks) -> Result<T, ModelError> + Sync) -> T {
    let found = run_ranks(2, work).unwrap_or_else(|failures| panic!("{}", failures[0]));
    let [first, second] = found.try_into().ok().unwrap();
    assert!(first == second, "the ranks differ");
    first
}

/// Two GPUs round the residual in another order than one: each is compared with the CPU and with its own training pass, at the
/// tolerances of one GPU.
#[test]
fn responses_are_those_of_one_gpu_except_rounding_and_equal_on_both() {
    if !has_two_gpus() {
        return;
    }
    let (prompts, sampling) = (prompts(), SamplingSettings { temperature: 0.8, ..sampling(14) });
    let (requests, beams) = (requests(&prompts), Decoding::Beam { n_beams: 4, length_penalty: 1.0 });
    for (name, decoding) in [("qwen2-tied", Decoding::Greedy), ("qwen3-bias", Decoding::Sample), ("qwen3-tied", beams)]
    {
        let pair = Pair::new(name);
        let mut of_one = pair.engine(5);
        let alone = generate(&mut of_one, &requests, decoding, &sampling);
        let of_cpu = &pair.on_cpu.1;
        let (found, mean, max, block_bytes) = on_two_gpus(|ranks| {
            let decoder = Decoder::load_shard(&golden(name), BaseDtype::Bf16, &device_of(&ranks)?, &ranks)?;
            let adapter = of_cpu.snapshot()?.for_decoder(&decoder)?;
            let mut engine = engine(&decoder, 5);
            engine.set_policy(Some(&adapter), 1)?;
            let found = generate(&mut engine, &requests, decoding, &sampling);
            assert_eq!(n_captured(&engine), 0, "steps in which ranks meet are recorded");
            let (mean, max) = off_the_training_pass((&decoder, &adapter), &requests, &found, sampling.temperature);
            Ok((found, mean, max, engine.cache_memory().block_bytes))
        });
        assert_eq!(2 * block_bytes, of_one.cache_memory().block_bytes, "each GPU has the keys of its own heads");
        let n_same = n_same(&found, &alone);
        println!("{name}, {decoding:?}: {n_same} of {} answers are those of one GPU", found.len());
        assert!(2 * n_same >= found.len(), "{name}, {decoding:?}: {n_same} of {}", found.len());
        if decoding == beams {
            continue; // beams do not keep probabilities of single tokens
        }
        println!("{name}, {decoding:?}: off the GPUs' training pass by {mean} on average, {max} at worst");
        assert!(mean <= 0.02 && max <= TOLERANCE, "{name}: off the training pass by {mean}, {max} at worst");
        let prompts = requests.iter().flat_map(|request| vec![request.prompt; request.n]);
        let off = |(prompt, answer)| pair.compared(prompt, answer, decoding, sampling.temperature);
        let worst = prompts.zip(&found).map(off).fold(0f32, f32::max);
        println!("{name}, {decoding:?}: off the CPU by {worst}");
        assert!(worst <= TOLERANCE, "{name}, {decoding:?}: off by {worst}");
    }
}

/// With few blocks, so that responses have to wait, on bases in all types.
#[test]
fn a_policy_takes_the_place_of_the_one_before_on_both() {
    if !has_two_gpus() {
        return;
    }
    // A shard of a row has complete groups of 64, which share a scale in int8 and nf4.
    let config = DecoderConfig { n_heads: 8, ..shapes(2) };
    let whole = Decoder::random(config.clone(), 3, BaseDtype::Bf16, &ComputeDevice::Cpu).unwrap();
    let adapters = [adapter(&whole, 0), adapter(&whole, 1)];
    let (prompts, sampling) = (prompts(), sampling(12));
    let requests = requests(&prompts);
    for dtype in [BaseDtype::Bf16, BaseDtype::Int8, BaseDtype::Fp8, BaseDtype::Nf4] {
        let (first, second, third, mean, max) = on_two_gpus(|ranks| {
            let decoder = Decoder::random_shard(config.clone(), 3, dtype, &device_of(&ranks)?, &ranks)?;
            let room = CacheRoom { n_responses: 3, n_prompts: 2, longest_prompt: 27, max_new_tokens: 12 };
            let settings = EngineSettings { max_prefix_tokens: 32, room: Some(room), ..EngineSettings::default() };
            let mut engine = Engine::new(&decoder, settings)?;
            let parts = adapters.each_ref().map(|adapter| adapter.snapshot().unwrap().for_decoder(&decoder).unwrap());
            let mut answers = |policy: usize, version: u64| {
                engine.set_policy(Some(&parts[policy]), version)?;
                Ok::<_, ModelError>(generate(&mut engine, &requests, Decoding::Sample, &sampling))
            };
            let (first, second, third) = (answers(0, 1)?, answers(1, 2)?, answers(0, 3)?);
            let (mean, max) = off_the_training_pass((&decoder, &parts[1]), &requests, &second, 1.0);
            Ok((first, second, third, mean, max))
        });
        println!("{dtype:?}: off the GPUs' training pass by {mean} on average, {max} at worst");
        assert!(first == third && first != second, "{dtype:?}");
        assert!(mean <= 0.03 && max <= 0.3, "{dtype:?}: off the training pass by {mean}, {max} at worst");
    }
}

#[test]
fn a_gpu_does_not_wait_for_one_that_has_failed() {
    if !has_two_gpus() {
        return;
    }
    let failures = run_ranks(2, |ranks| {
        let decoder = Decoder::random_shard(shapes(1), 3, BaseDtype::Bf16, &device_of(&ranks)?, &ranks)?;
        let mut engine = engine(&decoder, 1);
        let mut answer = |prompt: &[u32]| {
            let request = GenerationRequest { prompt, seed: 1, n: 1 };
            engine.generate(&[request], Decoding::Greedy, &sampling(3), &BTreeSet::new()).map(drop)
        };
        answer(&[5, 6])?;
        if ranks.rank() == 1 {
            return Err(ModelError::Generation("the second is gone".into()));
        }
        answer(&[7, 8])
    });
    let said = failures.unwrap_err().iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!(said.iter().any(|said| said.contains("the second is gone")), "{said:?}");
}
