use super::super::{DeviceRope, DropoutMasks, InverseIndex};
use super::*;
use candle_core::Tensor;
use querl_model::backend::{DropoutMask, normal};
use querl_model::kernels::{self, RopeTable};
use querl_model::{Dropout, Shard};
use std::sync::Arc;

/// Lengths around the eight values of a thread and the 2048 of a block, 0, and many.
const LENGTHS: [usize; 8] = [0, 1, 7, 8, 9, 2047, 2048, 70_001];

#[test]
fn casts_round_to_nearest_and_widen_exactly() {
    let mut rng = rng(1);
    for n in LENGTHS {
        let x = random(&mut rng, n);
        let expected: Vec<f32> = x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        let halves = gpu().to_bf16(&gpu().upload(&x).unwrap()).unwrap();
        assert_eq!(floats(&halves), expected);
        assert_eq!(gpu().download(&gpu().to_f32(&halves).unwrap()).unwrap(), expected);
    }
}

#[test]
fn parts_of_a_buffer_that_are_not_aligned_are_cast_alike() {
    let x = random(&mut rng(2), 1000);
    let whole = gpu().upload(&x).unwrap();
    for start in [1, 2, 3, 5] {
        let halves = gpu().to_bf16(&whole.slice(start..997)).unwrap();
        let expected: Vec<f32> = x[start..997].iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert_eq!(floats(&halves), expected);
    }
}

#[test]
fn sums_are_those_of_the_cpu() {
    let mut rng = rng(3);
    for n in LENGTHS {
        let (a, b) = (random(&mut rng, n), random(&mut rng, n));
        let mut sum = gpu().upload(&a).unwrap();
        gpu().add(&mut sum, &gpu().upload(&b).unwrap()).unwrap();
        let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        assert_eq!(gpu().download(&sum).unwrap(), expected);
    }
}

#[test]
fn gated_values_and_their_gradients_are_those_of_the_cpu() {
    let mut rng = rng(4);
    for n in LENGTHS {
        let [gate, up, grad] = [(); 3].map(|()| rounded(&mut rng, n));
        let (g, u, d) = (halves(&gate), halves(&up), halves(&grad));
        assert_rounded("swiglu", &gpu().swiglu(&g, &u).unwrap(), &kernels::swiglu_forward(&gate, &up));
        let found = gpu().swiglu_gradients(&g, &u, &d).unwrap();
        for (found, expected) in found.iter().zip(kernels::swiglu_backward(&gate, &up, &grad)) {
            assert_rounded("again, dgate, dup", found, &expected);
        }
    }
}

#[test]
fn gates_far_from_zero_stay_finite() {
    let gate = halves(&[-200.0, -100.0, 100.0, 200.0]);
    let (up, grad) = (halves(&[1.0; 4]), halves(&[1.0; 4]));
    assert_eq!(floats(&gpu().swiglu(&gate, &up).unwrap()), [0.0, 0.0, 100.0, 200.0]);
    let [_, dgate, dup] = gpu().swiglu_gradients(&gate, &up, &grad).unwrap();
    assert_eq!(floats(&dgate), [0.0, 0.0, 1.0, 1.0]);
    assert_eq!(floats(&dup), [0.0, 0.0, 100.0, 200.0]);
}

#[test]
fn rows_are_taken_and_added_by_index() {
    let mut rng = rng(5);
    for (n_rows, width, list) in [(5, 8, vec![0, 2, 4]), (9, 13, vec![8]), (3, 896, vec![0, 1, 2]), (4, 7, vec![])] {
        let all = rounded(&mut rng, n_rows * width);
        let indices = gpu().upload(&list).unwrap();
        let row = |row: u32| all[row as usize * width..][..width].to_vec();
        let expected: Vec<f32> = list.iter().flat_map(|&index| row(index)).collect();
        let on_device = gpu().upload(&all).unwrap();
        assert_eq!(gpu().download(&gpu().pick(&on_device, &indices, width).unwrap()).unwrap(), expected);
        assert_eq!(floats(&gpu().pick(&halves(&all), &indices, width).unwrap()), expected);
        assert_eq!(gpu().download(&gpu().rows(&halves(&all), &indices, width).unwrap()).unwrap(), expected);

        let picked = random(&mut rng, list.len() * width);
        let mut sum = gpu().upload(&all).unwrap();
        gpu().add_picked(&mut sum, &gpu().upload(&picked).unwrap(), &indices, width).unwrap();
        let mut expected = all.clone();
        for (&row, picked) in list.iter().zip(picked.chunks_exact(width)) {
            expected[row as usize * width..][..width].iter_mut().zip(picked).for_each(|(sum, x)| *sum += x);
        }
        assert_eq!(gpu().download(&sum).unwrap(), expected);
    }
}

