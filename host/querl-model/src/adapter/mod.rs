//! LoRA adapters in PEFT's format: plain, rank-stabilised, with magnitudes (DoRA), with `modules_to_save`.

mod peft;
mod settings;

pub(crate) use peft::CONFIG_FILE;
pub(crate) use settings::{EMBEDDING, HEAD, SCORE};
pub use settings::{LoraSettings, Modules, Patterns, SavedCopies};

use crate::random::standard_normal;
use crate::sharding::{Shard, TensorParallel};
use crate::{ComputeDevice, DecoderConfig, ModelError};
use candle_core::{DType, Device, Error, Result as TensorResult, Tensor, Var};
use peft::ConfigFile;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use settings::{LayerKind, LayerPlan};
use std::collections::{BTreeMap, HashMap};

/// LoRA matrices A and B of one layer, which add `scale * B A` to its weight.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct LoraPair {
    pub a: Tensor, // (rank, in); of the embedding (rank, V)
    pub b: Tensor, // (out, rank); of the embedding (H, rank)
    pub scale: f32,
    /// DoRA magnitude: length of each row of the adapted weight; `None` without DoRA.
    pub magnitude: Option<Tensor>, // (out)
}

/// A LoRA adapter of a frozen decoder, in f32.
#[derive(Debug, Clone)]
pub struct LoraAdapter {
    settings: LoraSettings,
    pairs: BTreeMap<String, LoraPair>,
    /// Trained copies of `modules_to_save` by path.
    saved: BTreeMap<&'static str, Tensor>,
    /// A classifier's head; the decoder does not use it.
    score: Option<Tensor>,
    vars: BTreeMap<String, Var>,
    file: ConfigFile,
    stored_dtype: DType,
    parallel: TensorParallel,
}

impl LoraAdapter {
    /// A new adapter on the CPU with the effect 0: A uniform in `±1/sqrt(in)`, B zero (embedding: A zero, B normal), magnitudes equal to
    /// the norms of the base's rows, saved modules equal to the base. `base_weight`: f32 weight `(out, in)` of the base by path.
    ///
    /// Source: PEFT's `reset_lora_parameters` (`kaiming_uniform_` with `a = sqrt(5)`) and `DoraLinearLayer.update_layer`.
    pub(crate) fn init(
        config: &DecoderConfig,
        settings: LoraSettings,
        seed: u64,
        base_weight: impl Fn(&str) -> TensorResult<Tensor>,
    ) -> Result<Self, ModelError> {
        let settings = settings.on_model(config);
        settings.check_names(config).map_err(ModelError::Lora)?;
        let plan = settings.plan(config).map_err(ModelError::Lora)?;
        let saved = settings.saved_modules().map_err(ModelError::Lora)?;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut vars = BTreeMap::new();
        for layer in plan.iter().filter(|layer| layer.kind != LayerKind::TiedHead) {
            let (a, b) = fresh_pair(layer, &mut rng)?;
            vars.insert(layer.a_name(), a);
            vars.insert(layer.b_name(), b);
            if settings.use_dora {
                let lengths = base_weight(&layer.path)?.sqr()?.sum(1)?.sqrt()?; // (out)
                vars.insert(layer.magnitude_name(), Var::from_tensor(&lengths)?);
            }
        }
        for path in saved {
            if path == SCORE {
                return Err(ModelError::Lora("modules_to_save: a language model has no `score`".into()));
            }
            if !(path == HEAD && settings.saved_copies == SavedCopies::Tied) {
                vars.insert(format!("{path}.weight"), Var::from_tensor(&base_weight(path)?.copy()?)?);
            }
        }
        let file = ConfigFile::new(&settings);
        Self::assemble(settings, plan, vars, None, file, DType::F32)
    }

