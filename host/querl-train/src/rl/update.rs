//! Several epochs of clipped updates of policy and critic on one batch.

use super::RlTask;
use super::algorithm::Algorithm;
use super::critic::Critic;
use super::estimate::{Experience, ValueExperience};
use super::learner::Learner;
use super::passes::parts;
use crate::maths::{
    Aggregation, KlLoss, PolicyClip, PolicyLoss, Rows, StepSize, ValueLossSettings, kl_loss, policy_loss,
    sequence_policy_loss, value_loss,
};
use crate::policy::{Example, Policy, Training, kept, rows_of, share};
use crate::together::summed;
use crate::{Gradients, Metrics, TrainError, lr_factor};
use candle_core::Tensor;
use querl_core::config::{AdvantageForm, KlPlacement, RlConfig};
use querl_model::{Recompute, backward};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::time::Instant;

/// Sums over the optimizer steps of a batch, to be averaged.
#[derive(Default)]
struct Totals {
    n_policy_steps: usize,
    n_critic_steps: usize,
    metrics: Metrics,
    actor_s: f64,
    critic_s: f64,
}

impl Totals {
    fn add(&mut self, name: &str, value: f64) {
        *self.metrics.entry(name.to_owned()).or_default() += value;
    }

    fn means(self) -> Metrics {
        let n_steps = |name: &str| if name.starts_with("critic/") { self.n_critic_steps } else { self.n_policy_steps };
        let mean = |(name, sum): (&String, &f64)| (name.clone(), sum / n_steps(name).max(1) as f64);
        let mut metrics: Metrics = self.metrics.iter().map(mean).collect();
        metrics.insert("actor/n_updates".into(), self.n_policy_steps as f64);
        metrics.insert("timing_s/update_actor".into(), self.actor_s);
        metrics.insert("timing_s/update_critic".into(), self.critic_s);
        metrics
    }
}

/// What becomes of a mini-batch.
enum Progress {
    GoesOn,
    /// The policy has moved as far as it may: no more updates on this batch.
    FarEnough,
}

impl Learner {
    /// Several epochs of updates of policy and critic on one batch.
    pub(super) fn update(
        &mut self,
        task: &RlTask<'_>,
        experience: &Experience<'_>,
        step: u64,
    ) -> Result<Metrics, TrainError> {
        let config = task.config;
        let policy_learns = step > config.critic_warmup_steps as u64 || self.critic.is_none();
        let learning_rate = if policy_learns { learning_rate(config, step) } else { 0.0 };
        let mut rng = ChaCha8Rng::seed_from_u64(task.seed ^ step.rotate_left(32));
        let mut order: Vec<usize> = (0..experience.rollouts.len()).collect();
        let mut totals = Totals::default();
        'epochs: for _ in 0..config.ppo_epochs {
            order.shuffle(&mut rng);
            for rows in order.chunks(config.mini_batch_size) {
                let mini_batch = MiniBatch::new(task, experience, rows, aggregation(self.algorithm, config))?;
                let started = Instant::now();
                if policy_learns {
                    let progress = self.policy_step(&mini_batch, learning_rate, step, &mut totals)?;
                    totals.actor_s += started.elapsed().as_secs_f64();
                    if matches!(progress, Progress::FarEnough) {
                        break 'epochs;
                    }
                }
                #[cfg(test)]
                crate::fault::at(step, "pass")?;
                let started = Instant::now();
                self.critic_step(&mini_batch, step, &mut totals)?;
                totals.critic_s += started.elapsed().as_secs_f64();
            }
        }
        let mut metrics = totals.means();
        metrics.insert("actor/lr".into(), learning_rate);
        if self.critic.is_some() {
            metrics.insert("critic/lr".into(), config.critic_learning_rate);
        }
        Ok(metrics)
    }

    /// One optimizer step of the policy, unless it has already moved as far as `target_kl` allows.
    fn policy_step(
        &mut self,
        mini_batch: &MiniBatch<'_>,
        learning_rate: f64,
        step: u64,
        totals: &mut Totals,
    ) -> Result<Progress, TrainError> {
        let task = mini_batch.task;
        let mut gradients = Gradients::default();
        let mut found = Metrics::new();
        for part in mini_batch.parts() {
            part.policy_pass(&mut gradients, &mut found)?;
        }
        let found = summed(&task.mesh.data, found)?;
        let moved = found.get("actor/ppo_kl_k3").copied().unwrap_or_default();
        if task.config.target_kl > 0.0 && moved > task.config.target_kl {
            return Ok(Progress::FarEnough);
        }
        gradients.sum_over(task.mesh, task.policy.vars())?;
        let grad_norm = gradients.clip(task.config.max_grad_norm)?;
        if !grad_norm.is_finite() {
            return Err(TrainError::NotFinite { stage: "rl", step, what: "the policy's gradient" });
        }
        self.optimizer.step(task.policy.vars(), &gradients, learning_rate)?;
        totals.n_policy_steps += 1;
        totals.add("actor/grad_norm", grad_norm);
        found.iter().for_each(|(name, value)| totals.add(name, *value));
        Ok(Progress::GoesOn)
    }

    /// One optimizer step of the critic, where there is one.
    fn critic_step(&mut self, mini_batch: &MiniBatch<'_>, step: u64, totals: &mut Totals) -> Result<(), TrainError> {
        let (Some(critic), Some(experience)) = (&mut self.critic, &mini_batch.experience.critic) else { return Ok(()) };
        let (config, mesh) = (mini_batch.task.config, mini_batch.task.mesh);
        let (mut gradients, mut found) = (Gradients::default(), Metrics::new());
        for part in mini_batch.parts() {
            part.critic_pass(critic, experience, &mut gradients, &mut found)?;
        }
        summed(&mesh.data, found)?.iter().for_each(|(name, value)| totals.add(name, *value));
        let norm = critic.step(gradients, mesh, config.critic_learning_rate, config.max_grad_norm)?;
        if !norm.is_finite() {
            return Err(TrainError::NotFinite { stage: "rl", step, what: "the critic's gradient" });
        }
        totals.n_critic_steps += 1;
        totals.add("critic/grad_norm", norm);
        Ok(())
    }
}

