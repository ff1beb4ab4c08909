use super::*;
use candle_core::Tensor;
use querl_model::kernels::{swiglu_backward, swiglu_forward};

/// Ragged, whole, none, many: around the eight values of a thread and the 2048 of a block.
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
        assert_rounded("gated", &gpu().gated(&g, &u).unwrap(), &swiglu_forward(&gate, &up));
        let found = gpu().gated_gradients(&g, &u, &d).unwrap();
        for (found, expected) in found.iter().zip(swiglu_backward(&gate, &up, &grad)) {
            assert_rounded("again, dgate, dup", found, &expected);
        }
    }
}

#[test]
fn gates_far_from_zero_stay_finite() {
    let gate = halves(&[-200.0, -100.0, 100.0, 200.0]);
    let (up, grad) = (halves(&[1.0; 4]), halves(&[1.0; 4]));
    assert_eq!(floats(&gpu().gated(&gate, &up).unwrap()), [0.0, 0.0, 100.0, 200.0]);
    let [_, dgate, dup] = gpu().gated_gradients(&gate, &up, &grad).unwrap();
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
fn a_thread_that_has_done_nothing_on_the_card_yet_starts_a_kernel() {
    let gpu = Gpu::new(0).unwrap();
    let (mut sum, one) = (gpu.upload(&[2f32; 9]).unwrap(), gpu.upload(&[1f32; 9]).unwrap());
    let added = std::thread::scope(|scope| scope.spawn(|| gpu.add(&mut sum, &one)).join());
    added.unwrap().unwrap();
    assert_eq!(gpu.download(&sum).unwrap(), [3.0; 9]);
}

#[test]
fn tensors_outlive_the_card_that_they_were_made_on() {
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
