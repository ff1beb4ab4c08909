//! Compares every operation with the same computation composed of candle's operations: values, and the gradient of every trainable tensor.
//! The gradients are also compared with finite differences.

use super::*;
use candle_core::{D, DType, Device, Var};
use querl_core::config::BaseDtype;
use std::sync::Arc;

pub(super) fn numbers(shape: (usize, usize), seed: u32) -> Tensor {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    Tensor::from_vec((0..shape.0 * shape.1).map(|_| next()).collect::<Vec<_>>(), shape, &Device::Cpu).unwrap()
}

fn var(shape: (usize, usize), seed: u32) -> Var {
    Var::from_tensor(&numbers(shape, seed)).unwrap()
}

fn row_var(size: usize, seed: u32) -> Var {
    Var::from_tensor(&numbers((1, size), seed).squeeze(0).unwrap()).unwrap()
}

pub(super) fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// A scalar that depends on every value of `y` with a different weight.
fn scalar(y: &Tensor) -> Tensor {
    let weights = numbers((1, y.elem_count()), 99).reshape(y.shape()).unwrap();
    (y * weights).unwrap().sum_all().unwrap()
}

fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let size = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst <= tolerance * size, "{what}: off by {worst}, largest value {size}");
}

/// Checks that values and gradients of `fused` equal those of `composed`, and that the gradients agree with finite differences.
fn check(what: &str, vars: &[&Var], fused: &dyn Fn() -> Tensor, composed: &dyn Fn() -> Tensor) {
    assert_close(what, &values(&fused()), &values(&composed()), 1e-5);
    let (found, expected) = (scalar(&fused()).backward().unwrap(), scalar(&composed()).backward().unwrap());
    for (index, var) in vars.iter().enumerate() {
        let what = format!("{what}, gradient {index}");
        let gradient = values(found.get(var).unwrap_or_else(|| panic!("{what} is missing")));
        assert!(gradient.iter().any(|g| *g != 0.0), "{what} is zero");
        assert_close(&what, &gradient, &values(expected.get(var).unwrap()), 3e-5);
        finite_differences(&what, var, &gradient, fused);
    }
}

/// Checks finite differences in the direction of single values and of all values at once.
fn finite_differences(what: &str, var: &Var, gradient: &[f32], f: &dyn Fn() -> Tensor) {
    let before = var.as_tensor().copy().unwrap();
    let sum = |tensor: Tensor| -> f64 {
        let weights = values(&numbers((1, tensor.elem_count()), 99));
        values(&tensor).iter().zip(weights).map(|(y, w)| f64::from(*y) * f64::from(w)).sum()
    };
    let step = 1e-2f32;
    let size = gradient.iter().fold(0f32, |max, x| max.max(x.abs()));
    for index in (0..gradient.len()).step_by(gradient.len().div_ceil(7)) {
        let moved = |by: f32| {
            let mut moved = values(&before);
            moved[index] += by;
            var.set(&Tensor::from_vec(moved, before.shape(), &Device::Cpu).unwrap()).unwrap();
            sum(f())
        };
        let slope = ((moved(step) - moved(-step)) / (2.0 * f64::from(step))) as f32;
        let off = (slope - gradient[index]).abs();
        assert!(off <= 1e-2 * size + 1e-3, "{what} at {index}: {} by formula, {slope} by difference", gradient[index]);
    }
    var.set(&before).unwrap();
}

fn norm_by_candle(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    let mean = x.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
    x.broadcast_div(&(mean + eps).unwrap().sqrt().unwrap()).unwrap().broadcast_mul(weight).unwrap()
}

#[test]
fn norms_have_the_gradients_of_their_parts() {
    for size in [5, 16, 70] {
        let (x, weight) = (var((37, size), 1), row_var(size, 2));
        check("rms_norm", &[&x, &weight], &|| rms_norm(&x, &weight, 1e-5).unwrap(), &|| {
            norm_by_candle(&x, &weight, 1e-5)
        });
    }
}

