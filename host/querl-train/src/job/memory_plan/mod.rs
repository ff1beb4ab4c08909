//! Memory plan: how many bytes a stage will take, from its settings and the model's shapes, before it starts.
//!
//! Counted: the base, adapters with gradients and optimizer moments, saved activations, a chunk of logits, the KV cache. Counts are
//! upper bounds where the data decides (the longest row, the most responses generated at once). Not counted, but reserved as
//! [`RESERVED_BYTES`]: driver, cuBLAS, kernels, and fragmentation.

use crate::BUCKET;
use crate::rl::kv_cache_room;
use querl_core::config::{BaseDtype, CriticKind, ModelConfig, RlConfig, SftConfig, TuningMethod};
use querl_model::kernels::{GPU_LOGITS, GPU_LOGITS_PER_ROW};
use querl_model::{ComputeDevice, DecoderConfig, EngineSettings, Shard};

/// Sizes of stored values and buffers on one kind of device, the CPU or a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSizes {
    /// Bytes of an activation, and of a cached key or value.
    pub value_bytes: usize,
    /// Bytes reserved for everything that the plan does not count.
    pub reserved_bytes: u64,
    /// Bytes reserved for a second CUDA stream, on which generation runs during training.
    pub stream_bytes: u64,
    /// Dtypes in which a frozen base can be stored, most bits first.
    pub storages: &'static [BaseDtype],
    /// Bytes per adapter weight of the copy that kernels read: rounded to bf16 on a GPU, packed on the CPU.
    pub adapter_copy_bytes: usize,
    /// Bytes per weight of the copy of a trained base that kernels read.
    pub weight_copy_bytes: u64,
    /// How matrix products read a quantised base.
    pub packed: PackedProducts,
    /// Bytes of an NCCL communicator; 0 on the CPU.
    pub communicator_bytes: u64,
}

/// How matrix products read a base of fewer bits than bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedProducts {
    /// The kernel dequantizes the weight block by block.
    Direct,
    /// Each weight is dequantized to bf16 before its matrix product, into one buffer for all weights.
    Widened,
}

/// Bytes reserved on a GPU for cuBLAS's workspace of 32 MiB, the driver's memory per process and loaded kernels. An estimate, not measured.
pub const RESERVED_BYTES: u64 = 768 << 20;

const WORKSPACE_BYTES: u64 = 32 << 20;

/// Bytes of an NCCL communicator per GPU: 24 channels, each with a ring and a tree connection of 10 MiB to receive (4 MiB of
/// `NCCL_BUFFSIZE`, and the buffers of the two protocols for short messages) and 2 MiB to send. An estimate, not measured: NCCL uses fewer
/// channels between GPUs without NVLink, and up to 32 with it; `NCCL_MAX_NCHANNELS` bounds the number of channels.
///
/// Source: NCCL's user guide, "Environment Variables"; NVIDIA/nccl issues 986 (what memory depends on) and 1685 (sizes of buffers).
pub const COMMUNICATOR_BYTES: u64 = 24 * 2 * (12 << 20);

impl DeviceSizes {
    /// Sizes on a GPU: activations in bf16, the base in bf16 or fewer bits.
    pub const GPU: Self = Self {
        value_bytes: 2,
        reserved_bytes: RESERVED_BYTES,
        stream_bytes: WORKSPACE_BYTES,
        storages: &ComputeDevice::GPU_DTYPES,
        adapter_copy_bytes: 2,
        weight_copy_bytes: 2,
        packed: PackedProducts::Widened,
        communicator_bytes: COMMUNICATOR_BYTES,
    };
    /// Sizes on the CPU: everything in f32, the base in any dtype.
    pub const CPU: Self = Self {
        value_bytes: 4,
        reserved_bytes: 0,
        stream_bytes: 0,
        storages: &[BaseDtype::F32, BaseDtype::Bf16, BaseDtype::F16, BaseDtype::Int8, BaseDtype::Fp8, BaseDtype::Nf4],
        adapter_copy_bytes: 4,
        weight_copy_bytes: 0,
        packed: PackedProducts::Direct,
        communicator_bytes: 0,
    };
}

/// Residuals, adapters, gradients and moments are f32 on every device.
const SUM_BYTES: usize = 4;

/// Bytes of a logit in f32 and its gradient in bf16.
const LOGIT_BYTES: usize = 6;

