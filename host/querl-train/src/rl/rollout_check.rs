//! Whether rollout and training compute the same log-probabilities.

use super::RlTask;
use super::rollout::Rollout;
use crate::policy::{Example, Policy};
use crate::{Metrics, TrainError};
use querl_model::LoraAdapter;
use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;

/// Responses of a batch that are computed again.
const SAMPLE: usize = 8;

/// Mean difference of log-probabilities above which a run stops. Rounding is below 1e-6; verl calls 1e-2 a fault, with two
/// engines and half precision.
const LIMIT: f64 = 1e-4;

/// Keeps the draws apart from the others of a step.
const CHECK_STREAM: u64 = 0x524f_4c4c_4f55_5421;

/// Computes a seeded sample of a batch again, by the pass that training makes, with the adapter that the batch was generated
/// with. Gives the mean difference as `rollout_probs_diff`, the largest as `rollout_probs_diff_max`.
///
/// # Errors
/// The mean is above 1e-4 or not a number; the step is named.
///
/// Source: verl `calculate_debug_metrics` (there, of probabilities).
pub(super) fn check_rollout(
    task: &RlTask<'_>,
    adapter: &LoraAdapter,
    rollouts: &[Rollout],
    step: u64,
) -> Result<Metrics, TrainError> {
    let mut rng = ChaCha8Rng::seed_from_u64(task.seed ^ CHECK_STREAM ^ step.rotate_left(32));
    let mut chosen = sample(&mut rng, rollouts.len(), SAMPLE.min(rollouts.len())).into_vec();
    chosen.sort_unstable();
    let examples: Vec<&Example> = chosen.iter().map(|&i| &rollouts[i].example).collect();
    let policy = Policy { decoder: task.decoder, adapter: Some(&adapter.without_gradient()) };
    let pass = policy.response_pass(&examples, task.config.temperature)?;
    let computed: Vec<f32> = pass.logprobs.narrow(1, 0, 1)?.flatten_all()?.to_vec1()?;
    let sampled = chosen.iter().flat_map(|&i| &rollouts[i].logprobs);
    let differences: Vec<f64> = computed.iter().zip(sampled).map(|(a, b)| f64::from((a - b).abs())).collect();
    let mean = differences.iter().sum::<f64>() / differences.len().max(1) as f64;
    if mean.is_nan() || mean > LIMIT {
        return Err(TrainError::RolloutDiffers { step, difference: mean, limit: LIMIT });
    }
    let max = differences.iter().copied().fold(0.0, f64::max);
    Ok(Metrics::from([("rollout_probs_diff".into(), mean), ("rollout_probs_diff_max".into(), max)]))
}
