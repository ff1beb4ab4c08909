//! Experience and updates on a tiny decoder.
use super::super::RlTask;
use super::super::learner::Learner;
use super::super::metrics::batch_metrics;
use super::super::rollout::Rollout;
use super::super::rollout_check::check_rollout;
use super::{Fixture, config};
use crate::policy::{Example, Policy, TrainingPass};
use crate::{Metrics, State, StateStore};
use candle_core::Tensor;
use querl_core::config::{AdvantageForm, CriticKind, KlEstimator, KlPlacement, RlAlgorithm, RlConfig};
use querl_core::ports::Silent;

pub(super) fn learn(learner: &mut Learner, task: &RlTask<'_>, rollouts: &[Rollout], step: u64) -> Metrics {
    let experience = learner.experience(task, rollouts, step).unwrap();
    let mut metrics = batch_metrics(&experience, task.config);
    metrics.extend(learner.update(task, &experience, step).unwrap().means());
    metrics
}

#[test]
fn a_rollout_whose_logprobs_differ_from_training_stops_the_run_and_the_step_is_named() {
    let (fixture, config) = (Fixture::new(), config());
    let task = fixture.task(&config);
    let mut rollouts = fixture.rollouts(&config, 1);
    let metrics = check_rollout(&task, task.policy, &rollouts, 7).unwrap();
    assert!(metrics["rollout_probs_diff"] < 1e-6, "{metrics:?}");
    // A small difference, as caused by another order of sums: a health warning, not an error.
    rollouts.iter_mut().flat_map(|rollout| &mut rollout.logprobs).for_each(|logprob| *logprob += 5e-5);
    let metrics = check_rollout(&task, task.policy, &rollouts, 7).unwrap();
    assert!((4e-5..6e-5).contains(&metrics["rollout_probs_diff"]), "{metrics:?}");
    rollouts.iter_mut().flat_map(|rollout| &mut rollout.logprobs).for_each(|logprob| *logprob += 1e-3);
    let message = check_rollout(&task, task.policy, &rollouts, 7).unwrap_err().to_string();
    let expected = "a token on average, expected at most 1e-4";
    assert!(message.starts_with("rl step 7: log-probabilities of rollout and training differ by 1"), "{message}");
    assert!(message.contains(expected), "{message}");
    rollouts.iter_mut().flat_map(|rollout| &mut rollout.logprobs).for_each(|logprob| *logprob = f32::NAN);
    assert!(check_rollout(&task, task.policy, &rollouts, 7).is_err());
}

#[test]
fn one_token_that_is_far_off_and_one_that_is_missing_stop_the_run() {
    let (fixture, config) = (Fixture::new(), config());
    let task = fixture.task(&config);
    // Long responses, so that one token hardly changes the mean.
    let examples = (0..8).map(|i| Example { prompt: vec![7, 8, 9], response: vec![20 + i; 50] }).collect();
    let mut rollouts = fixture.scored(&config, examples, |_| 0.0);
    rollouts[3].logprobs[20] += 0.02;
    let message = check_rollout(&task, task.policy, &rollouts, 7).unwrap_err().to_string();
    assert!(message.contains("differ by 2.0e-2 a token at worst, expected at most 1e-2"), "{message}");
    rollouts[3].logprobs.pop();
    let message = check_rollout(&task, task.policy, &rollouts, 7).unwrap_err().to_string();
    assert!(message.starts_with("rl step 7: a rollout has 49 log-probabilities for 50 tokens"), "{message}");
}

#[test]
fn the_rollout_check_is_cut_into_micro_batches_and_accepts_no_rollouts() {
    let (fixture, config) = (Fixture::new(), config());
    let rollouts = fixture.rollouts(&config, 1);
    for tokens_per_pass in [1, 14] {
        let task = RlTask { tokens_per_pass, ..fixture.task(&config) };
        let metrics = check_rollout(&task, task.policy, &rollouts, 7).unwrap();
        assert!(metrics["rollout_probs_diff_max"] < 1e-5, "{metrics:?}");
    }
    let task = fixture.task(&config);
    assert!(check_rollout(&task, task.policy, &[], 7).unwrap().is_empty());
}