/// What the memory plan of a stage depends on.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryRequest {
    /// Shapes of the model.
    pub shapes: DecoderConfig,
    /// Settings of the model, such as dtype and tokens per pass.
    pub model: ModelConfig,
    /// The training stage.
    pub stage: PlannedStage,
    /// Sizes of stored values on the kind of device that the stage uses.
    pub types: DeviceSizes,
    /// Number of devices: model copies (data parallel) times `model.tensor_parallel`.
    pub n_devices: usize,
}

impl MemoryRequest {
    fn n_copies(&self) -> usize {
        self.n_devices / self.model.tensor_parallel.max(1)
    }

    fn of_rank(&self) -> Self {
        Self { shapes: self.shapes.of_rank(self.model.tensor_parallel.max(1)), ..self.clone() }
    }
}

/// The training stage that is planned, with the settings and data sizes that memory depends on.
#[derive(Debug, Clone, PartialEq)]
pub enum PlannedStage {
    /// Supervised fine-tuning.
    Sft {
        /// Hyperparameters.
        config: SftConfig,
        /// Length of the longest row in tokens.
        longest_row: usize,
    },
    /// Reinforcement learning.
    Rl {
        /// Hyperparameters.
        config: Box<RlConfig>,
        /// LoRA settings of policy and critic adapters.
        lora: SftConfig,
        /// Length of the longest prompt in tokens.
        longest_prompt: usize,
    },
}

impl PlannedStage {
    /// Name of the stage on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sft { .. } => "sft",
            Self::Rl { .. } => "rl",
        }
    }

    fn generates(&self) -> bool {
        matches!(self, Self::Rl { .. })
    }

    fn lora(&self) -> &SftConfig {
        match self {
            Self::Sft { config, .. } => config,
            Self::Rl { lora, .. } => lora,
        }
    }

    fn longest_row(&self) -> usize {
        match self {
            Self::Sft { longest_row, .. } => *longest_row,
            Self::Rl { config, longest_prompt, .. } => longest_prompt + config.max_new_tokens,
        }
    }

    fn rows_of_step(&self) -> usize {
        match self {
            Self::Sft { config, .. } => config.batch_size * config.gradient_accumulation_steps,
            Self::Rl { config, .. } => config.mini_batch_size.div_ceil(config.gradient_accumulation_steps.max(1)),
        }
    }
}

/// Memory of a device at the peak of a stage, in bytes by part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryPlan {
    /// Weights of the base; in full fine-tuning also gradients and optimizer moments.
    pub base: u64,
    /// All adapters: weights, gradients, optimizer moments, and copies for generation.
    pub adapters: u64,
    /// Saved activations of one forward pass.
    pub activations: u64,
    /// Temporary buffers of one layer's backward pass.
    pub scratch: u64,
    /// Logits of a chunk of the vocabulary, and the gradients of these logits.
    pub logits: u64,
    /// Buffer for the largest weight of a quantised base, dequantised to bf16; two buffers where training and generation overlap.
    pub widened: u64,
    /// The KV cache of rollouts.
    pub cache: u64,
    /// Activations and logits of a decode step.
    pub decoding: u64,
    /// Communicators and buffers of all-reduces.
    pub sums: u64,
    /// Reserved for what is not counted: [`DeviceSizes::reserved_bytes`] and [`DeviceSizes::stream_bytes`].
    pub reserved: u64,
}

impl MemoryPlan {
    /// Computes the memory plan of a stage.
    pub fn new(request: &MemoryRequest) -> Self {
        let request = &request.of_rank();
        let MemoryRequest { shapes, model, stage, types, .. } = request;
        let n_rows = tokens_of_pass(request);
        let n_layers = shapes.n_layers as u64;
        let rank = stage.lora().lora_rank;
        let saved = saved_bytes_of_row(shapes, rank, types.value_bytes);
        let row_of_layer = (shapes.hidden_size * SUM_BYTES) as u64;
        // With gradient checkpointing each layer saves only its input, and one layer at a time has all activations.
        let saved = match model.gradient_checkpointing {
            true => (n_layers * row_of_layer + saved) * n_rows,
            false => n_layers * saved * n_rows,
        };
        let parameters = adapter_parameters(shapes, stage.lora());
        Self {
            base: base_of(request),
            adapters: adapters_of(request, parameters),
            activations: saved + row_of_layer * n_rows,
            scratch: scratch_bytes_of_row(shapes, types.value_bytes) * n_rows,
            logits: logits_of(shapes, n_rows),
            widened: widened_of(request),
            cache: cache_of(request),
            decoding: decoding_of(request),
            sums: sums_of(request, n_rows),
            reserved: types.reserved_bytes + u64::from(stage.generates()) * types.stream_bytes,
        }
    }

