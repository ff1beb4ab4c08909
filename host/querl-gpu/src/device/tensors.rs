//! candle's tensors of a GPU as slices, and slices as tensors.

use super::gpu::Gpu;
use super::weight::DeviceWeight;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{CudaStorage, Result, Storage, Tensor, bail};
use std::ops::Deref;

/// The borrowed values of an f32 tensor.
pub(crate) struct BorrowedValues<'a> {
    storage: Box<dyn Deref<Target = Storage> + 'a>,
}

impl<'a> BorrowedValues<'a> {
    /// Borrows all values of the tensor's storage; see [`whole`].
    pub(crate) fn of(tensor: &'a Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(values) = &*storage else { bail!("this operation runs on the GPU") };
        let n = values.as_cuda_slice::<f32>()?.len();
        if layout.contiguous_offsets() != Some((0, n)) {
            bail!("a tensor {:?} that is a part of {n} values", tensor.dims());
        }
        Ok(Self { storage: Box::new(storage) })
    }
}

impl Deref for BorrowedValues<'_> {
    type Target = CudaSlice<f32>;

    fn deref(&self) -> &CudaSlice<f32> {
        let Storage::Cuda(values) = &**self.storage else {
            unreachable!("the storage was on the GPU when it was borrowed")
        };
        values.as_cuda_slice().expect("the values were f32 when they were borrowed")
    }
}

/// The tensor itself if it is all of its storage in row-major order; otherwise a copy with that layout.
pub(crate) fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    let is_whole = {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(values) = &*storage else { bail!("this operation runs on the GPU") };
        layout.contiguous_offsets() == Some((0, values.as_cuda_slice::<f32>()?.len()))
    };
    if is_whole { Ok(tensor.clone()) } else { tensor.force_contiguous() }
}

pub(crate) fn storage(gpu: &Gpu, values: CudaSlice<f32>) -> CudaStorage {
    CudaStorage::wrap_cuda_slice(values, gpu.cuda_device().clone())
}

/// A trained weight `(out, in)`, rounded to bf16 for matrix products.
pub(crate) fn rounded_weight(gpu: &Gpu, weight: &Tensor) -> Result<DeviceWeight> {
    let (n_out, n_in) = weight.dims2()?;
    DeviceWeight::new(gpu.to_bf16(&*BorrowedValues::of(&contiguous(weight)?)?)?, n_out, n_in)
}
