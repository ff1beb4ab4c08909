//! Qwen2, Qwen3, Llama and Mistral decoders that can be trained.
//!
//! In: a Hugging Face directory (config.json, safetensors, tokenizer.json, chat template) and LoRA adapters in PEFT's format. Out:
//! hidden states, log-probabilities and generated tokens, with gradients for all that is trained. Text classifiers are decoders with a
//! classification head ([`classifier`]). This crate must not depend on losses, rewards, plugins and files other than a model's.
//!
//! Modules import in one direction: configuration, sharding and [`kernels`]; packed batches; transformer layers (`transformer/layer.rs`);
//! the decoder and adapters; generation. Devices other than the CPU are a [`backend::Backend`].
//!
//! Sequences are packed (concatenated without padding). One frozen base in memory serves every adapter: an adapter is an
//! argument of the forward pass, not merged into the weights.

mod accelerator;
mod adapter;
pub mod backend;
mod batch;
mod ceilings;
mod chat_template;
mod checkpoint;
pub mod classifier;
mod compute_device;
mod config;
mod control_tokens;
mod decoder;
mod dropout;
mod error;
mod export;
mod finite;
mod generate;
mod gguf;
mod inspect;
pub mod kernels;
mod kv_cache;
mod nccl;
mod random;
mod random_model;
mod ranks;
mod second_opinion;
mod sharding;
pub mod small_model;
mod tokenizer;
mod transformer;

pub use candle_core::DType;

pub use accelerator::{
    Accelerator, AcceleratorWeight, Accelerators, AdamWStep, AdamWTensors, DeviceMemory, DeviceState, GradientNorm,
    KernelLaunch, WeightValues, accelerator_of, has_accelerators,
};
pub use adapter::{LoraAdapter, LoraSettings, Modules, Patterns, SavedCopies};
pub use batch::PackedBatch;
pub use ceilings::{Repeated, copies, matrix_products};
pub use chat_template::ChatTemplate;
pub use checkpoint::{check_config_file, check_directory, check_weights, load_tensors, save_tensors};
pub use compute_device::{ComputeDevice, GpuUse};
pub use config::{DecoderConfig, Family, Llama3Scaling, RopeScaling, Weights, YarnScaling};
pub use decoder::Decoder;
pub use dropout::Dropout;
pub use error::ModelError;
pub use export::{ExportSettings, Exported, copy_model_files, dtype_name, export_model};
pub use generate::{
    AdapterWeights, CacheMemory, CacheRoom, Decoding, Engine, EngineSettings, FinishReason, Generated,
    GenerationRequest, PrefixLife, RequestLimits, SamplingSettings, ServingEngine, ServingRequest, ServingSettings,
    StepOutput, StopSignal, TokenText, generate,
};
pub use gguf::{GgufDtype, GgufExport, export_gguf};
pub use inspect::{AdapterSummary, ModelSummary, inspect_adapter, inspect_model, is_adapter};
pub use kv_cache::{BLOCK_TOKENS, n_splits, split_values};
pub use nccl::{NcclError, NcclLibrary, nccl_version, nccl_version_name};
pub use random::{STEP as SPLIT_MIX_STEP, mix as split_mix};
pub use random_model::write_random_model;
pub use ranks::{Communicator, Mesh, RankFailure, Ranks, RanksError, run_ranks};
pub use second_opinion::SecondOpinion;
pub use sharding::Shard;
pub use tokenizer::{TextTokenizer, TokenizerSettings, train_tokenizer};
pub use transformer::{Keep, Pass, Recompute, backward};

/// Sets the number of worker threads of all models in this process; 0 uses all cores. Only the first call has an effect.
///
/// With several threads the calling thread is one of them: handing its work to others while it sleeps would cost a tenth of the time on
/// small models. With one thread the worker is a separate thread, so that waiting for the calling thread cannot deadlock.
pub fn set_threads(n_threads: usize) {
    let available = || std::thread::available_parallelism().map_or(1, usize::from);
    let n_threads = if n_threads == 0 { available() } else { n_threads };
    let builder = rayon::ThreadPoolBuilder::new().num_threads(n_threads);
    let builder = if n_threads > 1 { builder.use_current_thread() } else { builder };
    // An error means that the global pool exists already, and its size is kept.
    let _ = builder.build_global();
}