    /// Sum of all parts, in bytes.
    pub fn total(&self) -> u64 {
        self.parts().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of base and adapters, which are allocated from start to end and known exactly up to padding. If these do not fit, smaller
    /// batches do not help.
    pub fn certain(&self) -> u64 {
        self.base + self.adapters
    }

    /// Parts of more than 0 bytes with their names, largest first.
    pub fn parts(&self) -> Vec<(&'static str, u64)> {
        let mut parts = vec![
            ("base", self.base),
            ("adapters", self.adapters),
            ("activations", self.activations + self.scratch),
            ("logits", self.logits),
            ("a widened weight", self.widened),
            ("keys and values", self.cache),
            ("decoding", self.decoding),
            ("sums over devices", self.sums),
            ("reserve", self.reserved),
        ];
        parts.retain(|(_, bytes)| *bytes > 0);
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        parts
    }
}

/// Number of tokens of the largest micro-batch: the limit, unless a step has fewer or a single row has more.
fn tokens_of_pass(request: &MemoryRequest) -> u64 {
    let longest = request.stage.longest_row();
    let of_step = request.stage.rows_of_step().saturating_mul(longest);
    request.model.tokens_per_pass.min(of_step).max(longest) as u64
}

fn base_of(request: &MemoryRequest) -> u64 {
    let stored = base_bytes(&request.shapes, request.model.dtype);
    match &request.stage {
        // Values, gradients, gradients of the current pass, and two moments: all f32, whatever the dtype of a frozen base; and the copies
        // that kernels read. Embedding and head are included.
        PlannedStage::Sft { config, .. } if config.method == TuningMethod::Full => {
            let values = base_bytes(&request.shapes, BaseDtype::F32);
            values * 5 + values / SUM_BYTES as u64 * request.types.weight_copy_bytes
        }
        _ => stored,
    }
}

/// Bytes of the adapters. A weight of a trained adapter takes five f32 values (the weight, the two moments of AdamW, the gradient, and the
/// gradient of the current pass) and the copy that kernels read; a weight of a frozen adapter takes one f32 value.
fn adapters_of(request: &MemoryRequest, parameters: u64) -> u64 {
    let trained = 5 * SUM_BYTES + request.types.adapter_copy_bytes;
    let bytes = match &request.stage {
        PlannedStage::Sft { config, .. } if config.method == TuningMethod::Full => 0,
        PlannedStage::Sft { .. } => trained,
        PlannedStage::Rl { config, .. } => {
            let has_critic = config.algorithm == querl_core::config::RlAlgorithm::Ppo;
            let critic = if has_critic && config.critic == CriticKind::Adapter { trained } else { 0 };
            let snapshot = usize::from(config.off_by_one);
            // The policy, the reference, and the copy for generation.
            trained + (1 + 1 + snapshot) * SUM_BYTES + critic
        }
    };
    bytes as u64 * parameters
}

fn widened_of(MemoryRequest { shapes, model, stage, types, .. }: &MemoryRequest) -> u64 {
    let is_full = matches!(stage, PlannedStage::Sft { config, .. } if config.method == TuningMethod::Full);
    let is_packed = matches!(model.dtype, BaseDtype::Int8 | BaseDtype::Fp8 | BaseDtype::Nf4);
    // The engine has a separate stream that runs concurrently with training, and each stream has a buffer.
    let n_places = 1 + u64::from(stage.generates());
    match types.packed == PackedProducts::Widened && is_packed && !is_full {
        true => n_places * 2 * largest_linear(shapes),
        false => 0,
    }
}

fn logits_of(shapes: &DecoderConfig, n_rows: u64) -> u64 {
    let n_logits = (GPU_LOGITS as u64).max(GPU_LOGITS_PER_ROW as u64 * n_rows).min(n_rows * shapes.vocab_size as u64);
    n_logits * LOGIT_BYTES as u64
}

/// The KV cache that the engine allocates on a GPU; on the CPU it grows with the tokens, which is less.
fn cache_of(request: &MemoryRequest) -> u64 {
    let PlannedStage::Rl { config, longest_prompt, .. } = &request.stage else { return 0 };
    let max_prefix_tokens = EngineSettings::default().max_prefix_tokens;
    kv_cache_room(config, *longest_prompt, request.n_copies()).cache_bytes(
        &request.shapes,
        max_prefix_tokens,
        request.types.value_bytes,
    )
}

/// The memory of decode steps.
fn decoding_of(request: &MemoryRequest) -> u64 {
    let PlannedStage::Rl { config, longest_prompt, lora } = &request.stage else { return 0 };
    kv_cache_room(config, *longest_prompt, request.n_copies()).work_bytes(&request.shapes, lora.lora_rank)
}

/// Data parallel: a communicator, and a gradient bucket before and after the all-reduce. Tensor parallel: a communicator, and the
/// all-reduced activations of a micro-batch.
fn sums_of(request: &MemoryRequest, n_rows: u64) -> u64 {
    let MemoryRequest { shapes, stage, types, .. } = request;
    let of_copies = types.communicator_bytes + 2 * SUM_BYTES as u64 * bucket_of(shapes, stage);
    let of_parts = types.communicator_bytes + n_rows * (shapes.hidden_size * SUM_BYTES) as u64;
    let copies = if request.n_copies() > 1 { of_copies } else { 0 };
    copies + if request.model.tensor_parallel > 1 { of_parts } else { 0 }
}

fn bucket_of(shapes: &DecoderConfig, stage: &PlannedStage) -> u64 {
    let (largest, all) = match stage {
        PlannedStage::Sft { config, .. } if config.method == TuningMethod::Full => {
            let table = (shapes.vocab_size * shapes.hidden_size) as u64;
            (table.max(largest_linear(shapes)), base_bytes(shapes, BaseDtype::F32) / SUM_BYTES as u64)
        }
        _ => (largest_trained(shapes, stage.lora()), adapter_parameters(shapes, stage.lora())),
    };
    largest.max(BUCKET as u64).min(all)
}

/// The seven linear layers of a decoder layer: name, input features, output features.
pub fn linears(shapes: &DecoderConfig) -> [(&'static str, usize, usize); 7] {
    let DecoderConfig { hidden_size, intermediate_size, .. } = *shapes;
    let (q, kv) = (shapes.n_heads * shapes.head_dim, shapes.n_kv_heads * shapes.head_dim);
    [
        ("q_proj", hidden_size, q),
        ("k_proj", hidden_size, kv),
        ("v_proj", hidden_size, kv),
        ("o_proj", q, hidden_size),
        ("gate_proj", hidden_size, intermediate_size),
        ("up_proj", hidden_size, intermediate_size),
        ("down_proj", intermediate_size, hidden_size),
    ]
}

fn largest_linear(shapes: &DecoderConfig) -> u64 {
    linears(shapes).into_iter().map(|(_, n_in, n_out)| (n_in * n_out) as u64).max().unwrap_or(0)
}

/// Bytes of a base model's weights stored as `dtype`: int8 and nf4 have one scale per 64 weights, fp8 one per output; all three keep
/// embedding and head in bf16.
pub fn base_bytes(shapes: &DecoderConfig, dtype: BaseDtype) -> u64 {
    let (of_linear, of_table) = match dtype {
        BaseDtype::F32 => (4.0, 4.0),
        BaseDtype::Bf16 | BaseDtype::F16 => (2.0, 2.0),
        BaseDtype::Int8 => (1.0625, 2.0),
        BaseDtype::Fp8 => (1.0, 2.0),
        BaseDtype::Nf4 => (0.5625, 2.0),
    };
    let of_layer: usize = linears(shapes).iter().map(|(_, n_in, n_out)| n_in * n_out).sum();
    let n_outputs: usize = linears(shapes).iter().map(|(_, _, n_out)| n_out).sum();
    let scales = if dtype == BaseDtype::Fp8 { shapes.n_layers * n_outputs } else { 0 };
    let n_tables = if shapes.tie_word_embeddings { 1 } else { 2 };
    let table = n_tables * shapes.vocab_size * shapes.hidden_size;
    let small = shapes.n_layers * small_of_layer(shapes) + shapes.hidden_size;
    let bytes = (shapes.n_layers * of_layer) as f64 * of_linear + table as f64 * of_table;
    bytes as u64 + ((small + scales) * SUM_BYTES) as u64
}

/// Norms and biases of a layer, always f32.
fn small_of_layer(shapes: &DecoderConfig) -> usize {
    let (q, kv) = (shapes.n_heads * shapes.head_dim, shapes.n_kv_heads * shapes.head_dim);
    let norms_of_heads = if shapes.family.has_qk_norm() { 2 * shapes.head_dim } else { 0 };
    let qkv = if shapes.qkv_bias { q + 2 * kv } else { 0 };
    let out = if shapes.output_bias { shapes.hidden_size } else { 0 };
    2 * shapes.hidden_size + norms_of_heads + qkv + out
}

/// Number of weights of an adapter: LoRA A and B of the adapted linear layers, and DoRA's magnitudes.
pub fn adapter_parameters(shapes: &DecoderConfig, lora: &SftConfig) -> u64 {
    let is_all = lora.lora_target_modules.iter().any(|name| name == "all-linear");
    let adapted = |name: &str| is_all || lora.lora_target_modules.iter().any(|target| target == name);
    let of_one = |n_in: usize, n_out: usize| lora.lora_rank * (n_in + n_out) + if lora.use_dora { n_out } else { 0 };
    let of_layer = linears(shapes).into_iter().filter(|(name, ..)| adapted(name));
    let of_layer: usize = of_layer.map(|(_, n_in, n_out)| of_one(n_in, n_out)).sum();
    (shapes.n_layers * of_layer) as u64
}

fn largest_trained(shapes: &DecoderConfig, lora: &SftConfig) -> u64 {
    let widest = linears(shapes).into_iter().map(|(_, n_in, n_out)| n_in.max(n_out)).max().unwrap_or(0);
    (lora.lora_rank * widest) as u64
}

/// Saved activations of a layer per token: queries, keys and values as attention reads them (for Qwen3 before their norms too),
/// attention output and logsumexp, the residuals after attention and after the layer, gate and up, LoRA A outputs.
fn saved_bytes_of_row(shapes: &DecoderConfig, rank: usize, value_bytes: usize) -> u64 {
    let (q, kv) = (shapes.n_heads * shapes.head_dim, shapes.n_kv_heads * shapes.head_dim);
    let before_norm = if shapes.family.has_qk_norm() { q + kv } else { 0 };
    let values = 2 * q + 2 * kv + before_norm + 2 * shapes.intermediate_size + 7 * rank;
    let sums = 2 * shapes.hidden_size + shapes.n_heads;
    (values * value_bytes + sums * SUM_BYTES) as u64
}

/// Temporary buffers of a layer's backward pass per token, the larger of: in the MLP the gated values and three gradients of their
/// width with one of the layer's; in attention the gradients of queries, keys, values and attention output, before and after RoPE;
/// and the residual's gradients.
fn scratch_bytes_of_row(shapes: &DecoderConfig, value_bytes: usize) -> u64 {
    let (q, kv) = (shapes.n_heads * shapes.head_dim, shapes.n_kv_heads * shapes.head_dim);
    let hidden = shapes.hidden_size;
    let feed_forward = (4 * shapes.intermediate_size + hidden) * value_bytes + 2 * hidden * SUM_BYTES;
    let attention = (3 * q + 3 * kv + hidden) * value_bytes + 3 * hidden * SUM_BYTES;
    feed_forward.max(attention) as u64
}

/// A change of settings that reduces memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// The configuration keys to change and their new values, as text.
    pub change: String,
    /// Bytes of memory that the change saves.
    pub saved_bytes: u64,
}

impl std::fmt::Display for Advice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "set {}, which takes {} less", self.change, gibibytes(self.saved_bytes))
    }
}