#[test]
fn a_row_that_is_not_there_reads_as_zeros_and_writes_nowhere() {
    let all = [1f32; 16];
    let indices = gpu().upload(&[1, 2, u32::MAX]).unwrap();
    let rows = gpu().download(&gpu().rows(&halves(&all), &indices, 8).unwrap()).unwrap();
    assert_eq!(rows, [[1f32; 8], [0.0; 8], [0.0; 8]].concat());
    let mut sum = gpu().upload(&all).unwrap();
    gpu().add_picked(&mut sum, &gpu().upload(&[1f32; 24]).unwrap(), &indices, 8).unwrap();
    assert_eq!(gpu().download(&sum).unwrap(), [[1f32; 8], [2.0; 8]].concat());
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    let (four, five) = (gpu().upload(&[0f32; 4]).unwrap(), gpu().upload(&[0f32; 5]).unwrap());
    let error = gpu().add(&mut gpu().copy(&four).unwrap(), &five).unwrap_err();
    assert!(error.to_string().starts_with("add: 5 values for 4"), "{error}");
    let error = gpu().pick(&five, &gpu().upload(&[0]).unwrap(), 2).unwrap_err();
    assert!(error.to_string().starts_with("pick: 5 values are not rows of 2"), "{error}");
}

#[test]
fn a_new_thread_launches_a_kernel() {
    let gpu = Gpu::new(0).unwrap();
    let (mut sum, one) = (gpu.upload(&[2f32; 9]).unwrap(), gpu.upload(&[1f32; 9]).unwrap());
    let added = std::thread::scope(|scope| scope.spawn(|| gpu.add(&mut sum, &one)).join());
    added.unwrap().unwrap();
    assert_eq!(gpu.download(&sum).unwrap(), [3.0; 9]);
}

#[test]
fn tensors_outlive_their_gpu() {
    let gpu = Gpu::new(0).unwrap();
    let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &gpu.device()).unwrap();
    drop(gpu);
    let product = x.matmul(&x).unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(product, [[7.0, 10.0], [15.0, 22.0]]);
}

#[test]
fn values_that_are_not_finite_in_bf16_leave_a_mark() {
    let n = 5003;
    for (value, is_marked) in
        [(f32::NAN, 1), (f32::INFINITY, 1), (-f32::INFINITY, 1), (3.4e38, 1), (3.38e38, 0), (-1e-45, 0)]
    {
        for place in [0, 7, 4096, n - 1] {
            let mut values = random(&mut rng(1), n);
            values[place] = value;
            let mut mark = gpu().zeros(1).unwrap();
            gpu().mark_not_finite(&gpu().upload(&values).unwrap(), &mut mark).unwrap();
            assert_eq!(gpu().download(&mark).unwrap(), [is_marked], "{value} at {place}");
        }
    }
}

const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 64), (33, 65), (70, 136), (5, 7), (0, 8)];

#[test]
fn columns_get_their_factors_and_what_is_added() {
    let mut rng = rng(1);
    for (n_rows, width) in SHAPES {
        let (x, factors, bias) = (rounded(&mut rng, n_rows * width), random(&mut rng, width), random(&mut rng, width));
        let expected: Vec<f32> = (0..x.len()).map(|i| x[i] * factors[i % width]).collect();
        let with_bias: Vec<f32> = (0..x.len()).map(|i| expected[i] + bias[i % width]).collect();
        let (on_gpu, in_bf16) = (gpu().upload(&x).unwrap(), halves(&x));
        let [factors, bias] = [factors, bias].map(|values| gpu().upload(&values).unwrap());
        assert_rounded("f32", &gpu().scaled_columns(&on_gpu, &factors, Some(&bias)).unwrap(), &with_bias);
        assert_rounded("bf16", &gpu().scaled_values(&in_bf16, &factors).unwrap(), &expected);
        let mut sum = gpu().upload(&vec![2f32; x.len()]).unwrap();
        gpu().add_scaled_columns(&on_gpu, &factors, None, &mut sum).unwrap();
        let added: Vec<f32> = expected.iter().map(|x| x + 2.0).collect();
        assert_close("added", &gpu().download(&sum).unwrap(), &added, 1e-6, 1e-6);
    }
    let (x, factors) = (gpu().upload(&[1f32; 6]).unwrap(), gpu().upload(&[1f32; 4]).unwrap());
    assert!(gpu().scaled_columns(&x, &factors, None).is_err());
}

