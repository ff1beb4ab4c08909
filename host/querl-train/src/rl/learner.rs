//! The update: from a scored batch to a better policy and critic.
//!
//! From top to bottom: [`Learner::learn`] takes a batch; [`Learner::update`] runs epochs over shuffled mini-batches, each one
//! optimizer step of the policy and one of the critic; [`MicroBatch`] is one forward and backward pass.

use super::RlTask;
use super::advantages::{RunningMoments, aggregation, has_critic};
use super::critic::Critic;
use super::experience::{Experience, RewardShaping, ValueExperience};
use super::losses::{
    Aggregation, KlController, KlLoss, PolicyClip, PolicyLoss, Rows, StepSize, ValueLossSettings, cispo_loss,
    gspo_loss, kl_loss, likelihood_loss, policy_loss, sequence_policy_loss, value_loss,
};
use super::metrics::{UpdateMetrics, add_metrics, batch_metrics, policy_metrics, value_metrics};
use super::rollout::{Rollout, RolloutBatch};
use super::rollout_check::{check_mismatch, check_rollout};
use super::step_record;
use crate::batching::accumulation_micro_batches;
use crate::data_parallel::{all_reduce_metrics, rank_share};
use crate::policy::{Example, Policy, TrainingPass, recompute_mode, rows_of};
use crate::{AdamW, AdamWSettings, Gradients, Metrics, State, TrainError, lr_factor};
use candle_core::{Tensor, Var};
use querl_core::config::{AdvantageForm, KlPlacement, PolicyLossKind, RlAlgorithm, RlConfig, RlRecord};
use querl_model::{LoraAdapter, Mesh, Recompute, backward};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// State of learning other than the policy's weights.
pub(super) struct Learner {
    /// `None` for algorithms that need no values.
    pub(super) critic: Option<Critic>,
    optimizer: AdamW,
    pub(super) shaping: RewardShaping,
}

impl Learner {
    pub(super) fn new(task: &RlTask<'_>) -> Result<Self, TrainError> {
        let RlConfig { kl_coef, kl_target, kl_horizon, weight_decay, .. } = *task.config;
        let kl = KlController::new(kl_coef, kl_target, kl_horizon);
        Ok(Self {
            critic: has_critic(task.config.algorithm).then(|| Critic::new(task)).transpose()?,
            optimizer: AdamW::new(AdamWSettings { weight_decay, ..Default::default() }),
            shaping: RewardShaping { kl, score_moments: RunningMoments::default() },
        })
    }

    /// Advantages and epochs of updates on one batch. Returns metrics, with timings.
    ///
    /// A batch that the policy of the step before generated (`rl.off_by_one`) is not compared with the training pass here: the
    /// train loop does, with that policy. One of a server is compared as a whole, since all of its log-probabilities are computed again.
    pub(super) fn learn(&mut self, task: &RlTask<'_>, batch: &RolloutBatch, step: u64) -> Result<Metrics, TrainError> {
        let mut metrics = Metrics::new();
        if !task.config.off_by_one && task.rollouts.is_none() {
            let started = Instant::now();
            metrics.extend(check_rollout(task, task.policy, &batch.rollouts, step)?);
            metrics.insert("timing_s/rollout_check".into(), started.elapsed().as_secs_f64());
        }
        let experience = self.experience(task, &batch.rollouts, step)?;
        if let Some(server) = task.rollouts.filter(|_| !task.config.off_by_one) {
            let (logprobs, rollouts) = (&experience.old_logprobs, &batch.rollouts);
            metrics.extend(check_mismatch(logprobs, rollouts, server.max_mismatch_kl, step)?);
        }
        metrics.extend(batch_metrics(&experience, task.config));
        let updates = self.update(task, &experience, step)?;
        if task.config.record == RlRecord::Full {
            step_record::write(task, step, &experience, &self.shaping, &updates)?;
        }
        metrics.extend(updates.means());
        Ok(metrics)
    }