    /// Moves a full adapter to the base's device, and keeps the shard of it that belongs to the base's shard.
    pub(crate) fn sharded(self, place: &ComputeDevice, parallel: &TensorParallel) -> Result<Self, ModelError> {
        if self.parallel.is_sharded() || !parallel.is_sharded() {
            return self.on(place);
        }
        self.settings.check_split(parallel)?;
        let (ranks, device) = (parallel.ranks(), place.device());
        let mut split = self.renewed(|name, values| match Shard::adapter_axis(name) {
            Some(axis) => ranks.shard_of(values, axis)?.to_device(&device),
            None => values.to_device(&device),
        })?;
        split.parallel = parallel.clone();
        Ok(split)
    }

    /// Gathers the full adapter on the CPU from the shards of all ranks; returns the adapter itself if it is not sharded. A collective
    /// operation.
    ///
    /// # Errors
    /// A rank has failed or made another collective call.
    pub fn whole(&self) -> Result<Self, ModelError> {
        if !self.parallel.is_sharded() {
            return Ok(self.clone());
        }
        let mut whole = self.renewed(|name, values| match Shard::adapter_axis(name) {
            Some(axis) => self.parallel.ranks().gather(values, axis).map_err(Error::wrap),
            None => values.to_device(&Device::Cpu),
        })?;
        whole.parallel = TensorParallel::default();
        Ok(whole)
    }

    fn assemble(
        settings: LoraSettings,
        plan: Vec<LayerPlan>,
        vars: BTreeMap<String, Var>,
        score: Option<Tensor>,
        file: ConfigFile,
        stored_dtype: DType,
    ) -> Result<Self, ModelError> {
        let value = |name: &str| vars.get(name).map(|var| var.as_tensor().clone());
        let mut pairs: BTreeMap<String, LoraPair> = BTreeMap::new();
        for layer in plan {
            if let (LayerKind::TiedHead, Some(embedding)) = (layer.kind, pairs.get(EMBEDDING)) {
                let head = embedding.of_tied_head(layer.scale)?;
                pairs.insert(layer.path, head);
                continue;
            }
            let (Some(a), Some(b)) = (value(&layer.a_name()), value(&layer.b_name())) else {
                return Err(ModelError::Lora(format!("layer `{}` has no matrices", layer.path)));
            };
            let pair = LoraPair { a, b, scale: layer.scale, magnitude: value(&layer.magnitude_name()) };
            pairs.insert(layer.path, pair);
        }
        let mut saved = BTreeMap::new();
        for path in settings.saved_modules().map_err(ModelError::Lora)? {
            let own = value(&format!("{path}.weight"));
            let tied = || (path == HEAD).then(|| value(&format!("{EMBEDDING}.weight"))).flatten();
            if let Some(weight) = own.or_else(tied) {
                saved.insert(path, weight);
            }
        }
        Ok(Self { settings, pairs, saved, score, vars, file, stored_dtype, parallel: TensorParallel::default() })
    }

    /// Adds a classification head, which is saved with the adapter and trained by the classifier.
    pub(crate) fn with_score(self, score: &Var) -> Self {
        let mut settings = self.settings.clone();
        if !settings.modules_to_save.iter().any(|name| name == SCORE) {
            settings.modules_to_save.push(SCORE.to_owned());
        }
        let file = self.file.of_classifier(&settings.modules_to_save);
        Self { settings, file, score: Some(score.as_tensor().clone()), ..self }
    }

    /// The classification head `(classes, H)` that was read with the adapter, if there is one.
    pub(crate) fn score(&self) -> Option<&Tensor> {
        self.score.as_ref()
    }

