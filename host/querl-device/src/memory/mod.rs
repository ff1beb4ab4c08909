//! How much memory a stage will take, from its settings and the model's shapes, before it begins.
//!
//! Counted are the large things: the base, the adapters with what their optimizers keep, what a pass keeps of each row for its
//! backward pass, the logits of a part of the vocabulary, the keys and values of answers in progress. Counts are upper bounds where
//! the data decides (the longest row, as many answers as are in progress at most). Not counted, and therefore reserved as
//! [`BESIDE_BYTES`]: what driver, cuBLAS and kernels take, and pieces that the allocator cannot join.

mod advice;
mod counts;

pub use advice::{Advice, advise, gibibytes};

pub(crate) use counts::{base_bytes, linears};

use counts::{adapter_parameters, kept_bytes_of_row, largest_linear, largest_trained, scratch_bytes_of_row};
use querl_core::config::{BaseDtype, CriticKind, ModelConfig, RlConfig, SftConfig, TuningMethod};
use querl_model::kernels::{CARD_LOGITS, CARD_LOGITS_OF_ROW};
use querl_model::{DecoderConfig, EngineSettings, Place};
use querl_train::BUCKET;
use querl_train::rl::kv_cache_room;

/// In what a device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Bytes of an activation within a layer, and of a key or value that is kept.
    pub value_bytes: usize,
    /// What is reserved for everything that is not counted.
    pub beside_bytes: u64,
    /// What work beside the training takes of that kind again.
    pub stream_bytes: u64,
    /// How it can store a frozen base, most bits first.
    pub storages: &'static [BaseDtype],
    /// Bytes of the copy of an adapter's weight that an operation multiplies with: rounded on a card, joined with others on the
    /// processor.
    pub adapter_copy_bytes: usize,
    /// Bytes of such a copy of a trained weight of the base.
    pub weight_copy_bytes: u64,
    /// How it multiplies with a packed base.
    pub packed: PackedProducts,
    /// What a communicator takes, in which devices of this sort sum together.
    pub communicator_bytes: u64,
}

/// How a device multiplies with a base in fewer bits than bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedProducts {
    /// Widened block by block on the way.
    Direct,
    /// A weight at a time is widened to bf16 first, in one place.
    Widened,
}

/// Of a card: cuBLAS's workspace of 32 MiB, the driver's part of a process and loaded kernels. An allowance, and no measurement.
pub const BESIDE_BYTES: u64 = 768 << 20;

/// cuBLAS's workspace of a stream of work.
const WORKSPACE_BYTES: u64 = 32 << 20;

/// Of a communicator of NCCL, on each of its cards: 24 channels, in each a connection of a ring and one of a tree, of which each has
/// 10 MiB where it receives (4 MiB of `NCCL_BUFFSIZE`, and the buffers of the two protocols for short messages) and 2 MiB where it
/// sends. An allowance, and no measurement: NCCL takes fewer channels between cards without NVLink, and up to 32 between others;
/// `NCCL_MAX_NCHANNELS` bounds them.
///
/// Source: NCCL's user guide, "Environment Variables"; NVIDIA/nccl issues 986 (what memory depends on) and 1685 (sizes of buffers).
pub const COMMUNICATOR_BYTES: u64 = 24 * 2 * (12 << 20);

impl Types {
    /// A card: activations in bf16, the base in that or fewer bits.
    pub const CARD: Self = Self {
        value_bytes: 2,
        beside_bytes: BESIDE_BYTES,
        stream_bytes: WORKSPACE_BYTES,
        storages: &Place::CARD_STORAGES,
        adapter_copy_bytes: 2,
        weight_copy_bytes: 2,
        packed: PackedProducts::Widened,
        communicator_bytes: COMMUNICATOR_BYTES,
    };
    /// The processor: everything in f32, the base in anything.
    pub const PROCESSOR: Self = Self {
        value_bytes: 4,
        beside_bytes: 0,
        stream_bytes: 0,
        storages: &[BaseDtype::F32, BaseDtype::Bf16, BaseDtype::F16, BaseDtype::Int8, BaseDtype::Fp8, BaseDtype::Nf4],
        adapter_copy_bytes: 4,
        weight_copy_bytes: 0,
        packed: PackedProducts::Direct,
        communicator_bytes: 0,
    };
}

/// Sums, adapters, gradients and moments are f32 on every device.
const SUM_BYTES: usize = 4;

/// A logit in f32 and its gradient in bf16.
const LOGIT_BYTES: usize = 6;

/// What will be run, as far as memory depends on it.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// The model's shapes.
    pub shapes: DecoderConfig,
    /// Its storage, and how passes are cut.
    pub model: ModelConfig,
    /// What is done with it.
    pub stage: Stage,
    /// In what.
    pub types: Types,
    /// How many devices do it together: the model's copies, each of `model.tensor_parallel` devices.
    pub n_devices: usize,
}

impl Asked {
    /// Copies of the model, whose gradients are summed.
    fn n_copies(&self) -> usize {
        self.n_devices / self.model.tensor_parallel.max(1)
    }