    pub(super) fn experience<'a>(
        &mut self,
        task: &RlTask<'_>,
        rollouts: &'a [Rollout],
        step: u64,
    ) -> Result<Experience<'a>, TrainError> {
        Experience::compute(task, self.critic.as_mut(), &mut self.shaping, rollouts, step)
    }

    /// Several epochs of updates of policy and critic on one batch.
    pub(super) fn update(
        &mut self,
        task: &RlTask<'_>,
        experience: &Experience<'_>,
        step: u64,
    ) -> Result<UpdateMetrics, TrainError> {
        let config = task.config;
        let updates_policy = step > config.critic_warmup_steps as u64 || self.critic.is_none();
        let learning_rate = if updates_policy { learning_rate(config, step) } else { 0.0 };
        let mut rng = ChaCha8Rng::seed_from_u64(task.seed ^ step.rotate_left(32));
        // RAFT learns from the best responses alone.
        let is_learned = |row: &usize| {
            config.algorithm != RlAlgorithm::Raft || experience.advantages[*row].first().is_some_and(|best| *best > 0.0)
        };
        let mut order: Vec<usize> = (0..experience.rollouts.len()).filter(is_learned).collect();
        let critic_lr = self.critic.is_some().then_some(config.critic_learning_rate);
        let mut metrics = UpdateMetrics { actor_lr: learning_rate, critic_lr, ..UpdateMetrics::default() };
        'epochs: for _ in 0..config.ppo_epochs {
            order.shuffle(&mut rng);
            for rows in order.chunks(config.mini_batch_size) {
                if metrics.first_mini_batch.is_empty() {
                    metrics.first_mini_batch = rows.to_vec();
                }
                let mini_batch = MiniBatch::new(task, experience, rows, aggregation(config));
                let started = Instant::now();
                if updates_policy {
                    let updated = self.policy_step(&mini_batch, learning_rate, step, &mut metrics)?;
                    metrics.actor_s += started.elapsed().as_secs_f64();
                    if updated == PolicyStep::KlEarlyStop {
                        break 'epochs;
                    }
                }
                #[cfg(test)]
                crate::testing::out_of_memory_at(step, "pass")?;
                let started = Instant::now();
                self.critic_step(&mini_batch, step, &mut metrics)?;
                metrics.critic_s += started.elapsed().as_secs_f64();
            }
        }
        Ok(metrics)
    }

    /// One optimizer step of the policy, unless its KL from the rollout policy exceeds `target_kl` already.
    fn policy_step(
        &mut self,
        mini_batch: &MiniBatch<'_>,
        learning_rate: f64,
        step: u64,
        updates: &mut UpdateMetrics,
    ) -> Result<PolicyStep, TrainError> {
        let task = mini_batch.task;
        let mut gradients = Gradients::default();
        let mut metrics = Metrics::new();
        for micro_batch in mini_batch.micro_batches() {
            task.check_stop(step)?;
            micro_batch.policy_backward(&mut gradients, &mut metrics)?;
        }
        let mut metrics = all_reduce_metrics(&task.mesh.data, metrics)?;
        let kl = metrics.get("actor/ppo_kl_k3").copied().unwrap_or_default();
        if task.config.target_kl > 0.0 && kl > task.config.target_kl {
            return Ok(PolicyStep::KlEarlyStop);
        }
        gradients.sum_over(task.mesh, task.policy.vars())?;
        let grad_norm = gradients.clip(task.config.max_grad_norm)?;
        if !grad_norm.is_finite() {
            return Err(TrainError::NotFinite { stage: "rl", step, what: "the policy's gradient" });
        }
        self.optimizer.step(task.policy.vars(), &gradients, learning_rate)?;
        metrics.insert("actor/grad_norm".into(), grad_norm);
        updates.policy.add_step(metrics);
        Ok(PolicyStep::Taken)
    }

    /// One optimizer step of the critic, where there is one.
    fn critic_step(
        &mut self,
        mini_batch: &MiniBatch<'_>,
        step: u64,
        updates: &mut UpdateMetrics,
    ) -> Result<(), TrainError> {
        let (Some(critic), Some(experience)) = (&mut self.critic, &mini_batch.experience.critic) else { return Ok(()) };
        let (config, mesh) = (mini_batch.task.config, mini_batch.task.mesh);
        let (mut gradients, mut metrics) = (Gradients::default(), Metrics::new());
        for micro_batch in mini_batch.micro_batches() {
            mini_batch.task.check_stop(step)?;
            micro_batch.value_backward(critic, experience, &mut gradients, &mut metrics)?;
        }
        let mut metrics = all_reduce_metrics(&mesh.data, metrics)?;
        let norm = critic.step(gradients, mesh, config.critic_learning_rate, config.max_grad_norm)?;
        if !norm.is_finite() {
            return Err(TrainError::NotFinite { stage: "rl", step, what: "the critic's gradient" });
        }
        metrics.insert("critic/grad_norm".into(), norm);
        updates.critic.add_step(metrics);
        Ok(())
    }

    /// Variables of policy and critic, prefixed with `policy.` and `critic.`.
    pub(super) fn trained_vars(&self, policy: &LoraAdapter) -> BTreeMap<String, Var> {
        let prefixed = |prefix: &'static str, vars: &BTreeMap<String, Var>| {
            vars.iter().map(|(name, var)| (format!("{prefix}.{name}"), var.clone())).collect::<Vec<_>>()
        };
        let critic = self.critic.as_ref().map(|critic| prefixed("critic", critic.vars()));
        prefixed("policy", policy.vars()).into_iter().chain(critic.into_iter().flatten()).collect()
    }

    /// Saves the policy's optimizer, the critic, the KL coefficient and the moments of the scores, without the policy's weights.
    pub(super) fn save(&self, state: &mut State) -> Result<(), TrainError> {
        self.optimizer.save("policy_optimizer", state)?;
        state.put("kl_controller", &self.shaping.kl)?;
        state.put("score_moments", &self.shaping.score_moments)?;
        self.critic.as_ref().map_or(Ok(()), |critic| critic.save_state(state))
    }

    pub(super) fn restore(&mut self, task: &RlTask<'_>, state: &State) -> Result<(), TrainError> {
        self.optimizer.restore("policy_optimizer", state, task.policy.vars())?;
        self.shaping.kl = state.get("kl_controller")?;
        self.shaping.score_moments = state.get("score_moments")?;
        self.critic.as_mut().map_or(Ok(()), |critic| critic.restore_state(state))
    }

    /// Writes the critic, if any, to a folder of its own.
    pub(super) fn save_critic(&self, mesh: &Mesh, directory: &Path, base: &Path) -> Result<(), TrainError> {
        self.critic.as_ref().map_or(Ok(()), |critic| critic.save(mesh, directory, base))
    }
}

