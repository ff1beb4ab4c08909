//! Compares packed matrix products with plain ones, at every SIMD level of this processor.

use super::super::simd::SimdLevel;
use super::super::tests::{numbers as matrix, values};
use super::e4m3;
use super::unpack::from_e4m3;
use crate::kernels::FrozenWeight;
use candle_core::{Device, Tensor};
use querl_core::config::BaseDtype;

const DTYPES: [BaseDtype; 6] =
    [BaseDtype::F32, BaseDtype::Bf16, BaseDtype::F16, BaseDtype::Int8, BaseDtype::Fp8, BaseDtype::Nf4];

/// Sizes that are multiples of panels, groups and vectors, and others.
const SHAPES: [(usize, usize); 6] = [(64, 64), (192, 256), (100, 130), (7, 5), (65, 17), (130, 300)];

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    values(&matrix((1, n), seed))
}

fn weight(n_out: usize, n_in: usize, dtype: BaseDtype) -> FrozenWeight {
    FrozenWeight::pack(&matrix((n_out, n_in), 1), dtype).unwrap()
}

/// The dequantized values, row-major in f64.
fn stored(weight: &FrozenWeight) -> Vec<f64> {
    values(&weight.to_tensor().unwrap()).into_iter().map(f64::from).collect()
}

/// Largest difference from the sums in f64, relative to the sums of absolute products.
fn worst(found: &[f32], rows: usize, cols: usize, steps: usize, product: impl Fn(usize, usize, usize) -> f64) -> f64 {
    let mut worst = 0f64;
    for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
        let products: Vec<f64> = (0..steps).map(|step| product(row, col, step)).collect();
        let size: f64 = products.iter().map(|x| x.abs()).sum();
        worst = worst.max((f64::from(found[row * cols + col]) - products.iter().sum::<f64>()).abs() / size.max(1e-9));
    }
    worst
}

#[test]
fn products_agree_with_f64_at_every_level_and_type() {
    for (dtype, (n_out, n_in)) in DTYPES.into_iter().flat_map(|dtype| SHAPES.map(|shape| (dtype, shape))) {
        let packed = weight(n_out, n_in, dtype);
        let w = stored(&packed);
        for (level, n_rows) in SimdLevel::all().into_iter().flat_map(|level| [1, 2, 7, 23].map(|n| (level, n))) {
            let packed = packed.at_level(level);
            let (x, g) = (numbers(n_rows * n_in, 2), numbers(n_rows * n_out, 3));
            let (mut y, mut dx) = (vec![f32::NAN; n_rows * n_out], vec![f32::NAN; n_rows * n_in]);
            // Unpacking is compiled for each level, too, so run it at that level.
            level.with(|| {
                packed.forward(&x, &mut y, 0.0).unwrap();
                packed.backward(&g, &mut dx, 0.0).unwrap();
            });
            let forward = worst(&y, n_rows, n_out, n_in, |r, c, s| f64::from(x[r * n_in + s]) * w[c * n_in + s]);
            let backward = worst(&dx, n_rows, n_in, n_out, |r, c, s| f64::from(g[r * n_out + s]) * w[s * n_in + c]);
            let limit = 1e-6;
            let case = format!("{} {level:?} ({n_out}, {n_in}) {n_rows} rows", dtype.name());
            assert!(forward < limit && backward < limit, "{case}: forward {forward:e}, backward {backward:e}");
        }
    }
}

#[test]
fn a_rows_result_does_not_depend_on_other_rows() {
    let (n_out, n_in, n_rows) = (192, 300, 523);
    let (x, g) = (numbers(n_rows * n_in, 4), numbers(n_rows * n_out, 5));
    for (dtype, level) in
        DTYPES.into_iter().flat_map(|dtype| SimdLevel::all().into_iter().map(move |level| (dtype, level)))
    {
        let packed = weight(n_out, n_in, dtype).at_level(level);
        let (mut y, mut dx) = (vec![0f32; n_rows * n_out], vec![0f32; n_rows * n_in]);
        packed.forward(&x, &mut y, 0.0).unwrap();
        packed.backward(&g, &mut dx, 0.0).unwrap();
        for row in [0, 1, 100, 522] {
            let (mut one_y, mut one_dx) = (vec![0f32; n_out], vec![0f32; n_in]);
            packed.forward(&x[row * n_in..(row + 1) * n_in], &mut one_y, 0.0).unwrap();
            packed.backward(&g[row * n_out..(row + 1) * n_out], &mut one_dx, 0.0).unwrap();
            assert_eq!(one_y, y[row * n_out..(row + 1) * n_out], "{} {level:?} forward row {row}", dtype.name());
            assert_eq!(one_dx, dx[row * n_in..(row + 1) * n_in], "{} {level:?} backward row {row}", dtype.name());
        }
    }
}

