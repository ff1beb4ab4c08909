//! Checks of a model's folder before any stage runs.

use crate::failure::Stop;
use querl_core::config::Config;
use querl_model::{DecoderConfig, Shard, TextTokenizer};

/// Everything about the model's folder that can be wrong, found before any stage runs.
///
/// # Errors
/// A file is missing or damaged, or the architecture is not supported.
pub fn preflight(config: &Config) -> anyhow::Result<()> {
    let path = &config.model.path;
    let tokenizer = TextTokenizer::load(path).map_err(|error| Stop::usage(error.to_string()))?;
    querl_model::check_directory(path).map_err(|error| Stop::usage(error.to_string()))?;
    let shapes = DecoderConfig::load(&path.join("config.json"))?;
    Shard::check(config.model.tensor_parallel, &shapes, config.model.dtype)
        .map_err(|error| Stop::usage(error.to_string()))?;
    let (n_tokens, vocab_size) = (tokenizer.vocab_size(), shapes.vocab_size);
    if n_tokens > vocab_size {
        let message = format!(
            "{}: the tokenizer has {n_tokens} tokens and config.json a vocab_size of {vocab_size}; they belong to different models",
            path.display()
        );
        return Err(Stop::usage(message).into());
    }
    Ok(())
}
