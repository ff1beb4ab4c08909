//! The formulas of policy optimisation against verl 0.9.1; expected values from `tests/reference/ppo.py`, which runs
//!
//! ```python
//! core_algos.compute_gae_advantage_return(rewards, values, response_mask, gamma, lam)
//! core_algos.compute_grpo_outcome_advantage(rewards, response_mask, index, norm_adv_by_std_in_grpo=True | False)
//! core_algos.compute_rloo_outcome_advantage(rewards, response_mask, index)
//! core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, response_mask, config)
//! core_algos.agg_loss(loss_mat, loss_mask, loss_agg_mode)
//! core_algos.compute_policy_loss_vanilla(old_log_prob, log_prob, advantages, response_mask, mode, config, is_weights)
//! core_algos.compute_value_loss(vpreds, returns, values, response_mask, cliprange_value, "token-mean")
//! core_algos.kl_penalty(log_prob, ref_log_prob, "kl" | "mse" | "low_var_kl")
//! core_algos.AdaptiveKLController(init_kl_coef, target_kl, horizon).update(current_kl, n_steps)
//! rollout_corr_helper.compute_rollout_correction_weights(log_ratio, response_mask, "token" | "sequence", threshold)
//! ```
#![allow(clippy::unwrap_used)]

mod support;

use querl_core::config::{KlEstimator, ValueLossKind};
use querl_train::rl::losses::{
    Aggregation, GroupScale, ImportanceLevel, KlController, PolicyClip, Rows, StepSize, ValueLossSettings,
    discounted_returns, effective_sample_share, gae, group_relative, importance_weights, kl_k1, kl_k2, kl_k3, kl_loss,
    kl_rows, leave_one_out, masked_mean, masked_whiten, policy_loss, token_rewards, value_loss, weighted_sum,
};
use serde_json::Value;
use support::{assert_rows, close, golden, mask, number, row, rows};

#[test]
fn gae_and_whitening_are_verls() {
    let golden = golden("ppo.json");
    for case in ["ragged", "interior"] {
        let case = &golden["gae"][case];
        let mask = mask(&case["response_mask"]);
        let (rewards, values) = (rows(&case["token_level_rewards"]), rows(&case["values"]));
        let found = gae(&rewards, &values, &mask, number(&case["gamma"]), number(&case["lam"]));
        assert_rows("returns", &found.returns, &rows(&case["returns"]), &mask);
        assert_rows("unwhitened", &found.advantages, &rows(&case["advantages_unwhitened"]), &mask);
        let whitened = masked_whiten(&found.advantages, &mask);
        assert_rows("advantages", &whitened, &rows(&case["advantages"]), &mask);
    }
    let case = &golden["whitening"];
    let (values, mask) = (rows(&case["values"]), mask(&case["response_mask"]));
    assert!(close(masked_mean(&values, &mask), number(&case["masked_mean"])));
    assert_rows("whitened", &masked_whiten(&values, &mask), &rows(&case["whitened"]), &mask);
}

#[test]
fn advantages_without_a_critic_are_verls() {
    let golden = golden("ppo.json");
    let case = &golden["group_advantages"];
    let (mask, rewards) = (mask(&case["response_mask"]), rows(&case["token_level_rewards"]));
    let groups: Vec<usize> = row(&case["index"]).iter().map(|index| *index as usize).collect();
    let totals: Vec<f32> = rewards.iter().map(|row| row.iter().sum()).collect();
    let is_alone = |b: usize| groups.iter().filter(|group| **group == groups[b]).count() == 1;
    assert!((0..groups.len()).any(is_alone), "the departure for single responses is met");
    let found = [
        ("grpo", group_relative(&totals, &groups, GroupScale::Deviation)),
        ("dr_grpo", group_relative(&totals, &groups, GroupScale::One)),
        ("rloo", leave_one_out(&totals, &groups)),
        ("rloo_vectorized", leave_one_out(&totals, &groups)),
    ];
    for (name, advantages) in found {
        let expected = rows(&case[name]);
        for (b, advantage) in advantages.iter().enumerate() {
            let expected = if is_alone(b) { 0.0 } else { expected[b][0] };
            assert!((advantage - expected).abs() < 5e-5, "{name}[{b}]: {advantage}, expected {expected}");
        }
    }
    let case = &case["reinforce_plus_plus"];
    let returns = discounted_returns(&rewards, &mask, number(&case["gamma"]));
    assert_rows("returns", &returns, &rows(&case["returns"]), &mask);
    assert_rows("whitened returns", &masked_whiten(&returns, &mask), &rows(&case["advantages"]), &mask);
}