/// Formats bytes in GiB, as `12.3 GiB`.
pub fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// Granularity of `model.tokens_per_pass`.
const STEP_OF_PASS: usize = 256;

/// Below this, matrix products are too small for a GPU, and gradient checkpointing costs less time.
const SMALL_PASS: usize = 2048;

/// The cheapest change of settings with which the plan fits in `free_bytes`; `None` if it fits already, or if no change suffices. Tried in
/// this order: fewer tokens per pass (costs no time down to 2,048), gradient checkpointing (a third more time), both, smaller batches of
/// rollouts, a base of fewer bits (results change), and all of these.
pub fn advise(request: &MemoryRequest, free_bytes: u64) -> Option<Advice> {
    let needed = MemoryPlan::new(request).total();
    if needed <= free_bytes {
        return None;
    }
    let checkpointed = with(request, |request| request.model.gradient_checkpointing = true);
    let candidates = [
        smaller_passes(request, free_bytes).filter(|request| request.model.tokens_per_pass >= SMALL_PASS),
        fits(checkpointed.clone(), free_bytes),
        smaller_passes(&checkpointed, free_bytes),
        smaller_passes(request, free_bytes),
        smaller_batches(request, free_bytes),
        smaller_storage(request, free_bytes),
        smaller_storage(&checkpointed, free_bytes),
        smaller_storage(&smallest_passes(&checkpointed), free_bytes),
    ];
    let chosen = candidates.into_iter().flatten().next()?;
    let saved_bytes = needed - MemoryPlan::new(&chosen).total();
    Some(Advice { change: changes(request, &chosen).join(" and "), saved_bytes })
}

