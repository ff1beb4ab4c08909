//! Memory plan: how many bytes a stage will take, from its settings and the model's shapes, before it starts.
//!
//! Counted: the base, adapters with gradients and optimizer moments, saved activations, a chunk of logits, the KV cache. Counts are
//! upper bounds where the data decides (the longest row, the most responses generated at once). Not counted, but reserved as
//! [`RESERVED_BYTES`]: driver, cuBLAS, kernels, and fragmentation.

mod advice;
mod counts;

pub use advice::{Advice, advise, gibibytes};

pub use counts::{base_bytes, linears};

use crate::BUCKET;
use crate::rl::kv_cache_room;
use counts::{adapter_parameters, largest_linear, largest_trained, saved_bytes_of_row, scratch_bytes_of_row};
use querl_core::config::{BaseDtype, CriticKind, ModelConfig, RlConfig, SftConfig, TuningMethod};
use querl_model::kernels::{GPU_LOGITS, GPU_LOGITS_PER_ROW};
use querl_model::{ComputeDevice, DecoderConfig, EngineSettings};

/// Sizes of what a kind of device stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSizes {
    /// Bytes of an activation, and of a cached key or value.
    pub value_bytes: usize,
    /// Reserved for everything that is not counted.
    pub reserved_bytes: u64,
    /// Reserved for a second stream, that of generation.
    pub stream_bytes: u64,
    /// Supported storage of a frozen base, most bits first.
    pub storages: &'static [BaseDtype],
    /// Bytes of the copy of an adapter's weight that kernels read: rounded on a GPU, packed on the CPU.
    pub adapter_copy_bytes: usize,
    /// Bytes of the copy of a trained base weight that kernels read.
    pub weight_copy_bytes: u64,
    /// Matrix products with a quantised base.
    pub packed: PackedProducts,
    /// Memory of a communicator (NCCL).
    pub communicator_bytes: u64,
}

/// Matrix products with a base of fewer bits than bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedProducts {
    /// Dequantised block by block within the kernel.
    Direct,
    /// One weight at a time is dequantised to bf16 first, in one buffer.
    Widened,
}

/// On a GPU: cuBLAS's workspace of 32 MiB, the driver's memory per process and loaded kernels. An estimate, not measured.
pub const RESERVED_BYTES: u64 = 768 << 20;

/// cuBLAS's workspace of a stream.
const WORKSPACE_BYTES: u64 = 32 << 20;

/// An NCCL communicator, per GPU: 24 channels, each with a ring and a tree connection of 10 MiB to receive (4 MiB of
/// `NCCL_BUFFSIZE`, and the buffers of the two protocols for short messages) and 2 MiB to send. An estimate, not measured: NCCL uses
/// fewer channels between GPUs without NVLink, and up to 32 between others; `NCCL_MAX_NCHANNELS` bounds them.
///
/// Source: NCCL's user guide, "Environment Variables"; NVIDIA/nccl issues 986 (what memory depends on) and 1685 (sizes of buffers).
pub const COMMUNICATOR_BYTES: u64 = 24 * 2 * (12 << 20);

impl DeviceSizes {
    /// A GPU: activations in bf16, the base in that or fewer bits.
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
    /// The CPU: everything in f32, the base in any dtype.
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

/// A logit in f32 and its gradient in bf16.
const LOGIT_BYTES: usize = 6;

/// A stage, as far as memory depends on it.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryRequest {
    /// The model's shapes.
    pub shapes: DecoderConfig,
    /// Its dtype and micro-batch size.
    pub model: ModelConfig,
    /// The training stage.
    pub stage: PlannedStage,
    /// Sizes of the kind of device.
    pub types: DeviceSizes,
    /// Devices: model copies times `model.tensor_parallel`.
    pub n_devices: usize,
}

impl MemoryRequest {
    /// Data-parallel copies of the model.
    fn n_copies(&self) -> usize {
        self.n_devices / self.model.tensor_parallel.max(1)
    }

    /// The shard of one tensor-parallel device.
    fn of_rank(&self) -> Self {
        Self { shapes: self.shapes.of_rank(self.model.tensor_parallel.max(1)), ..self.clone() }
    }
}

/// A training stage.
#[derive(Debug, Clone, PartialEq)]
pub enum PlannedStage {
    /// Supervised fine-tuning.
    Sft {
        /// Hyperparameters.
        config: SftConfig,
        /// Tokens of the longest row.
        longest_row: usize,
    },
    /// Reinforcement learning.
    Rl {
        /// Hyperparameters.
        config: Box<RlConfig>,
        /// The shape of adapters.
        lora: SftConfig,
        /// Tokens of the longest prompt.
        longest_prompt: usize,
    },
}

impl PlannedStage {
    /// Name on the command line.
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

    /// Tokens of the longest training row.
    fn longest_row(&self) -> usize {
        match self {
            Self::Sft { longest_row, .. } => *longest_row,
            Self::Rl { config, longest_prompt, .. } => longest_prompt + config.max_new_tokens,
        }
    }

