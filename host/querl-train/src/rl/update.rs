//! Several epochs of clipped updates of policy and critic on one batch.

use super::RlTask;
use super::critic::Critic;
use super::estimate::{Experience, all_true};
use crate::maths::{PolicyLoss, Rows, policy_loss, sequence_policy_loss, value_loss};
use crate::policy::{Example, Policy, rows_of};
use crate::{AdamW, Gradients, Metrics, TrainError, constant_with_warmup};
use candle_core::{Device, Tensor};
use querl_core::config::AdvantageForm;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

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
            let grad_norm = policy.clip(config.max_grad_norm)?;
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
