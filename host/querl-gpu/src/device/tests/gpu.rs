//! Device memory.
//! What was launched, and how long it took.

use super::super::{AdamTensor, AdamWStep};
use super::*;

fn other_stream() -> Gpu {
    gpu().with_new_stream().unwrap()
}

#[test]
fn captured_work_is_done_at_each_launch() {
    let gpu = other_stream();
    let (mut sum, x) = (gpu.upload(&[1f32, 2.0, 3.0]).unwrap(), gpu.upload(&[10f32, 20.0, 30.0]).unwrap());
    // SAFETY: `sum` and `x` are there until the end, and only this thread uses them.
    let mut graph = unsafe { gpu.capture(|| gpu.add(&mut sum, &x)) }.unwrap();
    assert_eq!(gpu.download(&sum).unwrap(), [1.0, 2.0, 3.0], "recording does nothing");
    for n in 1..4 {
        graph.launch().unwrap();
        let n = n as f32;
        assert_eq!(gpu.download(&sum).unwrap(), [1.0 + n * 10.0, 2.0 + n * 20.0, 3.0 + n * 30.0]);
    }
}

#[test]
fn what_cannot_be_captured_is_an_error_and_the_stream_remains_usable() {
    let gpu = other_stream();
    let x = gpu.upload(&[1f32, 2.0]).unwrap();
    // SAFETY: neither closure uses memory of the GPU.
    let refused = unsafe { gpu.capture(|| gpu.synchronize()) };
    assert!(refused.is_err(), "a wait was recorded");
    // SAFETY: as above.
    let failed = unsafe { gpu.capture(|| candle_core::bail!("a fault of the work")) }.err().unwrap();
    assert!(failed.to_string().contains("a fault of the work"), "{failed}");
    assert_eq!(gpu.download(&gpu.copy(&x).unwrap()).unwrap(), [1.0, 2.0]);
}

#[test]
fn work_on_another_stream_comes_after_what_it_waits_for() {
    let other = other_stream();
    let x = gpu().upload(&[1f32, -2.0, 0.5]).unwrap();
    other.wait_for(gpu()).unwrap();
    let y = other.copy(&x).unwrap();
    gpu().wait_for(&other).unwrap();
    drop(x);
    assert_eq!(other.download(&y).unwrap(), [1.0, -2.0, 0.5]);
}

const LARGE: u64 = 512 << 20;

#[test]
fn the_peak_is_what_was_used_at_once_and_can_be_reset() {
    let gpu = gpu();
    gpu.reset_peak_memory().unwrap();
    let before = gpu.memory().unwrap();
    // Larger than the memory of all other tests, which may run at the same time.
    let values = gpu.zeros::<u8>(LARGE as usize).unwrap();
    let during = gpu.memory().unwrap();
    drop(values);
    let after = gpu.memory().unwrap();
    assert!(during.peak >= LARGE && during.peak > before.peak, "{before:?} {during:?}");
    assert!(after.peak >= during.peak);
    gpu.reset_peak_memory().unwrap();
    assert!(gpu.memory().unwrap().peak < LARGE);
    assert!(after.total >= after.free + after.other());
}

#[test]
fn launches_are_traced_in_order_with_their_times() {
    // A separate GPU handle, because other tests launch on theirs.
    let own = Gpu::new(0).unwrap();
    let values = own.upload(&random(&mut rng(1), 1000)).unwrap();
    let (sum, launched) = own
        .traced(|| {
            let halves = own.to_bf16(&values).unwrap();
            own.to_f32(&halves).unwrap()
        })
        .unwrap();
    let names: Vec<&str> = launched.iter().map(|launched| launched.name).collect();
    assert_eq!(names, ["to_bf16", "to_f32"]);
    assert!(launched.iter().all(|launched| launched.milliseconds >= 0.0) && sum.len() == 1000);
    let (_, nothing) = own.traced(|| ()).unwrap();
    assert_eq!(nothing, []);
    assert_eq!(gpu().to_f32(&halves(&[1.0])).unwrap().len(), 1);
}

/// An independent implementation of one step of `querl_train::AdamW`.
fn step_on_cpu(values: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32], decay: f32, scale: f32) {
    for i in 0..values.len() {
        let g = gradient[i] * scale;
        first[i] = STEP.beta1 * first[i] + (1.0 - STEP.beta1) * g;
        second[i] = STEP.beta2 * second[i] + (1.0 - STEP.beta2) * g * g;
        values[i] = values[i] * decay - STEP.step_size * first[i] / (second[i].sqrt() * STEP.correction + STEP.eps);
    }
}

const STEP: AdamWStep = AdamWStep { step_size: 1e-2, correction: 1.5, beta1: 0.9, beta2: 0.999, eps: 1e-8 };

#[test]
fn one_launch_steps_every_tensor_as_the_cpu_does() {
    let mut rng = rng(1);
    let sizes = [1, 8192, 3, 8193, 0, 20_000, 7];
    let mut on_cpu: Vec<[Vec<f32>; 4]> = sizes.map(|n| [(); 4].map(|()| random(&mut rng, n))).to_vec();
    on_cpu.iter_mut().for_each(|tensor| tensor[3].iter_mut().for_each(|x| *x = x.abs()));
    let on_device: Vec<[CudaSlice<f32>; 4]> =
        on_cpu.iter().map(|tensor| [0, 1, 2, 3].map(|i| gpu().upload(&tensor[i]).unwrap())).collect();

    let gradients: Vec<_> = on_device.iter().map(|tensor| tensor[1].as_view()).collect();
    let norm = gpu().gradient_norm(&gradients, 0.5, Some(3.0)).unwrap();
    let squares: f64 = on_cpu.iter().flat_map(|tensor| &tensor[1]).map(|&g| f64::from(g) * f64::from(g)).sum();
    let expected = squares.sqrt() * 0.5;
    let scale = 0.5 * (3.0 / (expected + 1e-6)) as f32;
    let (found, factor) = norm.read(gpu()).unwrap();
    assert_close("norm", &[found, factor], &[expected as f32, scale], 1e-6, 0.0);

    for step in 0..3 {
        let decay = |index: usize| if index.is_multiple_of(2) { 1.0 } else { 0.99 };
        let tensors: Vec<AdamTensor<'_>> = on_device
            .iter()
            .enumerate()
            .map(|(index, [values, gradient, first, second])| AdamTensor {
                values: values.as_view(),
                gradient: gradient.as_view(),
                first: first.as_view(),
                second: second.as_view(),
                decay: decay(index),
            })
            .collect();
        gpu().adamw(&tensors, STEP, Some(&norm)).unwrap();
        for (index, ([values, gradient, first, second], found)) in on_cpu.iter_mut().zip(&on_device).enumerate() {
            step_on_cpu(values, gradient, first, second, decay(index), factor);
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