#[test]
fn importance_weights_are_verls() {
    let golden = golden("ppo.json");
    let inputs = &golden["importance"];
    let mask = mask(&inputs["response_mask"]);
    let (old, behaviour) = (rows(&inputs["old_log_prob"]), rows(&inputs["rollout_log_prob"]));
    for (name, level) in [("token", ImportanceLevel::Token), ("sequence", ImportanceLevel::Sequence)] {
        let case = &inputs["cases"][name];
        let weights = importance_weights(&old, &behaviour, &mask, number(&inputs["threshold"]), level);
        assert_rows(name, &weights, &rows(&case["weights"]), &mask);
        assert!(close(masked_mean(&weights, &mask), number(&case["mean"])), "{name}");
        assert!(close(effective_sample_share(&weights, &mask), number(&case["eff_sample_size"])), "{name}");
    }
}

#[test]
fn losses_are_aggregated_as_by_verl() {
    let golden = golden("ppo.json");
    let losses = rows(&golden["agg_loss"]["loss_mat"]);
    for case in golden["agg_loss"]["cases"].as_array().unwrap() {
        let mask = mask(&case["loss_mask"]);
        for (name, aggregation) in [
            ("token-mean", Aggregation::TokenMean),
            ("seq-mean-token-mean", Aggregation::SequenceMean),
            ("seq-mean-token-sum", Aggregation::SequenceSum { scale: 1.0 }),
            ("seq-mean-token-sum-norm-16", Aggregation::SequenceSum { scale: 16.0 }),
        ] {
            let found = weighted_sum(&losses, &aggregation.weights(&mask, StepSize::of(&mask)));
            assert!(close(found, number(&case[name])), "{name}: {found}, expected {}", case[name]);
        }
    }
}

fn aggregation(case: &Value) -> Aggregation {
    match case["loss_agg_mode"].as_str().unwrap() {
        "token-mean" => Aggregation::TokenMean,
        "seq-mean-token-mean" => Aggregation::SequenceMean,
        "seq-mean-token-sum-norm" => Aggregation::SequenceSum { scale: 16.0 },
        other => panic!("{other}"),
    }
}

#[test]
fn policy_loss_and_its_gradient_are_verls() {
    let golden = golden("ppo.json");
    let inputs = &golden["policy_loss"];
    let mask = mask(&inputs["response_mask"]);
    let size = StepSize::of(&mask);
    let mut n_cases = 0;
    for (name, case) in inputs["cases"].as_object().unwrap() {
        if case["clip_ratio_low"] != case["clip_ratio_high"] {
            continue; // querl clips symmetrically
        }
        let far = name == "far";
        let new = rows(match name.as_str() {
            "far" => &inputs["log_prob_far"],
            "unchanged" => &inputs["old_log_prob"],
            _ => &inputs["log_prob"],
        });
        let advantages = rows(&inputs[if far { "advantages_far" } else { "advantages" }]);
        let mut weights = aggregation(case).weights(&mask, size);
        if name == "weighted" {
            let importance = rows(&inputs["importance_weights"]).concat();
            weights.iter_mut().flatten().zip(importance).for_each(|(weight, importance)| *weight *= importance);
        }
        let dual_clip = number(&case["clip_ratio_c"]);
        let clip = PolicyClip {
            clip_range: number(&case["clip_ratio_low"]),
            dual_clip: (dual_clip < 1e6).then_some(dual_clip),
        };
        let loss = policy_loss(&rows(&inputs["old_log_prob"]), &new, &advantages, &weights, clip);
        let share = |n: usize| n as f32 / size.n_tokens as f32;
        assert!(close(loss.pg_loss, number(&case["pg_loss"])), "{name}: {} {}", loss.pg_loss, case["pg_loss"]);
        assert!(close(share(loss.n_clipped), number(&case["pg_clipfrac"])), "{name}");
        assert!(close(share(loss.n_clipped_lower), number(&case["pg_clipfrac_lower"])), "{name}");
        assert!(close(loss.kl_sum as f32 / size.n_tokens as f32, number(&case["ppo_kl"])), "{name}");
        assert_rows(name, &loss.grad_logprobs, &rows(&case["grad_log_prob"]), &mask);
        n_cases += 1;
    }
    assert_eq!(n_cases, 7);
}

