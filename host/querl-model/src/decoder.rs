//! The decoder: embedding, layers, final norm. One forward pass serves Qwen2 and Qwen3, training and decoding.

use crate::adapter::LoraAdapter;
use crate::checkpoint::{required, weight_files};
use crate::kernels::{self, CachedSegment, HeadGradient, RopeTable, attention, attention_cached};
use crate::{DecoderConfig, Family, KvCache, ModelError, PackedBatch, save_tensors};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Result as TensorResult, Tensor, Var};
use candle_nn::{Embedding, Module};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// Whether the base weights are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// No gradient is computed for them: adapters alone are trained.
    Frozen,
    /// Every weight is a variable.
    Trained,
}

/// A Qwen2 or Qwen3 decoder with its weights in f32.
pub struct Decoder {
    config: DecoderConfig,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Tensor, // (V, H); the embedding where tied
    rope: RopeTable,
    weights: Weights,
    vars: BTreeMap<String, Var>,
}

struct Linear {
    path: String,
    weight: Tensor, // (out, in)
    bias: Option<Tensor>,
    weights: Weights,
}

struct Layer {
    input_norm: Tensor,
    post_attention_norm: Tensor,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    /// Qwen3: weights of the per-head norms of queries and keys.
    qk_norm: Option<(Tensor, Tensor)>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl DecoderConfig {
    /// Every adapted-by-default linear layer: its path, outputs, inputs.
    pub(crate) fn linear_layers(&self) -> impl Iterator<Item = (String, usize, usize)> {
        let (h, f) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        let shapes = [
            ("self_attn.q_proj", q, h),
            ("self_attn.k_proj", kv, h),
            ("self_attn.v_proj", kv, h),
            ("self_attn.o_proj", h, q),
            ("mlp.gate_proj", f, h),
            ("mlp.up_proj", f, h),
            ("mlp.down_proj", h, f),
        ];
        (0..self.n_layers).flat_map(move |layer| {
            shapes.map(|(name, n_out, n_in)| (format!("model.layers.{layer}.{name}"), n_out, n_in))
        })
    }

    /// Weights in all, a tied head counted once.
    pub fn n_parameters(&self) -> usize {
        self.tensor_shapes().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Every tensor of a checkpoint with its shape.
    fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let h = self.hidden_size;
        let mut shapes = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, h]),
            ("model.norm.weight".to_owned(), vec![h]),
        ];
        if !self.tie_word_embeddings {
            shapes.push(("lm_head.weight".to_owned(), vec![self.vocab_size, h]));
        }
        for (path, n_out, n_in) in self.linear_layers() {
            let has_bias = match path.rsplit('.').next() {
                Some("q_proj" | "k_proj" | "v_proj") => self.qkv_bias,
                Some("o_proj") => self.output_bias,
                _ => false,
            };
            if has_bias {
                shapes.push((format!("{path}.bias"), vec![n_out]));
            }
            shapes.push((format!("{path}.weight"), vec![n_out, n_in]));
        }
        for layer in 0..self.n_layers {
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                shapes.push((format!("model.layers.{layer}.{norm}.weight"), vec![h]));
            }
            if self.family == Family::Qwen3 {
                for norm in ["q_norm", "k_norm"] {
                    shapes.push((format!("model.layers.{layer}.self_attn.{norm}.weight"), vec![self.head_dim]));
                }
            }
        }
        shapes
    }
}

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
        let embedding = take("model.embed_tokens.weight")?;
        let head = if config.tie_word_embeddings { embedding.clone() } else { take("lm_head.weight")? };
        let layers = (0..config.n_layers)
            .map(|index| Layer::new(&format!("model.layers.{index}"), &config, weights, &mut take))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            norm: take("model.norm.weight")?,
            embedding: Embedding::new(embedding, config.hidden_size),
            layers,
            head,
            rope: RopeTable::new(config.max_positions, config.head_dim, config.rope_theta),
            config,
            weights,
            vars,
        })
    }

    /// Shape of the decoder.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Trained base weights by name; empty where they are frozen.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        &self.vars
    }

    /// Hidden states after the final norm: `(N, H)` for the N rows of the batch.
    ///
    /// # Errors
    /// A token outside the vocabulary, or a sequence longer than the model's positions.
    pub fn hidden_states(&self, batch: &PackedBatch, adapter: Option<&LoraAdapter>) -> Result<Tensor, ModelError> {
        let head_dim = self.config.head_dim;
        Ok(self.forward(batch, adapter, &mut |_, q, k, v| attention(q, k, v, &batch.segments, head_dim))?)
    }

    /// Feeds new tokens to sequences in progress and grows their caches. Returns the final hidden states `(N, H)` of the new
    /// tokens, sequences one after another. Records no gradient if the adapter records none and the base is frozen.
    ///
    /// # Errors
    /// As [`Decoder::hidden_states`].
    pub fn extend(
        &self,
        caches: &mut [&mut KvCache],
        new: &[&[u32]],
        adapter: Option<&LoraAdapter>,
    ) -> Result<Tensor, ModelError> {
        let batch = PackedBatch::with_offsets(new.iter().zip(caches.iter()).map(|(new, cache)| (*new, cache.len)));
        let config = &self.config;
        let (q_width, kv_width) = (config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim);
        let hidden = self.forward(&batch, adapter, &mut |layer, q, k, v| {
            append(caches, layer, k, v, &batch, kv_width)?;
            let segments: Vec<CachedSegment<'_>> = batch
                .segments
                .iter()
                .zip(caches.iter())
                .map(|(&queries, cache)| CachedSegment {
                    queries,
                    keys: &cache.layers[layer].keys,
                    values: &cache.layers[layer].values,
                })
                .collect();
            let out = kernels::with_floats(q, |q| attention_cached(q, &segments, q_width, kv_width, config.head_dim))?;
            Tensor::from_vec(out, q.shape(), q.device())
        })?;
        for (cache, new) in caches.iter_mut().zip(new) {
            cache.len += new.len();
        }
        Ok(hidden)
    }

    /// Log-probability of `targets` and entropy of the distribution, `(N, 2)`, for N rows of hidden states.
    ///
    /// # Errors
    /// See [`kernels::token_logprobs`].
    pub fn token_logprobs(&self, hidden: &Tensor, targets: Vec<u32>, temperature: f64) -> Result<Tensor, ModelError> {
        let head_gradient = match self.weights {
            Weights::Frozen => HeadGradient::NotNeeded,
            Weights::Trained => HeadGradient::Needed,
        };
        Ok(kernels::token_logprobs(hidden, &self.head, &Arc::new(targets), temperature, head_gradient)?)
    }

    /// Logits `(N, V)` of N rows of hidden states.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor, ModelError> {
        Ok(kernels::frozen_linear(hidden, &self.head, None)?)
    }

    /// Writes `model.safetensors`. Tied heads are not written twice.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, directory: &Path, dtype: DType) -> Result<(), ModelError> {
        let tensors: Result<BTreeMap<String, Tensor>, candle_core::Error> =
            self.vars.iter().map(|(name, var)| Ok((name.clone(), var.as_tensor().to_dtype(dtype)?))).collect();
        save_tensors(&directory.join("model.safetensors"), &tensors?)
    }

    fn forward(
        &self,
        batch: &PackedBatch,
        adapter: Option<&LoraAdapter>,
        attend: &mut dyn FnMut(usize, &Tensor, &Tensor, &Tensor) -> TensorResult<Tensor>,
    ) -> TensorResult<Tensor> {
        let ids = Tensor::from_slice(&batch.token_ids, batch.n_rows(), &Device::Cpu)?;
        let mut x = self.embedding.forward(&ids)?; // (N, H)
        let eps = self.config.rms_norm_eps;
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = kernels::rms_norm(&x, &layer.input_norm, eps)?;
            let (q, k, v) = self.queries_keys_values(layer, &normed, batch, adapter)?;
            let attended = attend(index, &q, &k, &v)?; // (N, heads * D)
            x = (x + layer.o.forward(&attended, adapter)?)?;
            let normed = kernels::rms_norm(&x, &layer.post_attention_norm, eps)?;
            let gated = kernels::swiglu(&layer.gate.forward(&normed, adapter)?, &layer.up.forward(&normed, adapter)?)?;
            x = (x + layer.down.forward(&gated, adapter)?)?;
        }
        kernels::rms_norm(&x, &self.norm, eps)
    }

    fn queries_keys_values(
        &self,
        layer: &Layer,
        x: &Tensor,
        batch: &PackedBatch,
        adapter: Option<&LoraAdapter>,
    ) -> TensorResult<(Tensor, Tensor, Tensor)> {
        let (mut q, mut k) = (layer.q.forward(x, adapter)?, layer.k.forward(x, adapter)?);
        if let Some((q_norm, k_norm)) = &layer.qk_norm {
            q = self.per_head_norm(&q, q_norm)?;
            k = self.per_head_norm(&k, k_norm)?;
        }
        let q = kernels::rope(&q, &self.rope, &batch.positions)?;
        let k = kernels::rope(&k, &self.rope, &batch.positions)?;
        Ok((q, k, layer.v.forward(x, adapter)?))
    }

    fn per_head_norm(&self, x: &Tensor, weight: &Tensor) -> TensorResult<Tensor> {
        let rows = x.reshape(((), self.config.head_dim))?; // (N * heads, D)
        kernels::rms_norm(&rows, weight, self.config.rms_norm_eps)?.reshape(x.shape())
    }
}

