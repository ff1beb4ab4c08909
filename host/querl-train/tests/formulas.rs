//! Compares the formulas of policy optimisation with verl 0.9.1; expected values from `tests/reference/ppo.py`, which runs
//!
//! ```python
//! core_algos.compute_gae_advantage_return(rewards, values, response_mask, gamma, lam)
//! core_algos.compute_grpo_outcome_advantage(rewards, response_mask, index, norm_adv_by_std_in_grpo=True | False)
//! core_algos.compute_rloo_outcome_advantage(rewards, response_mask, index)
//! core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, response_mask, config)
//! core_algos.agg_loss(loss_mat, loss_mask, loss_agg_mode)
//! core_algos.compute_policy_loss_{vanilla,gspo,cispo,gpg}(old_log_prob, log_prob, advantages, response_mask, mode, config, is_weights)
//! DAPORewardManager.run_single(data)["reward_extra_info"]["overlong_reward"]
//! core_algos.compute_value_loss(vpreds, returns, values, response_mask, cliprange_value, "token-mean")
//! core_algos.kl_penalty(log_prob, ref_log_prob, "kl" | "mse" | "low_var_kl")
//! core_algos.AdaptiveKLController(init_kl_coef, target_kl, horizon).update(current_kl, n_steps)
//! rollout_corr_helper.compute_rollout_correction_weights(log_ratio, response_mask, "token" | "sequence", threshold)
//! ```
//!
//! and with TRL 0.11.4 (PPO) and 0.24.0 (GRPO); expected values from `tests/reference/trl_golden.py`, which runs
//!
//! ```python
//! PPOTrainer.compute_rewards(scores, logprobs, ref_logprobs, masks)
//! PPOTrainer.compute_advantages(values, rewards, mask)
//! PPOTrainer.loss(old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns)
//! GRPOTrainer._compute_loss(model, inputs)  # loss_type "grpo" | "dr_grpo", beta 0 | 0.1
//! RunningMoments.update(scores)
//! AdaptiveKLController.update(current, n_steps)
//! ```
//!
//! Log-probabilities, optimizer and schedule are compared with verl, torch and transformers.
#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Tensor, Var};
use querl_core::config::{BaseDtype, KlEstimator, LrScheduler, ValueLossKind};
use querl_model::kernels::{FrozenWeight, Weight, token_logprobs};
use querl_train::rl::advantages::{
    GroupScale, RunningMoments, discounted_returns, gae, group_relative, leave_one_out, masked_whiten,
    overlong_penalty, token_rewards,
};
use querl_train::rl::losses::{
    Aggregation, ImportanceLevel, KlController, PolicyClip, Rows, StepSize, ValueLossSettings, cispo_loss,
    effective_sample_share, gspo_loss, importance_weights, kl_k1, kl_k2, kl_k3, kl_loss, kl_rows, likelihood_loss,
    masked_mean, policy_loss, value_loss,
};
use querl_train::{AdamW, AdamWSettings, Gradients, lr_factor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const TOLERANCE: f32 = 2e-5;

fn golden(file: &str, section: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden").join(file);
    serde_json::from_str::<Value>(&std::fs::read_to_string(path).unwrap()).unwrap()[section].take()
}

fn number(value: &Value) -> f32 {
    value.as_f64().unwrap() as f32
}

fn row(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(number).collect()
}

fn rows(value: &Value) -> Rows {
    value.as_array().unwrap().iter().map(row).collect()
}

fn mask(value: &Value) -> Vec<Vec<bool>> {
    rows(value).iter().map(|row| row.iter().map(|keep| *keep != 0.0).collect()).collect()
}

fn all_true(rows: &Rows) -> Vec<Vec<bool>> {
    rows.iter().map(|row| vec![true; row.len()]).collect()
}

fn close(found: f32, expected: f32) -> bool {
    (found - expected).abs() <= TOLERANCE * expected.abs().max(1.0)
}

/// The references leave arbitrary values at masked positions; querl has 0 there.
fn assert_rows(what: &str, found: &Rows, expected: &Rows, mask: &[Vec<bool>]) {
    for (b, mask) in mask.iter().enumerate() {
        for (t, keep) in mask.iter().enumerate() {
            let (found, expected) = (found[b][t], if *keep { expected[b][t] } else { 0.0 });
            assert!(close(found, expected), "{what}[{b}][{t}]: {found}, expected {expected}");
        }
    }
}

#[test]
fn gae_and_whitening_are_verls() {
    let cases = golden("ppo.json", "gae");
    for case in ["ragged", "interior"] {
        let case = &cases[case];
        let mask = mask(&case["response_mask"]);
        let (rewards, values) = (rows(&case["token_level_rewards"]), rows(&case["values"]));
        let found = gae(&rewards, &values, &mask, number(&case["gamma"]), number(&case["lam"]));
        assert_rows("returns", &found.returns, &rows(&case["returns"]), &mask);
        assert_rows("unwhitened", &found.advantages, &rows(&case["advantages_unwhitened"]), &mask);
        let whitened = masked_whiten(&found.advantages, &mask);
        assert_rows("advantages", &whitened, &rows(&case["advantages"]), &mask);
    }
    let case = golden("ppo.json", "whitening");
    let (values, mask) = (rows(&case["values"]), mask(&case["response_mask"]));
    assert!(close(masked_mean(&values, &mask), number(&case["masked_mean"])));
    assert_rows("whitened", &masked_whiten(&values, &mask), &rows(&case["whitened"]), &mask);
}

#[test]
fn advantages_without_a_critic_are_verls() {
    let case = golden("ppo.json", "group_advantages");
    let (mask, rewards) = (mask(&case["response_mask"]), rows(&case["token_level_rewards"]));
    let groups: Vec<usize> = row(&case["index"]).iter().map(|index| *index as usize).collect();
    let totals: Vec<f32> = rewards.iter().map(|row| row.iter().sum()).collect();
    let is_alone = |b: usize| groups.iter().filter(|group| **group == groups[b]).count() == 1;
    assert!((0..groups.len()).any(is_alone), "the departure for single responses is met");
    let found = [
        ("grpo", group_relative(&totals, &groups, None, GroupScale::Deviation)),
        ("dr_grpo", group_relative(&totals, &groups, None, GroupScale::One)),
        ("rloo", leave_one_out(&totals, &groups, None)),
        ("rloo_vectorized", leave_one_out(&totals, &groups, None)),
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
    let inputs = golden("ppo.json", "importance");
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
    let inputs = golden("ppo.json", "agg_loss");
    let losses = rows(&inputs["loss_mat"]);
    for case in inputs["cases"].as_array().unwrap() {
        let mask = mask(&case["loss_mask"]);
        for (name, aggregation) in [
            ("token-mean", Aggregation::TokenMean),
            ("seq-mean-token-mean", Aggregation::SequenceMean),
            ("seq-mean-token-sum", Aggregation::SequenceSum { scale: 1.0 }),
            ("seq-mean-token-sum-norm-16", Aggregation::SequenceSum { scale: 16.0 }),
        ] {
            let weights = aggregation.weights(&mask, StepSize::of(&mask)).concat();
            let found: f32 = losses.concat().iter().zip(weights).map(|(loss, weight)| loss * weight).sum();
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
    let inputs = golden("ppo.json", "policy_loss");
    let mask = mask(&inputs["response_mask"]);
    let size = StepSize::of(&mask);
    let mut n_cases = 0;
    for (name, case) in inputs["cases"].as_object().unwrap() {
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
            clip_range_high: number(&case["clip_ratio_high"]),
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
    assert_eq!(n_cases, 8);
}

/// GSPO, CISPO, and the log-likelihood of RAFT. In `far`, log-ratios exceed their bounds.
#[test]
fn other_policy_losses_and_their_gradients_are_verls() {
    let inputs = golden("ppo.json", "other_policy_losses");
    let (mask, old) = (mask(&inputs["response_mask"]), rows(&inputs["old_log_prob"]));
    let size = StepSize::of(&mask);
    let cases = inputs["cases"].as_object().unwrap();
    assert_eq!(cases.len(), 8);
    for (name, case) in cases {
        let is_far = name.ends_with("_far");
        let new = rows(&inputs[if is_far { "log_prob_far" } else { "log_prob" }]);
        let by_response = ["gspo", "gspo_weighted", "gspo_far", "gpg"].contains(&name.as_str());
        let advantages = rows(&inputs[if by_response { "advantages_of_responses" } else { "advantages" }]);
        let mut weights = aggregation(case).weights(&mask, size);
        if name.ends_with("_weighted") {
            let importance = rows(&inputs["importance_weights"]).concat();
            weights.iter_mut().flatten().zip(importance).for_each(|(weight, importance)| *weight *= importance);
        }
        let (clip_range, clip_range_high) = (number(&case["clip_ratio_low"]), number(&case["clip_ratio_high"]));
        let clip = PolicyClip { clip_range, clip_range_high, dual_clip: None };
        let loss = match name.split('_').next().unwrap() {
            "gspo" => gspo_loss(&old, &new, &advantages, &mask, &weights, clip),
            "cispo" => cispo_loss(&old, &new, &advantages, &weights, clip),
            "gpg" => likelihood_loss(&old, &new, &advantages, &weights),
            other => panic!("{other}"),
        };
        assert!(close(loss.pg_loss, number(&case["pg_loss"])), "{name}: {} {}", loss.pg_loss, case["pg_loss"]);
        assert_rows(name, &loss.grad_logprobs, &rows(&case["grad_log_prob"]), &mask);
        if name == "gpg" {
            continue; // without metrics
        }
        let share = loss.n_clipped as f32 / size.n_tokens as f32;
        assert!(close(share, number(&case["pg_clipfrac"])), "{name}: {share}");
        // verl does not bound the log-ratios of this metric in GSPO.
        if name != "gspo_far" {
            assert!(close(loss.kl_sum as f32 / size.n_tokens as f32, number(&case["ppo_kl"])), "{name}");
        }
    }
}

#[test]
fn the_overlong_penalty_is_verls() {
    let cases = golden("ppo.json", "overlong");
    for case in cases.as_array().unwrap() {
        let integer = |name: &str| case[name].as_u64().unwrap() as usize;
        let (max_new_tokens, buffer_len) = (integer("max_resp_len"), integer("len"));
        let factor = case["penalty_factor"].as_f64().unwrap();
        for (n_tokens, expected) in row(&case["lengths"]).iter().zip(row(&case["overlong_reward"])) {
            let penalty = overlong_penalty(*n_tokens as usize, max_new_tokens, buffer_len, factor);
            assert!(close(-penalty as f32, expected), "{n_tokens} of {max_new_tokens}: {penalty}, expected {expected}");
        }
    }
    assert_eq!(overlong_penalty(20, 20, 0, 1.0), 0.0);
}

#[test]
fn value_loss_and_its_gradient_are_verls_and_torchs() {
    let inputs = golden("ppo.json", "value_loss");
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
    let inputs = golden("ppo.json", "kl");
    let (logprobs, reference) = (rows(&inputs["log_prob"]), rows(&inputs["ref_log_prob"]));
    let everywhere = all_true(&logprobs);
    let ones: Rows = logprobs.iter().map(|row| vec![1.0; row.len()]).collect();
    let mask = mask(&golden("ppo.json", "policy_loss")["response_mask"]);
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
    let inputs = golden("ppo.json", "kl");
    let (logprobs, reference) = (rows(&inputs["log_prob"]), rows(&inputs["ref_log_prob"]));
    let case = &inputs["rewards"];
    let scores: Vec<f32> = rows(&case["token_level_scores"]).iter().map(|row| row.iter().sum()).collect();
    // verl's rows are padded; here a row ends with its response, at whose last token verl puts the score.
    let placed = rows(&case["token_level_scores"]);
    let lengths: Vec<usize> = placed.iter().map(|row| row.iter().rposition(|x| *x != 0.0).unwrap() + 1).collect();
    let cut = |rows: &Rows| -> Rows { rows.iter().zip(&lengths).map(|(row, n)| row[..*n].to_vec()).collect() };
    let expected = cut(&rows(&case["token_level_rewards"]));
    let kl = kl_rows(KlEstimator::K1, &cut(&logprobs), &cut(&reference));
    let found = token_rewards(&scores, &kl, number(&case["kl_coef"]));
    assert_rows("token rewards", &found, &expected, &all_true(&expected));

    assert_adaptive(&inputs["adaptive"], ["target_kl", "current_kl"]);
}

/// Compares the adaptive KL coefficient after each KL. `names`: keys of the target and of the KLs.
fn assert_adaptive(case: &Value, names: [&str; 2]) {
    let [target, current] = names.map(|name| &case[name]);
    let horizon = case["horizon"].as_u64().unwrap() as usize;
    let mut controller = KlController::new(case["init_kl_coef"].as_f64().unwrap(), target.as_f64().unwrap(), horizon);
    for (current, expected) in row(current).iter().zip(row(&case["kl_coef"])) {
        controller.update(f64::from(*current), case["n_steps"].as_u64().unwrap() as usize);
        assert!(close(controller.kl_coef() as f32, expected), "{} {expected}", controller.kl_coef());
    }
}

/// Rows of a golden, each cut at the end of its response.
fn cut(value: &Value, mask: &[Vec<bool>]) -> Rows {
    let length = |mask: &Vec<bool>| mask.iter().filter(|keep| **keep).count();
    rows(value).iter().zip(mask).map(|(row, mask)| row[..length(mask)].to_vec()).collect()
}

#[test]
fn a_ppo_step_is_trls_from_rewards_to_gradients() {
    let case = golden("trl.json", "ppo");
    let padded = mask(&case["response_mask"]);
    let get = |name: &str| cut(&case[name], &padded);
    let mask = all_true(&get("values"));
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
    let clip_range = number(&case["cliprange"]);
    let clip = PolicyClip { clip_range, clip_range_high: clip_range, dual_clip: None };
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
    let inputs = golden("trl.json", "grpo");
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
        let clip_range = number(&inputs["epsilon"]);
        let clip = PolicyClip { clip_range, clip_range_high: clip_range, dual_clip: None };
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
    let case = golden("trl.json", "running_moments");
    let mut moments = RunningMoments::default();
    let expected = row(&case["std"]).into_iter().zip(row(&case["mean"]));
    for (batch, (std, mean)) in case["batches"].as_array().unwrap().iter().zip(expected) {
        moments.update(&row(batch));
        assert!(close(moments.deviation() as f32, std), "{moments:?} {std} {mean}");
        assert!(close(moments.mean() as f32, mean), "{moments:?} {std} {mean}");
    }
    assert_adaptive(&golden("trl.json", "adaptive_kl"), ["target", "current"]);
}

/// The head is the identity, so that hidden states are logits; multiplied by the temperature, they give the same distribution at any
/// temperature.
#[test]
fn entropy_and_logprobs_and_their_gradients_are_verls() {
    let case = golden("ppo.json", "entropy");
    let logits: Vec<Vec<f32>> = case["logits"].as_array().unwrap().iter().flat_map(rows).collect();
    let (n, v) = (logits.len(), logits[0].len());
    let flat = |name: &str| rows(&case[name]).concat();
    let labels = Arc::new(flat("labels").iter().map(|label| *label as u32).collect::<Vec<_>>());
    let mask = flat("response_mask");
    let weight = 1.0 / mask.iter().sum::<f32>();
    let identity = FrozenWeight::pack(&Tensor::eye(v, DType::F32, &Device::Cpu).unwrap(), BaseDtype::F32).unwrap();
    let identity = Weight::Frozen(identity);
    for temperature in [1.0, 0.7] {
        let scaled: Vec<f32> = logits.concat().iter().map(|x| x * temperature as f32).collect();
        let hidden = Var::from_vec(scaled, (n, v), &Device::Cpu).unwrap();
        let both = token_logprobs(&hidden, &identity, &labels, temperature).unwrap();
        let found: Vec<Vec<f32>> = both.to_vec2().unwrap();
        for (row, (logprob, entropy)) in found.iter().zip(flat("logprobs").iter().zip(flat("entropy"))) {
            assert!(close(row[0], *logprob) && close(row[1], entropy), "{row:?}, expected {logprob}, {entropy}");
        }
        let outer: Vec<f32> = mask.iter().flat_map(|keep| [0.0, keep * weight]).collect();
        let loss = (both * Tensor::from_vec(outer, (n, 2), &Device::Cpu).unwrap()).unwrap().sum_all().unwrap();
        let gradient: Vec<Vec<f32>> = loss.backward().unwrap().get(&hidden).unwrap().to_vec2().unwrap();
        let expected = case["grad_logits_of_token_mean"].as_array().unwrap().iter().flat_map(rows);
        for (found, expected) in gradient.concat().iter().zip(expected.flatten()) {
            assert!(close(found * temperature as f32, expected), "{found}, expected {expected}");
        }
    }
}

/// Creates [`Gradients`] with given values, by a loss with these gradients.
fn gradients_of(vars: &BTreeMap<String, Var>, gradients: &[(&str, Vec<f32>)]) -> Gradients {
    let mut sum = Gradients::default();
    for (name, gradient) in gradients {
        let var = &vars[*name];
        let outer = Tensor::from_vec(gradient.clone(), var.shape(), &Device::Cpu).unwrap();
        let loss = (var.as_tensor() * outer).unwrap().sum_all().unwrap();
        sum.add(&loss.backward().unwrap(), &BTreeMap::from([((*name).to_owned(), var.clone())])).unwrap();
    }
    sum
}

#[test]
fn adamw_is_torchs() {
    let case = golden("ppo.json", "adamw");
    let flat = |value: &Value| rows(value).concat();
    let shape = (rows(&case["start"]).len(), rows(&case["start"])[0].len());
    let var = Var::from_vec(flat(&case["start"]), shape, &Device::Cpu).unwrap();
    let vars = BTreeMap::from([("w".to_owned(), var.clone())]);
    let weight_decay = case["weight_decay"].as_f64().unwrap();
    let mut optimizer = AdamW::new(AdamWSettings { weight_decay, ..Default::default() });
    let steps = case["gradients"].as_array().unwrap().iter().zip(case["parameters"].as_array().unwrap());
    for (gradient, expected) in steps {
        let gradients = gradients_of(&vars, &[("w", flat(gradient))]);
        optimizer.step(&vars, &gradients, case["lr"].as_f64().unwrap()).unwrap();
        let found: Vec<f32> = var.as_tensor().flatten_all().unwrap().to_vec1().unwrap();
        for (found, expected) in found.iter().zip(flat(expected)) {
            assert!((found - expected).abs() < 1e-6, "{found}, expected {expected}");
        }
    }
}

#[test]
fn gradients_are_clipped_as_by_torch() {
    let case = golden("ppo.json", "clip_grad_norm");
    let (a, b) = (rows(&case["gradients"][0]), row(&case["gradients"][1]));
    let vars = BTreeMap::from([
        ("a".to_owned(), Var::from_vec(vec![0f32; 6], (2, 3), &Device::Cpu).unwrap()),
        ("b".to_owned(), Var::from_vec(vec![0f32; 4], 4, &Device::Cpu).unwrap()),
    ]);
    for case in case["cases"].as_array().unwrap() {
        let mut gradients = gradients_of(&vars, &[("a", a.concat()), ("b", b.clone())]);
        let norm = gradients.clip(case["max_norm"].as_f64().unwrap()).unwrap();
        assert!(close(norm as f32, number(&case["total_norm"])));
        let expected = [rows(&case["clipped"][0]).concat(), row(&case["clipped"][1])].concat();
        let found = ["a", "b"].map(|name| gradients.get(name).unwrap().unwrap()).concat();
        for (found, expected) in found.iter().zip(expected) {
            assert!(close(*found, expected), "{found}, expected {expected}");
        }
    }
}

#[test]
fn the_cosine_schedule_is_transformers() {
    let case = golden("ppo.json", "cosine_schedule");
    let (n_warmup, n_steps) =
        (case["num_warmup_steps"].as_u64().unwrap(), case["num_training_steps"].as_u64().unwrap());
    for (step, expected) in row(&case["factor_of_step_from_0_to_40"]).iter().enumerate() {
        assert!(close(lr_factor(LrScheduler::Cosine, step as u64, n_warmup, n_steps) as f32, *expected), "step {step}");
    }
}
