//! Compares the candle operations that querl uses on the GPU and the CPU. Run by tests/cuda/run.sh on the simulated GPU, where it tests the
//! simulation; on a GPU it tests the build.
#![cfg(feature = "cuda")]

use candle_core::{DType, Device, Result, Tensor};

/// Runs `program` on both devices and compares the results: equal within `tolerance` of the largest value.
fn same_on_both(tolerance: f64, program: impl Fn(&Device) -> Result<Tensor>) -> Result<()> {
    let values = |device: &Device| program(device)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (expected, got) = (values(&Device::Cpu)?, values(&Device::new_cuda(0)?)?);
    let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    assert_eq!(expected.len(), got.len());
    for (at, (expected, got)) in expected.iter().zip(&got).enumerate() {
        let near = (expected - got).abs() <= tolerance * largest;
        assert!(near, "value {at} is {got} on the device, {expected} on the CPU");
    }
    Ok(())
}

/// Values between -1 and 1 without a pattern.
fn values(shape: (usize, usize), device: &Device) -> Result<Tensor> {
    let numbers: Vec<f32> = (0..shape.0 * shape.1).map(|at| (at as f32 * 12.9898).sin()).collect();
    Tensor::from_vec(numbers, shape, device)
}

#[test]
fn a_matrix_product_is_the_same_in_f32() -> Result<()> {
    same_on_both(1e-6, |device| values((37, 50), device)?.matmul(&values((50, 21), device)?))
}

#[test]
fn a_matrix_product_of_a_transposed_matrix_is_the_same_in_bf16() -> Result<()> {
    same_on_both(8e-3, |device| {
        let (a, b) = (values((40, 64), device)?, values((24, 64), device)?);
        a.to_dtype(DType::BF16)?.matmul(&b.to_dtype(DType::BF16)?.t()?)
    })
}

#[test]
fn a_batch_of_products_is_the_same() -> Result<()> {
    same_on_both(1e-6, |device| {
        let (a, b) = (values((6 * 5, 7), device)?.reshape((6, 5, 7))?, values((6 * 7, 9), device)?.reshape((6, 7, 9))?);
        a.matmul(&b)
    })
}

#[test]
fn sums_over_each_axis_are_the_same() -> Result<()> {
    same_on_both(1e-5, |device| values((300, 1111), device)?.sum(1))?;
    same_on_both(1e-5, |device| values((300, 1111), device)?.sum(0))?;
    same_on_both(0.0, |device| values((30, 1111), device)?.max(1))
}

#[test]
fn rows_are_selected_and_added_in_the_same_way() -> Result<()> {
    same_on_both(0.0, |device| {
        let rows = Tensor::new(&[3_u32, 0, 3, 17], device)?;
        values((20, 33), device)?.index_select(&rows, 0)
    })?;
    same_on_both(1e-6, |device| {
        let rows = Tensor::new(&[3_u32, 0, 3, 17], device)?;
        Tensor::zeros((20, 33), DType::F32, device)?.index_add(&rows, &values((4, 33), device)?, 0)
    })
}

#[test]
fn elementwise_operations_are_the_same() -> Result<()> {
    same_on_both(1e-6, |device| {
        let (a, b) = (values((13, 29), device)?, values((1, 29), device)?);
        let mixed = (a.broadcast_mul(&b)? + a.exp()?)?.affine(0.5, -1.0)?;
        mixed.ge(&a)?.where_cond(&mixed.silu()?, &a.sqr()?)
    })?;
    same_on_both(0.0, |device| values((13, 29), device)?.t()?.contiguous()?.to_dtype(DType::BF16))
}

#[test]
fn softmax_is_the_same() -> Result<()> {
    same_on_both(1e-5, |device| candle_nn::ops::softmax_last_dim(&values((9, 200), device)?))
}

#[test]
fn random_numbers_have_the_requested_distribution() -> Result<()> {
    let device = Device::new_cuda(0)?;
    device.set_seed(7)?;
    let numbers = Tensor::randn(1.0_f32, 2.0, 20_000, &device)?;
    let mean = numbers.mean_all()?.to_scalar::<f32>()?;
    let variance = numbers.affine(1.0, -1.0)?.sqr()?.mean_all()?.to_scalar::<f32>()?;
    assert!((mean - 1.0).abs() < 0.06 && (variance - 4.0).abs() < 0.2, "mean {mean}, variance {variance}");
    Ok(())
}
