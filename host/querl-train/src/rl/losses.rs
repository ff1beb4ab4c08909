//! Losses of policy optimisation as pure functions from values to a loss and its gradient.
//!
//! `(B, T)` arguments are slices of rows; a row's length is its response's, so batches need no padding. A `response_mask` is true
//! for tokens to keep and has the shape of the values; masked positions never affect a result, whatever they hold. Losses take
//! weights made from such a mask ([`Aggregation::weights`]): 0 is a masked position.
//!
//! Order: masks, aggregation, policy losses, value loss, importance weights, KL. Advantages: [`advantages`](super::advantages).

use querl_core::config::{KlEstimator, ValueLossKind};
use serde::{Deserialize, Serialize};
use std::slice;

/// A `(B, T)` array whose rows may differ in length: one row per response.
pub type Rows = Vec<Vec<f32>>;

/// Log-ratios are clamped to plus and minus this value before the exponential.
const MAX_LOG_RATIO: f32 = 20.0;

/// Upper bound of a response's mean log-ratio. Source: verl `compute_policy_loss_gspo`.
const MAX_MEAN_LOG_RATIO: f32 = 10.0;

/// Checks the shapes, because zipping rows of different lengths would skip tokens silently.
///
/// # Panics
/// One of `others` does not have the shape of `weights`.
fn assert_shapes(weights: &[Vec<f32>], others: &[&[Vec<f32>]]) {
    for rows in others {
        let is_same = rows.len() == weights.len() && rows.iter().zip(weights).all(|(a, b)| a.len() == b.len());
        assert!(is_same, "the rows of a loss differ in number or length");
    }
}

/// Row, token and weight of the positions whose weight is not 0.
fn weighted_tokens(weights: &[Vec<f32>]) -> impl Iterator<Item = (usize, usize, f32)> {
    let rows = weights.iter().enumerate();
    let tokens = rows.flat_map(|(b, row)| row.iter().enumerate().map(move |(t, weight)| (b, t, *weight)));
    tokens.filter(|(_, _, weight)| *weight != 0.0)
}

fn zeros_like(rows: &[Vec<f32>]) -> Rows {
    rows.iter().map(|row| vec![0.0; row.len()]).collect()
}

pub(super) fn kept<'a>(values: &'a [Vec<f32>], response_mask: &'a [Vec<bool>]) -> impl Iterator<Item = f32> + 'a {
    let rows = values.iter().zip(response_mask);
    rows.flat_map(|(values, mask)| values.iter().zip(mask).filter(|(_, keep)| **keep).map(|(value, _)| *value))
}

pub(super) fn n_kept(response_mask: &[Vec<bool>]) -> usize {
    response_mask.iter().flatten().filter(|keep| **keep).count()
}

/// Mean of the values where the mask is true; 0 if it is true nowhere.
pub fn masked_mean(values: &[Vec<f32>], response_mask: &[Vec<bool>]) -> f32 {
    let n = n_kept(response_mask).max(1);
    (kept(values, response_mask).map(f64::from).sum::<f64>() / n as f64) as f32
}

/// Loss aggregation: how the losses of tokens are averaged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aggregation {
    /// Mean over all tokens: long responses have more weight.
    TokenMean,
    /// Mean over tokens of a response, then over responses.
    SequenceMean,
    /// Sum over tokens of a response, divided by a constant; mean over responses.
    SequenceSum {
        /// The constant divisor: in Dr. GRPO the maximum response length, so that a token's weight does not depend on the response.
        scale: f32,
    },
}

/// Number of tokens and responses of an optimizer step, over all micro-batches and ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSize {
    /// Number of tokens where the response mask is true.
    pub n_tokens: usize,
    /// Number of responses with at least one token where the response mask is true.
    pub n_responses: usize,
}

impl StepSize {
    /// The size of a step with the tokens of `response_mask`.
    pub fn of(response_mask: &[Vec<bool>]) -> Self {
        let n_responses = response_mask.iter().filter(|row| row.contains(&true)).count();
        Self { n_tokens: n_kept(response_mask), n_responses }
    }
}

impl Aggregation {
    /// The weight of each token in the loss of the step, 0 where `response_mask` is false: `(B, T)`.
    ///
    /// Losses of micro-batches with these weights add up to the loss of the step, however it is split.
    ///
    /// Source: verl `agg_loss`: `token-mean`, `seq-mean-token-mean` (here without the 1e-8 added to the number of tokens) and
    /// `seq-mean-token-sum-norm`.
    pub fn weights(self, response_mask: &[Vec<bool>], step: StepSize) -> Rows {
        let (n_tokens, n_responses) = (step.n_tokens.max(1) as f32, step.n_responses.max(1) as f32);
        let row = |mask: &Vec<bool>| {
            let n_kept = mask.iter().filter(|keep| **keep).count().max(1) as f32;
            let weight = match self {
                Self::TokenMean => 1.0 / n_tokens,
                Self::SequenceMean => 1.0 / (n_kept * n_responses),
                Self::SequenceSum { scale } => 1.0 / (scale * n_responses),
            };
            mask.iter().map(|keep| if *keep { weight } else { 0.0 }).collect()
        };
        response_mask.iter().map(row).collect()
    }
}