/// Result of a mini-batch's policy pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PolicyStep {
    Taken,
    /// KL early stopping: the remaining epochs of this batch are skipped.
    KlEarlyStop,
}

/// The policy's rate in a step that counts from 1. Neither the first nor the last rate is 0, since a step of rollouts costs
/// more than one of fine-tuning.
fn learning_rate(config: &RlConfig, step: u64) -> f64 {
    let n_steps = config.max_steps as u64;
    let n_warmup = (config.warmup_ratio * n_steps as f64).ceil() as u64;
    let factor = match step <= n_warmup {
        true => step as f64 / n_warmup as f64,
        false => lr_factor(config.lr_scheduler, step - 1, n_warmup, n_steps),
    };
    config.learning_rate * factor
}

/// The responses of one optimizer step.
struct MiniBatch<'a> {
    task: &'a RlTask<'a>,
    experience: &'a Experience<'a>,
    rows: &'a [usize],
    aggregation: Aggregation,
    size: StepSize,
    /// Positions that the critic learns at, in the whole mini-batch.
    n_values: usize,
    /// Where checkpointed layers put their gradients, one pass after another.
    recompute: Recompute,
}

impl<'a> MiniBatch<'a> {
    fn new(task: &'a RlTask<'a>, experience: &'a Experience<'a>, rows: &'a [usize], aggregation: Aggregation) -> Self {
        let n_tokens = rows.iter().map(|&i| experience.old_logprobs[i].len()).sum();
        let n_kept =
            |critic: &ValueExperience| rows.iter().flat_map(|&i| &critic.mask[i]).filter(|keep| **keep).count();
        Self {
            task,
            experience,
            rows,
            aggregation,
            size: StepSize { n_tokens, n_responses: rows.len() },
            n_values: experience.critic.as_ref().map_or(0, n_kept),
            recompute: recompute_mode(task.gradient_checkpointing),
        }
    }

    /// This rank's responses cut into micro-batches, whose losses add up to the step's over all ranks.
    fn micro_batches(&self) -> impl Iterator<Item = MicroBatch<'_>> {
        let example = |&i: &usize| &self.experience.rollouts[i].example;
        let all: Vec<&Example> = self.rows.iter().map(example).collect();
        let rows: Vec<usize> = rank_share(&all, &self.task.mesh.data).into_iter().map(|i| self.rows[i]).collect();
        let examples: Vec<&Example> = rows.iter().map(example).collect();
        let n_micro_batches = self.task.config.gradient_accumulation_steps;
        let cut = accumulation_micro_batches(&examples, n_micro_batches, self.task.tokens_per_pass);
        cut.into_iter().map(move |indices| MicroBatch {
            mini_batch: self,
            rows: indices.iter().map(|&i| rows[i]).collect(),
            examples: indices.iter().map(|&i| examples[i]).collect(),
        })
    }
}

