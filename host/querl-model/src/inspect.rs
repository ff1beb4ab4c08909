//! Summary of a model directory or an adapter. Tensors are read for NaN and Inf alone.

use crate::adapter::LoraAdapter;
use crate::checkpoint::{StoredModel, weight_files};
use crate::export::dtype_name;
use crate::{Family, ModelError, RopeScaling, TextTokenizer};
use serde::Serialize;
use std::path::Path;

/// Summary of a model directory.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct ModelSummary {
    pub family: Family,
    /// Number of parameters, a tied head counted once.
    pub parameters: usize,
    /// Types of the stored tensors, as `config.json` names them, sorted.
    pub dtypes: Vec<&'static str>,
    /// Number of weight files.
    pub weight_files: usize,
    /// Total bytes of the weight files.
    pub bytes: u64,
    pub layers: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
    /// Vocabulary size of the tokenizer.
    pub tokenizer_vocab_size: usize,
    /// Maximum number of tokens of a sequence.
    pub positions: usize,
    /// Scaling of the rotary frequencies; `None` if they are not scaled.
    pub rope_scaling: Option<RopeScaling>,
    /// Sliding window of attention in tokens; `None` if all layers have full attention.
    pub sliding_window: Option<usize>,
    /// Number of layers with the sliding window; the others have full attention.
    pub sliding_window_layers: usize,
    /// Whether the head shares the weights of the embedding.
    pub tied_embedding: bool,
}

/// Reads a model directory: configuration, tokenizer, and the names, types, shapes and values of its tensors.
///
/// # Errors
/// A file is missing or damaged, the architecture is not supported, the tensors are not those of the configuration, or a value is NaN
/// or Inf.
pub fn inspect_model(directory: &Path) -> Result<ModelSummary, ModelError> {
    let tokenizer = TextTokenizer::load(directory)?;
    let stored = StoredModel::open(directory)?;
    let config = &stored.config;
    let mut dtypes = Vec::new();
    for (name, _) in config.tensor_shapes() {
        let (dtype, ..) = stored.bytes(&name, None)?;
        dtypes.push(dtype_name(dtype));
    }
    dtypes.sort_unstable();
    dtypes.dedup();
    let files = weight_files(directory)?;
    let mut bytes = 0;
    for file in &files {
        bytes += std::fs::metadata(file).map_err(ModelError::io(file))?.len();
    }
    Ok(ModelSummary {
        family: config.family,
        parameters: config.n_parameters(),
        dtypes,
        weight_files: files.len(),
        bytes,
        layers: config.n_layers,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        heads: config.n_heads,
        kv_heads: config.n_kv_heads,
        head_dim: config.head_dim,
        vocab_size: config.vocab_size,
        tokenizer_vocab_size: tokenizer.vocab_size(),
        positions: config.max_positions,
        rope_scaling: config.rope_scaling,
        sliding_window: config.sliding_windows.iter().flatten().min().copied(),
        sliding_window_layers: config.sliding_windows.iter().flatten().count(),
        tied_embedding: config.tie_word_embeddings,
    })
}

/// Summary of an adapter folder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AdapterSummary {
    /// Base model as `adapter_config.json` names it.
    pub base: Option<String>,
    /// Number of parameters.
    pub parameters: usize,
    /// Type of the stored tensors, named as in `config.json`.
    pub dtype: &'static str,
    /// Rank of layers that no `rank_pattern` matches.
    pub rank: usize,
    /// Alpha of layers that no `alpha_pattern` matches.
    pub alpha: f64,
    /// Number of entries in `rank_pattern` and `alpha_pattern`.
    pub patterns: usize,
    /// Whether the scale is `alpha / sqrt(rank)` (rsLoRA) instead of `alpha / rank`.
    pub use_rslora: bool,
    /// Whether the adapter has DoRA magnitudes.
    pub use_dora: bool,
    /// Dropout probability of the adapter's training.
    pub dropout: f64,
    /// Number of adapted layers.
    pub adapted_layers: usize,
    /// Modules that are trained and saved in full.
    pub modules_to_save: Vec<String>,
}

/// Whether a folder holds an adapter.
pub fn is_adapter(directory: &Path) -> bool {
    directory.join(crate::adapter::CONFIG_FILE).is_file()
}

/// Reads an adapter that PEFT or querl saved. Whether it fits a base model is checked only when it is loaded on one.
///
/// # Errors
/// A file is missing or damaged, or the adapter uses what is not supported.
pub fn inspect_adapter(directory: &Path) -> Result<AdapterSummary, ModelError> {
    let parts = LoraAdapter::read(directory)?;
    let settings = &parts.settings;
    let matrices =
        parts.tensors.keys().filter(|name| name.ends_with(".lora_A.weight") || name.ends_with(".lora_embedding_A"));
    let numbers = parts.tensors.iter().filter(|(name, _)| !name.contains(".base_layer."));
    Ok(AdapterSummary {
        base: parts.file.base().map(str::to_owned),
        parameters: numbers.map(|(_, tensor)| tensor.elem_count()).sum(),
        dtype: dtype_name(parts.dtype),
        rank: settings.rank,
        alpha: settings.alpha,
        patterns: settings.rank_pattern.iter().count() + settings.alpha_pattern.iter().count(),
        use_rslora: settings.use_rslora,
        use_dora: settings.use_dora,
        dropout: settings.dropout,
        adapted_layers: matrices.count(),
        modules_to_save: settings.modules_to_save.clone(),
    })
}