/// Bounds for clipping the probability ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolicyClip {
    /// Lower clip range: ratios are clipped to `1 - clip_range ..= 1 + clip_range_high`.
    pub clip_range: f32,
    /// Upper clip range; above `clip_range` it lets tokens of low probability rise further (clip-higher of DAPO).
    pub clip_range_high: f32,
    /// Dual clip, above 1: bounds the loss of a token with negative advantage A at `-dual_clip * A`; `None`: off.
    pub dual_clip: Option<f32>,
}

/// Policy loss, its gradient, and metrics. Counts and sums are over ratios: one per token, or one per response in the sequence form.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyLoss {
    /// Weighted sum of the tokens' losses.
    pub pg_loss: f32,
    /// Number of ratios that were clipped.
    pub n_clipped: usize,
    /// Number of ratios whose loss the dual clip bounded.
    pub n_clipped_lower: usize,
    /// Sum of `old_logprobs - logprobs`, the k1 estimate of KL from the rollout policy; may be negative.
    pub kl_sum: f64,
    /// Sum of `ratio - 1 - log(ratio)`, the k3 estimate of KL from the rollout policy; never negative.
    ///
    /// Source: Schulman 2020, "Approximating KL divergence".
    pub kl_k3_sum: f64,
    /// `(B, T)`: derivative of `pg_loss` with respect to each log-probability.
    pub grad_logprobs: Rows,
}

/// The clipped policy loss: `max(-A r, -A clip(r, 1 - clip_range, 1 + clip_range_high))`.
///
/// `old_logprobs`, `logprobs`, `advantages`: `(B, T)`. `weights`, `(B, T)`: each token's weight in the step
/// ([`Aggregation::weights`], times importance weights); tokens of weight 0 are skipped.
///
/// # Panics
/// The shapes differ.
///
/// Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; dual clip of Ye et al. 2020; clip-higher of Yu et
/// al. 2025, "DAPO", section 3.1; verl `compute_policy_loss_vanilla`.
pub fn policy_loss(
    old_logprobs: &[Vec<f32>],
    logprobs: &[Vec<f32>],
    advantages: &[Vec<f32>],
    weights: &[Vec<f32>],
    clip: PolicyClip,
) -> PolicyLoss {
    assert_shapes(weights, &[old_logprobs, logprobs, advantages]);
    let token = |b: usize, t: usize| {
        TokenLoss::clipped(logprobs[b][t] - old_logprobs[b][t], MAX_LOG_RATIO, advantages[b][t], clip)
    };
    sum_token_losses(weights, token)
}

/// GSPO loss: [`policy_loss`] with one ratio per response, the geometric mean of its tokens' ratios; each token gets the gradient as if
/// this ratio were its own.
///
/// `old_logprobs`, `logprobs`, `advantages`, `response_mask`, `weights`: `(B, T)`. `n_clipped` counts the tokens of clipped responses; KL
/// is that of tokens. The dual clip is not part of it.
///
/// # Panics
/// The shapes differ.
///
/// Source: Zheng et al. 2025, "Group Sequence Policy Optimization", sections 4.1 and 4.3 (GSPO-token, which has the gradient of GSPO where
/// the advantage of a response is one number); verl `compute_policy_loss_gspo`.
pub fn gspo_loss(
    old_logprobs: &[Vec<f32>],
    logprobs: &[Vec<f32>],
    advantages: &[Vec<f32>],
    response_mask: &[Vec<bool>],
    weights: &[Vec<f32>],
    clip: PolicyClip,
) -> PolicyLoss {
    assert_shapes(weights, &[old_logprobs, logprobs, advantages]);
    let mean_log_ratio = |((old, new), mask): ((&Vec<f32>, &Vec<f32>), &Vec<bool>)| {
        let log_ratios: Vec<f32> = new.iter().zip(old).map(|(new, old)| new - old).collect();
        masked_mean(slice::from_ref(&log_ratios), slice::from_ref(mask))
    };
    let of_responses: Vec<f32> = old_logprobs.iter().zip(logprobs).zip(response_mask).map(mean_log_ratio).collect();
    let clip = PolicyClip { dual_clip: None, ..clip };
    let token = |b: usize, t: usize| {
        let log_ratio = bounded_log_ratio(old_logprobs[b][t], logprobs[b][t]);
        TokenLoss { log_ratio, ..TokenLoss::clipped(of_responses[b], MAX_MEAN_LOG_RATIO, advantages[b][t], clip) }
    };
    sum_token_losses(weights, token)
}

/// CISPO loss, the log-likelihood weighted by advantage and clipped ratio: `-A sg(clip(r, 1 - clip_range, 1 + clip_range_high)) log p`.
/// The weight carries no gradient (`sg`: stop-gradient), so clipped tokens are trained too.
///
/// Shapes as in [`policy_loss`]; the dual clip is not part of it.
///
/// # Panics
/// The shapes differ.
///
/// Source: Chen et al. 2025, "MiniMax-M1", section 3.1 (CISPO, there without a lower bound); verl `compute_policy_loss_cispo`.
pub fn cispo_loss(
    old_logprobs: &[Vec<f32>],
    logprobs: &[Vec<f32>],
    advantages: &[Vec<f32>],
    weights: &[Vec<f32>],
    clip: PolicyClip,
) -> PolicyLoss {
    assert_shapes(weights, &[old_logprobs, logprobs, advantages]);
    let token = |b: usize, t: usize| {
        let log_ratio = bounded_log_ratio(old_logprobs[b][t], logprobs[b][t]);
        let ratio = log_ratio.exp();
        let clipped = ratio.clamp(1.0 - clip.clip_range, 1.0 + clip.clip_range_high);
        let is_clipped = clipped != ratio;
        TokenLoss { is_clipped, ..TokenLoss::likelihood(log_ratio, logprobs[b][t], clipped * advantages[b][t]) }
    };
    sum_token_losses(weights, token)
}