impl Layer {
    fn new(
        path: &str,
        config: &DecoderConfig,
        weights: Weights,
        take: &mut impl FnMut(&str) -> Result<Tensor, ModelError>,
    ) -> Result<Self, ModelError> {
        let mut linear = |name: &str, has_bias: bool| -> Result<Linear, ModelError> {
            let path = format!("{path}.{name}");
            let bias = if has_bias { Some(take(&format!("{path}.bias"))?) } else { None };
            Ok(Linear { weight: take(&format!("{path}.weight"))?, bias, path, weights })
        };
        let bias = config.qkv_bias;
        let (q, k, v) =
            (linear("self_attn.q_proj", bias)?, linear("self_attn.k_proj", bias)?, linear("self_attn.v_proj", bias)?);
        let o = linear("self_attn.o_proj", config.output_bias)?;
        let (gate, up, down) =
            (linear("mlp.gate_proj", false)?, linear("mlp.up_proj", false)?, linear("mlp.down_proj", false)?);
        let qk_norm = match config.family {
            Family::Qwen2 => None,
            Family::Qwen3 => Some((
                take(&format!("{path}.self_attn.q_norm.weight"))?,
                take(&format!("{path}.self_attn.k_norm.weight"))?,
            )),
        };
        Ok(Self {
            input_norm: take(&format!("{path}.input_layernorm.weight"))?,
            post_attention_norm: take(&format!("{path}.post_attention_layernorm.weight"))?,
            q,
            k,
            v,
            o,
            qk_norm,
            gate,
            up,
            down,
        })
    }
}