#[test]
fn columns_are_added_in_one_order() {
    let mut rng = rng(2);
    for (n_rows, width) in SHAPES {
        let (a, b) = (rounded(&mut rng, n_rows * width), rounded(&mut rng, n_rows * width));
        let sums = |value: &dyn Fn(usize) -> f64| -> Vec<f32> {
            (0..width).map(|c| (0..n_rows).map(|row| value(row * width + c)).sum::<f64>() as f32).collect()
        };
        let (products, alone) = (sums(&|i| f64::from(a[i]) * f64::from(b[i])), sums(&|i| f64::from(a[i])));
        let (a, b) = (halves(&a), halves(&b));
        let of_products = || gpu().download(&gpu().column_totals(&a, Some(&b), width).unwrap()).unwrap();
        assert_close("products", &of_products(), &products, 1e-5, 1e-5);
        assert_repeatable("products", of_products);
        let found = gpu().download(&gpu().column_totals(&a, None, width).unwrap()).unwrap();
        assert_close("alone", &found, &alone, 1e-5, 1e-5);
    }
}

#[test]
fn dropout_drops_what_it_drops_on_the_cpu() {
    for (n_rows, width) in [(1, 1), (37, 33), (64, 512)] {
        let (x, row_keys) = (rounded(&mut rng(1), n_rows * width), (0..n_rows as u64).map(|row| row * 77).collect());
        let mask = DropoutMask::new(Dropout { p: 0.3, seed: 5 }, row_keys, Shard::FULL).unwrap();
        let mut expected = x.clone();
        mask.of_layer("a.layer", width).apply(&mut expected);
        let row_keys = gpu().upload(mask.row_keys()).unwrap();
        let masks =
            DropoutMasks { row_keys: &row_keys, layer_seed: mask.seed_of("a.layer"), first_input: 0, p: mask.p() };
        let found = floats(&gpu().dropout(&halves(&x), width, masks).unwrap());
        assert_close("dropout", &found, &expected, 4e-3, 0.0);
        assert!(found.iter().zip(&expected).all(|(a, b)| (*a == 0.0) == (*b == 0.0)));

        let base = random(&mut rng(2), x.len());
        let mut sum = gpu().upload(&base).unwrap();
        gpu().add_dropout(&mut sum, &halves(&x), width, masks).unwrap();
        let expected: Vec<f32> = base.iter().zip(&expected).map(|(base, dropout)| base + dropout).collect();
        assert_close("added", &gpu().download(&sum).unwrap(), &expected, 1e-6, 1e-6);
    }
}

#[test]
fn dropout_of_a_part_of_the_inputs_drops_what_it_drops_of_all_of_them() {
    let (n_rows, width, first) = (37, 96, 32);
    let (x, row_keys) = (rounded(&mut rng(1), n_rows * width), gpu().upload(&vec![5u64; n_rows]).unwrap());
    let dropout = |x: &[f32], width, first_input| {
        let masks = DropoutMasks { row_keys: &row_keys, layer_seed: 9, first_input, p: 0.3 };
        floats(&gpu().dropout(&halves(x), width, masks).unwrap())
    };
    let columns = |all: &[f32]| all.chunks(width).flat_map(|row| &row[first..]).copied().collect::<Vec<f32>>();
    assert_eq!(dropout(&columns(&x), width - first, first), columns(&dropout(&x, width, 0)));
}

#[test]
fn gradients_of_a_row_that_is_named_often_are_added_in_their_order() {
    let (width, places) = (45, [3, 0, 3, 3, 1, 0]);
    let grad = random(&mut rng(3), places.len() * width);
    let mut expected = vec![0f32; 5 * width];
    for (place, grad) in places.iter().zip(grad.chunks(width)) {
        let row = &mut expected[*place as usize * width..][..width];
        row.iter_mut().zip(grad).for_each(|(sum, grad)| *sum += grad);
    }
    let namers = InverseIndex::new(gpu(), &places, 5).unwrap();
    let found = gpu().sum_rows(&gpu().upload(&grad).unwrap(), &namers, width).unwrap();
    assert_eq!(gpu().download(&found).unwrap(), expected);
    assert!(InverseIndex::new(gpu(), &[5], 5).is_err());
}

#[test]
fn normal_numbers_are_those_of_the_cpu() {
    for n in [1, 2, 4097] {
        let found = floats(&gpu().normal(n, 99, 0.02).unwrap());
        // The last bits of logarithm, cosine and sine depend on the device; bf16 keeps 8.
        assert_close("normal", &found, &normal(n, 99, 0.02), 4e-3, 1e-6);
    }
}

#[test]
fn normal_numbers_of_a_part_are_those_of_the_whole_matrix() {
    let (n_rows, width) = (21, 15);
    let whole = floats(&gpu().normal(n_rows * width, 99, 0.02).unwrap());
    for (rows, columns) in [(0..21, 0..15), (7..14, 0..15), (0..21, 5..10), (3..4, 14..15)] {
        let expected: Vec<f32> = rows.clone().flat_map(|row| &whole[row * width..][columns.clone()]).copied().collect();
        assert_eq!(floats(&gpu().normal_part(rows, columns, width, 99, 0.02).unwrap()), expected);
    }
}