    /// What one of the devices that hold the model together holds and computes.
    fn of_rank(&self) -> Self {
        Self { shapes: self.shapes.of_rank(self.model.tensor_parallel.max(1)), ..self.clone() }
    }
}

/// What is done with a model.
#[derive(Debug, Clone, PartialEq)]
pub enum Stage {
    /// Supervised fine-tuning.
    Sft {
        /// Its settings.
        config: SftConfig,
        /// Tokens of the longest row.
        longest_row: usize,
    },
    /// Reinforcement learning.
    Rl {
        /// Its settings.
        config: Box<RlConfig>,
        /// The shape of its adapters.
        lora: SftConfig,
        /// Tokens of the longest prompt.
        longest_prompt: usize,
    },
}

impl Stage {
    /// As the command line calls it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sft { .. } => "sft",
            Self::Rl { .. } => "rl",
        }
    }

    /// Whether it has an engine besides.
    fn generates(&self) -> bool {
        matches!(self, Self::Rl { .. })
    }

    fn lora(&self) -> &SftConfig {
        match self {
            Self::Sft { config, .. } => config,
            Self::Rl { lora, .. } => lora,
        }
    }

    /// Tokens of the longest row that is learned from.
    fn longest_row(&self) -> usize {
        match self {
            Self::Sft { longest_row, .. } => *longest_row,
            Self::Rl { config, longest_prompt, .. } => longest_prompt + config.max_new_tokens,
        }
    }

    /// Most rows of data that one pass may have.
    fn rows_of_step(&self) -> usize {
        match self {
            Self::Sft { config, .. } => config.batch_size * config.gradient_accumulation_steps,
            Self::Rl { config, .. } => config.mini_batch_size.div_ceil(config.gradient_accumulation_steps.max(1)),
        }
    }
}

/// Bytes of each part, at the moment when all of them together are most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Plan {
    /// The base as it is stored; in full fine-tuning with its gradients and moments.
    pub base: u64,
    /// All adapters: values, gradients, moments, and copies that generation takes.
    pub adapters: u64,
    /// What a pass keeps for its backward pass.
    pub kept: u64,
    /// What the backward pass of one layer needs besides.
    pub scratch: u64,
    /// Logits and their gradients, of a part of the vocabulary.
    pub logits: u64,
    /// A packed base's largest weight, widened for a product; where answers are generated beside the training, twice.
    pub widened: u64,
    /// Keys and values of answers in progress.
    pub cache: u64,
    /// What else a step of decoding reads and writes: activations, logits.
    pub decoding: u64,
    /// What sums over devices take: communicators, and tensors that are summed.
    pub sums: u64,
    /// See [`Types::beside_bytes`] and [`Types::stream_bytes`].
    pub beside: u64,
}