/// The policy's rate in a step that counts from 1: the first of a warm-up is not 0, and neither is the last of all, since a
/// step of rollouts costs more than one of fine-tuning.
fn learning_rate(config: &RlConfig, step: u64) -> f64 {
    let n_steps = config.max_steps as u64;
    let n_warmup = (config.warmup_ratio * n_steps as f64).ceil() as u64;
    let factor = match step <= n_warmup {
        true => step as f64 / n_warmup as f64,
        false => lr_factor(config.lr_scheduler, step - 1, n_warmup, n_steps),
    };
    config.learning_rate * factor
}

/// How tokens are weighted in the loss. In the sequence form the surrogate weighs responses alike and reaches each of their
/// tokens whole, through the one ratio; divergence and entropy are sums over a response then too, so that `kl_coef` and
/// `ent_coef` weigh against the surrogate as in the token form.
fn aggregation(algorithm: &dyn Algorithm, config: &RlConfig) -> Aggregation {
    match config.advantage_form {
        AdvantageForm::Token => algorithm.aggregation(config),
        AdvantageForm::Sequence => Aggregation::SequenceSum { scale: 1.0 },
    }
}

/// The responses of one optimizer step, and how much each of their tokens counts in it.
struct MiniBatch<'a> {
    task: &'a RlTask<'a>,
    experience: &'a Experience<'a>,
    rows: &'a [usize],
    aggregation: Aggregation,
    size: StepSize,
    /// Value targets of the whole step.
    n_values: usize,
    /// Where checkpointed layers put their gradients, one pass after another.
    recompute: Recompute,
}

impl<'a> MiniBatch<'a> {
    fn new(
        task: &'a RlTask<'a>,
        experience: &'a Experience<'a>,
        rows: &'a [usize],
        aggregation: Aggregation,
    ) -> Result<Self, TrainError> {
        let n_tokens = rows.iter().map(|&i| experience.old_logprobs[i].len()).sum();
        let n_kept =
            |critic: &ValueExperience| rows.iter().flat_map(|&i| &critic.mask[i]).filter(|keep| **keep).count();
        Ok(Self {
            task,
            experience,
            rows,
            aggregation,
            size: StepSize { n_tokens, n_responses: rows.len() },
            n_values: experience.critic.as_ref().map_or(0, n_kept),
            recompute: kept(task.gradient_checkpointing),
        })
    }

