//! PPO on a tiny random decoder and an environment with a known optimum.

use super::support::{Model, Scorer, bits, config as common, plain_text, reward};
use crate::TrainError;
use crate::rl::{RlSummary, train};
use crate::testing::Recorder;
use querl_core::config::{AdvantageForm, CriticKind, PolicyLossKind, RlAlgorithm, RlConfig};
use querl_core::ports::PolicyResponse;
use querl_core::records::Rejection;
use querl_model::{LoraAdapter, LoraSettings};

fn config() -> RlConfig {
    RlConfig { max_steps: 2, batch_size: 16, mini_batch_size: 16, eval_steps: 100, ..common() }
}

/// Runs PPO; returns its result, its metrics and the bits of the adapter. `rejects`: every second episode is rejected.
fn run(model: &Model, config: &RlConfig, rejects: bool) -> (Result<RlSummary, TrainError>, Recorder, Vec<u32>) {
    run_with(model, LoraSettings::all_linear(4, 8.0), config, rejects)
}

fn run_with(
    model: &Model,
    settings: LoraSettings,
    config: &RlConfig,
    rejects: bool,
) -> (Result<RlSummary, TrainError>, Recorder, Vec<u32>) {
    let (policy, prompts) = (model.adapter(settings, 5), model.prompts());
    let score = |rejects| {
        Scorer(move |_, index, response: &PolicyResponse| match rejects && index % 2 == 1 {
            true => Err(Rejection::new("retrieval_timeout", "no answer within 1 s")),
            false => Ok(reward(plain_text(response))),
        })
    };
    let (environment, validation) = (score(rejects), score(false));
    let output = tempfile::tempdir().unwrap();
    let task = model.task(&policy, &prompts, [&environment, &validation], config, output.path());
    let mut recorder = Recorder::default();
    let summary = train(&task, &mut recorder);
    if summary.is_ok() {
        assert!(output.path().join("best/adapter_model.safetensors").is_file());
        let has_critic = config.algorithm == RlAlgorithm::Ppo;
        assert_eq!(output.path().join("last/critic/value_head.safetensors").is_file(), has_critic);
        let reloaded = LoraAdapter::load(&output.path().join("last"), model.decoder.config()).unwrap();
        assert_eq!(bits(&reloaded), bits(&policy));
    }
    (summary, recorder, bits(&policy))
}

#[test]
fn before_any_update_policy_and_reference_are_equal() {
    let (_, recorder, _) = run(&Model::new(), &config(), false);
    assert!(recorder.get(1, "actor/ref_kl").abs() < 1e-6, "LoRA's B is zero");
    assert!(recorder.get(1, "rollout_probs_diff") < 1e-5);
    assert!(recorder.get(2, "actor/ref_kl_k3") > 0.0, "the first update moved the policy");
    assert!(recorder.get(2, "rollout_probs_diff") < 1e-5);
}

/// Dropout applies to fine-tuning only: rollout, reference and updates of an adapter that was trained with dropout do not use it.
#[test]
fn rollout_reference_and_update_agree_at_any_temperature_and_without_dropout() {
    let dropping = LoraSettings { dropout: 0.5, ..LoraSettings::all_linear(4, 8.0) };
    for temperature in [0.6, 1.0, 1.5] {
        let config = RlConfig { temperature, ppo_epochs: 1, ..config() };
        let (summary, recorder, _) = run_with(&Model::new(), dropping.clone(), &config, false);
        summary.unwrap();
        for step in [1, 2] {
            assert!(recorder.get(step, "rollout_probs_diff") < 1e-5, "{temperature}");
            assert!(recorder.get(step, "actor/ppo_kl_k3") < 1e-6, "{temperature}");
        }
        assert!(recorder.get(1, "actor/ref_kl").abs() < 1e-6, "{temperature}");
    }
}

#[test]
fn samples_of_a_filtered_distribution_have_importance_weights() {
    let config = RlConfig { top_p: 0.7, max_steps: 1, ..config() };
    let (summary, recorder, _) = run(&Model::new(), &config, false);
    summary.unwrap();
    assert!(recorder.get(1, "rollout_probs_diff") < 1e-5, "the policy's own log-probabilities, before the filter");
    let mean = recorder.get(1, "rollout_corr/rollout_is_mean");
    assert!((0.6..0.95).contains(&mean), "top-p keeps 0.7 and the token that crosses it: {mean}");
    let recorder = run(&Model::new(), &RlConfig { max_steps: 1, ..self::config() }, false).1;
    assert!(!recorder.0.iter().any(|(_, metrics)| metrics.contains_key("rollout_corr/rollout_is_mean")));
}

/// High learning rates, for a task of a few dozen steps.
fn learning() -> RlConfig {
    RlConfig { learning_rate: 2e-2, ppo_epochs: 4, kl_coef: 0.0, ent_coef: 0.0, max_grad_norm: 5.0, ..config() }
}

