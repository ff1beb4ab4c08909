//! Making a decoder: from a checkpoint, or with fresh weights.

use super::layer::Layer;
use super::{Decoder, Weights};
use crate::checkpoint::{required, weight_files};
use crate::kernels::{FrozenWeight, RopeTable, Weight};
use crate::{DecoderConfig, ModelError};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor, Var};
use querl_core::config::BaseDtype;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

impl Decoder {
    /// Loads a Hugging Face directory.
    ///
    /// # Errors
    /// A file is missing, the architecture is not supported, or a tensor is missing or of another shape.
    pub fn load(directory: &Path, weights: Weights) -> Result<Self, ModelError> {
        let config = DecoderConfig::load(&required(directory, "config.json")?)?;
        let files = weight_files(directory)?;
        let bad = |message: String| ModelError::bad_file(directory, message);
        // SAFETY: the files are mapped for the length of this function only; a program that rewrites a checkpoint in place
        // while it is being loaded breaks the mapping, as it would for every reader of safetensors. querl never does.
        let stored = unsafe { MmapedSafetensors::multi(&files) }
            .map_err(|error| bad(format!("damaged safetensors file: {}", first_line(&error))))?;
        let shapes = config.tensor_shapes();
        let known: BTreeSet<&str> = shapes.iter().map(|(name, _)| name.as_str()).collect();
        let is_surplus = |name: &String| !known.contains(name.as_str()) && !is_redundant(name, &config);
        if let Some((name, _)) = stored.tensors().into_iter().find(|(name, _)| is_surplus(name)) {
            return Err(bad(format!("tensor `{name}` has no place in the model that config.json describes")));
        }
        let mut tensors = BTreeMap::new();
        for (name, shape) in &shapes {
            let tensor = stored.load(name, &Device::Cpu).map_err(|_| bad(format!("no tensor `{name}` there")))?;
            if tensor.dims() != shape.as_slice() {
                let found = tensor.dims();
                return Err(bad(format!("tensor `{name}` has shape {found:?}; config.json makes it {shape:?}")));
            }
            tensors.insert(name.clone(), tensor.to_dtype(DType::F32)?);
        }
        Self::from_tensors(config, tensors, weights)
    }

    /// Fresh weights: normal with the config's deviation, norms 1, biases 0; every weight is a variable.
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
                _ => (0..n_values).map(|_| normal(&mut rng) * config.initializer_range as f32).collect(),
            };
            tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        Self::from_tensors(config, tensors, Weights::Trained)
    }

    fn from_tensors(
        config: DecoderConfig,
        mut tensors: BTreeMap<String, Tensor>,
        weights: Weights,
    ) -> Result<Self, ModelError> {
        let mut vars = BTreeMap::new();
        if weights == Weights::Trained {
            for (name, tensor) in &mut tensors {
                let var = Var::from_tensor(tensor)?;
                *tensor = var.as_tensor().clone();
                vars.insert(name.clone(), var);
            }
        }
        let mut take = |name: &str| -> Result<Tensor, ModelError> {
            Ok(tensors.remove(name).ok_or_else(|| candle_core::Error::Msg(format!("no tensor `{name}`")))?)
        };
        let embedding = weight_of(take("model.embed_tokens.weight")?, weights)?;
        let head = match config.tie_word_embeddings {
            true => embedding.clone(),
            false => weight_of(take("lm_head.weight")?, weights)?,
        };
        let layers = (0..config.n_layers)
            .map(|index| Layer::new(&format!("model.layers.{index}"), &config, weights, &mut take).map(Arc::new))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            norm: take("model.norm.weight")?,
            embedding,
            layers,
            head,
            rope: RopeTable::new(config.max_positions, config.head_dim, config.rope_theta),
            config,
            vars,
        })
    }
}

/// A weight in the form in which its products are made.
pub(super) fn weight_of(tensor: Tensor, weights: Weights) -> Result<Weight, ModelError> {
    Ok(match weights {
        Weights::Frozen => Weight::Frozen(FrozenWeight::pack(&tensor, BaseDtype::F32)?),
        Weights::Trained => Weight::Trained(tensor),
    })
}

/// Tensors that some checkpoints hold beside what is needed: a tied head written out, constants of the rotary embedding.
fn is_redundant(name: &str, config: &DecoderConfig) -> bool {
    (config.tie_word_embeddings && name == "lm_head.weight") || name.ends_with("rotary_emb.inv_freq")
}

/// A standard normal value (Box and Muller).
pub(crate) fn normal(rng: &mut ChaCha8Rng) -> f32 {
    use rand::Rng;
    let (u, v): (f32, f32) = (rng.random_range(f32::MIN_POSITIVE..1.0), rng.random_range(0.0..1.0));
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

/// The first line of an error: candle appends backtraces.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