impl Linear {
    fn forward(&self, x: &Tensor, adapter: Option<&LoraAdapter>) -> TensorResult<Tensor> {
        if let Some((adapter, pair)) = adapter.and_then(|adapter| Some((adapter, adapter.pair(&self.path)?))) {
            return kernels::lora_linear(x, &self.weight, self.bias.as_ref(), &pair.a, &pair.b, adapter.scale());
        }
        match self.weights {
            Weights::Frozen => kernels::frozen_linear(x, &self.weight, self.bias.as_ref()),
            Weights::Trained => {
                let y = x.matmul(&self.weight.t()?)?;
                self.bias.as_ref().map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
            }
        }
    }
}

/// Appends new keys and values of one layer to the caches of their sequences.
fn append(
    caches: &mut [&mut KvCache],
    layer: usize,
    k: &Tensor,
    v: &Tensor,
    batch: &PackedBatch,
    kv_width: usize,
) -> TensorResult<()> {
    kernels::with_floats(k, |k| {
        kernels::with_floats(v, |v| {
            for (cache, segment) in caches.iter_mut().zip(batch.segments.iter()) {
                let rows = segment.start * kv_width..(segment.start + segment.len) * kv_width;
                cache.layers[layer].keys.extend_from_slice(&k[rows.clone()]);
                cache.layers[layer].values.extend_from_slice(&v[rows]);
            }
            Ok(())
        })
    })
}

/// Tensors that some checkpoints hold beside what is needed: a tied head written out, constants of the rotary embedding.
fn is_redundant(name: &str, config: &DecoderConfig) -> bool {
    (config.tie_word_embeddings && name == "lm_head.weight") || name.ends_with("rotary_emb.inv_freq")
}

/// A standard normal value (Box and Muller).
fn normal(rng: &mut ChaCha8Rng) -> f32 {
    use rand::Rng;
    let (u, v): (f32, f32) = (rng.random_range(f32::MIN_POSITIVE..1.0), rng.random_range(0.0..1.0));
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

/// The first line of an error: candle appends backtraces.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
