//! From scored rollouts to a better policy: estimates once per batch, then several epochs of clipped updates.

use super::RlTask;
use super::critic::Critic;
use super::rollout::{Batch, Rollout, summary};
use crate::maths::{
    PolicyLoss, Rows, gae, kl_k1, kl_k3, masked_mean, masked_whiten, policy_loss, sequence_policy_loss, token_rewards,
    value_loss,
};
use crate::policy::{Example, Policy, rows_of};
use crate::{AdamW, Gradients, Metrics, TrainError, constant_with_warmup};
use candle_core::{Device, Tensor};
use querl_core::config::AdvantageForm;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// A batch with everything that stays fixed during its updates.
pub(super) struct Experience<'a> {
    rollouts: &'a [Rollout],
    old_logprobs: Rows,
    ref_logprobs: Rows,
    /// `(T, H)` per response: hidden states of the reference.
    ref_hidden: Vec<Tensor>,
    values: Rows,
    token_rewards: Rows,
    advantages: Rows,
    returns: Rows,
    /// Which positions the critic learns at.
    value_mask: Vec<Vec<bool>>,
}

fn all_true(rows: &[Vec<f32>]) -> Vec<Vec<bool>> {
    rows.iter().map(|row| vec![true; row.len()]).collect()
}

/// Log-probabilities of policy and reference, values and advantages of a batch, without gradients.
pub(super) fn estimate<'a>(task: &RlTask<'_>, critic: &Critic, batch: &'a Batch) -> Result<Experience<'a>, TrainError> {
    let config = task.config;
    let policy_view = task.policy.without_gradient();
    let reference_view = task.reference.map(querl_model::LoraAdapter::without_gradient);
    let policy = Policy { decoder: task.decoder, adapter: Some(&policy_view) };
    let reference = Policy { decoder: task.decoder, adapter: reference_view.as_ref() };
    let (mut old_logprobs, mut ref_logprobs, mut values) = (Rows::new(), Rows::new(), Rows::new());
    let mut ref_hidden = Vec::new();
    for rollouts in batch.rollouts.chunks(ESTIMATE_BATCH) {
        let examples: Vec<&Example> = rollouts.iter().map(|rollout| &rollout.example).collect();
        let column = |logprobs: &Tensor| -> Result<Vec<f32>, TrainError> {
            Ok(logprobs.narrow(1, 0, 1)?.flatten_all()?.to_vec1()?)
        };
        let of_policy = policy.response_pass(&examples, config.temperature)?;
        old_logprobs.extend(rows_of(&column(&of_policy.logprobs)?, &examples));
        let of_reference = reference.response_pass(&examples, config.temperature)?;
        ref_logprobs.extend(rows_of(&column(&of_reference.logprobs)?, &examples));
        let hidden = of_reference.hidden.detach();
        values.extend(rows_of(&critic.values(task.decoder, &examples, &hidden)?.detach().to_vec1()?, &examples));
        ref_hidden.extend(split_rows(&hidden, &examples)?);
    }
    let penalty = |rollout: &Rollout| if rollout.truncated { config.missing_eos_penalty as f32 } else { 0.0 };
    let scores: Vec<f32> = batch.rollouts.iter().map(|rollout| rollout.score - penalty(rollout)).collect();
    let token_rewards = token_rewards(&scores, &old_logprobs, &ref_logprobs, config.kl_coef as f32);
    let (advantages, returns, value_mask) = match config.advantage_form {
        AdvantageForm::Token => token_advantages(task, &token_rewards, &values),
        AdvantageForm::Sequence => sequence_advantages(&token_rewards, &values),
    };
    let rollouts = batch.rollouts.as_slice();
    Ok(Experience {
        rollouts,
        old_logprobs,
        ref_logprobs,
        ref_hidden,
        values,
        token_rewards,
        advantages,
        returns,
        value_mask,
    })
}

/// Responses of one pass without gradient.
const ESTIMATE_BATCH: usize = 64;