impl Plan {
    /// Counts.
    pub fn new(asked: &Asked) -> Self {
        let asked = &asked.of_rank();
        let Asked { shapes, model, stage, types, .. } = asked;
        let n_rows = tokens_of_pass(asked);
        let n_layers = shapes.n_layers as u64;
        let rank = stage.lora().lora_rank;
        let kept = kept_bytes_of_row(shapes, rank, types.value_bytes);
        let row_of_layer = (shapes.hidden_size * SUM_BYTES) as u64;
        // With checkpointing each layer keeps its input alone, and one at a time has everything.
        let kept = match model.gradient_checkpointing {
            true => (n_layers * row_of_layer + kept) * n_rows,
            false => n_layers * kept * n_rows,
        };
        let parameters = adapter_parameters(shapes, stage.lora());
        Self {
            base: base_of(asked),
            adapters: adapters_of(asked, parameters),
            kept: kept + row_of_layer * n_rows,
            scratch: scratch_bytes_of_row(shapes, types.value_bytes) * n_rows,
            logits: logits_of(shapes, n_rows),
            widened: widened_of(asked),
            cache: cache_of(asked),
            decoding: decoding_of(asked),
            sums: sums_of(asked, n_rows),
            beside: types.beside_bytes + u64::from(stage.generates()) * types.stream_bytes,
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.certain()
            + self.kept
            + self.scratch
            + self.logits
            + self.widened
            + self.cache
            + self.decoding
            + self.sums
            + self.beside
    }

    /// What is there from the beginning to the end, counted to the byte but for padding: where this does not fit, nothing does.
    pub fn certain(&self) -> u64 {
        self.base + self.adapters
    }

    /// Parts that are not nothing, with their names, largest first.
    pub fn parts(&self) -> Vec<(&'static str, u64)> {
        let mut parts = vec![
            ("base", self.base),
            ("adapters", self.adapters),
            ("activations", self.kept + self.scratch),
            ("logits", self.logits),
            ("a widened weight", self.widened),
            ("keys and values", self.cache),
            ("decoding", self.decoding),
            ("sums over devices", self.sums),
            ("reserve", self.beside),
        ];
        parts.retain(|(_, bytes)| *bytes > 0);
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        parts
    }
}

/// Tokens of the largest pass: the limit, unless a step has fewer or a single row more.
fn tokens_of_pass(asked: &Asked) -> u64 {
    let longest = asked.stage.longest_row();
    let of_step = asked.stage.rows_of_step().saturating_mul(longest);
    asked.model.tokens_per_pass.min(of_step).max(longest) as u64
}

fn base_of(asked: &Asked) -> u64 {
    let stored = base_bytes(&asked.shapes, asked.model.dtype);
    match &asked.stage {
        // Values, their gradients, those of a pass, two moments: all f32, whatever the storage of a frozen base; and what layers
        // multiply with. Embedding and head are counted with them.
        Stage::Sft { config, .. } if config.method == TuningMethod::Full => {
            let values = base_bytes(&asked.shapes, BaseDtype::F32);
            values * 5 + values / SUM_BYTES as u64 * asked.types.weight_copy_bytes
        }
        _ => stored,
    }
}

/// A trained adapter: value, two moments, the gradient and that of the pass under way, and the copy that operations multiply with.
/// A frozen one: its values.
fn adapters_of(asked: &Asked, parameters: u64) -> u64 {
    let trained = 5 * SUM_BYTES + asked.types.adapter_copy_bytes;
    let bytes = match &asked.stage {
        Stage::Sft { config, .. } if config.method == TuningMethod::Full => 0,
        Stage::Sft { .. } => trained,
        Stage::Rl { config, .. } => {
            let has_critic = config.algorithm == querl_core::config::RlAlgorithm::Ppo;
            let critic = if has_critic && config.critic == CriticKind::Adapter { trained } else { 0 };
            let snapshot = usize::from(config.off_by_one);
            // The policy, its reference, the copy that generation reads.
            trained + (1 + 1 + snapshot) * SUM_BYTES + critic
        }
    };
    bytes as u64 * parameters
}

fn widened_of(Asked { shapes, model, stage, types, .. }: &Asked) -> u64 {
    let is_full = matches!(stage, Stage::Sft { config, .. } if config.method == TuningMethod::Full);
    let is_packed = matches!(model.dtype, BaseDtype::Int8 | BaseDtype::Fp8 | BaseDtype::Nf4);
    // The engine has a stream of its own, which works beside the training's: each has a place.
    let n_places = 1 + u64::from(stage.generates());
    match types.packed == PackedProducts::Widened && is_packed && !is_full {
        true => n_places * 2 * largest_linear(shapes),
        false => 0,
    }
}

fn logits_of(shapes: &DecoderConfig, n_rows: u64) -> u64 {
    let n_logits = (CARD_LOGITS as u64).max(CARD_LOGITS_OF_ROW as u64 * n_rows).min(n_rows * shapes.vocab_size as u64);
    n_logits * LOGIT_BYTES as u64
}

/// What the engine allocates on a card, counted by the engine; the processor's takes as much as there are tokens, which is less.
fn cache_of(asked: &Asked) -> u64 {
    let Stage::Rl { config, longest_prompt, .. } = &asked.stage else { return 0 };
    let max_prefix_tokens = EngineSettings::default().max_prefix_tokens;
    kv_cache_room(config, *longest_prompt, asked.n_copies()).cache_bytes(
        &asked.shapes,
        max_prefix_tokens,
        asked.types.value_bytes,
    )
}

/// As [`cache_of`].
fn decoding_of(asked: &Asked) -> u64 {
    let Stage::Rl { config, longest_prompt, lora } = &asked.stage else { return 0 };
    kv_cache_room(config, *longest_prompt, asked.n_copies()).work_bytes(&asked.shapes, lora.lora_rank)
}

/// Of copies of the model a communicator, and the gradients that are summed at once, joined and summed; of devices that hold a copy
/// together a communicator, and the sum of what each has of a pass's rows.
fn sums_of(asked: &Asked, n_rows: u64) -> u64 {
    let Asked { shapes, stage, types, .. } = asked;
    let of_copies = types.communicator_bytes + 2 * SUM_BYTES as u64 * bucket_of(shapes, stage);
    let of_parts = types.communicator_bytes + n_rows * (shapes.hidden_size * SUM_BYTES) as u64;
    let copies = if asked.n_copies() > 1 { of_copies } else { 0 };
    copies + if asked.model.tensor_parallel > 1 { of_parts } else { 0 }
}

/// Values of the largest bucket of gradients.
fn bucket_of(shapes: &DecoderConfig, stage: &Stage) -> u64 {
    let (largest, all) = match stage {
        Stage::Sft { config, .. } if config.method == TuningMethod::Full => {
            let table = (shapes.vocab_size * shapes.hidden_size) as u64;
            (table.max(largest_linear(shapes)), base_bytes(shapes, BaseDtype::F32) / SUM_BYTES as u64)
        }
        _ => (largest_trained(shapes, stage.lora()), adapter_parameters(shapes, stage.lora())),
    };
    largest.max(BUCKET as u64).min(all)
}

#[cfg(test)]
mod tests;