/// With sequence advantages, the KL in the loss is summed over each response, like the policy loss and the penalty in the reward.
#[test]
fn kl_in_the_loss_is_per_token_or_per_response_as_the_advantage_form() {
    let fixture = Fixture::new();
    fixture.move_policy();
    for (advantage_form, unit) in [(AdvantageForm::Token, "actor/ref_kl"), (AdvantageForm::Sequence, "objective/kl")] {
        let config = RlConfig {
            advantage_form,
            ppo_epochs: 1,
            learning_rate: 1e-12,
            kl_placement: KlPlacement::Loss,
            kl_estimator: KlEstimator::K1,
            ..config()
        };
        let task = fixture.task(&config);
        let metrics = learn(&mut Learner::new(&task).unwrap(), &task, &fixture.rollouts(&config, 1), 1);
        let (found, expected) = (metrics["actor/kl_loss"], metrics[unit]);
        assert!(expected.abs() > 1e-3 && (found - expected).abs() < 1e-4 * expected.abs().max(1.0), "{metrics:?}");
    }
}

#[test]
fn before_an_update_ratios_are_one_and_nothing_is_clipped() {
    let fixture = Fixture::new();
    fixture.move_policy();
    for temperature in [1.0, 0.6] {
        let config = RlConfig { ppo_epochs: 1, temperature, ..config() };
        let task = fixture.task(&config);
        let metrics = learn(&mut Learner::new(&task).unwrap(), &task, &fixture.rollouts(&config, 1), 1);
        assert_eq!(metrics["actor/pg_clipfrac"], 0.0);
        assert!(metrics["actor/ppo_kl"].abs() < 1e-6 && metrics["actor/ppo_kl_k3"] < 1e-6, "{metrics:?}");
        assert!(metrics["actor/ref_kl"].abs() > 1e-3, "the reference is the bare base");
    }
}

#[test]
fn an_update_does_not_depend_on_the_split_into_micro_batches() {
    let fixture = Fixture::new();
    fixture.move_policy();
    let norms = |config: &RlConfig, tokens_per_pass, gradient_checkpointing| {
        let task = RlTask { tokens_per_pass, gradient_checkpointing, ..fixture.task(config) };
        let metrics = learn(&mut Learner::new(&task).unwrap(), &task, &fixture.rollouts(config, 1), 1);
        ["actor/grad_norm", "critic/grad_norm", "actor/pg_loss", "actor/entropy", "critic/vf_loss"]
            .map(|name| metrics[name])
    };
    for advantage_form in [AdvantageForm::Token, AdvantageForm::Sequence] {
        // A tiny learning rate: every run starts from the same policy.
        let config = RlConfig {
            advantage_form,
            critic: CriticKind::Adapter,
            ppo_epochs: 1,
            learning_rate: 1e-12,
            kl_placement: KlPlacement::Loss,
            ..config()
        };
        let whole = norms(&config, 10_000, false);
        let accumulated = RlConfig { gradient_accumulation_steps: 5, ..config.clone() };
        for cut in [norms(&config, 14, false), norms(&config, 10_000, true), norms(&accumulated, 20, true)] {
            for (whole, cut) in whole.iter().zip(cut) {
                assert!((whole - cut).abs() < 1e-4 * whole.abs().max(1e-2), "{whole} and {cut}");
            }
        }
    }
}

#[test]
fn during_critic_warm_up_the_policy_does_not_change() {
    for critic in [CriticKind::Head, CriticKind::Adapter] {
        let (fixture, config) = (Fixture::new(), RlConfig { critic, critic_warmup_steps: 1, ..config() });
        let task = fixture.task(&config);
        let mut learner = Learner::new(&task).unwrap();
        let rollouts = fixture.rollouts(&config, 1);
        let before = fixture.policy_values();
        let first = learner.experience(&task, &rollouts, 1).unwrap();
        let zeros = first.critic.as_ref().unwrap().values.concat();
        assert!(zeros.iter().all(|value| *value == 0.0), "a new critic returns 0");
        let metrics = learner.update(&task, &first, 1).unwrap().means();
        assert_eq!(fixture.policy_values(), before, "{critic:?}");
        assert_eq!(metrics["actor/lr"], 0.0);
        let second = learner.experience(&task, &rollouts, 2).unwrap();
        assert!(second.critic.as_ref().unwrap().values.concat().iter().any(|value| value.abs() > 1e-3));
        learner.update(&task, &second, 2).unwrap();
        assert_ne!(fixture.policy_values(), before);
    }
}