fn split_rows(hidden: &Tensor, examples: &[&Example]) -> Result<Vec<Tensor>, TrainError> {
    let mut start = 0;
    let part = |example: &&Example| {
        let part = hidden.narrow(0, start, example.response.len());
        start += example.response.len();
        Ok(part?)
    };
    examples.iter().map(part).collect()
}

/// GAE per token; advantages whitened over the batch after the returns are formed.
fn token_advantages(task: &RlTask<'_>, rewards: &Rows, values: &Rows) -> (Rows, Rows, Vec<Vec<bool>>) {
    let mask = all_true(values);
    let estimates = gae(rewards, values, &mask, task.config.gamma as f32, task.config.gae_lambda as f32);
    (masked_whiten(&estimates.advantages, &mask), estimates.returns, mask)
}

/// The source plan's form: `A = R - V(s)` per response, whitened over responses; the critic learns at the first token.
fn sequence_advantages(rewards: &Rows, values: &Rows) -> (Rows, Rows, Vec<Vec<bool>>) {
    let totals: Vec<f32> = rewards.iter().map(|row| row.iter().sum()).collect();
    let raw: Rows = totals.iter().zip(values).map(|(total, values)| vec![total - values[0]]).collect();
    let whitened = masked_whiten(&raw, &all_true(&raw));
    let spread = |(advantage, values): (&Vec<f32>, &Vec<f32>)| vec![advantage[0]; values.len()];
    let advantages = whitened.iter().zip(values).map(spread).collect();
    let first_only = |values: &Vec<f32>| (0..values.len()).map(|t| t == 0).collect();
    let returns = totals.iter().zip(values).map(|(total, values)| vec![*total; values.len()]).collect();
    (advantages, returns, values.iter().map(first_only).collect())
}

/// Sums over the optimizer steps of a batch, to be averaged.
#[derive(Default)]
struct Totals {
    n_steps: f64,
    metrics: Metrics,
}

impl Totals {
    fn add(&mut self, name: &str, value: f64) {
        *self.metrics.entry(name.to_owned()).or_default() += value;
    }

    fn means(self) -> Metrics {
        self.metrics.into_iter().map(|(name, sum)| (name, sum / self.n_steps)).collect()
    }
}

/// Several epochs of updates of policy and critic on one batch.
pub(super) fn update(
    task: &RlTask<'_>,
    critic: &mut Critic,
    optimizer: &mut AdamW,
    experience: &Experience<'_>,
    step: u64,
) -> Result<Metrics, TrainError> {
    let config = task.config;
    let n_warmup = (config.warmup_ratio * config.max_steps as f64).ceil() as u64;
    let learning_rate = config.learning_rate * constant_with_warmup(step, n_warmup);
    let policy_learns = step > config.critic_warmup_steps as u64;
    let mut rng = ChaCha8Rng::seed_from_u64(task.seed ^ step.rotate_left(32));
    let mut order: Vec<usize> = (0..experience.rollouts.len()).collect();
    let mut totals = Totals::default();
    for _ in 0..config.ppo_epochs {
        order.shuffle(&mut rng);
        for mini_batch in order.chunks(config.mini_batch_size) {
            let mut step_gradients = StepGradients::default();
            for micro_batch in mini_batch.chunks(mini_batch.len().div_ceil(config.gradient_accumulation_steps)) {
                let micro_batch = MicroBatch::new(task, experience, mini_batch, micro_batch);
                micro_batch.policy_step(&mut step_gradients.policy, &mut totals)?;
                micro_batch.critic_step(critic, &mut step_gradients.critic, &mut totals)?;
            }
            let StepGradients { mut policy, critic: critic_gradients } = step_gradients;
            let grad_norm = policy.clip(config.max_grad_norm);
            if !grad_norm.is_finite() {
                return Err(TrainError::NotFinite { stage: "rl", step, what: "the policy's gradient" });
            }
            if policy_learns {
                optimizer.step(task.policy.vars(), &policy, learning_rate)?;
            }
            let value_norm = critic.step(critic_gradients, config.critic_learning_rate, config.max_grad_norm)?;
            if !value_norm.is_finite() {
                return Err(TrainError::NotFinite { stage: "rl", step, what: "the critic's gradient" });
            }
            totals.n_steps += 1.0;
            totals.add("actor/grad_norm", grad_norm);
            totals.add("critic/grad_norm", value_norm);
        }
    }
    let mut metrics = totals.means();
    metrics.insert("actor/lr".into(), if policy_learns { learning_rate } else { 0.0 });
    metrics.insert("critic/lr".into(), config.critic_learning_rate);
    Ok(metrics)
}

