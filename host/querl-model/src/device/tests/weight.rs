use super::super::{DeviceWeight, PackedFormat, Projection};
use super::*;
use crate::kernels::FrozenWeight;
use candle_core::{Device, Tensor};
use querl_core::config::BaseDtype;

fn on_device(values: &[f32], dims: (usize, usize), format: PackedFormat) -> DeviceWeight {
    DeviceWeight::packed(gpu(), &halves(values), dims, format).unwrap()
}

fn widened(weight: &DeviceWeight) -> Vec<f32> {
    gpu().download(&weight.to_f32(gpu()).unwrap()).unwrap()
}

#[test]
fn packed_weights_are_those_of_the_cpu_rounded_to_bf16() {
    let mut rng = rng(1);
    for (n_out, n_in) in [(1, 1), (3, 64), (5, 65), (70, 200), (2, 7), (9, 896)] {
        let mut values = rounded(&mut rng, n_out * n_in);
        values[0] = 0.0;
        for (format, dtype) in [(PackedFormat::Int8, BaseDtype::Int8), (PackedFormat::Nf4, BaseDtype::Nf4)] {
            let tensor = Tensor::from_slice(&values, (n_out, n_in), &Device::Cpu).unwrap();
            let on_cpu = FrozenWeight::pack(&tensor, dtype).unwrap().to_tensor().unwrap();
            let expected: Vec<f32> = on_cpu.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let expected: Vec<f32> = expected.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect();
            assert_eq!(widened(&on_device(&values, (n_out, n_in), format)), expected, "{format:?} ({n_out}, {n_in})");
        }
    }
}

#[test]
fn fp8_keeps_four_bits_of_each_weight() {
    let mut rng = rng(2);
    for (n_out, n_in) in [(1, 1), (4, 64), (3, 131)] {
        let values = rounded(&mut rng, n_out * n_in);
        let found = widened(&on_device(&values, (n_out, n_in), PackedFormat::Fp8));
        for (row, found) in values.chunks_exact(n_in).zip(found.chunks_exact(n_in)) {
            let largest = row.iter().fold(0f32, |max, x| max.max(x.abs()));
            for (value, found) in row.iter().zip(found) {
                // Half a step: 2^-4 of the value, or 2^-10 of the smallest that has a full mantissa; and bf16.
                let step = (value.abs() / 16.0).max(largest / 448.0 / 1024.0) + value.abs() / 256.0;
                assert!((value - found).abs() <= step, "{value} became {found}");
            }
        }
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
