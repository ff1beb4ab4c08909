//! Plans and advice compared with numbers computed by hand.

use super::*;
use serde_json::json;

/// The shapes of Qwen2.5-32B.
fn large() -> DecoderConfig {
    DecoderConfig::of_shape("qwen2.5-32b").unwrap()
}

fn model(dtype: BaseDtype, tokens_per_pass: usize) -> ModelConfig {
    serde_json::from_value(json!({"path": "model", "dtype": dtype, "tokens_per_pass": tokens_per_pass})).unwrap()
}

fn sft(dtype: BaseDtype, tokens_per_pass: usize) -> MemoryRequest {
    let config = SftConfig { batch_size: 64, ..SftConfig::default() };
    let stage = PlannedStage::Sft { config, longest_row: 1024 };
    let model = model(dtype, tokens_per_pass);
    MemoryRequest { shapes: large(), model, stage, types: DeviceSizes::GPU, n_devices: 1 }
}

fn rl(tokens_per_pass: usize) -> MemoryRequest {
    let config = RlConfig { batch_size: 64, max_new_tokens: 150, ..RlConfig::default() };
    let stage = PlannedStage::Rl { config: Box::new(config), lora: SftConfig::default(), longest_prompt: 874 };
    MemoryRequest { stage, ..sft(BaseDtype::Bf16, tokens_per_pass) }
}

/// The plan of `request` on some devices.
fn plan_on(request: MemoryRequest, n_devices: usize, tensor_parallel: usize) -> MemoryPlan {
    let model = ModelConfig { tensor_parallel, ..request.model.clone() };
    MemoryPlan::new(&MemoryRequest { model, n_devices, ..request })
}

const GIB: u64 = 1 << 30;

#[test]
fn the_base_is_the_published_number_of_weights() {
    // 32.76e9 weights: the model card of Qwen2.5-32B states 32.5B, 31.0B without embeddings.
    let layer = 5120 * (5120 + 2 * 1024) + 5120 * 5120 + 3 * 5120 * 27_648u64;
    let tables = 2 * 152_064 * 5120u64;
    let small = 64 * (2 * 5120 + 5120 + 2 * 1024) + 5120u64;
    let n_weights = 64 * layer + tables + small;
    assert!((32.7e9..32.8e9).contains(&(n_weights as f64)), "{n_weights}");
    assert_eq!(base_bytes(&large(), BaseDtype::Bf16), 2 * (64 * layer + tables) + 4 * small);
    assert_eq!(base_bytes(&large(), BaseDtype::F32), 4 * n_weights);
    // 4 bits per weight, and a scale of 4 bytes per 64 weights.
    assert_eq!(base_bytes(&large(), BaseDtype::Nf4), 64 * (layer / 2 + layer / 16) + 2 * tables + 4 * small);
}

#[test]
fn an_adapter_has_the_weights_that_peft_counts() {
    // The number that PEFT's `print_trainable_parameters()` gives for a LoRA of rank 16 on all linear layers of these shapes.
    let of_layer = 16 * ((5120 + 5120) + 2 * (5120 + 1024) + (5120 + 5120) + 3 * (5120 + 27_648));
    assert_eq!(adapter_parameters(&large(), &SftConfig::default()), 64 * of_layer);
    assert_eq!(adapter_parameters(&large(), &SftConfig::default()), 134_217_728);
    let some = SftConfig { lora_target_modules: vec!["q_proj".into()], ..SftConfig::default() };
    assert_eq!(adapter_parameters(&large(), &some), 64 * 16 * 10_240);
}

#[test]
fn tensor_parallelism_divides_a_model_except_tables_and_residuals() {
    let request = sft(BaseDtype::Bf16, 4096);
    let whole = MemoryPlan::new(&request);
    let part = plan_on(request, 1, 4);
    let (tables, small) = (2 * 152_064 * 5120 * 2, (64 * (2 * 5120) + 5120) * 4);
    let biases = 64 * (5120 + 2 * 1024) * 4;
    assert_eq!(part.base, (whole.base - tables - small - biases) / 4 + tables + small + biases / 4);
    // LoRA A of five layers and LoRA B of two are replicated on every rank.
    let of_layer = 16 * (5 * 5120 + (5120 + 2 * 1024 + 2 * 27_648) / 4 + 2 * 5120 + (5120 + 27_648) / 4);
    assert_eq!(part.adapters, (5 * 4 + 2) * 64 * of_layer);
    assert!(part.activations < whole.activations / 2 && part.logits == whole.logits);
}

