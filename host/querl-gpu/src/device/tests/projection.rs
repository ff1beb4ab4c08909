use super::super::{DeviceWeight, LowRank, Matrix, Projection, Scale, input_gradient};
use super::*;
use candle_core::{Device, Tensor};
use querl_core::config::BaseDtype;
use querl_model::kernels::FrozenWeight;
use querl_model::kernels::projection::{self, Trained};

/// `left right` in f64.
fn multiplied(left: &[f32], right: &[f32], (m, k, n): (usize, usize, usize)) -> Vec<f32> {
    let mut out = vec![0f64; m * n];
    for i in 0..m {
        for j in 0..k {
            for column in 0..n {
                out[i * n + column] += f64::from(left[i * k + j]) * f64::from(right[j * n + column]);
            }
        }
    }
    out.into_iter().map(|x| x as f32).collect()
}

fn turned(x: &[f32], n_columns: usize) -> Vec<f32> {
    let n_rows = x.len() / n_columns;
    (0..x.len()).map(|at| x[at % n_rows * n_columns + at / n_rows]).collect()
}

#[test]
fn products_take_either_side_turned_and_keep_what_is_there() {
    let mut rng = rng(1);
    for (m, k, n) in [(1, 1, 1), (3, 5, 7), (17, 33, 9), (64, 16, 40)] {
        let (left, right) = (rounded(&mut rng, m * k), rounded(&mut rng, k * n));
        let product = multiplied(&left, &right, (m, k, n));
        let (l, lt) = (halves(&left), halves(&turned(&left, k)));
        let (r, rt) = (halves(&right), halves(&turned(&right, n)));
        let of = |values, width| Matrix::of(gpu(), values, width).unwrap();
        for left in [of(&l, k), of(&lt, m).t()] {
            for right in [of(&r, n), of(&rt, k).t()] {
                let mut out = gpu().upload(&vec![1f32; m * n]).unwrap();
                gpu().product(&left, &right, &mut out, Scale { alpha: 0.5, keep: 2.0 }).unwrap();
                let expected: Vec<f32> = product.iter().map(|x| x * 0.5 + 2.0).collect();
                assert_close("f32", &gpu().download(&out).unwrap(), &expected, 1e-5, 1e-5);
                let mut out = halves(&vec![f32::NAN; m * n]);
                gpu().product(&left, &right, &mut out, Scale::WRITE).unwrap();
                assert_rounded("bf16", &out, &product);
            }
        }
    }
}

#[test]
fn a_sum_of_nothing_is_zero() {
    let empty = halves(&[]);
    let nothing = Matrix::of(gpu(), &empty, 3).unwrap();
    let mut out = gpu().upload(&[1f32; 9]).unwrap();
    gpu().product(&nothing.t(), &nothing, &mut out, Scale::ADD).unwrap();
    assert_eq!(gpu().download(&out).unwrap(), [1f32; 9]);
    gpu().product(&nothing.t(), &nothing, &mut out, Scale::WRITE).unwrap();
    assert_eq!(gpu().download(&out).unwrap(), [0f32; 9]);
}

struct Case {
    weight: Vec<f32>,
    bias: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
    x: Vec<f32>,
    grad: Vec<f32>,
    n_out: usize,
    n_in: usize,
}

impl Case {
    fn new(rng: &mut ChaCha8Rng, n_rows: usize, n_out: usize, n_in: usize, rank: usize) -> Self {
        let mut make = |n| rounded(rng, n);
        let (weight, bias, a, b) = (make(n_out * n_in), make(n_out), make(rank * n_in), make(n_out * rank));
        Self { weight, bias, a, b, x: make(n_rows * n_in), grad: make(n_rows * n_out), n_out, n_in }
    }

    fn frozen(&self) -> FrozenWeight {
        let weight = Tensor::from_slice(&self.weight, (self.n_out, self.n_in), &Device::Cpu).unwrap();
        FrozenWeight::pack(&weight, BaseDtype::F32).unwrap()
    }
}

