//! Tensor parallelism: which shard of a model's tensors a rank holds.
//!
//! q_proj, k_proj, v_proj, gate_proj and up_proj are column parallel (split by heads, and by the feed-forward layer's inner values),
//! o_proj and down_proj row parallel: between the two nothing is communicated. Norms, embedding and head are on every rank in full.
//!
//! Source: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3.

use crate::kernels::GROUP;
use crate::{DecoderConfig, ModelError, Ranks};
use candle_core::{Device, Result as TensorResult, Tensor};
use querl_core::config::BaseDtype;
use std::ops::Range;

/// Which shard of a model a tensor-parallel rank holds: its rank, and the number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    rank: usize,
    size: usize,
}

/// How the weight `(out, in)` of a linear layer is split, by Megatron's names for the transposed weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinearSplit {
    /// Split by outputs: each rank computes some of the outputs from all inputs.
    ColumnParallel,
    /// Split by inputs: each rank computes a partial sum of all outputs from some of the inputs.
    RowParallel,
}

/// A range along one axis of a tensor; the other axes are complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorSlice {
    pub(crate) axis: usize,
    pub(crate) range: Range<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Placement {
    Full,
    Slice(TensorSlice),
    /// The tensor is on another rank: a bias that must be added once to the sum over ranks.
    Absent,
}

impl LinearSplit {
    /// The split of the layer at `path`, or of a tensor in it; `None` for a tensor that is not split.
    pub(crate) fn of(path: &str) -> Option<Self> {
        path.split('.').find_map(|name| match name {
            "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj" => Some(Self::ColumnParallel),
            "o_proj" | "down_proj" => Some(Self::RowParallel),
            _ => None,
        })
    }
}

impl DecoderConfig {
    /// The configuration of one of `n_ranks` shards: fewer heads, narrower feed-forward layers.
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
    /// The only shard of a model that is not split.
    pub const FULL: Self = Self { rank: 0, size: 1 };

    /// The shard of `rank` among `size` ranks.
    ///
    /// # Errors
    /// `rank` is not below `size`, or the model cannot be split so: see [`Shard::check`].
    pub fn new(rank: usize, size: usize, config: &DecoderConfig, dtype: BaseDtype) -> Result<Self, ModelError> {
        Self::check(size, config, dtype)?;
        if rank >= size {
            return Err(ModelError::Shard(format!("rank {rank} is not below the number of ranks, {size}")));
        }
        Ok(Self { rank, size })
    }

    /// Checks that a model can be split over `size` ranks. Key and value heads are not replicated, so there must be one for each rank.
    /// Quantized values of a shard equal those of the full model, except for fp8, whose rows get a scale per shard.
    ///
    /// # Errors
    /// The number of ranks does not divide the key-value heads or the feed-forward width; or a boundary between ranks is inside a group
    /// of int8 or nf4.
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

    /// Checks that shard boundaries are also boundaries of int8 or nf4 groups, whose weights share a scale.
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

    /// The rank that holds the shard, from 0.
    pub fn rank(self) -> usize {
        self.rank
    }

    /// Number of shards.
    pub fn size(self) -> usize {
        self.size
    }

    /// Whether this rank adds residuals and row-parallel biases, which the sum over ranks must contain once.
    pub fn is_first(self) -> bool {
        self.rank == 0
    }

    pub(crate) fn placement(self, name: &str, shape: &[usize]) -> Placement {
        match (LinearSplit::of(name), shape) {
            _ if self.size == 1 => Placement::Full,
            (None, _) => Placement::Full,
            (Some(LinearSplit::ColumnParallel), [n, ..]) => Placement::Slice(self.slice(0, *n)),
            (Some(LinearSplit::RowParallel), [_, n]) => Placement::Slice(self.slice(1, *n)),
            (Some(LinearSplit::RowParallel), _) if self.is_first() => Placement::Full, // a bias is added once to the sum over ranks
            (Some(_), _) => Placement::Absent,
        }
    }

    /// Along which axis an adapter's tensor is split; `None` where every rank holds all of it: B of a column-parallel layer by rows,
    /// A of a row-parallel layer by columns.
    pub fn adapter_axis(name: &str) -> Option<usize> {
        match LinearSplit::of(name)? {
            LinearSplit::ColumnParallel if name.contains(".lora_B.") => Some(0),
            LinearSplit::RowParallel if name.contains(".lora_A.") => Some(1),
            _ => None,
        }
    }

    pub(crate) fn slice(self, axis: usize, n: usize) -> TensorSlice {
        let n = n / self.size;
        TensorSlice { axis, range: self.rank * n..(self.rank + 1) * n }
    }
}

