use super::super::{DeviceWeight, Matrix, PackedFormat, Projection, Scale};
use super::*;
use candle_core::{DType, Device, Tensor};
use querl_core::config::BaseDtype;
use querl_model::kernels::FrozenWeight;

fn on_device(values: &[f32], dims: (usize, usize), format: PackedFormat) -> DeviceWeight {
    DeviceWeight::packed(gpu(), &halves(values), dims, format).unwrap()
}

fn widened(weight: &DeviceWeight) -> Vec<f32> {
    gpu().download(&weight.to_f32(gpu()).unwrap()).unwrap()
}

const FORMATS: [(PackedFormat, BaseDtype); 3] =
    [(PackedFormat::Int8, BaseDtype::Int8), (PackedFormat::Nf4, BaseDtype::Nf4), (PackedFormat::Fp8, BaseDtype::Fp8)];

/// What the CPU stores of them, rounded to bf16.
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

/// The symptom: of an int8 group whose largest was below 3.7e-37 a zero was -127 on the card and 0 on the CPU, and others 127.
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
            // 448 and 127 over it are beyond f32; nf4's 1 only over what is smaller still.
            if dtype != BaseDtype::Nf4 {
                assert!(found[..192].iter().all(|&x| x == 0.0) && found[192] == 0.5, "{format:?}, {largest:e}");
            }
        }
    }
}

/// The symptom: a checkpoint in f32 or f16 was rounded to bf16 before it was packed, and had other codes than on the CPU.
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
            floats(&Projection { weight, bias: None, low_rank: None }.forward(gpu(), &x).unwrap().0)
        };
        assert_eq!(forward(&packed), forward(&stored));
    }
}

/// Few rows are multiplied with the weight as it is stored, many with what was widened: the same products, and those of the weights
/// that are held.
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
                let on_card = halves(x);
                let x = Matrix::of(gpu(), &on_card, n_in).unwrap();
                let mut sums = gpu().upload(&vec![1f32; n_rows * n_out]).unwrap();
                weight.multiply_few_rows(gpu(), &x, &mut sums, Scale { alpha: 0.5, keep: 2.0 }).unwrap();
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

/// Inputs that do not stand at a multiple of 16 bytes are read one by one.
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

/// Twice the same weight, and two at a time: what one product reads the next one's weight does not overwrite.
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