#[test]
fn data_parallel_ranks_reduce_a_gradient_bucket_and_tensor_parallel_ranks_activations() {
    let with = |n_devices, tensor_parallel| plan_on(sft(BaseDtype::Bf16, 4096), n_devices, tensor_parallel);
    let (alone, of_nccl) = (with(1, 1), 576 << 20);
    assert_eq!((alone.sums, with(2, 1).sums), (0, of_nccl + 2 * (32 << 20)));
    assert_eq!(with(2, 1), MemoryPlan { sums: with(2, 1).sums, ..alone });
    assert_eq!(with(2, 2).sums, of_nccl + 4096 * 5120 * 4);
    assert_eq!(with(4, 2).sums, with(2, 1).sums + with(2, 2).sums);
    assert_eq!(with(2, 1).total() - alone.total(), with(2, 1).sums);
    assert!(with(2, 1).parts().contains(&("sums over devices", with(2, 1).sums)));
}

#[test]
fn a_tensor_larger_than_a_bucket_is_reduced_at_once_and_small_adapters_are_one_bucket() {
    let bucket = |config: SftConfig| bucket_of(&large(), &PlannedStage::Sft { config, longest_row: 1024 });
    let lora = SftConfig { lora_rank: 2, lora_target_modules: vec!["q_proj".into()], ..SftConfig::default() };
    assert_eq!(bucket(lora.clone()), 64 * 2 * (5120 + 5120));
    assert_eq!(bucket(SftConfig { lora_rank: 16, ..SftConfig::default() }), 8 << 20);
    assert_eq!(bucket(SftConfig { lora_rank: 512, ..lora }), 512 * 27_648);
    assert_eq!(bucket(SftConfig { method: TuningMethod::Full, ..SftConfig::default() }), 152_064 * 5120);
}

#[test]
fn gradient_checkpointing_saves_layer_inputs_and_the_activations_of_one_layer() {
    let whole = MemoryPlan::new(&sft(BaseDtype::Bf16, 4096));
    let request = sft(BaseDtype::Bf16, 4096);
    let checkpointed = MemoryPlan::new(&MemoryRequest {
        model: ModelConfig { gradient_checkpointing: true, ..request.model.clone() },
        ..request
    });
    let of_row = (2 * (5120 + 1024 + 27_648 + 56)) as u64 * 2 + (2 * 5120 + 40) * 4;
    let inputs = 5120 * 4u64;
    assert_eq!(whole.activations, 4096 * (64 * of_row + inputs));
    assert_eq!(checkpointed.activations, 4096 * (64 * inputs + of_row + inputs));
    assert_eq!(MemoryPlan { activations: whole.activations, ..checkpointed }, whole);
}

#[test]
fn a_pass_is_at_most_a_step_and_at_least_the_longest_row() {
    let with = |tokens_per_pass, rows, longest_row| {
        let config = SftConfig { batch_size: rows, gradient_accumulation_steps: 1, ..SftConfig::default() };
        let stage = PlannedStage::Sft { config, longest_row };
        tokens_of_pass(&MemoryRequest { stage, ..sft(BaseDtype::Bf16, tokens_per_pass) })
    };
    assert_eq!((with(8192, 2, 500), with(8192, 64, 500), with(256, 64, 500)), (1000, 8192, 500));
}