#[test]
fn the_gated_activation_has_the_gradients_of_its_parts() {
    let (gate, up) = (var((9, 37), 3), var((9, 37), 4));
    let composed = || (gate.silu().unwrap() * up.as_tensor()).unwrap();
    check("swiglu", &[&gate, &up], &|| swiglu(&gate, &up).unwrap(), &composed);
}

/// candle's differentiable rotary embedding, head by head.
fn rope_by_candle(x: &Tensor, head_dim: usize, positions: &[u32], theta: f64) -> Tensor {
    let (n_rows, width) = x.dims2().unwrap();
    let half = head_dim / 2;
    let angles: Vec<f32> = positions
        .iter()
        .flat_map(|&p| (0..half).map(move |j| p as f32 / (theta.powf(2.0 * j as f64 / head_dim as f64) as f32)))
        .collect();
    let angles = Tensor::from_vec(angles, (n_rows, 1, half), &Device::Cpu).unwrap();
    let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
    let heads = x.reshape((n_rows, width / head_dim, head_dim)).unwrap();
    let (x0, x1) = (heads.narrow(2, 0, half).unwrap(), heads.narrow(2, half, half).unwrap());
    let times = |x: &Tensor, y: &Tensor| x.broadcast_mul(y).unwrap();
    let y0 = (times(&x0, &cos) - times(&x1, &sin)).unwrap();
    let y1 = (times(&x1, &cos) + times(&x0, &sin)).unwrap();
    Tensor::cat(&[y0, y1], 2).unwrap().reshape((n_rows, width)).unwrap()
}

#[test]
fn rope_has_the_gradients_of_its_parts() {
    let (x, weight) = (var((35, 24), 5), row_var(8, 6));
    let positions = Arc::new((0..35u32).map(|p| p % 11).collect::<Vec<_>>());
    let table = RopeTable::new(11, 8, 100.0);
    let composed = |x: &Tensor| rope_by_candle(x, 8, &positions, 100.0);
    check("rope", &[&x], &|| rope(&x, &table, &positions).unwrap(), &|| composed(&x));
    let normed = || norm_by_candle(&x.reshape((105, 8)).unwrap(), &weight, 1e-6).reshape((35, 24)).unwrap();
    check("norm_rope", &[&x, &weight], &|| norm_rope(&x, &weight, &table, &positions, 1e-6).unwrap(), &|| {
        composed(&normed())
    });
    let beyond = Arc::new(vec![11u32; 35]);
    assert!(rope(&x, &table, &beyond).unwrap_err().to_string().contains("position 11 is beyond the model's 11"));
}

/// Row counts and sizes that are multiples of the block sizes, and others.
const SHAPES: [(usize, usize, usize); 3] = [(3, 70, 33), (30, 64, 128), (300, 20, 17)];

#[test]
fn linear_layers_have_the_gradients_of_their_parts() {
    for (n_rows, n_out, n_in) in SHAPES {
        let (x, w, b) = (var((n_rows, n_in), 7), var((n_out, n_in), 8), row_var(n_out, 9));
        let plain = || x.matmul(&w.t().unwrap()).unwrap();
        let biased = || plain().broadcast_add(&b).unwrap();
        check("trained_linear", &[&x, &w], &|| trained_linear(&x, &w, None).unwrap(), &plain);
        check("trained_linear with bias", &[&x, &w, &b], &|| trained_linear(&x, &w, Some(&b)).unwrap(), &biased);
        let frozen = FrozenWeight::pack(&w, BaseDtype::F32).unwrap();
        check("frozen_linear", &[&x], &|| frozen_linear(&x, &frozen, None).unwrap(), &plain);
        check("frozen_linear with bias", &[&x], &|| frozen_linear(&x, &frozen, Some(&b)).unwrap(), &biased);
        let gradients = frozen_linear(&x, &frozen, Some(&b)).unwrap().sum_all().unwrap().backward().unwrap();
        assert!(gradients.get(&w).is_none() && gradients.get(&b).is_none(), "a frozen weight has a gradient");
    }
}

