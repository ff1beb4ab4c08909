//! Making a decoder: from a checkpoint, or with fresh weights.

use super::layer::Layer;
use super::{Decoder, Weights};
use crate::checkpoint::StoredModel;
use crate::kernels::{FrozenWeight, RopeTable, Weight};
use crate::{DecoderConfig, ModelError};
use candle_core::{DType, Device, Tensor, Var};
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
    /// weights are stored; trained ones are f32. With int8 and nf4, embedding and head are kept in bf16.
    ///
    /// # Errors
    /// A file is missing, the architecture is not supported, or a tensor is missing or of another shape.
    pub fn load_as(directory: &Path, weights: Weights, dtype: BaseDtype) -> Result<Self, ModelError> {
        let stored = StoredModel::open(directory)?;
        let read = |name: &str| stored.tensor(name);
        Self::from_source(stored.config().clone(), Source { read: &read, weights, dtype, vars: BTreeMap::new() })
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
        let read = |name: &str| {
            let tensor = tensors.get(name).cloned();
            Ok(tensor.ok_or_else(|| candle_core::Error::Msg(format!("no tensor `{name}`")))?)
        };
        let source = Source { read: &read, weights: Weights::Trained, dtype: BaseDtype::F32, vars: BTreeMap::new() };
        Self::from_source(config, source)
    }

    fn from_source(config: DecoderConfig, mut source: Source<'_>) -> Result<Self, ModelError> {
        let embedding = source.table("model.embed_tokens.weight")?;
        let head = match config.tie_word_embeddings {
            true => embedding.clone(),
            false => source.table("lm_head.weight")?,
        };
        let layers = (0..config.n_layers)
            .map(|index| Layer::new(&format!("model.layers.{index}"), &config, &mut source).map(Arc::new))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            norm: source.value("model.norm.weight")?,
            embedding,
            layers,
            head,
            rope: RopeTable::new(config.max_positions, config.head_dim, config.rope_theta),
            config,
            vars: source.vars,
        })
    }
}

/// Where a decoder's tensors come from, one at a time, and what becomes of them.
pub(super) struct Source<'a> {
    /// A tensor by name, of any float type.
    read: &'a dyn Fn(&str) -> Result<Tensor, ModelError>,
    weights: Weights,
    dtype: BaseDtype,
    vars: BTreeMap<String, Var>,
}

impl Source<'_> {
    /// A norm or a bias: f32, a variable where weights are trained.
    pub(super) fn value(&mut self, name: &str) -> Result<Tensor, ModelError> {
        let tensor = (self.read)(name)?.to_dtype(DType::F32)?;
        match self.weights {
            Weights::Frozen => Ok(tensor),
            Weights::Trained => {
                let var = Var::from_tensor(&tensor)?;
                let tensor = var.as_tensor().clone();
                self.vars.insert(name.to_owned(), var);
                Ok(tensor)
            }
        }
    }

    /// The weight of a linear layer in the form in which its products are made.
    pub(super) fn weight(&mut self, name: &str) -> Result<Weight, ModelError> {
        self.weight_as(name, self.dtype)
    }

    /// The embedding or the head: a few bits a value would cost more in the logits than they save.
    fn table(&mut self, name: &str) -> Result<Weight, ModelError> {
        let dtype = match self.dtype {
            BaseDtype::Int8 | BaseDtype::Nf4 => BaseDtype::Bf16,
            dtype => dtype,
        };
        self.weight_as(name, dtype)
    }

    fn weight_as(&mut self, name: &str, dtype: BaseDtype) -> Result<Weight, ModelError> {
        match self.weights {
            Weights::Frozen => Ok(Weight::Frozen(FrozenWeight::pack(&(self.read)(name)?, dtype)?)),
            Weights::Trained => Ok(Weight::Trained(self.value(name)?)),
        }
    }
}

/// A standard normal value (Box and Muller).
pub(crate) fn normal(rng: &mut ChaCha8Rng) -> f32 {
    use rand::Rng;
    let (u, v): (f32, f32) = (rng.random_range(f32::MIN_POSITIVE..1.0), rng.random_range(0.0..1.0));
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}