    /// Trained variables by name, sorted by name.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        &self.vars
    }

    /// LoRA settings: ranks, scales, adapted layers.
    pub fn settings(&self) -> &LoraSettings {
        &self.settings
    }

    /// Type of the tensors in the file that the adapter was loaded from; f32 for a new adapter. Values in memory are always f32.
    pub fn stored_dtype(&self) -> DType {
        self.stored_dtype
    }

    /// Number of parameters, including those of other ranks' shards.
    pub fn n_parameters(&self) -> usize {
        let n_ranks = |name: &str| Shard::adapter_axis(name).map_or(1, |_| self.parallel.shard().size());
        self.vars.iter().map(|(name, var)| var.elem_count() * n_ranks(name)).sum()
    }

    /// Paths of the adapted layers, sorted.
    pub fn adapted_layers(&self) -> impl Iterator<Item = &str> {
        self.pairs.keys().map(String::as_str)
    }

    /// Whether embedding and head stay equal: one trained copy, or one LoRA pair with one scale (PEFT's `ensure_weight_tying`).
    pub(crate) fn has_one_copy(&self) -> bool {
        let is_saved = self.settings.saved_copies == SavedCopies::Tied && self.saved.contains_key(EMBEDDING);
        let pairs = self.tied_pair().zip(self.pair(EMBEDDING));
        is_saved || pairs.is_some_and(|(head, embedding)| head.scale == embedding.scale)
    }

    /// The head's pair if it is the embedding's, transposed.
    fn tied_pair(&self) -> Option<&LoraPair> {
        self.pair(HEAD).filter(|_| !self.vars.contains_key(&format!("{HEAD}.lora_A.weight")))
    }

    /// A view for generation and evaluation that records no gradients. It shares the values, so it follows training.
    pub fn without_gradient(&self) -> Self {
        let mut view = self.clone();
        for pair in view.pairs.values_mut() {
            pair.a = pair.a.detach();
            pair.b = pair.b.detach();
            pair.magnitude = pair.magnitude.as_ref().map(Tensor::detach);
        }
        view.saved.values_mut().for_each(|weight| *weight = weight.detach());
        view
    }

    /// A copy of the current values, which later training of this adapter does not change.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn snapshot(&self) -> Result<Self, ModelError> {
        self.renewed(|_, values| values.copy())
    }

    /// Moves the adapter to a device; returns the adapter itself if it is there already.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn on(self, place: &ComputeDevice) -> Result<Self, ModelError> {
        let device = place.device();
        match self.vars.values().all(|var| var.device().same_device(&device)) {
            true => Ok(self),
            false => self.renewed(|_, values| values.to_device(&device)),
        }
    }

    /// A copy of the adapter with new variables, whose values are `of(path, value)`.
    fn renewed(&self, of: impl Fn(&str, &Tensor) -> TensorResult<Tensor>) -> Result<Self, ModelError> {
        let mut copy = self.clone();
        let mut renewed = HashMap::new();
        for (name, var) in &mut copy.vars {
            let id = var.as_tensor().id();
            *var = Var::from_tensor(&of(name, &var.as_tensor().detach())?)?;
            renewed.insert(id, var.as_tensor().clone());
        }
        // Layers share these variables, and a tied embedding and head are one variable: replace each variable once.
        let renew = |tensor: &mut Tensor| {
            if let Some(own) = renewed.get(&tensor.id()) {
                *tensor = own.clone();
            }
        };
        for pair in copy.pairs.values_mut() {
            renew(&mut pair.a);
            renew(&mut pair.b);
            pair.magnitude.iter_mut().for_each(renew);
        }
        if let (Some(head), Some(embedding)) = (self.tied_pair(), copy.pairs.get(EMBEDDING)) {
            let head = embedding.of_tied_head(head.scale)?;
            copy.pairs.insert(HEAD.to_owned(), head);
        }
        copy.saved.values_mut().for_each(renew);
        copy.score.iter_mut().for_each(renew);
        Ok(copy)
    }

    pub(crate) fn pair(&self, path: &str) -> Option<&LoraPair> {
        self.pairs.get(path)
    }

    /// The trained copy `(V, H)` of the embedding or the head at `path`, if `modules_to_save` names it.
    pub(crate) fn saved_module(&self, path: &str) -> Option<&Tensor> {
        self.saved.get(path)
    }
}

