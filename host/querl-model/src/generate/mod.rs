//! Generation: rollouts and evaluation.
//!
//! In: prompts as tokens, a policy, and how to decode. Out: answers with the log-probability of each token, as a training pass
//! computes it and as it was drawn. Nothing here records a graph.

mod admission;
mod batch;
mod beam;
#[cfg(feature = "cuda")]
mod card;
mod cpu_backend;
mod draw;
mod engine;
mod filters;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod levels;
mod model_runner;
mod paged_attention;
mod policy;
mod prefixes;
mod rows;
mod sampling;
mod settings;
mod sizes;
mod vectorised;

pub use engine::{CacheMemory, Engine, EngineSettings, PrefixLife};
pub use settings::{Decoding, EndedBy, Generated, GenerationRequest, SamplingSettings, TokenText};
pub use sizes::CacheRoom;

/// What tests of the device compare with.
#[cfg(all(test, feature = "cuda"))]
pub(crate) mod on_device {
    pub(crate) use super::filters::Rules;
    pub(crate) use super::sampling::choose;
}

use crate::{Decoder, LoraAdapter, ModelError};

/// Generates the answers to some requests with an engine of their own, one after another.
///
/// # Errors
/// As [`Engine::generate`].
pub fn generate(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    requests: &[GenerationRequest<'_>],
    decoding: Decoding,
    sampling: &SamplingSettings,
    text: &dyn TokenText,
) -> Result<Vec<Generated>, ModelError> {
    let mut engine = Engine::new(decoder, EngineSettings::default())?;
    engine.set_policy(adapter, 0)?;
    Ok(engine.generate(requests, decoding, sampling, text)?.into_iter().flatten().collect())
}