/// Responses that contain the ids of padding and end-of-sequence, also at the end: masks depend only on lengths.
#[test]
fn masks_come_from_lengths_and_the_policy_learns_to_stop_where_that_is_rewarded() {
    let (fixture, config) = (Fixture::new(), RlConfig { ppo_epochs: 6, ent_coef: 0.0, kl_coef: 0.0, ..config() });
    let task = fixture.task(&config);
    let (eos, pad) = (fixture.eos(), 0);
    let endings =
        [vec![pad, eos], vec![pad, pad, eos], vec![eos, 40, eos], vec![41, 42], vec![43, pad], vec![44, 45, 46]];
    let examples: Vec<Example> =
        endings.iter().map(|response| Example { prompt: vec![7, 8, 9], response: response.clone() }).collect();
    let rollouts = fixture.scored(&config, examples.clone(), |index| if index < 3 { 1.0 } else { -1.0 });
    let mut learner = Learner::new(&task).unwrap();
    let experience = learner.experience(&task, &rollouts, 1).unwrap();
    for (rows, what) in [(&experience.advantages, "advantages"), (&experience.old_logprobs, "log-probabilities")] {
        let lengths: Vec<usize> = rows.iter().map(Vec::len).collect();
        assert_eq!(lengths, [2, 3, 3, 2, 2, 3], "{what}");
    }
    assert!(
        experience.token_rewards.iter().all(|row| row.last().unwrap().abs() == 1.0),
        "the score is at the last token"
    );
    learner.update(&task, &experience, 1).unwrap();
    let (before, after) = (&experience.old_logprobs, fixture.logprobs(&config, &examples));
    for index in 0..3 {
        let (before, after) = (before[index].last().unwrap(), after[index].last().unwrap());
        assert!(after > before, "the end of sequence is learned: {before} to {after}");
    }
}

/// Saves a learner after a batch, restores it, and compares its next step with that of the original.
pub(super) fn assert_restored_learner_takes_the_same_step(fixture: &Fixture, config: &RlConfig) {
    let task = fixture.task(config);
    let mut learner = Learner::new(&task).unwrap();
    learn(&mut learner, &task, &fixture.rollouts(config, 1), 1);
    let store = StateStore::open(&fixture.model.path.join("states"), 1, "same");
    let mut state = State::default();
    learner.save(&mut state).unwrap();
    state.put_vars("policy", task.policy.vars());
    store.write(1, &state).unwrap();
    let rollouts = fixture.rollouts(config, 2);
    let without_time = |metrics: Metrics| -> Metrics {
        metrics.into_iter().filter(|(name, _)| !name.starts_with("timing_s/")).collect()
    };
    let expected = (without_time(learn(&mut learner, &task, &rollouts, 2)), fixture.policy_values());

    let (_, state) = store.newest(&Silent, &|_| Ok(None)).unwrap().unwrap();
    state.restore_vars("policy", task.policy.vars()).unwrap();
    let mut learner = Learner::new(&task).unwrap();
    learner.restore(&task, &state).unwrap();
    let found = (without_time(learn(&mut learner, &task, &rollouts, 2)), fixture.policy_values());
    assert_eq!(found, expected, "{:?}", config.critic);
}

#[test]
fn a_restored_learner_takes_the_same_next_step() {
    for critic in [CriticKind::Head, CriticKind::Adapter] {
        let config = RlConfig { critic, kl_target: 0.5, normalize_rewards: true, ..config() };
        assert_restored_learner_takes_the_same_step(&Fixture::new(), &config);
    }
}

#[test]
fn filtered_samples_have_importance_weights_and_plain_ones_do_not() {
    let (fixture, config) = (Fixture::new(), config());
    let task = fixture.task(&config);
    let mut rollouts = fixture.rollouts(&config, 1);
    let mut learner = Learner::new(&task).unwrap();
    assert!(learner.experience(&task, &rollouts, 1).unwrap().importance_weights.is_none());
    // A filter that kept 75 % of the probability: the policy's probability is 0.75 times the sampling probability.
    for rollout in &mut rollouts {
        rollout.behaviour_logprobs.iter_mut().for_each(|logprob| *logprob -= 0.75f32.ln());
    }
    for (form, expected) in [(AdvantageForm::Token, 0.75f32), (AdvantageForm::Sequence, 0.75f32.powi(4))] {
        let config = RlConfig { advantage_form: form, ..config.clone() };
        let task = fixture.task(&config);
        let experience = learner.experience(&task, &rollouts, 1).unwrap();
        let weights = experience.importance_weights.as_ref().unwrap();
        let of_four = rollouts.iter().position(|rollout| rollout.example.response.len() == 4).unwrap();
        assert!((weights[of_four][0] - expected).abs() < 1e-5, "{weights:?}");
        assert!(batch_metrics(&experience, &config).contains_key("rollout_corr/rollout_is_mean"));
        learner.update(&task, &experience, 1).unwrap();
    }
}