/// Loss of GPG and RAFT, the log-likelihood weighted by the advantage: `-A log p`. With advantages of 1 it is the cross-entropy.
///
/// Shapes as in [`policy_loss`]; `old_logprobs` are for KL alone.
///
/// # Panics
/// The shapes differ.
///
/// Source: verl `compute_policy_loss_gpg`.
pub fn likelihood_loss(
    old_logprobs: &[Vec<f32>],
    logprobs: &[Vec<f32>],
    advantages: &[Vec<f32>],
    weights: &[Vec<f32>],
) -> PolicyLoss {
    assert_shapes(weights, &[old_logprobs, logprobs, advantages]);
    let token = |b: usize, t: usize| {
        let log_ratio = bounded_log_ratio(old_logprobs[b][t], logprobs[b][t]);
        TokenLoss::likelihood(log_ratio, logprobs[b][t], advantages[b][t])
    };
    sum_token_losses(weights, token)
}

fn bounded_log_ratio(old_logprob: f32, logprob: f32) -> f32 {
    (logprob - old_logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
}

/// The sum of the losses that `token` returns for the positions whose weight is not 0.
fn sum_token_losses(weights: &[Vec<f32>], token: impl Fn(usize, usize) -> TokenLoss) -> PolicyLoss {
    let (mut loss, mut n_clipped, mut n_clipped_lower, mut kl_sum, mut kl_k3_sum) = (0f64, 0, 0, 0f64, 0f64);
    let mut grad_logprobs = zeros_like(weights);
    for (b, t, weight) in weighted_tokens(weights) {
        let token = token(b, t);
        loss += f64::from(token.loss) * f64::from(weight);
        n_clipped += usize::from(token.is_clipped);
        n_clipped_lower += usize::from(token.is_clipped_lower);
        kl_sum -= f64::from(token.log_ratio);
        kl_k3_sum += f64::from(token.log_ratio).exp_m1() - f64::from(token.log_ratio);
        grad_logprobs[b][t] = token.gradient * weight;
    }
    PolicyLoss { pg_loss: loss as f32, n_clipped, n_clipped_lower, kl_sum, kl_k3_sum, grad_logprobs }
}

/// [`policy_loss`] with one ratio per response, `exp(sum over its tokens of logprob - old_logprob)`, and one advantage per response.
///
/// `advantages`, `weights`: B. Each token where `response_mask` is true gets the gradient of its response's ratio.
pub fn sequence_policy_loss(
    old_logprobs: &[Vec<f32>],
    logprobs: &[Vec<f32>],
    advantages: &[f32],
    response_mask: &[Vec<bool>],
    weights: &[f32],
    clip: PolicyClip,
) -> PolicyLoss {
    let sums = |rows: &[Vec<f32>]| -> Rows {
        let row = |(row, mask): (&Vec<f32>, &Vec<bool>)| vec![kept(slice::from_ref(row), slice::from_ref(mask)).sum()];
        rows.iter().zip(response_mask).map(row).collect()
    };
    let one_each = |values: &[f32]| -> Rows { values.iter().map(|value| vec![*value]).collect() };
    let (old, new) = (sums(old_logprobs), sums(logprobs));
    let loss = policy_loss(&old, &new, &one_each(advantages), &one_each(weights), clip);
    let spread = |(gradient, mask): (&Vec<f32>, &Vec<bool>)| {
        mask.iter().map(|keep| if *keep { gradient[0] } else { 0.0 }).collect()
    };
    PolicyLoss { grad_logprobs: loss.grad_logprobs.iter().zip(response_mask).map(spread).collect(), ..loss }
}

/// The loss of one ratio.
struct TokenLoss {
    loss: f32,
    /// Derivative of `loss` with respect to the log-probability.
    gradient: f32,
    /// `logprob - old_logprob` of the token, for the KL estimate; in [`gspo_loss`] it differs from the log-ratio of the loss.
    log_ratio: f32,
    is_clipped: bool,
    is_clipped_lower: bool,
}

impl TokenLoss {
    /// Loss of the clipped surrogate with this log-ratio, which is clamped to `-MAX_LOG_RATIO ..= max_log_ratio`.
    fn clipped(unbounded: f32, max_log_ratio: f32, advantage: f32, clip: PolicyClip) -> Self {
        let log_ratio = unbounded.clamp(-MAX_LOG_RATIO, max_log_ratio);
        let ratio = log_ratio.exp();
        let plain = -advantage * ratio;
        let clipped = -advantage * ratio.clamp(1.0 - clip.clip_range, 1.0 + clip.clip_range_high);
        let is_clipped = clipped > plain;
        let is_saturated = unbounded != log_ratio;
        let gradient = if is_clipped || is_saturated { 0.0 } else { plain };
        let loss = plain.max(clipped);
        match clip.dual_clip {
            Some(bound) if advantage < 0.0 && -advantage * bound < loss => {
                Self { loss: -advantage * bound, gradient: 0.0, log_ratio, is_clipped, is_clipped_lower: true }
            }
            _ => Self { loss, gradient, log_ratio, is_clipped, is_clipped_lower: false },
        }
    }

    /// Loss of the weighted log-likelihood.
    fn likelihood(log_ratio: f32, logprob: f32, weight: f32) -> Self {
        Self { loss: -weight * logprob, gradient: -weight, log_ratio, is_clipped: false, is_clipped_lower: false }
    }
}

/// Kind and clipping of the value loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ValueLossSettings {
    /// Loss function of the error: half the squared error, or Huber with delta 1.
    pub kind: ValueLossKind,
    /// Maximum distance of a clipped value from the value before the updates; `None`: no clipping.
    pub clip_range_value: Option<f32>,
}

