//! Checks that rollout and training compute the same log-probabilities, and measures the KL of a rollout server's log-probabilities to
//! those of the training pass.

use super::RlTask;
use super::losses::{MAX_K3, Rows};
use super::metrics::{mismatch_metrics, rollout_check_metrics};
use super::rollout::Rollout;
use crate::batching::map_micro_batches;
use crate::policy::{Example, Policy, TrainingPass};
use crate::{Metrics, TrainError};
use querl_model::{ComputeDevice, LoraAdapter};
use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;

/// Number of responses of a batch that are checked.
const SAMPLE: usize = 8;

/// Limit of the mean difference of log-probabilities. Both passes compute in f32 from the same packed weights, whatever `model.dtype`, and
/// differ only in the order of sums: by 1e-6 in `tests/ppo.rs` and `tests/learning.rs`, by up to 1.2e-5 with the example's model. Above
/// 1e-5 there is a warning. verl's limit is 1e-2, with two engines and half precision.
const MEAN_LIMIT: f64 = 1e-4;

/// The same limit on a GPU, where activations are bf16 and the two passes round at different points. Measured on the simulated GPU with
/// real bf16 arithmetic: 0.005, 0.007 and 0.008 in random models of 2, 8 and 24 layers, 0.008 to 0.013 with adapters that spread the logits
/// over tens of nats, 0.017 in the tiny policy of the tests; on an H200 below 0.05 in random models of 24 and 28 layers and 0.061 in one of
/// 64.
const MEAN_LIMIT_ON_GPU: f64 = 1e-1;

/// The limit for a single token on a GPU. Measured: 0.02, 0.023 and 0.042, and 0.08 with such adapters, over some hundred tokens each; the
/// maximum over a million tokens is far larger.
const MAX_LIMIT_ON_GPU: f64 = 2.0;

/// The limit for a single token: an error in few positions, such as at the boundaries of micro-batches, hardly changes the mean. The
/// largest rounding error in those tests is 3e-5.
const MAX_LIMIT: f64 = 1e-2;

/// Separates this random stream from the others of a step.
const CHECK_STREAM: u64 = 0x524f_4c4c_4f55_5421;

/// Recomputes the log-probabilities of a seeded sample of a batch with the training pass and the adapter that generated the batch. Returns
/// the mean difference as `rollout_probs_diff` and the largest as `rollout_probs_diff_max`; no metrics for an empty batch.
///
/// Source: verl `calculate_debug_metrics` (there, of probabilities).
pub(super) fn check_rollout(
    task: &RlTask<'_>,
    adapter: &LoraAdapter,
    rollouts: &[Rollout],
    step: u64,
) -> Result<Metrics, TrainError> {
    if rollouts.is_empty() {
        return Ok(Metrics::new());
    }
    let mut rng = ChaCha8Rng::seed_from_u64(task.seed ^ CHECK_STREAM ^ step.rotate_left(32));
    let mut chosen = sample(&mut rng, rollouts.len(), SAMPLE.min(rollouts.len())).into_vec();
    chosen.sort_unstable();
    let examples: Vec<&Example> = chosen.iter().map(|&i| &rollouts[i].example).collect();
    let computed = training_logprobs(task, adapter, &examples, step)?;
    let mut differences: Vec<f64> = Vec::new();
    for (computed, sampled) in computed.iter().zip(chosen.iter().map(|&i| &rollouts[i].logprobs)) {
        if computed.len() != sampled.len() {
            let (n, expected) = (sampled.len(), computed.len());
            let message = format!("rl step {step}: a rollout has {n} log-probabilities for {expected} tokens");
            return Err(TrainError::Data(format!("{message}; internal error, please report it")));
        }
        differences.extend(computed.iter().zip(sampled).map(|(a, b)| f64::from((a - b).abs())));
    }
    let mean = differences.iter().sum::<f64>() / differences.len().max(1) as f64;
    let max = differences.iter().copied().fold(0.0, f64::max);
    let (mean_limit, max_limit) = match task.decoder.compute_device() {
        ComputeDevice::Cpu => (MEAN_LIMIT, MAX_LIMIT),
        ComputeDevice::Accelerator(_) => (MEAN_LIMIT_ON_GPU, MAX_LIMIT_ON_GPU),
    };
    let exceeded = [(mean, mean_limit, "on average"), (max, max_limit, "at worst")];
    // A NaN difference makes the mean NaN.
    match exceeded.into_iter().find(|(difference, limit, _)| difference.is_nan() || difference > limit) {
        Some((difference, limit, measure)) => Err(TrainError::RolloutDiffers { step, difference, limit, measure }),
        None => Ok(rollout_check_metrics(mean, max)),
    }
}