/// Gradients of one optimizer step.
#[derive(Default)]
struct StepGradients {
    policy: Gradients,
    critic: Gradients,
}

/// Some responses of an optimizer step, whose losses are weighted so that a step's sum does not depend on the split.
struct MicroBatch<'a> {
    task: &'a RlTask<'a>,
    experience: &'a Experience<'a>,
    rows: &'a [usize],
    examples: Vec<&'a Example>,
    /// Response tokens, responses and value targets of the whole step.
    n_tokens: usize,
    n_responses: usize,
    n_values: usize,
}

impl<'a> MicroBatch<'a> {
    fn new(task: &'a RlTask<'a>, experience: &'a Experience<'a>, step: &[usize], rows: &'a [usize]) -> Self {
        let n_kept = |mask: &[bool]| mask.iter().filter(|keep| **keep).count();
        Self {
            task,
            experience,
            rows,
            examples: rows.iter().map(|&i| &experience.rollouts[i].example).collect(),
            n_tokens: step.iter().map(|&i| experience.old_logprobs[i].len()).sum(),
            n_responses: step.len(),
            n_values: step.iter().map(|&i| n_kept(&experience.value_mask[i])).sum(),
        }
    }

    fn pick<T: Clone>(&self, of_batch: &[T]) -> Vec<T> {
        self.rows.iter().map(|&i| of_batch[i].clone()).collect()
    }

    /// The policy's loss: its derivative by each log-probability and entropy is carried on through the decoder's graph.
    fn policy_step(&self, gradients: &mut Gradients, totals: &mut Totals) -> Result<(), TrainError> {
        let policy = Policy { decoder: self.task.decoder, adapter: Some(self.task.policy) };
        let pass = policy.response_pass(&self.examples, self.task.config.temperature)?;
        let both: Vec<Vec<f32>> = pass.logprobs.to_vec2()?; // (N, 2)
        let logprobs: Vec<f32> = both.iter().map(|row| row[0]).collect();
        let loss = self.policy_loss(&rows_of(&logprobs, &self.examples));
        let entropy_gradient = (-self.task.config.ent_coef / self.n_tokens as f64) as f32;
        let outer: Vec<f32> = loss.grad_logprobs.iter().flatten().flat_map(|g| [*g, entropy_gradient]).collect();
        let outer = Tensor::from_vec(outer, pass.logprobs.shape(), &Device::Cpu)?;
        gradients.add(&(pass.logprobs * outer)?.sum_all()?.backward()?, self.task.policy.vars())?;
        let entropy: f64 = both.iter().map(|row| f64::from(row[1])).sum();
        totals.add("actor/pg_loss", f64::from(loss.pg_loss));
        totals.add("actor/pg_clipfrac", f64::from(loss.pg_clipfrac));
        totals.add("actor/ppo_kl", f64::from(loss.ppo_kl));
        totals.add("actor/entropy", entropy / self.n_tokens as f64);
        Ok(())
    }

    fn policy_loss(&self, logprobs: &Rows) -> PolicyLoss {
        let config = self.task.config;
        let (old_logprobs, advantages) =
            (self.pick(&self.experience.old_logprobs), self.pick(&self.experience.advantages));
        let mask = all_true(logprobs);
        let clip_range = config.clip_range as f32;
        let dual_clip = (config.dual_clip > 0.0).then_some(config.dual_clip as f32);
        match config.advantage_form {
            AdvantageForm::Token => {
                policy_loss(&old_logprobs, logprobs, &advantages, &mask, clip_range, dual_clip, self.n_tokens)
            }
            AdvantageForm::Sequence => {
                let per_response: Vec<f32> = advantages.iter().map(|row| row[0]).collect();
                sequence_policy_loss(&old_logprobs, logprobs, &per_response, &mask, clip_range, self.n_responses)
            }
        }
    }