/// The responses of one forward and backward pass.
struct MicroBatch<'a> {
    mini_batch: &'a MiniBatch<'a>,
    rows: Vec<usize>,
    examples: Vec<&'a Example>,
}

impl MicroBatch<'_> {
    /// Forward, loss and backward of the policy. The losses give the derivative with respect to each log-probability and
    /// entropy; the decoder's graph propagates it to the weights.
    fn policy_backward(&self, gradients: &mut Gradients, metrics: &mut Metrics) -> Result<(), TrainError> {
        let (task, config) = (self.mini_batch.task, self.mini_batch.task.config);
        let policy = Policy { decoder: task.decoder, adapter: Some(task.policy) };
        let training = TrainingPass { dropout: None, recompute: Some(&self.mini_batch.recompute) };
        let output = policy.response_logprobs(&self.examples, config.temperature, training)?;
        let both: Vec<Vec<f32>> = output.logprobs.to_vec2()?; // (N, 2)
        let column =
            |i: usize| -> Rows { rows_of(&both.iter().map(|row| row[i]).collect::<Vec<f32>>(), &self.examples) };
        let (logprobs, entropies) = (column(0), column(1));
        let weights = self.mini_batch.aggregation.weights(&self.mask(), self.mini_batch.size);
        let policy_loss = self.policy_loss(&logprobs, &weights);
        let kl_loss = self.kl_loss(&logprobs, &weights);
        let kl_term = kl_loss.as_ref().map(|kl| (kl, self.mini_batch.experience.kl_coef));
        let grad = loss_gradients(config, &policy_loss, kl_term, &weights);
        let grad = Tensor::from_vec(grad, output.logprobs.shape(), output.logprobs.device())?;
        let loss = (output.logprobs * grad)?.sum_all()?;
        gradients.add(&backward(&loss, training.recompute)?, task.policy.vars())?;
        let size = self.mini_batch.size;
        add_metrics(metrics, policy_metrics(config.advantage_form, size, &policy_loss, kl_loss.as_ref(), &entropies));
        Ok(())
    }

    /// The policy loss of `rl.policy_loss` over tokens, or the clipped one over responses, with importance weights; in RAFT the
    /// cross-entropy, whose targets are the responses as they are.
    fn policy_loss(&self, logprobs: &Rows, weights: &Rows) -> PolicyLoss {
        let (config, experience) = (self.mini_batch.task.config, self.mini_batch.experience);
        let (old, advantages) = (self.pick(&experience.old_logprobs), self.pick(&experience.advantages));
        let importance = experience.importance_weights.as_ref().map(|rows| self.pick(rows));
        let dual_clip = (config.dual_clip > 0.0).then_some(config.dual_clip as f32);
        let clip_range_high = config.clip_range_high.unwrap_or(config.clip_range) as f32;
        let clip = PolicyClip { clip_range: config.clip_range as f32, clip_range_high, dual_clip };
        if config.algorithm == RlAlgorithm::Raft {
            return likelihood_loss(&old, logprobs, &advantages, weights);
        }
        match config.advantage_form {
            AdvantageForm::Token => {
                let weights = importance.map_or_else(|| weights.clone(), |importance| product(weights, &importance));
                match config.policy_loss {
                    PolicyLossKind::Ppo => policy_loss(&old, logprobs, &advantages, &weights, clip),
                    PolicyLossKind::Gspo => gspo_loss(&old, logprobs, &advantages, &self.mask(), &weights, clip),
                    PolicyLossKind::Cispo => cispo_loss(&old, logprobs, &advantages, &weights, clip),
                }
            }
            AdvantageForm::Sequence => {
                let first = |rows: &Rows| -> Vec<f32> { rows.iter().map(|row| row[0]).collect() };
                let importance = importance.map_or_else(|| vec![1.0; self.rows.len()], |rows| first(&rows));
                let share = 1.0 / self.mini_batch.size.n_responses as f32;
                let weights: Vec<f32> = importance.iter().map(|weight| weight * share).collect();
                sequence_policy_loss(&old, logprobs, &first(&advantages), &self.mask(), &weights, clip)
            }
        }
    }

    /// KL from the reference, where it is a term of the loss.
    fn kl_loss(&self, logprobs: &Rows, weights: &Rows) -> Option<KlLoss> {
        let config = self.mini_batch.task.config;
        let reference = || self.pick(&self.mini_batch.experience.ref_logprobs);
        (config.kl_placement == KlPlacement::Loss)
            .then(|| kl_loss(config.kl_estimator, logprobs, &reference(), weights))
    }

    fn value_backward(
        &self,
        critic: &Critic,
        experience: &ValueExperience,
        gradients: &mut Gradients,
        metrics: &mut Metrics,
    ) -> Result<(), TrainError> {
        let MiniBatch { task, size, n_values, recompute, .. } = self.mini_batch;
        let config = task.config;
        let inputs = experience.inputs.as_ref().map(|inputs| Tensor::cat(&self.pick(inputs), 0)).transpose()?;
        let values = critic.values(task.decoder, &self.examples, inputs.as_ref(), Some(recompute))?; // (N)
        let size = StepSize { n_tokens: *n_values, n_responses: size.n_responses };
        let loss = value_loss(
            &self.pick(&experience.values),
            &rows_of(&values.to_vec1::<f32>()?, &self.examples),
            &self.pick(&experience.returns),
            &Aggregation::TokenMean.weights(&self.pick(&experience.mask), size),
            ValueLossSettings {
                kind: config.value_loss,
                clip_range_value: (config.clip_range_value > 0.0).then_some(config.clip_range_value as f32),
            },
        );
        let grad: Vec<f32> = loss.grad_values.iter().flatten().map(|g| g * config.vf_coef as f32).collect();
        let grad = Tensor::from_vec(grad, values.shape(), values.device())?;
        gradients.add(&backward(&(values * grad)?.sum_all()?, Some(recompute))?, critic.vars())?;
        add_metrics(metrics, value_metrics(*n_values, &loss));
        Ok(())
    }

    fn pick<T: Clone>(&self, of_batch: &[T]) -> Vec<T> {
        self.rows.iter().map(|&i| of_batch[i].clone()).collect()
    }

    fn mask(&self) -> Vec<Vec<bool>> {
        self.examples.iter().map(|example| vec![true; example.response.len()]).collect()
    }
}