fn with(request: &MemoryRequest, change: impl FnOnce(&mut MemoryRequest)) -> MemoryRequest {
    let mut changed = request.clone();
    change(&mut changed);
    changed
}

fn fits(request: MemoryRequest, free_bytes: u64) -> Option<MemoryRequest> {
    (MemoryPlan::new(&request).total() <= free_bytes).then_some(request)
}

fn smallest_passes(request: &MemoryRequest) -> MemoryRequest {
    with(request, |request| request.model.tokens_per_pass = request.stage.longest_row().next_multiple_of(STEP_OF_PASS))
}

/// The largest passes that fit, by bisection: every part of a plan grows with the size of passes.
fn smaller_passes(request: &MemoryRequest, free_bytes: u64) -> Option<MemoryRequest> {
    let of = |steps: usize| with(request, |request| request.model.tokens_per_pass = steps * STEP_OF_PASS);
    let mut fitting = request.stage.longest_row().div_ceil(STEP_OF_PASS);
    fits(of(fitting), free_bytes)?;
    let mut too_large = (tokens_of_pass(request) as usize).div_ceil(STEP_OF_PASS).max(fitting + 1);
    while too_large - fitting > 1 {
        let middle = fitting.midpoint(too_large);
        match fits(of(middle), free_bytes) {
            Some(_) => fitting = middle,
            None => too_large = middle,
        }
    }
    Some(of(fitting))
}

