//! Operations with a backward pass that candle lacks or does with more work than needed.
//!
//! Each is a candle custom operation on f32 tensors of the CPU: forward in `cpu_fwd`, gradient in `bwd`. Why they exist:
//! candle's `softmax_last_dim`, `rms_norm` and `rope` cut the gradient, and the backward pass of its matrix product computes
//! and keeps the gradient of frozen weights.

mod attention;
mod elementwise;
mod int8_matmul;
mod linear;
mod logprobs;
mod matmul;
mod packed_matmul;
mod packed_weight;
pub mod projection;
mod rope;
pub(crate) mod simd;

pub use attention::{LogSumExp, Node, Queries, RowTree, attention, attention_backward, attention_forward};
pub use elementwise::{rms_norm, rms_norm_backward, rms_norm_forward, swiglu, swiglu_backward, swiglu_forward};
pub use linear::{FrozenWeight, Weight, frozen_linear, linear, lora_linear, trained_linear};
pub use logprobs::{GPU_LOGITS, GPU_LOGITS_PER_ROW, token_logprobs};
pub use packed_weight::GROUP;
pub use rope::{RopeTable, norm_rope, rope};

pub(crate) use int8_matmul::Int8Rows;
#[cfg(test)]
pub(crate) use linear::gradients as projection_gradients;
pub(crate) use matmul::{Mat, matmul, matmul_into};
pub(crate) use projection::{LoraMatrices, ParameterGradients, Projection, input_backward_sum};
pub(crate) use simd::SimdLevel;

use crate::accelerator::accelerator_of;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail};
use std::mem::MaybeUninit;
use std::ops::Deref;

/// The values of a contiguous f32 storage.
pub(crate) fn floats<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let CpuStorage::F32(values) = storage else { bail!("this operation takes f32") };
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("this operation takes contiguous tensors") };
    Ok(&values[start..end])
}

/// The borrowed values of a contiguous f32 tensor on the CPU.
pub(crate) struct Floats<'a> {
    storage: Box<dyn Deref<Target = Storage> + 'a>,
    layout: &'a Layout,
}

impl<'a> Floats<'a> {
    pub(crate) fn of(tensor: &'a Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(values) = &*storage else { bail!("this operation runs on the CPU") };
        floats(values, layout)?;
        Ok(Self { storage: Box::new(storage), layout })
    }
}

impl Deref for Floats<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &**self.storage {
            Storage::Cpu(values) => floats(values, self.layout).unwrap_or_default(), // checked when it was borrowed
            _ => &[],
        }
    }
}

/// Calls `f` with the values of a tensor, after making it contiguous if necessary.
pub(crate) fn with_floats<R>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("this operation runs on the CPU") };
    f(floats(storage, layout)?)
}

/// An operation of candle's graph on f32 CPU tensors, defined by functions on slices.
struct SliceOp<const N: usize, F, B> {
    name: &'static str,
    shape: Shape,
    forward: F,
    backward: B,
}

/// Gradients of N inputs; `None` for inputs that need none.
pub(crate) type InputGradients<const N: usize> = [Option<Vec<f32>>; N];

/// Applies an operation with up to three contiguous inputs and an output of `shape`. `backward` gets the inputs, and the output with
/// its gradient.
pub(crate) fn slice_op<const N: usize>(
    name: &'static str,
    inputs: [&Tensor; N],
    shape: impl Into<Shape>,
    forward: impl Fn([&[f32]; N]) -> Result<Vec<f32>> + Send + Sync + 'static,
    backward: impl Fn([&[f32]; N], [&[f32]; 2]) -> Result<InputGradients<N>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let op = SliceOp { name, shape: shape.into(), forward, backward };
    match inputs.as_slice() {
        [x] => x.apply_op1(op),
        [x, y] => x.apply_op2(y, op),
        [x, y, z] => x.apply_op3(y, z, op),
        _ => bail!("{name}: an operation has one to three inputs"),
    }
}

impl<const N: usize, F, B> SliceOp<N, F, B>
where
    F: Fn([&[f32]; N]) -> Result<Vec<f32>>,
    B: Fn([&[f32]; N], [&[f32]; 2]) -> Result<InputGradients<N>>,
{
    fn run(&self, inputs: &[(&CpuStorage, &Layout)]) -> Result<(CpuStorage, Shape)> {
        let mut slices = [[].as_slice(); N];
        for (slice, (storage, layout)) in slices.iter_mut().zip(inputs) {
            *slice = floats(storage, layout)?;
        }
        Ok((CpuStorage::F32((self.forward)(slices)?), self.shape.clone()))
    }

    fn gradients(&self, inputs: &[&Tensor], out: &Tensor, grad: &Tensor) -> Result<std::vec::IntoIter<Option<Tensor>>> {
        let all = inputs.iter().chain([&out, &grad]).map(|tensor| tensor.contiguous()).collect::<Result<Vec<_>>>()?;
        let floats = all.iter().map(Floats::of).collect::<Result<Vec<_>>>()?;
        let found = (self.backward)(std::array::from_fn(|index| &*floats[index]), [&floats[N], &floats[N + 1]])?;
        let tensors = found.into_iter().zip(inputs).map(|(values, input)| {
            values.map(|values| Tensor::from_vec(values, input.shape(), input.device())).transpose()
        });
        Ok(tensors.collect::<Result<Vec<_>>>()?.into_iter())
    }
}