#[test]
fn few_and_many_values_are_uploaded_unchanged() {
    for n in [1, 1000, 300_000] {
        let values: Vec<u32> = (0..n).map(|i| i * 2_654_435).collect();
        // More uploads than there are buffers of page-locked memory.
        let uploaded: Vec<_> = (0..20).map(|_| gpu().upload(&values).unwrap()).collect();
        assert!(uploaded.iter().all(|uploaded| gpu().download(uploaded).unwrap() == values));
    }
    let bytes: Vec<u8> =
        (0..40_000_003u32).flat_map(|i| half::bf16::from_f32((i % 251) as f32).to_le_bytes()).collect();
    let found = gpu().upload_floats(&bytes, candle_core::DType::BF16).unwrap();
    let found = gpu().download(&found).unwrap();
    assert!(found.iter().enumerate().all(|(i, x)| x.to_f32() == (i % 251) as f32));
}

const EPS: f32 = 1e-6;

#[test]
fn norms_and_their_gradients_are_those_of_the_cpu() {
    let mut rng = rng(1);
    for (n_rows, width) in [(0, 8), (1, 1), (3, 7), (5, 64), (2, 896), (70, 130), (300, 24), (2, 5120)] {
        let (x, weight) = (rounded(&mut rng, n_rows * width), random(&mut rng, width));
        let (on_device, w) = (gpu().upload(&x).unwrap(), gpu().upload(&weight).unwrap());
        let expected = kernels::rms_norm_forward(&x, &weight, EPS);
        assert_rounded("rms_norm f32", &gpu().rms_norm(&on_device, &w, EPS).unwrap(), &expected);
        assert_rounded("rms_norm bf16", &gpu().rms_norm(&halves(&x), &w, EPS).unwrap(), &expected);

        let grad = random(&mut rng, n_rows * width);
        let g = gpu().upload(&grad).unwrap();
        let before = random(&mut rng, n_rows * width);
        let more = gpu().upload(&before).unwrap();
        for (more, on_cpu) in [(None, None), (Some(&more), Some(before.as_slice()))] {
            let (dx, dw) = gpu().rms_norm_gradients(&on_device, &w, EPS, &g, more, width).unwrap();
            let (expected_dx, expected_dw) = kernels::rms_norm_backward(&x, &weight, EPS, &grad, on_cpu, width);
            let dx = gpu().download(&dx).unwrap();
            if width == 1 {
                // A value is a difference of two terms of up to this size, so that rounding errors of the terms dominate.
                let term = grad.iter().chain(&before).fold(0f32, |max, value| max.max(value.abs()));
                assert_eq!(dx.len(), expected_dx.len());
                let is_close =
                    dx.iter().zip(&expected_dx).all(|(found, expected)| (found - expected).abs() <= 1e-5 * term);
                assert!(is_close, "dx: {dx:?}; expected {expected_dx:?}");
            } else {
                assert_close("dx", &dx, &expected_dx, 1e-5, 1e-5);
            }
            assert_close("dw", &gpu().download(&dw).unwrap(), &expected_dw, 1e-5, 1e-5);
            assert_eq!(gpu().rms_norm_gradients(&on_device, &w, EPS, &g, more, 0).unwrap().1.len(), 0);
        }
        let dw = || gpu().rms_norm_gradients(&on_device, &w, EPS, &g, None, width).unwrap().1;
        assert_repeatable("dw", || gpu().download(&dw()).unwrap());
    }
}

#[test]
fn rope_is_that_of_the_cpu() {
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

        let y = rope.norm_rope(gpu(), &x_at, None, &at).unwrap();
        assert_close("norm_rope", &floats(&y), &table.apply(&x, None, &positions).unwrap(), 1.0 / 256.0, 1e-4);
        let (dx, _) = rope.norm_rope_gradients(gpu(), &x_at, None, &at, &grad_at, 0).unwrap();
        let (expected, _) = table.apply_backward(&x, None, &positions, &grad, 0);
        assert_close("norm_rope back", &floats(&dx), &expected, 1.0 / 256.0, 1e-4);

        let (norm, on_cpu) = (Some((&w.as_view(), EPS)), Some((weight.as_slice(), EPS)));
        let y = rope.norm_rope(gpu(), &x_at, norm, &at).unwrap();
        assert_close("rms_norm", &floats(&y), &table.apply(&x, on_cpu, &positions).unwrap(), 1.0 / 256.0, 1e-4);
        for n_wanted in [0, dim] {
            let (dx, dw) = rope.norm_rope_gradients(gpu(), &x_at, norm, &at, &grad_at, n_wanted).unwrap();
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
