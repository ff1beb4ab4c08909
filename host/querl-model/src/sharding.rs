//! Which part of a model's tensors one of several ranks holds.
//!
//! Queries, keys, values, gate and up are split by their outputs (heads, and the feed-forward layer's inner values), the attention's
//! output and down by their inputs: between the two nothing is exchanged. Norms, embedding and head are whole on every rank.
//!
//! Source: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3.

use crate::kernels::GROUP;
use crate::{DecoderConfig, ModelError, Ranks};
use candle_core::{Device, Result as TensorResult, Tensor};
use querl_core::config::BaseDtype;
use std::ops::Range;

/// One rank's part of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    rank: usize,
    size: usize,
}

/// How the weight `(out, in)` of a linear layer is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Split {
    /// By rows: each rank computes some of the outputs from all inputs.
    Outputs,
    /// By columns: each rank adds to all outputs what its inputs make of them.
    Inputs,
}

/// Neighbours along one axis of a tensor; all of the other axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) axis: usize,
    pub(crate) range: Range<usize>,
}

/// What a rank holds of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Held {
    Whole,
    Part(Part),
    /// What all ranks' results together have once: another rank holds it.
    Nothing,
}

impl Split {
    /// Of the layer at `path`, or of a tensor in it; `None` where nothing is split.
    pub(crate) fn of(path: &str) -> Option<Self> {
        path.split('.').find_map(|name| match name {
            "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj" => Some(Self::Outputs),
            "o_proj" | "down_proj" => Some(Self::Inputs),
            _ => None,
        })
    }
}

impl DecoderConfig {
    /// The decoder that the tensors of one of `n_ranks` make: fewer heads, narrower feed-forward layers.
    pub fn of_rank(&self, n_ranks: usize) -> Self {
        Self {
            n_heads: self.n_heads / n_ranks,
            n_kv_heads: self.n_kv_heads / n_ranks,
            intermediate_size: self.intermediate_size / n_ranks,
            ..self.clone()
        }
    }
}

impl Shard {
    /// A model that is not split.
    pub const WHOLE: Self = Self { rank: 0, size: 1 };

    /// Part `rank` of a model that `size` ranks hold.
    ///
    /// # Errors
    /// A rank that is none of them, or a model that cannot be split so: see [`Shard::check`].
    pub fn new(rank: usize, size: usize, config: &DecoderConfig, dtype: BaseDtype) -> Result<Self, ModelError> {
        Self::check(size, config, dtype)?;
        if rank >= size {
            return Err(ModelError::Shard(format!("rank {rank} is none of {size}")));
        }
        Ok(Self { rank, size })
    }

    /// Refuses what cannot be split over `size` ranks. Key and value heads are never copied, so there must be one for each rank. A
    /// part is stored as it is in the whole model; of fp8, which has a scale for a row, each part of a row gets one of its own.
    ///
    /// # Errors
    /// The number of ranks does not divide the heads of keys and values or the feed-forward width; the scales of int8 and nf4 would
    /// be those of other neighbours than in the whole model.
    pub fn check(size: usize, config: &DecoderConfig, dtype: BaseDtype) -> Result<(), ModelError> {
        if size == 0 {
            return Err(ModelError::Shard("0 ranks; expected at least 1".into()));
        }
        if !config.n_kv_heads.is_multiple_of(size) || !config.n_heads.is_multiple_of(size) {
            let (n_kv_heads, n_heads) = (config.n_kv_heads, config.n_heads);
            return Err(ModelError::Shard(format!(
                "{n_kv_heads} heads of keys and values ({n_heads} of queries) cannot be split over {size} ranks; \
                 `model.tensor_parallel` must divide {n_kv_heads}"
            )));
        }
        if !config.intermediate_size.is_multiple_of(2 * size) && size > 1 {
            return Err(ModelError::Shard(format!(
                "intermediate_size {} cannot be split over {size} ranks into even parts; lower `model.tensor_parallel`",
                config.intermediate_size
            )));
        }
        Self::check_groups(size, config, dtype)
    }