#[test]
fn reinforcement_learning_counts_critic_reference_and_kv_cache() {
    let (rl, sft) = (MemoryPlan::new(&rl(4096)), MemoryPlan::new(&sft(BaseDtype::Bf16, 4096)));
    // 22 bytes per weight of policy and critic each, reference and copy for generation; fine-tuning has the policy only.
    assert_eq!((rl.adapters, sft.adapters), ((2 * 22 + 2 * 4) * 134_217_728, 22 * 134_217_728));
    // A part of the batch, 32 responses: 11 blocks each, 56 per prompt and for one waiting prompt, 256 of cached prefixes; 16 tokens per
    // block, 256 KiB per token.
    assert_eq!(rl.cache, (32 * 11 + 33 * 56 + 256) * 16 * 64 * 2 * 1024 * 2);
    // Rows of a pass, as many as split-K attention in four parts has room for: the residual in f32, and in bf16 its norm, queries and
    // attention output, keys and values, gate and up, 3 * 16 LoRA A outputs. Of 32 responses and one waiting: residual, queries, two
    // hidden states.
    let rows = 4 * 5120 + 2 * (5120 + 2 * 5120 + 2 * 1024 + 2 * 27_648 + 48);
    let n_rows = (1 << 24) / (40 * 4 * 130);
    let responses = 33 * (4 * 5120 + 2 * 3 * 5120) + 4 * 32 * 152_064;
    assert_eq!(rl.decoding, n_rows * rows + responses + 4 * n_rows * 40 * 4 * 130);
    assert_eq!((sft.cache, sft.decoding), (0, 0));
}

/// Regression: with several GPUs, each was planned for the responses of all.
#[test]
fn model_copies_share_the_responses_of_a_part_and_shards_do_not() {
    let with = |n_devices, tensor_parallel| plan_on(rl(4096), n_devices, tensor_parallel);
    // Each copy has 8 of 32 responses with their prompts; the cached prefixes are the same.
    assert_eq!(with(4, 1).cache, (8 * 11 + 9 * 56 + 256) * 16 * 64 * 2 * 1024 * 2);
    assert!(with(4, 1).decoding < with(1, 1).decoding);
    // Each shard has half of the heads and all responses.
    assert_eq!(with(2, 2).cache, with(1, 1).cache / 2);
}

#[test]
fn full_fine_tuning_on_a_gpu_keeps_a_copy_of_the_weights_in_bf16() {
    let config = SftConfig { method: TuningMethod::Full, ..SftConfig::default() };
    let stage = PlannedStage::Sft { config, longest_row: 1024 };
    let plan = |types| MemoryPlan::new(&MemoryRequest { stage: stage.clone(), types, ..sft(BaseDtype::Bf16, 4096) });
    let values = base_bytes(&large(), BaseDtype::F32);
    assert_eq!((plan(DeviceSizes::GPU).base, plan(DeviceSizes::CPU).base), (values * 5 + values / 2, values * 5));
    assert_eq!((plan(DeviceSizes::GPU).adapters, plan(DeviceSizes::GPU).widened), (0, 0));
}

fn advised(request: &MemoryRequest, free: u64) -> Option<String> {
    let advice = advise(request, free)?;
    let needed = MemoryPlan::new(request).total();
    assert!(needed > free && needed - advice.saved_bytes <= free, "{advice:?}");
    Some(advice.change)
}

#[test]
fn a_plan_that_fits_or_never_fits_has_no_advice() {
    assert_eq!(advised(&sft(BaseDtype::Bf16, 2048), 141 * GIB), None);
    let request = sft(BaseDtype::Bf16, 8192);
    assert!(MemoryPlan::new(&request).total() > 8 * GIB && advise(&request, 8 * GIB).is_none());
}

