use super::super::DeviceRope;
use super::*;
use querl_model::kernels::{RopeTable, rms_norm_backward, rms_norm_forward};
use std::sync::Arc;

const EPS: f32 = 1e-6;

#[test]
fn norms_and_their_gradients_are_those_of_the_cpu() {
    let mut rng = rng(1);
    for (n_rows, width) in [(0, 8), (1, 1), (3, 7), (5, 64), (2, 896), (70, 130), (300, 24), (2, 5120)] {
        let (x, weight) = (rounded(&mut rng, n_rows * width), random(&mut rng, width));
        let (on_device, w) = (gpu().upload(&x).unwrap(), gpu().upload(&weight).unwrap());
        let expected = rms_norm_forward(&x, &weight, EPS);
        assert_rounded("normed f32", &gpu().normed(&on_device, &w, EPS).unwrap(), &expected);
        assert_rounded("normed bf16", &gpu().normed(&halves(&x), &w, EPS).unwrap(), &expected);

        let grad = random(&mut rng, n_rows * width);
        let g = gpu().upload(&grad).unwrap();
        let before = random(&mut rng, n_rows * width);
        let more = gpu().upload(&before).unwrap();
        for (more, on_cpu) in [(None, None), (Some(&more), Some(before.as_slice()))] {
            let (dx, dw) = gpu().norm_gradients(&on_device, &w, EPS, &g, more, width).unwrap();
            let (expected_dx, expected_dw) = rms_norm_backward(&x, &weight, EPS, &grad, on_cpu, width);
            assert_close("dx", &gpu().download(&dx).unwrap(), &expected_dx, 1e-5, 1e-5);
            assert_close("dw", &gpu().download(&dw).unwrap(), &expected_dw, 1e-5, 1e-5);
            assert_eq!(gpu().norm_gradients(&on_device, &w, EPS, &g, more, 0).unwrap().1.len(), 0);
        }
        let dw = || gpu().norm_gradients(&on_device, &w, EPS, &g, None, width).unwrap().1;
        assert_repeatable("dw", || gpu().download(&dw()).unwrap());
    }
}

#[test]
fn heads_are_turned_as_on_the_cpu() {
    let mut rng = rng(2);
    for (n_rows, n_heads, dim) in
        [(0, 2, 8), (1, 1, 2), (5, 3, 6), (40, 2, 64), (7, 5, 80), (3, 2, 96), (9, 4, 128), (2, 1, 256)]
    {
        let (table, width) = (RopeTable::new(100, dim, 10_000.0), n_heads * dim);
        let rope = DeviceRope::new(gpu(), &table).unwrap();
        let positions: Arc<Vec<u32>> = Arc::new((0..n_rows).map(|_| rng.random_range(0..100)).collect());
        let at = rope.positions(gpu(), &positions).unwrap();
        let [x, grad] = [(); 2].map(|()| rounded(&mut rng, n_rows * width));
        let weight = random(&mut rng, dim);
        let (x_at, grad_at, w) = (halves(&x), halves(&grad), gpu().upload(&weight).unwrap());

        let y = rope.turned(gpu(), &x_at, None, &at).unwrap();
        assert_close("turned", &floats(&y), &table.apply(&x, None, &positions).unwrap(), 1.0 / 256.0, 1e-4);
        let (dx, _) = rope.turned_gradients(gpu(), &x_at, None, &at, &grad_at, 0).unwrap();
        let (expected, _) = table.apply_backward(&x, None, &positions, &grad, 0);
        assert_close("turned back", &floats(&dx), &expected, 1.0 / 256.0, 1e-4);

        let (norm, on_cpu) = (Some((&w.as_view(), EPS)), Some((weight.as_slice(), EPS)));
        let y = rope.turned(gpu(), &x_at, norm, &at).unwrap();
        assert_close("normed", &floats(&y), &table.apply(&x, on_cpu, &positions).unwrap(), 1.0 / 256.0, 1e-4);
        for n_wanted in [0, dim] {
            let (dx, dw) = rope.turned_gradients(gpu(), &x_at, norm, &at, &grad_at, n_wanted).unwrap();
            let (expected_dx, expected_dw) = table.apply_backward(&x, on_cpu, &positions, &grad, n_wanted);
            assert_close("dx", &floats(&dx), &expected_dx, 1.0 / 256.0, 1e-4);
            assert_close("dw", &gpu().download(&dw).unwrap(), &expected_dw, 1e-5, 1e-5);
        }
    }
}

#[test]
fn a_position_beyond_the_table_is_refused() {
    let rope = DeviceRope::new(gpu(), &RopeTable::new(10, 4, 10_000.0)).unwrap();
    let error = rope.positions(gpu(), &[3, 10]).unwrap_err();
    assert!(error.to_string().starts_with("position 10 is beyond the model's 10 positions"), "{error}");
}