#[test]
fn a_batch_of_an_earlier_policy_is_compared_with_the_current_one() {
    let (fixture, config) = (Fixture::new(), RlConfig { off_by_one: true, ..config() });
    let task = fixture.task(&config);
    let rollouts = fixture.rollouts(&config, 1);
    fixture.move_policy(); // updated since the rollout
    let experience = Learner::new(&task).unwrap().experience(&task, &rollouts, 1).unwrap();
    let examples: Vec<Example> = rollouts.iter().map(|rollout| rollout.example.clone()).collect();
    let present = fixture.logprobs(&config, &examples).concat();
    let pairs = experience.old_logprobs.concat().into_iter().zip(present);
    assert!(pairs.into_iter().all(|(old, present)| (old - present).abs() < 1e-4));
    let weights = experience.importance_weights.as_ref().unwrap();
    let expected = (experience.old_logprobs[0][0] - rollouts[0].logprobs[0]).exp().min(config.importance_cap as f32);
    assert!((weights[0][0] - expected).abs() < 1e-6);
    assert!(weights.concat().iter().all(|weight| *weight <= config.importance_cap as f32));
}

#[test]
fn kl_early_stopping_ends_the_epochs() {
    let fixture = Fixture::new();
    let updates = |target_kl| {
        let config = RlConfig { target_kl, ppo_epochs: 5, learning_rate: 5e-2, ..config() };
        let task = fixture.task(&config);
        learn(&mut Learner::new(&task).unwrap(), &task, &fixture.rollouts(&config, 1), 1)["actor/n_updates"]
    };
    assert_eq!((updates(0.0), updates(1e-6), updates(1e6)), (5.0, 1.0, 5.0));
}

#[test]
fn kl_in_the_loss_pulls_the_policy_back_to_the_reference() {
    for kl_estimator in [KlEstimator::K2, KlEstimator::K3] {
        let fixture = Fixture::new();
        fixture.move_policy();
        let config = RlConfig {
            algorithm: RlAlgorithm::Grpo,
            n_samples: 3,
            kl_placement: KlPlacement::Loss,
            kl_estimator,
            kl_coef: 1.0,
            ent_coef: 0.0,
            ppo_epochs: 8,
            ..config()
        };
        let task = fixture.task(&config);
        // Equal scores within each group: all advantages are 0, so that only KL has a gradient.
        let examples = fixture.rollouts(&config, 1).into_iter().map(|rollout| rollout.example).collect();
        let rollouts = fixture.scored(&config, examples, |_| 0.5);
        let mut learner = Learner::new(&task).unwrap();
        let first = learn(&mut learner, &task, &rollouts, 1);
        assert_eq!((first["frac_reward_zero_std"], first["actor/pg_loss"]), (1.0, 0.0));
        let again = fixture.scored(&config, rollouts.iter().map(|rollout| rollout.example.clone()).collect(), |_| 0.5);
        let second = learn(&mut learner, &task, &again, 2);
        assert!(second["actor/ref_kl_k3"] < 0.7 * first["actor/ref_kl_k3"], "{kl_estimator:?}: {first:?} {second:?}");
    }
}

/// Regression: with KL in the reward every group had spread from the second step on, whatever its scores.
#[test]
fn groups_without_spread_are_those_of_equal_scores_whatever_their_kl() {
    let fixture = Fixture::new();
    fixture.move_policy();
    let config = RlConfig {
        algorithm: RlAlgorithm::Grpo,
        n_samples: 3,
        kl_placement: KlPlacement::Reward,
        kl_coef: 1.0,
        ..config()
    };
    let task = fixture.task(&config);
    let examples = fixture.rollouts(&config, 1).into_iter().map(|rollout| rollout.example).collect();
    // The samples of two of four queries have equal scores.
    let rollouts = fixture.scored(&config, examples, |index| if index < 6 { 0.5 } else { 0.1 * (index % 3) as f32 });
    let experience = Learner::new(&task).unwrap().experience(&task, &rollouts, 1).unwrap();
    assert!(experience.advantages[..6].concat().iter().any(|advantage| *advantage != 0.0), "KL has spread");
    assert_eq!(batch_metrics(&experience, &config)["frac_reward_zero_std"], 0.5);
}