/// Recomputes the log-probabilities of a rollout server's batch with the training pass and the adapter that generated the batch, and
/// compares both with [`check_mismatch`].
pub(super) fn check_server_rollout(
    task: &RlTask<'_>,
    adapter: &LoraAdapter,
    rollouts: &[Rollout],
    max_mismatch_kl: f64,
    step: u64,
) -> Result<Metrics, TrainError> {
    let examples: Vec<&Example> = rollouts.iter().map(|rollout| &rollout.example).collect();
    check_mismatch(&training_logprobs(task, adapter, &examples, step)?, rollouts, max_mismatch_kl, step)
}

/// KL per token of the server's distribution to that of the training pass, estimated from the sampled tokens. A batch whose k3 is above
/// `max_mismatch_kl` is an error: the server has another model, adapter or temperature, or reports log-probabilities of another
/// distribution. For this limit, not for the metric, the k3 of a token is capped at [`MAX_K3`]. Filters (`rl.top_p`, `rl.top_k`) increase
/// the KL by the probability that they cut off.
///
/// `logprobs`: of the training pass, `(B, T)`.
///
/// Source: verl `compute_offpolicy_metrics`, `rollout_corr/kl` and `rollout_corr/k3_kl`.
pub(super) fn check_mismatch(
    logprobs: &Rows,
    rollouts: &[Rollout],
    max_mismatch_kl: f64,
    step: u64,
) -> Result<Metrics, TrainError> {
    let rows = logprobs.iter().zip(rollouts);
    // Log-ratio of the training pass's probability and the server's.
    let log_ratios: Vec<f64> = rows
        .flat_map(|(ours, rollout)| ours.iter().zip(&rollout.behaviour_logprobs))
        .map(|(ours, server)| f64::from(*ours) - f64::from(*server))
        .collect();
    if log_ratios.is_empty() {
        return Ok(Metrics::new());
    }
    let mean =
        |value: fn(f64) -> f64| log_ratios.iter().map(|ratio| value(*ratio)).sum::<f64>() / log_ratios.len() as f64;
    let (k1, k3) = (mean(|ratio| -ratio), mean(raw_k3));
    // Capped, because otherwise one token with a very small probability on one side would dominate the batch.
    let bounded = mean(|ratio| raw_k3(ratio).clamp(0.0, f64::from(MAX_K3)));
    // NaN is an error, too.
    if bounded <= max_mismatch_kl {
        Ok(mismatch_metrics(k1, k3))
    } else {
        Err(TrainError::Mismatch { step, kl: bounded, max_mismatch_kl })
    }
}

/// k3 of a log-ratio.
fn raw_k3(log_ratio: f64) -> f64 {
    log_ratio.exp_m1() - log_ratio
}

/// Log-probabilities `(B, T)` of responses under `adapter`, by the training pass.
fn training_logprobs(
    task: &RlTask<'_>,
    adapter: &LoraAdapter,
    examples: &[&Example],
    step: u64,
) -> Result<Rows, TrainError> {
    let policy = Policy { decoder: task.decoder, adapter: Some(&adapter.without_gradient()) };
    map_micro_batches(examples, task.tokens_per_pass, |examples| {
        task.check_stop(step)?;
        policy.response_logprobs(examples, task.config.temperature, TrainingPass::default())?.rows(examples)
    })
}