/// Value loss, its gradient, and metrics.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueLoss {
    /// Weighted sum over tokens of the larger of plain and clipped loss.
    pub vf_loss: f32,
    /// Number of tokens where the clipped loss was larger.
    pub n_clipped: usize,
    /// `(B, T)`: derivative of `vf_loss` with respect to each value.
    pub grad_values: Rows,
}

/// Value loss of an error, and its derivative.
///
/// Source: torch `huber_loss` with delta 1.
fn error_loss(kind: ValueLossKind, error: f32) -> (f32, f32) {
    match kind {
        ValueLossKind::Huber if error.abs() > 1.0 => (error.abs() - 0.5, error.signum()),
        _ => (0.5 * error * error, error),
    }
}

/// Clipped value loss of `values` against `returns`.
///
/// `old_values`, `values`, `returns`, `weights`: `(B, T)`; tokens of weight 0 are skipped.
///
/// # Panics
/// The shapes differ.
///
/// Source: verl `compute_value_loss` (squared); Schulman et al. 2017's implementation in OpenAI baselines.
pub fn value_loss(
    old_values: &[Vec<f32>],
    values: &[Vec<f32>],
    returns: &[Vec<f32>],
    weights: &[Vec<f32>],
    settings: ValueLossSettings,
) -> ValueLoss {
    assert_shapes(weights, &[old_values, values, returns]);
    let (mut loss, mut n_clipped) = (0f64, 0);
    let mut grad_values = zeros_like(values);
    for (b, t, weight) in weighted_tokens(weights) {
        let (old, value, target) = (old_values[b][t], values[b][t], returns[b][t]);
        let bounded = settings.clip_range_value.map_or(value, |range| value.clamp(old - range, old + range));
        let (plain, gradient) = error_loss(settings.kind, value - target);
        let (clipped, _) = error_loss(settings.kind, bounded - target);
        let is_clipped = clipped > plain;
        loss += f64::from(plain.max(clipped)) * f64::from(weight);
        n_clipped += usize::from(is_clipped);
        grad_values[b][t] = if is_clipped { 0.0 } else { gradient * weight };
    }
    ValueLoss { vf_loss: loss as f32, n_clipped, grad_values }
}

/// Level of [`importance_weights`]: a weight per token or per response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImportanceLevel {
    /// One weight per token: biased, with a small variance.
    Token,
    /// One weight per response, the product of its tokens' ratios: unbiased, with a large variance.
    Sequence,
}

/// Truncated importance weights: `min(cap, p / q)`, where `p` is a token's probability under the policy and `q` under the distribution
/// that it was sampled from.
///
/// `logprobs`, `behaviour_logprobs`: `(B, T)`. Returns `(B, T)`, 0 where `response_mask` is false. The weights multiply the
/// policy's loss and carry no gradient.
///
/// Source: Espeholt et al. 2018, "IMPALA", section 4.1 (the cap); verl `compute_rollout_correction_weights`, `token` and
/// `sequence`.
pub fn importance_weights(
    logprobs: &[Vec<f32>],
    behaviour_logprobs: &[Vec<f32>],
    response_mask: &[Vec<bool>],
    cap: f32,
    level: ImportanceLevel,
) -> Rows {
    let weight = |log_ratio: f32| log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().min(cap);
    let row = |((logprobs, behaviour), mask): ((&Vec<f32>, &Vec<f32>), &Vec<bool>)| {
        let log_ratios: Vec<f32> = logprobs.iter().zip(behaviour).map(|(p, q)| p - q).collect();
        let of_response = weight(kept(slice::from_ref(&log_ratios), slice::from_ref(mask)).sum());
        let of_token = |(log_ratio, keep): (&f32, &bool)| match (keep, level) {
            (false, _) => 0.0,
            (true, ImportanceLevel::Token) => weight(*log_ratio),
            (true, ImportanceLevel::Sequence) => of_response,
        };
        log_ratios.iter().zip(mask).map(of_token).collect()
    };
    logprobs.iter().zip(behaviour_logprobs).zip(response_mask).map(row).collect()
}

/// Effective sample size of importance weights as a share of the tokens: 1 if all weights are equal.
///
/// Source: Kish 1965, "Survey Sampling"; verl `compute_is_metrics`, `rollout_is_eff_sample_size`.
pub fn effective_sample_share(weights: &[Vec<f32>], response_mask: &[Vec<bool>]) -> f32 {
    let squares: Rows = weights.iter().map(|row| row.iter().map(|weight| weight * weight).collect()).collect();
    let (mean, mean_square) = (masked_mean(weights, response_mask), masked_mean(&squares, response_mask));
    if mean_square > 0.0 { mean * mean / mean_square } else { 0.0 }
}