impl LoraSettings {
    /// Refuses DoRA with tensor parallelism: a magnitude needs the norm of a complete row.
    pub(crate) fn check_split(&self, parallel: &TensorParallel) -> Result<(), ModelError> {
        match self.use_dora {
            true => parallel.require_unsharded("an adapter with magnitudes (`sft.use_dora`)"),
            false => Ok(()),
        }
    }
}

impl LoraPair {
    /// The pair of a head that is tied to this embedding: the same matrices, transposed, so that gradients reach this pair.
    fn of_tied_head(&self, scale: f32) -> TensorResult<Self> {
        Ok(Self { a: self.b.t()?, b: self.a.t()?, scale, magnitude: None })
    }

    /// The weight `(out, in)` with this adapter merged, in the weight's type: `W + scale * B A`; with DoRA each row is scaled to the length
    /// of its magnitude. As in training, no gradient flows through the lengths of the rows.
    ///
    /// Source: PEFT's `Linear.get_delta_weight` and `DoraLinearVariant.merge_safe`.
    pub(crate) fn changed(&self, weight: &Tensor) -> TensorResult<Tensor> {
        let changed = (weight + self.product(weight.dtype())?)?;
        let Some(magnitude) = &self.magnitude else { return Ok(changed) };
        let lengths = changed.detach().sqr()?.sum(1)?.sqrt()?; // (out)
        changed.broadcast_mul(&magnitude.to_dtype(weight.dtype())?.div(&lengths)?.unsqueeze(1)?)
    }

    /// The change of the weight, `scale * B A`, in `dtype`.
    pub(crate) fn product(&self, dtype: DType) -> TensorResult<Tensor> {
        self.b.to_dtype(dtype)?.matmul(&self.a.to_dtype(dtype)?)? * f64::from(self.scale)
    }

    /// Lengths of the adapted weight's rows, `(out)`, without a gradient; DoRA multiplies each output by its magnitude over this length.
    /// `times_a`: `A W^T` `(rank, out)`; `squares`: squared lengths of the base's rows `(out)`. With these the adapted weight need not be
    /// formed: `|w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b A A^T b^T`. As in PEFT, the lengths are constants for the backward pass.
    ///
    /// Source: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", equations 5 and 11.
    pub(crate) fn lengths(&self, times_a: &Tensor, squares: &Tensor) -> TensorResult<Tensor> {
        let (a, b, scale) = (self.a.detach(), self.b.detach(), f64::from(self.scale));
        let cross = (&b * times_a.t()?)?.sum(1)?; // (out)
        let own = (b.matmul(&a.matmul(&a.t()?)?)? * &b)?.sum(1)?; // (out)
        ((squares + (cross * (2.0 * scale))?)? + (own * (scale * scale))?)?.sqrt()
    }
}

fn fresh_pair(layer: &LayerPlan, rng: &mut ChaCha8Rng) -> TensorResult<(Var, Var)> {
    let (rank, n_in, n_out) = (layer.rank, layer.n_in, layer.n_out);
    match layer.kind {
        LayerKind::Linear | LayerKind::TiedHead => {
            let bound = 1.0 / (n_in as f32).sqrt();
            let a: Vec<f32> = (0..rank * n_in).map(|_| rng.random_range(-bound..bound)).collect();
            let a = Var::from_vec(a, (rank, n_in), &Device::Cpu)?;
            Ok((a, Var::zeros((n_out, rank), DType::F32, &Device::Cpu)?))
        }
        LayerKind::Embedding => {
            let b: Vec<f32> = (0..n_out * rank).map(|_| standard_normal(rng)).collect();
            let b = Var::from_vec(b, (n_out, rank), &Device::Cpu)?;
            Ok((Var::zeros((rank, n_in), DType::F32, &Device::Cpu)?, b))
        }
    }
}
