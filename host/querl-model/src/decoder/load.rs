//! Making a decoder, or one rank's part of it: from a checkpoint, or with fresh weights.

use super::layer::Layer;
use super::parallel::TensorParallel;
use super::shard::{Held, Part};
use super::tensors::{RandomTensors, Tensors};
use super::{Decoder, Weights};
use crate::checkpoint::StoredModel;
use crate::kernels::{FrozenWeight, RopeTable, Weight};
use crate::{DecoderConfig, ModelError, Place, Ranks};
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
    /// weights are stored; trained ones are f32. With int8, fp8 and nf4, embedding and head are kept in bf16.
    ///
    /// # Errors
    /// A file is missing, the architecture is not supported, or a tensor is missing or of another shape.
    pub fn load_as(directory: &Path, weights: Weights, dtype: BaseDtype) -> Result<Self, ModelError> {
        Self::load_on(directory, weights, dtype, &Place::Cpu)
    }

    /// The same, somewhere else. On a card frozen weights are bf16, int8, fp8 or nf4, with the codes that the CPU makes; tensors go there
    /// one after another, a part of one at a time.
    ///
    /// # Errors
    /// As [`Decoder::load_as`]; frozen weights stored in another type on a card.
    pub fn load_on(directory: &Path, weights: Weights, dtype: BaseDtype, place: &Place) -> Result<Self, ModelError> {
        let stored = StoredModel::open(directory)?;
        Self::from_source(stored.config().clone(), Source::new(&stored, weights, dtype, place)?)
    }

    /// One rank's part of a frozen model that `ranks` hold together: of split tensors only that part is read. A rank that is alone
    /// has the whole model.
    ///
    /// # Errors
    /// As [`Decoder::load_on`], or a model that cannot be split so: see [`Shard::check`].
    pub fn load_part(directory: &Path, dtype: BaseDtype, place: &Place, ranks: &Ranks) -> Result<Self, ModelError> {
        let stored = StoredModel::open(directory)?;
        let config = stored.config().clone();
        let parallel = TensorParallel::new(ranks, &config, dtype)?;
        let source = Source { parallel, ..Source::new(&stored, Weights::Frozen, dtype, place)? };
        Self::from_source(config, source)
    }

    /// A decoder whose frozen weights are random, for measurements: normal with the config's deviation, norms 1, biases 0. Values
    /// depend on the seed and on a tensor's name alone. No file is read or written, and tensors are made one after another where
    /// they stay.
    ///
    /// # Errors
    /// A tensor cannot be made, or as [`Decoder::load_on`].
    pub fn random(config: DecoderConfig, seed: u64, dtype: BaseDtype, place: &Place) -> Result<Self, ModelError> {
        Self::random_part(config, seed, dtype, place, &Ranks::alone())
    }

    /// One rank's part of the same decoder.
    ///
    /// # Errors
    /// As [`Decoder::random`], or a model that cannot be split so: see [`Shard::check`].
    pub fn random_part(
        config: DecoderConfig,
        seed: u64,
        dtype: BaseDtype,
        place: &Place,
        ranks: &Ranks,
    ) -> Result<Self, ModelError> {
        let made = RandomTensors::new(&config, seed);
        let parallel = TensorParallel::new(ranks, &config, dtype)?;
        let source = Source { parallel, ..Source::new(&made, Weights::Frozen, dtype, place)? };
        Self::from_source(config, source)
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
        Self::from_source(config, Source::new(&tensors, Weights::Trained, BaseDtype::F32, &Place::Cpu)?)
    }

    /// A decoder of tensors that were opened already.
    ///
    /// # Errors
    /// As [`Decoder::load_on`].
    pub(crate) fn of_tensors(
        config: DecoderConfig,
        tensors: &dyn Tensors,
        weights: Weights,
        dtype: BaseDtype,
    ) -> Result<Self, ModelError> {
        Self::from_source(config, Source::new(tensors, weights, dtype, &Place::Cpu)?)
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
        let rope = RopeTable::new(config.max_positions, config.head_dim, config.rope_theta);
        Ok(Self {
            norm: source.value("model.norm.weight")?,
            embedding,
            layers,
            head,
            #[cfg(feature = "cuda")]
            on_card: match source.place {
                Place::Cpu => None,
                Place::Card(gpu) => Some(super::card::OnCard::new(gpu, &rope)?),
            },
            rope,
            local: config.of_rank(source.parallel.shard().size()),
            config,
            parallel: source.parallel,
            vars: source.vars,
            place: source.place.clone(),
        })
    }
}

/// Where a decoder's tensors come from, one at a time, and what becomes of them.
pub(super) struct Source<'a> {
    tensors: &'a dyn Tensors,
    weights: Weights,
    dtype: BaseDtype,
    place: &'a Place,
    /// Who holds which part.
    parallel: TensorParallel,
    vars: BTreeMap<String, Var>,
}

impl<'a> Source<'a> {
    fn new(tensors: &'a dyn Tensors, weights: Weights, dtype: BaseDtype, place: &'a Place) -> Result<Self, ModelError> {
        place.check(weights, dtype)?;
        Ok(Self { tensors, weights, dtype, place, parallel: TensorParallel::default(), vars: BTreeMap::new() })
    }

    /// What is held here of a tensor: its part, `None` for all of it.
    fn part(&self, name: &str) -> Result<Option<Part>, ModelError> {
        match self.parallel.shard().held(name, &self.tensors.shape(name)?) {
            Held::Part(part) => Ok(Some(part)),
            Held::Whole | Held::Nothing => Ok(None),
        }
    }

    /// A bias, where it is added on this rank.
    pub(super) fn bias(&mut self, name: &str) -> Result<Option<Tensor>, ModelError> {
        match self.parallel.shard().held(name, &self.tensors.shape(name)?) {
            Held::Nothing => Ok(None),
            Held::Whole | Held::Part(_) => self.value(name).map(Some),
        }
    }

    /// A norm or a bias: f32, a variable where weights are trained.
    pub(super) fn value(&mut self, name: &str) -> Result<Tensor, ModelError> {
        let part = self.part(name)?;
        let tensor = self.tensors.tensor(name, part.as_ref())?.to_dtype(DType::F32)?.to_device(&self.place.device())?;
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
            BaseDtype::Int8 | BaseDtype::Fp8 | BaseDtype::Nf4 => BaseDtype::Bf16,
            dtype => dtype,
        };
        self.weight_as(name, dtype)
    }

    fn weight_as(&mut self, name: &str, dtype: BaseDtype) -> Result<Weight, ModelError> {
        if self.weights == Weights::Trained {
            return Ok(Weight::Trained(self.value(name)?));
        }
        let part = self.part(name)?;
        match self.place {
            Place::Cpu => Ok(Weight::Frozen(FrozenWeight::pack(&self.tensors.tensor(name, part.as_ref())?, dtype)?)),
            #[cfg(feature = "cuda")]
            Place::Card(gpu) => {
                let format = crate::device::PackedFormat::of(dtype);
                Ok(Weight::OnCard(self.tensors.on_card(name, part.as_ref(), gpu, format)?))
            }
        }
    }
}

/// A standard normal value (Box and Muller).
pub(crate) fn normal(rng: &mut ChaCha8Rng) -> f32 {
    use rand::Rng;
    let (u, v): (f32, f32) = (rng.random_range(f32::MIN_POSITIVE..1.0), rng.random_range(0.0..1.0));
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}