#[test]
fn policies_learn_to_write_plain_text() {
    let model = Model::new();
    let ppo = |advantage_form, critic| RlConfig { advantage_form, critic, batch_size: 32, ..learning() };
    let grouped = |algorithm| RlConfig { algorithm, n_samples: 4, batch_size: 8, ..learning() };
    for config in [
        ppo(AdvantageForm::Token, CriticKind::Head),
        ppo(AdvantageForm::Token, CriticKind::Adapter),
        ppo(AdvantageForm::Sequence, CriticKind::Head),
        grouped(RlAlgorithm::Grpo),
        grouped(RlAlgorithm::DrGrpo),
        grouped(RlAlgorithm::Rloo),
        grouped(RlAlgorithm::ReinforcePlusPlus),
        grouped(RlAlgorithm::Raft),
        RlConfig { policy_loss: PolicyLossKind::Gspo, ..grouped(RlAlgorithm::Grpo) },
        RlConfig { policy_loss: PolicyLossKind::Cispo, clip_range_high: Some(0.28), ..grouped(RlAlgorithm::Grpo) },
    ] {
        let config = RlConfig { max_steps: 50, mini_batch_size: 32, ..config };
        let (summary, recorder, _) = run(&model, &config, false);
        summary.unwrap();
        let (first, last) = (recorder.mean("avg_reward", 1..11), recorder.mean("avg_reward", 41..51));
        let kind = (config.algorithm, config.policy_loss);
        assert!(last > 0.8 && last > first + 0.2, "{kind:?}: {first} to {last}");
    }
}

#[test]
fn the_update_does_not_depend_on_the_split_into_micro_batches() {
    let model = Model::new();
    // One epoch and one optimizer step: the gradient norms are those of the first step, before Adam rescales. Responses have different
    // lengths, so that micro-batches have different numbers of tokens.
    let split = |n| RlConfig { gradient_accumulation_steps: n, max_steps: 1, ppo_epochs: 1, ..config() };
    let ((_, whole, _), (_, parts, _)) = (run(&model, &split(1), false), run(&model, &split(5), false));
    for name in ["actor/grad_norm", "critic/grad_norm", "actor/pg_loss", "actor/entropy", "critic/vf_loss"] {
        let (whole, parts) = (whole.get(1, name), parts.get(1, name));
        assert!((whole - parts).abs() < 1e-5 * whole.abs().max(1.0), "{name}: {whole} and {parts}");
        assert!(name == "actor/pg_loss" || whole > 0.0, "{name}");
    }
}

#[test]
fn the_same_seed_gives_the_same_adapter() {
    let model = Model::new();
    assert_eq!(run(&model, &config(), false).2, run(&model, &config(), false).2);
}

#[test]
fn too_many_dropped_episodes_stop_the_run_with_the_reason() {
    let (summary, _, _) = run(&Model::new(), &config(), true);
    let message = summary.unwrap_err().to_string();
    assert!(message.contains("8 of 16 episodes were dropped"), "{message}");
    assert!(message.ends_with("most often: retrieval_timeout; the last: no answer within 1 s"), "{message}");
    let tolerant = RlConfig { max_drop_rate: 0.5, ..config() };
    let (summary, recorder, _) = run(&Model::new(), &tolerant, true);
    assert_eq!(summary.unwrap().dropped, [("retrieval_timeout".to_owned(), 16)].into());
    assert_eq!((recorder.get(1, "drop_rate"), recorder.get(1, "dropped/retrieval_timeout")), (0.5, 8.0));
}

#[test]
fn a_truncated_response_has_the_missing_eos_penalty() {
    let config = RlConfig { missing_eos_penalty: 5.0, kl_coef: 0.0, max_steps: 1, ..config() };
    let (_, recorder, _) = run(&Model::new(), &config, false);
    let truncated = recorder.get(1, "response_length/clip_ratio");
    assert!(truncated > 0.0, "the random model hardly ever stops by itself");
    let expected = recorder.get(1, "avg_reward") - 5.0 * truncated;
    assert!((recorder.get(1, "critic/rewards/mean") - expected).abs() < 1e-4);
}

/// Without KL the reward is the score plus the penalty, whose mean is a metric.
#[test]
fn long_responses_have_the_overlong_penalty() {
    let overlong = RlConfig { overlong_buffer_len: 6, overlong_penalty_factor: 2.0, ..config() };
    let (_, recorder, _) = run(&Model::new(), &RlConfig { kl_coef: 0.0, max_steps: 1, ..overlong }, false);
    let (mean, share) = (recorder.get(1, "overlong_reward"), recorder.get(1, "overlong"));
    assert!((-2.0..0.0).contains(&mean) && share > 0.0, "{mean} {share}");
    let expected = recorder.get(1, "critic/score/mean") + mean;
    assert!((recorder.get(1, "critic/rewards/mean") - expected).abs() < 1e-4);
}