macro_rules! custom_op {
    ($trait:ident($($input:ident $layout:ident),*) -> $gradients:ty, $take:expr) => {
        impl<const N: usize, F, B> $trait for SliceOp<N, F, B>
        where
            F: Fn([&[f32]; N]) -> Result<Vec<f32>>,
            B: Fn([&[f32]; N], [&[f32]; 2]) -> Result<InputGradients<N>>,
        {
            fn name(&self) -> &'static str {
                self.name
            }

            fn cpu_fwd(&self, $($input: &CpuStorage, $layout: &Layout),*) -> Result<(CpuStorage, Shape)> {
                self.run(&[$(($input, $layout)),*])
            }

            fn bwd(&self, $($input: &Tensor,)* out: &Tensor, grad: &Tensor) -> Result<$gradients> {
                let mut gradients = self.gradients(&[$($input),*], out, grad)?;
                let mut next = || gradients.next().flatten();
                Ok($take(&mut next))
            }
        }
    };
}

type Next<'a> = &'a mut dyn FnMut() -> Option<Tensor>;

custom_op!(CustomOp1(x x_layout) -> Option<Tensor>, |next: Next<'_>| next());
custom_op!(CustomOp2(x x_layout, y y_layout) -> (Option<Tensor>, Option<Tensor>), |next: Next<'_>| (next(), next()));
custom_op!(
    CustomOp3(x x_layout, y y_layout, z z_layout) -> (Option<Tensor>, Option<Tensor>, Option<Tensor>),
    |next: Next<'_>| (next(), next(), next())
);

/// `e^x` to about 2 units in the last place, in a form that the compiler can vectorise.
///
/// Source: the Cephes single-precision `expf` (range reduction by ln 2 in two parts, degree 5 polynomial).
#[inline(always)]
fn exp(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    let rounding = 12_582_912.0_f32; // 1.5 * 2^23: adding it rounds to the nearest integer
    let n = (x * std::f32::consts::LOG2_E + rounding) - rounding;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4_f32;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let mantissa = p * r * r + r + 1.0;
    mantissa * f32::from_bits((((n as i32) + 127) << 23) as u32)
}

/// Number of f32 values in an AVX-512 register. Sums have this many lanes on every CPU, so that the order of additions is the same.
pub(crate) const LANES: usize = 16;

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            lanes[i] += a[i] * b[i];
        }
    }
    lanes.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

#[inline(always)]
fn dot3(a: &[f32], b: &[f32], c: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let (c, c_rest) = c.as_chunks::<LANES>();
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for i in 0..LANES {
            lanes[i] += a[i] * b[i] * c[i];
        }
    }
    lanes.iter().sum::<f32>() + a_rest.iter().zip(b_rest).zip(c_rest).map(|((a, b), c)| a * b * c).sum::<f32>()
}

/// Allocates `len` values without clearing them and lets `fill` write them. Returns the values and the result of `fill`.
///
/// # Safety
/// `fill` writes every value.
unsafe fn filled<R>(len: usize, fill: impl FnOnce(&mut [MaybeUninit<f32>]) -> R) -> (Vec<f32>, R) {
    let mut values: Vec<f32> = Vec::with_capacity(len);
    let found = fill(&mut values.spare_capacity_mut()[..len]);
    // SAFETY: the caller's promise.
    unsafe { values.set_len(len) };
    (values, found)
}

/// Rows per parallel task: enough to outweigh the cost of scheduling.
const ROWS_PER_TASK: usize = 32;

/// Number of values in that many rows; 1 for empty rows, because chunks must not be empty.
fn values_per_task(width: usize) -> usize {
    (width * ROWS_PER_TASK).max(1)
}

/// Rows of `x` `(N, width)` by index: `(indices, width)`. Gradients reach `x`; those of a row that is selected more than once are added
/// in the order of the indices.
///
/// # Errors
/// An index that is not below N.
pub fn select_rows(x: &Tensor, indices: Vec<u32>) -> Result<Tensor> {
    if let Some(accelerator) = accelerator_of(x)? {
        return accelerator.select_rows(x, indices);
    }
    let n_indices = indices.len();
    x.index_select(&Tensor::from_vec(indices, n_indices, x.device())?, 0)
}

#[cfg(test)]
mod tests;