/// Halves the number of queries per batch until the plan fits.
fn smaller_batches(request: &MemoryRequest, free_bytes: u64) -> Option<MemoryRequest> {
    let PlannedStage::Rl { config, .. } = &request.stage else { return None };
    let sizes = std::iter::successors(Some(config.batch_size / 2), |size| Some(size / 2)).take_while(|size| *size > 0);
    let of = |size: usize| {
        with(request, |request| {
            if let PlannedStage::Rl { config, .. } = &mut request.stage {
                config.batch_size = size;
                config.mini_batch_size = config.mini_batch_size.min(size * config.n_samples);
            }
        })
    };
    sizes.map(of).find_map(|request| fits(request, free_bytes))
}

/// The dtype with the most bits that fits and that the device supports.
fn smaller_storage(request: &MemoryRequest, free_bytes: u64) -> Option<MemoryRequest> {
    let base = |dtype| with(request, |request| request.model.dtype = dtype);
    let now = MemoryPlan::new(request).base;
    // The tensor-parallel devices must be able to shard it.
    let can_be_split = |dtype: &BaseDtype| Shard::check(request.model.tensor_parallel, &request.shapes, *dtype).is_ok();
    let storages = request.types.storages.iter().copied().filter(can_be_split);
    let mut smaller = storages.map(base).filter(|request| MemoryPlan::new(request).base < now);
    smaller.find_map(|request| fits(request, free_bytes))
}

fn changes(from: &MemoryRequest, to: &MemoryRequest) -> Vec<String> {
    let mut changes = Vec::new();
    if to.model.dtype != from.model.dtype {
        changes.push(format!("model.dtype to \"{}\"", to.model.dtype.name()));
    }
    if to.model.gradient_checkpointing != from.model.gradient_checkpointing {
        changes.push("model.gradient_checkpointing to true".into());
    }
    if to.model.tokens_per_pass != from.model.tokens_per_pass {
        changes.push(format!("model.tokens_per_pass to {}", to.model.tokens_per_pass));
    }
    if let (PlannedStage::Rl { config: from, .. }, PlannedStage::Rl { config: to, .. }) = (&from.stage, &to.stage) {
        if to.batch_size != from.batch_size {
            changes.push(format!("rl.batch_size to {}", to.batch_size));
        }
        if to.mini_batch_size != from.mini_batch_size {
            changes.push(format!("rl.mini_batch_size to {}", to.mini_batch_size));
        }
    }
    changes
}

#[cfg(test)]
mod tests;
