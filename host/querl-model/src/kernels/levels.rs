//! Every operation, values and gradients, at each level of this processor against its best one.
#![allow(clippy::unwrap_used)]

use super::*;
use candle_core::{Device, Var};
use querl_core::config::BaseDtype;
use rayon::prelude::*;
use std::sync::Arc;

fn var(n_rows: usize, n_cols: usize, seed: usize) -> Var {
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 1999) as f32 / 1000.0 - 1.0;
    Var::from_vec((0..n_rows * n_cols).map(number).collect::<Vec<_>>(), (n_rows, n_cols), &Device::Cpu).unwrap()
}

fn row(size: usize, seed: usize) -> Var {
    Var::from_tensor(&var(1, size, seed).squeeze(0).unwrap()).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// The result of `f` and the gradients of `vars` for the sum of its squares, at a level.
fn at(level: Level, vars: &[&Var], f: &(dyn Fn() -> Tensor + Sync)) -> Vec<Vec<f32>> {
    level.with(|| {
        let y = f();
        let gradients = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let of_vars = vars.iter().map(|var| values(gradients.get(var).unwrap()));
        std::iter::once(values(&y)).chain(of_vars).collect()
    })
}

/// Differences are at most `tolerance` of the largest value.
fn compare(what: &str, vars: &[&Var], tolerance: f32, f: &(dyn Fn() -> Tensor + Sync)) {
    let best = *Level::all().last().unwrap();
    let expected = at(best, vars, f);
    for level in Level::all() {
        for (index, (found, expected)) in at(level, vars, f).iter().zip(&expected).enumerate() {
            let size = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
            let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(size > 0.0 && found.len() == expected.len(), "{what}, result {index}: {size}");
            assert!(
                worst <= tolerance * size,
                "{what}, result {index}: {level:?} and {best:?} differ by {worst} of {size}"
            );
        }
    }
}

#[test]
fn a_level_that_is_asked_for_is_that_of_every_thread_at_work_and_of_no_other() {
    for level in Level::all() {
        let seen: Vec<Level> = level.with(|| (0..64).into_par_iter().map(|_| Level::detected()).collect());
        assert!(seen.iter().all(|&seen| seen == level), "{seen:?}");
    }
    assert_eq!(Some(&Level::detected()), Level::all().last());
}

/// What has no products but element-wise ones is not fused: it gives the same bits.
#[test]
fn norms_turns_and_gates_are_the_same_at_every_level() {
    let (x, weight, up) = (var(37, 72, 1), row(72, 2), var(37, 72, 3));
    let (table, head_norm) = (RopeTable::new(50, 24, 100.0), row(24, 4));
    let positions = Arc::new((0..37u32).collect::<Vec<_>>());
    compare("rms_norm", &[&x, &weight], 0.0, &|| rms_norm(&x, &weight, 1e-6).unwrap());
    compare("rope", &[&x], 0.0, &|| rope(&x, &table, &positions).unwrap());
    compare("norm_rope", &[&x, &head_norm], 0.0, &|| norm_rope(&x, &head_norm, &table, &positions, 1e-6).unwrap());
    compare("swiglu", &[&x, &up], 0.0, &|| swiglu(&x, &up).unwrap());
}

#[test]
fn attention_agrees_at_every_level() {
    let node = |start, len, end, depth, parent| Node { start, len, end, depth, parent };
    let tree =
        RowTree::new(vec![node(0, 20, 61, 0, None), node(20, 18, 38, 20, Some(0)), node(38, 23, 61, 20, Some(0))]);
    let (q, k, v) = (var(61, 48, 1), var(61, 24, 2), var(61, 24, 3));
    compare("attention", &[&q, &k, &v], 1e-5, &|| attention(&q, &k, &v, &Queries::all(&tree), 12).unwrap());
}

#[test]
fn logprobs_and_linear_layers_agree_at_every_level() {
    let (hidden, head) = (var(9, 40, 1), var(700, 40, 2));
    let targets = Arc::new((0..9u32).map(|row| row * 71).collect::<Vec<_>>());
    compare("logprobs of a trained head", &[&hidden, &head], 1e-5, &|| {
        token_logprobs(&hidden, &Weight::Trained(head.as_tensor().clone()), &targets, 0.8).unwrap()
    });
    for dtype in [BaseDtype::F32, BaseDtype::Bf16, BaseDtype::F16, BaseDtype::Int8, BaseDtype::Fp8, BaseDtype::Nf4] {
        // Packed within the closure: a frozen weight goes on with the level that it was packed at.
        let frozen = || FrozenWeight::pack(&head, dtype).unwrap();
        compare(&format!("logprobs of a head in {}", dtype.name()), &[&hidden], 1e-5, &|| {
            token_logprobs(&hidden, &Weight::Frozen(frozen()), &targets, 0.8).unwrap()
        });
        compare(&format!("a layer in {}", dtype.name()), &[&hidden], 1e-5, &|| {
            frozen_linear(&hidden, &frozen(), None).unwrap()
        });
    }
}
