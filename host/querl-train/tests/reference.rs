//! Log-probabilities, optimizer and schedule against verl, torch and transformers; expected values from
//! `tests/reference/ppo.py`.
#![allow(clippy::unwrap_used)]

mod support;

use candle_core::{DType, Device, Tensor, Var};
use querl_core::config::BaseDtype;
use querl_model::kernels::{FrozenWeight, Weight, token_logprobs};
use querl_train::{AdamW, AdamWSettings, Gradients, cosine_with_warmup};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use support::{close, golden, number, row, rows};

/// Hidden states that are the logits, under a head that is the identity: at any temperature, once they are scaled by it.
#[test]
fn entropy_and_logprobs_and_their_gradients_are_verls() {
    let golden = golden("ppo.json");
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
    let golden = golden("ppo.json");
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
    let golden = golden("ppo.json");
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
    let golden = golden("ppo.json");
    let case = &golden["cosine_schedule"];
    let (n_warmup, n_steps) =
        (case["num_warmup_steps"].as_u64().unwrap(), case["num_training_steps"].as_u64().unwrap());
    for (step, expected) in row(&case["factor_of_step_from_0_to_40"]).iter().enumerate() {
        assert!(close(cosine_with_warmup(step as u64, n_warmup, n_steps) as f32, *expected), "step {step}");
    }
}
