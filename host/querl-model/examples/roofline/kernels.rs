//! The kernels with their operands.

use super::{Kernel, ModelShape, Work};
use candle_core::{Device, Tensor};
use querl_core::config::BaseDtype;
use querl_model::kernels::FrozenWeight;
use std::rc::Rc;

pub(crate) fn numbers(n: usize) -> Vec<f32> {
    let mut state = 12_345u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Calls `measure` with every kernel of a shape whose name contains `filter`.
pub(crate) fn each(shape: &ModelShape, rows: &[usize], filter: Option<&str>, mut measure: impl FnMut(Kernel)) {
    let is_wanted = |name: &str| filter.is_none_or(|filter| name.contains(filter));
    let products = [
        ("q, o", shape.hidden, shape.hidden),
        ("k, v", shape.kv_width, shape.hidden),
        ("gate, up", shape.intermediate, shape.hidden),
        ("down", shape.hidden, shape.intermediate),
        ("head", shape.vocabulary, shape.hidden),
    ];
    for (name, n_out, n_in) in products {
        let values = Rc::new(numbers(n_out * n_in));
        let tensor = Tensor::from_slice(&values, (n_out, n_in), &Device::Cpu).unwrap();
        for dtype in [BaseDtype::F32, BaseDtype::Bf16, BaseDtype::F16, BaseDtype::Int8, BaseDtype::Fp8, BaseDtype::Nf4]
        {
            let kernel_name = format!("{name} {}", dtype.name());
            if !is_wanted(&kernel_name) && !is_wanted(&format!("{kernel_name} backward")) {
                continue;
            }
            let weight = FrozenWeight::pack(&tensor, dtype).unwrap();
            for &n_rows in rows.iter().filter(|&&n_rows| n_rows * n_out < 1 << 27) {
                for direction in [Direction::Forward, Direction::Backward] {
                    let kernel = product(&kernel_name, &weight, &values, n_rows, direction);
                    if is_wanted(&kernel.name) {
                        measure(kernel);
                    }
                }
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Forward,
    Backward,
}

fn product(name: &str, weight: &FrozenWeight, plain: &Rc<Vec<f32>>, n_rows: usize, direction: Direction) -> Kernel {
    let (n_out, n_in) = weight.dims();
    let dtype = weight.dtype();
    let work = Work {
        operations: 2.0 * (n_rows * n_out * n_in) as f64,
        bytes: (weight.memory_bytes() + 4 * n_rows * (n_in + n_out)) as f64,
    };
    let backward = direction == Direction::Backward;
    let (n_left, n_right) = if backward { (n_out, n_in) } else { (n_in, n_out) };
    let left = Rc::new(numbers(n_rows * n_left));
    let mut result = vec![0f32; n_rows * n_right];
    let weight = weight.clone();
    let own_left = left.clone();
    let run = move || match direction {
        Direction::Forward => weight.forward(&own_left, &mut result, 0.0).unwrap(),
        Direction::Backward => weight.backward(&own_left, &mut result, 0.0).unwrap(),
    };
    let (plain, mut result) = (plain.clone(), vec![0f32; n_rows * n_right]);
    let reference = move || {
        let (row, col) = if backward { (n_in, 1) } else { (1, n_in) };
        gemm_crate(&left, &plain, &mut result, [n_rows, n_right, n_left], [row as isize, col as isize]);
    };
    Kernel {
        name: format!("{name}{}", if backward { " backward" } else { "" }),
        n_rows,
        work,
        run: Box::new(run),
        reference: (dtype == BaseDtype::F32).then(|| Box::new(reference) as Box<dyn FnMut()>),
    }
}

/// `result = left right`, `right` with any strides.
fn gemm_crate(left: &[f32], right: &[f32], result: &mut [f32], [m, n, k]: [usize; 3], strides: [isize; 2]) {
    let threads = gemm::Parallelism::Rayon(rayon::current_num_threads());
    assert!(left.len() >= m * k && right.len() >= k * n && result.len() >= m * n);
    // SAFETY: the lengths were checked, and the strides are those of a dense matrix of `right`'s size.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            result.as_mut_ptr(),
            1,
            n as isize,
            false,
            left.as_ptr(),
            1,
            k as isize,
            right.as_ptr(),
            strides[1],
            strides[0],
            0.0,
            1.0,
            false,
            false,
            false,
            threads,
        );
    }
}