#[test]
fn value_loss_and_its_gradient_are_verls_and_torchs() {
    let golden = golden("ppo.json");
    let inputs = &golden["value_loss"];
    let mask = mask(&inputs["response_mask"]);
    let range = Some(number(&inputs["cliprange_value"]));
    for (name, kind, clip_range_value, aggregation) in [
        ("token-mean", ValueLossKind::Squared, range, Aggregation::TokenMean),
        ("seq-mean-token-mean", ValueLossKind::Squared, range, Aggregation::SequenceMean),
        ("huber", ValueLossKind::Huber, range, Aggregation::TokenMean),
        ("unclipped_huber", ValueLossKind::Huber, None, Aggregation::TokenMean),
    ] {
        let case = &inputs["cases"][name];
        let vpreds = case.get("vpreds").unwrap_or(&inputs["vpreds"]);
        let loss = value_loss(
            &rows(&inputs["values"]),
            &rows(vpreds),
            &rows(&inputs["returns"]),
            &aggregation.weights(&mask, StepSize::of(&mask)),
            ValueLossSettings { kind, clip_range_value },
        );
        let n_tokens = StepSize::of(&mask).n_tokens as f32;
        assert!(close(loss.vf_loss, number(&case["vf_loss"])), "{name}: {} {}", loss.vf_loss, case["vf_loss"]);
        assert!(close(loss.n_clipped as f32 / n_tokens, number(&case["vf_clipfrac"])), "{name}");
        assert_rows(name, &loss.grad_values, &rows(&case["grad_vpreds"]), &mask);
    }
}

#[test]
fn kl_estimators_and_their_gradients_are_verls() {
    let golden = golden("ppo.json");
    let inputs = &golden["kl"];
    let (logprobs, reference) = (rows(&inputs["log_prob"]), rows(&inputs["ref_log_prob"]));
    let everywhere: Vec<Vec<bool>> = logprobs.iter().map(|row| vec![true; row.len()]).collect();
    let ones: Rows = logprobs.iter().map(|row| vec![1.0; row.len()]).collect();
    let mask = mask(&golden["policy_loss"]["response_mask"]);
    let weights = Aggregation::SequenceMean.weights(&mask, StepSize::of(&mask));
    type Estimator = fn(f32, f32) -> f32;
    let estimators: [(&str, KlEstimator, Estimator); 3] =
        [("k1", KlEstimator::K1, kl_k1), ("k2", KlEstimator::K2, kl_k2), ("k3", KlEstimator::K3, kl_k3)];
    for (name, estimator, function) in estimators {
        let case = &inputs["estimates"][name];
        let found = kl_rows(estimator, &logprobs, &reference);
        assert_rows(name, &found, &rows(&case["kl"]), &everywhere);
        assert_eq!(found[0][0], function(logprobs[0][0], reference[0][0]));
        let summed = kl_loss(estimator, &logprobs, &reference, &ones);
        assert_rows(name, &summed.grad_logprobs, &rows(&case["grad_log_prob"]), &everywhere);
        let loss = kl_loss(estimator, &logprobs, &reference, &weights);
        assert!(close(loss.kl_loss, number(&case["loss_seq_mean_token_mean"])), "{name}");
        assert_rows(name, &loss.grad_logprobs, &rows(&case["grad_of_loss"]), &mask);
    }
}

#[test]
fn token_rewards_and_the_adaptive_coefficient_are_verls() {
    let golden = golden("ppo.json");
    let inputs = &golden["kl"];
    let (logprobs, reference) = (rows(&inputs["log_prob"]), rows(&inputs["ref_log_prob"]));
    let case = &inputs["rewards"];
    let scores: Vec<f32> = rows(&case["token_level_scores"]).iter().map(|row| row.iter().sum()).collect();
    // verl's rows are padded; here a row ends with its response, where verl puts the score.
    let placed = rows(&case["token_level_scores"]);
    let lengths: Vec<usize> = placed.iter().map(|row| row.iter().rposition(|x| *x != 0.0).unwrap() + 1).collect();
    let cut = |rows: &Rows| -> Rows { rows.iter().zip(&lengths).map(|(row, n)| row[..*n].to_vec()).collect() };
    let expected = cut(&rows(&case["token_level_rewards"]));
    let kl = kl_rows(KlEstimator::K1, &cut(&logprobs), &cut(&reference));
    let found = token_rewards(&scores, &kl, number(&case["kl_coef"]));
    let mask: Vec<Vec<bool>> = expected.iter().map(|row| vec![true; row.len()]).collect();
    assert_rows("token rewards", &found, &expected, &mask);

    let case = &inputs["adaptive"];
    let double = |name: &str| case[name].as_f64().unwrap();
    let mut controller =
        KlController::new(double("init_kl_coef"), double("target_kl"), case["horizon"].as_u64().unwrap() as usize);
    for (current, expected) in row(&case["current_kl"]).iter().zip(row(&case["kl_coef"])) {
        controller.update(f64::from(*current), case["n_steps"].as_u64().unwrap() as usize);
        assert!(close(controller.kl_coef() as f32, expected), "{} {expected}", controller.kl_coef());
    }
}