    /// Most rows of one micro-batch.
    fn rows_of_step(&self) -> usize {
        match self {
            Self::Sft { config, .. } => config.batch_size * config.gradient_accumulation_steps,
            Self::Rl { config, .. } => config.mini_batch_size.div_ceil(config.gradient_accumulation_steps.max(1)),
        }
    }
}

/// Bytes by part, at the peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryPlan {
    /// The base; in full fine-tuning with gradients and moments.
    pub base: u64,
    /// All adapters: values, gradients, moments, and copies for generation.
    pub adapters: u64,
    /// Saved activations of one forward pass.
    pub activations: u64,
    /// Temporary buffers of one layer's backward pass.
    pub scratch: u64,
    /// Logits and their gradients, of a chunk of the vocabulary.
    pub logits: u64,
    /// The largest weight of a quantised base, dequantised; twice where training and generation overlap.
    pub widened: u64,
    /// The KV cache.
    pub cache: u64,
    /// Activations and logits of a decode step.
    pub decoding: u64,
    /// Communicators and buffers of all-reduces.
    pub sums: u64,
    /// See [`DeviceSizes::reserved_bytes`] and [`DeviceSizes::stream_bytes`].
    pub reserved: u64,
}

impl MemoryPlan {
    /// Computes the plan.
    pub fn new(request: &MemoryRequest) -> Self {
        let request = &request.of_rank();
        let MemoryRequest { shapes, model, stage, types, .. } = request;
        let n_rows = tokens_of_pass(request);
        let n_layers = shapes.n_layers as u64;
        let rank = stage.lora().lora_rank;
        let saved = saved_bytes_of_row(shapes, rank, types.value_bytes);
        let row_of_layer = (shapes.hidden_size * SUM_BYTES) as u64;
        // With gradient checkpointing each layer saves its input only, and one at a time has all activations.
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

    /// Sum of all parts.
    pub fn total(&self) -> u64 {
        self.certain()
            + self.activations
            + self.scratch
            + self.logits
            + self.widened
            + self.cache
            + self.decoding
            + self.sums
            + self.reserved
    }

    /// Base and adapters, which are there from start to end, exact up to padding: if these do not fit, nothing does.
    pub fn certain(&self) -> u64 {
        self.base + self.adapters
    }

    /// Nonzero parts with their names, largest first.
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

/// Tokens of the largest micro-batch: the limit, unless a step has fewer or a single row more.
fn tokens_of_pass(request: &MemoryRequest) -> u64 {
    let longest = request.stage.longest_row();
    let of_step = request.stage.rows_of_step().saturating_mul(longest);
    request.model.tokens_per_pass.min(of_step).max(longest) as u64
}

fn base_of(request: &MemoryRequest) -> u64 {
    let stored = base_bytes(&request.shapes, request.model.dtype);
    match &request.stage {
        // Values, their gradients, those of a pass, two moments: all f32, whatever the dtype of a frozen base; and the copies that
        // kernels read. Embedding and head are included.
        PlannedStage::Sft { config, .. } if config.method == TuningMethod::Full => {
            let values = base_bytes(&request.shapes, BaseDtype::F32);
            values * 5 + values / SUM_BYTES as u64 * request.types.weight_copy_bytes
        }
        _ => stored,
    }
}

/// A trained adapter: value, two moments, the gradient and that of the current pass, and the copy that kernels read. A frozen one:
/// its values.
fn adapters_of(request: &MemoryRequest, parameters: u64) -> u64 {
    let trained = 5 * SUM_BYTES + request.types.adapter_copy_bytes;
    let bytes = match &request.stage {
        PlannedStage::Sft { config, .. } if config.method == TuningMethod::Full => 0,
        PlannedStage::Sft { .. } => trained,
        PlannedStage::Rl { config, .. } => {
            let has_critic = config.algorithm == querl_core::config::RlAlgorithm::Ppo;
            let critic = if has_critic && config.critic == CriticKind::Adapter { trained } else { 0 };
            let snapshot = usize::from(config.off_by_one);
            // The policy, its reference, the copy that generation reads.
            trained + (1 + 1 + snapshot) * SUM_BYTES + critic
        }
    };
    bytes as u64 * parameters
}

fn widened_of(MemoryRequest { shapes, model, stage, types, .. }: &MemoryRequest) -> u64 {
    let is_full = matches!(stage, PlannedStage::Sft { config, .. } if config.method == TuningMethod::Full);
    let is_packed = matches!(model.dtype, BaseDtype::Int8 | BaseDtype::Fp8 | BaseDtype::Nf4);
    // The engine has a stream of its own, concurrent with training: each has a buffer.
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

/// As [`cache_of`], for decode steps.
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

/// Values of the largest bucket of gradients.
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

#[cfg(test)]
mod tests;