#[test]
fn adapted_layers_have_the_gradients_of_their_parts_whatever_the_base_is_stored_as() {
    for (index, (n_rows, n_out, n_in)) in SHAPES.into_iter().enumerate() {
        let (x, a, b) = (var((n_rows, n_in), 10), var((8 + index, n_in), 11), var((n_out, 8 + index), 12));
        let (w, bias) = (numbers((n_out, n_in), 13), numbers((1, n_out), 14).squeeze(0).unwrap());
        for dtype in [BaseDtype::F32, BaseDtype::Bf16, BaseDtype::F16, BaseDtype::Int8, BaseDtype::Fp8, BaseDtype::Nf4]
        {
            let frozen = FrozenWeight::pack(&w, dtype).unwrap();
            let stored = frozen.to_tensor().unwrap();
            let composed = || {
                let low = x.matmul(&a.t().unwrap()).unwrap().matmul(&b.t().unwrap()).unwrap();
                let base = x.matmul(&stored.t().unwrap()).unwrap().broadcast_add(&bias).unwrap();
                (base + (low * 0.5).unwrap()).unwrap()
            };
            let fused = || lora_linear(&x, &frozen, Some(&bias), &a, &b, 0.5).unwrap();
            check(&format!("lora_linear on {}", dtype.name()), &[&x, &a, &b], &fused, &composed);
        }
    }
}

/// Log-probabilities and entropies `(N, 2)` from candle's own softmax.
fn logprobs_by_candle(hidden: &Tensor, head: &Tensor, targets: &[u32], temperature: f64) -> Tensor {
    let logits = (hidden.matmul(&head.t().unwrap()).unwrap() / temperature).unwrap();
    let log_p = candle_nn::ops::log_softmax(&logits, D::Minus1).unwrap();
    let index = Tensor::new(targets, &Device::Cpu).unwrap().unsqueeze(1).unwrap();
    let chosen = log_p.gather(&index, 1).unwrap();
    let entropy = (log_p.exp().unwrap() * &log_p).unwrap().sum_keepdim(1).unwrap().neg().unwrap();
    Tensor::cat(&[chosen, entropy], 1).unwrap()
}

#[test]
fn logprobs_and_entropies_have_the_gradients_of_their_parts() {
    // The second vocabulary is larger than one part of the sums.
    for (n_rows, n_tokens) in [(5, 100), (7, 1300)] {
        let (hidden, head) = (var((n_rows, 24), 15), var((n_tokens, 24), 16));
        let targets = Arc::new((0..n_rows).map(|row| (row * 977 % n_tokens) as u32).collect::<Vec<_>>());
        for temperature in [1.0, 0.7] {
            let composed = || logprobs_by_candle(&hidden, &head, &targets, temperature);
            let trained = Weight::Trained(head.as_tensor().clone());
            let with_trained = || token_logprobs(&hidden, &trained, &targets, temperature).unwrap();
            check("token_logprobs", &[&hidden, &head], &with_trained, &composed);
            let frozen = Weight::Frozen(FrozenWeight::pack(&head, BaseDtype::F32).unwrap());
            let with_frozen = || token_logprobs(&hidden, &frozen, &targets, temperature).unwrap();
            check("token_logprobs, frozen head", &[&hidden], &with_frozen, &composed);
        }
    }
}

