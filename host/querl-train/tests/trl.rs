//! The formulas of policy optimisation against TRL 0.11.4 (PPO) and 0.24.0 (GRPO); expected values from
//! `tests/reference/trl_golden.py`, which runs
//!
//! ```python
//! PPOTrainer.compute_rewards(scores, logprobs, ref_logprobs, masks)
//! PPOTrainer.compute_advantages(values, rewards, mask)
//! PPOTrainer.loss(old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns)
//! GRPOTrainer._compute_loss(model, inputs)  # loss_type "grpo" | "dr_grpo", beta 0 | 0.1
//! RunningMoments.update(scores)
//! AdaptiveKLController.update(current, n_steps)
//! ```
#![allow(clippy::unwrap_used)]

mod support;

use querl_core::config::{KlEstimator, ValueLossKind};
use querl_train::rl::losses::{
    Aggregation, KlController, PolicyClip, Rows, RunningMoments, StepSize, ValueLossSettings, gae, kl_loss, kl_rows,
    masked_whiten, policy_loss, token_rewards, value_loss,
};
use serde_json::Value;
use support::{assert_rows, close, golden, mask, number, row, rows};

/// Rows of a golden, each cut at the end of its response.
fn cut(value: &Value, mask: &[Vec<bool>]) -> Rows {
    let length = |mask: &Vec<bool>| mask.iter().filter(|keep| **keep).count();
    rows(value).iter().zip(mask).map(|(row, mask)| row[..length(mask)].to_vec()).collect()
}

#[test]
fn a_ppo_step_is_trls_from_rewards_to_gradients() {
    let golden = golden("trl.json");
    let case = &golden["ppo"];
    let padded = mask(&case["response_mask"]);
    let get = |name: &str| cut(&case[name], &padded);
    let mask: Vec<Vec<bool>> = get("values").iter().map(|row| vec![true; row.len()]).collect();
    let kl = kl_rows(KlEstimator::K1, &get("old_logprobs"), &get("ref_logprobs"));
    let rewards = token_rewards(&row(&case["scores"]), &kl, number(&case["kl_coef"]));
    assert_rows("rewards", &rewards, &get("rewards"), &mask);
    let found = gae(&rewards, &get("values"), &mask, number(&case["gamma"]), number(&case["lam"]));
    assert_rows("returns", &found.returns, &get("returns"), &mask);
    let advantages = masked_whiten(&found.advantages, &mask);
    assert_rows("advantages", &advantages, &get("advantages"), &mask);

    let size = StepSize::of(&mask);
    let weights = Aggregation::TokenMean.weights(&mask, size);
    let share = |n: usize| n as f32 / size.n_tokens as f32;
    let clip = PolicyClip { clip_range: number(&case["cliprange"]), dual_clip: None };
    let loss = policy_loss(&get("old_logprobs"), &get("logprobs"), &advantages, &weights, clip);
    assert!(close(loss.pg_loss, number(&case["pg_loss"])));
    assert!(close(loss.kl_sum as f32 / size.n_tokens as f32, number(&case["policykl"])));
    assert!(close(share(loss.n_clipped), number(&case["clipfrac"])));
    assert_rows("policy", &loss.grad_logprobs, &get("grad_logprobs"), &mask);

    let settings =
        ValueLossSettings { kind: ValueLossKind::Squared, clip_range_value: Some(number(&case["cliprange_value"])) };
    let loss = value_loss(&get("values"), &get("vpreds"), &found.returns, &weights, settings);
    let vf_coef = number(&case["vf_coef"]);
    assert!(close(loss.vf_loss * vf_coef, number(&case["weighted_vf_loss"])));
    assert!(close(share(loss.n_clipped), number(&case["vf_clipfrac"])));
    let weighted: Rows = loss.grad_values.iter().map(|row| row.iter().map(|g| g * vf_coef).collect()).collect();
    assert_rows("values", &weighted, &get("grad_vpreds"), &mask);
}

#[test]
fn the_losses_of_grpo_and_dr_grpo_are_trls() {
    let golden = golden("trl.json");
    let inputs = &golden["grpo"];
    let mask = mask(&inputs["completion_mask"]);
    let (old, new, reference) = (rows(&inputs["old_logps"]), rows(&inputs["logps"]), rows(&inputs["ref_logps"]));
    let spread = |(advantage, row): (&f32, &Vec<f32>)| vec![*advantage; row.len()];
    let advantages: Rows = row(&inputs["advantages"]).iter().zip(&old).map(spread).collect();
    let scale = number(&inputs["max_completion_length"]);
    for (name, case) in inputs["cases"].as_object().unwrap() {
        let aggregation = match case["loss_type"].as_str().unwrap() {
            "grpo" => Aggregation::SequenceMean,
            _ => Aggregation::SequenceSum { scale },
        };
        let weights = aggregation.weights(&mask, StepSize::of(&mask));
        let clip = PolicyClip { clip_range: number(&inputs["epsilon"]), dual_clip: None };
        let surrogate = policy_loss(&old, &new, &advantages, &weights, clip);
        let (kl, beta) = (kl_loss(KlEstimator::K3, &new, &reference, &weights), number(&case["beta"]));
        assert!(close(surrogate.pg_loss + beta * kl.kl_loss, number(&case["loss"])), "{name}");
        let sum = |(a, b): (&Vec<f32>, &Vec<f32>)| a.iter().zip(b).map(|(a, b)| a + beta * b).collect();
        let gradient: Rows = surrogate.grad_logprobs.iter().zip(&kl.grad_logprobs).map(sum).collect();
        assert_rows(name, &gradient, &rows(&case["grad_logps"]), &mask);
    }
}

#[test]
fn running_moments_and_the_adaptive_coefficient_are_trls() {
    let golden = golden("trl.json");
    let case = &golden["running_moments"];
    let mut moments = RunningMoments::default();
    let expected = row(&case["std"]).into_iter().zip(row(&case["mean"]));
    for (batch, (std, mean)) in case["batches"].as_array().unwrap().iter().zip(expected) {
        moments.update(&row(batch));
        assert!(
            close(moments.deviation() as f32, std) && close(moments.mean() as f32, mean),
            "{moments:?} {std} {mean}"
        );
    }
    let case = &golden["adaptive_kl"];
    let mut controller = KlController::new(
        case["init_kl_coef"].as_f64().unwrap(),
        case["target"].as_f64().unwrap(),
        case["horizon"].as_u64().unwrap() as usize,
    );
    for (current, expected) in row(&case["current"]).iter().zip(row(&case["kl_coef"])) {
        controller.update(f64::from(*current), case["n_steps"].as_u64().unwrap() as usize);
        assert!(close(controller.kl_coef() as f32, expected));
    }
}
