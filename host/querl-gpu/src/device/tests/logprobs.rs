use super::super::DeviceWeight;
use super::*;
use candle_core::{Device, Tensor, Var};
use querl_core::config::BaseDtype;
use querl_model::kernels::{FrozenWeight, Weight, token_logprobs};
use std::sync::Arc;

#[test]
fn logprobs_entropies_and_gradients_are_those_of_the_cpu() {
    let mut rng = rng(1);
    for (n_rows, width, n_tokens, temperature) in
        [(1, 4, 3, 1.0), (6, 16, 700, 0.7), (33, 24, 1531, 1.3), (3, 8, 70_000, 1.0), (0, 8, 10, 1.0)]
    {
        let hidden = rounded(&mut rng, n_rows * width);
        let head = rounded(&mut rng, n_tokens * width);
        let targets: Vec<u32> = (0..n_rows).map(|_| rng.random_range(0..n_tokens as u32)).collect();
        let grad = random(&mut rng, n_rows * 2);

        let weight = DeviceWeight::new(halves(&head), n_tokens, width).unwrap();
        let (hidden_at, targets_at, grad_at) =
            (halves(&hidden), gpu().upload(&targets).unwrap(), gpu().upload(&grad).unwrap());
        let (out, rows) = gpu().token_logprobs(&hidden_at, &weight, &targets_at, temperature).unwrap();
        let dhidden = gpu().token_logprob_gradients(&hidden_at, &weight, &targets_at, &rows, &grad_at, None).unwrap();
        if n_rows == 0 {
            assert_eq!((out.len(), dhidden.len()), (0, 0));
            continue;
        }

        let hidden = Var::from_slice(&hidden, (n_rows, width), &Device::Cpu).unwrap();
        let head = Tensor::from_slice(&head, (n_tokens, width), &Device::Cpu).unwrap();
        let head = Weight::Frozen(FrozenWeight::pack(&head, BaseDtype::F32).unwrap());
        let expected = token_logprobs(&hidden, &head, &Arc::new(targets), temperature).unwrap();
        let values = expected.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_close("logprobs", &gpu().download(&out).unwrap(), &values, 1e-5, 1e-5);
        let grad = Tensor::from_slice(&grad, (n_rows, 2), &Device::Cpu).unwrap();
        let loss = (expected * grad).unwrap().sum_all().unwrap();
        let expected = loss.backward().unwrap().get(&hidden).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        // Gradients of logits are rounded to bf16 before they are multiplied.
        assert_close("dhidden", &gpu().download(&dhidden).unwrap(), &expected, 1.0 / 256.0, 1.0 / 256.0);
    }
}

#[test]
fn logits_far_apart_overflow_nowhere() {
    let hidden = halves(&[100.0]);
    let weight = DeviceWeight::new(halves(&[-3.0, 1.0, 3.0]), 3, 1).unwrap();
    let (out, _) = gpu().token_logprobs(&hidden, &weight, &gpu().upload(&[0u32]).unwrap(), 1.0).unwrap();
    assert_eq!(gpu().download(&out).unwrap(), [-600.0, 0.0]);
}

#[test]
fn a_temperature_that_is_not_above_zero_is_refused() {
    let weight = DeviceWeight::new(halves(&[1.0]), 1, 1).unwrap();
    let targets = gpu().upload(&[0u32]).unwrap();
    let Err(error) = gpu().token_logprobs(&halves(&[1.0]), &weight, &targets, 0.0) else {
        panic!("a temperature of 0")
    };
    assert!(error.to_string().starts_with("temperature is 0; expected above 0"), "{error}");
}
