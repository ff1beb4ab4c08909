use super::super::{DeviceWeight, LoraWeights, Matrix, PackedFormat, Projection, Scale, input_gradient};
use super::*;
use candle_core::{DType, Device, Tensor, Var};
use querl_core::config::BaseDtype;
use querl_model::kernels::projection::{self, Trained};
use querl_model::kernels::{FrozenWeight, Weight, token_logprobs};
use std::sync::Arc;

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

fn norm_rope(x: &[f32], n_columns: usize) -> Vec<f32> {
    let n_rows = x.len() / n_columns;
    (0..x.len()).map(|at| x[at % n_rows * n_columns + at / n_rows]).collect()
}

#[test]
fn products_take_either_side_transposed_and_add_to_the_output() {
    let mut rng = rng(1);
    for (m, k, n) in [(1, 1, 1), (3, 5, 7), (17, 33, 9), (64, 16, 40)] {
        let (left, right) = (rounded(&mut rng, m * k), rounded(&mut rng, k * n));
        let product = multiplied(&left, &right, (m, k, n));
        let (l, lt) = (halves(&left), halves(&norm_rope(&left, k)));
        let (r, rt) = (halves(&right), halves(&norm_rope(&right, n)));
        let of = |values, width| Matrix::of(gpu(), values, width).unwrap();
        for left in [of(&l, k), of(&lt, m).t()] {
            for right in [of(&r, n), of(&rt, k).t()] {
                let mut out = gpu().upload(&vec![1f32; m * n]).unwrap();
                gpu().product(&left, &right, &mut out, Scale { alpha: 0.5, beta: 2.0 }).unwrap();
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
            let lora =
                has_change.then(|| LoraWeights { a: a.as_view(), b: b.as_view(), rank, scale: SCALE, masks: None });
            let layer = Projection { weight: &weight, bias: has_bias.then(|| bias.as_view()), lora };
            let (y, low) = layer.forward(gpu(), &x).unwrap();
            let (expected, expected_low) = on_cpu.forward(&case.x).unwrap();
            // The change is added to a result that was rounded, and its first factor was rounded too.
            assert_close("forward", &floats(&y), &expected, 1.0 / 128.0, 1.0 / 128.0);
            assert_rounded("low", &low, &expected_low);
            let mut sum = gpu().upload(&vec![1f32; n_rows * n_out]).unwrap();
            layer.add_to(gpu(), &x, &mut sum).unwrap();
            let expected: Vec<f32> = expected.iter().map(|x| x + 1.0).collect();
            assert_close("add_to", &gpu().download(&sum).unwrap(), &expected, 1e-3, 1.0 / 256.0);

            let mut found = layer.lora_b_gradient(gpu(), &grad).unwrap();
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

fn on_device(values: &[f32], dims: (usize, usize), format: PackedFormat) -> DeviceWeight {
    DeviceWeight::packed(gpu(), &halves(values), dims, format).unwrap()
}

fn widened(weight: &DeviceWeight) -> Vec<f32> {
    gpu().download(&weight.to_f32(gpu()).unwrap()).unwrap()
}

const FORMATS: [(PackedFormat, BaseDtype); 3] =
    [(PackedFormat::Int8, BaseDtype::Int8), (PackedFormat::Nf4, BaseDtype::Nf4), (PackedFormat::Fp8, BaseDtype::Fp8)];

/// The values that the CPU stores for them, rounded to bf16.
fn stored_on_cpu(values: &[f32], dims: (usize, usize), dtype: BaseDtype) -> Vec<f32> {
    let tensor = Tensor::from_slice(values, dims, &Device::Cpu).unwrap();
    let stored = FrozenWeight::pack(&tensor, dtype).unwrap().to_tensor().unwrap();
    let stored: Vec<f32> = stored.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    stored.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect()
}

#[test]
fn packed_weights_are_those_of_the_cpu_rounded_to_bf16() {
    let mut rng = rng(1);
    for dims in [(1, 1), (3, 64), (5, 65), (70, 200), (2, 7), (9, 896)] {
        let mut values = rounded(&mut rng, dims.0 * dims.1);
        values[0] = 0.0;
        for (format, dtype) in FORMATS {
            let expected = stored_on_cpu(&values, dims, dtype);
            assert_eq!(widened(&on_device(&values, dims, format)), expected, "{format:?} {dims:?}");
        }
    }
}

/// Regression: in an int8 group with a maximum below 3.7e-37, a zero was -127 on the GPU and 0 on the CPU, and other values 127.
#[test]
fn groups_too_small_to_be_scaled_are_zeros_on_both() {
    let dims = (4, 64);
    for largest in [3.6e-37f32, 1e-37, 2e-38, 1e-40, 0.0] {
        let mut values: Vec<f32> = (0..256).map(|i| largest * [1.0, 0.0, -0.5, 0.25][i % 4]).collect();
        values[192..].fill(0.5); // a row like others
        values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        for (format, dtype) in FORMATS {
            let (found, expected) = (widened(&on_device(&values, dims, format)), stored_on_cpu(&values, dims, dtype));
            assert_eq!(found, expected, "{format:?}, {largest:e}");
            // 448 and 127 divided by it exceed f32; 1 (nf4) only if divided by smaller values.
            if dtype != BaseDtype::Nf4 {
                assert!(found[..192].iter().all(|&x| x == 0.0) && found[192] == 0.5, "{format:?}, {largest:e}");
            }
        }
    }
}

/// Regression: a checkpoint in f32 or f16 was rounded to bf16 before it was packed, and had other codes than on the CPU.
#[test]
fn weights_of_a_file_have_the_codes_of_the_cpu_whatever_their_type() {
    let (mut rng, dims) = (rng(4), (37, 200));
    let values = random(&mut rng, dims.0 * dims.1);
    for file in [DType::F32, DType::F16, DType::BF16] {
        let tensor = Tensor::from_slice(&values, dims, &Device::Cpu).unwrap().to_dtype(file).unwrap();
        let held: Vec<f32> = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let bytes: Vec<u8> = match file {
            DType::F32 => held.iter().flat_map(|x| x.to_le_bytes()).collect(),
            DType::F16 => held.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
            _ => held.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        };
        for (format, dtype) in FORMATS {
            let weight = gpu().upload_packed(&bytes, file, dims, format).unwrap();
            assert_eq!(widened(&weight), stored_on_cpu(&held, dims, dtype), "{format:?} of {file:?}");
        }
        let error = gpu().upload_packed(&bytes[1..], file, dims, PackedFormat::Int8).err().unwrap().to_string();
        assert!(error.contains("a weight (37, 200)"), "{error}");
    }
}

#[test]
fn every_fp8_number_comes_back_as_itself() {
    // Positive numbers of e4m3, the largest in the row being 448, so that the scale is 1.
    let values: Vec<f32> = (0..127u32)
        .map(|code| match code >> 3 {
            0 => (code & 7) as f32 / 512.0,
            exponent => (1.0 + (code & 7) as f32 / 8.0) * 2f32.powi(exponent as i32 - 7),
        })
        .collect();
    let both: Vec<f32> = values.iter().chain(&values.iter().map(|x| -x).collect::<Vec<_>>()).copied().collect();
    assert_eq!(widened(&on_device(&both, (2, 127), PackedFormat::Fp8)), both);
}

#[test]
fn packed_weights_take_the_bytes_that_they_say() {
    let bytes = |format| on_device(&[1.0; 128 * 256], (128, 256), format).memory_bytes();
    let n = 128.0 * 256.0;
    assert_eq!(bytes(PackedFormat::Int8) as f64, n * 1.0625);
    assert_eq!(bytes(PackedFormat::Nf4) as f64, n * 0.5625);
    assert_eq!(bytes(PackedFormat::Fp8) as f64, n + 128.0 * 4.0);
}

#[test]
fn rows_and_products_of_packed_weights_are_those_of_what_they_hold() {
    let (mut rng, dims) = (rng(3), (20, 72));
    let values = rounded(&mut rng, 20 * 72);
    let (x, ids) = (halves(&rounded(&mut rng, 5 * 72)), [3u32, 19, 0]);
    for format in [PackedFormat::Int8, PackedFormat::Nf4, PackedFormat::Fp8] {
        let packed = on_device(&values, dims, format);
        let held = widened(&packed);
        let expected: Vec<f32> = ids.iter().flat_map(|&id| held[id as usize * 72..][..72].to_vec()).collect();
        let rows = packed.rows_at(gpu(), &gpu().upload(&ids).unwrap()).unwrap();
        assert_eq!(gpu().download(&rows).unwrap(), expected);
        let stored = DeviceWeight::new(halves(&held), 20, 72).unwrap();
        let forward = |weight: &DeviceWeight| {
            floats(&Projection { weight, bias: None, lora: None }.forward(gpu(), &x).unwrap().0)
        };
        assert_eq!(forward(&packed), forward(&stored));
    }
}

/// With few rows the stored weight is used directly, with many rows it is unpacked first: both give the same products, those of the stored
/// values.
#[test]
fn few_rows_are_multiplied_with_the_weights_that_many_are() {
    let mut rng = rng(5);
    let shapes = [(1, 1), (5, 65), (70, 200), (9, 131), (40, 896), (31, 528)];
    for (n_out, n_in) in shapes {
        let values = rounded(&mut rng, n_out * n_in);
        let x = rounded(&mut rng, 65 * n_in);
        let stored = [Some(PackedFormat::Int8), Some(PackedFormat::Nf4), Some(PackedFormat::Fp8), None].map(|format| {
            let values = halves(&values);
            match format {
                Some(format) => DeviceWeight::packed(gpu(), &values, (n_out, n_in), format).unwrap(),
                None => DeviceWeight::new(values, n_out, n_in).unwrap(),
            }
        });
        for weight in &stored {
            let held = widened(weight);
            for n_rows in [1, 8, 9, 17, 33] {
                let (x, of) = (&x[..n_rows * n_in], format!("({n_out}, {n_in}), {n_rows} rows"));
                let expected: Vec<f32> = (0..n_rows * n_out)
                    .map(|at| {
                        let (x, row) = (&x[at / n_out * n_in..][..n_in], &held[at % n_out * n_in..][..n_in]);
                        x.iter().zip(row).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>() as f32
                    })
                    .collect();
                let on_gpu = halves(x);
                let x = Matrix::of(gpu(), &on_gpu, n_in).unwrap();
                let mut sums = gpu().upload(&vec![1f32; n_rows * n_out]).unwrap();
                weight.multiply_few_rows(gpu(), &x, &mut sums, Scale { alpha: 0.5, beta: 2.0 }).unwrap();
                let kept: Vec<f32> = expected.iter().map(|x| x * 0.5 + 2.0).collect();
                assert_close(&of, &gpu().download(&sums).unwrap(), &kept, 1e-5, 1e-5);
                let mut out = halves(&vec![f32::NAN; n_rows * n_out]);
                weight.multiply_few_rows(gpu(), &x, &mut out, Scale::WRITE).unwrap();
                assert_rounded(&of, &out, &expected);
            }
        }
    }
}

#[test]
fn a_rows_product_does_not_depend_on_how_many_there_are() {
    let (mut rng, dims) = (rng(6), (48, 320));
    let (values, x) = (rounded(&mut rng, 48 * 320), rounded(&mut rng, 17 * 320));
    for (format, _) in FORMATS {
        let weight = on_device(&values, dims, format);
        let products = |first: usize, n: usize| {
            let x = halves(&x[first * 320..(first + n) * 320]);
            let mut out = gpu().zeros::<f32>(n * 48).unwrap();
            let x = Matrix::of(gpu(), &x, 320).unwrap();
            weight.multiply_few_rows(gpu(), &x, &mut out, Scale::WRITE).unwrap();
            gpu().download(&out).unwrap()
        };
        let all = products(0, 17);
        for row in [0, 7, 8, 16] {
            assert_eq!(products(row, 1), all[row * 48..(row + 1) * 48], "{format:?} row {row}");
        }
    }
}

/// Inputs that are not aligned to 16 bytes are read one by one.
#[test]
fn few_rows_may_stand_anywhere() {
    let (mut rng, dims) = (rng(7), (20, 64));
    let (values, x) = (rounded(&mut rng, 20 * 64), rounded(&mut rng, 65));
    let (weight, aligned, shifted) = (on_device(&values, dims, PackedFormat::Nf4), halves(&x[1..]), halves(&x));
    let product = |x: &Matrix<'_>| {
        let mut out = gpu().zeros::<f32>(20).unwrap();
        weight.multiply_few_rows(gpu(), x, &mut out, Scale::WRITE).unwrap();
        gpu().download(&out).unwrap()
    };
    let shifted = shifted.slice(1..);
    let found =
        [Matrix::of(gpu(), &aligned, 64).unwrap(), Matrix::of(gpu(), &shifted, 64).unwrap()].map(|x| product(&x));
    assert_eq!(found[0], found[1]);
}

/// The same weight twice, and two weights at a time: unpacking one weight must not overwrite another that is in use.
#[test]
fn what_is_widened_for_one_product_is_not_that_of_another() {
    let mut rng = rng(8);
    let (small, large) = (rounded(&mut rng, 8 * 64), rounded(&mut rng, 40 * 64));
    let [small, large] = [(small, 8), (large, 40)].map(|(values, n)| on_device(&values, (n, 64), PackedFormat::Int8));
    let identity: Vec<f32> = (0..64 * 64).map(|at| f32::from(u8::from(at / 64 == at % 64))).collect();
    let identity = halves(&identity);
    let identity = Matrix::of(gpu(), &identity, 64).unwrap();
    let (first, second) = (small.rows(gpu(), 0..8).unwrap(), large.rows(gpu(), 0..40).unwrap());
    for (rows, weight) in [(&first, &small), (&second, &large)] {
        let mut out = gpu().zeros::<f32>(weight.dims().0 * 64).unwrap();
        gpu().product(&rows.matrix(gpu(), 64).unwrap(), &identity, &mut out, Scale::WRITE).unwrap();
        assert_eq!(gpu().download(&out).unwrap(), widened(weight));
    }
}

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