#[test]
fn results_are_added_to_what_is_kept() {
    let packed = weight(70, 40, BaseDtype::F32);
    let x = numbers(3 * 40, 6);
    let (mut fresh, mut kept) = (vec![0f32; 210], vec![2f32; 210]);
    packed.forward(&x, &mut fresh, 0.0).unwrap();
    packed.forward(&x, &mut kept, 0.5).unwrap();
    assert!(fresh.iter().zip(&kept).all(|(fresh, kept)| (kept - fresh - 1.0).abs() < 1e-5));
}

#[test]
fn stored_values_are_the_nearest_of_each_type() {
    let (n_out, n_in) = (70, 130);
    let values = numbers(n_out * n_in, 1);
    // Half a quantization step of each type, relative to the largest value, 1; fp8's widest step is 32 of 448, nf4's widest gap is between
    // -1 and -0.696.
    for (dtype, limit) in
        DTYPES.into_iter().zip([0.0, 2f64.powi(-9), 2f64.powi(-12), 0.5 / 127.0, 16.0 / 448.0, 0.1520])
    {
        let packed = weight(n_out, n_in, dtype);
        let worst = stored(&packed).iter().zip(&values).map(|(a, b)| (a - f64::from(*b)).abs()).fold(0.0, f64::max);
        assert!(worst <= limit + 1e-7, "{}: {worst}", dtype.name());
        let rows: Vec<Vec<f32>> = packed.rows(&[69, 0, 64]).unwrap().to_vec2().unwrap();
        let all: Vec<Vec<f32>> = packed.to_tensor().unwrap().to_vec2().unwrap();
        assert_eq!(rows, [all[69].clone(), all[0].clone(), all[64].clone()]);
    }
    assert!(weight(8, 8, BaseDtype::F32).rows(&[8]).is_err());
}

/// Regression: an int8 group with a maximum below 3.7e-37 was scaled by infinity, and all of its values became the maximum.
#[test]
fn groups_too_small_to_be_scaled_are_zeros() {
    for largest in [3.6e-37f32, 1e-38, 1e-44] {
        let values: Vec<f32> = (0..64).map(|i| largest * [1.0, 0.0, -0.5, 0.25][i % 4]).collect();
        let values = Tensor::from_vec(values, (1, 64), &Device::Cpu).unwrap();
        for dtype in [BaseDtype::Int8, BaseDtype::Fp8] {
            let stored = stored(&FrozenWeight::pack(&values, dtype).unwrap());
            assert!(stored.iter().all(|&x| x == 0.0), "{} {largest:e}: {stored:?}", dtype.name());
        }
    }
}

#[test]
fn memory_is_what_the_type_promises() {
    let n_values = 128.0 * 256.0;
    for (dtype, bytes) in DTYPES.into_iter().zip([4.0, 2.0, 2.0, 1.0625, 1.0 + 4.0 / 256.0, 0.5625]) {
        assert_eq!(weight(128, 256, dtype).memory_bytes() as f64, n_values * bytes, "{}", dtype.name());
    }
}

#[test]
fn values_that_f16_cannot_hold_are_refused() {
    let values = Tensor::new(&[[1f32, 1e6]], &Device::Cpu).unwrap();
    let error = FrozenWeight::pack(&values, BaseDtype::F16).err().unwrap().to_string();
    assert!(error.contains("not finite as f16; try `f32` or `bf16`"), "{error}");
    assert!(FrozenWeight::pack(&values, BaseDtype::Bf16).is_ok());
}

#[test]
fn values_that_no_type_can_hold_are_refused_without_the_advice_to_take_another() {
    let values = Tensor::new(&[[1f32, f32::NAN]], &Device::Cpu).unwrap();
    for dtype in DTYPES.into_iter().filter(|&dtype| dtype != BaseDtype::F16) {
        let error = FrozenWeight::pack(&values, dtype).err().unwrap().to_string();
        // A backtrace may follow.
        let error = error.lines().next().unwrap_or_default();
        assert!(error.contains("not finite as") && !error.contains("try"), "{}: {error}", dtype.name());
    }
}

#[test]
#[should_panic(expected = "index out of bounds")]
fn a_group_without_scales_is_never_left_as_it_was() {
    let values = Tensor::from_vec(numbers(64 * 128, 1), (64, 128), &Device::Cpu).unwrap();
    let mut packed = super::pack(&values, BaseDtype::Int8).unwrap();
    packed.scales.truncate(super::WIDTH);
    packed.unpack(SimdLevel::detected(), 0, 0..128, &mut [0f32; 128 * super::WIDTH]);
}

/// Golden values: `tests/reference/fp8.py`.
#[test]
fn numbers_of_8_bits_are_those_of_torch() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/golden/fp8.json");
    let golden: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let numbers = |name: &str| -> Vec<f64> {
        golden[name].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    };
    for (x, code) in numbers("values").into_iter().zip(numbers("codes")) {
        assert_eq!(f64::from(e4m3(x as f32)), code, "{x}");
    }
    for (code, x) in (0..127u8).zip(numbers("numbers")) {
        assert_eq!((f64::from(from_e4m3(code)), f64::from(from_e4m3(code | 0x80))), (x, -x), "{code}");
    }
    assert_eq!((e4m3(449.0), e4m3(-449.0)), (0x7e, 0xfe));
}