fn product(a: &Rows, b: &Rows) -> Rows {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a * b).collect()).collect()
}

/// The derivative of the whole loss (policy, KL, entropy bonus) with respect to each token's log-probability and entropy:
/// `(N, 2)`, row-major.
fn loss_gradients(config: &RlConfig, policy: &PolicyLoss, kl: Option<(&KlLoss, f64)>, weights: &Rows) -> Vec<f32> {
    let entropy = |weight: f32| -(config.ent_coef as f32) * weight;
    let tokens = policy.grad_logprobs.iter().flatten().zip(weights.iter().flatten());
    match kl {
        None => tokens.flat_map(|(gradient, weight)| [*gradient, entropy(*weight)]).collect(),
        Some((kl, kl_coef)) => tokens
            .zip(kl.grad_logprobs.iter().flatten())
            .flat_map(|((gradient, weight), kl)| [gradient + kl_coef as f32 * kl, entropy(*weight)])
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::config::LrScheduler;

    #[test]
    fn every_step_has_a_learning_rate_and_the_peak_comes_after_the_warm_up() {
        for lr_scheduler in [LrScheduler::Cosine, LrScheduler::Linear, LrScheduler::Constant] {
            let config =
                RlConfig { lr_scheduler, learning_rate: 2.0, max_steps: 10, warmup_ratio: 0.2, ..Default::default() };
            let rates: Vec<f64> = (1..=10).map(|step| learning_rate(&config, step)).collect();
            assert_eq!((rates[0], rates[1], rates[2]), (1.0, 2.0, 2.0), "{lr_scheduler:?}");
            assert!(rates.iter().all(|rate| *rate > 0.0), "{rates:?}");
            assert!(rates[2..].is_sorted_by(|a, b| a >= b), "{rates:?}");
            assert_eq!(rates[9] == 2.0, lr_scheduler == LrScheduler::Constant);
            let at_once = RlConfig { warmup_ratio: 0.0, ..config };
            assert_eq!(learning_rate(&at_once, 1), 2.0);
        }
    }
}