#[test]
fn the_kl_coefficient_follows_its_target_and_scores_are_normalised() {
    let fixture = Fixture::new();
    fixture.move_policy();
    let config = RlConfig { kl_target: 1e-3, kl_horizon: 12, normalize_rewards: true, reward_clip: 0.9, ..config() };
    let task = fixture.task(&config);
    let mut learner = Learner::new(&task).unwrap();
    let rollouts = fixture.rollouts(&config, 1);
    let first = learner.experience(&task, &rollouts, 1).unwrap().kl_coef;
    let second = learner.experience(&task, &rollouts, 2).unwrap().kl_coef;
    assert_eq!(first, config.kl_coef);
    assert!((second / first - 1.2).abs() < 1e-9 || (second / first - 0.8).abs() < 1e-9, "one horizon, clipped error");
    let scores: Vec<f32> = rollouts.iter().map(|rollout| rollout.score).collect();
    assert!(learner.shaping.score_moments.deviation() > 0.5 && scores.iter().any(|score| *score > 1.5));
    let experience = learner.experience(&task, &rollouts, 3).unwrap();
    let clipped = experience.token_rewards.iter().zip(&experience.ref_logprobs);
    assert!(clipped.map(|(row, _)| row.last().unwrap().abs()).all(|reward| reward < 1.1), "0.9 and KL");
}

#[test]
fn advantages_are_clipped_where_configured() {
    let (fixture, config) = (Fixture::new(), RlConfig { advantage_clip: 0.5, ..config() });
    let task = fixture.task(&config);
    let rollouts = fixture.rollouts(&config, 1);
    let experience = Learner::new(&task).unwrap().experience(&task, &rollouts, 1).unwrap();
    let largest = experience.advantages.concat().into_iter().fold(0f32, |max, x| max.max(x.abs()));
    assert_eq!(largest, 0.5);
}

/// Regression: a head on unnormalised hidden states explained none of the returns' variance, at any learning rate.
#[test]
fn a_head_on_the_reference_learns_the_value_of_queries() {
    let (fixture, config) =
        (Fixture::new(), RlConfig { ppo_epochs: 4, gamma: 1.0, critic_learning_rate: 2e-2, ..config() });
    let task = fixture.task(&config);
    let mut learner = Learner::new(&task).unwrap();
    let mut explained = Vec::new();
    for step in 1..=30 {
        let examples = fixture.rollouts(&config, step).into_iter().map(|rollout| rollout.example).collect();
        // The score depends only on the query.
        let rollouts = fixture.scored(&config, examples, |index| [0.8, -0.6, 0.1, -0.3][index / 3]);
        let critic_only = RlConfig { critic_warmup_steps: 100, ..config.clone() };
        let task = fixture.task(&critic_only);
        explained.push(learn(&mut learner, &task, &rollouts, step)["critic/vf_explained_var"]);
    }
    let last = explained[20..].iter().sum::<f64>() / 10.0;
    assert!(last > 0.8, "{explained:?}");
}

/// The saved head includes the normalisation, so that it gives the same values on unnormalised hidden states.
#[test]
fn a_saved_head_gives_the_critics_values_on_unnormalised_hidden_states() {
    let (fixture, config) = (Fixture::new(), config());
    let task = fixture.task(&config);
    let mut learner = Learner::new(&task).unwrap();
    let rollouts = fixture.rollouts(&config, 1);
    learn(&mut learner, &task, &rollouts, 1);
    let values = learner.experience(&task, &rollouts, 2).unwrap().critic.unwrap().values;
    let directory = fixture.model.path.join("critic");
    learner.save_critic(task.mesh, &directory, task.base_path).unwrap();
    let head = querl_model::load_tensors(&directory.join("value_head.safetensors")).unwrap();
    let reference = Policy { decoder: &fixture.model.decoder, adapter: None };
    let hidden = reference.response_hidden(&[&rollouts[2].example], TrainingPass::default()).unwrap(); // (T, H)
    let first = hidden.narrow(0, 0, 1).unwrap().broadcast_as(hidden.shape()).unwrap();
    let product = Tensor::cat(&[first, hidden], 1).unwrap().matmul(&head["value_head.weight"].t().unwrap()).unwrap();
    let found =
        product.broadcast_add(&head["value_head.bias"]).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    for (found, expected) in found.iter().zip(&values[2]) {
        assert!((found - expected).abs() < 1e-4, "{found}, expected {expected}");
    }
}