#[test]
fn advice_is_the_cheapest_change_that_suffices() {
    let request = sft(BaseDtype::Bf16, 8192);
    let needed = MemoryPlan::new(&request).total();
    assert!(needed > 131 * GIB, "{needed}");
    // A little less memory: the largest passes that fit, in steps of 256.
    let change = advised(&request, 131 * GIB).unwrap();
    assert!(change.starts_with("model.tokens_per_pass to "), "{change}");
    let size: usize = change["model.tokens_per_pass to ".len()..].parse().unwrap();
    let total = |size| MemoryPlan::new(&sft(BaseDtype::Bf16, size)).total();
    assert!(total(size) <= 131 * GIB && total(size + 256) > 131 * GIB && size.is_multiple_of(256));
    // If passes would become small, gradient checkpointing; if that is not enough, fewer bits per weight.
    assert_eq!(advised(&request, 85 * GIB).unwrap(), "model.gradient_checkpointing to true");
    assert!(advised(&request, 72 * GIB).unwrap().starts_with("model.gradient_checkpointing to true and model.tokens"));
    let fewer_bits = |free| advised(&request, free * GIB).unwrap();
    assert_eq!(fewer_bits(55), "model.dtype to \"int8\" and model.gradient_checkpointing to true");
    assert_eq!(fewer_bits(40), "model.dtype to \"nf4\" and model.gradient_checkpointing to true");
}

#[test]
fn a_quantised_base_on_a_gpu_needs_a_buffer_for_its_largest_dequantised_weight() {
    let planned = |dtype, types| MemoryPlan::new(&MemoryRequest { types, ..sft(dtype, 4096) });
    let [bf16, fp8] = [BaseDtype::Bf16, BaseDtype::Fp8].map(|dtype| planned(dtype, DeviceSizes::GPU));
    assert_eq!((bf16.widened, fp8.widened), (0, 2 * 5120 * 27_648));
    assert_eq!(planned(BaseDtype::Fp8, DeviceSizes::CPU).widened, 0);
    // One byte less per weight of the layers, and a scale for each of their outputs.
    let n_outputs = 64 * (2 * 5120 + 2 * 1024 + 2 * 27_648 + 5120u64);
    let n_weights = 64 * (5120 * (5120 + 2 * 1024) + 5120 * 5120 + 3 * 5120 * 27_648u64);
    assert_eq!(bf16.base - fp8.base, n_weights - 4 * n_outputs);
    // Generation has a separate stream with a separate buffer and workspace.
    let with_generation = |dtype| MemoryPlan::new(&MemoryRequest { model: model(dtype, 4096), ..rl(4096) });
    let [bf16_rl, fp8_rl] = [BaseDtype::Bf16, BaseDtype::Fp8].map(with_generation);
    assert_eq!((bf16_rl.widened, fp8_rl.widened), (0, 2 * fp8.widened));
    assert_eq!((bf16.reserved, bf16_rl.reserved), (RESERVED_BYTES, RESERVED_BYTES + (32 << 20)));
    assert!(fp8.parts().iter().any(|(name, bytes)| *name == "a widened weight" && *bytes == fp8.widened));
}

/// Regression: a dtype was advised whose weight groups cross the boundary between two shards.
#[test]
fn no_dtype_is_advised_that_cannot_be_sharded() {
    let over = |intermediate_size| {
        let request = sft(BaseDtype::Bf16, 8192);
        let model = ModelConfig { tensor_parallel: 2, ..request.model.clone() };
        let request =
            MemoryRequest { shapes: DecoderConfig { intermediate_size, ..large() }, model, n_devices: 2, ..request };
        (8..80).map(|gib| advised(&request, gib * GIB)).collect::<Vec<_>>()
    };
    let names =
        |advice: &[Option<String>], dtype| advice.iter().flatten().filter(|change| change.contains(dtype)).count();
    let (whole_groups, halves) = (over(27_648), over(27_648 + 64));
    assert!(names(&whole_groups, "\"nf4\"") + names(&whole_groups, "\"int8\"") > 0, "{whole_groups:?}");
    assert_eq!(names(&halves, "\"nf4\"") + names(&halves, "\"int8\""), 0, "{halves:?}");
    assert!(names(&halves, "\"fp8\"") > 0, "{halves:?}");
}

#[test]
fn advice_reads_as_a_sentence() {
    let advice = Advice { change: "model.gradient_checkpointing to true".into(), saved_bytes: 10 * GIB + GIB / 2 };
    assert_eq!(advice.to_string(), "set model.gradient_checkpointing to true, which takes 10.5 GiB less");
}
