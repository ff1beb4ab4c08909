//! Creates a decoder, or one rank's shard of it: from a checkpoint, or with new weights.

use super::Decoder;
use crate::checkpoint::StoredModel;
use crate::checkpoint::{RandomTensors, Tensors, WeightLoader};
use crate::kernels::RopeTable;
use crate::random::standard_normal;
use crate::sharding::TensorParallel;
use crate::transformer::{self, LayerWeights};
use crate::{ComputeDevice, DecoderConfig, ModelError, Ranks, Weights};
use candle_core::{Device, Tensor};
use querl_core::config::BaseDtype;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

impl Decoder {
    /// Loads a Hugging Face directory, frozen weights stored in f32.
    ///
    /// # Errors
    /// See [`Decoder::load_as`].
    pub fn load(directory: &Path, weights: Weights) -> Result<Self, ModelError> {
        Self::load_as(directory, weights, BaseDtype::F32)
    }

    /// Loads a Hugging Face directory. Tensors are packed one after another, straight from the mapped file. `dtype` is how frozen
    /// weights are stored; trained ones are f32. With int8, fp8 and nf4, embedding and head are kept in bf16.
    ///
    /// # Errors
    /// A file is missing, the architecture is not supported, or a tensor is missing or of another shape.
    pub fn load_as(directory: &Path, weights: Weights, dtype: BaseDtype) -> Result<Self, ModelError> {
        Self::load_on(directory, weights, dtype, &ComputeDevice::Cpu)
    }

    /// Loads a Hugging Face directory onto a device. On a GPU frozen weights are bf16, int8, fp8 or nf4, with the codes that the CPU
    /// makes; tensors are uploaded one after another.
    ///
    /// # Errors
    /// As [`Decoder::load_as`]; or a GPU does not support `dtype`.
    pub fn load_on(
        directory: &Path,
        weights: Weights,
        dtype: BaseDtype,
        compute_device: &ComputeDevice,
    ) -> Result<Self, ModelError> {
        let stored = StoredModel::open(directory)?;
        Self::from_weights(stored.config.clone(), WeightLoader::new(&stored, weights, dtype, compute_device)?)
    }

    /// Loads one rank's shard of a frozen model; of split tensors only the shard is read.
    ///
    /// # Errors
    /// As [`Decoder::load_on`], or the model cannot be split over these ranks: see [`Shard::check`].
    pub fn load_shard(
        directory: &Path,
        dtype: BaseDtype,
        compute_device: &ComputeDevice,
        ranks: &Ranks,
    ) -> Result<Self, ModelError> {
        let stored = StoredModel::open(directory)?;
        let config = stored.config.clone();
        let parallel = TensorParallel::new(ranks, &config, dtype)?;
        let source = WeightLoader::new(&stored, Weights::Frozen, dtype, compute_device)?.sharded(parallel);
        Self::from_weights(config, source)
    }

    /// A decoder with random frozen weights, for benchmarks: normally distributed with the configuration's `initializer_range`, norms 1,
    /// biases 0. Values depend on the seed and on a tensor's name alone. No file is read or written, and tensors are made one after another
    /// on their device.
    ///
    /// # Errors
    /// A tensor cannot be made, or as [`Decoder::load_on`].
    pub fn random(
        config: DecoderConfig,
        seed: u64,
        dtype: BaseDtype,
        compute_device: &ComputeDevice,
    ) -> Result<Self, ModelError> {
        Self::random_shard(config, seed, dtype, compute_device, &Ranks::alone())
    }

    /// One rank's shard of the decoder that [`Decoder::random`] makes.
    ///
    /// # Errors
    /// As [`Decoder::random`], or the model cannot be split over these ranks: see [`Shard::check`].
    pub fn random_shard(
        config: DecoderConfig,
        seed: u64,
        dtype: BaseDtype,
        compute_device: &ComputeDevice,
        ranks: &Ranks,
    ) -> Result<Self, ModelError> {
        let made = RandomTensors::new(&config, seed);
        let parallel = TensorParallel::new(ranks, &config, dtype)?;
        let source = WeightLoader::new(&made, Weights::Frozen, dtype, compute_device)?.sharded(parallel);
        Self::from_weights(config, source)
    }

    /// A decoder with new trained weights: normally distributed with the configuration's `initializer_range`, norms 1, biases 0.
    ///
    /// # Errors
    /// A tensor cannot be made.
    ///
    /// Source: transformers' `_init_weights` for Qwen.
    pub fn init(config: DecoderConfig, seed: u64) -> Result<Self, ModelError> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut tensors = BTreeMap::new();
        for (name, shape) in config.tensor_shapes() {
            let n_values = shape.iter().product();
            let values: Vec<f32> = match name.as_str() {
                name if name.ends_with(".bias") => vec![0.0; n_values],
                name if name.contains("norm") => vec![1.0; n_values],
                _ => (0..n_values).map(|_| standard_normal(&mut rng) * config.initializer_range as f32).collect(),
            };
            tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        Self::from_weights(config, WeightLoader::new(&tensors, Weights::Trained, BaseDtype::F32, &ComputeDevice::Cpu)?)
    }

    pub(crate) fn of_tensors(
        config: DecoderConfig,
        tensors: &dyn Tensors,
        weights: Weights,
        dtype: BaseDtype,
    ) -> Result<Self, ModelError> {
        Self::from_weights(config, WeightLoader::new(tensors, weights, dtype, &ComputeDevice::Cpu)?)
    }

    fn from_weights(config: DecoderConfig, mut source: WeightLoader<'_>) -> Result<Self, ModelError> {
        source.compute_device.check_windows(&config)?;
        let embedding = source.table("model.embed_tokens.weight")?;
        let head = match config.tie_word_embeddings {
            true => embedding.clone(),
            false => source.table("lm_head.weight")?,
        };
        let layers = (0..config.n_layers)
            .map(|index| LayerWeights::load(&format!("model.layers.{index}"), &config, &mut source).map(Arc::new))
            .collect::<Result<_, _>>()?;
        let rope =
            RopeTable::scaled(config.max_positions, config.head_dim, config.rope_theta, config.rope_scaling.as_ref());
        Ok(Self {
            norm: source.value("model.norm.weight")?,
            embedding,
            layers,
            head,
            device_rope: transformer::layer_accelerator_of(&source.compute_device.device())?
                .map(|accelerator| accelerator.upload_rope(&rope))
                .transpose()?,
            rope,
            local: config.of_rank(source.parallel.shard().size()),
            config,
            parallel: source.parallel,
            vars: source.vars,
            compute_device: source.compute_device.clone(),
        })
    }
}