#[test]
fn logprobs_of_a_row_do_not_depend_on_other_rows_or_on_parts() {
    let (hidden, head) = (numbers((700, 16), 17), numbers((5000, 16), 18));
    let head = Weight::Frozen(FrozenWeight::pack(&head, BaseDtype::F32).unwrap());
    let targets: Vec<u32> = (0..700).map(|row| row * 7).collect();
    let all: Vec<Vec<f32>> =
        token_logprobs(&hidden, &head, &Arc::new(targets.clone()), 0.9).unwrap().to_vec2().unwrap();
    for row in [0, 345, 699] {
        let one = hidden.narrow(0, row, 1).unwrap();
        let one = token_logprobs(&one, &head, &Arc::new(vec![targets[row]]), 0.9).unwrap();
        assert_eq!(one.to_vec2::<f32>().unwrap(), [all[row].clone()]);
    }
}

#[test]
fn operations_refuse_other_types_with_a_sentence() {
    let halves = numbers((4, 16), 1).to_dtype(DType::BF16).unwrap();
    let frozen = FrozenWeight::pack(&halves, BaseDtype::F32).unwrap();
    assert!(frozen_linear(&halves, &frozen, None).unwrap_err().to_string().contains("takes f32"));
    assert!(frozen_linear(&numbers((2, 15), 1), &frozen, None).is_err());
    assert!(lora_linear(&numbers((2, 16), 1), &frozen, None, &numbers((2, 15), 1), &numbers((4, 2), 1), 1.0).is_err());
}

#[test]
fn no_rows_have_no_values_and_gradients_of_zero() {
    let (n_out, n_in, rank) = (70, 33, 4);
    let (x, w, bias) = (var((0, n_in), 1), var((n_out, n_in), 2), row_var(n_out, 3));
    let (a, b) = (var((rank, n_in), 4), var((n_out, rank), 5));
    let frozen = FrozenWeight::pack(&w, BaseDtype::F32).unwrap();
    let none = Arc::new(Vec::new());
    let (norm, table) = (row_var(n_in, 6), RopeTable::new(4, n_in - 1, 100.0));
    let (heads, head_norm) = (var((0, 2 * (n_in - 1)), 7), row_var(n_in - 1, 8));
    let of = |y: Tensor, vars: &[&Var]| {
        assert_eq!(y.dim(0).unwrap(), 0);
        let gradients = y.backward().unwrap();
        for var in vars {
            let gradient = values(gradients.get(var).unwrap());
            assert!(gradient.len() == var.elem_count() && gradient.iter().all(|g| *g == 0.0), "{gradient:?}");
        }
    };
    of(trained_linear(&x, &w, None).unwrap(), &[&x, &w]);
    of(trained_linear(&x, &w, Some(&bias)).unwrap(), &[&x, &w, &bias]);
    of(frozen_linear(&x, &frozen, None).unwrap(), &[&x]);
    of(lora_linear(&x, &frozen, None, &a, &b, 0.5).unwrap(), &[&x, &a, &b]);
    of(rms_norm(&x, &norm, 1e-6).unwrap(), &[&x, &norm]);
    of(swiglu(&x, &x).unwrap(), &[&x]);
    of(rope(&heads, &table, &none).unwrap(), &[&heads]);
    of(norm_rope(&heads, &head_norm, &table, &none, 1e-6).unwrap(), &[&heads, &head_norm]);
    of(token_logprobs(&x, &Weight::Trained(w.as_tensor().clone()), &none, 1.0).unwrap(), &[&x, &w]);
}

#[test]
fn rope_of_rows_without_width() {
    let (table, positions) = (RopeTable::new(11, 8, 100.0), Arc::new(vec![1u32, 2, 3]));
    assert_eq!(rope(&numbers((3, 0), 1), &table, &positions).unwrap().dims(), [3, 0]);
    assert_eq!(table.apply(&[], None, &Arc::new(Vec::new())).unwrap(), [0f32; 0]);
    let (dx, dw) = table.apply_backward(&[], Some((&[1.0; 8], 1e-6)), &Arc::new(Vec::new()), &[], 8);
    assert_eq!((dx, dw), (Vec::new(), vec![0.0; 8]));
    for width in [0, 3] {
        let error = rope(&numbers((3, 0), 1), &RopeTable::new(11, width, 100.0), &positions).unwrap_err();
        assert!(error.to_string().contains("expected an even width above 0"), "{error}");
    }
}