/// k1 estimate of a token's KL, `log p - log q` with policy p and reference q: unbiased, may be negative.
///
/// Source: Schulman 2020, "Approximating KL divergence"; verl `kl_penalty`, `kl`.
pub fn kl_k1(logprob: f32, ref_logprob: f32) -> f32 {
    logprob - ref_logprob
}

/// k2 estimate of a token's KL, half the squared log-ratio: biased, never negative; its mean gradient is that of KL.
///
/// Source: as [`kl_k1`]; verl `kl_penalty`, `mse`.
pub fn kl_k2(logprob: f32, ref_logprob: f32) -> f32 {
    0.5 * (logprob - ref_logprob).powi(2)
}

/// k3 estimate of a token's KL, `q/p - 1 - log(q/p)` with policy p and reference q: unbiased and never negative.
///
/// The log-ratio is clamped to ±20 and the result to ±10.
///
/// Source: as [`kl_k1`]; verl `kl_penalty`, `low_var_kl`.
pub fn kl_k3(logprob: f32, ref_logprob: f32) -> f32 {
    let log_ratio = (ref_logprob - logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO);
    (log_ratio.exp() - log_ratio - 1.0).clamp(-MAX_K3, MAX_K3)
}

/// Upper bound of one token's k3, in nats.
pub(super) const MAX_K3: f32 = 10.0;

/// Estimate of one token's KL by `estimator`, in nats.
pub fn kl(estimator: KlEstimator, logprob: f32, ref_logprob: f32) -> f32 {
    match estimator {
        KlEstimator::K1 => kl_k1(logprob, ref_logprob),
        KlEstimator::K2 => kl_k2(logprob, ref_logprob),
        KlEstimator::K3 => kl_k3(logprob, ref_logprob),
    }
}

/// The derivative of [`kl`] with respect to `logprob`; 0 where a clamp is active.
///
/// For tokens sampled from the policy, only the mean gradient of k2 equals the gradient of the KL: that of k1 is 0, that of k3 is the
/// gradient of the reverse KL.
///
/// Source: torch's derivative of verl `kl_penalty`.
fn kl_gradient(estimator: KlEstimator, logprob: f32, ref_logprob: f32) -> f32 {
    let log_ratio = ref_logprob - logprob;
    match estimator {
        KlEstimator::K1 => 1.0,
        KlEstimator::K2 => -log_ratio,
        KlEstimator::K3 if log_ratio.abs() > MAX_LOG_RATIO || log_ratio.exp() - log_ratio - 1.0 > MAX_K3 => 0.0,
        KlEstimator::K3 => 1.0 - log_ratio.exp(),
    }
}

/// [`kl`] of every token: `(B, T)`.
pub fn kl_rows(estimator: KlEstimator, logprobs: &[Vec<f32>], ref_logprobs: &[Vec<f32>]) -> Rows {
    let row = |(logprobs, reference): (&Vec<f32>, &Vec<f32>)| {
        logprobs.iter().zip(reference).map(|(logprob, reference)| kl(estimator, *logprob, *reference)).collect()
    };
    logprobs.iter().zip(ref_logprobs).map(row).collect()
}

/// KL from the reference as a term of the loss.
#[derive(Debug, Clone, PartialEq)]
pub struct KlLoss {
    /// Weighted sum of the tokens' KL estimates.
    pub kl_loss: f32,
    /// `(B, T)`: derivative of `kl_loss` with respect to each log-probability.
    pub grad_logprobs: Rows,
}

/// Weighted sum of the tokens' KL estimates and its gradient, not multiplied by `kl_coef`.
///
/// `logprobs`, `ref_logprobs`, `weights`: `(B, T)`; see [`Aggregation::weights`].
///
/// # Panics
/// The shapes differ.
///
/// Source: verl `ppo_loss`, `use_kl_loss`.
pub fn kl_loss(
    estimator: KlEstimator,
    logprobs: &[Vec<f32>],
    ref_logprobs: &[Vec<f32>],
    weights: &[Vec<f32>],
) -> KlLoss {
    assert_shapes(weights, &[logprobs, ref_logprobs]);
    let mut total = 0f64;
    let mut grad_logprobs = zeros_like(logprobs);
    for (b, t, weight) in weighted_tokens(weights) {
        let (logprob, reference) = (logprobs[b][t], ref_logprobs[b][t]);
        total += f64::from(kl(estimator, logprob, reference)) * f64::from(weight);
        grad_logprobs[b][t] = kl_gradient(estimator, logprob, reference) * weight;
    }
    KlLoss { kl_loss: total as f32, grad_logprobs }
}

/// Lower bound of the factor applied after one batch, so that the coefficient stays above 0.
const MIN_FACTOR: f64 = 0.1;

/// The KL coefficient, fixed or adapted to a target.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KlController {
    kl_coef: f64,
    /// In nats; 0 if the coefficient is fixed.
    kl_target: f64,
    kl_horizon: f64,
}