    /// This rank's rows of the step cut into passes, whose losses add up to the step's over all ranks.
    fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let example = |&i: &usize| &self.experience.rollouts[i].example;
        let all: Vec<&Example> = self.rows.iter().map(example).collect();
        let rows: Vec<usize> = share(&all, &self.task.mesh.data).into_iter().map(|i| self.rows[i]).collect();
        let examples: Vec<&Example> = rows.iter().map(example).collect();
        let n_parts = self.task.config.gradient_accumulation_steps;
        let parts = parts(&examples, n_parts, self.task.tokens_per_pass);
        parts.into_iter().map(move |part| Part {
            of: self,
            rows: part.iter().map(|&i| rows[i]).collect(),
            examples: part.iter().map(|&i| examples[i]).collect(),
        })
    }
}

/// Responses of one forward and backward pass.
struct Part<'a> {
    of: &'a MiniBatch<'a>,
    rows: Vec<usize>,
    examples: Vec<&'a Example>,
}

impl Part<'_> {
    fn pick<T: Clone>(&self, of_batch: &[T]) -> Vec<T> {
        self.rows.iter().map(|&i| of_batch[i].clone()).collect()
    }

    fn mask(&self) -> Vec<Vec<bool>> {
        self.examples.iter().map(|example| vec![true; example.response.len()]).collect()
    }

    /// The policy's loss: its derivative by each log-probability and entropy is carried on through the decoder's graph.
    fn policy_pass(&self, gradients: &mut Gradients, found: &mut Metrics) -> Result<(), TrainError> {
        let (task, config) = (self.of.task, self.of.task.config);
        let policy = Policy { decoder: task.decoder, adapter: Some(task.policy) };
        let training = Training { dropout: None, recompute: Some(&self.of.recompute) };
        let pass = policy.training_pass(&self.examples, config.temperature, training)?;
        let both: Vec<Vec<f32>> = pass.logprobs.to_vec2()?; // (N, 2)
        let column =
            |i: usize| -> Rows { rows_of(&both.iter().map(|row| row[i]).collect::<Vec<f32>>(), &self.examples) };
        let (logprobs, entropies) = (column(0), column(1));
        let weights = self.of.aggregation.weights(&self.mask(), self.of.size);
        let surrogate = self.surrogate(&logprobs, &weights);
        let divergence = self.divergence(&logprobs, &weights);
        let outer = outer_gradients(
            config,
            &surrogate,
            divergence.as_ref().map(|kl| (kl, self.of.experience.kl_coef)),
            &weights,
        );
        let outer = Tensor::from_vec(outer, pass.logprobs.shape(), pass.logprobs.device())?;
        let loss = (pass.logprobs * outer)?.sum_all()?;
        gradients.add(&backward(&loss, training.recompute)?, task.policy.vars())?;
        self.note(&surrogate, divergence.as_ref(), &entropies, found);
        Ok(())
    }

    /// Adds the part's share to the figures of the step.
    fn note(&self, surrogate: &PolicyLoss, divergence: Option<&KlLoss>, entropies: &Rows, found: &mut Metrics) {
        let StepSize { n_tokens, n_responses } = self.of.size;
        let n_ratios = match self.of.task.config.advantage_form {
            AdvantageForm::Token => n_tokens,
            AdvantageForm::Sequence => n_responses,
        } as f64;
        let mut add = |name: &str, value: f64| *found.entry(name.to_owned()).or_default() += value;
        add("actor/pg_loss", f64::from(surrogate.pg_loss));
        add("actor/pg_clipfrac", surrogate.n_clipped as f64 / n_ratios);
        add("actor/pg_clipfrac_lower", surrogate.n_clipped_lower as f64 / n_ratios);
        // Per token in both forms, so that they compare.
        add("actor/ppo_kl", surrogate.kl_sum / n_tokens as f64);
        add("actor/ppo_kl_k3", surrogate.kl_k3_sum / n_tokens as f64);
        let entropy: f64 = entropies.iter().flatten().map(|entropy| f64::from(*entropy)).sum();
        add("actor/entropy", entropy / n_tokens as f64);
        if let Some(kl) = divergence {
            add("actor/kl_loss", f64::from(kl.kl_loss));
        }
    }

    /// The clipped surrogate of tokens or of responses, with the importance weights.
    fn surrogate(&self, logprobs: &Rows, weights: &Rows) -> PolicyLoss {
        let (config, experience) = (self.of.task.config, self.of.experience);
        let (old, advantages) = (self.pick(&experience.old_logprobs), self.pick(&experience.advantages));
        let importance = experience.importance.as_ref().map(|rows| self.pick(rows));
        let dual_clip = (config.dual_clip > 0.0).then_some(config.dual_clip as f32);
        let clip = PolicyClip { clip_range: config.clip_range as f32, dual_clip };
        match config.advantage_form {
            AdvantageForm::Token => {
                let weights = importance.map_or_else(|| weights.clone(), |importance| product(weights, &importance));
                policy_loss(&old, logprobs, &advantages, &weights, clip)
            }
            AdvantageForm::Sequence => {
                let first = |rows: &Rows| -> Vec<f32> { rows.iter().map(|row| row[0]).collect() };
                let of_responses = importance.map_or_else(|| vec![1.0; self.rows.len()], |rows| first(&rows));
                let share = 1.0 / self.of.size.n_responses as f32;
                let weights: Vec<f32> = of_responses.iter().map(|weight| weight * share).collect();
                sequence_policy_loss(&old, logprobs, &first(&advantages), &self.mask(), &weights, clip)
            }
        }
    }

    /// The divergence from the reference as a term of the loss, where it is one.
    fn divergence(&self, logprobs: &Rows, weights: &Rows) -> Option<KlLoss> {
        let config = self.of.task.config;
        let reference = || self.pick(&self.of.experience.ref_logprobs);
        (config.kl_placement == KlPlacement::Loss)
            .then(|| kl_loss(config.kl_estimator, logprobs, &reference(), weights))
    }

    /// The critic's loss, likewise.
    fn critic_pass(
        &self,
        critic: &Critic,
        experience: &ValueExperience,
        gradients: &mut Gradients,
        found: &mut Metrics,
    ) -> Result<(), TrainError> {
        let config = self.of.task.config;
        let inputs = experience.inputs.as_ref().map(|inputs| Tensor::cat(&self.pick(inputs), 0)).transpose()?;
        let recompute = Some(&self.of.recompute);
        let values = critic.values(self.of.task.decoder, &self.examples, inputs.as_ref(), recompute)?; // (N)
        let size = StepSize { n_tokens: self.of.n_values, n_responses: self.of.size.n_responses };
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
        let outer: Vec<f32> = loss.grad_values.iter().flatten().map(|g| g * config.vf_coef as f32).collect();
        let outer = Tensor::from_vec(outer, values.shape(), values.device())?;
        critic.collect(gradients, &(values * outer)?.sum_all()?, recompute)?;
        let mut add = |name: &str, value: f64| *found.entry(name.to_owned()).or_default() += value;
        add("critic/vf_loss", f64::from(loss.vf_loss));
        add("critic/vf_clipfrac", loss.n_clipped as f64 / self.of.n_values.max(1) as f64);
        Ok(())
    }
}

fn product(a: &Rows, b: &Rows) -> Rows {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a * b).collect()).collect()
}

/// The derivative of the whole loss by each token's log-probability and entropy: `(N, 2)`, row-major.
fn outer_gradients(
    config: &RlConfig,
    surrogate: &PolicyLoss,
    divergence: Option<(&KlLoss, f64)>,
    weights: &Rows,
) -> Vec<f32> {
    let entropy = |weight: f32| -(config.ent_coef as f32) * weight;
    let of_surrogate = surrogate.grad_logprobs.iter().flatten().zip(weights.iter().flatten());
    match divergence {
        None => of_surrogate.flat_map(|(gradient, weight)| [*gradient, entropy(*weight)]).collect(),
        Some((kl, kl_coef)) => of_surrogate
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
