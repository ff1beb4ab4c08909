use super::super::{AdamTensor, AdamWStep};
use super::*;

/// One step of `querl_train::AdamW` in its own words.
fn step_on_cpu(values: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32], keep: f32, scale: f32) {
    for i in 0..values.len() {
        let g = gradient[i] * scale;
        first[i] = STEP.beta1 * first[i] + (1.0 - STEP.beta1) * g;
        second[i] = STEP.beta2 * second[i] + (1.0 - STEP.beta2) * g * g;
        values[i] = values[i] * keep - STEP.step_size * first[i] / (second[i].sqrt() * STEP.correction + STEP.eps);
    }
}

const STEP: AdamWStep = AdamWStep { step_size: 1e-2, correction: 1.5, beta1: 0.9, beta2: 0.999, eps: 1e-8 };

#[test]
fn one_launch_steps_every_tensor_as_the_cpu_does() {
    let mut rng = rng(1);
    let sizes = [1, 8192, 3, 8193, 0, 20_000, 7];
    let mut on_cpu: Vec<[Vec<f32>; 4]> = sizes.map(|n| [(); 4].map(|()| random(&mut rng, n))).to_vec();
    on_cpu.iter_mut().for_each(|tensor| tensor[3].iter_mut().for_each(|x| *x = x.abs()));
    let mut on_device: Vec<[CudaSlice<f32>; 4]> =
        on_cpu.iter().map(|tensor| [0, 1, 2, 3].map(|i| gpu().upload(&tensor[i]).unwrap())).collect();

    let gradients: Vec<_> = on_device.iter().map(|tensor| tensor[1].as_view()).collect();
    let norm = gpu().gradient_norm(&gradients, 0.5, Some(3.0)).unwrap();
    let squares: f64 = on_cpu.iter().flat_map(|tensor| &tensor[1]).map(|&g| f64::from(g) * f64::from(g)).sum();
    let expected = squares.sqrt() * 0.5;
    let scale = 0.5 * (3.0 / (expected + 1e-6)) as f32;
    let (found, factor) = norm.read(gpu()).unwrap();
    assert_close("norm", &[found, factor], &[expected as f32, scale], 1e-6, 0.0);

    for step in 0..3 {
        let keep = |index: usize| if index.is_multiple_of(2) { 1.0 } else { 0.99 };
        let mut tensors: Vec<AdamTensor<'_>> = on_device
            .iter_mut()
            .enumerate()
            .map(|(index, [values, gradient, first, second])| AdamTensor {
                values: values.as_view_mut(),
                gradient: gradient.as_view(),
                first: first.as_view_mut(),
                second: second.as_view_mut(),
                keep: keep(index),
            })
            .collect();
        gpu().adamw(&mut tensors, STEP, Some(&norm)).unwrap();
        for (index, ([values, gradient, first, second], found)) in on_cpu.iter_mut().zip(&on_device).enumerate() {
            step_on_cpu(values, gradient, first, second, keep(index), factor);
            for (what, (expected, found)) in
                [&*values, &*first, &*second].into_iter().zip([&found[0], &found[2], &found[3]]).enumerate()
            {
                let what = format!("step {step}, tensor {index}, part {what}");
                assert_close(&what, &gpu().download(found).unwrap(), expected, 1e-6, 1e-7);
            }
        }
    }
}

#[test]
fn gradients_below_the_limit_are_not_scaled() {
    let gradient = gpu().upload(&[3f32, 4.0]).unwrap();
    let norm = |limit| gpu().gradient_norm(&[gradient.as_view()], 1.0, limit).unwrap().read(gpu()).unwrap();
    assert_eq!(norm(Some(5.5)), (5.0, 1.0));
    assert_eq!(norm(None), (5.0, 1.0));
    assert_eq!(norm(Some(2.5)), (5.0, (2.5 / (5.0f64 + 1e-6)) as f32));
    assert_eq!(gpu().gradient_norm(&[], 1.0, Some(1.0)).unwrap().read(gpu()).unwrap(), (0.0, 1.0));
}