impl Ranks {
    /// This rank's shard of the matrix `full` along `axis`.
    ///
    /// # Errors
    /// There is no such axis.
    pub fn shard_of(&self, full: &Tensor, axis: usize) -> TensorResult<Tensor> {
        let TensorSlice { axis, range } =
            Shard { rank: self.rank(), size: self.world_size() }.slice(axis, full.dim(axis)?);
        full.narrow(axis, range.start, range.len())?.force_contiguous()
    }

    /// The full matrix from the shards of all ranks along an axis, f32 on the CPU; a collective operation.
    ///
    /// # Errors
    /// A rank has failed or made another call, or a shard is not f32.
    pub fn gather(&self, part: &Tensor, axis: usize) -> Result<Tensor, ModelError> {
        let values = part.flatten_all()?.to_vec1::<f32>()?;
        let all = self.all_gather(values)?;
        let tensors = all.iter().map(|values| Tensor::from_slice(values, part.shape(), &Device::Cpu));
        Ok(Tensor::cat(&tensors.collect::<TensorResult<Vec<_>>>()?, axis)?)
    }
}

/// The tensor-parallel shard of one rank and its process group; the default is a model that is not split.
#[derive(Clone)]
pub struct TensorParallel {
    shard: Shard,
    ranks: Ranks,
}

impl Default for TensorParallel {
    fn default() -> Self {
        Self { shard: Shard::FULL, ranks: Ranks::alone() }
    }
}

impl std::fmt::Debug for TensorParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.shard.fmt(f)
    }
}

impl TensorParallel {
    /// Makes this rank's tensor-parallel shard of a model split over all `ranks`.
    ///
    /// # Errors
    /// See [`Shard::check`].
    pub fn new(ranks: &Ranks, config: &DecoderConfig, dtype: BaseDtype) -> Result<Self, ModelError> {
        let shard = Shard::new(ranks.rank(), ranks.world_size(), config, dtype)?;
        Ok(Self { shard, ranks: ranks.clone() })
    }

    /// This rank's shard.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// The process group.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Whether the model is split over several ranks.
    pub fn is_sharded(&self) -> bool {
        self.shard.size() > 1
    }

    /// Checks that the model is not sharded, for an operation that does not support shards.
    ///
    /// # Errors
    /// There are several ranks.
    pub(crate) fn require_unsharded(&self, what: &str) -> Result<(), ModelError> {
        match self.is_sharded() {
            true => Err(ModelError::Shard(format!("{what} is not split over ranks; set `model.tensor_parallel = 1`"))),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement(name: &str, shape: &[usize], rank: usize) -> Placement {
        Shard { rank, size: 2 }.placement(name, shape)
    }

    fn slice(axis: usize, range: Range<usize>) -> Placement {
        Placement::Slice(TensorSlice { axis, range })
    }

    #[test]
    fn each_rank_holds_its_slice_and_the_first_the_row_parallel_bias() {
        assert_eq!(placement("model.layers.3.self_attn.q_proj.weight", &[8, 6], 1), slice(0, 4..8));
        assert_eq!(placement("model.layers.3.self_attn.k_proj.bias", &[4], 0), slice(0, 0..2));
        assert_eq!(placement("model.layers.3.self_attn.o_proj.weight", &[6, 8], 1), slice(1, 4..8));
        assert_eq!(placement("model.layers.3.mlp.down_proj.weight", &[6, 10], 0), slice(1, 0..5));
        assert_eq!(placement("model.layers.3.self_attn.o_proj.bias", &[6], 0), Placement::Full);
        assert_eq!(placement("model.layers.3.self_attn.o_proj.bias", &[6], 1), Placement::Absent);
        for name in ["model.layers.3.self_attn.q_norm.weight", "model.embed_tokens.weight", "lm_head.weight"] {
            assert_eq!(placement(name, &[8], 1), Placement::Full, "{name}");
        }
    }

    #[test]
    fn one_matrix_of_an_adapter_is_split() {
        let axis = |layer: &str, side: &str| Shard::adapter_axis(&format!("model.layers.0.{layer}.lora_{side}.weight"));
        assert_eq!((axis("self_attn.v_proj", "A"), axis("self_attn.v_proj", "B")), (None, Some(0)));
        assert_eq!((axis("mlp.down_proj", "A"), axis("mlp.down_proj", "B")), (Some(1), None));
        assert_eq!(Shard::adapter_axis("lm_head.lora_B.weight"), None);
    }

    #[test]
    fn shapes_that_cannot_be_split_are_refused_with_a_remedy() {
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