const SCALE: f32 = 0.5;

#[test]
fn linear_layers_and_their_gradients_are_those_of_the_cpu() {
    let mut rng = rng(2);
    for (n_rows, n_out, n_in, rank) in [(1, 8, 16, 1), (5, 24, 40, 4), (33, 17, 9, 3), (0, 8, 8, 2), (20, 64, 32, 16)] {
        let case = Case::new(&mut rng, n_rows, n_out, n_in, rank);
        let frozen = case.frozen();
        let weight = DeviceWeight::new(halves(&case.weight), n_out, n_in).unwrap();
        let (a, b, bias) = (halves(&case.a), halves(&case.b), gpu().upload(&case.bias).unwrap());
        let (x, grad) = (halves(&case.x), halves(&case.grad));
        for (has_bias, has_change) in [(false, false), (true, false), (false, true), (true, true)] {
            let on_cpu = projection::Projection::Frozen {
                weight: &frozen,
                bias: has_bias.then_some(case.bias.as_slice()),
                lora: has_change.then_some(projection::LoraMatrices {
                    a: &case.a,
                    b: &case.b,
                    rank,
                    scale: SCALE,
                    dropout: None,
                }),
            };
            let low_rank =
                has_change.then(|| LowRank { a: a.as_view(), b: b.as_view(), rank, scale: SCALE, masks: None });
            let layer = Projection { weight: &weight, bias: has_bias.then(|| bias.as_view()), low_rank };
            let (y, low) = layer.forward(gpu(), &x).unwrap();
            let (expected, expected_low) = on_cpu.forward(&case.x).unwrap();
            // The change is added to a result that was rounded, and its first factor was rounded too.
            assert_close("forward", &floats(&y), &expected, 1.0 / 128.0, 1.0 / 128.0);
            assert_rounded("low", &low, &expected_low);
            let mut sum = gpu().upload(&vec![1f32; n_rows * n_out]).unwrap();
            layer.add_to(gpu(), &x, &mut sum).unwrap();
            let expected: Vec<f32> = expected.iter().map(|x| x + 1.0).collect();
            assert_close("add_to", &gpu().download(&sum).unwrap(), &expected, 1e-3, 1.0 / 256.0);

            let mut found = layer.low_gradient(gpu(), &grad).unwrap();
            let [mut on_cpu_found] = projection::lora_b_gradients([(&on_cpu, case.grad.as_slice())]).unwrap();
            projection::parameter_gradients(&mut [Trained {
                layer: &on_cpu,
                x: &case.x,
                lora_a_out: &expected_low,
                grad: &case.grad,
                found: &mut on_cpu_found,
            }])
            .unwrap();
            if let Some(found) = &mut found {
                layer.parameter_gradients(gpu(), &x, &low, &grad, found).unwrap();
                assert_close("da", &gpu().download(&found.a).unwrap(), &on_cpu_found.a, 1e-3, 1.0 / 256.0);
                assert_close("db", &gpu().download(&found.b).unwrap(), &on_cpu_found.b, 1e-3, 1.0 / 256.0);
            }
            let on_device = (&layer, &grad, found.as_ref());
            let dx: CudaSlice<f32> = input_gradient(gpu(), &[on_device, on_device]).unwrap();
            let twice = [(&on_cpu, case.grad.as_slice(), &on_cpu_found), (&on_cpu, &case.grad, &on_cpu_found)];
            let expected = projection::input_backward_sum(&twice).unwrap();
            assert_close("dx", &gpu().download(&dx).unwrap(), &expected, 1e-3, 1.0 / 256.0);
            let dx: CudaSlice<bf16> = input_gradient(gpu(), &[on_device]).unwrap();
            let expected: Vec<f32> = expected.iter().map(|x| x / 2.0).collect();
            assert_close("dx in bf16", &floats(&dx), &expected, 1.0 / 128.0, 1.0 / 128.0);
        }
    }
}