    /// Weights of a few bits share a scale with their neighbours in the row: a border between ranks must be one between groups.
    fn check_groups(size: usize, config: &DecoderConfig, dtype: BaseDtype) -> Result<(), ModelError> {
        let inputs = [config.n_heads * config.head_dim / size, config.intermediate_size / size];
        match inputs.iter().find(|inputs| !inputs.is_multiple_of(GROUP)) {
            Some(inputs) if size > 1 && matches!(dtype, BaseDtype::Int8 | BaseDtype::Nf4) => {
                let dtype = dtype.name();
                Err(ModelError::Shard(format!(
                    "split over {size} ranks, a row has {inputs} weights, and `{dtype}` keeps {GROUP} of them by one scale; \
                     take another `model.tensor_parallel` or `model.dtype = \"bf16\"`"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Which of the ranks.
    pub fn rank(self) -> usize {
        self.rank
    }

    /// How many ranks hold the model together.
    pub fn size(self) -> usize {
        self.size
    }

    /// Whether this rank adds what is to be added once: residuals and biases of outputs that all ranks sum up.
    pub fn is_first(self) -> bool {
        self.rank == 0
    }

    /// What this rank holds of the base's tensor `name` of a shape.
    pub(crate) fn held(self, name: &str, shape: &[usize]) -> Held {
        match (Split::of(name), shape) {
            _ if self.size == 1 => Held::Whole,
            (None, _) => Held::Whole,
            (Some(Split::Outputs), [n, ..]) => Held::Part(self.part(0, *n)),
            (Some(Split::Inputs), [_, n]) => Held::Part(self.part(1, *n)),
            (Some(Split::Inputs), _) if self.is_first() => Held::Whole, // a bias
            (Some(_), _) => Held::Nothing,
        }
    }

    /// Along which axis an adapter's tensor is split; `None` where every rank holds all of it.
    ///
    /// Of `B A` beside a layer that is split by its outputs, A is whole and B is split by rows; beside one that is split by its
    /// inputs, A is split by columns and B is whole.
    pub fn adapter_axis(name: &str) -> Option<usize> {
        match Split::of(name)? {
            Split::Outputs if name.contains(".lora_B.") => Some(0),
            Split::Inputs if name.contains(".lora_A.") => Some(1),
            _ => None,
        }
    }

    /// This rank's part of `n` neighbours.
    pub(crate) fn part(self, axis: usize, n: usize) -> Part {
        let n = n / self.size;
        Part { axis, range: self.rank * n..(self.rank + 1) * n }
    }
}

impl Ranks {
    /// This rank's part of a matrix that they hold along an axis.
    ///
    /// # Errors
    /// It has no such axis.
    pub fn part_of(&self, whole: &Tensor, axis: usize) -> TensorResult<Tensor> {
        let Part { axis, range } = Shard { rank: self.rank(), size: self.world_size() }.part(axis, whole.dim(axis)?);
        whole.narrow(axis, range.start, range.len())?.force_contiguous()
    }

    /// The matrix of which each of them holds a part along an axis, on the CPU: f32. All must come to it.
    ///
    /// # Errors
    /// A rank has failed or is elsewhere, or has a part of another type.
    pub fn whole_of(&self, part: &Tensor, axis: usize) -> Result<Tensor, ModelError> {
        let values = part.flatten_all()?.to_vec1::<f32>()?;
        let all = self.all_gather(values)?;
        let tensors = all.iter().map(|values| Tensor::from_slice(values, part.shape(), &Device::Cpu));
        Ok(Tensor::cat(&tensors.collect::<TensorResult<Vec<_>>>()?, axis)?)
    }
}

/// The ranks that hold one model together, as one of them sees them; by default one holds all of it.
#[derive(Clone)]
pub struct TensorParallel {
    shard: Shard,
    ranks: Ranks,
}

impl Default for TensorParallel {
    fn default() -> Self {
        Self { shard: Shard::WHOLE, ranks: Ranks::alone() }
    }
}

impl std::fmt::Debug for TensorParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.shard.fmt(f)
    }
}

impl TensorParallel {
    /// # Errors
    /// See [`Shard::check`].
    pub fn new(ranks: &Ranks, config: &DecoderConfig, dtype: BaseDtype) -> Result<Self, ModelError> {
        let shard = Shard::new(ranks.rank(), ranks.world_size(), config, dtype)?;
        Ok(Self { shard, ranks: ranks.clone() })
    }

    pub fn shard(&self) -> Shard {
        self.shard
    }

    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    pub fn is_split(&self) -> bool {
        self.shard.size() > 1
    }

    /// Refuses what a part of a model does not do.
    ///
    /// # Errors
    /// There are several ranks.
    pub fn only_whole(&self, what: &str) -> Result<(), ModelError> {
        match self.is_split() {
            true => Err(ModelError::Shard(format!("{what} is not split over ranks; set `model.tensor_parallel = 1`"))),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn held(name: &str, shape: &[usize], rank: usize) -> Held {
        Shard { rank, size: 2 }.held(name, shape)
    }

    fn part(axis: usize, range: Range<usize>) -> Held {
        Held::Part(Part { axis, range })
    }

    #[test]
    fn each_rank_holds_its_part_of_a_layer_and_one_of_them_what_is_added_once() {
        assert_eq!(held("model.layers.3.self_attn.q_proj.weight", &[8, 6], 1), part(0, 4..8));
        assert_eq!(held("model.layers.3.self_attn.k_proj.bias", &[4], 0), part(0, 0..2));
        assert_eq!(held("model.layers.3.self_attn.o_proj.weight", &[6, 8], 1), part(1, 4..8));
        assert_eq!(held("model.layers.3.mlp.down_proj.weight", &[6, 10], 0), part(1, 0..5));
        assert_eq!(held("model.layers.3.self_attn.o_proj.bias", &[6], 0), Held::Whole);
        assert_eq!(held("model.layers.3.self_attn.o_proj.bias", &[6], 1), Held::Nothing);
        for name in ["model.layers.3.self_attn.q_norm.weight", "model.embed_tokens.weight", "lm_head.weight"] {
            assert_eq!(held(name, &[8], 1), Held::Whole, "{name}");
        }
    }

    #[test]
    fn of_an_adapter_the_side_of_the_split_is_split() {
        let axis = |layer: &str, side: &str| Shard::adapter_axis(&format!("model.layers.0.{layer}.lora_{side}.weight"));
        assert_eq!((axis("self_attn.v_proj", "A"), axis("self_attn.v_proj", "B")), (None, Some(0)));
        assert_eq!((axis("mlp.down_proj", "A"), axis("mlp.down_proj", "B")), (Some(1), None));
        assert_eq!(Shard::adapter_axis("lm_head.lora_B.weight"), None);
    }

    #[test]
    fn shapes_that_cannot_be_split_are_refused_with_what_would_do() {
        let config = DecoderConfig::of_shape("qwen2.5-7b").unwrap();
        assert!(Shard::check(4, &config, BaseDtype::Nf4).is_ok());
        let refused = |size, config: &DecoderConfig, dtype| Shard::check(size, config, dtype).unwrap_err().to_string();
        assert_eq!(
            refused(8, &config, BaseDtype::Bf16),
            "tensor parallel: 4 heads of keys and values (28 of queries) cannot be split over 8 ranks; \
             `model.tensor_parallel` must divide 4"
        );
        let narrow = DecoderConfig { intermediate_size: 18_954, ..config.clone() };
        assert_eq!(
            refused(2, &narrow, BaseDtype::Bf16),
            "tensor parallel: intermediate_size 18954 cannot be split over 2 ranks into even parts; \
             lower `model.tensor_parallel`"
        );
        let narrow = DecoderConfig { intermediate_size: 18_960, ..config };
        assert!(Shard::check(2, &narrow, BaseDtype::Bf16).is_ok());
        assert_eq!(
            refused(2, &narrow, BaseDtype::Int8),
            "tensor parallel: split over 2 ranks, a row has 9480 weights, and `int8` keeps 64 of them by one scale; \
             take another `model.tensor_parallel` or `model.dtype = \"bf16\"`"
        );
    }
}