impl KlController {
    /// A controller that starts at `kl_coef`. With a `kl_target` above 0 the coefficient adapts over about `kl_horizon` episodes.
    pub fn new(kl_coef: f64, kl_target: f64, kl_horizon: usize) -> Self {
        Self { kl_coef, kl_target, kl_horizon: kl_horizon.max(1) as f64 }
    }

    /// The current coefficient.
    pub fn kl_coef(&self) -> f64 {
        self.kl_coef
    }

    /// Adapts the coefficient to `current_kl`, the mean KL of `n_episodes` episodes, in the unit of `kl_target`.
    ///
    /// The unit is nats per response, summed over its tokens, as in the paper and in TRL; verl's trainer averages over tokens.
    /// Departure: a lower bound of the factor, since the sources' factor is 0 or negative where a batch has more episodes than five
    /// horizons.
    ///
    /// Source: Ziegler et al. 2019, section 2.2; verl `AdaptiveKLController`.
    pub fn update(&mut self, current_kl: f64, n_episodes: usize) {
        if self.kl_target > 0.0 {
            let proportional_error = (current_kl / self.kl_target - 1.0).clamp(-0.2, 0.2);
            self.kl_coef *= (1.0 + proportional_error * n_episodes as f64 / self.kl_horizon).max(MIN_FACTOR);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_do_not_depend_on_the_split_into_micro_batches() {
        let mask = vec![vec![true, true, false], vec![true], vec![true, true, true]];
        for aggregation in [Aggregation::TokenMean, Aggregation::SequenceMean, Aggregation::SequenceSum { scale: 8.0 }]
        {
            let whole = aggregation.weights(&mask, StepSize::of(&mask));
            let parts: Rows = mask.chunks(2).flat_map(|part| aggregation.weights(part, StepSize::of(&mask))).collect();
            assert_eq!(whole, parts);
        }
    }

    const CLIP: PolicyClip = PolicyClip { clip_range: 0.2, clip_range_high: 0.2, dual_clip: None };

    fn token_mean(mask: &[Vec<bool>]) -> Rows {
        Aggregation::TokenMean.weights(mask, StepSize::of(mask))
    }

    /// Reward 0.65, V(s) 0.5, log-probabilities -2.3 and -2.1: `A = R - V(s)` is 0.15, the ratio e^0.2 = 1.2214 is clipped to 1.2.
    #[test]
    fn worked_example_with_a_positive_advantage() {
        let advantage = 0.65 - 0.5;
        let ratio = (-2.1f32 + 2.3).exp();
        assert!((ratio - 1.2214).abs() < 1e-4);
        assert!((ratio * advantage - 0.1832).abs() < 1e-4);
        assert!((ratio.clamp(0.8, 1.2) * advantage - 0.18).abs() < 1e-6);
        let (old, new) = (vec![vec![-2.3]], vec![vec![-2.1]]);
        let loss = policy_loss(&old, &new, &[vec![advantage]], &[vec![1.0]], CLIP);
        assert!((loss.pg_loss + 0.18).abs() < 1e-6);
        assert_eq!((loss.n_clipped, loss.grad_logprobs[0][0]), (1, 0.0));
        let sequence = sequence_policy_loss(&old, &new, &[advantage], &[vec![true]], &[1.0], CLIP);
        assert_eq!(sequence.pg_loss, loss.pg_loss);
    }

    /// The same with reward -0.3: the advantage is -0.8, and the loss pushes the probability down without clipping.
    #[test]
    fn worked_example_with_a_negative_advantage() {
        let advantage = -0.3 - 0.5;
        let loss = policy_loss(&[vec![-2.3]], &[vec![-2.1]], &[vec![advantage]], &[vec![1.0]], CLIP);
        assert!((loss.pg_loss - 0.8 * 0.2f32.exp()).abs() < 1e-5, "{}", loss.pg_loss);
        assert!(loss.grad_logprobs[0][0] > 0.0, "descent lowers the log-probability");
        assert_eq!(loss.n_clipped, 0);
    }

    #[test]
    fn before_an_update_the_ratio_is_one() {
        let logprobs = vec![vec![-1.0, -0.2], vec![-3.0]];
        let weights = token_mean(&[vec![true, true], vec![true]]);
        let loss = policy_loss(&logprobs, &logprobs, &[vec![1.0, -1.0], vec![0.5]], &weights, CLIP);
        assert_eq!((loss.n_clipped, loss.kl_sum, loss.kl_k3_sum), (0, 0.0, 0.0));
        assert!((loss.pg_loss + 0.5 / 3.0).abs() < 1e-6);
    }

    #[test]
    #[should_panic(expected = "the rows of a loss differ")]
    fn rows_shorter_than_their_weights_panic() {
        policy_loss(&[vec![-1.0]], &[vec![-1.0, -2.0]], &[vec![1.0]], &[vec![1.0]], CLIP);
    }

    #[test]
    fn log_ratios_are_bounded() {
        let loss = policy_loss(&[vec![-500.0]], &[vec![0.0]], &[vec![-1.0]], &[vec![1.0]], CLIP);
        assert!(loss.pg_loss.is_finite() && loss.kl_k3_sum.is_finite());
    }

    #[test]
    fn masked_positions_do_not_leak_into_the_policy_loss() {
        let mask = vec![vec![true, false]];
        let (old, new) = (vec![vec![-1.0, f32::NAN]], vec![vec![-0.9, f32::NAN]]);
        let loss = policy_loss(&old, &new, &[vec![1.0, f32::INFINITY]], &token_mean(&mask), CLIP);
        assert!(loss.pg_loss.is_finite() && loss.kl_sum.is_finite() && loss.kl_k3_sum.is_finite());
        assert_eq!(loss.grad_logprobs[0][1], 0.0);
        let (advantages, weights) = (vec![vec![1.0, f32::INFINITY]], token_mean(&mask));
        for loss in [
            sequence_policy_loss(&old, &new, &[1.0], &mask, &[1.0], CLIP),
            gspo_loss(&old, &new, &advantages, &mask, &weights, CLIP),
            cispo_loss(&old, &new, &advantages, &weights, CLIP),
            likelihood_loss(&old, &new, &advantages, &weights),
        ] {
            assert!(loss.pg_loss.is_finite() && loss.kl_sum.is_finite(), "{loss:?}");
            assert_eq!(loss.grad_logprobs[0][1], 0.0);
        }
    }

    /// Ratios of e^0.2 = 1.2214: above 1.2, below 1.28.
    #[test]
    fn clip_higher_lets_likely_tokens_rise_further_and_leaves_the_lower_bound() {
        let higher = PolicyClip { clip_range_high: 0.28, ..CLIP };
        let loss = |new: f32, advantage: f32, clip| {
            policy_loss(&[vec![-2.3]], &[vec![new]], &[vec![advantage]], &[vec![1.0]], clip)
        };
        assert_eq!((loss(-2.1, 1.0, CLIP).n_clipped, loss(-2.1, 1.0, higher).n_clipped), (1, 0));
        assert!((loss(-2.1, 1.0, higher).grad_logprobs[0][0] + 0.2f32.exp()).abs() < 1e-5);
        // e^-0.3 = 0.7408 is below 0.8 in both.
        assert_eq!(loss(-2.6, -1.0, CLIP), loss(-2.6, -1.0, higher));
        assert_eq!(loss(-2.6, -1.0, higher).n_clipped, 1);
    }

    /// Log-ratios 0.3 and -0.1 have the mean 0.1: both tokens have the ratio e^0.1 = 1.1052.
    #[test]
    fn gspo_has_one_ratio_per_response_and_cispo_learns_clipped_tokens() {
        let (old, new) = (vec![vec![-1.0, -1.0]], vec![vec![-0.7, -1.1]]);
        let (advantages, mask) = (vec![vec![1.0, 1.0]], vec![vec![true, true]]);
        let weights = token_mean(&mask);
        let gspo = gspo_loss(&old, &new, &advantages, &mask, &weights, CLIP);
        assert!((gspo.pg_loss + 0.1f32.exp()).abs() < 1e-6, "{gspo:?}");
        assert!(gspo.grad_logprobs[0].iter().all(|gradient| (gradient + 0.1f32.exp() / 2.0).abs() < 1e-6));
        // e^0.3 = 1.3499 is clipped to 1.2, e^-0.1 = 0.9048 is not.
        let cispo = cispo_loss(&old, &new, &advantages, &weights, CLIP);
        assert_eq!(cispo.n_clipped, 1);
        assert!((cispo.pg_loss - (1.2 * 0.7 + (-0.1f32).exp() * 1.1) / 2.0).abs() < 1e-6, "{cispo:?}");
        assert!((cispo.grad_logprobs[0][0] + 0.6).abs() < 1e-6);
        let cross_entropy = likelihood_loss(&old, &new, &advantages, &weights);
        assert!((cross_entropy.pg_loss - 0.9).abs() < 1e-6);
        assert_eq!(cross_entropy.grad_logprobs, [[-0.5, -0.5]]);
    }

    #[test]
    fn the_loss_does_not_depend_on_the_split_into_micro_batches() {
        let old = vec![vec![-1.0, -2.0, -0.1], vec![-0.4]];
        let new = vec![vec![-1.1, -1.5, -0.1], vec![-0.9]];
        let advantages = vec![vec![0.3, -0.2, 1.0], vec![-0.7]];
        let weights = token_mean(&[vec![true; 3], vec![true]]);
        let whole = policy_loss(&old, &new, &advantages, &weights, CLIP);
        let part = |b: usize| {
            let one = |rows: &[Vec<f32>]| vec![rows[b].clone()];
            policy_loss(&one(&old), &one(&new), &one(&advantages), &one(&weights), CLIP)
        };
        let (first, second) = (part(0), part(1));
        assert!((whole.pg_loss - first.pg_loss - second.pg_loss).abs() < 1e-6);
        assert_eq!(whole.grad_logprobs, [first.grad_logprobs, second.grad_logprobs].concat());
    }

    #[test]
    fn without_clipping_every_value_has_its_gradient() {
        let unbounded = ValueLossSettings { kind: ValueLossKind::Squared, clip_range_value: None };
        let loss = value_loss(&[vec![0.0]], &[vec![5.0]], &[vec![1.0]], &[vec![1.0]], unbounded);
        assert_eq!((loss.vf_loss, loss.n_clipped, loss.grad_values[0][0]), (8.0, 0, 4.0));
        let bounded = ValueLossSettings { clip_range_value: Some(0.2), ..unbounded };
        let moved_past_the_bound = value_loss(&[vec![0.0]], &[vec![0.5]], &[vec![1.0]], &[vec![1.0]], bounded);
        assert_eq!((moved_past_the_bound.n_clipped, moved_past_the_bound.grad_values[0][0]), (1, 0.0));
    }

    #[test]
    #[should_panic(expected = "the rows of a loss differ")]
    fn more_values_than_weights_panic() {
        let settings = ValueLossSettings { kind: ValueLossKind::Squared, clip_range_value: None };
        value_loss(&[vec![0.0]], &[vec![0.1, 5.0]], &[vec![0.2]], &[vec![1.0]], settings);
    }

    #[test]
    fn masked_positions_do_not_leak_into_the_value_loss() {
        let settings = ValueLossSettings { kind: ValueLossKind::Huber, clip_range_value: Some(0.2) };
        let row = |x: f32| vec![vec![x, f32::NAN]];
        let loss = value_loss(&row(0.0), &row(0.1), &row(0.2), &[vec![1.0, 0.0]], settings);
        assert!(loss.vf_loss.is_finite());
        assert_eq!(loss.grad_values[0][1], 0.0);
    }

    #[test]
    fn tokens_sampled_from_the_policy_have_weight_1() {
        let (logprobs, mask) = (vec![vec![-1.0, -0.3, f32::NAN]], vec![vec![true, true, false]]);
        for level in [ImportanceLevel::Token, ImportanceLevel::Sequence] {
            let weights = importance_weights(&logprobs, &logprobs, &mask, 2.0, level);
            assert_eq!(weights, [[1.0, 1.0, 0.0]]);
            assert_eq!(effective_sample_share(&weights, &mask), 1.0);
        }
    }

    /// A filter keeps two of three tokens and renormalises. The mean of the weights under the filtered distribution is the probability of
    /// the kept tokens.
    #[test]
    fn the_weights_undo_the_renormalisation_of_a_filter() {
        let (p, kept) = ([0.5f32, 0.3, 0.2], 0.8f32);
        let behaviour = [p[0] / kept, p[1] / kept];
        let rows = |values: &[f32]| vec![values.iter().map(|x| x.ln()).collect::<Vec<f32>>()];
        let mask = vec![vec![true, true]];
        let weights = importance_weights(&rows(&p[..2]), &rows(&behaviour), &mask, 2.0, ImportanceLevel::Token);
        let mean: f32 = weights[0].iter().zip(behaviour).map(|(weight, q)| weight * q).sum();
        assert!((mean - kept).abs() < 1e-6, "{mean}");
    }

    /// A policy over two tokens: expectations in closed form.
    #[test]
    fn only_k2_has_the_gradient_of_kl() {
        let (z, reference) = (1.5f64, [0.3f64.ln(), 0.7f64.ln()]);
        let p = |z: f64| [1.0 / (1.0 + (-z).exp()), 1.0 / (1.0 + z.exp())];
        let divergence = |z: f64| -> f64 { p(z).iter().zip(reference).map(|(p, q)| p * (p.ln() - q)).sum() };
        let slope = (divergence(z + 1e-5) - divergence(z - 1e-5)) / 2e-5;
        let mean_gradient = |estimator| -> f64 {
            // d log p / dz of the two tokens is 1 - p and p - 1.
            let by_z = [1.0 - p(z)[0], -p(z)[0]];
            let token = |i: usize| {
                let gradient = kl_gradient(estimator, p(z)[i].ln() as f32, reference[i] as f32);
                p(z)[i] * f64::from(gradient) * by_z[i]
            };
            token(0) + token(1)
        };
        assert!((mean_gradient(KlEstimator::K2) - slope).abs() < 1e-5);
        assert!(mean_gradient(KlEstimator::K1).abs() < 1e-6);
        assert!((mean_gradient(KlEstimator::K3) - slope).abs() > 1e-3);
    }

    #[test]
    #[should_panic(expected = "the rows of a loss differ")]
    fn a_reference_of_another_batch_panics() {
        kl_loss(KlEstimator::K3, &[vec![-1.0]], &[vec![-1.2], vec![-1.0]], &[vec![1.0]]);
    }

    #[test]
    fn a_fixed_coefficient_stays() {
        let mut controller = KlController::new(0.05, 0.0, 100);
        controller.update(50.0, 64);
        assert_eq!(controller.kl_coef(), 0.05);
    }

    /// Regression: with a horizon below a fifth of a batch, the coefficient became negative, and the penalty a reward for KL.
    #[test]
    fn an_adapted_coefficient_stays_positive_however_short_its_horizon() {
        let mut controller = KlController::new(0.05, 6.0, 1);
        controller.update(0.0, 64);
        assert!((controller.kl_coef() - 0.005).abs() < 1e-12, "{controller:?}");
        controller.update(60.0, 64);
        assert!(controller.kl_coef() > 0.05, "{controller:?}");
    }

    #[test]
    fn masked_positions_do_not_leak_into_the_kl_loss() {
        let loss = kl_loss(KlEstimator::K3, &[vec![-1.0, f32::NAN]], &[vec![-1.2, f32::INFINITY]], &[vec![1.0, 0.0]]);
        assert!(loss.kl_loss.is_finite());
        assert_eq!(loss.grad_logprobs[0][1], 0.0);
    }
}