    /// The critic's loss, likewise.
    fn critic_step(&self, critic: &Critic, gradients: &mut Gradients, totals: &mut Totals) -> Result<(), TrainError> {
        let (config, experience) = (self.task.config, self.experience);
        let hidden = Tensor::cat(&self.pick(&experience.ref_hidden), 0)?;
        let values = critic.values(self.task.decoder, &self.examples, &hidden)?; // (N)
        let loss = value_loss(
            &self.pick(&experience.values),
            &rows_of(&values.to_vec1::<f32>()?, &self.examples),
            &self.pick(&experience.returns),
            &self.pick(&experience.value_mask),
            config.clip_range_value as f32,
            self.n_values,
        );
        let outer: Vec<f32> = loss.grad_values.iter().flatten().map(|g| g * config.vf_coef as f32).collect();
        let outer = Tensor::from_vec(outer, values.shape(), &Device::Cpu)?;
        critic.collect(gradients, &(values * outer)?.sum_all()?)?;
        totals.add("critic/vf_loss", f64::from(loss.vf_loss));
        totals.add("critic/vf_clipfrac", f64::from(loss.vf_clipfrac));
        Ok(())
    }
}

impl Experience<'_> {
    /// What the estimates say of the batch before any update.
    pub(super) fn metrics(&self) -> Metrics {
        let mask = all_true(&self.old_logprobs);
        let estimator = |estimate: fn(f32, f32) -> f32| -> f64 {
            let row = |(old, reference): (&Vec<f32>, &Vec<f32>)| {
                old.iter().zip(reference).map(|(old, reference)| estimate(*old, *reference)).collect()
            };
            let rows: Rows = self.old_logprobs.iter().zip(&self.ref_logprobs).map(row).collect();
            f64::from(masked_mean(&rows, &mask))
        };
        let flat = |rows: &Rows| -> Vec<f64> { rows.iter().flatten().map(|x| f64::from(*x)).collect() };
        let mut metrics = Metrics::from([
            ("actor/ref_kl".to_owned(), estimator(kl_k1)),
            ("actor/ref_kl_k3".to_owned(), estimator(kl_k3)),
            ("critic/vf_explained_var".to_owned(), self.explained_variance()),
            ("rollout_probs_diff".to_owned(), self.rollout_difference()),
        ]);
        let rewards: Vec<f64> = self.token_rewards.iter().map(|row| f64::from(row.iter().sum::<f32>())).collect();
        metrics.extend(summary("critic/rewards", &rewards));
        metrics.extend(summary("critic/advantages", &flat(&self.advantages)));
        metrics.extend(summary("critic/returns", &flat(&self.returns)));
        metrics.extend(summary("critic/values", &flat(&self.values)));
        metrics
    }

    /// Mean difference between log-probabilities as sampled and as computed for training.
    fn rollout_difference(&self) -> f64 {
        let pairs = self.rollouts.iter().zip(&self.old_logprobs);
        let differences = pairs.flat_map(|(rollout, old)| rollout.rollout_logprobs.iter().zip(old));
        let (sum, n) = differences.fold((0.0, 0), |(sum, n), (a, b)| (sum + f64::from((a - b).abs()), n + 1));
        sum / f64::from(n.max(1))
    }

    /// `1 - var(returns - values) / var(returns)` over the positions the critic learns at.
    fn explained_variance(&self) -> f64 {
        let kept = |rows: &Rows| -> Vec<f64> {
            let rows = rows.iter().zip(&self.value_mask);
            rows.flat_map(|(row, mask)| row.iter().zip(mask).filter(|(_, keep)| **keep).map(|(x, _)| f64::from(*x)))
                .collect()
        };
        let (returns, values) = (kept(&self.returns), kept(&self.values));
        let errors: Vec<f64> = returns.iter().zip(&values).map(|(target, value)| target - value).collect();
        let spread = variance(&returns);
        if spread > 0.0 { 1.0 - variance(&errors) / spread } else { 0.0 }
    }
}

fn variance(values: &[f64]) -> f64 {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n
}
