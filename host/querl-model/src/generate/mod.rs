//! Generation: rollouts and evaluation.
//!
//! In: prompts as tokens, a policy, and how to decode. Out: answers with the log-probability of each token, as a training pass
//! computes it and as it was drawn. Nothing here records a graph.

mod admission;
mod batch;
mod beam;
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

pub use draw::{Draw, Taker};
pub use engine::{CacheMemory, Engine, EngineSettings, PrefixLife};
pub use filters::Rules;
pub use model_runner::{Hidden, Unit};
pub use policy::DecodePolicy;
pub use sampling::{Choice, choose};
pub use settings::{Decoding, EndedBy, Generated, GenerationRequest, SamplingSettings, TokenText};
pub use sizes::{CacheRoom, Sizes, bucket};

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
