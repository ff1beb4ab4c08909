//! The formulas against verl, torch and transformers; expected values from `tests/reference/ppo.py`, which runs
//!
//! ```python
//! core_algos.compute_gae_advantage_return(rewards, values, response_mask, gamma, lam)
//! core_algos.compute_policy_loss_vanilla(old_log_prob, log_prob, advantages, response_mask, "token-mean", config)
//! core_algos.compute_value_loss(vpreds, returns, values, response_mask, cliprange_value, "token-mean")
//! core_algos.kl_penalty(log_prob, ref_log_prob, "kl" | "mse" | "low_var_kl")
//! ```
#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Tensor, Var};
use querl_core::config::BaseDtype;
use querl_model::kernels::{FrozenWeight, Weight, token_logprobs};
use querl_train::maths::{
    Rows, gae, kl_k1, kl_k2, kl_k3, masked_mean, masked_whiten, policy_loss, token_rewards, value_loss,
};
use querl_train::{AdamW, AdamWSettings, Gradients, cosine_with_warmup};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const TOLERANCE: f32 = 2e-5;

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/ppo.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
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

fn close(found: f32, expected: f32) -> bool {
    (found - expected).abs() <= TOLERANCE * expected.abs().max(1.0)
}

/// verl leaves whatever was computed at masked positions; querl puts 0 there.
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
    let golden = golden();
    for case in ["ragged", "interior"] {
        let case = &golden["gae"][case];
        let mask = mask(&case["response_mask"]);
        let found = gae(
            &rows(&case["token_level_rewards"]),
            &rows(&case["values"]),
            &mask,
            number(&case["gamma"]),
            number(&case["lam"]),
        );
        assert_rows("returns", &found.returns, &rows(&case["returns"]), &mask);
        let whitened = masked_whiten(&found.advantages, &mask);
        assert_rows("advantages", &whitened, &rows(&case["advantages"]), &mask);
    }
    let case = &golden["whitening"];
    let (values, mask) = (rows(&case["values"]), mask(&case["response_mask"]));
    assert!(close(masked_mean(&values, &mask), number(&case["masked_mean"])));
    assert_rows("whitened", &masked_whiten(&values, &mask), &rows(&case["whitened"]), &mask);
}

#[test]
fn policy_loss_and_its_gradient_are_verls() {
    let golden = golden();
    let inputs = &golden["policy_loss"];
    let mask = mask(&inputs["response_mask"]);
    let n_tokens = mask.iter().flatten().filter(|keep| **keep).count();
    let mut n_cases = 0;
    for (name, case) in inputs["cases"].as_object().unwrap() {
        let symmetric = case["clip_ratio_low"] == case["clip_ratio_high"];
        if case["loss_agg_mode"] != "token-mean" || !symmetric {
            continue; // querl averages over tokens and clips symmetrically
        }
        let far = name == "far";
        let new = rows(match name.as_str() {
            "far" => &inputs["log_prob_far"],
            "unchanged" => &inputs["old_log_prob"],
            _ => &inputs["log_prob"],
        });
        let advantages = rows(&inputs[if far { "advantages_far" } else { "advantages" }]);
        let dual_clip = number(&case["clip_ratio_c"]);
        let loss = policy_loss(
            &rows(&inputs["old_log_prob"]),
            &new,
            &advantages,
            &mask,
            number(&case["clip_ratio_low"]),
            (dual_clip < 1e6).then_some(dual_clip),
            n_tokens,
        );
        assert!(close(loss.pg_loss, number(&case["pg_loss"])), "{name}: {} {}", loss.pg_loss, case["pg_loss"]);
        assert!(close(loss.pg_clipfrac, number(&case["pg_clipfrac"])), "{name}");
        assert!(close(loss.ppo_kl, number(&case["ppo_kl"])), "{name}: {} {}", loss.ppo_kl, case["ppo_kl"]);
        assert_rows(name, &loss.grad_logprobs, &rows(&case["grad_log_prob"]), &mask);
        n_cases += 1;
    }
    assert!(n_cases >= 4);
}

#[test]
fn value_loss_and_its_gradient_are_verls() {
    let golden = golden();
    let inputs = &golden["value_loss"];
    let mask = mask(&inputs["response_mask"]);
    let n_tokens = mask.iter().flatten().filter(|keep| **keep).count();
    let case = &inputs["cases"]["token-mean"];
    let loss = value_loss(
        &rows(&inputs["values"]),
        &rows(&inputs["vpreds"]),
        &rows(&inputs["returns"]),
        &mask,
        number(&inputs["cliprange_value"]),
        n_tokens,
    );
    assert!(close(loss.vf_loss, number(&case["vf_loss"])));
    assert!(close(loss.vf_clipfrac, number(&case["vf_clipfrac"])));
    assert_rows("grad", &loss.grad_values, &rows(&case["grad_vpreds"]), &mask);
}

#[test]
fn kl_estimators_and_token_rewards_are_verls() {
    let golden = golden();
    let inputs = &golden["kl"];
    let (logprobs, reference) = (rows(&inputs["log_prob"]), rows(&inputs["ref_log_prob"]));
    type Estimator = fn(f32, f32) -> f32;
    let estimators: [(&str, Estimator); 3] = [("k1", kl_k1), ("k2", kl_k2), ("k3", kl_k3)];
    for (name, estimator) in estimators {
        let expected = rows(&inputs["estimates"][name]["kl"]);
        for (b, row) in expected.iter().enumerate() {
            for (t, expected) in row.iter().enumerate() {
                assert!(close(estimator(logprobs[b][t], reference[b][t]), *expected), "{name}[{b}][{t}]");
            }
        }
    }
    let case = &inputs["rewards"];
    let scores: Vec<f32> = rows(&case["token_level_scores"]).iter().map(|row| row.iter().sum()).collect();
    // verl's rows are padded; here a row ends with its response, where verl puts the score.
    let placed = rows(&case["token_level_scores"]);
    let lengths: Vec<usize> = placed.iter().map(|row| row.iter().rposition(|x| *x != 0.0).unwrap() + 1).collect();
    let cut = |rows: &Rows| -> Rows { rows.iter().zip(&lengths).map(|(row, n)| row[..*n].to_vec()).collect() };
    let expected = cut(&rows(&case["token_level_rewards"]));
    let found = token_rewards(&scores, &cut(&logprobs), &cut(&reference), number(&case["kl_coef"]));
    let mask: Vec<Vec<bool>> = expected.iter().map(|row| vec![true; row.len()]).collect();
    assert_rows("token rewards", &found, &expected, &mask);
}

/// Hidden states that are the logits, under a head that is the identity: at any temperature, once they are scaled by it.
#[test]
fn entropy_and_logprobs_and_their_gradients_are_verls() {
    let golden = golden();
    let case = &golden["entropy"];
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

/// Carries given gradients into [`Gradients`] through a loss that has them.
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
    let golden = golden();
    let case = &golden["adamw"];
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
    let golden = golden();
    let case = &golden["clip_grad_norm"];
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
    let golden = golden();
    let case = &golden["cosine_schedule"];
    let (n_warmup, n_steps) =
        (case["num_warmup_steps"].as_u64().unwrap(), case["num_training_steps"].as_u64().unwrap());
    for (step, expected) in row(&case["factor_of_step_from_0_to_40"]).iter().enumerate() {
        assert!(close(cosine_with_warmup(step as u64, n_warmup, n_steps) as f32, *expected), "step {step}");
    }
}