#[test]
fn exp_agrees_with_the_standard_library() {
    for i in -8000..=8000 {
        let x = i as f32 * 0.01;
        let expected = f64::from(x).exp();
        let relative = (f64::from(super::exp(x)) - expected).abs() / expected;
        assert!(relative < 3e-7, "exp({x}) is off by {relative}");
    }
    assert!(super::exp(-1e30) < 2e-38);
}

/// Compares values and gradients of every operation at each SIMD level of this CPU with those at the highest.
mod simd_levels {
    use super::*;
    use rayon::prelude::*;

    /// The result of `f` and the gradients of `vars` for the sum of its squares, at a level.
    fn at(level: SimdLevel, vars: &[&Var], f: &(dyn Fn() -> Tensor + Sync)) -> Vec<Vec<f32>> {
        level.with(|| {
            let y = f();
            let gradients = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            let of_vars = vars.iter().map(|var| values(gradients.get(var).unwrap()));
            std::iter::once(values(&y)).chain(of_vars).collect()
        })
    }

    /// Differences are at most `tolerance` of the largest value.
    fn compare(what: &str, vars: &[&Var], tolerance: f32, f: &(dyn Fn() -> Tensor + Sync)) {
        let best = *SimdLevel::all().last().unwrap();
        let expected = at(best, vars, f);
        for level in SimdLevel::all() {
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
    fn a_requested_simd_level_holds_for_its_worker_threads_alone() {
        for level in SimdLevel::all() {
            let seen: Vec<SimdLevel> = level.with(|| (0..64).into_par_iter().map(|_| SimdLevel::detected()).collect());
            assert!(seen.iter().all(|&seen| seen == level), "{seen:?}");
        }
        assert_eq!(Some(&SimdLevel::detected()), SimdLevel::all().last());
    }

    /// Element-wise operations use no fused multiply-add, so all levels give the same bits.
    #[test]
    fn norms_rope_and_swiglu_are_the_same_at_every_level() {
        let (x, weight, up) = (var((37, 72), 1), row_var(72, 2), var((37, 72), 3));
        let (table, head_norm) = (RopeTable::new(50, 24, 100.0), row_var(24, 4));
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
        let (q, k, v) = (var((61, 48), 1), var((61, 24), 2), var((61, 24), 3));
        compare("attention", &[&q, &k, &v], 1e-5, &|| attention(&q, &k, &v, &Queries::all(&tree), 12).unwrap());
    }

    #[test]
    fn logprobs_and_linear_layers_agree_at_every_level() {
        let (hidden, head) = (var((9, 40), 1), var((700, 40), 2));
        let targets = Arc::new((0..9u32).map(|row| row * 71).collect::<Vec<_>>());
        compare("logprobs of a trained head", &[&hidden, &head], 1e-5, &|| {
            token_logprobs(&hidden, &Weight::Trained(head.as_tensor().clone()), &targets, 0.8).unwrap()
        });
        for dtype in [BaseDtype::F32, BaseDtype::Bf16, BaseDtype::F16, BaseDtype::Int8, BaseDtype::Fp8, BaseDtype::Nf4]
        {
            // Packed within the closure, because a frozen weight stores the level at which it was packed.
            let frozen = || FrozenWeight::pack(&head, dtype).unwrap();
            compare(&format!("logprobs of a head in {}", dtype.name()), &[&hidden], 1e-5, &|| {
                token_logprobs(&hidden, &Weight::Frozen(frozen()), &targets, 0.8).unwrap()
            });
            compare(&format!("a layer in {}", dtype.name()), &[&hidden], 1e-5, &|| {
                frozen_linear(&hidden, &frozen(), None).unwrap()
            });
        }
    }
}
